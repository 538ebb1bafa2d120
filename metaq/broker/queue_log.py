"""`__queues`: the log with the states of all queue groups.

Each change is a record, appended after the state has changed in memory, and answered
when the record is stored. A start reads the log once (`read_snapshots`). From time to
time a *snapshot* of each queue is appended; the log is trimmed up to the oldest of the
last snapshots.
"""

from typing import Final

from metaq.broker.internal_logs import read_records
from metaq.errors import CorruptRecordError
from metaq.model import LogId
from metaq.queues.state_log import QueueSnapshots, decode_state
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog

QUEUES: Final = LogId("__queues", 0)
"""One partition, so that acks of all queues share their syncs."""


async def read_snapshots(log: PartitionLog) -> QueueSnapshots:
    """Read the states of all queues.

    Raises:
        CorruptRecordError: the log is damaged, or a record cannot be decoded.
        StorageError: the disk cannot be read.
        ClosedError: the log is closed.
    """
    if log.state is LogState.STOPPED:
        # The readable part may be whole records, with later ones missing.
        raise CorruptRecordError(f"partition {log.log_id} is stopped: {log.damage[0]}")
    snapshots = QueueSnapshots()
    async for offset, record in read_records(log):
        try:
            snapshots.apply(decode_state(record.payload), offset)
        except CorruptRecordError as error:
            raise CorruptRecordError(
                f"partition {log.log_id} at offset {offset}: {error}"
            ) from error
    return snapshots
