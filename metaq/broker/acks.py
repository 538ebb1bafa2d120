"""Appends runs and batches of puts, and answers them once they are durable.

A *run* is the puts of one session to one log in one pass over its input. It is appended
as one piece, has one ticket, and is answered by one formatting operation: only opaque,
id and offset of a put are kept.

A *batch* of a producer is appended once and answered each time it is sent. The
partition log remembers recent batches (`storage/producers.py`). A repeated batch gets
the receipt of the first: at once if that is stored, otherwise together with it
(`PartitionLog.join`). So no batch is acknowledged before it is durable.

*Order.* When a batch is refused, the batches that its producer sent before it received
the refusal are refused too: stored, they would precede the refused one when that is
sent again. They are recognized by their sequence numbers, which continue from it.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Final, NamedTuple, Protocol, TypeAlias

from metaq.broker.context import BrokerContext
from metaq.errors import (
    ClosedError,
    CorruptRecordError,
    DiskError,
    ForbiddenError,
    LogDirOfflineError,
    LogOfflineError,
    MayBeStoredError,
    MetaqError,
    NoSpaceError,
    NotLeaderError,
    SequenceError,
    ServerError,
    StorageError,
    TooFewReplicasError,
    UnavailableError,
    WireError,
)
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, SizeBytes
from metaq.protocol import texts
from metaq.protocol.commands import NO_CHECKSUM
from metaq.protocol.encoding import encode_result
from metaq.protocol.put_replies import encode_put_replies
from metaq.protocol.texts import (
    IN_DOUBT,
    NO_ROOM,
    NOT_LEADER,
    SEQUENCE_USED,
    TOO_FEW_REPLICAS,
    with_code,
)
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch

PUT_OVERHEAD_BYTES: Final = 128
"""Bytes that a command counts in the in-flight bounds in addition to its records: its
reply, and the objects that hold both."""


LIGHT_BYTES: Final = 16 * 1024
"""Maximum bytes in flight of a connection whose puts are written first: less than one
piece of a stream."""

CAUSES: Final[dict[type[MetaqError], str]] = {
    ForbiddenError: "closed",
    NotLeaderError: "not_leader",
    TooFewReplicasError: "too_few_replicas",
    ServerError: "invalid",
    SequenceError: "sequence",
    NoSpaceError: "no_space",
    LogDirOfflineError: "offline",
    LogOfflineError: "damaged",
    MetaqError: "other",
}
"""Label of each error that refuses a put, for the metrics; the first match counts."""

REFUSALS: Final = (
    ForbiddenError, ServerError, UnavailableError, SequenceError, StorageError,
    ClosedError,
)  # fmt: skip

PASSING: Final = (LogOfflineError, ClosedError, CorruptRecordError, DiskError)
"""Errors of one copy of a log; in a replica set, another copy can serve."""

CODES: Final[dict[type[MetaqError], str]] = {
    NoSpaceError: NO_ROOM,
    MayBeStoredError: IN_DOUBT,
    SequenceError: SEQUENCE_USED,
    NotLeaderError: NOT_LEADER,
    TooFewReplicasError: TOO_FEW_REPLICAS,
}
"""Reply codes that give the reason for a refusal (`protocol/texts.py`)."""


HELD_BACK_MAX: Final = 1024
"""Maximum number of refusals remembered by a connection; the oldest is dropped."""

Writer: TypeAlias = tuple[str, LogId]
"""Producer of a batch, and the partition it was sent to."""


class HeldBack(NamedTuple):
    """A refusal that also applies to the next batch."""

    next_sequence: int
    """Sequence number of the next batch of a producer that has not seen the refusal."""
    error: MetaqError


class Answerer(Protocol):
    """Session interface used by put handlers."""

    context: BrokerContext
    held_back: dict[Writer, HeldBack]
    """Refusals of batches that their producers will send again."""
    taker_count: int
    """Number of its waiting `take` and `listen` commands."""

    @property
    def in_flight_bytes(self) -> int:
        """Return the bytes held by its commands in flight."""

    def hold(self, *, count: int, size_bytes: int) -> None:
        """Count commands as in flight until `answer`."""

    def answer(
        self,
        replies: bytes,
        *,
        count: int,
        size_bytes: int,
        joins_next: bool = False,
        is_alone: bool = False,
    ) -> None:
        """Send replies to `count` commands that held `size_bytes` in flight.

        With `joins_next` they are sent together with the next replies, if more are due;
        with `is_alone` they are sent within this call, however many are due.
        """

    def run_out(self) -> None:
        """Close the connection because there is no memory for its replies."""


class Receipts(NamedTuple):
    """Values for the replies to a run of puts, as columns of one length."""

    opaques: Sequence[bytes]
    """Opaques in decimal, as in the replies."""
    ids: Sequence[int]
    offsets: Sequence[int]


class PutTicket:
    """Ticket of a run of puts; one of its callbacks is called once, on the loop."""

    __slots__ = (
        "_answerer", "_appended_s", "_batch", "_record_count", "log_id", "receipts",
        "size_bytes",
    )  # fmt: skip

    def __init__(
        self,
        answerer: Answerer,
        *,
        log_id: LogId,
        receipts: Receipts,
        record_count: int,
        size_bytes: int,
        batch: StoredBatch | None = None,
    ) -> None:
        self._answerer = answerer
        self._batch = batch
        self.log_id: Final = log_id
        self.receipts: Final = receipts
        self._record_count = record_count
        self.size_bytes: Final = size_bytes
        self._appended_s = answerer.context.clock.monotonic_s()

    def on_stored(self) -> None:
        """Answer 200: the bytes are durable under the topic's policy."""
        context = self._answerer.context
        waited_s = context.clock.monotonic_s() - self._appended_s
        context.put_latency.record(waited_s, self._record_count)
        try:
            replies = self.encode()
        except MemoryError:
            # Do not raise: other tickets of this group still need replies.
            replies = b""
            self._answerer.run_out()
        self._answerer.answer(
            replies, count=len(self.receipts.opaques), size_bytes=self.size_bytes
        )

    def encode(self) -> bytes:
        """Return the replies."""
        return encode_put_replies(self.log_id.partition, *self.receipts)

    def on_failed(self, error: StorageError | ClosedError) -> None:
        """Refuse every put of the run."""
        context, count = self._answerer.context, self._record_count
        refusal = refuse_put(context, error, self.log_id, count)
        if (batch := self._batch) is not None:
            writer = batch.producer, self.log_id
            hold_back(self._answerer, writer, batch.next_sequence, error)
        body = str(refusal).encode()
        opaques = self.receipts.opaques
        self._answerer.answer(
            b"".join([encode_result(refusal.status, body, int(o)) for o in opaques]),
            count=len(opaques),
            size_bytes=self.size_bytes,
        )


