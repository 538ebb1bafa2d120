"""Requests and outcomes: the values exchanged by the two sides of a log.

    partition_log.py   ── AppendRequest, Task ─────────>   appender.py
    loop's thread      <── WriterProgress, refusal ─────   storage thread

A request refers to both sides of its log; they share nothing else.
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
returns run before the write; one returned by several appends of a group runs once."""


class AppendTicket(Protocol):
    """Receives the outcome of an append, on the loop's thread."""

    def on_stored(self) -> None:
        """The records are stored as the log's durability mode promises."""

    def on_failed(self, error: StorageError) -> None:
        """They are not acknowledged; after some errors they may be stored."""


class Tickets(NamedTuple):
    """One ticket for several; empty for an append that was answered early."""

    tickets: tuple[AppendTicket, ...] = ()

    def on_stored(self) -> None:
        """Call `on_stored` of all tickets, in order."""
        for ticket in self.tickets:
            ticket.on_stored()

    def on_failed(self, error: StorageError) -> None:
        """Call `on_failed` of all tickets, in order."""
        for ticket in self.tickets:
            ticket.on_failed(error)


class AppendReceiver(Protocol):
    """The loop's side of a log."""

    def on_written(self, end: Offset) -> None:
        """Appends up to `end` were written; their sync is in progress or begins now."""

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
    """Version of the writer for which the offset is valid."""
    offset: Offset
    chunks: Sequence[Buffer]
    """The bytes, whole records; owned by the request."""
    size_bytes: SizeBytes
    record_count: int
    last_id: MessageId
    ticket: AppendTicket
    """Receives the outcome; used on the loop's thread only."""
    batches: Sequence[StoredBatch] = ()
    """Entries for the producer file, if producers may resend parts of the append."""
    before_write: BeforeWrite | None = None
    """Called on the storage thread before the bytes are written; neither it nor the
    tasks that it returns may raise."""
    finish: Iterable[None] = ()
    """Steps that finish the bytes before they are written; pure computation."""
    is_light: bool = False
    """Whether the connection has little in flight; see `GroupQueue`."""
    completes: bool = False
    """Whether it begins with the rest of an append, so it must be in that segment."""

    @property
    def end_offset(self) -> Offset:
        """Return the offset after the last byte."""
        return Offset(self.offset + self.size_bytes)

    @property
    def is_single(self) -> bool:
        """Return whether it is a single put, with nothing to do before its write.

        Its connections wait for each reply, and there is nothing to compute or report.
        """
        return self.is_light and self.before_write is None and not self.finish

    @property
    def is_current(self) -> bool:
        """Return whether the writer has refused no append before this one."""
        return self.version == self.writer.version


class CopiedAppends(NamedTuple):
    """Appends written by a leader, in the form that its followers get."""

    offset: Offset
    """Offset of the first byte."""
    chunks: Sequence[Buffer]
    """Bytes of whole appends, all from one segment of the leader."""
    size_bytes: SizeBytes
    """Sum of the lengths of the chunks, 1 or more."""
    record_count: int
    last_id: MessageId
    """Greatest id among the records."""
    batches: Sequence[StoredBatch] = ()
    """Entries of the batches that begin in this range, in order."""


Request: TypeAlias = AppendRequest | Task


class WriterProgress(NamedTuple):
    """Events of a writer for the loop's side of its log."""

    log_end: Offset
    """Offset after the last byte written."""
    synced_end: Offset
    """Offset after the last byte synced."""
    last_sync_s: float
    """Time when the last sync ended, on the monotonic clock."""
    sync_count: int
    sync_s: float
    """Total duration of the syncs, in seconds."""
