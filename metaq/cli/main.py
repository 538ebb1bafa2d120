"""The argument tree of the `metaq` command; what each command does is in its own file.

Exit codes: 0 fine; 1 failed, or problems found; 2 wrong usage; 130 interrupted by
Ctrl-C; 141 the reader of our output went away.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click

from metaq import __version__
from metaq.cli import admin, render, serve
from metaq.cli.cat import CatOptions, cat
from metaq.cli.cluster import Target
from metaq.cli.inspect_log import DumpOptions, dump, verify
from metaq.cli.produce import ProduceOptions, produce
from metaq.cli.stats import stats
from metaq.cli.topics import topics
from metaq.errors import MetaqError

ZOOKEEPER: Final = "localhost:2181"
ROOT: Final = "/meta"
TIMEOUT_S: Final = 10.0
PORT: Final = 8123
ZOOKEEPER_PORT: Final = 2181
PORT_MAX: Final = 65535

F = TypeVar("F", bound=Callable[..., Any])


class MetaqGroup(click.Group):
    """Turns what commands raise into one sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except MetaqError as error:
            render.say(" ".join(str(error).split("\n")) or type(error).__name__)
            ctx.exit(render.EXIT_PROBLEMS)
        except BrokenPipeError:
            # Nobody reads any more; nothing can be written at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(render.EXIT_PIPE_CLOSED)
        except OSError as error:
            subject = f"{error.filename}: " if error.filename else ""
            render.say(
                f"{subject}{error.strerror or str(error) or type(error).__name__}"
            )
            ctx.exit(render.EXIT_PROBLEMS)
        except KeyboardInterrupt:
            ctx.exit(render.EXIT_INTERRUPTED)
        else:
            if result is False:
                ctx.exit(render.EXIT_PROBLEMS)
            return result


TARGET_OPTIONS: Final = (
    click.option(
        "--timeout",
        type=click.FloatRange(0.01, 3600),
        default=TIMEOUT_S,
        show_default=True,
        help="Seconds that one answer may take.",
    ),
    click.option(
        "--broker",
        "brokers",
        multiple=True,
        metavar="HOST:PORT",
        help="Ask this broker instead of ZooKeeper; may be repeated.",
    ),
    click.option(
        "--zk-root",
        default=ROOT,
        show_default=True,
        help="Where the cluster is in ZooKeeper.",
    ),
    click.option(
        "--zookeeper",
        envvar="METAQ_ZOOKEEPER",
        default=ZOOKEEPER,
        show_default=True,
        metavar="HOST:PORT,...",
        help="ZooKeeper; METAQ_ZOOKEEPER in the environment says the same.",
    ),
)


