"""Data directories for the tests of `metaq-segments`, written by the real storage."""

from collections.abc import Sequence
from pathlib import Path

from metaq.clock import SystemClock
from metaq.config.settings import (
    BrokerConfig,
    DeleteKind,
    DeletePolicy,
    LimitsConfig,
    SystemConfig,
)
from metaq.fs import SystemFileSystem
from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, BrokerId, LogId, MessageId
from metaq.record.ids import SEQUENCE_BITS
from metaq.record.layout import encode_record
from metaq.spark.record_bounds import PushedFilters
from metaq.spark.rows import OnCorrupt
from metaq.spark.segments.segment_options import SegmentOptions
from metaq.spark.segments.segment_plan import plan_query
from metaq.spark.segments.segment_reader import read_splits
from metaq.storage.listing import check_names
from metaq.storage.retention_run import remove_segment
from metaq.storage.segment import Segment, segment_file_name
from tests.rigs.storage import StorageBench, Ticket

FS = SystemFileSystem()
LOG = LogId("test", 0)
OTHER = LogId("wild-x", 3)
BROKER = BrokerId(7)
TIME_MS = 1_700_000_000_000
ZIP = DeletePolicy(DeleteKind.ARCHIVE, is_compressed=True)
ARCHIVE = DeletePolicy(DeleteKind.ARCHIVE)


def id_at(time_ms: int, broker_id: int = BROKER) -> MessageId:
    """Return the first id that a broker stamps in a millisecond."""
    return MessageId(
        ((time_ms - ID_ZERO_MS) << ID_MS_SHIFT) | broker_id << SEQUENCE_BITS
    )


def payloads(count: int, size: int = 40) -> list[bytes]:
    """Return payloads that all differ."""
    return [(b"%d-" % number * size)[:size] for number in range(count)]


def write_log(
    data: Path,
    values: Sequence[bytes],
    log_id: LogId = LOG,
    *,
    segment_bytes: int = 1000,
    group: int = 5,
    first_id: int | None = None,
) -> Path:
    """Write a partition through the storage; return its directory.

    Each group of values is one commit; ids follow each other from `first_id`.
    """
    system = SystemConfig(data_path=str(data), segment_bytes_max=segment_bytes)
    limits = LimitsConfig(free_bytes_min=0, span_bytes_min=64)
    config = BrokerConfig(system=system, limits=limits)
    bench = StorageBench(FS, config, SystemClock())
    bench.open()
    bench.next_id = id_at(TIME_MS) if first_id is None else first_id
    log = bench.manager.get_or_create(log_id, bench.config.topic(log_id.topic))
    for first in range(0, len(values), group):
        bench.append(log, values[first : first + group], Ticket())
        bench.run()
    bench.close()
    return data / str(log_id)


def write_java_log(
    data: Path, segments: Sequence[Sequence[bytes]], log_id: LogId = LOG
) -> Path:
    """Write a partition as a Java broker does: negative ids, no span index."""
    directory = data / str(log_id)
    directory.mkdir(parents=True)
    base, number = 0, 0
    for values in segments:
        parts = []
        for value in values:
            number += 1
            parts.append(encode_record(value, id=MessageId(-(10**9) + number)))
        (directory / segment_file_name(base)).write_bytes(b"".join(parts))
        base += sum(map(len, parts))
    return directory


def segments_of(directory: Path) -> tuple[Segment, ...]:
    """Return the segments of a partition directory."""
    return check_names(FS, directory).segments


def archive(directory: Path, *policies: DeletePolicy) -> list[Path]:
    """Remove the oldest segments, one by each policy; return the files left."""
    for segment, policy in zip(segments_of(directory), policies, strict=False):
        remove_segment(FS, segment, policy)
    return sorted(p for p in directory.iterdir() if ".meta" in p.name)


def flip(path: Path, position: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x55
    path.write_bytes(data)


def options(*paths: Path | str, **more: object) -> SegmentOptions:
    """Return options for some paths."""
    return SegmentOptions(paths=tuple(map(str, paths)), **more)  # type: ignore[arg-type]


def rows(
    asked: SegmentOptions, pushed: PushedFilters | None = None
) -> list[dict[str, object]]:
    """Plan a query and read all of it here, without Spark."""
    plan = plan_query(FS, asked, pushed or PushedFilters())
    return [
        row
        for task in plan.tasks
        for batch in read_splits(FS, task, asked)
        for row in batch.to_pylist()
    ]


def values(asked: SegmentOptions) -> list[object]:
    """Return the column `value` of all rows."""
    return [row["value"] for row in rows(asked)]


SKIP = OnCorrupt.SKIP
