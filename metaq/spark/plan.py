"""Ranges of a batch, and their division among tasks. Pure.

    backlog, limits  --plan_batch_end-->  end offsets  --plan_reads-->  read ranges

Offsets are bytes, so a number in the middle of a log need not be where a record begins.
Nothing here ever makes up an offset: every end and every cut is one that `SpanFacts`
named, or the end of a span that was given. A batch therefore never ends inside a
record, and the ranges of a plan cover its spans exactly, without overlap.

`settle` is the one policy for data that should be read and is gone. Data are lost in
three ways: retention moves the log start past a query's offset, a log ends before its
old end (it was created again, or a disk lost its tail), or a partition no longer
exists. Driver and tasks call the same function, so that they never disagree; nothing is
ever left out without a `LostRange` that names it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol, TypeAlias

from metaq.model import Offset, SizeBytes, TopicPartition
from metaq.spark.errors import BackwardRangeError, DataLossError, LostRange

PROBES: Final = 15
"""Boundaries asked for at once while one is searched. A guess says where among them it
is, and a count or two confirm it."""
PROBES_MAX: Final = 1000
"""The same within `WALK_BYTES`: there they are all, as a rule."""
WALK_BYTES: Final = 256 * 1024
"""Bytes that a broker walks record by record in less time than another request
takes."""
PIECES_PER_RANGE: Final = 4
"""Factor by which boundaries are asked for finer than the result; the ranges then come
within a quarter of the asked size."""


@dataclass(frozen=True, slots=True)
class LogSpan:
    """A stretch of one partition's log, from one record boundary to another."""

    start: Offset
    end: Offset

    @property
    def size_bytes(self) -> SizeBytes:
        """Return how many bytes it has; negative where it ends before it starts."""
        return SizeBytes(self.end - self.start)


Spans: TypeAlias = Mapping[TopicPartition, LogSpan]
Logs: TypeAlias = Mapping[TopicPartition, LogSpan | None]
"""None: a broker does not have the log, or does not have it yet."""


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Range of one partition for a Spark task; goes to executors in pickled form."""

    partition: TopicPartition
    start: Offset
    end: Offset


class SpanFacts(Protocol):
    """Log facts used by planning; all answers are about [start, end)."""

    def count(self, partition: TopicPartition, start: Offset, end: Offset) -> int:
        """Return how many records begin there.

        An estimate will do where a broker cannot count; limits then hold roughly.
        """

    def boundaries(
        self, partition: TopicPartition, start: Offset, end: Offset, count: int
    ) -> Sequence[Offset]:
        """Return about `count` (1 or more) places where records begin.

        Returns:
            Offsets strictly between `start` and `end`, ascending, spread evenly over
            the bytes. Empty only where no such place is known.
        """

    def boundaries_after(
        self, partition: TopicPartition, start: Offset, end: Offset, origin: Offset
    ) -> Sequence[Offset]:
        """Return offsets soon after `start` where records begin.

        Asked where `boundaries` named none.

        Args:
            partition: whose.
            start: where a record begins.
            end: the same.
            origin: where the search began, at `start` or before it.

        Returns:
            Offsets strictly between `start` and `end`, ascending. Empty where none is
            known, or where enough was searched.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of one micro-batch; None is no limit."""

    messages_max: int | None = None
    """At most that many messages, but one of each partition; 1 or more."""
    bytes_max: int | None = None
    """At most that many bytes, but one message of each partition; 1 or more."""
    messages_min: int | None = None
    """Wait until so many are there, 1 or more."""
    delay_s_max: float = 0.0
    """Wait no longer than that for `messages_min`."""

    @property
    def is_any(self) -> bool:
        """Whether there is a limit."""
        limits = (self.messages_max, self.bytes_max, self.messages_min)
        return any(limit is not None for limit in limits)


def plan_batch_end(
    backlog: Spans, limits: BatchLimits, facts: SpanFacts, *, waited_s: float
) -> dict[TopicPartition, Offset]:
    """Return where a micro-batch ends in each partition.

    A limit is shared in proportion to the backlog, as Kafka's source does; every
    partition that has a backlog takes one record at least, so that none starves.

    Args:
        backlog: per partition, from the next byte to read to the log end.
        limits: bounds of the batch.
        facts: asked only where a limit makes it necessary.
        waited_s: how long the oldest of the backlog has waited.

    Returns:
        One record boundary for each partition of `backlog`. All of them are the
        starts when the batch is to wait for more.

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
        facts: asked only where a span has to be cut.
        ranges_min: a hint: cut large spans so that there are about so many ranges,
            1 or more; None leaves every span whole.
        records_max: records of one range, 1 or more; exceeded only where a log names
            no boundary. None is no limit.

    Returns:
        Ranges that cover the spans exactly, the largest first: a task that starts
        late should be a short one.

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
                f" at {span.end}: the log went back, or the offset is of another one"
            )


