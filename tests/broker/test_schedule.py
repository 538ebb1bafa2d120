"""Quartz expressions and the jobs that follow them."""

import calendar
import contextlib
import datetime as dt
import zoneinfo
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.broker.schedule import Schedules, local_timezone, parse_schedule
from metaq.errors import ConfigError
from metaq.model import Millis
from tests.sampling import examples

UTC = dt.UTC
Time = dt.datetime


def utc(text: str) -> Time:
    return Time.fromisoformat(text).replace(tzinfo=UTC)


def firings(text: str, after: str, count: int, zone: dt.tzinfo = UTC) -> list[str]:
    trigger = parse_schedule(text, zone)
    now = Time.fromisoformat(after).replace(tzinfo=zone)
    found = []
    for _ in range(count):
        now = trigger.get_next_fire_time(None, now + dt.timedelta(milliseconds=1))
        found.append(now.replace(tzinfo=None).isoformat(" "))
    return found


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        # MetaQ's default: twice a day.
        ("0 0 6,18 * * ?", "2024-02-28 12:00", ["2024-02-28 18:00:00",
         "2024-02-29 06:00:00", "2024-02-29 18:00:00", "2024-03-01 06:00:00"]),
        ("*/20 * * * * ?", "2024-01-01 00:00", ["2024-01-01 00:00:20",
         "2024-01-01 00:00:40", "2024-01-01 00:01:00"]),
        ("/30 5 * ? * *", "2024-01-01 00:00", ["2024-01-01 00:05:00",
         "2024-01-01 00:05:30", "2024-01-01 01:05:00"]),
        ("0 10/25 0 * * ?", "2024-01-01 00:00", ["2024-01-01 00:10:00",
         "2024-01-01 00:35:00", "2024-01-02 00:10:00"]),
        # 2024-01-01 is a Monday; in quartz 1 is Sunday.
        ("0 0 0 ? * 1", "2024-01-01 00:00", ["2024-01-07 00:00:00",
         "2024-01-14 00:00:00"]),
        ("0 0 0 ? * SUN", "2024-01-01 00:00", ["2024-01-07 00:00:00"]),
        ("0 0 0 ? * MON-FRI", "2024-01-04 00:00", ["2024-01-05 00:00:00",
         "2024-01-08 00:00:00"]),
        ("0 0 0 ? * fri-Mon", "2024-01-01 00:00", ["2024-01-05 00:00:00",
         "2024-01-06 00:00:00", "2024-01-07 00:00:00", "2024-01-08 00:00:00",
         "2024-01-12 00:00:00"]),
        ("0 0 0 ? * 7-2", "2024-01-01 00:00", ["2024-01-06 00:00:00",
         "2024-01-07 00:00:00", "2024-01-08 00:00:00", "2024-01-13 00:00:00"]),
        ("0 0 22-2 * * ?", "2024-01-01 01:30", ["2024-01-01 02:00:00",
         "2024-01-01 22:00:00", "2024-01-01 23:00:00", "2024-01-02 00:00:00",
         "2024-01-02 01:00:00", "2024-01-02 02:00:00", "2024-01-02 22:00:00"]),
        ("0 0 20-4/3 * * ?", "2024-01-01 03:00", ["2024-01-01 20:00:00",
         "2024-01-01 23:00:00", "2024-01-02 02:00:00", "2024-01-02 20:00:00"]),
        ("0 0 0 1 NOV-FEB ?", "2024-01-15 00:00", ["2024-02-01 00:00:00",
         "2024-11-01 00:00:00", "2024-12-01 00:00:00", "2025-01-01 00:00:00"]),
        ("0 0 0 L * ?", "2024-01-31 12:00", ["2024-02-29 00:00:00",
         "2024-03-31 00:00:00", "2024-04-30 00:00:00"]),
        ("0 0 0 ? * L", "2024-01-01 00:00", ["2024-01-06 00:00:00"]),
        ("0 0 0 ? * 6L", "2024-01-01 00:00", ["2024-01-26 00:00:00",
         "2024-02-23 00:00:00"]),
        ("0 0 0 ? * FRIL", "2024-01-01 00:00", ["2024-01-26 00:00:00"]),
        ("0 0 0 ? * 6#3", "2024-01-01 00:00", ["2024-01-19 00:00:00",
         "2024-02-16 00:00:00"]),
        ("0 0 0 ? * SUN#1", "2024-01-01 00:00", ["2024-01-07 00:00:00"]),
        ("0 0 0 ? * 2#5", "2024-01-30 00:00", ["2024-04-29 00:00:00",
         "2024-07-29 00:00:00"]),
        ("0 0 0 29 2 ?", "2024-03-01 00:00", ["2028-02-29 00:00:00",
         "2032-02-29 00:00:00"]),
        ("0 0 0 31 * ?", "2024-03-31 00:00", ["2024-05-31 00:00:00"]),
        ("0 0 0 1 1 ? 2030-2031", "2024-01-01 00:00", ["2030-01-01 00:00:00",
         "2031-01-01 00:00:00"]),
        ("0 0 0 1 1 ? *", "2024-01-01 00:00", ["2025-01-01 00:00:00"]),
        ("  0\t0  0 1 JAN,jul ? ", "2024-01-01 00:00", ["2024-07-01 00:00:00"]),
    ],
)  # fmt: skip
def test_an_expression_fires_when_quartz_would(
    text: str, after: str, expected: list[str]
) -> None:
    """Sunday is 1, ranges wrap, letters are L and #."""
    assert firings(text, after, len(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 6 or 7 fields, got 0"),
        ("0 0 6 * *", "expected 6 or 7 fields, got 5"),
        ("0 0 6 * * ? * *", "expected 6 or 7 fields, got 8"),
        ("0 0 6 * * *", ("day-of-week '*': exactly one of it and day-of-month must be "
         "'?'")),
        ("0 0 6 ? * ?", ("day-of-week '?': exactly one of it and day-of-month must be "
         "'?'")),
        ("60 0 6 * * ?", "seconds '60': expected 0..59, got 60"),
        ("0 0,60 6 * * ?", "minutes '0,60': expected 0..59, got 60"),
        ("0 0 24 * * ?", "hours '24': expected 0..23, got 24"),
        ("0 0 ? * * ?", "hours '?': '?' is not understood"),
        ("0 0 ? * * MON", "day-of-week 'MON': exactly one"),
        ("? 0 6 * * ?", "seconds '?': '?' is not understood"),
        ("0 0 6 0 * ?", "day-of-month '0': expected 1..31, got 0"),
        ("0 0 6 32 * ?", "day-of-month '32': expected 1..31, got 32"),
        ("0 0 6 * 13 ?", "month '13': expected 1..12, got 13"),
        ("0 0 6 * FOO ?", "month 'FOO': 'FOO' is not understood"),
        ("0 0 6 ? * 0", "day-of-week '0': expected 1..7, got 0"),
        ("0 0 6 ? * 8", "day-of-week '8': expected 1..7, got 8"),
        ("0 0 6 ? * MONDAY", "day-of-week 'MONDAY': 'MONDAY' is not understood"),
        ("0 0 6 * * ? 1969", "year '1969': expected 1970..2099, got 1969"),
        ("0 0 6 * * ? 2031-2030", ("year '2031-2030': the first year must not be "
         "greater than the last")),
        ("0/0 0 6 * * ?", "seconds '0/0': expected a step of 1..59, got 0"),
        ("0/60 0 6 * * ?", "seconds '0/60': expected a step of 1..59, got 60"),
        ("0 0 */24 * * ?", "hours '*/24': expected a step of 1..23, got 24"),
        ("0 0 6 ? * MON-FRI/2", ("day-of-week 'MON-FRI/2': a step needs numbers, not "
         "names")),
        ("0 0 6, * * ?", "hours '6,': '' is not understood"),
        ("0 0 6- * * ?", "hours '6-': '6-' is not understood"),
        ("0 0 -6 * * ?", "hours '-6': '-6' is not understood"),
        ("0 0 6 15W * ?", ("day-of-month '15W': the weekday nearest to a day (W) is "
         "not supported")),
        ("0 0 6 LW * ?", ("day-of-month 'LW': the weekday nearest to a day (W) is not "
         "supported")),
        ("0 0 6 L-3 * ?", ("day-of-month 'L-3': L must be alone; L-n is not "
         "supported")),
        ("0 0 6 1,L * ?", ("day-of-month '1,L': L must be alone; L-n is not "
         "supported")),
        ("0 0 6 ? * 6L,2", "day-of-week '6L,2': L and # must be alone"),
        ("0 0 6 ? * 2#1,6#3", "day-of-week '2#1,6#3': L and # must be alone"),
        ("0 0 6 ? * 6#6", "day-of-week '6#6': expected 1..5 after '#', got 6"),
        ("0 0 6 ? * 9#1", "day-of-week '9#1': expected 1..7, got 9"),
        ("0 0 6 30,31 2 ?", "day-of-month '30,31': none of the months has such a day"),
        ("0 0 6 31 4,6,9,11 ?", ("day-of-month '31': none of the months has such a "
         "day")),
        ("0 0 6 * * ?" + " " * 200, "expected at most 200 characters, got 211"),
    ],
)  # fmt: skip
def test_what_cannot_be_scheduled_is_refused_with_the_field(
    text: str, message: str
) -> None:
    """The message names the expression, the field and its text."""
    with pytest.raises(ConfigError) as caught:
        parse_schedule(text, UTC)
    assert message in str(caught.value)
    if len(text) < 200:
        assert f"schedule '{text}'" in str(caught.value)


