"""Decoding of log bytes into Arrow batches of rows; every checksum is verified.

    decoder = RowDecoder(partition, start, end)
    while not decoder.is_done:
        data = read(decoder.next_offset, max(FETCH_BYTES, decoder.needed_bytes))
        for batch in decoder.decode(data):
            ...

The decoder names the next offset to read; the caller gets the bytes, from a broker, a
segment file or a decompressor. A record truncated by the end of the data is decoded by
the next call.

Damage either ends the read with an error that names the record, or is skipped and
recorded in `damage`: the decoder then searches for the next record whose checksum
matches. That may be megabytes away. The search uses at least `RESYNC_BYTES` at once, so
that it misses no good record up to that size because of a truncation.

Runs of complete, verified records are found first, without an object per record
(`find_run`). A run is described by its edges, one flat array of positions in the bytes:

    edges:  0        1         2        3         4            2n
            | header | payload | header | payload | ... payload |
            |<--- record 0 --->|<--- record 1 --->|

Producers that care for speed send records of equal size, so that case has a fast path:
the length fields are compared as strided slices, and one unpacking iterator feeds the
checksums. Both paths accept and refuse the same bytes.
"""

import enum
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final

import pyarrow as pa

from metaq.model import Offset, Position, SizeBytes, TopicPartition
from metaq.record.checksum import CHECKSUM_MASK, BytesLike, crc32
from metaq.record.layout import HEADER_BYTES, ZERO_HEADER
from metaq.record.scan import (
    Corrupt,
    Flaw,
    Incomplete,
    find_next_record,
    is_blank_to_end,
    read_record,
)
from metaq.spark.columns import VALUE_BYTES_MAX, RowBuilder
from metaq.spark.errors import BackwardRangeError, DamagedRecordError

_LENGTH_CHECKSUM: Final = Struct(">ii")
_LENGTH_BYTES: Final = 4
_CHECKSUM_BYTES: Final = 4
_TOP_BIT_CLEARED: Final = bytes(byte & 0x7F for byte in range(256))


def find_run(
    data: memoryview, start: int, *, records_max: int, bytes_max: int, payload_max: int
) -> "array[int]":
    """Return the edges of the complete records from `start`; verify their checksums.

    Args:
        data: bytes of the log; not kept.
        start: position of a record, 0..len(data).
        records_max: maximum number of records, 1 or more.
        bytes_max: the run ends with the record that reaches this size, so it may have
            one larger record.
        payload_max: a longer payload ends the run.

    Returns:
        2n + 1 edges for n records, positions in `data` minus `start`. A run ends at a
        limit, at a record truncated by the end of `data`, or at bytes that are not a
        record; `metaq.record.scan` distinguishes these.
    """
    view = data[start:]
    edges = _find_uniform(view, records_max, bytes_max, payload_max)
    # Records of other sizes may follow those of equal size.
    _find_each(view, edges, records_max, bytes_max, payload_max)
    return edges


