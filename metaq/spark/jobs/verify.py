"""Check every record of data directories and archives, in parallel on Spark.

Files are cut as for a query, so that each byte is checked by one task. Where there is a
span index, bytes are held against it as `metaq verify` does; elsewhere each record is
held against its own checksum, and a zip against its own as well. The data files of an
archive are read as a whole (`check_files.py`). Nothing is changed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Final, TypeAlias

from pyspark.sql import SparkSession

from metaq.client.names import name_few
from metaq.errors import DiskError
from metaq.fs import FileSystem, SystemFileSystem
from metaq.model import SizeBytes
from metaq.spark.errors import OptionError
from metaq.spark.jobs.archive_store import (
    LOG,
    OWN,
    PATTERN_MARKS,
    ArchiveStore,
    open_archive,
    root_of,
)
from metaq.spark.jobs.check_files import CheckedFile, check_file
from metaq.spark.jobs.data_files import DataFile
from metaq.spark.jobs.failures import job_errors
from metaq.spark.record_bounds import PushedFilters
from metaq.spark.rows import OnCorrupt
from metaq.spark.segments.segment_files import FileKind, SegmentFile, find_segments
from metaq.spark.segments.segment_options import BYTES_PER_PARTITION, SegmentOptions
from metaq.spark.segments.segment_plan import Split, plan_query
from metaq.spark.segments.segment_reader import read_split, tail_of
from metaq.storage.damage import apart, check_parts
from metaq.storage.listing import check_neighbours, index_of
from metaq.storage.segment import Damage, Segment
from metaq.storage.span_index import SpanIndex

PART_BYTES: Final = 8 << 20
"""Checked by one call; its damaged ranges are in memory together."""

TASKS_PER_CORE: Final = 4
"""Tasks per core and Spark job: progress is reported once per job."""


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """Progress of a check."""

    checked_bytes: SizeBytes
    """Bytes of records that were checked."""
    total_bytes: SizeBytes
    """Bytes of records that there were at the start."""
    damage_count: int
    """Damaged ranges found so far."""


@dataclass(frozen=True, slots=True)
class VerifySummary:
    """Result of a check."""

    file_count: int
    """Segment files, and data files of archives."""
    record_count: int
    """Good records; such as share a damaged span are not counted."""
    checked_bytes: SizeBytes
    """Bytes of records that were checked; of zips, unpacked; of data files, all."""
    torn_bytes: SizeBytes
    """Bytes behind the last whole record of active segments: the next start of a
    broker cuts them, or the broker that runs is writing them."""
    damage: tuple[Damage, ...]
    """Damaged ranges, holes and unreadable files, by file and offset; empty: none."""
    unsummed_count: int = 0
    """Data files whose pages have no checksums, as older versions and other programs
    write them: a changed row need not show."""


@dataclass(frozen=True, slots=True)
class CheckedSplit:
    """Findings of one task in one split."""

    record_count: int
    """Good records; such as share a damaged span are not counted."""
    checked_bytes: SizeBytes
    """Bytes that were looked at."""
    torn_bytes: SizeBytes
    """Bytes at its end that a crash or a running broker explains."""
    damage: tuple[Damage, ...]
    """Damaged ranges, in order."""


_Found: TypeAlias = CheckedSplit | CheckedFile
_Task: TypeAlias = Callable[[], Sequence[_Found]]
"""Checks a part, on an executor; goes there in pickled form."""


def verify(
    spark: SparkSession,
    *paths: str,
    bytes_per_task: SizeBytes = BYTES_PER_PARTITION,
    on_progress: Callable[[VerifyProgress], None] = lambda _progress: None,
) -> VerifySummary:
    """Check every record of some data directories, partition directories or archives.

    Args:
        spark: Where the tasks run; each executor has the paths mounted.
        paths: As for `load`: directories or files, wildcards allowed; and directories
            of archives; 1 or more.
        bytes_per_task: About as many bytes are checked by one task, 1 or more.
        on_progress: Called on the driver, in this thread, now and then.

    Raises:
        OptionError: A path does not exist, names no partition, or has no segment.
        ArchiveError: The table of an archive cannot be read.
        StorageError: The disk refused. A read that it refuses in a task is damage.
        JobError: Spark failed, or the disk refused to open a file in a task.
    """
    fs = SystemFileSystem()
    stores = {path: store for path in paths if (store := _archive_at(fs, path))}
    tasks: list[tuple[int, _Task]] = [
        (file.size_bytes, partial(_check_data, store.root, file))
        for store in stores.values()
        for file in store.files()
    ]
    file_count, damage = len(tasks), list[Damage]()
    if others := [path for path in paths if path not in stores]:
        files = find_segments(fs, others)
        if not files:
            raise OptionError(
                f"no segment is below {name_few(others)}: nothing to check"
            )
        file_count += len(files)
        options = SegmentOptions(
            paths=tuple(others), bytes_per_partition=bytes_per_task
        )
        plan = plan_query(fs, options, PushedFilters())
        for each in plan.tasks:
            splits = [bounded.split for bounded in each]
            size = sum(split.size_bytes for split in splits)
            tasks.append((size, partial(_check_task, splits)))
        damage += [*plan.unreadable, *find_holes(fs, files)]
    done = list(_run(spark, tasks, len(damage), on_progress))
    damage += [item for found in done for item in found.damage]
    checked = [found for found in done if isinstance(found, CheckedSplit)]
    return VerifySummary(
        file_count,
        sum(found.record_count for found in done),
        SizeBytes(sum(found.checked_bytes for found in done)),
        SizeBytes(sum(split.torn_bytes for split in checked)),
        tuple(sorted(damage, key=lambda item: (item.path, item.offset))),
        sum(found.is_unsummed for found in done if isinstance(found, CheckedFile)),
    )


def _run(
    spark: SparkSession,
    tasks: Sequence[tuple[int, _Task]],
    damage_count: int,
    on_progress: Callable[[VerifyProgress], None],
) -> Iterator[_Found]:
    """Yield what tasks find; each comes with the bytes that it checks."""
    total = SizeBytes(sum(size for size, _task in tasks))
    checked = 0
    at_once = spark.sparkContext.defaultParallelism * TASKS_PER_CORE
    for first in range(0, len(tasks), at_once):
        group = [task for _size, task in tasks[first : first + at_once]]
        spread = spark.sparkContext.parallelize(group, len(group))
        with job_errors("verify"):
            found = list(chain.from_iterable(spread.map(_call).collect()))
        checked += sum(each.checked_bytes for each in found)
        damage_count += sum(len(each.damage) for each in found)
        on_progress(VerifyProgress(SizeBytes(checked), total, damage_count))
        yield from found


def _archive_at(fs: FileSystem, path: str) -> ArchiveStore | None:
    """Return the archive that a path names; None for any other path.

    Raises:
        ArchiveError: There is one, and its table cannot be read.
    """
    if not path or PATTERN_MARKS & frozenset(path):
        return None
    root = Path(root_of(path))
    if any(fs.is_directory(root / name) for name in (LOG, OWN)):
        return open_archive(path)
    return None


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


def _call(task: _Task) -> Sequence[_Found]:
    return task()


def _check_data(root: str, file: DataFile) -> list[CheckedFile]:
    return [check_file(root, file)]


def _check_task(splits: Iterable[Split]) -> list[CheckedSplit]:
    """Check the splits of one task, on an executor."""
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
    plain = fs.open_read(file.path)
    try:
        for part in check_parts(
            plain, segment, index, split.start, split.end, bytes_max=PART_BYTES
        ):
            damage += part.damage
            count += part.record_count
    finally:
        plain.close()
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
