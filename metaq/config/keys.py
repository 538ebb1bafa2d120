"""Table of all keys: spelling in `server.ini`, field, kind, unit, range, reload.

The parser, error messages, the reload report and the check of the comments of
`config/server.ini` use it. Source: docs/metaq-1.4/broker.md 4.2 to 4.5.

An integer is an expression, `maxSegmentSize=1024*1024*1024`: numbers, `+ - * / %` and
parentheses, evaluated as by a Java broker. Division truncates toward zero, the
remainder has the sign of the dividend, results are signed 64-bit numbers. Length, depth
and size are bounded, so that a hostile file is refused quickly. Source:
docs/metaq-1.4/broker.md 4.1.
"""

import ast
import enum
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, assert_never

from metaq.config.settings import (
    HOUR_MS,
    MINUTE_MS,
    SECOND_MS,
    DeleteKind,
    DeletePolicy,
)

INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1
INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
EXPRESSION_CHARS_MAX: Final = 100
"""Maximum length of an expression; also bounds the depth of the parsed tree."""
DELETE_POLICY_FORMS: Final = (
    "expected delete,168h or archive,168h or archive,168h,true, with an age in hours"
    " (168 or 168h), minutes (90m) or seconds (30s)"
)
PORT_MAX: Final = 65_535
BROKER_ID_MAX: Final = 1023
PARTITION_COUNT_MAX: Final = 10_000
"""Bounded because each partition has open files; MetaQ's deployments had tens."""
THREAD_COUNT_MAX: Final = 10_000
CHECKPOINTS_MAX_MAX: Final = 1_000
DELETE_AGE_MS_MAX: Final = 100 * 366 * 24 * HOUR_MS
"""A century; a higher age would overflow the dates of some clients."""
NAMES_MAX: Final = 16
"""Maximum number of indexed names; each costs time and space for every message."""
SUGGESTION_CHARS_MAX: Final = 80
"""Length to which an unknown key is cut when it is compared and quoted."""

GROUP_PREFIX: Final = "group."
"""Prefix of the keys of a topic section that set a filter class of a group."""

SYSTEM_KEYS_WITHOUT_EFFECT: Final = frozenset(
    {"topics", "slaveConfig", "path", "log", "lastModified", "configFileChecksum"}
)
TOPIC_KEYS_WITHOUT_EFFECT: Final = frozenset({"topic", "filterClassNames"})


class KeyKind(enum.Enum):
    """Syntax of a value."""

    INTEGER = "integer"
    """An arithmetic expression within `low`..`high`."""
    BOOLEAN = "boolean"
    """`true` or `false`."""
    LENIENT_BOOLEAN = "lenient boolean"
    """`true` in any case is true, everything else is false (`stat` of a topic)."""
    TEXT = "text"
    """Any text, used unchanged."""
    ZNODE = "znode path"
    """An absolute path; slashes at its ends are normalized."""
    NAMES = "names"
    """Up to `NAMES_MAX` names, separated by commas."""
    POLICY = "delete policy"
    """`delete,<age>` or `archive,<age>[,<compress>]`."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of one kind of section."""

    name: str
    """Spelling in `server.ini`."""
    field: str
    kind: KeyKind = KeyKind.INTEGER
    unit: str = ""
    """Unit of an integer; "" for names, ports and switches."""
    low: int = 1
    high: int = INT32_MAX
    is_required: bool = False
    """Whether a blank or absent value is an error."""
    is_reloadable: bool = False
    """Whether a reload applies a change; otherwise it takes a restart."""

    def read(self, text: str) -> object:
        """Parse the text of a value, trimmed and not blank.

        Raises:
            ValueError: the text is not a value of this key; the message names the
                expected form.
        """
        match self.kind:
            case KeyKind.INTEGER:
                number = evaluate_integer(text)
                if not self.low <= number <= self.high:
                    raise ValueError(f"expected {self.low}..{self.high}, got {number}")
                return number
            case KeyKind.BOOLEAN:
                return evaluate_boolean(text)
            case KeyKind.LENIENT_BOOLEAN:
                return text.lower() == "true"
            case KeyKind.TEXT:
                return text
            case KeyKind.ZNODE:
                return "/" + text.strip("/")
            case KeyKind.NAMES:
                return read_names(text)
            case KeyKind.POLICY:
                return read_delete_policy(text)
            case _:
                assert_never(self.kind)


