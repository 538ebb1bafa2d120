"""Check every record of segment files, a split at a time; nothing is changed.

Files are cut as for a query, so that each byte is checked once. Where there is a span
index, bytes are compared with it as `metaq verify` does; elsewhere each record is
compared with its own checksum, and a zip with its own as well.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from metaq.client.names import name_few
from metaq.errors import DiskError
from metaq.fs import FileSystem, SystemFileSystem
from metaq.model import SizeBytes
from metaq.spark.errors import OptionError
from metaq.spark.record_bounds import PushedFilters
from metaq.spark.rows import OnCorrupt
from metaq.spark.segments.segment_options import BYTES_PER_PARTITION, SegmentOptions
from metaq.spark.segments.segment_plan import (
    FileKind,
    SegmentFile,
    Split,
    find_segments,
    plan_query,
)
from metaq.spark.segments.segment_reader import read_split, tail_of
from metaq.storage.damage import apart, check_parts
from metaq.storage.listing import check_neighbours, index_of
from metaq.storage.segment import Damage, Segment
from metaq.storage.span_index import SpanIndex

__all__ = [
    "BYTES_PER_PARTITION",
    "CheckPlan",
    "CheckedSplit",
    "Damage",
    "Split",
    "check_split",
    "check_splits",
    "find_holes",
    "plan_checks",
]

PART_BYTES: Final = 8 << 20
"""Checked by one call; its damaged ranges are in memory together."""


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The checks of some paths."""

    file_count: int
    damage: tuple[Damage, ...]
    """Unreadable files, and holes between files of one directory."""
    tasks: tuple[tuple[Split, ...], ...]
    """The splits of each task; go to executors in pickled form."""


@dataclass(frozen=True, slots=True)
class CheckedSplit:
    """Findings of one task in one split."""

    record_count: int
    checked_bytes: SizeBytes
    torn_bytes: SizeBytes
    """Bytes at its end that a crash or a running broker explains."""
    damage: tuple[Damage, ...]


def plan_checks(paths: Sequence[str], bytes_per_task: SizeBytes) -> CheckPlan:
    """Find the segments below some paths, and cut them into tasks.

    Args:
        paths: as for `load`: directories or files, wildcards allowed; 1 or more.
        bytes_per_task: about as many bytes are checked by one task, 1 or more.

    Raises:
        OptionError: a path does not exist, names no partition, or has no segment.
        StorageError: the disk refused.
    """
    fs = SystemFileSystem()
    files = find_segments(fs, paths)
    if not files:
        raise OptionError(f"no segment is below {name_few(paths)}: nothing to check")
    options = SegmentOptions(
        paths=tuple(paths),
        bytes_per_partition=bytes_per_task,
        leaves_out_internal=False,
    )
    plan = plan_query(fs, options, PushedFilters())
    return CheckPlan(len(files), (*plan.unreadable, *find_holes(fs, files)), plan.tasks)


def check_splits(splits: Iterable[Split]) -> list[CheckedSplit]:
    """Check the splits of one task, as `check_split` does each."""
    return [check_split(SystemFileSystem(), split) for split in splits]


def check_split(fs: FileSystem, split: Split) -> CheckedSplit:
    """Check the bytes of one split.

    A read that the disk refuses is damage up to the end of the split.

    Raises:
        StorageError: The disk refused to open or size a file.
    """
    try:
        if split.file.kind is FileKind.ZIPPED:
            return _check_zip(fs, split)
        return _check_torn(fs, split) if split.may_be_torn else _check_synced(fs, split)
    except DiskError as error:
        if error.operation != "read":
            raise
        bad = Damage(split.file.path, split.start, split.end, str(error))
        return CheckedSplit(0, split.size_bytes, SizeBytes(0), (bad,))


def _check_synced(fs: FileSystem, split: Split) -> CheckedSplit:
    """Check bytes of which nothing may be torn."""
    file, base = split.file, split.file.base_offset
    segment = Segment(file.path, base, SizeBytes(split.end - base))
    index = SpanIndex(base)
    if file.kind is FileKind.PLAIN:
        index = index_of(fs, segment).until(split.end)
    damage: list[Damage] = []
    count = 0
    with closing(fs.open_read(file.path)) as plain:
        for part in check_parts(
            plain, segment, index, split.start, split.end, bytes_max=PART_BYTES
        ):
            damage += part.damage
            count += part.record_count
    return CheckedSplit(count, split.size_bytes, SizeBytes(0), apart(damage))


def _check_torn(fs: FileSystem, split: Split) -> CheckedSplit:
    """Check bytes of an active segment that its index does not cover."""
    tail = tail_of(fs, split)
    count = sum(span.record_count for span in tail.spans)
    torn = SizeBytes(split.end - tail.end)
    return CheckedSplit(count, split.size_bytes, torn, tail.damage)


def _check_zip(fs: FileSystem, split: Split) -> CheckedSplit:
    damage: list[Damage] = []
    batches = read_split(fs, split, on_corrupt=OnCorrupt.SKIP, damage=damage)
    count = sum(batch.num_rows for batch in batches)
    return CheckedSplit(count, split.size_bytes, SizeBytes(0), apart(damage))


def find_holes(fs: FileSystem, files: Sequence[SegmentFile]) -> list[Damage]:
    """Return where neighbours in one directory do not meet: base + size = next base.

    Args:
        fs: The disk.
        files: By directory, then by base offset.

    Raises:
        StorageError: The disk refused a read.
    """
    holes: list[Damage] = []
    for one, two in pairwise(files):
        if one.path.parent != two.path.parent or one.flaw:
            continue
        if one.kind is FileKind.ZIPPED and one.end_offset < two.base_offset:
            # Unpacked it is whole, or its own damage is named.
            detail = (
                f"segment ends at offset {one.end_offset}, next begins at"
                f" {two.base_offset}"
            )
            holes.append(Damage(one.path, one.end_offset, two.base_offset, detail))
        elif one.kind is not FileKind.ZIPPED:
            first, second = _segment_of(one), _segment_of(two)
            holes += check_neighbours(fs, first, second, two.end_offset)
    return holes


def _segment_of(file: SegmentFile) -> Segment:
    return Segment(file.path, file.base_offset, file.size_bytes)
