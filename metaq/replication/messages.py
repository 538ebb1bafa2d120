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

Properties of a head that are not known are left out. What a peer sends is checked here
once: kinds, ranges and sizes, and the checksum of the bytes of each chunk.
"""

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from metaq.errors import RemoteProtocolError
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.protocol.codec import PRODUCER
from metaq.protocol.decimals import I32_MAX, I64_MAX, I64_MIN
from metaq.record.checksum import crc32
from metaq.replication.election import Flag
from metaq.replication.epochs import CopyFacts, Epoch, EpochStart
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
_JSON: Final = json.JSONEncoder(separators=(",", ":"))

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


@dataclass(frozen=True, slots=True)
class TailReply:
    """Bytes from the offset on; None where the member has none."""

    chunk: Chunk | None


# -- values to bytes ------------------------------------------------------------------


def encode_join(request: JoinRequest) -> bytes:
    """Return the payload of a join."""
    return _encode(
        {
            "set": request.set_id,
            "epoch": request.epoch,
            "replica": request.replica,
            "incarnation": request.incarnation,
            "token": request.token,
            "revision": request.revision,
            "flag": request.flag,
            "logs": [_log(each.log_id, each.copy) for each in request.logs],
        }
    )


def encode_join_reply(reply: JoinReply) -> bytes:
    """Return the payload of the answer to a join."""
    return _encode(
        {
            "epoch": reply.epoch,
            "logs": list(map(_answer, reply.logs)),
            "gone": reply.gone,
            "lost": reply.is_lost,
        }
    )


def encode_pull(pull: Pull) -> bytes:
    """Return the payload of a pull."""
    return _encode(
        {
            "epoch": pull.epoch,
            "replica": pull.replica,
            "incarnation": pull.incarnation,
            "revision": pull.revision,
            "acks": pull.acks,
            "credit": pull.credit_bytes,
            "hw": pull.wants_hw,
        }
    )


def encode_data(data: Data) -> bytes:
    """Return the payload of the answer to a pull."""
    head: dict[str, object] = {"epoch": data.epoch}
    if data.marks:
        head["marks"] = data.marks
    if data.births:
        head["births"] = list(map(_answer, data.births))
    if data.gone:
        head["gone"] = data.gone
    return _encode(head, data.chunks)


def encode_tables(request: TablesRequest) -> bytes:
    """Return the payload of a question for tables."""
    return _encode(
        {"set": request.set_id, "epoch": request.epoch, "replica": request.replica}
    )


def encode_tables_reply(reply: TablesReply) -> bytes:
    """Return the payload of its answer."""
    logs = [_log(each.log_id, each.copy) for each in reply.copies]
    return _encode({"logs": logs, "last_id": reply.last_id})


def encode_tail(request: TailRequest) -> bytes:
    """Return the payload of a question for a tail."""
    return _encode(
        {
            "set": request.set_id,
            "epoch": request.epoch,
            "number": request.number,
            "offset": request.offset,
            "bytes": request.max_bytes,
        }
    )


def encode_tail_reply(reply: TailReply) -> bytes:
    """Return the payload of its answer."""
    return _encode({}, () if reply.chunk is None else (reply.chunk,))


def _encode(head: dict[str, object], chunks: Iterable[Chunk] = ()) -> bytes:
    bodies: list[Buffer] = []
    rows = []
    for each in chunks:
        notes = b"".join(map(_encode_note, each.batches))
        rows.append(
            (
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
    data = _JSON.encode(head).encode()
    return b"".join((_HEAD.pack(len(data)), data, *bodies))


def _log(log_id: LogId, copy: CopyFacts) -> list[object]:
    table = [(*each.epoch, each.start) for each in copy.table]
    facts = (copy.number, copy.start, copy.end, copy.hw, table)
    return [log_id.topic, log_id.partition, *facts]


def _answer(answer: LogAnswer) -> list[object]:
    found = answer.answer
    return [*_log(answer.log_id, found.copy), found.point, found.target]


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


# -- bytes to values ------------------------------------------------------------------


def decode_join(payload: bytes) -> JoinRequest:
    """Read a join.

    Raises:
        RemoteProtocolError: it is not as `encode_join` writes it; likewise below.
    """
    head = _Head(payload)
    flags = {each.value: each for each in Flag}
    flag = flags.get(head.text("flag"))
    if flag is None:
        raise RemoteProtocolError(f"flag: expected one of {list(flags)}")
    return JoinRequest(
        head.text("set"),
        head.epoch(),
        head.number("replica"),
        head.number("incarnation"),
        head.text("token"),
        head.number("revision"),
        flag,
        head.rows("logs", _decode_join_log),
    )


def decode_join_reply(payload: bytes) -> JoinReply:
    """Read the answer to a join."""
    head = _Head(payload)
    logs = head.rows("logs", _decode_answer)
    return JoinReply(
        head.epoch(), logs, head.rows("gone", _decode_number), head.switch("lost")
    )


def decode_pull(payload: bytes) -> Pull:
    """Read a pull."""
    head = _Head(payload)
    return Pull(
        head.epoch(),
        head.number("replica"),
        head.number("incarnation"),
        head.number("revision"),
        head.rows("acks", _decode_ack),
        head.number("credit"),
        head.switch("hw"),
    )


def decode_data(payload: bytes) -> Data:
    """Read the answer to a pull."""
    head = _Head(payload)
    return Data(
        head.epoch(),
        head.rows("marks", _decode_mark),
        head.chunks(),
        head.rows("births", _decode_answer),
        head.rows("gone", _decode_number),
    )


def decode_tables(payload: bytes) -> TablesRequest:
    """Read a question for tables."""
    head = _Head(payload)
    return TablesRequest(head.text("set"), head.epoch(), head.number("replica"))


def decode_tables_reply(payload: bytes) -> TablesReply:
    """Read its answer."""
    head = _Head(payload)
    last_id = MessageId(head.number("last_id", I64_MIN))
    return TablesReply(head.rows("logs", _decode_join_log), last_id)


def decode_tail(payload: bytes) -> TailRequest:
    """Read a question for a tail."""
    head = _Head(payload)
    return TailRequest(
        head.text("set"),
        head.epoch(),
        head.number("number", 0, U64_MAX),
        Offset(head.number("offset")),
        head.number("bytes"),
    )


def decode_tail_reply(payload: bytes) -> TailReply:
    """Read its answer."""
    chunks = _Head(payload).chunks()
    if len(chunks) > 1:
        raise RemoteProtocolError(f"tail: expected 1 chunk, got {len(chunks)}")
    return TailReply(chunks[0] if chunks else None)


class _Head:
    """Reads the properties of a head, and what follows it."""

    def __init__(self, payload: bytes) -> None:
        try:
            (length,) = _HEAD.unpack_from(payload)
            fields = json.loads(payload[_HEAD.size : _HEAD.size + length])
        except (struct.error, ValueError, RecursionError) as error:
            raise RemoteProtocolError(
                f"message: expected a head, got {payload[:80]!r}"
            ) from error
        if not isinstance(fields, dict):
            raise RemoteProtocolError(
                f"message: expected an object, got {fields!r:.80}"
            )
        self._fields: dict[str, Any] = fields
        self._rest = memoryview(payload)[_HEAD.size + length :]

    def number(self, name: str, low: int = 0, high: int = I64_MAX) -> int:
        """Return a number of a range."""
        return _number(self._fields.get(name), low, high, name)

    def text(self, name: str) -> str:
        """Return a text."""
        return _text(self._fields.get(name), name)

    def switch(self, name: str) -> bool:
        """Return a truth."""
        value = self._fields.get(name)
        if not isinstance(value, bool):
            raise RemoteProtocolError(
                f"{name}: expected true or false, got {value!r:.80}"
            )
        return value

    def epoch(self) -> Epoch:
        """Return the epoch of the message."""
        return _epoch(_row(self._fields.get("epoch"), 2, "epoch"))

    def rows(self, name: str, decode: Callable[[Any], T]) -> tuple[T, ...]:
        """Return the decoded items of a list; none where it is missing."""
        value = self._fields.get(name, [])
        if not isinstance(value, list):
            raise RemoteProtocolError(f"{name}: expected a list, got {value!r:.80}")
        return tuple(map(decode, value))

    def chunks(self) -> tuple[Chunk, ...]:
        """Return the chunks with their bodies, which fill the rest exactly."""
        found, rest = [], self._rest
        for row in self.rows("chunks", lambda row: _row(row, 9, "chunk")):
            chunk, size = _decode_chunk(row, rest)
            found.append(chunk)
            rest = rest[size:]
        if rest:
            raise RemoteProtocolError(f"message: {len(rest)} bytes belong to no chunk")
        return tuple(found)


def _number(value: object, low: int, high: int, name: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise RemoteProtocolError(
            f"{name}: expected {low} to {high}, got {value!r:.80}"
        )
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RemoteProtocolError(f"{name}: expected a text, got {value!r:.80}")
    return value


def _row(value: object, length: int, name: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise RemoteProtocolError(f"{name}: expected {length} items, got {value!r:.80}")
    return value


def _offset(value: object, name: str) -> Offset:
    return Offset(_number(value, 0, I64_MAX, name))


def _decode_number(value: object) -> int:
    return _number(value, 0, U64_MAX, "log number")


def _epoch(row: list[Any]) -> Epoch:
    return Epoch(_number(row[0], 0, I64_MAX, "epoch"), _text(row[1], "nonce"))


def _decode_ack(row: object) -> tuple[int, Offset]:
    number, end = _row(row, 2, "ack")
    return _decode_number(number), _offset(end, "end")


def _decode_mark(row: object) -> tuple[int, Offset, Offset]:
    number, hw, start = _row(row, 3, "mark")
    return _decode_number(number), _offset(hw, "hw"), _offset(start, "log start")


def _decode_join_log(row: object) -> JoinLog:
    topic, partition, number, start, end, hw, table = _row(row, 7, "log")
    log_id = LogId(_text(topic, "topic"), _number(partition, 0, I32_MAX, "partition"))
    if not isinstance(table, list):
        raise RemoteProtocolError(f"table: expected a list, got {table!r:.80}")
    copy = CopyFacts(
        _decode_number(number),
        _offset(start, "log start"),
        _offset(end, "end"),
        _offset(hw, "hw"),
        tuple(
            EpochStart(_epoch(each), _offset(each[2], "epoch start"))
            for each in (_row(each, 3, "table") for each in table)
        ),
    )
    # A watermark above the end is said as it is: then bytes are missing there.
    if copy.start > copy.end:
        raise RemoteProtocolError(f"log {log_id}: starts at {start}, ends at {end}")
    return JoinLog(log_id, copy)


def _decode_answer(row: object) -> LogAnswer:
    *log, point, target = _row(row, 9, "answer")
    found = _decode_join_log(log)
    answer = JoinAnswer(found.copy, _offset(point, "point"), _offset(target, "target"))
    return LogAnswer(found.log_id, answer)


def _decode_chunk(row: list[Any], rest: memoryview) -> tuple[Chunk, int]:
    """Return a chunk, and the number of bytes that are its own."""
    offset, size = _offset(row[1], "offset"), _number(row[2], 1, U32_MAX, "size")
    note_bytes = _number(row[7], 0, U32_MAX, "notes") * ENTRY_BYTES
    if note_bytes + size > len(rest) or offset + size > I64_MAX:
        raise RemoteProtocolError(
            f"chunk: expected {note_bytes + size} bytes, got {len(rest)}"
        )
    notes, body = rest[:note_bytes], rest[note_bytes : note_bytes + size]
    for part, value in ((body, row[5]), (notes, row[8])):
        expected = _number(value, 0, U32_MAX, "checksum")
        if (got := crc32(part)) != expected:
            raise RemoteProtocolError(
                f"chunk of log {row[0]} at {offset}: expected checksum {expected},"
                f" got {got}"
            )
    chunk = Chunk(
        _decode_number(row[0]),
        offset,
        SizeBytes(size),
        _number(row[3], 1, U32_MAX, "records"),
        MessageId(_number(row[4], I64_MIN, I64_MAX, "last id")),
        row[5],
        _offset(row[6], "segment"),
        tuple(map(_decode_note, ENTRY.iter_unpack(notes))),
        (body,),
    )
    for batch in chunk.batches:
        if not offset <= batch.offset or batch.end_offset > chunk.end_offset:
            raise RemoteProtocolError(f"chunk at {offset}: {batch} is not in it")
    return chunk, note_bytes + size


def _decode_note(entry: tuple[Any, ...]) -> StoredBatch:
    name, sequence, count, checksum, first_id, offset, size, _crc = entry
    producer = name.rstrip(b"\0").decode("latin-1")
    if sequence < 0 or not PRODUCER.fullmatch(producer):
        raise RemoteProtocolError(f"note: {producer!r} {sequence} is no batch")
    return StoredBatch(
        producer, sequence, count, checksum, first_id, offset, SizeBytes(size)
    )
