"""Requests: messages of a batch that are sent together, and the replies to them.

A request is one `mput`, or a run of single puts if the broker has no `mput`. It belongs
to one partition sender at a time, which sends it until its messages have their outcome.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import groupby

from metaq.client.produce.attempts import WRAPPER_BYTES, BatchSpan
from metaq.client.produce.batches import Batch, BatchName, BatchOutcome, SendResult
from metaq.client.produce.scheduling import AT_ONCE, Scheduled
from metaq.errors import MetaqError, UnroutableError
from metaq.model import MessageId, Offset, TopicPartition
from metaq.peer.replies import ReceiptColumns, parse_receipt, parse_scheduled
from metaq.protocol import texts
from metaq.protocol.commands import OWN_TIMES, Mput, Reply
from metaq.protocol.encoding import encode, encode_puts
from metaq.record.checksum import checksum, checksums
from metaq.record.ids import ids_from
from metaq.record.layout import HEADER_BYTES


class Request:
    """Messages of a batch that are sent together. Owner: one partition sender.

    A run of puts is a `PutListener` of its connection. It is sent once: failed puts
    become requests of their own. Ids and offsets from its receipts are kept in columns.
    """

    __slots__ = (
        "_first_opaque", "_ids", "_is_stored", "_offsets", "_on_failed", "_on_stored",
        "attempt", "batch", "error", "is_in_doubt", "left", "name", "order",
        "partition", "sequence", "span",
    )  # fmt: skip

    def __init__(
        self, batch: Batch, span: BatchSpan, partition: TopicPartition, order: int
    ) -> None:
        self.batch = batch
        self.span = span
        self.partition = partition
        self.order = order
        """Position in the order of its sender's requests."""
        self.sequence: int | None = None
        """Sequence at the broker; None if not sent yet, or to be renumbered."""
        self.name: BatchName | None = batch.name
        self.attempt = 0
        """Number of the last attempt, from 1; 0 before the first."""
        self.left = 0
        """Number of its commands in flight."""
        self.error: MetaqError | None = None
        """Error of the last attempt."""
        self.is_in_doubt = False

    @property
    def message_count(self) -> int:
        """Number of its messages."""
        return self.span.end - self.span.first

    @property
    def command_count(self) -> int:
        """Number of commands as which it is sent."""
        return 1 if self.span.is_mput else self.message_count

    def like(self, span: BatchSpan) -> "Request":
        """Return a request in the same state for other messages of the batch."""
        made = Request(self.batch, span, self.partition, self.order)
        made.name, made.error, made.attempt = self.name, self.error, self.attempt
        made.is_in_doubt = self.is_in_doubt
        return made

    def split(
        self, messages: Collection[int]
    ) -> tuple[list["Request"], list["Request"]]:
        """Return requests for refused messages, and requests for all others.

        All of them count in `Batch.requests_left`.

        Args:
            messages: indexes of the refused messages in this request; if there are
                none, it is halved.
        """
        first, end, _ = self.span
        refused = {first + number for number in messages} & {*range(first, end)}
        parts = [
            (is_refused, list(part))
            for is_refused, part in groupby(range(first, end), refused.__contains__)
        ]
        if not refused:
            middle = (first + end) // 2
            parts = [(False, [first, middle - 1]), (False, [middle, end - 1])]
        failed, others = list[Request](), list[Request]()
        for is_refused, part in parts:
            made = self.like(BatchSpan(part[0], part[-1] + 1, is_mput=True))
            (failed if is_refused else others).append(made)
        self.batch.requests_left += len(parts) - 1
        return failed, others

    def use_spare_name(self) -> bool:
        """Switch to the spare name; return False if there is none."""
        if self.name is None or self.name.spare is None:
            return False
        self.name = BatchName(self.name.spare, self.name.sequence, None)
        self.sequence = None
        return True

    def outcome_of(self, reply: Reply) -> BatchOutcome:
        """Return the outcome in the reply to its `mput`; raises as `parse_receipt`."""
        batch, partition, (first, end, _) = self.batch, self.partition, self.span
        if not batch.times:
            receipt = parse_receipt(reply, partition.partition)
            result = SendResult(receipt.id, partition, receipt.offset)
            if receipt.offset >= 0:
                return BatchOutcome(first, result)
            ids = ids_from(receipt.id, self.message_count)
            return BatchOutcome(first, result, ids, [receipt.offset] * len(ids))
        receipt, tier = parse_scheduled(reply, partition.partition)
        offset, offsets = receipt.offset, list[int]()
        if tier == AT_ONCE and offset < 0:  # to an exchange
            offsets = [offset] * (end - first)
        elif tier == AT_ONCE:
            offsets = [offset + batch.size_of(first, at) for at in range(first, end)]
        head_bytes = HEADER_BYTES + WRAPPER_BYTES + len(partition.topic.encode())
        while len(offsets) < end - first:
            # The broker holds contiguous messages with the same time as one record.
            start = at = first + len(offsets)
            while at < end and batch.times[at] == batch.times[start]:
                at += 1
            offsets += [offset] * (at - start)
            offset = Offset(offset + head_bytes + batch.size_of(start, at))
        due_ms = batch.times[first]
        result = Scheduled(receipt.id, partition, receipt.offset, due_ms, tier)
        return BatchOutcome(first, result, ids_from(receipt.id, end - first), offsets)

    @property
    def own_times(self) -> Sequence[int]:
        """Delivery times of its messages; () if none or all have the same."""
        return self.batch.own_times(self.span.first, self.span.end)

    # -- as bytes ---------------------------------------------------------------------

    def encode_mput(
        self, opaque: int, producer_id: str, *, is_mandatory: bool | None = None
    ) -> bytes:
        """Return the `mput`; the request's own name overrides the producer's.

        Raises:
            LocalProtocolError: the topic's name cannot be sent.
        """
        if self.name is not None:
            producer_id = self.name.producer
            self.sequence = self.name.sequence + self.span.first
        assert self.sequence is not None
        times = self.batch.times[self.span.first : self.span.end]
        deliver_ms = OWN_TIMES if self.own_times else times[0] if times else None
        records = self.batch.encode(self.span.first, self.span.end)
        return encode(
            Mput(
                topic=self.partition.topic,
                partition=self.partition.partition,
                count=self.message_count,
                checksum=checksum(records),
                opaque=opaque,
                payload=records,
                producer=producer_id,
                sequence=self.sequence,
                deliver_ms=deliver_ms,
                is_mandatory=is_mandatory,
            )
        )

    def encode_puts(self, opaques: range, first: int | None = None) -> bytes:
        """Return single puts of contiguous messages.

        Args:
            opaques: one for each message.
            first: index of the first message in the batch; None for that of the
                request.

        Raises:
            LocalProtocolError: the topic's name cannot be sent.
        """
        batch, first = self.batch, self.span.first if first is None else first
        numbers, flags = range(first, first + len(opaques)), None
        payloads = batch.payloads[numbers.start : numbers.stop]
        if batch.flags:
            flags = [batch.flags.get(at, 0) for at in numbers]
        return encode_puts(
            self.partition.topic,
            self.partition.partition,
            payloads,
            flags=flags,
            checksums=checksums(payloads),
            opaques=opaques,
        )

    # -- a run of puts ----------------------------------------------------------------

    def expect_receipts(
        self,
        opaques: range,
        on_stored: Callable[["Request", int], None],
        on_failed: Callable[["Request", Sequence[int], MetaqError], None],
    ) -> None:
        """Prepare for the receipts of a run of puts.

        Args:
            opaques: one for each put.
            on_stored: called with the number of puts newly stored.
            on_failed: called with the opaques of failed puts, and their error.
        """
        count = len(opaques)
        self._first_opaque = opaques.start
        self._ids = [0] * count
        self._offsets = [0] * count
        self._is_stored: list[bool | None] = [None] * count  # None: no answer
        self._on_stored = on_stored
        self._on_failed = on_failed

    def sizes(self) -> list[int]:
        """Return the size of each put's frame, in bytes."""
        start, first = self._first_opaque, self.span.first
        return [
            len(self.encode_puts(range(start + at, start + at + 1), first + at))
            for at in range(self.message_count)
        ]

    def on_receipts(self, receipts: ReceiptColumns) -> None:
        """Record stored puts; `receipts` are in the order of their opaques."""
        if not receipts.are_of(self.partition.partition):
            for reply in receipts.replies():
                self.on_outcome((reply.opaque,), reply)
        elif self.left:  # otherwise they were given up
            self._note(receipts)
            self._on_stored(self, len(receipts.opaques))

    def on_outcome(self, opaques: Sequence[int], outcome: Reply | MetaqError) -> None:
        """Record the reply to one put, or the error of several; opaques ascend."""
        try:
            if isinstance(outcome, MetaqError):
                raise outcome
            receipt = parse_receipt(outcome, self.partition.partition)
            if not receipt.copy_count:
                raise UnroutableError(f"{self.partition}: {texts.UNROUTED}")
        except MetaqError as error:
            if self.left:
                self._on_failed(self, opaques, error)
        else:
            partitions = [receipt.partition]
            self.on_receipts(
                ReceiptColumns(opaques, [receipt.id], partitions, [receipt.offset])
            )

    def _note(self, receipts: ReceiptColumns) -> None:
        opaques, ids, _, offsets = receipts
        first, end = (
            opaques[0] - self._first_opaque,
            opaques[-1] + 1 - self._first_opaque,
        )
        if end - first == len(opaques):
            self._ids[first:end] = ids
            self._offsets[first:end] = offsets
            self._is_stored[first:end] = [True] * len(opaques)
        else:
            for opaque, message_id, offset in zip(opaques, ids, offsets, strict=True):
                at = opaque - self._first_opaque
                self._ids[at], self._offsets[at] = message_id, offset
                self._is_stored[at] = True

    def unanswered(self) -> list[int]:
        """Return the opaques of unanswered puts, ascending."""
        return [
            self._first_opaque + at
            for at, is_stored in enumerate(self._is_stored)
            if is_stored is None
        ]

    def cut(self, opaques: Sequence[int]) -> list["Request"]:
        """Return failed puts as requests, one for each contiguous range of `opaques`.

        All of them count in `Batch.requests_left`. If memory runs out, none is cut out.

        Args:
            opaques: of the failed puts, ascending.
        """
        found, base = [], self.span.first
        failed = [opaque - self._first_opaque for opaque in opaques]
        for _, group in groupby(enumerate(failed), lambda pair: pair[1] - pair[0]):
            some = [at for _, at in group]
            span = BatchSpan(base + some[0], base + some[-1] + 1, is_mput=False)
            found.append(self.like(span))
        self.batch.requests_left += len(found)
        for at in failed:
            self._is_stored[at] = False
        return found

    def outcomes(self) -> list[BatchOutcome]:
        """Return the outcomes of the stored puts."""
        outcomes, at = [], 0
        for is_stored, group in groupby(self._is_stored):
            end = at + len(list(group))
            if is_stored:
                ids, offsets = self._ids[at:end], self._offsets[at:end]
                result = SendResult(
                    MessageId(ids[0]), self.partition, Offset(offsets[0])
                )
                first = self.span.first + at
                outcomes.append(BatchOutcome(first, result, ids, offsets))
            at = end
        return outcomes
