"""`metaq offsets`: show, reset, copy and delete the committed offsets of groups."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import click

from metaq.cli import render
from metaq.cli.cluster import Target, named_partitions
from metaq.cli.options import (
    dry_option,
    json_option,
    parse_start,
    partitions_option,
    read_group,
    takes,
    target_options,
    yes_option,
)
from metaq.cli.tree import command, group
from metaq.client.admin.cluster_admin import (
    OffsetChange,
    delete_offsets,
    plan_copy,
    plan_reset,
    read_offsets,
    require_coordinator,
    require_idle,
    write_offsets,
)
from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import log_range
from metaq.client.errors import GroupInUseError
from metaq.client.fan_out import for_each
from metaq.client.offsets.offset_reset import Goal
from metaq.errors import ClientError, MetaqError, NoBrokerError
from metaq.model import GroupOffset, Offset, TopicPartition
from metaq.zk.errors import PayloadError
from metaq.zk.groups import list_groups

SHOW_COLUMNS = (
    "topic", "partition", "committed", "message_id", "log_start", "log_end", "state",
)  # fmt: skip
PLAN_COLUMNS = ("topic", "partition", "old", "new")
OFFSET_COLUMNS = ("topic", "partition", "committed")
"""Of offsets that are to be deleted."""

Stored = Mapping[TopicPartition, GroupOffset | PayloadError]

group("offsets", "Show, move or delete what groups have committed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of carrying out a plan."""

    is_dry: Annotated[bool, dry_option]
    is_forced: Annotated[
        bool,
        click.option(
            "--force",
            "is_forced",
            is_flag=True,
            help="Write although members read; they overwrite it with their next"
            " commit.",
        ),
    ]
    as_json: Annotated[bool, json_option]
    """The plan as one object per partition."""


# -- show -----------------------------------------------------------------------------


@command(
    "offsets show",
    click.argument("group"),
    click.argument("topic", default=""),
    json_option,
    target_options,
    examples=("metaq offsets show billing", "metaq offsets show billing orders"),
)
def show_offsets(target: Target, group: str, topic: str, *, as_json: bool) -> None:
    """Print the offsets that GROUP has committed.

    Says for each of them whether the log still has it.
    """

    async def look(
        context: ClientContext, deadline_s: float
    ) -> list[list[render.Cell]]:
        found = await _committed(context, group, topic, deadline_s)
        await read_cluster(context, {p.topic for p in found}, deadline_s=deadline_s)

        async def ask(partition: TopicPartition) -> tuple[Offset, Offset] | None:
            if context.address_of(partition.broker_id) is None:
                raise NoBrokerError(f"broker {partition.broker_id} is not registered")
            return await log_range(context, partition, deadline_s=deadline_s)

        ends = await for_each(ask, found)
        return [_show_row(p, stored, ends[p]) for p, stored in found.items()]

    rows = target.run(look)
    marked = [index for index, row in enumerate(rows) if row[-1] != "ok"]
    render.print_rows(SHOW_COLUMNS, rows, as_json=as_json, marked=marked)


async def _committed(
    context: ClientContext, group: str, topic: str, deadline_s: float
) -> Stored:
    """Return what a group has committed in one topic or all; at least one offset."""
    found = await read_offsets(context, group, topic or None, deadline_s=deadline_s)
    if not found:
        of = f" of topic {topic}" if topic else ""
        raise ClientError(
            f"group {group} has committed no offset{of} in ZooKeeper; offsets that it"
            " keeps in files or databases are managed there"
        )
    return found


def _show_row(
    partition: TopicPartition,
    stored: GroupOffset | PayloadError,
    ends: tuple[Offset, Offset] | MetaqError | None,
) -> list[render.Cell]:
    start, end = ends if isinstance(ends, tuple) else (None, None)
    first: list[render.Cell] = [partition.topic, partition.name]
    if isinstance(stored, PayloadError):
        return [*first, None, None, start, end, str(stored)]
    state = describe_offset(stored.offset, ends)
    return [*first, stored.offset, stored.message_id, start, end, state]


def describe_offset(
    offset: Offset, ends: tuple[Offset, Offset] | MetaqError | None
) -> str:
    """Return the remark on a committed offset; `ok` when the log contains it."""
    if isinstance(ends, MetaqError):
        return str(ends)
    start, end = ends or (0, 0)
    if offset < start:
        return f"{start - offset} bytes below the log start"
    if offset > end:
        return f"{offset - end} bytes above the log end"
    return "ok"


# -- reset and copy -------------------------------------------------------------------


