"""A replica's way to a term: when it claims, what it merges, when it gives up."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from metaq.errors import StorageError, UnavailableError
from metaq.model import BrokerAddress, LogId, MessageId, Offset
from metaq.replication import claims
from metaq.replication.claims import Claims
from metaq.replication.election import Flag, Presence, PresenceState, begin_merge
from metaq.replication.epochs import Epoch
from metaq.replication.merging import Merged
from metaq.replication.record import Purpose, make_record
from metaq.replication.replica import (
    BeginEpoch,
    LeaderSeen,
    Propose,
    Replica,
    ReplicaRole,
    SaveSet,
    SetFile,
    Transition,
    View,
)
from tests.rigs.virtual_time import VirtualClock
from tests.rigs.waiting import until

ALL = frozenset({1, 2, 3})
MADE = make_record("s1", 1, ALL, min_in_sync=2, nonce="i")
RECORD = replace(MADE, in_sync=ALL).at(2, "a", leader=1)
FILE = SetFile("s1", 2, RECORD, 2, 2)
IDLE = Replica(ReplicaRole.IDLE, FILE, 4, 5)
EPOCH = Epoch(3, "mine")
CLAIMED = RECORD.at(3, "mine", leader=2)
MERGING = replace(
    IDLE,
    role=ReplicaRole.MERGING,
    file=replace(FILE, record=CLAIMED),
    merge=begin_merge(RECORD, 2),
)


def present(*replicas: int) -> tuple[Presence, ...]:
    return tuple(Presence(k, 1, PresenceState.READY, 2, 2) for k in replicas)


def view(leader: LeaderSeen | None = None) -> View:
    return View(RECORD, 4, leader, present(2, 3), is_synced=True)


class Node:
    """A replica that claims."""

    token = ""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.lock = asyncio.Lock()
        self.actions: list[Any] = []
        self.error: Exception | None = None
        self.forgotten = self.wakes = self.last_id = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.away: set[int] = set()

    async def apply(self, transition: Transition | None) -> bool:
        if transition is None:
            return False
        if self.error is not None:
            raise self.error
        self.replica = transition[0]
        self.actions += transition[1]
        return True

    def set_replica(self, replica: Replica) -> None:
        self.replica = replica

    def wake(self) -> None:
        self.wakes += 1

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    async def read(self) -> View:
        return view()

    async def forget_former_process(self) -> None:
        self.forgotten += 1

    def address_of(self, replica: int) -> BrokerAddress | None:
        return None if replica in self.away else BrokerAddress(f"host{replica}", 8123)

    def note_last_id(self, last_id: MessageId) -> None:
        self.last_id = max(self.last_id, last_id)

    def make_log(self, log_id: LogId, start: Offset, number: int) -> Any:
        raise AssertionError((log_id, start, number))


class Merges:
    """`Merging` in a test's hands: what each member has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, Merged | Exception] = {}
        self.asked: list[str] = []
        monkeypatch.setattr(claims, "connected", self._connected)
        monkeypatch.setattr(claims, "Merging", self._merging)

    @asynccontextmanager
    async def _connected(
        self, address: BrokerAddress, _clock: object
    ) -> AsyncIterator["_Peer"]:
        yield _Peer(address.host)

    def _merging(self, *_rest: object, **_options: object) -> "Merges":
        return self

    async def merge_with(self, peer: "_Peer") -> Merged:
        """Return what is found at a member; one that is not named hangs."""
        self.asked.append(peer.host)
        found = self.found.get(peer.host)
        if found is None:
            await asyncio.Event().wait()
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found


class _Peer:
    """A connection to a member."""

    def __init__(self, host: str) -> None:
        self.host = host


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> Merges:
    return Merges(monkeypatch)


class Store:
    """The logs of a replica: none."""

    logs = tables = None


Scenario = Callable[[Node, Claims, VirtualClock], Awaitable[None]]


