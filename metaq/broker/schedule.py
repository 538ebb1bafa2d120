"""Schedules of deletion: quartz expressions, and the jobs that follow them.

Theory of operation. A quartz expression has six or seven fields:

    seconds minutes hours day-of-month month day-of-week [year]
    0       0       6,18  *            *     ?

Each field is parsed by quartz's rules into the set of its values, from which
APScheduler's `CronTrigger` is built. So its calendar is used but not its syntax, where
Monday is 0 (quartz: 2). Forms that it lacks (`W`, `LW`, `L-3`, and `L` or `#` inside a
list) are refused when the setting is read. Fields may have `*`, `?`, names, lists,
ranges that may wrap (`FRI-MON`, `22-2`), steps, `L` (the last day of the month), `6L`
(its last Friday) and `6#3` (its third Friday). Exactly one of the two day fields is
`?`.

`Schedules` keeps one job per distinct text. The housekeeping sleeps until the next one
is due, but never longer than `NAP_S_MAX`, because the wall clock may be set.

Source: docs/metaq-1.4/broker.md 2.9.
"""

import datetime as dt
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from apscheduler.triggers.cron import CronTrigger

from metaq.clock import Clock
from metaq.errors import ConfigError
from metaq.model import Millis

SCHEDULE_CHARS_MAX: Final = 200
"""Maximum length of an expression; enough for long lists in every field."""
NAP_S_MAX: Final = 60.0
"""Maximum delay of a job after the wall clock was set forward, in seconds."""
POSITIONS: Final = ("1st", "2nd", "3rd", "4th", "5th")
WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
MONTHS: Final = (
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
)  # fmt: skip
MONTH_DAYS_MAX: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of an expression."""

    name: str
    low: int
    high: int
    """Largest value; also the largest step."""
    names: tuple[str, ...] = ()
    """Names of the values, from `low` upwards, in lower case."""


_SECONDS: Final = _Field("seconds", 0, 59)
_MINUTES: Final = _Field("minutes", 0, 59)
_HOURS: Final = _Field("hours", 0, 23)
_DAY: Final = _Field("day-of-month", 1, 31)
_MONTH: Final = _Field("month", 1, 12, MONTHS)
_WEEKDAY: Final = _Field("day-of-week", 1, 7, WEEKDAYS)
_YEAR: Final = _Field("year", 1970, 2099)

_ITEM: Final = re.compile(
    r"(?:\*|(?P<first>[a-z]{3}|[0-9]{1,4})(?:-(?P<last>[a-z]{3}|[0-9]{1,4}))?)?"
    r"(?:/(?P<step>[0-9]{1,4}))?",
    re.ASCII | re.IGNORECASE,
)
_WEEKDAY_OF_MONTH: Final = re.compile(
    r"(?P<day>[a-z]{3}|[0-9])(?:(?P<last>l)|#(?P<position>[0-9]+))",
    re.ASCII | re.IGNORECASE,
)


def parse_schedule(text: str, timezone: dt.tzinfo) -> CronTrigger:
    """Turn a quartz expression into a trigger.

    Args:
        text: six or seven fields; letters in any case.
        timezone: time zone of the fields.

    Returns:
        A trigger that fires at the whole seconds that match the expression.

    Raises:
        ConfigError: it is not a quartz expression, can never fire, or is not supported
            by APScheduler; the message names the field and its text. Any other
            exception is a bug.
    """
    if len(text) > SCHEDULE_CHARS_MAX:
        raise ConfigError(
            f"schedule: expected at most {SCHEDULE_CHARS_MAX} characters, "
            f"got {len(text)}"
        )
    parts = text.split()
    if len(parts) not in {6, 7}:
        raise ConfigError(
            f"schedule '{text}': expected 6 or 7 fields, got {len(parts)}"
        )
    try:
        return _build_trigger(parts, timezone)
    except ConfigError as error:
        raise ConfigError(f"schedule '{text}': {error}") from error


def _build_trigger(parts: list[str], timezone: dt.tzinfo) -> CronTrigger:
    seconds, minutes, hours, day, month, weekday, *year = parts
    if (day == "?") == (weekday == "?"):
        _refuse(_WEEKDAY, weekday, f"exactly one of it and {_DAY.name} must be '?'")
    months = _read_values(_MONTH, month)
    return CronTrigger(
        second=_listed(_SECONDS, _read_values(_SECONDS, seconds)),
        minute=_listed(_MINUTES, _read_values(_MINUTES, minutes)),
        hour=_listed(_HOURS, _read_values(_HOURS, hours)),
        month=_listed(_MONTH, months),
        year=_listed(_YEAR, _read_values(_YEAR, year[0])) if year else "*",
        timezone=timezone,
        **(_read_weekday(weekday) if day == "?" else _read_day(day, months)),
    )


def _read_day(text: str, months: set[int]) -> dict[str, str]:
    """Return the trigger's argument for a day-of-month field."""
    folded = text.lower()
    if folded == "l":
        return {"day": "last"}
    if "w" in folded:
        _refuse(_DAY, text, "the weekday nearest to a day (W) is not supported")
    if "l" in folded:
        _refuse(_DAY, text, "L must be alone; L-n is not supported")
    days = _read_values(_DAY, text)
    if min(days) > max(MONTH_DAYS_MAX[month - 1] for month in months):
        _refuse(_DAY, text, "none of the months has such a day")
    return {"day": _listed(_DAY, days)}


