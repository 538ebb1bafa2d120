"""Plans the ranges of a batch, and their division among tasks. Pure.

    backlog, limits  --plan_batch_end-->  end offsets  --plan_reads-->  read ranges

Offsets are bytes, so an arbitrary number inside a log is usually not the start of a
record. Nothing here computes an offset: every end and every cut was returned by
`SpanFacts`, or is an edge of a given span. So a batch never ends inside a record, and
the ranges of a plan cover its spans exactly, without overlap.

`settle` is the only policy for data to be read that are gone. Data are lost in three
ways: retention moves the log start past a query's offset, a log ends before its former
end (it was created again, or a disk lost its tail), or a partition no longer exists.
Driver and tasks call the same function, so that they never disagree; all data left out
are reported as a `LostRange`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol, TypeAlias

from metaq.model import Offset, SizeBytes, TopicPartition
from metaq.spark.errors import BackwardRangeError, DataLossError, LostRange

PROBES: Final = 15
"""Number of boundaries requested at once in a search. The right one among them is
guessed, and one or two counts confirm it."""
PROBES_MAX: Final = 1000
"""The same within `WALK_BYTES`; usually these are all boundaries there."""
WALK_BYTES: Final = 256 * 1024
"""Bytes that a broker walks record by record in less time than another request
takes."""
PIECES_PER_RANGE: Final = 4
"""Number of boundaries requested per resulting range; the ranges then are within a
quarter of the requested size."""


@dataclass(frozen=True, slots=True)
class LogSpan:
    """A range of one partition's log, between two record boundaries."""

    start: Offset
    end: Offset

    @property
    def size_bytes(self) -> SizeBytes:
        """Size in bytes; negative if it ends before it starts."""
        return SizeBytes(self.end - self.start)


