"""Composition of requests, and reactions to failures. Pure.

A batch is cut into spans as its broker takes them: one `mput`, several where the broker
announced less than a batch holds, or runs of single puts where the broker knows no
`mput`. Each leaves as a request, perhaps several times, until it has an outcome.

After a failure a request is in one of two states. *Certainly not stored*: it never
left, or the broker refused it; then it may go elsewhere. *In doubt*: it was sent, and
the connection broke before the answer, or the answer says that the disk failed during
the write. It keeps this state: it goes to the same partition again, under the same
sequence, where a broker that announced `dedup` recognises it.

Source: docs/protocol.md "mput"; docs/metaq-1.4/client.md 7.3, 7.6, 16.5.
"""

import enum
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NamedTuple

from metaq.client.errors import NoDelayError, NoExchangesError, OutcomeUnknownError
from metaq.errors import (
    OUTCOME_UNKNOWN,
    BadReplyError,
    ClosedError,
    ConnectionLostError,
    DiskFailedError,
    ForbiddenError,
    MetaqError,
    NoBrokerError,
    NoRoomError,
    NotLeaderError,
    NotSentError,
    RequestTimeoutError,
    TooFewReplicasError,
    UnavailableError,
    UnknownPutError,
)
from metaq.model import TopicPartition
from metaq.protocol.version import Capabilities
from metaq.record.layout import HEADER_BYTES, PAYLOAD_BYTES_MAX

NEVER_LEFT: Final = (NoBrokerError, NotSentError, ClosedError)
"""Errors after which the broker certainly knows nothing of a command."""

IN_DOUBT: Final = (ConnectionLostError, UnknownPutError, BadReplyError)
"""Errors after which a command may be stored; it may be sent again."""

IN_DOUBT_FINAL: Final = (RequestTimeoutError, DiskFailedError)
"""The same, of a command that may not: its deadline was that of the messages, so there
is no time (`AttemptLimits.answer_timeout_s` leaves some); or its broker will not
recognise it."""

REFUSALS: Final = (ForbiddenError, NoRoomError, UnavailableError)
"""Answers of a broker that did not store a command, and may store it later."""

PASSING: Final = (NotLeaderError, TooFewReplicasError)
"""Those of a replica set while its leader changes: they end by themselves."""

PUTS_MAX: Final = 500
"""Single puts that leave together, to a broker without `mput`: their replies are
handled together as well, while the next ones leave."""

PUTS_BYTES_MAX: Final = 256 * 1024
"""Record bytes of them; a larger one leaves alone."""


WRAPPER_BYTES: Final = 29
"""Bytes that a broker adds to messages with one time, besides their topic and the
header of the record that they wait in."""


class Reaction(enum.Enum):
    """The next step of a request after a failure."""

    AGAIN = "again"
    """It goes to the same partition once more."""
    MOVE = "move"
    """It goes to another partition, or here again when there is none."""
    FAIL = "fail"
    """Its senders get the error."""


class BatchSpan(NamedTuple):
    """Neighbours in a batch that leave together."""

    first: int
    """Number of its first message in the batch."""
    end: int
    """Number of the message after its last one."""
    is_mput: bool
    """True for one `mput`; False for a put of each message."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Bounds of a delivery that ends with its first failure, on top of deadlines.

    For one whose caller repeats everything from the beginning, as a task of Spark does.
    A refusal is final there, unless it is one of a replica set (`PASSING`).
    """

    answer_timeout_s: float
    """Longest wait for one answer, then the request is sent again; longest time of
    attempts to connect again, then it has failed."""
    retries_max: int
    """Times that a request is sent again."""


def on_failure(
    error: MetaqError,
    *,
    may_move: bool,
    is_in_doubt: bool,
    has_dedup: bool,
    retry_unknown: bool,
    attempt: int = 1,
    limits: AttemptLimits | None = None,
) -> tuple[Reaction, bool]:
    """Decide about a request that failed before its deadline.

    Args:
        error: the error of the attempt.
        may_move: its messages may go to another partition.
        is_in_doubt: an earlier attempt may have stored it.
        has_dedup: the broker recognises what it has stored already.
        retry_unknown: send again what may be stored, also to other brokers.
        attempt: its number, from 1 on.
        limits: of its attempts; None leaves the end to the deadline.

    Returns:
        The reaction, and `is_in_doubt` from now on.
    """
    in_doubt: tuple[type[MetaqError], ...] = IN_DOUBT
    if limits is not None and not isinstance(error, PASSING):
        in_doubt += (RequestTimeoutError,)
        if isinstance(error, REFUSALS) or attempt > limits.retries_max:
            is_unknown = isinstance(error, in_doubt + IN_DOUBT_FINAL)
            return Reaction.FAIL, is_in_doubt or is_unknown
    if isinstance(error, in_doubt):
        again = has_dedup or retry_unknown
        return (Reaction.AGAIN if again else Reaction.FAIL), True
    if isinstance(error, NEVER_LEFT + REFUSALS):
        moves = may_move and not is_in_doubt
        return (Reaction.MOVE if moves else Reaction.AGAIN), is_in_doubt
    return Reaction.FAIL, is_in_doubt or isinstance(error, IN_DOUBT_FINAL)


