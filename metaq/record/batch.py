"""Check the payload of an `mput` and stamp its ids.

The payload is records exactly as they will lie in the segment, with any id (producers
write 0). Every record's own checksum is verified before the batch may reach the disk:
a wrong one would later look like rot, and a Java broker would cut the log there.

Producers that care for speed send records of equal size, so that case has a way of
its own where they are many: lengths and checksums are compared, and ids written,
column by column (`uniform.py`). Both ways accept and refuse the same batches.

A payload may come in pieces, cut anywhere. It is checked in steps of about STEP_BYTES,
each of which copies what it has checked into a *part*: whole records that are stamped
and written from there. So a large batch neither holds up the caller, nor does it need
memory in one piece.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from metaq.model import MessageId, Position
from metaq.record.checksum import CHECKSUM_MASK, BytesLike, pack_checksums
from metaq.record.ids import id_after, id_runs
from metaq.record.layout import CHECKSUM_AT, HEADER_BYTES, ID_AT, PAYLOAD_BYTES_MAX
from metaq.record.pieces import in_steps
from metaq.record.uniform import stamp_ids

_LENGTH_CHECKSUM: Final = Struct(">ii")
_ID: Final = Struct(">q")

UNIFORM_COUNT_MIN: Final = 12
"""Fewer records are looked at one by one: the way of equal ones has a set-up."""


BLOCK_COUNT: Final = 128
"""Records of one length that are taken apart in one call."""

STEP_BYTES: Final = 128 * 1024
"""Bytes of a batch verified in one step: 0.3 ms with small records."""


@dataclass(frozen=True, slots=True)
class BatchError:
    """Reason for refusing a batch, as a whole."""

    position: Position
    """Start of the offending record in the payload; the payload's end when the number
    of records is wrong."""
    detail: str
    """Description of the fault, with both numbers; goes into the 500."""


class CheckedRecords(NamedTuple):
    """Some of the records of a batch: whole ones that match their checksums."""

    records: bytearray
    """As they go to disk but for their ids."""
    positions: Sequence[int]
    """Start of each of them, in `records`."""


def check_in_steps(
    pieces: Sequence[BytesLike],
    count: int,
    *,
    payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    step_bytes: int = STEP_BYTES,
) -> Generator[None, None, BatchError | list[CheckedRecords]]:
    """Verify `count` records that fill the payload, about `step_bytes` a step.

    Args:
        pieces: the payload, cut anywhere; not changed, and must not change between two
            steps.
        count: records announced.
        payload_bytes_max: largest payload of a record.
        step_bytes: size of a step, exceeded by less than one piece.

    Returns:
        The records, for `stamp_in_steps`, when every one is whole and matches its
        checksum and nothing is left over; else the first thing that is wrong.
    """
    if count < 1:
        return BatchError(Position(0), f"expected 1 record or more, got {count}")
    checker = _Checker(sum(map(len, pieces)), count, payload_bytes_max)
    for step in in_steps(pieces, step_bytes):
        error = checker.take(step)
        if error is not None:
            return error
        yield
    return checker.finish()


def stamp_in_steps(
    parts: Sequence[CheckedRecords], first_id: MessageId
) -> Iterator[None]:
    """Write ids into verified records, one part a step.

    Args:
        parts: of a batch, from `check_in_steps`; changed in place.
        first_id: of the first record; the k-th gets `id_after(first_id, k)`.
    """
    done = 0
    for part in parts:
        _stamp(part.records, part.positions, id_after(first_id, done))
        done += len(part.positions)
        yield


def _stamp(records: bytearray, positions: Sequence[int], first_id: MessageId) -> None:
    if isinstance(positions, range):
        stamp_ids(records, positions.step, first_id, len(positions))
        return
    write, done = _ID.pack_into, 0
    for ids in id_runs(first_id, len(positions)):
        for position, number in zip(islice(positions, done, None), ids, strict=False):
            write(records, position + ID_AT, number)
        done += len(ids)


class _Checker:
    """A check that is under way: what it has found, and a window of what is left."""

    def __init__(self, size_bytes: int, count: int, payload_bytes_max: int) -> None:
        self._end = size_bytes
        self._count = count
        self._payload_bytes_max = payload_bytes_max
        self._parts: list[CheckedRecords] = []
        self._found = 0
        self._window = bytearray()
        self._start = 0  # of the window, in the payload
        stride, rest = divmod(size_bytes, count)
        self._may_be_uniform = (
            count >= UNIFORM_COUNT_MIN
            and not rest
            and 0 < stride - HEADER_BYTES <= payload_bytes_max
        )
        self._stride = stride

    def take(self, step: Sequence[BytesLike]) -> BatchError | None:
        """Check all records that are whole with the bytes of one more step."""
        for piece in step:
            self._window += piece
        if self._may_be_uniform and self._take_uniform():
            return None
        return self._take_each()

    def finish(self) -> BatchError | list[CheckedRecords]:
        """Return what was found, all steps being taken."""
        # Behind uniform records less than one of them may be left.
        error = self._take_each()
        if error is None and self._found != self._count:
            return BatchError(
                Position(self._end),
                f"expected {self._count} records, got {self._found}",
            )
        return error or self._parts

    def _take_uniform(self) -> bool:
        """Take the records of the window if all have the length that they may have."""
        window, stride = self._window, self._stride
        count = len(window) // stride
        if not count:
            return False
        rest = window[count * stride :]
        del window[count * stride :]
        if _is_uniform_and_whole(window, count, stride - HEADER_BYTES):
            self._add(range(0, len(window), stride), rest)
            return True
        window += rest
        return False

    def _take_each(self) -> BatchError | None:
        """Take the records of the window, one by one."""
        window, unpack, crc = self._window, _LENGTH_CHECKSUM.unpack_from, crc32
        header_bytes, mask = HEADER_BYTES, CHECKSUM_MASK
        position, size, left_bytes = 0, len(window), self._end - self._start
        positions: list[int] = []
        with memoryview(window) as view:
            while position < size:
                if position + HEADER_BYTES > left_bytes:
                    return self._refuse(
                        position,
                        f"expected a header of 20 bytes, got {left_bytes - position}",
                    )
                if position + HEADER_BYTES > size:
                    break
                length, stored = unpack(window, position)
                next_position = position + HEADER_BYTES + length
                number = self._found + len(positions)
                if length < 0 or next_position > left_bytes:
                    return self._refuse(
                        position,
                        f"record {number}: length {length}, but"
                        f" {left_bytes - position - HEADER_BYTES} bytes follow",
                    )
                if length > self._payload_bytes_max:
                    return self._refuse(
                        position,
                        f"record {number}: payload of {length} bytes, expected at most"
                        f" {self._payload_bytes_max}",
                    )
                if next_position > size:
                    break
                computed = crc(view[position + header_bytes : next_position]) & mask
                if computed != stored:
                    return self._refuse(
                        position,
                        f"record {number}: expected checksum {stored}, got {computed}",
                    )
                positions.append(position)
                position = next_position
        if positions:
            rest = window[position:]
            del window[position:]
            self._add(positions, rest)
        return None

    def _add(self, positions: Sequence[int], rest: bytearray) -> None:
        """Add the window as a part; go on with the rest behind it."""
        self._parts.append(CheckedRecords(self._window, positions))
        self._found += len(positions)
        self._start += len(self._window)
        self._window = rest

    def _refuse(self, position: int, detail: str) -> BatchError:
        return BatchError(Position(self._start + position), detail)


def _is_uniform_and_whole(records: bytearray, count: int, payload_bytes: int) -> bool:
    stride = HEADER_BYTES + payload_bytes
    for octet, value in enumerate(payload_bytes.to_bytes(4)):
        if records[octet::stride] != bytes([value]) * count:
            return False
    checksums = pack_checksums(_payloads(records, count, payload_bytes))
    return all(
        records[CHECKSUM_AT + octet :: stride] == checksums[octet::4]
        for octet in range(4)
    )


def _payloads(records: bytearray, count: int, payload_bytes: int) -> list[bytes]:
    """Return the payloads of records of one length."""
    payloads: list[bytes] = []
    left, block_bytes = count, BLOCK_COUNT * (HEADER_BYTES + payload_bytes)
    for start in range(0, len(records), block_bytes):
        payloads += _unpacker(payload_bytes, min(left, BLOCK_COUNT))(records, start)
        left -= BLOCK_COUNT
    return payloads


@lru_cache(64)
def _unpacker(payload_bytes: int, count: int) -> Callable[..., tuple[bytes, ...]]:
    """Return what takes the payloads out of a block: one call, not one a record."""
    return Struct(f"{HEADER_BYTES}x{payload_bytes}s" * count).unpack_from
