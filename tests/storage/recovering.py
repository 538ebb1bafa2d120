"""A partition directory that is recovered, and what is known of its log."""

from metaq.model import Millis, Offset, SizeBytes
from metaq.storage.recovery import REWRITTEN_BYTES_MAX, RecoveredLog, recover_log
from metaq.storage.segment import segment_file_name
from tests.rigs.fs import FaultyFileSystem
from tests.storage.logs import (
    DIRECTORY,
    SPAN,
    disk_with_directory,
    put_file,
    put_segment,
    record,
)

BOUND = SizeBytes(200)
COMMITS = [[record(1), record(2)], [record(3, 50)], [record(4)], [record(5, 90)]]
BYTES = b"".join(map(b"".join, COMMITS))
STARTS = (0, 30, 60, 130, 160)
"""Offsets of its records."""
UNCOVERED = {start + at for start in STARTS for at in range(8, 20)}
"""Offsets of ids and flags, which no checksum of MetaQ's format covers."""
META = segment_file_name(Offset(0))
SPANS = META.replace(".meta", ".spans")


def recover(
    disk: FaultyFileSystem,
    bound: SizeBytes | None = BOUND,
    *,
    rewritten_bytes_max: int = REWRITTEN_BYTES_MAX,
) -> RecoveredLog:
    """Recover, and close the index writer that a log would own."""
    result = recover_log(
        disk,
        DIRECTORY,
        unsynced_bytes_max=bound,
        span_bytes_min=SPAN,
        now_ms=Millis(10_000),
        rewritten_bytes_max=rewritten_bytes_max,
    )
    if result.spans is not None:
        assert result.spans.end_offset == result.segments[-1].end_offset
        result.spans.abandon()
    assert disk.open_paths() == []
    return result


def disk_with_log(tail: bytes = b"", *, indexed: bool = True) -> FaultyFileSystem:
    disk = disk_with_directory()
    put_segment(disk, 0, COMMITS, indexed=indexed)
    if tail:
        put_file(disk, META, tail, synced=False)
    return disk


def writes(disk: FaultyFileSystem, since: int) -> list[str]:
    changing = {"write", "create", "truncate", "rename", "unlink"}
    return [call.name for call in disk.log[since:] if call.name in changing]
