"""Dead letters of queue groups, stored atomically with the end of their messages.

The dead letter and the done record of its message are one local transaction
(`joined_appends.py`). Until it is committed, the message is open and not delivered. A
letter that its topic refuses is retried with a growing delay, and the problem names the
topic.

A replica set has no transactions. There a letter is a batch of a producer named after
the queue and offset, so that it is stored once (`storage/producers.py`), and the done
record is stored after it. A new leader looks for such batches in the producer table and
stores missing done records before it delivers anything (`stored_letters`).
"""

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Final

from metaq.broker.context import BrokerContext
from metaq.broker.internal_logs import (
    InternalLogs,
    Ticket,
    note_damage,
    producer_name,
)
from metaq.broker.joined_appends import JoinedAppends, JoinedRecord
from metaq.broker.queue_groups import OnTried, QueueOwner
from metaq.broker.queue_log import QUEUES
from metaq.broker.queue_part import ServedQueue
from metaq.errors import (
    ClosedError,
    CorruptRecordError,
    MetaqError,
    UnavailableError,
)
from metaq.model import (
    RANDOM_PARTITION,
    BrokerId,
    LogId,
    MessageId,
    Millis,
    Offset,
    TopicPartition,
)
from metaq.queues.state import DeadLetter
from metaq.queues.state_log import Done, QueueName
from metaq.record.dead_letters import TEXT_CHARS_MAX, Origin, letter_headers
from metaq.record.flags import decode_payload, encode_payload
from metaq.record.layout import Record
from metaq.record.scan import read_record
from metaq.retry import Backoff
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import NO_CHECKSUM

_log = logging.getLogger(__name__)

AT_ONCE_MAX: Final = 32
"""Maximum letters being sent at once; the others wait."""
PATIENCE: Final = Backoff(first_s=0.5, max_s=30.0)


@dataclass(slots=True, eq=False)
class _Sending:
    """A dead letter that is not stored yet."""

    queue: ServedQueue
    letter: DeadLetter
    on_first: OnTried | None
    topic: str = ""
    """Topic of the last try; an operator may change it between tries."""
    error: str = ""
    """Error of the last try; "" before the first."""
    failure_count: int = 0
    due_s: float = 0.0


