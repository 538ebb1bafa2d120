"""The options of `metaq-segments`: files, their records to read, and splits."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from metaq.model import BrokerId, Millis, Offset, SizeBytes, TopicPartition
from metaq.spark.errors import BackwardRangeError, OptionError
from metaq.spark.offsets import EARLIEST, LATEST, Offsets
from metaq.spark.option_table import Use
from metaq.spark.options import (
    BadRows,
    Chosen,
    FoundOptions,
    ValueFormat,
    ValueOptions,
    read_value_options,
)
from metaq.spark.record_bounds import EVERYTHING, Bounds
from metaq.spark.rows import OnCorrupt

BYTES_PER_PARTITION: Final = SizeBytes(64 << 20)
"""Bytes of records of one task: a few tenths of a second of work."""
MESSAGE_BYTES_MAX: Final = SizeBytes(64 << 20)
"""Maximum bytes of a message, four times the default limit of brokers: a damaged or
forged length in a small zip could otherwise take gigabytes of memory."""

_EDGES: Final = {EARLIEST: "earliest", LATEST: "latest"}
BINARY_VALUES: Final = ValueOptions(
    format=ValueFormat.BINARY, ddl=None, bad_rows=BadRows.FAIL, dead_letter_topic=None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOptions(Chosen):
    """Checked options of a read of segment files."""

    paths: tuple[str, ...]
    """Data directories, partition directories, segment files; wildcards allowed."""
    starts: Offsets = field(default_factory=dict)
    """Partition → first offset to read, if not the earliest."""
    ends: Offsets = field(default_factory=dict)
    """Partition → end offset, exclusive, if not the latest."""
    start_ms: Millis | None = None
    end_ms: Millis | None = None
    on_corrupt: OnCorrupt = OnCorrupt.FAIL
    bytes_per_partition: SizeBytes = BYTES_PER_PARTITION
    message_bytes_max: SizeBytes = MESSAGE_BYTES_MAX
    broker_id: BrokerId | None = None
    """Value of `broker_id` in every row; None takes it from the message ids."""
    values: ValueOptions = BINARY_VALUES
    can_push_filters: bool = False
    leaves_out_internal: bool = True
    """Whether to skip the internal logs of the broker, if there are logs of topics."""

    @property
    def named(self) -> frozenset[TopicPartition]:
        """The partitions that the user named one by one."""
        return self.assigned.union(self.starts, self.ends)

    def bounds_of(self, partition: TopicPartition) -> Bounds | None:
        """Return the range to read of a partition; None if it is not read."""
        if not self.chooses(partition):
            return None
        start = self.starts.get(partition, EVERYTHING.start)
        end = self.ends.get(partition, EVERYTHING.end)
        return Bounds(start, end, self.start_ms, self.end_ms)


def parse_segment_options(options: Mapping[str, str]) -> SegmentOptions:
    """Parse the options of one read.

    Args:
        options: name → text, as passed by Spark; names are case-insensitive.

    Raises:
        OptionError: one is missing, unknown, out of range or contradicts another.
        OffsetTextError: JSON is wrong.
    """
    found = FoundOptions(options, Use.SEGMENTS)
    ways = ("subscribe", "subscribePattern", "assign")
    if len(chosen := [name for name in ways if found[name] is not None]) > 1:
        raise OptionError(
            f"expected at most one of {', '.join(ways)}, got {' and '.join(chosen)}"
        )
    start_ms, end_ms = found["startingTimestamp"], found["endingTimestamp"]
    starts = _offsets(found["startingOffsets"], "startingOffsets", EARLIEST)
    ends = _offsets(found["endingOffsets"], "endingOffsets", LATEST)
    for partition in sorted(starts.keys() & ends.keys()):
        if starts[partition] > ends[partition]:
            raise BackwardRangeError(
                f"{partition}: read from {starts[partition]} ends at {ends[partition]}"
            )
    way = found.chosen()
    way.require_chosen("startingOffsets", starts)
    way.require_chosen("endingOffsets", ends)
    return SegmentOptions(
        paths=_paths(found),
        **asdict(way),
        starts=starts if start_ms is None else {},
        ends=ends if end_ms is None else {},
        start_ms=start_ms,
        end_ms=end_ms,
        on_corrupt=OnCorrupt(found["onCorrupt"]),
        bytes_per_partition=found["maxBytesPerPartition"] or BYTES_PER_PARTITION,
        message_bytes_max=found["maxMessageBytes"],
        broker_id=found["brokerId"],
        values=read_value_options(options, Use.SEGMENTS),
        can_push_filters=found["filterPushdown"],
        leaves_out_internal=not (way.topics or way.assigned),
    )


def _offsets(value: Any, name: str, edge: Offset) -> dict[TopicPartition, Offset]:
    """Return the user's offsets, without those equal to the edge."""
    if value is None or value == _EDGES[edge]:
        return {}
    if not isinstance(value, dict):
        raise OptionError(f"{name}: expected {_EDGES[edge]} or JSON, got {value!r}")
    for partition, offset in sorted(value.items()):
        if offset < 0 and offset != edge:
            raise OptionError(
                f"{name}: {partition}: expected {edge} or an offset, got {offset}"
            )
    return {partition: offset for partition, offset in value.items() if offset >= 0}


def _paths(found: FoundOptions) -> tuple[str, ...]:
    """Return the paths of `load(path)`, `load([path, ...])` or the option `path`."""
    listed: list[object] = []
    if isinstance(text := found["paths"], str):
        try:
            listed = list(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise OptionError(f"paths: expected a JSON list: {error}") from error
    if isinstance(text := found["path"], str):
        listed += text.split(",")
    paths = tuple(path.strip() for path in listed if isinstance(path, str))
    if not paths or not all(paths) or len(paths) < len(listed):
        raise OptionError(
            f"path: expected directories or files of segments, got {listed!r}"
        )
    return paths