@command(
    "offsets reset",
    click.argument("group", callback=read_group),
    click.argument("topic"),
    click.option(
        "--to",
        "goal",
        required=True,
        metavar="earliest|latest|TIME|OFFSET",
        callback=lambda _context, _option, text: parse_goal(text),
        help="Where to go on; TIME is ISO 8601 (local time without a zone), a number is"
        " an OFFSET of one partition.",
    ),
    partitions_option("Move"),
    takes(WriteOptions),
    yes_option,
    target_options,
    examples=(
        "metaq offsets reset billing orders --to earliest --dry-run",
        "metaq offsets reset billing orders --to 2026-01-31T12:00",
        "metaq offsets reset billing orders --to 4096 --partition 0-3",
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
    """Move the offsets of GROUP in TOPIC; stop its members first.

    Prints the old and the new offset of each partition. Asks first if there is no such
    group: its name may be misspelt. Groups of Java consumers are moved the same way.
    """

    async def plan(
        context: ClientContext, deadline_s: float
    ) -> tuple[tuple[OffsetChange, ...], tuple[str, ...]]:
        coordinator = require_coordinator(context)
        snapshot = await read_cluster(context, {topic}, deadline_s=deadline_s)
        served = snapshot.get_partitions(topic)
        if not served:
            raise NoBrokerError(f"no broker serves topic '{topic}'")
        wanted = named_partitions(topic, served, partitions)
        if isinstance(goal, int) and len(wanted) != 1:
            raise click.UsageError(
                f"an offset means one partition, {topic} has {len(wanted)}: say"
                " which one with --partition"
            )
        changes = await plan_reset(context, group, wanted, goal, deadline_s=deadline_s)
        await _require_idle(context, group, {topic}, options, deadline_s)
        known = await list_groups(coordinator, context.paths, deadline_s=deadline_s)
        return changes, known

    changes, known = target.run(plan)
    _print_plan(changes, options)
    question = (
        f"There is no group {group}; groups there are: {', '.join(known) or 'none'}."
        " Make it?"
    )
    is_sure = is_sure or group in known
    if render.may_change(question, is_dry=options.is_dry, is_sure=is_sure):
        target.run(partial(write_offsets, group=group, changes=changes))


@command(
    "offsets copy",
    click.argument("source", metavar="FROM_GROUP"),
    click.argument("goal", metavar="TO_GROUP", callback=read_group),
    click.argument("topic", default=""),
    takes(WriteOptions),
    target_options,
    examples=(
        "metaq offsets copy billing billing-test --dry-run",
        "metaq offsets copy billing billing-test orders",
    ),
)
def copy_offsets(
    target: Target, source: str, goal: str, topic: str, options: WriteOptions
) -> None:
    """Have TO_GROUP go on where FROM_GROUP is.

    In all topics, or in TOPIC alone.
    """

    async def plan(
        context: ClientContext, deadline_s: float
    ) -> tuple[OffsetChange, ...]:
        changes = await plan_copy(
            context, source, goal, topic or None, deadline_s=deadline_s
        )
        topics = {change.partition.topic for change in changes}
        await _require_idle(context, goal, topics, options, deadline_s)
        return changes

    changes = target.run(plan)
    _print_plan(changes, options)
    if render.may_change("", is_dry=options.is_dry, is_sure=True):
        target.run(partial(write_offsets, group=goal, changes=changes))


async def _require_idle(
    context: ClientContext,
    group: str,
    topics: set[str],
    options: WriteOptions,
    deadline_s: float,
) -> None:
    try:
        await require_idle(context, group, topics, deadline_s=deadline_s)
    except GroupInUseError as error:
        if not options.is_forced and not options.is_dry:
            raise
        render.say(str(error))


def _print_plan(changes: Iterable[OffsetChange], options: WriteOptions) -> None:
    rows = [
        (
            change.partition.topic,
            change.partition.name,
            change.old.offset if change.old else None,
            change.new.offset,
        )
        for change in changes
    ]
    render.print_rows(PLAN_COLUMNS, rows, as_json=options.as_json)


def parse_goal(text: str) -> Goal:
    """Return the goal in `--to`: a number is an offset, anything with a date a time."""
    if re.fullmatch(r"\d{1,19}", text, re.ASCII):
        return Offset(int(text))
    return parse_start(text, hint="--to")


# -- delete ---------------------------------------------------------------------------


@command(
    "offsets delete",
    click.argument("group"),
    click.argument("topic", default=""),
    dry_option,
    yes_option,
    json_option,
    target_options,
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
    """Delete the offsets that GROUP has committed.

    In all topics, or in TOPIC alone. Prints them and asks; a group with live members in
    these topics is refused. Where it has no offset, a group begins as a new one does.
    """

    async def plan(context: ClientContext, deadline_s: float) -> Stored:
        found = await _committed(context, group, topic, deadline_s)
        topics = {partition.topic for partition in found}
        await require_idle(context, group, topics, deadline_s=deadline_s)
        return found

    found = target.run(plan)
    render.print_rows(OFFSET_COLUMNS, offset_rows(found), as_json=as_json)
    count = render.count_text(len(found), "committed offset")
    question = f"Delete {count} of group {group}?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        target.run(partial(delete_offsets, group=group, partitions=found))
        render.say(f"{count} of group {group} deleted")


def offset_rows(found: Stored) -> list[tuple[render.Cell, ...]]:
    """Return the cells of offsets; a node that contains none has an empty one."""
    return [
        (
            each.topic,
            each.name,
            stored.offset if isinstance(stored, GroupOffset) else None,
        )
        for each, stored in found.items()
    ]
