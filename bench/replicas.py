"""Figures of a set of three replicas, which share the machine with ZooKeeper and the
load; each replica syncs before it acknowledges a put to the leader.

The floor of puts is a single broker, with the same load in the same round.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as counter
from pathlib import Path

from bench import load
from bench.figures import (
    Figure,
    Turns,
    WithLines,
    batches,
    in_blocks,
    put_frames,
)
from bench.lines import Payloads
from bench.processes import cpu_seconds
from bench.producing import send_one_by_one
from metaq.client import Client, Producer
from tests.cluster.rig import (
    BROKER_ID,
    CALM_MS,
    PARTITIONS,
    SESSION_S,
    TOPIC,
    Cluster,
)
from tests.rigs.process import BrokerProcess

LINE = b"x" * 150
RECORD_BYTES = 20 + len(LINE)
PUTS = 25 * 8000
BATCH, BATCHES = 4000, 100
RATE = 5000
CATCH_UP_BYTES = 1 << 30
IDLE_LOGS, REST_S, IDLE_S = 5000, 15.0, 20.0
WARM_S, PAUSE_S = 1.0, 2.0


def puts(directory: Path, payloads: Payloads) -> Turns:
    """Single puts over one connection, 1,000 in flight."""
    with (
        Cluster(directory / "set", segment_bytes=1 << 30) as cluster,
        alone(directory) as broker,
    ):
        for number in counter():
            frames = put_frames(payloads, partition=number % PARTITIONS, topic=TOPIC)
            plain, other = (
                PUTS
                / load.pipeline(port, in_blocks(frames, PUTS), 1000, load.ok_counter())
                for port in (broker.port, leader_port(cluster))
            )
            yield plain, other


def send_many(directory: Path, payloads: Payloads) -> Turns:
    """Batches of 4,000 records, eight in flight, like those of `send_many`."""
    with (
        Cluster(directory / "set", segment_bytes=1 << 30) as cluster,
        alone(directory) as broker,
    ):
        for number in counter():
            work = batches(payloads, BATCH, BATCHES, number % PARTITIONS, topic=TOPIC)
            plain, other = (
                BATCH * BATCHES / load.pipeline(port, work, 8, load.ok_counter())
                for port in (broker.port, leader_port(cluster))
            )
            yield plain, other


def send_alone(directory: Path, payloads: Payloads) -> Turns:
    """One `send` of the sync client at a time."""
    with (
        Cluster(directory / "set", segment_bytes=1 << 30) as cluster,
        alone(directory) as broker,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as one,
        cluster.client() as other,
    ):
        while True:
            yield (
                send_one_by_one(one, payloads, topic=TOPIC),
                send_one_by_one(other, payloads, topic=TOPIC),
            )


def failover(directory: Path, rounds: int) -> Figure:
    """Kill of the leader: time to the first acknowledged put, minus the session."""
    figure = Figure(
        "leader killed, first acknowledged put, beyond the session",
        "s",
        [],
        at_least="1.5",
        aim="0.5",
        is_ratio=False,
    )
    with (
        Cluster(directory / "set", segment_bytes=1 << 30) as cluster,
        senders(cluster) as pauses,
    ):
        for _ in range(rounds):
            time.sleep(WARM_S)
            pauses.clear()
            cluster.replicas[cluster.leader()].kill()
            cluster.mend()
            time.sleep(PAUSE_S)
            figure.broker.append(max(0.0, max(pauses) - SESSION_S))
    return figure


def hand_over(directory: Path, rounds: int) -> Figure:
    """Planned stop of the leader: longest pause of a sender."""
    figure = Figure(
        f"planned hand-over, longest pause of a sender at {RATE:,}/s",
        "ms",
        [],
        at_least="500",
        aim="100",
        is_ratio=False,
    )
    with (
        Cluster(directory / "set", segment_bytes=1 << 30) as cluster,
        senders(cluster) as pauses,
    ):
        for _ in range(rounds):
            time.sleep(WARM_S)
            pauses.clear()
            replica = cluster.replicas[cluster.leader()]
            replica.ask_to_end()
            replica.wait()
            time.sleep(PAUSE_S)
            figure.broker.append(max(pauses) * 1e3)
            cluster.mend()
    return figure


def catch_up(directory: Path, rounds: int) -> Figure:
    """A wiped replica copies 1 GiB during other puts, until it is in sync."""
    mib = CATCH_UP_BYTES >> 20
    figure = Figure(
        f"wiped replica, {mib} MiB, while {RATE:,}/s are put, until in sync",
        "s",
        [],
        at_least=str(60 * mib / 1024),
        aim=str(15 * mib / 1024),
        is_ratio=False,
    )
    with Cluster(directory / "set", segment_bytes=1 << 30) as cluster:
        count = CATCH_UP_BYTES // (RECORD_BYTES * BATCH)
        work = batches(Payloads([LINE] * 8000, "made"), BATCH, count, topic=TOPIC)
        load.pipeline(leader_port(cluster), work, 8, load.ok_counter())
        with senders(cluster):
            for _ in range(rounds):
                replica = cluster.replicas[cluster.followers()[0]]
                replica.kill()
                replica.wipe()
                begin = time.perf_counter()
                cluster.mend()
                figure.broker.append(time.perf_counter() - begin)
    return figure


def idle(directory: Path, rounds: int) -> Figure:
    """Many idle logs, without clients."""
    figure = Figure(
        f"{IDLE_LOGS:,} partitions idle, processor of all three replicas",
        "% of a core",
        [],
        at_least="3",
        aim="0.5",
        is_ratio=False,
    )
    calm = Cluster(directory / "set", session_ms=CALM_MS, is_begun=False)
    for replica in calm.replicas.values():
        replica.configure(partitions=IDLE_LOGS)
    with calm as cluster:
        cluster.begin()
        with cluster.client() as client, client.producer() as producer:
            for number in range(IDLE_LOGS):
                producer.send_nowait(TOPIC, LINE, partition=f"{BROKER_ID}-{number}")
            producer.flush(timeout=60)
        time.sleep(REST_S)
        for _ in range(rounds):
            before_s, begin = processor_s(cluster), time.perf_counter()
            time.sleep(IDLE_S)
            used_s = processor_s(cluster) - before_s
            figure.broker.append(100 * used_s / (time.perf_counter() - begin))
    return figure


def processor_s(cluster: Cluster) -> float:
    return sum(cpu_seconds(each.pid) for each in cluster.replicas.values())


@contextmanager
def alone(directory: Path) -> Iterator[BrokerProcess]:
    """Run a single broker."""
    with BrokerProcess(
        directory / "alone", topic=TOPIC, partition_count=PARTITIONS
    ) as broker:
        yield broker


def leader_port(cluster: Cluster) -> int:
    return cluster.replicas[cluster.leader()].port


@contextmanager
def senders(cluster: Cluster) -> Iterator[list[float]]:
    """Send at a steady rate; yield the list of pauses between acknowledgements."""
    pauses: list[float] = []
    is_over = threading.Event()
    last = [time.perf_counter()]

    def on_done(_future: object) -> None:
        now = time.perf_counter()
        pauses.append(now - last[0])
        last[0] = now

    def run(producer: Producer) -> None:
        begin = time.perf_counter()
        for sent in counter():
            if is_over.is_set():
                break
            while sent > (time.perf_counter() - begin) * RATE:
                time.sleep(0.001)
            producer.send_nowait(TOPIC, LINE).add_done_callback(on_done)
        producer.flush(timeout=60)

    with cluster.client() as client, client.producer(timeout_s=30.0) as producer:
        producer.send(TOPIC, b"first")
        thread = threading.Thread(target=run, args=(producer,))
        thread.start()
        try:
            yield pauses
        finally:
            is_over.set()
            thread.join()


FIGURES = {
    "replicas-puts": WithLines(
        puts, "replicas: puts, 1,000 in flight", "put/s", "60000", "120000"
    ),
    "replicas-send-many": WithLines(
        send_many, "replicas: batches of 4,000", "msg/s", "250000", "400000"
    ),
    "replicas-send": WithLines(
        send_alone, "replicas: one send, p50", "ms", "+ 0.7", "+ 0.4", is_ratio=False
    ),
    "replicas-failover": failover,
    "replicas-hand-over": hand_over,
    "replicas-catch-up": catch_up,
    "replicas-idle": idle,
}
