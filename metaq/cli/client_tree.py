"""The argument tree of the client's commands: messages, groups and offsets."""

from typing import Any, Final

import click

from metaq.cli.bench import BenchOptions, bench_consume, bench_latency, bench_produce
from metaq.cli.brokers import forget, list_brokers
from metaq.cli.cat import CatOptions, cat
from metaq.cli.cluster import Target
from metaq.cli.consume import ConsumeOptions, consume
from metaq.cli.groups import groups
from metaq.cli.offsets import (
    WriteOptions,
    copy_offsets,
    parse_goal,
    reset_offsets,
    show_offsets,
)
from metaq.cli.options import (
    count_option,
    example,
    json_option,
    read_group,
    takes,
    target_options,
    yes_option,
)
from metaq.cli.produce import ProduceOptions, produce
from metaq.cli.tail import TailOptions, tail

# -- messages -------------------------------------------------------------------------


@click.command(
    "produce",
    short_help="Put each line of standard input or of a file to TOPIC.",
    epilog=example(
        "metaq produce test --file /var/log/syslog",
        "tail -F app.log | metaq produce test --attribute app",
    ),
)
@takes(ProduceOptions)
@target_options
def produce_command(options: ProduceOptions, target: Target) -> None:
    """Put each line of standard input or of a file as one message to TOPIC.

    A line ends with LF; all other bytes, a CR among them, are kept. Lines that are read
    at once go to one partition in order, the next to the next partition. A line that
    got no answer is sent again; the summary says how many may be stored twice.
    """
    produce(target, options)


@click.command(
    "cat",
    epilog=example(
        "metaq cat test --max 10",
        "metaq cat test --from 2026-01-31T12:00 --json",
        "metaq cat test --from latest --follow",
    ),
)
@takes(CatOptions)
@target_options
def cat_command(options: CatOptions, target: Target) -> None:
    """Print the messages of TOPIC, each followed by a line end.

    All of it, or nothing: while a broker that has some of its partitions is away, the
    command waits for the time-out and fails, unless --partial is given.

    Needs no group and commits nothing. Partitions come one after the other, each up
    to the end it has when its turn comes; with --follow as messages arrive. Within a
    partition the order is that of the log.
    """
    cat(target, options)


@click.command(
    "consume",
    short_help="Print the messages of TOPIC as a member of a group.",
    epilog=example(
        "metaq consume test --group billing",
        "metaq consume test --group billing --max 10 --no-commit --json",
        "metaq consume test --group nightly --idle 5 --start 2026-01-31T12:00",
    ),
)
@takes(ConsumeOptions)
@target_options
def consume_command(options: ConsumeOptions, target: Target) -> None:
    """Print the messages of TOPIC as a member of a group, each followed by a line end.

    The members of a group share the partitions, ours and those of Java consumers.
    Ctrl-C and SIGTERM commit what was printed and leave the group; after a crash the
    last messages are printed again.
    """
    consume(target, options)


@click.command(
    "tail",
    short_help="Put each line that FILE gains to TOPIC, through rotation.",
    epilog=example(
        "metaq tail /var/log/syslog logs",
        "metaq tail app.log logs --state app.state --from-start",
        "metaq tail app.log logs --state app.state --once --json",
    ),
)
@takes(TailOptions)
@target_options
def tail_command(options: TailOptions, target: Target) -> None:
    """Put each line that FILE gains as one message to TOPIC, through its rotation.

    FILE may be renamed and created anew, or copied and cut; a line is sent when it has
    its end. With --state no line is lost over a restart, and after a crash the lines
    of one batch at most come twice. A broker has to be there at the start; for one
    that goes away it waits.
    """
    tail(target, options)


# -- brokers --------------------------------------------------------------------------


@click.group("brokers", invoke_without_command=True, epilog=example("metaq brokers"))
@json_option
@target_options
@click.pass_context
def brokers(context: click.Context, as_json: bool, target: Target) -> bool:
    """List the brokers that there are, also those that are missing.

    A broker that has left a record in ZooKeeper and is not registered is missing. The
    exit code is 1 when one is. Java brokers leave no record.
    """
    if context.invoked_subcommand is not None:
        source = click.core.ParameterSource.COMMANDLINE
        if any(context.get_parameter_source(n) is source for n in context.params):
            raise click.UsageError(
                f"options go behind the command: metaq brokers"
                f" {context.invoked_subcommand} OPTIONS"
            )
        return True
    return list_brokers(target, as_json=as_json)


@brokers.command(
    "forget",
    short_help="Take a broker that is gone for good out of the record.",
    epilog=example("metaq brokers forget 3 --dry-run", "metaq brokers forget 3 --yes"),
)
@click.argument("number", metavar="BROKER", type=click.IntRange(0))
@click.option(
    "--dry-run",
    "is_dry",
    is_flag=True,
    help="Print what would be forgotten; remove nothing.",
)
@yes_option
@json_option
@target_options
def forget_command(
    number: int, is_dry: bool, is_sure: bool, as_json: bool, target: Target
) -> None:
    """Take BROKER, which is gone for good, out of the record in ZooKeeper.

    From then on reads do not miss its partitions. Nothing that it stored is touched: a
    broker that comes back is recorded again. One that is registered is refused.
    """
    forget(target, number, is_dry=is_dry, is_sure=is_sure, as_json=as_json)


