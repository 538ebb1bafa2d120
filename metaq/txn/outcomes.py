"""Heuristic outcomes: which prepared transactions an operator has ended.

    outcomes    JSON in the journal's directory, replaced as a whole:
                {"version": 1, "outcomes": [{"key": "XID:...", "outcome": "commit",
                 "at_ms": 1700000000000}, ...], "crc": CRC-32 of all but itself}

An outcome is written before it is carried out, and stays until the coordinator of the
transaction forgets it: whatever it asks is answered with code 6, 7 or 8 meanwhile. A
Java broker keeps its own in `heuristic.log`, as a serialised Java object: that file is
never read or written here. Source: broker spec 5.6, 5.8.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from metaq.errors import DiskError, StorageError
from metaq.fs import FileSystem
from metaq.model import Millis, SizeBytes
from metaq.txn.state import HeuristicOutcome

OUTCOMES_FILE: Final = "outcomes"
JAVA_OUTCOMES_FILE: Final = "heuristic.log"
JAVA_EMPTY_MAP_BYTES: Final = 135
"""Length of Java's file that holds no outcome."""

VERSION: Final = 1
_BYTES_MAX: Final = SizeBytes(64 << 20)


class KeptOutcome(NamedTuple):
    """Decision of an operator."""

    outcome: HeuristicOutcome
    """Which way."""
    at_ms: Millis
    """When, wall clock."""


def encode_outcomes(outcomes: Mapping[str, KeptOutcome]) -> bytes:
    """Return the content of the file."""
    fields: dict[str, object] = {
        "version": VERSION,
        "outcomes": [
            {"key": key, "outcome": kept.outcome.value, "at_ms": kept.at_ms}
            for key, kept in outcomes.items()
        ],
    }
    return json.dumps({**fields, "crc": _crc(fields)}, indent=1).encode()


def decode_outcomes(data: bytes) -> dict[str, KeptOutcome]:
    """Return what the content says.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        fields = json.loads(data)
        crc = fields.pop("crc")
        if crc != _crc(fields) or fields["version"] != VERSION:
            raise ValueError(f"expected version {VERSION} and a checksum that fits")
        return {
            str(each["key"]): KeptOutcome(
                HeuristicOutcome(each["outcome"]), Millis(int(each["at_ms"]))
            )
            for each in fields["outcomes"]
        }
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no outcomes: {error!r}") from error


def _crc(fields: Mapping[str, object]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())


def read_outcomes(fs: FileSystem, directory: Path) -> dict[str, KeptOutcome]:
    """Return the outcomes that are kept; none without a file.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    path = directory / OUTCOMES_FILE
    try:
        return decode_outcomes(fs.read_file(path, _BYTES_MAX))
    except DiskError as error:
        if error.errno_name != "ENOENT":
            raise
        return {}
    except ValueError as error:
        raise StorageError(f"outcomes damaged: file={path} {error}") from error


def write_outcomes(
    fs: FileSystem, directory: Path, outcomes: Mapping[str, KeptOutcome]
) -> None:
    """Replace the file.

    Raises:
        StorageError: the disk refuses; the old one is still there.
    """
    fs.write_atomically(directory / OUTCOMES_FILE, encode_outcomes(outcomes))


def has_java_outcomes(fs: FileSystem, directory: Path) -> bool:
    """Tell whether a Java broker left outcomes, which cannot be read here."""
    path = directory / JAVA_OUTCOMES_FILE
    if not fs.exists(path):
        return False
    file = fs.open_read(path)
    try:
        return file.size() > JAVA_EMPTY_MAP_BYTES
    finally:
        file.close()
