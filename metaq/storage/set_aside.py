"""Partitions that are moved aside on disk at once, and removed later.

    <dataPath>/deleted/20261122T101501.123Z/orders-0/    the partition orders-0, deleted
    <dataPath>/aside/20261122T101501.123Z/orders-0/      a replica made another copy

A partition's directory leaves the data directory with one rename, so it is there as a
whole or not at all. Recovery, `metaq verify` and a Java broker ignore names without a
dash, so nothing below these two is ever served. They may be removed by hand at any
time. The broker removes `deleted` in the background, and `aside` when it knows that the
new copy is complete.
"""

import logging
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from metaq.errors import MissingFileError
from metaq.fs import FileSystem
from metaq.model import LogId, Millis
from metaq.storage.opening import find_logs

_log = logging.getLogger(__name__)

DELETED_DIRECTORY: Final = "deleted"
"""Subdirectory of a data directory for deleted topics; without a dash, see above."""

ASIDE_DIRECTORY: Final = "aside"
"""Subdirectory for logs that a replica has replaced."""


def set_aside(
    fs: FileSystem,
    data_path: Path,
    is_wanted: Callable[[LogId], bool],
    wall_ms: Millis,
    *,
    holding: str = DELETED_DIRECTORY,
) -> None:
    """Move the directories of some partitions aside, if there are any.

    The caller repeats it until it succeeds: each partition is in one directory or the
    other.

    Args:
        fs: the disk.
        data_path: the data directory.
        is_wanted: selects the partitions, which must be closed.
        wall_ms: time for the name of the new directory.
        holding: parent of the new directory.

    Raises:
        StorageError: the disk refuses; some partitions may have been moved.
    """
    logs = find_logs(fs, data_path)
    names = [name for name, log_id in logs.items() if is_wanted(log_id)]
    if not names:
        return
    fs.make_directory(data_path / holding)
    target = _new_directory(fs, data_path / holding, wall_ms)
    fs.make_directory(target)
    for name in names:
        fs.rename(data_path / name, target / name)
    _log.info(
        "partitions set aside: first=%s partitions=%d directory=%s",
        names[0],
        len(names),
        target,
    )


def remove_set_aside(
    fs: FileSystem,
    data_path: Path,
    *,
    holding: str = DELETED_DIRECTORY,
    names: Collection[str] | None = None,
) -> None:
    """Remove set-aside directories; blocks on the disk without a limit.

    Args:
        fs: the disk.
        data_path: the data directory.
        holding: their parent.
        names: directories to remove; None: all. `holding` is removed with the last one.

    Raises:
        StorageError: the disk refuses; the rest is still there.
    """
    parent = data_path / holding
    if names is None:
        if fs.is_directory(parent):
            _remove(fs, parent)
        return
    there = list_set_aside(fs, data_path, holding=holding)
    for name in set(names).intersection(there):
        _remove(fs, parent / name)
    if set(there) <= set(names) and fs.is_directory(parent):
        _remove(fs, parent)


def list_set_aside(
    fs: FileSystem, data_path: Path, *, holding: str = DELETED_DIRECTORY
) -> tuple[str, ...]:
    """Return the names of set-aside directories; empty if there are none.

    Raises:
        StorageError: the disk refuses.
    """
    try:
        return fs.list_directory(data_path / holding)
    except MissingFileError:
        return ()


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
    except MissingFileError:
        pass  # an operator may remove it, too
