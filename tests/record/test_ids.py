"""Ids grow, never repeat, and survive any clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, BrokerId, MessageId, Millis
from metaq.record.ids import MS_MAX, SEQUENCE_MASK, IdGenerator, id_after, id_runs


class StepClock:
    """A wall clock that the test sets."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def wall_ms(self) -> Millis:
        return Millis(self.ms)


NO_FLOOR = MessageId(-1)


def generator(clock: StepClock, broker: int = 3, floor: int = -1) -> IdGenerator:
    return IdGenerator(clock, BrokerId(broker), MessageId(floor))


def test_an_id_has_the_documented_bits() -> None:
    """Broker 3 at 1700000000000 ms stamps the id of the specification."""
    assert generator(StepClock(1_700_000_000_000)).reserve(1) == 1661382015569637376


def test_the_first_java_id_lies_on_the_same_line() -> None:
    """The recorded Java id has worker 3 and sequence 0."""
    java = -5468930500527640576
    assert (java >> 12) & 0x3FF == 3
    assert java & SEQUENCE_MASK == 0
    assert (java >> ID_MS_SHIFT) + ID_ZERO_MS == 1021362


def test_ids_of_one_millisecond_run_ahead_of_the_clock() -> None:
    """More than 4096 ids in a millisecond carry into the next ones, no waiting."""
    ids = generator(StepClock(ID_ZERO_MS + 50))
    first = ids.reserve(10_000)
    second = ids.reserve(1)
    assert first == (50 << ID_MS_SHIFT) | (3 << 12)
    assert second == id_after(first, 10_000)
    assert second == (52 << ID_MS_SHIFT) | (3 << 12) | (10_000 - 8192)


def test_a_clock_that_steps_back_changes_nothing() -> None:
    """Ids keep growing by one until the clock has caught up."""
    clock = StepClock(ID_ZERO_MS + 1000)
    ids = generator(clock)
    before = ids.reserve(1)
    clock.ms -= 900
    assert ids.reserve(1) == before + 1
    clock.ms += 901
    assert ids.reserve(1) >> ID_MS_SHIFT == 1001


def test_ids_start_behind_the_floor() -> None:
    """The largest id on disk is a floor, at any time of the clock."""
    floor = (5000 << ID_MS_SHIFT) | (3 << 12) | 4095
    ids = generator(StepClock(ID_ZERO_MS + 100), floor=floor)
    assert ids.peek() == id_after(MessageId(floor), 1) > floor


def test_a_floor_of_another_worker_keeps_its_time() -> None:
    """A data directory that changed its broker id still does not go back."""
    floor = (5000 << ID_MS_SHIFT) | (900 << 12) | 7
    first = generator(StepClock(ID_ZERO_MS), floor=floor).peek()
    assert first == (5000 << ID_MS_SHIFT) | (3 << 12) | 8


@pytest.mark.parametrize("floor", [-1, -5468930500527640576, 2**63 - 1])
def test_ids_no_clock_made_are_no_floor(floor: int) -> None:
    """Negative ids come from Java brokers, absurd ones from damage."""
    ids = generator(StepClock(ID_ZERO_MS + 7), floor=floor)
    assert ids.peek() >> ID_MS_SHIFT == 7


@pytest.mark.parametrize("ms", [0, ID_ZERO_MS, ID_ZERO_MS + 2**50])
def test_absurd_clocks_still_give_ids_that_fit(ms: int) -> None:
    """A clock at 1970 or beyond 2080 gives positive signed 64-bit ids, never 0."""
    ids = generator(StepClock(ms), broker=0)
    assert 0 < ids.reserve(1) < ids.peek() < 2**63
    assert ids.peek() >> ID_MS_SHIFT <= MS_MAX + 1


@pytest.mark.parametrize("broker", [-1, 1024])
def test_a_broker_id_beyond_ten_bits_is_refused(broker: int) -> None:
    """Worker bits hold 0..1023."""
    with pytest.raises(ValueError, match=r"expected 0\.\.1023"):
        generator(StepClock(0), broker=broker)


def test_a_caller_that_stamps_ids_itself_hands_them_back() -> None:
    """After peek and advance_to the next id is the first unused one."""
    ids = generator(StepClock(ID_ZERO_MS + 9))
    first = ids.peek()
    assert ids.peek() == first
    ids.advance_to(id_after(first, 5000))
    assert ids.peek() == id_after(first, 5000)
    ids.advance_to(first)
    assert ids.peek() == id_after(first, 5000)


@given(st.integers(-(2**62), 2**62), st.integers(0, 20_000), st.integers(0, 20_000))
def test_id_after_adds_up_and_grows(first: int, a: int, b: int) -> None:
    """Stepping a then b is stepping a + b; later ids are larger, also below zero."""
    step_a = id_after(MessageId(first), a)
    assert id_after(step_a, b) == id_after(MessageId(first), a + b)
    assert (step_a > first) == (a > 0)
    assert (step_a ^ first) >> 12 & 0x3FF == 0


@given(st.lists(st.tuples(st.integers(0, 2**42), st.integers(1, 9000)), max_size=20))
def test_ids_never_repeat_under_any_clock(steps: list[tuple[int, int]]) -> None:
    """However the clock moves between reservations, every range is above the last."""
    clock = StepClock(0)
    ids, last = generator(clock), NO_FLOOR
    for ms, count in steps:
        clock.ms = ms
        first = ids.reserve(count)
        assert first > last
        last = id_after(first, count - 1)


def test_ids_of_a_time_that_a_clock_has_shown_are_over() -> None:
    """All of its millisecond; a time that no clock shows changes nothing."""
    clock = StepClock(1_700_000_000_000)
    last = generator(clock).reserve(SEQUENCE_MASK + 1) + SEQUENCE_MASK
    clock.ms = 1_600_000_000_000
    ids = generator(clock)
    ids.advance_past(Millis(1_700_000_000_000))
    first = ids.peek()
    assert first > last
    assert first >> ID_MS_SHIFT == (last >> ID_MS_SHIFT) + 1
    for time_ms in (1_699_999_999_999, ID_ZERO_MS + MS_MAX):
        ids.advance_past(Millis(time_ms))
        assert ids.peek() == first


@given(st.integers(0, 2**62), st.integers(1, 10_000))
def test_ids_of_a_run_are_those_of_each(first: int, count: int) -> None:
    """Across as many ends of the sequence as there are."""
    runs = list(id_runs(MessageId(first), count))
    ids = [id_ for run in runs for id_ in run]
    assert ids == [id_after(MessageId(first), k) for k in range(count)]
    assert all(run.stop & SEQUENCE_MASK == 0 for run in runs[:-1])
