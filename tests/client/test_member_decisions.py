"""Decisions of one consumer: each guard, and the failure that it prevents."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from metaq.client.consume.exactly_once import AsyncExactlyOnce
from metaq.client.decisions.rules import make_decision
from metaq.client.errors import LostBranchError, TransactionInDoubtError
from metaq.client.partitioner import OutgoingMessage
from metaq.errors import (
    CoordinationError,
    NoBrokerError,
    OwnershipLostError,
    TransactionError,
)
from metaq.model import Offset, XaTransactionId
from metaq.protocol.commands import TransactionCommand, TransactionType
from metaq.protocol.transaction_ids import parse_key
from metaq.txn.state import HeuristicOutcome
from metaq.zk.decisions import batch_xid
from metaq.zk.errors import PayloadError
from metaq.zk.session import SessionEvent
from tests.client.exactly_once_model import (
    BROKERS,
    CLOCK,
    GROUP,
    INPUTS,
    PATHS,
    REQUEST_S,
    Batch,
    Fault,
    Member,
    World,
    check,
    due,
    heal,
)
from tests.rigs.virtual_time import run_virtually

ZERO, ONE = INPUTS
NEVER = 10**6
TOKENS = PATHS.group_tokens(GROUP)


@dataclass
class Stage:
    """A member, and what is to fail of its requests."""

    world: World
    member: Member
    asked: list[str] = field(default_factory=list)
    """Requests of the member, oldest first."""
    faults: dict[str, tuple[int, int, Fault]] = field(default_factory=dict)
    """Request → the first to fail, from 1, the first not to, and how."""

    def fail(
        self,
        *names: str,
        fault: Fault = Fault.FAILED,
        first: int = 1,
        count: int = NEVER,
    ) -> None:
        """Have requests of these names fail, counted from now."""
        for name in names:
            seen = self.asked.count(name)
            self.faults[name] = (seen + first, seen + first + count, fault)

    def choose(self, who: Member, name: str) -> Fault | None:
        """Return the fault of a request."""
        if who is not self.member:
            return None
        self.asked.append(name)
        first, end, fault = self.faults.get(name, (NEVER, NEVER, Fault.FAILED))
        return fault if first <= self.asked.count(name) < end else None

    def prepared(self) -> list[str]:
        """Return the transactions that have not ended."""
        return [
            key
            for broker in self.world.brokers.values()
            for key in iter(broker.transactions.keys())
        ]

    def tokens(self) -> tuple[str, ...]:
        return self.world.server.names(TOKENS) or ()

    def logs(self) -> int:
        """Return how many messages are readable."""
        return sum(len(one.log) for one in self.world.brokers.values())

    def batch(self) -> Batch:
        batch = self.member.next_batch()
        assert batch is not None
        return batch

    async def claim(self) -> None:
        """Claim all partitions."""
        for partition in INPUTS:
            assert await self.member.claim(partition)

    async def other(self) -> Member:
        """Return another member that has begun."""
        member = Member(self.world, "g_other")
        await asyncio.sleep(1)
        return member

    async def die_after_the_decision(self) -> XaTransactionId:
        """Have the member write a batch to both brokers, and die before the commits."""
        await self.claim()
        tx = self.batch().block()
        await tx.__aenter__()
        xid = xid_of(tx)
        for broker_id in BROKERS:
            tx.add("out", [OutgoingMessage(b"0 0", partition=str(broker_id))])
        self.fail("COMMIT_TWO_PHASE", count=1, fault=Fault.KILLED_BEFORE)
        await asyncio.wait([asyncio.create_task(tx.__aexit__(None, None, None))])
        self.member.reap()
        return xid

    def end_at_zero(
        self, xid: XaTransactionId, outcome: HeuristicOutcome, *, is_forgotten: bool
    ) -> None:
        """End the part of broker 0 as an operator does, who may have it forgotten."""
        transactions = self.world.brokers[BROKERS[0]].transactions
        transactions.end(xid, outcome)
        if is_forgotten:
            kind = TransactionType.FORGET
            transactions.answer(TransactionCommand(xid, "operator", kind, 1), None)

    def lose_before_the_commit(
        self, xid: XaTransactionId, *, is_known: bool, is_ours: bool
    ) -> None:
        """Have the part of broker 0 dropped before the commit, known to it or not.

        Not ours: a partition goes as well.
        """
        choose = self.world.choose

        def lose(who: Member, name: str) -> Fault | None:
            if name == "COMMIT_TWO_PHASE" and self.prepared():
                outcome = HeuristicOutcome.ROLLBACK
                self.end_at_zero(xid, outcome, is_forgotten=not is_known)
                if not is_ours:
                    self.member.decisions.release([ONE])
            return choose(who, name)

        self.world.choose = lose

    async def finish(self) -> None:
        """Have all inputs written, each once, by this member first."""
        self.faults.clear()
        for broker in self.world.brokers.values():
            broker.is_away = False
        await self.member.run(INPUTS, 8)
        assert self.logs() == due().total()
        await self.member.close()
        await heal(self.world, [self.member])
        check(self.world, [self.member])


def play(story: Callable[[Stage], Awaitable[None]]) -> None:
    """Run a story of a member that owns all partitions."""

    async def scenario() -> None:
        world = World()
        stage = Stage(world, Member(world, "g_one"))
        world.choose = stage.choose
        await asyncio.sleep(1)
        await story(stage)

    run_virtually(scenario())


def xid_of(tx: AsyncExactlyOnce) -> XaTransactionId:
    """Return the id of an open block."""
    xid = parse_key(tx.id)
    assert isinstance(xid, XaTransactionId)
    return xid


# -- claims ----------------------------------------------------------------------------


def test_a_claim_costs_one_read_until_the_group_writes_exactly_once() -> None:
    """Two reads then; other groups pay nothing for it."""

    async def story(stage: Stage) -> None:
        decisions = stage.member.decisions
        for _ in range(2):
            assert (
                await decisions.settle(ZERO, deadline_s=CLOCK.monotonic_s() + 1) is None
            )
        assert stage.asked == ["exists"] * 2
        await stage.claim()
        await stage.member.write(stage.batch())
        await decisions.settle(ZERO, deadline_s=CLOCK.monotonic_s() + 1)
        del stage.asked[:]
        place = await decisions.settle(ZERO, deadline_s=CLOCK.monotonic_s() + 1)
        assert place is not None
        assert [one for one in stage.asked if one.islower()] == ["get", "get"]
        await stage.finish()

    play(story)


def test_who_claims_commits_what_is_decided_and_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where it is committed already: that a broker knows no more is no loss."""

    async def story(stage: Stage) -> None:
        xid = await stage.die_after_the_decision()
        stage.end_at_zero(xid, HeuristicOutcome.COMMIT, is_forgotten=True)
        assert len(stage.prepared()) == 1
        other = await stage.other()
        assert await other.claim(ZERO)
        assert (stage.prepared(), stage.logs()) == ([], 2)
        await other.close()

    caplog.set_level(logging.WARNING)
    play(story)
    assert [one.message for one in caplog.records] == []


