"""Work queues of real processes, any of which is killed or stopped.

A scenario has one or two brokers, a ZooKeeper, workers of both worlds and a producer.
They go on while faults happen, chosen by the seed; the book says what may never be
seen, and a deadline that the queue is empty at the end. METAQ_QUEUE_FAULTS is how many
faults a scenario has. The book of a test that failed stays where its data is.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import pytest

from metaq.client import Client
from metaq.errors import MetaqError
from metaq.model import Message
from tests.integration.conftest import ZooKeeperServer, make_root
from tests.matrix.queue_book import Book, Place, check
from tests.matrix.queue_processes import (
    GROUP_OPTIONS,
    SESSION_S,
    WORKER_OPTIONS,
    Child,
)
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE

FAULTS: Final = int(os.environ.get("METAQ_QUEUE_FAULTS") or (12 if IS_WHOLE else 4))
RECLAIM_MS: Final = 600
GROUP: Final = "workers"
PARTITIONS: Final = 2
WORKERS: Final = 3
DRAIN_S: Final = 60.0
"""All is settled within so long after the last fault; a busy machine takes time."""
DELIVERIES_MAX: Final = 40
"""So many that chance does not bring a message there."""

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900 + 30 * FAULTS),
]


@dataclass
class Shop:
    """Brokers, workers and a producer, with their book. A context manager."""

    zookeeper: str
    server: ZooKeeperServer
    topic: str
    book: Book
    random: Random
    brokers: list[BrokerProcess]
    options: dict[str, Any] = field(default_factory=dict)
    workers: list[Child] = field(default_factory=list)
    producer: Child | None = None
    producer_kind: Literal["producer", "router"] = "producer"
    producer_to: str = ""
    """Name to which it sends, if not the topic's."""
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def letters_topic(self) -> str:
        """Topic of the dead letters."""
        return f"{self.topic}-dead"

    def hire(self, kind: Any = None, **options: Any) -> Child:
        """Start another worker."""
        number = next(self.numbers)
        worker = Child(
            kind or ("sync", "async")[number % 2],
            f"{self.topic}-w{number}",
            self.book,
            self.zookeeper,
            self.topic,
            group=GROUP + self.topic,
            dead_letter_topic=self.letters_topic,
            **{
                "deliveries_max": DELIVERIES_MAX,
                **GROUP_OPTIONS,
                **WORKER_OPTIONS,
                **self.options,
                **options,
            },
        )
        self.workers.append(worker)
        return worker

    def start_producer(self) -> None:
        """Start another producer."""
        name = f"{self.topic}-p{next(self.numbers)}"
        to = self.producer_to or self.topic
        self.producer = Child(self.producer_kind, name, self.book, self.zookeeper, to)

    def put(self, *data: bytes) -> None:
        """Put messages, and enter them into the book."""
        with (
            Client(self.zookeeper, session_timeout_s=SESSION_S) as client,
            client.producer() as producer,
        ):
            for one in data:
                self.book.note("put", place=Place.of(producer.send(self.topic, one)))

    def wait_took(self, data: str, worker: Child) -> None:
        """Wait until a worker has a message."""
        took = {"event": "took", "data": data, "worker": worker.name}
        wait_until(
            lambda: any(took.items() <= each.items() for each in self.book.read()),
            DRAIN_S,
            self.describe,
        )

    def told(self, data: str, worker: Child) -> list[str]:
        """Return the errors of a worker about a message; "" for what is good."""
        rows = self.book.read()
        places = [one["place"] for one in rows if one.get("data") == data]
        return [
            one["error"]
            for one in rows
            if one["event"] == "told"
            and one["worker"] == worker.name
            and one["place"] in places
        ]

    def told_count(self) -> int:
        """Return how many acks were answered."""
        return sum(
            each["event"] == "told" and each["verb"] == "ack" and not each["error"]
            for each in self.book.read()
        )

    def go_on(self) -> None:
        """Wait until more is settled than now."""
        before = self.told_count()
        wait_until(lambda: self.told_count() > before + 5, DRAIN_S, self.describe)

    def describe(self) -> str:
        """Return the state of all, and where it is written down."""
        with Client(self.zookeeper, session_timeout_s=SESSION_S) as client:
            try:
                found = client.admin().describe_queue_group(GROUP + self.topic)
            except MetaqError as error:
                return f"{error}; see {self.book.path}"
        return f"{found.queues} {found.problems}; see {self.book.path}"

    def finish(self) -> list[Message]:
        """Let all be settled, end all, check the book; return the dead letters."""
        if self.producer is not None:
            self.producer.stop()
        used = {one["place"][0] for one in self.book.read() if one["event"] == "put"}
        with Client(self.zookeeper, session_timeout_s=SESSION_S) as client:

            def is_empty() -> bool:
                for worker in [one for one in self.workers if not one.is_alive]:
                    self.workers.remove(worker)  # of poison
                    self.hire()
                try:
                    found = client.admin().describe_queue_group(GROUP + self.topic)
                except MetaqError:
                    return False
                return (
                    len(found.queues) >= len(used)
                    and not found.problems
                    and not any(
                        one.open_count or one.floor < one.end for one in found.queues
                    )
                )

            wait_until(is_empty, DRAIN_S, self.describe)
            for worker in self.workers:
                worker.stop()
            letters = list(client.browse(self.letters_topic))
        found = check(
            self.book.read(),
            [_origin_of(letter) for letter in letters],
            self.options.get("deliveries_max", DELIVERIES_MAX),
            is_ordered=self.options.get("ordered_by") is not None,
        )
        assert not found, "\n".join([*found[:20], f"see {self.book.path}"])
        return letters

    def end(self) -> None:
        """Kill what is left."""
        for child in (*self.workers, *filter(None, [self.producer])):
            child.kill()


