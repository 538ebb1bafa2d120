"""Plan of one query: the bytes of segment files for each task."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from metaq.client.names import name_few
from metaq.errors import CorruptRecordError
from metaq.fs import FileSystem
from metaq.model import BrokerId, LogId, SizeBytes, TopicPartition
from metaq.spark.errors import OptionError
from metaq.spark.record_bounds import Bounds, PushedFilters
from metaq.spark.segments.segment_files import (
    SegmentFile,
    find_segments,
)
from metaq.spark.segments.segment_options import SegmentOptions
from metaq.spark.segments.segment_splits import (
    NO_BROKER,
    WALK_BYTES_MAX,
    Placed,
    Split,
    WalkBudget,
    place_files,
    split_file,
)
from metaq.storage.segment import Damage


@dataclass(frozen=True, slots=True)
class BoundedSplit:
    """A split, and which of its records are wanted; picklable."""

    split: Split
    """Split to read."""
    bounds: Bounds
    """Bounds of the rows to hand out."""


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Plan of a query."""

    tasks: tuple[tuple[BoundedSplit, ...], ...]
    """Splits by task; every wanted record is in exactly one."""
    unreadable: tuple[Damage, ...]
    """Wanted files that cannot be read at all."""


def plan_query(
    fs: FileSystem,
    options: SegmentOptions,
    pushed: PushedFilters,
    walk_bytes_max: int = WALK_BYTES_MAX,
) -> SegmentPlan:
    """Look at the files, and give each task about as many bytes as the options say.

    Raises:
        OptionError: A path does not exist, or names no partition; or no file is of a
            topic or partition that the options name.
        StorageError: The disk refused.
    """
    found = find_segments(fs, options.paths)
    _require_topics(options, {file.log_id.topic for file in found})
    files = [file for file in found if options.wants(file.log_id)]
    all_placed = list(place_files(fs, files, options.broker_id))
    _require_partitions(options, files, all_placed)
    splits: list[BoundedSplit] = []
    budget = WalkBudget(walk_bytes_max)
    for placed in all_placed:
        bounds = _bounds_of(placed, options, pushed)
        if bounds is not None:
            size = options.bytes_per_partition
            cut = split_file(fs, placed, bounds, bytes_max=size, budget=budget)
            splits += [BoundedSplit(split, bounds) for split in cut]
    tasks = _pack(splits, options.bytes_per_partition)
    return SegmentPlan(tasks, tuple(_unreadable(f) for f in files if f.flaw))


def _require_topics(options: SegmentOptions, there: Collection[str]) -> None:
    """Refuse a topic of `subscribe` of which there is no file."""
    for topic in sorted((options.topics or frozenset()).difference(there)):
        raise OptionError(
            f"subscribe: no file is of topic {topic!r}; topics of the files are:"
            f" {name_few(sorted(there)) or 'none'}"
        )


def _require_partitions(
    options: SegmentOptions, files: Iterable[SegmentFile], placed: Iterable[Placed]
) -> None:
    """Refuse a partition that is named and of which there is no file.

    Its broker is told by message ids. A file without any may be of each broker.
    """
    brokers: dict[LogId, set[BrokerId]] = {file.log_id: set() for file in files}
    for one in placed:
        if one.file.size_bytes:
            brokers[one.file.log_id].add(one.broker_id)
    for partition in sorted(options.named):
        there = brokers.get(LogId(partition.topic, partition.partition))
        if there is not None and NO_BROKER in there:
            raise OptionError(
                f"{partition}: the ids of its messages do not tell their broker: name"
                " it by brokerId"
            )
        if there is None or (there and partition.broker_id not in there):
            others = [f"{each}-{partition.partition}" for each in sorted(there or ())]
            raise OptionError(
                f"{partition}: no file is of this partition; of topic"
                f" {partition.topic} and its number there are:"
                f" {name_few(others) or 'none'}"
            )


def _bounds_of(
    placed: Placed, options: SegmentOptions, pushed: PushedFilters
) -> Bounds | None:
    """Return the wanted range of a file; None: none."""
    log_id = placed.file.log_id
    partition = TopicPartition(log_id.topic, placed.broker_id, log_id.partition)
    asked = options.bounds_of(partition)
    if asked is None or not pushed.allows(partition):
        return None
    return asked.narrowed(pushed.bounds)


def _pack(
    splits: Iterable[BoundedSplit], bytes_max: SizeBytes
) -> tuple[tuple[BoundedSplit, ...], ...]:
    """Put small splits together, in order: a task for each would cost more."""
    packs: list[list[BoundedSplit]] = []
    size = 0
    for bounded in splits:
        if not packs or size + bounded.split.size_bytes > bytes_max:
            packs.append([])
            size = 0
        packs[-1].append(bounded)
        size += bounded.split.size_bytes
    return tuple(tuple(pack) for pack in packs)


def _unreadable(file: SegmentFile) -> Damage:
    return Damage(file.path, file.base_offset, None, file.flaw)


def refuse_unreadable(plan: SegmentPlan) -> None:
    """Raise the error about unreadable files of a query that fails on damage.

    Raises:
        CorruptRecordError: There are such files; it names the first.
    """
    for damage in plan.unreadable:
        raise CorruptRecordError(str(damage))