def append_run(
    log: PartitionLog,
    chunks: Sequence[Buffer],
    answerer: Answerer,
    *,
    size_bytes: int,
    record_count: int,
    last_id: MessageId,
    receipts: Receipts,
    batch: StoredBatch | None = None,
    finish: Iterable[None] = (),
) -> None:
    """Append a run or a batch; its ticket answers the commands, at once if refused.

    The chunks are the records, split anywhere; the log owns them and the receipts from
    now on. The first offset must be the log end offset. For `batch` and `finish` see
    `PartitionLog.append`.
    """
    offset = receipts.offsets[0]
    assert offset == log.next_offset, f"{log.log_id}: {offset} {log.next_offset}"
    count = len(receipts.opaques)
    in_flight = size_bytes + count * PUT_OVERHEAD_BYTES
    ticket = PutTicket(
        answerer,
        log_id=log.log_id,
        receipts=receipts,
        record_count=record_count,
        size_bytes=in_flight,
        batch=batch,
    )
    answerer.hold(count=count, size_bytes=in_flight)
    try:
        log.append(
            chunks,
            size_bytes=SizeBytes(size_bytes),
            record_count=record_count,
            last_id=last_id,
            ticket=ticket,
            batch=batch,
            finish=finish,
            is_light=is_light(answerer),
        )
    except (StorageError, ClosedError) as error:
        ticket.on_failed(error)
    except MemoryError:
        answerer.answer(b"", count=count, size_bytes=in_flight)
        raise


def is_light(answerer: Answerer) -> bool:
    """Return whether the puts of a session are written first, held ones counted."""
    return answerer.in_flight_bytes <= LIGHT_BYTES


