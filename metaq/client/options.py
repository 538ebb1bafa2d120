"""Options of users, with defaults: the keyword arguments of the client's objects.

Each field is a keyword of `Client`, `client.producer` or `client.consumer`, in both
worlds. Times are seconds and sizes bytes, as the names say. Every queue, batch, retry
and wait of the client is bounded by one of these fields. A value out of its range is a
`ConfigError` that names the field; two that contradict each other are one that names
both; a value of another type, and a name that is no option, are a `TypeError` that
names the wanted type, or the nearest option.
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
from metaq.model import Message, Offset, TopicPartition
from metaq.peer.options import ConnectionOptions
from metaq.zk.paths import DEFAULT_ROOT, is_legal_step, normalize_root

MIB: Final = 1024 * 1024

P = ParamSpec("P")
R = TypeVar("R")

SESSION_TIMEOUT_S_MAX: Final = (2**31 - 1) / 1000
"""Greatest time-out for ZooKeeper: milliseconds in 32 bits, signed."""

Start: TypeAlias = (
    Literal["earliest", "latest"] | datetime | Offset | Mapping[TopicPartition, Offset]
)
"""Start of a group without a committed offset: the log start, the log end, the first
message of a time, an offset for every partition, or one for each."""

Hook: TypeAlias = Callable[[Any, frozenset[TopicPartition]], object]
"""Called with the consumer and partitions; in the async world it may be a coroutine
function."""

HOOKS: Final = ("on_assigned", "on_revoked", "on_lost")

IN_FLIGHT_BATCHES_MAX: Final = 5
"""More than that are not remembered by brokers, so they could be stored twice."""


LEASE_S_MAX: Final = 43_200
"""Longest lease of a message: 12 h."""
DELAY_S_MAX: Final = 86_400
"""Longest delay of a returned message: 24 h."""
DELIVERIES_MAX: Final = 1_000
PREFETCH_MAX: Final = 20_000
"""So many messages of one partition are open at most, over all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions(ConnectionOptions):
    """Connection of a client to brokers and ZooKeeper."""

    root: str = DEFAULT_ROOT
    """Root of MetaQ's tree in ZooKeeper."""
    session_timeout_s: float = 30.0
    """ZooKeeper session time-out to ask for, which the server may change: how long a
    member may be silent before its partitions go to others."""
    request_timeout_s: float = 10.0
    """Bound on one question to a broker, on top of the wait of a long poll."""
    metadata_s: float = 30.0
    """Interval at which brokers named by address are asked for their topics."""
    close_timeout_s: float = 10.0
    """Bound on closing a producer or the connections, when the caller gives none."""

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
    """Bound on each send, all retries included, when the caller gives none. It outlives
    a restart of a broker, and two failovers of a replica set."""
    linger_s: float = 0.0
    """Time for which a batch waits for more messages while its partition is idle. With
    0 batches still form: messages appended while others are in flight are one."""
    batch_bytes_max: int = MIB
    """Largest batch; a broker that announces less is given less."""
    batch_count_max: int = 16_384
    """Most messages in a batch; a broker that announces less is given less."""
    in_flight_batches_max: int = 3
    """Batches of one partition that are sent and not answered, 1..5. With 1 each put
    to a MetaQ 1.4 broker keeps its place in the order, and so does a refused and
    repeated batch of messages with a time, or to an exchange."""
    buffer_bytes_max: int = 64 * MIB
    """Most bytes that are appended and not answered, over all topics."""
    buffer_count_max: int = 1_000_000
    """Most messages that are appended and not answered."""
    when_full: Literal["block", "raise"] = "block"
    """Behaviour of `send_nowait` without room: wait, or raise `BufferFullError`."""
    retry_unknown: bool = True
    """Send a batch again when it is in doubt. Brokers of this package
    recognise the repetition; a MetaQ 1.4 broker stores it twice. With False the error
    says that the outcome is unknown."""
    retry_first_s: float = 0.02
    """Longest pause before the first repetition; doubles from there."""
    retry_max_s: float = 1.0
    """Longest pause between repetitions; the deadline ends them."""
    transaction_timeout_s: float = 30.0
    """Longest time of a transaction from its first message on, when the caller says
    nothing else; then its broker rolls back what is neither prepared nor committed."""

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
    """Start without a committed offset: `"earliest"`, `"latest"`, a `datetime`, an
    offset for every partition, or a mapping of partitions to offsets."""
    ignore_committed: bool = False
    """Begin at `start` even where an offset is committed."""
    strategy: Literal["DEFAULT", "CONSIST"] = "DEFAULT"
    """Division of partitions, by MetaQ's names: ranges, or consistent hashing; all
    members of a group need the same."""
    consumer_id: str | None = None
    """Last part of the member's name, without blanks and `/`; None makes MetaQ's
    `<ip>-<pid>-<uuid>`."""
    commit_interval_s: float | None = 5.0
    """Interval of commits of handled offsets, which are committed, too, before a
    partition goes and on `close`. None: only `commit` commits, and what was handled
    without it is delivered again."""
    fetch_bytes: int = MIB
    """Size of one get; grows for a larger message and falls back."""
    fetch_bytes_max: int = 64 * MIB
    """Largest record that is fetched."""
    buffer_bytes_max: int = 16 * MIB
    """No further get is sent at or above so many fetched bytes that were not handed
    out, over all partitions; gets in flight still come: at most as much again, or
    64 KiB for each partition."""
    buffer_count_max: int = 200_000
    """Bound on fetched messages that were not handed out."""
    wait_s: float = 10.0
    """Longest wait of a long poll; a broker that announces less is asked for less."""
    idle_step_s: float = 0.5
    """Without long poll: the pause after an empty get grows by so much."""
    idle_max_s: float = 5.0
    """Without long poll: longest pause after empty gets."""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """A damaged record ends the consumer with an error that names it, or is skipped,
    logged and counted."""
    where: str | None = None
    """Messages for which this condition is not true are counted as handled, not
    delivered: `"tag IN ('paid', 'void') AND amount > 100"`. Brokers that announce
    `filter` do not even send them. All members of a group have the same one."""
    message_filter: Callable[[Message], bool] | None = None
    """Messages for which it returns False are counted as handled, not delivered."""
    on_expired: Literal["skip", "deliver"] = "skip"
    """Messages that are read later than their senders' `expires_in` says are counted
    and passed over, or delivered all the same."""
    skip_repeats: bool = True
    """Messages that this process has handled are not delivered to it again after a
    lost session or a late rebalance; `seek` and `rollback` ask for them. What
    was handled with `commit_interval_s=None`, or with hooks, comes again."""
    duplicate_ids: DuplicateIds | None = None
    """Cache in which members of a group share the ids of handled messages: a message
    whose id is there counts as handled and is not delivered. None: none."""
    revoke_timeout_s: float = 30.0
    """Time for which a rebalance waits for a message being handled and, after it, for
    `on_revoked`; then the partition goes, and a late commit is refused."""
    on_assigned: Hook | None = None
    """Called with the consumer and a frozenset of partitions before the first of their
    messages is handed out; may `seek`."""
    on_revoked: Hook | None = None
    """Called before partitions go to another member, or `close`; they are ours still,
    and it may `commit`. If it raises, or is late, nothing more of them is committed."""
    on_lost: Hook | None = None
    """Called with partitions that went without `on_revoked`, or during it: the session
    was lost, or the time was over. `commit` raises `OwnershipLostError` in it."""
    watchdog_s: float | None = 60.0
    """No progress for so long although there is data and a free worker: an error.
    Counts as twice `idle_max_s` at least. None trusts that it never happens."""

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

    Those that may be None are the group's: the first worker defines it, and another one
    need not repeat them. One that says something else is refused.
    """

    prefetch: int = 32
    """Most messages of each broker that are here and not settled; more are taken when
    half of them are. With `run` at least `concurrency`. 1: a busy worker holds none
    that another one could handle."""
    prefetch_bytes: int = 4 * MIB
    """Most bytes of them; one message may be larger."""
    handle_s_max: float = 1800.0
    """A lease is renewed for so long, from the moment when its message was handed out,
    or came and waits. Then it ends, and another worker gets the message."""
    lease_s: float | None = None
    """Time for which a message is its worker's, unless that renews it, 1 s to 12 h. Of
    a new group: 30 s."""
    deliveries_max: int | None = None
    """Deliveries of a message after which it is given up, 1 to 1,000. Of a new
    group: 16."""
    then: Literal["dead_letter", "drop"] | None = None
    """A message that is given up or rejected becomes a dead letter, or is dropped. A
    new group needs this, or `dead_letter_topic`."""
    dead_letter_topic: str | None = None
    """Topic of the dead letters, which exists; says `then="dead_letter"`."""
    retry_delays_s: Sequence[float] | None = None
    """Delays after a nack that names none, by the number of deliveries so far; the last
    one repeats, and () is none. Of a new group: 1, 5, 30 and 120 s."""
    ordered_by: Literal["key"] | None = None
    """One message of each key at a time, in order, over all workers. Of a new group:
    in any order."""
    start: Literal["earliest", "latest"] | None = None
    """Start of a new group: the log start, unless it says `"latest"`."""
    where: str | None = None
    """Filter (docs/messaging.md): a message that does not match is no message of the
    group. `metaq queues alter` changes it. Of a new group: all messages."""

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
        """Return what they say of the group, by the names of its definition."""
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
    """Refuse a text that is no filter; None is none.

    The first one on an event loop is only looked at by `load_filter`: to load the
    parser would hold up the loop.
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
    """Return the filter of a text; the parser is loaded on another thread.

    Raises:
        FilterError, TypeError: as `parse_filter`.
    """
    if text is None:
        return None
    if not has_parser():
        await asyncio.to_thread(parse_filter, text)
    return parse_filter(text)


