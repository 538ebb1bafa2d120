"""Requests and outcomes: the values that the two sides of a log exchange.

    partition_log.py   ── AppendRequest, Task ─────────>   appender.py
    loop's thread      <── WriterProgress, refusal ─────   storage thread

A request names both sides of its log; nothing else is shared.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from metaq.errors import NoSpaceError, StorageError
from metaq.fs import Buffer
from metaq.fs.group_thread import Task
from metaq.model import MessageId, Offset, SizeBytes
from metaq.storage.log_writer import LogWriter
from metaq.storage.producers import StoredBatch
from metaq.storage.segment import Segment

BeforeWrite: TypeAlias = Callable[[Offset], Iterable[Task]]
"""Called with the offset of an append before its bytes are written. The tasks that it
returns run before the write, each once for all appends of a group that return it."""


class AppendTicket(Protocol):
    """Receives the outcome of an append, on the loop's thread."""

    def on_stored(self) -> None:
        """The records are stored as the log's durability mode promises."""

    def on_failed(self, error: StorageError) -> None:
        """They are not acknowledged; after some errors they may be stored."""


class Tickets(NamedTuple):
    """One outcome for several; none are what an append has that was answered early."""

    tickets: tuple[AppendTicket, ...] = ()

    def on_stored(self) -> None:
        """Answer all of them, in their order."""
        for ticket in self.tickets:
            ticket.on_stored()

    def on_failed(self, error: StorageError) -> None:
        """Likewise."""
        for ticket in self.tickets:
            ticket.on_failed(error)


class AppendReceiver(Protocol):
    """The loop's side of a log."""

    def on_written(self, end: Offset) -> None:
        """Appends up to this end were written; their sync goes on, or begins now."""

    def on_progress(self, progress: "WriterProgress") -> None:
        """Appends were written or synced."""

    def on_rolled(self, sealed: Segment, active: Segment) -> None:
        """The log has a new active segment."""

    def on_refused(self, error: NoSpaceError) -> None:
        """The disk was full: every append in flight failed."""


class AppendRequest(NamedTuple):
    """One append on its way to the storage thread."""

    writer: LogWriter
    """The log's side of the storage thread."""
    receiver: AppendReceiver
    """The log's side of the loop."""
    version: int
    """The writer's version that the offset belongs to."""
    offset: Offset
    chunks: Sequence[Buffer]
    """Its bytes, whole records; owned by the request."""
    size_bytes: SizeBytes
    record_count: int
    last_id: MessageId
    ticket: AppendTicket
    """Receives the outcome; used on the loop's thread only."""
    batches: Sequence[StoredBatch] = ()
    """Its notes in the producer file, where producers may send parts of it again."""
    before_write: BeforeWrite | None = None
    """Called on the storage thread before its bytes are written; it, and what it
    returns, raise nothing."""
    finish: Iterable[None] = ()
    """Steps that finish its bytes, done before they are written; they only compute."""
    is_light: bool = False
    """Of a connection that has little in flight; see `GroupQueue`."""
    completes: bool = False
    """It begins with the rest of an append, and belongs into the same segment."""

    @property
    def end_offset(self) -> Offset:
        """Return the offset after its last byte."""
        return Offset(self.offset + self.size_bytes)

    @property
    def is_single(self) -> bool:
        """Return whether it is of connections that wait for each reply, and only bytes.

        Nothing is to be computed or reported before it is written.
        """
        return self.is_light and self.before_write is None and not self.finish

    @property
    def is_current(self) -> bool:
        """Return whether its writer has not refused what it follows."""
        return self.version == self.writer.version


class CopiedAppends(NamedTuple):
    """Appends that a leader has written, as its followers get them."""

    offset: Offset
    """Of the first byte."""
    chunks: Sequence[Buffer]
    """Bytes of whole appends, of one segment of the leader."""
    size_bytes: SizeBytes
    """Sum of the lengths of the chunks, 1 or more."""
    record_count: int
    last_id: MessageId
    """Greatest id among the records."""
    batches: Sequence[StoredBatch] = ()
    """Notes of the batches that begin there, in their order."""


Request: TypeAlias = AppendRequest | Task


class WriterProgress(NamedTuple):
    """Events of a writer for the loop's side of its log."""

    log_end: Offset
    """Offset after the last byte written."""
    synced_end: Offset
    """Offset after the last byte synced."""
    last_sync_s: float
    """When the last sync ended, on the monotonic clock."""
    sync_count: int
    sync_s: float
    """Time they took together, seconds."""
