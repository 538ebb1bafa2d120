"""The manifest of an archive: which files count. Pure.

Each change of an archive is one new manifest, numbered one higher; the highest number
is the truth. A file that it does not name was left by a killed job. The contents of
each file by partition are written down as well, so that a later loss is known.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.spark.errors import ArchiveError

VERSION: Final = 1
NUMBER_DIGITS: Final = 20
MANIFEST_SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True)
class ArchivedLog:
    """Archived range of one partition, in a file or in all of them."""

    partition: TopicPartition
    """Partition of the messages."""
    message_count: int
    """Number of messages."""
    first: Offset
    """Offset of the first one."""
    last: Offset
    """Offset of the last one."""


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """One Parquet file of an archive."""

    path: str
    """Below the archive's directory: `topic=…/date=…/….parquet`."""
    size_bytes: int
    """Length of the file, bytes."""
    message_count: int
    """Rows of the file."""
    logs: tuple[ArchivedLog, ...] = ()
    """Contents by partition, in order; empty if an older version of this package wrote
    the file."""

    @property
    def directory(self) -> str:
        """`topic=…/date=…`."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of an archive at one moment."""

    number: int = 0
    """Rises by one with every change; 0: there is no archive yet."""
    query_id: str | None = None
    """The streaming query that archives here; None: none yet."""
    batch: int = -1
    """Last batch of the query that is in the archive; -1: none."""
    files: tuple[ArchivedFile, ...] = ()
    """Valid data files, by path."""

    @property
    def message_count(self) -> int:
        """Messages in all files."""
        return sum(file.message_count for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def logs(self) -> tuple[ArchivedLog, ...]:
        """Contents of all files by partition, in order, as far as they tell."""
        return sum_logs(log for file in self.files for log in file.logs)

    def to_json(self) -> str:
        """Return the manifest as its file holds it."""
        fields = {
            "version": VERSION,
            "number": self.number,
            "query": self.query_id,
            "batch": self.batch,
            "files": [[f.path, f.size_bytes, f.message_count] for f in self.files],
            # Beside the files, where versions that do not know of it look past it.
            "logs": {f.path: list(map(_log_to_json, f.logs)) for f in self.files},
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, *, name: str) -> "Manifest":
        """Read the JSON of `to_json`.

        Args:
            text: content of the file.
            name: the file, for messages.

        Raises:
            ArchiveError: It is no manifest, or one of a later version.
        """
        try:
            fields = json.loads(text)
            version = fields["version"]
            if version != VERSION:
                raise ArchiveError(
                    f"{name}: manifest of version {version}, expected {VERSION}"
                )
            logs = fields.get("logs", {})
            files = [
                ArchivedFile(
                    path, size, count, tuple(map(_log_from_json, logs.get(path, ())))
                )
                for path, size, count in fields["files"]
            ]
            return cls(
                number=fields["number"],
                query_id=fields["query"],
                batch=fields["batch"],
                files=tuple(files),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArchiveError(f"{name} is no manifest: {error!r}") from error


def sum_logs(logs: Iterable[ArchivedLog]) -> tuple[ArchivedLog, ...]:
    """Return one log for each partition, in order: counts added, ends taken."""
    found: dict[TopicPartition, ArchivedLog] = {}
    for log in logs:
        known = found.get(log.partition, log)
        count = log.message_count
        if known is not log:
            count += known.message_count
        found[log.partition] = ArchivedLog(
            log.partition,
            count,
            min(known.first, log.first),
            max(known.last, log.last),
        )
    return tuple(found[partition] for partition in sorted(found))


def _log_to_json(log: ArchivedLog) -> list[Any]:
    where = log.partition
    place = [where.topic, where.broker_id, where.partition]
    return [*place, log.message_count, log.first, log.last]


def _log_from_json(fields: list[Any]) -> ArchivedLog:
    topic, broker_id, number, count, first, last = fields
    partition = TopicPartition(topic, BrokerId(broker_id), number)
    return ArchivedLog(partition, count, Offset(first), Offset(last))


def manifest_name(number: int) -> str:
    """Return the file name of a manifest; names sort as their numbers do."""
    return f"{number:0{NUMBER_DIGITS}}{MANIFEST_SUFFIX}"
