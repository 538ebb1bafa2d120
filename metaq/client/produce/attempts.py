"""Composition of requests, and reactions to failures. Pure.

A batch is cut into spans that its broker accepts: one `mput`; several, if the batch
exceeds the limits that the broker announced; or runs of single puts, if the broker has
no `mput`. Each span is sent as one request, and retried until it has an outcome.

After a failure a request is in one of two states. *Certainly not stored*: it never
left, or the broker refused it; it may go to another partition. *In doubt*: it was sent,
and the connection broke before the reply, or the reply says that the disk failed during
the write. A request in doubt stays so: it is sent to the same partition again, under
the same sequence, by which a broker that announced `dedup` recognises it.

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
"""Errors after which the broker certainly did not receive a command."""

IN_DOUBT: Final = (ConnectionLostError, UnknownPutError, BadReplyError)
"""Errors after which a command may be stored; it may be sent again."""

IN_DOUBT_FINAL: Final = (RequestTimeoutError, DiskFailedError)
"""Errors after which a command may be stored and is not sent again: its deadline, which
is that of its messages, has passed (`AttemptLimits.answer_timeout_s` ends earlier); or
the broker would not recognise it."""

REFUSALS: Final = (ForbiddenError, NoRoomError, UnavailableError)
"""Errors of a broker that did not store a command, and may store it later."""

PASSING: Final = (NotLeaderError, TooFewReplicasError)
"""Refusals of a replica set while its leader changes; they are temporary."""

PUTS_MAX: Final = 500
"""Maximum number of single puts sent together to a broker without `mput`. Their replies
are handled together too, while the next puts are sent."""

PUTS_BYTES_MAX: Final = 256 * 1024
"""Maximum record bytes of puts sent together; a larger record is sent alone."""


WRAPPER_BYTES: Final = 29
"""Bytes that a broker adds to messages with the same delivery time, besides their topic
and the header of the record that holds them until then."""


class Reaction(enum.Enum):
    """The next step of a request after a failure."""

    AGAIN = "again"
    """Send it to the same partition again."""
    MOVE = "move"
    """Send it to another partition, or to the same one if there is no other."""
    FAIL = "fail"
    """Report the error to the callers."""


class BatchSpan(NamedTuple):
    """Contiguous messages of a batch that are sent together."""

    first: int
    """Index of the first message in the batch."""
    end: int
    """Index after the last message."""
    is_mput: bool
    """True for one `mput`; False for a put of each message."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Limits, besides deadlines, of a delivery that ends with its first failure.

    For callers that repeat everything from the beginning after a failure, as a Spark
    task does. A refusal is final, unless it is one of a replica set (`PASSING`).
    """

    answer_timeout_s: float
    """Maximum wait for one reply, after which the request is sent again; maximum time
    to reconnect, after which the delivery fails."""
    retries_max: int
    """Maximum number of times that a request is sent again."""


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
        may_move: whether its messages may go to another partition.
        is_in_doubt: whether an earlier attempt may have stored it.
        has_dedup: whether the broker recognises a request that it has stored.
        retry_unknown: send a request in doubt again even without `has_dedup`.
        attempt: number of the attempt, from 1.
        limits: of attempts; None for the deadline only.

    Returns:
        The reaction, and the new `is_in_doubt`.
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
    """Return the error for the callers that sent a request's messages."""
    if not is_in_doubt or isinstance(error, OutcomeUnknownError):
        return error
    # The text of ConnectionLostError ends with it already.
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
    """Cut messages `first` up to `end` of a batch into spans that the broker accepts.

    Args:
        ends: record bytes of the batch up to each message, beginning with 0.
        first: index of the first message.
        end: index after the last message; above `first`.
        capabilities: of the broker.
        puts_max: maximum number of single puts sent together.

    Returns:
        Spans in order. A record above the broker's limit for batches or for payloads
        is a span of its own, a put: its refusal affects no other message.
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
    """Cut spans so that all messages of one have the same delivery time.

    For brokers that accept one time per command.

    Args:
        spans: of a batch.
        times: delivery time of each message of the batch.
    """
    found = list[BatchSpan]()
    for first, end, is_mput in spans:
        for _, group in groupby(range(first, end), times.__getitem__):
            stop = first + len(list(group))
            found.append(BatchSpan(first, stop, is_mput))
            first = stop
    return found


def for_one_time(capabilities: Capabilities, topic: str) -> Capabilities:
    """Return the limits for delayed messages, which a broker holds in one record."""
    payload_max = capabilities.payload_bytes_max or PAYLOAD_BYTES_MAX
    bytes_max = payload_max - WRAPPER_BYTES - len(topic.encode())
    return replace(
        capabilities,
        payload_bytes_max=bytes_max - HEADER_BYTES,
        batch_bytes_max=min(bytes_max, capabilities.batch_bytes_max or bytes_max),
    )


def no_delay(broker: str, capabilities: Capabilities) -> NoDelayError:
    """Return the error of a delayed message for a broker without delays."""
    return NoDelayError(
        f"{broker} does not support scheduled messages: it is of MetaQ 1.4, an older"
        f" version, or a replica of a set (version {capabilities.version}); nothing"
        " was sent"
    )


def no_exchanges(broker: str, capabilities: Capabilities) -> NoExchangesError:
    """Return the error of a message to an exchange for a broker without exchanges."""
    return NoExchangesError(
        f"{broker} does not support exchanges: its version is {capabilities.version};"
        " nothing was sent"
    )


def _first_refused(
    ends: Sequence[int], first: int, stop: int, limit: int
) -> int | None:
    """Return the index of the first message whose record exceeds a limit, or None."""
    if ends[stop] - ends[first] <= limit:
        return None
    return next(
        (at for at in range(first, stop) if ends[at + 1] - ends[at] > limit), None
    )


def _record_bytes_max(capabilities: Capabilities) -> int:
    return HEADER_BYTES + (capabilities.payload_bytes_max or PAYLOAD_BYTES_MAX)
