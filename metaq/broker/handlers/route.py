"""Puts to an exchange: one command, appended to each matching topic, one answer.

The messages of a command are grouped by target, a partition of each topic that a
message matches. All targets are checked before anything is appended, in one turn of the
loop: if one of them refuses, nothing is stored. The command is answered when all have
stored it. After a later failure of a disk it is in doubt; sending the command again
stores what is missing.

    mput events ... a b c         a: order.paid   b: order.new   c: order.paid
                                          orders  <- order.#     a b c    one append
                                          paid    <- *.paid      a c      one append

A batch with a producer is looked up at each target, under a name made of producer and
exchange, with its whole sequence and count: each target stores it once. The partition
is a function of the message key, or else of producer and sequence, so it is the same
when the batch is sent again. Each target keeps the order of the command.

In a transaction the messages become puts of it, to the topics that are bound now.
"""

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Final, TypeAlias
from zlib import crc32

from metaq.broker import delay_puts
from metaq.broker.acks import (
    PUT_OVERHEAD_BYTES,
    REFUSALS,
    Answerer,
    PutTicket,
    Receipts,
    is_light,
    refuse_put,
)
from metaq.broker.context import DelayedMessages
from metaq.broker.handlers.txn import find_transaction
from metaq.broker.internal_logs import producer_name
from metaq.broker.topics import ServedExchange
from metaq.errors import (
    ClosedError,
    ConfigError,
    MayBeStoredError,
    MetaqError,
    NoSpaceError,
    ServerError,
    StorageError,
    TransactionError,
    UnavailableError,
    WireError,
)
from metaq.model import RANDOM_PARTITION, HeaderPairs, LogId, MessageId, SizeBytes
from metaq.protocol import texts
from metaq.protocol.commands import Mput, Status
from metaq.protocol.encoding import encode_refusal, encode_result
from metaq.protocol.transaction_ids import format_key
from metaq.record.batch import CheckedRecords, stamp_in_steps
from metaq.record.flags import HAS_PROPERTIES, decode_text, text_of
from metaq.record.ids import id_after
from metaq.record.layout import HEADER, HEADER_BYTES, record_positions
from metaq.routing.match import KEY_BYTES_MAX, ROUTING_KEY
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.txn.records import encode_batch
from metaq.txn.transaction import BrokerTransaction, PutRun

TARGETS_MAX: Final = 64
"""Maximum topics for one message."""
STEP_COUNT: Final = 256
"""Maximum messages sorted in one step; takes about a millisecond."""
STEP_BYTES: Final = 64 * 1024
"""Maximum bytes sorted in one step; they may all be headers."""
LINES_REMEMBERED_MAX: Final = 4096
LINE_BYTES_MAX: Final = 512
"""Maximum length of a line of key and headers whose decoding is cached."""


Addressed: TypeAlias = tuple[str, bytes | None, HeaderPairs]
"""Routing key, message key and headers of a message."""


class _Target:
    """Messages of a command for one partition."""

    __slots__ = ("count", "first", "last", "runs", "size_bytes", "waiting")

    def __init__(self, first: int) -> None:
        self.first = self.last = first
        """Positions of its first and its last message in the command."""
        self.count = self.size_bytes = 0
        self.runs: list[list[int]] = []
        """Part, start and end of runs of adjacent messages."""
        self.waiting: delay_puts.WaitingRecords | None = None
        """Their records for `__delays`; None: the messages are due."""

    def add(self, number: int, part: int, start: int, end: int) -> None:
        run = self.runs[-1] if self.runs else None
        if run is not None and run[2] == start and run[0] == part:
            run[2] = end
        else:
            self.runs.append([part, start, end])
        self.last = number
        self.count += 1
        self.size_bytes += end - start

    def chunks(self, parts: Sequence[CheckedRecords]) -> list[memoryview]:
        return [memoryview(parts[k].records)[a:b] for k, a, b in self.runs]

    def records(self, parts: Sequence[CheckedRecords]) -> CheckedRecords:
        """Return its messages in one piece."""
        data = bytearray().join(self.chunks(parts))
        return CheckedRecords(data, record_positions(data))


