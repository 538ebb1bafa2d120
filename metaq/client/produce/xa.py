"""XA transactions: two-phase commit, in the shape of Python's DB-API (PEP 249).

    xa = client.xa(qualifier="billing-1")
    xid = xa.xid(42, "global-id", "branch-1")
    await xa.begin(xid)
    await xa.send("orders", b"...")
    await xa.prepare()
    await xa.commit(xid)

Theory of operation. An XA transaction has one branch at each broker to which it sends
messages, all under the same xid. After `prepare`, each branch survives a crash of its
broker until it is committed or rolled back. Another process may do that: `recover`
lists the transactions prepared under this qualifier at any broker, and `commit` and
`rollback` accept an xid that this object never began. They then ask every broker,
because nothing records which of them have a branch: a broker without one says so, and
one that is away may have one.

Source: docs/metaq-1.4/client.md 9.3; docs/metaq-1.4/broker.md 5.4, 5.5.
"""

import asyncio
from typing import Final, NoReturn

from metaq.client.cluster.context import ClientContext
from metaq.client.errors import TransactionInDoubtError, TransactionRolledBackError
from metaq.client.fan_out import failures
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.producer import AsyncProducer
from metaq.client.produce.transaction_branch import PendingResult, TransactionSends
from metaq.client.produce.xa_commands import (
    COMMIT,
    ROLLBACK,
    XaBranches,
    XaCommands,
    listed,
    shown,
)
from metaq.client.timeouts import ClosedByBlock
from metaq.client.validation import check_timeout, check_whole, wrong_type
from metaq.errors import ConfigError, TransactionError
from metaq.model import Millis, XaTransactionId
from metaq.protocol.decimals import I32_MAX
from metaq.protocol.transaction_ids import format_key

ID_BYTES_MAX: Final = 64
"""Maximum bytes of a global id and of a branch, by the XA specification."""


def check_qualifier(qualifier: object) -> None:
    """Refuse a value that cannot be a qualifier.

    Raises:
        TypeError: not a str.
        ConfigError: empty, or with a space, a colon or an unprintable character.
    """
    if not isinstance(qualifier, str):
        raise wrong_type("qualifier", "str", qualifier)
    if (
        not qualifier
        or not qualifier.isprintable()
        or any(mark in qualifier for mark in ": ")
    ):
        raise ConfigError(
            "qualifier: expected a name without blank and colon, the same after every"
            f" restart of this program, got {qualifier!r}"
        )


