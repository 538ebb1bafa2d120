"""Output of the command line: tables, progress, sentences, lines for machines.

Results go to standard output, everything else to standard error, so that a pipe gets
results alone. A person at a terminal gets a table with colours; a pipe gets the same
cells, tab-separated with a header line; `--json` gives one JSON object per line.
"""

import base64
import datetime as dt
import io
import json
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import Final, TextIO

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from metaq.model import HeaderPairs, Millis, printable

EXIT_PROBLEMS: Final = 1
"""The command failed, or found damage."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C, as shells count it: 128 + SIGINT."""
EXIT_PIPE_CLOSED: Final = 141
"""The reader of our output went away, as shells count it: 128 + SIGPIPE."""

SPEAKER: Final = "metaq: "
"""Begins every sentence on standard error: a pipe may have several programs."""

PREVIEW_CHARS_MAX: Final = 60
TABLE_WIDTH_MAX: Final = 1000
"""Characters; a wider table has its cells broken, on any terminal."""
BAR_WIDTH_MIN: Final = 4
BAR_WIDTH_MAX: Final = 40
FIGURES_WIDTH: Final = 42
"""Characters that sizes, speed and time beside a bar take at most."""
UNIT: Final = 1024
STANDARD_OUTPUT: Final = 1
"""Its descriptor."""
STANDARD_ERROR: Final = 2
"""Its descriptor, the last of the standard ones."""
MARKED_STYLE: Final = "bold red"

_bars: Final[list[Progress]] = []

Cell = str | int | float | bool | None


def say(text: str) -> None:
    """Print one sentence for people, on standard error; it may have several lines."""
    click.echo(f"{SPEAKER}{printable_lines(text)}", err=True)


def may_change(question: str, *, is_dry: bool, is_sure: bool) -> bool:
    """Return whether a plan that was printed may be carried out; ask on standard error.

    Raises:
        click.UsageError: there is no terminal to ask at.
        click.Abort: the answer is no.
    """
    if is_dry:
        say("dry run: nothing was changed")
    elif not is_sure:
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"{question} Not asked, for the input is no terminal: --yes means yes"
            )
        click.confirm(question, abort=True, err=True)
    return not is_dry


def printable_lines(text: str) -> str:
    """Return a text of several lines with all other unprintable characters escaped."""
    return "\n".join(map(printable, text.split("\n")))


