"""The fast path of puts: one flat loop parses, stamps and appends the received puts.

Theory of operation. The loop takes every form of a put that can be stored,

    put topic partition length flag checksum opaque CRLF payload
    put topic partition length flag opaque CRLF payload         (older clients)
    put topic partition length flag [checksum] transaction opaque CRLF payload

with a checksum, with -1 instead, or without; to a partition, or to any (-1). Each put
is split into words once. Topic and partition are resolved through `Topics` and cached
under the words as sent; nothing else is cached, so a session has at most one entry for
each partition and topic that it uses. The loop stops at the first put that it cannot
take and leaves the position there: a put that is refused, is cut by the end of the
read, is the first of its partition, or writes the partition in an unusual way. The
general path (`protocol.Connection`, `dispatch`, handlers) handles exactly that frame,
and the loop is tried again after it. So this file only answers with an error if a
transaction would exceed a bound.

`_gather` is that loop, and the only parser. It has two callers: `take` appends runs of
puts; `take_single` passes a put that was received alone to `SinglePuts`, which appends
it with those of other connections. A producer that waits for each reply sends batches
of one message, which are another command: `take_batch` parses them.

The loop is flat on purpose: a call, an object or an attribute chain per message costs
as much as the rest of its processing. Payloads, checksums, flags and opaques become
columns of a `_Run`, one for each log and transaction; ids, offsets and headers are made
for a whole column at once. One run is one append and one ticket. Runs of a transaction
go to the transaction and its journal instead of the log.

If the broker chooses the partition, it chooses once for all puts to a topic that are
received together, and keeps the choice for some reads of a stream: many small runs
would cost what one large run saves, and would keep all logs busy.

    Invariant: for any input, the bytes stored and the replies are those of the
    general path (tests/broker/test_hot_puts.py compares them).
    Invariant: a target resolved under an older `topics.version` is never used.

Keep in step: `handlers/put.py`, `record/layout.py`, `record/ids.py`.
"""

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

from metaq.broker.acks import Answerer, Receipts, append_run, count_puts
from metaq.broker.context import BrokerContext
from metaq.broker.single_puts import SINGLE_BYTES_MAX, SINGLE_OVERHEAD_BYTES, SinglePuts
from metaq.broker.transactions import put_run
from metaq.errors import RemoteProtocolError, SequenceError, TransactionError, WireError
from metaq.model import RANDOM_PARTITION, MessageId, SizeBytes
from metaq.protocol.commands import NO_CHECKSUM
from metaq.protocol.decimals import parse_i32
from metaq.protocol.names import parse_producer
from metaq.record.checksum import CHECKSUM_MASK, crc32
from metaq.record.ids import ids_from
from metaq.record.layout import HEADER, HEADER_BYTES, encode_records, record_starts
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.txn.records import encode_put_head
from metaq.txn.transaction import BrokerTransaction, PutRun

TAKEN_MAX: Final = 512
"""Maximum number of puts of one `take`, about 0.5 ms; then the session checks the
time."""

ANY_READS_MAX: Final = 4
"""Maximum number of reads of a stream for which a chosen partition is kept: 1 MiB, the
size of a group of the disk."""

_LINE_END: Final = b"\r\n"
_UNCHECKED: Final = b"%d" % NO_CHECKSUM
"""Word in place of a missing checksum."""
_ZERO: Final = ord("0")
_DIGITS_END: Final = b":"
"""Sorts after every number, and before the key of every transaction."""
_PLAIN_DIGITS_MAX: Final = 9
"""Maximum number of digits of which any number fits in 32 bits."""
_PARTS: Final = 5
"""Number of parts of a put; see `_to_five`."""
_BATCH_WORDS: Final = 9
"""Number of words of an `mput` outside a transaction."""
_SEQUENCE_DIGITS_MAX: Final = 18
"""Maximum number of digits of which any number fits in 64 bits."""


class UnparsedBytes(Protocol):
    """Receive buffer as `take` uses it."""

    data: bytes
    position: int
    """Start of the first frame that was not taken yet."""


