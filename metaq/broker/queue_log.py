"""`__queues`: the log that the states of queue groups are kept in.

A change is a record of it, appended when the state has changed in memory, and answered
when it is stored. A start reads the log once (`read_images`). Each queue is written as
a whole, a *snapshot*, from time to time; what comes before the oldest last snapshot is
trimmed.
"""

from typing import Final

from metaq.broker.internal_logs import read_records
from metaq.errors import CorruptRecordError
from metaq.model import LogId
from metaq.queues.state_log import Images, decode_state
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog

QUEUES: Final = LogId("__queues", 0)
"""One partition, so that acks of all queues share their syncs."""


async def read_images(log: PartitionLog) -> Images:
    """Return the queues of the log.

    Raises:
        CorruptRecordError: it is damaged, or a record makes no sense.
        StorageError: the disk does not give it.
        ClosedError: it is closed.
    """
    if log.state is LogState.STOPPED:
        # What can be read of it may be whole records, and their end missing.
        raise CorruptRecordError(f"partition {log.log_id} is stopped: {log.damage[0]}")
    images = Images()
    async for offset, record in read_records(log):
        try:
            images.apply(decode_state(record.payload), offset)
        except CorruptRecordError as error:
            raise CorruptRecordError(
                f"partition {log.log_id} at offset {offset}: {error}"
            ) from error
    return images