def test_a_partition_is_not_read_while_a_broker_that_has_a_part_of_it_is_away() -> None:
    """The claim fails, and is repeated."""

    async def story(stage: Stage) -> None:
        await stage.die_after_the_decision()
        other = await stage.other()
        stage.world.brokers[BROKERS[1]].is_away = True
        with pytest.raises(TransactionInDoubtError, match=r"in/0-0: .*not read"):
            await other.claim(ZERO)
        assert other.positions == {}
        stage.world.brokers[BROKERS[1]].is_away = False
        assert await other.claim(ZERO)
        assert stage.prepared() == []
        await other.close()

    play(story)


def test_a_decided_branch_that_an_operator_dropped_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Waiting does not bring it back: the partition is read, and an error is logged."""

    async def story(stage: Stage) -> None:
        xid = await stage.die_after_the_decision()
        stage.end_at_zero(xid, HeuristicOutcome.ROLLBACK, is_forgotten=False)
        other = await stage.other()
        assert await other.claim(ZERO)
        await other.close()

    play(story)
    assert "messages of a decided batch are missing" in caplog.text


def test_a_claim_has_what_the_dead_left_ended_once_more_if_one_runs() -> None:
    """The one that runs may have looked before its partition's member was dead."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        await stage.member.write(stage.batch())
        await asyncio.sleep(1)
        del stage.asked[:]
        stage.world.pause_s = lambda: 0.1
        await stage.claim()
        await asyncio.sleep(5)
        assert stage.asked.count("RECOVER") == 2 * len(BROKERS)
        stage.world.pause_s = lambda: 0.0
        await stage.finish()

    play(story)