class _Run:
    """Puts of one session to one log, in one transaction or in none, in one pass.

    Runs outside transactions are reused in later passes.
    """

    __slots__ = ("columns", "ids", "journal_lines", "log", "name", "transaction")

    def __init__(
        self,
        name: bytes,
        log: PartitionLog,
        transaction: BrokerTransaction | None = None,
    ) -> None:
        self.name = name
        """ "put topic partition"."""
        self.log = log
        self.transaction = transaction
        self.clear()

    def clear(self) -> None:
        """Make the run empty, with new lists; others own the old ones now."""
        self.columns: tuple[list[bytes], list[int], list[int], list[bytes]]
        self.columns = [], [], [], []
        """Payloads, their checksums, flags, and opaques in the form of replies."""
        self.ids: list[int] = []
        self.journal_lines: list[bytes] = []
        """Command line of each put, in its eight-word form; empty outside
        transactions."""


_Turns: TypeAlias = list[tuple[int, _Run]]
"""Pieces of runs in the order of arrival, each with the number of its first put. A run
may occur more than once, and a piece may be empty."""


class _AnyPartition:
    """The open partitions of a topic, and the run chosen for this read."""

    __slots__ = ("partitions", "read_number", "run", "topic")

    def __init__(self, topic: bytes, partitions: Sequence[int]) -> None:
        self.topic = topic
        self.partitions = partitions
        self.read_number = -1
        self.run: _Run | None = None


