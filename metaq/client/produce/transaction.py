"""Local transactions: messages of one broker that are stored all, or none.

    async with producer.transaction(timeout=30) as tx:
        await tx.send("orders", b"...")
        await tx.send("audit", b"...")

Theory of operation. Nothing is sent before the first message. Where that goes decides
the broker; the others choose among its partitions, but for keys, which have one
partition inside and outside of transactions. The transaction belongs to the connection
that it began on, and ends with it, so the one command whose loss leaves the outcome
unknown is the commit: without it nothing of the transaction is ever readable.

    OPEN ── commit ──> COMMITTED         a send failed: FAILED, which can only
      │         └────> IN_DOUBT          be rolled back
      └─── rollback ─> ROLLED_BACK

Source: docs/metaq-1.4/client.md 9.2.
"""

import asyncio
import enum
import logging
from typing import Self

from metaq.client.errors import TransactionInDoubtError, TransactionRolledBackError
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.transaction_branch import (
    CERTAIN,
    Branch,
    PendingResult,
    TransactionParts,
    TransactionSends,
)
from metaq.errors import MetaqError, TransactionError
from metaq.model import LocalTransactionId
from metaq.protocol.commands import TransactionType
from metaq.protocol.transaction_ids import format_key

_log = logging.getLogger(__name__)


class TransactionState(enum.Enum):
    """The state of a local transaction."""

    OPEN = "open"
    """It takes messages."""
    FAILED = "failed"
    """A message may be missing: it can only be rolled back."""
    COMMITTED = "committed"
    """Its messages are stored."""
    ROLLED_BACK = "rolled back"
    """None of its messages is stored."""
    IN_DOUBT = "in doubt"
    """The commit was sent; whether it was carried out is not known."""


