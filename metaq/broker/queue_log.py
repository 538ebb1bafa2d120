"""`__queues`: the log that the states of queue groups are kept in.

    partition = CRC-32 of group, topic and partition, modulo PARTITIONS

A change is a record of it, appended when the state has changed in memory, and answered
when it is stored. A start reads the partitions once (`read_images`). Each queue is
written as a whole, a *snapshot*, from time to time; what comes before the oldest last
snapshot of a partition is trimmed.
"""

import zlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from metaq.broker.context import BrokerContext
from metaq.errors import ClosedError, CorruptRecordError, MetaqError, StorageError
from metaq.model import LogId, MessageId, Offset, Position, SizeBytes
from metaq.queues.state_log import Images, QueueName, decode_state
from metaq.record.layout import Record, encode_record
from metaq.record.scan import Incomplete, read_record
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch

TOPIC: Final = "__queues"
PARTITIONS: Final = 1
"""One, so that acks of all queues share their syncs."""
READ_BYTES: Final = 1 << 20
"""Bytes of a partition that a start reads at once."""

OnStored = Callable[[MetaqError | None], None]
"""Called once, on the loop's thread: stored, or why not (then it may be stored)."""


def log_of(name: QueueName) -> LogId:
    """Return the partition that has the state of a queue."""
    key = f"{name.group}\0{name.topic}\0{name.partition}".encode()
    return LogId(TOPIC, zlib.crc32(key) % PARTITIONS)


def all_logs() -> tuple[LogId, ...]:
    """Return every partition."""
    return tuple(LogId(TOPIC, partition) for partition in range(PARTITIONS))


async def read_images(log: PartitionLog) -> tuple[Images, dict[QueueName, Offset]]:
    """Return the queues of one partition, and where the last whole state of each is.

    Raises:
        CorruptRecordError: it is damaged, or a record makes no sense.
        StorageError: the disk does not give it.
        ClosedError: it is closed.
    """
    images, starts = Images(), dict[QueueName, Offset]()
    async for offset, record in read_records(log):
        try:
            state = decode_state(record.payload)
            name = images.apply(state)
        except CorruptRecordError as error:
            raise CorruptRecordError(
                f"partition {log.log_id} at offset {offset}: {error}"
            ) from error
        if name is not None and (state.is_whole or name not in starts):
            starts[name] = offset
    return images, {name: starts[name] for name in images.by_name}


async def read_records(log: PartitionLog) -> AsyncIterator[tuple[Offset, Record]]:
    """Yield the readable records of a log with their offsets, checksums verified.

    Raises:
        CorruptRecordError: it is damaged.
        StorageError: the disk does not give it.
        ClosedError: it is closed.
    """
    offset, size = log.log_start_offset, READ_BYTES
    while offset < log.high_watermark:
        part = log.read(offset, SizeBytes(size))
        data = await part.run(part.read)
        position, size = Position(0), READ_BYTES
        while isinstance(found := read_record(data, position), Record):
            yield Offset(offset + position), found
            position = Position(position + found.size_bytes)
        if not position:
            needed = found.needed_bytes if isinstance(found, Incomplete) else 0
            if needed <= len(data):
                raise CorruptRecordError(
                    f"partition {log.log_id}: no record at offset {offset}: {found}"
                )
            size = max(size, needed)
        offset = Offset(offset + position)


class QueueLog:
    """Appends to `__queues`. Used on the loop's thread."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def find(self, log_id: LogId) -> PartitionLog | None:
        """Return a partition; None before its first record."""
        return self._context.topics.find_internal(log_id)

    def append(self, log_id: LogId, payload: bytes, on_stored: OnStored) -> None:
        """Append a record; never blocks. `on_stored` may be called at once."""
        try:
            log = self.find(log_id) or self._context.topics.internal_log(log_id)
        except (StorageError, ClosedError) as error:
            on_stored(error)
            return
        message_id = self._context.ids.reserve(1)
        record = encode_record(payload, id=message_id)
        append_record(log, record, message_id, Ticket(on_stored))


def append_record(
    log: PartitionLog,
    record: bytes,
    message_id: MessageId,
    ticket: "Ticket",
    batch: StoredBatch | None = None,
) -> None:
    """Append one record; never blocks. The ticket may be called at once."""
    try:
        log.append(
            (record,),
            size_bytes=SizeBytes(len(record)),
            record_count=1,
            last_id=message_id,
            ticket=ticket,
            batch=batch,
            is_light=True,
        )
    except (StorageError, ClosedError) as error:
        ticket.on_failed(error)


class Ticket:
    """Reports the outcome of an append."""

    __slots__ = ("_on_stored",)

    def __init__(self, on_stored: OnStored) -> None:
        self._on_stored = on_stored

    def on_stored(self) -> None:
        """Report it."""
        self._on_stored(None)

    def on_failed(self, error: StorageError | ClosedError) -> None:
        """Likewise."""
        self._on_stored(error)
