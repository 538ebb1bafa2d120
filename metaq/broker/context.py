"""The parts of a broker that handlers use, and its counters."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from metaq.broker.load import Load, PacedWork, Turns
from metaq.broker.mailboxes import Mailboxes
from metaq.broker.realtime import Realtime
from metaq.broker.topics import Topics
from metaq.broker.waiters import Waiters
from metaq.clock import Clock
from metaq.config.settings import BrokerConfig
from metaq.errors import MetaqError, WireError
from metaq.fs import FileSystem
from metaq.protocol.commands import Cancel, Follow, ListScheduled, Settle, Take
from metaq.record.ids import IdGenerator
from metaq.stats import Histogram, counter
from metaq.storage.key_builder import KeyBuilder
from metaq.storage.key_index import BlockLists
from metaq.storage.span_lookup import MadeIndexes
from metaq.txn.coordinator import TransactionCoordinator
from metaq.zk.group_definitions import QueueGroupDefinition

ROUTED: Final = ("routed", "alternate", "dropped", "unroutable")
"""Outcomes of a message at an exchange: it matched a binding, or none."""


def _commands(word: str) -> Any:
    return counter(
        "metaq_commands_total",
        "Commands of clients; each message of a batch counts as a put.",
        labels=("command",),
        read=lambda count: {word: count},
    )


@dataclass(slots=True)
class CommandStatistics:
    """Counts of client requests since the start. Snapshots are copies."""

    cmd_put: int = _commands("put")
    """Includes failed puts."""
    cmd_get: int = _commands("get")
    cmd_offset: int = _commands("offset")
    """Offset queries, and gets that were answered with an offset."""
    rejections: Counter[str] = counter(
        "metaq_rejections_total",
        "Commands that were refused, by cause.",
        labels=("cause",),
        read=lambda causes: dict(sorted(causes.items())),
        default=Counter,
    )
    """One per message for puts; causes are a fixed set of lower-case words."""
    put_failed: int = counter(
        "metaq_put_failures_total", "Puts answered with an error, one per message."
    )
    get_failed: int = counter(
        "metaq_get_failures_total",
        "Gets answered with an error or with another offset.",
    )
    get_miss: int = counter("metaq_get_misses_total", "Gets that found no data.")
    batch_repeated: int = counter(
        "metaq_repeated_batches_total",
        "Batches that a producer sent again; they were not stored again.",
    )
    routed: Counter[str] = counter(
        "metaq_routed_messages_total",
        "Messages that came to an exchange, by what it found for them.",
        labels=("outcome",),
        read=lambda outcomes: {word: outcomes[word] for word in ROUTED},
        default=Counter,
    )
    wait_count: int = counter("metaq_waits_total", "Gets that waited for data.")
    filtered: int = counter(
        "metaq_filtered_gets_total", "Gets that were answered with what matches."
    )
    filter_plain: int = counter(
        "metaq_filter_plain_gets_total",
        "Gets with a filter that were answered without it: at damage, at a message"
        " larger than the get, because there were too many, or because it was the first"
        " one and the parser was not loaded yet.",
    )
    filter_scanned_bytes: int = counter(
        "metaq_filter_scanned_bytes_total", "Bytes that filters of gets looked at."
    )
    malformed_count: int = counter(
        "metaq_malformed_commands_total",
        "Connections closed because of a malformed command.",
    )
    error_count: int = counter(
        "metaq_command_errors_total",
        "Commands that failed unexpectedly; the log has a traceback for each.",
    )

    def copy(self) -> "CommandStatistics":
        """Return an independent snapshot."""
        return replace(
            self, rejections=Counter(self.rejections), routed=Counter(self.routed)
        )


class SetMember(Protocol):
    """Replica interface used by handlers."""

    @property
    def is_leading(self) -> bool:
        """Return whether it is the leader of its set."""

    @property
    def knows_ends(self) -> bool:
        """Return whether it is certainly the leader: its log ends are the set's."""

    @property
    def is_registered(self) -> bool:
        """Return whether clients can find it: it leads and is registered."""

    @property
    def epoch(self) -> int:
        """Return the leader epoch of its term; 0 while it does not lead."""

    def facts(self) -> str:
        """Return the line of `stats replica`."""

    def handle(
        self,
        command: Follow,
        owner: object,
        answer: Callable[[bytes | WireError], None],
    ) -> None:
        """Answer a `follow` exactly once, now or later."""

    def drop(self, owner: object) -> None:
        """Drop the unanswered requests of a connection that ends."""

    async def bury(self, topic: str) -> None:
        """Record durably, for the whole set, that the logs of a topic are deleted.

        Raises:
            StorageError: a data directory is offline.
            ClosedError: the replica is closed.
        """


