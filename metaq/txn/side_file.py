"""Small files of JSON beside the journal, replaced as a whole, with a checksum inside.

{"version": 1, ..., "crc": CRC-32 of all but itself}
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from metaq.errors import DiskError, StorageError
from metaq.fs import FileSystem
from metaq.model import SizeBytes

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


def read_side_file(fs: FileSystem, path: Path) -> bytes | None:
    """Return the content of a file; None without one.

    Raises:
        StorageError: the disk refuses.
    """
    try:
        return fs.read_file(path, _BYTES_MAX)
    except DiskError as error:
        if error.errno_name != "ENOENT":
            raise
        return None


def damaged(path: Path, error: ValueError) -> StorageError:
    """Return the error of a file that makes no sense."""
    return StorageError(f"{path.name} damaged: file={path} {error}")


def _crc(fields: Mapping[str, object]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())