def test_an_end_of_the_dead_that_fails_fails_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next claim does it."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.fail("transact", fault=Fault.KILLED_BEFORE, count=1)
        await asyncio.wait([asyncio.create_task(stage.member.write(stage.batch()))])
        stage.member.reap()
        stage.faults.clear()
        stage.member = await stage.other()
        stage.fail("set_or_create")
        assert await stage.member.claim(ONE)
        await asyncio.sleep(1)
        assert stage.prepared() != []
        assert "batches of dead members may be left: group=g" in caplog.text
        stage.faults.clear()
        assert await stage.member.claim(ZERO)
        await asyncio.sleep(1)
        assert stage.prepared() == []
        await stage.finish()

    caplog.set_level(logging.INFO)
    play(story)


def test_after_a_close_nothing_is_asked() -> None:
    """The end of what the dead left is cut short."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        await stage.member.write(stage.batch())
        claiming = asyncio.create_task(stage.claim())
        while "RECOVER" not in stage.asked:
            await asyncio.sleep(0)
        stage.world.pause_s = lambda: 1.0
        await asyncio.sleep(0.5)
        stage.world.pause_s = lambda: 0.0
        await claiming
        sweeps = [one for one in asyncio.all_tasks() if one.get_name() == "sweep"]
        assert len(sweeps) == 1
        await stage.member.decisions.close(deadline_s=CLOCK.monotonic_s() + 5)
        assert sweeps[0].cancelling()
        await heal(stage.world, [stage.member])
        check(stage.world, [stage.member])

    play(story)


# -- in doubt --------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.FAILED, Fault.ANSWER_LOST])
def test_a_member_in_doubt_gives_up_its_token_before_it_reads_again(
    fault: Fault,
) -> None:
    """The partitions are claimed again, and a request under way cannot fit any more."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.fail("transact", fault=fault)
        if fault is Fault.ANSWER_LOST:
            # When it was read what the partitions have.
            stage.fail("get", first=5)
        batch = stage.batch()
        with pytest.raises(TransactionInDoubtError, match="in doubt, not failed"):
            await stage.member.write(batch)
        assert (batch.ends, stage.member.positions) == (["again"], {})
        assert stage.prepared() != []
        (token,) = stage.tokens()
        stage.faults.clear()
        stage.fail("delete", count=1)
        with pytest.raises(CoordinationError):
            await stage.member.claim(ZERO)
        assert stage.tokens() == (token,)
        calls = stage.world.server.calls
        del calls[:]
        assert await stage.member.claim(ZERO)
        dropped = calls.index(("delete", PATHS.group_token(GROUP, token)))
        assert dropped < calls.index(("get", PATHS.group_decision(GROUP, ZERO)))
        assert stage.tokens() == ()
        await asyncio.sleep(1)
        assert stage.prepared() == []
        await stage.finish()

    play(story)


