"""Behaviour of a MetaQ 1.4 broker in memory: commands in, replies out, no I/O.

Tests compare it with recorded conversations of a Java broker, and tests/java with a
real one. It has no extensions: a get never waits, a batch is an unknown command, ids
are negative because Java brokers number by a clock that starts at boot. It has the bugs
of MetaQ that clients meet: a put to any partition may go to a closed one, and a put
with a wrong checksum creates the partition although it is refused.

Differences from MetaQ: replication is refused as by our own broker, puts are readable
at once at any size, and the counters of `stats` are 0.

Transactions have two more traps for clients: a put after the PREPARE is acknowledged
and lost, and a local transaction can be used over its own connection only.

Source: docs/metaq-1.4/broker.md 1.4 to 1.7, 1.14, 2.4, 5.1 to 5.5, 5.8, 7.1, 8.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from metaq.clock import Clock
from metaq.config.topic_rules import TopicRules
from metaq.errors import (
    BadRequestError,
    ForbiddenError,
    MovedError,
    NotFoundError,
    ServerError,
    UnavailableError,
    WireError,
)
from metaq.model import (
    ID_MS_SHIFT,
    ID_ZERO_MS,
    MAX_OFFSET,
    RANDOM_PARTITION,
    LocalTransactionId,
    LogId,
    MessageId,
    Offset,
    TransactionId,
    XaTransactionId,
)
from metaq.protocol import texts
from metaq.protocol.commands import (
    NO_CHECKSUM,
    Get,
    OffsetQuery,
    Put,
    Reply,
    Result,
    Stats,
    Status,
    Sync,
    TransactionCommand,
    TransactionType,
    Value,
    Version,
)
from metaq.protocol.transaction_ids import format_key
from metaq.record.checksum import checksum
from metaq.record.ids import SEQUENCE_BITS, id_after
from metaq.record.layout import HEADER, HEADER_BYTES, Record, encode_record
from metaq.txn.state import (
    PROTOCOL,
    RM_ERROR,
    UNKNOWN,
    HeuristicOutcome,
    XaCommandError,
    not_started,
    outcome_error,
)

_NULL_BEGIN: Final = (
    "class com.taobao.metamorphosis.transaction.NullTransactionId cannot be cast to"
    " class com.taobao.metamorphosis.transaction.LocalTransactionId"
    " (com.taobao.metamorphosis.transaction.NullTransactionId and"
    " com.taobao.metamorphosis.transaction.LocalTransactionId are in unnamed module of"
    " loader 'app')"
)

Held: TypeAlias = tuple[Put, int]
"""A put of a transaction, and its message id."""
Place: TypeAlias = tuple[object, TransactionId]
"""Key of a transaction: its connection (None for an XA transaction) and its id."""


@dataclass(slots=True)
class _Transaction:
    ends_s: float | None
    puts: list[Held] = field(default_factory=list)
    lost: list[Held] = field(default_factory=list)
    is_prepared: bool = False

    def require_prepared(self) -> None:
        if not self.is_prepared:
            text = "Cannot do 2 phase commit if the transaction has not been prepared."
            raise _xa_error(PROTOCOL, text)


class FakeTransactions:
    """All transactions of one broker. Not thread-safe; its owner serialises calls."""

    def __init__(self, clock: Clock, append: Callable[[Put, int], object]) -> None:
        """Start without transactions.

        Args:
            clock: clock of timeouts.
            append: stores a committed put with its message id.
        """
        self._clock = clock
        self._append = append
        self._live: dict[Place, _Transaction] = {}
        self._heuristic: dict[TransactionId, HeuristicOutcome] = {}

    # -- for the test -----------------------------------------------------------------

    def keys(self) -> list[str]:
        """Return the keys of unfinished transactions."""
        self._expire()
        return [format_key(transaction) for _, transaction in self._live]

    def end(self, transaction: XaTransactionId, outcome: HeuristicOutcome) -> None:
        """End a prepared transaction heuristically, as an operator does."""
        found = self._live.pop((None, transaction))
        assert found.is_prepared
        if outcome is HeuristicOutcome.COMMIT:
            self._commit(found)
        self._heuristic[transaction] = outcome

    def restart(self) -> None:
        """Drop transactions that are not prepared, as a crash and restart do."""
        self._live = {p: one for p, one in self._live.items() if one.is_prepared}

    def recover(self) -> None:
        """Drop the puts of unprepared transactions, which go on.

        A Java broker does so at a start, when its port is already open.
        """
        for one in self._live.values():
            if not one.is_prepared:
                one.puts.clear()

    # -- commands ---------------------------------------------------------------------

    def put(self, put: Put, number: int, connection: object) -> None:
        """Add a put to its transaction.

        Raises:
            ServerError: no such transaction.
        """
        assert put.transaction is not None
        found = self._find(put.transaction, connection, is_put=True)
        (found.lost if found.is_prepared else found.puts).append((put, number))

    def require(self, transaction: TransactionId, connection: object) -> None:
        """Raise ServerError, as for a put, if there is no such transaction."""
        self._find(transaction, connection, is_put=True)

    def answer(self, command: TransactionCommand, connection: object) -> str:
        """Carry out a command; return the body of its 200.

        Raises:
            ServerError: the command fails; with MetaQ's text.
        """
        transaction, kind = command.transaction, command.type
        match kind:
            case TransactionType.BEGIN:
                self._begin(command, connection)
                return ""
            case TransactionType.RECOVER:
                return self._recover(command.qualifier)
            case TransactionType.FORGET:
                if not isinstance(transaction, XaTransactionId):
                    text = f"{format_key(transaction)} is not a valid xid"
                    raise _xa_error(UNKNOWN, text)
                self._heuristic.pop(transaction, None)
                return ""
        found = self._find(transaction, connection)
        if kind is TransactionType.PREPARE:
            return self._prepare(transaction, found)
        is_global = isinstance(transaction, XaTransactionId)
        if kind is TransactionType.COMMIT_TWO_PHASE and is_global:
            found.require_prepared()
        if kind is not TransactionType.ROLLBACK:
            self._commit(found)
        del self._live[_place(transaction, connection)]
        return ""

    def _begin(self, command: TransactionCommand, connection: object) -> None:
        transaction = command.transaction
        if not isinstance(transaction, LocalTransactionId | XaTransactionId):
            raise ServerError(_NULL_BEGIN)
        self._expire()
        ends_s = None
        if command.timeout_s > 0:
            ends_s = self._clock.monotonic_s() + command.timeout_s
        self._live.setdefault(_place(transaction, connection), _Transaction(ends_s))

    def _prepare(self, transaction: TransactionId, found: _Transaction) -> str:
        if not isinstance(transaction, XaTransactionId):
            text = "Prepare not implemented on Local Transactions."
            raise _xa_error(RM_ERROR, text)
        if found.is_prepared:
            raise _xa_error(PROTOCOL, "Cannot call prepare now.")
        if not found.puts:
            del self._live[None, transaction]
            return "3"
        found.is_prepared = True
        return "0"

    def _recover(self, qualifier: str | None) -> str:
        prepared = [one for (_, one), found in self._live.items() if found.is_prepared]
        return "\r\n".join(
            format_key(one)
            for one in (*prepared, *self._heuristic)
            if isinstance(one, XaTransactionId) and qualifier in (None, one.qualifier)
        )

    def _commit(self, found: _Transaction) -> None:
        for put, number in found.puts:
            self._append(put, number)

    def _find(
        self, transaction: TransactionId, connection: object, *, is_put: bool = False
    ) -> _Transaction:
        self._expire()
        outcome, key = self._heuristic.get(transaction), format_key(transaction)
        found = self._live.get(_place(transaction, connection))
        if outcome is None and found is not None:
            return found
        error = not_started(key) if outcome is None else outcome_error(key, outcome)
        if isinstance(error, XaCommandError) and not is_put:
            raise _xa_error(error.code, str(error))
        raise ServerError(str(error))

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        self._live = {
            place: one
            for place, one in self._live.items()
            if one.is_prepared or one.ends_s is None or now_s < one.ends_s
        }


def _place(transaction: TransactionId, connection: object) -> Place:
    is_global = isinstance(transaction, XaTransactionId)
    return None if is_global else connection, transaction


def _xa_error(code: int, text: str) -> ServerError:
    return ServerError(f"XAException:code={code},msg={text}")


VERSION: Final = "1.4.6.2"
"""Body of the `version` reply; it announces no extensions to our clients."""

UPTIME_S: Final = 3600
"""Uptime of a broker that has long finished its recovery."""

TRANSFER_BYTES_MAX: Final = 1024 * 1024

_COUNTERS: Final = (
    "curr_connections", "threads", "cmd_put", "cmd_get", "cmd_offset", "tx_begin",
    "tx_xa_begin", "tx_commit", "tx_rollback", "get_miss", "put_failed",
)  # fmt: skip
_REALTIME: Final = ("put", "get", "offset", "get_miss", "put_failed", "message_size")
_HELP: Final = (
    "*EMPTY* Returns broker info.",
    "help Returns help menu.",
    "topics Returns topics statistics detail info.",
    "offsets Returns partitions detail info.",
    "realtime Returns realtime statistics detail info.",
    "config Returns broker's config file content.",
)

Known: TypeAlias = Put | Get | OffsetQuery | Version | Stats | TransactionCommand | Sync


class FakeLog:
    """Log of one partition: segments of bytes, addressed by offset."""

    def __init__(self) -> None:
        self._base = 0
        self._segments = [bytearray()]
        self.gaps: list[tuple[int, int, WireError]] = []
        """Unreadable ranges, as (start, end, error for a get there)."""

    @property
    def start(self) -> Offset:
        """Log start offset."""
        return Offset(self._base)

    @property
    def end(self) -> Offset:
        """Log end offset."""
        return Offset(self._base + sum(map(len, self._segments)))

    def append(self, data: bytes) -> Offset:
        """Append bytes to the last segment; return their offset."""
        offset = self.end
        self._segments[-1] += data
        return offset

    def roll(self) -> None:
        """Begin a new segment."""
        self._segments.append(bytearray())

    def trim(self) -> None:
        """Delete the oldest segment; the last one stays, as in a broker."""
        if len(self._segments) > 1:
            self._base += len(self._segments.pop(0))

    def find(self, offset: int) -> tuple[int, bytearray]:
        """Return (base offset, bytes) of the segment with a readable offset."""
        start = self._base
        for segment in self._segments:
            if start <= offset < start + len(segment):
                return start, segment
            start += len(segment)
        raise AssertionError(f"expected {self.start}..{self.end}, got {offset}")

    def records(self) -> list[Record]:
        """Return all records, oldest first, including damaged ones."""
        data, position, found = b"".join(self._segments), 0, []
        while position < len(data):
            length, stored, number, flag = HEADER.unpack_from(data, position)
            position += HEADER_BYTES
            payload = data[position : position + length]
            found.append(Record(MessageId(number), flag, stored, payload))
            position += length
        return found


class FakeMetaq:
    """Topics and logs of one broker. Not thread-safe; its owner serialises calls."""

    def __init__(
        self,
        topics: Mapping[str, int],
        *,
        broker_id: int,
        clock: Clock,
        choose: Callable[[int], int],
    ) -> None:
        """Configure a broker without messages.

        Args:
            topics: topic → number of partitions; a name may be a pattern, and topics
                that only match a pattern have one partition.
            broker_id: broker id, 0..1023.
            clock: clock of message ids.
            choose: returns a number in 0..n-1, for puts to any partition.
        """
        self.topics = dict(topics)
        self.closed: set[LogId] = set()
        self.logs: dict[LogId, FakeLog] = {}
        """Logs of partitions that have had a put."""
        self.transfer_bytes_max = TRANSFER_BYTES_MAX
        """Maximum body of a get (`maxTransferSize`)."""
        self.does_redirect = False
        """Whether a get after the end is answered 301 (`updateConsumerOffsets`)."""
        self.uri = ""
        """Advertised address, for the texts of refused puts."""
        self.port = 0
        self.uptime_s = UPTIME_S
        """Uptime in seconds, as shown by `stats`."""
        self._broker_id = broker_id
        self._clock = clock
        self._choose = choose
        self._last_id = MessageId(-(2**63))
        self.transactions = FakeTransactions(clock, self._append)

    # -- content ----------------------------------------------------------------------

    def log(self, topic: str, partition: int) -> FakeLog:
        """Return the log of a partition, created on demand."""
        return self.logs.setdefault(LogId(topic, partition), FakeLog())

    def peek(self, topic: str, partition: int) -> FakeLog:
        """Return the log of a partition, or a temporary empty one."""
        return self.logs.get(LogId(topic, partition)) or FakeLog()

    def next_id(self) -> MessageId:
        """Return a new negative id, larger than the last one."""
        now_ms = int(self._clock.monotonic_s() * 1000) - ID_ZERO_MS
        now = MessageId(now_ms << ID_MS_SHIFT | self._broker_id << SEQUENCE_BITS)
        self._last_id = max(now, id_after(self._last_id, 1))
        return self._last_id

    def config_text(self) -> str:
        """Return a configuration file with these topics."""
        lines = [
            "[system]",
            f"brokerId={self._broker_id}",
            f"serverPort={self.port}",
            "numPartitions=1",
            "unflushThreshold=0",
            "unflushInterval=10000",
            "maxSegmentSize=1073741824",
            f"maxTransferSize={self.transfer_bytes_max}",
            f"updateConsumerOffsets={str(self.does_redirect).lower()}",
            "[zookeeper]",
            "zk.zkConnect=localhost:2181",
        ]
        for topic, count in self.topics.items():
            lines += [f"[topic={topic}]", f"numPartitions={count}"]
        return "\n".join(lines) + "\n"

    # -- commands ---------------------------------------------------------------------

    def answer(self, command: Known, connection: object = None) -> Reply | None:
        """Carry out one command.

        Args:
            command: the command.
            connection: its connection, which local transactions belong to.

        Returns:
            The reply; None where MetaQ sends none.
        """
        try:
            return self._carry_out(command, connection)
        except WireError as error:
            return Result(error.status, str(error).encode(), command.opaque)

    def _carry_out(self, command: Known, connection: object) -> Reply | None:
        match command:
            case Put(transaction=None):
                return _ok(self._put(command), command.opaque)
            case Put():
                return _ok(self._put_later(command, connection), command.opaque)
            case Get():
                return Value(self._get(command), command.opaque)
            case OffsetQuery():
                return _ok(str(self._offset(command)), command.opaque)
            case Version():
                return _ok(VERSION, command.opaque)
            case Stats():
                return _ok(self._stats(command.item), command.opaque)
            case TransactionCommand():
                if command.type is TransactionType.END:
                    return None
                text = self.transactions.answer(command, connection)
                return _ok(text, command.opaque)
            case Sync():
                raise UnavailableError(texts.NO_SYNC_PROCESSOR)

    def _put_later(self, put: Put, connection: object) -> str:
        """Add a put to its transaction; only its topic and partition are checked."""
        assert put.transaction is not None
        self.transactions.require(put.transaction, connection)
        topic, partition = put.topic, put.partition
        if partition == RANDOM_PARTITION:
            raise ServerError(texts.invalid_transactional_partition(partition))
        if topic not in self.topics and not self._has_pattern_for(topic):
            raise ServerError(texts.topic_not_accepted(topic))
        if not 0 <= partition < self.topics.get(topic, 1):
            raise ServerError(texts.wrong_partition(partition))
        number = self.next_id()
        self.transactions.put(put, number, connection)
        return f"{number} {partition} -1"

    def _append(self, put: Put, number: int) -> Offset:
        record = _record(put, MessageId(number))
        return self.log(put.topic, put.partition).append(record)

    def _put(self, put: Put) -> str:
        topic, partition, detail = put.topic, put.partition, ""
        count = self.topics.get(topic, 1)
        if LogId(topic, partition) in self.closed:
            detail = texts.closed_detail(self._broker_id, partition)
            raise ForbiddenError(texts.put_failed(self.uri, topic, partition, detail))
        if partition == RANDOM_PARTITION:
            # As in MetaQ, also a closed partition, and before the topic is checked.
            partition = self._choose(count)
        if topic not in self.topics and not self._has_pattern_for(topic):
            detail = texts.topic_not_accepted(topic)
        elif not 0 <= partition < count:
            detail = texts.wrong_partition(partition)
        else:
            log = self.log(topic, partition)
            if put.checksum not in {NO_CHECKSUM, checksum(put.payload)}:
                detail = texts.CHECKSUM_FAILURE
        if detail:
            raise ServerError(texts.put_failed(self.uri, topic, partition, detail))
        number = self.next_id()
        return texts.put_reply(number, partition, log.append(_record(put, number)))

    def _has_pattern_for(self, topic: str) -> bool:
        return TopicRules().extended(self.topics).accepts(topic)

    def _get(self, get: Get) -> bytes:
        # The rows of docs/metaq-1.4/broker.md 1.5, in that order.
        if LogId(get.topic, get.partition) in self.closed:
            raise ForbiddenError(texts.get_closed(self._broker_id, get.partition))
        log = self._existing(get)
        if get.max_size <= 0:
            raise BadRequestError(texts.invalid_max_size(get.max_size))
        if get.offset < log.start:
            raise MovedError(str(log.start))
        if get.offset < log.end:
            start, segment = log.find(get.offset)
            position = get.offset - start
            size_bytes = min(get.max_size, self.transfer_bytes_max)
            for gap_start, gap_end, answer in log.gaps:
                if gap_start <= get.offset < gap_end:
                    raise answer
                if get.offset < gap_start:
                    size_bytes = min(size_bytes, gap_start - get.offset)
            return bytes(segment[position : position + size_bytes])
        is_redirected = self.does_redirect or get.offset == MAX_OFFSET
        if get.offset > log.end and is_redirected:
            raise MovedError(str(log.end))
        raise NotFoundError(texts.nothing_at(get.offset))

    def _offset(self, query: OffsetQuery) -> Offset:
        log = self._existing(query)
        if query.offset < log.start:
            return log.start
        if query.offset >= log.end:
            return log.end
        return Offset(log.find(query.offset)[0])

    def _existing(self, command: Get | OffsetQuery) -> FakeLog:
        log = self.logs.get(LogId(command.topic, command.partition))
        if log is None:
            raise NotFoundError(texts.no_such_log(command.topic, command.partition))
        return log

    def _stats(self, item: str) -> str:
        topics = {log_id.topic for log_id in self.logs}
        match item:
            case "config":
                return self.config_text()
            case "":
                lines = [
                    "pid 1",
                    f"broker_id {self._broker_id}",
                    f"port {self.port}",
                    f"uptime {self.uptime_s}",
                    f"version {VERSION}",
                    "slave false",
                    *(f"{name} 0" for name in _COUNTERS),
                    f"total_messages {_count(self.logs.values())}",
                    f"topics {len(topics.union(self.topics))}",
                    f"config_checksum {zlib.crc32(self.config_text().encode())}",
                ]
            case "help":
                lines = list(_HELP)
            case "reset":
                lines = ["reset ok"]
            case "realtime":
                lines = [f"realtime_{name} null" for name in _REALTIME]
            case "topics":
                lines = [self._describe(topic) for topic in sorted(topics)]
                lines += [f"{t} *Empty*" for t in self.topics if t not in topics]
            case "offsets":
                lines = [
                    f"{log_id.topic} part {log_id.partition}"
                    f" min_offset {log.start} max_offset {log.end}"
                    for log_id, log in sorted(self.logs.items())
                ]
            case topic:
                code = 0 if topic in topics else 2 if topic in self.topics else 1
                logs = self._logs_of(topic)
                lines = [
                    topic,
                    f"resultCode {code}",
                    f"partitions {len(logs)}",
                    f"message_count {_count(logs)}",
                    f"bytes {_size_bytes(logs)}",
                    *(f"topic_realtime_{name} null" for name in _REALTIME),
                ]
        return "\r\n".join(["STATS", *lines, "END", ""])

    def _describe(self, topic: str) -> str:
        logs = self._logs_of(topic)
        return (
            f"{topic} partitions {len(logs)}"
            f" message_count {_count(logs)} message_bytes {_size_bytes(logs)}"
            " accept_publish true accept_subscribe true"
        )

    def _logs_of(self, topic: str) -> list[FakeLog]:
        return [log for log_id, log in self.logs.items() if log_id.topic == topic]


def _count(logs: Iterable[FakeLog]) -> int:
    return sum(len(log.records()) for log in logs)


def _size_bytes(logs: Iterable[FakeLog]) -> int:
    return sum(log.end - log.start for log in logs)


def _record(put: Put, number: MessageId) -> bytes:
    return encode_record(put.payload, id=number, flag=put.flag)


def _ok(body: str, opaque: int) -> Result:
    return Result(Status.OK, body.encode(), opaque)
