"""The command `metaq`: help, exit codes, and registration of commands.

Exit codes: 0 success; 1 failure, or problems found; 2 wrong usage; 130 interrupted by
Ctrl-C; 141 the reader of standard output has closed it; 143 ended by SIGTERM. A broker
that is stopped by a signal exits with 0.
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
"""Sections of the help → commands, in the order of first use."""
LINE_MAX: Final = 200
"""Maximum length of a command's line in a list; click cuts it to the terminal."""

SHARED: Final[dict[str, Callable[[Any], Any]]] = {
    "is_dry": dry_option,
    "is_sure": yes_option,
    "as_json": json_option,
    "target": target_options,
    "data_dir": here_options,
}
"""Name of an argument → decorator that adds its options. Other modules add theirs."""

NO_WORDS: Final[Any] = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Raised by click to show the help of a group; click 8.1 prints the help instead."""

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Convert an exception of the body to one sentence and an exit code."""
    code = 0
    try:
        yield
    except click.ClickException as error:
        # Unless it is our help, the message may have user input; `show` escapes none.
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
            where = "standard output"  # the only output without a name
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
    """Group that converts exceptions of commands to one sentence and an exit code."""

    load: Callable[[str], None] = staticmethod(lambda _name: None)
    """Loads the modules of a command."""

    def make_context(self, *words: Any, **options: Any) -> click.Context:
        """Parse the command line; `--help` and `--version` print here."""
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
        """Return a command; load its modules only."""
        self.load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the commands by section, each with its full first sentence."""
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
    """Group that lists, with or without the word `list`, or runs a subcommand."""

    def __init__(self, *words: Any, **options: Any) -> None:
        """Create a group that can run without a subcommand."""
        options["invoke_without_command"] = True
        options["subcommand_metavar"] = "| COMMAND [ARGS]..."
        super().__init__(*words, **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options of the listing; leave those of a subcommand to it."""
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
        """Return the parameters; for usage lines of subcommands, without arguments."""
        found = super().get_params(ctx)
        if ctx.command is self:
            return found
        return [one for one in found if not isinstance(one, click.Argument)]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand if one was named, else list."""
        if not ctx.args:
            return click.Command.invoke(self, ctx)
        name, command, words = self.resolve_command(ctx, ctx.args)
        assert command is not None, name
        ctx.invoked_subcommand = name
        with command.make_context(name, words, parent=ctx) as below:
            return command.invoke(below)


def example(*lines: str) -> str:
    """Return the examples that a command's help ends with."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@click.group(
    cls=MetaqGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=example("metaq local", "metaq produce test --file /var/log/syslog"),
)
def main() -> None:
    """Run and administer a MetaQ message log."""
    render.fill_standard_descriptors()
    render.print_any_character()
    logs.be_quiet()


def group(name: str, text: str) -> None:
    """Add a group of commands with its help."""
    main.add_command(click.Group(name, help=text, short_help=text))


def command(
    name: str,
    *options: Callable[[Any], Any],
    examples: tuple[str, ...],
    cls: type[click.Command] = click.Command,
    short_help: str | None = None,
) -> Callable[[F], F]:
    """Return a decorator that adds a function as a command; its docstring is the help.

    The function itself is returned unchanged, for tests and other commands.

    Args:
        name: words after `metaq`.
        options: decorators that add options, in the order of the help; those of
            `SHARED` for arguments of the function are added after them.
        examples: example command lines.
        cls: class of the command.
        short_help: line in the list of commands; None: the help's first sentence.
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
