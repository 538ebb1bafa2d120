"""Small files of JSON beside the journal, replaced as a whole, with a checksum inside.

{"version": 1, ..., "crc": CRC-32 of all but itself}
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from metaq.errors import DiskError, StorageError
from metaq.fs import FileSystem
from metaq.model import SizeBytes
from metaq.record.checksum import crc32

T = TypeVar("T")

VERSION: Final = 1
_BYTES_MAX: Final = SizeBytes(64 << 20)


def encode_fields(fields: Mapping[str, object]) -> bytes:
    """Return the content of a file with these fields."""
    all_fields = {"version": VERSION, **fields}
    return json.dumps({**all_fields, "crc": _crc(all_fields)}, indent=1).encode()


def decode_fields(data: bytes) -> dict[str, Any]:
    """Return the fields of a file.

    Raises:
        ValueError: it has none, another version, or a checksum that does not fit.
    """
    try:
        fields = json.loads(data)
        if fields.pop("crc") == _crc(fields) and fields.pop("version") == VERSION:
            return dict(fields)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no fields: {error!r}") from error
    raise ValueError(f"expected version {VERSION} and a checksum that fits")


def read_side_file(
    fs: FileSystem, path: Path, decode: Callable[[bytes], T]
) -> T | None:
    """Return what a file says; None without one.

    Args:
        fs: the disk.
        path: of the file.
        decode: returns what a content says; ValueError: it makes no sense.

    Raises:
        StorageError: the disk refuses, or the file is damaged.
    """
    try:
        return decode(fs.read_file(path, _BYTES_MAX))
    except DiskError as error:
        if error.errno_name != "ENOENT":
            raise
        return None
    except ValueError as error:
        raise StorageError(f"{path.name} damaged: file={path} {error}") from error


def _crc(fields: Mapping[str, object]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())
