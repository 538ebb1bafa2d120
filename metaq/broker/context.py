"""What handlers work with: the parts of one broker, and its counters."""

from collections import Counter
from concurrent.futures import Executor
from dataclasses import dataclass, field

from metaq.broker.load import Load, Turns
from metaq.broker.realtime import Realtime
from metaq.broker.topics import Topics
from metaq.broker.waiters import Waiters
from metaq.clock import Clock
from metaq.config import BrokerConfig
from metaq.fs import FileSystem
from metaq.record.ids import IdGenerator
from metaq.stats import Histogram
from metaq.storage.span_lookup import MadeIndexes


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
    """Bytes that connections hold."""
    turns: Turns
    """Work that takes more than one turn of the loop."""
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