def final_error(
    error: MetaqError, partition: TopicPartition, *, is_in_doubt: bool
) -> MetaqError:
    """Return the error for the senders of a request's messages."""
    if not is_in_doubt or isinstance(error, OutcomeUnknownError):
        return error
    # The error of a lost connection says so itself.
    prefix = "" if str(error).endswith(OUTCOME_UNKNOWN) else f"{OUTCOME_UNKNOWN}: "
    final = OutcomeUnknownError(f"{partition}: {prefix}{error}")
    final.__cause__ = error
    return final


def plan_spans(
    ends: Sequence[int],
    first: int,
    end: int,
    capabilities: Capabilities,
    puts_max: int = PUTS_MAX,
) -> list[BatchSpan]:
    """Cut messages `first` up to `end` of a batch into spans that their broker takes.

    Args:
        ends: record bytes of the batch up to each message, beginning with 0.
        first: the first message.
        end: the message after the last one; above `first`.
        capabilities: of the broker.
        puts_max: most single puts that leave together.

    Returns:
        Spans in order. A record above the broker's batch limit is a put,
        and so is one above its limit of payloads: refused, it takes no other with it.
    """
    bytes_max = capabilities.batch_bytes_max
    count_max = capabilities.batch_records_max or end - first
    if not capabilities.has_mput:
        bytes_max, count_max = PUTS_BYTES_MAX, puts_max
    spans = []
    while first < end:
        stop = min(end, first + count_max)
        fits = True
        if bytes_max is not None:
            limit = ends[first] + bytes_max
            stop = max(first + 1, bisect_right(ends, limit, first, stop + 1) - 1)
            fits = ends[stop] <= limit
        refused = _first_refused(ends, first, stop, _record_bytes_max(capabilities))
        if refused is not None:
            stop, fits = max(first + 1, refused), fits and refused > first
        spans.append(BatchSpan(first, stop, is_mput=fits and capabilities.has_mput))
        first = stop
    return spans


def cut_by_time(spans: Sequence[BatchSpan], times: Sequence[int]) -> list[BatchSpan]:
    """Return spans of messages with one time each, for a broker that takes no others.

    Args:
        spans: of a batch.
        times: of each of its messages.
    """
    found = list[BatchSpan]()
    for first, end, is_mput in spans:
        for _, group in groupby(range(first, end), times.__getitem__):
            stop = first + len(list(group))
            found.append(BatchSpan(first, stop, is_mput))
            first = stop
    return found


def for_one_time(capabilities: Capabilities, topic: str) -> Capabilities:
    """Return what a broker takes of messages with a time, one record there."""
    payload_max = capabilities.payload_bytes_max or PAYLOAD_BYTES_MAX
    bytes_max = payload_max - WRAPPER_BYTES - len(topic.encode())
    return replace(
        capabilities,
        payload_bytes_max=bytes_max - HEADER_BYTES,
        batch_bytes_max=min(bytes_max, capabilities.batch_bytes_max or bytes_max),
    )


def no_delay(broker: str, capabilities: Capabilities) -> NoDelayError:
    """Return the error of a message with a time, for a broker that takes none."""
    return NoDelayError(
        f"{broker} delivers no message later: it is of MetaQ 1.4, an older one, or a"
        f" replica of a set (version {capabilities.version}); nothing was sent"
    )


def no_exchanges(broker: str, capabilities: Capabilities) -> NoExchangesError:
    """Return the error of a message for an exchange, for a broker that has none."""
    return NoExchangesError(
        f"{broker} has no exchanges: its version is {capabilities.version}; nothing was"
        " sent"
    )


def _first_refused(
    ends: Sequence[int], first: int, stop: int, limit: int
) -> int | None:
    """Return the first message whose record is over a limit; None: there is none."""
    if ends[stop] - ends[first] <= limit:
        return None
    return next(
        (at for at in range(first, stop) if ends[at + 1] - ends[at] > limit), None
    )


def _record_bytes_max(capabilities: Capabilities) -> int:
    return HEADER_BYTES + (capabilities.payload_bytes_max or PAYLOAD_BYTES_MAX)
