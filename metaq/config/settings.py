"""Settings of a broker: frozen values with their units in the field names.

`server.ini` keeps MetaQ's historical key names; this is where they gain units.
Every default is a named constant here, is repeated in the comments of
`config/server.ini`, and the two are kept in step by
`tests/house/test_config_documented.py`.

Source: broker spec 4.2 to 4.4, 2.9. `LimitsConfig` is ours: MetaQ has no limits.
"""

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from metaq.model import BrokerId

KIB: Final = 1024
MIB: Final = 1024 * KIB
SECOND_MS: Final = 1_000
MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * MINUTE_MS

# -- defaults of MetaQ ----------------------------------------------------------------

BROKER_ID: Final = BrokerId(0)
SERVER_PORT: Final = 8123
DASHBOARD_HTTP_PORT: Final = 8120
PARTITION_COUNT: Final = 1
UNFLUSH_THRESHOLD: Final = 0
"""Group commit; MetaQ's code says 1000, but the key is required in a file anyway."""
UNFLUSH_INTERVAL_MS: Final = 10_000
SEGMENT_BYTES_MAX: Final = 1024 * MIB
TRANSFER_BYTES_MAX: Final = MIB
DELETE_WHEN: Final = "0 0 6,18 * * ?"
DELETE_AGE_MS: Final = 168 * HOUR_MS
QUARTZ_THREAD_COUNT: Final = 5
CHECKPOINTS_MAX: Final = 3
CHECKPOINT_INTERVAL_MS: Final = HOUR_MS
TX_TIMER_CAPACITY: Final = 30_000
TX_TIMEOUT_S_MAX: Final = 60
FLUSH_TX_LOG_AT_COMMIT: Final = 1
ZK_CONNECT: Final = "localhost:2181"
ZK_SESSION_TIMEOUT_MS: Final = 30_000
ZK_CONNECTION_TIMEOUT_MS: Final = 30_000
ZK_SYNC_TIME_MS: Final = 5_000
ZK_ROOT: Final = "/meta"

# -- defaults of our own limits -------------------------------------------------------

LINE_BYTES_MAX: Final = 8 * KIB
"""The longest legal line (a transactional put) is a few hundred bytes."""
PAYLOAD_BYTES_MAX: Final = 16 * MIB
"""MetaQ's clients stop at 1 MiB by default; brokers were run with several."""
BATCH_BYTES_MAX: Final = 16 * MIB
BATCH_RECORDS_MAX: Final = 65_536
CONNECTION_COUNT_MAX: Final = 4_096
CONNECTION_COUNT_PER_HOST_MAX: Final = 0
CONNECTION_BUFFER_BYTES_MAX: Final = 8 * MIB
CONNECTION_IN_FLIGHT_BYTES_MAX: Final = 2 * MIB
"""Bytes that a put may find queued before it, put by another connection to the same
partition; the disk is kept busy with less."""
IN_FLIGHT_BYTES_MAX: Final = 256 * MIB
IDLE_TIMEOUT_MS: Final = 300_000
"""MetaQ's own connection threshold (broker spec 4.6)."""
WAIT_MS_MAX: Final = 30_000
WAITERS_MAX: Final = 10_000
LOG_BYTES_MAX: Final = 0
DATA_DIR_BYTES_MAX: Final = 0
FREE_BYTES_MIN: Final = 64 * MIB
PRODUCER_COUNT_MAX: Final = 1_024
SPAN_BYTES_MIN: Final = 16 * KIB
"""Fine enough to find a time or a boundary, coarse enough to recover 1 GiB quickly."""
SCRUB_BYTES_PER_S: Final = MIB
SHUTDOWN_TIMEOUT_MS: Final = 10_000
HTTP_PORT: Final = 0
HTTP_HOST: Final = "127.0.0.1"
SLOW_SYNC_MS: Final = 500
TX_COUNT_MAX: Final = 100_000
TX_BYTES_MAX: Final = 256 * MIB
TX_JOURNAL_BYTES_MAX: Final = 4 * 1024 * MIB
TX_JOURNAL_FILE_BYTES_MAX: Final = 4 * MIB
"""MetaQ has 64 MiB; what a start behind a crash reads is bounded by it."""
TX_IN_DOUBT_ALARM_MS: Final = 10 * MINUTE_MS


