"""Exactly once, from topic to topic: a batch of messages and the messages made of them.

    async for batch in consumer.batches():
        async with producer.exactly_once(batch) as tx:
            for message in batch:
                await tx.send("enriched", transform(message), key=message.key)

Theory of operation. The new messages are sent in one XA transaction. At the end of the
block its branches are prepared; then the consumer decides, by one write that moves the
group's offsets and names the transaction; then the branches are committed.

    OPEN ── flush, prepare ──> PREPARED ── decide ──> DECIDED ── commit ──> complete
      └── an exception: rolled back, and the batch is delivered again

`metaq/client/decisions/rules.py` has the decision, and why a crash leaves all or
nothing.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Self

from metaq.client.consume.message_batch import ListedMessages
from metaq.client.decisions.member import MemberDecisions
from metaq.client.errors import (
    TransactionInDoubtError,
    TransactionRolledBackError,
    UnknownXidError,
)
from metaq.client.fan_out import for_each, raise_first
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.awaited_calls import AwaitedCalls, to_be_awaited
from metaq.client.produce.runs import frozen, list_outgoing, tagged
from metaq.client.produce.transaction_branch import TransactionParts
from metaq.client.produce.xa_commands import XaBranches, shown
from metaq.errors import (
    ConfigError,
    MetaqError,
    OwnershipLostError,
    TransactionError,
)
from metaq.model import BrokerId, GroupOffset, TopicPartition
from metaq.protocol.transaction_ids import format_key
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers

FLUSH_COUNT: Final = 1000
"""Number of waiting messages at which they are sent, together."""
FLUSH_BYTES: Final = 256 * 1024
"""Bytes of waiting messages at which they are sent."""


class AsyncExactlyOnce(AwaitedCalls):
    """Sends the messages made of one batch. Owned by the caller of `exactly_once`.

    Lifecycle: one `async with` block.

    Concurrency: on the loop; `add` on any thread.
    """

    def __init__(
        self,
        parts: TransactionParts,
        batch: ListedMessages[Any],
        decider: MemberDecisions,
        *,
        confirm: Callable[[], None],
        redeliver: Callable[[], None],
        lost: Callable[[], list[TopicPartition]],
    ) -> None:
        """Create the block; entering it begins the transaction.

        Args:
            parts: parts of the producer.
            batch: the last batch of its consumer.
            decider: decisions of the consumer.
            confirm: counts the messages of the batch as handled.
            redeliver: delivers them again.
            lost: returns the partitions of the batch that were lost since.

        Raises:
            ConfigError: consumer and producer are of different clients.
        """
        super().__init__()
        self._parts = parts
        self._batch = batch
        self._decider = decider
        self._confirm, self._redeliver, self._lost = confirm, redeliver, lost
        if decider.pool is not parts.pool:
            raise ConfigError(
                "exactly_once: the batch is from a consumer of another client: create"
                " the consumer and the producer with one client"
            )
        self._current: XaBranches | None = None
        self._waiting: dict[str, list[OutgoingMessage]] = {}
        self._count = self._size = 0
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()

    @property
    def id(self) -> str:
        """Key of the transaction in the brokers' lists; "" outside the block."""
        return "" if self._current is None else format_key(self._current.xid)

    # -- messages ---------------------------------------------------------------------

    @to_be_awaited
    async def send(
        self,
        topic: str,
        data: BytesLike,
        *,
        attribute: str | None = None,
        key: str | bytes | None = None,
        headers: Headers = (),
        tag: str | None = None,
        partition: str | None = None,
    ) -> None:
        """Add one message; it is sent with others, at the latest at the block's end.

        Args:
            topic: any topic of the cluster, on brokers of this package.
            data: application bytes.
            attribute: application attribute; "" is an attribute, None means none.
            key: stored; the same key goes to the same partition as in `send`.
            headers: names and bytes, stored in this order; a dict, or pairs.
            tag: text stored as the header `tag`, for consumers with `where`.
            partition: `<broker>-<partition>`, the only partition to send it to.

        Raises:
            TransactionError: the block has not begun or has ended, or a MetaQ 1.4
                broker has the partition.
            MetaqError: an earlier message could not be sent; all are rolled back. See
                `TransactionSends.send`.

        Cancellation: all are rolled back.
        """
        message = tagged(
            OutgoingMessage(frozen(data), attribute, key, partition, headers, tag)
        )
        if self.add(topic, [message]):
            await self.flush()

    @to_be_awaited
    async def send_many(
        self, topic: str, messages: Iterable[BytesLike | OutgoingMessage]
    ) -> None:
        """Add several messages, as `send`.

        Args:
            topic: as in `send`.
            messages: bytes, or `OutgoingMessage` objects with further arguments.

        Raises:
            As `send`.
        """
        listed = list_outgoing(messages)
        if self.add(topic, listed):
            await self.flush()

    def add(self, topic: str, messages: list[OutgoingMessage]) -> bool:
        """Keep messages for the next `flush`; from any thread.

        Args:
            topic: topic of the messages.
            messages: checked and encoded, in the order of sending.

        Returns:
            Whether enough wait that the caller has to call `flush`.

        Raises:
            TransactionError: the block is not open.
        """
        self._require_open()
        with self._lock:
            self._waiting.setdefault(topic, []).extend(messages)
            self._count += len(messages)
            self._size += sum(len(one.data) for one in messages)
            return self._count >= FLUSH_COUNT or self._size >= FLUSH_BYTES

    async def flush(self) -> None:
        """Send waiting messages, and wait until brokers have them; raises as `send`."""
        async with self._turn:
            current = self._require_open()
            with self._lock:
                waiting, self._waiting = self._waiting, {}
                self._count = self._size = 0
            deadline_s = self._parts.deadline_s(None)
            for topic, messages in waiting.items():
                await current.put(topic, messages, deadline_s=deadline_s)

    def _require_open(self) -> XaBranches:
        current = self._current
        if current is None:
            raise TransactionError(
                "no exactly-once block is open: use it once, as `with` or `async with`"
            )
        if current.failure is not None:
            raise TransactionError(
                f"{shown(current.xid)} has failed, and is rolled back at the end of its"
                f" block: {current.failure!r}"
            ) from current.failure
        return current

    # -- the block --------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Begin the transaction, once the previous batch is complete.

        Raises:
            OwnershipLostError: a partition of the batch was lost.
            TransactionError: another block of this consumer is open, or this batch was
                written before.
            TransactionInDoubtError: the previous batch is decided, but a broker that is
                away has not committed it yet; this batch is delivered again.
            MetaqError: ZooKeeper cannot be asked; the batch is delivered again.
        """
        parts = self._parts
        if not self._batch.is_last:
            raise TransactionError(
                f"{self._batch!r}: the next messages were requested before it was"
                " written"
            )
        self._decider.check()
        for partition in self._lost():
            self._redeliver()
            raise OwnershipLostError(
                f"{partition}: lost before its messages were written; they will be"
                " delivered again"
            )
        try:
            xid = await self._decider.begin(
                self._batch.begins, deadline_s=parts.deadline_s(None)
            )
        except BaseException:
            self._redeliver()
            raise
        lifetime_s = parts.lifetime_s(None)
        self._current = XaBranches(parts, xid, lifetime_s, is_refusing_others=True)
        parts.counters.counts.begun_count += 1
        return self

    async def __aexit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """Store the new messages and the offsets of the batch: both or neither.

        If an exception leaves the block, none of its messages ever becomes readable,
        and the batch is delivered again.

        *Durability.* On return a majority of the ZooKeeper servers has the decision on
        disk, and the brokers have committed as their transaction settings say.

        Raises:
            OwnershipLostError: a partition of the batch belongs to another member now;
                nothing is stored, and this consumer gets the messages of its own
                partitions again.
            TransactionInDoubtError: no answer shows whether it is decided; the next
                owner of the partitions finds out, and continues accordingly. Or it is
                decided, and a broker that is away will commit it.
            LostBranchError: it is decided, but a broker has lost prepared messages, or
                an operator has dropped them.
            TransactionRolledBackError: the block exceeded its transaction's time-out.
            TransactionError: a message had failed, or its call was never awaited;
                nothing is stored, and the batch is delivered again.
            MetaqError: nothing is stored; the batch is delivered again.

        Cancellation: as an exception, or in doubt.
        """
        current, parts = self._current, self._parts
        if current is None:
            return
        began_s = parts.clock.monotonic_s()
        deadline_s = parts.deadline_s(None)
        try:
            if error is not None:
                await self._give_up(current, deadline_s)
                return
            with parts.counters.failing():
                await self._finish(current, deadline_s)
            parts.counters.on_committed(parts.clock.monotonic_s() - began_s)
        finally:
            self._current = None
            self._decider.end()

    async def _finish(self, current: XaBranches, deadline_s: float) -> None:
        ids = {message.partition: message.id for message in self._batch}
        offsets = {
            partition: GroupOffset(offset, ids.get(partition))
            for partition, offset in self._batch.offsets.items()
        }
        may_be_decided = False
        try:
            current.failure = current.failure or self._unawaited()
            await self.flush()
            brokers = await self._prepare(current, deadline_s)
            self._parts.counters.counts.prepared_count += 1
            may_be_decided = True
            await self._decider.decide(
                current.xid, brokers, offsets, deadline_s=deadline_s
            )
        except BaseException as error:
            is_certain = isinstance(error, MetaqError) and not isinstance(
                error, TransactionInDoubtError
            )
            if is_certain or not may_be_decided:
                await self._give_up(current, deadline_s)
            else:
                self._redeliver()
            raise
        self._confirm()
        await self._decider.complete(deadline_s=deadline_s)

    async def _prepare(self, current: XaBranches, deadline_s: float) -> list[BrokerId]:
        """Prepare all branches; return the brokers that have something to commit.

        Raises:
            TransactionRolledBackError: a broker has dropped its branch.
            MetaqError: a broker refuses, or is away.
        """
        vote = partial(self._parts.vote, xid=current.xid, deadline_s=deadline_s)
        votes = await for_each(vote, current.branches)
        try:
            raise_first(votes)
        except UnknownXidError as error:
            lifetime_s = self._parts.lifetime_s(None)
            raise TransactionRolledBackError(
                f"{shown(current.xid)} is dropped: a broker keeps sent messages until"
                " the end of the block for at most"
                f" transaction_timeout_s={lifetime_s}, or its own"
                " maxTxTimeoutInSeconds, and not over a restart; smaller batches"
                f" (max_count) take less time: {error}"
            ) from error
        return [broker_id for broker_id, has_work in votes.items() if has_work]

    async def _give_up(self, current: XaBranches, deadline_s: float) -> None:
        """Roll back before the decision, and deliver the batch again."""
        self._parts.counters.counts.rolled_back_count += 1
        try:
            await self._decider.give_up(
                current.xid, current.branches, deadline_s=deadline_s
            )
        finally:
            self._redeliver()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id or 'not open'}: {self._batch!r}>"
