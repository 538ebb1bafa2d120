"""Check every record of segment files, one split at a time; changes nothing.

Files are split as for a query, so that each byte is checked once. Bytes with a span
index are compared with it, as by `metaq verify`; other records are compared with their
own checksums, and zips with theirs too.
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
from metaq.storage.damage import check_parts, merge_damage
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
"""Bytes checked by one call; bounds the damaged ranges in memory."""


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Plan of the checks of files."""

    file_count: int
    damage: tuple[Damage, ...]
    """Unreadable files, and gaps between files of one directory."""
    tasks: tuple[tuple[Split, ...], ...]
    """The splits of each task; picklable, for executors."""


@dataclass(frozen=True, slots=True)
class CheckedSplit:
    """Result of checking one split."""

    record_count: int
    checked_bytes: SizeBytes
    torn_bytes: SizeBytes
    """Bytes of a torn tail, left by a crash or a running broker."""
    damage: tuple[Damage, ...]


def plan_checks(paths: Sequence[str], bytes_per_task: SizeBytes) -> CheckPlan:
    """Find the segments of paths, and divide them into tasks.

    Args:
        paths: as for `load`: directories or files, wildcards allowed; 1 or more.
        bytes_per_task: approximate bytes checked by one task, 1 or more.

    Raises:
        OptionError: a path does not exist, names no partition, or has no segment.
        StorageError: a disk error.
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
    """Check the splits of one task; see `check_split`."""
    return [check_split(SystemFileSystem(), split) for split in splits]


def check_split(fs: FileSystem, split: Split) -> CheckedSplit:
    """Check the bytes of one split.

    A read error counts as damage up to the end of the split.

    Raises:
        StorageError: a file cannot be opened, or its size not be read.
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
    """Check synced bytes, which cannot have a torn tail."""
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
    return CheckedSplit(count, split.size_bytes, SizeBytes(0), merge_damage(damage))


def _check_torn(fs: FileSystem, split: Split) -> CheckedSplit:
    """Check the bytes of an active segment after its index; allows a torn tail."""
    tail = tail_of(fs, split)
    count = sum(span.record_count for span in tail.spans)
    torn = SizeBytes(split.end - tail.end)
    return CheckedSplit(count, split.size_bytes, torn, tail.damage)


def _check_zip(fs: FileSystem, split: Split) -> CheckedSplit:
    damage: list[Damage] = []
    batches = read_split(fs, split, on_corrupt=OnCorrupt.SKIP, damage=damage)
    count = sum(batch.num_rows for batch in batches)
    return CheckedSplit(count, split.size_bytes, SizeBytes(0), merge_damage(damage))


def find_holes(fs: FileSystem, files: Sequence[SegmentFile]) -> list[Damage]:
    """Return where adjacent files of a directory break base + size = next base.

    Args:
        fs: the disk.
        files: by directory, then by base offset.

    Raises:
        StorageError: a read error.
    """
    holes: list[Damage] = []
    for one, two in pairwise(files):
        if one.path.parent != two.path.parent or one.flaw:
            continue
        if one.kind is FileKind.ZIPPED and one.end_offset < two.base_offset:
            # The unpacked zip is complete, or its own damage is reported.
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
