"""Figures of offset commits, one per message, with a real ZooKeeper and broker.

The floor is ZooKeeper's client library alone, with the same requests one at a time:
the sync of ZooKeeper's log, and two thread switches on each side.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

from kazoo.client import KazooClient

from bench import load
from bench.figures import TOPIC, Figure, Turns, WithLines, batches
from bench.lines import Payloads
from metaq.client import Client, Consumer
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.rigs.process import BrokerProcess

COUNT = 2000
"""Commits of the floor, and of the consumer that waits for each commit."""
MANY = 20_000
"""Messages that are committed without a wait for each commit."""
UNDER_WAY_MAX = 1000
"""Maximum number of commits under way."""
PARTITIONS = 16
BATCH = 500
GROUP = "bench-committers"
OFFSET = b"-5468920727941939200-1080000"


@contextmanager
def cluster(
    directory: Path, partition_count: int, more_topics: Sequence[str] = ()
) -> Iterator[tuple[str, BrokerProcess]]:
    """Run ZooKeeper and a broker; yield ZooKeeper's address, and the broker."""
    with EmbeddedZooKeeper(directory / "zookeeper") as zookeeper:
        arguments = (
            "--set", "zk.zkEnable=true",
            "--set", f"zk.zkConnect={zookeeper.address}",
        )  # fmt: skip
        with BrokerProcess(
            directory / "broker",
            topic=TOPIC,
            partition_count=partition_count,
            more_topics=more_topics,
            arguments=arguments,
        ) as broker:
            yield zookeeper.address, broker


@contextmanager
def bare_writes(address: str, count: int) -> Iterator[Callable[[], None]]:
    """Yield a function that writes `count` nodes in one request, without our client."""
    client = KazooClient(address)
    client.start()
    paths = [f"/floor-{number}" for number in range(count)]
    for path in paths:
        client.ensure_path(path)

    def write() -> None:
        if count == 1:
            client.set(paths[0], OFFSET)
            return
        transaction = client.transaction()
        for path in paths:
            transaction.set_data(path, OFFSET)
        transaction.commit()

    try:
        yield write
    finally:
        client.stop()
        client.close()


def per_second(step: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return count / (time.perf_counter() - begin)


def commit_each(consumer: Consumer, count: int) -> float:
    """Commit each message and wait for it; return messages per second."""
    messages = iter(consumer)
    next(messages)
    consumer.commit()

    def step() -> None:
        next(messages)
        consumer.commit()

    return per_second(step, count)


def commit_each_nowait(consumer: Consumer, count: int) -> float:
    """Commit each message, wait for the commits at the end; return messages/s."""
    messages = iter(consumer)
    next(messages)
    consumer.commit()
    under_way: deque[Future[None]] = deque()
    begin = time.perf_counter()
    for _message in islice(messages, count):
        under_way.append(consumer.commit_nowait())
        if len(under_way) == UNDER_WAY_MAX:
            under_way.popleft().result()
    for future in under_way:
        future.result()
    return count / (time.perf_counter() - begin)


def commits(
    directory: Path,
    payloads: Payloads,
    *,
    partition_count: int,
    count: int,
    measure: Callable[[Consumer, int], float],
) -> Turns:
    """The only member of a group reads a backlog and commits each message."""
    with (
        cluster(directory, partition_count) as (address, broker),
        bare_writes(address, partition_count) as write,
        Client(address) as client,
    ):
        while True:
            for number in range(partition_count):
                size = 1 + 2 * count // BATCH // partition_count
                work = batches(payloads, BATCH, size, number)
                load.pipeline(broker.port, work, 8, load.ok_counter())
            plain = per_second(write, COUNT)
            with client.consumer(GROUP, [TOPIC], commit_interval_s=None) as consumer:
                yield plain, measure(consumer, count)


FIGURES: dict[str, Callable[[Path, int], Figure] | WithLines] = {
    "consume-commit": WithLines(
        partial(commits, partition_count=1, count=COUNT, measure=commit_each),
        "one message, one commit that is waited for (floor: kazoo's set)",
        "messages/s",
    ),
    "consume-commit-nowait": WithLines(
        partial(commits, partition_count=1, count=MANY, measure=commit_each_nowait),
        "one message, one commit_nowait (floor: kazoo's set)",
        "messages/s",
        at_least="2,000/s",
    ),
    "consume-commit-16": WithLines(
        partial(commits, partition_count=16, count=MANY, measure=commit_each_nowait),
        "the same, 16 partitions (floor: 16 nodes in one request of kazoo)",
        "messages/s",
        aim="5,000/s",
    ),
}
