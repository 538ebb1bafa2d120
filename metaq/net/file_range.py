"""A range of a file on its way to a socket."""

from typing import Protocol


class FileRange(Protocol):
    """Bytes of a file that a channel can send without reading them."""

    def fileno(self) -> int:
        """Return a descriptor open for reading, valid until `release`."""
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


class QueuedRange:
    """A range in the queue of a channel, and how much of it has left."""

    __slots__ = ("file", "head", "is_warm", "left_bytes", "position", "substitute")

    def __init__(self, file: FileRange, head: bytes, substitute: bytes) -> None:
        """Queue a range behind its header, or `substitute` in place of both."""
        self.file = file
        """Released when it has left, or never will."""
        self.head: bytes | memoryview = head
        """What has not left of the header."""
        self.substitute = substitute
        """Sent when the disk cannot read the range."""
        self.position = file.position
        """Where in the file the rest starts."""
        self.left_bytes = file.size_bytes
        """Length of the rest."""
        self.is_warm = False
        """Whether it was in the page cache when somebody looked."""
