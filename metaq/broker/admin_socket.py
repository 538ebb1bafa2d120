"""Address and limits of the administration socket.

    <dataPath>/admin.sock     mode 0600: opening it gives all rights

One JSON object per line in both directions, UTF-8 (`docs/operations.md` lists the
commands). A request is an object with `command`; its answer has `ok`, and either the
fields of the result or `error`, one sentence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from metaq.fs import FileSystem

SOCKET_NAME: Final = "admin.sock"
"""Name in the data directory. It does not end in `.meta` and is no directory, so
neither broker takes it for data."""

REQUEST_BYTES_MAX: Final = 8 * 1024
"""Longest request, line end included: a topic's name and a few words."""

REPLY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Longest reply, line end included; a hundred thousand logs fit."""

ADDRESS_BYTES_MAX: Final = 107
"""Longest path the kernel takes as the address of a Unix socket."""


@contextmanager
def short_address(fs: FileSystem, path: Path) -> Iterator[str]:
    """Give a path that may be longer than an address a name that fits.

    A long path is reached through a descriptor of its directory, which `/proc` shows
    as a path; nothing of the process changes, as a change of directory would.

    Args:
        fs: the disk.
        path: the socket, existing or not.

    Returns:
        An address that is good inside the block.

    Raises:
        StorageError: the directory cannot be opened.
    """
    text = str(path)
    if len(text.encode("utf-8", "surrogateescape")) <= ADDRESS_BYTES_MAX:
        yield text
        return
    directory = fs.open_read(path.parent)
    try:
        yield f"/proc/self/fd/{directory.fileno()}/{path.name}"
    finally:
        directory.close()