def run(replica: Replica, scenario: Scenario) -> None:
    """Run a scenario on a replica and its claims, with a clock in its hands."""

    async def main() -> None:
        node, clock, store = Node(replica), Hand(), Store()
        held: Any = store
        made = Claims(node, held, clock=clock, draw=lambda size: "n" * size)
        await scenario(node, made, clock)
        await made.end()

    asyncio.run(main())


class Hand(VirtualClock):
    """A clock that a test moves."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


def test_a_claim_waits_for_those_of_better_rank() -> None:
    """The time counts from when no replica was seen to lead."""

    async def scenario(node: Node, made: Claims, clock: Any) -> None:
        leads = LeaderSeen(1, RECORD.epoch, is_own=False)
        node.replica = replace(IDLE, file=replace(FILE, replica=3))
        await made.claim_if_due(view(leads))
        clock.now_s += 0.04
        await made.claim_if_due(view())
        assert node.actions == []
        clock.now_s += 0.02
        await made.claim_if_due(view())
        assert node.replica.role is ReplicaRole.CLAIMING
        (proposed,) = [each for each in node.actions if isinstance(each, Propose)]
        assert proposed.change.purpose is Purpose.CLAIM
        assert proposed.change.record.epoch == Epoch(3, "n" * claims.NONCE_BYTES)

    run(IDLE, scenario)


def test_a_replica_that_gave_up_leaves_the_next_claim_to_others() -> None:
    """For as long as it was told."""

    async def scenario(node: Node, made: Claims, clock: Any) -> None:
        made.wait(10)
        clock.now_s += 9
        await made.claim_if_due(view())
        assert node.actions == []
        clock.now_s += 2
        await made.claim_if_due(view())
        assert node.actions

    run(IDLE, scenario)


def test_a_replica_alone_claims_only_where_it_is_sure() -> None:
    """Its directory may be an older state, else: the others are waited for."""
    alone = View(RECORD, 4, None, present(2), is_synced=True)

    async def scenario(node: Node, made: Claims, clock: Any) -> None:
        async def read() -> View:
            return alone

        node.read = read  # type: ignore[method-assign]
        clock.now_s += 60
        await made.claim_if_due(alone)
        assert node.actions == []
        node.replica = replace(IDLE, is_sure=True)
        await made.claim_if_due(alone)
        assert node.actions

    run(IDLE, scenario)


def test_the_node_of_a_former_life_is_deleted() -> None:
    """That of another replica is not."""

    async def scenario(node: Node, made: Claims, _clock: Any) -> None:
        await made.claim_if_due(view(LeaderSeen(1, RECORD.epoch, is_own=False)))
        assert node.forgotten == 0
        await made.claim_if_due(view(LeaderSeen(2, RECORD.epoch, is_own=False)))
        assert node.forgotten == 1
        assert node.actions == []

    run(IDLE, scenario)


def answered(node: Node) -> frozenset[int]:
    """Return who is merged."""
    assert node.replica.merge is not None
    return node.replica.merge.answered


def test_members_are_merged_one_after_another(merges: Merges) -> None:
    """One that does not answer is gone without; ids of all are noted."""
    merges.found = {
        "host1": UnavailableError("no"),
        "host3": Merged(MessageId(77), lacks_bytes=False),
    }

    async def scenario(node: Node, made: Claims, _clock: Any) -> None:
        made.begin_merge({1, 3}, EPOCH)
        await until(lambda: answered(node) == {2, 3})
        assert merges.asked[:2] == ["host1", "host3"]
        assert (node.last_id, node.wakes) == (77, 1)
        await made.lead_if_merged(view())
        assert node.replica.role is ReplicaRole.LEADING
        assert isinstance(node.actions[0], BeginEpoch)

    run(MERGING, scenario)


def test_a_member_that_refuses_is_asked_again_until_it_answers(
    merges: Merges, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two that claim at once refuse each other; the one that lost answers soon."""
    monkeypatch.setattr(claims, "ASK_AGAIN_S", 0.0)
    merges.found = {
        "host1": UnavailableError("it claims"),
        "host3": UnavailableError("it is not there"),
    }

    async def scenario(node: Node, made: Claims, _clock: Any) -> None:
        made.begin_merge({1, 3}, EPOCH)
        await until(lambda: len(merges.asked) >= 6)
        assert merges.asked[:6] == ["host1", "host3"] * 3
        assert len(caplog.records) == 2, caplog.text
        merges.found["host1"] = Merged(MessageId(7), lacks_bytes=False)
        await until(lambda: answered(node) == {1, 2})
        merges.found["host3"] = Merged(MessageId(8), lacks_bytes=False)
        await until(node.tasks[0].done)
        assert answered(node) == {1, 2, 3}
        assert merges.asked.count("host1") < merges.asked.count("host3")

    run(MERGING, scenario)