class RouteTicket(PutTicket):
    """Ticket of a command at each of its targets; answers when all have reported.

    Called on the loop's thread, by the disk or by the journal.
    """

    __slots__ = ("_command", "_copies", "_errors", "_is_stored", "_left", "first_id")

    def __init__(
        self,
        answerer: Answerer,
        command: Mput,
        first_id: MessageId,
        targets: Sequence[_Target],
    ) -> None:
        """Hold the command in flight, its bytes once for each target."""
        super().__init__(
            answerer,
            log_id=LogId(command.topic, max(0, command.partition)),
            receipts=Receipts((b"%d" % command.opaque,), (first_id,), (-1,)),
            record_count=command.count,
            size_bytes=PUT_OVERHEAD_BYTES + sum(one.size_bytes for one in targets),
        )
        self.first_id = first_id
        self._command = command
        self._copies = sum(each.count for each in targets)
        self._errors: list[MetaqError] = []
        self._is_stored = False
        self._left = len(targets)
        answerer.hold(count=1, size_bytes=self.size_bytes)
        if not targets:
            super().on_stored()

    def on_stored(self) -> None:
        """Count one target that has stored its messages."""
        self._is_stored = True
        self._end_one()

    def on_failed(self, error: StorageError | ClosedError) -> None:
        """Record the failure of one target, which may have stored the messages."""
        self._errors.append(error)
        self._end_one()

    def on_journalled(self, _position: int) -> None:
        """Count one target whose messages are journalled."""
        self._end_one()

    def on_refused(self, error: StorageError) -> None:
        """Record that messages are not journalled: the transaction cannot commit."""
        self.on_failed(error)

    def _end_one(self) -> None:
        self._left -= 1
        if not self._left:
            super().on_stored()

    def encode(self) -> bytes:
        """Return the reply: 200 if all targets have stored the messages."""
        opaque, partition = self._command.opaque, self.log_id.partition
        if not self._errors:
            body = b"%d %d -1 routed=%d" % (self.first_id, partition, self._copies)
            return encode_result(Status.OK, body, opaque)
        error = self._errors[0]
        if self._is_stored:
            error = MayBeStoredError(f"in some of the bound topics, and: {error}")
        refusal = _refuse(self._answerer, self._command, error)
        return encode_refusal(refusal, opaque)


def route(
    command: Mput,
    checking: Generator[None, None, Sequence[CheckedRecords]],
    answerer: Answerer,
) -> Generator[None]:
    """Append messages to all of their targets, in steps; answered by a ticket.

    Args:
        command: a batch for an exchange.
        checking: generator that verifies the messages and returns them.
        answerer: the session.

    Raises:
        WireError: refused, and nothing was appended; the text is the answer.
    """
    exchange = _exchange_of(command, answerer)
    try:
        routing = _Routing(exchange, command, (yield from checking), answerer)
        yield from routing.sort()
        yield from routing.wrap()
    except (ServerError, UnavailableError, NoSpaceError) as error:
        raise _refuse(answerer, command, error) from error
    # From here on in one turn of the loop, so that the targets do not change.
    if command.transaction is None:
        routing.append()
    else:
        routing.put(find_transaction(command, answerer, count=command.count))


def _exchange_of(command: Mput, answerer: Answerer) -> ServedExchange:
    """Return the exchange of a command; raise ServerError if it is not served.

    The text is the answer.
    """
    name = command.topic
    exchange = answerer.context.topics.exchanges.get(name)
    if exchange is None:
        raise ServerError(texts.no_exchange(name))
    if command.partition not in {0, RANDOM_PARTITION}:
        raise ServerError(texts.wrong_partition(command.partition))
    return exchange


