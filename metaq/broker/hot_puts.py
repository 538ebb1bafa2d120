"""The hot path: pipelined puts, parsed, stamped and appended in one flat loop.

Theory of operation. The general path (`protocol.Connection`, `dispatch`, handlers)
can do everything; this loop does one thing fast: the put that current clients send,

    put topic partition length flag checksum opaque CRLF payload

with a checksum that is right, a head that was resolved before, and its payload there
in whole. What is in any way unusual ends the loop, with the position at that frame's
first byte; the general path handles exactly that frame, and the loop is tried again
behind it. So this file never answers an error and never decides anything new: a head
("put topic partition length flag") is resolved through `Topics` like any other put.

The loop is flat on purpose: a call, an object or an attribute chain per message costs
what the whole rest of a message does. One message adds two pieces to the list of
chunks and three values to the list of replies; one run is one append and one ticket.

    Invariant: for any input, the bytes stored and the replies are those of the
    general path (tests/broker/test_hot_puts.py compares them).
    Invariant: heads resolved under an older `topics.epoch` are never used.

Keep in step: `handlers/put.py`, `record/layout.py`, `record/ids.py`.
"""

from typing import Final, Protocol
from zlib import crc32

from metaq.broker.acks import Answerer, append_run, count_puts
from metaq.broker.context import BrokerContext
from metaq.errors import RemoteProtocolError, WireError
from metaq.model import LogId, MessageId
from metaq.protocol.java import parse_i32
from metaq.record.checksum import CHECKSUM_MASK
from metaq.record.ids import CARRY, SEQUENCE_MASK
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.storage.partition_log import PartitionLog

HEADS_MAX: Final = 4096
"""Heads remembered per session; one more starts the memory afresh."""


class UnparsedBytes(Protocol):
    """What the loop needs of a receive buffer."""

    data: bytes
    """Received bytes."""
    position: int
    """Where the first frame that was not taken yet starts."""


class _Run:
    """What one session puts to one log in one pass; reused from pass to pass."""

    __slots__ = ("chunks", "flat", "log", "offset")

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.chunks: list[bytes] = []
        self.flat: list[int] = []
        self.offset = 0


class _Head:
    """A resolved head: how long the payload is, and where it goes."""

    __slots__ = ("flag", "length", "run")

    def __init__(self, run: _Run, length: int, flag: int) -> None:
        self.run = run
        self.length = length
        self.flag = flag


class HotPuts:
    """The hot loop of one session and its memory of heads."""

    def __init__(self, answerer: Answerer, context: BrokerContext) -> None:
        self._answerer = answerer
        self._context = context
        self._heads: dict[bytes, _Head] = {}
        self._runs: dict[LogId, _Run] = {}
        self._epoch = 0
        self._length_max = context.config.limits.payload_bytes_max

    def take(self, buffer: UnparsedBytes) -> int:
        """Append every ordinary put that stands at the buffer's position.

        Args:
            buffer: its position is moved behind what was taken.

        Returns:
            The number of puts taken; each is answered by its run's ticket.
        """
        if self._epoch != self._context.topics.epoch:
            self._heads.clear()
            self._runs.clear()
            self._epoch = self._context.topics.epoch
        data, position = buffer.data, buffer.position
        size, find, pack = len(data), data.find, HEADER.pack
        active: list[_Run] = []
        first_id = self._context.ids.peek()
        next_id = int(first_id)
        # What the head of the message before this one stood for: most follow suit.
        last_name, length, flag, offset = b"", 0, 0, 0
        run: _Run | None = None
        chunks: list[bytes] = []
        flat: list[int] = []
        while (line_end := find(b"\r\n", position)) >= 0:
            try:
                name, token, opaque = data[position:line_end].rsplit(b" ", 2)
            except ValueError:
                break
            if name != last_name:
                head = self._heads.get(name) or self._resolve(name)
                if head is None:
                    break
                if run is not None:
                    run.offset = offset
                last_name, run, length, flag = name, head.run, head.length, head.flag
                chunks, flat = run.chunks, run.flat
                if not chunks:
                    run.offset = run.log.next_offset
                    active.append(run)
                offset = run.offset
            start = line_end + 2
            end = start + length
            payload = data[start:end]
            crc = crc32(payload) & CHECKSUM_MASK
            if end > size or token != b"%d" % crc:
                break
            if opaque.isdigit() and len(opaque) <= 9:
                number = int(opaque)
            elif (careful := read_opaque(opaque)) is not None:
                number = careful
            else:
                break
            chunks += (pack(length, crc, next_id, flag), payload)
            flat += (number, next_id, offset)
            offset += HEADER_BYTES + length
            next_id += 1
            if not next_id & SEQUENCE_MASK:
                next_id += CARRY
            position = end
        if run is None or next_id == first_id:
            return 0
        run.offset = offset
        buffer.position = position
        self._context.ids.advance_to(MessageId(next_id))
        # The last one may have met its head only, and no put that it could take.
        return sum([self._append(run) for run in active if run.chunks])

    def _append(self, run: _Run) -> int:
        """Hand what a run gathered to its log; return the number of puts."""
        chunks, flat = run.chunks, run.flat
        run.chunks, run.flat = [], []
        count, size_bytes = len(chunks) // 2, run.offset - flat[2]
        count_puts(
            self._context,
            run.log.log_id.topic,
            count=count,
            payload_bytes=size_bytes - HEADER_BYTES * count,
        )
        append_run(
            run.log,
            chunks,
            self._answerer,
            self._context,
            size_bytes=size_bytes,
            record_count=count,
            last_id=MessageId(flat[-2]),
            flat=flat,
        )
        return count

    def _resolve(self, name: bytes) -> _Head | None:
        """Return what a head stands for, or None if the general path must look."""
        words = name.split(b" ")
        if len(words) != 5 or words[0] != b"put":
            return None
        try:
            topic = words[1].decode()
            asked = parse_i32(words[2], "partition")
            length = parse_i32(words[3], "length")
            flag = parse_i32(words[4], "flag")
            if asked < 0 or not topic or not 0 <= length <= self._length_max:
                return None
            partition = self._context.topics.resolve_put(topic, asked)
        except (RemoteProtocolError, UnicodeDecodeError, WireError):
            return None
        # The first put of a log takes the general path, which makes the log.
        log = self._context.topics.find_log(topic, partition)
        if log is None:
            return None
        run = self._runs.setdefault(log.log_id, _Run(log))
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
        head = self._heads[name] = _Head(run, length, flag)
        return head


def read_opaque(token: bytes) -> int | None:
    """Return the number in a token that is not nine plain digits; None: there is none.

    Java clients count up from -2147483648, so this is the ordinary case for them.
    """
    try:
        return parse_i32(token, "opaque")
    except RemoteProtocolError:
        return None