def test_a_member_that_hangs_is_gone_without(
    merges: Merges, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are asked all the same; so is one without an address.

    The log has a cause.
    """
    monkeypatch.setattr(claims, "MERGE_TIMEOUT_S", 0.01)
    merges.found = {"host3": Merged(MessageId(7), lacks_bytes=False)}

    async def scenario(node: Node, made: Claims, _clock: Any) -> None:
        node.away = {2}
        made.begin_merge({1, 2, 3}, EPOCH)
        await until(lambda: answered(node) == {2, 3})
        assert merges.asked[:2] == ["host1", "host3"]

    run(MERGING, scenario)
    texts = [record.getMessage() for record in caplog.records]
    assert "replica 1 did not answer: waited 0.01 s" in texts


def test_a_claimer_that_lacks_committed_bytes_gives_up(merges: Merges) -> None:
    """It says so on its disk, and never leads on what is here."""
    merges.found = {"host1": Merged(MessageId(7), lacks_bytes=True)}

    async def scenario(node: Node, made: Claims, _clock: Any) -> None:
        made.begin_merge({1, 3}, EPOCH)
        await until(node.tasks[0].done)
        assert merges.asked == ["host1"]
        (saved,) = [each for each in node.actions if isinstance(each, SaveSet)]
        assert saved.file.flag is Flag.INCOMPLETE
        await made.lead_if_merged(view())
        assert node.replica.role is ReplicaRole.MERGING
        (proposed,) = [each for each in node.actions if isinstance(each, Propose)]
        assert proposed.change.purpose is Purpose.GIVE_UP

    run(MERGING, scenario)


def test_a_disk_that_fails_under_a_merge_is_no_bug(merges: Merges) -> None:
    """The member is asked again; the claimer gives up for want of answers."""
    merges.found = {"host1": Merged(MessageId(7), lacks_bytes=True)}

    async def scenario(node: Node, made: Claims, clock: Any) -> None:
        node.error = StorageError("EIO")
        made.begin_merge({1}, EPOCH)
        await until(lambda: len(merges.asked) > 1)
        assert not node.tasks[0].done()
        await made.end()
        node.error = None
        await made.lead_if_merged(view())
        assert node.actions == []
        clock.now_s += claims.TERM_TRIES_S + 1
        node.replica = replace(
            node.replica, file=replace(FILE, flag=Flag.CUT), pending=None
        )
        await made.lead_if_merged(view())
        assert isinstance(node.actions[-1], Propose)

    run(MERGING, scenario)


def test_a_merge_that_is_called_off_does_nothing_more(merges: Merges) -> None:
    """Cuts and appends of a merge are no business of another role."""

    async def scenario(node: Node, made: Claims, _clock: Any) -> None:
        made.begin_merge({1}, EPOCH)
        await until(lambda: merges.asked)
        await made.end()
        assert node.tasks[0].cancelled()
        await made.end()
        assert node.replica.merge == MERGING.merge

    run(MERGING, scenario)
