"""A range of a file to be sent to a socket."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeAlias

Explain: TypeAlias = Callable[[BaseException], bytes]
"""Returns the bytes to send instead of an unreadable range, given the error."""


class FileRange(Protocol):
    """Bytes of a file that a channel can send without copying them to memory."""

    @property
    def reader(self) -> Executor:
        """Return threads that may wait for the file's disk; one is always free."""

    @property
    def is_open(self) -> bool:
        """Return whether the file has a descriptor."""

    def open(self) -> None:
        """Open the file unless it is open; blocks; called on a thread of `reader`.

        Raises:
            Exception: it cannot be opened, or does not contain the range.
        """

    def fileno(self) -> int:
        """Return a descriptor open for reading, valid from `open` until `release`."""

    def is_cached(self, position: int, size_bytes: int) -> bool:
        """Return whether a part of the open file can be sent without reading its disk.

        `sendfile` of bytes that are not in memory blocks its thread until the disk has
        delivered them, even on a non-blocking socket, so an event loop checks first.
        """

    def warm(self, position: int, size_bytes: int) -> None:
        """Read a part of the open file into memory; blocks; on a thread of `reader`.

        Raises:
            Exception: the disk cannot read it.
        """

    @property
    def position(self) -> int:
        """Return the position of the range in the file."""

    @property
    def size_bytes(self) -> int:
        """Return the length of the range, 1 or more."""

    def release(self) -> None:
        """Release the range: it is no longer needed."""


class ShortRangeError(OSError):
    """The file ends before the end of the range to be sent."""


class QueuedRange:
    """A range in the queue of a channel, with what is left of it to send."""

    __slots__ = (
        "explain", "file", "head", "is_short", "is_warm", "left_bytes", "position",
    )  # fmt: skip

    def __init__(self, file: FileRange, head: bytes, explain: Explain) -> None:
        """Queue a range and its header, or what `explain` returns for both."""
        self.file = file
        """Released when it was sent, or will not be."""
        self.head: bytes | memoryview = head
        self.explain = explain
        self.position = file.position
        self.left_bytes = file.size_bytes
        self.is_short = False
        """Whether the file was found to end early after the header was sent."""
        self.is_warm = False
        """Whether it was in the page cache at the last check, or is known to be."""