def check_lease(name: str, value: float | None) -> None:
    """Refuse a time that no lease can have; None is no time.

    Raises:
        TypeError, ConfigError: not from 1 s to 12 h.
    """
    if value is not None:
        check_seconds(name, value)
        if not 1 <= value <= LEASE_S_MAX:
            raise ConfigError(f"{name}: expected 1 to {LEASE_S_MAX} s, got {value}")


def check_delay(name: str, value: float) -> None:
    """Refuse a time that no returned message can wait.

    Raises:
        TypeError, ConfigError: not from 0 to 24 h.
    """
    check_seconds(name, value)
    if value > DELAY_S_MAX:
        raise ConfigError(f"{name}: expected 0 to {DELAY_S_MAX} s, got {value}")


def takes_options(kind: type[object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function that takes `**options` name them: in its help and its errors.

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
    """Have a call name itself where arguments are missing, or by another name."""
    return with_signature(function, inspect.signature(function), function.__doc__)


def with_signature(
    function: Callable[..., R], signature: inspect.Signature, text: str | None
) -> Callable[..., R]:
    """Return a function with these arguments and this text, which its errors name.

    The first one is the object. Wrong arguments are looked for at a failure, but for a
    function that takes any name: a call that is right pays next to nothing.
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
    """Return the error of a call, named by its title, with an argument that it lacks.

    The text has our name for it, the nearest of `names`, or all of them.
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
    """Refuse a value that cannot be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        raise wrong_type(name, "a function", value)


def check_methods(name: str, value: object, protocol: type) -> None:
    """Refuse a value that is no object with the methods of a protocol.

    Raises:
        TypeError: it lacks one, or is a class.
    """
    methods = [each for each in vars(protocol) if not each.startswith("_")]
    lacks = [each for each in methods if not callable(getattr(value, each, None))]
    if lacks or isinstance(value, type):
        raise wrong_type(name, f"an object with {' and '.join(methods)}", value)


def check_plain_function(name: str, value: object) -> None:
    """Refuse a value that cannot be called, or does nothing when it is.

    Raises:
        TypeError: it cannot be called.
        ConfigError: a call only returns a coroutine or an iterator.
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
    """Refuse values of another type, and numbers not above 0; `zero` may be 0.

    Raises:
        TypeError: a value is of another type than its field.
        ConfigError: a number is out of range, or a text is none of the choices.
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
    """Refuse two numbers that contradict each other.

    Raises:
        ConfigError: the low one is above the high one, or equal where it may not be.
    """
    one, other = getattr(options, low), getattr(options, high)
    if one > other or (one == other and not may_be_equal):
        bound = "at most" if may_be_equal else "less than"
        raise ConfigError(f"{low}: expected {bound} {high}, got {one} and {other}")


def check_start(start: object, name: str = "start") -> None:
    """Refuse a value that is no start of any partition; errors begin with the name.

    Raises:
        TypeError: it is none of `Start`.
        ConfigError: a text is no start, or an offset of it is none.
    """
    if isinstance(start, str):
        _check_choice(name, start, ("earliest", "latest"))
    elif isinstance(start, Mapping):
        for partition, offset in start.items():
            if not isinstance(partition, TopicPartition):
                # It would never be looked up, and reading begin at the log start.
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
    """`ClientOptions` as keyword arguments; see there."""

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
    """`ProducerOptions` as keyword arguments; see there."""

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
    """`ConsumerOptions` as keyword arguments; see there."""

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
    """`QueueOptions` as keyword arguments; see there."""

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
