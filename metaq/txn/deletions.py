"""Deletions of topics: which commits of the journal must not come back.

    deletions   JSON in the journal's directory, replaced as a whole (`side_file.py`):
                {"topics": {"orders": {"3": 4711, "4": 0}, ...}}

Replay appends what a commit put and a partition lacks. A partition that was deleted
lacks everything, and so does one that was made under its name again. So before the data
of a topic goes, the end of each redo file is written down: of commits in front of it,
the batches for that topic are over. What is committed behind it is for a topic that was
made again. A start leaves none of the named files, and removes the record.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from metaq.fs import FileSystem
from metaq.txn.side_file import decode_fields, encode_fields, read_side_file

DELETIONS_FILE: Final = "deletions"

Deletions: TypeAlias = dict[str, dict[int, int]]
"""Topic → number of a redo file → its end when the topic was deleted."""


def encode_deletions(deletions: Deletions) -> bytes:
    """Return the content of the file."""
    return encode_fields({"topics": deletions})


def decode_deletions(data: bytes) -> Deletions:
    """Return what the content says.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        return {
            str(topic): {int(number): int(end) for number, end in ends.items()}
            for topic, ends in decode_fields(data)["topics"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no deletions: {error!r}") from error


def read_deletions(fs: FileSystem, directory: Path) -> Deletions:
    """Return the deletions since the last start; none without a file.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    return read_side_file(fs, directory / DELETIONS_FILE, decode_deletions) or {}


def write_deletions(fs: FileSystem, directory: Path, deletions: Deletions) -> None:
    """Replace the file.

    Raises:
        StorageError: the disk refuses; the old one is still there.
    """
    fs.write_atomically(directory / DELETIONS_FILE, encode_deletions(deletions))


def remove_deletions(fs: FileSystem, directory: Path) -> None:
    """Remove the file, if there is one.

    Raises:
        StorageError: the disk refuses.
    """
    fs.discard(directory / DELETIONS_FILE)


def ends_in(deletions: Deletions, number: int) -> Mapping[str, int]:
    """Return topic → end in one redo file; no topic that was deleted before it."""
    return {topic: ends[number] for topic, ends in deletions.items() if number in ends}