Spans: TypeAlias = Mapping[TopicPartition, LogSpan]
Logs: TypeAlias = Mapping[TopicPartition, LogSpan | None]
"""Partition → span; None if its broker has no log, or none yet."""


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Range of one partition for a Spark task; picklable, for executors."""

    partition: TopicPartition
    start: Offset
    end: Offset


class SpanFacts(Protocol):
    """Facts about logs used by planning; all results are about [start, end)."""

    def count(self, partition: TopicPartition, start: Offset, end: Offset) -> int:
        """Return the number of records that begin in the range.

        May be an estimate if the broker cannot count; limits are then approximate.
        """

    def boundaries(
        self, partition: TopicPartition, start: Offset, end: Offset, count: int
    ) -> Sequence[Offset]:
        """Return about `count` (1 or more) record boundaries.

        Returns:
            Offsets strictly between `start` and `end`, ascending, spread evenly over
            the bytes. Empty only if no boundary is known.
        """

    def boundaries_after(
        self, partition: TopicPartition, start: Offset, end: Offset, origin: Offset
    ) -> Sequence[Offset]:
        """Return record boundaries shortly after `start`.

        Called if `boundaries` returned none.

        Args:
            partition: partition of the log.
            start: a record boundary.
            end: a record boundary.
            origin: offset at which the search began, at `start` or before it.

        Returns:
            Offsets strictly between `start` and `end`, ascending. Empty if none is
            known, or the search has gone far enough.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of one micro-batch; None is no limit."""

    messages_max: int | None = None
    """Maximum number of messages, 1 or more; but at least one per partition."""
    bytes_max: int | None = None
    """Maximum bytes, 1 or more; but at least one message per partition."""
    messages_min: int | None = None
    """Number of messages to wait for, 1 or more."""
    delay_s_max: float = 0.0
    """Maximum wait for `messages_min`, in seconds."""

    @property
    def is_any(self) -> bool:
        """Whether there is a limit."""
        limits = (self.messages_max, self.bytes_max, self.messages_min)
        return any(limit is not None for limit in limits)


def plan_batch_end(
    backlog: Spans, limits: BatchLimits, facts: SpanFacts, *, waited_s: float
) -> dict[TopicPartition, Offset]:
    """Return the end offset of a micro-batch in each partition.

    A limit is shared in proportion to the backlog, as by Spark's Kafka source; every
    partition with a backlog gets at least one record, so that none starves.

    Args:
        backlog: partition → span from the next byte to read to the log end.
        limits: limits of the batch.
        facts: used only if a limit requires it.
        waited_s: seconds for which the oldest message of the backlog has waited.

    Returns:
        One record boundary for each partition of `backlog`; the starts if the batch
        has to wait for more messages.

    Raises:
        BackwardRangeError: a span ends before it starts.
    """
    _check_forward(backlog)
    ends = {partition: span.end for partition, span in backlog.items()}
    filled = {p: span for p, span in backlog.items() if span.size_bytes}
    if limits.messages_min is not None or limits.messages_max is not None:
        counts = {p: facts.count(p, s.start, s.end) for p, s in filled.items()}
        too_few = sum(counts.values()) < (limits.messages_min or 0)
        if too_few and waited_s < limits.delay_s_max:
            return {partition: span.start for partition, span in backlog.items()}
        for partition, share in _shares(counts, limits.messages_max).items():
            search = _Search(facts, partition, filled[partition], share, is_count=True)
            ends[partition] = search.run()
    sizes = {partition: int(span.size_bytes) for partition, span in filled.items()}
    for partition, share in _shares(sizes, limits.bytes_max).items():
        span = LogSpan(filled[partition].start, ends[partition])
        search = _Search(facts, partition, span, share, is_count=False)
        ends[partition] = search.run()
    return ends


def plan_reads(
    spans: Spans,
    facts: SpanFacts,
    *,
    ranges_min: int | None = None,
    records_max: int | None = None,
) -> tuple[ReadRange, ...]:
    """Cut spans into the ranges that tasks read.

    Args:
        spans: the span to read of each partition; empty ones give no range.
        facts: used only to cut a span.
        ranges_min: approximate number of ranges, 1 or more, up to which large spans are
            cut; None leaves every span whole.
        records_max: maximum records of one range, 1 or more; exceeded only if no
            boundary is known. None is no limit.

    Returns:
        Ranges that cover the spans exactly, the largest first, so that tasks that start
        late are short.

    Raises:
        BackwardRangeError: a span ends before it starts.
    """
    _check_forward(spans)
    ranges = [
        ReadRange(partition, span.start, span.end)
        for partition, span in spans.items()
        if span.size_bytes
    ]
    if records_max is not None:
        ranges = [
            piece
            for whole in ranges
            for piece in _cut_by_count(facts, whole, records_max)
        ]
    if ranges_min is not None and len(ranges) < ranges_min:
        total = sum(whole.end - whole.start for whole in ranges)
        ranges = [
            piece
            for whole in ranges
            for piece in _cut_evenly(
                facts, whole, round((whole.end - whole.start) * ranges_min / total)
            )
        ]
    return tuple(sorted(ranges, key=lambda r: (r.start - r.end, r.partition, r.start)))


def _check_forward(spans: Spans) -> None:
    for partition, span in sorted(spans.items()):
        if span.start > span.end:
            raise BackwardRangeError(
                f"{partition}: the next byte to read is {span.start}, but the log ends"
                f" at {span.end}: the log was truncated, or the offset is of another"
                " log"
            )


def _shares(
    sizes: Mapping[TopicPartition, int], limit: int | None
) -> dict[TopicPartition, int]:
    """Share a limit in proportion to `sizes`; {} if their sum is within it."""
    total = sum(sizes.values())
    if limit is None or total <= limit:
        return {}
    return {p: limit * size // total for p, size in sizes.items()}


@dataclass(slots=True)
class _Search:
    """Search for the last boundary of a non-empty span that is within a limit.

    Each round keeps one gap between boundaries, so the search ends: at a single record,
    or if no boundary is known inside the gap. Boundaries and counts cost requests, so
    the position of the limit is first guessed as if all records had the same size.
    """

    facts: SpanFacts
    partition: TopicPartition
    span: LogSpan
    limit: int
    is_count: bool
    """Whether `limit` counts records; otherwise bytes."""
    has_boundaries: bool = True

    def run(self) -> Offset:
        """Return the last boundary that fits; the first one if none does."""
        start, end = self.span.start, self.span.end
        low, high = (start, 0), (end, self._amount(start, end))
        if high[1] <= self.limit:
            return high[0]
        while inner := self._inner(low, high):
            known = [low[0], *inner, high[0]]
            if self.is_count and high[1] - low[1] == len(known) - 1:
                # The boundaries of every record are known: no more counts.
                return known[max(self.limit - low[1], low[0] == self.span.start)]
            low, high = self._narrow(known, low, high)
        return low[0] if low[0] > self.span.start else high[0]

    def _amount(self, start: Offset, end: Offset) -> int:
        if self.is_count:
            return self.facts.count(self.partition, start, end)
        return end - start

    def _inner(
        self, low: tuple[Offset, int], high: tuple[Offset, int]
    ) -> Sequence[Offset]:
        if self.is_count and high[1] - low[1] <= 1:
            return ()
        span = LogSpan(low[0], high[0])
        facts, partition = self.facts, self.partition
        probes = PROBES if span.size_bytes > WALK_BYTES else PROBES_MAX
        inner: Sequence[Offset] = ()
        if self.has_boundaries:
            inner = facts.boundaries(partition, low[0], high[0], probes)
            # If there are none in a gap, there are none in a part of it.
            self.has_boundaries = bool(inner)
        if not inner:
            inner = facts.boundaries_after(partition, low[0], high[0], self.span.start)
        return _checked(partition, span, inner)

    def _narrow(
        self, known: Sequence[Offset], low: tuple[Offset, int], high: tuple[Offset, int]
    ) -> tuple[tuple[Offset, int], tuple[Offset, int]]:
        """Return the adjacent boundaries in `known` around the limit.

        Args:
            known: three boundaries or more, ascending, from that of `low` to `high`.
            low: first boundary, within the limit, and the amount before it.
            high: last boundary, over the limit, and the amount before it.
        """
        first, last, is_guess = 0, len(known) - 1, True
        while last - first > 1:
            share = (self.limit - low[1]) / (high[1] - low[1])
            expected = low[0] + share * (high[0] - low[0])
            # Bisects every other time: guesses alone may approach from one side only.
            middle = (first + last) // 2
            place = bisect_right(known, expected) - 1 if is_guess else middle
            place, is_guess = min(max(place, first + 1), last - 1), not is_guess
            # Counted from `low`, because short ranges cost the broker less.
            at, before = known[place], low[1] + self._amount(low[0], known[place])
            if before <= self.limit:
                first, low = place, (at, before)
            else:
                last, high = place, (at, before)
        return low, high


def _cut_by_count(
    facts: SpanFacts, whole: ReadRange, records_max: int
) -> list[ReadRange]:
    """Cut a range so that no piece has more than `records_max` records."""
    partition, last_count = whole.partition, records_max
    pieces: list[ReadRange] = []
    waiting = [LogSpan(whole.start, whole.end)]
    while waiting:
        span = waiting.pop()
        count = facts.count(partition, span.start, span.end)
        inner: Sequence[Offset] = ()
        if count > records_max:
            wanted = PIECES_PER_RANGE * -(-count // records_max) - 1
            inner = facts.boundaries(partition, span.start, span.end, wanted)
        if inner:
            edges = [span.start, *_checked(partition, span, inner), span.end]
            waiting += [LogSpan(a, b) for a, b in pairwise(edges)][::-1]
        elif last_count + count <= records_max:
            last_count += count
            pieces[-1] = ReadRange(partition, pieces[-1].start, span.end)
        else:
            last_count = count
            pieces.append(ReadRange(partition, span.start, span.end))
    return pieces


def _cut_evenly(facts: SpanFacts, whole: ReadRange, count: int) -> list[ReadRange]:
    """Cut a range into `count` pieces or fewer, of about the same size in bytes."""
    if count <= 1:
        return [whole]
    partition, size = whole.partition, whole.end - whole.start
    span = LogSpan(whole.start, whole.end)
    wanted = PIECES_PER_RANGE * count - 1
    inner = facts.boundaries(partition, whole.start, whole.end, wanted)
    known = [whole.start, *_checked(partition, span, inner), whole.end]
    edges = {whole.start, whole.end}
    for number in range(1, count):
        target = whole.start + size * number // count
        place = max(1, bisect_left(known, target))
        edges.add(min(known[place - 1 : place + 1], key=lambda at: abs(at - target)))
    return [ReadRange(partition, a, b) for a, b in pairwise(sorted(edges))]


def _checked(
    partition: TopicPartition, span: LogSpan, inner: Sequence[Offset]
) -> Sequence[Offset]:
    """Assert that boundaries ascend; others would make a plan overlap or never end."""
    edges = [span.start, *inner, span.end]
    assert all(a < b for a, b in pairwise(edges)), (
        f"{partition}: boundaries are not ascending: {edges}"
    )
    return inner


@dataclass(frozen=True, slots=True)
class Settled:
    """Readable and lost parts of a wanted span."""

    span: LogSpan
    """Span to read: within the log, and within the wanted span or empty."""
    lost: tuple[LostRange, ...] = ()


def settle(
    partition: TopicPartition,
    wanted: LogSpan,
    log: LogSpan | None,
    *,
    fail_on_data_loss: bool,
) -> Settled:
    """Decide what to read if a log may not have the wanted span.

    If a log ends before the query's offset, reading continues at the log end: messages
    put after the loss cannot be distinguished from those read before.

    Args:
        partition: partition of the log.
        wanted: span to read; empty for the current offset of a query.
        log: span of the log; None if the partition is gone.
        fail_on_data_loss: raise if bytes are lost.

    Raises:
        DataLossError: bytes are lost, and `fail_on_data_loss` is set.
        BackwardRangeError: `wanted` ends before it starts.
    """
    if wanted.start > wanted.end:
        raise BackwardRangeError(
            f"{partition}: cannot read from {wanted.start} to {wanted.end}"
        )
    if log is None:
        here = LogSpan(wanted.start, wanted.start)
        gone = LostRange(partition, wanted.start, None, "the partition is gone")
        settled = Settled(here, (gone,))
    else:
        settled = _fit(partition, wanted, log)
    if settled.lost and fail_on_data_loss:
        raise DataLossError(settled.lost)
    return settled


def _fit(partition: TopicPartition, wanted: LogSpan, log: LogSpan) -> Settled:
    lost: list[LostRange] = []

    def lose(start: Offset, end: Offset, reason: str) -> None:
        lost.append(LostRange(partition, start, end, reason))

    if wanted.start < log.start:
        # For an empty span, everything from its offset to the log start is lost.
        is_empty = wanted.start == wanted.end
        end = log.start if is_empty else min(wanted.end, log.start)
        lose(wanted.start, end, f"the log starts at {log.start}")
    if wanted.end > log.end:
        reason = f"the log ends at {log.end}"
        if wanted.start > log.end:
            reason += f", before the next byte to read, {wanted.start}"
        lose(log.end, wanted.end, reason)
    start = min(max(wanted.start, log.start), log.end)
    end = max(min(wanted.end, log.end), start)
    return Settled(LogSpan(start, end), tuple(lost))
