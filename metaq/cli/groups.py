"""`metaq groups`: show members, owners and lag of groups; delete a group."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.offsets import print_changes
from metaq.cli.tree import ListingGroup, command
from metaq.client import AsyncAdmin, GroupDescription, PartitionProgress
from metaq.errors import ClientError

GROUP_COLUMNS = (
    "group", "members", "topics", "partitions", "unowned", "lag_messages", "lag_bytes",
    "where",
)  # fmt: skip
MEMBER_COLUMNS = ("member", "topics", "partitions")
PARTITION_COLUMNS = (
    "topic", "partition", "owner", "committed", "lag_messages", "lag_bytes",
    "lag_seconds",
)  # fmt: skip


@command(
    "groups",
    click.argument("name", metavar="[GROUP]", default=""),
    examples=("metaq groups", "metaq groups billing --json"),
    cls=ListingGroup,
)
def groups(target: Target, name: str, *, as_json: bool) -> None:
    """List consumer groups with their lag; describe or delete one.

    With GROUP, print its members, and the owner and lag of each partition. Partitions
    of subscribed topics that have no owner are highlighted.
    """
    found = describe_groups(target, name)
    if as_json:
        for group in found:
            render.print_json(to_json(group))
    elif name:
        _print_group(found[0])
    else:
        rows = [group_row(group) for group in found]
        marks = [any(_unowned(group)) for group in found]
        render.print_rows(GROUP_COLUMNS, rows, as_json=False, marks=marks)


@command(
    "groups delete",
    click.argument("group"),
    examples=("metaq groups delete billing --dry-run", "metaq groups delete billing"),
)
def delete(
    target: Target, group: str, *, is_dry: bool, is_sure: bool, as_json: bool
) -> None:
    """Delete GROUP and its committed offsets in ZooKeeper.

    Prints the offsets and asks for confirmation. Refused if the group has live members.
    If the group is used again, it starts as a new group.
    """
    found = target.ask(lambda admin: admin.delete_group(group, plan=True))
    print_changes(found, as_json=as_json)
    count = render.count_text(len(found), "committed offset")
    question = f"Delete group {group} and its {count}?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        target.ask(lambda admin: admin.delete_group(group))
        render.say(f"group {group} is deleted")


def describe_groups(
    target: Target, name: str, *, with_parts: bool = False
) -> Sequence[GroupDescription]:
    """Return one group, or all if `name` is ""; raise ClientError if it is unknown.

    `with_parts` adds the groups whose names begin with `name` and a dot, and returns
    none if all are unknown.
    """

    async def look(admin: AsyncAdmin) -> Sequence[GroupDescription]:
        known = await admin.groups()
        part = f"{name}." if with_parts else None
        names = [
            each
            for each in known
            if name in {"", each} or (part and each.startswith(part))
        ]
        if name and not names and not with_parts:
            raise ClientError(
                f"no group {name}; existing groups: {', '.join(known) or 'none'}"
            )
        return await asyncio.gather(*map(admin.describe_group, names))

    return target.ask(look)


def to_json(group: GroupDescription) -> dict[str, object]:
    """Return the `--json` object of a group."""
    return {
        "group": group.group,
        "where": group.where,
        "members": {member: list(topics) for member, topics in group.members.items()},
        "partitions": [
            {
                "topic": each.partition.topic,
                "partition": each.partition.name,
                "owner": each.owner,
                "committed": each.committed,
                "lag": asdict(each.lag) if each.lag else None,
                "problem": each.problem,
            }
            for each in group.partitions
        ],
    }


def _unowned(group: GroupDescription) -> list[bool]:
    """Return for each partition whether a member subscribes to it and none owns it."""
    return [each.is_wanted and not each.owner for each in group.partitions]


def group_row(group: GroupDescription) -> tuple[render.Cell, ...]:
    """Return the row of a group."""
    # A sum without the unknown values would look complete.
    lags = [each.lag for each in group.partitions]
    counts = [lag.messages if lag else None for lag in lags]
    sizes = [lag.bytes if lag else None for lag in lags]
    return (
        group.group,
        len(group.members),
        ",".join(sorted({each.partition.topic for each in group.partitions})) or None,
        len(group.partitions),
        sum(_unowned(group)),
        _sum_if_known(counts),
        _sum_if_known(sizes),
        group.where,
    )


def _sum_if_known(values: Sequence[int | None]) -> int | None:
    """Return the sum; None if a value is unknown, or there are no values."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _print_group(group: GroupDescription) -> None:
    members = [
        (
            member,
            ",".join(topics),
            sum(each.owner == member for each in group.partitions),
        )
        for member, topics in group.members.items()
    ]
    render.print_rows(MEMBER_COLUMNS, members, as_json=False)
    click.echo()
    if group.where is not None:
        render.say(f"members read with the filter {group.where}")
    print_progress(group)


def print_progress(group: GroupDescription) -> None:
    """Print the progress and the problems of a group in each partition."""
    marks = _unowned(group)
    rows = [_partition_row(each) for each in group.partitions]
    render.print_rows(PARTITION_COLUMNS, rows, as_json=False, marks=marks)
    if any(marks):
        render.say(f"{render.count_text(sum(marks), 'partition')} without an owner")
    fresh = sum(_is_uncommitted(each) for each in group.partitions)
    if fresh:
        render.say(
            f"{render.count_text(fresh, 'partition')} without a committed offset: the"
            " lag is counted from the log start"
        )
    for each in group.partitions:
        if each.problem is not None:
            render.say(each.problem)


def _is_uncommitted(each: PartitionProgress) -> bool:
    return each.committed is None and each.problem is None


def _partition_row(each: PartitionProgress) -> tuple[render.Cell, ...]:
    lag = each.lag
    return (
        each.partition.topic,
        each.partition.name,
        each.owner,
        "uncommitted" if _is_uncommitted(each) else each.committed,
        lag.messages if lag else None,
        lag.bytes if lag else None,
        round(lag.seconds, 1) if lag and lag.seconds is not None else None,
    )
