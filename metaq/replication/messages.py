"""Messages of the replicas of a set to each other: the payloads of `follow`. Pure.

    payload of a message, or of the `value` that answers it

    byte  0             4                 4 + length
          +-------------+-----------------+---------------------------------------+
          | head length | head            | bodies of the chunks, back to back    |
          | u32         | JSON, an object | 104 bytes for each note, then records |
          +-------------+-----------------+---------------------------------------+

| kind | asked by | answered by | to |
|---|---|---|---|
| `join` | a follower: what it has | its leader | cut its logs where they part |
| `pull` | a follower: what it has synced | its leader, when there is more | go on |
| `tables` | a claimer | a member of the in-sync set | learn what it has |
| `tail` | a claimer | the same | take over what it lacks itself |
| | one with damage | any with a good copy | mend it, where both copies are the same |

A head has the fields of its message by name, without those that have their default.
Properties that are not known are left out. What a peer sends is checked here once:
kinds, ranges and sizes, and the checksum of the bytes of each chunk.
"""

import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, Final, NamedTuple, TypeVar

from metaq.errors import RemoteProtocolError
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.protocol.codec import PRODUCER
from metaq.protocol.decimals import I32_MAX, I64_MAX, I64_MIN
from metaq.record.checksum import crc32
from metaq.replication.election import Flag
from metaq.replication.epochs import CopyFacts, Epoch, EpochStart
from metaq.replication.json_fields import (
    FieldError,
    Reader,
    listed,
    number,
    one_of,
    row,
    switch,
    text,
    to_json,
)
from metaq.replication.progress import JoinAnswer
from metaq.storage.append_request import CopiedAppends
from metaq.storage.producer_file import ENTRY, ENTRY_BYTES
from metaq.storage.producers import StoredBatch

JOIN: Final = "join"
PULL: Final = "pull"
TABLES: Final = "tables"
TAIL: Final = "tail"

STALE_EPOCH: Final = "stale-epoch"
"""Code of a refusal: the message is of an epoch that is over; `epoch` is the later."""

U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1

_HEAD: Final = struct.Struct(">I")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JoinLog:
    """One log of a follower that joins."""

    log_id: LogId
    copy: CopyFacts


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A follower would follow: it says what it has."""

    set_id: str
    epoch: Epoch
    replica: int
    incarnation: int
    token: str
    """Text of this life, as its node `present/K` has it."""
    revision: int
    """Of the record in its `set` file."""
    flag: Flag
    logs: tuple[JoinLog, ...]


@dataclass(frozen=True, slots=True)
class LogAnswer:
    """The leader's answer about one of its logs."""

    log_id: LogId
    answer: JoinAnswer


@dataclass(frozen=True, slots=True)
class JoinReply:
    """All logs of the leader, for a follower that joins."""

    epoch: Epoch
    logs: tuple[LogAnswer, ...]
    gone: tuple[int, ...]
    """Numbers of the follower's logs that were deleted."""
    is_lost: bool
    """The follower lacks bytes that it promised; it cuts nothing before it knows."""


@dataclass(frozen=True, slots=True)
class Pull:
    """A follower says what it has synced, and has room for one data message."""

    epoch: Epoch
    replica: int
    incarnation: int
    revision: int
    acks: tuple[tuple[int, Offset], ...]
    """Number of a log and its synced end, of those that changed."""
    credit_bytes: int
    """Most bytes of records in the answer; one append may be larger."""
    wants_hw: bool
    """High watermarks alone are sent at once: gets wait for them here."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole appends of one log and one segment, back to back."""

    number: int
    offset: Offset
    size_bytes: SizeBytes
    """1 or more."""
    record_count: int
    last_id: MessageId
    """Greatest id among the records."""
    crc32: int
    """CRC-32 of the bytes."""
    segment: Offset
    """Base offset of the leader's segment."""
    batches: tuple[StoredBatch, ...]
    """Notes of the batches that begin in it."""
    body: Sequence[Buffer] = field(repr=False)
    """Its bytes, in pieces."""

    @property
    def end_offset(self) -> Offset:
        """Return the offset after its last byte."""
        return Offset(self.offset + self.size_bytes)

    def appends(self) -> CopiedAppends:
        """Return what a log that follows appends."""
        return CopiedAppends(
            self.offset,
            self.body,
            self.size_bytes,
            self.record_count,
            self.last_id,
            self.batches,
        )