def leave_echo() -> None:
    """Go to a new line of the terminal, after the `^C` that it shows for the key.

    A progress bar clears its line by itself. Called in a signal handler, so nothing
    that buffers is used.
    """
    with suppress(OSError):
        if not _bars and os.isatty(STANDARD_ERROR):
            os.write(STANDARD_ERROR, b"\n")


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object on a line of its own."""
    line = json.dumps(value, ensure_ascii=False)
    if not line.isprintable():
        line = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)
    click.echo(line)


def print_rows(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    as_json: bool,
    marks: Sequence[bool] = (),
) -> None:
    """Print a table, in the form that fits its reader.

    Args:
        columns: names of the columns; the keys of the JSON objects.
        rows: one cell per column; None is a value that is not known.
        as_json: print objects, and nothing when there are no rows.
        marks: which rows a person at a terminal should see first; () for none.
    """
    if as_json:
        for row in rows:
            print_json(dict(zip(columns, row, strict=True)))
        return
    texts = [[_cell_text(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in (columns, *texts):
            click.echo("\t".join(line))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows if row[index] is not None]
        is_number = bool(cells) and all(isinstance(c, int | float) for c in cells)
        table.add_column(
            name, justify="right" if is_number else "left", overflow="fold"
        )
    for row, is_marked in zip(texts, marks or repeat(False), strict=False):
        table.add_row(*map(Text, row), style=MARKED_STYLE if is_marked else None)
    # A terminal that is narrower breaks the lines: cells broken into columns can be
    # neither read nor copied.
    console = Console()
    free = console.options.update(max_width=TABLE_WIDTH_MAX)
    console.width = max(console.width, console.measure(table, options=free).maximum)
    console.print(table)


def print_header(widths: Mapping[str, int]) -> None:
    """Print the line above rows that come one by one."""
    print_aligned(widths, tuple(widths))


def print_aligned(widths: Mapping[str, int], cells: Sequence[Cell]) -> None:
    """Print one row of a table of unknown length.

    The widths are the least ones on a terminal, by the names of the columns.
    """
    texts = [_cell_text(cell) for cell in cells]
    if sys.stdout.isatty():
        padded = zip(texts, widths.values(), strict=True)
        click.echo("  ".join(text.ljust(width) for text, width in padded).rstrip())
    else:
        click.echo("\t".join(texts))


def _cell_text(cell: Cell) -> str:
    return "-" if cell is None else printable(str(cell))


def message_fields(
    data: bytes, attribute: str | None, key: bytes | None, headers: HeaderPairs
) -> dict[str, object]:
    """Return the contents of a message for JSON.

    Bytes are text where they are UTF-8, under `<name>`, and else Base64, under
    `<name>_base64`. Both are there; one of them is None.
    """
    return {
        "attribute": attribute,
        **_text_or_base64("key", key),
        "headers": [
            {"name": name, **_text_or_base64("value", value)} for name, value in headers
        ],
        **_text_or_base64("data", data),
    }


def _text_or_base64(name: str, octets: bytes | None) -> dict[str, str | None]:
    if octets is None:
        return {name: None, f"{name}_base64": None}
    try:
        return {name: octets.decode(), f"{name}_base64": None}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(octets).decode()}


def preview(data: bytes) -> str:
    """Return the start of a payload as one line of printable text."""
    text = data[: PREVIEW_CHARS_MAX * 4].decode(errors="replace")
    shown = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in text)
    if len(shown) <= PREVIEW_CHARS_MAX and len(data) <= PREVIEW_CHARS_MAX * 4:
        return shown
    return shown[: PREVIEW_CHARS_MAX - 1] + "\N{HORIZONTAL ELLIPSIS}"


def bytes_text(size_bytes: float) -> str:
    """Return a size for people: `1.5 MiB`."""
    if size_bytes < UNIT:
        return f"{size_bytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    index = -1
    while size_bytes >= UNIT and index < len(units) - 1:
        size_bytes /= UNIT
        index += 1
    return f"{size_bytes:.1f} {units[index]}"


def count_text(count: int, singular: str, plural: str | None = None) -> str:
    """Return `1 message`, `2,000 messages`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def format_time(moment: Millis | None) -> str | None:
    """Return ISO 8601 in UTC with milliseconds; None for an unknown time."""
    if moment is None:
        return None
    try:
        text = dt.datetime.fromtimestamp(moment / 1000, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return text.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Speed(ProgressColumn):
    """Speed, in the units of the sizes beside it."""

    def render(self, task: Task) -> Text:
        """Return how fast it goes; nothing before that is known."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{bytes_text(speed)}/s")


@contextmanager
def progress(
    what: str, total_bytes: int | None, *, is_typing: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar while the body runs; nothing where no terminal is.

    Yields a function that takes the bytes that are done in all.

    Args:
        what: the words beside the bar.
        total_bytes: the goal, or None when it is unknown.
        is_typing: the user types the input on this terminal, where a bar would get
            between the lines.
    """
    console = Console(stderr=True)
    if is_typing or not console.is_terminal:
        yield lambda _done_bytes: None
        return
    free = console.width - len(what) - FIGURES_WIDTH
    columns = (
        TextColumn("{task.description}"),
        BarColumn(min(max(free, BAR_WIDTH_MIN), BAR_WIDTH_MAX)),
        DownloadColumn(True, table_column=Column(no_wrap=True)),
        _Speed(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        _bars.append(bar)
        try:
            yield lambda done_bytes: bar.update(task, completed=done_bytes)
        finally:
            _bars.remove(bar)


def print_any_character() -> None:
    """Have standard output escape characters that its encoding lacks, as errors are.

    Names of files have any bytes, and a preview any character. Text escaped so is JSON
    in JSON too.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fill_standard_descriptors() -> None:
    """Open /dev/null as each standard descriptor that is closed.

    A segment that was opened as descriptor 2 would receive what a library prints to
    standard error. Python leaves out the streams of those that it found closed.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        pass
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def require_reader() -> None:
    """Raise BrokenPipeError if the pipe on standard output has no reader any more."""
    output = select.poll()
    output.register(STANDARD_OUTPUT, 0)  # errors are always reported
    if any(event & select.POLLERR for _fd, event in output.poll(0)):
        raise BrokenPipeError


def let_go_of_refused(stream: TextIO | None) -> None:
    """Write the bytes that a stream still buffers; drop those it does not take.

    Python would try again when the process ends, and fail with lines and an exit code
    of its own. A stream that was closed when we were started is None.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