class QueueGroups(Protocol):
    """Queue groups interface used by handlers; `answerer` is the session."""

    def take(self, command: Take, answerer: Any) -> None:
        """Answer a `take`, now or later; raises WireError."""

    def settle(self, command: Settle, answerer: Any) -> None:
        """Answer a `settle`, now or later; raises WireError."""

    def drop(self, answerer: Any) -> None:
        """Forget a connection that has ended."""

    def drop_topic(self, topic: str) -> None:
        """Forget the queues of a topic that was deleted."""

    def set_leading(self, *, is_leading: bool) -> None:
        """Begin to serve, or stop at once: the replica leads its set, or no more."""

    def apply_groups(
        self,
        definitions: Mapping[str, QueueGroupDefinition],
        unread: Mapping[str, str],
    ) -> None:
        """Put definitions in effect."""

    def problems(self) -> tuple[str, ...]:
        """Return one sentence for each thing that needs an operator's attention."""

    async def skip_damage(
        self, topic: str, group: str, partition: int, agreed: tuple[int, int] | None
    ) -> dict[str, object]:
        """Show the damage that a queue is at, or pass over it; raises MetaqError."""

    def require_read(self) -> None:
        """Raise UnavailableError where `lines` would lack queues."""

    def lines(self) -> list[str]:
        """Return the lines of `stats queues`."""

    def status(self) -> tuple[Any, ...]:
        """Return a `QueueGroupStatus` of each group."""


class DelayedMessages(Protocol):
    """Delayed messages interface used by handlers; `answerer` is the session."""

    @property
    def tiers(self) -> Sequence[Any]:
        """Return each `DelayTier`, in order."""

    def now_ms(self) -> int:
        """Return the time that due times are compared with."""

    def wake(self) -> None:
        """Look for what is due: something was scheduled, or will be by a commit."""

    def cancel(self, command: Cancel, answerer: Any) -> None:
        """Answer a `cancel`, later; raises WireError."""

    def show(self, command: ListScheduled, answerer: Any) -> None:
        """Answer a `scheduled`, later; raises WireError."""

    def drop_topic(
        self, topic: str, on_done: Callable[[MetaqError | None], None]
    ) -> None:
        """Forget what waits for a topic that was deleted, durably."""

    def status(self) -> Any:
        """Return a `DelayStatus`."""


@dataclass(slots=True)
class BrokerContext:
    """The parts of one broker. Owned by the app; used on the loop's thread."""

    config: BrokerConfig
    """Replaced as a whole on reload."""
    clock: Clock
    """Wall clock for ids and dates, monotonic for waits."""
    topics: Topics
    transactions: TransactionCoordinator
    ids: IdGenerator
    realtime: Realtime
    waiters: Waiters
    fs: FileSystem
    """File system for the work of `upkeep`."""
    upkeep: Executor
    """Threads for long work; not owned."""
    address: str
    """Advertised address, `meta://host:port`; part of error texts."""
    load: Load
    turns: Turns
    """Queue of work that takes more than one turn of the loop."""
    filter_work: PacedWork
    """Evaluates the filters of gets."""
    port: int
    started_s: float
    replica: SetMember | None = None
    """Its replica in a set; None: the broker is the only copy."""
    queues: QueueGroups | None = None
    """Its queue groups; None: not served (yet)."""
    delays: DelayedMessages | None = None
    """Its delayed messages; None: delays are not supported."""
    mailboxes: Mailboxes = field(default_factory=Mailboxes)
    counters: CommandStatistics = field(default_factory=CommandStatistics)
    put_latency: Histogram = field(default_factory=Histogram)
    """Seconds from append to acknowledgement, per message."""
    made_indexes: MadeIndexes = field(default_factory=MadeIndexes)
    """Cached indexes of segments without an index file, for metadata queries."""
    connection_count: int = 0
    filtered_count: int = 0
    """Number of gets with a filter in progress."""
    filter_parser_asked: bool = False
    """Whether loading the parser of filters has begun."""
    filter_look_bytes: int = 256 * 1024
    """Minimum range for which a filter uses an index; scanning less is as fast."""
    filter_hold_s: float = 0.1
    """Minimum wait of a long-polling get when nothing matches, in seconds; limits it to
    ten answers a second on a busy topic with few matches."""
    key_builder: KeyBuilder = field(default_factory=lambda: KeyBuilder(0))
    """Builds the indexes of keys."""
    key_lists: BlockLists = field(default_factory=BlockLists)
    """Cached block lists of the index files that look-ups have read."""
    find_count: int = 0
    """Number of unanswered look-ups."""
    finds: list[Any] = field(default_factory=list)
    """Look-ups received in this turn of the loop (`handlers/find.py`)."""
    check_count: int = 0
    """Number of unanswered checks of stored bytes."""
