"""Messages of one task: named batches, cut the same way in every run of the task.

A task that failed is run again and sends everything once more. Batches carry a producer
and a sequence that follow from the task, so brokers that announced `dedup` recognise
stored batches, as long as they remember them. They remember the last few batches of
each producer, so each has no more than that: the next batches belong to the next
producer.

No batch on the wire has rows of two batches of Spark. Where the input of a task breaks
off, because its source has failed, it looks as if it ended there; the batches sent so
far are then the first ones of the next run.

    producer  w-5f0c...-7-3-0    batches 0..4 of task 3 of the query's batch 7
              w-5f0c...-7-3-1    batches 5..9

If a task has other rows, or another order of them, when it is run again (after a
shuffle, for example), brokers answer that these numbers belong to other messages. New
rows cannot be distinguished from old ones then, and the batch is sent under a name of
this run: it may be stored twice, and is never lost.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Self, TypeAlias

import pyarrow as pa

from metaq.client.options import IN_FLIGHT_BATCHES_MAX
from metaq.errors import NoBrokerError
from metaq.model import BrokerId, TopicPartition
from metaq.record.layout import HEADER_BYTES
from metaq.spark.options import WireOptions
from metaq.spark.sink.named_batches import NamedSender
from metaq.spark.sink.sink_rows import Payloads, Router

Targets: TypeAlias = Mapping[str, Mapping[TopicPartition, str]]
"""Topic → partition → address of the broker that takes its puts."""
FindTargets: TypeAlias = Callable[[Collection[str]], Targets]
"""Return where puts to topics go; raises NoBrokerError if no broker takes them."""

BATCH_RECORDS_MAX: Final = 8192
"""Most messages of one batch."""
_NAME_BYTES: Final = 12
"""Bytes of the hash of a write's name: producers have 64 characters at most."""


@dataclass(frozen=True, slots=True)
class WriteName:
    """Name of a write: the same in every run of the same task."""

    query: str
    batch: int
    task: int
    attempt: int
    """Number of the run; no two runs of anything have the same."""

    @property
    def producer(self) -> str:
        """Return the beginning of the names of its producers."""
        digest = blake2b(self.query.encode(), digest_size=_NAME_BYTES).hexdigest()
        return f"w-{digest}-{self.batch}-{self.task}"

    @property
    def turn(self) -> int:
        """Return a number that differs from task to task, and from batch to batch."""
        return self.batch * 7 + self.task


@dataclass(frozen=True, slots=True)
class Written:
    """Counters of one task."""

    message_count: int
    """Messages that are on the disks of brokers."""
    size_bytes: int
    doubtful_count: int
    """Messages that may be stored twice: they were sent again to a broker that cannot
    recognise them, or under a second name."""


@dataclass(slots=True)
class _Sent:
    """Counters of one partition."""

    batch_count: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class RowTargets:
    """Where the rows of a task go."""

    topic: str | None
    """Of all rows; None: each row names its own."""
    known: Targets
    """Of topics that are known already."""
    find: FindTargets
    """Asked for other topics."""


class RowOutbox(ABC):
    """Routes the rows of one task. Blocking; one thread."""

    def __init__(self, targets: RowTargets, first_turn: int) -> None:
        """Prepare to route; `first_turn` is as in `Router`."""
        self._targets = targets
        self._router = Router({}, first_turn=first_turn)
        self._addresses: dict[BrokerId, str] = {}
        for known, there in targets.known.items():
            self._add_topic(known, there)

    def __enter__(self) -> Self:
        return self

    def put(self, batch: pa.RecordBatch) -> None:
        """Send rows; waits only while too much is in flight.

        Raises:
            RowError: a row cannot be written; rows before it may have been.
            MetaqError: as the sender's `send`; outcomes are unknown.
        """
        topic, find = self._targets.topic, self._targets.find
        missing = self._router.missing(batch) if topic is None else ()
        for name, there in find(missing).items() if missing else ():
            self._add_topic(name, there)
        for partition, new in self._router.route(batch, topic).items():
            self._send(partition, new)

    @abstractmethod
    def _send(self, partition: TopicPartition, new: Payloads) -> None:
        """Put rows on their way to one partition, in order."""

    def _add_topic(self, topic: str, there: Mapping[TopicPartition, str]) -> None:
        if not there:
            raise NoBrokerError(f"no broker takes puts to topic '{topic}' now")
        self._router.add_topic(topic, there)
        for partition, address in there.items():
            self._addresses[partition.broker_id] = address


class Outbox(RowOutbox):
    """Sends the rows of one task in named batches. Blocking; one thread.

    Lifecycle: a context manager; `put` any number of times, `finish` once.
    """

    def __init__(
        self,
        name: WriteName,
        targets: RowTargets,
        *,
        batch_bytes: int,
        wire: WireOptions,
    ) -> None:
        """Prepare to send.

        Args:
            name: of the task.
            targets: where the rows go.
            batch_bytes: most bytes of one batch; a larger message goes alone.
            wire: has the time-outs.
        """
        super().__init__(targets, name.turn)
        self._name = name
        self._batch_bytes = batch_bytes
        self._sent: dict[TopicPartition, _Sent] = {}
        self._sender = NamedSender(
            self._addresses,
            timeout_s=wire.request_timeout_s,
            retry_timeout_s=wire.retry_timeout_s,
        )

    def __exit__(self, *_error: object) -> None:
        self._sender.close()

    def finish(self) -> Written:
        """Wait for every answer, and return the counters; raises as `put`."""
        self._sender.flush()
        done = self._sender.statistics()
        return Written(
            done.acknowledged_count,
            done.acknowledged_bytes,
            done.doubtful_count + self._sender.renamed_count,
        )

    def _send(self, partition: TopicPartition, new: Payloads) -> None:
        sent = self._sent.setdefault(partition, _Sent())
        payloads, flags, first = new.payloads, new.flags, 0
        ends = list(accumulate(map(HEADER_BYTES.__add__, map(len, payloads))))
        while first < len(payloads):
            sent_bytes = ends[first - 1] if first else 0
            end = bisect_right(ends, sent_bytes + self._batch_bytes)
            end = min(max(end, first + 1), first + BATCH_RECORDS_MAX)
            chunk, number = divmod(sent.batch_count, IN_FLIGHT_BATCHES_MAX)
            if not number:
                sent.sequence = 0
            producer = self._name.producer
            self._sender.send(
                partition,
                payloads[first:end],
                flags[first:end],
                producer=f"{producer}-{chunk}",
                sequence=sent.sequence,
                spare=f"{producer}-{sent.batch_count}~{self._name.attempt}",
            )
            sent.sequence += end - first
            sent.batch_count += 1
            first = end
