"""Options of users, with defaults: the keyword arguments of the client's objects.

Each field is a keyword of `Client`, `client.producer`, `client.consumer` or
`client.queue`, in both worlds. Times are in seconds and sizes in bytes, as the names
say. These fields bound every queue, batch, retry and wait of the client. Errors:
`ConfigError` for a value outside its range or two that contradict each other, which
names the fields; `TypeError` for a value of another type, which names the expected
type, or for an unknown option, which suggests the nearest one.
"""

import asyncio
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import (
    Any,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
)

from metaq.client.duplicate_ids import DuplicateIds
from metaq.client.foreign_names import OURS
from metaq.client.validation import (
    WIRE_BYTES_MAX,
    check_offset,
    check_seconds,
    check_whole,
    wrong_type,
)
from metaq.errors import ConfigError
from metaq.filter.language import Filter, has_parser, parse_filter
from metaq.model import Message, TopicPartition
from metaq.peer.options import ConnectionOptions
from metaq.zk.paths import DEFAULT_ROOT, is_legal_step, normalize_root

MIB: Final = 1024 * 1024

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

SESSION_TIMEOUT_S_MAX: Final = (2**31 - 1) / 1000
"""Maximum session time-out: ZooKeeper has milliseconds in a signed 32-bit integer."""

Start: TypeAlias = (
    Literal["earliest", "latest"] | datetime | int | Mapping[TopicPartition, int]
)
"""Start of a group without a committed offset: the log start, the log end, the first
message of a time or later, one offset for all partitions, or one for each partition."""

Hook: TypeAlias = Callable[[Any, frozenset[TopicPartition]], object]
"""Called with the consumer and a frozenset of partitions; may be a coroutine function
in the async world."""

HOOKS: Final = ("on_assigned", "on_revoked", "on_lost")

IN_FLIGHT_BATCHES_MAX: Final = 5
"""Number of batches that a broker remembers of each producer in a partition; a repeated
older one could be stored twice."""


