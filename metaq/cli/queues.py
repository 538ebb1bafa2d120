"""`metaq queues`: queue groups, how far they are, and their end."""

from dataclasses import asdict

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.tree import ListingGroup, command
from metaq.client import QueueGroupDescription
from metaq.zk.group_definitions import QueueGroupDefinition

COLUMNS = (
    "group", "topic", "lease_s", "deliveries_max", "dead_letters", "ordered_by",
)  # fmt: skip
QUEUE_COLUMNS = (
    "partition", "ready", "open", "unread_bytes", "lost", "workers",
)  # fmt: skip


@command(
    "queues",
    click.argument("name", metavar="[GROUP]", default=""),
    examples=("metaq queues", "metaq queues workers --json"),
    cls=ListingGroup,
)
def queues(target: Target, name: str, *, as_json: bool) -> None:
    """List queue groups; show or delete one.

    With GROUP, show how far it is in each partition that a worker has used since its
    broker began: messages that are ready, and those that are open in all.
    """
    if name:
        _show(target.ask(lambda admin: admin.describe_queue_group(name)), as_json)
        return
    found = target.ask(lambda admin: admin.queue_groups())
    if as_json:
        for group, definition in found.items():
            render.print_json({"group": group, **_fields(definition)})
        return
    rows = [_row(group, definition) for group, definition in found.items()]
    render.print_rows(COLUMNS, rows, as_json=False)


@command(
    "queues delete",
    click.argument("group"),
    examples=("metaq queues delete workers --dry-run", "metaq queues delete workers"),
)
def delete(
    target: Target, group: str, *, is_dry: bool, is_sure: bool, as_json: bool
) -> None:
    """Delete queue GROUP: brokers forget what is done, and the messages stay.

    Prints the group and asks. If it comes back it begins as a new group does.
    """
    _show(target.ask(lambda admin: admin.describe_queue_group(group)), as_json)
    question = f"Delete queue group {group}?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        target.ask(lambda admin: admin.delete_queue_group(group))
        render.say(f"queue group {group} is deleted")


def _show(group: QueueGroupDescription, as_json: bool) -> None:
    if as_json:
        rows = [
            {**asdict(each), "partition": each.partition.name} for each in group.queues
        ]
        render.print_json(
            {"group": group.group, **_fields(group.definition), "queues": rows}
        )
    else:
        row = _row(group.group, group.definition)
        render.print_rows(COLUMNS, [row], as_json=False)
        click.echo()
        render.print_rows(
            QUEUE_COLUMNS,
            [
                (
                    each.partition.name,
                    each.ready_count,
                    each.open_count,
                    each.unread_bytes,
                    each.lost_count,
                    each.worker_count,
                )
                for each in group.queues
            ],
            as_json=False,
        )
    for problem in group.problems:
        render.say(problem)


def _row(group: str, definition: QueueGroupDefinition) -> tuple[render.Cell, ...]:
    return (
        group,
        definition.topic,
        definition.lease_ms / 1000,
        definition.deliveries_max,
        definition.dead_letter_topic or "dropped",
        definition.ordered_by,
    )


def _fields(definition: QueueGroupDefinition) -> dict[str, object]:
    fields = asdict(definition)
    return {**fields.pop("others"), **fields}
