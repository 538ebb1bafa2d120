"""Decodes and verifies the messages in an answer to a get. Pure.

The hot path of every consumer, flat on purpose. One pass parses and checks the records
into columns; a message is created when it is handed out. The garbage collector would
have to traverse seven thousand waiting tuples, a megabyte; a tuple that is created,
used and dropped stays in the processor's cache.

Source: docs/metaq-1.4/client.md 3.3 and 3.4.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final, overload

from metaq.errors import CorruptRecordError
from metaq.filter.language import Filter
from metaq.model import HeaderPairs, Message, Offset, Position, TopicPartition
from metaq.record.checksum import CHECKSUM_MASK, crc32
from metaq.record.expiry import EXPIRES_IN
from metaq.record.flags import decode_payload
from metaq.record.layout import HEADER, HEADER_BYTES, ZERO_HEADER
from metaq.record.runs import RecordRun, decode_runs
from metaq.record.scan import ScanResult, scan_records

# `Message._make` without its check of the length, which is half of the cost.
MAKE: Final = tuple.__new__

_OFFSETS: Final = Message._fields.index("offset")
_NEXT_OFFSETS: Final = Message._fields.index("next_offset")


class FetchedMessages(Sequence[Message]):
    """Messages of one partition in order, each created when it is accessed."""

    __slots__ = ("columns", "may_expire")

    def __init__(
        self, columns: Sequence[list[Any]], *, may_expire: bool = False
    ) -> None:
        self.columns = columns
        """One list for each field of a message, all of the same length."""
        self.may_expire = may_expire
        """Whether any of them has the header of an expiry."""

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> "FetchedMessages": ...
    def __getitem__(self, at: int | slice) -> "Message | FetchedMessages":
        """Return one message, or a slice as columns."""
        if isinstance(at, slice):
            some = [column[at] for column in self.columns]
            return FetchedMessages(some, may_expire=self.may_expire)
        return MAKE(Message, [column[at] for column in self.columns])

    def __iter__(self) -> Iterator[Message]:
        """Return an iterator over the messages in order."""
        return map(MAKE, repeat(Message), zip(*self.columns, strict=True))


def take_apart(messages: Sequence[Message]) -> tuple[Iterator[Any], Iterator[Any]]:
    """Return an iterator over the fields of messages, and one that advances with it.

    The first yields the fields of each message, for `MAKE`. `length_hint` of the second
    is the number of messages left.
    """
    if not isinstance(messages, FetchedMessages):
        rows = iter(messages)
        return rows, rows
    left, *others = map(iter, messages.columns)
    return zip(left, *others, strict=True), left


def join(first: Sequence[Message], second: Sequence[Message]) -> Sequence[Message]:
    """Return messages followed by others, as columns if both are."""
    if isinstance(first, FetchedMessages) and isinstance(second, FetchedMessages):
        pairs = zip(first.columns, second.columns, strict=True)
        return FetchedMessages([a + b for a, b in pairs])
    return [*first, *second]


def decode_messages(
    data: bytes, partition: TopicPartition, offset: Offset
) -> tuple[FetchedMessages, ScanResult | CorruptRecordError]:
    """Return the complete, valid records at the start of `data`, and their ending.

    Args:
        data: bytes of the log; the last record may be incomplete.
        partition: partition of the log.
        offset: offset of the first byte, a record boundary.

    Returns:
        The messages in order, and the end of the scan: clean, incomplete or corrupt,
        its position relative to `data`; or the error of a record with a right checksum
        and an invalid attribute block.
    """
    ids: list[int] = []
    payloads: list[bytes] = []
    ends: list[int] = []
    described: dict[int, tuple[str | None, bytes | None, HeaderPairs]] = {}
    add_id, add_payload, add_end = ids.append, payloads.append, ends.append
    unpack, crc, mask = HEADER.unpack_from, crc32, CHECKSUM_MASK
    header_bytes = HEADER_BYTES
    position, end = 0, len(data)
    ending: CorruptRecordError | None = None
    last = end - header_bytes
    while position <= last:
        length, stored, message_id, flag = unpack(data, position)
        start = position + header_bytes
        stop = start + length
        if stop > end or length < 0:
            break
        payload = data[start:stop]
        if crc(payload) & mask != stored:
            break
        if flag & 1:
            try:
                payload, attribute, key, pairs = decode_payload(payload, flag)
            except CorruptRecordError as error:
                ending = error
                break
            described[len(ids)] = attribute, key, pairs
        elif not length and data[position:start] == ZERO_HEADER:
            break
        add_id(message_id)
        add_payload(payload)
        add_end(offset + stop)
        position = stop
    count = len(ids)
    attributes: list[str | None] = [None] * count
    keys: list[bytes | None] = [None] * count
    headers: list[HeaderPairs] = [()] * count
    may_expire = False
    for at, (attribute, key, pairs) in described.items():
        attributes[at], keys[at], headers[at] = attribute, key, pairs
        may_expire = may_expire or any(name == EXPIRES_IN for name, _ in pairs)
    messages = FetchedMessages(
        (
            [partition.topic] * count,
            payloads,
            attributes,
            ids,
            [partition] * count,
            [offset, *ends][:count],
            ends,
            keys,
            headers,
        ),
        may_expire=may_expire,
    )
    return messages, ending or scan_records(data, Position(position))


def decode_joined(
    runs: Sequence[RecordRun], partition: TopicPartition
) -> FetchedMessages:
    """Return the messages of runs, in their order.

    All are decoded in one call: most runs have one record, and a call for each run
    would take longer than decoding the record.

    Raises:
        CorruptRecordError: a record is damaged, or a run has an incomplete record.
    """
    data = b"".join([run.data for run in runs])
    messages, _ending = decode_messages(data, partition, Offset(0))
    begins, ends = messages.columns[_OFFSETS], messages.columns[_NEXT_OFFSETS]
    first = stop = 0
    for offset, records in runs:
        shift = offset - stop
        stop += len(records)
        after = bisect_right(ends, stop, lo=first)
        if after == first or ends[after - 1] != stop:
            raise CorruptRecordError(
                f"{partition}: damaged record at {offset} or later"
            )
        for at in range(first, after):
            begins[at] += shift
            ends[at] += shift
        first = after
    return messages


def decode_matches(
    data: bytes, partition: TopicPartition, start: Offset, end: Offset
) -> FetchedMessages | None:
    """Return the messages of runs between two offsets; None: the runs are damaged."""
    try:
        runs = decode_runs(data)
        messages = decode_joined(runs, partition)
    except CorruptRecordError:
        return None
    for offset, records in runs:
        if offset < start:
            return None
        start = Offset(offset + len(records))
    return None if start > end else messages


def matching(messages: Sequence[Message], where: Filter | None) -> Sequence[Message]:
    """Return the messages that match a filter; None: all."""
    if where is None:
        return messages
    matches = where.matches
    kept = [m for m in messages if matches(m.key, m.header_pairs, m.attribute)]
    # Keep columns if all match, as from a broker that filters.
    return messages if len(kept) == len(messages) else kept
