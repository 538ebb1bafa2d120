"""Commits that are one decision: which transactions a start has to commit as well.

    together    JSON in the journal's directory, replaced as a whole (`side_file.py`):
                {"together": [{"XID:...": 6755399441055744, "XID:...": ...}, ...]}

For each command the keys of its transactions that are not finished, and the largest
message id of each. Every transaction has its commit record in the redo file of its
puts, and these may be several files: a power cut may leave one record of two. So the
file is written and synced before the first record. What it names is committed: a start
makes the records that are missing. Batches are appended when all records are synced, so
one that has none is nowhere yet.

The file stays until the next command, start or stop. A name that is out of date says
nothing: ids only grow, so a later transaction of that key has larger ones.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from metaq.fs import FileSystem
from metaq.model import MessageId
from metaq.txn.side_file import decode_fields, encode_fields, read_side_file

TOGETHER_FILE: Final = "together"

NamedGroup: TypeAlias = Mapping[str, MessageId]
"""Key of each transaction of one command → its largest message id."""


def encode_together(groups: Sequence[NamedGroup]) -> bytes:
    """Return the content of the file."""
    return encode_fields({"together": [dict(group) for group in groups]})


def decode_together(data: bytes) -> list[NamedGroup]:
    """Return what the content says.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        return [
            {str(key): MessageId(int(last_id)) for key, last_id in group.items()}
            for group in decode_fields(data)["together"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no transactions: {error!r}") from error


def read_together(fs: FileSystem, directory: Path) -> list[NamedGroup]:
    """Return what is committed together; nothing without a file.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    return read_side_file(fs, directory / TOGETHER_FILE, decode_together) or []


def write_together(
    fs: FileSystem, directory: Path, groups: Sequence[NamedGroup]
) -> None:
    """Replace the file.

    Raises:
        NoSpaceError: the old one is still there.
        StorageError: the disk refuses; which one is there, is unknown.
    """
    fs.write_atomically(directory / TOGETHER_FILE, encode_together(groups))


def remove_together(fs: FileSystem, directory: Path) -> None:
    """Remove the file, if there is one.

    Raises:
        StorageError: the disk refuses.
    """
    fs.discard(directory / TOGETHER_FILE)