SYSTEM_KEYS: Final = (
    Key("brokerId", "broker_id", low=0, high=BROKER_ID_MAX, is_required=True),
    Key("hostName", "host_name", KeyKind.TEXT),
    Key("serverPort", "server_port", low=0, high=PORT_MAX),
    Key("dashboardHttpPort", "dashboard_http_port", low=0, high=PORT_MAX),
    Key("numPartitions", "partition_count", unit="partitions",
        high=PARTITION_COUNT_MAX, is_required=True),
    Key("dataPath", "data_path", KeyKind.TEXT),
    Key("dataLogPath", "data_log_path", KeyKind.TEXT),
    Key("appClassPath", "app_class_path", KeyKind.TEXT),
    Key("unflushThreshold", "unflush_threshold", unit="records", low=INT32_MIN,
        is_required=True),
    Key("unflushInterval", "unflush_interval_ms", unit="ms", low=INT32_MIN,
        is_required=True),
    Key("maxSegmentSize", "segment_bytes_max", unit="bytes", is_required=True),
    Key("maxTransferSize", "transfer_bytes_max", unit="bytes", is_required=True),
    Key("getProcessThreadCount", "get_thread_count", unit="threads", low=0,
        high=THREAD_COUNT_MAX),
    Key("putProcessThreadCount", "put_thread_count", unit="threads", low=0,
        high=THREAD_COUNT_MAX),
    Key("deletePolicy", "delete_policy", KeyKind.POLICY),
    Key("deleteWhen", "delete_when", KeyKind.TEXT),
    Key("quartzThreadCount", "quartz_thread_count", unit="threads",
        high=THREAD_COUNT_MAX),
    Key("maxCheckpoints", "checkpoints_max", unit="checkpoints",
        high=CHECKPOINTS_MAX_MAX),
    Key("checkpointInterval", "checkpoint_interval_ms", unit="ms", high=INT64_MAX),
    Key("maxTxTimeoutTimerCapacity", "tx_timer_capacity", unit="transactions"),
    Key("maxTxTimeoutInSeconds", "tx_timeout_s_max", unit="s"),
    Key("flushTxLogAtCommit", "flush_tx_log_at_commit", low=0, high=2),
    Key("acceptPublish", "accept_publish", KeyKind.BOOLEAN),
    Key("acceptSubscribe", "accept_subscribe", KeyKind.BOOLEAN),
    Key("stat", "stat", KeyKind.BOOLEAN),
    Key("updateConsumerOffsets", "update_consumer_offsets", KeyKind.BOOLEAN),
    Key("loadMessageStoresInParallel", "load_stores_in_parallel", KeyKind.BOOLEAN),
)  # fmt: skip

ZOOKEEPER_KEYS: Final = (
    Key("zk.zkConnect", "connect", KeyKind.TEXT),
    Key("zk.zkSessionTimeoutMs", "session_timeout_ms", unit="ms"),
    Key("zk.zkConnectionTimeoutMs", "connection_timeout_ms", unit="ms"),
    Key("zk.zkSyncTimeMs", "sync_time_ms", unit="ms", low=0),
    Key("zk.zkEnable", "is_enabled", KeyKind.BOOLEAN),
    Key("zk.zkRoot", "root", KeyKind.ZNODE),
)

REPLICATION_KEYS: Final = (
    Key("replicaId", "replica_id", high=9, is_required=True),
    Key("replicaLagTimeoutMs", "lag_timeout_ms", unit="ms", low=100),
)

