"""Checkpoints: where replay begins, one small file each.

    checkpoint.N    {"number":<N of a redo file>,"offset":<byte in it>}

The one with the highest number counts, and an empty one says nothing. It names the
first record of the oldest transaction that is not finished. Only a newer one is
written, and only the newest few are kept. Source: broker spec 5.6.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from metaq.fs import FileSystem
from metaq.model import SizeBytes

_NAME: Final = re.compile(r"checkpoint\.([1-9][0-9]{0,8})")
_BYTES_MAX: Final = SizeBytes(4096)


class JournalPosition(NamedTuple):
    """A byte of the journal; ordered."""

    number: int
    """Number of the redo file."""
    position: int
    """In it."""


NOWHERE: Final = JournalPosition(0, 0)
"""Start of replay without a checkpoint: everything."""


def encode_checkpoint(place: JournalPosition) -> bytes:
    """Return the content of a checkpoint file."""
    return b'{"number":%d,"offset":%d}' % place


def decode_checkpoint(data: bytes) -> JournalPosition:
    """Return what a checkpoint says; `NOWHERE` if it makes no sense."""
    try:
        fields = json.loads(data)
        return JournalPosition(
            max(0, int(fields["number"])), max(0, int(fields["offset"]))
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return NOWHERE


def checkpoint_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the checkpoint files among some names, sorted."""
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_checkpoint(fs: FileSystem, directory: Path) -> JournalPosition:
    """Return where replay begins.

    Raises:
        StorageError: the disk refuses.
    """
    numbers = checkpoint_numbers(fs.list_directory(directory))
    if not numbers:
        return NOWHERE
    path = directory / f"checkpoint.{numbers[-1]}"
    return decode_checkpoint(fs.read_file(path, _BYTES_MAX))


def write_checkpoint(
    fs: FileSystem, directory: Path, place: JournalPosition, *, kept_max: int
) -> bool:
    """Write a checkpoint if it is newer than the last one, and remove old ones.

    Returns:
        Whether it was written; it is on the disk then.

    Raises:
        StorageError: the disk refuses; the last one still counts.
    """
    numbers = checkpoint_numbers(fs.list_directory(directory))
    newest = numbers[-1] if numbers else 0
    is_empty = False
    if newest:
        data = fs.read_file(directory / f"checkpoint.{newest}", _BYTES_MAX)
        is_empty = not data
        if not is_empty and place <= decode_checkpoint(data):
            return False
    # Like a Java broker, which makes an empty one first and fills it then.
    number = newest if is_empty else newest + 1
    path = directory / f"checkpoint.{number}"
    fs.write_atomically(path, encode_checkpoint(place))
    kept = [*(each for each in numbers if each != number), number]
    for old in kept[:-kept_max]:
        fs.unlink(directory / f"checkpoint.{old}")
    return True