@dataclass(frozen=True, slots=True)
class Data:
    """The answer to a pull."""

    epoch: Epoch
    marks: tuple[tuple[int, Offset, Offset], ...] = ()
    """Number, high watermark and log start, of logs of which one has moved."""
    chunks: tuple[Chunk, ...] = ()
    births: tuple[LogAnswer, ...] = ()
    """Logs that the leader has made since."""
    gone: tuple[int, ...] = ()
    """Numbers of logs that it has deleted since."""


@dataclass(frozen=True, slots=True)
class TablesRequest:
    """A claimer asks a member what it has; the member follows no older epoch then."""

    set_id: str
    epoch: Epoch
    replica: int


@dataclass(frozen=True, slots=True)
class TablesReply:
    """All that a member has."""

    copies: tuple[JoinLog, ...]
    last_id: MessageId
    """Greatest id that it has stamped or copied."""


@dataclass(frozen=True, slots=True)
class TailRequest:
    """A claimer asks a member for bytes that it lacks itself."""

    set_id: str
    epoch: Epoch
    number: int
    offset: Offset
    max_bytes: int
    is_unchecked: bool = False
    """Send them as they are on the disk: no replica has a good copy of all."""
    copy: CopyFacts | None = None
    """The asker's copy of the log: the answer has only bytes that are the same in both.
    None: of a claimer."""


@dataclass(frozen=True, slots=True)
class TailReply:
    """Bytes from the offset on; None where the member has none."""

    chunk: Chunk | None
    is_damaged: bool = False
    """They are damaged there, too."""


# -- fields ---------------------------------------------------------------------------


def _copy(value: Any, name: str) -> CopyFacts:
    copy = _FACTS(value, name)
    # A watermark above the end is said as it is: then bytes are missing there.
    if copy.start > copy.end:
        raise FieldError(
            f"log {copy.number}: starts at {copy.start}, ends at {copy.end}"
        )
    return copy


def _copy_or_none(value: Any, name: str) -> CopyFacts | None:
    return None if value is None else _copy(value, name)


def _items(*items: Any) -> tuple[Any, ...]:
    return items


class _ChunkRow(NamedTuple):
    """Head of a chunk."""

    number: int
    offset: Offset
    size_bytes: SizeBytes
    record_count: int
    last_id: MessageId
    crc32: int
    segment: Offset
    notes: int
    """Number of its notes."""
    notes_crc32: int


_COUNT: Final = number()
_OFFSET: Final = number()
_ID: Final = number(I64_MIN)
_U32: Final = number(0, U32_MAX)
_NUMBER: Final = number(0, U64_MAX)
_NUMBERS: Final = listed(_NUMBER, "log number")
_EPOCH: Final = row(Epoch, epoch=_COUNT, nonce=text)
_ENTRY: Final = row(EpochStart, epoch=_EPOCH, start=_OFFSET)
_FACTS: Final = row(
    CopyFacts,
    number=_NUMBER,
    start=_OFFSET,
    end=_OFFSET,
    hw=_OFFSET,
    table=listed(_ENTRY, "entry"),
)
_LOG_ID: Final = row(LogId, topic=text, partition=number(0, I32_MAX))
_LOGS: Final = listed(row(JoinLog, log_id=_LOG_ID, copy=_copy), "log")
_ANSWER: Final = row(JoinAnswer, copy=_copy, point=_OFFSET, target=_OFFSET)
_ANSWERS: Final = listed(row(LogAnswer, log_id=_LOG_ID, answer=_ANSWER), "answer")
_ACKS: Final = listed(row(_items, number=_NUMBER, end=_OFFSET), "ack")
_MARKS: Final = listed(row(_items, number=_NUMBER, hw=_OFFSET, start=_OFFSET), "mark")
_CHUNK: Final = row(
    _ChunkRow,
    number=_NUMBER,
    offset=_OFFSET,
    size_bytes=number(1, U32_MAX),
    record_count=number(1, U32_MAX),
    last_id=_ID,
    crc32=_U32,
    segment=_OFFSET,
    notes=_U32,
    notes_crc32=_U32,
)
_CHUNKS: Final = listed(_CHUNK, "chunk")


