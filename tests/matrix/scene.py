"""A scene: a cluster under load, with members that keep a ledger of what they do.

Brokers and ZooKeeper are processes of their own; members and senders are threads with a
client each. A member's consumer tells the ledger of each assignment, revocation, fence
and commit at the moment it happens.
"""

import threading
import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Self

from metaq.client import Client
from metaq.client.errors import PartlySentError
from metaq.client.sync.client import Consumer
from metaq.model import TopicPartition
from tests.matrix.ledger import Event, Ledger, check, readers
from tests.rigs.inside import subscription_of, twin_of
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

SESSION_TIMEOUT_S = 6.0
"""Of members: an ended one gives its partitions up that late."""
COMMIT_S = 0.3
WAIT_S = 0.5
"""Of a long poll: an idle member knows that a broker is back when one has ended."""
PROGRESS_S = 90.0
"""Deadline of everything that must happen; reached only when it never will."""
BATCH = 20
PAUSE_S = 0.01
"""Between batches of the load: a fifth of what two cores would bear."""


def broker_arguments(
    zookeeper: str, broker_id: int, topics: Mapping[str, int]
) -> list[str]:
    """Return what makes a broker process a member of the cluster."""
    settings = {
        "brokerId": str(broker_id),
        "zk.zkEnable": "true",
        "zk.zkConnect": zookeeper,
        "zk.zkSessionTimeoutMs": "3000",
        "zk.zkSyncTimeMs": "100",
    }
    arguments = [f"--set={key}={value}" for key, value in settings.items()]
    arguments += [
        f"--set={name}:numPartitions={count}" for name, count in topics.items()
    ]
    return arguments