def test_a_member_in_doubt_gives_up_its_token_when_it_is_closed() -> None:
    """Its token would keep others from rolling back, for as long as its session."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.fail("transact")
        with pytest.raises(TransactionInDoubtError):
            await stage.member.write(stage.batch())
        assert len(stage.tokens()) == 1
        await stage.member.decisions.close(deadline_s=CLOCK.monotonic_s() + 1)
        assert stage.tokens() == ()
        await stage.finish()

    play(story)


def test_an_answer_that_is_lost_once_is_no_doubt() -> None:
    """The request is sent again, and the nodes say that it was ours."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        for fault in (Fault.ANSWER_LOST, Fault.FAILED):
            stage.fail("transact", fault=fault, count=1)
            batch = stage.batch()
            await stage.member.write(batch)
            assert batch.ends == ["handled"]
            assert set(stage.member.positions) == {*INPUTS}
        await stage.finish()

    play(story)


def test_a_request_that_fails_before_it_is_sent_leaves_no_doubt() -> None:
    """Parents of nodes could not be made: all is rolled back at once."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.fail("replace")
        began_s = CLOCK.monotonic_s()
        with pytest.raises(CoordinationError) as caught:
            await stage.member.write(stage.batch())
        assert not isinstance(caught.value, TransactionInDoubtError)
        assert CLOCK.monotonic_s() - began_s < 2 * REQUEST_S
        assert stage.asked.count("replace") > 2
        assert "transact" not in stage.asked
        assert (stage.prepared(), stage.member.positions) == ([], {})
        await stage.finish()

    play(story)


def test_a_block_waits_for_zookeeper_before_it_begins() -> None:
    """A loop that asks for the next batch at once would spin while it is away."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        began_s = CLOCK.monotonic_s()
        stage.fail("create_ephemeral", count=3)
        batch = stage.batch()
        await stage.member.write(batch)
        assert batch.ends == ["handled"]
        assert CLOCK.monotonic_s() > began_s
        await stage.finish()

    play(story)


def test_a_block_begins_only_with_partitions_that_are_ours_after_the_wait() -> None:
    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.fail("create_ephemeral")
        writing = asyncio.create_task(stage.member.write(stage.batch()))
        await asyncio.sleep(0.01)
        stage.world.server.expire(stage.member.raw)
        with pytest.raises(OwnershipLostError):
            await writing
        stage.faults.clear()
        await asyncio.sleep(1)
        await stage.claim()
        await stage.finish()

    play(story)


def test_an_error_that_time_does_not_heal_is_not_waited_for() -> None:
    """A damaged node: nothing is sent, and nothing is repeated."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        path = PATHS.group_decision(GROUP, ONE)
        stage.world.server.write(path, b"damaged")
        began_s = CLOCK.monotonic_s()
        with pytest.raises(PayloadError, match=path):
            await stage.member.write(stage.batch())
        assert CLOCK.monotonic_s() == began_s
        assert stage.prepared() == []
        stage.world.server.remove(path)
        await stage.finish()

    play(story)


# -- a session that is over ------------------------------------------------------------


@pytest.mark.parametrize("is_new", [False, True])
def test_nothing_is_decided_under_another_session_than_that_of_the_claims(
    is_new: bool,
) -> None:
    """Its owner nodes may be there yet: the request would fit, and is not sent."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        batch = stage.batch()
        tx = batch.block()
        await tx.__aenter__()
        session_id = stage.member.raw.status.session_id
        stage.member.raw.report(SessionEvent.EXPIRED)
        if is_new:
            stage.member.raw.connect()
        for partition in INPUTS:
            stage.member.decisions.hold(partition, None, Offset(0))
        with pytest.raises(OwnershipLostError, match="lost"):
            await tx.__aexit__(None, None, None)
        assert "transact" not in stage.asked
        stage.world.server.reap(session_id)
        stage.member.raw.connect()
        await asyncio.sleep(1)
        await stage.finish()

    play(story)


