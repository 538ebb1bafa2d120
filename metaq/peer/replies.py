"""Interpretation of replies: values for success, errors for the rest. Pure.

A peer is not trusted: an impossible number, or one of another partition, is a
BadReplyError. The owner of the connection then closes it, as after a frame that breaks
the rules.

Source: docs/metaq-1.4/client.md 2.3, docs/metaq-1.4/broker.md 1.4 to 1.6 and 1.12.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

from metaq.errors import (
    BadReplyError,
    CorruptRecordError,
    DiskFailedError,
    NoRecordError,
    NoRoomError,
    NotAnExchangeError,
    NotDefinedError,
    NotLeaderError,
    SequenceUsedError,
    ServerError,
    TooFewReplicasError,
    UnavailableError,
    UnexpectedReplyError,
    UnknownPutError,
    UnroutableError,
    WireError,
)
from metaq.model import MAX_OFFSET, MessageId, Offset, TopicPartition, printable
from metaq.protocol.commands import NO_NEXT, Reply, Result, Status, Value
from metaq.protocol.connection import ReceiveBuffer
from metaq.protocol.decimals import I32_MAX
from metaq.protocol.texts import (
    DAMAGED,
    IN_DOUBT,
    NO_EXCHANGE,
    NO_RECORD,
    NO_ROOM,
    NOT_DEFINED,
    NOT_LEADER,
    SEQUENCE_USED,
    TOO_FEW_REPLICAS,
    UNROUTABLE,
    says_disk_failed,
    says_unregistered,
    split_code,
)

_NUMBER: Final = re.compile("[0-9]{1,19}")
"""A count or offset of 64 bits."""
_RECEIPT: Final = re.compile(rb"(-?[0-9]{1,19}) ([0-9]{1,10}) ([0-9]{1,19})")
"""Id, which is negative if a Java broker stamped it, partition and offset."""
_ROUTED: Final = re.compile(rb"([0-9]{1,19}) ([0-9]{1,10}) (-1) routed=([0-9]{1,10})")
"""Receipt from an exchange: -1 instead of the offset; the number of topics."""
_SCHEDULED: Final = re.compile(
    rb"([0-9]{1,19}) (-?[0-9]{1,10}) -1 ([0-9]) ([0-9]{1,19})"
)
"""Id and partition of a message with a time; the tier and offset where it waits."""
_ONE_OF_SEVERAL: Final = re.compile(r"[^ ]+ part [0-9]+(?= )|set [^ =]+(?==)")
_STATS_FRAME: Final = frozenset({"STATS", "END"})
"""First and last line of a `stats` reply."""
_KIND_OF_CODE: Final[dict[str, type[WireError]]] = {
    NO_ROOM: NoRoomError,
    IN_DOUBT: UnknownPutError,
    SEQUENCE_USED: SequenceUsedError,
    UNROUTABLE: UnroutableError,
    NO_EXCHANGE: NotAnExchangeError,
    NO_RECORD: NoRecordError,
    NOT_DEFINED: NotDefinedError,
    NOT_LEADER: NotLeaderError,
    TOO_FEW_REPLICAS: TooFewReplicasError,
}
"""Error for the code of a 500 or 503. The code of damage is read for gets only."""


@dataclass(frozen=True, slots=True)
class PutReceipt:
    """Receipt for a put that is on the broker's disk."""

    id: MessageId
    """Id of the message; for a batch, of its first one (`record.ids.id_after`)."""
    partition: int
    """The partition it went to, even if the broker chose it."""
    offset: Offset
    """Offset of the record; -1 from an exchange: each topic has its own."""
    copy_count: int = 1
    """Number of topics that stored it; 0: an exchange dropped it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Bytes of the log; the last record may be cut short anywhere."""

    data: bytes
    """At least one byte, starting at the requested offset."""


@dataclass(frozen=True, slots=True)
class FetchedRuns:
    """Records that match a filter; the others before the next offset do not."""

    data: bytes
    """Runs: see `record/runs.py`; empty if nothing matches."""
    next_offset: Offset
    """Offset to continue at; above the requested one."""


@dataclass(frozen=True, slots=True)
class MovedTo:
    """The offset is outside the log; continue at another one."""

    offset: Offset
    """The log start, or the log end."""


