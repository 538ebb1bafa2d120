"""Settings of a broker: frozen values with their units in the field names.

`server.ini` keeps MetaQ's historical key names; this is where they gain units. The
default of each field is repeated in the comments of `config/server.ini`, and
`tests/house/test_config_documented.py` compares the two.

Source: docs/metaq-1.4/broker.md 4.2 to 4.4, 2.9. `LimitsConfig` is ours: MetaQ has no
limits.
"""

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

from metaq.model import BrokerId, is_internal, no_items

KIB: Final = 1024
MIB: Final = 1024 * KIB
SECOND_MS: Final = 1_000
MINUTE_MS: Final = 60 * SECOND_MS
HOUR_MS: Final = 60 * MINUTE_MS

# Defaults that are used more than once; the others are beside their fields.

BROKER_ID: Final = BrokerId(0)
ZK_ROOT: Final = "/meta"
SPAN_BYTES_MIN: Final = 16 * KIB
"""Fine enough to find a time or a boundary, coarse enough to recover 1 GiB quickly."""


class DeleteKind(enum.Enum):
    """Fate of a segment that is old enough."""

    DELETE = "delete"
    """Remove the file."""
    ARCHIVE = "archive"
    """Keep the file beside the log, as `.arc` or compressed as `.zip`."""