def test_a_session_that_ends_after_an_answer_was_lost_leaves_it_in_doubt() -> None:
    """A server that is late would say that it was not carried out."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.fail("transact", fault=Fault.ANSWER_LOST, count=1)
        # After the refusal, and before it is found out why.
        stage.fail("get", fault=Fault.SESSION_LOST_BEFORE, first=5, count=1)
        stage.world.lag = lambda count: count
        with pytest.raises(TransactionInDoubtError, match="session of the claims"):
            await stage.member.write(stage.batch())
        stage.world.lag = lambda _count: 0
        assert stage.prepared() != []
        await stage.finish()

    play(story)


def test_a_session_that_ends_after_a_refusal_leaves_no_doubt() -> None:
    """The request was refused, and no other was sent: it is not decided."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        await stage.member.write(stage.batch())
        node = stage.world.server.nodes[PATHS.group_offset(GROUP, ZERO)]
        stage.world.server.write(PATHS.group_offset(GROUP, ZERO), node.data)
        stage.fail("get", fault=Fault.SESSION_LOST_AFTER, first=4, count=1)
        with pytest.raises(OwnershipLostError, match="session of the claims is lost"):
            await stage.member.write(stage.batch())
        assert stage.prepared() == []
        await stage.finish()

    play(story)


def test_a_new_session_has_a_token_of_its_own() -> None:
    """That of the last one is gone; the first batch after it is written."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        await stage.member.write(stage.batch())
        first = stage.tokens()
        stage.world.server.expire(stage.member.raw)
        await asyncio.sleep(1)
        await stage.claim()
        await stage.member.write(stage.batch())
        assert len(stage.tokens()) == 1
        assert stage.tokens() != first
        await stage.finish()

    play(story)


# -- what others have written ----------------------------------------------------------


def test_a_tool_that_writes_the_same_offset_is_no_other_member() -> None:
    """The request is sent again over what is there now."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        await stage.member.write(stage.batch())
        path = PATHS.group_offset(GROUP, ZERO)
        stage.world.server.write(path, stage.world.server.nodes[path].data)
        await stage.member.write(stage.batch())
        assert stage.asked.count("transact") == 3
        await stage.finish()

    play(story)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("what", ["offset", "decision"])
def test_a_batch_does_not_follow_what_others_have_written(
    what: str, is_first: bool
) -> None:
    """An offset that was moved, or a decision about the same partition."""

    async def story(stage: Stage) -> None:
        server = stage.world.server
        await stage.claim()
        if not is_first:
            await stage.member.write(stage.batch())
        batch = stage.batch()
        if what == "offset":
            server.write(PATHS.group_offset(GROUP, ONE), b"7-5")
        else:
            foreign = make_decision(batch_xid(GROUP, "g_x", "0f" * 16, 1), [])
            server.write(PATHS.group_decision(GROUP, ONE), foreign.encode())
        before, logs = server.tree(), stage.logs()
        with pytest.raises(OwnershipLostError, match=r"another member or a tool"):
            await stage.member.write(batch)
        changed = {
            path
            for path, node in server.tree().items()
            if before.get(path) != node and node.data
        }
        assert not [one for one in changed if "/tokens/" not in one]
        assert (stage.logs(), stage.prepared()) == (logs, [])
        assert stage.member.positions == {}
        assert await stage.member.claim(ONE)
        assert stage.member.positions[ONE] == (
            5 if what == "offset" else batch.begins[ONE]
        )

    play(story)


