"""The one error tree. Policy is on the class, so no retry loop lists types.

Every error names its subject and both numbers ("expected ... got ..."), with topic,
partition, offset, file and position where they exist. `OSError` never leaves `fs`
and `storage`, kazoo's exceptions never leave `zk/coordinator.py`, and `struct.error`,
`UnicodeDecodeError` and `ValueError` from foreign bytes never leave `record` and
`protocol`.
"""

from typing import ClassVar, Final

from metaq.model import Offset, TopicPartition, printable

OUTCOME_UNKNOWN: Final = "outcome unknown"
"""Ends the texts of errors whose outcome is in doubt."""


class MetaqError(Exception):
    """Root of all errors that this package raises on purpose."""

    retriable: ClassVar[bool] = False
    """The same call may succeed later with nothing changed."""
    refresh_metadata: ClassVar[bool] = False
    """The caller's metadata on brokers and partitions is out of date."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with the fields of subclasses.

        By default, unpickling calls the class with the text alone. That fails for a
        class with more arguments, and breaks the process pool that its error came from.
        """
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[MetaqError], args: tuple[object, ...]) -> MetaqError:
    return kind.__new__(kind, *args)


# -- wire -----------------------------------------------------------------------------


class ProtocolError(MetaqError):
    """Bytes or calls that break the rules of the wire."""


class LocalProtocolError(ProtocolError):
    """Our own side tried to break the rules."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules; MetaQ closes the connection without a reply."""


class WireError(MetaqError):
    """A reply other than 200: one of MetaQ's status numbers and a text.

    The text is wire content: the broker sends `str(error)` as the body. Numbers never
    change; see docs/metaq-1.4/broker.md 1.12.
    """

    status: ClassVar[int] = 0
    by_status: ClassVar[dict[int, type["WireError"]]] = {}

    def __init_subclass__(cls) -> None:
        """Register the class under its number, which only its subclasses may share."""
        taken = WireError.by_status.setdefault(cls.status, cls)
        if not issubclass(cls, taken):
            raise TypeError(f"status {cls.status} belongs to {taken.__name__}")


class MovedError(WireError):
    """301: read on at the offset in the body."""

    status = 301


class BadRequestError(WireError):
    """400: the request is invalid (a get with maxSize 0, for example)."""

    status = 400


class ForbiddenError(WireError):
    """403: the partition is administratively closed."""

    status = 403
    refresh_metadata = True


class NotFoundError(WireError):
    """404: no such partition on this broker, or no data at that offset."""

    status = 404


class ServerError(WireError):
    """500: the broker failed to do it; the body has the reason."""

    status = 500
    messages: tuple[int, ...] = ()
    """Numbers of the messages of a batch that caused the refusal, where known."""


class NoRoomError(ServerError):
    """500 to a put for lack of free space (code `no-room`).

    The message is not stored. A retry may succeed later, or on another broker.
    """

    retriable = True


class UnknownPutError(ServerError):
    """500 to a put during which the disk failed (code `in-doubt`).

    The message may be stored; a retry may store it twice.
    """


class SequenceUsedError(ServerError):
    """500 to a batch whose numbers its producer has used before (code `sequence-used`).

    It is not stored.
    """


class UnroutableError(ServerError):
    """500 to a message for an exchange that no binding matches (code `unroutable`).

    It is not stored.
    """


class NotAnExchangeError(ServerError):
    """500 to a message for an exchange that is not there (code `no-exchange`).

    It is not stored.
    """


class NoRecordError(ServerError):
    """500 to a question about a range that begins or ends inside a record.

    Its code is `no-record`.
    """


class DiskFailedError(ServerError):
    """500 of a MetaQ 1.4 broker whose disk failed: the put may still be stored."""


class UnavailableError(WireError):
    """503: no processor for this command, or the broker cannot answer at this moment.

    It is shutting down, or the log start has moved during a question. A client also
    raises this for the 500 of a MetaQ 1.4 broker that is not registered yet.
    """

    status = 503
    retriable = True


class NotLeaderError(UnavailableError):
    """503 to a put at a replica that does not lead its set (code `not-leader`).

    The message is not stored. Another replica leads, or soon will.
    """

    refresh_metadata = True


class TooFewReplicasError(UnavailableError):
    """503 to a put while fewer replicas than the minimum would have it.

    Its code is `too-few-replicas`. The message is not stored. A retry may succeed
    later, or on another broker.
    """


class NotDefinedError(UnavailableError):
    """503 to a worker of a queue group that this broker does not know yet.

    Its code is `not-defined`.
    """


# -- storage --------------------------------------------------------------------------


class StorageError(MetaqError):
    """Root of disk and damage errors."""


