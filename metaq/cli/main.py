"""The argument tree of the `metaq` command; what commands do is in files of their own.

Exit codes: 0 fine; 1 failed, or problems found; 2 wrong usage; 130 interrupted by
Ctrl-C; 141 the reader of our output went away; 143 ended by SIGTERM. A broker that is
stopped by a signal ends with 0.
"""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import click

from metaq import __version__
from metaq.cli import admin, logs, render, serve
from metaq.cli.accept_loss import accept_loss
from metaq.cli.brokers import stats
from metaq.cli.client_tree import COMMANDS
from metaq.cli.cluster import Target
from metaq.cli.inspect_log import DumpOptions, dump, verify
from metaq.cli.options import example, json_option, takes, target_options, yes_option
from metaq.cli.pipeline import pipeline
from metaq.cli.topics import topics_group
from metaq.cli.transactions import txn
from metaq.config.load import load_config
from metaq.errors import MetaqError
from metaq.model import printable

NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn an exception of the body into one sentence and an exit code.

    Raises:
        Exit: the body failed.
    """
    code = 0
    try:
        yield
    except click.ClickException as error:
        # What the user typed is in it; `show` prints nothing else of it.
        error.message = printable(error.message)  # type: ignore[misc]  # no other way
        raise
    except MetaqError as error:
        _say(" ".join(str(error).split("\n")) or type(error).__name__)
        code = render.EXIT_PROBLEMS
    except BrokenPipeError:
        code = render.EXIT_PIPE_CLOSED
    except OSError as error:
        where = error.filename
        if where is None and error.errno in NO_ROOM:
            where = "standard output"  # our only output without a name
        text = error.strerror or str(error) or type(error).__name__
        _say(f"{where}: {text}" if where else text)
        code = render.EXIT_PROBLEMS
    except KeyboardInterrupt:
        code = render.EXIT_INTERRUPTED
    if code:
        for stream in (sys.stdout, sys.stderr):
            render.let_go_of_refused(stream)
        raise click.exceptions.Exit(code)


def _say(text: str) -> None:
    """Print the sentence that ends a command, unless standard error is closed."""
    with suppress(OSError):
        render.say(text)


class MetaqGroup(click.Group):
    """Turns exceptions of commands into one sentence and an exit code."""

    def make_context(self, *words: Any, **options: Any) -> click.Context:
        """Read the command line; `--help` and `--version` print in here."""
        with _one_sentence():
            return super().make_context(*words, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with _one_sentence():
            result = super().invoke(ctx)
            sys.stdout.flush()
        if result is False:
            ctx.exit(render.EXIT_PROBLEMS)
        return result


@click.group(
    cls=MetaqGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=example("metaq local", "metaq produce test --file /var/log/syslog"),
)
@click.version_option(__version__, prog_name="metaq")
def main() -> None:
    """Run and look after a MetaQ message log."""
    render.fill_standard_descriptors()
    render.print_any_character()
    logs.be_quiet()


for command in (*COMMANDS, *admin.COMMANDS, pipeline, topics_group, txn):
    main.add_command(command)


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
@takes(serve.LocalOptions)
def local_command(options: serve.LocalOptions) -> None:
    """Run ZooKeeper and a broker on this machine, for this machine.

    Prints one line when both are ready; logs go to standard error and to
    local/zookeeper in the data directory. Ends on SIGTERM or Ctrl-C.
    """
    serve.serve_local(options)


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


@main.command(
    "verify",
    epilog=example(
        "metaq verify ~/.local/share/metaq", "metaq verify /var/lib/metaq --json"
    ),
)
@click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@json_option
def verify_command(directory: Path, as_json: bool) -> bool:
    """Check every stored byte of the data directory DIRECTORY.

    Reads only, and may run beside a broker. Prints what is wrong, where, and where
    the next good record is; the exit code is 1 when anything is.
    """
    return verify(directory, as_json=as_json)


@main.command(
    "accept-loss",
    short_help="Let a broker start on less than it had.",
    epilog=example(
        "metaq accept-loss /var/lib/metaq",
        "metaq accept-loss /var/lib/metaq --config config/server.ini",
    ),
)
@click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Settings of the broker: shows what its other data directories and ZooKeeper"
    " know of this one, and accepts a new disk.",
)
@yes_option
def accept_loss_command(directory: Path, config: Path | None, is_sure: bool) -> None:
    """Go on without what is missing from the data directory DIRECTORY, for good.

    For a broker that refuses to start, or stopped a partition, because DIRECTORY
    holds less than it did: when a disk is not mounted, mount it instead. Prints what
    is missing and asks; the next start takes what is there for all that there is, and
    later ones compare with that. The broker must not be running.
    """
    settings = None if config is None else load_config(str(config), serve.read_bytes)
    accept_loss(directory, settings, is_sure=is_sure)


@main.command(
    "dump",
    epilog=example(
        "metaq dump data/test-0/00000000000000000000.meta",
        "metaq dump 00000000000000000000.meta --from 4096 --max 10 --json",
        "metaq dump archive/test-0/00000000000000000000.meta.zip",
    ),
)
@takes(DumpOptions)
def dump_command(options: DumpOptions) -> bool:
    """Print the records of the file SEGMENT.

    The exit code is 1 when a damaged record is met.
    """
    return dump(options)
