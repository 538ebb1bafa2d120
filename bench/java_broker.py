"""Figures with MetaQ's own Java broker and client; both are of the tests.

Java compiles the loop of its side at run time, with the compiler that PySpark brings.
"""

import time
from pathlib import Path

from bench import load
from bench.figures import PAYLOAD, TOPIC, Figure
from metaq.client import Client
from metaq.zk.embedded import EmbeddedZooKeeper, find_classpath
from tests.java.client import JavaClient
from tests.java.jars import CLIENT, CLIENT_EXTENSION, LOG4J, SERVER, find_jars
from tests.java.jvm import Jvm
from tests.java.server import JavaBroker
from tests.rigs.process import BrokerProcess

COUNT = 200_000
IN_FLIGHT = 4000
TIMEOUT_S = 60.0

SENDER = """
import com.taobao.metamorphosis.Message;
import com.taobao.metamorphosis.client.producer.MessageProducer;
import com.taobao.metamorphosis.client.producer.SendMessageCallback;
import com.taobao.metamorphosis.client.producer.SendResult;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

public class Sender implements SendMessageCallback {
    private final Semaphore places = new Semaphore(0);
    private final AtomicInteger failures = new AtomicInteger();

    public void onMessageSent(SendResult result) {
        if (!result.isSuccess()) this.failures.incrementAndGet();
        this.places.release();
    }

    public void onException(Throwable error) {
        this.failures.incrementAndGet();
        this.places.release();
    }

    /** Returns how many seconds it took until each of the messages was stored. */
    public double send(
        MessageProducer producer, String topic, byte[] data, int count, int inFlight
    ) throws Exception {
        this.places.release(inFlight);
        long start = System.nanoTime();
        for (int sent = 0; sent < count; sent++) {
            this.places.acquire();
            Message message = new Message(topic, data);
            producer.sendMessage(message, this, 60, TimeUnit.SECONDS);
        }
        this.places.acquire(inFlight);
        double seconds = (System.nanoTime() - start) / 1e9;
        if (this.failures.get() > 0)
            throw new IllegalStateException(this.failures.get() + " puts failed");
        return seconds;
    }
}
"""


def closed_loop(directory: Path, rounds: int) -> Figure:
    """Many clients with one put under way each: MetaQ's own broker, then ours.

    Raises:
        NoJarsError: the jars cannot be had here.
    """
    connections, count, payload = 64, 20_000, b"x" * 1024
    frame = load.put_frame(TOPIC, payload, 1)
    figure = Figure(
        f"puts of 1 KiB, {connections} connections with one under way"
        " (floor: MetaQ's own broker)",
        "puts/s",
        [],
        [],
        at_least="1.0",
        aim="1.5",
    )
    with (
        EmbeddedZooKeeper(directory / "zookeeper") as zookeeper,
        JavaBroker(
            find_jars(SERVER, LOG4J),
            directory / "theirs",
            zookeeper.address,
            {TOPIC: {}},
            {"maxSegmentSize": 1 << 30},
        ) as theirs,
        BrokerProcess(directory / "ours", topic=TOPIC) as ours,
    ):
        for number in range(rounds + 1):
            for port, samples in (
                (theirs.port, figure.floor),
                (ours.port, figure.broker),
            ):
                seconds = load.closed_loop(port, frame, connections, count)
                if number:  # the first round warms up
                    samples.append(count / seconds)
    return figure


def send_nowait(directory: Path, rounds: int) -> Figure:
    """Single puts to the Java broker: MetaQ's own client, then ours.

    Raises:
        NoJarsError: the jars cannot be had here.
    """
    figure = Figure(
        f"send_nowait to a MetaQ 1.4 broker, 128 B, {IN_FLIGHT:,} in flight"
        " (floor: its own Java client)",
        "messages/s",
        [],
        [],
        at_least="0.8",
        aim="1.5",
    )
    server_jars = find_jars(SERVER, LOG4J)
    client_jars = find_jars(CLIENT, CLIENT_EXTENSION, LOG4J)
    with (
        EmbeddedZooKeeper(directory / "zookeeper") as zookeeper,
        JavaBroker(
            server_jars,
            directory / "broker",
            zookeeper.address,
            {TOPIC: {}},
            {"maxSegmentSize": 1 << 30},
        ),
        Jvm([*client_jars, Path(find_classpath())], directory) as jvm,
        JavaClient(jvm, zookeeper.address) as theirs,
        Client(zookeeper.address) as ours,
    ):
        compiler = jvm.package("org.codehaus.janino").SimpleCompiler()
        compiler.cook(SENDER)
        kind = compiler.getClassLoader().loadClass("Sender")
        sender, producer = kind.newInstance(), theirs.producer(TOPIC)
        for number in range(rounds + 1):
            floor_s = sender.send(producer, TOPIC, PAYLOAD, COUNT, IN_FLIGHT)
            seconds = send_all(ours)
            if number:  # the first round warms up
                figure.floor.append(COUNT / floor_s)
                figure.broker.append(COUNT / seconds)
    return figure


def send_all(client: Client) -> float:
    """Send as the Java client does, and return how many seconds it took."""
    with client.producer(timeout_s=TIMEOUT_S) as producer:
        producer.send(TOPIC, PAYLOAD)
        send = producer.send_nowait
        start = time.perf_counter()
        for _ in range(COUNT):
            send(TOPIC, PAYLOAD)
        producer.flush(TIMEOUT_S)
        seconds = time.perf_counter() - start
        assert producer.statistics().acknowledged_count == COUNT + 1
    return seconds
