"""One value per command and reply, the same in both directions, and the reply codes.

Names follow the grammar table in the README beside this file. Numbers are plain ints
in the ranges of the wire (i32, or i64 for offsets, ids and sequences); the handlers
interpret them. In all of them `opaque` pairs a reply with its command, `topic` is any
text without space, CR and LF, `partition` is one on this broker (-1 in a put leaves the
choice to the broker), a checksum may be NO_CHECKSUM, and the flag is stored as sent.

Those that are made for each message of a worker are not frozen: that takes three times
as long, 1.0 µs in place of 0.4 for a `Take`. They are not changed all the same.
"""

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

from metaq.model import TransactionId
from metaq.protocol.decimals import I32_MAX, I64_MAX

OPAQUE_MISSING: Final = I32_MAX
"""Opaque of a `version` or `stats` that carries none."""

NO_CHECKSUM: Final = -1
"""The sender supplies no checksum; nothing is verified."""

NO_SEQUENCE: Final = -1
"""Sequence of a batch without a producer."""

OWN_TIMES: Final = -1
"""Time of a batch whose records have one each, in the place of their ids."""

NO_NEXT: Final = -1
"""A `value` that names no offset to go on at."""

NO_GROUP: Final = "metaq-browser"
"""Group of gets and questions that belong to none."""


class TransactionType(enum.Enum):
    """Kind of a transaction command; the value is the token."""

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
    """Stored as sent; bit 0 announces an attribute block."""
    checksum: int
    opaque: int
    transaction: TransactionId | None = None


@dataclass(frozen=True, slots=True)
class Mput:
    """Append many records to one partition, all or none (our extension)."""

    topic: str
    partition: int
    count: int
    """Records in the payload as announced, 0 or more."""
    checksum: int
    """Checksum of the whole payload as sent, or NO_CHECKSUM."""
    opaque: int
    payload: bytes
    """Records in segment format with id 0; the broker stamps the ids."""
    producer: str | None = None
    """1..64 of [A-Za-z0-9._~-], but not a single '-'; None for none."""
    sequence: int = NO_SEQUENCE
    """Number of the first record among this producer's records for this partition, 0
    or more; NO_SEQUENCE without a producer."""
    transaction: TransactionId | None = None
    """The transaction it belongs to, then without a producer; None appends at once."""
    deliver_ms: int | None = None
    """When it is to be in its partition, milliseconds since 1970, 0 or more; None: at
    once; OWN_TIMES: each record has its own, in the place of its id."""
    is_mandatory: bool | None = None
    """Whether an exchange refuses it when a message matches no binding; None: unless
    there is an alternate topic, and what it is put to need be no exchange."""


@dataclass(frozen=True, slots=True)
class Get:
    """Read bytes of the log from an offset on."""

    topic: str
    group: str
    partition: int
    """Partition on this broker; -1 has no meaning here."""
    offset: int
    max_size: int
    opaque: int
    wait_ms: int = 0
    """Milliseconds for which the broker may hold the reply when there is no data yet;
    0: none (our extension: the extra token `wait=`)."""
    where: str | None = None
    """Expression of a filter: only records that match are wanted; None: all (our
    extension: the extra token `where=`)."""


@dataclass(frozen=True, slots=True)
class TimeQuestion:
    """Ask where to begin to see all that is as new as a time (our extension)."""

    time_ms: int


@dataclass(frozen=True, slots=True)
class CountQuestion:
    """Ask how many records there are between two offsets (our extension)."""

    end: int
    """Offset after the last record, i64, 0 or more."""


@dataclass(frozen=True, slots=True)
class SplitQuestion:
    """Ask where a range can be divided into equal parts (our extension)."""

    end: int
    """Offset after the range, i64, 0 or more."""
    count_max: int
    """Most offsets wanted, the two ends among them, 0 or more."""


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
    """Metadata query about the log from `offset` on, instead of the nearest
    offset; None for none (our extension: the extra tokens `time=`, `count=` and
    `boundaries=`)."""


@dataclass(frozen=True, slots=True)
class Check:
    """Compare stored bytes with their checksums (our extension)."""

    topic: str
    partition: int
    offset: int
    """The first byte; need not be where a record starts."""
    size: int
    """Bytes from there on, less than 1 counts as 1; the broker may check fewer."""
    opaque: int


