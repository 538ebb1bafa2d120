"""One value class per command and reply, for both directions, and the reply codes.

Names follow the grammar table in the README of this directory. Numbers are plain ints
in the ranges of the wire (i32, or i64 for offsets, ids and sequences); the handlers
interpret them. In all of them, `opaque` pairs a reply with its command, `topic` is any
text without space, CR and LF, and `partition` is one on this broker (-1 in a put: the
broker chooses). A checksum may be NO_CHECKSUM, and the flag is stored as sent.

Values that are made for each message of a worker are not frozen, because creating a
frozen one takes almost three times as long: 1.0 µs instead of 0.4 for a `Take`. Do not
modify them.
"""

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

from metaq.model import TransactionId
from metaq.protocol.decimals import I32_MAX, I64_MAX

OPAQUE_MISSING: Final = I32_MAX
"""Opaque of a `version` or `stats` that was sent without one."""

NO_CHECKSUM: Final = -1
"""The sender sends no checksum; nothing is verified."""

NO_SEQUENCE: Final = -1
"""Sequence of a batch without a producer."""

OWN_TIMES: Final = -1
"""Delivery time of a batch whose records each have their own, in their id fields."""

NO_NEXT: Final = -1
"""Next offset of a `value` that names none."""

NO_GROUP: Final = "metaq-browser"
"""Group of gets and questions without a consumer group."""


class TransactionType(enum.Enum):
    """Kind of a transaction command; the value is its token on the wire."""

    BEGIN = "BEGIN"
    PREPARE = "PREPARE"
    COMMIT_ONE_PHASE = "COMMIT_ONE_PHASE"
    COMMIT_TWO_PHASE = "COMMIT_TWO_PHASE"
    ROLLBACK = "ROLLBACK"
    RECOVER = "RECOVER"
    FORGET = "FORGET"
    END = "END"


@dataclass(frozen=True, slots=True)
class Put:
    """Append one message."""

    topic: str
    partition: int
    payload: bytes
    flag: int
    """Stored as sent; bit 0: the payload starts with an attribute block."""
    checksum: int
    opaque: int
    transaction: TransactionId | None = None


@dataclass(frozen=True, slots=True)
class Mput:
    """Append many records to one partition, all or none (our extension)."""

    topic: str
    partition: int
    count: int
    """Number of records announced for the payload, 0 or more."""
    checksum: int
    """Checksum of the whole payload as sent, or NO_CHECKSUM."""
    opaque: int
    payload: bytes
    """Records in segment format with id 0; the broker stamps the ids."""
    producer: str | None = None
    """Name of the producer, 1..64 of [A-Za-z0-9._~-], but not a single '-'; or None."""
    sequence: int = NO_SEQUENCE
    """Number of the first record among this producer's records for this partition, 0 or
    more; NO_SEQUENCE without a producer."""
    transaction: TransactionId | None = None
    """Transaction of the batch, which then has no producer; None: append at once."""
    deliver_ms: int | None = None
    """Time to deliver it, milliseconds since 1970, 0 or more; None: at once; OWN_TIMES:
    each record has its own time, in its id field."""
    is_mandatory: bool | None = None
    """Handling of messages that match no binding of the exchange. True: refuse the
    batch. False: use the alternate topic, or else drop them (but refuse a batch with a
    time). None: use the alternate topic, or else refuse; the target may be a topic."""


@dataclass(frozen=True, slots=True)
class Get:
    """Read bytes of the log from an offset."""

    topic: str
    group: str
    partition: int
    """Partition on this broker; -1 is not valid."""
    offset: int
    max_size: int
    opaque: int
    wait_ms: int = 0
    """Longest wait of the broker for data, in milliseconds; 0: none (our extension: the
    extra token `wait=`)."""
    where: str | None = None
    """Filter expression: only matching records are wanted; None: all (our extension:
    the extra token `where=`)."""


@dataclass(frozen=True, slots=True)
class TimeQuestion:
    """Ask for the offset to begin at to see all as new as a time (our extension)."""

    time_ms: int