@dataclass(frozen=True, slots=True)
class NothingThere:
    """No data at this offset now, or no such partition on this broker's disk yet."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """The broker reports a range of its log that cannot be read."""

    start: Offset
    end: Offset | None
    """Offset of the next good record, or the log end; None: reading cannot resume."""
    path: str | None
    """Path of the damaged file on the broker's disk, if reported."""
    detail: str

    def covers(self, offset: Offset) -> bool:
        """Return whether the byte at `offset` is in the range."""
        return self.start <= offset and (self.end is None or offset < self.end)

    def __str__(self) -> str:
        named = "" if self.path is None else f": file={self.path}"
        return f"{self.detail}, as the broker says{named}"


GetOutcome: TypeAlias = Fetched | FetchedRuns | MovedTo | NothingThere | Damaged


def parse_receipt(reply: Reply, partition: int | None = None) -> PutReceipt:
    """Parse the reply to a put or mput.

    Args:
        reply: the broker's reply.
        partition: the partition of the put; None: the broker chose it.

    Raises:
        WireError: the broker refused.
        BadReplyError: a 200 that is not a receipt for this partition.
    """
    result = require_ok(reply)
    found = _RECEIPT.fullmatch(result.body) or _ROUTED.fullmatch(result.body)
    if found is not None:
        message_id, chosen, offset, *copies = map(int, found.groups())
        is_ours = partition in {None, chosen} and chosen <= I32_MAX
        if is_ours and abs(message_id) <= MAX_OFFSET >= offset:
            return PutReceipt(MessageId(message_id), chosen, Offset(offset), *copies)
    wanted = "partition" if partition is None else partition
    raise BadReplyError(f"put: expected 'id {wanted} offset', got {result.text[:80]!r}")


def parse_scheduled(reply: Reply, partition: int) -> tuple[PutReceipt, int]:
    """Parse the reply to an mput with a time.

    Returns:
        The receipt, and the tier in which the message waits at its offset; -1: its time
        had passed, and the receipt is that of a put.

    Raises:
        WireError: the broker refused.
        BadReplyError: a 200 that is neither of them.
    """
    result = require_ok(reply)
    found = _SCHEDULED.fullmatch(result.body)
    if found is None:
        return parse_receipt(reply, partition), -1
    message_id, chosen, tier, offset = map(int, found.groups())
    if chosen != partition or max(message_id, offset) > MAX_OFFSET:
        raise BadReplyError(
            f"put: expected 'id {partition} -1 tier offset', got {result.text[:80]!r}"
        )
    return PutReceipt(MessageId(message_id), chosen, Offset(offset)), tier


def parse_get(reply: Reply, asked: Offset, *, has_filter: bool = False) -> GetOutcome:
    """Parse the reply to a get at an offset.

    Args:
        reply: the broker's reply.
        asked: the requested offset.
        has_filter: whether the get has a filter, so that runs are possible.

    Raises:
        WireError: the broker refused.
        BadReplyError: it has an impossible offset, or damage of another range.
        UnexpectedReplyError: it is not a reply to a get.
    """
    match reply:
        case Value(next_offset=next_offset) if has_filter and next_offset != NO_NEXT:
            if next_offset <= asked:
                raise BadReplyError(
                    f"get: expected a next offset after {asked}, got {next_offset}"
                )
            return FetchedRuns(reply.payload, Offset(next_offset))
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
            damaged = damage_in(reply)
            if damaged is None:
                raise _refusal(reply)
            if not damaged.covers(asked):
                raise _elsewhere("get", asked, damaged)
            return damaged


def parse_check(reply: Reply, asked: Offset) -> Damaged | None:
    """Parse the reply to a check of the bytes at an offset; None if they are good.

    Raises:
        WireError: the broker cannot check them.
        BadReplyError: it has an impossible range, or one somewhere else.
    """
    damaged = damage_in(reply)
    if damaged is None:
        end = parse_offset(require_ok(reply))
        if end > asked:
            return None
        raise BadReplyError(f"check: expected an end after {asked}, got {end}")
    if not damaged.covers(asked):
        raise _elsewhere("check", asked, damaged)
    return damaged


def _elsewhere(word: str, asked: Offset, damaged: Damaged) -> BadReplyError:
    return BadReplyError(
        f"{word}: expected damage that covers offset {asked}, got"
        f" {damaged.start}..{damaged.end}"
    )


def damage_in(reply: Reply) -> Damaged | None:
    """Return the damage that a refusal reports; None for any other reply.

    Raises:
        BadReplyError: it reports an impossible range.
    """
    if not isinstance(reply, Result) or reply.status != Status.SERVER_ERROR:
        return None
    text, code = split_code(reply.text)
    if code is None or code.word != DAMAGED:
        return None
    start, end = code.number("from"), code.number("to")
    has_end = "to" in code.values
    if start is None or (has_end and (end is None or start >= end)):
        raise BadReplyError(
            f"expected a damaged range from..to, got {reply.text[-80:]!r}"
        )
    path, detail = code.values.get("file"), code.values.get("why", text)
    return Damaged(
        Offset(start),
        None if end is None else Offset(end),
        None if path is None else printable(path),
        printable(detail),
    )


