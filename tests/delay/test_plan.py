"""Tiers, progress, batches and the clock of delayed messages."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.delay.plan import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    NOTHING_DONE,
    OFFSET_MAX,
    RETRY_MS_MAX,
    STEPS_MAX,
    DueEntry,
    Progress,
    advanced,
    is_done,
    lowered,
    retry_delay_ms,
    take_batch,
    tier_of,
)

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass
class Source:
    """A tier that is a list."""

    waiting: list[DueEntry] = field(default_factory=list)
    late: list[DueEntry] = field(default_factory=list)
    progress: Progress = NOTHING_DONE
    seen: int = 10**6

    def peek(self) -> DueEntry | None:
        return self.waiting[0] if self.waiting else None

    def pop(self) -> DueEntry:
        return self.waiting.pop(0)


def waiting(due_ms: int, offset: int, messages: int = 1, size: int = 100) -> DueEntry:
    return DueEntry(due_ms, offset, messages, size, 0)


@pytest.mark.parametrize(
    ("delay_ms", "tier"),
    [
        (-5, 0),
        (0, 0),
        (HOUR_MS, 0),
        (HOUR_MS + 1, 1),
        (DAY_MS, 1),
        (DAY_MS + 1, 2),
        (32 * DAY_MS, 2),
        (32 * DAY_MS + 1, 3),
        (400 * DAY_MS, 3),
    ],
)
def test_a_tier_has_the_delays_up_to_its_end(delay_ms: int, tier: int) -> None:
    """An hour, a day, 32 days, more."""
    assert tier_of(10**12 + delay_ms, 10**12) == tier


@pytest.mark.parametrize(
    ("tries", "delay_ms"),
    [(1, 1000), (2, 2000), (6, 32_000), (7, 60_000), (9999, 60_000)],
)
def test_a_target_that_refuses_is_asked_less_and_less_often(
    tries: int, delay_ms: int
) -> None:
    """From a second to a minute."""
    assert retry_delay_ms(tries) == delay_ms <= RETRY_MS_MAX


def test_the_oldest_of_all_tiers_goes_first_and_nothing_before_its_time() -> None:
    """A record whose time is now is due."""
    a = Source([waiting(5, 0), waiting(9, 10), waiting(10, 20), waiting(11, 30)])
    b = Source([waiting(7, 0), waiting(10, 0)])
    batch, progress = take_batch([a, b], 10)
    assert [(each.tier, *each.record.key) for each in batch] == [
        (0, 5, 0), (1, 7, 0), (0, 9, 10), (1, 10, 0), (0, 10, 20)
    ]  # fmt: skip
    assert progress == [Progress(10, 20, 10**6), Progress(10, 0, 10**6)]
    assert a.waiting == [waiting(11, 30)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (waiting(1, 0, BATCH_MESSAGES_MAX), waiting(1, 9)),
        (waiting(1, 0, size=BATCH_BYTES_MAX), waiting(1, 9)),
        (waiting(1, 0, BATCH_MESSAGES_MAX + 1, BATCH_BYTES_MAX + 1), waiting(1, 9)),
        (waiting(1, 0), waiting(1, 9, BATCH_MESSAGES_MAX)),
    ],
)
def test_a_batch_is_bounded_but_for_one_larger_record(
    first: DueEntry, second: DueEntry
) -> None:
    """The rest comes with the next one."""
    source = Source([first, second])
    batch, progress = take_batch([source], 5)
    assert [each.record for each in batch] == [first]
    assert progress == [Progress(1, 0, 10**6)]
    assert source.waiting == [second]


def test_a_batch_may_reach_its_bounds() -> None:
    """Both are the most that one transaction has."""
    first = waiting(1, 0, size=9)
    second = waiting(1, 9, BATCH_MESSAGES_MAX - 1, size=BATCH_BYTES_MAX - 9)
    batch, _progress = take_batch([Source([first, second])], 5)
    assert [each.record for each in batch] == [first, second]


def test_what_is_late_goes_first_and_the_rest_of_its_tier_waits_for_it() -> None:
    """`seen` stops in front of the first late one that is left."""
    late = [waiting(3, 50, BATCH_MESSAGES_MAX), waiting(1, 70), waiting(2, 90)]
    source = Source([waiting(8, 60)], late, Progress(5, 5, 40), 99)
    batch, progress = take_batch([source], 10)
    assert [each.record.offset for each in batch] == [50]
    assert progress == [Progress(5, 5, 70)]
    source.progress = progress[0]
    batch, progress = take_batch([source], 10)
    assert [each.record.offset for each in batch] == [70, 90, 60]
    assert progress == [Progress(8, 60, 99)]


def test_a_cancelled_message_is_taken_with_its_record() -> None:
    """A record of which all are cancelled is no part of the batch, but is passed."""
    cancelled = [waiting(1, 0, 2), waiting(1, 0, -1), waiting(1, 0, -2)]
    source = Source([*cancelled, waiting(2, 5, 3), waiting(2, 5, -3)])
    batch, progress = take_batch([source], 10)
    assert [(each.record.offset, each.cancelled) for each in batch] == [
        (0, (0, 1)), (5, (2,))
    ]  # fmt: skip
    assert progress == [Progress(2, 5, 10**6)]


def test_a_late_message_may_be_cancelled_too() -> None:
    """It was, before a clock went back and on; all of them is no part of the batch."""
    late = [
        waiting(3, 50, 2),
        waiting(3, 50, -2),
        waiting(1, 70),
        waiting(1, 70, -1),
    ]
    source = Source([], late, Progress(5, 5, 40), 99)
    batch, progress = take_batch([source], 10)
    assert [(each.record.offset, each.cancelled) for each in batch] == [
        (50, (1,)), (70, (0,))
    ]  # fmt: skip
    assert progress == [Progress(5, 5, 99)]


def test_a_tier_stops_where_a_cancel_is_being_stored() -> None:
    """The other tiers go on."""
    a, b = Source([waiting(1, 0), waiting(2, 5)]), Source([waiting(9, 0)])
    batch, _progress = take_batch([a, b], 10, {(0, 2, 5)})
    assert [(each.tier, each.record.offset) for each in batch] == [(0, 0), (1, 0)]


records = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 50), st.integers(1, 3000)),
    max_size=30,
    unique_by=lambda each: each[1],
)


@given(
    st.lists(st.tuples(records, st.integers(0, 60)), min_size=1, max_size=12),
    st.lists(st.integers(0, 30), min_size=12, max_size=12),
)
def test_each_record_is_delivered_once_whenever_it_comes(
    arrivals: list[tuple[list[tuple[int, int, int]], int]], clock: list[int]
) -> None:
    """Records that come early, late, or after the clock went back; with crashes."""
    steps = (NOTHING_DONE,)
    log: list[DueEntry] = []
    delivered: list[DueEntry] = []
    for (news, _at), now_ms in zip(arrivals, clock, strict=False):
        for due_ms, _offset, messages in news:
            log.append(waiting(due_ms, 10 * len(log), messages))
        steps = lowered(steps, now_ms)
        while True:
            left = [each for each in log if not is_done(steps, each.key)]
            source = Source(
                sorted(each for each in left if each.key > steps[0][:2]),
                [each for each in left if each.key <= steps[0][:2]],
                steps[0],
                10 * len(log),
            )
            batch, progress = take_batch([source], now_ms)
            if not batch:
                break
            assert all(each.record.due_ms <= now_ms for each in batch)
            delivered += [each.record for each in batch]
            steps = advanced(steps, progress[0])
        assert sorted(delivered) == sorted(set(delivered))
        is_bounded = len(steps) < STEPS_MAX
        due = {each for each in log if each.due_ms <= now_ms}
        assert not is_bounded or due <= set(delivered)


def test_lowered_progress_has_the_same_done() -> None:
    """A record that comes later with a time in between waits for it."""
    steps = lowered((Progress(100, 7, 50),), 60)
    assert steps == (Progress(60, OFFSET_MAX, 50), Progress(100, 7, 50))
    assert is_done(steps, (99, 49))
    assert not is_done(steps, (99, 50))
    assert not is_done(steps, (60, 50))
    assert advanced(steps, Progress(99, 55, 80)) == (Progress(99, 55, 80), steps[1])
    assert advanced(steps, Progress(100, 8, 80)) == (Progress(100, 8, 80),)
    assert lowered(steps, 60) is steps
