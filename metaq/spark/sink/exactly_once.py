"""Transaction manager of an exactly-once write, on the driver.

    begin     before the tasks: commit or roll back branches left by former runs
    decide    once all tasks are prepared: store the decision, in one write to ZooKeeper
    complete  commit every decided branch; retry while a broker is away
    give_up   after a failed write: roll back what it prepared
    settle    by an operator: end the branches of a dead driver as was decided

`decisions.py` has the rules that keep any number of drivers consistent. Requests use
the client of `cluster.py`; a step interrupted at any point is repeated by the next run
of the batch.

Source: docs/metaq-1.4/client.md 9.3; docs/metaq-1.4/broker.md 5.4 to 5.8.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from metaq.client.cluster.context import ClientContext
from metaq.client.errors import LostBranchError
from metaq.client.fan_out import answers
from metaq.client.names import name_few
from metaq.client.offsets.query_progress import (
    change_decision,
    forget_decision,
    read_decision,
)
from metaq.client.produce.branch_endings import (
    FOREIGN_START_S,
    LOST,
    BranchEndings,
    Found,
    silent_brokers,
)
from metaq.client.produce.branch_fates import Placed, Recovery
from metaq.client.produce.xa_commands import COMMIT, ROLLBACK, key_of
from metaq.client.session import AsyncClient, context_of
from metaq.errors import MetaqError, WireError
from metaq.model import BrokerId, Millis
from metaq.spark.errors import IncompleteError, NoTransactionsError, TakenOverError
from metaq.spark.sink.decisions import (
    BATCH_WRITE,
    Decision,
    QueryRecord,
    WriteTerms,
    name_branches,
    plan_recovery,
)

SHOWN_MAX: Final = 3
"""Maximum number of causes, and of keys, in an error."""


class TransactionManager:
    """Manager of the transactions of a query or a batch write, for one step.

    Owner: the caller of the step, on the client's loop. Only the node keeps state
    between steps.
    """

    def __init__(
        self,
        context: ClientContext,
        deadline_s: float,
        *,
        name: str,
        place: str,
        draw_turn: Callable[[], str],
        foreign_start_s: float = FOREIGN_START_S,
    ) -> None:
        """Prepare a step; nothing is sent.

        Args:
            context: the client's parts.
            deadline_s: on the client's monotonic clock.
            name: name of the query's nodes, and its qualifier at brokers.
            place: name of the query for operators; "" keeps the stored one.
            draw_turn: returns a new unique text on each call.
            foreign_start_s: see `FOREIGN_START_S`.
        """
        self._context = context
        self._deadline_s = deadline_s
        self._name = name
        self._place = place
        self._draw_turn = draw_turn
        self._endings = BranchEndings(
            context, deadline_s, name=name, foreign_start_s=foreign_start_s
        )
        self._promised_ms: Millis | None = None

    # -- steps ------------------------------------------------------------------------

    async def begin(self, brokers: Collection[BrokerId]) -> WriteTerms:
        """End the branches of former runs, and return the terms of the tasks.

        Args:
            brokers: brokers to which the tasks will write, as far as known.

        Raises:
            NoTransactionsError: one of these brokers refuses transactions.
            DecisionError: the content of the node is invalid.
        """
        record = await self._read()
        found = await self._endings.look()
        for broker_id in brokers:
            error = found.get(broker_id)
            if isinstance(error, WireError):
                raise NoTransactionsError(
                    "delivery=exactly-once needs transactions, which broker"
                    f" {broker_id} refuses: {error}; delivery=at-least-once needs none"
                ) from error
        record = await self._clear(found, record)
        decision = record.decision
        if decision is None:
            return WriteTerms(record.turn)
        return WriteTerms(record.turn, decision.query, decision.batch)

    async def decide(self, decision: Decision, terms: WriteTerms) -> str:
        """Store a decision; durable on return. Returns the turn of the decision.

        Raises:
            TakenOverError: another driver has taken over; these tasks will be rolled
                back.
            DecisionError: the decision is too large.
            IncompleteError: as `complete`, about the last batch of a former query.
            CoordinationError: ZooKeeper is not available; the batch may be decided.
        """
        if terms.query not in (None, decision.query):
            # Spark guarantees a completed last commit only within one query.
            former = (await self._read()).decision
            if former is not None:
                await self._commit_all(former, None)
        drawn = self._draw_turn()

        def change(kept: bytes | None) -> bytes:
            record = QueryRecord.decode(kept)
            if kept is not None and record.decision == decision:
                return kept
            if record.turn != terms.turn:
                raise TakenOverError(
                    f"batch {decision.batch} of query {decision.query} is not written:"
                    f" another driver writes with the checkpoint {self._place}, and has"
                    " taken over in between; let only one of them go on"
                )
            return QueryRecord(drawn, self._place, decision).encode()

        await change_decision(
            self._context, self._name, change, deadline_s=self._deadline_s
        )
        return drawn

    async def complete(
        self,
        decision: Decision | None = None,
        turn: str | None = None,
        promised_ms: Millis | None = None,
    ) -> Decision | None:
        """Commit the branches of the decided batch, and roll back its other ones.

        Args:
            decision: a new decision; None takes the stored one of an earlier run.
            turn: turn of a new decision.
            promised_ms: when its first branch was prepared; None if not known.

        Returns:
            The decision; None if there is none.

        Raises:
            IncompleteError: not all branches are committed.
        """
        if decision is None:
            record = await self._read()
            if record.decision is not None:
                record = await self._void(record.turn)
            decision = record.decision
        if decision is None:
            return None
        self._promised_ms = promised_ms
        await self._commit_all(decision, turn)
        found = await self._endings.look()
        recovery = self._plan(found, QueryRecord(decision=decision))
        await self._endings.end(ROLLBACK, recovery.superseded)
        return decision

    async def give_up(
        self, branches: Collection[Placed], turn: str | None
    ) -> Decision | None:
        """Roll back the branches of a run, unless the node names them.

        Tasks may still be running. Branches prepared before the new turn are listed by
        brokers; a task that prepares later sees the new turn.

        Args:
            branches: branches of the tasks that have returned.
            turn: turn under which the tasks were planned; None if not known.

        Returns:
            The decision of the node.

        Raises:
            CoordinationError: ZooKeeper is not available; branches stay prepared.
        """
        record = await self._read()
        is_last = turn in (None, record.turn)
        if is_last:
            record = await self._void(turn)
        named = {} if record.decision is None else record.decision.xids(self._name)
        lost = [one for one in branches if one[0] not in named.get(one[1], ())]
        await self._endings.end(ROLLBACK, lost)
        if is_last:
            record = await self._clear(await self._endings.look(), record)
        return record.decision

    async def settle(self) -> Decision | None:
        """End the branches of a dead driver; return its decision.

        Branches named by the decision are committed; all others prepared under the name
        are rolled back. If the driver is still alive, it can no longer decide, and its
        tasks roll back what they prepare.

        Raises:
            IncompleteError: not all branches are committed, or a recorded broker does
                not confirm that none is left.
        """
        await self._void()
        await self.begin(())
        await self.complete(None)
        record = await self._read()
        await self._require_ended(record)
        return record.decision

    async def _require_ended(self, record: QueryRecord) -> None:
        """Raise IncompleteError unless every broker confirms that no branch is left."""
        decision = record.decision
        what = "nothing is decided"
        if decision is not None:
            what = f"batch {decision.batch} is decided and committed"
        found = await self._endings.look()
        silent = await silent_brokers(self._context, found, deadline_s=self._deadline_s)
        if silent:
            errors = [of for of in found.values() if isinstance(of, MetaqError)]
            why = f": {errors[0]}" if errors else ""
            raise IncompleteError(
                f"{self._name}: {what}, but brokers {name_few(list(map(str, silent)))}"
                f" did not report their prepared transactions{why}; settle it again"
                " when they are present"
            )
        left = [placed for fate in self._plan(found, record) for placed in fate]
        if left:
            raise IncompleteError(
                f"{self._name}: {what}, but {len(left)} branches stay prepared"
                f" ({name_branches(left)}); settle it again"
            )

    async def forget(self) -> None:
        """Delete the complete decision of a write that will not be repeated."""
        await forget_decision(self._context, self._name, deadline_s=self._deadline_s)

    # -- ZooKeeper --------------------------------------------------------------------

    async def _read(self) -> QueryRecord:
        data = await read_decision(
            self._context, self._name, deadline_s=self._deadline_s
        )
        return QueryRecord.decode(data)

    async def _void(self, turn: str | None = None) -> QueryRecord:
        """Store a new turn, so that runs planned before can no longer decide.

        With `turn`, only if that is the current one.
        """
        drawn = self._draw_turn()

        def change(kept: bytes | None) -> bytes:
            record = QueryRecord.decode(kept)
            is_due = record.turn != drawn and turn in (None, record.turn)
            if kept is not None and not is_due:
                return kept
            place = self._place or record.place
            return replace(record, turn=drawn, place=place).encode()

        data = await change_decision(
            self._context, self._name, change, deadline_s=self._deadline_s
        )
        return QueryRecord.decode(data)

    # -- brokers ----------------------------------------------------------------------

    async def _clear(self, found: Found, record: QueryRecord) -> QueryRecord:
        """End prepared branches found at brokers; return the node, which has a turn."""
        recovery = self._plan(found, record)
        if recovery.undecided:
            record = await self._void()
            recovery = self._plan(found, record)
            await self._endings.end(ROLLBACK, recovery.undecided)
        elif recovery.commit or not record.turn:
            # The new turn explains missing branches to the driver that decided, and
            # ends the tasks of a write whose node was deleted.
            record = await self._void()
        await self._endings.end(COMMIT, recovery.commit)
        await self._endings.end(ROLLBACK, recovery.superseded)
        return record

    def _plan(self, found: Found, record: QueryRecord) -> Recovery:
        return plan_recovery(answers(found), record.decision, self._name)

    async def _commit_all(self, decision: Decision, turn: str | None) -> None:
        """Commit the branches of a durable decision.

        Args:
            decision: the decision.
            turn: turn of a new decision; None if a run may have begun to commit it.

        Raises:
            IncompleteError: not all branches are committed.
        """
        branches = [
            (broker_id, xid)
            for xid, brokers in decision.xids(self._name).items()
            for broker_id in brokers
        ]
        failed = await self._endings.commit(
            branches, was_sent=turn is None, promised_ms=self._promised_ms
        )
        unknown = [
            k for k, error in failed.items() if isinstance(error, LostBranchError)
        ]
        if unknown and (await self._read()).turn != turn:
            # Another driver has taken over since, and has committed them.
            failed = {k: error for k, error in failed.items() if k not in unknown}
        lost = [one for one, error in failed.items() if isinstance(error, LOST)]
        named = lost or list(failed)
        if not named:
            return
        causes = "; ".join(sorted({str(failed[one]) for one in named})[:SHOWN_MAX])
        keys = " ".join(key_of(xid) for _, xid in named[:SHOWN_MAX])
        what = f"batch {decision.batch} of query {decision.query} is decided, but"
        where = f"{len(named)} of {len(branches)} branches ({name_branches(named)})"
        if lost:
            raise IncompleteError(
                f"{what} rows of {where} are missing: {causes}. {self._cure()} the"
                f" batch without them; their keys: {keys}"
            ) from failed[named[0]]
        raise IncompleteError(
            f"{what} {where} stay prepared: {causes}. {self._cure()} the batch"
            f" when all brokers are there; their keys: {keys}"
        ) from failed[named[0]]

    def _cure(self) -> str:
        """Return how an error names what completes a batch."""
        settling = f"`metaq txn settle {self._name}`"
        if self._name.startswith(BATCH_WRITE):
            return f"Do not write the rows again: {settling} completes"
        return f"The query, started again with its checkpoint, or {settling} completes"


async def settle_write(
    client: AsyncClient,
    name: str,
    *,
    is_batch_write: bool,
    draw_turn: Callable[[], str],
    foreign_start_s: float = FOREIGN_START_S,
) -> Decision | None:
    """Settle by hand: commit what was decided at all brokers, roll back the rest.

    A MetaQ 1.4 broker that has committed its part already says that it knows nothing of
    it, and is believed after `foreign_start_s`, so all takes that long there.

    Args:
        client: started.
        name: of the write's nodes, and its qualifier at brokers.
        is_batch_write: no later batch needs its decision, which is forgotten.
        draw_turn: returns a text that it never returned before.
        foreign_start_s: how long a MetaQ 1.4 broker may take to know its branches.

    Returns:
        What was decided; None for nothing.
    """
    context = context_of(client)
    manager = TransactionManager(
        context,
        context.deadline_s() + foreign_start_s,
        name=name,
        place="",
        draw_turn=draw_turn,
        foreign_start_s=foreign_start_s,
    )
    decision = await manager.settle()
    if is_batch_write and decision is not None:
        await manager.forget()
    return decision