def damage_error(
    partition: TopicPartition, offset: Offset, damaged: Damaged
) -> CorruptRecordError:
    """Return a reader's error for an offset in a damaged range."""
    end = damaged.end
    rest = "nothing after it" if end is None else f"reading can go on at offset {end}"
    return CorruptRecordError(
        f"{partition}: damaged record at offset {offset}: {damaged}; {rest}",
        partition=partition,
        offset=offset,
        next_good_offset=end,
        path=damaged.path,
        detail=damaged.detail,
    )


def parse_stats(text: str) -> dict[str, str]:
    """Return the lines of a `stats` reply as name → value; "" without a value.

    A name ends at the first space, except in lines that occur several times: there it
    is `TOPIC part NUMBER` (of `offsets`) or `set KEY` (of settings that override the
    file).
    """
    found = {}
    for line in text.splitlines():
        if line not in _STATS_FRAME:
            several = _ONE_OF_SEVERAL.match(line)
            name = several[0] if several else line.partition(" ")[0]
            found[name] = line[len(name) + 1 :]
    return found


def require_ok(reply: Reply) -> Result:
    """Return the reply if it is a 200.

    Raises:
        WireError: the broker refused.
        UnexpectedReplyError: it refused with an unknown status.
        BadReplyError: the reply is not a result, so the outcome is unknown.
    """
    if isinstance(reply, Value):
        size_bytes = len(reply.payload)
        raise BadReplyError(f"expected a result, got a value of {size_bytes} bytes")
    if reply.status != Status.OK:
        raise _refusal(reply)
    return reply


def raise_passing(reply: Reply) -> None:
    """Raise the error of a retriable refusal; the caller handles any other reply."""
    if isinstance(reply, Result):
        kind = WireError.by_status.get(reply.status)
        if kind is not None and kind.retriable:
            raise _refusal(reply)


def _refusal(reply: Result) -> WireError | UnexpectedReplyError:
    kind = WireError.by_status.get(reply.status)
    text, code = split_code(reply.text)
    shown = printable(text) or f"refused with status {reply.status} and no text"
    if kind is None:
        return UnexpectedReplyError(f"status {reply.status}: {shown}")
    by_code = _KIND_OF_CODE.get(code.word) if code else None
    if by_code is not None and kind in {ServerError, UnavailableError}:
        kind = by_code
    elif kind is ServerError:
        kind = _kind_by_text(reply.text)
    error = kind(shown)
    if code and isinstance(error, ServerError):
        error.messages = code.messages
    return error


def _kind_by_text(text: str) -> type[WireError]:
    """Return the error class for a 500 of a MetaQ 1.4 broker, which has no codes."""
    if says_disk_failed(text):
        return DiskFailedError
    if says_unregistered(text):
        return UnavailableError
    return ServerError


def parse_offset(reply: Result) -> Offset:
    """Return the offset in a body.

    Raises:
        BadReplyError: it is not one number of 0 to 2**63 - 1.
    """
    offsets = _numbers(reply)
    if len(offsets) != 1 or offsets[0] > MAX_OFFSET:
        raise _unreadable(reply, "an offset")
    return Offset(offsets[0])


def parse_nearest(reply: Reply) -> Offset | None:
    """Return the offset in the reply to an offset query; None without a log.

    Raises:
        WireError: the broker refused.
        BadReplyError: it is not one number of 0 to 2**63 - 1.
        UnexpectedReplyError: it is not a reply to an offset query.
    """
    if isinstance(reply, Result) and reply.status == Status.NOT_FOUND:
        return None
    return parse_offset(require_ok(reply))


def parse_count(reply: Reply) -> int:
    """Return the number of records in the reply to a question.

    Raises:
        WireError: the broker refused.
        BadReplyError: a 200 that is not one number.
    """
    result = require_ok(reply)
    counts = _numbers(result)
    if len(counts) != 1:
        raise _unreadable(result, "a count")
    return counts[0]


def parse_boundaries(reply: Reply) -> tuple[Offset, ...]:
    """Return the offsets that divide a range, ascending, at least one.

    Raises:
        WireError: the broker refused.
        BadReplyError: a 200 that is not a list of ascending offsets.
    """
    result = require_ok(reply)
    offsets = _numbers(result)
    is_growing = all(one < two for one, two in pairwise(offsets))
    if not offsets or not is_growing or offsets[-1] > MAX_OFFSET:
        raise _unreadable(result, "growing offsets")
    return tuple(map(Offset, offsets))