def _find_uniform(
    view: memoryview, records_max: int, bytes_max: int, payload_max: int
) -> "array[int]":
    """Return the edges if all records are complete and of the first one's size.

    Otherwise the only edge is 0.
    """
    nothing = array("i", [0])
    if len(view) < HEADER_BYTES:
        return nothing
    length, _stored = _LENGTH_CHECKSUM.unpack_from(view)
    if not 0 < length <= payload_max:
        return nothing
    stride = HEADER_BYTES + length
    count = min(len(view) // stride, records_max, -(-bytes_max // stride))
    last = (count - 1) * stride
    if count < 1 or view[last : last + _LENGTH_BYTES] != view[:_LENGTH_BYTES]:
        return nothing
    run = bytes(view[: count * stride])
    for byte in range(_LENGTH_BYTES):
        if run[byte::stride] != run[byte : byte + 1] * count:
            return nothing
    payloads = [p for (p,) in Struct(f"{HEADER_BYTES}x{length}s").iter_unpack(run)]
    computed = bytearray(Struct(f">{count}I").pack(*map(crc32, payloads)))
    top_bytes = computed[::_CHECKSUM_BYTES].translate(_TOP_BIT_CLEARED)
    computed[::_CHECKSUM_BYTES] = top_bytes
    for byte in range(_CHECKSUM_BYTES):
        if computed[byte::_CHECKSUM_BYTES] != run[_LENGTH_BYTES + byte :: stride]:
            return nothing
    edges = array("i", bytes(nothing.itemsize * (2 * count + 1)))
    edges[0::2] = array("i", range(0, len(run) + 1, stride))
    edges[1::2] = array("i", range(HEADER_BYTES, len(run), stride))
    return edges


def _find_each(
    view: memoryview,
    edges: "array[int]",
    records_max: int,
    bytes_max: int,
    payload_max: int,
) -> None:
    """Append the edges after the last one. Inlined for speed: it runs once per row."""
    unpack, crc, mask = _LENGTH_CHECKSUM.unpack_from, crc32, CHECKSUM_MASK
    header_bytes, end, append = HEADER_BYTES, len(view), edges.append
    position, left = edges[-1], records_max - len(edges) // 2
    last_start = min(end - header_bytes, bytes_max - 1)
    while position <= last_start and left:
        length, stored = unpack(view, position)
        payload_at = position + header_bytes
        next_position = payload_at + length
        if not 0 <= length <= payload_max or next_position > end:
            break
        if crc(view[payload_at:next_position]) & mask != stored:
            break
        if not length and view[position:payload_at] == ZERO_HEADER:
            break
        append(payload_at)
        append(next_position)
        position = next_position
        left -= 1


BATCH_RECORDS_MAX: Final = 10_000
"""Maximum rows of a batch: Spark's own default; larger batches were no faster."""
BATCH_BYTES_MAX: Final = SizeBytes(32 * 1024 * 1024)
"""Maximum bytes of a batch, exceeded by less than one record."""
RESYNC_BYTES: Final = SizeBytes(4 * 1024 * 1024)
"""Minimum bytes for a search for the next good record: four times the largest message
that brokers accept by default."""


class OnCorrupt(enum.Enum):
    """Reaction to a damaged record; values of the option `onCorrupt`."""

    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class RowDamage:
    """Bytes that were skipped because they are not records."""

    partition: TopicPartition
    start: Offset
    """Offset of the first byte, at which a record should begin."""
    end: Offset
    """Offset of the next good record, or the end of the read."""
    detail: str

    def __str__(self) -> str:
        return f"{self.partition}: [{self.start}, {self.end}) left out: {self.detail}"


@dataclass(frozen=True, slots=True)
class _Search:
    """Damage whose end, the next good record, is being searched for."""

    start: Offset
    detail: str


class RowDecoder:
    """Decodes the bytes of one read range into rows. Owner: one task; one thread."""

    def __init__(
        self,
        partition: TopicPartition,
        start: Offset,
        end: Offset,
        *,
        on_corrupt: OnCorrupt = OnCorrupt.FAIL,
        payload_bytes_max: int = VALUE_BYTES_MAX,
        limit_hint: str = "",
        batch_records_max: int = BATCH_RECORDS_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        resync_bytes: int = RESYNC_BYTES,
    ) -> None:
        """Begin at `start`.

        Args:
            partition: the partition to read.
            start: a record boundary.
            end: a record boundary at or after `start`; exclusive.
            on_corrupt: reaction to a damaged record.
            payload_bytes_max: a longer payload is damage, 1..VALUE_BYTES_MAX.
            limit_hint: appended to the error about such a payload.
            batch_records_max: maximum rows of a batch, 1 or more.
            batch_bytes_max: maximum bytes of a batch, exceeded by less than one record;
                1..VALUE_BYTES_MAX.
            resync_bytes: minimum bytes for a search for the next good record.

        Raises:
            BackwardRangeError: `end` is before `start`.
        """
        if start > end:
            raise BackwardRangeError(f"{partition}: read from {start} ends at {end}")
        self.partition = partition
        self.end = end
        self.next_offset = start
        """Offset of the next data: a record boundary, or a position in a search."""
        self.needed_bytes = SizeBytes(HEADER_BYTES)
        """Minimum bytes from `next_offset` needed for progress, unless `end` is
        nearer."""
        self.damage: list[RowDamage] = []
        self._on_corrupt = on_corrupt
        self._payload_bytes_max = payload_bytes_max
        self._limit_hint = limit_hint
        self._records_max = batch_records_max
        self._bytes_max = batch_bytes_max
        self._resync_bytes = resync_bytes
        self._builder = RowBuilder(partition, batch_records_max)
        self._search: _Search | None = None

    @property
    def is_done(self) -> bool:
        """Whether everything up to the end was decoded."""
        return self.next_offset >= self.end

    def decode(self, data: BytesLike) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the complete records in `data`, in order.

        Args:
            data: the log from `next_offset`, of any length; must not change until the
                iterator is exhausted. Bytes at or after `end` are ignored.

        Yields:
            Batches of `ROW_SCHEMA` that own their bytes; never empty. When one is
            yielded, `next_offset` is the end of its last record.

        Raises:
            DamagedRecordError: a record is damaged, with `OnCorrupt.FAIL`. The records
                before it were yielded.
        """
        view = memoryview(data)[: self.end - self.next_offset]
        base, position = self.next_offset, 0
        while position < len(view) and not self.is_done:
            if self._search is not None:
                if not self._resync(view, position):
                    return
                position = self.next_offset - base
                continue
            edges = find_run(
                view,
                position,
                records_max=self._records_max,
                bytes_max=self._bytes_max,
                payload_max=self._payload_bytes_max,
            )
            if len(edges) > 1:
                yield from self._rows(view[position:], edges)
            elif not self._may_go_on(view, position):
                return
            position = self.next_offset - base

    def finish(self) -> None:
        """End the read, when there is no more data.

        Raises:
            DamagedRecordError: data is missing before the end, with `OnCorrupt.FAIL`;
                with SKIP the missing range is added to `damage`.
        """
        if self.is_done:
            return
        if self._search is None:
            left = self.end - self.next_offset
            self._begin_search(f"the data ends {left} bytes early")
        self._go_on_at(self.end)

    def _rows(self, run: memoryview, edges: "array[int]") -> Iterator[pa.RecordBatch]:
        """Yield the rows of a run, up to a bad attribute block, which is damage."""
        start, ends = self.next_offset, edges[2::2]
        batch, bad = self._builder.build(run[: edges[-1]], edges, start)
        self.needed_bytes = SizeBytes(HEADER_BYTES)
        if batch.num_rows:
            self.next_offset = Offset(start + ends[batch.num_rows - 1])
            yield batch
        if bad is not None:
            after = Offset(start + ends[bad.row])
            self._begin_search(bad.detail, in_sight=after)
            self._go_on_at(after)

    def _may_go_on(self, view: memoryview, position: int) -> bool:
        """Examine the bytes at `position`, which are not a complete record.

        Returns:
            False if only the rest of the record is missing from the data.
        """
        found = read_record(
            view, Position(position), payload_bytes_max=self._payload_bytes_max
        )
        if isinstance(found, Incomplete):
            if self.next_offset + found.needed_bytes <= self.end:
                self.needed_bytes = found.needed_bytes
                return False
            left = self.end - self.next_offset
            detail = f"a record of {found.needed_bytes} bytes, but {left} are left"
        else:
            assert isinstance(found, Corrupt), found
            detail = found.detail
            if found.flaw is Flaw.LENGTH_OVER_LIMIT:
                detail += self._limit_hint
        after = self._next_good(view, position)
        good = None if after is None else Offset(self.next_offset + after - position)
        self._begin_search(detail, in_sight=good)
        return True

    def _resync(self, view: memoryview, position: int) -> bool:
        """Continue at the next good record in the data; return whether there is one."""
        found = self._next_good(view, position)
        data_end = Offset(self.next_offset + len(view) - position)
        if found is not None:
            self._go_on_at(Offset(self.next_offset + found - position))
        elif data_end >= self.end:
            self._go_on_at(self.end)
        else:
            # The last bytes may be the beginning of a good record.
            self.next_offset = max(
                self.next_offset, Offset(data_end - self._resync_bytes)
            )
            self.needed_bytes = SizeBytes(2 * self._resync_bytes)
        return found is not None

    def _next_good(self, view: memoryview, position: int) -> Position | None:
        """Return the position of the next good record after damage; None for none."""
        search = self._search
        is_damaged = search is None or search.start == self.next_offset
        found = find_next_record(
            view,
            Position(position + is_damaged),
            payload_bytes_max=self._payload_bytes_max,
        )
        is_last = self.next_offset + len(view) - position >= self.end
        if found is None or is_last or not is_blank_to_end(view, found):
            return found
        return None

    def _begin_search(self, detail: str, in_sight: Offset | None = None) -> None:
        self._search = _Search(self.next_offset, detail)
        self._fail_if_asked(in_sight)

    def _go_on_at(self, good: Offset) -> None:
        """End the search at a good record, or at the end of the range."""
        self._fail_if_asked(good)
        assert self._search is not None
        start, detail = self._search.start, self._search.detail
        self.damage.append(RowDamage(self.partition, start, good, detail))
        self._search = None
        self.next_offset = good
        self.needed_bytes = SizeBytes(HEADER_BYTES)

    def _fail_if_asked(self, good: Offset | None) -> None:
        if self._on_corrupt is OnCorrupt.FAIL and self._search is not None:
            search = self._search
            raise DamagedRecordError(self.partition, search.start, search.detail, good)


def decode_pieces(
    decoder: RowDecoder, pieces: Iterable[BytesLike], *, batch_bytes: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of bytes that come in contiguous pieces.

    Args:
        decoder: its `next_offset` is that of the first piece; afterwards it has the
            damage.
        pieces: of any size; records cut between pieces are joined.
        batch_bytes: minimum bytes decoded at a time, except the last.

    Yields:
        Batches as from `RowDecoder.decode`.

    Raises:
        DamagedRecordError: a record is damaged, or the pieces end early, with
            `OnCorrupt.FAIL`.
    """
    waiting: list[BytesLike] = []
    waiting_bytes = 0
    for piece in pieces:
        if decoder.is_done:
            break
        waiting.append(piece)
        waiting_bytes += len(piece)
        left = decoder.end - decoder.next_offset
        if waiting_bytes < min(max(batch_bytes, decoder.needed_bytes), left):
            continue
        data = b"".join(waiting) if len(waiting) > 1 else piece
        start = decoder.next_offset
        yield from decoder.decode(data)
        rest = bytes(memoryview(data)[decoder.next_offset - start :])
        waiting, waiting_bytes = [rest], len(rest)
    decoder.finish()