def _origin_of(letter: Message) -> tuple[Place, str]:
    headers = dict(letter.headers)
    where = headers["dead-letter.origin"].decode()
    partition, _, offset = where.rpartition("/")[2].partition("@")
    cause = headers["dead-letter.cause"].decode().partition(":")[0]
    return Place(partition, int(offset)), cause


# -- faults


def kill_broker(shop: Shop) -> None:
    """A broker is killed, and is back after a while or at once."""
    broker = shop.random.choice(shop.brokers)
    broker.kill()
    time.sleep(shop.random.choice([0, 0.3, 1.5]))
    broker.start()


def restart_broker(shop: Shop) -> None:
    """A broker is asked to end, and started again."""
    broker = shop.random.choice(shop.brokers)
    broker.stop()
    broker.start()


def stop_broker(shop: Shop) -> None:
    """A broker is stopped for longer than the reclaim time, or than its session."""
    pid = shop.random.choice(shop.brokers).pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(shop.random.choice([1.0, 1.5, 4.5]))
    os.kill(pid, signal.SIGCONT)


def kill_worker(shop: Shop) -> None:
    """A worker is killed, and another one begins."""
    worker = shop.workers.pop(shop.random.randrange(len(shop.workers)))
    worker.kill()
    shop.hire()


def stop_worker(shop: Shop) -> None:
    """A worker is stopped for longer than its leases."""
    worker = shop.random.choice(shop.workers)
    worker.send(signal.SIGSTOP)
    time.sleep(shop.random.choice([0.8, 1.5, 3.0]))
    worker.send(signal.SIGCONT)


def end_worker(shop: Shop) -> None:
    """A worker is asked to end, and another one begins."""
    shop.workers.pop(shop.random.randrange(len(shop.workers))).stop()
    shop.hire()


def kill_producer(shop: Shop) -> None:
    """The producer is killed, and another one begins."""
    assert shop.producer is not None
    shop.producer.kill()
    shop.start_producer()


def restart_zookeeper(shop: Shop) -> None:
    """ZooKeeper is away for a while."""
    shop.server.stop()
    time.sleep(shop.random.choice([0, 1.0]))
    shop.server.start()


def kill_both(shop: Shop) -> None:
    """A broker and a worker are killed in one moment."""
    broker = shop.random.choice(shop.brokers)
    broker.kill()
    kill_worker(shop)
    broker.start()


FAULT_KINDS: Final = (
    kill_broker,
    stop_broker,
    kill_worker,
    stop_worker,
    kill_both,
    restart_broker,
    end_worker,
    kill_producer,
    restart_zookeeper,
)


# -- scenarios