def test_where_others_have_gone_on_since_our_decision_is_read_anew() -> None:
    """It is decided, for one partition says so; of the other we know nothing more."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        server = stage.world.server
        stage.fail("transact", fault=Fault.ANSWER_LOST, count=1)
        answered = stage.choose

        def choose(who: Member, name: str) -> Fault | None:
            fault = answered(who, name)
            if name == "transact" and who is stage.member and fault is None:
                foreign = make_decision(batch_xid(GROUP, "g_x", "0f" * 16, 1), [])
                server.write(PATHS.group_decision(GROUP, ONE), foreign.encode())
                server.write(PATHS.group_offset(GROUP, ONE), b"7-4")
                server.remove(PATHS.owner(GROUP, ONE))
            return fault

        stage.world.choose = choose
        await stage.member.write(stage.batch())
        assert stage.member.positions == {ZERO: 2}
        assert stage.prepared() == []
        stage.world.choose = stage.choose
        assert await stage.member.claim(ONE)
        assert stage.member.positions[ONE] == 4

    play(story)


@pytest.mark.parametrize("what", ["owner", "token"])
def test_a_request_that_can_never_fit_is_sent_once(what: str) -> None:
    """Nothing has changed but that the partition, or the token, is not ours."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        await stage.member.write(stage.batch())
        path = PATHS.owner(GROUP, ONE)
        if what == "token":
            path = PATHS.group_token(GROUP, stage.tokens()[0])
        stage.world.server.remove(path)
        before = stage.asked.count("transact")
        with pytest.raises(OwnershipLostError, match="another member may own"):
            await stage.member.write(stage.batch())
        assert stage.asked.count("transact") == before + 1
        assert stage.prepared() == []
        await stage.finish()

    play(story)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_partition_that_went_is_not_decided_about(is_open: bool) -> None:
    """Before the block nothing is sent; within it all is rolled back."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        batch = stage.batch()
        tx = batch.block()
        if is_open:
            await tx.__aenter__()
            tx.add("out", [OutgoingMessage(b"x", partition="0")])
        stage.member.decisions.release([ONE])
        end = tx.__aexit__(None, None, None) if is_open else tx.__aenter__()
        with pytest.raises(OwnershipLostError, match="lost while its messages"):
            await end
        assert "transact" not in stage.asked
        assert is_open or stage.tokens() == ()
        assert (stage.prepared(), stage.logs()) == ([], 0)
        if not is_open:
            assert stage.member.positions == batch.begins

    play(story)


def test_a_batch_of_which_a_partition_went_is_delivered_again() -> None:
    """Also what is left of it, and where the partition is ours again by then."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        batch = stage.batch()
        batch.lost.append(ONE)
        with pytest.raises(OwnershipLostError, match="lost before its messages"):
            await stage.member.write(batch)
        assert (stage.member.positions, stage.tokens()) == (batch.begins, ())
        await stage.member.write(stage.batch())
        assert stage.member.positions == batch.offsets

    play(story)


# -- one batch after the other ---------------------------------------------------------


def test_the_next_batch_waits_until_the_last_one_is_complete() -> None:
    """A decision that makes way is complete: else none would name what is left."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        first = stage.batch()
        stage.fail("COMMIT_TWO_PHASE")
        with pytest.raises(
            TransactionInDoubtError, match="input is not delivered again"
        ):
            await stage.member.write(first)
        assert stage.member.positions == first.offsets
        second = stage.batch()
        with pytest.raises(TransactionInDoubtError, match="has not committed it yet"):
            await stage.member.write(second)
        assert stage.asked.count("transact") == 1
        assert stage.member.positions == second.begins
        stage.faults.clear()
        await stage.member.write(stage.batch())
        assert stage.prepared() == []
        await stage.finish()

    play(story)


def test_a_commit_that_was_carried_out_is_not_taken_for_a_loss() -> None:
    """Its answer was lost, and no other came before the deadline."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        answered = stage.choose
        count = 0

        def choose(who: Member, name: str) -> Fault | None:
            nonlocal count
            answered(who, name)
            if name != "COMMIT_TWO_PHASE":
                return None
            count += 1
            return Fault.ANSWER_LOST if count <= len(BROKERS) else Fault.FAILED

        stage.world.choose = choose
        with pytest.raises(TransactionInDoubtError):
            await stage.member.write(stage.batch())
        assert stage.prepared() == []
        stage.world.choose = stage.choose
        await stage.member.write(stage.batch())
        await stage.finish()

    play(story)


