"""A term: what the streams report changes the replica, and what is due after it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from metaq.replication.election import Flag, Presence, PresenceState
from metaq.replication.epochs import Epoch
from metaq.replication.progress import Leadership, Quorum
from metaq.replication.record import Purpose, make_record
from metaq.replication.replica import Replica, ReplicaRole, SetFile, on_applied
from metaq.replication.store import ReplicaStore
from metaq.replication.term import ALONE_S, Term
from tests.replication.stream_rig import LAG_S, Copy, Following, LoopClock, Stage, play
from tests.storage.support import DATA

ALL = frozenset({1, 2, 3})
STEP_S = 0.05


def present(*replicas: int) -> tuple[Presence, ...]:
    ready = PresenceState.READY
    return tuple(Presence(k, 1, ready, 2, 2, Flag.NONE) for k in replicas)


class Node:
    """A replica that leads; the node around a term."""

    def __init__(self, in_sync: frozenset[int], minimum: int) -> None:
        made = make_record("s", 1, ALL, min_in_sync=minimum, nonce="init")
        record = replace(made, in_sync=in_sync).at(2, "a", leader=1)
        term = Leadership(Epoch(2, "a"), Quorum(1, in_sync, minimum))
        file = SetFile("s", 1, record, 2, 2)
        self.replica = Replica(ReplicaRole.LEADING, file, 5, 1, term=term)
        self.term: Term | None = None
        self.wakes = 0

    def set_replica(self, replica: Replica) -> None:
        self.replica = replica
        if self.term is not None and replica.term is not None:
            self.term.streams.set_term(replica.term)

    def wake(self) -> None:
        self.wakes += 1

    def knows(self, replica: int, token: str) -> bool:
        return token == "token"


class Act:
    """A stage whose leader is a term."""

    def __init__(self, stage: Stage, node: Node, term: Term, copy: Copy) -> None:
        self.stage, self.node, self.term, self.copy = stage, node, term, copy

    def follow(self, copy: Copy | None = None, replica: int = 2) -> Following:
        found = self.stage.follow(copy, replica)
        found.revision = self.node.replica.record.revision
        return found

    async def pass_s(self, seconds: float) -> None:
        """Tick as a node does."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        while loop.time() < end_s:
            self.term.tick(loop.time())
            await asyncio.sleep(STEP_S)

    def due(self, *presences: int) -> Any:
        """Return the in-sync set after the change that is due, or None."""
        transition = self.term.next_change(present(*presences))
        if transition is None or transition[0].pending is None:
            return None
        return transition[0].pending.purpose, transition[0].pending.record.in_sync


async def begun(
    stage: Stage, in_sync: frozenset[int] = frozenset({1, 2}), *, minimum: int = 2
) -> Act:
    """Begin a term on a new copy."""
    copy = await stage.lead()
    stage.leader.end()
    node = Node(in_sync, minimum)
    store = ReplicaStore(copy.fs, DATA, copy.logs, copy.tables, clock=LoopClock())
    node.term = term = Term(node, store, lag_s=LAG_S)
    term.streams.begin()
    # The rig serves, ticks and ends what its leader has.
    stage.leader.streams = term.streams
    copy.logs.assign_number = lambda log_id, directory, start: copy.tables.begin_log(
        log_id, directory, start, node.replica.record.epoch
    )
    copy.logs.on_numbered = term.streams.add_log
    return Act(stage, node, term, copy)


def test_a_follower_that_joins_and_catches_up_is_due_to_come_in() -> None:
    """Its life and its record are known then, and its node is woken for it."""

    async def scenario(stage: Stage) -> None:
        act = await begun(stage, frozenset({1, 2}))
        member = act.follow()
        await stage.until(lambda: member.saves)
        ticket = act.copy.put()
        await stage.until(lambda: ticket.is_stored)
        assert act.due(1, 2, 3) is None
        wakes = act.node.wakes
        third = act.follow(replica=3)
        await stage.until(lambda: act.term.streams.has_caught_up(3))
        assert act.node.wakes > wakes
        assert dict(act.term.term.incarnations) == {2: 1, 3: 1}
        assert dict(act.term.term.saved)[3] == third.revision
        assert act.due(1, 2, 3) == (Purpose.TAKE_IN, ALL)
        assert act.due(1, 2) is None
        assert not act.term.refusal(present(1, 2))

    play(scenario)