def _read_weekday(text: str) -> dict[str, str]:
    """Return the trigger's argument for a day-of-week field."""
    if text in {"l", "L"}:  # quartz: the last day of the week, that is Saturday
        return {"day_of_week": WEEKDAYS[6]}
    special = _WEEKDAY_OF_MONTH.fullmatch(text)
    if special is not None:
        name = WEEKDAYS[_read_value(_WEEKDAY, text, special["day"]) - 1]
        if special["last"]:
            return {"day": f"last {name}"}
        position = int(special["position"])
        if not 1 <= position <= len(POSITIONS):
            _refuse(_WEEKDAY, text, f"expected 1..5 after '#', got {position}")
        return {"day": f"{POSITIONS[position - 1]} {name}"}
    if "#" in text or re.search(r"(?:[0-9]|[A-Za-z]{3})[Ll]\b", text):
        _refuse(_WEEKDAY, text, "L and # must be alone")
    values = _read_values(_WEEKDAY, text)
    if len(values) == len(WEEKDAYS):
        return {"day_of_week": "*"}
    return {"day_of_week": ",".join(WEEKDAYS[value - 1] for value in sorted(values))}


def _read_values(field: _Field, text: str) -> set[int]:
    """Return the values in a field's list, at least one."""
    values: set[int] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item)
        if not item or match is None:
            _refuse(field, text, f"'{item}' is not understood")
        values.update(_read_item(field, text, match))
    return values


def _read_item(field: _Field, text: str, match: re.Match[str]) -> list[int]:
    step = 1
    if match["step"] is not None:
        step = int(match["step"])
        if not 1 <= step <= field.high:
            _refuse(field, text, f"expected a step of 1..{field.high}, got {step}")
        if (
            not (match["first"] or "0").isdigit()
            or not (match["last"] or "0").isdigit()
        ):
            _refuse(field, text, "a step needs numbers, not names")
    if match["first"] is None:
        return list(range(field.low, field.high + 1, step))
    first = _read_value(field, text, match["first"])
    if match["last"] is not None:
        last = _read_value(field, text, match["last"])
    else:
        last = field.high if match["step"] is not None else first
    if first <= last:
        return list(range(first, last + 1, step))
    if field is _YEAR:
        _refuse(field, text, "the first year must not be greater than the last")
    # A range that wraps continues its steps after the largest value.
    size = field.high - field.low + 1
    return [
        value if value <= field.high else value - size
        for value in range(first, last + size + 1, step)
    ]


def _read_value(field: _Field, text: str, token: str) -> int:
    if token.lower() in field.names:
        return field.low + field.names.index(token.lower())
    if not token.isdigit():
        _refuse(field, text, f"'{token}' is not understood")
    value = int(token)
    if not field.low <= value <= field.high:
        _refuse(field, text, f"expected {field.low}..{field.high}, got {value}")
    return value