class DeleteKind(enum.Enum):
    """Fate of a segment that is old enough."""

    DELETE = "delete"
    """Remove the file."""
    ARCHIVE = "archive"
    """Keep the file beside the log, as `.arc` or compressed as `.zip`."""


@dataclass(frozen=True, slots=True)
class DeletePolicy:
    """A parsed `deletePolicy` (broker spec 2.9)."""

    kind: DeleteKind = DeleteKind.DELETE
    """Delete or archive."""
    age_ms: int = DELETE_AGE_MS
    """A sealed segment qualifies when it is strictly older, milliseconds, 0 or more."""
    is_compressed: bool = False
    """Archive into a `.zip`; never true for `delete`."""

    def __str__(self) -> str:
        """Return the text form, in the coarsest unit that is exact."""
        units = (("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS))
        age = next(
            f"{self.age_ms // length_ms}{unit}"
            for unit, length_ms in units
            if self.age_ms % length_ms == 0 or unit == "s"
        )
        text = f"{self.kind.value},{age}"
        return f"{text},true" if self.is_compressed else text


def default_data_path() -> str:
    """Return MetaQ's default data directory, `<home>/meta`."""
    return os.path.join(os.path.expanduser("~"), "meta")  # noqa: PTH111  # text only


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """`[system]`: one broker's settings; changes take effect at restart."""

    broker_id: BrokerId = BROKER_ID
    """Unique in the cluster, 0..1023."""
    host_name: str | None = None
    """Advertised host; None: detect one. The listener binds every interface."""
    server_port: int = SERVER_PORT
    """TCP port, 0..65535; 0 lets the system pick one."""
    dashboard_http_port: int = DASHBOARD_HTTP_PORT
    """MetaQ's dashboard; accepted, without effect (see `LimitsConfig.http_port`)."""
    partition_count: int = PARTITION_COUNT
    """Partitions of a topic that does not say otherwise, 1 or more."""
    data_path: str = field(default_factory=default_data_path)
    """Directory of the partition logs; its parent must exist."""
    data_log_path: str = ""
    """Root of the transaction journal, "" becomes `data_path`."""
    app_class_path: str | None = None
    """Directory of filter classes; accepted, without effect: none is run."""
    unflush_threshold: int = UNFLUSH_THRESHOLD
    """Records; 0 or less: group commit; n: sync after more than n unsynced puts."""
    unflush_interval_ms: int = UNFLUSH_INTERVAL_MS
    """Sync at least this often; 0 or less: no timer."""
    segment_bytes_max: int = SEGMENT_BYTES_MAX
    """Roll size, 1..2147483647."""
    transfer_bytes_max: int = TRANSFER_BYTES_MAX
    """Cap on the body of one get, 1..2147483647."""
    get_thread_count: int = 0
    """MetaQ's pool (0: 10 per CPU); accepted, without effect: there is no pool."""
    put_thread_count: int = 0
    """MetaQ's pool (0: 10 per CPU); accepted, without effect: there is no pool."""
    delete_policy: DeletePolicy = DeletePolicy()
    """Retention of topics that do not say otherwise."""
    delete_when: str = DELETE_WHEN
    """Quartz expression in local time; `broker.schedule` reads it."""
    quartz_thread_count: int = QUARTZ_THREAD_COUNT
    """MetaQ's pool; accepted, without effect: deletion runs in turn."""
    checkpoints_max: int = CHECKPOINTS_MAX
    """Transaction checkpoints kept, 1 or more."""
    checkpoint_interval_ms: int = CHECKPOINT_INTERVAL_MS
    """Between two transaction checkpoints, 1 or more."""
    tx_timer_capacity: int = TX_TIMER_CAPACITY
    """Transactions with a deadline at the same time, 1 or more."""
    tx_timeout_s_max: int = TX_TIMEOUT_S_MAX
    """Upper bound on the timeout that a client may ask for, seconds."""
    flush_tx_log_at_commit: int = FLUSH_TX_LOG_AT_COMMIT
    """1: sync every prepare, commit and rollback; 2: every second; 0: never."""
    accept_publish: bool = True
    """Topics take puts unless they say otherwise."""
    accept_subscribe: bool = True
    """Topics take gets unless they say otherwise."""
    stat: bool = False
    """Topics have realtime statistics unless they say otherwise."""
    update_consumer_offsets: bool = False
    """A get behind the end answers 301 with the end (row 7 of broker spec 1.5)."""
    load_stores_in_parallel: bool = False
    """Recover several partitions at once; accepted, without effect: all starts do."""

    def __post_init__(self) -> None:
        """Let the journal follow a configured data path."""
        if not self.data_log_path:
            object.__setattr__(self, "data_log_path", self.data_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperConfig:
    """`[zookeeper]`; changes take effect at restart."""

    connect: str = ZK_CONNECT
    """`host:port[,host:port...][/chroot]`."""
    session_timeout_ms: int = ZK_SESSION_TIMEOUT_MS
    """Session time-out: life of ephemeral nodes after a broken connection; 1 or
    more."""
    connection_timeout_ms: int = ZK_CONNECTION_TIMEOUT_MS
    """Time-out of a first connection; 1 or more."""
    sync_time_ms: int = ZK_SYNC_TIME_MS
    """Greatest lag of a follower; waits for peers to notice a change use it."""
    is_enabled: bool = True
    """False: no ZooKeeper at all, nothing is registered."""
    root: str = ZK_ROOT
    """Path under which every znode of the cluster lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """`[metaq]`: settings that MetaQ lacks; changes take effect at restart.

    The keys have a section of their own because a Java broker ignores sections that
    it does not know and refuses keys that it does not know.
    """

    line_bytes_max: int = LINE_BYTES_MAX
    """Longest command line, CRLF included."""
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """Largest payload of a message, put alone or in an mput."""
    batch_bytes_max: int = BATCH_BYTES_MAX
    """Largest body of one mput."""
    batch_records_max: int = BATCH_RECORDS_MAX
    """Most records in one mput."""
    connection_count_max: int = CONNECTION_COUNT_MAX
    """Connections of the whole broker."""
    connection_count_per_host_max: int = CONNECTION_COUNT_PER_HOST_MAX
    """Connections from one address; 0: no limit."""
    connection_buffer_bytes_max: int = CONNECTION_BUFFER_BYTES_MAX
    """Reply bytes queued for one connection before its commands wait."""
    connection_in_flight_bytes_max: int = CONNECTION_IN_FLIGHT_BYTES_MAX
    """Bytes of puts read from one connection and not yet answered; room for one."""
    in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX
    """Bytes of puts in flight, half frames and unread replies of all connections; room
    for the puts of one."""
    idle_timeout_ms: int = IDLE_TIMEOUT_MS
    """A connection silent for so long is closed; 0: never."""
    wait_ms_max: int = WAIT_MS_MAX
    """Longest long poll; a longer wish is cut to it."""
    waiters_max: int = WAITERS_MAX
    """Long polls held at the same time; one more is answered at once."""
    log_bytes_max: int = LOG_BYTES_MAX
    """Size of one partition above which sealed segments go; 0: no limit."""
    data_dir_bytes_max: int = DATA_DIR_BYTES_MAX
    """Size of one data directory above which sealed segments go; 0: no limit."""
    free_bytes_min: int = FREE_BYTES_MIN
    """Low-space watermark: with less free on the disk puts are refused; 0: off."""
    producer_count_max: int = PRODUCER_COUNT_MAX
    """Producers of one partition whose repeated batches are recognised."""
    span_bytes_min: int = SPAN_BYTES_MIN
    """A span of the side index covers at least this much."""
    scrub_bytes_per_s: int = SCRUB_BYTES_PER_S
    """Rate at which stored bytes are verified in the background; 0: off."""
    shutdown_timeout_ms: int = SHUTDOWN_TIMEOUT_MS
    """Bound on an orderly stop."""
    http_port: int = HTTP_PORT
    """Port of /health and /metrics; 0: off."""
    http_host: str = HTTP_HOST
    """Address that the HTTP port is bound to."""
    slow_sync_ms: int = SLOW_SYNC_MS
    """A sync slower than this is logged as a warning."""
    tx_count_max: int = TX_COUNT_MAX
    """Transactions that are not finished; one more is refused."""
    tx_bytes_max: int = TX_BYTES_MAX
    """Bytes that the puts of these hold in memory; a put that needs more is refused."""
    tx_journal_bytes_max: int = TX_JOURNAL_BYTES_MAX
    """Size of the transaction journal above which it takes no new puts."""
    tx_journal_file_bytes_max: int = TX_JOURNAL_FILE_BYTES_MAX
    """A file of the journal that has this size takes no new transactions."""
    tx_in_doubt_alarm_ms: int = TX_IN_DOUBT_ALARM_MS
    """A transaction that is prepared for longer raises an alarm; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """`[topic=NAME]`, or for a topic without a section the values of `[system]`."""

    name: str
    """Topic name; in a configured topic also a pattern (broker spec 2.2)."""
    partition_count: int = PARTITION_COUNT
    """Partitions 0 .. count-1 take puts; shrinking deletes nothing."""
    stat: bool = False
    """Keep realtime statistics."""
    delete_policy: DeletePolicy = DeletePolicy()
    """Retention by age."""
    delete_when: str = DELETE_WHEN
    """Quartz expression of its deletion job."""
    data_path: str = field(default_factory=default_data_path)
    """Directory of its partition logs; open logs stay where they are."""
    unflush_interval_ms: int = UNFLUSH_INTERVAL_MS
    """Sync at least this often; 0 or less: no timer."""
    unflush_threshold: int = UNFLUSH_THRESHOLD
    """Records; 0 or less: group commit. The mode of an open log does not change."""
    accept_publish: bool = True
    """Advertise it to producers."""
    accept_subscribe: bool = True
    """Advertise it to consumers."""
    filters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Consumer group → filter class (`group.<consumerGroup>=<class>`)."""

    @property
    def unflush_interval_s(self) -> float:
        """Return how old unsynced records may become, seconds, 0 or more."""
        return max(0, self.unflush_interval_ms) / 1000


def default_topic(name: str, system: SystemConfig) -> TopicConfig:
    """Return the settings of a topic that has no section of its own."""
    return TopicConfig(
        name=name,
        partition_count=system.partition_count,
        stat=system.stat,
        delete_policy=system.delete_policy,
        delete_when=system.delete_when,
        data_path=system.data_path,
        unflush_interval_ms=system.unflush_interval_ms,
        unflush_threshold=system.unflush_threshold,
        accept_publish=system.accept_publish,
        accept_subscribe=system.accept_subscribe,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """A whole configuration file, validated; replaced as a whole on reload."""

    path: str = ""
    """The file it came from, as it was named; "" when there is none."""
    data: bytes = b""
    """Reply to `stats config`: the bytes of the file, or a text of the settings in
    effect when there are overrides."""
    checksum: int = 0
    """Unsigned CRC-32 of `data`; other brokers watch it in ZooKeeper."""
    system: SystemConfig = field(default_factory=SystemConfig)
    """This broker."""
    zookeeper: ZooKeeperConfig = field(default_factory=ZooKeeperConfig)
    """ZooKeeper of the cluster."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """Bounds of everything that could grow."""
    topics: Mapping[str, TopicConfig] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Configured topics and patterns by section name, in the order of the file."""
    defined: Mapping[str, TopicConfig] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Topics that were made by command, by exact name; a section of that name wins."""
    ignored_sections: tuple[str, ...] = ()
    """Unknown sections, in order: legal (legacy), but worth a warning."""
    overrides: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Overrides of the file (`--set`), key → value; already applied above."""
    shadowed: tuple[str, ...] = ()
    """A sentence for each of these that a topic's own section keeps from its topic."""

    def topic(self, name: str) -> TopicConfig:
        """Return the settings of one topic.

        Args:
            name: a topic name, configured or not. Settings of a pattern section do
                not pass to the topics that it matches (broker spec 2.2).

        Returns:
            Its section, else its definition, else all defaults from `[system]`.
        """
        return (
            self.topics.get(name)
            or self.defined.get(name)
            or default_topic(name, self.system)
        )

    @property
    def topic_names(self) -> tuple[str, ...]:
        """Names of sections, in the order of the file, then of other defined topics."""
        return tuple(dict.fromkeys((*self.topics, *self.defined)))
