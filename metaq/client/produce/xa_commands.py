"""XA transactions at several brokers: their messages, commands and replies.

    XaBranches    an open transaction: one branch at each broker it has messages for
    XaCommands    prepare, commit, roll back, list: by xid, over any connection

Brokers know an XA transaction by its id, over any connection. A broker without a branch
says so; one that is away may have a branch. So without a reply from every broker the
outcome is unknown until the same command is sent again. Brokers that may be away are
those recorded in ZooKeeper and those ever seen by the client: a MetaQ 1.4 broker leaves
no record, and ZooKeeper may have lost its data.

Source: docs/metaq-1.4/client.md 9.3; docs/metaq-1.4/broker.md 5.4, 5.5.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeAlias

from metaq.client.cluster.catalog import recorded_addresses
from metaq.client.cluster.context import ClientContext
from metaq.client.errors import (
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnknownXidError,
    XaError,
)
from metaq.client.fan_out import answers, failures, for_each, raise_first
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.transaction_branch import (
    CERTAIN,
    Branch,
    BranchParts,
    PendingResult,
    TransactionParts,
)
from metaq.client.produce.transaction_replies import (
    DUPID,
    NOTA,
    parse_outcomes,
    parse_prepared,
    require_done,
)
from metaq.errors import (
    MetaqError,
    NoBrokerError,
    RemoteProtocolError,
    TransactionError,
)
from metaq.model import NULL_TRANSACTION, BrokerId, Millis, XaTransactionId
from metaq.peer.connection import BrokerConnection
from metaq.protocol.commands import CommitTogether, TransactionType
from metaq.protocol.transaction_ids import KEYS_MAX, encode_keys, format_key
from metaq.record.layout import PAYLOAD_BYTES_MAX

_log = logging.getLogger(__name__)

XaEnd: TypeAlias = TransactionType
"""COMMIT, ROLLBACK or FORGET."""

COMMIT: Final = TransactionType.COMMIT_TWO_PHASE
ROLLBACK: Final = TransactionType.ROLLBACK
FORGET: Final = TransactionType.FORGET


class XaCommands:
    """Sends to several brokers at once. Owner: a transaction manager, on its loop.

    Deadlines apply to the replies. `promised_ms` is the time at which brokers were
    asked to prepare; None if not known.
    """

    def __init__(self, context: ClientContext, parts: BranchParts) -> None:
        self._context = context
        self._parts = parts
        self._recorded: set[BrokerId] = set()

    async def prepare(
        self, xid: XaTransactionId, brokers: Iterable[BrokerId], deadline_s: float
    ) -> dict[BrokerId, bool | MetaqError]:
        """Prepare at brokers; return whether each has work to commit, or its error."""
        vote = partial(self._parts.vote, xid=xid, deadline_s=deadline_s)
        return await for_each(vote, brokers)

    async def commit_one_phase(
        self, xid: XaTransactionId, brokers: Collection[BrokerId], deadline_s: float
    ) -> None:
        """Commit an unprepared transaction; `brokers` are at most one.

        Raises:
            TransactionRolledBackError: it is certainly not committed.
            TransactionInDoubtError: it may be committed; the command is not repeated.
            XaError: the broker replied with another code.
        """
        assert len(brokers) < 2
        kind = TransactionType.COMMIT_ONE_PHASE
        failed = await self._failures(xid, kind, brokers, deadline_s)
        for error in failed.values():
            if isinstance(error, (*CERTAIN, UnknownXidError)):
                raise TransactionRolledBackError(
                    f"{shown(xid)} is not committed: {error}"
                ) from error
            if not isinstance(error, XaError):
                raise TransactionInDoubtError(
                    f"{shown(xid)} is in doubt, not failed: the commit was sent, and"
                    f" may be carried out: {error}"
                ) from error
            raise error

    async def end(
        self,
        xid: XaTransactionId,
        kind: XaEnd,
        brokers: Iterable[BrokerId],
        deadline_s: float,
        promised_ms: Millis | None = None,
    ) -> None:
        """Commit or roll back a prepared transaction at the brokers of its branches.

        Raises:
            TransactionInDoubtError: a broker may not have carried it out.
            XaError: a broker replied with an error code.
        """
        failed = await self._failures(xid, kind, brokers, deadline_s, promised_ms)
        _raise_failed(xid, kind, failed)

    async def end_everywhere(
        self, xid: XaTransactionId, kind: XaEnd, deadline_s: float
    ) -> None:
        """Commit or roll back at every broker, as any of them may have a branch.

        Raises:
            UnknownXidError: no broker ever seen knows the transaction.
            TransactionInDoubtError, XaError: as `end`; in doubt also if a broker is
                away.
        """
        there, away = await self._brokers(deadline_s)
        failed = await self._failures(xid, kind, there, deadline_s)
        unknown = [e for e in failed.values() if isinstance(e, UnknownXidError)]
        serious = {one: e for one, e in failed.items() if e not in unknown}
        _raise_failed(xid, kind, serious)
        if away:
            done = listed([one for one in there if one not in failed])
            raise TransactionInDoubtError(
                f"{shown(xid)} is in doubt: {', '.join(away)} away, and may have a"
                f" part of it; {done} did it: call {kind.name.lower()} again"
            )
        if len(unknown) == len(there):
            text = f"no broker knows {shown(xid)}: it has ended, or never began"
            raise UnknownXidError(text, code=NOTA, text=text) from next(
                iter(unknown), None
            )

    async def drop(
        self, xid: XaTransactionId, brokers: Iterable[BrokerId], deadline_s: float
    ) -> list[BrokerId]:
        """Roll back an open transaction; return brokers that may not have done so.

        A broker that was not reached rolls back when the transaction's time is over,
        unless it has prepared.
        """
        failed = await self._failures(xid, ROLLBACK, brokers, deadline_s)
        for broker_id, error in failed.items():
            _log.info(
                "rollback did not reach a broker: broker=%d transaction=%s error=%s",
                broker_id,
                format_key(xid),
                error,
            )
        return [one for one, e in failed.items() if not isinstance(e, UnknownXidError)]

    async def recover(
        self, qualifier: str, *, partial: bool, deadline_s: float
    ) -> list[XaTransactionId]:
        """Return the transactions that brokers list; see `AsyncXa.recover`."""
        there, away = await self._brokers(deadline_s)
        if away and not partial:
            raise NoBrokerError(
                f"{', '.join(away)} away, and may have prepared transactions:"
                " partial=True lists those of the others"
            )
        found = await self.recover_each(qualifier, there, deadline_s)
        if not partial:
            raise_first(found)
        for broker_id, error in failures(found).items():
            _log.warning("broker was left out: broker=%d error=%s", broker_id, error)
        return list(dict.fromkeys(chain.from_iterable(answers(found).values())))

    async def recover_each(
        self, qualifier: str, brokers: Iterable[BrokerId], deadline_s: float
    ) -> dict[BrokerId, tuple[XaTransactionId, ...] | MetaqError]:
        """Return the transactions each broker lists under a qualifier, or its error."""

        async def ask(broker_id: BrokerId) -> tuple[XaTransactionId, ...]:
            kind = TransactionType.RECOVER
            connection, reply = await self._parts.send(
                broker_id, NULL_TRANSACTION, kind, deadline_s, qualifier
            )
            try:
                return parse_prepared(reply, f"broker {broker_id}")
            except RemoteProtocolError as error:
                connection.close_for(error)
                raise

        return await for_each(ask, brokers)

    async def end_at(
        self,
        broker_id: BrokerId,
        xid: XaTransactionId,
        kind: TransactionType,
        deadline_s: float,
        promised_ms: Millis | None = None,
    ) -> None:
        """End a transaction at one broker.

        Raises:
            MetaqError: as `require_done`, and as `BrokerConnection.call`.
        """
        connection, reply = await self._parts.send(broker_id, xid, kind, deadline_s)
        require_done(reply, f"broker {broker_id}")
        start = self._parts.starts.known(connection)
        if kind is COMMIT and start and start.is_after(promised_ms):
            _log.warning(
                "committed at a MetaQ 1.4 broker that has, or may have, restarted"
                " since the promise: readable after its next start, and may have"
                " overwritten what it stored since this one: broker=%d transaction=%s",
                broker_id,
                format_key(xid),
            )

    async def commit_at(
        self,
        broker_id: BrokerId,
        xids: Collection[XaTransactionId],
        deadline_s: float,
        promised_ms: Millis | None = None,
    ) -> dict[XaTransactionId, MetaqError | None]:
        """Commit prepared transactions at one broker, together if it announced that.

        Otherwise each is committed, and becomes readable, on its own. `promised_ms` is
        that of the first one.

        Returns:
            Each xid → its error; None if committed.
        """

        async def commit(xid: XaTransactionId) -> None:
            await self.end_at(broker_id, xid, COMMIT, deadline_s, promised_ms)

        keys = encode_keys(xids)
        try:
            connection = await self._parts.connect(broker_id, deadline_s=deadline_s)
            announced = connection.capabilities
            limit = announced.payload_bytes_max or PAYLOAD_BYTES_MAX
            is_one = 2 <= len(xids) <= KEYS_MAX and len(keys) <= limit
            if not is_one or not announced.together:
                return await for_each(commit, xids)
            command = CommitTogether(
                self._parts.session_id, len(xids), connection.next_opaque(), keys
            )
            reply = await connection.call(command, deadline_s=deadline_s)
            outcomes = parse_outcomes(reply, len(xids), f"broker {broker_id}")
        except MetaqError as error:
            return dict.fromkeys(xids, error)
        return dict(zip(xids, outcomes, strict=True))

    async def forget(self, xid: XaTransactionId, deadline_s: float) -> None:
        """Make every broker forget an outcome; see `AsyncXa.forget`."""
        there, away = await self._brokers(deadline_s)
        for error in (await self._failures(xid, FORGET, there, deadline_s)).values():
            raise error
        if away:
            raise NoBrokerError(f"{', '.join(away)} away, and may still know it")

    # -- inside -----------------------------------------------------------------------

    async def _failures(
        self,
        xid: XaTransactionId,
        kind: TransactionType,
        brokers: Iterable[BrokerId],
        deadline_s: float,
        promised_ms: Millis | None = None,
    ) -> dict[BrokerId, MetaqError]:
        async def end(broker_id: BrokerId) -> None:
            await self.end_at(broker_id, xid, kind, deadline_s, promised_ms)

        return failures(await for_each(end, brokers))

    async def _brokers(self, deadline_s: float) -> tuple[list[BrokerId], list[str]]:
        """Return the registered brokers, and the names of those that are away.

        Never both empty: if no broker was ever seen, "every broker" is away.
        """
        context = self._context
        snapshot = context.metadata.snapshot
        if not snapshot.version:
            snapshot = await context.metadata.wait_newer(0, deadline_s=deadline_s)
        self._recorded.update(await recorded_addresses(context, deadline_s=deadline_s))
        known = {*snapshot.seen, *self._recorded}
        for counts in (snapshot.recorded, snapshot.puts, snapshot.gets):
            known.update(one for by_broker in counts.values() for one in by_broker)
        there = list(snapshot.leaders())
        away = [f"broker {one} is" for one in sorted(known.difference(there))]
        away += [f"{address} is" for address in sorted(snapshot.silent)]
        if not there and not away:
            away = ["every broker is"]
        return there, away


def _raise_failed(
    xid: XaTransactionId, kind: TransactionType, failed: Mapping[BrokerId, MetaqError]
) -> None:
    for error in failed.values():
        if not isinstance(error, XaError):
            errors = "; ".join(f"broker {one}: {e}" for one, e in failed.items())
            raise TransactionInDoubtError(
                f"{shown(xid)} is in doubt, not failed: say {kind.name.lower()} again"
                f" to {listed(list(failed))}: {errors}"
            ) from error
    for error in failed.values():
        raise error


def key_of(xid: XaTransactionId) -> str:
    """Return the key by which `metaq txn` knows a transaction."""
    return format_key(xid)


def shown(xid: XaTransactionId) -> str:
    """Return the name of a transaction in errors."""
    return f"transaction {format_key(xid)}"


def listed(brokers: Sequence[BrokerId]) -> str:
    """Return the names of brokers in errors."""
    names = ", ".join(map(str, sorted(brokers))) or "none"
    return f"broker{'s' if len(brokers) != 1 else ''} {names}"


class XaBranches:
    """An XA transaction in progress. Owner: its creator; one call at a time."""

    def __init__(
        self,
        parts: TransactionParts,
        xid: XaTransactionId,
        lifetime_s: int,
        *,
        is_refusing_others: bool = False,
    ) -> None:
        """Begin without branches; nothing is sent.

        Args:
            parts: of a producer.
            xid: its id.
            lifetime_s: seconds until a broker rolls back an unprepared branch.
            is_refusing_others: refuse messages for MetaQ 1.4 brokers.
        """
        self._parts = parts
        self.xid = xid
        self._lifetime_s = lifetime_s
        self._is_refusing_others = is_refusing_others
        self.branches: dict[BrokerId, Branch] = {}
        self.is_prepared = False
        self.promised_ms: Millis | None = None
        self.failure: BaseException | None = None

    async def put(
        self,
        topic: str,
        messages: list[OutgoingMessage],
        *,
        deadline_s: float,
        deliver_ms: Millis | None = None,
    ) -> list[PendingResult]:
        """Add messages, at least one; see `TransactionSends.send`."""
        placed = await self._parts.place(
            topic,
            messages,
            None,
            deadline_s=deadline_s,
            is_bound=False,
            deliver_ms=deliver_ms,
        )
        places: dict[BrokerId, list[int]] = {}
        for at, message in enumerate(placed):
            places.setdefault(message.partition.broker_id, []).append(at)
        found: dict[int, PendingResult] = {}
        try:
            for broker_id, some in places.items():
                branch = await self._branch(broker_id, deadline_s)
                mine = [placed[at] for at in some]
                branch.check([one.payload for one in mine], mine[0])
                results = await branch.put(mine, deadline_s=deadline_s)
                found.update(zip(some, results, strict=True))
        except BaseException as error:
            self.failure = error
            raise
        return [found[at] for at in range(len(placed))]

    async def _branch(self, broker_id: BrokerId, deadline_s: float) -> Branch:
        branch = self.branches.get(broker_id)
        if branch is None:
            connection = await self._parts.wait_connect(
                broker_id, deadline_s=deadline_s
            )
            if self._is_refusing_others:
                _require_ours(connection, broker_id)
            branch = Branch(self._parts, connection, broker_id, self.xid)
            self.branches[broker_id] = branch
            try:
                await branch.begin(
                    self._lifetime_s,
                    deadline_s=deadline_s,
                    qualifier=self.xid.qualifier,
                )
            except XaError as error:
                if error.code == DUPID:
                    # The branch is another program's: send it no command.
                    del self.branches[broker_id]
                raise
        return branch


def _require_ours(connection: BrokerConnection, broker_id: BrokerId) -> None:
    if not connection.capabilities.mput_tx:
        raise TransactionError(
            f"broker {broker_id} is a MetaQ 1.4 broker, which loses prepared"
            " transactions when it restarts: exactly once writes only to brokers of"
            " this project; the input may come from MetaQ 1.4"
        )