# -- payloads -------------------------------------------------------------------------


def _encode(head: dict[str, Any], chunks: Iterable[Chunk] = ()) -> bytes:
    rows, bodies = [], list[Buffer]()
    for each in chunks:
        notes = b"".join(map(_encode_note, each.batches))
        rows.append(
            _ChunkRow(
                each.number,
                each.offset,
                each.size_bytes,
                each.record_count,
                each.last_id,
                each.crc32,
                each.segment,
                len(each.batches),
                crc32(notes),
            )
        )
        bodies += (notes, *each.body)
    if rows:
        head["chunks"] = rows
    data = to_json(head).encode()
    return b"".join((_HEAD.pack(len(data)), data, *bodies))


def _decode(
    payload: bytes, readers: Mapping[str, Reader[Any]], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Return the fields of a head, and `chunks`, which fill the rest exactly."""
    try:
        (length,) = _HEAD.unpack_from(payload)
        head = json.loads(payload[_HEAD.size : _HEAD.size + length])
    except (struct.error, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"message: expected a head, got {payload[:80]!r}"
        ) from error
    if not isinstance(head, dict):
        raise RemoteProtocolError(f"message: expected an object, got {head!r:.80}")
    try:
        found = {
            name: read(head.get(name), name)
            for name, read in readers.items()
            if name in head or name not in optional
        }
        rows = _CHUNKS(head.get("chunks", []), "chunks")
        rest = memoryview(payload)[_HEAD.size + length :]
        found["chunks"] = _decode_chunks(rows, rest)
    except FieldError as error:
        raise RemoteProtocolError(str(error)) from error
    return found


def _decode_chunks(rows: Iterable[_ChunkRow], rest: memoryview) -> tuple[Chunk, ...]:
    chunks = []
    for each in rows:
        chunk, size = _decode_chunk(each, rest)
        chunks.append(chunk)
        rest = rest[size:]
    if rest:
        raise FieldError(f"message: {len(rest)} bytes belong to no chunk")
    return tuple(chunks)


def _decode_chunk(found: _ChunkRow, rest: memoryview) -> tuple[Chunk, int]:
    """Return a chunk, and the number of bytes that are its own."""
    offset, note_bytes = found.offset, found.notes * ENTRY_BYTES
    size = note_bytes + found.size_bytes
    if size > len(rest) or offset + found.size_bytes > I64_MAX:
        raise FieldError(f"chunk: expected {size} bytes, got {len(rest)}")
    notes, body = rest[:note_bytes], rest[note_bytes:size]
    for part, expected in ((body, found.crc32), (notes, found.notes_crc32)):
        if (got := crc32(part)) != expected:
            raise FieldError(
                f"chunk of log {found.number} at {offset}: expected checksum"
                f" {expected}, got {got}"
            )
    batches = tuple(map(_decode_note, ENTRY.iter_unpack(notes)))
    chunk = Chunk(*found[:7], batches, (body,))
    for batch in batches:
        if not offset <= batch.offset or batch.end_offset > chunk.end_offset:
            raise FieldError(f"chunk at {offset}: {batch} is not in it")
    return chunk, size


def _encode_note(batch: StoredBatch) -> bytes:
    return ENTRY.pack(
        batch.producer.encode("ascii"),
        batch.sequence,
        batch.count,
        batch.checksum,
        batch.first_id,
        batch.offset,
        batch.size_bytes,
        0,
    )


def _decode_note(entry: tuple[Any, ...]) -> StoredBatch:
    name, sequence, count, checksum, first_id, offset, size, _crc = entry
    producer = name.rstrip(b"\0").decode("latin-1")
    if sequence < 0 or not PRODUCER.fullmatch(producer):
        raise FieldError(f"note: {producer!r} {sequence} is no batch")
    return StoredBatch(
        producer, sequence, count, checksum, first_id, offset, SizeBytes(size)
    )


# -- messages -------------------------------------------------------------------------


def _codec(
    kind: Callable[..., T], **readers: Reader[Any]
) -> tuple[Callable[[T], bytes], Callable[[bytes], T]]:
    """Return what writes the messages of a class, and what reads them.

    The one that reads raises RemoteProtocolError for what the other does not write.

    Args:
        kind: the class.
        readers: name of each field in the head → its reader.
    """
    defaults = {name: each.default for name, each in signature(kind).parameters.items()}
    optional = [name for name, each in defaults.items() if each is not Parameter.empty]

    def encode(message: T) -> bytes:
        head = {name: getattr(message, name) for name in readers}
        head = {name: each for name, each in head.items() if each != defaults[name]}
        return _encode(head, getattr(message, "chunks", ()))

    def decode(payload: bytes) -> T:
        found = _decode(payload, readers, optional)
        if "chunks" not in defaults:
            del found["chunks"]
        return kind(**found)

    return encode, decode


encode_join, decode_join = _codec(
    JoinRequest,
    set_id=text,
    epoch=_EPOCH,
    replica=_COUNT,
    incarnation=_COUNT,
    token=text,
    revision=_COUNT,
    flag=one_of(Flag),
    logs=_LOGS,
)
encode_join_reply, decode_join_reply = _codec(
    JoinReply, epoch=_EPOCH, logs=_ANSWERS, gone=_NUMBERS, is_lost=switch
)
encode_pull, decode_pull = _codec(
    Pull,
    epoch=_EPOCH,
    replica=_COUNT,
    incarnation=_COUNT,
    revision=_COUNT,
    acks=_ACKS,
    credit_bytes=_COUNT,
    wants_hw=switch,
)
encode_data, decode_data = _codec(
    Data, epoch=_EPOCH, marks=_MARKS, births=_ANSWERS, gone=_NUMBERS
)
encode_tables, decode_tables = _codec(
    TablesRequest, set_id=text, epoch=_EPOCH, replica=_COUNT
)
encode_tables_reply, decode_tables_reply = _codec(
    TablesReply, copies=_LOGS, last_id=_ID
)
encode_tail, decode_tail = _codec(
    TailRequest,
    set_id=text,
    epoch=_EPOCH,
    number=_NUMBER,
    offset=_OFFSET,
    max_bytes=_COUNT,
    is_unchecked=switch,
    copy=_copy_or_none,
)


def encode_tail_reply(reply: TailReply) -> bytes:
    """Return the payload of the answer to a tail."""
    head = {"damaged": True} if reply.is_damaged else {}
    return _encode(head, () if reply.chunk is None else (reply.chunk,))


def decode_tail_reply(payload: bytes) -> TailReply:
    """Read it.

    Raises:
        RemoteProtocolError: it is not as `encode_tail_reply` writes it.
    """
    found = _decode(payload, {"damaged": switch}, ("damaged",))
    chunks, is_damaged = found["chunks"], found.get("damaged", False)
    if len(chunks) > 1:
        raise RemoteProtocolError(f"tail: expected 1 chunk, got {len(chunks)}")
    return TailReply(chunks[0] if chunks else None, is_damaged)
