"""Messages between the replicas of a set: the payloads of `follow`. Pure.

    payload of a message, or of the `value` that replies to it

    byte  0             4                 4 + length
          +-------------+-----------------+---------------------------------------+
          | head length | head            | bodies of the chunks, back to back    |
          | u32         | JSON, an object | 104 bytes for each note, then records |
          +-------------+-----------------+---------------------------------------+

    payload of a pull, and of the data that replies to it: a put waits for two of each

    byte  0        4             8        12     12 + length
          +--------+-------------+--------+------+---------------------------------+
          | mark   | head length | CRC-32 | head | bodies of the chunks, as above  |
          | 4 text | u32         | u32    |      |                                 |
          +--------+-------------+--------+------+---------------------------------+

    head of a pull, mark `pul1`
    byte  0       8         16            24         32       40         41      42
          +-------+---------+-------------+----------+--------+----------+-------+
          | epoch | replica | incarnation | revision | credit | 0        | bytes |
          | u64   | u64     | u64         | u64      | u64    | u8       | u8    |
          +-------+---------+-------------+----------+--------+----------+-------+
          nonce, of so many bytes; then of each log: number u64, synced end u64

    head of data, mark `dat1`
    byte  0       8       12       16      17
          +-------+-------+--------+-------+-------------------------------------+
          | epoch | marks | chunks | bytes | nonce, marks, rows of chunks, JSON  |
          | u64   | u32   | u32    | u8    |                                     |
          +-------+-------+--------+-------+-------------------------------------+
          mark: number u64, high watermark u64, log start u64
          row:  number u64, offset u64, size u32, records u32, last id i64,
                CRC-32 u32, segment u64, notes u32, CRC-32 of the notes u32
          JSON: births and gone, if there are any

| kind | sent by | reply by | purpose |
|---|---|---|---|
| `join` | a follower: its copies | its leader | truncate its logs where they part |
| `pull` | a follower: its synced ends | its leader, once there is more | continue |
| `tables` | a claimer | a member of the in-sync set | learn the facts of its copies |
| `tail` | a claimer | the same | take over bytes that it lacks itself |
| | a replica with damage | any with a good copy | repair it, where both copies agree |
| `sum` | any | any | compare a sealed segment by its checksum |

A JSON head is the message in the format of `json_values.py`, with a row for each chunk.
Input from a peer is checked here once: types, ranges and sizes, and the checksum of
each chunk's bytes.
"""

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from metaq.errors import RemoteProtocolError
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.protocol.decimals import I64_MAX
from metaq.protocol.names import PRODUCER
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
from metaq.storage.producer_file import ENTRY_BYTES, pack_entry, unpack_entry
from metaq.storage.producers import StoredBatch

PULL: Final = "pull"
STALE_EPOCH: Final = "stale-epoch"
"""Code of a refusal: the epoch of the message is over; `epoch` is the later one."""

_HEAD: Final = struct.Struct(">I")
_START: Final = struct.Struct(">4sII")
_PULL: Final = struct.Struct(">QQQQQxB")
_DATA: Final = struct.Struct(">QIIB")
_ACK: Final = struct.Struct(">QQ")
_MARK: Final = struct.Struct(">QQQ")
_ROW: Final = struct.Struct(">QQIIqIQII")
_U32: TypeAlias = Annotated[int, number(0, 2**32 - 1)]
_POSITIVE: Final = number(1, 2**32 - 1)

