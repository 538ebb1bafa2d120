"""A replica's way to its leader: connects, follows, connects again, and ends."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from metaq.clock import SystemClock
from metaq.errors import NoBrokerError, StorageError
from metaq.model import BrokerAddress, LogId, MessageId, Offset
from metaq.peer.options import READ_BACKOFF
from metaq.replication import follow_task
from metaq.replication.election import Flag
from metaq.replication.epochs import CopyFacts, Epoch
from metaq.replication.follow_task import FollowTask
from metaq.replication.progress import JoinAnswer
from metaq.replication.record import make_record
from metaq.replication.replica import (
    Replica,
    ReplicaRole,
    SaveSet,
    SetFile,
    SimpleAction,
    Transition,
)
from tests.rigs.waiting import until

EPOCH = Epoch(3, "n")
RECORD = make_record("s1", 1, {1, 2}, min_in_sync=1, nonce="i").at(3, "n", leader=1)
FILE = SetFile("s1", 2, RECORD, 3, 2)
FOLLOWER = Replica(ReplicaRole.FOLLOWING, FILE, 4, 5)


class Store:
    """The disk of a replica that keeps what it is told."""

    def __init__(self) -> None:
        self.logs = self.tables = None
        self.revision = 7
        self.saved: list[SetFile] = []
        self.removals = 0
        self.error: Exception | None = None

    async def save(self, file: SetFile) -> None:
        if self.error is not None:
            raise self.error
        self.saved.append(file)

    def remove_aside(self) -> None:
        self.removals += 1


class Node:
    """A replica that follows."""

    token = "t"

    def __init__(self) -> None:
        self.replica = FOLLOWER
        self.lock = asyncio.Lock()
        self.address: BrokerAddress | None = BrokerAddress("host1", 8123)
        self.actions: list[Any] = []
        self.wakes = 0
        self.last_id = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def apply(self, transition: Transition | None) -> bool:
        assert self.lock.locked()
        if transition is not None:
            self.replica = transition[0]
            self.actions += transition[1]
        return transition is not None

    def set_replica(self, replica: Replica) -> None:
        self.replica = replica

    def wake(self) -> None:
        self.wakes += 1

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    def address_of(self, replica: int) -> BrokerAddress | None:
        return self.address if replica == 1 else None

    def note_last_id(self, last_id: MessageId) -> None:
        self.last_id = last_id

    def make_log(self, log_id: LogId, start: Offset, number: int) -> Any:
        return log_id, start, number


class Streams:
    """`Follower` and `connect` in a test's hands: each stream is one entry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outcomes: list[Exception | None] = []
        self.connects: list[BrokerAddress] = []
        self.owners: list[FollowTask] = []
        self.gate = asyncio.Event()
        monkeypatch.setattr(follow_task, "connect", self._connect)
        monkeypatch.setattr(follow_task, "Follower", self._follower)
        fast = replace(READ_BACKOFF, first_s=0.001, max_s=0.002)
        monkeypatch.setattr(follow_task, "READ_BACKOFF", fast)

    async def _connect(self, address: BrokerAddress, _clock: object) -> object:
        self.connects.append(address)
        return object()

    def _follower(self, *arguments: Any, **_options: object) -> "Streams":
        self.owners.append(arguments[2])
        return self

    async def run(self) -> None:
        if not self.outcomes:
            await self.gate.wait()
            return
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome


Scenario = Callable[[Node, Store, FollowTask], Awaitable[None]]


def run(scenario: Scenario, node: Node | None = None) -> None:
    """Run a scenario while a task follows."""

    async def main() -> None:
        one, store = node or Node(), Store()
        held: Any = store
        task = FollowTask(one, held, 1, EPOCH, clock=SystemClock())
        try:
            await scenario(one, store, task)
        finally:
            await task.end()

    asyncio.run(main())


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_a_stream_that_ends_is_followed_by_another_one(streams: Streams) -> None:
    """Whatever ended it; in between the nodes of the set are read again."""
    streams.outcomes = [NoBrokerError("away"), StorageError("EIO"), None]

    async def scenario(node: Node, _store: Store, task: FollowTask) -> None:
        await until(lambda: len(streams.connects) == 4)
        assert node.wakes == 3
        assert task.leader == (1, EPOCH)

    run(scenario)


