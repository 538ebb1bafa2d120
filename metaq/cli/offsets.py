"""`metaq offsets`: show, reset and copy the committed offsets of groups."""

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import click

from metaq.cli import render
from metaq.cli.cluster import Target, named_partitions
from metaq.cli.options import json_option, parse_time
from metaq.client.admin.cluster_admin import (
    Goal,
    OffsetChange,
    know_topics,
    plan_copy,
    plan_reset,
    read_offsets,
    require_coordinator,
    require_idle,
    write_offsets,
)
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import log_range
from metaq.client.errors import GroupInUseError
from metaq.client.fan_out import for_each
from metaq.errors import ClientError, MetaqError, NoBrokerError
from metaq.model import GroupOffset, Offset, TopicPartition
from metaq.zk.errors import PayloadError

SHOW_COLUMNS = (
    "topic", "partition", "committed", "message_id", "log_start", "log_end", "state",
)  # fmt: skip
PLAN_COLUMNS = ("topic", "partition", "old", "new")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of carrying out a plan."""

    is_dry: Annotated[
        bool,
        click.option(
            "--dry-run",
            "is_dry",
            is_flag=True,
            help="Print what would be written; write nothing.",
        ),
    ]
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


def show_offsets(target: Target, group: str, topic: str, *, as_json: bool) -> None:
    """Print the committed offsets of a group, and whether the log still has them.

    Raises:
        ClientError: it has committed nothing.
    """

    async def look(
        context: ClientContext, deadline_s: float
    ) -> list[list[render.Cell]]:
        found = await read_offsets(context, group, topic or None, deadline_s=deadline_s)
        if not found:
            raise ClientError(f"group {group} has committed no offset")
        await know_topics(context, {p.topic for p in found}, deadline_s=deadline_s)

        async def ask(partition: TopicPartition) -> tuple[Offset, Offset] | None:
            if context.address_of(partition.broker_id) is None:
                raise NoBrokerError(f"broker {partition.broker_id} is not registered")
            return await log_range(context, partition, deadline_s=deadline_s)

        ends = await for_each(ask, found)
        return [_show_row(p, stored, ends[p]) for p, stored in found.items()]

    rows = target.run(look)
    marked = [index for index, row in enumerate(rows) if row[-1] != "ok"]
    render.print_rows(SHOW_COLUMNS, rows, as_json=as_json, marked=marked)


def _show_row(
    partition: TopicPartition,
    stored: GroupOffset | PayloadError,
    ends: tuple[Offset, Offset] | MetaqError | None,
) -> list[render.Cell]:
    start, end = ends if isinstance(ends, tuple) else (None, None)
    place: list[render.Cell] = [partition.topic, partition.name]
    if isinstance(stored, PayloadError):
        return [*place, None, None, start, end, str(stored)]
    state = describe_offset(stored.offset, ends)
    return [*place, stored.offset, stored.message_id, start, end, state]


def describe_offset(
    offset: Offset, ends: tuple[Offset, Offset] | MetaqError | None
) -> str:
    """Return the remark on a committed offset; `ok` when it lies in the log."""
    if isinstance(ends, MetaqError):
        return str(ends)
    start, end = ends or (0, 0)
    if offset < start:
        return f"{start - offset} bytes below the log start"
    if offset > end:
        return f"{offset - end} bytes behind the log end"
    return "ok"


# -- reset and copy -------------------------------------------------------------------


def reset_offsets(
    target: Target,
    group: str,
    topic: str,
    goal: Goal,
    names: tuple[str, ...],
    options: WriteOptions,
) -> None:
    """Move the committed offsets of a group.

    Args:
        target: which cluster.
        group: name of the group; it may have committed nothing yet.
        topic: the topic to move.
        goal: where to.
        names: `BROKER-NUMBER` of partitions; none of them is all.
        options: how.

    Raises:
        GroupInUseError: it has members that read the topic.
        MetaqError: it cannot be planned; nothing is written then.
    """

    async def plan(
        context: ClientContext, deadline_s: float
    ) -> tuple[OffsetChange, ...]:
        require_coordinator(context)
        snapshot = await know_topics(context, {topic}, deadline_s=deadline_s)
        served = snapshot.get_partitions(topic)
        if not served:
            raise NoBrokerError(f"no broker serves topic '{topic}'")
        partitions = named_partitions(topic, served, names)
        if isinstance(goal, int) and len(partitions) != 1:
            raise click.UsageError(
                f"an offset means one partition, {topic} has {len(partitions)}: say"
                " which one with --partition"
            )
        changes = await plan_reset(
            context, group, partitions, goal, deadline_s=deadline_s
        )
        await _write(context, group, changes, options, deadline_s)
        return changes

    _print_plan(target.run(plan), options)


def copy_offsets(
    target: Target, source: str, goal: str, topic: str, options: WriteOptions
) -> None:
    """Give one group the committed offsets of another.

    Args:
        target: which cluster.
        source: the group whose offsets are read.
        goal: the group that gets them.
        topic: only of this topic; "" is all.
        options: how.

    Raises:
        GroupInUseError: the second group has members that read the copied topics.
        ClientError: there is nothing to copy.
    """

    async def plan(
        context: ClientContext, deadline_s: float
    ) -> tuple[OffsetChange, ...]:
        changes = await plan_copy(
            context, source, goal, topic or None, deadline_s=deadline_s
        )
        await _write(context, goal, changes, options, deadline_s)
        return changes

    _print_plan(target.run(plan), options)


async def _write(
    context: ClientContext,
    group: str,
    changes: Sequence[OffsetChange],
    options: WriteOptions,
    deadline_s: float,
) -> None:
    topics = {change.partition.topic for change in changes}
    try:
        await require_idle(context, group, topics, deadline_s=deadline_s)
    except GroupInUseError as error:
        if not options.is_forced and not options.is_dry:
            raise
        render.say(str(error))
    if not options.is_dry:
        await write_offsets(context, group, changes, deadline_s=deadline_s)


def _print_plan(changes: Sequence[OffsetChange], options: WriteOptions) -> None:
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
    if options.is_dry:
        render.say("dry run: nothing was written")


def parse_goal(text: str) -> Goal:
    """Return the goal in `--to`: a number is an offset, anything with a date a time.

    Raises:
        click.BadParameter: it is neither, and not `earliest` or `latest`.
    """
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if re.fullmatch(r"\d{1,19}", text, re.ASCII):
        return Offset(int(text))
    try:
        return dt.datetime.fromtimestamp(parse_time(text) / 1000, dt.UTC)
    except ValueError as error:
        raise click.BadParameter(
            f"expected earliest, latest, an offset, or a time such as 2026-01-31T12:00,"
            f" got '{text}'",
            param_hint="--to",
        ) from error