def _numbers(result: Result) -> list[int]:
    """Return the numbers in a body; [] if it contains anything else."""
    found = [_NUMBER.fullmatch(word) for word in result.text.split(" ")]
    return [int(one[0]) for one in found if one] if all(found) else []


def _unreadable(result: Result, wanted: str) -> BadReplyError:
    return BadReplyError(f"expected {wanted}, got {result.text[:80]!r}")


# -- many at once ----------------------------------------------------------------------
#
# Replies to puts come by the hundred in one read. `take_receipts` parses a run of them
# column by column; `take_results` parses any result, at a third of the cost of the
# general path (`protocol/connection.py`). Both return the same as that path, and leave
# all but the plain case to it. Property tests compare them.
#
# A result as brokers write it.
_RESULT_LINE: Final = re.compile(rb"result (\d{1,9}) (\d{1,9}) (-?\d{1,9})\r\n")

# A result with the body of a put's reply: id, partition and offset.
_RECEIPT_LINE: Final = re.compile(
    rb"result 200 (\d{1,9}) (-?\d{1,9})\r\n((-?\d{1,19}) (-?\d{1,9}) (\d{1,19}))(?!\d)"
)
# No possessive repeat of a group: before CPython 3.11.5 it matches wrongly.
_RECEIPTS: Final = re.compile(
    rb"(?:result 200 \d{1,9} -?\d{1,9}\r\n-?\d{1,19} -?\d{1,9} \d{1,19}(?!\d))+"
)
_REST_BYTES: Final = len(b"result 200  \r\n")


class ReceiptColumns(NamedTuple):
    """Receipts of stored puts, one column for each number."""

    opaques: Sequence[int]
    """Opaques of the puts, in the order of the replies."""
    ids: Sequence[int]
    partitions: Sequence[int]
    offsets: Sequence[int]

    def are_of(self, partition: int) -> bool:
        """Return whether all can be receipts of puts to a partition."""
        return (
            self.partitions.count(partition) == len(self.partitions)
            and min(self.ids) >= -MAX_OFFSET
            and max(self.ids) <= MAX_OFFSET
            and max(self.offsets) <= MAX_OFFSET
        )

    def replies(self) -> list[Result]:
        """Return the receipts as replies."""
        columns = zip(
            self.opaques, self.ids, self.partitions, self.offsets, strict=True
        )
        return [
            Result(Status.OK, b"%d %d %d" % (message_id, partition, offset), opaque)
            for opaque, message_id, partition, offset in columns
        ]


def take_receipts(buffer: ReceiveBuffer) -> ReceiptColumns | None:
    """Remove the plain replies to stored puts from the front of a buffer; return them.

    The buffer must be between two frames; its position moves after the removed bytes.
    None if it does not begin with a complete one.
    """
    data, start = buffer.data, buffer.position
    run = _RECEIPTS.match(data, start)
    if run is None:
        return None
    end, found = run.end(), _RECEIPT_LINE.findall(data, start, run.end())
    lengths, opaques, bodies, ids, partitions, offsets = zip(*found, strict=True)
    sizes = tuple(map(len, bodies))
    if tuple(map(int, lengths)) != sizes:
        # The last one is incomplete, or the length of one is not that of its match.
        count = next(
            at for at, length in enumerate(lengths) if int(length) != sizes[at]
        )
        if not count:
            return None
        for row in found[count:]:
            end -= _REST_BYTES + sum(map(len, row[:3]))
        opaques, ids = opaques[:count], ids[:count]
        partitions, offsets = partitions[:count], offsets[:count]
    buffer.position = end
    return ReceiptColumns(
        *(list(map(int, one)) for one in (opaques, ids, partitions, offsets))
    )


def take_results(buffer: ReceiveBuffer) -> list[Result]:
    """Remove every complete, plain result from the front of a buffer; return them.

    The buffer must be between two frames; its position moves after the removed bytes.
    """
    data, position = buffer.data, buffer.position
    size, match = len(data), _RESULT_LINE.match
    results: list[Result] = []
    while (found := match(data, position)) is not None:
        status, length, opaque = found.groups()
        start = found.end()
        end = start + int(length)
        if end > size:
            break
        results.append(Result(int(status), data[start:end], int(opaque)))
        position = end
    buffer.position = position
    return results
