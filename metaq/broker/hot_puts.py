"""The path of puts: parsed, stamped and appended in one flat loop over what was read.

Theory of operation. The loop takes every form of a put that is to be stored,

    put topic partition length flag checksum opaque CRLF payload
    put topic partition length flag opaque CRLF payload         (older clients)
    put topic partition length flag [checksum] transaction opaque CRLF payload

with its checksum, with -1 in its place, or without; to a partition, or to any (-1).
What names a transaction goes to that and to the journal in the place of the log
(`_TransactionRun`); all else about it is the same. A *request prefix*, "put topic
partition length flag", is resolved once, through `Topics`, and remembered. What is left
over ends the loop, with the position at that frame's first byte: puts that are refused,
that are not there in whole, or that come first to their partition. The general path
(`protocol.Connection`, `dispatch`, handlers) handles exactly that frame, and the loop
is tried again behind it. So this file never answers an error, but to puts that would
pass a bound of transactions.

The loop is flat on purpose: a call, an object or an attribute chain per message costs
what the whole rest of a message does. One message adds two pieces to the list of
chunks and one value to each column of receipts; one run is one append and one ticket.

Where the choice of the partition is ours, it is made once for all puts to a topic that
are received together, and kept for some reads of a stream: many small runs would cost
what one large one saves, and puts of others would find every log busy.

A put that was received alone is not appended here: `take_lone` checks it, and it is
appended with those of other connections (`lone_puts.py`). A batch of one message, which
is what a producer sends that waits for each reply, is looked up like a put of the
length of its record (`take_lone_batch`).

A request prefix that many messages in a row had is expected again: what follows is
tried as a *uniform run* first (`uniform_puts.py`), which goes without the loop; those
that follow each other in one turn are appended as one. Whatever is odd about a uniform
run leaves all of it to the loop, and none is expected until there was one again.

    Invariant: for any input, the bytes stored and the replies are those of the
    general path (tests/broker/test_hot_puts.py compares them).
    Invariant: request prefixes resolved under an older `topics.version` are never used.

Keep in step: `handlers/put.py`, `record/layout.py`, `record/ids.py`.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from metaq.broker.acks import Answerer, Receipts, append_batch, append_run, count_puts
from metaq.broker.context import BrokerContext
from metaq.broker.lone_puts import LONE_OVERHEAD_BYTES, LONE_PAYLOAD_BYTES_MAX, LonePuts
from metaq.broker.transactions import put_run
from metaq.broker.uniform_puts import (
    UNCHECKED,
    UNIFORM_MIN,
    UNIFORM_PAYLOAD_BYTES_MAX,
    UniformPutReader,
)
from metaq.errors import RemoteProtocolError, SequenceError, TransactionError, WireError
from metaq.fs import Buffer
from metaq.model import LogId, MessageId, SizeBytes
from metaq.protocol.codec import parse_producer
from metaq.protocol.decimals import parse_i32
from metaq.record.checksum import CHECKSUM_MASK, crc32
from metaq.record.ids import CARRY, SEQUENCE_MASK, id_runs
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.uniform import encode_uniform, stamp_ids
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.txn.records import encode_put_head
from metaq.txn.transaction import BrokerTransaction

UNIFORM_MAX: Final = 256
"""Most puts of a uniform run, a quarter of a millisecond; then a look at the time."""

TAKEN_MAX: Final = 128
"""Most puts that are taken one by one before the time is looked at: likewise."""

ANY_READS_MAX: Final = 4
"""Most reads of a stream whose puts to any partition go to one, 1 MiB: a group of the
disk."""

PREFIXES_MAX: Final = 4096
"""Request prefixes remembered per session; one more starts the memory afresh."""

_ZERO: Final = ord("0")
_DIGITS_END: Final = b":"
"""Sorts behind every number, and before the key of every transaction."""
_BATCH_WORDS: Final = 9
"""Words of an `mput` that is in no transaction."""
_SEQUENCE_DIGITS_MAX: Final = 18
"""Digits of numbers that have 64 bits, whichever they are."""


class UnparsedBytes(Protocol):
    """Receive buffer as the loop uses it."""

    data: bytes
    """Received bytes."""
    position: int
    """Start of the first frame that was not taken yet."""


class _Run:
    """Puts of one session to one log in one pass; reused from pass to pass."""

    __slots__ = ("chunks", "commands", "ids", "log", "offset", "offsets", "opaques")

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.commands: list[bytes] | None = None
        self.offset = 0
        self.clear()

    def clear(self) -> None:
        """Begin anew; what was gathered belongs to others now."""
        self.chunks: list[bytes] = []
        self.opaques: list[bytes] = []
        self.ids: list[int] = []
        self.offsets: list[int] = []


class _TransactionRun(_Run):
    """Puts of one session to one log in one transaction in one pass."""

    __slots__ = ("transaction",)

    def __init__(self, log: PartitionLog, transaction: BrokerTransaction) -> None:
        super().__init__(log)
        self.transaction = transaction
        # Each put in the eight-word form, framed as a record of the journal.
        self.commands = []


class _AnyPartition:
    """The runs of a topic's open partitions, and the one chosen for this read."""

    __slots__ = ("partitions", "read_number", "run", "topic")

    def __init__(self, topic: str, partitions: Sequence[int]) -> None:
        self.topic = topic
        self.partitions = partitions
        self.read_number = -1
        self.run: _Run | None = None