def test_a_join_makes_former_words_of_a_follower_void() -> None:
    """That it had caught up, or lacked bytes, in an earlier life."""

    async def scenario(stage: Stage) -> None:
        act = await begun(stage, frozenset({1}), minimum=1)
        ticket = act.copy.put(2)
        await stage.until(lambda: ticket.is_stored)
        own = act.node.replica
        record = replace(own.record, in_sync=frozenset({1, 2}))
        act.node.replica = replace(own, file=replace(own.file, record=record))
        act.term.on_lost(2)
        assert act.due(1, 2, 3) == (Purpose.TAKE_OUT, frozenset({1}))
        act.term.on_join(2, 7, 2)
        assert act.due(1, 2, 3) is None
        assert dict(act.term.term.incarnations) == {2: 7}
        act.term.on_caught_up(3)
        act.term.on_join(3, 1, 2)
        assert act.due(1, 2, 3) is None

    play(scenario)


@pytest.mark.slow
def test_a_follower_that_was_taken_out_comes_in_when_it_pulls_again() -> None:
    """Its connection alone says nothing: it may be open one way only."""

    async def scenario(stage: Stage) -> None:
        act = await begun(stage, ALL)
        two, three = act.follow(), act.follow(replica=3)
        first = act.copy.put()
        await stage.until(lambda: first.is_stored)
        three.wire.is_stalled = True
        await act.pass_s(LAG_S + 1)
        transition = act.term.next_change(present(1, 2, 3))
        assert transition is not None
        taken_out, _actions = on_applied(transition[0])
        act.node.set_replica(taken_out)
        two.revision = three.revision = taken_out.record.revision
        ticket = act.copy.put()
        await act.pass_s(LAG_S + 1)
        assert ticket.is_stored
        assert act.due(1, 2, 3) is None
        three.wire.is_stalled = False
        act.follow(replica=3)
        await act.pass_s(1)
        assert act.due(1, 2, 3) == (Purpose.TAKE_IN, ALL)

    play(scenario)


@pytest.mark.slow
def test_puts_are_refused_while_a_member_is_silent_and_end_in_doubt() -> None:
    """After the lag time; the member goes where the minimum remains."""

    async def scenario(stage: Stage) -> None:
        act = await begun(stage, ALL)
        two, three = act.follow(), act.follow(replica=3)
        first = act.copy.put()
        await stage.until(lambda: first.is_stored)
        three.wire.is_stalled = True
        second = act.copy.put()
        await act.pass_s(LAG_S / 2)
        assert not act.term.refusal(present(1, 2, 3))
        await act.pass_s(LAG_S * 0.75)
        assert act.term.streams.stalled()
        assert act.term.refusal(present(1, 2, 3))
        assert act.due(1, 2, 3) == (Purpose.TAKE_OUT, frozenset({1, 2}))
        await act.pass_s(LAG_S)
        assert second.error is not None
        assert "have not all synced it within 4 s" in str(second.error)
        await stage.until(lambda: two.copy.log().synced_end)

    play(scenario)


@pytest.mark.slow
def test_a_leader_that_reaches_nobody_is_alone() -> None:
    """Some seconds after the last sign of any, and where others can lead."""

    async def scenario(stage: Stage) -> None:
        act = await begun(stage)
        follower = act.follow()
        first = act.copy.put()
        await stage.until(lambda: first.is_stored)
        await act.pass_s(1)
        loop = asyncio.get_running_loop()
        assert not act.term.is_alone(present(1, 2, 3), loop.time())
        follower.wire.is_stalled = True
        await act.pass_s(ALONE_S)
        assert not act.term.is_alone(present(1, 2, 3), loop.time())
        await act.pass_s(LAG_S + 1)
        assert act.term.is_alone(present(1, 2, 3), loop.time())
        assert not act.term.is_alone(present(1, 2), loop.time())

    play(scenario)


def test_members_that_went_are_waited_for_until_all_have_saved_that() -> None:
    """The revision in a pull says it; then the quorum is the new one."""

    async def scenario(stage: Stage) -> None:
        act = await begun(stage)
        follower = act.follow()
        follower.revision -= 1
        await stage.until(lambda: act.term.streams.has_caught_up(2))
        replica = act.node.replica
        assert replica.term is not None
        quorum = replace(replica.term.quorum, former=frozenset({3}))
        act.node.set_replica(
            replace(replica, term=replace(replica.term, quorum=quorum))
        )
        held = act.copy.put()
        await act.pass_s(1)
        assert not held.is_answered
        follower.revision += 1
        await stage.until(lambda: held.is_stored)
        assert act.term.term.quorum.former == frozenset()

    play(scenario)


def test_the_end_of_a_term_ends_its_streams() -> None:
    """Followers hear that it leads no more."""

    async def scenario(stage: Stage) -> None:
        act = await begun(stage)
        follower = act.follow()
        await stage.until(lambda: act.term.streams.has_caught_up(2))
        await act.pass_s(1)
        act.term.streams.close()
        await stage.until(follower.task.done)
        assert "leads no more" in str(follower.error)

    play(scenario)
