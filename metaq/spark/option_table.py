"""The table of all options: name, kind, default, range, and uses.

The parser, the error messages and the tables of `docs/spark.md` are made from it.
Options have the names of Spark's Kafka source if they mean the same, so that most
queries can switch by changing the format. Names are case-insensitive, because Spark
passes them in lower case.
"""

import difflib
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, assert_never

from metaq.model import MAX_OFFSET
from metaq.record.ids import BROKER_ID_MAX
from metaq.spark.columns import VALUE_BYTES_MAX
from metaq.spark.errors import OptionError
from metaq.spark.offsets import (
    QUOTED_CHARS_MAX,
    parse_assigned,
    parse_times,
    parse_wanted,
)

COUNT_MAX: Final = int(MAX_OFFSET)
TASKS_MAX: Final = 1_000_000
"""Maximum number of tasks: planning more takes the driver too long."""
TIMEOUT_MS_MAX: Final = 24 * 3600 * 1000

_UNITS_S: Final = {
    "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0,
}  # fmt: skip
_DURATION: Final = re.compile(r"([0-9]{1,12})\s*(ms|s|m|min|h|d)", re.IGNORECASE)

EXACTLY_ONCE: Final = "exactly-once"
"""Value of `delivery`."""

_OF_KAFKA: Final[Mapping[str, str]] = {
    "kafka.bootstrap.servers": 'format("metaq") has zookeeper or brokers for it',
    "kafka.group.id": "a read needs no group; a stream commits to progressGroup",
    "groupidprefix": "a read needs no group; a stream commits to progressGroup",
    "includeheaders": "the column headers is always there",
    "kafkaconsumer.polltimeoutms": "requestTimeoutMs is the wait for one answer",
    "fetchoffset.numretries": "retryTimeoutMs is the time of all tries",
    "fetchoffset.retryintervalms": "retryTimeoutMs is the time of all tries",
}
"""Option of Spark's Kafka source and sink → advice: its name here, or why none."""

SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of Spark's own writer that are passed to the sink too."""


class Use(enum.Enum):
    """Use of an option; the value is its name in errors."""

    BATCH = "batch reads"
    STREAM = "streaming reads"
    SINK = "writes"
    SEGMENTS = "reads of segments"


class Kind(enum.Enum):
    """Form of an option's text; the value is its name in the docs."""

    TEXT = "text"
    """Any text that is not blank."""
    NAMES = "list of names"
    """Separated by commas; none blank, none twice."""
    PATTERN = "regular expression"
    """A pattern of Python's `re` that must match the whole name."""
    PARTITIONS = "JSON of partitions"
    """`{"topic": ["0-0"]}`: broker and partition."""
    OFFSETS = "edge or JSON of offsets"
    """One of `choices`, or `{"topic": {"0-0": 4096}}` with -2 and -1 for the edges."""
    TIMES = "JSON of times"
    """`{"topic": {"0-0": 1700000000000}}`, milliseconds since 1970."""
    INTEGER = "integer"
    """A decimal number within `low`..`high`."""
    BOOLEAN = "boolean"
    DURATION = "duration"
    """A whole number and a unit: ms, s, m or min, h, d."""
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """One option."""

    name: str
    kind: Kind
    uses: frozenset[Use]
    meaning: str
    """Text for the docs, with the unit of a number."""
    default: str | None = None
    """Default as text; None for none, or for one described in `meaning`."""
    low: int = 1
    high: int = COUNT_MAX
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> object:
        """Parse the text of a value.

        Raises:
            OptionError: the text is not a value of this option; the message says what
                was expected.
            OffsetTextError: the same for JSON.
        """
        text = text.strip()
        match self.kind:
            case Kind.TEXT:
                return text or self._refuse("a text", text)
            case Kind.NAMES:
                names = tuple(name.strip() for name in text.split(","))
                if not all(names) or len(set(names)) < len(names):
                    self._refuse("names separated by commas, each once", text)
                return names
            case Kind.PATTERN:
                return self._read_pattern(text)
            case Kind.PARTITIONS:
                return parse_assigned(text, option=self.name)
            case Kind.OFFSETS:
                if text.lower() in self.choices:
                    return text.lower()
                if not text.startswith("{"):
                    self._refuse(f"{_any_of(self.choices)} or JSON", text)
                return parse_wanted(text, option=self.name)
            case Kind.TIMES:
                return parse_times(text, option=self.name)
            case Kind.INTEGER:
                return self._read_integer(text)
            case Kind.BOOLEAN:
                if text.lower() not in {"true", "false"}:
                    self._refuse("true or false", text)
                return text.lower() == "true"
            case Kind.DURATION:
                return self._read_duration(text)
            case Kind.CHOICE:
                if text.lower() not in self.choices:
                    self._refuse(_any_of(self.choices), text)
                return text.lower()
            case _:
                assert_never(self.kind)

    def _read_pattern(self, text: str) -> str:
        try:
            re.compile(text)
        except re.error as error:
            self._refuse(f"a regular expression ({error})", text)
        return text or self._refuse("a regular expression", text)

    def _read_integer(self, text: str) -> int:
        # Numbers with more digits are out of any range, and slow to convert.
        if not re.fullmatch(r"-?[0-9]{1,20}", text):
            self._refuse("an integer", text)
        if not self.low <= int(text) <= self.high:
            self._refuse(f"{self.low}..{self.high}", text)
        return int(text)

    def _read_duration(self, text: str) -> float:
        match = _DURATION.fullmatch(text)
        if match is None:
            return self._refuse("a duration such as 500ms, 30s or 15m", text)
        return int(match[1]) * _UNITS_S[match[2].lower()]

    def _refuse(self, expected: str, text: str) -> NoReturn:
        raise OptionError(
            f"{self.name}: expected {expected}, got {text[:QUOTED_CHARS_MAX]!r}"
        )


