"""Is a range of a file in the page cache, and how to get it there without copying.

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
from typing import Final

WARM_CALL_BYTES: Final = 4 * 1024 * 1024
"""Bytes asked of one sendfile while warming."""

_PROBE: Final = (bytearray(1),)


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
