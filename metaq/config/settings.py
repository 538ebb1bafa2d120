"""Settings of a broker: frozen values, with units in the field names.

`server.ini` keeps MetaQ's historical key names, without units. The default of each
field is repeated in the comments of `config/server.ini`, and
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
    """Action on a segment that has reached the age of the policy."""

    DELETE = "delete"
    """Remove the file."""
    ARCHIVE = "archive"
    """Keep the file beside the log, as `.arc` or compressed as `.zip`."""


@dataclass(frozen=True, slots=True)
class DeletePolicy:
    """A parsed `deletePolicy` (docs/metaq-1.4/broker.md 2.9)."""

    kind: DeleteKind = DeleteKind.DELETE
    age_ms: int = 168 * HOUR_MS
    """Age above which a sealed segment is deleted or archived; 0 or more."""
    is_compressed: bool = False
    """Whether to archive into a `.zip`; never true for `delete`."""

    def __str__(self) -> str:
        """Return the text form, with the age in the coarsest exact unit."""
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
    """Settings of a topic; those that its section lacks come from `[system]`."""

    partition_count: int = 1
    """Partitions 0 .. count-1 take puts; a lower count deletes nothing."""
    stat: bool = False
    delete_policy: DeletePolicy = DeletePolicy()
    delete_when: str = "0 0 6,18 * * ?"
    """Quartz expression of the deletion job, local time; see `broker.schedule`."""
    data_path: str = field(default_factory=default_data_path)
    """Directory of the partition logs, whose parent must exist; open logs are not
    moved."""
    # MetaQ's default in code is 1000, but the key is required in a file anyway.
    unflush_threshold: int = 0
    """Records; 0 or less: group commit; n: sync after more than n unsynced puts. The
    mode of an open log does not change."""
    unflush_interval_ms: int = 10_000
    """Maximum time between syncs; 0 or less: no timer."""
    accept_publish: bool = True
    """Whether to advertise the topic to producers."""
    accept_subscribe: bool = True
    """Whether to advertise the topic to consumers."""

    @property
    def unflush_interval_s(self) -> float:
        """Return the maximum age of unsynced records, seconds; 0: no timer."""
        return max(0, self.unflush_interval_ms) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig(TopicSettings):
    """`[system]`: settings of the broker; changes take effect at restart."""

    broker_id: BrokerId = BROKER_ID
    host_name: str | None = None
    """Advertised host; None: detect one. The listener binds every interface."""
    server_port: int = 8123
    """TCP port, 0..65535; 0 lets the system pick one."""
    dashboard_http_port: int = 8120
    """Port of MetaQ's dashboard; no effect here (see `LimitsConfig.http_port`)."""
    data_log_path: str = ""
    """Directory of the transaction journal; "" becomes `data_path`."""
    app_class_path: str | None = None
    """Directory of filter classes; no effect, because none is run."""
    segment_bytes_max: int = 1024 * MIB
    """Roll size, 1..2147483647."""
    transfer_bytes_max: int = MIB
    """Maximum body of one get, 1..2147483647."""
    get_thread_count: int = 0
    """Size of MetaQ's pool (0: 10 per CPU); no effect, because there is no pool."""
    put_thread_count: int = 0
    """Size of MetaQ's pool (0: 10 per CPU); no effect, because there is no pool."""
    quartz_thread_count: int = 5
    """Size of MetaQ's pool; no effect, because deletions run one at a time."""
    checkpoints_max: int = 3
    checkpoint_interval_ms: int = HOUR_MS
    tx_timer_capacity: int = 30_000
    """Maximum number of transactions with a deadline at the same time, 1 or more."""
    tx_timeout_s_max: int = 60
    """Maximum timeout that a client may request, seconds."""
    flush_tx_log_at_commit: int = 1
    """1: sync every prepare, commit and rollback; 2: every second; 0: never."""
    update_consumer_offsets: bool = False
    """Whether a get after the end is answered 301 with the end (row 7 of
    docs/metaq-1.4/broker.md 1.5)."""
    load_stores_in_parallel: bool = False
    """Recover partitions in parallel; no effect, because every start does."""

    def __post_init__(self) -> None:
        """Derive `data_log_path` from `data_path` if it is ""."""
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
    """Maximum lag of a ZooKeeper follower; bounds waits for peers to see a change."""
    is_enabled: bool = True
    """Whether ZooKeeper is used; False: nothing is registered."""
    root: str = ZK_ROOT
    """Path of the cluster's root node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """`[metaq]`: settings that MetaQ lacks; changes take effect at restart.

    The keys have their own section because a Java broker ignores unknown sections and
    refuses unknown keys.
    """

    line_bytes_max: int = 8 * KIB
    """Longest command line, CRLF included; MetaQ's own have up to 300 bytes."""
    payload_bytes_max: int = 16 * MIB
    """Largest payload of a message, in a put or an mput. MetaQ's clients allow 1 MiB by
    default; brokers were run with several MiB."""
    batch_bytes_max: int = 16 * MIB
    """Largest body of one mput."""
    batch_records_max: int = 65_536
    connection_count_max: int = 4_096
    connection_count_per_host_max: int = 0
    """Connections from one address; 0: no limit."""
    connection_buffer_bytes_max: int = 8 * MIB
    """Reply bytes queued for one connection above which its commands wait."""
    connection_in_flight_bytes_max: int = 2 * MIB
    """Maximum bytes of puts read from one connection and not yet answered, but at least
    one put. A put may wait for as much from another connection to the same partition;
    a smaller bound still keeps the disk busy."""
    in_flight_bytes_max: int = 256 * MIB
    """Maximum bytes of puts and lookups in flight, partial frames and unread replies of
    all connections; at least the largest of the bounds of a put and a connection."""
    idle_timeout_ms: int = 300_000
    """Silence after which a connection is closed; 0: never. The default is MetaQ's
    (docs/metaq-1.4/broker.md 4.6)."""
    wait_ms_max: int = 30_000
    """Longest long poll; longer waits are shortened to it."""
    waiters_max: int = 10_000
    """Maximum number of long polls held; one more is answered at once."""
    filter_bytes_per_s: int = 176 * MIB
    """Maximum rate at which filters of gets scan bytes; above it replies are delayed.
    0: clients filter."""
    queue_open_max: int = 20_000
    """Maximum number of messages of a queue group and partition that are given out,
    returned or blocked; at the bound no more are given out."""
    delay_max: int = 400 * 86_400_000
    """Maximum delay of a message, milliseconds."""
    delay_bytes_max: int = 8192 * MIB
    """Maximum bytes on disk of delayed messages; more are refused."""
    queue_open_broker_max: int = 500_000
    """`queue_open_max` for all queue groups and partitions together."""
    queue_reclaim_ms: int = 2_000
    """Time for which a worker without a connection keeps its messages, and after a
    start for which messages given out before it are not given out."""
    log_bytes_max: int = 0
    """Size of a partition above which sealed segments are removed; 0: unlimited."""
    data_dir_bytes_max: int = 0
    """The same for the size of a data directory."""
    free_bytes_min: int = 64 * MIB
    """Free bytes on the disk below which puts are refused; 0: off."""
    producer_count_max: int = 1_024
    """Maximum number of producers of a partition whose repeats are detected."""
    span_bytes_min: int = SPAN_BYTES_MIN
    """Minimum size of a span of the side index."""
    index_bytes_per_s: int = 64 * MIB
    """Rate at which logs are read to build their key indexes; 0: none are built."""
    scrub_bytes_per_s: int = MIB
    """Rate of the background check of stored bytes; 0: off."""
    shutdown_timeout_ms: int = 10_000
    http_port: int = 0
    """Port of /health and /metrics; 0: off."""
    http_host: str = "127.0.0.1"
    slow_sync_ms: int = 500
    """Duration above which a sync is logged as a warning."""
    tx_count_max: int = 100_000
    """Maximum number of unfinished transactions; one more is refused."""
    tx_bytes_max: int = 256 * MIB
    """Maximum bytes of their puts in memory; a put that needs more is refused."""
    tx_journal_bytes_max: int = 4 * 1024 * MIB
    """Size of the transaction journal above which it takes no new puts."""
    tx_journal_file_bytes_max: int = 4 * MIB
    """Size above which a journal file takes no new transactions, 64 MiB in MetaQ;
    bounds what a start after a crash reads."""
    tx_in_doubt_alarm_ms: int = 10 * MINUTE_MS
    """Time after which a prepared transaction raises an alarm; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """`[replication]`: this broker is one replica of a set (docs/replication.md)."""

    replica_id: int = 0
    """Number of this replica, 1..9; its broker id is that of the set. 0: no set."""
    lag_timeout_ms: int = 3_000
    """Lag after which a follower leaves the in-sync set, and wait after which a put
    ends in doubt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig(TopicSettings):
    """`[topic=NAME]`; without such a section, the values of `[system]`."""

    name: str
    """Topic name; of a section, possibly a pattern (docs/metaq-1.4/broker.md 2.2)."""
    index: tuple[str, ...] = ()
    """Indexed names for `find`: `key`, and headers; (): no index."""
    filters: Mapping[str, str] = field(default_factory=no_items)
    """Consumer group → filter class (`group.<consumerGroup>=<class>`)."""


