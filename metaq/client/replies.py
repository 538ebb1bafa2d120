"""What replies mean: values for what a client goes on with, errors for the rest. Pure.

Source: client spec 2.3, broker spec 1.4 to 1.6 and 1.12.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

from metaq.client.errors import UnexpectedReplyError
from metaq.errors import (
    DiskFailedError,
    NoRoomError,
    ServerError,
    UnavailableError,
    UnknownPutError,
    WireError,
)
from metaq.model import MessageId, Offset
from metaq.protocol.commands import Reply, Result, Value
from metaq.protocol.status import Status
from metaq.protocol.texts import (
    says_disk_failed,
    says_no_room,
    says_unknown,
    says_unregistered,
)

_NUMBER: Final = re.compile("[0-9]{1,19}")
"""Counts and offsets of 64 bits."""


@dataclass(frozen=True, slots=True)
class PutReceipt:
    """What a broker says about a put that is on its disk."""

    id: MessageId
    """Id of the message; of a batch, of its first one (`record.ids.id_after`)."""
    partition: int
    """The partition it went to, also when the broker chose."""
    offset: Offset
    """Offset of its first byte."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Bytes of the log; the last record may be cut short anywhere."""

    data: bytes
    """At least one byte, from the offset asked for on."""


@dataclass(frozen=True, slots=True)
class MovedTo:
    """The offset lies outside the log; read on at another one."""

    offset: Offset
    """The log start, or the log end."""


@dataclass(frozen=True, slots=True)
class NothingThere:
    """No data at this offset now, or no such partition on this broker's disk yet."""


GetOutcome: TypeAlias = Fetched | MovedTo | NothingThere


def parse_receipt(reply: Reply) -> PutReceipt:
    """Read the reply to a put or mput.

    Raises:
        WireError: the broker refused.
        UnexpectedReplyError: a 200 that is no receipt.
    """
    result = require_ok(reply)
    try:
        message_id, partition, offset = map(int, result.text.split(" "))
    except ValueError as error:
        raise UnexpectedReplyError(
            f"put: expected 'id partition offset', got {result.text[:80]!r}"
        ) from error
    return PutReceipt(MessageId(message_id), partition, Offset(offset))


def parse_get(reply: Reply) -> GetOutcome:
    """Read the reply to a get.

    Raises:
        WireError: the broker refused.
        UnexpectedReplyError: a reply that no get is answered with.
    """
    match reply:
        case Value(payload=b""):
            return NothingThere()
        case Value(payload=data):
            return Fetched(data)
        case Result(status=Status.MOVED):
            return MovedTo(parse_offset(reply))
        case Result(status=Status.NOT_FOUND):
            return NothingThere()
        case Result(status=Status.OK):
            raise UnexpectedReplyError(f"get: expected data, got {reply.text[:80]!r}")
        case Result():
            raise _refusal(reply)


def require_ok(reply: Reply) -> Result:
    """Return a reply that is a 200.

    Raises:
        WireError: the broker refused.
        UnexpectedReplyError: the reply is no result.
    """
    if isinstance(reply, Value):
        raise UnexpectedReplyError("expected a result, got a value")
    if reply.status != Status.OK:
        raise _refusal(reply)
    return reply


def raise_passing(reply: Reply) -> None:
    """Raise a refusal that may pass by itself; any other reply is the caller's.

    Raises:
        WireError: of a retriable class.
    """
    if isinstance(reply, Result):
        kind = WireError.by_status.get(reply.status)
        if kind is not None and kind.retriable:
            raise _refusal(reply)


def _refusal(reply: Result) -> WireError | UnexpectedReplyError:
    kind = WireError.by_status.get(reply.status)
    text = reply.text or f"refused with status {reply.status} and no text"
    if kind is None:
        return UnexpectedReplyError(f"status {reply.status}: {text}")
    return _server_error(text) if kind is ServerError else kind(text)


def _server_error(text: str) -> WireError:
    """Return what a 500 means: to a put it may say whether that is stored."""
    if says_unknown(text):
        return UnknownPutError(text)
    if says_no_room(text):
        return NoRoomError(text)
    if says_disk_failed(text):
        return DiskFailedError(text)
    if says_unregistered(text):
        return UnavailableError(text)
    return ServerError(text)


def parse_offset(reply: Result) -> Offset:
    """Return the offset that a body is.

    Raises:
        UnexpectedReplyError: it is none.
    """
    try:
        return Offset(int(reply.text))
    except ValueError as error:
        raise UnexpectedReplyError(
            f"expected an offset, got {reply.text[:80]!r}"
        ) from error


def parse_count(reply: Reply) -> int:
    """Return the number of records that a question was answered with.

    Raises:
        WireError: the broker refused.
        UnexpectedReplyError: a 200 that is no number of 0 or more.
    """
    result = require_ok(reply)
    counts = _numbers(result)
    if len(counts) != 1:
        raise _unreadable(result, "a count")
    return counts[0]


def parse_boundaries(reply: Reply) -> tuple[Offset, ...]:
    """Return the offsets that divide a range, growing, at least one.

    Raises:
        WireError: the broker refused.
        UnexpectedReplyError: a 200 that is no list of growing offsets.
    """
    result = require_ok(reply)
    offsets = _numbers(result)
    if not offsets or any(one >= two for one, two in pairwise(offsets)):
        raise _unreadable(result, "growing offsets")
    return tuple(map(Offset, offsets))


def _numbers(result: Result) -> list[int]:
    """Return the numbers that a body consists of; [] when there is anything else."""
    found = [_NUMBER.fullmatch(word) for word in result.text.split(" ")]
    return [int(one[0]) for one in found if one] if all(found) else []


def _unreadable(result: Result, wanted: str) -> UnexpectedReplyError:
    return UnexpectedReplyError(f"expected {wanted}, got {result.text[:80]!r}")
