"""Bytes of the log → messages, verified, as many per call as a get brought. Pure.

The hot path of every consumer, flat on purpose. Producers that send at high rates send
records of one size, so a run of those has a way of its own: strided slices tell how
far the run goes (every length and flag byte of it at one stroke), one unpacking takes
it apart, and the messages are made by one `map`. Everything else goes
record by record. Both ways give the same messages and stop at the same byte.

Everything made here is alive when it is made, and mostly dead when the next get has
come: looking for garbage among it, over and over while it grows, costs a third of the
time and finds nothing. So the collector pauses during a call.

Source: client spec 3.3 and 3.4.
"""

import gc
from functools import lru_cache
from itertools import repeat
from struct import Struct
from typing import Final

from metaq.errors import CorruptRecordError
from metaq.model import HeaderPairs, Message, Offset, Position, TopicPartition
from metaq.record.checksum import CHECKSUM_MASK, crc32, pack_checksums
from metaq.record.flags import decode_payload
from metaq.record.layout import CHECKSUM_AT, HEADER, HEADER_BYTES, ID_AT, ZERO_HEADER
from metaq.record.scan import ScanResult, scan_records

RUN_MIN: Final = 8
"""Records of one size in a row that are worth the run's set-up."""
RUN_MAX: Final = 512
"""Longest run taken at once: its copies stay in the processor's cache, and a run that
breaks off early costs little."""

RUN_SIZES_MAX: Final = 16
"""Sizes of records whose longest run is prepared; each takes 32 KiB."""

_ID_AND_PAYLOAD: Final = "8xq4x%ds"
_ID_BYTES = range(ID_AT, ID_AT + 8)
_CHECKSUM_BYTES = range(CHECKSUM_AT, ID_AT)
_CONSTANT_BYTES: Final = tuple(
    at
    for at in range(HEADER_BYTES)
    if at not in _ID_BYTES and at not in _CHECKSUM_BYTES
)
"""Positions in a header that are equal in all records of a run: length and flag."""


def decode_messages(
    data: bytes, partition: TopicPartition, offset: Offset
) -> tuple[list[Message], ScanResult | CorruptRecordError]:
    """Return the whole, valid records from the start of `data` on, and why it ended.

    Args:
        data: bytes of the log; the last record may be cut short anywhere.
        partition: where they lie.
        offset: offset of the first byte, a record boundary.

    Returns:
        The messages in order, and the end of the walk: clean, incomplete or corrupt,
        its position counted from the start of `data`; or the error of a record whose
        checksum is right and whose attribute block is not.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return _decode(data, partition, offset)
    finally:
        if is_collecting:
            gc.enable()


def _decode(
    data: bytes, partition: TopicPartition, offset: Offset
) -> tuple[list[Message], ScanResult | CorruptRecordError]:
    messages: list[Message] = []
    position, end = 0, len(data)
    topic, make, unpack = partition.topic, tuple.__new__, HEADER.unpack_from
    run_from = 0
    while position + HEADER_BYTES <= end:
        length, stored, message_id, flag = unpack(data, position)
        start = position + HEADER_BYTES
        stop = start + length
        if length < 0 or stop > end:
            break
        if position >= run_from and length and not flag:
            run = _decode_run(data, position, length, partition, offset)
            if run:
                messages += run
                position += len(run) * (stop - position)
                continue
            # Sizes vary here: do not look for a run again at every record.
            run_from = stop + RUN_MIN * (stop - position)
        payload = data[start:stop]
        if crc32(payload) & CHECKSUM_MASK != stored:
            break
        attribute, key = None, None
        headers: HeaderPairs = ()
        if flag & 1:
            try:
                payload, attribute, key, headers = decode_payload(payload, flag)
            except CorruptRecordError as error:
                return messages, error
        elif not length and data[position:start] == ZERO_HEADER:
            break
        place = (message_id, partition, offset + position, offset + stop)
        fields = (topic, payload, attribute, *place, key, headers)
        messages.append(make(Message, fields))
        position = stop
    return messages, scan_records(data, Position(position))


def _decode_run(
    data: bytes, position: int, length: int, partition: TopicPartition, offset: Offset
) -> list[Message]:
    """Return the messages of a run of equal records; [] when it is not worth it."""
    stride = HEADER_BYTES + length
    count = min((len(data) - position) // stride, RUN_MAX)
    for at in _CONSTANT_BYTES:
        if count < RUN_MIN:
            return []
        column = data[position + at : position + count * stride : stride]
        count -= len(column.lstrip(column[:1]))
    if count < RUN_MIN:
        return []
    stop = position + count * stride
    if count == RUN_MAX:
        fields = _full_run(length).unpack_from(data, position)
        ids, payloads = fields[0::2], fields[1::2]
    else:
        records = Struct(">" + _ID_AND_PAYLOAD % length).iter_unpack(
            data[position:stop]
        )
        ids, payloads = zip(*records, strict=True)
    checksums = pack_checksums(payloads)
    for octet, at in enumerate(_CHECKSUM_BYTES):
        if data[position + at : stop : stride] != checksums[octet::4]:
            return []
    # The end of one is the offset of the next: one number for both.
    offsets = list(range(offset + position, offset + stop + 1, stride))
    columns = zip(
        repeat(partition.topic),
        payloads,
        repeat(None),
        ids,
        repeat(partition),
        offsets[:-1],
        offsets[1:],
        repeat(None),
        repeat(()),
        strict=False,
    )
    # `Message._make` without its check of the length: a fifth of the cost of a run.
    return list(map(tuple.__new__, repeat(Message), columns))


@lru_cache(RUN_SIZES_MAX)
def _full_run(length: int) -> Struct:
    """Return the struct that takes a whole longest run apart in one call."""
    return Struct(">" + _ID_AND_PAYLOAD % length * RUN_MAX)
