"""Retention: what the plan takes, in which order, and which clocks it believes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.model import LogId, Millis, Offset, SizeBytes
from metaq.storage.retention import (
    HOLD_MS,
    LEAD_MS_MAX,
    STEP_MS_MAX,
    LogFacts,
    Reason,
    Removal,
    SegmentFacts,
    TrustedTime,
    check_clocks,
    newest_times,
    plan_retention,
    trust_at_start,
)
from tests.sampling import examples

SECOND = 1000
HOUR = 3600 * SECOND
DAY = 24 * HOUR
YEAR = 365 * DAY
NOW = Millis(50 * YEAR)
LOG = LogId("test", 0)
OTHER = LogId("test", 1)
WEEK = 7 * DAY


def facts(
    ages: list[int | None], sizes: list[int] | None = None, mtime_age: int = 0
) -> tuple[SegmentFacts, ...]:
    """Segments of these ages, oldest first, the last one active."""
    made, base = [], 0
    for number, age in enumerate(ages):
        size = sizes[number] if sizes else 100
        made.append(
            SegmentFacts(
                Offset(base),
                SizeBytes(size),
                is_active=number == len(ages) - 1,
                newest_append_ms=None if age is None else Millis(NOW - age),
                mtime_ms=Millis(NOW - mtime_age),
            )
        )
        base += size
    return tuple(made)


def plan(*logs: LogFacts, now: int = NOW, directory: int = 0) -> tuple[Removal, ...]:
    return plan_retention(logs, now_ms=Millis(now), directory_bytes_max=directory)


def bases(actions: tuple[Removal, ...]) -> list[tuple[int, Reason]]:
    return [(action.base_offset, action.reason) for action in actions]


# -- age ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ages", "gone"),
    [
        ([9 * DAY, 8 * DAY, 6 * DAY, 0], 2),
        ([9 * DAY, 8 * DAY, 8 * DAY], 2),
        ([9 * DAY], 0),
        ([], 0),
        ([7 * DAY + 1, 0], 1),
        ([7 * DAY, 0], 0),
        ([6 * DAY, 9 * DAY, 0], 0),
        ([None, 0], 0),
    ],
    ids=str,
)
def test_the_oldest_go_while_each_is_strictly_older(ages, gone: int) -> None:
    """In a row from the front, never the active one, never at exactly the age."""
    segments = facts(ages)
    actions = plan(LogFacts(LOG, segments, WEEK))
    assert actions == tuple(
        Removal(LOG, item.base_offset, Reason.AGE) for item in segments[:gone]
    )


def test_without_an_index_the_time_of_the_file_counts() -> None:
    """And only then: a touched file does not make its records young."""
    assert len(plan(LogFacts(LOG, facts([None, 0], mtime_age=8 * DAY), WEEK))) == 1
    assert len(plan(LogFacts(LOG, facts([8 * DAY, 0], mtime_age=0), WEEK))) == 1
    assert plan(LogFacts(LOG, facts([6 * DAY, 0], mtime_age=8 * DAY), WEEK)) == ()


@pytest.mark.parametrize(
    ("ages", "expected"),
    [
        ([5, 4, 3], [5, 4, 3]),
        ([5, -YEAR, 3], [5, 3, 3]),
        ([-1, -YEAR, 3], [3, 3, 3]),
        ([5, YEAR, 3], [5, 5, 3]),
        ([5, 3, 4], [5, 3, 3]),
        ([0], [0]),
        ([], []),
    ],
)
def test_impossible_times_only_make_segments_stay(ages, expected) -> None:
    """Written while the clock was wrong: the neighbours know better."""
    assert [NOW - time for time in newest_times(facts(ages), NOW)] == expected


def test_a_log_written_wholly_in_the_future_stays() -> None:
    """Nothing is known about its age."""
    assert plan(LogFacts(LOG, facts([-YEAR, -YEAR, -YEAR]), WEEK)) == ()


# -- size -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "gone"), [(400, 0), (399, 1), (300, 1), (299, 2), (1, 3), (0, 0)]
)
def test_a_log_over_its_size_loses_the_oldest(limit: int, gone: int) -> None:
    """Until the rest fits, the active segment counted in and never taken."""
    log = LogFacts(LOG, facts([0, 0, 0, 0]), WEEK, log_bytes_max=limit)
    assert bases(plan(log)) == [(100 * n, Reason.LOG_SIZE) for n in range(gone)]


def test_age_comes_first_and_counts_for_the_size() -> None:
    """Segments that go by age need not go by size as well."""
    log = LogFacts(LOG, facts([8 * DAY, 1, 1, 0]), WEEK, log_bytes_max=250)
    assert bases(plan(log)) == [(0, Reason.AGE), (100, Reason.LOG_SIZE)]


def test_size_asks_no_clock() -> None:
    """With a clock ten years off the same segments go by size."""
    log = LogFacts(LOG, facts([3, 2, 1, 0]), WEEK, log_bytes_max=250)
    for now in (NOW, NOW - 10 * YEAR):
        assert bases(plan(log, now=now)) == [
            (0, Reason.LOG_SIZE), (100, Reason.LOG_SIZE),
        ]  # fmt: skip


def test_a_full_directory_loses_the_oldest_of_all_logs() -> None:
    """Across logs by age, within a log in order; active segments stay."""
    one = LogFacts(LOG, facts([9, 5, 0]), WEEK)
    two = LogFacts(OTHER, facts([7, 6, 1, 0]), WEEK)
    actions = plan(one, two, directory=300)
    assert [(a.log_id, a.base_offset) for a in actions] == [
        (LOG, 0), (OTHER, 0), (OTHER, 100), (LOG, 100),
    ]  # fmt: skip
    assert {a.reason for a in actions} == {Reason.DIRECTORY_SIZE}
    assert plan(one, two, directory=700) == ()
    assert len(plan(one, two, directory=1)) == 5


SHAPES = st.lists(
    st.tuples(
        st.lists(st.integers(-2 * DAY, 20 * DAY), max_size=6),
        st.integers(0, 500),
    ),
    max_size=4,
)


@settings(max_examples=examples(200), deadline=None)
@given(SHAPES, st.integers(0, 900))
def test_a_plan_only_ever_trims_the_front(shapes, directory: int) -> None:
    """Any facts: a prefix of each log without its active segment, and sizes kept."""
    logs = [
        LogFacts(LogId("t", n), facts(list(ages)), WEEK, log_bytes_max=limit)
        for n, (ages, limit) in enumerate(shapes)
    ]
    actions = plan(*logs, directory=directory)
    total = 0
    for log in logs:
        gone = [a.base_offset for a in actions if a.log_id == log.log_id]
        assert gone == [item.base_offset for item in log.segments[: len(gone)]]
        assert len(gone) < len(log.segments) or not log.segments
        rest = 100 * (len(log.segments) - len(gone))
        assert rest <= max(log.log_bytes_max, 100) or log.log_bytes_max == 0
        total += rest
    minimum = 100 * sum(bool(log.segments) for log in logs)
    assert total <= max(directory, minimum) or directory == 0


# -- clocks ---------------------------------------------------------------------------


def trusted(**changes) -> TrustedTime:
    return TrustedTime(NOW, Millis(0), **changes)


def test_clocks_that_agree_are_believed() -> None:
    """Small corrections and slow drift are no jump."""
    for passed, off in [
        (0, 0),
        (HOUR, STEP_MS_MAX),
        (HOUR, -STEP_MS_MAX),
        (DAY, 90_000),
    ]:
        look = check_clocks(
            trusted(), wall_ms=Millis(NOW + passed + off), boot_ms=Millis(passed)
        )
        assert look.clock_fault is None
        assert look.now_ms == NOW + passed + off
        assert look.trusted == TrustedTime(look.now_ms, Millis(passed))


@pytest.mark.parametrize("jump", [HOUR, -HOUR, 10 * YEAR, -10 * YEAR, 2 * HOUR, DAY])
def test_a_jump_is_not_believed_within_the_hold(jump: int) -> None:
    """Ages go on as if it had not happened, or get smaller; it is said each time."""
    now = trusted()
    for passed in range(HOUR, DAY, HOUR):
        look = check_clocks(
            now, wall_ms=Millis(NOW + passed + jump), boot_ms=Millis(passed)
        )
        assert look.clock_fault is not None
        assert f"by {abs(jump) // 1000} s" in look.clock_fault
        assert look.now_ms == NOW + passed + min(jump, 0)
        now = look.trusted


@pytest.mark.parametrize(
    ("jump", "is_believed"),
    [
        (HOUR, True),
        (-HOUR, True),
        (-10 * YEAR, True),
        (LEAD_MS_MAX, True),
        (LEAD_MS_MAX + 1, False),
        (10 * YEAR, False),
    ],
)
def test_after_the_hold_an_even_clock_is_believed(jump: int, is_believed: bool) -> None:
    """A long jump forward waits for a restart, however long the clock runs evenly."""
    now = trusted()
    for passed in (HOUR, HOUR + HOLD_MS, HOUR + 100 * HOLD_MS):
        look = check_clocks(
            now, wall_ms=Millis(NOW + passed + jump), boot_ms=Millis(passed)
        )
        now = look.trusted
    assert (look.clock_fault is None) == is_believed
    assert look.now_ms == NOW + passed + (jump if is_believed else 0)


def test_a_clock_that_jumps_again_is_held_again() -> None:
    """The hold begins with the last jump; coming back ends the fault at once."""
    now = trusted()
    for passed, jump in [(HOUR, HOUR), (HOUR + HOLD_MS, 5 * HOUR)]:
        look = check_clocks(
            now, wall_ms=Millis(NOW + passed + jump), boot_ms=Millis(passed)
        )
        assert look.clock_fault is not None
        now = look.trusted
    passed += HOUR
    look = check_clocks(now, wall_ms=Millis(NOW + passed), boot_ms=Millis(passed))
    assert look.clock_fault is None
    assert look.now_ms == NOW + passed


@pytest.mark.parametrize("down", [0, HOUR, 90 * DAY, 10 * YEAR])
def test_after_a_start_the_newest_append_is_what_is_known(down: int) -> None:
    """A broker that was down deletes by age a day late, however long it was down."""
    start = trust_at_start(NOW, wall_ms=Millis(NOW + down), boot_ms=Millis(5))
    look = check_clocks(start, wall_ms=Millis(NOW + down), boot_ms=Millis(5))
    assert look.now_ms == NOW
    # Only what no absence explains is doubted.
    assert (look.clock_fault is None) == (down <= LEAD_MS_MAX)
    look = check_clocks(
        look.trusted,
        wall_ms=Millis(NOW + down + HOLD_MS),
        boot_ms=Millis(5 + HOLD_MS),
    )
    assert (look.now_ms, look.clock_fault) == (NOW + down + HOLD_MS, None)
    jumped = check_clocks(
        look.trusted,
        wall_ms=Millis(look.now_ms + YEAR),
        boot_ms=Millis(5 + HOLD_MS),
    )
    assert jumped.now_ms == look.now_ms


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_jump_after_an_absence_is_doubted(jump: int) -> None:
    """The absence explains the lead of the start, and no other."""
    start = trust_at_start(NOW, wall_ms=Millis(NOW + DAY), boot_ms=Millis(5))
    assert start.is_absence
    look = check_clocks(start, wall_ms=Millis(NOW + DAY), boot_ms=Millis(5))
    assert look.clock_fault is None
    for passed in (0, HOUR):
        look = check_clocks(
            look.trusted,
            wall_ms=Millis(NOW + DAY + jump + passed),
            boot_ms=Millis(5 + passed),
        )
        assert look.clock_fault is not None
        assert look.now_ms == NOW + passed


def test_a_clock_behind_the_newest_append_is_doubted_at_the_start() -> None:
    """No absence sets a clock back."""
    start = trust_at_start(NOW, wall_ms=Millis(NOW - HOUR), boot_ms=Millis(5))
    look = check_clocks(start, wall_ms=Millis(NOW - HOUR), boot_ms=Millis(5))
    assert look.clock_fault is not None


def test_a_new_broker_believes_its_clock() -> None:
    """Nothing is stored, so nothing can be deleted wrongly."""
    start = trust_at_start(None, wall_ms=NOW, boot_ms=Millis(5))
    assert start == TrustedTime(NOW, Millis(5))


@pytest.mark.parametrize("jump", [HOUR, 10 * YEAR, -HOUR, -10 * YEAR])
@pytest.mark.parametrize("age", [DAY, 6 * DAY + 23 * HOUR])
def test_a_jumped_clock_deletes_nothing(jump: int, age: int) -> None:
    """Neither the jump nor what was appended during it costs a segment."""
    log = LogFacts(LOG, facts([age, 0, 0]), WEEK)
    look = check_clocks(trusted(), wall_ms=Millis(NOW + jump), boot_ms=Millis(0))
    assert plan(log, now=look.now_ms) == ()
    during = LogFacts(LOG, facts([age, -jump, 0]), WEEK)
    assert plan(during, now=look.now_ms) == ()
    back = check_clocks(look.trusted, wall_ms=NOW, boot_ms=Millis(0))
    assert back.clock_fault is None
    assert plan(during, now=back.now_ms) == ()
