"""`metaq topics`: which there are, and how far they go; topics by command."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from metaq.cli import render
from metaq.cli.cluster import Target, nobody_serves
from metaq.cli.options import F, example, json_option, target_options
from metaq.client.admin.cluster_admin import know_topics
from metaq.client.admin.topic_admin import AsyncAdmin, Brokers, TopicDescription
from metaq.client.cluster.broker_facts import read_closed
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import log_range
from metaq.client.cluster.presence import require_all_there
from metaq.client.consume.browse import stats_of_broker
from metaq.client.errors import PartitionsAwayError
from metaq.client.fan_out import for_each
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.config.keys import DEFINITION_KEYS
from metaq.errors import MetaqError
from metaq.model import BrokerId, Offset, TopicPartition

COLUMNS = (
    "topic", "partition", "broker", "puts", "gets", "log_start", "log_end", "closed",
)  # fmt: skip
STATUS_COLUMNS = ("broker", "is_there", "partitions", "effect", "text")


def topics(target: Target, wanted: tuple[str, ...], *, as_json: bool) -> bool:
    """Print one row per partition, also of those that are away.

    Args:
        target: which cluster.
        wanted: names of topics; none of them is all.
        as_json: one object per row.

    Returns:
        False when partitions are away; standard error names them, the rest is shown.

    Raises:
        NoBrokerError: there is no broker, or a topic that was named is nowhere.
    """

    async def look(
        context: ClientContext, deadline_s: float
    ) -> tuple[list[tuple[render.Cell, ...]], list[int], str]:
        target.require_brokers(context.metadata.snapshot.brokers)
        known = sorted(await context.metadata.topics(deadline_s=deadline_s))
        names = wanted or known
        snapshot = await know_topics(context, names, deadline_s=deadline_s)
        partitions: list[TopicPartition] = []
        for topic in names:
            found = _partitions(snapshot, topic)
            if not found and wanted:
                raise nobody_serves(topic, known)
            partitions += found

        async def ask(partition: TopicPartition) -> tuple[Offset, Offset] | None:
            if context.address_of(partition.broker_id) is None:
                return None
            return await log_range(context, partition, deadline_s=deadline_s)

        async def ask_closed(broker_id: BrokerId) -> frozenset[str] | None:
            address = context.address_of(broker_id)
            if address is None:
                return None
            told = await stats_of_broker(context, address, "", deadline_s=deadline_s)
            return read_closed(told or {})

        async with asyncio.TaskGroup() as both:
            asking = both.create_task(for_each(ask, partitions))
            brokers = dict.fromkeys(each.broker_id for each in partitions)
            closed = both.create_task(for_each(ask_closed, brokers))
        rows = [
            _row(
                context,
                snapshot,
                each,
                asking.result()[each],
                closed.result()[each.broker_id],
            )
            for each in partitions
        ]
        marked = [
            index
            for index, each in enumerate(partitions)
            if not snapshot.is_served(each)
        ]
        try:
            require_all_there(snapshot, names)
        except PartitionsAwayError as error:
            return rows, marked, str(error)
        return rows, marked, ""

    rows, marked, problem = target.run(look)
    render.print_rows(COLUMNS, rows, as_json=as_json, marked=marked)
    if problem:
        render.say(problem)
    return not problem


def _partitions(snapshot: ClusterSnapshot, topic: str) -> list[TopicPartition]:
    served = {*snapshot.put_partitions(topic), *snapshot.get_partitions(topic)}
    return sorted(served.union(snapshot.away(topic)))


def _row(
    context: ClientContext,
    snapshot: ClusterSnapshot,
    partition: TopicPartition,
    ends: tuple[Offset, Offset] | MetaqError | None,
    closed: frozenset[str] | MetaqError | None,
) -> tuple[render.Cell, ...]:
    if isinstance(ends, MetaqError):
        render.say(f"{partition}: {ends}")
        ends = None
    if isinstance(closed, MetaqError):
        closed = None  # the same broker, and the same sentence
    topic, name = partition.topic, f"{partition.topic}-{partition.partition}"
    return (
        topic,
        partition.name,
        str(context.address_of(partition.broker_id) or "unreachable"),
        partition in snapshot.put_partitions(topic),
        partition in snapshot.get_partitions(topic),
        ends[0] if ends else None,
        ends[1] if ends else None,
        None if closed is None else name in closed,
    )


# -- by command -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Wanted settings of a topic, from the options."""

    partitions: int | None
    brokers: Brokers | None
    settings: dict[str, str]


