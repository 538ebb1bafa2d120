"""One redo file of the journal, with its checksums and the places in it.

    redo.N   records, appended; offsets in commit records are rewritten (`places.py`)
    sums.N   what the redo file holds (`sums.py`), written behind its bytes

A failure of the side file costs the checksums of what follows in that redo file, and
nothing else. Source: broker spec 5.6.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeAlias

from metaq.errors import StorageError
from metaq.fs import AppendFile, Buffer, FileSystem, UpdateFile
from metaq.model import Offset, SizeBytes
from metaq.txn.places import PlaceBlock, PlacesFile, make_blocks
from metaq.txn.records import OFFSET
from metaq.txn.sums import BOUND, SYNCED, encode_entry, encode_head, encode_span

FILE_NAME: Final = re.compile(r"(redo|sums)\.([1-9][0-9]{0,8})")

Bounds: TypeAlias = Sequence[tuple[int, Offset]]
"""Byte of an entry and first value of each offset in it that may be rewritten."""

log = logging.getLogger(__name__)


class RedoFile:
    """One redo file and its side file. Owner: the journal's thread."""

    __slots__ = ("_places", "_redo", "_sums", "end", "is_dirty", "number", "references")

    def __init__(
        self, number: int, redo: AppendFile, places: UpdateFile, sums: AppendFile
    ) -> None:
        """Take over new files; `create_redo_file` makes them."""
        self.number: Final = number
        """Its number, which its name has."""
        self.end = 0
        """Bytes in it."""
        self.references = 0
        """Transactions that need it."""
        self.is_dirty = False
        """It has verdicts that are not on the disk."""
        self._redo = redo
        self._sums: AppendFile | None = sums
        self._places = PlacesFile(places)
        self._sum(encode_head(number))

    @property
    def path(self) -> Path:
        """Return its path."""
        return self._redo.path

    def write(self, data: Buffer) -> None:
        """Write records behind the last one; `note_written` is to follow.

        Raises:
            NoSpaceError: a part of them may be there; `cut_back` is to follow.
            DiskError: nothing is known about the file any more.
        """
        self._redo.write(data)

    def cut_back(self) -> None:
        """Cut off what was written and not noted, for good.

        Raises:
            StorageError: nothing is known about the file any more.
        """
        self._redo.truncate(SizeBytes(self.end))
        # A record of what was refused must not come back after a power cut.
        self._redo.sync()

    def sync(self) -> None:
        """Wait until everything written is on disk.

        Raises:
            DiskError: final, see `AppendFile.sync`.
        """
        self._redo.sync()
        self.is_dirty = False

    def note_synced(self) -> None:
        """Tell the side file that everything noted is on the disk."""
        self._sum(encode_entry(SYNCED, 0, self.end))

    def note_written(
        self, data: Buffer, commits: Sequence[tuple[int, Bounds]], *, is_synced: bool
    ) -> Sequence[PlaceBlock]:
        """Take in what was written: its checksum, and the offsets in it.

        Args:
            data: the bytes; the end moves behind them.
            commits: start of each entry with offsets in the data, and these, in order.
            is_synced: whether the bytes are on the disk.

        Returns:
            The block of each of these entries.
        """
        bounds = [
            encode_entry(BOUND, 0, self.end + start + at, value)
            for start, offsets in commits
            for at, value in offsets
        ]
        span = encode_span(self.end, data, is_synced=is_synced)
        self._sum(b"".join((*bounds, span)))
        ranges = [
            (start + offsets[0][0], start + offsets[-1][0] + OFFSET.size)
            for start, offsets in commits
        ]
        blocks = make_blocks(self._places, self.end, data, ranges)
        self.end += len(data)
        return blocks

    def close(self) -> None:
        """Close what is open."""
        for file in (self._redo, self._sums, self._places):
            if file is not None:
                file.close()

    def _sum(self, entries: bytes) -> None:
        if self._sums is None:
            return
        try:
            self._sums.write(entries)
        except StorageError as error:
            log.warning(
                "journal goes on without checksums: file=%s error=%s",
                self._sums.path,
                error,
            )
            sums, self._sums = self._sums, None
            sums.close()


def create_redo_file(fs: FileSystem, directory: Path, number: int) -> RedoFile:
    """Create a redo file, and what lies beside it.

    Raises:
        StorageError: the disk refuses; nothing is left open.
    """
    path = directory / f"redo.{number}"
    with ExitStack() as opened:
        redo = fs.open_append(path, create=True)
        opened.callback(redo.close)
        places = fs.open_update(path)
        opened.callback(places.close)
        sums = fs.open_append(directory / f"sums.{number}", create=True)
        opened.pop_all()
    return RedoFile(number, redo, places, sums)


def remove_files(fs: FileSystem, directory: Path, numbers: Iterable[int]) -> None:
    """Remove redo files and what lies beside them, the oldest one last.

    A newer one may be its copy, which a power cut has torn: until that is gone, the
    bytes that were synced come first in a replay.

    Raises:
        StorageError: the disk refuses; those behind it are gone.
    """
    for number in sorted(numbers, reverse=True):
        for kind in ("redo", "sums"):
            fs.discard(directory / f"{kind}.{number}")
