"""Figures with MetaQ's own Java broker and client, run as by the tests.

Their client's loop is Java, compiled at run time by the compiler in PySpark. Figures
raise `NoJarsError` if the jars are not available.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as counter
from pathlib import Path
from typing import Any

from bench import consuming, load, producing
from bench.figures import (
    LOOP_PUTS,
    TOPIC,
    Turns,
    WithLines,
    batches,
    in_blocks,
    put_frames,
)
from bench.lines import Payloads
from bench.processes import SERVER_JAVA
from metaq.client import Client
from metaq.zk.embedded import EmbeddedZooKeeper, find_classpath
from tests.java.client import JavaClient
from tests.java.jars import CLIENT, CLIENT_EXTENSION, LOG4J, SERVER, find_jars
from tests.java.jvm import Jvm
from tests.java.server import JavaBroker
from tests.rigs.process import BrokerProcess

COUNT = 200_000
IN_FLIGHT = 4000
CONNECTIONS = 64
TIMEOUT_S = 60

PEER = """
import com.taobao.metamorphosis.Message;
import com.taobao.metamorphosis.client.consumer.MessageListener;
import com.taobao.metamorphosis.client.producer.MessageProducer;
import com.taobao.metamorphosis.client.producer.SendMessageCallback;
import com.taobao.metamorphosis.client.producer.SendResult;
import java.util.Arrays;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executor;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

public class Peer implements SendMessageCallback, MessageListener {
    private final Semaphore places = new Semaphore(0);
    private final AtomicInteger failures = new AtomicInteger();
    private final CountDownLatch drained = new CountDownLatch(1);
    private byte[][] lines;
    private int count, wanted;
    private long first, last;

    public void onMessageSent(SendResult result) {
        if (!result.isSuccess()) this.failures.incrementAndGet();
        this.places.release();
    }

    public void onException(Throwable error) {
        this.failures.incrementAndGet();
        this.places.release();
    }

    public void recieveMessages(Message message) {
        if (this.count == 0) this.first = System.nanoTime();
        if (++this.count == this.wanted) {
            this.last = System.nanoTime();
            this.drained.countDown();
        }
    }

    public Executor getExecutor() { return null; }

    public void setWanted(int wanted) { this.wanted = wanted; }

    /** Returns the seconds from the first message to the last one that is wanted. */
    public double drain(int timeoutS) throws Exception {
        if (!this.drained.await(timeoutS, TimeUnit.SECONDS))
            throw new IllegalStateException(
                this.count + " of " + this.wanted + " messages in " + timeoutS + " s");
        return (this.last - this.first) / 1e9;
    }

    /** Takes the lines to send, one after the other in one array. */
    public void setLines(byte[] text, int count) {
        this.lines = new byte[count][];
        int from = 0;
        for (int i = 0; i < count; i++) {
            int to = from;
            while (to < text.length && text[to] != '\\n') to++;
            this.lines[i] = Arrays.copyOfRange(text, from, to);
            from = to + 1;
        }
    }

    /** Returns how many seconds it took until each of the messages was stored. */
    public double send(
        MessageProducer producer, String topic, int count, int inFlight
    ) throws Exception {
        this.places.release(inFlight);
        long start = System.nanoTime();
        for (int sent = 0; sent < count; sent++) {
            this.places.acquire();
            Message message = new Message(topic, this.lines[sent % this.lines.length]);
            producer.sendMessage(message, this, 60, TimeUnit.SECONDS);
        }
        this.places.acquire(inFlight);
        double seconds = (System.nanoTime() - start) / 1e9;
        if (this.failures.get() > 0)
            throw new IllegalStateException(this.failures.get() + " puts failed");
        return seconds;
    }

    /** Returns p50 in milliseconds of messages that are sent one by one. */
    public double sendAlone(MessageProducer producer, String topic, int count)
    throws Exception {
        double[] samples = new double[count];
        for (int sent = 0; sent < count; sent++) {
            long start = System.nanoTime();
            producer.sendMessage(
                new Message(topic, this.lines[sent % this.lines.length]));
            samples[sent] = (System.nanoTime() - start) / 1e6;
        }
        Arrays.sort(samples);
        return samples[count / 2];
    }
}
"""


@contextmanager
def their_broker(directory: Path) -> Iterator[tuple[JavaBroker, str]]:
    """Run their broker; yield it and ZooKeeper's address."""
    jars = find_jars(SERVER, LOG4J)
    with EmbeddedZooKeeper(directory / "zookeeper") as zookeeper:
        theirs = JavaBroker(
            jars,
            directory / "theirs",
            zookeeper.address,
            {TOPIC: {}},
            {"maxSegmentSize": 1 << 30},
            java_options=SERVER_JAVA,
        )
        with theirs:
            yield theirs, zookeeper.address


@contextmanager
def their_client(
    directory: Path, zookeeper: str, payloads: Payloads
) -> Iterator[tuple[JavaClient, Callable[[], Any]]]:
    """Run their client; yield it, and a factory of `Peer` objects with the lines."""
    jars = [*find_jars(CLIENT, CLIENT_EXTENSION, LOG4J), Path(find_classpath())]
    home = directory / "client"
    home.mkdir()
    with (
        Jvm(jars, home, java_options=SERVER_JAVA) as jvm,
        JavaClient(jvm, zookeeper) as client,
    ):
        compiler = jvm.package("org.codehaus.janino").SimpleCompiler()
        compiler.cook(PEER)
        kind = compiler.getClassLoader().loadClass("Peer")

        def make() -> Any:
            peer = kind.newInstance()
            peer.setLines(b"\n".join(payloads.data), len(payloads.data))
            return peer

        yield client, make