LEASE_S_MAX: Final = 43_200
"""Maximum lease of a message: 12 h."""
DELAY_S_MAX: Final = 86_400
"""Maximum delay of a returned message: 24 h."""
DELIVERIES_MAX: Final = 1_000
PREFETCH_MAX: Final = 20_000
"""Maximum number of messages of one partition with workers, over all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions(ConnectionOptions):
    """Connection of a client to brokers and ZooKeeper."""

    root: str = DEFAULT_ROOT
    """Root of MetaQ's tree in ZooKeeper."""
    session_timeout_s: float = 30.0
    """ZooKeeper session time-out to request; the server may change it. A member that is
    silent for longer loses its partitions to others."""
    request_timeout_s: float = 10.0
    """Maximum time of one request to a broker, in addition to a long poll's wait."""
    metadata_s: float = 30.0
    """Interval at which brokers named by address are asked for their topics."""
    close_timeout_s: float = 10.0
    """Maximum time to close a producer or the connections, if the caller gives none."""

    def __post_init__(self) -> None:
        check_types(self, zero=("close_timeout_s",))
        normalize_root(self.root)
        if self.session_timeout_s > SESSION_TIMEOUT_S_MAX:
            raise ConfigError(
                f"session_timeout_s: expected at most {SESSION_TIMEOUT_S_MAX}, got"
                f" {self.session_timeout_s}"
            )
        check_order(self, "reconnect_first_s", "reconnect_max_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """Options of sending."""

    timeout_s: float = 30.0
    """Maximum time of each send, retries included, if the caller gives none. The
    default is longer than a broker restart, or two failovers of a replica set."""
    linger_s: float = 0.0
    """Time for which a batch waits for more messages while its partition is idle. Even
    with 0, messages appended while others are in flight are sent as one batch."""
    batch_bytes_max: int = MIB
    """Maximum size of a batch; lowered to the limit that a broker announces."""
    batch_count_max: int = 16_384
    """Maximum number of messages in a batch; lowered likewise."""
    in_flight_batches_max: int = 3
    """Maximum number of batches of one partition in flight, 1 to 5. 1 keeps the order
    also at a MetaQ 1.4 broker, and when batches of delayed messages, or to an exchange,
    are refused and sent again."""
    buffer_bytes_max: int = 64 * MIB
    """Maximum bytes appended and not yet answered, over all topics."""
    buffer_count_max: int = 1_000_000
    """Maximum number of messages appended and not yet answered, over all topics."""
    when_full: Literal["block", "raise"] = "block"
    """With full buffer memory `send_nowait` waits, or raises `BufferFullError`."""
    retry_unknown: bool = True
    """Whether a batch in doubt is sent again to a MetaQ 1.4 broker, which may store it
    twice. If False, `OutcomeUnknownError` is raised. Brokers of this package recognise
    a repetition, so it is always sent."""
    retry_first_s: float = 0.02
    """Maximum pause before the first retry; doubles with each further one."""
    retry_max_s: float = 1.0
    """Maximum pause between retries, which end at the deadline."""
    transaction_timeout_s: float = 30.0
    """Maximum time of a transaction from its first message on, if the caller gives
    none. Then its broker rolls it back, unless it is prepared or committed."""

    def __post_init__(self) -> None:
        check_types(self, zero=("linger_s",))
        check_order(self, "retry_first_s", "retry_max_s")
        # A batch that lingers past its deadline is never sent.
        check_order(self, "linger_s", "timeout_s", may_be_equal=False)
        if self.in_flight_batches_max > IN_FLIGHT_BATCHES_MAX:
            raise ConfigError(
                f"in_flight_batches_max: expected 1 to {IN_FLIGHT_BATCHES_MAX}, got"
                f" {self.in_flight_batches_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Options of fetching, handling and committing."""

    start: Start = "earliest"
    """Start of a partition without a committed offset: `"earliest"`, `"latest"`, a
    `datetime`, one offset for all partitions, or a mapping of partitions to offsets."""
    ignore_committed: bool = False
    """Whether to begin at `start` even if an offset is committed."""
    strategy: Literal["DEFAULT", "CONSIST"] = "DEFAULT"
    """Division of partitions, by MetaQ's names: ranges, or consistent hashing; must be
    the same for all members of a group. A difference is not detected, and may leave
    partitions unread."""
    consumer_id: str | None = None
    """Last part of the member's name, without blanks and `/`. None: MetaQ's
    `<ip>-<pid>-<uuid>`."""
    commit_interval_s: float | None = 5.0
    """Interval of automatic commits of handled offsets; they are also committed before
    a partition is revoked and on `close`. None: only `commit` commits, and messages
    handled but not committed are delivered again."""
    fetch_bytes: int = MIB
    """Size of one get; raised for a larger message, and lowered with many partitions
    (`buffer_bytes_max` is shared)."""
    fetch_bytes_max: int = 64 * MIB
    """Maximum size of a record."""
    buffer_bytes_max: int = 16 * MIB
    """Number of fetched bytes not yet handed out, over all partitions, at which no
    further get is sent. Gets in flight may add as much again, or 64 KiB for each
    partition."""
    buffer_count_max: int = 200_000
    """Number of fetched messages not yet handed out at which no further get is sent."""
    wait_s: float = 10.0
    """Maximum wait of a long poll; lowered to the limit that a broker announces."""
    idle_step_s: float = 0.5
    """Without long poll: increase of the pause after each empty get."""
    idle_max_s: float = 5.0
    """Without long poll: maximum pause after empty gets."""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """A damaged record ends the consumer with an error that names it, or is skipped,
    logged and counted."""
    where: str | None = None
    """Condition, such as `"tag IN ('paid', 'void') AND amount > 100"`. Messages for
    which it is not true count as handled and are not delivered; brokers that announce
    `filter` do not send them. Must be the same for all members of a group."""
    message_filter: Callable[[Message], bool] | None = None
    """Messages for which it returns False count as handled and are not delivered."""
    on_expired: Literal["skip", "deliver"] = "skip"
    """Messages read after their sender's `expires_in` are skipped and counted, or
    delivered anyway."""
    skip_repeats: bool = True
    """Whether messages handled by this process are not delivered to it again after a
    lost session or a late rebalance, except after `seek` and `rollback`. With
    `commit_interval_s=None`, or with hooks, they are delivered again."""
    duplicate_ids: DuplicateIds | None = None
    """Cache of the ids of handled messages, which members of a group may share. A
    message whose id it has counts as handled and is not delivered. None: no cache."""
    revoke_timeout_s: float = 30.0
    """Maximum time, in total, for which a rebalance waits for a message being handled
    and then for `on_revoked`. Then the partition is released, and a late commit is
    refused."""
    on_assigned: Hook | None = None
    """Called with the consumer and a frozenset of partitions before their first
    messages are handed out; may `seek`."""
    on_revoked: Hook | None = None
    """Called before partitions are released, in a rebalance or on `close`; may
    `commit`. If it raises or is late, no more offsets of them are committed."""
    on_lost: Hook | None = None
    """Called with partitions that were lost without `on_revoked`, or during it, because
    the session was lost or the time was over. In it, `commit` raises
    `OwnershipLostError`."""
    watchdog_s: float | None = 60.0
    """Time without progress, although there is data and a free worker, after which the
    consumer fails; at least twice `idle_max_s`. None: no check."""

    def __post_init__(self) -> None:
        check_types(self, zero=("wait_s", "revoke_timeout_s"))
        # A get brings whole records of its size, the largest one included or not.
        check_order(self, "fetch_bytes", "fetch_bytes_max")
        check_whole("fetch_bytes_max", self.fetch_bytes_max, 1, WIRE_BYTES_MAX)
        check_start(self.start)
        if self.consumer_id is not None and (
            not is_legal_step(self.consumer_id)
            or self.consumer_id.split() != [self.consumer_id]
        ):
            raise ConfigError(
                "consumer_id: expected a name without blanks and '/', got"
                f" {self.consumer_id!r}"
            )
        for name in HOOKS:
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name))
        check_filter(self.where)
        if self.message_filter is not None:
            check_plain_function("message_filter", self.message_filter)
        if self.duplicate_ids is not None:
            check_methods("duplicate_ids", self.duplicate_ids, DuplicateIds)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of a worker, and of its queue group.

    Options that may be None belong to the group: the first worker defines it. Later
    workers need not repeat them; a worker with different ones is refused.
    """

    prefetch: int = 32
    """Maximum number of unsettled messages of each broker in this worker; more are
    taken once half of them are settled, or none waits to be handed out. `run` raises it
    to `concurrency`. With 1, a busy worker holds no message that another one could
    handle."""
    prefetch_bytes: int = 4 * MIB
    """Maximum bytes of these messages; a single message may be larger."""
    handle_s_max: float = 1800.0
    """Maximum time for which a lease is renewed, counted from when its message was
    handed out, or from its arrival if it still waits. Then another worker gets it."""
    lease_s: float | None = None
    """Time for which a worker has a message, unless it renews the lease, 1 s to 12 h.
    In a new group: 30 s."""
    deliveries_max: int | None = None
    """Number of deliveries after which a message is given up, 1 to 1,000. In a new
    group: 16."""
    then: Literal["dead_letter", "drop"] | None = None
    """A message that is given up or rejected becomes a dead letter, or is dropped. A
    new group needs this, or `dead_letter_topic`."""
    dead_letter_topic: str | None = None
    """Topic of the dead letters, which must exist; implies `then="dead_letter"`."""
    retry_delays_s: Sequence[float] | None = None
    """Delay of a nack without a delay, after the first, second, ... delivery; the last
    value repeats, and () means no delay. In a new group: 1, 5, 30 and 120 s."""
    ordered_by: Literal["key"] | None = None
    """Deliver messages of a key one at a time, in order, over all workers. In a new
    group: in any order."""
    start: Literal["earliest", "latest"] | None = None
    """Start of a new group: the log start, or with `"latest"` the log end."""
    where: str | None = None
    """Filter (docs/messaging.md): messages that do not match are not delivered. `metaq
    queues alter` changes it. In a new group: all messages."""

    def __post_init__(self) -> None:
        check_types(self, zero=())
        check_whole("prefetch", self.prefetch, 1, PREFETCH_MAX)
        check_lease("lease_s", self.lease_s)
        if self.deliveries_max is not None:
            check_whole("deliveries_max", self.deliveries_max, 1, DELIVERIES_MAX)
        check_filter(self.where)
        wrong = "drop" if self.dead_letter_topic is not None else "dead_letter"
        if self.then == wrong:
            raise ConfigError(
                "dead_letter_topic: expected a topic with then='dead_letter', and none"
                f" with 'drop', got {self.dead_letter_topic!r} and {self.then!r}"
            )
        delays: object = self.retry_delays_s
        if delays is not None and (
            isinstance(delays, str) or not isinstance(delays, Sequence)
        ):
            raise wrong_type("retry_delays_s", "a list of seconds", delays)
        for delay_s in self.retry_delays_s or ():
            check_delay("retry_delays_s", delay_s)

    def definition(self) -> dict[str, object]:
        """Return the group's options that are set, by their names in its definition."""
        delays_s, lease_s = self.retry_delays_s, self.lease_s
        wanted = {
            "lease_ms": None if lease_s is None else int(lease_s * 1000),
            "deliveries_max": self.deliveries_max,
            "then": self.then,
            "dead_letter_topic": self.dead_letter_topic,
            "retry_delays_ms": None
            if delays_s is None
            else tuple(int(each * 1000) for each in delays_s),
            "ordered_by": self.ordered_by,
            "start": self.start,
            "where": self.where,
        }
        return {name: each for name, each in wanted.items() if each is not None}