class _Routing:
    """One command that is being routed."""

    def __init__(
        self,
        exchange: ServedExchange,
        command: Mput,
        parts: Sequence[CheckedRecords],
        answerer: Answerer,
    ) -> None:
        self._exchange = exchange
        self._command = command
        self._parts = parts
        self._answerer = answerer
        self._context = answerer.context
        self._targets: dict[LogId, _Target] = {}
        self._name: tuple[str, int, int, int] | None = None
        """Producer's name at the targets, sequence, count and checksum of the batch;
        None without a producer."""
        self._first_id: MessageId | None = None
        """First id of delayed messages; they get new ids when they are delivered."""
        self._unkeyed = self._context.topics.choose(1 << 32)
        """Chooses the partition of messages without a key."""
        if command.producer is not None:
            producer = producer_name(command.producer, command.topic)
            sequence, count = command.sequence, command.count
            self._name = producer, sequence, count, command.checksum
            self._unkeyed = crc32(b"%b %d" % (producer.encode(), sequence))

    # -- sorting

    def sort(self) -> Generator[None]:
        """Sort the messages by target.

        Raises:
            ServerError: a message is unroutable, or matches too many topics, or a topic
                is not served.
            UnavailableError: this replica takes no put now.
        """
        topics, number, step_bytes = self._context.topics, 0, 0
        logs: dict[str, list[LogId]] = {}
        nowhere: dict[int, str] = {}
        if topics.refusal is not None:
            raise topics.refusal
        for part, (records, positions) in enumerate(self._parts):
            ends = [*positions[1:], len(records)]
            for start, end in zip(positions, ends, strict=True):
                routing_key, key, headers = read_address(records, start)
                at = self._unkeyed if key is None else crc32(key)
                found = self._topics_of(routing_key, headers)
                if found is None:
                    nowhere[number] = routing_key
                for topic in found or ():
                    if topic not in logs:
                        count = topics.count_of(topic)
                        logs[topic] = [LogId(topic, each) for each in range(count)]
                    choices = logs[topic]
                    log_id = choices[at % len(choices)]
                    target = self._targets.get(log_id)
                    if target is None:
                        target = self._targets[log_id] = _Target(number)
                    target.add(number, part, start, end)
                number += 1
                step_bytes += end - start
                if not number % STEP_COUNT or step_bytes > STEP_BYTES:
                    step_bytes = 0
                    yield
        if nowhere:
            first_key, name = next(iter(nowhere.values())), self._exchange.name
            raise ServerError(texts.unroutable(name, first_key, [*nowhere], number))

    def _topics_of(
        self, routing_key: str, headers: HeaderPairs
    ) -> tuple[str, ...] | None:
        """Return the topics of a message; None: it has none and may not be dropped."""
        exchange, counters = self._exchange, self._context.counters
        if exchange.matcher.has_keys and len(routing_key) > KEY_BYTES_MAX:
            raise ServerError(
                f"routing key: expected at most {KEY_BYTES_MAX} characters, got"
                f" {len(routing_key)}"
            )
        try:
            topics = exchange.matcher.topics(routing_key, headers)
        except ConfigError as error:
            raise ServerError(f"exchange '{exchange.name}': {error}") from error
        if len(topics) > TARGETS_MAX:
            raise ServerError(
                f"exchange '{exchange.name}': expected at most {TARGETS_MAX} topics for"
                f" a message, got {len(topics)}"
            )
        if topics:
            counters.routed["routed"] += 1
            return topics
        command = self._command
        may_drop = command.is_mandatory is False and command.deliver_ms is None
        if command.is_mandatory or (exchange.alternate is None and not may_drop):
            counters.routed["unroutable"] += 1
            return None
        if exchange.alternate is None:
            counters.routed["dropped"] += 1
            return ()
        counters.routed["alternate"] += 1
        return (exchange.alternate,)

    def wrap(self) -> Generator[None]:
        """Make records for `__delays`, if a due time is in the future.

        Raises:
            ServerError: a time is too far in the future, or the messages are too large.
            NoSpaceError: delayed messages take too much space already.
            UnavailableError: this broker does not delay messages.
        """
        command, context = self._command, self._context
        if command.deliver_ms is None:
            return
        if context.delays is None:
            raise UnavailableError(texts.NO_DELAY)
        timed = yield from delay_puts.split_by_time(command, self._parts)
        if not delay_puts.is_due_later(context.delays, timed, context):
            return
        self._first_id = context.ids.reserve(command.count)
        for log_id, target in self._targets.items():
            first_id = id_after(self._first_id, target.first)
            own = [target.records(self._parts)]
            timed = yield from delay_puts.split_by_time(command, own)
            target.waiting = yield from delay_puts.wrap(
                log_id, timed, first_id, context
            )
        context.delays.wake()

    # -- appending

    def append(self) -> None:
        """Append to all targets, or to none."""
        looked = [self._look_at(*each) for each in self._targets.items()]
        first_id, targets = self._stamp(), list(self._targets.values())
        ticket = RouteTicket(self._answerer, self._command, first_id, targets)
        repeated = [batch for _, batch in looked if batch is not None]
        self._context.counters.batch_repeated += bool(repeated)
        for (log_id, target), (log, batch) in zip(
            self._targets.items(), looked, strict=True
        ):
            if batch is None and target.waiting is not None:
                delay_puts.append(
                    target.waiting,
                    self._delays,
                    self._answerer,
                    self._name_waiting(log_id),
                    lambda _receipt: ticket,
                )
                continue
            if batch is None:
                self._append(log, target, first_id, ticket)
                continue
            if not target.first:
                ticket.first_id = batch.first_id
            log.join(batch, ticket)

    def _look_at(
        self, log_id: LogId, target: _Target
    ) -> tuple[PartitionLog, StoredBatch | None]:
        """Return the log of a target, and the batch if it is stored there already.

        Raises:
            WireError: the target refuses puts now.
        """
        topics, where = self._context.topics, (log_id.topic, log_id.partition)
        try:
            topics.open_for_put(*where)
            log = topics.log_for_put(*where)
            batch = None if self._name is None else log.producers.find(*self._name)
            if batch is None:
                found = self._find_waiting(log_id, target.waiting)
                log, batch = found or (log, None)
            if batch is None:
                log.plan_append(target.size_bytes)
                if target.waiting is not None:
                    delay_puts.require_taken(
                        target.waiting, self._delays, self._context
                    )
        except REFUSALS as error:
            raise _refuse(self._answerer, self._command, error, log_id) from error
        return log, batch

    def _find_waiting(
        self, log_id: LogId, waiting: delay_puts.WaitingRecords | None
    ) -> tuple[PartitionLog, StoredBatch] | None:
        """Return the delayed batch and its log, if it was stored there before."""
        command, name = self._command, self._name_waiting(log_id)
        if name is None or command.deliver_ms is None:
            return None
        own = None if waiting is None else waiting.tier(self._delays)
        found = delay_puts.find_repeated(self._delays, command, name[0], own)
        return None if found is None else found[1:]

    @property
    def _delays(self) -> DelayedMessages:
        delays = self._context.delays
        assert delays is not None, "messages wait"
        return delays

    def _name_waiting(self, log_id: LogId) -> tuple[str, int, int, int] | None:
        name = self._name
        return name and (delay_puts.name_of(name[0], log_id), *name[1:])

    def _stamp(self) -> MessageId:
        if self._first_id is not None:
            return self._first_id
        first_id = self._context.ids.reserve(self._command.count)
        for _ in stamp_in_steps(self._parts, first_id):
            pass
        return first_id

    def _append(
        self,
        log: PartitionLog,
        target: _Target,
        first_id: MessageId,
        ticket: RouteTicket,
    ) -> None:
        batch, size = None, SizeBytes(target.size_bytes)
        if self._name is not None:
            own_first_id = id_after(first_id, target.first)
            batch = StoredBatch(*self._name, own_first_id, log.next_offset, size)
        try:
            log.append(
                target.chunks(self._parts),
                size_bytes=size,
                record_count=target.count,
                last_id=id_after(first_id, target.last),
                ticket=ticket,
                batch=batch,
                is_light=is_light(self._answerer),
            )
        except (StorageError, ClosedError) as error:
            ticket.on_failed(error)

    # -- in a transaction

    def put(self, transaction: BrokerTransaction) -> None:
        """Add the messages to a transaction; raises as `append`."""
        for log_id, target in self._targets.items():
            self._look_at(log_id, target)
        transactions, targets = self._context.transactions, self._targets.values()
        first_id = self._stamp()
        try:
            transactions.check_room(
                sum(each.count for each in targets),
                sum(each.size_bytes for each in targets),
            )
        except TransactionError as error:
            raise ServerError(str(error)) from error
        ticket = RouteTicket(self._answerer, self._command, first_id, list(targets))
        for log_id, target in self._targets.items():
            transactions.put(
                transaction, self._run_of(log_id, target, first_id), ticket
            )

    def _run_of(self, log_id: LogId, target: _Target, first_id: MessageId) -> PutRun:
        if target.waiting is not None:
            return delay_puts.run_of(target.waiting, self._command, self._delays)
        data, positions = target.records(self._parts)
        assert self._command.transaction is not None, "of a transaction"
        key = format_key(self._command.transaction).encode()
        return PutRun(
            log_id,
            (data,),
            len(data),
            target.count,
            id_after(first_id, target.last),
            encode_batch(log_id, key, self._command.opaque, data, positions),
        )


def _refuse(
    answerer: Answerer, command: Mput, error: MetaqError, log_id: LogId | None = None
) -> WireError:
    """Return the answer to a command that is not stored; it names the target."""
    at = log_id or LogId(command.topic, command.partition)
    return refuse_put(answerer.context, error, at, command.count)


# -- reading an address


def read_address(records: bytearray, start: int) -> Addressed:
    """Return the address of the verified record at a position.

    A truncated block of attribute and headers counts as empty.
    """
    length, _, _, flag = HEADER.unpack_from(records, start)
    first = start + HEADER_BYTES
    text = text_of(records, first, first + length, flag)
    read = _read_text if len(text) <= LINE_BYTES_MAX else _read_text.__wrapped__
    return read(text, flag & HAS_PROPERTIES)


@lru_cache(LINES_REMEMBERED_MAX)
def _read_text(text: bytes, flag: int) -> Addressed:
    key, headers, attribute = decode_text(text, flag)
    routing_key = dict(reversed(headers)).get(ROUTING_KEY)
    if routing_key is None:
        return attribute or "", key, headers
    return routing_key.decode(errors="replace"), key, headers
