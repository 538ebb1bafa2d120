"""A range of a file on its way to a socket."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeAlias

Explain: TypeAlias = Callable[[BaseException], bytes]
"""Makes the bytes sent instead of an unreadable range, given the error."""


class FileRange(Protocol):
    """Bytes of a file that a channel can send without reading them."""

    @property
    def reader(self) -> Executor:
        """Return threads that may wait for its disk; there is always a free one."""

    @property
    def is_open(self) -> bool:
        """Return whether there is a descriptor."""

    def open(self) -> None:
        """Open the file unless it is open; blocks, on a thread of `reader`.

        Raises:
            Exception: it cannot be opened, or does not have the range.
        """

    def fileno(self) -> int:
        """Return a descriptor open for reading, valid from `open` until `release`."""

    def is_cached(self, position: int, size_bytes: int) -> bool:
        """Return whether a part of the open file can be sent without its disk.

        `sendfile` of bytes that are not in memory blocks its thread until the disk has
        delivered them, also on a non-blocking socket: a loop asks first.
        """

    def warm(self, position: int, size_bytes: int) -> None:
        """Have a part of the open file read in; blocks, on a thread of `reader`.

        Raises:
            Exception: the disk does not give it.
        """

    @property
    def position(self) -> int:
        """Return where the range starts in the file."""

    @property
    def size_bytes(self) -> int:
        """Return its length, 1 or more."""

    def release(self) -> None:
        """Give the range back: it is no longer needed."""


class ShortRangeError(OSError):
    """A file ends before the range that was to be sent."""


class QueuedRange:
    """A range in the queue of a channel, and how much of it has left."""

    __slots__ = (
        "explain", "file", "head", "is_short", "is_warm", "left_bytes", "position",
    )  # fmt: skip

    def __init__(self, file: FileRange, head: bytes, explain: Explain) -> None:
        """Queue a range after its header, or what `explain` returns for both."""
        self.file = file
        """Released when it has left, or never will."""
        self.head: bytes | memoryview = head
        self.explain = explain
        self.position = file.position
        self.left_bytes = file.size_bytes
        self.is_short = False
        """Whether the file ended before the range did, its header being sent."""
        self.is_warm = False
        """Whether it was in the page cache at the last check, or must be."""
