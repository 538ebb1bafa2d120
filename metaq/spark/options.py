"""Options of a source or sink: frozen values without contradictions.

`option_table.py` parses the texts; this module combines them. A contradiction is an
error that names both options, raised before anything is connected or read.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from metaq.client.names import name_some
from metaq.errors import FilterError
from metaq.filter.language import Filter, parse_filter
from metaq.model import Millis, Offset, TopicPartition
from metaq.spark.errors import OptionError
from metaq.spark.offsets import EARLIEST, LATEST, Offsets
from metaq.spark.option_table import EXACTLY_ONCE, Use, read_options
from metaq.spark.plan import BatchLimits
from metaq.spark.rows import OnCorrupt

_MS_PER_S: Final = 1000
_NOT_NULL: Final = re.compile(r"\bNOT\s+NULL\b", re.IGNORECASE)


class Edge(enum.Enum):
    """Start or end of reading without a named offset; the value is the user's text."""

    EARLIEST = "earliest"
    LATEST = "latest"
    GROUP = "group"
    """The committed offset of a consumer group; the log start if it has none."""


class ValueFormat(enum.Enum):
    """Format of the column `value`; values of the option `valueFormat`."""

    BINARY = "binary"
    STRING = "string"
    JSON = "json"


class BadRows(enum.Enum):
    """Handling of values without the format; values of the option `badRows`."""

    FAIL = "fail"
    COLUMN = "column"
    TOPIC = "topic"