class Member(threading.Thread):
    """One member of the group: it reads until it is told to leave."""

    def __init__(
        self,
        name: str,
        zookeeper: str,
        group: str,
        topic: str,
        ledger: Ledger,
        *,
        session_timeout_s: float = SESSION_TIMEOUT_S,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.client = Client(zookeeper, session_timeout_s=session_timeout_s)
        self.consumer: Consumer | None = None
        self.error: BaseException | None = None
        self._group = group
        self._topic = topic
        self._ledger = ledger
        self.leaving = threading.Event()

    def run(self) -> None:
        try:
            with self.client:
                consumer = self.client.consumer(
                    self._group,
                    [self._topic],
                    consumer_id=self.name,
                    commit_interval_s=COMMIT_S,
                    wait_s=WAIT_S,
                )
                self._tap(consumer)
                with consumer:
                    self.consumer = consumer
                    while not self.leaving.is_set():
                        messages = consumer.receive_many(50, timeout=0.1)
                        if messages:
                            self._ledger.deliver(self.name, messages)
        except BaseException as error:
            self.error = error

    def _tap(self, consumer: Consumer) -> None:
        """Have the ledger told of what the group and the store are told."""
        reading = subscription_of(twin_of(consumer))
        store = reading._store
        assign, revoke, fence = reading.assign, reading.revoke, reading.fence
        commit, note = store.commit, self._ledger.note

        async def tapped_assign(partitions: Collection[TopicPartition]) -> None:
            note("assign", self.name, partitions)
            try:
                await assign(partitions)
            except BaseException:
                note("revoke", self.name, partitions)
                raise

        async def tapped_revoke(partitions: Collection[TopicPartition]) -> None:
            await revoke(partitions)
            note("revoke", self.name, partitions)

        def tapped_fence(partitions: Collection[TopicPartition]) -> None:
            fence(partitions)
            note("fence", self.name, partitions)

        async def tapped_commit(group: str, offsets: Any, **options: Any) -> Any:
            failed = dict.fromkeys(offsets)
            try:
                failed = await commit(group, offsets, **options)
            finally:
                for partition, offset in offsets.items():
                    kind = "refused" if partition in failed else "commit"
                    self._ledger.events.append(
                        Event(kind, self.name, partition, offset.offset)
                    )
            return failed

        reading.assign, reading.revoke, reading.fence = (
            tapped_assign,
            tapped_revoke,
            tapped_fence,
        )
        store.commit = tapped_commit

    def leave(self) -> None:
        """Leave the group in order, and wait for it."""
        self.leaving.set()
        self.join(PROGRESS_S)
        assert not self.is_alive(), f"{self.name} does not leave"
        assert self.error is None, self.error

    @property
    def is_ok(self) -> bool:
        """Whether it has what is its own, and nothing to complain of."""
        return self.consumer is not None and self.consumer.health().is_ok


class Sender(threading.Thread):
    """Sends without pause while told to, and keeps accounts."""

    def __init__(self, zookeeper: str, topic: str) -> None:
        super().__init__(name="sender", daemon=True)
        self.tried: set[bytes] = set()
        self.acked: set[bytes] = set()
        self.error: BaseException | None = None
        self.is_loaded = threading.Event()
        self._zookeeper = zookeeper
        self._topic = topic
        self._commands: list[int] = []
        self.ending = threading.Event()

    def run(self) -> None:
        try:
            with (
                Client(self._zookeeper, session_timeout_s=SESSION_TIMEOUT_S) as client,
                client.producer(timeout_s=PROGRESS_S) as producer,
            ):
                while not self.ending.is_set():
                    if self._commands:
                        for _ in range(self._commands[0]):
                            self._send(producer)
                        self._commands.pop()
                    elif self.is_loaded.is_set():
                        self._send(producer)
                    time.sleep(PAUSE_S)
        except BaseException as error:
            self.error = error

    def _send(self, producer: Any) -> None:
        first = len(self.tried)
        batch = [f"{self._topic}:{first + n}".encode() for n in range(BATCH)]
        self.tried.update(batch)
        try:
            producer.send_many(self._topic, batch)
        except PartlySentError as error:
            outcomes = zip(batch, error.outcomes, strict=True)
            self.acked.update(p for p, o in outcomes if not isinstance(o, Exception))
            raise
        self.acked.update(batch)

    def send(self, batch_count: int) -> None:
        """Send so many batches, and wait until they are acknowledged."""
        self._commands.append(batch_count)
        wait_until(
            lambda: not self._commands or self.error is not None,
            show=lambda: f"{len(self.tried) - len(self.acked)} not acknowledged",
        )
        assert self.error is None, self.error

    def end(self) -> None:
        """Stop, and wait for what is in flight."""
        self.ending.set()
        self.join(PROGRESS_S)
        assert not self.is_alive(), "the sender does not end"
        assert self.error is None, self.error


class Scene:
    """One topic, one group, members and a sender. Lifecycle: a context manager."""

    def __init__(
        self,
        zookeeper: str,
        topic: str,
        partitions: Collection[TopicPartition],
        brokers: list[BrokerProcess],
    ) -> None:
        self.zookeeper = zookeeper
        self.topic = topic
        self.partitions = frozenset(partitions)
        self.brokers = brokers
        self.group = f"group-of-{topic}"
        self.ledger = Ledger()
        self.members: dict[str, Member] = {}
        self.forced: set[str] = set()
        """Members whose session was ended by force."""
        self.sender = Sender(zookeeper, topic)

    def __enter__(self) -> Self:
        self.sender.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            for member in self.members.values():
                member.leaving.set()
            self.sender.ending.set()

    def join(self, name: str, zookeeper: str | None = None) -> Member:
        """Let a member join; does not wait."""
        member = Member(
            name, zookeeper or self.zookeeper, self.group, self.topic, self.ledger
        )
        self.members[name] = member
        member.start()
        return member

    def leave(self, name: str) -> None:
        """Let a member leave, and wait for it."""
        self.members.pop(name).leave()

    # -- rest and progress ------------------------------------------------------------

    def settle(self) -> None:
        """Wait until each partition has one reader, and no member complains."""
        wait_until(self._is_settled, show=self.describe)

    def _is_settled(self) -> bool:
        for member in self.members.values():
            assert member.error is None, member.error
        reading = readers(self.ledger.events)
        return (
            reading.keys() == self.partitions
            and set(reading.values()) == self.members.keys()
            and all(member.is_ok for member in self.members.values())
        )

    def drain(self) -> None:
        """Wait until everything acknowledged was delivered."""
        wait_until(
            lambda: not self.ledger.missing(self.sender.acked), show=self.describe
        )

    def describe(self) -> str:
        """Return who reads what, what is missing and who complains, in one text."""
        lines = [f"{len(self.ledger.missing(self.sender.acked))} not delivered"]
        for partition, name in sorted(readers(self.ledger.events).items()):
            lines.append(f"{partition} is read by {name}")
        for name, member in self.members.items():
            consumer = member.consumer
            health = "not started" if consumer is None else consumer.health()
            lines.append(f"{name}: {health} {member.error or ''}")
        return "\n".join(lines)

    def finish(self) -> None:
        """Stop the load, prove progress everywhere, leave, and check the ledger."""
        self.sender.is_loaded.clear()
        self.settle()
        # Round robin: a few batches reach every partition.
        self.sender.send(len(self.partitions))
        self.drain()
        self.sender.end()
        for name in tuple(self.members):
            self.leave(name)
        violations = check(
            self.ledger,
            tried=self.sender.tried,
            acked=self.sender.acked,
            forced=self.forced,
        )
        assert violations == [], "\n".join(violations[:20])