@contextmanager
def open_shop(
    server: ZooKeeperServer,
    root: str,
    directory: Path,
    random: Random,
    broker_ids: Sequence[int],
    *,
    program: Sequence[str] = ("metaq",),
    more_topics: Sequence[str] = (),
    **options: Any,
) -> Iterator[Shop]:
    """Run brokers and a topic; the rest is left to the test."""
    topic = "jobs"
    topics = {topic: PARTITIONS, f"{topic}-dead": 1, **dict.fromkeys(more_topics, 1)}
    brokers = [
        BrokerProcess(
            directory / f"data{broker_id}",
            topic="unused",
            arguments=[
                *broker_arguments(root, broker_id, topics),
                f"--set=queueReclaimMs={RECLAIM_MS}",
            ],
            program=program,
        )
        for broker_id in broker_ids
    ]
    book = Book(directory / "book.jsonl")
    shop = Shop(root, server, topic, book, random, brokers, options)
    try:
        for broker in brokers:
            broker.start()
        yield shop
    finally:
        shop.end()
        for broker in brokers:
            broker.kill()
        book.close()


@pytest.fixture
def root(zookeeper_alone: ZooKeeperServer, tmp_path: Path) -> str:
    """Return a root of its own on a ZooKeeper that may be stopped."""
    return make_root(zookeeper_alone, f"/{tmp_path.name}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("broker_ids", "ordered_by"), [((0,), None), ((0,), "key"), ((0, 1), None)]
)
def test_faults_lose_nothing_and_repeat_nothing_that_was_acknowledged(
    zookeeper_alone: ZooKeeperServer,
    root: str,
    tmp_path: Path,
    rng: Random,
    broker_ids: Sequence[int],
    ordered_by: str | None,
) -> None:
    """Whatever is killed or stopped, and in whatever order."""
    options = {} if ordered_by is None else {"ordered_by": ordered_by}
    with open_shop(zookeeper_alone, root, tmp_path, rng, broker_ids, **options) as shop:
        for _ in range(WORKERS):
            shop.hire()
        shop.start_producer()
        shop.go_on()
        for number in range(FAULTS):
            fault = rng.choice(FAULT_KINDS)
            shop.book.note("fault", number=number, fault=fault.__name__)
            fault(shop)
            shop.book.note("mended", number=number)
            shop.go_on()
        shop.finish()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_message_that_kills_its_worker_is_a_dead_letter_alone(
    zookeeper_alone: ZooKeeperServer, root: str, tmp_path: Path, rng: Random, kind: str
) -> None:
    """Its neighbours are not, though they were in the prefetch of those that died."""
    options = {"deliveries_max": 4}
    with open_shop(zookeeper_alone, root, tmp_path, rng, (0,), **options) as shop:
        data = [b"plain:%d" % n for n in range(30)]
        data[5] = b"poison:1"
        data[17] = b"poison:2"
        shop.put(*data)
        shop.hire(kind)
        letters = shop.finish()
    assert sorted(one.data for one in letters) == [b"poison:1", b"poison:2"]


def goes_on(shop: Shop, data: str, worker: Child) -> bool:
    """Let a worker go on, if it has stopped; return whether it was told of an ack."""
    worker.send(signal.SIGCONT)
    return bool(shop.told(data, worker))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_late_ack_is_refused_only_where_another_worker_has_the_message(
    zookeeper_alone: ZooKeeperServer, root: str, tmp_path: Path, rng: Random, kind: str
) -> None:
    """A worker stops where it would ack, past its lease, and goes on."""
    with open_shop(zookeeper_alone, root, tmp_path, rng, (0,)) as shop:
        # A worker that takes more would be given the message once more.
        late = shop.hire(kind, prefetch=1, concurrency=1, handle_s_max=60.0)
        for number, other in enumerate((None, "sync")):
            shop.put(b"stops:%d" % number)
            name = f"stops:{number}"
            shop.wait_took(name, late)
            if other is None:
                time.sleep(1.0 + 2 * RECLAIM_MS / 1000)  # lease and more
            else:
                shop.wait_took(name, shop.hire(other, handle_s_max=60.0))
            wait_until(partial(goes_on, shop, name, late), DRAIN_S, shop.describe)
            wanted = "" if other is None else "LeaseLostError"
            assert shop.told(name, late) == [wanted]
        shop.finish()
