"""`metaq scheduled`: list and cancel messages that wait for their due time."""

import datetime as dt
from dataclasses import dataclass

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.options import TOPIC, declared, takes, time_option, topic_argument
from metaq.cli.tree import command, group
from metaq.client import ScheduledDescription
from metaq.model import Millis

HOUR_COLUMNS = ("hour", "messages")
COLUMNS = ("due", "topic", "partition", "messages")

group("scheduled", "List or cancel scheduled messages.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRange:
    """Options for a range of due times."""

    since: dt.datetime | None = declared(
        time_option("--from", "Only messages due at this time or later.")
    )
    until: dt.datetime | None = declared(
        time_option("--to", "Only messages due before this time.")
    )


@command(
    "scheduled list",
    click.option(
        "--topic", type=TOPIC, help="Only messages of this topic.  [default: all]"
    ),
    takes(DueRange, "due"),
    click.option(
        "--max",
        "count_max",
        type=click.IntRange(0, 1000),
        default=20,
        show_default=True,
        help="Maximum number of batches to list, the soonest first.",
    ),
    examples=(
        "metaq scheduled list",
        "metaq scheduled list --topic orders --from 2026-01-31T12:00 --json",
    ),
)
def list_scheduled(
    target: Target, topic: str | None, due: DueRange, count_max: int, *, as_json: bool
) -> bool:
    """List scheduled messages: their number per hour, and the soonest batches.

    Brokers that do not answer are named on standard error; the exit code is 1 then.
    """
    found = target.ask(
        lambda admin: admin.scheduled(
            topic, since=due.since, until=due.until, count_max=count_max
        )
    )
    _show(found, as_json=as_json)
    return not found.problems


@command(
    "scheduled cancel",
    topic_argument,
    takes(DueRange, "due"),
    examples=(
        "metaq scheduled cancel orders --dry-run",
        "metaq scheduled cancel orders --from 2026-01-31T12:00 --to 2026-01-31T13:00",
    ),
)
def cancel(
    target: Target,
    topic: str,
    due: DueRange,
    *,
    is_dry: bool,
    is_sure: bool,
    as_json: bool,
) -> bool:
    """Cancel scheduled messages of TOPIC, so that they are never delivered.

    Prints them and asks for confirmation. A message that becomes due before the answer
    is delivered.
    """
    found = target.ask(
        lambda admin: admin.scheduled(topic, since=due.since, until=due.until)
    )
    _show(found, as_json=as_json)
    if found.problems or not found.message_count:
        return not found.problems
    count = render.count_text(found.message_count, "message")
    question = f"Cancel {count} of topic {topic}?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        done = target.ask(
            lambda admin: admin.cancel_scheduled(
                topic, since=due.since, until=due.until
            )
        )
        render.say(f"{render.count_text(done, 'message')} cancelled")
    return True


def _show(found: ScheduledDescription, *, as_json: bool) -> None:
    hours = [(_time(hour), count) for hour, count in found.hours.items()]
    soonest = [
        (
            render.format_time(batch.due_ms),
            batch.partition.topic,
            None if batch.partition.partition < 0 else batch.partition.name,
            batch.message_count,
        )
        for batch in found.soonest
    ]
    if as_json:
        render.print_json(
            {
                "messages": found.message_count,
                "bytes": found.size_bytes,
                "hours": dict(hours),
                "soonest": [dict(zip(COLUMNS, row, strict=True)) for row in soonest],
            }
        )
    else:
        click.echo(
            f"{render.count_text(found.message_count, 'message')},"
            f" {render.bytes_text(found.size_bytes)}"
        )
        render.print_rows(HOUR_COLUMNS, hours, as_json=False)
        render.print_rows(COLUMNS, soonest, as_json=False)
    for problem in found.problems:
        render.say(problem)


def _time(moment: dt.datetime) -> str | None:
    return render.format_time(Millis(round(moment.timestamp() * 1000)))
