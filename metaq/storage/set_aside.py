"""Deleted topics on the disk: moved aside at once, removed later.

    <dataPath>/deleted/20261122T101501.123Z/orders-0/    what was the partition orders-0

A partition's directory leaves the data directory with one rename, so it is there as a
whole or not at all. Recovery, `metaq verify` and a Java broker take no name without a
dash for a partition, so nothing below `deleted` is ever served. It may be removed by
hand at any time; the broker does it in the background.
"""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from metaq.errors import DiskError
from metaq.fs import FileSystem
from metaq.model import Millis
from metaq.storage.opening import find_logs

_log = logging.getLogger(__name__)

DELETED_DIRECTORY: Final = "deleted"
"""Below a data directory; without a dash, see the head of this file."""


def set_aside(fs: FileSystem, data_path: Path, topic: str, wall_ms: Millis) -> None:
    """Move the directories of a topic's partitions aside, if there are any.

    To be repeated until it succeeds: each partition is in one directory or the other.

    Args:
        fs: the disk.
        data_path: the data directory.
        topic: whose partitions; none of them is open.
        wall_ms: names the new directory.

    Raises:
        StorageError: the disk refuses; some partitions may be moved.
    """
    logs = find_logs(fs, data_path)
    names = [name for name, log_id in logs.items() if log_id.topic == topic]
    if not names:
        return
    fs.make_directory(data_path / DELETED_DIRECTORY)
    target = _new_directory(fs, data_path / DELETED_DIRECTORY, wall_ms)
    fs.make_directory(target)
    for name in names:
        fs.rename(data_path / name, target / name)
    _log.info(
        "topic set aside: topic=%s partitions=%d directory=%s",
        topic,
        len(names),
        target,
    )


def remove_set_aside(fs: FileSystem, data_path: Path) -> None:
    """Remove set-aside directories; blocks for as long as the disk needs.

    Raises:
        StorageError: the disk refuses; the rest is there still.
    """
    if fs.is_directory(data_path / DELETED_DIRECTORY):
        _remove(fs, data_path / DELETED_DIRECTORY)


def _new_directory(fs: FileSystem, holding: Path, wall_ms: Millis) -> Path:
    while True:
        moment = datetime.fromtimestamp(wall_ms // 1000, UTC)
        target = holding / f"{moment:%Y%m%dT%H%M%S}.{wall_ms % 1000:03}Z"
        if not fs.exists(target):
            return target
        wall_ms = Millis(wall_ms + 1)


def _remove(fs: FileSystem, path: Path) -> None:
    try:
        if not fs.is_directory(path):
            fs.unlink(path)
            return
        for name in fs.list_directory(path):
            _remove(fs, path / name)
        fs.remove_directory(path)
    except DiskError as error:
        # An operator removes it too.
        if error.errno_name != "ENOENT":
            raise
