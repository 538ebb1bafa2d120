"""`metaq offsets`: show, reset, copy and delete the committed offsets of groups."""

import datetime as dt
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import click

from metaq.cli import render
from metaq.cli.cluster import Target, named_partitions
from metaq.cli.options import (
    GROUP,
    declared,
    dry_option,
    json_option,
    option,
    parse_start,
    partitions_option,
    takes,
    topic_argument,
)
from metaq.cli.tree import command, group
from metaq.client import (
    AsyncAdmin,
    GroupInUseError,
    GroupOffset,
    MetaqError,
    NoBrokerError,
    OffsetChange,
    PartitionDescription,
)
from metaq.errors import ClientError
from metaq.model import Offset, TopicPartition

Goal: TypeAlias = Literal["earliest", "latest"] | dt.datetime | Offset
Changes: TypeAlias = Sequence[OffsetChange]

SHOW_COLUMNS = (
    "topic", "partition", "committed", "message_id", "log_start", "log_end", "state",
)  # fmt: skip
PLAN_COLUMNS = ("topic", "partition", "old", "new")
OLD_COLUMNS = ("topic", "partition", "committed")
"""Columns of a plan to delete offsets."""

group("offsets", "Show, reset, copy or delete committed offsets of groups.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options for carrying out a plan."""

    is_dry: bool = declared(dry_option)
    is_forced: bool = option(
        "--force",
        is_flag=True,
        help="Write even if the group has members; their next commits overwrite it.",
    )
    as_json: bool = declared(json_option)
    """Print the plan as one object per partition."""


# -- show -----------------------------------------------------------------------------


@command(
    "offsets show",
    click.argument("group"),
    click.argument("topic", default=""),
    examples=("metaq offsets show billing", "metaq offsets show billing orders"),
)
def show_offsets(target: Target, group: str, topic: str, *, as_json: bool) -> None:
    """Print the committed offsets of GROUP.

    Also prints whether the log still has each offset.
    """

    async def look(admin: AsyncAdmin) -> list[list[render.Cell]]:
        found = await admin.committed_offsets(group, [topic] if topic else None)
        if not found:
            raise _nothing_committed(group, topic)
        logs: dict[TopicPartition, PartitionDescription] = {}
        for name in dict.fromkeys(each.topic for each in found):
            try:
                seen = await admin.describe_partitions([name])
            except NoBrokerError:
                continue  # the topic is gone, its offsets are not
            logs |= {each.partition: each for each in seen}
        return [_show_row(p, stored, logs.get(p)) for p, stored in found.items()]

    rows = target.ask(look)
    marks = [row[-1] != "ok" for row in rows]
    render.print_rows(SHOW_COLUMNS, rows, as_json=as_json, marks=marks)


def _nothing_committed(group: str, topic: str) -> ClientError:
    of = f" of topic {topic}" if topic else ""
    return ClientError(
        f"group {group} has committed no offset{of} in ZooKeeper; offsets that it"
        " keeps in files or databases are managed there"
    )


def _show_row(
    partition: TopicPartition,
    stored: GroupOffset | MetaqError,
    log: PartitionDescription | None,
) -> list[render.Cell]:
    start, end = (log.log_start, log.log_end) if log else (None, None)
    first: list[render.Cell] = [partition.topic, partition.name]
    if not isinstance(stored, GroupOffset):
        return [*first, None, None, start, end, str(stored)]
    if log is None or log.address is None:
        state = f"broker {partition.broker_id} is not registered"
    else:
        state = log.problem or describe_offset(stored.offset, start, end)
    return [*first, stored.offset, stored.message_id, start, end, state]


def describe_offset(offset: int, start: int | None, end: int | None) -> str:
    """Return the state of a committed offset; `ok` if the log contains it."""
    if start is None or end is None:
        return "the broker has no log of it" if offset else "ok"
    if offset < start:
        return f"{start - offset} bytes below the log start"
    if offset > end:
        return f"{offset - end} bytes above the log end"
    return "ok"


# -- reset and copy -------------------------------------------------------------------


@command(
    "offsets reset",
    click.argument("group", type=GROUP),
    topic_argument,
    click.option(
        "--to",
        "goal",
        required=True,
        metavar="earliest|latest|TIME|OFFSET|-N",
        callback=lambda _context, _option, text: parse_goal(text),
        help="New position; TIME is ISO 8601 (local time unless it has a zone), OFFSET"
        " needs a single partition, and -N is N messages before the committed offset.",
    ),
    partitions_option("Reset"),
    takes(WriteOptions),
    examples=(
        "metaq offsets reset billing orders --to earliest --dry-run",
        "metaq offsets reset billing orders --to 2026-01-31T12:00",
        "metaq offsets reset billing orders --to 4096 --partition 0-3",
        "metaq offsets reset billing orders --to -100",
    ),
)
def reset_offsets(
    target: Target,
    group: str,
    topic: str,
    goal: Goal,
    partitions: tuple[str, ...],
    options: WriteOptions,
    *,
    is_sure: bool = False,
) -> None:
    """Reset the committed offsets of GROUP in TOPIC; stop its members first.

    Prints the old and new offset of each partition. If there is no such group, asks for
    confirmation, because its name may be misspelt. Groups of Java consumers are reset
    in the same way.
    """

    async def plan(admin: AsyncAdmin) -> tuple[Changes, tuple[str, ...]]:
        found = await admin.describe_partitions([topic], with_logs=False)
        served = [each.partition for each in found if each.gives_gets]
        if not served:
            raise NoBrokerError(f"no broker serves topic '{topic}'")
        wanted = named_partitions(topic, served, partitions)
        is_offset = isinstance(goal, int) and goal >= 0
        if is_offset and len(wanted) != 1:
            raise click.UsageError(
                f"an offset needs a single partition, {topic} has {len(wanted)}:"
                " select one with --partition"
            )
        move = partial(admin.reset_offsets, group, plan=True)
        if is_offset:
            move = partial(move, to={wanted[0]: goal})
        elif isinstance(goal, int) and not partitions:
            # Partitions without a committed offset are left out.
            move = partial(move, to=goal, topics=[topic])
        else:
            move = partial(move, to=goal, partitions=wanted)
        return await _try(move, options), await admin.groups()

    changes, known = target.ask(plan)
    print_changes(changes, PLAN_COLUMNS, as_json=options.as_json)
    question = (
        f"There is no group {group}; existing groups: {', '.join(known) or 'none'}."
        " Create it?"
    )
    is_sure = is_sure or group in known
    if render.may_change(question, is_dry=options.is_dry, is_sure=is_sure):
        goals = {each.partition: each.new.offset for each in changes if each.new}
        target.ask(
            lambda admin: admin.reset_offsets(group, to=goals, force=options.is_forced)
        )


@command(
    "offsets copy",
    click.argument("source", metavar="FROM_GROUP"),
    click.argument("goal", metavar="TO_GROUP", type=GROUP),
    click.argument("topic", default=""),
    takes(WriteOptions),
    examples=(
        "metaq offsets copy billing billing-test --dry-run",
        "metaq offsets copy billing billing-test orders",
    ),
)
def copy_offsets(
    target: Target, source: str, goal: str, topic: str, options: WriteOptions
) -> None:
    """Copy the committed offsets of FROM_GROUP to TO_GROUP.

    Copies the offsets in all topics, or in TOPIC only.
    """

    async def copy(admin: AsyncAdmin) -> Changes:
        topics = [topic] if topic else None
        move = partial(
            admin.copy_offsets, source, goal, topics=topics, plan=options.is_dry
        )
        return await _try(move, options)

    print_changes(target.ask(copy), PLAN_COLUMNS, as_json=options.as_json)
    render.may_change("", is_dry=options.is_dry, is_sure=True)


async def _try(
    move: Callable[..., Awaitable[Changes]], options: WriteOptions
) -> Changes:
    """Plan or write; if members are reading, print that and go on if forced or dry."""
    try:
        return await move(force=False)
    except GroupInUseError as error:
        if not options.is_forced and not options.is_dry:
            raise
        render.say(str(error))
        return await move(force=True)


def print_changes(
    changes: Changes, columns: Sequence[str] = OLD_COLUMNS, *, as_json: bool
) -> None:
    """Print old offsets, or old and new ones; a missing or invalid one as `-`."""
    rows: list[Sequence[render.Cell]] = []
    for each in changes:
        offsets = (one.offset if one else None for one in (each.old, each.new))
        cells = [each.partition.topic, each.partition.name, *offsets]
        rows.append(cells[: len(columns)])
    render.print_rows(columns, rows, as_json=as_json)


def parse_goal(text: str) -> Goal:
    """Parse `--to`: a number is an offset or, below 0, a number of messages to go back.

    Other texts are parsed by `parse_start`.
    """
    if re.fullmatch(r"\d{1,19}|-[1-9]\d{0,17}", text, re.ASCII):
        return Offset(int(text))
    return parse_start(text, hint="--to")


# -- delete ---------------------------------------------------------------------------


@command(
    "offsets delete",
    click.argument("group"),
    click.argument("topic", default=""),
    examples=(
        "metaq offsets delete billing orders --dry-run",
        "metaq offsets delete billing orders",
    ),
)
def delete(
    target: Target,
    group: str,
    topic: str,
    *,
    is_dry: bool,
    is_sure: bool,
    as_json: bool,
) -> None:
    """Delete the committed offsets of GROUP.

    Deletes the offsets in all topics, or in TOPIC only; prints them first and asks for
    confirmation. Refused if the group has live members in these topics. In a partition
    without a committed offset, a group starts as a new group.
    """
    topics = [topic] if topic else None
    found = target.ask(
        lambda admin: admin.delete_offsets(group, topics=topics, plan=True)
    )
    if not found:
        raise _nothing_committed(group, topic)
    print_changes(found, as_json=as_json)
    count = render.count_text(len(found), "committed offset")
    question = f"Delete {count} of group {group}?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        target.ask(lambda admin: admin.delete_offsets(group, topics=topics))
        render.say(f"{count} of group {group} deleted")