def test_a_commit_whose_answer_is_lost_is_sent_again_and_is_no_loss() -> None:
    """The broker does not know the branch any more, for it has committed it."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.fail("COMMIT_TWO_PHASE", fault=Fault.ANSWER_LOST, count=len(BROKERS))
        await stage.member.write(stage.batch())
        assert stage.asked.count("COMMIT_TWO_PHASE") == 2 * len(BROKERS)
        await stage.finish()

    play(story)


def test_a_batch_is_committed_once_where_each_broker_has_a_part() -> None:
    """Not again with the next one; and each batch has an id of its own."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        keys = set()
        for _ in range(2):
            del stage.asked[:]
            tx = stage.batch().block()
            await tx.__aenter__()
            keys.add(tx.id)
            for broker_id in BROKERS:
                tx.add("out", [OutgoingMessage(b"0 0", partition=str(broker_id))])
            await tx.__aexit__(None, None, None)
            assert tx.id == ""
            assert stage.asked.count("COMMIT_TWO_PHASE") == len(BROKERS)
            with pytest.raises(TransactionError, match="no exactly-once block is open"):
                tx.add("out", [])
        assert len(keys) == 2

    play(story)


def test_a_broker_that_has_nothing_to_commit_is_not_named() -> None:
    """It has ended its part, and would know nothing of a commit."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        tx = stage.batch().block()
        await tx.__aenter__()
        tx.add("out", [OutgoingMessage(b"0 0", partition="0")])
        await tx.flush()
        transactions = stage.world.brokers[BROKERS[0]].transactions
        for kind in (TransactionType.ROLLBACK, TransactionType.BEGIN):
            transactions.answer(TransactionCommand(xid_of(tx), "none", kind, 1), None)
        await tx.__aexit__(None, None, None)
        assert stage.asked.count("COMMIT_TWO_PHASE") == 0

    play(story)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
def test_messages_that_a_broker_lost_after_the_decision_are_missed(
    is_ours: bool, is_known: bool
) -> None:
    """Only the next owner of the partition may have committed what is unknown now."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        tx = stage.batch().block()
        await tx.__aenter__()
        tx.add("out", [OutgoingMessage(b"0 0", partition="0")])
        stage.lose_before_the_commit(xid_of(tx), is_known=is_known, is_ours=is_ours)
        if is_ours or is_known:
            with pytest.raises(LostBranchError, match="at broker 0 are missing"):
                await tx.__aexit__(None, None, None)
        else:
            await tx.__aexit__(None, None, None)

    play(story)


def test_a_branch_that_could_not_be_rolled_back_is_so_with_the_next_batch() -> None:
    """While its member is alive no other one does it; it is tried until it is done."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        batch = stage.batch()
        tx = batch.block()
        await tx.__aenter__()
        for broker_id in BROKERS:
            tx.add("out", [OutgoingMessage(b"0 0", partition=str(broker_id))])
        stage.fail("PREPARE", first=2, count=1)
        stage.fail("ROLLBACK")
        with pytest.raises(NoBrokerError):
            await tx.__aexit__(None, None, None)
        assert "transact" not in stage.asked
        assert stage.member.positions == batch.begins
        assert len(stage.prepared()) == 2
        await stage.member.write(stage.batch())
        assert len(stage.prepared()) == 2
        stage.faults.clear()
        await stage.member.write(stage.batch())
        assert stage.prepared() == []
        del stage.asked[:]
        await stage.member.write(stage.batch())
        assert "ROLLBACK" not in stage.asked
        await stage.member.close()
        await heal(stage.world, [stage.member])
        check(stage.world, [stage.member])

    play(story)


def test_a_message_that_failed_has_the_block_rolled_back() -> None:
    """Later sends say so, and nothing is prepared."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        batch = stage.batch()
        tx = batch.block()
        await tx.__aenter__()
        tx.add("out", [OutgoingMessage(b"0 0", partition="0")])
        stage.fail("PUT")
        with pytest.raises(NoBrokerError):
            await tx.flush()
        with pytest.raises(TransactionError, match="has failed, and is rolled back"):
            tx.add("out", [])
        with pytest.raises(TransactionError, match="has failed"):
            await tx.__aexit__(None, None, None)
        assert "PREPARE" not in stage.asked
        assert stage.member.positions == batch.begins
        await stage.finish()

    play(story)