class _Prefix:
    """A resolved request prefix: how long the payload is, and where it goes."""

    __slots__ = ("any", "flag", "is_canonical", "length", "reader", "run")

    def __init__(
        self,
        name: bytes,
        run: _Run | None,
        any_: _AnyPartition | None,
        *,
        length: int,
        flag: int,
    ) -> None:
        self.run = run
        self.any = any_
        self.length = length
        self.flag = flag
        self.is_canonical = False
        """Names one partition, its numbers spelt as replies would spell them."""
        self.reader: UniformPutReader | None = None
        if run is not None:
            log_id = run.log.log_id
            words = log_id.topic.encode(), log_id.partition, length, flag
            self.is_canonical = name == b"put %b %d %d %d" % words


class HotPuts:
    """The hot loop of one session and its memory of request prefixes."""

    def __init__(
        self, answerer: Answerer, context: BrokerContext, lone_puts: LonePuts
    ) -> None:
        self._answerer = answerer
        self._context = context
        self._lone_puts = lone_puts
        self._prefixes: dict[bytes, _Prefix] = {}
        self._runs: dict[LogId, _Run] = {}
        self._any: dict[str, _AnyPartition] = {}
        self._expected: _Prefix | None = None
        self._version = 0
        self._read_number = 0
        self._kept_reads = 0
        limits = context.config.limits
        self._length_max = limits.payload_bytes_max
        self._lone_batch_max = min(LONE_PAYLOAD_BYTES_MAX, limits.batch_bytes_max)
        self.has_more = False
        """Whether the last `take` stopped at its bound, and is to be tried again."""
        self.turn_ends_s = 0.0
        """When `take` is to stop, on the monotonic clock; set by the session."""

    def begin_read(self) -> None:
        """Take notice that more bytes were received.

        Puts to any partition go elsewhere then, but of a connection with puts in flight
        not before ANY_READS_MAX reads: a stream keeps one log busy, and not all.
        """
        self._kept_reads += 1
        if not self._answerer.in_flight_bytes or self._kept_reads >= ANY_READS_MAX:
            self._kept_reads = 0
            self._read_number += 1

    def take_lone(self, data: bytes) -> int:
        """Gather a put that was received alone, if it is an ordinary one.

        Its checksum may be -1, its partition too; whatever else is odd is for `take`.

        Args:
            data: all that was received and not carried out.

        Returns:
            What it holds in flight until it is answered, bytes; 0: nothing was taken.
        """
        line_end = data.find(b"\r\n")
        words = data[:line_end].rsplit(b" ", 2)
        prefix = self._prefixes.get(words[0])
        if (
            prefix is None
            or prefix.length != len(data) - line_end - 2
            or prefix.length > LONE_PAYLOAD_BYTES_MAX
            or line_end < 0
            or self._version != self._context.topics.version
        ):
            return 0
        # More than two spaces are in a prefix, so there are three words.
        _, token, opaque = words
        payload = data[line_end + 2 :]
        crc = crc32(payload) & CHECKSUM_MASK
        if token != b"%d" % crc and token != UNCHECKED:
            return 0
        if not opaque.isdigit() or len(opaque) > 9 or opaque[0] == _ZERO:
            number = read_opaque(opaque)
            if number is None:
                return 0
            opaque = b"%d" % number
        self._read_number += 1
        run = prefix.run or self._choose(prefix)
        if run is None:
            return 0
        put = (self._answerer, opaque, crc, prefix.flag, payload)
        self._lone_puts.add(run.log, put)
        return LONE_OVERHEAD_BYTES + len(payload)

    def take_lone_batch(self, data: bytes) -> bool:
        """Append a batch of one message that was received alone, if all is ordinary.

            mput topic partition length 1 checksum producer sequence opaque CRLF record

        Args:
            data: as for `take_lone`.

        Returns:
            Whether it was taken; it is held and answered by its ticket then.
        """
        line_end = data.find(b"\r\n")
        words = data[:line_end].split(b" ")
        if len(words) != _BATCH_WORDS or words[0] != b"mput" or words[4] != b"1":
            return False
        _, topic, partition, length, _, token, producer, number, opaque = words
        self._forget_outdated()
        name = b"put %b %b %b 0" % (topic, partition, length)
        prefix = self._prefixes.get(name) or self._resolve(name)
        record = data[line_end + 2 :]
        if (
            prefix is None
            or prefix.run is None
            or not HEADER_BYTES <= prefix.length == len(record) <= self._lone_batch_max
            or not _is_plain(opaque)
            or not (number.isdigit() and len(number) <= _SEQUENCE_DIGITS_MAX)
            or (writer := parse_producer(producer)) is None
        ):
            return False
        payload, log = record[HEADER_BYTES:], prefix.run.log
        payload_bytes, crc, _, flag = HEADER.unpack_from(record)
        whole = crc32(record) & CHECKSUM_MASK
        if (
            payload_bytes != len(payload)
            or crc != crc32(payload) & CHECKSUM_MASK
            or token not in (b"%d" % whole, UNCHECKED)
        ):
            return False
        sequence, checksum = int(number), int(token)
        try:
            if log.producers.find(writer, sequence, 1, checksum) is not None:
                return False
        except SequenceError:
            return False
        count_puts(
            self._context, log.log_id.topic, count=1, payload_bytes=payload_bytes
        )
        first_id, size_bytes = self._context.ids.reserve(1), SizeBytes(len(record))
        append_batch(
            log,
            (HEADER.pack(payload_bytes, crc, first_id, flag), payload),
            StoredBatch(
                writer, sequence, 1, checksum, first_id, log.next_offset, size_bytes
            ),
            self._answerer,
            self._context,
            opaque=int(opaque),
            finish=(),
        )
        return True

    def take(self, buffer: UnparsedBytes) -> int:
        """Append every ordinary put that stands at the buffer's position.

        Args:
            buffer: its position is moved behind what was taken.

        Returns:
            The number of puts taken; each is answered by its run's ticket.
        """
        self._forget_outdated()
        self.has_more = False
        count = self._take_uniform(buffer)
        if self.has_more:
            return count
        return count + self._take_each(buffer)

    def _forget_outdated(self) -> None:
        """Forget what was resolved before topics or partitions changed."""
        if self._version != self._context.topics.version:
            self._prefixes.clear()
            self._runs.clear()
            self._any.clear()
            self._expected = None
            self._version = self._context.topics.version

    def _take_uniform(self, buffer: UnparsedBytes) -> int:
        """Take uniform runs with the prefix of the puts before; append them as one."""
        prefix = self._expected
        if prefix is None or prefix.reader is None:
            return 0
        run = prefix.run or self._choose(prefix)
        if run is None:
            return 0
        now_s, opaques, records = self._context.clock.monotonic_s, [], bytearray()
        while True:
            puts = prefix.reader.read(buffer.data, buffer.position, UNIFORM_MAX)
            if puts is None:
                self._expected = None
                break
            buffer.position = puts.end
            opaques += puts.opaques
            records += encode_uniform(puts.payloads, puts.checksums, flag=prefix.flag)
            if len(puts.opaques) < UNIFORM_MAX:
                break
            if now_s() >= self.turn_ends_s:
                self.has_more = True
                break
        count, stride = len(opaques), HEADER_BYTES + prefix.length
        if not count:
            return 0
        log, done = run.log, 0
        first_id = self._context.ids.reserve(count)
        stamp_ids(records, stride, first_id, count)
        for ids in id_runs(first_id, count):
            end = done + len(ids)
            piece = (
                records[done * stride : end * stride] if len(ids) < count else records
            )
            offset = log.next_offset
            offsets = range(offset, offset + len(piece), stride)
            receipts = Receipts(opaques[done:end], ids, offsets)
            self._append(log, [piece], receipts, len(piece))
            done = end
        return count

    def _take_each(self, buffer: UnparsedBytes) -> int:
        """Take ordinary puts one by one, whatever their prefixes are."""
        data, position = buffer.data, buffer.position
        size, find, pack = len(data), data.find, HEADER.pack
        active: list[_Run] = []
        first_id = self._context.ids.peek()
        next_id = since_id = int(first_id)
        # What the prefix of the message before this one stood for: most follow suit.
        last_name, last_key, length, flag, offset = b"", b"", 0, 0, 0
        commands: list[bytes] | None = None
        run: _Run | None = None
        chunks, opaques = list[bytes](), list[bytes]()
        ids, offsets = list[int](), list[int]()
        for _ in range(TAKEN_MAX):
            line_end = find(b"\r\n", position)
            if line_end < 0:
                break
            try:
                name, token, opaque = data[position:line_end].rsplit(b" ", 2)
            except ValueError:
                break
            key = b""
            if token > _DIGITS_END:
                (name, _, token), key = name.rpartition(b" "), token
            if name != last_name or key != last_key:
                found = self._look_up(name, token, key, active)
                if found is None:
                    break
                if run is not None:
                    run.offset = offset
                name, token, prefix, run = found
                last_name, last_key, since_id = name, key, next_id
                length, flag, commands = prefix.length, prefix.flag, run.commands
                chunks, opaques, ids = run.chunks, run.opaques, run.ids
                offsets, offset = run.offsets, run.offset
            start = line_end + 2
            end = start + length
            payload = data[start:end]
            crc = crc32(payload) & CHECKSUM_MASK
            if end > size or (token != b"%d" % crc and token != UNCHECKED):
                break
            # Nine digits, no zero before them: a number that is written as replies do.
            if not opaque.isdigit() or len(opaque) > 9 or opaque[0] == _ZERO:
                number = read_opaque(opaque)
                if number is None:
                    break
                opaque = b"%d" % number
            chunks += (pack(length, crc, next_id, flag), payload)
            if commands is not None:
                line = b"%b %b %b %b\r\n" % (name, token, key, opaque)
                front = encode_put_head(next_id, len(line) + length)
                commands += (front, line, payload)
            opaques.append(opaque)
            ids.append(next_id)
            offsets.append(offset)
            offset += HEADER_BYTES + length
            next_id += 1
            if not next_id & SEQUENCE_MASK:
                next_id += CARRY
            position = end
        else:
            self.has_more = True
        if run is None or next_id == first_id:
            return 0
        run.offset = offset
        buffer.position = position
        self._context.ids.advance_to(MessageId(next_id))
        if next_id - since_id >= UNIFORM_MIN and not last_key:
            self._expect(last_name)
        # The last one may have met its prefix only, and no put that it could take.
        return sum([self._append_run(run) for run in active if run.chunks])

    def _look_up(
        self, name: bytes, token: bytes, key: bytes, active: list[_Run]
    ) -> tuple[bytes, bytes, _Prefix, _Run] | None:
        """Return prefix and run of a put, and its name and checksum as they are then.

        Args:
            name: its words before the checksum.
            token: its checksum, as far as it has one.
            key: of its transaction, or empty.
            active: the runs of this pass; one more, where it is new.

        Returns:
            None where the general path must look.
        """
        if not name.startswith(b"put "):
            return None  # a command behind the puts, as the verdict of a transaction
        prefix = self._prefixes.get(name) or self._resolve(name)
        if prefix is None:
            # The older form: what looks like a checksum is the flag.
            name, token = name + b" " + token, UNCHECKED
            prefix = self._prefixes.get(name) or self._resolve(name)
        if prefix is None or (run := prefix.run or self._choose(prefix)) is None:
            return None
        if key:
            found = self._find_transaction_run(key, prefix, active)
            return None if found is None else (name, token, prefix, found)
        if not run.chunks:
            run.offset = run.log.next_offset
            active.append(run)
        return name, token, prefix, run

    def _expect(self, name: bytes) -> None:
        """Expect a uniform run with this prefix: there was one just now."""
        prefix = self._prefixes[name]
        if prefix.length > UNIFORM_PAYLOAD_BYTES_MAX:
            return
        self._expected = prefix
        if prefix.reader is None:
            prefix.reader = UniformPutReader(name, prefix.length)

    def _append_run(self, run: _Run) -> int:
        """Hand what a run gathered to its log; return the number of puts."""
        receipts = Receipts(run.opaques, run.ids, run.offsets)
        chunks, size_bytes = run.chunks, run.offset - run.offsets[0]
        run.clear()
        if isinstance(run, _TransactionRun):
            self._append_to_transaction(run, chunks, receipts, size_bytes)
        else:
            self._append(run.log, chunks, receipts, size_bytes)
        return len(receipts.ids)

    def _append_to_transaction(
        self,
        run: _TransactionRun,
        chunks: list[bytes],
        receipts: Receipts,
        size_bytes: int,
    ) -> None:
        count, payload_bytes = len(receipts.ids), sum(map(len, chunks[1::2]))
        topic = run.log.log_id.topic
        count_puts(self._context, topic, count=count, payload_bytes=payload_bytes)
        put_run(
            self._context.transactions,
            run.transaction,
            run.log.log_id,
            chunks,
            self._answerer,
            opaques=receipts.opaques,
            ids=receipts.ids,
            size_bytes=size_bytes,
            record_count=count,
            last_id=MessageId(receipts.ids[-1]),
            journalled=run.commands or (),
        )

    def _find_transaction_run(
        self, key: bytes, prefix: _Prefix, active: list[_Run]
    ) -> _TransactionRun | None:
        """Return the run of a transaction in this pass; None: the general path looks.

        The journal gets the words of the put as they are, so all must be spelt as MetaQ
        spells them.
        """
        if prefix.run is None or not prefix.is_canonical:
            return None
        try:
            # Transactions are kept under their keys as MetaQ spells them.
            transaction = self._context.transactions.find_for_put(
                key.decode(), self._answerer
            )
        except (UnicodeDecodeError, TransactionError):
            return None
        log = prefix.run.log
        for run in active:
            if (
                isinstance(run, _TransactionRun)
                and run.transaction is transaction
                and run.log is log
            ):
                return run
        made = _TransactionRun(log, transaction)
        active.append(made)
        return made

    def _append(
        self,
        log: PartitionLog,
        chunks: Sequence[Buffer],
        receipts: Receipts,
        size_bytes: int,
    ) -> None:
        count = len(receipts.ids)
        count_puts(
            self._context,
            log.log_id.topic,
            count=count,
            payload_bytes=size_bytes - HEADER_BYTES * count,
        )
        append_run(
            log,
            chunks,
            self._answerer,
            self._context,
            size_bytes=size_bytes,
            record_count=count,
            last_id=MessageId(receipts.ids[-1]),
            receipts=receipts,
        )

    def _resolve(self, name: bytes) -> _Prefix | None:
        """Return what a prefix stands for, or None if the general path must look."""
        words = name.split(b" ")
        if len(words) != 5 or words[0] != b"put":
            return None
        try:
            topic = words[1].decode()
            asked = parse_i32(words[2], "partition")
            length = parse_i32(words[3], "length")
            flag = parse_i32(words[4], "flag")
            if not topic or not 0 <= length <= self._length_max:
                return None
            choices = self._context.topics.open_for_put(topic, asked)
        except (RemoteProtocolError, UnicodeDecodeError, WireError):
            return None
        run, any_ = None, None
        if len(choices) > 1:
            any_ = self._any.setdefault(topic, _AnyPartition(topic, choices))
        else:
            run = self._find_run(topic, choices[0])
            if run is None:
                return None
        if len(self._prefixes) >= PREFIXES_MAX:
            self._prefixes.clear()
        prefix = self._prefixes[name] = _Prefix(
            name, run, any_, length=length, flag=flag
        )
        return prefix

    def _find_run(self, topic: str, partition: int) -> _Run | None:
        """Return the run of a log; None before the log's first put, which makes it."""
        log = self._context.topics.find_log(topic, partition)
        return None if log is None else self._runs.setdefault(log.log_id, _Run(log))

    def _choose(self, prefix: _Prefix) -> _Run | None:
        """Return where puts to any partition go in this read; None: no log is there."""
        chosen = prefix.any
        assert chosen is not None, "a prefix has a run, or a choice of them"
        if chosen.read_number != self._read_number:
            chosen.read_number = self._read_number
            number = self._context.topics.choose(len(chosen.partitions))
            chosen.run = self._find_run(chosen.topic, chosen.partitions[number])
        return chosen.run


def read_opaque(token: bytes) -> int | None:
    """Return the number in a token that is not nine plain digits; None: there is none.

    Java clients count up from -2147483648, so this is the ordinary case for them.
    """
    try:
        return parse_i32(token, "opaque")
    except RemoteProtocolError:
        return None


def _is_plain(digits: bytes) -> bool:
    """Tell whether a number of nine digits at most is written as replies write it."""
    return digits.isdigit() and len(digits) <= 9 and digits[0] != _ZERO