def _shares(
    sizes: Mapping[TopicPartition, int], limit: int | None
) -> dict[TopicPartition, int]:
    """Share a limit in proportion to `sizes`; nothing if it holds."""
    total = sum(sizes.values())
    if limit is None or total <= limit:
        return {}
    return {p: limit * size // total for p, size in sizes.items()}


@dataclass(slots=True)
class _Search:
    """Search for the last boundary of a span, not empty, that is within a limit.

    Each round keeps one gap between boundaries, so the search ends: at a gap between
    two records, or where the log names no boundary. Boundaries and counts are requests,
    so the limit is guessed, as if all records were of one size.
    """

    facts: SpanFacts
    partition: TopicPartition
    span: LogSpan
    limit: int
    is_count: bool
    """It limits records; bytes otherwise."""
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
                # Every record is known; nothing has to be counted.
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
            # Where it names none in a gap, it names none in a part of it.
            self.has_boundaries = bool(inner)
        if not inner:
            inner = facts.boundaries_after(partition, low[0], high[0], self.span.start)
        return _checked(partition, span, inner)

    def _narrow(
        self, known: Sequence[Offset], low: tuple[Offset, int], high: tuple[Offset, int]
    ) -> tuple[tuple[Offset, int], tuple[Offset, int]]:
        """Return the neighbours in `known` between which the limit is passed.

        `known` has three boundaries or more, ascending: `low` is the first, which fits,
        and `high` the last, which does not, each with the amount before it.
        """
        first, last, is_guess = 0, len(known) - 1, True
        while last - first > 1:
            share = (self.limit - low[1]) / (high[1] - low[1])
            expected = low[0] + share * (high[0] - low[0])
            # Every other time the middle: guesses alone may come from one side.
            middle = (first + last) // 2
            place = bisect_right(known, expected) - 1 if is_guess else middle
            place, is_guess = min(max(place, first + 1), last - 1), not is_guess
            # Asked from the last place that fits: long ranges cost the broker more.
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
    """Catch boundaries that would make a plan overlap or run for ever."""
    edges = [span.start, *inner, span.end]
    assert all(a < b for a, b in pairwise(edges)), (
        f"{partition}: boundaries are not ascending: {edges}"
    )
    return inner


@dataclass(frozen=True, slots=True)
class Settled:
    """Readable and lost parts of a wanted span."""

    span: LogSpan
    """Span to read: within the wanted span or empty, and within the log."""
    lost: tuple[LostRange, ...] = ()


def settle(
    partition: TopicPartition,
    wanted: LogSpan,
    log: LogSpan | None,
    *,
    fail_on_data_loss: bool,
) -> Settled:
    """Decide how to go on when a log may not hold the wanted span.

    Reading goes on at the end of a log that ends before the query's offset: messages
    put after the loss cannot be distinguished from those read before.

    `wanted` is empty where a query only has an offset; `log` is None where the
    partition is gone.

    Raises:
        DataLossError: something is lost and `fail_on_data_loss` is set.
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
        # A query that only has an offset there has lost everything up to the log start.
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