def example(*lines: str) -> str:
    """Return the text below a command's options."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def target_options(command: F) -> F:
    """Add the options that say which cluster is meant, as the argument `target`."""

    @functools.wraps(command)
    def with_target(
        *args: Any,
        zookeeper: str,
        zk_root: str,
        brokers: tuple[str, ...],
        timeout: float,
        **kwargs: Any,
    ) -> Any:
        target = Target(zookeeper, zk_root, brokers, timeout)
        return command(*args, target=target, **kwargs)

    wrapped: Any = with_target
    for option in TARGET_OPTIONS:
        wrapped = option(wrapped)
    return cast("F", wrapped)


def place_options(command: F) -> F:
    """Add the options that say which broker on this machine is meant."""
    for option in (
        click.option(
            "--config",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Configuration of the broker; its dataPath is the data directory.",
        ),
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path),
            help="Data directory of the broker.  [default: that of 'metaq local']",
        ),
    ):
        command = option(command)
    return command


json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per line, for machines."
)


@click.group(
    cls=MetaqGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=example("metaq local", "metaq produce test --file /var/log/syslog"),
)
@click.version_option(__version__, prog_name="metaq")
def main() -> None:
    """Run and look after a MetaQ message log."""
    render.fill_standard_descriptors()


# -- serve ----------------------------------------------------------------------------


@main.command(
    "broker",
    epilog=example(
        "metaq broker --config config/server.ini",
        "metaq broker --config server.ini --set serverPort=9123 --set brokerId=1",
    ),
)
@click.option(
    "--config",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Settings, in MetaQ's format.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key; TOPIC:KEY=VALUE overrides it for one topic.",
)
def broker_command(config: Path, settings: tuple[str, ...]) -> None:
    """Run a broker in the foreground, until SIGTERM or Ctrl-C.

    SIGHUP reloads the configuration.
    """
    serve.serve_broker(config, settings)


@main.command(
    "local",
    epilog=example(
        "metaq local",
        "metaq local --port 0 --zk-port 0 --data-dir ./data --topic orders=4",
        "metaq local --set unflushThreshold=1000",
    ),
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything is kept.  [default: metaq in the user's data directory]",
)
@click.option(
    "--port",
    type=click.IntRange(0, PORT_MAX),
    default=PORT,
    show_default=True,
    help="Port of the broker; 0 picks a free one.",
)
@click.option(
    "--zk-port",
    type=click.IntRange(0, PORT_MAX),
    default=ZOOKEEPER_PORT,
    show_default=True,
    help="Port of ZooKeeper; 0 picks a free one.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of server.ini; may be repeated.",
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="NAME[=PARTITIONS]",
    help="Add a topic; may be repeated.",
)
def local_command(
    data_dir: Path | None,
    port: int,
    zk_port: int,
    settings: tuple[str, ...],
    topics: tuple[str, ...],
) -> None:
    """Run ZooKeeper and a broker on this machine, for this machine.

    Prints one line when both are ready; logs go to standard error and to
    local/zookeeper in the data directory. Ends on SIGTERM or Ctrl-C.
    """
    serve.serve_local(
        serve.LocalOptions(
            data_dir=data_dir,
            port=port,
            zookeeper_port=zk_port,
            settings=settings,
            topics=topics,
        )
    )


# -- messages -------------------------------------------------------------------------


@main.command(
    "produce",
    epilog=example(
        "metaq produce test --file /var/log/syslog",
        "tail -F app.log | metaq produce test --attribute app",
    ),
)
@click.argument("topic")
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read this file instead of standard input.",
)
@click.option(
    "--partition",
    metavar="BROKER-NUMBER",
    help="Put everything there.  [default: all partitions in turn]",
)
@click.option("--attribute", help="Attribute of every message.")
@json_option
@target_options
def produce_command(
    topic: str,
    file: Path | None,
    partition: str | None,
    attribute: str | None,
    as_json: bool,
    target: Target,
) -> None:
    """Put each line of standard input or of a file as one message to TOPIC.

    A line ends with LF; all other bytes, a CR among them, are kept. What is read at
    once goes to one partition in order, the next to the next partition. A line that
    got no answer is sent again; the summary says how many may be stored twice.
    """
    options = ProduceOptions(
        topic=topic,
        file=file,
        partition=partition,
        attribute=attribute,
        as_json=as_json,
    )
    produce(target, options)


@main.command(
    "cat",
    epilog=example(
        "metaq cat test --max 10",
        "metaq cat test --from 2026-01-31T12:00 --json",
        "metaq cat test --from latest --follow",
    ),
)
@click.argument("topic")
@click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    metavar="earliest|latest|TIME",
    help="Where to begin; TIME is ISO 8601 (local time without a zone) or seconds"
    " since 1970. Messages stamped by a Java broker carry no time.",
)
@click.option(
    "--max", "count_max", type=click.IntRange(0), help="Stop after so many messages."
)
@click.option("--follow", "follows", is_flag=True, help="Wait for new messages.")
@click.option(
    "--partition",
    "partitions",
    multiple=True,
    metavar="BROKER-NUMBER",
    help="Read this partition; may be repeated.  [default: all]",
)
@json_option
@target_options
def cat_command(
    topic: str,
    start: str,
    count_max: int | None,
    follows: bool,
    partitions: tuple[str, ...],
    as_json: bool,
    target: Target,
) -> None:
    """Print the messages of TOPIC, each followed by a line end.

    Needs no group and commits nothing. Partitions come one after the other, each up
    to the end it has when its turn comes; with --follow as messages arrive. Within a
    partition the order is that of the log.
    """
    options = CatOptions(
        topic=topic,
        start=start,
        count_max=count_max,
        follows=follows,
        as_json=as_json,
        partitions=partitions,
    )
    cat(target, options)


# -- looking --------------------------------------------------------------------------


@main.command(
    "stats",
    epilog=example(
        "metaq stats",
        "metaq stats topics --json",
        "metaq stats realtime --broker localhost:8123",
    ),
)
@click.argument("item", default="")
@json_option
@target_options
def stats_command(item: str, as_json: bool, target: Target) -> bool:
    """Print what brokers count.

    ITEM is topics, offsets, realtime, config, help or the name of a topic; without it
    each broker tells of itself.
    """
    return stats(target, item, as_json=as_json)


@main.command("topics", epilog=example("metaq topics", "metaq topics test --json"))
@click.argument("names", nargs=-1, metavar="[TOPIC]...")
@json_option
@target_options
def topics_command(names: tuple[str, ...], as_json: bool, target: Target) -> None:
    """List topics, their partitions, the brokers that serve them and their offsets."""
    topics(target, names, as_json=as_json)


@main.command(
    "verify",
    epilog=example(
        "metaq verify ~/.local/share/metaq", "metaq verify /var/lib/metaq --json"
    ),
)
@click.argument("directory", type=click.Path(exists=True, path_type=Path))
@json_option
def verify_command(directory: Path, as_json: bool) -> bool:
    """Check every stored byte of the data directory DIRECTORY.

    Reads only, and may run beside a broker. Prints what is wrong, where, and where
    the next good record is; the exit code is 1 when anything is.
    """
    return verify(directory, as_json=as_json)


@main.command(
    "dump",
    epilog=example(
        "metaq dump data/test-0/00000000000000000000.meta",
        "metaq dump 00000000000000000000.meta --from 4096 --max 10 --json",
    ),
)
@click.argument("segment", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--from", "start", type=click.IntRange(0), help="Offset of the first record."
)
@click.option(
    "--max", "count_max", type=click.IntRange(0), help="Stop after so many records."
)
@json_option
def dump_command(
    segment: Path, start: int | None, count_max: int | None, as_json: bool
) -> bool:
    """Print the records of the file SEGMENT.

    The exit code is 1 when a damaged record is met.
    """
    return dump(
        DumpOptions(segment=segment, start=start, count_max=count_max, as_json=as_json)
    )


# -- administration -------------------------------------------------------------------


@main.command(
    "reload", epilog=example("metaq reload", "metaq reload --config config/server.ini")
)
@place_options
def reload_command(data_dir: Path | None, config: Path | None) -> None:
    """Let a broker on this machine read its configuration again.

    A file with an error changes nothing, and the error is printed.
    """
    admin.reload(admin.find_data_dir(data_dir, config))


@main.group()
def partitions() -> None:
    """Close partitions to puts and gets, or open them again."""


@partitions.command(
    "close",
    epilog=example("metaq partitions close test", "metaq partitions close test 0-3"),
)
@click.argument("topic")
@click.argument("span", metavar="[RANGE]", default="")
@place_options
def close_command(
    topic: str, span: str, data_dir: Path | None, config: Path | None
) -> None:
    """Refuse puts and gets of TOPIC, all of it or RANGE (a number, FIRST-LAST).

    Lasts until the partitions are opened or the broker restarts.
    """
    admin.close_partitions(admin.find_data_dir(data_dir, config), topic, span)


@partitions.command(
    "open",
    epilog=example("metaq partitions open test", "metaq partitions open test 2"),
)
@click.argument("topic")
@click.argument("span", metavar="[RANGE]", default="")
@place_options
def open_command(
    topic: str, span: str, data_dir: Path | None, config: Path | None
) -> None:
    """Take puts and gets of TOPIC again, all of it or RANGE (a number, FIRST-LAST)."""
    admin.open_partitions(admin.find_data_dir(data_dir, config), topic, span)