class HotPuts:
    """The hot loop of one session, and its cache of topics and partitions."""

    def __init__(
        self, answerer: Answerer, context: BrokerContext, single_puts: SinglePuts
    ) -> None:
        self._answerer = answerer
        self._context = context
        self._single_puts = single_puts
        self._targets: dict[bytes, _Run | _AnyPartition] = {}
        """"put topic partition" → its run. Only for existing logs and one spelling of
        a partition, so that it has no more entries than there are logs and topics."""
        self._last: _Run | None = None
        """Run of the last put to a named partition; most next puts have the same."""
        self._version = 0
        self._read_number = 0
        self._kept_reads = 0
        limits = context.config.limits
        self._length_max = limits.payload_bytes_max
        self._batch_max = min(SINGLE_BYTES_MAX, limits.batch_bytes_max)
        self.has_more = False
        """Whether the last `take` stopped at its bound and must be called again."""

    def begin_read(self) -> None:
        """Note that more bytes were received; called once a read.

        Puts to any partition then choose a new one. While puts of the connection are in
        flight, this happens only every ANY_READS_MAX reads, so that a stream keeps one
        log busy and not all.
        """
        self._kept_reads += 1
        if not self._answerer.in_flight_bytes or self._kept_reads >= ANY_READS_MAX:
            self._kept_reads = 0
            self._read_number += 1

    def take(self, buffer: UnparsedBytes) -> int:
        """Append every ordinary put at the buffer's position.

        Args:
            buffer: received bytes; its position is moved past the puts taken.

        Returns:
            The number of puts taken; each is answered by the ticket of its run.
        """
        turns, count, end = self._gather(buffer.data, buffer.position, TAKEN_MAX)
        self.has_more = count == TAKEN_MAX
        if not count:
            return 0
        buffer.position = end
        ids = ids_from(self._context.ids.reserve(count), count)
        ends = [first for first, _ in turns[1:]]
        for (first, run), end in zip(turns, [*ends, count], strict=True):
            run.ids += ids[first:end]
        for _, run in turns:
            if run.ids:
                self._append(run)
        return count

    def take_single(self, data: bytes) -> int:
        """Gather a put that was received alone, if it is an ordinary one.

        Args:
            data: all bytes received and not processed yet.

        Returns:
            Bytes that it holds in flight until it is answered; 0: nothing was taken.
        """
        if len(data) > SINGLE_BYTES_MAX or not data.startswith(b"put "):
            return 0
        turns, count, end = self._gather(data, 0, 1)
        if not count:
            return 0
        run = turns[-1][1]
        payloads, checksums, flags, opaques = run.columns
        run.clear()
        if end < len(data) or run.transaction is not None:
            return 0
        put = self._answerer, payloads[0], checksums[0], flags[0], opaques[0]
        self._single_puts.add(run.log, put)
        return SINGLE_OVERHEAD_BYTES + len(payloads[0])

    def take_batch(self, data: bytes) -> bool:
        """Append a batch of one message that was received alone, if it is ordinary.

            mput topic partition length 1 checksum producer sequence opaque CRLF record

        Args:
            data: as for `take_single`.

        Returns:
            Whether it was taken; then its ticket holds and answers it.
        """
        line_end = data.find(_LINE_END)
        words = data[:line_end].split(b" ")
        if len(words) != _BATCH_WORDS or words[0] != b"mput" or words[4] != b"1":
            return False
        _, topic, partition, length, _, token, producer, number, opaque_word = words
        name, record = b"put %b %b" % (topic, partition), data[line_end + 2 :]
        self._forget_outdated()
        run = self._find_log_run(name)
        if (
            run is None
            or name != run.name
            or length != b"%d" % len(record)
            or not HEADER_BYTES <= len(record) <= self._batch_max
            or (opaque := read_i32(opaque_word)) is None
            or not (number.isdigit() and len(number) <= _SEQUENCE_DIGITS_MAX)
            or (writer := parse_producer(producer)) is None
            or (writer, run.log.log_id) in self._answerer.held_back
        ):
            return False
        payload, log = record[HEADER_BYTES:], run.log
        payload_bytes, crc, _, flag = HEADER.unpack_from(record)
        whole = crc32(record) & CHECKSUM_MASK
        if (
            payload_bytes != len(payload)
            or crc != crc32(payload) & CHECKSUM_MASK
            or token not in (b"%d" % whole, _UNCHECKED)
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
        offset = log.next_offset
        append_run(
            log,
            (HEADER.pack(payload_bytes, crc, first_id, flag), payload),
            self._answerer,
            size_bytes=size_bytes,
            record_count=1,
            last_id=first_id,
            receipts=Receipts((b"%d" % opaque,), (first_id,), (offset,)),
            batch=StoredBatch(
                writer, sequence, 1, checksum, first_id, offset, size_bytes
            ),
        )
        return True

    def _gather(
        self, data: bytes, position: int, count_max: int
    ) -> tuple[_Turns, int, int]:
        """Parse the ordinary puts from a position on into runs, without appending.

        Returns:
            The pieces of runs, the number of puts, and the position after the last put.
        """
        self._forget_outdated()
        size, length_max = len(data), self._length_max
        turns: _Turns = []
        made: dict[tuple[bytes, bytes], _Run] = {}
        # Words of the previous put, because most puts repeat them. The initial values
        # cannot be words.
        last_name, last_key, last_flag, flag = _LINE_END, b"", _LINE_END, 0
        if self._last is not None:
            last_name = self._last.name
            turns.append((0, self._last))
            payloads, checksums, flags, opaques = self._last.columns
        for number in range(count_max):
            line_end = data.find(_LINE_END, position)
            if line_end < 0:
                break
            words, key = data[position:line_end].rsplit(b" ", 4), b""
            if words[0] != last_name or last_key or words[3] > _DIGITS_END:
                words, key = _to_five(words)
                name = words[0]
                if name != last_name or key != last_key:
                    run = self._find_run(name, key, made)
                    if run is None:
                        break
                    last_name, last_key = name, key
                    payloads, checksums, flags, opaques = run.columns
                    turns.append((number, run))
            _, length, flag_word, token, opaque = words
            if not length.isdigit() or len(length) > _PLAIN_DIGITS_MAX:
                break
            start = line_end + 2
            end = start + int(length)
            payload = data[start:end]
            crc = crc32(payload) & CHECKSUM_MASK
            if (
                (token != b"%d" % crc and token != _UNCHECKED)
                or end > size
                or end - start > length_max
            ):
                break
            if flag_word != last_flag:
                if (flag_read := read_i32(flag_word)) is None:
                    break
                flag, last_flag = flag_read, flag_word
            # At most nine digits without a leading zero are already as in replies.
            if (
                not opaque.isdigit()
                or len(opaque) > _PLAIN_DIGITS_MAX
                or opaque[0] == _ZERO
            ):
                if (opaque_read := read_i32(opaque)) is None:
                    break
                opaque = b"%d" % opaque_read
            payloads.append(payload)
            checksums.append(crc)
            flags.append(flag)
            opaques.append(opaque)
            if key:
                fields = last_name, end - start, flag, token, key, opaque
                turns[-1][1].journal_lines.append(b"%b %d %d %b %b %b\r\n" % fields)
            position = end
        else:
            number = count_max
        return turns, number, position

    def _forget_outdated(self) -> None:
        """Clear the cache if topics or partitions have changed."""
        if self._version != self._context.topics.version:
            self._targets.clear()
            self._version, self._last = self._context.topics.version, None

    def _find_run(
        self, name: bytes, key: bytes, made: dict[tuple[bytes, bytes], _Run]
    ) -> _Run | None:
        """Return the run of a put; None: the general path must handle it.

        Args:
            name: "put topic partition", as sent.
            key: key of its transaction, or empty.
            made: runs of transactions in this pass; a new run is added.
        """
        run = self._find_log_run(name)
        if run is None or name != run.name:
            return None if key else run
        if not key:
            self._last = run
            return run
        if (name, key) not in made:
            try:
                # Only the key as MetaQ spells it is found.
                transaction = self._context.transactions.find_for_put(
                    key.decode(), self._answerer
                )
            except (UnicodeDecodeError, TransactionError):
                return None
            made[name, key] = _Run(name, run.log, transaction)
        return made[name, key]

    def _find_log_run(self, name: bytes) -> _Run | None:
        """Return the run of the log of a put, ignoring transactions; as `_find_run`."""
        target = self._targets.get(name)
        if isinstance(target, _Run):
            return target
        if target is not None:
            return self._choose(target)
        words = name.split(b" ")
        if len(words) != 3 or words[0] != b"put":
            return None
        topics = self._context.topics
        try:
            topic, asked = words[1].decode(), parse_i32(words[2], "partition")
            if not topic or words[2] != b"%d" % asked:
                return None
            choices = topics.open_for_put(topic, asked)
        except (RemoteProtocolError, UnicodeDecodeError, WireError):
            return None
        if asked == RANDOM_PARTITION:
            any_ = _AnyPartition(words[1], choices)
            run = self._choose(any_)
            if run is not None:
                self._targets[name] = any_
            return run
        log = topics.find_log(topic, asked)
        if log is None:
            return None  # the first put creates the log
        run = self._targets[name] = _Run(name, log)
        return run

    def _choose(self, chosen: _AnyPartition) -> _Run | None:
        """Return the run for puts to any partition in this read; None: no log yet."""
        if chosen.read_number != self._read_number:
            chosen.read_number = self._read_number
            number = self._context.topics.choose(len(chosen.partitions))
            words = chosen.topic, chosen.partitions[number]
            chosen.run = self._find_log_run(b"put %b %d" % words)
        return chosen.run

    def _append(self, run: _Run) -> None:
        """Append the puts of a run to its log, or to its transaction."""
        (payloads, checksums, flags, opaques), ids = run.columns, run.ids
        lines = run.journal_lines
        run.clear()
        offsets = record_starts(payloads, run.log.next_offset)
        count, size_bytes = len(payloads), offsets.pop() - run.log.next_offset
        records = encode_records(payloads, checksums, ids, flags)
        last_id = MessageId(ids[-1])
        count_puts(
            self._context,
            run.log.log_id.topic,
            count=count,
            payload_bytes=size_bytes - HEADER_BYTES * count,
        )
        if run.transaction is None:
            append_run(
                run.log,
                [records],
                self._answerer,
                size_bytes=size_bytes,
                record_count=count,
                last_id=last_id,
                receipts=Receipts(opaques, ids, offsets),
            )
            return
        journalled: list[bytes] = []
        for each, line, payload in zip(ids, lines, payloads, strict=True):
            journalled += (
                encode_put_head(each, len(line) + len(payload)),
                line,
                payload,
            )
        put_run(
            run.transaction,
            PutRun(run.log.log_id, [records], size_bytes, count, last_id, journalled),
            self._answerer,
            opaques=opaques,
            ids=ids,
        )


def _to_five(words: list[bytes]) -> tuple[list[bytes], bytes]:
    """Return the parts of a put of any form, and the key of its transaction, or b"".

    The parts are name ("put topic partition"), length, flag, checksum and opaque.

    Args:
        words: the rest of the line, then its last four words; fewer are no put.
    """
    spaces = words[0].count(b" ") if len(words) == _PARTS else 0
    if spaces == 1:
        # Six words: partition, length, flag, opaque.
        command, partition, length, flag, opaque = words
        return [command + b" " + partition, length, flag, _UNCHECKED, opaque], b""
    if spaces == 2 and words[3] > _DIGITS_END:
        # Seven words: length, flag, key, opaque.
        name, length, flag, key, opaque = words
        return [name, length, flag, _UNCHECKED, opaque], key
    if spaces == 3 and words[3]:
        # Eight words: flag, checksum, key, opaque.
        name, _, length = words[0].rpartition(b" ")
        return [name, length, *words[1:3], words[4]], words[3]
    return words if spaces == 2 else [b""] * _PARTS, b""


def read_i32(token: bytes) -> int | None:
    """Return a word as a number of 32 bits; None: it is not one.

    Java clients count opaques up from -2147483648.
    """
    try:
        return parse_i32(token, "number")
    except RemoteProtocolError:
        return None