T = TypeVar("T")
Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class JoinLog:
    """One log in a follower's join."""

    log_id: LogId
    copy: CopyFacts


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Request of a follower to follow, with the facts of its copies."""

    set_id: str
    epoch: Epoch
    replica: int
    incarnation: int
    token: str
    """Token of this process, as in its node `present/K`."""
    revision: int
    """Revision of the record in its `set` file."""
    flag: Flag
    logs: tuple[JoinLog, ...]


@dataclass(frozen=True, slots=True)
class LogAnswer:
    """The leader's reply about one of its logs."""

    log_id: LogId
    answer: JoinAnswer


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The leader's reply to a join, with all its logs."""

    epoch: Epoch
    logs: tuple[LogAnswer, ...]
    gone: tuple[LogNumber, ...]
    """Numbers of the follower's logs that were deleted."""
    is_lost: bool
    """Whether the follower lacks promised bytes; if so, it truncates nothing."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Acknowledgement of a follower, and its request for one data message."""

    epoch: Epoch
    replica: int
    incarnation: int
    revision: int
    acks: tuple[tuple[LogNumber, Offset], ...]
    """Number and synced end of each log whose end has changed."""
    credit_bytes: int
    """Maximum size of the records in the reply, in bytes; one append may be larger."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Complete appends of one log and one segment, back to back."""

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
    """Bytes of the chunk, in pieces."""

    @property
    def end_offset(self) -> Offset:
        """Return the offset after its last byte."""
        return Offset(self.offset + self.size_bytes)

    def appends(self) -> CopiedAppends:
        """Return the appends for a log that follows."""
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
    """The reply to a pull."""

    epoch: Epoch
    marks: tuple[tuple[LogNumber, Offset, Offset], ...] = ()
    """Number, high watermark and log start of each log where one of these moved."""
    chunks: tuple[Chunk, ...] = ()
    new_logs: tuple[LogAnswer, ...] = ()
    """Logs created by the leader since the last message."""
    gone: tuple[LogNumber, ...] = ()
    """Numbers of logs that it has deleted since the last message."""


@dataclass(frozen=True, slots=True)
class TablesRequest:
    """Request of a claimer for a member's facts; it then follows no older epoch."""

    set_id: str
    epoch: Epoch
    replica: int


@dataclass(frozen=True, slots=True)
class TablesReply:
    """Facts of all copies of a member."""

    copies: tuple[JoinLog, ...]
    last_id: MessageId
    """Greatest id that it has stamped or copied."""


@dataclass(frozen=True, slots=True)
class TailRequest:
    """Request of a claimer for bytes that it lacks, or of a replica with damage."""

    set_id: str
    epoch: Epoch
    number: LogNumber
    offset: Offset
    max_bytes: int
    is_unchecked: bool = False
    """Send the bytes unchecked, because no replica has a good copy of them all."""
    copy: CopyFacts | None = None
    """The requester's copy of the log: the reply has only bytes that are equal in both.
    None: the requester is a claimer."""


@dataclass(frozen=True, slots=True)
class TailReply:
    """Bytes from the requested offset on; None if the replica has none."""

    chunk: Chunk | None
    is_damaged: bool = False
    """Whether the bytes are damaged there, too."""


@dataclass(frozen=True, slots=True)
class SumRequest:
    """Request to compare bytes of a log with those of another replica."""

    set_id: str
    copy: CopyFacts
    """The requester's copy of the log."""
    start: Offset
    end: Offset
    checksum: _U32
    """CRC-32 of the requester's bytes, from its span index."""


@dataclass(frozen=True, slots=True)
class SumReply:
    """Result of a comparison."""

    is_known: bool
    """Whether the other replica can compare, by its span index."""
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


class _Rest(NamedTuple):
    """Rare parts of data, `births` being the new logs: names on the wire."""

    births: tuple[LogAnswer, ...] = ()
    gone: tuple[LogNumber, ...] = ()


_facts_of: Final = attrgetter(*_ChunkRow._fields[:7])
_read_rows: Final = reader_of(tuple[_ChunkRow, ...])
_read_switch: Final = reader_of(bool)
_read_rest: Final = reader_of(_Rest)


def _codec(kind: Callable[..., T]) -> tuple[Callable[[T], bytes], Callable[[bytes], T]]:
    """Return the encoder and the decoder of a message class."""
    read = reader_of(kind)

    def encode(message: T) -> bytes:
        head = fields_of(message)
        return _encode(head, head.pop("chunks", ()))

    return encode, lambda payload: _decode(payload, read)


def _encode(head: dict[str, Any], chunks: Iterable[Chunk]) -> bytes:
    rows, bodies = _apart(chunks)
    if rows:
        head["chunks"] = rows
    data = to_json(head)
    return b"".join((_HEAD.pack(len(data)), data, *bodies))