# -- an independent reading of quartz's rules, by brute force over dates --------------


@dataclass(frozen=True)
class Part:
    """The text of a field, and what it means, said in another way."""

    text: str
    holds: Callable[[int], bool]


def ranged(first: int, last: int, step: int, low: int, size: int) -> Part:
    """`first-last/step`: walk round the clock face from first to last."""
    hits = set()
    value = first
    for walked in range(size):
        if walked % step == 0:
            hits.add(value)
        if value == last:
            break
        value = low if value == low + size - 1 else value + 1
    suffix = f"/{step}" if step > 1 else ""
    return Part(f"{first}-{last}{suffix}", hits.__contains__)


def parts(low: int, high: int) -> st.SearchStrategy[Part]:
    value = st.integers(low, high)
    step = st.integers(1, high)
    one = st.one_of(
        value.map(lambda n: Part(str(n), lambda v: v == n)),
        st.builds(
            lambda n, s: Part(f"{n}/{s}", lambda v: v >= n and (v - n) % s == 0),
            value,
            step,
        ),
        st.builds(
            lambda a, b, s: ranged(a, b, s, low, high - low + 1), value, value, step
        ),
        step.map(lambda s: Part(f"*/{s}", lambda v: (v - low) % s == 0)),
    )
    listed = st.lists(one, min_size=1, max_size=3).map(
        lambda many: Part(
            ",".join(part.text for part in many),
            lambda v: any(part.holds(v) for part in many),
        )
    )
    return st.one_of(st.just(Part("*", lambda _v: True)), listed)