LIMITS_KEYS: Final = (
    # The longest line of MetaQ's own clients has about 300 bytes.
    Key("lineBytesMax", "line_bytes_max", unit="bytes", low=512),
    Key("payloadBytesMax", "payload_bytes_max", unit="bytes"),
    Key("batchBytesMax", "batch_bytes_max", unit="bytes"),
    Key("batchRecordsMax", "batch_records_max", unit="records"),
    Key("connectionCountMax", "connection_count_max", unit="connections"),
    Key("connectionCountPerHostMax", "connection_count_per_host_max",
        unit="connections", low=0),
    Key("connectionBufferBytesMax", "connection_buffer_bytes_max", unit="bytes"),
    Key("connectionInFlightBytesMax", "connection_in_flight_bytes_max", unit="bytes"),
    Key("inFlightBytesMax", "in_flight_bytes_max", unit="bytes", high=INT64_MAX),
    Key("idleTimeoutMs", "idle_timeout_ms", unit="ms", low=0),
    Key("waitMsMax", "wait_ms_max", unit="ms", low=0),
    Key("waitersMax", "waiters_max", unit="long polls", low=0),
    Key("filterBytesPerS", "filter_bytes_per_s", unit="bytes/s", low=0),
    Key("queueOpenMax", "queue_open_max", unit="messages", low=1),
    Key("queueOpenBrokerMax", "queue_open_broker_max", unit="messages", low=1),
    Key("queueReclaimMs", "queue_reclaim_ms", unit="ms", low=0),
    Key("delayMax", "delay_max", unit="ms", low=1, high=INT64_MAX),
    Key("delayBytesMax", "delay_bytes_max", unit="bytes", low=0, high=INT64_MAX),
    Key("logBytesMax", "log_bytes_max", unit="bytes", low=0, high=INT64_MAX),
    Key("dataDirBytesMax", "data_dir_bytes_max", unit="bytes", low=0, high=INT64_MAX),
    Key("freeBytesMin", "free_bytes_min", unit="bytes", low=0, high=INT64_MAX),
    # A partition's producer file takes up to 2 KiB for each producer.
    Key("producerCountMax", "producer_count_max", unit="producers", high=16_384),
    Key("spanBytesMin", "span_bytes_min", unit="bytes"),
    Key("indexBytesPerS", "index_bytes_per_s", unit="bytes/s", low=0),
    Key("scrubBytesPerS", "scrub_bytes_per_s", unit="bytes/s", low=0),
    Key("shutdownTimeoutMs", "shutdown_timeout_ms", unit="ms"),
    Key("httpPort", "http_port", low=0, high=PORT_MAX),
    Key("httpHost", "http_host", KeyKind.TEXT),
    Key("slowSyncMs", "slow_sync_ms", unit="ms"),
    Key("txCountMax", "tx_count_max", unit="transactions"),
    Key("txBytesMax", "tx_bytes_max", unit="bytes", high=INT64_MAX),
    Key("txJournalBytesMax", "tx_journal_bytes_max", unit="bytes", high=INT64_MAX),
    Key("txJournalFileBytesMax", "tx_journal_file_bytes_max", unit="bytes"),
    Key("txInDoubtAlarmMs", "tx_in_doubt_alarm_ms", unit="ms", low=0),
)  # fmt: skip

TOPIC_KEYS: Final = (
    Key("numPartitions", "partition_count", unit="partitions",
        high=PARTITION_COUNT_MAX, is_reloadable=True),
    Key("stat", "stat", KeyKind.LENIENT_BOOLEAN, is_reloadable=True),
    Key("deletePolicy", "delete_policy", KeyKind.POLICY, is_reloadable=True),
    Key("deleteWhen", "delete_when", KeyKind.TEXT, is_reloadable=True),
    # No effect on open logs: their directory does not change.
    Key("dataPath", "data_path", KeyKind.TEXT),
    Key("unflushInterval", "unflush_interval_ms", unit="ms", low=INT32_MIN,
        is_reloadable=True),
    # No effect on open logs: their mode, group commit or threshold, does not change.
    Key("unflushThreshold", "unflush_threshold", unit="records", low=INT32_MIN),
    Key("acceptPublish", "accept_publish", KeyKind.BOOLEAN, is_reloadable=True),
    Key("acceptSubscribe", "accept_subscribe", KeyKind.BOOLEAN, is_reloadable=True),
    Key("index", "index", KeyKind.NAMES, is_reloadable=True),
)  # fmt: skip

