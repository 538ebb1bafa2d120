"""The command `metaq`: its help, its exit codes, and how commands join it.

Exit codes: 0 fine; 1 failed, or problems found; 2 wrong usage; 130 interrupted by
Ctrl-C; 141 the reader of our output went away; 143 ended by SIGTERM. A broker that is
stopped by a signal ends with 0.
"""

import errno
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import click

from metaq.cli import logs, render
from metaq.cli.options import (
    dry_option,
    here_options,
    json_option,
    target_options,
    yes_option,
)
from metaq.errors import MetaqError
from metaq.model import printable

NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SECTIONS: Final = {
    "Data": (
        "produce", "cat", "find", "consume", "scheduled", "request", "ship", "bench",
    ),
    "Groups": ("groups", "queues", "offsets"),
    "Topics": ("topics", "partitions", "exchanges"),
    "Operate": (
        "local", "broker", "brokers", "stats", "reload", "txn", "verify", "dump",
        "replicas", "accept-loss", "hand-over",
    ),
    "Pipelines": ("pipeline",),
}  # fmt: skip
"""Sections of the help, and their commands in the order of a first use."""
LINE_MAX: Final = 200
"""Longest sentence in a list of commands; click cuts it at the width of a terminal."""

SHARED: Final[dict[str, Callable[[Any], Any]]] = {
    "is_dry": dry_option,
    "is_sure": yes_option,
    "as_json": json_option,
    "target": target_options,
    "data_dir": here_options,
}
"""Options of many commands, by the argument that they become; rooms add theirs."""

NO_WORDS: Final[Any] = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Shows the help of a group of commands; click 8.1 has none, and prints it."""

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn an exception of the body into one sentence and an exit code."""
    code = 0
    try:
        yield
    except click.ClickException as error:
        # It has what the user typed, unless it is our help; `show` escapes nothing.
        if not isinstance(error, NO_WORDS):
            error.message = printable(error.message)  # type: ignore[misc]  # no other way
        raise
    except MetaqError as error:
        _say(" ".join(str(error).split("\n")) or type(error).__name__)
        code = render.EXIT_PROBLEMS
    except BrokenPipeError:
        code = render.EXIT_PIPE_CLOSED
    except OSError as error:
        where = error.filename
        if where is None and error.errno in NO_SPACE:
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

    load: Callable[[str], None] = staticmethod(lambda _name: None)
    """Loads the modules of a command."""

    def make_context(self, *words: Any, **options: Any) -> click.Context:
        """Read the command line; `--help` and `--version` print here."""
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

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, ascending."""
        return sorted(name for names in SECTIONS.values() for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; its modules are loaded now, and those of no other."""
        self.load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the commands by section, each with its whole first sentence."""
        width = max(map(len, self.list_commands(ctx)))
        for section, names in SECTIONS.items():
            rows = list[tuple[str, str]]()
            for name in names:
                found = self.get_command(ctx, name)
                assert found is not None, name
                rows.append((name.ljust(width), found.get_short_help_str()))
            with formatter.section(section):
                formatter.write_dl(rows)


class ListingGroup(click.Group):
    """Lists, with the word `list` or without; or runs the command that is named."""

    def __init__(self, *words: Any, **options: Any) -> None:
        """Make a group that also runs without a command."""
        options["invoke_without_command"] = True
        options["subcommand_metavar"] = "| COMMAND [ARGS]..."
        super().__init__(*words, **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave the words of a command to that command."""
        if args and args[0] in self.commands:
            ctx.args = list(args)
            return ctx.args
        if args[:1] == ["list"]:
            args = args[1:]
        ctx.allow_interspersed_args = True
        ctx.allow_extra_args = False
        late = [word for word in args if word in self.commands]
        try:
            return click.Command.parse_args(self, ctx, list(args))
        except click.UsageError as error:
            if not late:
                raise
            raise click.UsageError(
                f"options go after the command: metaq {self.name} {late[0]} OPTIONS",
                ctx,
            ) from error

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Leave the arguments of the listing out of the usage lines of commands."""
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


def example(*lines: str) -> str:
    """Return the text below a command's options."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(
    cls=MetaqGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=example("metaq local", "metaq produce test --file /var/log/syslog"),
)
def main() -> None:
    """Run and look after a MetaQ message log."""
    render.fill_standard_descriptors()
    render.print_any_character()
    logs.be_quiet()


def group(name: str, text: str) -> None:
    """Add a group of commands, with its help."""
    main.add_command(click.Group(name, help=text, short_help=text))


def command(
    name: str,
    *options: Callable[[Any], Any],
    examples: tuple[str, ...],
    cls: type[click.Command] = click.Command,
    short_help: str | None = None,
) -> Callable[[F], F]:
    """Make a command of a function; its docstring is the help.

    The function itself stays as it is, for tests and for other commands.

    Args:
        name: the words after `metaq`.
        options: decorators that add options, in the order of the help; those of
            `SHARED` come after them, where the function has such an argument.
        examples: lines that can be typed.
        cls: the kind of command.
        short_help: its line in the list of commands; None: the help's first sentence.
    """

    def register(function: F) -> F:
        arguments = inspect.signature(function).parameters
        shared = [
            add
            for argument, add in SHARED.items()
            if argument in arguments and add not in options
        ]
        wrapped: Callable[..., Any] = function
        for add in reversed((*options, *shared)):
            wrapped = add(wrapped)
        above, _, last = name.rpartition(" ")
        parent = main.commands[above] if above else main
        assert isinstance(parent, click.Group)
        epilog = example(*examples)
        made = parent.command(last, cls=cls, epilog=epilog, short_help=short_help)
        one = made(wrapped)
        one.short_help = one.get_short_help_str(LINE_MAX)
        return function

    return register