def weekday_of(date: dt.date) -> int:
    return date.isoweekday() % 7 + 1


def is_last_day(date: dt.date) -> bool:
    return (date + dt.timedelta(days=1)).month != date.month


weekday = st.integers(1, 7)
days: st.SearchStrategy[tuple[str, str, Callable[[dt.date], bool]]] = st.one_of(
    parts(1, 31).map(lambda p: (p.text, "?", lambda d: p.holds(d.day))),
    st.just(("L", "?", is_last_day)),
    parts(1, 7).map(lambda p: ("?", p.text, lambda d: p.holds(weekday_of(d)))),
    weekday.map(
        lambda n: (
            "?",
            f"{n}L",
            lambda d: (
                weekday_of(d) == n and (d + dt.timedelta(days=7)).month != d.month
            ),
        )
    ),
    st.builds(
        lambda n, k: (
            "?",
            f"{n}#{k}",
            lambda d: weekday_of(d) == n and (d.day - 1) // 7 == k - 1,
        ),
        weekday,
        st.integers(1, 5),
    ),
)


def next_by_search(
    second: Part,
    minute: Part,
    hour: Part,
    month: Part,
    is_day: Callable[[dt.date], bool],
    after: Time,
    until: Time,
) -> Time | None:
    """Walk day by day, then over the seconds that match within the day."""
    hours = [h for h in range(24) if hour.holds(h)]
    minutes = [m for m in range(60) if minute.holds(m)]
    seconds = [s for s in range(60) if second.holds(s)]

    def times() -> Iterator[dt.time]:
        for h in hours:
            for m in minutes:
                for s in seconds:
                    yield dt.time(h, m, s, tzinfo=UTC)

    date = after.date()
    while date <= until.date():
        if month.holds(date.month) and is_day(date):
            for time in times():
                candidate = Time.combine(date, time)
                if candidate > after:
                    return candidate
        date += dt.timedelta(days=1)
    return None