def create(target: Target, topic: str, wishes: Wishes, *, as_json: bool) -> None:
    """Make a topic; print its status on each broker."""
    assert wishes.partitions is not None
    partitions = wishes.partitions
    found = target.run(
        lambda context, _deadline_s: AsyncAdmin(context).create_topic(
            topic,
            partitions=partitions,
            brokers=wishes.brokers or "all",
            settings=wishes.settings,
        )
    )
    _print(found, as_json=as_json)


def alter(target: Target, topic: str, wishes: Wishes, *, as_json: bool) -> None:
    """Change a topic; print its status on each broker."""
    found = target.run(
        lambda context, _deadline_s: AsyncAdmin(context).alter_topic(
            topic,
            partitions=wishes.partitions,
            brokers=wishes.brokers,
            settings=wishes.settings,
        )
    )
    _print(found, as_json=as_json)


def delete(target: Target, topic: str, confirmed: str | None, *, as_json: bool) -> None:
    """Delete a topic, when its name was said twice.

    Raises:
        click.BadParameter: it was not.
    """
    if confirmed is None and sys.stdin.isatty():
        confirmed = click.prompt(
            f"All messages of {topic} will be removed. Its name again", err=True
        )
    if confirmed != topic:
        raise click.BadParameter(
            f"expected '{topic}' once more, got"
            f" {'nothing' if confirmed is None else repr(confirmed)}: all its messages"
            " will be removed",
            param_hint="--confirm",
        )
    target.run(lambda context, _deadline_s: AsyncAdmin(context).delete_topic(topic))
    if as_json:
        render.print_json({"topic": topic, "is_deleted": True})
    else:
        render.say(f"topic {topic} is deleted")


def describe(target: Target, topic: str, *, as_json: bool) -> None:
    """Print the definition of a topic, and its status on each broker."""
    found = target.run(
        lambda context, _deadline_s: AsyncAdmin(context).describe_topic(topic)
    )
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


# -- the tree -------------------------------------------------------------------------


