"""Local transactions: messages at one broker, stored all or not at all.

    async with producer.transaction(timeout=30) as tx:
        await tx.send("orders", b"...")
        await tx.send("audit", b"...")

Theory of operation. Nothing is sent before the first message, whose partition decides
the broker. Later messages choose among that broker's partitions, except those with a
key: a key has the same partition inside and outside of transactions. The transaction
belongs to the connection on which it began, and ends with it. So only the loss of the
commit leaves the outcome unknown: without it no message becomes readable.

    OPEN ── commit ──> COMMITTED         a send failed: FAILED, which can only
      │         └────> IN_DOUBT          be rolled back
      └─── rollback ─> ROLLED_BACK

Source: docs/metaq-1.4/client.md 9.2.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Iterator
from typing import Any, Protocol, Self

from metaq.client.errors import (
    TransactionInDoubtError,
    TransactionRolledBackError,
    group_gone,
)
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.awaited_calls import to_be_awaited
from metaq.client.produce.transaction_branch import (
    CERTAIN,
    Branch,
    HeldDelivery,
    PendingResult,
    QueueWorker,
    TransactionParts,
    TransactionSends,
)
from metaq.client.validation import wrong_type
from metaq.errors import MetaqError, NotDefinedError, TransactionError
from metaq.model import BrokerId, LocalTransactionId, Message, Millis
from metaq.protocol.commands import TransactionType
from metaq.protocol.queue_frames import Word
from metaq.protocol.transaction_ids import format_key

_log = logging.getLogger(__name__)


class TransactionState(enum.Enum):
    """The state of a local transaction."""

    OPEN = "open"
    """It accepts messages."""
    FAILED = "failed"
    """A message may be missing; it can only be rolled back."""
    COMMITTED = "committed"
    """Its messages are stored."""
    ROLLED_BACK = "rolled back"
    """None of its messages is stored."""
    IN_DOUBT = "in doubt"
    """The commit was sent; whether it was carried out is not known."""


class HoldingQueue(QueueWorker, Protocol):
    """A queue as a transaction sees it; `QueueLife` is one."""

    def begin_hold(self, held: Any, pool: object) -> None:
        """Hand a message over to a transaction; raises as a settle."""

    def refuse_hold(self, held: Any) -> MetaqError:
        """Record that another delivery has a message; return the error."""

    def end_hold(self, held: Any, *, is_done: bool) -> None:
        """Record whether the transaction of a message was committed."""


class AsyncTransaction(TransactionSends):
    """One transaction. Owner: the caller of `AsyncProducer.transaction`.

    Lifecycle: open from the start; ended by `commit`, `rollback`, or its `async with`
    block, which commits at its end and rolls back after an exception.

    Concurrency: on its producer's loop; concurrent calls run one at a time.
    """

    def __init__(
        self,
        parts: TransactionParts,
        transaction: LocalTransactionId,
        lifetime_s: int,
        *,
        has_local_keys: bool = False,
    ) -> None:
        """Create an open transaction without messages; nothing is sent.

        Args:
            parts: of the producer.
            transaction: its id, unique in the session.
            lifetime_s: seconds from its first message until the broker rolls it back.
            has_local_keys: whether keys choose among the partitions of its broker.
        """
        super().__init__()
        self._parts = parts
        self._transaction = transaction
        self._lifetime_s = lifetime_s
        self._has_local_keys = has_local_keys
        self._branch: Branch | None = None
        self.state = TransactionState.OPEN
        self._failure: BaseException | None = None
        self._turn = asyncio.Lock()
        self._acked = list[tuple[HoldingQueue, HeldDelivery]]()
        parts.counters.counts.begun_count += 1

    @property
    def id(self) -> str:
        """Its id, as in the logs of brokers."""
        return format_key(self._transaction)

    async def _send(
        self,
        topic: str,
        messages: list[OutgoingMessage],
        timeout: float | None,
        due_ms: Millis | None,
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
                deliver_ms=due_ms,
            )
            branch = await self._connect(placed[0].partition.broker_id, deadline_s)
            branch.check([one.payload for one in placed], placed[0])
            with self._failing():
                await self._begin(branch, deadline_s)
                return await branch.put(placed, deadline_s=deadline_s)

    @to_be_awaited
    async def ack(self, message: Message, timeout: float | None = None) -> None:
        """Ack a message of a work queue; takes effect if the transaction commits.

        The message is settled by this call, and no other worker gets it before the
        outcome. A commit acks it. After a rollback this worker has it as before, and
        may settle it again. If the outcome is unknown, or the queue is closed before
        the outcome, the broker delivers it again unless the transaction was committed.

        Args:
            message: a message of a queue of the same client, at the transaction's
                broker.
            timeout: seconds; None is `timeout_s` of the producer.

        Raises:
            AlreadySettledError: it was settled before, or belongs to another client.
            ClosedError: its queue is closed.
            LeaseLostError: another delivery has it; the transaction has failed.
            QueueGroupError: its group was deleted; the transaction has failed.
            TransactionRolledBackError: the broker has rolled the transaction back,
                because its time was over.
            TransactionError: the transaction is not open, or earlier messages have
                bound it to another broker; nothing changed.
            TypeError: not a message of a queue.
            MetaqError: the transaction has failed.

        Cancellation: the transaction has failed.
        """
        deadline_s = self._parts.deadline_s(timeout)
        held: HeldDelivery | None = getattr(message, "held", None)
        queue: HoldingQueue | None = getattr(message, "queue", None)
        if held is None or queue is None:
            raise wrong_type("message", "a message of a queue", message)
        async with self._turn:
            self._require_open()
            bound, broker_id = self._branch, held.partition.broker_id
            if bound is not None and bound.broker_id != broker_id:
                raise TransactionError(
                    f"{held}: it is of broker {broker_id}, but transaction {self.id}"
                    f" is bound to {bound.where}: begin a transaction with this ack,"
                    " which binds it to that broker"
                )
            branch = await self._connect(broker_id, deadline_s)
            with self._failing():
                await self._begin(branch, deadline_s)
            # Not before `begin`, because from here on the lease is not renewed.
            queue.begin_hold(held, self._parts.pool)
            self._acked.append((queue, held))
            with self._failing():
                try:
                    word = await branch.ack(held, queue, deadline_s=deadline_s)
                except NotDefinedError:
                    # No retry: the broker knew the group when it delivered the message,
                    # and the transaction cannot move to another leader.
                    raise group_gone(queue.group, broker_id) from None
                if word is not Word.OK:
                    raise queue.refuse_hold(held)

    async def _connect(self, broker_id: BrokerId, deadline_s: float) -> Branch:
        """Return the branch; a new one that is not begun, if there is none."""
        if self._branch is not None:
            return self._branch
        connection = await self._parts.wait_connect(broker_id, deadline_s=deadline_s)
        return Branch(self._parts, connection, broker_id, self._transaction)

    async def _begin(self, branch: Branch, deadline_s: float) -> None:
        if self._branch is None:
            self._branch = branch
            await branch.begin(self._lifetime_s, deadline_s=deadline_s)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Mark the transaction as failed if the block raises."""
        try:
            yield
        except BaseException as error:
            self.state, self._failure = TransactionState.FAILED, error
            raise

    def _end_holds(self, *, is_done: bool) -> None:
        for queue, held in self._acked:
            queue.end_hold(held, is_done=is_done)

    async def commit(self, timeout: float | None = None) -> None:
        """Commit: store all messages. Sends nothing if there are none.

        *Durability.* When this returns, the broker has committed, on disk to the extent
        that its settings for transactions demand.

        Args:
            timeout: seconds; None is `timeout_s` of the producer.

        Raises:
            TransactionInDoubtError: the commit was sent, and may have been carried out.
                It is not sent again.
            TransactionRolledBackError: nothing is stored: a message had failed, or its
                call was never awaited; the time was over; or the connection was lost
                before the commit.
            TransactionError: the transaction had ended before.
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

        A broker that cannot be reached rolls the transaction back when its time is
        over; its messages never become readable.

        Args:
            timeout: seconds; None is `timeout_s` of the producer.

        Raises:
            TransactionError: the transaction had ended before.
        """
        deadline_s = self._parts.deadline_s(timeout)
        async with self._turn:
            if self.state is not TransactionState.FAILED:
                self._require_open()
            await self._roll_back(deadline_s)
            self._parts.counters.counts.rolled_back_count += 1

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
        if self.state is TransactionState.OPEN and (error := self._unawaited()):
            self.state, self._failure = TransactionState.FAILED, error
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
            self._end_holds(is_done=False)
            raise TransactionRolledBackError(
                f"transaction {self.id} is not committed: {error}"
            ) from error
        except MetaqError as error:
            raise TransactionInDoubtError(
                f"transaction {self.id} is in doubt, not failed: the commit was"
                f" sent, and may be carried out: {error}"
            ) from error
        self.state = TransactionState.COMMITTED
        self._end_holds(is_done=True)

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
        finally:
            self._end_holds(is_done=False)

    async def _end(self, kind: TransactionType, deadline_s: float) -> None:
        if self._branch is not None:
            await self._branch.end(kind, deadline_s=deadline_s)