@settings(max_examples=examples(60), deadline=None)
@given(
    second=parts(0, 59),
    minute=parts(0, 59),
    hour=parts(0, 23),
    day=days,
    month=parts(1, 12),
    after=st.datetimes(Time(2023, 1, 1), Time(2025, 1, 1)),
)
def test_the_next_firing_is_the_one_found_by_search(
    second: Part, minute: Part, hour: Part, day, month: Part, after: Time
) -> None:
    """Trigger and brute force agree on any expression and any moment."""
    of_month, of_week, is_day = day
    after = after.replace(tzinfo=UTC, microsecond=0)
    until = after + dt.timedelta(days=800)
    expected = next_by_search(second, minute, hour, month, is_day, after, until)
    text = f"{second.text} {minute.text} {hour.text} {of_month} {month.text} {of_week}"
    try:
        trigger = parse_schedule(text, UTC)
    except ConfigError as error:
        refused = "no such day" if "none of the months" in str(error) else str(error)
        assert refused == "no such day" or len(text) > 200
        assert expected is None or len(text) > 200
        return
    found = trigger.get_next_fire_time(None, after + dt.timedelta(milliseconds=1))
    if expected is None:
        assert found is None or found > until - dt.timedelta(days=1)
    else:
        assert found == expected


@settings(max_examples=examples(50))
@given(st.text("0123456789*?LW#/-, MONFRIJA", max_size=30))
def test_any_text_is_a_trigger_or_a_config_error(text: str) -> None:
    """Nothing else comes out of a setting."""
    for candidate in (text, f"0 0 0 {text} * ?", f"{text} 0 0 ? * MON"):
        with contextlib.suppress(ConfigError):
            parse_schedule(candidate, UTC)


def test_hours_are_counted_in_the_given_zone() -> None:
    """Six in the morning stays six in the morning when the clocks change."""
    try:
        zone = zoneinfo.ZoneInfo("Europe/Berlin")
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("this machine has no time zone data")
    assert firings("0 0 6,18 * * ?", "2024-03-30 12:00", 3, zone) == [
        "2024-03-30 18:00:00",
        "2024-03-31 06:00:00",
        "2024-03-31 18:00:00",
    ]
    assert firings("0 0 6 * * ?", "2024-10-26 12:00", 2, zone) == [
        "2024-10-27 06:00:00",
        "2024-10-28 06:00:00",
    ]


def test_the_machine_has_a_time_zone() -> None:
    """It is what the hours of deleteWhen are counted in."""
    now = Time.now(tz=local_timezone())
    assert now.utcoffset() is not None


