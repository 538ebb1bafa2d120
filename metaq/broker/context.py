"""What handlers work with: the parts of one broker, and its counters."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from metaq.broker.realtime import Realtime
from metaq.broker.topics import Topics
from metaq.broker.waiters import Waiters
from metaq.clock import Clock
from metaq.config import BrokerConfig
from metaq.fs import FileSystem
from metaq.record.ids import IdGenerator
from metaq.stats import Histogram
from metaq.storage.made_indexes import MadeIndexes


@dataclass(slots=True)
class Counters:
    """What a broker counts from its start on; only ever grows."""

    cmd_put: int = 0
    """Puts attempted, one per message."""
    cmd_get: int = 0
    """Gets."""
    cmd_offset: int = 0
    """Offset queries, and gets that were answered with an offset."""
    get_miss: int = 0
    """Gets that found no data."""
    get_failed: int = 0
    """Gets that were answered with an error or an offset."""
    put_failed: int = 0
    """Puts answered with 500, one per message."""
    wait_count: int = 0
    """Gets that waited for data."""
    malformed_count: int = 0
    """Connections closed because of a malformed frame."""
    error_count: int = 0
    """Commands that ended in an error nobody expected; each has a traceback."""
    batch_repeated: int = 0
    """Batches that were sent again, and answered without being stored again."""
    rejections: Counter[str] = field(default_factory=Counter)
    """Puts that were refused, one per message, by cause: a fixed set of words."""


class Load:
    """Bytes of puts that were read and not yet answered, whole broker.

    Sessions that find it full stop reading and are called when there is room again.
    """

    def __init__(self, in_flight_bytes_max: int) -> None:
        self._max = in_flight_bytes_max
        self.in_flight_bytes = 0
        """Held now."""
        self.partial_bytes = 0
        """Bytes of frames that have not arrived in whole, on all connections."""
        self._sleepers: list[Callable[[], None]] = []

    @property
    def is_full(self) -> bool:
        """Tell whether sessions must stop reading."""
        return self.in_flight_bytes >= self._max

    @property
    def has_too_many_parts(self) -> bool:
        """Tell whether half-received frames hold more than the bound.

        They cannot wait for room as commands do: only their own rest frees it, so the
        connection that goes over the bound has to go.
        """
        return self.partial_bytes > self._max

    def hold(self, size_bytes: int) -> None:
        """Count bytes as in flight."""
        self.in_flight_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Count bytes as answered; wake sleepers when there is room."""
        self.in_flight_bytes -= size_bytes
        if self._sleepers and not self.is_full:
            sleepers, self._sleepers = self._sleepers, []
            for wake in sleepers:
                wake()

    def call_when_room(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, when bytes were answered and there is room."""
        self._sleepers.append(wake)


@dataclass(slots=True)
class BrokerContext:
    """The parts of one broker. Owner: the app; used on the loop's thread."""

    config: BrokerConfig
    """Replaced as a whole on reload."""
    clock: Clock
    """Wall clock for ids and dates, monotonic for waits."""
    topics: Topics
    """Which topics and partitions exist, and their logs."""
    ids: IdGenerator
    """Message ids."""
    realtime: Realtime
    """Realtime statistics."""
    waiters: Waiters
    """Gets that wait for data."""
    fs: FileSystem
    """The disk, for what `upkeep` does."""
    upkeep: Executor
    """Threads for what may take long; not owned."""
    address: str
    """Advertised address, `meta://host:port`; part of error texts."""
    load: Load
    """Bytes in flight."""
    port: int
    """Port that the broker listens on."""
    started_s: float
    """Monotonic time of the start."""
    counters: Counters = field(default_factory=Counters)
    """Counters of commands."""
    put_latency: Histogram = field(default_factory=Histogram)
    """Seconds from append to acknowledgement, per message."""
    made_indexes: MadeIndexes = field(default_factory=MadeIndexes)
    """What questions about segments without an index have found."""
    connection_count: int = 0
    """Connections that are open."""
