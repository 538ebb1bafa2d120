"""Heuristic outcomes: which prepared transactions an operator has ended.

    outcomes    JSON in the journal's directory, replaced as a whole (`side_file.py`):
                {"outcomes": [{"key": "XID:...", "outcome": "commit",
                 "at_ms": 1700000000000}, ...]}

An outcome is written before it is carried out, and stays until the coordinator of the
transaction forgets it: whatever it asks is answered with code 6, 7 or 8 meanwhile. A
Java broker keeps its own in `heuristic.log`, as a serialised Java object: that file is
never read or written here. Source: broker spec 5.6, 5.8.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from metaq.fs import FileSystem
from metaq.model import Millis
from metaq.txn.side_file import decode_fields, encode_fields, read_side_file
from metaq.txn.state import HeuristicOutcome

OUTCOMES_FILE: Final = "outcomes"
JAVA_OUTCOMES_FILE: Final = "heuristic.log"
JAVA_EMPTY_MAP_BYTES: Final = 135
"""Length of Java's file that holds no outcome."""


class KeptOutcome(NamedTuple):
    """Decision of an operator."""

    outcome: HeuristicOutcome
    """The outcome decided on."""
    at_ms: Millis
    """Time of the decision, wall clock."""


def encode_outcomes(outcomes: Mapping[str, KeptOutcome]) -> bytes:
    """Return the content of the file."""
    return encode_fields(
        {
            "outcomes": [
                {"key": key, "outcome": kept.outcome.value, "at_ms": kept.at_ms}
                for key, kept in outcomes.items()
            ]
        }
    )


def decode_outcomes(data: bytes) -> dict[str, KeptOutcome]:
    """Return what the content says.

    Raises:
        ValueError: it makes no sense.
    """
    try:
        return {
            str(each["key"]): KeptOutcome(
                HeuristicOutcome(each["outcome"]), Millis(int(each["at_ms"]))
            )
            for each in decode_fields(data)["outcomes"]
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"no outcomes: {error!r}") from error


def read_outcomes(fs: FileSystem, directory: Path) -> dict[str, KeptOutcome]:
    """Return the outcomes that are kept; none without a file.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    return read_side_file(fs, directory / OUTCOMES_FILE, decode_outcomes) or {}


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