def check_filter(text: Any) -> None:
    """Refuse a filter that cannot be parsed; None is accepted.

    On an event loop without a loaded parser the filter is not checked, because loading
    the parser would block the loop; `load_filter` checks it later.

    Raises:
        FilterError, TypeError: as `parse_filter`.
    """
    if text is None:
        return
    if not isinstance(text, str) or has_parser() or not _is_on_loop():
        parse_filter(text)


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def load_filter(text: str | None) -> Filter | None:
    """Return the parsed filter; the parser is loaded on another thread.

    Raises:
        FilterError, TypeError: as `parse_filter`.
    """
    if text is None:
        return None
    if not has_parser():
        await asyncio.to_thread(parse_filter, text)
    return parse_filter(text)


def check_lease(name: str, value: float | None) -> None:
    """Refuse a lease outside 1 s to 12 h; None is accepted.

    Raises:
        TypeError: it is not a number.
        ConfigError: it is out of range.
    """
    if value is not None:
        check_seconds(name, value)
        if not 1 <= value <= LEASE_S_MAX:
            raise ConfigError(f"{name}: expected 1 to {LEASE_S_MAX} s, got {value}")


def check_delay(name: str, value: float) -> None:
    """Refuse a delay of a returned message outside 0 to 24 h.

    Raises:
        TypeError: it is not a number.
        ConfigError: it is out of range.
    """
    check_seconds(name, value)
    if value > DELAY_S_MAX:
        raise ConfigError(f"{name}: expected 0 to {DELAY_S_MAX} s, got {value}")