@dataclass(frozen=True, slots=True)
class CountQuestion:
    """Ask for the number of records between two offsets (our extension)."""

    end: int
    """Offset after the last record, i64, 0 or more."""


@dataclass(frozen=True, slots=True)
class SplitQuestion:
    """Ask for offsets that divide a range into equal parts (our extension)."""

    end: int
    """Offset after the range, i64, 0 or more."""
    count_max: int
    """Maximum number of offsets, both ends included; 0 or more."""


Question: TypeAlias = TimeQuestion | CountQuestion | SplitQuestion


@dataclass(frozen=True, slots=True)
class OffsetQuery:
    """Ask for the nearest offset at which reading can start."""

    topic: str
    group: str
    partition: int
    offset: int
    opaque: int
    question: Question | None = None
    """Question about the log from `offset` on, instead of the nearest offset; None: no
    question (our extension: the extra tokens `time=`, `count=` and `boundaries=`)."""


@dataclass(frozen=True, slots=True)
class Check:
    """Compare stored bytes with their checksums (our extension)."""

    topic: str
    partition: int
    offset: int
    """Offset of the first byte; need not be the start of a record."""
    size: int
    """Number of bytes; less than 1 counts as 1; the broker may check fewer."""
    opaque: int


@dataclass(slots=True)
class Take:
    """Ask for messages of a queue group, each to be settled (our extension)."""

    topic: str
    group: str
    partition: int
    """Partition on this broker; -1: any of them."""
    count: int
    """Maximum number of messages; the broker may give fewer. 0: none, and waiting takes
    of this worker end, so that they do not get the messages that it gives back."""
    max_size: int
    """Maximum size of the records, in bytes; the first message may be larger."""
    opaque: int
    worker: str
    """Name of the worker that gets them, the same on all its connections."""
    lease_ms: int = 0
    """Lease of the messages, in milliseconds; 0: that of the group."""
    wait_ms: int = 0
    """Longest wait of the broker for messages, in milliseconds; 0: none."""
    generation: int | None = None
    """Generation of the group, new each time that it is made again; None: any."""


@dataclass(slots=True)
class Settle:
    """Settle deliveries of one partition (our extension)."""

    topic: str
    group: str
    partition: int
    count: int
    """Number of deliveries in the payload, 1 or more."""
    payload: bytes
    """See `queue_frames.py`."""
    opaque: int
    worker: str
    """Name of the worker that settles."""
    transaction: TransactionId | None = None
    """Local transaction of this connection that the acks are part of; None: at once."""
    generation: int | None = None
    """As in `Take`."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel one scheduled message (our extension)."""

    topic: str
    payload: bytes
    """Receipt of the message: `tier offset due id`, in decimal."""
    opaque: int


@dataclass(frozen=True, slots=True)
class Find:
    """Ask for the records with a key or header, newest first (our extension)."""

    topic: str
    partition: int
    payload: bytes
    """The key or header, as in the line of a record: `key=42`, `h.order-id=7`."""
    opaque: int
    limit: int
    """Maximum number of records, 1 or more."""
    below: int = I64_MAX
    """Only records that begin below this offset."""
    since_ms: int = 0
    """Only records stamped at or after this time, milliseconds since 1970."""
    until_ms: int = I64_MAX
    """Only records stamped at or before this time, milliseconds since 1970."""
    others: tuple[int, ...] = ()
    """More partitions; the reply then consists of pages (`find_pages.py`)."""


@dataclass(frozen=True, slots=True)
class ListScheduled:
    """Ask for the scheduled messages that are not due yet (our extension)."""

    topic: str
    """Name of one topic, or `*` for all."""
    limit: int
    """Maximum number of records listed one by one, 0 or more."""
    opaque: int
    from_ms: int = 0
    """First due time, milliseconds since 1970."""
    to_ms: int = I64_MAX
    """End of the due times, exclusive, milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Ask for the messages of a mailbox, and open it if needed (our extension)."""

    mailbox: str
    """32 hexadecimal digits that only its owner and those it asks know."""
    opaque: int
    wait_ms: int = 0
    """Longest wait of the broker for messages, in milliseconds; 0: none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Put one reply into a mailbox (our extension)."""

    mailbox: str
    correlation: int
    """Number of the request that it replies to, 0 or more."""
    payload: bytes
    """Kind and data of the reply, interpreted by the requester alone."""
    opaque: int


