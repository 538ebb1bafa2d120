"""Ranges of files on their way to a socket, without their bytes entering this process.

`sendfile` on bytes that are not in memory blocks the calling thread until the disk has
delivered them, whatever the socket says. The event loop therefore asks first
(`is_cached`, two reads of one byte that refuse to wait) and leaves a cold range to a
reader thread, which sends it to the null device (`warm`): the kernel reads the pages
in, and not one byte enters this process.

The question is about the first and the last page only. Pages between them may have
been dropped alone; that costs the loop one disk read, and nothing breaks.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, Protocol, TypeAlias

Explain: TypeAlias = Callable[[BaseException], bytes]
"""Maker of the bytes sent in place of an unreadable range, given the error."""

WARM_CALL_BYTES: Final = 4 * 1024 * 1024
"""Bytes asked of one sendfile while warming."""

_PROBE: Final = (bytearray(1),)


class FileRange(Protocol):
    """Bytes of a file that a channel can send without reading them."""

    @property
    def reader(self) -> Executor:
        """Return threads that may wait for its disk; they never run out."""
        ...

    @property
    def is_open(self) -> bool:
        """Tell whether there is a descriptor."""
        ...

    def open(self) -> None:
        """Open the file unless it is open; blocks, on a thread of `reader`.

        Raises:
            Exception: it cannot be opened, or does not have the range.
        """
        ...

    def fileno(self) -> int:
        """Return a descriptor open for reading, valid from `open` until `release`."""
        ...

    @property
    def position(self) -> int:
        """Return where the range starts in the file."""
        ...

    @property
    def size_bytes(self) -> int:
        """Return its length, 1 or more."""
        ...

    def release(self) -> None:
        """Tell the owner that the range is no longer needed."""
        ...


class ShortRangeError(OSError):
    """A file ended before the range of it that was to be sent."""


class QueuedRange:
    """A range in the queue of a channel, and how much of it has left."""

    __slots__ = (
        "explain",
        "file",
        "head",
        "is_short",
        "is_warm",
        "left_bytes",
        "position",
    )

    def __init__(self, file: FileRange, head: bytes, explain: Explain) -> None:
        """Queue a range behind its header, or what `explain` returns for both."""
        self.file = file
        """Released when it has left, or never will."""
        self.head: bytes | memoryview = head
        """Unsent bytes of the header."""
        self.explain = explain
        """Maker of the bytes sent when the range cannot be read."""
        self.position = file.position
        """Position of the rest in the file."""
        self.left_bytes = file.size_bytes
        """Length of the rest."""
        self.is_short = False
        """Whether the file ended before the range did, its header being sent."""
        self.is_warm = False
        """Whether it was in the page cache at the last check, or must be."""


def is_cached(fd: int, *, position: int, size_bytes: int) -> bool:
    """Tell whether reading a range would not wait for the disk.

    Args:
        fd: a file open for reading.
        position: first byte of the range.
        size_bytes: its length, 1 or more.

    Returns:
        False when its first or last page is not in the page cache, or not in the file
        at all. Where the file system cannot say (tmpfs), whether the range is in the
        file: warming would not help with the rest.
    """
    try:
        for at in (position, position + size_bytes - 1):
            if not os.preadv(fd, _PROBE, at, os.RWF_NOWAIT):
                return False
    except BlockingIOError:
        return False
    except OSError:
        return os.fstat(fd).st_size >= position + size_bytes
    return True


def warm(fd: int, *, position: int, size_bytes: int) -> None:
    """Read a range into the page cache; blocks, so it belongs on a reader thread.

    Raises:
        OSError: the disk could not read it.
    """
    end = position + size_bytes
    while position < end:
        count = min(end - position, WARM_CALL_BYTES)
        sent = os.sendfile(_null_device(), fd, position, count)
        if not sent:
            return
        position += sent


@functools.cache
def _null_device() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
