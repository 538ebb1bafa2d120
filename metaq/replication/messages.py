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
| `sum` | any | any | compare a sealed segment by its checksum |

A head is its message as `json_values.py` has it, with a row for each chunk. What a peer
sends is checked here once: kinds, ranges and sizes, and the checksum of the bytes of
each chunk.
"""

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

from metaq.errors import RemoteProtocolError
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.protocol.codec import PRODUCER
from metaq.protocol.decimals import I64_MAX
from metaq.record.checksum import crc32
from metaq.replication.election import Flag
from metaq.replication.epochs import CopyFacts, Epoch
from metaq.replication.json_values import (
    FieldError,
    LogNumber,
    Reader,
    fields_of,
    number,
    reader_of,
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
SUM: Final = "sum"

STALE_EPOCH: Final = "stale-epoch"
"""Code of a refusal: the message is of an epoch that is over; `epoch` is the later."""

_HEAD: Final = struct.Struct(">I")
_U32: TypeAlias = Annotated[int, number(0, 2**32 - 1)]
_POSITIVE: Final = number(1, 2**32 - 1)

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
    gone: tuple[LogNumber, ...]
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
    acks: tuple[tuple[LogNumber, Offset], ...]
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
    marks: tuple[tuple[LogNumber, Offset, Offset], ...] = ()
    """Number, high watermark and log start, of logs of which one has moved."""
    chunks: Annotated[tuple[Chunk, ...], lambda found, _: found] = ()
    births: tuple[LogAnswer, ...] = ()
    """Logs that the leader has made since."""
    gone: tuple[LogNumber, ...] = ()
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
    number: LogNumber
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


@dataclass(frozen=True, slots=True)
class SumRequest:
    """A replica compares bytes of a log with those of another."""

    set_id: str
    copy: CopyFacts
    """The asker's copy of the log."""
    start: Offset
    end: Offset
    checksum: _U32
    """CRC-32 of the asker's bytes, as its span index has it."""


@dataclass(frozen=True, slots=True)
class SumReply:
    """Result of a comparison."""

    is_known: bool
    """Whether the other one can tell, by its span index."""
    is_equal: bool


class _ChunkRow(NamedTuple):
    """Head of a chunk."""

    number: LogNumber
    offset: Offset
    size_bytes: Annotated[SizeBytes, _POSITIVE]
    record_count: Annotated[int, _POSITIVE]
    last_id: MessageId
    crc32: _U32
    segment: Offset
    notes: _U32
    """Number of its notes."""
    notes_crc32: _U32


_facts_of: Final = attrgetter(*_ChunkRow._fields[:7])
_read_rows: Final = reader_of(tuple[_ChunkRow, ...])
_read_switch: Final = reader_of(bool)


def _codec(kind: Callable[..., T]) -> tuple[Callable[[T], bytes], Callable[[bytes], T]]:
    """Return what writes the messages of a class, and what reads them.

    The one that reads raises RemoteProtocolError for what the other does not write.
    """
    read = reader_of(kind)

    def encode(message: T) -> bytes:
        head = fields_of(message)
        return _encode(head, head.pop("chunks", ()))

    return encode, lambda payload: _decode(payload, read)


def _encode(head: dict[str, Any], chunks: Iterable[Chunk]) -> bytes:
    rows, bodies = [], list[Buffer]()
    for each in chunks:
        notes = b"".join(map(_encode_note, each.batches))
        rows.append((*_facts_of(each), len(each.batches), crc32(notes)))
        bodies += (notes, *each.body)
    if rows:
        head["chunks"] = rows
    data = to_json(head)
    return b"".join((_HEAD.pack(len(data)), data, *bodies))


def _decode(payload: bytes, read: Reader) -> Any:
    """Return what a reader says of a head, with its chunks in the place of their rows.

    Raises:
        RemoteProtocolError: it is not as it is written here.
    """
    try:
        (length,) = _HEAD.unpack_from(payload)
        head = json.loads(payload[_HEAD.size : _HEAD.size + length].decode())
    except (struct.error, ValueError, RecursionError) as error:
        raise RemoteProtocolError(
            f"message: expected a head, got {payload[:80]!r}"
        ) from error
    if not isinstance(head, dict):
        raise RemoteProtocolError(f"message: expected an object, got {head!r:.80}")
    try:
        rows = _read_rows(head.get("chunks", []), "chunks")
        rest = memoryview(payload)[_HEAD.size + length :]
        return read(head | {"chunks": _decode_chunks(rows, rest)}, "message")
    except FieldError as error:
        raise RemoteProtocolError(str(error)) from error


def _decode_chunks(rows: Iterable[_ChunkRow], rest: memoryview) -> tuple[Chunk, ...]:
    """Return the chunks, which fill the rest of a message exactly."""
    chunks = []
    for row in rows:
        chunk, size = _decode_chunk(row, rest)
        chunks.append(chunk)
        rest = rest[size:]
    if rest:
        raise FieldError(f"message: {len(rest)} bytes belong to no chunk")
    return tuple(chunks)


def _decode_chunk(row: _ChunkRow, rest: memoryview) -> tuple[Chunk, int]:
    """Return a chunk, and the number of bytes that are its own."""
    offset, note_bytes = row.offset, row.notes * ENTRY_BYTES
    size = note_bytes + row.size_bytes
    if size > len(rest) or offset + row.size_bytes > I64_MAX:
        raise FieldError(f"chunk: expected {size} bytes, got {len(rest)}")
    notes, body = rest[:note_bytes], rest[note_bytes:size]
    for part, expected in ((body, row.crc32), (notes, row.notes_crc32)):
        if (got := crc32(part)) != expected:
            raise FieldError(
                f"chunk of log {row.number} at {offset}: expected checksum"
                f" {expected}, got {got}"
            )
    batches = tuple(map(_decode_note, ENTRY.iter_unpack(notes)))
    chunk = Chunk(*row[:7], batches, (body,))
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


encode_join, decode_join = _codec(JoinRequest)
encode_join_reply, decode_join_reply = _codec(JoinReply)
encode_pull, decode_pull = _codec(Pull)
encode_data, decode_data = _codec(Data)
encode_tables, decode_tables = _codec(TablesRequest)
encode_tables_reply, decode_tables_reply = _codec(TablesReply)
encode_tail, decode_tail = _codec(TailRequest)
encode_sum, decode_sum = _codec(SumRequest)
encode_sum_reply, decode_sum_reply = _codec(SumReply)


def encode_tail_reply(reply: TailReply) -> bytes:
    """Return the payload of the answer to a tail."""
    head = {"damaged": True} if reply.is_damaged else {}
    return _encode(head, () if reply.chunk is None else (reply.chunk,))


def decode_tail_reply(payload: bytes) -> TailReply:
    """Read it.

    Raises:
        RemoteProtocolError: it is not as `encode_tail_reply` writes it.
    """
    reply: TailReply = _decode(payload, _tail_reply)
    return reply


def _tail_reply(head: dict[str, Any], _: str) -> TailReply:
    chunks: tuple[Chunk, ...] = head["chunks"]
    if len(chunks) > 1:
        raise FieldError(f"tail: expected 1 chunk, got {len(chunks)}")
    is_damaged = _read_switch(head.get("damaged", False), "damaged")
    return TailReply(chunks[0] if chunks else None, is_damaged)