@dataclass(frozen=True, slots=True)
class DeletePolicy:
    """A parsed `deletePolicy` (docs/metaq-1.4/broker.md 2.9)."""

    kind: DeleteKind = DeleteKind.DELETE
    age_ms: int = 168 * HOUR_MS
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
class TopicSettings:
    """Settings of a topic; where its own section says nothing, those of `[system]`."""

    partition_count: int = 1
    """Partitions 0 .. count-1 take puts; shrinking deletes nothing."""
    stat: bool = False
    delete_policy: DeletePolicy = DeletePolicy()
    delete_when: str = "0 0 6,18 * * ?"
    """Quartz expression of its deletion job, local time; `broker.schedule` reads it."""
    data_path: str = field(default_factory=default_data_path)
    """Directory of its partition logs, whose parent must exist; open logs stay where
    they are."""
    # MetaQ's code says 1000, but the key is required in a file anyway.
    unflush_threshold: int = 0
    """Records; 0 or less: group commit; n: sync after more than n unsynced puts. The
    mode of an open log does not change."""
    unflush_interval_ms: int = 10_000
    """Sync at least this often; 0 or less: no timer."""
    accept_publish: bool = True
    """Advertise it to producers."""
    accept_subscribe: bool = True
    """Advertise it to consumers."""

    @property
    def unflush_interval_s(self) -> float:
        """Return how old unsynced records may become, seconds, 0 or more."""
        return max(0, self.unflush_interval_ms) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig(TopicSettings):
    """`[system]`: one broker's settings; changes take effect at restart."""

    broker_id: BrokerId = BROKER_ID
    host_name: str | None = None
    """Advertised host; None: detect one. The listener binds every interface."""
    server_port: int = 8123
    """TCP port, 0..65535; 0 lets the system pick one."""
    dashboard_http_port: int = 8120
    """MetaQ's dashboard; accepted, without effect (see `LimitsConfig.http_port`)."""
    data_log_path: str = ""
    """Root of the transaction journal, "" becomes `data_path`."""
    app_class_path: str | None = None
    """Directory of filter classes; accepted, without effect: none is run."""
    segment_bytes_max: int = 1024 * MIB
    """Roll size, 1..2147483647."""
    transfer_bytes_max: int = MIB
    """Cap on the body of one get, 1..2147483647."""
    get_thread_count: int = 0
    """MetaQ's pool (0: 10 per CPU); accepted, without effect: there is no pool."""
    put_thread_count: int = 0
    """MetaQ's pool (0: 10 per CPU); accepted, without effect: there is no pool."""
    quartz_thread_count: int = 5
    """MetaQ's pool; accepted, without effect: deletion runs in turn."""
    checkpoints_max: int = 3
    checkpoint_interval_ms: int = HOUR_MS
    tx_timer_capacity: int = 30_000
    """Transactions with a deadline at the same time, 1 or more."""
    tx_timeout_s_max: int = 60
    """Upper bound on the timeout that a client may ask for, seconds."""
    flush_tx_log_at_commit: int = 1
    """1: sync every prepare, commit and rollback; 2: every second; 0: never."""
    update_consumer_offsets: bool = False
    """A get after the end answers 301 with the end (row 7 of docs/metaq-1.4/broker.md
    1.5)."""
    load_stores_in_parallel: bool = False
    """Recover several partitions at once; accepted, without effect: all starts do."""

    def __post_init__(self) -> None:
        """Let the journal follow a configured data path."""
        if not self.data_log_path:
            object.__setattr__(self, "data_log_path", self.data_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperConfig:
    """`[zookeeper]`; changes take effect at restart."""

    connect: str = "localhost:2181"
    """`host:port[,host:port...][/chroot]`."""
    session_timeout_ms: int = 30_000
    """Life of ephemeral nodes after a broken connection; 1 or more."""
    connection_timeout_ms: int = 30_000
    sync_time_ms: int = 5_000
    """Greatest lag of a follower; waits for peers to notice a change use it."""
    is_enabled: bool = True
    """False: no ZooKeeper at all, nothing is registered."""
    root: str = ZK_ROOT
    """Path of the parent of all nodes of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """`[metaq]`: settings that MetaQ lacks; changes take effect at restart.

    The keys have a section of their own because a Java broker ignores sections that
    it does not know and refuses keys that it does not know.
    """

    line_bytes_max: int = 8 * KIB
    """Longest command line, CRLF included; those of MetaQ have up to 300 bytes."""
    payload_bytes_max: int = 16 * MIB
    """Largest payload of a message, put alone or in an mput. MetaQ's clients stop at 1
    MiB by default; brokers were run with several."""
    batch_bytes_max: int = 16 * MIB
    """Largest body of one mput."""
    batch_records_max: int = 65_536
    connection_count_max: int = 4_096
    connection_count_per_host_max: int = 0
    """Connections from one address; 0: no limit."""
    connection_buffer_bytes_max: int = 8 * MIB
    """Reply bytes queued for one connection before its commands wait."""
    connection_in_flight_bytes_max: int = 2 * MIB
    """Bytes of puts read from one connection and not yet answered, at least one put. A
    put may find so much queued before it by another connection to the same partition;
    less keeps the disk busy."""
    in_flight_bytes_max: int = 256 * MIB
    """Bytes of puts and look-ups in flight, half frames and unread replies of all
    connections; at least the puts of one."""
    idle_timeout_ms: int = 300_000
    """A connection silent for so long is closed; 0: never. The default is MetaQ's own
    threshold (docs/metaq-1.4/broker.md 4.6)."""
    wait_ms_max: int = 30_000
    """Longest long poll; a longer wish is cut to it."""
    waiters_max: int = 10_000
    """Long polls held at the same time; one more is answered at once."""
    filter_bytes_per_s: int = 176 * MIB
    """Rate at which filters of gets look at bytes; beyond it their answers come later.
    0: clients filter."""
    queue_open_max: int = 20_000
    """Messages of a queue group and partition that are given out, returned or blocked;
    at the bound nothing more is given out."""
    delay_max: int = 400 * 86_400_000
    """Longest delay of a message, milliseconds."""
    delay_bytes_max: int = 8192 * MIB
    """Bytes on disk of messages that wait for their time; above it more are refused."""
    queue_open_broker_max: int = 500_000
    """The same, of all queue groups and partitions together."""
    queue_reclaim_ms: int = 2_000
    """A worker without a connection keeps its messages for so long; for as long after a
    start nothing is given out that an earlier life may have given out."""
    log_bytes_max: int = 0
    """Size of one partition above which sealed segments go; 0: no limit."""
    data_dir_bytes_max: int = 0
    """Size of one data directory above which sealed segments go; 0: no limit."""
    free_bytes_min: int = 64 * MIB
    """Low-space watermark: with less free on the disk puts are refused; 0: off."""
    producer_count_max: int = 1_024
    """Producers of one partition whose repeated batches are recognised."""
    span_bytes_min: int = SPAN_BYTES_MIN
    """A span of the side index covers at least this much."""
    index_bytes_per_s: int = 64 * MIB
    """Rate at which logs are read to make their indexes of keys; 0: none is made."""
    scrub_bytes_per_s: int = MIB
    """Rate at which stored bytes are verified in the background; 0: off."""
    shutdown_timeout_ms: int = 10_000
    http_port: int = 0
    """Port of /health and /metrics; 0: off."""
    http_host: str = "127.0.0.1"
    slow_sync_ms: int = 500
    """A sync slower than this is logged as a warning."""
    tx_count_max: int = 100_000
    """Transactions that are not finished; one more is refused."""
    tx_bytes_max: int = 256 * MIB
    """Bytes that the puts of these hold in memory; a put that needs more is refused."""
    tx_journal_bytes_max: int = 4 * 1024 * MIB
    """Size of the transaction journal above which it takes no new puts."""
    tx_journal_file_bytes_max: int = 4 * MIB
    """A file of the journal that has this size takes no new transactions. MetaQ has 64
    MiB; it bounds what a start after a crash reads."""
    tx_in_doubt_alarm_ms: int = 10 * MINUTE_MS
    """A transaction that is prepared for longer raises an alarm; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """`[replication]`: this broker is one replica of a set (docs/replication.md)."""

    replica_id: int = 0
    """Number of this replica, 1..9; the broker id is that of the set. 0: no set."""
    lag_timeout_ms: int = 3_000
    """A follower that lacks a byte for so long leaves the in-sync set, and a put that
    waits for so long ends in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig(TopicSettings):
    """`[topic=NAME]`, or for a topic without a section the values of `[system]`."""

    name: str
    """Topic name; in a configured topic also a pattern (docs/metaq-1.4/broker.md
    2.2)."""
    index: tuple[str, ...] = ()
    """Names that `find` looks up in an index: `key`, and headers; (): none."""
    filters: Mapping[str, str] = field(default_factory=no_items)
    """Consumer group → filter class (`group.<consumerGroup>=<class>`)."""


INTERNAL_SEGMENT_BYTES: Final = 16 * MIB
INTERNAL_PRODUCERS: Final = 16
"""A partition of the broker's own remembers so many times as many producers."""
INTERNAL_PRODUCERS_MAX: Final = 32_768
"""More than these would not fit into the file that remembers them."""

_SHARED: Final = tuple(each.name for each in fields(TopicSettings))


def default_topic(name: str, system: SystemConfig) -> TopicConfig:
    """Return the settings of a topic that has no section of its own."""
    return TopicConfig(name=name, **{each: getattr(system, each) for each in _SHARED})


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
    zookeeper: ZooKeeperConfig = field(default_factory=ZooKeeperConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    replication: ReplicationConfig | None = None
    """Part in a replica set; None: this broker is the only copy."""
    topics: Mapping[str, TopicConfig] = field(default_factory=no_items)
    """Configured topics and patterns by section name, in the order of the file."""
    defined: Mapping[str, TopicConfig] = field(default_factory=no_items)
    """Topics that were made by command, by exact name; a section of that name wins."""
    ignored_sections: tuple[str, ...] = ()
    """Unknown sections, in order: legal (legacy), but worth a warning."""
    overrides: Mapping[str, str] = field(default_factory=no_items)
    """Overrides of the file (`--set`), key → value; already applied above."""
    shadowed: tuple[str, ...] = ()
    """A sentence for each of these that a topic's own section keeps from its topic."""

    def topic(self, name: str) -> TopicConfig:
        """Return the settings of one topic.

        Args:
            name: a topic name, configured or not. Settings of a pattern section do
                not pass to the topics that it matches (docs/metaq-1.4/broker.md 2.2).

        Returns:
            Its section, else its definition, else all defaults from `[system]`. A topic
            of the broker's own has these, and is synced before it is acknowledged.
        """
        if is_internal(name):
            own = default_topic(name, self.system)
            return replace(own, unflush_threshold=0, unflush_interval_ms=0)
        return (
            self.topics.get(name)
            or self.defined.get(name)
            or default_topic(name, self.system)
        )

    def segment_bytes_of(self, topic: str) -> int:
        """Return the size of a full segment: of the broker's own they go sooner."""
        size = self.system.segment_bytes_max
        return min(size, INTERNAL_SEGMENT_BYTES) if is_internal(topic) else size

    def log_bytes_max_of(self, topic: str) -> int:
        """Return the bound of a log: one of the broker's own has none.

        It goes by what is needed of it.
        """
        return 0 if is_internal(topic) else self.limits.log_bytes_max

    def producers_of(self, topic: str) -> int:
        """Return how many producers a partition remembers.

        One of the broker's own has those of many partitions.
        """
        count = self.limits.producer_count_max
        if not is_internal(topic):
            return count
        return min(count * INTERNAL_PRODUCERS, INTERNAL_PRODUCERS_MAX)

    @property
    def topic_names(self) -> tuple[str, ...]:
        """Names of sections, in the order of the file, then of other defined topics."""
        return tuple(dict.fromkeys((*self.topics, *self.defined)))
