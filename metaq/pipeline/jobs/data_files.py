"""Data files of an archive, and what its table says that they hold. Pure.

    topic=orders/date=2026-01-31/part-….parquet    rows of one task, so of one partition

Files that were put together have rows of several partitions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow.parquet as pq

from metaq.model import BrokerId, MessageId, Offset, TopicPartition

PLACED_BY: Final = ("broker_id", "partition", "offset")
"""Columns of MEASURED without which it is unknown what should be in a file."""
MEASURED: Final = (*PLACED_BY, "message_id", "timestamp")
"""Columns of which the table has the least and the greatest value of each file."""
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
"""Name of the directory for messages without a timestamp."""

_ESCAPED: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
"""Spark escapes them, and nothing else, in names of directories."""


@dataclass(frozen=True, slots=True)
class ArchivedLog:
    """Archived range of one partition, in a file or in all of them."""

    partition: TopicPartition
    message_count: int
    first: Offset
    last: Offset
    up_to: TopicPartition | None = None
    """None for messages of one partition; of several, no broker id and no number is
    greater than of this one, nor less than of `partition`."""

    def may_hold(self, partition: TopicPartition) -> bool:
        """Whether messages of a partition can be among them."""
        low, high = self.partition, self.up_to or self.partition
        return (
            partition.topic == low.topic
            and low.broker_id <= partition.broker_id <= high.broker_id
            and low.partition <= partition.partition <= high.partition
        )


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file of an archive."""

    path: str
    """Below the archive's directory."""
    size_bytes: int
    topic: str
    date: str | None
    """UTC day of their timestamps, `YYYY-MM-DD`; None where they have none."""
    stats: Mapping[str, Any]
    """Delta's statistics: `numRecords`, and `minValues` and `maxValues` by column."""
    modified_ms: int
    last_id: MessageId | None = None
    """Id of its last message; None where that is not known."""

    @classmethod
    def from_path(
        cls,
        path: str,
        size_bytes: int,
        stats: Mapping[str, Any],
        modified_ms: int,
        last_id: MessageId | None = None,
    ) -> "DataFile":
        """Return a file by its place: the directories have topic and day."""
        names = (step.partition("=")[2] for step in path.split("/")[:2])
        topic, date = map(unescaped, names)
        day = None if date == NO_VALUE else date
        return cls(path, size_bytes, topic, day, stats, modified_ms, last_id)

    @property
    def message_count(self) -> int:
        """Rows of the file."""
        count: int = self.stats["numRecords"]
        return count

    @property
    def log(self) -> ArchivedLog:
        """Its messages."""
        least, most = self.stats["minValues"], self.stats["maxValues"]
        low, high = (
            TopicPartition(self.topic, BrokerId(e["broker_id"]), e["partition"])
            for e in (least, most)
        )
        return ArchivedLog(
            low,
            self.message_count,
            Offset(least["offset"]),
            Offset(most["offset"]),
            None if low == high else high,
        )

    @property
    def directory_topic(self) -> str:
        """The topic that Spark reads in the name of the directory.

        Spark takes each escaped byte for a character; other writers escape UTF-8.
        """
        return unescaped(self.path.partition("/")[0].removeprefix("topic="))


def directory_of(topic: str, date: str | None) -> str:
    """Return the directory of a topic and day, below that of the archive."""
    name = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", topic)
    return f"topic={name}/date={date or NO_VALUE}"


def unescaped(name: str) -> str:
    """Return what Spark reads in a step of a path, after the `=`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), name)


def stats_of(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Return Delta's statistics of a file, from its footer.

    Times of a file that has one after the year 9999 have no bounds there.
    """
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    unbounded: set[str] = set()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            column = group.column(place)
            found, name = column.statistics, column.path_in_schema
            if name in MEASURED and found is not None and found.has_min_max:
                try:
                    low, high = found.min, found.max
                except OverflowError:  # Python's times end there
                    unbounded.add(name)
                    continue
                least[name] = min(least.get(name, low), low)
                most[name] = max(most.get(name, high), high)
    for values in (least, most):
        for name in unbounded:
            values.pop(name, None)
        if "timestamp" in values:
            values["timestamp"] = f"{values['timestamp']:%Y-%m-%dT%H:%M:%S.%fZ}"
    return {
        "numRecords": metadata.num_rows,
        "minValues": least,
        "maxValues": most,
        "nullCount": {},
    }
