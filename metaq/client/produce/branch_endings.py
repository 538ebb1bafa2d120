"""Ends prepared branches as their transaction manager has decided.

    look      ask all brokers for the branches prepared under one name
    commit    commit decided branches; retry while a broker is away
    end       commit or roll back once; the next `look` finds what is left

All transaction managers here use it: the Spark sink (`spark/sink`) and consumers that
write exactly once (`client/decisions`). They decide which branches are committed, and
store the decision.

Source: docs/metaq-1.4/client.md 9.3; docs/metaq-1.4/broker.md 5.4 to 5.8.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from metaq.client.cluster.catalog import read_cluster, recorded_addresses
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import BACKOFF
from metaq.client.errors import (
    HeuristicError,
    LostBranchError,
    UnknownXidError,
    XaRolledBackError,
)
from metaq.client.fan_out import all_for, answers, failures, for_each
from metaq.client.produce.attempts import NEVER_LEFT
from metaq.client.produce.branch_fates import Placed
from metaq.client.produce.broker_starts import BrokerStarts
from metaq.client.produce.transaction_branch import BranchParts
from metaq.client.produce.transaction_replies import HEURCOM, HEURHAZ, HEURRB
from metaq.client.produce.xa_commands import (
    COMMIT,
    FORGET,
    ROLLBACK,
    XaCommands,
    XaEnd,
    key_of,
)
from metaq.errors import MetaqError
from metaq.model import BrokerAddress, BrokerId, Millis, XaTransactionId

Found: TypeAlias = Mapping[BrokerId, tuple[XaTransactionId, ...] | MetaqError]
"""Broker → the branches that it lists as prepared, or its error."""

Outcomes: TypeAlias = dict[XaTransactionId, MetaqError | None]
"""Branch at a broker → the error of its commit or rollback; None on success."""

LOOK_S: Final = 10.0
"""Seconds that a broker has to list its prepared branches, or to end some. One that
does not answer in time is asked again in the next step."""
LOST: Final = (LostBranchError, HeuristicError, XaRolledBackError)
"""Errors after which a decided branch can never be committed."""
AGREEING: Final = {COMMIT: (HEURCOM,), ROLLBACK: (HEURRB, HEURHAZ)}
"""XaEnd → heuristic outcomes with the same effect."""
FOREIGN_START_S: Final = 45.0
"""Seconds for which a MetaQ 1.4 broker must report a branch as unknown before that is
believed. It accepts connections before it has recovered its prepared transactions
(docs/metaq-1.4/broker.md 5.7), and recovers none while ZooKeeper still has its old
node: 30 s by default."""

_log = logging.getLogger(__name__)


class BranchEndings:
    """Ends the branches of one transaction manager, during one of its steps.

    Owner: the step, on the client's loop.
    """

    def __init__(
        self,
        context: ClientContext,
        deadline_s: float,
        *,
        name: str,
        foreign_start_s: float = FOREIGN_START_S,
    ) -> None:
        """Prepare; no broker is asked.

        Args:
            context: the client's parts.
            deadline_s: end of the step, on the client's monotonic clock.
            name: qualifier of the manager's branches.
            foreign_start_s: see `FOREIGN_START_S`.
        """
        self._context = context
        self._deadline_s = deadline_s
        self._name = name
        self._foreign_start_s = foreign_start_s
        self._parts = BranchParts(
            address_of=self._address_of,
            pool=context.pool,
            clock=context.clock,
            session_id=name,
            starts=BrokerStarts(context.clock),
        )
        self._commands = XaCommands(context, self._parts)
        self._unknown_since_s: dict[BrokerId, float] = {}
        self._promised_ms: Millis | None = None

    async def look(self) -> Found:
        """Ask every registered broker for its prepared branches."""
        snapshot = await read_cluster(self._context, (), deadline_s=self._deadline_s)
        found = await self._commands.recover_each(
            self._name, snapshot.leaders(), self._soon_s(LOOK_S)
        )
        for broker_id, error in failures(found).items():
            _log.warning(
                "broker did not report its prepared transactions: broker=%d error=%s",
                broker_id,
                error,
            )
        return found

    async def end(self, action: XaEnd, branches: Iterable[Placed]) -> set[Placed]:
        """Commit or roll back branches once; return any that may still be prepared."""
        deadline_s = self._soon_s(LOOK_S)
        found = await _at_each(
            branches, partial(self._say, action=action, deadline_s=deadline_s)
        )
        failed = {k: e for k, e in found.items() if not isinstance(e, UnknownXidError)}
        for (broker_id, xid), error in failed.items():
            _log.warning(
                "branch not ended as decided: broker=%d transaction=%s action=%s"
                " error=%s",
                broker_id,
                key_of(xid),
                action.name,
                error,
            )
        return {*failed}

    async def commit(
        self,
        branches: Iterable[Placed],
        *,
        was_sent: bool,
        promised_ms: Millis | None = None,
    ) -> dict[Placed, MetaqError]:
        """Commit branches of a durable decision; return the errors of failed ones.

        Retries until the deadline while a broker is away.

        Args:
            branches: the branches to commit.
            was_sent: their commit may have been sent before: a broker that does not
                know a branch has committed it.
            promised_ms: when the first of them was prepared; None if not known.
        """
        self._promised_ms = promised_ms
        return await _at_each(branches, partial(self._commit, was_sent=was_sent))

    # -- inside -----------------------------------------------------------------------

    def _address_of(self, broker_id: BrokerId) -> BrokerAddress | None:
        return self._context.metadata.snapshot.leader(broker_id)

    def _soon_s(self, limit_s: float) -> float:
        return min(self._deadline_s, self._context.clock.monotonic_s() + limit_s)

    async def _commit(
        self, broker_id: BrokerId, xids: Collection[XaTransactionId], *, was_sent: bool
    ) -> Outcomes:
        """Commit branches at a broker; retry until the deadline while it is away."""
        clock, tries, outcomes = self._context.clock, 0, Outcomes()
        sent = dict.fromkeys(xids, was_sent)
        while sent:
            tries += 1
            now_s, pause_s = clock.monotonic_s(), BACKOFF.delay_s(tries)
            limit_s = self._soon_s(self._context.options.request_timeout_s)
            found, start_s = await self._commit_once(broker_id, sent, limit_s)
            for xid, error in found.items():
                if isinstance(error, UnknownXidError):
                    since_s = self._unknown_since_s.setdefault(broker_id, now_s)
                    if now_s - since_s < start_s:
                        continue
                    error = None if sent[xid] else _lost(broker_id)
                elif isinstance(error, MetaqError) and not isinstance(error, LOST):
                    self._unknown_since_s.pop(broker_id, None)
                    if now_s + pause_s < self._deadline_s:
                        sent[xid] |= not isinstance(error, NEVER_LEFT)
                        continue
                outcomes[xid] = error
                del sent[xid]
            if sent:
                await asyncio.sleep(pause_s)
        return outcomes

    async def _commit_once(
        self, broker_id: BrokerId, xids: Collection[XaTransactionId], deadline_s: float
    ) -> tuple[Outcomes, float]:
        """Commit branches once; also return how long unknown ones may still appear.

        That is 0 for a broker of ours, which opens its port after recovery, and
        FOREIGN_START_S for a MetaQ 1.4 broker.
        """
        found = await self._say(broker_id, xids, action=COMMIT, deadline_s=deadline_s)
        unknown = [
            k for k, error in found.items() if isinstance(error, UnknownXidError)
        ]
        if not unknown:
            return found, 0.0
        try:
            connection = await self._parts.connect(broker_id, deadline_s=deadline_s)
        except MetaqError as error:
            return found | dict.fromkeys(unknown, error), 0.0
        is_ours = connection.capabilities.has_mput
        return found, 0.0 if is_ours else self._foreign_start_s

    async def _say(
        self,
        broker_id: BrokerId,
        xids: Collection[XaTransactionId],
        *,
        action: XaEnd,
        deadline_s: float,
    ) -> Outcomes:
        """Commit or roll back; forget heuristic outcomes with the same effect."""

        async def send(kind: XaEnd, xid: XaTransactionId) -> None:
            await self._commands.end_at(broker_id, xid, kind, deadline_s)

        if action is COMMIT:
            found = await self._commands.commit_at(
                broker_id, xids, deadline_s, self._promised_ms
            )
        else:
            found = await for_each(partial(send, action), xids)
        agreed = [
            xid
            for xid, error in found.items()
            if isinstance(error, HeuristicError) and error.code in AGREEING[action]
        ]
        found |= await for_each(partial(send, FORGET), agreed)
        return found


async def silent_brokers(
    context: ClientContext, found: Found, *, deadline_s: float
) -> list[BrokerId]:
    """Return the brokers that may have branches and did not list them, ascending.

    Includes brokers recorded in ZooKeeper that are away.
    """
    recorded = await recorded_addresses(context, deadline_s=deadline_s)
    return sorted({*recorded, *found} - answers(found).keys())


def _lost(broker_id: BrokerId) -> LostBranchError:
    return LostBranchError(
        f"broker {broker_id} no longer has it, although it was prepared there"
    )


async def _at_each(
    branches: Iterable[Placed],
    end: Callable[[BrokerId, list[XaTransactionId]], Coroutine[Any, Any, Outcomes]],
) -> dict[Placed, MetaqError]:
    """Call `end` for each broker with its branches; return the errors."""
    by_broker: dict[BrokerId, list[XaTransactionId]] = {}
    for broker_id, xid in branches:
        by_broker.setdefault(broker_id, []).append(xid)
    found = await all_for(lambda one: end(one, by_broker[one]), by_broker)
    return {
        (broker_id, xid): error
        for broker_id, outcomes in found.items()
        for xid, error in failures(outcomes).items()
    }