@dataclass(frozen=True, slots=True)
class Bound:
    """Start or end of reading as given by the options, for any partition."""

    edge: Edge
    """Edge for partitions without a value in the other fields."""
    offsets: Offsets = field(default_factory=dict)
    time_ms: Millis | None = None
    """One time for all partitions; overrides all other fields."""
    times_ms: Mapping[TopicPartition, Millis] = field(default_factory=dict)

    @property
    def named(self) -> frozenset[TopicPartition]:
        """The partitions with an offset or time of their own."""
        return frozenset(self.offsets.keys() | self.times_ms.keys())

    def of(self, partition: TopicPartition) -> "Edge | Offset | AtTime":
        """Return the bound of one partition, by the precedence of the fields."""
        time_ms = self.time_ms
        if time_ms is None:
            time_ms = self.times_ms.get(partition)
        if time_ms is not None:
            return AtTime(time_ms)
        offset = self.offsets.get(partition)
        if offset == EARLIEST:
            return Edge.EARLIEST
        if offset == LATEST:
            return Edge.LATEST
        return self.edge if offset is None else offset


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message of that time or later."""

    time_ms: Millis


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOptions:
    """Addresses of the cluster, and time-outs."""

    zookeeper: str | None
    """Connect string; None if brokers are named."""
    zk_root: str
    brokers: tuple[str, ...]
    """`host:port` of each; empty if ZooKeeper is used."""
    request_timeout_s: float
    """Time limit for one answer, at most `retry_timeout_s`."""
    retry_timeout_s: float
    """Time limit for every wait, retries included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions:
    """Conversion of payloads to the column `value`."""

    format: ValueFormat
    ddl: str | None
    """Fields of JSON values as DDL; None for the other formats."""
    bad_rows: BadRows
    dead_letter_topic: str | None
    """Topic for bad values; None unless `bad_rows` is TOPIC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The partitions chosen for a read, in one of three ways.

    The fields of the other two ways are empty. If all are empty, it chooses everything.
    """

    topics: tuple[str, ...] = ()
    topic_pattern: str | None = None
    assigned: frozenset[TopicPartition] = frozenset()

    def chooses_topic(self, topic: str) -> bool:
        """Whether anything of a topic may be read."""
        if self.topic_pattern is not None:
            return re.fullmatch(self.topic_pattern, topic) is not None
        return not self.topics or topic in self.topics

    def chooses(self, partition: TopicPartition) -> bool:
        """Whether the user chose a partition, which need not exist."""
        if self.assigned:
            return partition in self.assigned
        return self.chooses_topic(partition.topic)

    def require_chosen(self, name: str, named: Iterable[TopicPartition]) -> None:
        """Refuse bounds of partitions that the query does not read.

        Args:
            name: name of the option, for the error.
            named: partitions named in its value.

        Raises:
            OptionError: the query does not read some of them.
        """
        if strangers := {each for each in named if not self.chooses(each)}:
            way = "assign" if self.assigned else "subscribe"
            way = way if self.topic_pattern is None else "subscribePattern"
            shown = name_some(strangers)
            raise OptionError(f"{name} names {shown}, which {way} does not choose")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(Chosen):
    """Options of a batch or streaming read; picklable, for executors.

    `option_table.py` describes each option.
    """

    wire: WireOptions
    waits_for_topics: bool
    starting: Bound
    ending: Bound
    is_late_start_error: bool
    pin_name: str | None
    """Name under which the start of a stream is stored; None: it is not stored."""
    start_group: str | None
    """Consumer group for `Edge.GROUP`."""
    progress_group: str | None
    fail_on_data_loss: bool
    limits: BatchLimits
    ranges_min: int | None
    records_max: int | None
    values: ValueOptions
    on_corrupt: OnCorrupt
    is_filter_pushdown: bool
    where: Filter | None
    """Condition on messages; None reads all."""

    @property
    def named(self) -> frozenset[TopicPartition]:
        """The partitions that the user named one by one."""
        return self.assigned | self.starting.named | self.ending.named

    def require_raw_values(self) -> None:
        """Refuse options that an archive does not support: decoding and `where`.

        Raises:
            OptionError: the read decodes values, or filters messages.
        """
        if self.where is not None:
            raise OptionError("an archive has all messages: expected no where")
        if self.values.format is not ValueFormat.BINARY:
            raise OptionError(
                f"an archive has values as they are: expected valueFormat=binary, got"
                f" {self.values.format.value}"
            )

    @classmethod
    def from_map(
        cls, options: Mapping[str, str], *, is_stream: bool
    ) -> "SourceOptions":
        """Parse the options of a read.

        Args:
            options: name → text; names are case-insensitive.
            is_stream: whether it is a streaming read.

        Raises:
            OptionError: an option is unknown, wrong, or contradicts another.
            OffsetTextError: JSON is wrong.
        """
        found = FoundOptions(options, Use.STREAM if is_stream else Use.BATCH)
        found.exactly_one("subscribe", "subscribePattern", "assign")
        wire = _wire_options(found)
        chosen = found.chosen()
        starting = _starting(found, is_stream=is_stream)
        ending = _ending(found)
        chosen.require_chosen("startingOffsets", starting.named)
        chosen.require_chosen("endingOffsets", ending.named)
        progress_group = found["progressGroup"]
        start_group = found["group"] or progress_group
        if starting.edge is Edge.GROUP and start_group is None:
            raise OptionError("startingOffsets=group needs group or progressGroup")
        if starting.edge is not Edge.GROUP and "group" in found.given:
            raise OptionError("group has no effect without startingOffsets=group")
        strategy = found["startingOffsetsByTimestampStrategy"]
        return cls(
            **asdict(chosen),
            wire=wire,
            waits_for_topics=is_stream and found["waitForTopic"],
            starting=starting,
            ending=ending,
            is_late_start_error=strategy == "error",
            pin_name=found["pinStart"] or progress_group,
            start_group=start_group,
            progress_group=progress_group,
            fail_on_data_loss=found["failOnDataLoss"],
            limits=_limits(found),
            ranges_min=found["minPartitions"],
            records_max=found["maxRecordsPerPartition"],
            values=_value_options(found),
            on_corrupt=OnCorrupt(found["onCorrupt"]),
            is_filter_pushdown=found["filterPushdown"],
            where=_where(found["where"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Options of a write; picklable, for executors.

    `option_table.py` describes each option.
    """

    wire: WireOptions
    topic: str | None
    """Topic of all rows; None takes it from the column `topic`."""
    has_tombstones: bool
    is_exactly_once: bool
    batch_bytes: int
    fail_on_lost_route: bool

    @classmethod
    def from_map(cls, options: Mapping[str, str]) -> "SinkOptions":
        """Parse the options of a write.

        Args:
            options: name → text; names are case-insensitive; ignores Spark's own.

        Raises:
            OptionError: an option is unknown, wrong, or contradicts another.
        """
        found = FoundOptions(options, Use.SINK)
        wire = _wire_options(found)
        is_exactly_once = found["delivery"] == EXACTLY_ONCE
        if is_exactly_once:
            if wire.zookeeper is None:
                raise OptionError(
                    "delivery=exactly-once keeps its decisions in ZooKeeper: it needs"
                    " zookeeper in place of brokers"
                )
            for name in sorted({"failOnLostRoute", "batchBytes"} & found.given):
                raise OptionError(f"{name} has no effect with delivery=exactly-once")
        return cls(
            wire=wire,
            topic=found["topic"],
            has_tombstones=found["nullValue"] == "tombstone",
            is_exactly_once=is_exactly_once,
            batch_bytes=found["batchBytes"] or 0,
            fail_on_lost_route=found["failOnLostRoute"],
        )


def read_value_options(options: Mapping[str, str], use: Use) -> ValueOptions:
    """Parse the options of `use` about the column `value`.

    Raises:
        OptionError: an option is unknown, wrong, or contradicts another.
    """
    return _value_options(FoundOptions(options, use))


class FoundOptions:
    """Parsed options by name; the kind in the table determines the type."""

    def __init__(self, options: Mapping[str, str], use: Use) -> None:
        self._values = read_options(options, use)
        given = {name.lower() for name in options}
        self.given = frozenset(n for n in self._values if n.lower() in given)

    def exactly_one(self, *names: str) -> None:
        """Raise unless exactly one of these options is given."""
        chosen = [name for name in names if name in self.given]
        if len(chosen) != 1:
            got = " and ".join(chosen) or "none of them"
            raise OptionError(f"expected exactly one of {', '.join(names)}, got {got}")

    def chosen(self) -> Chosen:
        """Return the user's choice of partitions."""
        return Chosen(
            topics=self["subscribe"] or (),
            topic_pattern=self["subscribePattern"],
            assigned=self["assign"] or frozenset(),
        )

    def needs(self, name: str, other: str) -> None:
        """Raise if an option is given without another that it needs."""
        if name in self.given and self._values[other] is None:
            raise OptionError(f"{name} has no effect without {other}")

    def __getitem__(self, name: str) -> Any:
        """Return the parsed value; None also for an option of another use."""
        return self._values.get(name)

    def seconds(self, name: str) -> float:
        """Return a duration, or milliseconds, in seconds; 0 if there is no value."""
        value = self[name] or 0.0
        return value if isinstance(value, float) else value / _MS_PER_S

    def bound(self, side: str, edge: Edge) -> Bound:
        """Return the bound of `side`, "starting" or "ending"; `edge` by default."""
        offsets = self[f"{side}Offsets"]
        return Bound(
            edge=Edge(offsets) if isinstance(offsets, str) else edge,
            offsets=offsets if isinstance(offsets, dict) else {},
            time_ms=self[f"{side}Timestamp"],
            times_ms=self[f"{side}OffsetsByTimestamp"] or {},
        )


def _wire_options(found: FoundOptions) -> WireOptions:
    found.exactly_one("zookeeper", "brokers")
    found.needs("zkRoot", "zookeeper")
    for name in ("group", "progressGroup", "pinStart"):
        if name in found.given and found["zookeeper"] is None:
            raise OptionError(f"{name} is kept in ZooKeeper: it needs zookeeper")
    retry_timeout_s = found.seconds("retryTimeoutMs")
    return WireOptions(
        zookeeper=found["zookeeper"],
        zk_root=found["zkRoot"] or "/",
        brokers=found["brokers"] or (),
        request_timeout_s=min(found.seconds("requestTimeoutMs"), retry_timeout_s),
        retry_timeout_s=retry_timeout_s,
    )


def _where(text: str | None) -> Filter | None:
    try:
        return None if text is None else parse_filter(text)
    except FilterError as error:
        raise OptionError(f"where: {error}") from error


def _starting(found: FoundOptions, *, is_stream: bool) -> Bound:
    has_offsets = "startingOffsets" in found.given
    is_earliest = has_offsets or not is_stream
    bound = found.bound("starting", Edge.EARLIEST if is_earliest else Edge.LATEST)
    if not is_stream:
        latest = [p for p, offset in bound.offsets.items() if offset == LATEST]
        if bound.edge is Edge.LATEST:
            raise OptionError("startingOffsets=latest: a batch would read nothing")
        if latest:
            raise OptionError(
                f"startingOffsets: {min(latest)} starts at the latest (-1): a batch"
                " would read nothing of it"
            )
    return bound


def _ending(found: FoundOptions) -> Bound:
    bound = found.bound("ending", Edge.LATEST)
    if early := [p for p, offset in bound.offsets.items() if offset == EARLIEST]:
        raise OptionError(
            f"endingOffsets: {min(early)} ends at the earliest (-2): a batch would"
            " read nothing of it"
        )
    return bound


def _limits(found: FoundOptions) -> BatchLimits:
    least = found["minOffsetsPerTrigger"]
    most = found["maxOffsetsPerTrigger"]
    if least is not None and most is not None and least > most:
        raise OptionError(
            f"minOffsetsPerTrigger {least} is larger than maxOffsetsPerTrigger {most}"
        )
    found.needs("maxTriggerDelay", "minOffsetsPerTrigger")
    return BatchLimits(
        messages_max=most,
        bytes_max=found["maxBytesPerTrigger"],
        messages_min=least,
        delay_s_max=found.seconds("maxTriggerDelay"),
    )


def _value_options(found: FoundOptions) -> ValueOptions:
    value_format = ValueFormat(found["valueFormat"])
    bad_rows = BadRows(found["badRows"])
    ddl, dead_letter_topic = found["valueSchema"], found["deadLetterTopic"]
    if (value_format is ValueFormat.JSON) != (ddl is not None):
        raise OptionError("valueFormat=json and valueSchema need each other")
    if ddl is not None and _NOT_NULL.search(ddl):
        raise OptionError("valueSchema: NOT NULL is more than JSON can promise")
    if value_format is ValueFormat.BINARY and bad_rows is not BadRows.FAIL:
        raise OptionError(
            f"badRows={bad_rows.value} has no effect: valueFormat=binary takes all"
        )
    if (bad_rows is BadRows.TOPIC) != (dead_letter_topic is not None):
        raise OptionError("badRows=topic and deadLetterTopic need each other")
    return ValueOptions(
        format=value_format,
        ddl=ddl,
        bad_rows=bad_rows,
        dead_letter_topic=dead_letter_topic,
    )
