"""Check every record of data directories and archives, in parallel on Spark.

Segments are checked by `metaq.spark.segments.checks`, data files of archives by
`check_files.py`, one file at a time. Nothing is changed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import call
from pathlib import Path
from typing import Final, TypeAlias

from pyspark.sql import SparkSession

from metaq.fs import FileSystem, SystemFileSystem
from metaq.model import SizeBytes
from metaq.pipeline.jobs.archive_store import (
    LOG,
    OWN,
    PATTERN_MARKS,
    ArchiveStore,
    root_of,
)
from metaq.pipeline.jobs.check_files import CheckedFile, check_file
from metaq.pipeline.jobs.day_files import DataFile
from metaq.pipeline.jobs.session import job_errors
from metaq.spark.segments.checks import (
    BYTES_PER_PARTITION,
    CheckedSplit,
    Damage,
    check_splits,
    plan_checks,
)

TASKS_PER_CORE: Final = 4
"""Tasks per core in one Spark job; progress is reported after each job."""


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """Progress of a check: bytes checked, of those that existed at the start."""

    checked_bytes: SizeBytes
    total_bytes: SizeBytes
    damage_count: int


@dataclass(frozen=True, slots=True)
class VerifySummary:
    """Result of a check."""

    file_count: int
    """Number of segment files, and of data files of archives."""
    record_count: int
    """Number of good records, without those in a damaged span."""
    checked_bytes: SizeBytes
    """Bytes of checked records; of zips, unpacked; of data files, their size."""
    torn_bytes: SizeBytes
    """Bytes after the last complete record of active segments: a torn tail, which the
    next start of a broker truncates, or bytes that a running broker is writing."""
    damage: tuple[Damage, ...]
    """Damaged ranges, gaps and unreadable files, by file and offset; () for none."""
    unsummed_count: int = 0
    """Number of data files without page checksums, written by other programs; a changed
    row in them may go undetected."""


_Found: TypeAlias = CheckedSplit | CheckedFile
_Task: TypeAlias = Callable[[], Sequence[_Found]]
"""Checks a part, on an executor; picklable."""


def verify(
    spark: SparkSession,
    *paths: str,
    bytes_per_task: SizeBytes = BYTES_PER_PARTITION,
    on_progress: Callable[[VerifyProgress], None] = lambda _progress: None,
) -> VerifySummary:
    """Check every record of data directories, partition directories or archives.

    Args:
        spark: runs the tasks; each executor has the paths mounted.
        paths: as for `load`: directories or files, wildcards allowed; and directories
            of archives; 1 or more.
        bytes_per_task: approximate bytes checked by one task, 1 or more.
        on_progress: called on the driver, in this thread, after each Spark job.

    Raises:
        OptionError: a path does not exist, names no partition, or has no segment.
        ArchiveError: the table of an archive cannot be read.
        StorageError: a disk error on the driver. A read error in a task is damage.
        JobError: Spark failed, or a file could not be opened in a task.
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
        plan = plan_checks(others, bytes_per_task)
        file_count += plan.file_count
        tasks += [
            (sum(split.size_bytes for split in splits), partial(check_splits, splits))
            for splits in plan.tasks
        ]
        damage += plan.damage
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
    """Yield the results of tasks, which are given with the bytes that each checks."""
    total = SizeBytes(sum(size for size, _task in tasks))
    checked = 0
    at_once = spark.sparkContext.defaultParallelism * TASKS_PER_CORE
    for first in range(0, len(tasks), at_once):
        group = [task for _size, task in tasks[first : first + at_once]]
        spread = spark.sparkContext.parallelize(group, len(group))
        with job_errors("verify"):
            found = list(chain.from_iterable(spread.map(call).collect()))
        checked += sum(each.checked_bytes for each in found)
        damage_count += sum(len(each.damage) for each in found)
        on_progress(VerifyProgress(SizeBytes(checked), total, damage_count))
        yield from found


def _archive_at(fs: FileSystem, path: str) -> ArchiveStore | None:
    """Return the archive at a path; None if there is none.

    Raises:
        ArchiveError: there is one, and its table cannot be read.
    """
    if not path or PATTERN_MARKS & frozenset(path):
        return None
    root = Path(root_of(path))
    if any(fs.is_directory(root / name) for name in (LOG, OWN)):
        return ArchiveStore(path)
    return None


def _check_data(root: str, file: DataFile) -> list[CheckedFile]:
    return [check_file(root, file)]