def _apart(chunks: Iterable[Chunk]) -> tuple[list[tuple[int, ...]], list[Buffer]]:
    """Return the rows of chunks, and their bodies."""
    rows, bodies = [], list[Buffer]()
    for each in chunks:
        notes = b"".join(map(pack_entry, each.batches))
        rows.append((*_facts_of(each), len(each.batches), crc32(notes)))
        bodies += (notes, *each.body)
    return rows, bodies


def _decode(payload: bytes, read: Reader) -> Any:
    """Return the message in a payload, read by `read`, with its decoded chunks.

    Raises:
        RemoteProtocolError: it does not have the format above.
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
    """Return the chunks, which must fill the rest of a message exactly."""
    chunks = []
    for row in rows:
        chunk, size = _decode_chunk(row, rest)
        chunks.append(chunk)
        rest = rest[size:]
    if rest:
        raise FieldError(f"message: {len(rest)} bytes belong to no chunk")
    return tuple(chunks)


def _decode_chunk(row: _ChunkRow, rest: memoryview) -> tuple[Chunk, int]:
    """Return a chunk, and the number of its bytes in the message."""
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
    starts = range(0, note_bytes, ENTRY_BYTES)
    batches = [unpack_entry(notes[at : at + ENTRY_BYTES]) for at in starts]
    chunk = Chunk(*row[:7], tuple(batches), (body,))
    for batch in batches:
        if batch.sequence < 0 or not PRODUCER.fullmatch(batch.producer):
            raise FieldError(f"note: {batch.producer!r} {batch.sequence} is no batch")
        if not offset <= batch.offset or batch.end_offset > chunk.end_offset:
            raise FieldError(f"chunk at {offset}: {batch} is not in it")
    return chunk, size


def _encode_tail_reply(reply: TailReply) -> bytes:
    head = {"damaged": True} if reply.is_damaged else {}
    return _encode(head, () if reply.chunk is None else (reply.chunk,))


def _tail_reply(head: dict[str, Any], _: str) -> TailReply:
    chunks: tuple[Chunk, ...] = head["chunks"]
    if len(chunks) > 1:
        raise FieldError(f"tail: expected 1 chunk, got {len(chunks)}")
    is_damaged = _read_switch(head.get("damaged", False), "damaged")
    return TailReply(chunks[0] if chunks else None, is_damaged)


@dataclass(frozen=True, slots=True)
class Question(Generic[Q, A]):
    """One kind of message with a head in JSON, and its replies.

    The decoders raise RemoteProtocolError for bytes that the encoders do not write.
    """

    kind: str
    encode: Callable[[Q], bytes]
    decode: Callable[[bytes], Q]
    encode_answer: Callable[[A], bytes]
    decode_answer: Callable[[bytes], A]


JOIN: Final = Question("join", *_codec(JoinRequest), *_codec(JoinReply))
TABLES: Final = Question("tables", *_codec(TablesRequest), *_codec(TablesReply))
TAIL: Final = Question(
    "tail",
    *_codec(TailRequest),
    _encode_tail_reply,
    lambda payload: _decode(payload, _tail_reply),
)
SUM: Final = Question("sum", *_codec(SumRequest), *_codec(SumReply))


# -- the stream -----------------------------------------------------------------------


def encode_pull(pull: Pull) -> bytes:
    """Return the payload of a pull."""
    epoch, nonce = pull.epoch.number, pull.epoch.nonce.encode()
    head = _PULL.pack(
        epoch,
        pull.replica,
        pull.incarnation,
        pull.revision,
        pull.credit_bytes,
        len(nonce),
    )
    acks = [_ACK.pack(*each) for each in pull.acks]
    return _sealed(b"pul1", b"".join((head, nonce, *acks)))


def decode_pull(payload: bytes) -> Pull:
    """Decode a pull.

    Raises:
        RemoteProtocolError: it is not as `encode_pull` writes it.
    """
    head, rest = _opened(payload, b"pul1")
    try:
        epoch, replica, incarnation, revision, credit, size = _PULL.unpack_from(head)
        nonce, at = _nonce_at(head, _PULL.size, size)
        acks = tuple(_ACK.iter_unpack(head[at:]))
        ends = [end for _, end in acks]
        _check_range("pull", epoch, replica, incarnation, revision, credit, *ends)
        if rest:
            raise FieldError(f"pull: {len(rest)} bytes belong to no chunk")
    except (struct.error, ValueError) as error:
        raise _unread("pull", error) from error
    return Pull(Epoch(epoch, nonce), replica, incarnation, revision, acks, credit)


def encode_data(data: Data) -> bytes:
    """Return the payload of data."""
    (number, nonce), (rows, bodies) = data.epoch, _apart(data.chunks)
    text = nonce.encode()
    rest = _Rest(data.new_logs, data.gone)
    parts = [_DATA.pack(number, len(data.marks), len(rows), len(text)), text]
    parts += [_MARK.pack(*each) for each in data.marks]
    parts += [_ROW.pack(*each) for each in rows]
    if data.new_logs or data.gone:
        parts.append(to_json(rest))
    return _sealed(b"dat1", b"".join(parts), bodies)


def decode_data(payload: bytes) -> Data:
    """Decode data.

    Raises:
        RemoteProtocolError: it is not as `encode_data` writes it.
    """
    head, rest = _opened(payload, b"dat1")
    try:
        epoch, mark_count, row_count, size = _DATA.unpack_from(head)
        nonce, at = _nonce_at(head, _DATA.size, size)
        rows_at = at + mark_count * _MARK.size
        json_at = rows_at + row_count * _ROW.size
        if json_at > len(head):
            raise FieldError(f"head: expected {json_at} bytes, got {len(head)}")
        marks = tuple(_MARK.iter_unpack(head[at:rows_at]))
        rows = list(map(list, _ROW.iter_unpack(head[rows_at:json_at])))
        _check_range("data", epoch, *[n for mark in marks for n in mark[1:]])
        chunks = _decode_chunks(_read_rows(rows, "chunk"), rest)
        last = _Rest()
        if json_at < len(head):
            last = _read_rest(json.loads(head[json_at:].decode()), "data")
    except (struct.error, ValueError, RecursionError) as error:
        raise _unread("data", error) from error
    return Data(Epoch(epoch, nonce), marks, chunks, *last)


def _sealed(mark: bytes, head: bytes, bodies: Iterable[Buffer] = ()) -> bytes:
    return b"".join((_START.pack(mark, len(head), crc32(head)), head, *bodies))


def _opened(payload: bytes, mark: bytes) -> tuple[bytes, memoryview]:
    """Return the head of a stream message, and the bytes after it."""
    if payload[: len(mark)] != mark:
        raise RemoteProtocolError(
            f"message: expected {mark!r} at its begin, got {payload[:80]!r}: the"
            " other replica has a version of metaq with other messages"
        )
    head, size, checksum = b"", 0, 0
    if len(payload) >= _START.size:
        _, size, checksum = _START.unpack_from(payload)
        head = payload[_START.size : _START.size + size]
    if not size or len(head) != size or crc32(head) != checksum:
        raise RemoteProtocolError(
            f"message: expected a head of {size} bytes with checksum {checksum}, got"
            f" {len(head)} with {crc32(head)}"
        )
    return head, memoryview(payload)[_START.size + size :]


def _nonce_at(head: bytes, at: int, size: int) -> tuple[str, int]:
    """Return the nonce of an epoch, and the position of its end."""
    return head[at : at + size].decode(), at + size


def _check_range(name: str, *numbers: int) -> None:
    if max(numbers) > I64_MAX:
        raise FieldError(f"{name}: expected 0 to {I64_MAX}, got {max(numbers)}")


def _unread(name: str, error: Exception) -> RemoteProtocolError:
    """Return the error for a head that cannot be decoded."""
    is_named = isinstance(error, FieldError)
    return RemoteProtocolError(str(error) if is_named else f"{name}: {error}")
