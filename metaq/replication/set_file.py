"""The `set` file of a replica: state that must survive a restart.

    <dataPath>/set      in the first data directory of a broker that is a replica

    metaq-set 1 <CRC-32 of the next line, 8 hex digits>
    {"set_id":"4be1…","replica":2,"record":{…},"epoch":7,"completed":6,"flag":"",
     "clean":9}

It is replaced as a whole and synced before the replica acts on it. `record` is its copy
of the newest record that it has seen, as in ZooKeeper (`record.py`), or null. A replica
with a damaged file does not start, because it cannot know what it has promised.
"""

from pathlib import Path
from typing import Final

from metaq.errors import MissingFileError, StorageError
from metaq.fs import FileSystem
from metaq.model import SizeBytes
from metaq.record.checksum import body_after_crc_line, with_crc_line
from metaq.replication.json_values import FieldError, from_json, to_json
from metaq.replication.record import SET_FILE
from metaq.replication.replica import SetFile

SET_BYTES_MAX: Final = SizeBytes(1 << 20)
"""Largest valid file, in bytes; a record takes some kilobytes."""

_MAGIC: Final = b"metaq-set 1 "


def encode_set_file(file: SetFile) -> bytes:
    """Return the content of the file."""
    return with_crc_line(_MAGIC, to_json(file))


def decode_set_file(data: bytes) -> SetFile:
    """Decode the content of a file; unknown properties are ignored.

    Raises:
        StorageError: it is damaged, or a property is missing or has another type.
    """
    body = body_after_crc_line(_MAGIC, data)
    try:
        return from_json(SetFile, body, "set")
    except FieldError as error:
        raise StorageError(
            f"expected the fields of version 1, got {body[:80]!r}: {error}"
        ) from error


def read_set_file(fs: FileSystem, directory: Path) -> SetFile | None:
    """Read and decode the file of a data directory; None if there is none. Blocks.

    Raises:
        StorageError: it is damaged, or the disk failed; its state is unknown then.
    """
    path = directory / SET_FILE
    try:
        data = fs.read_file(path, SET_BYTES_MAX)
    except MissingFileError:
        return None
    try:
        return decode_set_file(data)
    except StorageError as error:
        raise StorageError(
            f"{path} is damaged: {error}; move the data directories away, and the"
            " replica joins its set as a new one"
        ) from error


def write_set_file(fs: FileSystem, directory: Path, file: SetFile) -> None:
    """Replace the file; synced on return. Blocks.

    Raises:
        StorageError: the write failed; either the old or the new file is there.
    """
    fs.write_atomically(directory / SET_FILE, encode_set_file(file))