@dataclass(slots=True)
class Take:
    """Ask for messages of a queue group, each to be settled (our extension)."""

    topic: str
    group: str
    partition: int
    """Partition on this broker; -1: any one of it."""
    count: int
    """Most messages wanted; the broker may give fewer. 0: none, and the takes of this
    worker that wait end, so that what it gives back does not come to them."""
    max_size: int
    """Most bytes of records wanted; the first message may be larger."""
    opaque: int
    worker: str
    """Name of the worker that gets them; the same one over all its connections."""
    lease_ms: int = 0
    """Milliseconds for which they are the worker's; 0: as the group has it."""
    wait_ms: int = 0
    """Milliseconds for which the broker may hold the reply when there are none."""
    generation: int | None = None
    """Of the group: one that was deleted and made again is another; None: any."""


@dataclass(slots=True)
class Settle:
    """Say what became of deliveries of one partition (our extension)."""

    topic: str
    group: str
    partition: int
    count: int
    """Deliveries in the payload, 1 or more."""
    payload: bytes
    """See `queue_frames.py`."""
    opaque: int
    worker: str
    """Name of the worker that settles."""
    transaction: TransactionId | None = None
    """A local one of this connection, which the acks count with; None: at once."""
    generation: int | None = None
    """As in `Take`."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Take back one message whose time has not come (our extension)."""

    topic: str
    payload: bytes
    """Its receipt: `tier offset due id`, in decimal."""
    opaque: int


@dataclass(frozen=True, slots=True)
class Find:
    """Ask for the records with a key or header, newest first (our extension)."""

    topic: str
    partition: int
    payload: bytes
    """The key or header, as it is in the line of a record: `key=42`, `h.order-id=7`."""
    opaque: int
    limit: int
    """Most records, 1 or more."""
    below: int = I64_MAX
    """Records begin below this offset."""
    since_ms: int = 0
    """Records are stamped then or later, milliseconds since 1970."""
    until_ms: int = I64_MAX
    """Records are stamped then or before."""


@dataclass(frozen=True, slots=True)
class ListScheduled:
    """Ask what waits for its time (our extension)."""

    topic: str
    """One topic, or `*`."""
    limit: int
    """Most records named one by one, 0 or more."""
    opaque: int
    from_ms: int = 0
    """Of due times, milliseconds since 1970."""
    to_ms: int = I64_MAX
    """After the last one."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Ask for what came to a mailbox, which is opened by that (our extension)."""

    mailbox: str
    """32 hexadecimal digits that no one else knows."""
    opaque: int
    wait_ms: int = 0
    """Milliseconds for which the broker may hold the reply when there is nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Put one reply into a mailbox (our extension)."""

    mailbox: str
    correlation: int
    """Number of the request that it answers, 0 or more."""
    payload: bytes
    """Its kind and its data, for the requester alone."""
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


# Not frozen: two of them are made for each transaction, in a fifth of the time so.
@dataclass(slots=True)
class TransactionCommand:
    """Change the state of a transaction, or list the prepared ones."""

    transaction: TransactionId
    """Key of the transaction; the null id with RECOVER."""
    session_id: str
    type: TransactionType
    """Kind of the command. END is never answered."""
    opaque: int
    timeout_s: int = 0
    """With BEGIN: seconds until it is rolled back unless prepared; 0 is never."""
    qualifier: str | None = None
    """Unique qualifier of an XA transaction manager; None for none."""


@dataclass(frozen=True, slots=True)
class CommitTogether:
    """Commit several prepared XA transactions as one (our extension)."""

    session_id: str
    count: int
    opaque: int
    payload: bytes
    """Keys of the transactions, a CRLF after each."""


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
    """A message of one replica of a set to another (our extension)."""

    kind: str
    """Word of the message: see `replication/messages.py`."""
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
    """Everything else; the body has the reason."""
    UNAVAILABLE = 503
    """The command has no handler, the broker is shutting down, or it cannot answer it
    now."""


@dataclass(slots=True)
class Result:
    """A reply with a status and a text."""

    status: int
    """Numeric code; `Status` has those of MetaQ, a peer may send others."""
    body: bytes
    """UTF-8 text; empty for none."""
    opaque: int

    @property
    def text(self) -> str:
        """Return the body as text; bytes that are no UTF-8 become U+FFFD."""
        return self.body.decode(errors="replace")


@dataclass(slots=True)
class Value:
    """A reply with bytes of the log."""

    payload: bytes
    """Records; the first and last may be cut anywhere. Of a `take`, see
    `queue_frames.py`; of a `find`, or a `get` with a filter and a next offset: runs
    (`record/runs.py`)."""
    opaque: int
    next_offset: int = NO_NEXT
    """Offset to go on at, where the payload is no single range of the log; NO_NEXT:
    right after it. Of a `find` it is the one to go on below."""
    read_bytes: int = 0
    """Of a `find`: bytes of the log that were looked through without an index."""


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
