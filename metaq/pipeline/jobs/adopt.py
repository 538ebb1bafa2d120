"""Take over an archive of an older version: its files become a table, and stay.

Before archives were tables, they were Parquet files and numbered manifests:

    topic=orders/date=2026-01-31/….parquet      as today
    _metaq/manifest/00000000000000000012.json   which files count; the highest is true
    _metaq/checkpoint/                          how far a query of Spark has come

A manifest has the `batch` that is the last one, `files` as [path, bytes,
messages], and `logs`: for each path what it holds of each partition, as [topic, broker,
number, messages, first offset, last offset]. The oldest ones have no `logs`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive_store import (
    CHECKPOINT,
    MANIFESTS,
    ArchiveStore,
    table_errors,
)
from metaq.pipeline.jobs.data_files import DataFile, stats_of
from metaq.pipeline.jobs.day_files import NS_PER_MS, file_system

VERSION: Final = 1
SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True)
class AdoptSummary:
    """Result of taking over."""

    message_count: int
    """Messages that the archive says it has."""
    file_count: int


def adopt(path: str) -> AdoptSummary:
    """Make a table of an archive of an older version, while no job writes it.

    No data file is copied, and only where the manifest does not say what a file holds
    its footer is read. One commit names them all; then the manifests are deleted, and
    until then no job takes it for a table. After a kill run it again.

    Args:
        path: Path or URL of the archive.

    Raises:
        ArchiveError: There is none, or it is damaged.
    """
    store = ArchiveStore(path)
    root = store.root
    manifests = [name for name in store.names_in(MANIFESTS) if name.endswith(SUFFIX)]
    if not manifests:
        raise ArchiveError(f"{root}: no archive of an older version: no {MANIFESTS}")
    there = file_system(root)
    with table_errors(root):
        _take_over(store, f"{MANIFESTS}/{manifests[-1]}", there)
        there.delete_dir(MANIFESTS)
    files = store.files()
    return AdoptSummary(sum(file.message_count for file in files), len(files))


def _take_over(store: ArchiveStore, name: str, there: FileSystem) -> None:
    """Make a table of what a manifest names; one that is whole is left as it is."""
    root = store.root
    with there.open_input_file(name) as stream:
        text = stream.read()
    try:
        manifest = json.loads(text)
        if manifest["version"] != VERSION:
            raise ArchiveError(
                f"{root}/{name}: manifest of version {manifest['version']}, expected"
                f" {VERSION}"
            )
        logs = manifest.get("logs", {})
        files = [
            _file_of(there, where, size_bytes, count, logs.get(where, ()))
            for where, size_bytes, count in manifest["files"]
        ]
        batch = int(manifest["batch"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"{root}/{name} is no manifest: {error!r}") from error
    # Batches without messages made no manifest.
    batches = filter(str.isdecimal, store.names_in(f"{CHECKPOINT}/commits"))
    batch = max([batch, *map(int, batches)])
    store.claim()
    if store.batch < 0 <= batch:
        ends = _ends(files, chain.from_iterable(logs.values()))
        store.commit(batch, files, ends=ends)


def _file_of(
    there: FileSystem, path: str, size_bytes: int, count: int, logs: Sequence[Any]
) -> DataFile:
    """Return a file as the table has it."""
    # One that is gone has no time.
    modified_ms = (there.get_file_info(path).mtime_ns or 0) // NS_PER_MS
    if logs:
        least, most = (
            {
                "broker_id": pick(log[1] for log in logs),
                "partition": pick(log[2] for log in logs),
                "offset": pick(log[offset_at] for log in logs),
            }
            for pick, offset_at in ((min, 4), (max, 5))
        )
        stats = {"numRecords": count, "minValues": least, "maxValues": most}
        return DataFile.from_path(path, size_bytes, stats, modified_ms)
    with there.open_input_file(path) as stream:
        stats = stats_of(pq.read_metadata(stream))
    return DataFile.from_path(path, size_bytes, stats, modified_ms)


def _ends(
    files: Iterable[DataFile], logs: Iterable[Sequence[Any]]
) -> dict[TopicPartition, Offset]:
    """Return the offset of the last archived message of each partition, if known."""
    alone = (file.log for file in files if file.log.up_to is None)
    lasts = [(log.partition, log.last) for log in alone]
    for topic, broker_id, number, _count, _first, last in logs:
        partition = TopicPartition(topic, BrokerId(broker_id), number)
        lasts.append((partition, Offset(last)))
    return dict(sorted(lasts, key=lambda each: each[1]))