def test_a_block_that_is_cancelled_before_the_decision_is_rolled_back() -> None:
    """While it waits for the promises of its brokers; the batch comes again."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.world.pause_s = lambda: 0.05
        batch = stage.batch()
        task = asyncio.create_task(stage.member.write(batch))
        while "PREPARE" not in stage.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (stage.prepared(), batch.ends) == ([], ["again"])
        assert stage.member.positions == batch.begins
        assert "transact" not in stage.asked
        stage.world.pause_s = lambda: 0.0
        await stage.finish()

    play(story)


def test_a_batch_is_written_again_where_the_user_went_back() -> None:
    """Else it is refused, and what is stored is read again: the group is past it."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        first = stage.batch()
        await stage.member.write(first)
        with pytest.raises(TransactionError, match="write each batch once"):
            await stage.member.write(first)
        assert stage.member.positions == {}
        await stage.claim()
        assert stage.member.positions == first.offsets
        for partition in INPUTS:
            stage.member.decisions.move(partition, Offset(0))
        await stage.member.write(first)
        assert stage.asked.count("transact") == 2

    play(story)


def test_a_batch_of_an_earlier_claim_is_not_written() -> None:
    """Since the claim its messages are read again, together with later ones maybe."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        batch = stage.batch()
        tx = batch.block()
        await tx.__aenter__()
        await stage.member.leave()
        await stage.claim()
        with pytest.raises(OwnershipLostError, match="delivered again"):
            await tx.__aexit__(None, None, None)
        assert (batch.ends, stage.logs()) == (["again"], 0)
        assert "transact" not in stage.asked
        await stage.finish()

    play(story)


def test_a_partition_is_not_given_up_during_a_decision() -> None:
    """Its next owner reads what is decided, and not what was before it."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.world.pause_s = lambda: 0.05
        task = asyncio.create_task(stage.member.write(stage.batch()))
        while "transact" not in stage.asked:
            await asyncio.sleep(0.01)
        await stage.member.decisions.wait_idle(deadline_s=CLOCK.monotonic_s() + 1)
        assert PATHS.group_decision(GROUP, ZERO) in stage.world.server.nodes
        await task
        await stage.finish()

    play(story)


# -- the end ---------------------------------------------------------------------------


def test_a_close_completes_rolls_back_and_gives_up_the_token() -> None:
    """The next member has nothing to wait for."""

    async def story(stage: Stage) -> None:
        await stage.claim()
        stage.fail("PREPARE", first=2, count=1)
        stage.fail("ROLLBACK", count=4)
        tx = stage.batch().block()
        await tx.__aenter__()
        for broker_id in BROKERS:
            tx.add("out", [OutgoingMessage(b"0 0", partition=str(broker_id))])
        with pytest.raises(NoBrokerError):
            await tx.__aexit__(None, None, None)
        stage.fail("COMMIT_TWO_PHASE")
        with pytest.raises(TransactionInDoubtError):
            await stage.member.write(stage.batch())
        assert len(stage.prepared()) == 4
        stage.faults.clear()
        await stage.member.decisions.close(deadline_s=CLOCK.monotonic_s() + 1)
        assert stage.prepared() == []
        assert stage.logs() > 0
        assert stage.tokens() == ()
        await heal(stage.world, [stage.member])
        check(stage.world, [stage.member])

    play(story)


def test_a_close_that_cannot_do_it_says_so_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next member does; so does one that never wrote anything, and asks nothing."""

    async def story(stage: Stage) -> None:
        await stage.member.decisions.close(deadline_s=CLOCK.monotonic_s() + 1)
        assert stage.asked == []
        await stage.claim()
        await stage.member.write(stage.batch())
        stage.fail("delete")
        await stage.member.decisions.close(deadline_s=CLOCK.monotonic_s() + 1)
        assert "not ended: group=g: delete: connection lost" in caplog.text
        await heal(stage.world, [stage.member])
        check(stage.world, [stage.member])

    play(story)