def require_checksum(found: int, wanted: int) -> None:
    """Compare the checksum of a payload with the one sent, unless that is NO_CHECKSUM.

    Raises:
        ServerError: they differ.
    """
    if wanted not in (NO_CHECKSUM, found):
        raise ServerError(texts.CHECKSUM_FAILURE)


def count_puts(
    context: BrokerContext, topic: str, *, count: int, payload_bytes: int
) -> None:
    """Count puts, including those that will fail."""
    context.counters.cmd_put += count
    if context.topics.has_stat(topic):
        realtime = context.realtime
        realtime.record("put", topic, count=count)
        realtime.record("message_size", topic, count=count, value=payload_bytes)


def refuse_put(
    context: BrokerContext,
    error: MetaqError,
    at: LogId,
    count: int = 1,
) -> WireError:
    """Return the reply to failed puts, and count them.

    ForbiddenError becomes 403, which does not count as a failure; refusals by a replica
    set become 503, others 500, with a code if `CODES` has one. The partition is the
    resolved one, or the one sent if the put failed before it was resolved.
    """
    if isinstance(error, ClosedError) and context.topics.refusal is not None:
        error = context.topics.refusal  # the log has just become a follower
    cause = next(word for kind, word in CAUSES.items() if isinstance(error, kind))
    context.counters.rejections[cause] += count
    if not isinstance(error, ForbiddenError):
        context.counters.put_failed += count
        if context.topics.has_stat(at.topic):
            context.realtime.record("put_failed", at.topic, count=count)
    return wire_error(context, error, at)


def wire_error(context: BrokerContext, error: MetaqError, at: LogId) -> WireError:
    """Return the reply to a command that failed at a partition, as `refuse_put`."""
    if isinstance(error, ClosedError) and context.topics.refusal is not None:
        error = context.topics.refusal
    if context.replica is not None:
        if isinstance(error, LogDirOfflineError):
            error = NotLeaderError(str(error))  # it resigns; another leads soon
        elif isinstance(error, PASSING):
            error = UnavailableError(str(error))  # the log is repaired and reopened
    detail = str(error)
    if isinstance(error, NoSpaceError):
        detail = f"{texts.NO_ROOM_PREFIX}{detail}"
    text = texts.put_failed(context.address, at.topic, at.partition, detail)
    if isinstance(error, ForbiddenError):
        return ForbiddenError(text)
    for kind, word in CODES.items():
        if isinstance(error, kind):
            text = with_code(text, word, {})
    if isinstance(error, UnavailableError):
        return type(error)(text)
    return ServerError(text)


def hold_back(
    answerer: Answerer, writer: Writer, next_sequence: int, error: MetaqError
) -> None:
    """Refuse the batches after a refused one, if its producer will send that again.

    The disk may refuse a batch after a later one was refused at once; the refusal with
    the highest sequence number is kept.

    Args:
        answerer: session of the batch.
        writer: producer and partition of the batch.
        next_sequence: sequence number after its last record.
        error: why it was refused.
    """
    refusal, held = wire_error(answerer.context, error, writer[1]), answerer.held_back
    is_sent_again = isinstance(refusal, ForbiddenError | UnavailableError)
    if not (is_sent_again or isinstance(error, NoSpaceError)):
        return
    if writer not in held or held[writer].next_sequence < next_sequence:
        # A copy has no traceback, which would keep the payload in memory.
        held[writer] = HeldBack(next_sequence, copy(error))
        if len(held) > HELD_BACK_MAX:
            del held[next(iter(held))]


def answer_repeated(
    log: PartitionLog, batch: StoredBatch, answerer: Answerer, *, opaque: int
) -> None:
    """Answer a batch that is stored or being stored; append nothing."""
    answerer.context.counters.batch_repeated += 1
    answerer.hold(count=1, size_bytes=PUT_OVERHEAD_BYTES)
    ticket = PutTicket(
        answerer,
        log_id=log.log_id,
        receipts=Receipts((b"%d" % opaque,), (batch.first_id,), (batch.offset,)),
        record_count=batch.count,
        size_bytes=PUT_OVERHEAD_BYTES,
        batch=batch,
    )
    log.join(batch, ticket)