METAQ_TOPIC_KEYS: Final = frozenset(key.name for key in TOPIC_KEYS) - {"index"}
"""Keys of MetaQ 1.4, which does not start with another key in a topic section."""

DEFINITION_KEYS: Final = tuple(
    key for key in TOPIC_KEYS if key.name not in {"numPartitions", "dataPath"}
)
"""Keys allowed for a topic created by command; paths differ between brokers."""

_ALPHABET = re.compile(r"[0-9+\-*/%() \t]+")
_AGE = re.compile(r"(?P<number>\d{1,19})(?P<unit>[smh])?", re.ASCII)
_LEADING_ZEROS = re.compile(r"\b0+(?=[0-9])")


def _divide(left: int, right: int) -> int:
    if right == 0:
        raise ValueError("division by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    return left - right * _divide(left, right)


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: _remainder,
}


def evaluate_integer(text: str) -> int:
    """Evaluate an integer expression of at most `EXPRESSION_CHARS_MAX` characters.

    Raises:
        ValueError: a syntax error, a division by zero, or a number beyond 64 bits.
    """
    if len(text) > EXPRESSION_CHARS_MAX:
        raise ValueError(
            f"expected at most {EXPRESSION_CHARS_MAX} characters, got {len(text)}"
        )
    if _ALPHABET.fullmatch(text) is None:
        raise ValueError("expected a whole number or an expression such as 1024*1024")
    try:
        tree = ast.parse(_LEADING_ZEROS.sub("", text.strip()), mode="eval")
    except SyntaxError as error:
        raise ValueError("the expression is not well formed") from error
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            result = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("only + - * / % and parentheses are understood")
    if not INT64_MIN <= result <= INT64_MAX:
        raise ValueError(f"expected a signed 64-bit number, got {result}")
    return result


def evaluate_boolean(text: str) -> bool:
    """Parse a boolean literal.

    Raises:
        ValueError: the text is neither `true` nor `false`.
    """
    if text not in {"true", "false"}:
        raise ValueError("expected true or false")
    return text == "true"


def read_delete_policy(text: str) -> DeletePolicy:
    """Parse `delete,<age>` or `archive,<age>[,<compress>]`.

    An age is a whole number with the suffix `s`, `m` or `h`; hours without a suffix.
    Source: docs/metaq-1.4/broker.md 2.9.

    Raises:
        ValueError: the text is not such a policy; the message names the forms.
    """
    kind, compress = DeleteKind.ARCHIVE, "false"
    match [part.strip() for part in text.split(",")]:
        case ["delete", age]:
            kind = DeleteKind.DELETE
        case ["archive", age]:
            pass
        case ["archive", age, compress]:
            compress = compress.lower()
        case _:
            age = ""
    found = _AGE.fullmatch(age)
    if found is None or compress not in {"true", "false"}:
        raise ValueError(f"{DELETE_POLICY_FORMS}, got '{text}'")
    units = {"s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS}
    age_ms = int(found["number"]) * units.get(found["unit"], HOUR_MS)
    if age_ms > DELETE_AGE_MS_MAX:
        raise ValueError(f"expected an age of at most a century, got '{text}'")
    return DeletePolicy(kind=kind, age_ms=age_ms, is_compressed=compress == "true")


def read_names(text: str) -> tuple[str, ...]:
    """Parse names separated by commas; repeated names count once.

    Raises:
        ValueError: a name is empty, or there are more than `NAMES_MAX`.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names or len(names) > NAMES_MAX:
        raise ValueError(f"expected 1 to {NAMES_MAX} names, a,b,c, got '{text}'")
    return names


def nearest_key(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate with the smallest edit distance; among equals, the first."""
    cut = name[:SUGGESTION_CHARS_MAX]
    return min(candidates, key=lambda candidate: edit_distance(cut, candidate))


def edit_distance(left: str, right: str) -> int:
    """Return the Levenshtein distance of two texts."""
    row = list(range(len(right) + 1))
    for i, char in enumerate(left, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(right, 1):
            changed = diagonal + (char != other)
            diagonal = row[j]
            row[j] = min(changed, row[j] + 1, row[j - 1] + 1)
    return row[-1]