class AsyncXa(TransactionSends, ClosedByBlock):
    """XA transactions, one at a time. Owner: the client that created it.

    Lifecycle: `begin`, sends, `prepare`, `commit` or `rollback`, any number of times;
    in between `recover`, and `commit` or `rollback` of the xids it returns; `close`.

    Concurrency: on the client's loop; concurrent calls run one at a time.
    """

    def __init__(
        self, context: ClientContext, producer: AsyncProducer, *, qualifier: str
    ) -> None:
        """Prepare; see `AsyncClient.xa`. `producer` is closed with this."""
        super().__init__()
        self._context = context
        self._producer = producer
        self._parts = producer.transacting
        self._commands = XaCommands(context, self._parts)
        self.qualifier: Final = qualifier
        """Name that distinguishes its transactions from those of other programs."""
        self._global: XaBranches | None = None
        self._turn = asyncio.Lock()

    def xid(
        self, format_id: int, global_id: str | bytes, branch: str | bytes = b""
    ) -> XaTransactionId:
        """Return the id of a transaction; nothing is sent.

        Args:
            format_id: 0 to 2**31 - 1; chosen by the transaction manager, which may be
                this program.
            global_id: identifies the whole transaction; at most 64 bytes, text in
                UTF-8.
            branch: identifies the part of it at the brokers, likewise.

        Raises:
            ConfigError: an argument out of range.
            TypeError: an argument of another type.
        """
        check_whole("format_id", format_id, 0, I32_MAX)
        return XaTransactionId(
            format_id,
            _id_bytes("global_id", global_id),
            _id_bytes("branch", branch),
            self.qualifier,
        )

    async def begin(self, xid: XaTransactionId, timeout: float | None = None) -> None:
        """Begin a transaction; a broker learns of it with its first message there.

        Args:
            xid: made by `xid`, and never used before.
            timeout: seconds after which a broker rolls back an unprepared branch; see
                `AsyncProducer.transaction`. None is `transaction_timeout_s` of the
                options.

        Raises:
            TransactionError: another transaction has not ended.
            ConfigError: the xid has another qualifier, or `timeout` is invalid.
        """
        lifetime_s = self._parts.lifetime_s(timeout)
        self._check_xid(xid)
        async with self._turn:
            self._require_none()
            self._forget_calls()
            self._global = XaBranches(self._parts, xid, lifetime_s)
            self._parts.counters.counts.begun_count += 1

    async def _send(
        self,
        topic: str,
        messages: list[OutgoingMessage],
        timeout: float | None,
        due_ms: Millis | None,
    ) -> list[PendingResult]:
        deadline_s = self._parts.deadline_s(timeout)
        async with self._turn:
            current = self._require_open()
            return await current.put(
                topic, messages, deadline_s=deadline_s, deliver_ms=due_ms
            )

    # -- prepare, commit, roll back ---------------------------------------------------

    async def prepare(self, timeout: float | None = None) -> bool:
        """Prepare the branch at every broker, which keeps it until commit or rollback.

        *Durability.* Each branch is durable as the broker's settings for transactions
        demand.

        Args:
            timeout: seconds; None is `timeout_s` of the options.

        Returns:
            Whether there is anything to commit. A broker has already ended an empty
            branch, to which `commit` sends nothing.

        Raises:
            TransactionInDoubtError: a broker may have prepared, and could not be
                reached for the rollback: roll the xid back later.
            TransactionRolledBackError: a message had failed, or its call was never
                awaited, or a broker did not prepare; the cause is that error.
                Everything is rolled back.
            TransactionError: no transaction is open.

        Cancellation: the transaction may be prepared; roll it back.
        """
        deadline_s, counters = self._parts.deadline_s(timeout), self._parts.counters
        async with self._turn:
            with counters.failing():
                has_work = await self._prepare(deadline_s)
            counters.counts.prepared_count += has_work
            return has_work

    async def commit(
        self, xid: XaTransactionId | None = None, timeout: float | None = None
    ) -> None:
        """Commit the current transaction, or another one that is prepared.

        An unprepared transaction with one broker is committed in one phase.

        Args:
            xid: None for the current one; any other is sent to every broker.
            timeout: seconds; None is `timeout_s` of the options.

        Raises:
            TransactionInDoubtError: a broker that was away or did not answer may have a
                branch that is not committed. Commit the xid again if it is prepared.
            UnknownXidError: no broker ever seen knows the transaction: it has ended, or
                never began.
            HeuristicError: an operator has ended it at a broker; `forget` it.
            TransactionRolledBackError: it was not prepared, and nothing is stored.
            TransactionError: it has several brokers and is not prepared; or another
                transaction is open, or none.

        Cancellation: the outcome is unknown; commit the xid again.
        """
        parts = self._parts
        deadline_s, began_s = parts.deadline_s(timeout), parts.clock.monotonic_s()
        async with self._turn:
            current = self._mine(xid)
            with parts.counters.failing():
                if current is None:
                    assert xid is not None
                    await self._commands.end_everywhere(xid, COMMIT, deadline_s)
                    parts.counters.counts.recovered_count += 1
                else:
                    await self._commit(current, deadline_s)
                    parts.counters.on_committed(parts.clock.monotonic_s() - began_s)

    async def rollback(
        self, xid: XaTransactionId | None = None, timeout: float | None = None
    ) -> None:
        """Roll back the current transaction, or another one that is prepared.

        Args:
            xid: None for the current one; any other is sent to every broker.
            timeout: seconds; None is `timeout_s` of the options.

        Raises:
            TransactionInDoubtError: a broker that was away or did not answer may keep a
                prepared branch. Roll the xid back again.
            UnknownXidError: no broker ever seen knows the transaction: it has ended, or
                never began.
            HeuristicError: an operator has ended it at a broker; `forget` it.
            TransactionError: another transaction is open, or none.

        Cancellation: the outcome is unknown; roll the xid back again.
        """
        deadline_s, counters = self._parts.deadline_s(timeout), self._parts.counters
        async with self._turn:
            current = self._mine(xid)
            with counters.failing():
                if current is None:
                    assert xid is not None
                    await self._commands.end_everywhere(xid, ROLLBACK, deadline_s)
                    counters.counts.recovered_count += 1
                else:
                    await self._roll_back(current, deadline_s)
                    counters.counts.rolled_back_count += 1

    async def recover(
        self, *, partial: bool = False, timeout: float | None = None
    ) -> list[XaTransactionId]:
        """Return the transactions prepared under this qualifier, at any broker.

        Includes heuristic outcomes that are not forgotten yet.

        Args:
            partial: return what answering brokers list, even if others are away.
            timeout: seconds; None is `timeout_s` of the options.

        Returns:
            Each xid once; [] for none.

        Raises:
            NoBrokerError: a broker that may have some is away, or there is no broker.
                A MetaQ 1.4 broker leaves no record when it stops, so only a client that
                has seen it misses it.
            MetaqError: a broker refuses, or does not answer.
        """
        deadline_s = self._parts.deadline_s(timeout)
        return await self._commands.recover(
            self.qualifier, partial=partial, deadline_s=deadline_s
        )

    async def forget(self, xid: XaTransactionId, timeout: float | None = None) -> None:
        """Make every broker forget a heuristic outcome.

        Args:
            xid: of any transaction under this qualifier.
            timeout: seconds; None is `timeout_s` of the options.

        Raises:
            NoBrokerError: a broker is away; the others have forgotten it.
            MetaqError: a broker refuses, or does not answer.
        """
        deadline_s = self._parts.deadline_s(timeout)
        self._check_xid(xid)
        await self._commands.forget(xid, deadline_s)

    # -- the end ----------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it refuses new messages."""
        return self._producer.is_closed

    async def close(self, timeout: float | None = None) -> None:
        """Close, and roll back an unprepared transaction; a prepared one stays so.

        Args:
            timeout: seconds for everything; None is the client's `close_timeout_s`.

        Raises:
            TypeError, ConfigError: `timeout` is invalid; nothing is closed.
        """
        check_timeout(timeout)
        current, self._global = self._global, None
        limit_s = self._context.options.close_timeout_s if timeout is None else timeout
        if current is not None and not current.is_prepared:
            deadline_s = self._parts.deadline_s(limit_s)
            await self._commands.drop(current.xid, current.branches, deadline_s)
            self._parts.counters.counts.rolled_back_count += 1
        await self._producer.close(timeout)

    def __repr__(self) -> str:
        current = self._global
        state = "no transaction"
        if current is not None:
            prepared = "prepared" if current.is_prepared else "open"
            state = f"{format_key(current.xid)}, {prepared}"
        return f"<{type(self).__name__} {self.qualifier}: {state}>"

    # -- inside -----------------------------------------------------------------------

    def _check_xid(self, xid: object) -> None:
        if not isinstance(xid, XaTransactionId):
            raise wrong_type("xid", "XaTransactionId", xid)
        if xid.qualifier != self.qualifier:
            raise ConfigError(
                f"xid: expected one of qualifier {self.qualifier}, made by `xid` or"
                f" listed by `recover`, got {xid!r:.160}"
            )

    def _require_none(self) -> None:
        if self._global is not None:
            raise TransactionError(
                f"{shown(self._global.xid)} has not ended: commit it or roll it back"
            )

    def _require_begun(self) -> XaBranches:
        if self._global is None:
            raise TransactionError("no XA transaction is under way: begin one")
        return self._global

    def _require_open(self) -> XaBranches:
        current = self._require_begun()
        if current.is_prepared:
            # MetaQ 1.4 brokers acknowledge such messages and lose them.
            raise TransactionError(
                f"{shown(current.xid)} is prepared: it takes no more messages"
            )
        if current.failure is not None:
            raise TransactionError(
                f"{shown(current.xid)} has failed and can only be rolled back:"
                f" {current.failure!r}"
            ) from current.failure
        return current

    def _mine(self, xid: XaTransactionId | None) -> XaBranches | None:
        """Return the current transaction if it has this xid."""
        if xid is None:
            return self._require_begun()
        self._check_xid(xid)
        if self._global is not None and self._global.xid == xid:
            return self._global
        self._require_none()
        return None

    async def _prepare(self, deadline_s: float) -> bool:
        current = self._require_begun()
        if current.is_prepared:
            raise TransactionError(f"{shown(current.xid)} is prepared already")
        await self._require_all_sent(current, deadline_s)
        current.promised_ms = self._parts.clock.wall_ms()
        votes = await self._commands.prepare(current.xid, current.branches, deadline_s)
        for failure in failures(votes).values():
            await self._give_up(current, failure, deadline_s, was_asked=True)
        for broker_id, has_work in votes.items():
            if not has_work:
                del current.branches[broker_id]
        current.is_prepared = True
        return bool(current.branches)

    async def _commit(self, current: XaBranches, deadline_s: float) -> None:
        await self._require_all_sent(current, deadline_s)
        brokers = list(current.branches)
        if not current.is_prepared and len(brokers) > 1:
            raise TransactionError(
                f"{shown(current.xid)} has messages at {listed(brokers)}: prepare"
                " it before the commit"
            )
        # Even if the commit fails, because it cannot be withdrawn once sent.
        self._global = None
        if current.is_prepared:
            await self._commands.end(
                current.xid, COMMIT, brokers, deadline_s, current.promised_ms
            )
        else:
            await self._commands.commit_one_phase(current.xid, brokers, deadline_s)

    async def _require_all_sent(self, current: XaBranches, deadline_s: float) -> None:
        """Roll back and raise if a message may be missing."""
        failure = current.failure
        if not current.is_prepared:
            failure = failure or self._unawaited()
        if failure is not None:
            await self._give_up(current, failure, deadline_s)

    async def _roll_back(self, current: XaBranches, deadline_s: float) -> None:
        self._global = None
        brokers = list(current.branches)
        if current.is_prepared:
            await self._commands.end(current.xid, ROLLBACK, brokers, deadline_s)
        else:
            await self._commands.drop(current.xid, brokers, deadline_s)

    async def _give_up(
        self,
        current: XaBranches,
        failure: BaseException,
        deadline_s: float,
        *,
        was_asked: bool = False,
    ) -> NoReturn:
        """Roll back after a failure and raise; `was_asked`: prepare was sent."""
        self._global = None
        left = await self._commands.drop(current.xid, current.branches, deadline_s)
        if left and was_asked:
            raise TransactionInDoubtError(
                f"{shown(current.xid)} is in doubt: it failed ({failure!r}), and may be"
                f" prepared at {listed(left)}: roll it back later"
            ) from failure
        raise TransactionRolledBackError(
            f"{shown(current.xid)} was rolled back: {failure!r}"
        ) from failure


def _id_bytes(name: str, value: object) -> bytes:
    if not isinstance(value, str | bytes | bytearray | memoryview):
        # From an int, `bytes` would make zeros.
        raise wrong_type(name, "str or bytes", value)
    found = value.encode() if isinstance(value, str) else bytes(value)
    if len(found) > ID_BYTES_MAX:
        raise ConfigError(
            f"{name}: expected at most {ID_BYTES_MAX} bytes, got {len(found)}"
        )
    return found