def takes_options(kind: type[object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function with `**options` so that its help and errors name them.

    Args:
        kind: the dataclass whose fields are the options.
    """
    options = inspect.signature(kind).parameters

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.name != "options"]
        full = signature.replace(parameters=[*own, *options.values()])
        lines = "".join(f"\n    {option}" for option in options.values())
        text = inspect.cleandoc(function.__doc__ or "")
        text = f"{text}\n\nOptions, as `{kind.__name__}` explains them:{lines}"
        return with_signature(function, full, text)

    return decorate


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method so that errors about its arguments name it."""
    return with_signature(function, inspect.signature(function), function.__doc__)


def names_calls(kind: type[T]) -> type[T]:
    """Decorate a class as `names_arguments` does all of its public methods."""
    for name, call in inspect.getmembers(kind, inspect.isfunction):
        if not (name.startswith("_") or hasattr(call, "__wrapped__")):
            setattr(kind, name, names_arguments(call))
    return kind


def names_fields(kind: type[T]) -> type[T]:
    """Decorate a dataclass so that errors about its arguments name it."""
    made: Any = kind
    made.__init__ = names_arguments(made.__init__)
    return kind


def with_signature(
    function: Callable[..., R], signature: inspect.Signature, text: str | None
) -> Callable[..., R]:
    """Return a method with this signature and docstring; its errors name the method.

    The first argument is the object. Arguments are checked only after a TypeError, so
    that correct calls cost almost nothing; if the function has `**keywords`, names are
    checked first.
    """
    names = {*list(signature.parameters)[1:]}
    kinds = {each.kind for each in inspect.signature(function).parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds

    def title(one: object) -> str:
        return f"{type(one).__name__}.{call.__name__}".removesuffix(".__init__")

    def check(one: object, keywords: Collection[str]) -> None:
        for name in {*keywords} - names:
            raise no_option(title(one), name, names)

    @functools.wraps(function)
    def call(self: Any, /, *args: Any, **keywords: Any) -> R:
        if takes_any:
            check(self, keywords)
        try:
            return function(self, *args, **keywords)
        except TypeError:
            check(self, keywords)
            try:
                signature.bind(self, *args, **keywords)
            except TypeError as error:
                raise TypeError(f"{title(self)}: {error}") from None
            raise

    vars(call)["__signature__"] = signature
    call.__doc__ = text
    return call


def no_option(title: str, name: str, names: Collection[str]) -> TypeError:
    """Return the error for an unknown argument of the call with this title.

    It suggests our name for it, the nearest of `names`, or lists all of them.
    """
    ours = OURS.get(name.replace(".", "_"))
    if ours is not None:
        return TypeError(f"{title}: no option '{name}'; here that is {ours}")
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {_listed(names)}"
    return TypeError(f"{title}: no option '{name}'; {hint}")


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def check_callable(name: str, value: object) -> None:
    """Raise TypeError if a value cannot be called."""
    if not callable(value):
        raise wrong_type(name, "a function", value)


def check_methods(name: str, value: object, protocol: type) -> None:
    """Raise TypeError unless a value is an instance with the methods of a protocol."""
    methods = [each for each in vars(protocol) if not each.startswith("_")]
    lacks = [each for each in methods if not callable(getattr(value, each, None))]
    if lacks or isinstance(value, type):
        raise wrong_type(name, f"an object with {' and '.join(methods)}", value)


def check_plain_function(name: str, value: object) -> None:
    """Refuse a value that is not a function which does its work when called.

    Raises:
        TypeError: it cannot be called.
        ConfigError: it is a coroutine function, or a generator function.
    """
    check_callable(name, value)
    call = getattr(value, "__call__", None)  # noqa: B004  # of an object that is called
    if any(
        inspect.iscoroutinefunction(part)
        or inspect.isasyncgenfunction(part)
        or inspect.isgeneratorfunction(part)
        for part in (value, call)
    ):
        raise ConfigError(
            f"{name}: expected a plain function, neither async nor a generator, got"
            f" {value!r}"
        )


_TYPES: Final = {bool: "True or False", str: "str"}


def check_types(options: Any, *, zero: Collection[str]) -> None:
    """Refuse values of the wrong type, and numbers below the minimum.

    Args:
        options: a dataclass object; its field types are the expected types.
        zero: fields that may be 0; other numbers must be positive.

    Raises:
        TypeError: a value is of another type than its field.
        ConfigError: a number is out of range, or a text is not one of the choices.
    """
    for field in fields(options):
        value, name, kind = getattr(options, field.name), field.name, field.type
        if type(None) in get_args(kind):
            if value is None:
                continue
            kind = get_args(kind)[0]
        if field.type is int:
            check_whole(name, value, 1)
        elif kind is float:
            check_seconds(name, value, may_be_zero=name in zero)
        elif get_origin(kind) is Literal:
            _check_choice(name, value, get_args(kind))
        elif kind in _TYPES and not isinstance(value, kind):
            raise wrong_type(name, _TYPES[kind], value)


def check_order(
    options: object, low: str, high: str, *, may_be_equal: bool = True
) -> None:
    """Refuse two options of which the lower bound is above the upper one.

    Raises:
        ConfigError: `low` is above `high`, or equal without `may_be_equal`.
    """
    one, other = getattr(options, low), getattr(options, high)
    if one > other or (one == other and not may_be_equal):
        bound = "at most" if may_be_equal else "less than"
        raise ConfigError(f"{low}: expected {bound} {high}, got {one} and {other}")


def check_start(start: object, name: str = "start") -> None:
    """Refuse a value that is not a `Start`; errors begin with the name.

    Raises:
        TypeError: it is of another type.
        ConfigError: the text, the offset, one of the offsets or the time is invalid.
    """
    if isinstance(start, str):
        _check_choice(name, start, ("earliest", "latest"))
    elif isinstance(start, Mapping):
        for partition, offset in start.items():
            if not isinstance(partition, TopicPartition):
                # Such a key would be ignored: reading would begin at the log start.
                raise wrong_type(name, "TopicPartition(...) as key", partition)
            check_offset(f"{name} of {partition}", offset)
    elif isinstance(start, int) and not isinstance(start, bool):
        check_offset(name, start)
    elif isinstance(start, datetime):
        try:
            start.timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise ConfigError(
                f"{name}: expected a time, got {start}: {error}"
            ) from error
    else:
        wanted = "earliest, latest, a datetime, an offset or a mapping of them"
        raise wrong_type(name, wanted, start)


def _check_choice(name: str, value: object, choices: Collection[str]) -> None:
    if not isinstance(value, str):
        raise wrong_type(name, f"str {' or '.join(choices)}", value)
    if value not in choices:
        raise ConfigError(f"{name}: expected {' or '.join(choices)}, got {value!r}")


class ClientKeywords(TypedDict, total=False):
    """Keyword arguments of `ClientOptions`."""

    root: str
    session_timeout_s: float
    connect_timeout_s: float
    request_timeout_s: float
    heartbeat_s: float
    heartbeat_timeout_s: float
    reconnect_first_s: float
    reconnect_max_s: float
    in_flight_bytes_max: int
    metadata_s: float
    close_timeout_s: float


class ProducerKeywords(TypedDict, total=False):
    """Keyword arguments of `ProducerOptions`."""

    timeout_s: float
    linger_s: float
    batch_bytes_max: int
    batch_count_max: int
    in_flight_batches_max: int
    buffer_bytes_max: int
    buffer_count_max: int
    when_full: Literal["block", "raise"]
    retry_unknown: bool
    retry_first_s: float
    retry_max_s: float
    transaction_timeout_s: float


class ConsumerKeywords(TypedDict, total=False):
    """Keyword arguments of `ConsumerOptions`."""

    start: Start
    ignore_committed: bool
    strategy: Literal["DEFAULT", "CONSIST"]
    consumer_id: str | None
    commit_interval_s: float | None
    fetch_bytes: int
    fetch_bytes_max: int
    buffer_bytes_max: int
    buffer_count_max: int
    wait_s: float
    idle_step_s: float
    idle_max_s: float
    on_corrupt: Literal["stop", "skip"]
    on_expired: Literal["skip", "deliver"]
    where: str | None
    message_filter: Callable[[Message], bool] | None
    skip_repeats: bool
    duplicate_ids: DuplicateIds | None
    revoke_timeout_s: float
    on_assigned: Hook | None
    on_revoked: Hook | None
    on_lost: Hook | None
    watchdog_s: float | None


class QueueKeywords(TypedDict, total=False):
    """Keyword arguments of `QueueOptions`."""

    prefetch: int
    prefetch_bytes: int
    handle_s_max: float
    lease_s: float | None
    deliveries_max: int | None
    then: Literal["dead_letter", "drop"] | None
    dead_letter_topic: str | None
    retry_delays_s: Sequence[float] | None
    ordered_by: Literal["key"] | None
    start: Literal["earliest", "latest"] | None
    where: str | None