@dataclass(frozen=True, slots=True)
class Version:
    """Ask for the server's version; also the heartbeat."""

    opaque: int = OPAQUE_MISSING


@dataclass(frozen=True, slots=True)
class Stats:
    """Ask for statistics."""

    item: str = ""
    """Item to report; "" is the broker itself."""
    opaque: int = OPAQUE_MISSING


@dataclass(frozen=True, slots=True)
class Quit:
    """Close the connection; there is no reply."""


# Not frozen: two are made for each transaction; this takes a fifth of the time.
@dataclass(slots=True)
class TransactionCommand:
    """Change the state of a transaction, or list the prepared ones."""

    transaction: TransactionId
    """Key of the transaction; the null id for RECOVER."""
    session_id: str
    type: TransactionType
    """Kind of the command. END gets no reply."""
    opaque: int
    timeout_s: int = 0
    """For BEGIN: seconds until it is rolled back unless prepared; 0: never."""
    qualifier: str | None = None
    """Unique qualifier of an XA transaction manager; None for none."""


@dataclass(frozen=True, slots=True)
class CommitTogether:
    """Commit several prepared XA transactions as one (our extension)."""

    session_id: str
    count: int
    opaque: int
    payload: bytes
    """Keys of the transactions, each followed by CRLF."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Append one message with the id that another broker gave it (replication)."""

    topic: str
    partition: int
    payload: bytes
    flag: int
    message_id: int
    checksum: int
    opaque: int


@dataclass(frozen=True, slots=True)
class Follow:
    """A message from one replica of a set to another (our extension)."""

    kind: str
    """Word that names the message: see `replication/messages.py`."""
    payload: bytes
    opaque: int


class Status(enum.IntEnum):
    """Reply codes that MetaQ 1.4 sends (docs/metaq-1.4/broker.md 1.12)."""

    OK = 200
    MOVED = 301
    """Read on at the decimal offset in the body."""
    BAD_REQUEST = 400
    """A get with a maximum size of 0 or less."""
    FORBIDDEN = 403
    """The partition is administratively closed."""
    NOT_FOUND = 404
    """No such partition on this broker, or no data at that offset."""
    SERVER_ERROR = 500
    """Any other failure; the body has the reason."""
    UNAVAILABLE = 503
    """No handler for the command, the broker is shutting down, or cannot reply now."""


@dataclass(slots=True)
class Result:
    """A reply with a status and a text."""

    status: int
    """Status number; `Status` has those of MetaQ, a peer may send others."""
    body: bytes
    """UTF-8 text; empty for none."""
    opaque: int

    @property
    def text(self) -> str:
        """Return the body as text; bytes that are not UTF-8 become U+FFFD."""
        return self.body.decode(errors="replace")


@dataclass(slots=True)
class Value:
    """A reply with bytes of the log."""

    payload: bytes
    """Records of a `get`; the first and last may be cut anywhere. Of a `take`: see
    `queue_frames.py`. Of a `find`, or a `get` with a filter and a next offset: runs
    (`record/runs.py`)."""
    opaque: int
    next_offset: int = NO_NEXT
    """Offset to continue at if the payload is not one range of the log; NO_NEXT: right
    after the payload. Of a `find`: continue below this offset."""
    read_bytes: int = 0
    """Of a `find`: number of bytes of the log that were searched without an index."""


Command: TypeAlias = (
    Put
    | Mput
    | Get
    | OffsetQuery
    | Check
    | Take
    | Settle
    | Cancel
    | Find
    | ListScheduled
    | Listen
    | Answer
    | Version
    | Stats
    | Quit
    | TransactionCommand
    | CommitTogether
    | Sync
    | Follow
)
Reply: TypeAlias = Result | Value