def _listed(field: _Field, values: set[int]) -> str:
    if len(values) == field.high - field.low + 1:
        return "*"
    return ",".join(str(value) for value in sorted(values))


def _refuse(field: _Field, text: str, reason: str) -> NoReturn:
    raise ConfigError(f"{field.name} '{text}': {reason}")


def local_timezone() -> dt.tzinfo:
    """Return the machine's time zone; UTC if it has none.

    Raises:
        ConfigError: the machine's settings are wrong or contradict each other.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "defaulting to UTC"
            zone: dt.tzinfo = CronTrigger().timezone
    except (KeyError, ValueError, OSError) as error:
        raise ConfigError(
            "the local time zone is unclear; set TZ to a name such as Europe/Berlin"
        ) from error
    return zone


@dataclass(frozen=True, slots=True)
class _Job:
    """One distinct expression, the topics that share it, and when it is due."""

    trigger: CronTrigger
    topics: frozenset[str]
    due_ms: Millis | None
    """Next firing, by the wall clock; None: never again."""


class Schedules:
    """The jobs of a broker: one per distinct expression, replaced as a whole.

    Used by the broker's housekeeping, on its event loop. A job that missed firings (the
    machine slept, the clock was set forward) fires once, not once per missed time.
    """

    def __init__(self, clock: Clock, timezone: dt.tzinfo) -> None:
        self._clock = clock
        self._timezone = timezone
        self._jobs: dict[str, _Job] = {}
        self._seen_ms = clock.wall_ms()

    def replace_jobs(self, schedules: Mapping[str, str]) -> None:
        """Replace the jobs by those of `schedules`, topic → expression.

        A job whose expression stays keeps its next firing, so a reload in the second
        when it is due does not lose that.

        Raises:
            ConfigError: an expression is refused; the old jobs stay. The message
                names the topic.
        """
        topics_by_text: dict[str, set[str]] = {}
        for topic, text in schedules.items():
            topics_by_text.setdefault(text, set()).add(topic)
        now_ms = self._clock.wall_ms()
        jobs = {}
        for text, topics in topics_by_text.items():
            old = self._jobs.get(text)
            if old is not None:
                jobs[text] = _Job(old.trigger, frozenset(topics), old.due_ms)
                continue
            try:
                trigger = parse_schedule(text, self._timezone)
            except ConfigError as error:
                where = f"[topic={min(topics)}] deleteWhen"
                raise ConfigError(f"{where}: {error}") from error
            due_ms = self._due_after(trigger, now_ms)
            jobs[text] = _Job(trigger, frozenset(topics), due_ms)
        self._jobs = jobs

    def next_due_ms(self) -> Millis | None:
        """Return when the next job is due, by the wall clock; None: never."""
        dues = [job.due_ms for job in self._jobs.values() if job.due_ms is not None]
        return min(dues, default=None)

    def take_due(self) -> frozenset[str]:
        """Return the topics that are due now, and advance their jobs.

        If the wall clock was set back, all jobs are planned from the new time, so that
        none waits for a time in the far future.
        """
        now_ms = self._clock.wall_ms()
        went_back = now_ms < self._seen_ms
        self._seen_ms = now_ms
        due: set[str] = set()
        for text, job in self._jobs.items():
            is_due = job.due_ms is not None and job.due_ms <= now_ms
            if is_due:
                due |= job.topics
            if is_due or went_back:
                due_ms = self._due_after(job.trigger, now_ms)
                self._jobs[text] = _Job(job.trigger, job.topics, due_ms)
        return frozenset(due)

    def _due_after(self, trigger: CronTrigger, now_ms: Millis) -> Millis | None:
        """Return the trigger's first firing strictly after a time."""
        after = dt.datetime.fromtimestamp((now_ms + 1) / 1000, self._timezone)
        due: dt.datetime | None = trigger.get_next_fire_time(None, after)
        return None if due is None else Millis(round(due.timestamp() * 1000))