INTERNAL_SEGMENT_BYTES: Final = 16 * MIB
INTERNAL_PRODUCERS: Final = 16
"""Factor of `producer_count_max` for partitions of internal topics."""
INTERNAL_PRODUCERS_MAX: Final = 32_768
"""Maximum number of producers that fit into a producer file."""

_SHARED: Final = tuple(each.name for each in fields(TopicSettings))


def default_topic(name: str, system: SystemConfig) -> TopicConfig:
    """Return the settings of a topic without a section."""
    return TopicConfig(name=name, **{each: getattr(system, each) for each in _SHARED})


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """A validated configuration file; replaced as a whole on reload."""

    path: str = ""
    """Path of the file as it was given; "" without a file."""
    data: bytes = b""
    """Reply to `stats config`: the bytes of the file; with overrides, a text of the
    settings in effect."""
    checksum: int = 0
    """Unsigned CRC-32 of `data`; other brokers watch it in ZooKeeper."""
    system: SystemConfig = field(default_factory=SystemConfig)
    zookeeper: ZooKeeperConfig = field(default_factory=ZooKeeperConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    replication: ReplicationConfig | None = None
    """Settings of the replica set; None: the broker is in none."""
    topics: Mapping[str, TopicConfig] = field(default_factory=no_items)
    """Configured topics and patterns by name, in the order of the file."""
    defined: Mapping[str, TopicConfig] = field(default_factory=no_items)
    """Topics created by command, by exact name; a section has precedence."""
    ignored_sections: tuple[str, ...] = ()
    """Unknown sections, in order: allowed for old files, but logged as a warning."""
    overrides: Mapping[str, str] = field(default_factory=no_items)
    """Overrides of the file (`--set`), key → value; applied to the fields above."""
    shadowed: tuple[str, ...] = ()
    """A sentence for each override that a topic's own section overrules."""

    def topic(self, name: str) -> TopicConfig:
        """Return the settings of one topic.

        Args:
            name: a topic name, configured or not. Topics do not inherit the settings
                of a pattern section that they match (docs/metaq-1.4/broker.md 2.2).

        Returns:
            The section of that name, else the definition, else the defaults from
            `[system]`. An internal topic has the defaults, with group commit.
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
        """Return the roll size of a topic; lower for internal topics."""
        size = self.system.segment_bytes_max
        return min(size, INTERNAL_SEGMENT_BYTES) if is_internal(topic) else size

    def log_bytes_max_of(self, topic: str) -> int:
        """Return the maximum size of a partition's log; 0: no limit (internal topics).

        Internal topics delete what they no longer need.
        """
        return 0 if is_internal(topic) else self.limits.log_bytes_max

    def producers_of(self, topic: str) -> int:
        """Return the maximum number of producers that a partition remembers.

        Higher for internal topics, which take puts of the producers of many partitions.
        """
        count = self.limits.producer_count_max
        if not is_internal(topic):
            return count
        return min(count * INTERNAL_PRODUCERS, INTERNAL_PRODUCERS_MAX)

    @property
    def topic_names(self) -> tuple[str, ...]:
        """Names of sections in file order, then of other topics created by command."""
        return tuple(dict.fromkeys((*self.topics, *self.defined)))
