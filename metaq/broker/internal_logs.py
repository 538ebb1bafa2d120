"""Internal logs of the broker, in topics that begin with `__`.

State that a broker keeps besides messages is stored as records of these: synced before
it takes effect, and recovered, scrubbed and backed up as any partition. The owner of a
log reads it at its start and trims it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Final

from metaq.broker.context import BrokerContext
from metaq.errors import ClosedError, CorruptRecordError, MetaqError, StorageError
from metaq.model import LogId, Offset, Position, SizeBytes
from metaq.record.layout import Record, encode_record
from metaq.record.scan import Incomplete, read_record
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import NO_CHECKSUM, StoredBatch

READ_BYTES: Final = 1 << 20
"""Bytes read at once at a start."""

OnStored = Callable[[MetaqError | None], None]
"""Called once, on the loop: None if stored; after an error it may be stored or not."""


async def read_records(
    log: PartitionLog, start: Offset | None = None, *, window_bytes: int = READ_BYTES
) -> AsyncIterator[tuple[Offset, Record]]:
    """Yield the readable records of a log with their offsets, checksums verified.

    Args:
        log: the log; records that become readable during the read are included.
        start: offset of the first record; None: the log start.
        window_bytes: bytes read at once; a larger record is read whole.

    Raises:
        CorruptRecordError: the log is damaged.
        StorageError: the disk cannot be read.
        ClosedError: the log is closed.
    """
    offset, size = log.log_start_offset if start is None else start, window_bytes
    while offset < log.high_watermark:
        part = log.read(offset, SizeBytes(size))
        data = await part.run(part.read)
        position, size = Position(0), window_bytes
        while isinstance(found := read_record(data, position), Record):
            yield Offset(offset + position), found
            position = Position(position + found.size_bytes)
        if not position:
            needed = found.needed_bytes if isinstance(found, Incomplete) else 0
            if needed <= len(data):
                await report_damage(log, offset)
                raise CorruptRecordError(
                    f"partition {log.log_id}: no record at offset {offset}: {found}"
                )
            size = max(size, needed)
        offset = Offset(offset + position)


async def report_damage(log: PartitionLog, offset: Offset) -> None:
    """Record damage of a log at an offset, as the scrub does; raises as `read_records`.

    In a replica set it is then mended from another replica.
    """
    part = log.read(offset, SizeBytes(1))
    for damage in await part.run(partial(part.damage, log.high_watermark)):
        log.on_damage(damage)


async def note_damage(log: PartitionLog, offset: Offset) -> None:
    """Record damage of a log at an offset, if the log can be read now."""
    with suppress(StorageError, ClosedError):
        await report_damage(log, offset)


async def read_range(log: PartitionLog, start: Offset, end: Offset) -> bytes:
    """Return the bytes of a readable range; raises as `PartitionLog.read`."""
    data = b""
    while len(data) < end - start:
        part = log.read(Offset(start + len(data)), end - start - len(data))
        data += await part.run(part.read)
    return data


def producer_name(*parts: object) -> str:
    """Return a digest of `parts`, as a producer's name in the table of a log.

    For batches that are identified by more than a producer's name.
    """
    text = "\0".join(map(str, parts))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def read_cached(log: PartitionLog, offset: Offset, size: int) -> bytes | None:
    """Return readable bytes if they are cached; raises as `PartitionLog.read`."""
    part = log.read(offset, size)
    try:
        if part.is_open and part.is_cached(part.position, part.size_bytes):
            return part.read()
        return None
    finally:
        part.release()


class InternalLogs:
    """Appends to internal logs. Used on the loop's thread."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def find(self, log_id: LogId) -> PartitionLog | None:
        """Return a partition; None before its first record."""
        return self._context.topics.find_internal(log_id)

    def append(
        self,
        log_id: LogId,
        payload: bytes,
        on_stored: OnStored,
        *,
        flag: int = 0,
        name: tuple[str, int] | None = None,
        joins: bool = False,
    ) -> None:
        """Append a record; never blocks. `on_stored` may be called at once.

        With a name (producer and sequence) the record is added to the producer table of
        the log. `joins`: more appends follow in this turn of the loop, and may share
        its commit.
        """
        try:
            log = self.find(log_id) or self._context.topics.internal_log(log_id)
            message_id = self._context.ids.reserve(1)
            record = encode_record(payload, id=message_id, flag=flag)
            size, at = SizeBytes(len(record)), log.next_offset
            batch = name and StoredBatch(*name, 1, NO_CHECKSUM, message_id, at, size)
            log.append(
                (record,),
                size_bytes=size,
                record_count=1,
                last_id=message_id,
                ticket=Ticket(on_stored),
                batch=batch,
                is_light=True,
                joins=joins,
            )
        except (StorageError, ClosedError) as error:
            on_stored(error)


class Ticket:
    """Reports the outcome of an append."""

    __slots__ = ("_on_stored",)

    def __init__(self, on_stored: OnStored) -> None:
        self._on_stored = on_stored

    def on_stored(self) -> None:
        """Report success."""
        self._on_stored(None)

    def on_failed(self, error: StorageError) -> None:
        """Report the error."""
        self._on_stored(error)
