"""Commands to all brokers of an XA transaction, and the sum of their answers.

An XA transaction is known by its id, over whatever connection. A broker that has no
part of it answers so; one that is away may have one. So of several answers, silence
counts most: it leaves a doubt, which the same verdict said again ends. Away are brokers
that ZooKeeper has recorded, and those that the client has ever seen: a ZooKeeper that
lost its data, and a MetaQ 1.4 broker, leave no record.

Source: client spec 9.3; broker spec 5.4, 5.5.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from metaq.client.cluster.catalog import recorded_addresses
from metaq.client.cluster.context import ClientContext
from metaq.client.errors import (
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnknownXidError,
    XaError,
)
from metaq.client.fan_out import failures, for_each, raise_first
from metaq.client.produce.transaction_branch import CERTAIN, BranchParts
from metaq.client.produce.transaction_replies import (
    NOTA,
    parse_outcomes,
    parse_prepared,
    parse_vote,
    require_done,
)
from metaq.errors import MetaqError, NoBrokerError, RemoteProtocolError
from metaq.model import NULL_TRANSACTION, BrokerId, Millis, XaTransactionId
from metaq.protocol.commands import CommitTogether, Reply, TransactionType
from metaq.protocol.transaction_ids import encode_keys, format_key
from metaq.record.layout import PAYLOAD_BYTES_MAX

_log = logging.getLogger(__name__)

Verdict: TypeAlias = TransactionType
"""One of those below, here."""

COMMIT: Final = TransactionType.COMMIT_TWO_PHASE
ROLLBACK: Final = TransactionType.ROLLBACK
FORGET: Final = TransactionType.FORGET


class Verdicts:
    """Tells brokers, all at once. Owner: a transaction manager; used on its loop."""

    def __init__(self, context: ClientContext, parts: BranchParts) -> None:
        """Prepare; nothing is sent."""
        self._context = context
        self._parts = parts
        self._recorded: set[BrokerId] = set()

    async def prepare(
        self, xid: XaTransactionId, brokers: Iterable[BrokerId], deadline_s: float
    ) -> dict[BrokerId, bool | MetaqError]:
        """Ask brokers to promise; return whether each has work to commit, or failed."""

        async def vote(broker_id: BrokerId) -> bool:
            reply = await self._say(broker_id, xid, TransactionType.PREPARE, deadline_s)
            return parse_vote(reply, f"broker {broker_id}")

        return await for_each(vote, brokers)

    async def commit_one_phase(
        self, xid: XaTransactionId, brokers: Collection[BrokerId], deadline_s: float
    ) -> None:
        """Commit at one broker, or at none, what is not prepared.

        Raises:
            TransactionRolledBackError: it is certainly not committed.
            TransactionInDoubtError: it may be committed; the command is not repeated.
            XaError: the broker answered with another code.
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

    async def tell(
        self,
        xid: XaTransactionId,
        verdict: TransactionType,
        brokers: Iterable[BrokerId],
        deadline_s: float,
        promised_ms: Millis | None = None,
    ) -> None:
        """Say a verdict to the brokers that have a part of a prepared transaction.

        Args:
            xid: of the transaction.
            verdict: COMMIT or ROLLBACK.
            brokers: which.
            deadline_s: of their answers.
            promised_ms: when they were asked to prepare it; None: not known.

        Raises:
            TransactionInDoubtError: one of them may not have carried it out.
            XaError: one of them answered with a code.
        """
        tell = self._teller(xid, verdict, deadline_s, promised_ms)
        _raise_failed(xid, verdict, failures(await for_each(tell, brokers)))

    async def tell_all(
        self, xid: XaTransactionId, verdict: TransactionType, deadline_s: float
    ) -> None:
        """Say a verdict to every broker: any of them may have a part.

        Raises:
            UnknownXidError: every broker that was ever known says that it has none.
            TransactionInDoubtError, XaError: as `tell`; also for one that is away.
        """
        there, away = await self._brokers(deadline_s)
        failed = await self._failures(xid, verdict, there, deadline_s)
        unknown = [e for e in failed.values() if isinstance(e, UnknownXidError)]
        serious = {one: e for one, e in failed.items() if e not in unknown}
        _raise_failed(xid, verdict, serious)
        if away:
            done = listed([one for one in there if one not in failed])
            raise TransactionInDoubtError(
                f"{shown(xid)} is in doubt: {', '.join(away)} away, and may have a part"
                f" of it; {done} did it: say {verdict.name.lower()} again"
            )
        if len(unknown) == len(there):
            text = f"no broker knows {shown(xid)}: it has ended, or never began"
            raise UnknownXidError(text, code=NOTA, text=text) from next(
                iter(unknown), None
            )

    async def drop(
        self, xid: XaTransactionId, brokers: Iterable[BrokerId], deadline_s: float
    ) -> list[BrokerId]:
        """Roll back what is not known to be prepared; return who may not have done it.

        A broker that cannot be told does it when its time is over, unless it prepared.
        """
        failed = await self._failures(xid, ROLLBACK, brokers, deadline_s)
        for broker_id, error in failed.items():
            _log.info(
                "broker was not told of a rollback: broker=%d transaction=%s error=%s",
                broker_id,
                format_key(xid),
                error,
            )
        return [one for one, e in failed.items() if not isinstance(e, UnknownXidError)]

    async def recover(
        self, qualifier: str, *, partial: bool, deadline_s: float
    ) -> list[XaTransactionId]:
        """Return what brokers list; see `AsyncXa.recover`."""
        there, away = await self._brokers(deadline_s)
        if away and not partial:
            raise NoBrokerError(
                f"{', '.join(away)} away, and may have prepared transactions:"
                " partial=True lists those of the others"
            )

        told = await self.recover_each(qualifier, there, deadline_s)
        if not partial:
            raise_first(told)
        for broker_id, error in failures(told).items():
            _log.warning("broker was left out: broker=%d error=%s", broker_id, error)
        lists = (one for one in told.values() if not isinstance(one, MetaqError))
        return list(dict.fromkeys(xid for found in lists for xid in found))

    async def recover_each(
        self, qualifier: str, brokers: Iterable[BrokerId], deadline_s: float
    ) -> dict[BrokerId, tuple[XaTransactionId, ...] | MetaqError]:
        """Return what each of some brokers lists under a qualifier, or its error."""

        async def ask(broker_id: BrokerId) -> tuple[XaTransactionId, ...]:
            return await self._list(broker_id, qualifier, deadline_s)

        return await for_each(ask, brokers)

    async def tell_one(
        self,
        broker_id: BrokerId,
        xid: XaTransactionId,
        kind: TransactionType,
        deadline_s: float,
        promised_ms: Millis | None = None,
    ) -> None:
        """Say a verdict, or `FORGET`, to one broker; arguments as of `tell`.

        Raises:
            MetaqError: as `require_done`, and as `BrokerConnection.call`.
        """
        await self._teller(xid, kind, deadline_s, promised_ms)(broker_id)

    async def commit_at(
        self,
        broker_id: BrokerId,
        xids: Collection[XaTransactionId],
        deadline_s: float,
        promised_ms: Millis | None = None,
    ) -> dict[XaTransactionId, MetaqError | None]:
        """Commit prepared transactions at one broker, as one where it announced that.

        Another broker commits each by itself, and shows it as soon as it is.

        Args:
            broker_id: where.
            xids: which.
            deadline_s: of the answers.
            promised_ms: when the first of them was prepared; None: not known.

        Returns:
            What became of each; None: it is committed.
        """

        async def commit(xid: XaTransactionId) -> None:
            await self.tell_one(broker_id, xid, COMMIT, deadline_s, promised_ms)

        keys = encode_keys(xids)
        try:
            connection = await self._parts.connect(broker_id, deadline_s=deadline_s)
            told = connection.capabilities
            limit = told.payload_bytes_max or PAYLOAD_BYTES_MAX
            if len(xids) < 2 or not told.together or len(keys) > limit:
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
        """Tell every broker to forget an outcome; see `AsyncXa.forget`."""
        there, away = await self._brokers(deadline_s)
        tell = self._teller(xid, TransactionType.FORGET, deadline_s)
        raise_first(await for_each(tell, there))
        if away:
            raise NoBrokerError(f"{', '.join(away)} away, and was not told to forget")

    # -- inside -----------------------------------------------------------------------

    async def _failures(
        self,
        xid: XaTransactionId,
        kind: TransactionType,
        brokers: Iterable[BrokerId],
        deadline_s: float,
    ) -> dict[BrokerId, MetaqError]:
        told = await for_each(self._teller(xid, kind, deadline_s), brokers)
        return failures(told)

    def _teller(
        self,
        xid: XaTransactionId,
        kind: TransactionType,
        deadline_s: float,
        promised_ms: Millis | None = None,
    ) -> Callable[[BrokerId], Awaitable[str]]:
        async def tell(broker_id: BrokerId) -> str:
            connection = await self._parts.connect(broker_id, deadline_s=deadline_s)
            reply = await self._parts.tell(connection, xid, kind, deadline_s=deadline_s)
            text = require_done(reply, f"broker {broker_id}")
            start = self._parts.starts.known(connection)
            if kind is COMMIT and start and start.is_after(promised_ms):
                _log.warning(
                    "committed at a MetaQ 1.4 broker that has, or may have, restarted"
                    " since the promise: readable after its next start, and may have"
                    " overwritten what it stored since this one: broker=%d"
                    " transaction=%s",
                    broker_id,
                    format_key(xid),
                )
            return text

        return tell

    async def _say(
        self,
        broker_id: BrokerId,
        xid: XaTransactionId,
        kind: TransactionType,
        deadline_s: float,
    ) -> Reply:
        connection = await self._parts.connect(broker_id, deadline_s=deadline_s)
        return await self._parts.tell(connection, xid, kind, deadline_s=deadline_s)

    async def _list(
        self, broker_id: BrokerId, qualifier: str, deadline_s: float
    ) -> tuple[XaTransactionId, ...]:
        connection = await self._parts.connect(broker_id, deadline_s=deadline_s)
        reply = await self._parts.tell(
            connection,
            NULL_TRANSACTION,
            TransactionType.RECOVER,
            deadline_s=deadline_s,
            qualifier=qualifier,
        )
        try:
            return parse_prepared(reply, f"broker {broker_id}")
        except RemoteProtocolError as error:
            connection.close_for(error)
            raise

    async def _brokers(self, deadline_s: float) -> tuple[list[BrokerId], list[str]]:
        """Return the brokers that are there, and names of those that are away.

        At least one of either: where none was ever seen, every broker is away.
        """
        context = self._context
        snapshot = context.metadata.snapshot
        if not snapshot.version:
            snapshot = await context.metadata.wait_newer(0, deadline_s=deadline_s)
        self._recorded.update(await recorded_addresses(context, deadline_s=deadline_s))
        known = {*snapshot.seen, *self._recorded}
        for counts in (snapshot.recorded, snapshot.puts, snapshot.gets):
            known.update(one for by_broker in counts.values() for one in by_broker)
        there = [
            one for one, copies in snapshot.brokers.items() if copies.leader is not None
        ]
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
            told = "; ".join(f"broker {one}: {e}" for one, e in failed.items())
            raise TransactionInDoubtError(
                f"{shown(xid)} is in doubt, not failed: say {kind.name.lower()} again"
                f" to {listed(list(failed))}: {told}"
            ) from error
    for error in failed.values():
        raise error


def key_of(xid: XaTransactionId) -> str:
    """Return the key by which `metaq txn` knows a transaction."""
    return format_key(xid)


def shown(xid: XaTransactionId) -> str:
    """Return how an error names a transaction."""
    return f"transaction {format_key(xid)}"


def listed(brokers: Sequence[BrokerId]) -> str:
    """Return how an error names brokers."""
    names = ", ".join(map(str, sorted(brokers))) or "none"
    return f"broker{'s' if len(brokers) != 1 else ''} {names}"
