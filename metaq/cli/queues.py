"""`metaq queues`: list, show, create, change and delete queue groups."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import click

from metaq.cli import render
from metaq.cli.admin import ask
from metaq.cli.cluster import Target
from metaq.cli.options import (
    GROUP,
    TOPIC,
    ReadWord,
    SecondsRange,
    option,
    takes,
    topic_argument,
)
from metaq.cli.tree import command, group
from metaq.client import AsyncAdmin, QueueGroupDescription
from metaq.filter.language import parse_filter
from metaq.model import TopicPartition
from metaq.zk.group_definitions import (
    DELAY_MS_MAX,
    DELIVERIES_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    QueueGroupDefinition,
)

PROGRESS_COLUMNS = (
    "partition", "unread_count", "ready_count", "open_count", "delayed_count",
    "done_per_s", "oldest_s", "passed_count", "expired_count", "letter_count",
    "floor", "end",
)  # fmt: skip
NEW: Final = QueueGroupDefinition(topic="")
"""Defaults of a new group."""
NEW_DELAYS: Final = ", ".join(f"{each / 1000:g}" for each in NEW.retry_delays_ms)
WORKER_COLUMNS = ("worker", "partition", "messages")
OVER_S = 1.0
"""Time over which `show` measures the rate of messages done, seconds."""
Rates = Mapping[TopicPartition, float]

group("queues", "List or show queue groups; create, alter, redrive or delete one.")
group_argument = click.argument("group", type=GROUP)


@command("queues list", examples=("metaq queues list", "metaq queues list --json"))
def list_queues(target: Target, *, as_json: bool) -> bool:
    """List queue groups with their options.

    Definitions written by a newer version are named on standard error; the exit code is
    1 then.
    """
    show = partial(_print_groups, as_json=as_json)
    return target.show_defined(lambda admin: admin.queue_groups(), show)


@command(
    "queues show",
    group_argument,
    examples=("metaq queues show workers", "metaq queues show workers --json"),
)
def show(target: Target, group: str, *, as_json: bool) -> bool:
    """Show the progress of GROUP and the messages that its workers hold.

    Expired leases and dead letters are counted since the broker started. Partitions
    whose broker is away are named on standard error; the exit code is 1 then.
    """

    async def look(admin: AsyncAdmin) -> tuple[QueueGroupDescription, Rates]:
        now_s = asyncio.get_running_loop().time
        before, began_s = await admin.describe_queue_group(group), now_s()
        await asyncio.sleep(OVER_S)
        after = await admin.describe_queue_group(group)
        return after, rates_of(before, after, now_s() - began_s)

    found, rates = target.ask(look)
    rows: list[dict[str, Any]] = [
        {
            **asdict(each),
            "partition": each.partition.name,
            "done_per_s": rates.get(each.partition),
        }
        for each in found.queues
    ]
    if as_json:
        render.print_json({**_options(group, found.definition), "queues": rows})
    else:
        _print_groups({group: found.definition}, as_json=False)
        click.echo()
        progress = [[row[name] for name in PROGRESS_COLUMNS] for row in rows]
        render.print_rows(PROGRESS_COLUMNS, progress, as_json=False)
        click.echo()
        held = [
            (worker, row["partition"], count)
            for row in rows
            for worker, count in row["held"].items()
        ]
        render.print_rows(WORKER_COLUMNS, held, as_json=False)
    for problem in found.problems:
        render.say(problem)
    if not found.queues and not found.problems:
        topic = found.definition.topic
        render.say(
            f"no partitions yet: topic {topic} has had no message, or the group was"
            " created within the last second"
        )
    return not found.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Options of a queue group to set; None: unchanged, or the default."""

    lease_s: float | None = option(
        "--lease",
        "lease_s",
        type=SecondsRange(LEASE_MS_MIN / 1000, LEASE_MS_MAX / 1000),
        metavar="SECONDS",
        help="Time until the lease of a delivery expires, unless its worker extends"
        f" it, in seconds; {NEW.lease_ms / 1000:g} in a new group.",
    )
    deliveries_max: int | None = option(
        "--deliveries-max",
        type=click.IntRange(1, DELIVERIES_MAX),
        help="Deliveries after which a message is given up;"
        f" {NEW.deliveries_max} in a new group.",
    )
    dead_letter_topic: str | None = option(
        "--dead-letter-topic",
        metavar="TOPIC",
        type=TOPIC,
        help="Existing topic that receives messages that are given up.",
    )
    then: Literal["drop"] | None = option(
        "--then", type=click.Choice(["drop"]), help="Drop messages that are given up."
    )
    retry_delays_s: tuple[float, ...] = option(
        "--retry-delay",
        "retry_delays_s",
        multiple=True,
        type=SecondsRange(0, DELAY_MS_MAX / 1000),
        metavar="SECONDS",
        help="Delay before a message is delivered again, in seconds, 0 for none; may"
        " be repeated for the second, third, ... time, and the last value applies to"
        f" all later ones; {NEW_DELAYS} in a new group.",
    )

    where: str | None = option(
        "--where",
        metavar="FILTER",
        type=ReadWord(lambda text: text and parse_filter(text).text),
        help="Deliver only messages that match; '' for all messages.",
    )

    def given(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `AsyncAdmin`'s calls."""
        if self.then is not None and self.dead_letter_topic is not None:
            raise click.UsageError("--then and --dead-letter-topic exclude each other")
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**given, "retry_delays_s": self.retry_delays_s or None}