# -- groups ---------------------------------------------------------------------------


@click.command(
    "groups",
    short_help="List consumer groups, their members, owners and lag.",
    epilog=example("metaq groups", "metaq groups billing --json"),
)
@click.argument("group", default="")
@json_option
@target_options
def groups_command(group: str, as_json: bool, target: Target) -> None:
    """List consumer groups, or show the members, owners and lag of GROUP.

    Partitions that a member subscribes to and no member owns stand out.
    """
    groups(target, group, as_json=as_json)


@click.group("offsets")
def offsets() -> None:
    """Look at what groups have committed, or move it."""


@offsets.command(
    "show",
    short_help="Print the offsets that GROUP has committed.",
    epilog=example("metaq offsets show billing", "metaq offsets show billing orders"),
)
@click.argument("group")
@click.argument("topic", default="")
@json_option
@target_options
def show_command(group: str, topic: str, as_json: bool, target: Target) -> None:
    """Print the offsets that GROUP has committed, and whether the logs have them."""
    show_offsets(target, group, topic, as_json=as_json)


@offsets.command(
    "reset",
    epilog=example(
        "metaq offsets reset billing orders --to earliest --dry-run",
        "metaq offsets reset billing orders --to 2026-01-31T12:00",
        "metaq offsets reset billing orders --to 4096 --partition 0-3",
    ),
)
@click.argument("group", callback=read_group)
@click.argument("topic")
@click.option(
    "--to",
    "goal",
    required=True,
    metavar="earliest|latest|TIME|OFFSET",
    help="Where to go on; TIME is ISO 8601 (local time without a zone), a number is an"
    " OFFSET of one partition.",
)
@click.option(
    "--partition",
    "partitions",
    multiple=True,
    metavar="BROKER-NUMBER",
    help="Move this partition; may be repeated.  [default: all]",
)
@takes(WriteOptions)
@target_options
def reset_command(
    group: str,
    topic: str,
    goal: str,
    partitions: tuple[str, ...],
    options: WriteOptions,
    target: Target,
) -> None:
    """Move the offsets of GROUP in TOPIC; stop its members first.

    Prints the old and the new offset of each partition. Groups of Java consumers are
    moved the same way.
    """
    reset_offsets(target, group, topic, parse_goal(goal), partitions, options)


@offsets.command(
    "copy",
    short_help="Have TO_GROUP go on where FROM_GROUP is.",
    epilog=example(
        "metaq offsets copy billing billing-test --dry-run",
        "metaq offsets copy billing billing-test orders",
    ),
)
@click.argument("from_group")
@click.argument("to_group", callback=read_group)
@click.argument("topic", default="")
@takes(WriteOptions)
@target_options
def copy_command(
    from_group: str,
    to_group: str,
    topic: str,
    options: WriteOptions,
    target: Target,
) -> None:
    """Have TO_GROUP go on where FROM_GROUP is, in all topics or in TOPIC alone."""
    copy_offsets(target, from_group, to_group, topic, options)


# -- measuring ------------------------------------------------------------------------

topic_option = click.option("--topic", required=True, help="Topic to measure.")
size_option = click.option(
    "--size",
    "size_bytes",
    type=click.IntRange(0, 1024 * 1024),
    default=128,
    show_default=True,
    help="Bytes of a message.",
)


@click.group("bench")
def bench() -> None:
    """Measure what the cluster does for this client, right now."""


@bench.command(
    "produce",
    short_help="Put messages to a topic, which keeps them: rates and times.",
    epilog=example("metaq bench produce --topic test --size 128 --count 1000000"),
)
@topic_option
@size_option
@count_option(500_000)
@json_option
@target_options
def bench_produce_command(target: Target, **options: Any) -> None:
    """Put messages to a topic, which keeps them: rates, and the times of lists."""
    bench_produce(target, BenchOptions(**options))


@bench.command(
    "consume", epilog=example("metaq bench consume --topic test --count 1000000")
)
@topic_option
@count_option(500_000)
@json_option
@target_options
def bench_consume_command(target: Target, **options: Any) -> None:
    """Read a topic from its start, without a group: rates."""
    bench_consume(target, BenchOptions(**options))


@bench.command(
    "latency",
    short_help="Send at a steady rate to a consumer that waits: percentiles.",
    epilog=example("metaq bench latency --topic test --rate 5000 --count 50000"),
)
@topic_option
@size_option
@count_option(5_000)
@click.option(
    "--rate",
    type=click.IntRange(1),
    default=1000,
    show_default=True,
    help="Messages per second.",
)
@json_option
@target_options
def bench_latency_command(target: Target, **options: Any) -> None:
    """Send at a steady rate to a consumer that waits: percentiles from put to delivery.

    The messages stay in the topic.
    """
    bench_latency(target, BenchOptions(**options))


COMMANDS: Final = (
    produce_command,
    cat_command,
    consume_command,
    tail_command,
    brokers,
    groups_command,
    offsets,
    bench,
)
"""Commands in the order of their sections above."""