_READ: Final = frozenset({Use.BATCH, Use.STREAM})
_WIRE: Final = _READ | {Use.SINK}
_ROWS: Final = _READ | {Use.SEGMENTS}
_STREAM: Final = frozenset({Use.STREAM})
_BATCH: Final = frozenset({Use.BATCH})
_FILES: Final = frozenset({Use.SEGMENTS})
_SINK: Final = frozenset({Use.SINK})
_STRATEGIES: Final = ("error", "latest")

OPTIONS: Final = (
    # Where the log is.
    OptionSpec(name="zookeeper", kind=Kind.TEXT, uses=_WIRE,
        meaning="Connect string `host:port[,host:port...][/chroot]`: brokers are found"
        " there; this or `brokers`."),
    OptionSpec(name="zkRoot", kind=Kind.TEXT, uses=_WIRE, default="/meta",
        meaning="Root of the cluster's nodes in ZooKeeper."),
    OptionSpec(name="brokers", kind=Kind.NAMES, uses=_WIRE,
        meaning="Brokers as `host:port`, without ZooKeeper."),
    OptionSpec(name="path", kind=Kind.TEXT, uses=_FILES,
        meaning="Data directories, partition directories or segment files, separated by"
        " commas; `*`, `?` and `[...]` match within a step. What `load(path)` sets."),
    OptionSpec(name="paths", kind=Kind.TEXT, uses=_FILES,
        meaning="The same as a JSON list; what `load([path, ...])` sets."),
    OptionSpec(name="brokerId", kind=Kind.INTEGER, uses=_FILES, low=0,
        high=BROKER_ID_MAX,
        meaning="The column `broker_id`; default: what the message ids say, and -1"
        " where a Java broker stamped them."),
    # -- input
    OptionSpec(name="subscribe", kind=Kind.NAMES, uses=_ROWS,
        meaning="Topics, separated by commas; one of the three ways to choose."),
    OptionSpec(name="subscribePattern", kind=Kind.PATTERN, uses=_ROWS,
        meaning="Every topic whose whole name matches, also those that come later."),
    OptionSpec(name="assign", kind=Kind.PARTITIONS, uses=_ROWS,
        meaning="Exactly these partitions; one that no broker has is an error."),
    OptionSpec(name="waitForTopic", kind=Kind.BOOLEAN, uses=_STREAM, default="false",
        meaning="Start also while a topic of `subscribe` is not there yet, or none"
        " matches `subscribePattern`; `false` is an error that names topics like it."),
    # Where reading starts and ends.
    OptionSpec(name="startingOffsets", kind=Kind.OFFSETS, uses=_ROWS,
        choices=("earliest", "latest", "group"),
        meaning="Where to start: default `latest` for streams and `earliest` for"
        " batches; `group` is where `group` has committed. A stream heeds it for a new"
        " checkpoint only; partitions that come later start at the earliest."),
    OptionSpec(name="startingTimestamp", kind=Kind.INTEGER, uses=_ROWS, low=0,
        meaning="Start at the first message of that time or later, milliseconds since"
        " 1970; wins over the other two."),
    OptionSpec(name="startingOffsetsByTimestamp", kind=Kind.TIMES, uses=_READ,
        meaning="The same for each partition; wins over `startingOffsets`."),
    OptionSpec(name="startingOffsetsByTimestampStrategy", kind=Kind.CHOICE, uses=_READ,
        choices=_STRATEGIES, default="error",
        meaning="What to do where no message is that young."),
    OptionSpec(name="endingOffsets", kind=Kind.OFFSETS, uses=_BATCH | _FILES,
        choices=("latest",), default="latest", meaning="Where a batch ends."),
    OptionSpec(name="endingTimestamp", kind=Kind.INTEGER, uses=_BATCH | _FILES, low=0,
        meaning="End before the first message of that time or later, milliseconds"
        " since 1970; wins over the other two."),
    OptionSpec(name="endingOffsetsByTimestamp", kind=Kind.TIMES, uses=_BATCH,
        meaning="The same for each partition; wins over `endingOffsets`."),
    OptionSpec(name="pinStart", kind=Kind.TEXT, uses=_STREAM,
        meaning="Name under which the start of a new query is kept in ZooKeeper, so"
        " that a restart before the first commit loses nothing; default:"
        " `progressGroup`."),
    OptionSpec(name="group", kind=Kind.TEXT, uses=_READ,
        meaning="Consumer group that `startingOffsets=group` reads; default:"
        " `progressGroup`."),
    OptionSpec(name="progressGroup", kind=Kind.TEXT, uses=_STREAM,
        meaning="Consumer group to which progress is committed, so that tools see the"
        " lag of the query."),
    OptionSpec(name="failOnDataLoss", kind=Kind.BOOLEAN, uses=_READ, default="true",
        meaning="Fail when bytes that should be read are gone, and at the start also"
        " when a broker that has some is away; `false` reads on and reports what is"
        " left out."),
    # How much at once.
    OptionSpec(name="maxOffsetsPerTrigger", kind=Kind.INTEGER, uses=_STREAM,
        meaning="Messages of a micro-batch, shared in proportion to the backlog."),
    OptionSpec(name="maxBytesPerTrigger", kind=Kind.INTEGER, uses=_STREAM,
        meaning="Bytes of a micro-batch, shared in the same way."),
    OptionSpec(name="minOffsetsPerTrigger", kind=Kind.INTEGER, uses=_STREAM,
        meaning="Wait until so many messages are there."),
    OptionSpec(name="maxTriggerDelay", kind=Kind.DURATION, uses=_STREAM, default="15m",
        meaning="Wait no longer than that for `minOffsetsPerTrigger`."),
    OptionSpec(name="minPartitions", kind=Kind.INTEGER, uses=_READ, high=TASKS_MAX,
        meaning="Hint: cut large partitions, and let fewer small ones share a task, so"
        " that there are about so many tasks."),
    OptionSpec(name="maxRecordsPerPartition", kind=Kind.INTEGER, uses=_READ,
        meaning="Messages of one task."),
    OptionSpec(name="maxBytesPerPartition", kind=Kind.INTEGER, uses=_FILES,
        default=str(64 * 1024 * 1024),
        meaning="Bytes of records of one task, about; larger files are cut and smaller"
        " ones put together. A zip is never cut; of files without a span index 4 GiB"
        " are cut per query."),
    OptionSpec(name="maxMessageBytes", kind=Kind.INTEGER, uses=_FILES,
        default=str(64 * 1024 * 1024), high=VALUE_BYTES_MAX,
        meaning="A longer message is damage, known by its header; a task has memory for"
        " one of that size."),
    # Rows.
    OptionSpec(name="valueFormat", kind=Kind.CHOICE, uses=_ROWS, default="binary",
        choices=("binary", "string", "json"),
        meaning="What the column `value` holds: bytes, UTF-8, or fields of JSON."),
    OptionSpec(name="valueSchema", kind=Kind.TEXT, uses=_ROWS,
        meaning="Fields of a JSON value as DDL: `level STRING, code INT`."),
    OptionSpec(name="badRows", kind=Kind.CHOICE, uses=_ROWS, default="fail",
        choices=("fail", "column", "topic"),
        meaning="What becomes of values that are not of the format: fail the query,"
        " go to the columns `bad_value` and `bad_reason`, or to `deadLetterTopic`."),
    OptionSpec(name="deadLetterTopic", kind=Kind.TEXT, uses=_READ,
        meaning="Topic that bad values are put to."),
    OptionSpec(name="onCorrupt", kind=Kind.CHOICE, uses=_ROWS, default="fail",
        choices=("fail", "skip"),
        meaning="What becomes of damaged records: fail the query, or leave them out and"
        " report each."),
    OptionSpec(name="where", kind=Kind.TEXT, uses=_READ,
        meaning="Only messages for which this"
        " [condition](messaging.md#filters-and-tags) on tag, key, attribute and headers"
        " is true; brokers send no others."),
    OptionSpec(name="filterPushdown", kind=Kind.BOOLEAN, uses=_ROWS, default="false",
        meaning="Read only what filters on topic, partition, offset and timestamp ask"
        " for; takes `spark.sql.python.filterPushdown.enabled=true` as well."),
    # Writing.
    OptionSpec(name="topic", kind=Kind.TEXT, uses=_SINK,
        meaning="Topic of all rows; wins over a column `topic`."),
    OptionSpec(name="nullValue", kind=Kind.CHOICE, uses=_SINK, default="fail",
        choices=("fail", "tombstone"),
        meaning="What becomes of rows whose `value` is null: fail the query, or write a"
        " message without data, which deletes what had its `key` where a reader keeps"
        " the latest of each key."),
    OptionSpec(name="delivery", kind=Kind.CHOICE, uses=_SINK, default="at-least-once",
        choices=("at-least-once", EXACTLY_ONCE),
        meaning="What a failed and repeated task may leave: rows that are stored twice,"
        " or nothing. `exactly-once` needs `zookeeper`, and for a stream the"
        " option `checkpointLocation`."),
    OptionSpec(name="batchBytes", kind=Kind.INTEGER, uses=_SINK, default="1048576",
        low=1024, high=64 * 1024 * 1024,
        meaning="Bytes of one batch on the wire; a larger message goes alone."),
    OptionSpec(name="failOnLostRoute", kind=Kind.BOOLEAN, uses=_SINK, default="true",
        meaning="Fail when a batch that is run again went to partitions that are away"
        " now; `false` sends it elsewhere, and what it has stored there comes twice."),
    # Patience.
    OptionSpec(name="requestTimeoutMs", kind=Kind.INTEGER, uses=_WIRE, default="30000",
        high=TIMEOUT_MS_MAX, meaning="How long one answer of a broker may take."),
    OptionSpec(name="retryTimeoutMs", kind=Kind.INTEGER, uses=_WIRE, default="120000",
        high=TIMEOUT_MS_MAX,
        meaning="Bound of every wait for a broker or ZooKeeper, with all its tries, in"
        " the driver and in tasks; a shorter one bounds `requestTimeoutMs` as well."),
)  # fmt: skip
"""All options, in the order of the docs."""