def closed_loop(directory: Path, payloads: Payloads) -> Turns:
    """64 clients with one put under way each: their broker, then ours."""
    frames, count = put_frames(payloads), LOOP_PUTS[CONNECTIONS]
    with (
        their_broker(directory) as (theirs, _zookeeper),
        BrokerProcess(directory / "ours", topic=TOPIC) as ours,
    ):
        while True:
            plain, other = (
                count / load.closed_loop(port, frames, CONNECTIONS, count)
                for port in (theirs.port, ours.port)
            )
            yield plain, other


def put_alone(directory: Path, payloads: Payloads) -> Turns:
    """One raw put at a time, p50: their broker, then ours."""
    frames = put_frames(payloads)
    with (
        their_broker(directory) as (theirs, _zookeeper),
        BrokerProcess(directory / "ours", topic=TOPIC) as ours,
    ):
        while True:
            plain, other = (
                statistics.median(load.one_at_a_time(port, frames, 1000)) * 1e3
                for port in (theirs.port, ours.port)
            )
            yield plain, other


def puts(directory: Path, payloads: Payloads) -> Turns:
    """Pipelined raw puts, 1,000 in flight: their broker, then ours."""
    work = in_blocks(put_frames(payloads), COUNT)
    with (
        their_broker(directory) as (theirs, _zookeeper),
        BrokerProcess(directory / "ours", topic=TOPIC) as ours,
    ):
        while True:
            plain, other = (
                COUNT / load.pipeline(port, work, 1000, load.ok_counter())
                for port in (theirs.port, ours.port)
            )
            yield plain, other


def send_alone(directory: Path, payloads: Payloads) -> Turns:
    """`send`, p50: their client at their broker, then ours at ours."""
    with (
        their_broker(directory) as (_theirs, zookeeper),
        their_client(directory, zookeeper, payloads) as (client, make),
        BrokerProcess(directory / "ours", topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as ours,
    ):
        peer, producer = make(), client.producer(TOPIC)
        while True:
            plain = peer.sendAlone(producer, TOPIC, producing.ALONE)
            yield plain, producing.send_one_by_one(ours, payloads)


def send_nowait(directory: Path, payloads: Payloads) -> Turns:
    """Single puts to the Java broker: their client, then ours."""
    messages = payloads.repeat(COUNT)
    with (
        their_broker(directory) as (_theirs, zookeeper),
        their_client(directory, zookeeper, payloads) as (client, make),
        Client(zookeeper) as ours,
    ):
        producer = client.producer(TOPIC)
        while True:
            plain = COUNT / make().send(producer, TOPIC, COUNT, IN_FLIGHT)
            yield plain, COUNT / producing.send_all(messages, ours)


def send_many(directory: Path, payloads: Payloads) -> Turns:
    """Their client at their broker, 4,000 in flight; then our list at our broker."""
    messages = payloads.repeat(producing.COUNT)
    with (
        their_broker(directory) as (_theirs, zookeeper),
        their_client(directory, zookeeper, payloads) as (client, make),
        BrokerProcess(directory / "ours", topic=TOPIC) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as ours,
    ):
        producer = client.producer(TOPIC)
        while True:
            plain = COUNT / make().send(producer, TOPIC, COUNT, IN_FLIGHT)
            yield plain, len(messages) / producing.send_list(messages, ours)


def drain(directory: Path, payloads: Payloads) -> Turns:
    """A backlog of 1,000,000: their client at their broker, then ours at ours.

    Timed from the first message on, without the time that a group takes to form.
    """
    total = consuming.COUNT
    with (
        their_broker(directory) as (theirs, zookeeper),
        their_client(directory, zookeeper, payloads) as (client, make),
        BrokerProcess(directory / "ours", topic=TOPIC) as broker,
    ):
        consuming.fill(
            broker, batches(payloads, consuming.BATCH, total // consuming.BATCH)
        )
        work = in_blocks(put_frames(payloads), total)
        load.pipeline(theirs.port, work, 1000, load.ok_counter())
        for number in counter():
            peer = make()
            peer.setWanted(total)
            consumer = client.consumer(f"drain-{number}", TOPIC, peer)
            seconds = peer.drain(TIMEOUT_S)
            consumer.shutdown()
            yield total / seconds, total / consuming.iterate_sync(broker.port)


FIGURES = {
    "closed-loop-metaq": WithLines(
        closed_loop,
        f"puts, {CONNECTIONS} connections with one under way (floor: MetaQ's broker)",
        "puts/s",
        "1.0",
        "1.5",
    ),
    "puts-metaq": WithLines(
        puts, "pipelined puts, 1,000 in flight (floor: MetaQ's broker)", "puts/s"
    ),
    "alone-metaq": WithLines(
        put_alone,
        "one put at a time, p50 (floor: MetaQ's broker)",
        "ms",
        "0.9 of it",
        "0.7 of it",
        is_ratio=False,
    ),
    "send-metaq": WithLines(
        send_alone,
        "send, one at a time, p50 (floor: MetaQ's client and broker)",
        "ms",
        "1.25 of it",
        "1.0 of it",
        is_ratio=False,
    ),
    "send-nowait-metaq": WithLines(
        send_nowait,
        f"send_nowait to a MetaQ broker, {IN_FLIGHT:,} in flight (floor: its client)",
        "messages/s",
        "0.8",
        "1.5",
    ),
    "send-many-metaq": WithLines(
        send_many,
        "send_many (floor: MetaQ's client and broker)",
        "messages/s",
    ),
    "drain-metaq": WithLines(
        drain,
        "drain of 1,000,000 (floor: MetaQ's client and broker)",
        "messages/s",
        "1.2",
        "1.6",
    ),
}
