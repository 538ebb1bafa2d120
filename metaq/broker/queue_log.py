"""`__queues`: the log that the states of queue groups are kept in.

    partition = CRC-32 of group, topic and partition, modulo PARTITIONS

A change is a record of it, appended when the state has changed in memory, and answered
when it is stored. A start reads the partitions once (`read_images`). Each queue is
written as a whole, a *snapshot*, from time to time; what comes before the oldest last
snapshot of a partition is trimmed.
"""

import zlib
from typing import Final

from metaq.broker.internal_logs import read_records
from metaq.errors import CorruptRecordError
from metaq.model import LogId, Offset
from metaq.queues.state_log import Images, QueueName, decode_state
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog

TOPIC: Final = "__queues"
PARTITIONS: Final = 1
"""One, so that acks of all queues share their syncs."""


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
    if log.state is LogState.STOPPED:
        # What can be read of it may be whole records, and their end missing.
        raise CorruptRecordError(f"partition {log.log_id} is stopped: {log.damage[0]}")
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