class AsyncTransaction(TransactionSends):
    """One transaction. Owner: who asked `AsyncProducer.transaction` for it.

    Lifecycle: open from the start; ended by `commit`, `rollback`, or its block, which
    commits at its end and rolls back when an exception leaves it.

    Concurrency: on its producer's loop; calls that come together go one by one.
    """

    def __init__(
        self,
        parts: TransactionParts,
        transaction: LocalTransactionId,
        lifetime_s: int,
        *,
        has_local_keys: bool = False,
    ) -> None:
        """Begin without messages; nothing is sent.

        Args:
            parts: of the producer.
            transaction: its id, which no other transaction of the session has.
            lifetime_s: time from its first message until the broker rolls it back.
            has_local_keys: keys choose among the partitions of its broker.
        """
        self._parts = parts
        self._transaction = transaction
        self._lifetime_s = lifetime_s
        self._has_local_keys = has_local_keys
        self._branch: Branch | None = None
        self.state = TransactionState.OPEN
        self._failure: BaseException | None = None
        self._turn = asyncio.Lock()
        parts.counters.begun_count += 1

    @property
    def id(self) -> str:
        """Its id, as brokers log it."""
        return format_key(self._transaction)

    async def _send(
        self, topic: str, messages: list[OutgoingMessage], timeout: float | None
    ) -> list[PendingResult]:
        deadline_s = self._parts.deadline_s(timeout)
        async with self._turn:
            self._require_open()
            branch = self._branch
            placed = await self._parts.place(
                topic,
                messages,
                None if branch is None else branch.broker_id,
                deadline_s=deadline_s,
                is_bound=True,
                has_local_keys=self._has_local_keys,
            )
            if branch is None:
                broker_id = placed[0].partition.broker_id
                connection = await self._parts.wait_connect(
                    broker_id, deadline_s=deadline_s
                )
                branch = Branch(self._parts, connection, broker_id, self._transaction)
            branch.check([one.payload for one in placed])
            try:
                if self._branch is None:
                    self._branch = branch
                    await branch.begin(self._lifetime_s, deadline_s=deadline_s)
                return await branch.put(placed, deadline_s=deadline_s)
            except BaseException as error:
                self.state, self._failure = TransactionState.FAILED, error
                raise

    async def commit(self, timeout: float | None = None) -> None:
        """Store all messages; without any there is nothing to do.

        *Durability.* It returns when the broker has committed: on its disk as its
        settings for transactions say.

        Args:
            timeout: seconds; None is `timeout_s` of the producer.

        Raises:
            TransactionInDoubtError: the commit was sent; whether it was carried out is
                not known. It is not sent again.
            TransactionRolledBackError: nothing is stored: a message had failed, the
                time was over, or the connection was lost before.
            TransactionError: the transaction has ended before.
            ClosedError: the client is closed; nothing is stored.

        Cancellation: the outcome is unknown.
        """
        parts = self._parts
        deadline_s, began_s = parts.deadline_s(timeout), parts.clock.monotonic_s()
        async with self._turn:
            with parts.counters.failing():
                await self._commit(deadline_s)
            parts.counters.on_committed(parts.clock.monotonic_s() - began_s)

    async def rollback(self, timeout: float | None = None) -> None:
        """Roll back: none of the messages is stored.

        A broker that is not reached forgets the transaction when its time is over: it
        was never committed, so it is never read.

        Args:
            timeout: seconds; None is `timeout_s` of the producer.

        Raises:
            TransactionError: the transaction has ended before.
        """
        deadline_s = self._parts.deadline_s(timeout)
        async with self._turn:
            if self.state is not TransactionState.FAILED:
                self._require_open()
            await self._roll_back(deadline_s)
            self._parts.counters.rolled_back_count += 1

    async def __aenter__(self) -> Self:
        """Return the transaction."""
        return self

    async def __aexit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Commit, or roll back when an exception leaves the block."""
        if self.state not in {TransactionState.OPEN, TransactionState.FAILED}:
            return
        if error is None:
            await self.commit()
        else:
            await self.rollback()

    def __repr__(self) -> str:
        where = "" if self._branch is None else f" at {self._branch.where}"
        return f"<{type(self).__name__} {self.id}{where}: {self.state.value}>"

    def _require_open(self) -> None:
        if self.state is TransactionState.FAILED:
            raise TransactionError(
                f"transaction {self.id} has failed and can only be rolled back:"
                f" {self._failure!r}"
            ) from self._failure
        if self.state is not TransactionState.OPEN:
            raise TransactionError(
                f"transaction {self.id} has ended: it is {self.state.value}"
            )

    async def _commit(self, deadline_s: float) -> None:
        failure = self._failure
        if self.state is TransactionState.FAILED:
            await self._roll_back(deadline_s)
            raise TransactionRolledBackError(
                f"transaction {self.id} was rolled back in place of the commit: a"
                f" message had failed: {failure!r}"
            ) from failure
        self._require_open()
        self.state = TransactionState.IN_DOUBT
        try:
            await self._end(TransactionType.COMMIT_ONE_PHASE, deadline_s)
        except CERTAIN as error:
            self.state = TransactionState.ROLLED_BACK
            raise TransactionRolledBackError(
                f"transaction {self.id} is not committed: {error}"
            ) from error
        except MetaqError as error:
            raise TransactionInDoubtError(
                f"transaction {self.id} is in doubt, not failed: the commit was"
                f" sent, and may be carried out: {error}"
            ) from error
        self.state = TransactionState.COMMITTED

    async def _roll_back(self, deadline_s: float) -> None:
        self.state = TransactionState.ROLLED_BACK
        try:
            await self._end(TransactionType.ROLLBACK, deadline_s)
        except MetaqError as error:
            _log.info(
                "rollback did not reach the broker: transaction=%s lifetime_s=%d"
                " error=%s",
                self.id,
                self._lifetime_s,
                error,
            )

    async def _end(self, kind: TransactionType, deadline_s: float) -> None:
        if self._branch is not None:
            await self._branch.end(kind, deadline_s=deadline_s)