class TopicsGroup(click.Group):
    """Lists topics, or runs a command, if the first word names one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave the words of a command to that command."""
        if args and args[0] in self.commands:
            ctx.args = list(args)
            return ctx.args
        ctx.allow_interspersed_args = True
        return click.Command.parse_args(self, ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Leave the topics to list out of the usage lines of commands."""
        found = super().get_params(ctx)
        if ctx.command is self:
            return found
        return [one for one in found if not isinstance(one, click.Argument)]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named, or list."""
        if not ctx.args:
            return click.Command.invoke(self, ctx)
        name, command, words = self.resolve_command(ctx, ctx.args)
        assert command is not None, name
        ctx.invoked_subcommand = name
        with command.make_context(name, words, parent=ctx) as below:
            return command.invoke(below)


@click.group(
    "topics",
    cls=TopicsGroup,
    invoke_without_command=True,
    subcommand_metavar="| COMMAND [ARGS]...",
    short_help="List topics; create, alter, delete or describe one.",
    epilog=example("metaq topics", "metaq topics test --json"),
)
@click.argument("names", nargs=-1, metavar="[TOPIC]...")
@json_option
@target_options
def topics_group(names: tuple[str, ...], as_json: bool, target: Target) -> bool:
    """List topics, their partitions, the brokers that serve them and their offsets.

    Partitions whose broker is away are listed too; then the exit code is 1. A word that
    is one of the commands below is that command.
    """
    return topics(target, names, as_json=as_json)


def _read_settings(
    _context: click.Context, _option: click.Parameter, words: tuple[str, ...]
) -> dict[str, str]:
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise click.BadParameter(f"'{word}' is not KEY=VALUE")
        settings[key.strip()] = value
    return settings


def _read_brokers(
    _context: click.Context, _option: click.Parameter, word: str | None
) -> Brokers | None:
    if word is None or word == "all":
        return "all" if word else None
    parts = [part.strip() for part in word.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise click.BadParameter(f"'{word}' is neither 'all' nor ids such as 0,2")
    return [int(part) for part in parts]


def _partitions_option(*, is_required: bool) -> Callable[[F], F]:
    return click.option(
        "--partitions",
        type=click.IntRange(1),
        required=is_required,
        help="How many, on each of its brokers."
        + ("" if is_required else "  They never become fewer.  [default: as now]"),
    )


brokers_option = click.option(
    "--brokers",
    "served_by",
    metavar="all|ID,...",
    callback=_read_brokers,
    help="Brokers that serve it; 'all' includes later ones.",
)
settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_read_settings,
    help="A setting, as in a topic section of server.ini: "
    + ", ".join(key.name for key in DEFINITION_KEYS)
    + ". May be repeated; a blank value goes back to the broker's default.",
)


@topics_group.command(
    "create",
    short_help="Make TOPIC, on all brokers or some.",
    epilog=example(
        "metaq topics create orders --partitions 4",
        "metaq topics create orders --partitions 4 --set deletePolicy=delete,72h",
        "metaq topics create audit --partitions 1 --brokers 0,2",
    ),
)
@click.argument("topic")
@_partitions_option(is_required=True)
@brokers_option
@settings_option
@json_option
@target_options
def create_command(
    topic: str,
    partitions: int,
    served_by: Brokers | None,
    settings: dict[str, str],
    as_json: bool,
    target: Target,
) -> None:
    """Make TOPIC, and wait until its brokers serve it.

    Brokers take it up at once, beside their server.ini, whose sections win. Brokers of
    MetaQ 1.4 take topics from server.ini alone.
    """
    wishes = Wishes(partitions=partitions, brokers=served_by, settings=settings)
    create(target, topic, wishes, as_json=as_json)


@topics_group.command(
    "alter",
    short_help="Change TOPIC: more partitions, other brokers or settings.",
    epilog=example(
        "metaq topics alter orders --partitions 8",
        "metaq topics alter orders --set deletePolicy=delete,24h --set deleteWhen=",
    ),
)
@click.argument("topic")
@_partitions_option(is_required=False)
@brokers_option
@settings_option
@json_option
@target_options
def alter_command(
    topic: str,
    partitions: int | None,
    served_by: Brokers | None,
    settings: dict[str, str],
    as_json: bool,
    target: Target,
) -> None:
    """Change TOPIC, and wait until its brokers serve it like that.

    What a broker has that is not among them any more stays readable there. A topic
    that is served and was not made by command is put under command.
    """
    wishes = Wishes(partitions=partitions, brokers=served_by, settings=settings)
    alter(target, topic, wishes, as_json=as_json)


@topics_group.command(
    "delete",
    short_help="Delete TOPIC, its messages and its groups' offsets.",
    epilog=example("metaq topics delete orders --confirm orders"),
)
@click.argument("topic")
@click.option(
    "--confirm",
    "confirmed",
    metavar="TOPIC",
    help="The name again.  [default: asked for at a terminal]",
)
@json_option
@target_options
def delete_command(
    topic: str, confirmed: str | None, as_json: bool, target: Target
) -> None:
    """Delete TOPIC with all its messages, and the offsets of its groups.

    Its consumers have to end first. Brokers that are away do their part when they come
    back; who that is, is told when the time is over, and by describe.
    """
    delete(target, topic, confirmed, as_json=as_json)


@topics_group.command(
    "describe",
    short_help="Print what TOPIC is to be, and what each broker makes of it.",
    epilog=example("metaq topics describe orders", "metaq topics describe test --json"),
)
@click.argument("topic")
@json_option
@target_options
def describe_command(topic: str, as_json: bool, target: Target) -> None:
    """Print what TOPIC is to be, and what each broker makes of it.

    The column effect says whether a broker goes by the definition, by its server.ini
    (the text is the file), refuses the definition (the text says why), or is deleting.
    """
    describe(target, topic, as_json=as_json)
