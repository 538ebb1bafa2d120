"""`metaq topics`: list partitions and their offsets; create and change topics."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.options import declared, option, pairs_option, takes
from metaq.cli.tree import ListingGroup, command
from metaq.client import (
    AsyncAdmin,
    NoTopicError,
    PartitionDescription,
    PartitionsAwayError,
    TopicDescription,
)
from metaq.config.keys import DEFINITION_KEYS

COLUMNS = (
    "topic", "partition", "broker", "puts", "gets", "log_start", "log_end", "closed",
)  # fmt: skip
SHOWN_COLUMNS = ("topic", "partition", "broker", "state", "log_start", "log_end")
"""Columns of the table, which fits 80 characters but for the longest names."""
STATUS_COLUMNS = ("broker", "is_there", "partitions", "effect", "text")


@command(
    "topics",
    click.argument("names", nargs=-1, metavar="[TOPIC]..."),
    examples=("metaq topics", "metaq topics test --json"),
    cls=ListingGroup,
)
def topics(target: Target, names: tuple[str, ...], *, as_json: bool) -> bool:
    """List topics; create, alter, delete or describe one.

    Prints one row per partition: its broker, state and offsets. Partitions whose broker
    is away are listed, too; the exit code is 1 then. A topic named like one of the
    commands below, or `list`, cannot be named here.
    """

    async def look(admin: AsyncAdmin) -> tuple[Sequence[PartitionDescription], str]:
        await target.find_brokers(admin)
        found = await admin.describe_partitions(names or None)
        try:
            shown = names or {each.partition.topic for each in found}
            await admin.wait_until_there(shown, timeout=0)
        except PartitionsAwayError as error:
            return found, str(error)
        return found, ""

    found, problem = target.ask(look)
    for each in found:
        if each.problem:
            render.say(f"{each.partition}: {each.problem}")
    rows = [_row(each) for each in found]
    marks = [each.is_away for each in found]
    if as_json:
        render.print_rows(COLUMNS, rows, as_json=True)
    else:
        shown = [_shown(row) for row in rows]
        render.print_rows(SHOWN_COLUMNS, shown, as_json=False, marks=marks)
    if problem:
        render.say(problem)
    return not problem


def _row(each: PartitionDescription) -> tuple[render.Cell, ...]:
    return (
        each.partition.topic,
        each.partition.name,
        str(each.address or "unreachable"),
        each.takes_puts,
        each.gives_gets,
        each.log_start,
        each.log_end,
        each.is_closed,
    )


def _shown(row: Sequence[render.Cell]) -> tuple[render.Cell, ...]:
    """Return the row of the table for a row of `COLUMNS`."""
    topic, partition, broker, takes_puts, takes_gets, start, end, is_closed = row
    state = "puts only" if takes_puts else "gets only" if takes_gets else "away"
    if takes_puts and takes_gets:
        state = "closed" if is_closed else "open"
    address = str(broker).removeprefix("meta://")
    return (topic, partition, address, state, start, end)


# -- by command -----------------------------------------------------------------------


Brokers = list[int] | Literal["all"]


def read_brokers(
    _context: click.Context, _option: click.Parameter, word: str | None
) -> Brokers | None:
    """Parse the value of `--brokers`."""
    if word is None or word == "all":
        return "all" if word else None
    parts = [part.strip() for part in word.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise click.BadParameter(f"'{word}' is neither 'all' nor ids such as 0,2")
    return [int(part) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOptions:
    """Options for a topic to create or alter."""

    partitions: int | None = option(
        "--partitions",
        type=click.IntRange(1),
        help="Number of partitions on each broker; required for a new topic, and can"
        " only be increased.",
    )
    served_by: Brokers | None = option(
        "--brokers",
        metavar="all|ID,...",
        callback=read_brokers,
        help="Brokers that serve the topic; 'all' includes brokers added later.",
    )
    settings: dict[str, str] = declared(
        pairs_option(
            "--set",
            "settings",
            "Topic setting, as in server.ini: "
            + ", ".join(key.name for key in DEFINITION_KEYS)
            + "; an empty value restores the broker's default",
        )
    )


topic_argument = click.argument("topic")


@command(
    "topics create",
    topic_argument,
    takes(TopicOptions, "options"),
    examples=(
        "metaq topics create orders --partitions 4",
        "metaq topics create orders --partitions 4 --set deletePolicy=delete,72h",
        "metaq topics create audit --partitions 1 --brokers 0,2",
    ),
)
def create(target: Target, topic: str, options: TopicOptions, *, as_json: bool) -> None:
    """Create TOPIC on all or some brokers.

    Waits until the brokers serve it, which needs no restart. A topic section in a
    broker's server.ini takes precedence. Brokers of MetaQ 1.4 read topics from
    server.ini only.
    """
    partitions = options.partitions
    if partitions is None:
        raise click.UsageError("Missing option '--partitions'.")
    found = target.ask(
        lambda admin: admin.create_topic(
            topic,
            partitions=partitions,
            brokers=options.served_by or "all",
            settings=options.settings,
        )
    )
    _print(found, as_json=as_json)


@command(
    "topics alter",
    topic_argument,
    takes(TopicOptions, "options"),
    examples=(
        "metaq topics alter orders --partitions 8",
        "metaq topics alter orders --set deletePolicy=delete,24h --set deleteWhen=",
    ),
)
def alter(target: Target, topic: str, options: TopicOptions, *, as_json: bool) -> None:
    """Change the partitions, brokers or settings of TOPIC.

    Waits until the brokers have applied the change. Existing partitions on other
    brokers stay readable. A topic that is served without having been created by a
    command is managed by commands from then on.
    """
    found = target.ask(
        lambda admin: admin.alter_topic(
            topic,
            partitions=options.partitions,
            brokers=options.served_by,
            settings=options.settings,
        )
    )
    _print(found, as_json=as_json)


@command(
    "topics delete",
    topic_argument,
    click.option(
        "--confirm",
        "confirmed",
        metavar="TOPIC",
        help="Name of the topic again, to confirm.  [default: ask on a terminal]",
    ),
    examples=("metaq topics delete orders --confirm orders",),
)
def delete(target: Target, topic: str, confirmed: str | None, *, as_json: bool) -> None:
    """Delete TOPIC, its messages and its committed offsets.

    Scheduled messages of the topic are deleted, too. Stop its consumers first, and
    unbind it from exchanges. Brokers that are away delete their part when they return;
    the command names them at the timeout, and describe does, too.
    """
    if confirmed is None and sys.stdin.isatty():
        waiting = target.ask(lambda admin: _count_waiting(admin, topic))
        confirmed = click.prompt(
            f"This deletes all messages of {topic}{_with(waiting)}. Name of the topic,"
            " to confirm",
            err=True,
        )
    if confirmed != topic:
        raise click.BadParameter(
            f"expected '{topic}', to confirm that all its messages are deleted, got"
            f" {'nothing' if confirmed is None else repr(confirmed)}",
            param_hint="--confirm",
        )
    waiting = target.ask(lambda admin: admin.delete_topic(topic))
    if as_json:
        render.print_json({"topic": topic, "is_deleted": True, "scheduled": waiting})
    else:
        render.say(f"topic {topic} is deleted{_with(waiting)}")


async def _count_waiting(admin: AsyncAdmin, topic: str) -> int:
    with suppress(NoTopicError):  # it may be defined but not served
        return (await admin.scheduled(topic, count_max=0)).message_count
    return 0


def _with(waiting: int) -> str:
    text = render.count_text(waiting, "scheduled message")
    return f", with {text}" if waiting else ""


@command(
    "topics describe",
    topic_argument,
    examples=("metaq topics describe orders", "metaq topics describe test --json"),
)
def describe(target: Target, topic: str, *, as_json: bool) -> None:
    """Print the definition of TOPIC, and its state on each broker.

    The column effect shows whether a broker uses the definition, uses its server.ini
    (text is the file), refuses the definition (text is the reason), or is deleting the
    topic.
    """
    found = target.ask(lambda admin: admin.describe_topic(topic))
    _print(found, as_json=as_json)


def _print(found: TopicDescription, *, as_json: bool) -> None:
    rows: list[tuple[render.Cell, ...]] = [
        (
            int(each.broker_id),
            each.is_there,
            each.partitions,
            None if each.effect is None else each.effect.value,
            each.text or None,
        )
        for each in found.brokers
    ]
    definition = found.definition
    if as_json:
        render.print_json(
            {
                "topic": found.topic,
                "definition": definition
                and {
                    "partitions": definition.partitions,
                    "brokers": definition.brokers,
                    "settings": dict(definition.settings),
                    "state": definition.state.value,
                },
                "problem": found.problem or None,
                "brokers": [
                    dict(zip(STATUS_COLUMNS, row, strict=True)) for row in rows
                ],
            }
        )
        return
    if definition is not None:
        lines: list[tuple[str, object]] = [
            ("state", definition.state.value),
            ("partitions", definition.partitions),
            ("brokers", _listed(definition.brokers)),
            *definition.settings.items(),
        ]
        for name, value in lines:
            click.echo(f"{name} {value}")
        click.echo()
    elif found.problem:
        render.say(f"{found.topic}: {found.problem}")
    render.print_rows(STATUS_COLUMNS, rows, as_json=False)


def _listed(brokers: Sequence[int] | None) -> str:
    return "all" if brokers is None else ", ".join(map(str, brokers))