class DiskError(StorageError):
    """The operating system refused a file operation.

    A failed operation is never repeated: after a failed sync, the page cache does not
    show what is on the disk.
    """

    def __init__(self, operation: str, path: str, errno_name: str) -> None:
        super().__init__(f"{operation} failed: path={path} error={errno_name}")
        self.operation = operation
        """The failed operation, one word: "write", "sync", "rename" ..."""
        self.path = path
        self.errno_name = errno_name
        """The symbol of the error number: "EIO", "EROFS", "ENOENT" ..."""

    @property
    def lacks_descriptors(self) -> bool:
        """Whether an open failed for lack of file descriptors; a retry may succeed."""
        return self.operation == "open" and self.errno_name in {"EMFILE", "ENFILE"}


class MissingFileError(DiskError):
    """There is no such file or directory ("ENOENT")."""


class CorruptRecordError(StorageError):
    """Bytes contradict a checksum or an invariant, and a crash cannot explain it."""

    def __init__(
        self,
        message: str,
        *,
        partition: TopicPartition | None = None,
        offset: Offset | None = None,
        next_good_offset: Offset | None = None,
        path: str | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.partition = partition
        """The damaged partition, if a client found the damage."""
        self.offset = offset
        """Offset of the first damaged byte; None if unknown."""
        self.next_good_offset = next_good_offset
        """Offset where a reader can resume; None if unknown, or if there is none."""
        self.path = path
        """Path of the damaged file on the broker's disk, if known."""
        self.detail = detail
        """Description of the damage, with both numbers; complete without the
        message."""


class SegmentSealedError(StorageError):
    """An append to a sealed segment: a bug on our side."""


class MayBeStoredError(StorageError):
    """A log ended during an append: the record may be on the disk after a restart."""

    def __init__(self, cause: object) -> None:
        super().__init__(f"{cause}: {OUTCOME_UNKNOWN}")


class LogDirLockedError(StorageError):
    """Another process owns this data directory."""


class LogDirOfflineError(StorageError):
    """The data directory had a disk error; it is not trusted until restart."""


class DataMissingError(StorageError):
    """A data directory holds less data than was recorded for it."""


class LogOfflineError(StorageError):
    """One partition is stopped because of damage; the others go on."""


class NoSpaceError(StorageError):
    """The disk, or a configured size limit, has no room for this put."""

    retriable = True


class SequenceError(MetaqError):
    """A producer has already used the sequence numbers of a batch for another one."""


class OffsetOutOfRangeError(StorageError):
    """The offset is before the log start, or not below the high watermark."""

    def __init__(
        self, offset: Offset, *, log_start: Offset, high_watermark: Offset
    ) -> None:
        super().__init__(
            f"offset is out of range: expected {log_start} <= offset <"
            f" {high_watermark}, got {offset}"
        )
        self.offset = offset
        self.log_start = log_start
        """The first readable offset, if any byte is readable."""
        self.high_watermark = high_watermark
        """The offset after the last readable byte."""


# -- the rest -------------------------------------------------------------------------


class TransactionError(MetaqError):
    """A transaction's state does not allow the request."""


class CoordinationError(MetaqError):
    """Root of ZooKeeper errors."""

    retriable = True


class SessionSuspendedError(CoordinationError):
    """The session may return; assume nothing new until it does."""


class SessionLostError(CoordinationError):
    """The session is gone, and every ephemeral node with it."""


class OwnershipLostError(CoordinationError):
    """Another member owns the partition now."""

    retriable = False


class ClientError(MetaqError):
    """Root of errors raised by clients only."""


class RequestTimeoutError(ClientError):
    """No reply in time; the outcome is unknown."""

    retriable = True


class NoBrokerError(ClientError):
    """No broker serves the topic at the moment."""

    retriable = True
    refresh_metadata = True


class ConnectionLostError(RequestTimeoutError):
    """The connection broke before the reply came; the outcome is unknown."""


class NotSentError(ClientError):
    """No byte of the request was sent: nothing was done."""

    retriable = True
    refresh_metadata = True


class UnexpectedReplyError(ClientError):
    """A broker sent a reply that no MetaQ broker sends."""


class BadReplyError(UnexpectedReplyError, RemoteProtocolError):
    """A reply has an impossible number, or one that belongs to another request.

    The reply is discarded, and the connection is closed.
    """


class NoDataError(ClientError):
    """A broker returns no data at an offset that, by its own report, its log holds."""

    retriable = True


class NoResourcesError(ClientError):
    """The system refuses this process descriptors or a thread for an event loop."""

    retriable = True


class ClosedError(ClientError):
    """The object was closed by its owner."""


class ConfigError(MetaqError):
    """A setting or an argument is wrong; the message names it and its value."""


class FilterError(ConfigError):
    """A filter cannot be parsed; the message has the column and the expected text."""

    def __init__(self, column: int, expected: str, got: str) -> None:
        shown = printable(got)[:40]
        super().__init__(f"filter, column {column}: expected {expected}, got {shown}")
        self.column = column
        """Position in the text, in characters from 1."""


class AdminError(MetaqError):
    """An administrative request was refused; the message has the reason."""