def test_a_leader_that_shows_no_address_is_asked_later(streams: Streams) -> None:
    """Its node may come a moment after its claim."""
    node = Node()
    node.address = None

    async def scenario(one: Node, _store: Store, _task: FollowTask) -> None:
        await until(lambda: one.wakes > 2)
        assert streams.connects == []
        one.address = BrokerAddress("host1", 8123)
        await until(lambda: streams.connects)

    run(scenario, node)


def test_a_replica_that_is_frozen_follows_no_more(streams: Streams) -> None:
    """The leader's log contradicts its own: no other stream would say otherwise."""

    async def scenario(node: Node, _store: Store, task: FollowTask) -> None:
        await until(lambda: streams.owners)
        own = CopyFacts(9, Offset(0), Offset(10), Offset(10), ())
        answer = JoinAnswer(own, Offset(5), Offset(10))
        await task.refuse(LogId("t", 0), own, answer)
        assert node.replica.role is ReplicaRole.FROZEN
        assert "t-0" in node.replica.reason
        assert node.actions == []
        streams.gate.set()
        await until(node.tasks[0].done)
        assert len(streams.connects) == 1

    run(scenario)


def test_a_replica_that_lacks_what_it_promised_saves_that_first(
    streams: Streams,
) -> None:
    """Before it joins again: a crash in between must not forget it."""

    async def scenario(node: Node, store: Store, task: FollowTask) -> None:
        await until(lambda: streams.owners)
        store.error = StorageError("EIO")
        with pytest.raises(StorageError):
            await task.on_lost()
        assert node.replica.file.flag is Flag.NONE
        store.error = None
        await task.on_lost()
        assert store.saved[-1].flag is Flag.INCOMPLETE
        assert node.replica.file == store.saved[-1]

    run(scenario)


def test_steps_of_a_stream_are_taken_under_the_lock(streams: Streams) -> None:
    """A join is saved before a pull; a copy that is complete drops what it kept."""

    async def scenario(node: Node, store: Store, task: FollowTask) -> None:
        await until(lambda: streams.owners)
        assert streams.owners[0] is task
        flagged = replace(FILE, flag=Flag.CUT)
        node.replica = replace(FOLLOWER, file=flagged)
        async with node.lock:
            joining = asyncio.create_task(task.on_joined(EPOCH))
            await asyncio.sleep(0)
            assert node.actions == []
        await joining
        assert node.replica.stream == EPOCH
        await task.on_caught_up()
        assert node.replica.is_sure
        assert node.replica.file.flag is Flag.NONE
        assert node.replica.file.completed == 3
        assert [type(each) for each in node.actions] == [SaveSet, SaveSet]
        assert store.removals == 1
        assert SimpleAction.STOP_PULLING not in node.actions

    run(scenario)


def test_a_stream_knows_what_its_replica_knows(streams: Streams) -> None:
    """Settings, the greatest id."""

    async def scenario(node: Node, _store: Store, task: FollowTask) -> None:
        task.note_last_id(MessageId(9))
        assert node.last_id == 9
        made = LogId("t", 0), Offset(3), 7
        assert task.make_log(*made) == made
        assert task.replica is node.replica
        assert streams.outcomes == []

    run(scenario)


def test_a_bug_is_not_taken_for_a_stream_that_ended(streams: Streams) -> None:
    """Its task fails, and with it the replica."""
    streams.outcomes = [AssertionError("a bug")]

    async def scenario(node: Node, _store: Store, _task: FollowTask) -> None:
        await until(node.tasks[0].done)
        assert isinstance(node.tasks[0].exception(), AssertionError)

    run(scenario)