class Letters:
    """Sends the dead letters of one broker. Owned by the service, on the loop."""

    def __init__(
        self, service: QueueOwner, context: BrokerContext, joined: JoinedAppends
    ) -> None:
        self._service = service
        self._joined = joined
        self._log = InternalLogs(context)
        self._context = context
        self._waiting = deque[_Sending]()
        self._failed = list[_Sending]()
        self._open = set[_Sending]()

    def send(self, queue: ServedQueue, on_first: OnTried | None = None) -> int:
        """Send the dead letters that the state of a queue has collected.

        Args:
            queue: the queue.
            on_first: called for each letter after its first try.

        Returns:
            The number of letters.
        """
        letters = queue.state.drain_letters()
        for letter in letters:
            queue.letters_open += 1
            self._waiting.append(_Sending(queue, letter, on_first))
        self._begin()
        return len(letters)

    def retry(self) -> None:
        """Retry the letters whose delay is over."""
        now_s = self._context.clock.monotonic_s()
        due = [each for each in self._failed if each.due_s <= now_s]
        self._failed = [each for each in self._failed if each.due_s > now_s]
        self._waiting += due
        self._begin()

    def problems(self) -> tuple[str, ...]:
        """Return one sentence for each topic that refuses letters now."""
        tried = (*self._failed, *self._waiting, *self._open)
        stuck = {each.topic: each.error for each in tried if each.error}
        return tuple(
            f"dead letters wait for topic '{topic}': {text}{self._advice(topic)}"
            for topic, text in sorted(stuck.items())
        )

    def _advice(self, topic: str) -> str:
        if self._context.topics.accepts(topic):
            return ""
        return (
            "; this broker needs it in partitions of its own ('metaq topics alter"
            f" {topic} --brokers all'), or the group another topic ('metaq queues"
            " alter')"
        )

    def _begin(self) -> None:
        while (
            self._waiting
            and len(self._open) < AT_ONCE_MAX
            and not self._service.is_ending
        ):
            sending = self._waiting.popleft()
            self._open.add(sending)
            sending.queue.letters_tried += 1
            self._service.spawn(self._send(sending), name="letter")

    async def _send(self, sending: _Sending) -> None:
        queue, letter = sending.queue, sending.letter
        end = Offset(letter.offset + letter.size_bytes)
        try:
            is_gone = letter.offset < queue.log.log_start_offset
            is_gone |= queue.state.is_done(letter.offset)
            if is_gone or not self._service.has(queue):
                # Removed by retention, or skipped by an operator.
                self._end(sending, is_stored=False)
                return
            topic = self._service.letter_topic(queue)
            if topic is None:  # an operator has changed the group to `drop`
                queue.state.drop_letter(letter.offset)
                queue.store()
                self._service.on_settled(queue)
                self._end(sending, is_stored=False)
                return
            sending.topic, topics = topic, self._context.topics
            partition = topics.resolve_put(topic, RANDOM_PARTITION)
            target = topics.log_for_put(topic, partition).log_id
            data = await queue.read(letter.offset, end)
            if not self._service.has(queue):
                # Its state is being read again, and would not have the done record.
                self._end(sending, is_stored=False)
                return
            payload, flag = self._make(sending, data)
            if self._context.replica is not None:
                self._send_by_name(sending, target, payload, flag)
                return
        except MetaqError as error:
            self._on_done(sending, error)
            return
        change = queue.encode([Done(letter.offset, end)])
        self._joined.append(
            [
                JoinedRecord(target, payload, flag),
                JoinedRecord(QUEUES, change),
            ],
            lambda error: self._on_done(sending, error),
        )

    def _send_by_name(
        self, sending: _Sending, target: LogId, payload: bytes, flag: int
    ) -> None:
        """Store a letter unless it is stored already, then its done record."""
        queue, letter = sending.queue, sending.letter
        done = Done(letter.offset, Offset(letter.offset + letter.size_bytes))

        def stored(error: MetaqError | None) -> None:
            if error is None and self._service.has(queue):
                queue.note_done([done], partial(self._on_done, sending))
            else:
                self._on_done(sending, error or ClosedError("the queue is read again"))

        name = f"{letters_of(queue.name, queue.log)}{done.start}", letter.size_bytes
        for log in self._context.topics.logs():
            if log.log_id.topic == target.topic:
                known = log.producers.find(*name, 1, NO_CHECKSUM)
                if known is not None:
                    log.join(known, Ticket(stored))
                    return
        self._log.append(target, payload, stored, flag=flag, name=name)

    def _make(self, sending: _Sending, data: bytes) -> tuple[bytes, int]:
        """Return the payload and flag of a letter.

        Raises:
            CorruptRecordError: the message contradicts its checksum.
        """
        queue, letter = sending.queue, sending.letter
        record = read_record(data)
        if not isinstance(record, Record):
            raise CorruptRecordError(
                f"partition {queue.log.log_id}: no record at offset {letter.offset}"
            )
        message = decode_payload(record.payload, record.flag)
        error, colon, text = letter.cause.partition(": ")
        if not colon:
            error, text = "", letter.cause
        log_id, context = queue.log.log_id, self._context
        broker_id = BrokerId(context.config.system.broker_id)
        origin = Origin(
            partition=TopicPartition(log_id.topic, broker_id, log_id.partition),
            offset=letter.offset,
            id=MessageId(record.id),
            error=error,
            text=text[:TEXT_CHARS_MAX],
            group=queue.name.group,
            attempts=letter.deliveries,
            at_ms=Millis(context.clock.wall_ms()),
        )
        headers = letter_headers(message.headers, origin)
        return encode_payload(message.data, message.attribute, message.key, headers)

    def _on_done(self, sending: _Sending, error: MetaqError | None) -> None:
        queue = sending.queue
        if error is None:
            queue.state.letter_stored(sending.letter.offset)
            self._end(sending, is_stored=True)
            self._service.on_settled(queue)
            return
        self._end_try(sending)
        is_known = any(each.topic == sending.topic for each in self._failed)
        if not is_known and str(error) != sending.error:
            _log.error(
                "dead letter not stored: topic=%s error=%s", sending.topic, error
            )
        if isinstance(error, CorruptRecordError) and not sending.error:
            at = sending.letter.offset
            self._service.spawn(note_damage(queue.log, at), name="damage")
        sending.error = str(error)
        sending.failure_count += 1
        delay_s = PATIENCE.delay_s(sending.failure_count)
        sending.due_s = self._context.clock.monotonic_s() + delay_s
        self._failed.append(sending)
        self._report(sending, is_stored=False)
        self._begin()

    def _end(self, sending: _Sending, *, is_stored: bool) -> None:
        """Remove a letter that is stored or not needed any more."""
        self._end_try(sending)
        sending.queue.letters_open -= 1
        self._report(sending, is_stored=is_stored)
        self._begin()

    def _end_try(self, sending: _Sending) -> None:
        self._open.discard(sending)
        sending.queue.letters_tried -= 1

    def _report(self, sending: _Sending, *, is_stored: bool) -> None:
        on_first, sending.on_first = sending.on_first, None
        if on_first is not None:
            on_first(sending.letter.offset, is_stored)


def letters_of(name: QueueName, log: PartitionLog) -> str:
    """Return the prefix of the producer names of a queue's letters.

    It has the number of the log, because a topic that is created again has the same
    offsets.
    """
    return f"letter-{producer_name(*name, log.number)}-"


def stored_letters(
    context: BrokerContext, topic: str | None, name: QueueName, log: PartitionLog
) -> list[Done]:
    """Return the messages of a queue whose letters are stored, in a replica set.

    Raises:
        UnavailableError: a letter is being stored.
    """
    begin, found = letters_of(name, log), list[Done]()
    for each in context.topics.logs() if context.replica is not None else ():
        for batch in each.producers if each.log_id.topic == topic else ():
            if batch.producer.startswith(begin):
                if batch.end_offset > each.high_watermark:
                    raise UnavailableError("a dead letter is on its way")
                start = Offset(int(batch.producer[len(begin) :]))
                found.append(Done(start, Offset(start + batch.sequence)))
    return found