def test_an_unclear_time_zone_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sentence says what to set."""

    def refuse() -> None:
        raise zoneinfo.ZoneInfoNotFoundError("no zone 'Mars'")

    monkeypatch.setattr("metaq.broker.schedule.CronTrigger", refuse)
    with pytest.raises(ConfigError, match="time zone is unclear; set TZ to a name"):
        local_timezone()


# -- jobs -----------------------------------------------------------------------------


@dataclass
class StoppedClock:
    """Shows what it is told to."""

    now: Time

    def wall_ms(self) -> Millis:
        return Millis(calendar.timegm(self.now.timetuple()) * 1000
                      + self.now.microsecond // 1000)  # fmt: skip

    def monotonic_s(self) -> float:
        raise AssertionError("schedules follow the wall clock")

    def boot_s(self) -> float:
        return self.monotonic_s()


def ms(text: str) -> int:
    return StoppedClock(utc(text)).wall_ms()


def test_one_job_serves_all_topics_with_the_same_text() -> None:
    """And it moves on when it was taken."""
    clock = StoppedClock(utc("2024-01-01 00:00"))
    schedules = Schedules(clock, UTC)
    schedules.replace_jobs({"a": "0 0 6 * * ?", "b": "0 0 6 * * ?", "c": "0 0 7 * * ?"})
    assert schedules.take_due() == frozenset()
    assert schedules.next_due_ms() == ms("2024-01-01 06:00")
    clock.now = utc("2024-01-01 06:00")
    assert schedules.take_due() == {"a", "b"}
    assert schedules.take_due() == frozenset()
    assert schedules.next_due_ms() == ms("2024-01-01 07:00")
    clock.now = utc("2024-01-04 12:00")
    assert schedules.take_due() == {"a", "b", "c"}
    assert schedules.take_due() == frozenset()
    assert schedules.next_due_ms() == ms("2024-01-05 06:00")


def test_no_jobs_are_never_due() -> None:
    """Neither are those whose years have passed."""
    schedules = Schedules(StoppedClock(utc("2024-01-01 00:00")), UTC)
    assert schedules.next_due_ms() is None
    schedules.replace_jobs({"a": "0 0 6 * * ? 2020"})
    assert schedules.next_due_ms() is None
    assert schedules.take_due() == frozenset()


def test_a_reload_replaces_jobs_and_keeps_those_that_are_due() -> None:
    """A job whose text stays is not put off by a reload at its very second."""
    clock = StoppedClock(utc("2024-01-01 05:00"))
    schedules = Schedules(clock, UTC)
    schedules.replace_jobs({"a": "0 0 6 * * ?", "b": "0 0 6 ? * *"})
    clock.now = utc("2024-01-01 06:00")
    schedules.replace_jobs({"a": "0 0 6 * * ?", "c": "0 0 6 * * ?"})
    assert schedules.take_due() == {"a", "c"}


def test_a_bad_text_leaves_the_old_jobs() -> None:
    """The message names the topic."""
    schedules = Schedules(StoppedClock(utc("2024-01-01 05:00")), UTC)
    schedules.replace_jobs({"a": "0 0 6 * * ?"})
    with pytest.raises(ConfigError, match=r"^\[topic=b\] deleteWhen: schedule '0 0"):
        schedules.replace_jobs({"a": "0 0 7 * * ?", "b": "0 0 6"})
    assert schedules.next_due_ms() == ms("2024-01-01 06:00")


def test_a_clock_that_went_back_does_not_stop_the_jobs() -> None:
    """They are counted anew from the new time."""
    clock = StoppedClock(utc("2030-01-01 05:00"))
    schedules = Schedules(clock, UTC)
    schedules.replace_jobs({"a": "0 0 6 * * ?"})
    clock.now = utc("2024-01-01 05:00")
    assert schedules.take_due() == frozenset()
    assert schedules.next_due_ms() == ms("2024-01-01 06:00")
