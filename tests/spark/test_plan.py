"""Any log and any limits: plans cover, never overlap, progress, and fall on records."""

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.spark.errors import BackwardRangeError
from metaq.spark.options import SourceOptions
from metaq.spark.plan import BatchLimits, LogSpan, ReadRange, plan_batch_end, plan_reads
from metaq.spark.source.batch import RANGES_MAX, SHARED_BYTES, TASKS_MIN, share_tasks
from metaq.spark.source.read_task import ReadTask

Logs = dict[TopicPartition, list[int]]


class Book:
    """The facts of logs that are known record by record; some name few boundaries."""

    def __init__(self, logs: Logs, every: int = 1, after: int = 0) -> None:
        self.starts = logs
        self.every = every
        self.after = after
        self.questions = 0
        self.counted = 0

    def count(self, partition: TopicPartition, start: Offset, end: Offset) -> int:
        self.questions += 1
        self.counted += end - start
        starts = self.starts[partition]
        return max(0, bisect_left(starts, end) - bisect_left(starts, start))

    def boundaries(
        self, partition: TopicPartition, start: Offset, end: Offset, count: int
    ) -> Sequence[Offset]:
        self.questions += 1
        assert count >= 1
        starts = self.starts[partition][:: self.every]
        inside = starts[bisect_right(starts, start) : bisect_left(starts, end)]
        targets = (
            start + (end - start) * n // (count + 1) for n in range(1, count + 1)
        )
        places = (min(bisect_left(inside, at), len(inside) - 1) for at in targets)
        return [Offset(inside[at]) for at in sorted(set(places)) if inside]

    def boundaries_after(
        self, partition: TopicPartition, start: Offset, end: Offset, origin: Offset
    ) -> Sequence[Offset]:
        self.questions += 1
        assert origin <= start < end
        starts = self.starts[partition]
        inside = starts[bisect_right(starts, start) : bisect_left(starts, end)]
        return [Offset(at) for at in inside[: self.after]]


def partition(number: int) -> TopicPartition:
    return TopicPartition("logs", BrokerId(0), number)


def book(*sizes: Sequence[int], every: int = 1) -> tuple[Book, dict]:
    """Return facts and full spans of logs whose records have these sizes."""
    logs = {
        partition(n): list(accumulate(log, initial=100)) for n, log in enumerate(sizes)
    }
    spans = {p: LogSpan(Offset(100), Offset(at[-1])) for p, at in logs.items()}
    return Book(logs, every), spans


SIZES = st.lists(st.integers(20, 300), max_size=40)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Book, dict[TopicPartition, LogSpan]]:
    """Logs of any record sizes, read from any boundary to any later one."""
    facts, spans = book(
        *draw(st.lists(SIZES, min_size=1, max_size=5)), every=draw(st.integers(1, 5))
    )
    facts.after = draw(st.integers(0, 3))
    for name, starts in facts.starts.items():
        low, high = sorted(draw(st.tuples(*[st.sampled_from(starts)] * 2)))
        spans[name] = LogSpan(Offset(low), Offset(high))
    return facts, spans


LIMITS = st.none() | st.integers(1, 60)


@pytest.mark.slow
@given(worlds(), LIMITS, st.none() | st.integers(1, 5000))
def test_any_batch_progresses_and_ends_between_records(
    world: tuple[Book, dict[TopicPartition, LogSpan]],
    messages_max: int | None,
    bytes_max: int | None,
) -> None:
    """Each partition with a backlog takes one record at least; limits are kept."""
    facts, backlog = world
    limits = BatchLimits(messages_max=messages_max, bytes_max=bytes_max)
    ends = plan_batch_end(backlog, limits, facts, waited_s=0)
    assert ends.keys() == backlog.keys()
    for name, span in backlog.items():
        assert span.start <= ends[name] <= span.end
        assert (ends[name] > span.start) == (span.end > span.start)
        assert ends[name] in facts.starts[name]
    filled = {p: span for p, span in backlog.items() if span.size_bytes}
    if facts.every == 1:
        taken = {p: facts.count(p, s.start, ends[p]) for p, s in filled.items()}
        if messages_max is not None:
            assert sum(taken.values()) <= max(messages_max, 0) + len(filled)
        for p, span in filled.items():
            if bytes_max is not None and taken[p] > 1:
                assert ends[p] - span.start <= bytes_max


@pytest.mark.slow
@given(worlds(), LIMITS, LIMITS)
def test_any_plan_covers_exactly_and_falls_on_records(
    world: tuple[Book, dict[TopicPartition, LogSpan]],
    ranges_min: int | None,
    records_max: int | None,
) -> None:
    """No byte twice, none left out, no empty range, no cut inside a record."""
    facts, spans = world
    ranges = plan_reads(spans, facts, ranges_min=ranges_min, records_max=records_max)
    sizes = [r.end - r.start for r in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size > 0 for size in sizes)
    for name, span in spans.items():
        own = sorted((r.start, r.end) for r in ranges if r.partition == name)
        if span.size_bytes:
            assert (own[0][0], own[-1][1]) == (span.start, span.end)
            assert all(a[1] == b[0] for a, b in pairwise(own))
        else:
            assert own == []
    for r in ranges:
        assert {int(r.start), int(r.end)} <= set(facts.starts[r.partition])
        if records_max is not None and facts.every == 1:
            assert facts.count(r.partition, r.start, r.end) <= records_max


