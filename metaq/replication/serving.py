"""Reads of a replica's copy for another replica: chunks, from memory or from a file.

Bytes from a file are scanned before they are sent, and each record's checksum is
compared, because sending damage with a fresh checksum would spread it. Damaged bytes
are reported and not sent. Bytes of appends in flight are in memory, and were never on a
disk.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from metaq.errors import ClosedError, StorageError, UnavailableError
from metaq.model import LogId, MessageId, Offset, SizeBytes
from metaq.protocol import texts
from metaq.record.checksum import crc32
from metaq.record.scan import CleanEnd, Incomplete, scan_records
from metaq.replication.epochs import CopyFacts, divergence_point
from metaq.replication.messages import (
    Chunk,
    JoinLog,
    TailReply,
    TailRequest,
)
from metaq.replication.tables import EpochTables
from metaq.storage.append_request import AppendRequest
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.storage.segment import DamagedSegmentError
from metaq.storage.slices import Slice
from metaq.storage.span_index import NO_ID

_log = logging.getLogger(__name__)

CHUNK_BYTES_MAX: Final = 1 << 20
"""Largest chunk, in bytes, unless one append is larger."""


def refusal(text: str, word: str = "", **values: object) -> UnavailableError:
    """Return the error for a message that is refused for now, with its code."""
    return UnavailableError(texts.with_code(text, word, values) if word else text)


def facts_of(log: PartitionLog, tables: EpochTables) -> CopyFacts:
    """Return the current facts of a replica's copy of a log, which has a number."""
    assert log.number is not None, f"{log.log_id} has no number"
    return CopyFacts(
        log.number,
        log.log_start_offset,
        log.synced_end,
        log.high_watermark,
        tables.table(log.number),
    )


def copies_of(
    logs: Mapping[LogId, PartitionLog], tables: EpochTables
) -> tuple[JoinLog, ...]:
    """Return the facts of all copies of a replica.

    A cancelled join may have left a log that is buried or has no epochs yet: it does
    not count, and is set aside.
    """
    return tuple(
        JoinLog(log_id, facts_of(log, tables))
        for log_id, log in logs.items()
        if tables.is_living(log.number)
    )


def find_log(logs: Mapping[LogId, PartitionLog], number: int) -> PartitionLog | None:
    """Return the log with a number; None if it is not here."""
    return next((each for each in logs.values() if each.number == number), None)


async def answer_tail(
    logs: Mapping[LogId, PartitionLog], tables: EpochTables, request: TailRequest
) -> TailReply:
    """Return bytes of the own copy, for a claimer or for a replica with damage.

    Raises:
        UnavailableError: they cannot be read.
    """
    log = find_log(logs, request.number)
    if log is None or request.offset >= log.synced_end:
        return TailReply(None)
    end, copy = log.synced_end, request.copy
    if copy is not None:
        is_living = tables.is_living(log.number)
        end = divergence_point(facts_of(log, tables), copy) if is_living else Offset(0)
    size = max(1, min(request.max_bytes, CHUNK_BYTES_MAX))
    try:
        if request.is_unchecked:
            body = await read_unchecked(log, request.offset, size)
            chunk = _chunk(log, request.offset, body)
        else:
            chunk = await read_chunk(log, request.offset, size)
    except DamagedSegmentError as error:
        report(log, error)
        return TailReply(None, is_damaged=True)
    except (StorageError, ClosedError) as error:
        report(log, error)
        raise refusal(f"{log.log_id} at {request.offset}: {error}") from error
    return TailReply(None if chunk.end_offset > end else chunk)


def report(log: PartitionLog, error: Exception) -> None:
    """Stop a log with damage, or log the error of a failed read."""
    if isinstance(error, DamagedSegmentError):
        log.on_damage(error.damage)
    else:
        _log.warning("log cannot be read: partition=%s error=%s", log.log_id, error)


def chunk_of(log: PartitionLog, requests: Sequence[AppendRequest]) -> Chunk:
    """Return appends that are in memory as one chunk.

    Args:
        log: their log, which has a number.
        requests: from `PartitionLog.tail`, 1 or more.
    """
    body = b"".join([part for each in requests for part in each.chunks])
    return _chunk(
        log,
        requests[0].offset,
        body,
        record_count=sum([each.record_count for each in requests]),
        last_id=max([each.last_id for each in requests]),
        batches=[batch for each in requests for batch in each.batches],
    )


async def read_chunk(log: PartitionLog, offset: Offset, max_bytes: int) -> Chunk:
    """Return complete records from an offset on, read from the file.

    Args:
        log: has a number; read on the threads of its directory.
        offset: start of a record, below the synced end.
        max_bytes: 1 or more; one record or batch may be larger.

    Raises:
        DamagedSegmentError: a record is damaged.
        StorageError: the bytes do not exist, or the disk cannot read them.
        ClosedError: the log is closed.
    """
    while True:
        end, is_whole = log.copy_end(offset, max_bytes)
        batches = list(log.batches_in(offset, end))
        if batches and batches[-1].end_offset > end:
            # A part of a batch would be taken for the whole batch.
            last = batches[-1]
            is_first = last.offset <= offset
            end, is_whole = last.end_offset if is_first else last.offset, True
            if not is_first:
                batches.pop()
        part = log.read_copy(offset, end)
        is_whole = is_whole and part.size_bytes == end - offset
        found = await part.run(
            partial(_verified, part, log.synced_end, is_whole=is_whole)
        )
        if isinstance(found, Incomplete):
            max_bytes = found.needed_bytes
            continue
        body, count, last_id = found
        return _chunk(
            log, offset, body, record_count=count, last_id=last_id, batches=batches
        )


async def read_unchecked(log: PartitionLog, offset: Offset, size: int) -> bytes:
    """Return bytes of one segment as they are on disk, at most `size`.

    Raises:
        StorageError: the disk cannot read them.
    """
    end = min(Offset(offset + size), log.synced_end)
    part = log.read_unchecked(offset, end)
    return await part.run(part.read)


def _chunk(
    log: PartitionLog,
    offset: Offset,
    body: bytes,
    *,
    record_count: int = 1,
    last_id: MessageId = NO_ID,
    batches: Sequence[StoredBatch] = (),
) -> Chunk:
    assert log.number is not None, f"{log.log_id} has no number"
    return Chunk(
        log.number,
        offset,
        SizeBytes(len(body)),
        record_count,
        last_id,
        crc32(body),
        log.segment_base(offset),
        tuple(batches),
        (body,),
    )


def _verified(
    part: Slice, until: Offset, *, is_whole: bool
) -> tuple[bytes, int, MessageId] | Incomplete:
    """Return the complete records of a slice, their number and greatest id; blocks.

    Incomplete: the first record is larger than the slice.
    """
    data = part.read()
    found = scan_records(data)
    is_cut = isinstance(found, Incomplete) and not is_whole
    if isinstance(found, Incomplete) and is_cut and not found.position:
        return found
    # Checksums of records do not cover their headers; those of spans do.
    is_flawed = not isinstance(found, CleanEnd) and not is_cut
    for damage in part.damage(until, walks=is_flawed):
        raise DamagedSegmentError(damage)
    if is_flawed:
        raise StorageError(f"{part} changed while it was read: {found}")
    last_id = NO_ID if found.last_id is None else found.last_id
    return data[: found.position], found.record_count, last_id