@command(
    "queues create",
    group_argument,
    click.option("--topic", required=True, type=TOPIC, help="Topic of the group."),
    takes(GroupOptions, "options"),
    click.option(
        "--ordered-by",
        type=click.Choice(["key"]),
        help="Deliver messages of one key in order, one at a time.  [default: in any"
        " order]",
    ),
    click.option(
        "--start",
        type=click.Choice(["earliest", "latest"]),
        help="Start at the log start, or with messages put from now on.  [default:"
        " earliest]",
    ),
    examples=(
        "metaq queues create workers --topic orders --dead-letter-topic orders-dead",
        "metaq queues create mails --topic mails --then drop --lease 60",
    ),
)
def create(
    target: Target,
    group: str,
    topic: str,
    options: GroupOptions,
    ordered_by: Literal["key"] | None,
    start: Literal["earliest", "latest"] | None,
    *,
    as_json: bool,
) -> None:
    """Create GROUP with its options, so that its workers need none.

    Either --dead-letter-topic or --then drop is required, for messages that are given
    up.
    """
    if options.dead_letter_topic is None and options.then is None:
        raise click.UsageError("Missing option '--dead-letter-topic' or '--then'.")
    given = {"ordered_by": ordered_by, "start": start, **options.given()}
    made = target.ask(lambda admin: admin.create_queue_group(group, topic, **given))
    _print_groups({group: made}, as_json=as_json)


@command(
    "queues alter",
    group_argument,
    takes(GroupOptions, "options"),
    examples=(
        "metaq queues alter workers --lease 60 --retry-delay 5 --retry-delay 60",
        "metaq queues alter workers --then drop",
    ),
)
def alter(target: Target, group: str, options: GroupOptions, *, as_json: bool) -> None:
    """Change options of GROUP, from the next delivery on.

    Its topic, order and start position cannot be changed. Messages that an old filter
    skipped are not delivered later. Workers that pass an option must pass the new value
    when they start again.
    """
    given = options.given()
    if not any(each is not None for each in given.values()):
        raise click.UsageError("expected at least one option to change")
    new = target.ask(lambda admin: admin.alter_queue_group(group, **given))
    _print_groups({group: new}, as_json=as_json)


@command(
    "queues delete",
    group_argument,
    examples=("metaq queues delete workers --dry-run", "metaq queues delete workers"),
)
def delete(
    target: Target, group: str, *, is_dry: bool, is_sure: bool, as_json: bool
) -> None:
    """Delete GROUP and its progress; the messages stay.

    Prints the group and asks for confirmation. If the group is used again, it starts as
    a new group.
    """
    found = target.ask(lambda admin: admin.describe_queue_group(group))
    _print_groups({group: found.definition}, as_json=as_json)
    question = f"Delete queue group {group}?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        target.ask(lambda admin: admin.delete_queue_group(group))
        render.say(f"queue group {group} is deleted")


@command(
    "queues skip",
    topic_argument,
    group_argument,
    click.argument("partition", type=click.IntRange(min=0)),
    examples=(
        "metaq queues skip orders workers 3 --dry-run",
        "metaq queues skip orders workers 3",
    ),
)
def skip(
    topic: str,
    group: str,
    partition: int,
    data_dir: Path,
    *,
    is_dry: bool,
    is_sure: bool,
) -> None:
    """Skip damage for GROUP in PARTITION of TOPIC, on the broker of this machine.

    Prints the damaged range and asks for confirmation. Messages in it are never
    delivered to GROUP, even if a good copy is restored; messages after it are.
    """
    fields = {"topic": topic, "group": group, "partition": partition}
    found = ask(data_dir, "skip_damage", **fields)
    start, end = found["start"], found["end"]
    click.echo(
        f"damaged: offsets {start} to {end}, {end - start} bytes, with"
        f" {found['open_count']} open messages, file {found['file']}: {found['reason']}"
    )
    question = f"Skip {end - start} bytes of {topic}-{partition} for {group}?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        ask(data_dir, "skip_damage", **fields, start=start, end=end)
        render.say(f"queue group {group} continues at offset {end}")


def rates_of(
    before: QueueGroupDescription, after: QueueGroupDescription, took_s: float
) -> Rates:
    """Return the messages done per second, without brokers that restarted between."""
    counts = {each.partition: each.done_count for each in before.queues}
    return {
        each.partition: round((each.done_count - count) / took_s, 1)
        for each in after.queues
        if (count := counts.get(each.partition)) is not None
        and count <= each.done_count
    }


def _print_groups(found: Mapping[str, QueueGroupDefinition], *, as_json: bool) -> None:
    """Print a row for each group."""
    columns = tuple(_options("", QueueGroupDefinition(topic="")))
    rows = [tuple(_options(name, each).values()) for name, each in found.items()]
    render.print_rows(columns, rows, as_json=as_json)


def _options(group: str, definition: QueueGroupDefinition) -> dict[str, render.Cell]:
    """Return the options of a group, named as in `create`."""
    delays_s = ",".join(f"{each / 1000:g}" for each in definition.retry_delays_ms)
    letters = definition.dead_letter_topic
    return {
        "group": group,
        "topic": definition.topic,
        "lease_s": definition.lease_ms / 1000,
        "deliveries_max": definition.deliveries_max,
        "then": "drop" if letters is None else "dead_letter",
        "dead_letter_topic": letters,
        "retry_delays_s": delays_s or "none",
        "ordered_by": definition.ordered_by,
        "start": definition.start,
        "where": definition.where,
    }
