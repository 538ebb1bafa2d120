"""The manifest of an archive: which files count. Pure.

Each change of an archive is one new manifest, numbered one higher; the highest number
is the truth. A file that it does not name is what a killed job left behind.
"""

import json
from dataclasses import dataclass
from typing import Final

from metaq.spark.errors import ArchiveError

VERSION: Final = 1
NUMBER_DIGITS: Final = 20
MANIFEST_SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """One Parquet file of an archive."""

    path: str
    """Below the archive's directory: `topic=…/date=…/….parquet`."""
    size_bytes: int
    """Its length."""
    message_count: int
    """Its rows."""

    @property
    def directory(self) -> str:
        """`topic=…/date=…`."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an archive holds at one moment."""

    number: int = 0
    """Rises by one with every change; 0: there is no archive yet."""
    query_id: str | None = None
    """The streaming query that archives here; None: none yet."""
    batch: int = -1
    """Its last batch that is in the archive; -1: none."""
    files: tuple[ArchivedFile, ...] = ()
    """What counts, by path."""

    @property
    def message_count(self) -> int:
        """Messages in all files."""
        return sum(file.message_count for file in self.files)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> str:
        """Return the manifest as its file holds it."""
        fields = {
            "version": VERSION,
            "number": self.number,
            "query": self.query_id,
            "batch": self.batch,
            "files": [[f.path, f.size_bytes, f.message_count] for f in self.files],
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, *, name: str) -> "Manifest":
        """Read what `to_json` wrote.

        Args:
            text: what the file holds.
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
            return cls(
                number=fields["number"],
                query_id=fields["query"],
                batch=fields["batch"],
                files=tuple(ArchivedFile(*each) for each in fields["files"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ArchiveError(f"{name} is no manifest: {error!r}") from error


def manifest_name(number: int) -> str:
    """Return the file name of a manifest; names sort as their numbers do."""
    return f"{number:0{NUMBER_DIGITS}}{MANIFEST_SUFFIX}"