def read_options(options: Mapping[str, str], use: Use) -> dict[str, Any]:
    """Parse a user's options for one use; add defaults.

    Args:
        options: name → text, as passed by Spark; names are case-insensitive.
        use: the use of the options.

    Returns:
        Name → value, for every option of that use; None for an option without a value
        or default.

    Raises:
        OptionError: an option is unknown, has another use, is given twice, or has an
            invalid value; the message names the option.
        OffsetTextError: an invalid value in JSON.
    """
    known = {spec.name.lower(): spec for spec in OPTIONS}
    found: dict[str, Any] = {
        spec.name: None if spec.default is None else spec.read(spec.default)
        for spec in OPTIONS
        if use in spec.uses
    }
    seen: set[str] = set()
    for name, text in options.items():
        spec = known.get(name.lower())
        if spec is None and use is Use.SINK and name.lower() in SPARKS_OWN:
            continue
        if spec is None:
            raise OptionError(_unknown(name, use))
        if use not in spec.uses:
            places = " and ".join(u.value for u in Use if u in spec.uses)
            raise OptionError(f"{spec.name} is an option of {places}, not {use.value}")
        if spec.name in seen:
            raise OptionError(f"{spec.name} is given twice")
        seen.add(spec.name)
        found[spec.name] = spec.read(text)
    return found


def _unknown(name: str, use: Use) -> str:
    names = {spec.name.lower(): spec.name for spec in OPTIONS if use in spec.uses}
    quoted = name[:QUOTED_CHARS_MAX]
    if ours := _OF_KAFKA.get(name.lower()):
        return f"unknown option {quoted!r}, which is Kafka's: {ours}"
    if name.lower().startswith("kafka."):
        return f"unknown option {quoted!r}: Kafka's client is not used here"
    close = difflib.get_close_matches(quoted.lower(), names, n=1, cutoff=0)
    return f"unknown option {quoted!r}; the closest is {names[close[0]]}"


def _any_of(words: tuple[str, ...]) -> str:
    return " or ".join(words)