def shares_of(
    facts: Book, spans: dict[TopicPartition, LogSpan], **more: int | None
) -> list[tuple[ReadRange, ...]]:
    """Return the ranges of each task, as the options of a read say."""
    given = {name: str(value) for name, value in more.items() if value is not None}
    options = SourceOptions.from_map(
        {"brokers": "unused:1", "subscribe": "logs", **given}, is_stream=False
    )
    ranges = plan_reads(
        spans, facts, ranges_min=options.ranges_min, records_max=options.records_max
    )
    tasks = [ReadTask(one, None) for one in ranges]
    shares = [
        tuple(task.range for task in share)
        for share in share_tasks(facts, options, tasks)
    ]
    assert sorted(r.start for share in shares for r in share) == sorted(
        r.start for r in ranges
    )
    return shares


def test_small_partitions_share_a_task() -> None:
    """As many as a task may have, while there is one for each of some cores."""
    facts, spans = book(*[[100] * 4] * 500)
    shares = shares_of(facts, spans)
    assert len(shares) == 17
    assert max(map(len, shares)) == 31 <= RANGES_MAX
    assert len(shares_of(facts, spans, minPartitions=200)) >= 200
    limited = shares_of(facts, spans, maxRecordsPerPartition=10)
    assert [len(share) for share in limited] == [2] * 250
    few = dict(list(spans.items())[:TASKS_MIN])
    assert len(shares_of(facts, few)) == TASKS_MIN
    facts, spans = book(*[[SHARED_BYTES // 2 - 1]] * 100)
    assert [len(share) for share in shares_of(facts, spans)] == [2] * 50


@pytest.mark.slow
@given(worlds(), LIMITS, LIMITS)
def test_any_shared_tasks_keep_order_and_limits(
    world: tuple[Book, dict[TopicPartition, LogSpan]],
    ranges_min: int | None,
    records_max: int | None,
) -> None:
    """Ranges of a partition ascend in a task; the options still hold."""
    facts, spans = world
    given = {"minPartitions": ranges_min, "maxRecordsPerPartition": records_max}
    shares = shares_of(facts, spans, **given)
    range_count = sum(map(len, shares))
    assert len(shares) >= min(ranges_min or 0, range_count)
    for share in shares:
        assert list(share) == sorted(share, key=lambda r: (r.partition, r.start))
        if records_max is not None and facts.every == 1:
            counts = [facts.count(r.partition, r.start, r.end) for r in share]
            assert sum(counts) <= records_max


def test_without_limits_a_batch_takes_all_and_asks_nothing() -> None:
    """Facts may cost a request, so unneeded ones are not asked for."""
    facts, backlog = book([100] * 10, [50] * 4)
    ends = plan_batch_end(backlog, BatchLimits(), facts, waited_s=0)
    assert ends == {p: span.end for p, span in backlog.items()}
    roomy = BatchLimits(bytes_max=10_000)
    assert plan_batch_end(backlog, roomy, facts, waited_s=0) == ends
    assert [r.partition for r in plan_reads(backlog, facts)] == list(backlog)
    assert facts.questions == 0


def test_a_limit_is_shared_in_proportion_to_the_backlog() -> None:
    """As Kafka's source does; a small partition gets one at least."""
    facts, backlog = book([100] * 900, [100] * 99, [100])
    ends = plan_batch_end(backlog, BatchLimits(messages_max=100), facts, waited_s=0)
    taken = [facts.count(p, s.start, ends[p]) for p, s in backlog.items()]
    assert taken == [90, 9, 1]
    ends = plan_batch_end(backlog, BatchLimits(bytes_max=10_000), facts, waited_s=0)
    assert [ends[p] - s.start for p, s in backlog.items()] == [9000, 900, 100]


def test_both_limits_hold_together() -> None:
    """Whichever is reached first."""
    facts, backlog = book([1000] * 10 + [20] * 90)
    for messages_max, bytes_max, count in (
        (50, 3000, 3),
        (2, 3000, 2),
        (50, 10**6, 50),
    ):
        limits = BatchLimits(messages_max=messages_max, bytes_max=bytes_max)
        ends = plan_batch_end(backlog, limits, facts, waited_s=0)
        assert facts.count(partition(0), Offset(100), ends[partition(0)]) == count


def test_a_record_over_the_limit_is_taken_alone() -> None:
    """Progress comes before the limit: otherwise the query would wait for ever."""
    facts, backlog = book([5000, 20, 20])
    ends = plan_batch_end(backlog, BatchLimits(bytes_max=10), facts, waited_s=0)
    assert ends == {partition(0): 5100}


def test_a_batch_waits_until_there_is_enough_or_time_is_up() -> None:
    """minOffsetsPerTrigger with maxTriggerDelay."""
    facts, backlog = book([100] * 9)
    starts = {p: span.start for p, span in backlog.items()}
    ends = {p: span.end for p, span in backlog.items()}
    few = BatchLimits(messages_min=10, delay_s_max=900)
    enough = BatchLimits(messages_min=9, delay_s_max=900)
    assert plan_batch_end(backlog, few, facts, waited_s=899.9) == starts
    assert plan_batch_end(backlog, few, facts, waited_s=900) == ends
    assert plan_batch_end(backlog, enough, facts, waited_s=0) == ends


def test_searching_a_long_log_takes_few_questions() -> None:
    """A question may be a request: their number grows with the logarithm."""
    facts, backlog = book([30] * 200_000)
    for limits in (BatchLimits(messages_max=777), BatchLimits(bytes_max=77_777)):
        facts.questions = 0
        plan_batch_end(backlog, limits, facts, waited_s=0)
        assert facts.questions <= 8
    facts.questions = 0
    ranges = plan_reads(backlog, facts, records_max=10_000)
    assert facts.questions <= 250
    assert len(ranges) <= 27


@pytest.mark.parametrize("messages_max", [777, 90_000, 199_000])
def test_a_search_counts_no_stretch_many_times(messages_max: int) -> None:
    """A broker adds up what it counts: the whole backlog twice, and then the gap."""
    facts, backlog = book([30] * 100_000 + [60] * 100_000)
    limits = BatchLimits(messages_max=messages_max)
    plan_batch_end(backlog, limits, facts, waited_s=0)
    assert facts.counted <= 3.2 * backlog[partition(0)].size_bytes


def test_a_short_log_takes_two_questions() -> None:
    """The number of records, and where all of them begin."""
    facts, backlog = book([30] * 1000)
    for messages_max in (1, 7, 999):
        facts.questions = 0
        limits = BatchLimits(messages_max=messages_max)
        ends = plan_batch_end(backlog, limits, facts, waited_s=0)
        assert ends == {partition(0): 100 + 30 * messages_max}
        assert facts.questions <= 3  # one to share the limit, and one of the two again


def test_records_of_many_sizes_take_a_few_more_questions() -> None:
    """A guess that is wrong halves what is left, like any search."""
    facts, backlog = book([20] * 50_000 + [3000] * 2000 + [25] * 50_000)
    for messages_max in (1, 49_999, 50_001, 51_000, 52_001, 101_999):
        facts.questions = 0
        limits = BatchLimits(messages_max=messages_max)
        ends = plan_batch_end(backlog, limits, facts, waited_s=0)
        questions = facts.questions
        assert facts.count(partition(0), Offset(100), ends[partition(0)]) == (
            messages_max
        )
        assert questions <= 40


def test_large_spans_are_cut_for_a_minimum_of_ranges() -> None:
    """In proportion to their bytes; what is small already stays whole."""
    facts, spans = book([100] * 80, [100] * 19, [100])
    ranges = plan_reads(spans, facts, ranges_min=10)
    sizes = [r.end - r.start for r in ranges]
    assert sizes == [1000] * 9 + [900, 100]
    assert len(plan_reads(spans, facts, ranges_min=3)) == 3


def test_boundaries_need_not_be_as_many_as_asked_for() -> None:
    """The cuts nearest to the wanted ones are taken, each once."""
    facts, spans = book([100] * 100, every=30)
    ranges = plan_reads(spans, facts, ranges_min=50)
    assert sorted(r.start for r in ranges) == [100, 3100, 6100, 9100]
    facts, spans = book([100] * 1000)
    assert len(plan_reads(spans, facts, ranges_min=4)) == 4


def test_more_ranges_than_bytes_are_no_mistake() -> None:
    """The hint asks for what cannot be had; every record alone is the most."""
    facts, spans = book([20, 20])
    ranges = plan_reads(spans, facts, ranges_min=1000)
    assert [(r.start, r.end) for r in ranges] == [(100, 120), (120, 140)]


def test_a_span_that_goes_back_is_refused_with_both_numbers() -> None:
    """Spark would take it for empty and lose what is between, without a word."""
    facts, _spans = book([100])
    back = {partition(0): LogSpan(Offset(25), Offset(20))}
    pattern = r"logs/0-0: the next byte to read is 25, but the log ends at 20"
    with pytest.raises(BackwardRangeError, match=pattern):
        plan_batch_end(back, BatchLimits(), facts, waited_s=0)
    with pytest.raises(BackwardRangeError, match=pattern):
        plan_reads(back, facts)


def test_boundaries_that_are_not_ascending_are_a_bug() -> None:
    """Believed, they would give overlapping ranges or an endless search."""

    class Liar(Book):
        def boundaries(self, *_args: object) -> Sequence[Offset]:
            return [Offset(150), Offset(150)]

    facts = Liar({partition(0): [100, 150, 200]})
    spans = {partition(0): LogSpan(Offset(100), Offset(200))}
    with pytest.raises(AssertionError, match="not ascending"):
        plan_reads(spans, facts, records_max=1)


def test_a_read_range_travels_to_executors() -> None:
    """In pickled form, equal on arrival."""
    one = ReadRange(partition(3), Offset(1), Offset(2))
    assert pickle.loads(pickle.dumps(one)) == one
