"""Output of the command line: tables, progress, sentences, JSON.

Results go to standard output, everything else to standard error, so that a pipe gets
only results. On a terminal, a table is aligned and coloured; in a pipe, its cells are
tab-separated, with a header line; `--json` prints one JSON object per line.
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
"""The command failed, or found problems."""
EXIT_INTERRUPTED: Final = 130
"""Interrupted by Ctrl-C; 128 + SIGINT, as in shells."""
EXIT_PIPE_CLOSED: Final = 141
"""Standard output has no reader any more; 128 + SIGPIPE, as in shells."""

SPEAKER: Final = "metaq: "
"""Prefix of sentences on standard error, which several programs may share."""

PREVIEW_CHARS_MAX: Final = 60
TABLE_WIDTH_MAX: Final = 1000
"""Maximum width of a table in characters; cells of a wider one are broken."""
BAR_WIDTH_MIN: Final = 4
BAR_WIDTH_MAX: Final = 40
FIGURES_WIDTH: Final = 42
"""Maximum width of the sizes, speed and time beside a bar, in characters."""
UNIT: Final = 1024
STANDARD_OUTPUT: Final = 1
"""Descriptor of standard output."""
STANDARD_ERROR: Final = 2
"""Descriptor of standard error, the last of the standard ones."""
MARKED_STYLE: Final = "bold red"

_bars: Final[list[Progress]] = []

Cell = str | int | float | bool | None


def say(text: str) -> None:
    """Print a sentence, possibly of several lines, on standard error."""
    click.echo(f"{SPEAKER}{printable_lines(text)}", err=True)


def may_change(question: str, *, is_dry: bool, is_sure: bool) -> bool:
    """Ask on standard error whether to carry out a printed plan; False on a dry run.

    Raises:
        click.UsageError: standard input is not a terminal.
        click.Abort: the answer is no.
    """
    if is_dry:
        say("dry run: nothing was changed")
    elif not is_sure:
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"{question} Cannot ask, because standard input is not a terminal: use"
                " --yes to confirm"
            )
        click.confirm(question, abort=True, err=True)
    return not is_dry


def printable_lines(text: str) -> str:
    """Return a text with unprintable characters other than line ends escaped."""
    return "\n".join(map(printable, text.split("\n")))


def leave_echo() -> None:
    """Begin a new line after the `^C` that the terminal shows.

    A progress bar clears its line itself. Called in a signal handler, so it writes
    without a buffer.
    """
    with suppress(OSError):
        if not _bars and os.isatty(STANDARD_ERROR):
            os.write(STANDARD_ERROR, b"\n")


def print_json(value: Mapping[str, object]) -> None:
    """Print a JSON object on one line."""
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
    """Print a table: aligned on a terminal, tab-separated in a pipe, or as JSON.

    Args:
        columns: names of the columns; the keys of the JSON objects.
        rows: one cell per column; None is an unknown value.
        as_json: print objects, and nothing if there are no rows.
        marks: whether to highlight each row on a terminal; () for no row.
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
    # On a narrower terminal, let the terminal break lines: cells broken within
    # their columns can be neither read nor copied.
    console = Console()
    free = console.options.update(max_width=TABLE_WIDTH_MAX)
    console.width = max(console.width, console.measure(table, options=free).maximum)
    console.print(table)


def print_header(widths: Mapping[str, int]) -> None:
    """Print the header above rows of `print_aligned`."""
    print_aligned(widths, tuple(widths))


def print_aligned(widths: Mapping[str, int], cells: Sequence[Cell]) -> None:
    """Print one row of a table of unknown length.

    Args:
        widths: name of each column → its minimum width on a terminal.
        cells: one cell per column.
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

    Bytes that are UTF-8 are text under `<name>`, others Base64 under
    `<name>_base64`. Both keys are present; at least one is None.
    """
    return {
        "attribute": attribute,
        **text_or_base64("key", key),
        "headers": [
            {"name": name, **text_or_base64("value", value)} for name, value in headers
        ],
        **text_or_base64("data", data),
    }


def text_or_base64(name: str, octets: bytes | None) -> dict[str, str | None]:
    """Return bytes for JSON: UTF-8 as text under the name, others as Base64."""
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
    """Return a human-readable size: `1.5 MiB`."""
    if size_bytes < UNIT:
        return f"{size_bytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    index = -1
    while size_bytes >= UNIT and index < len(units) - 1:
        size_bytes /= UNIT
        index += 1
    return f"{size_bytes:.1f} {units[index]}"


def count_text(count: int, singular: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 message`, `2,000 messages`."""
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
    """Speed, in the units of `bytes_text`."""

    def render(self, task: Task) -> Text:
        """Return the speed; empty while unknown."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{bytes_text(speed)}/s")


@contextmanager
def progress(
    what: str, total_bytes: int | None, *, is_typing: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar during the block; without a terminal, nothing.

    Yields a function that takes the total of bytes done so far.

    Args:
        what: text beside the bar.
        total_bytes: total, or None if unknown.
        is_typing: show no bar, because the user types input on this terminal.
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
    """Let standard output escape characters that its encoding lacks.

    File names may have any bytes, and previews any characters. Standard error escapes
    them by default. Within JSON, such escapes are valid JSON.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fill_standard_descriptors() -> None:
    """Open /dev/null as each standard descriptor that is closed.

    Otherwise a segment could be opened as descriptor 2, and libraries would write their
    errors into it. Python has set the streams of closed descriptors to None.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        pass
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def require_reader() -> None:
    """Raise BrokenPipeError if standard output is a pipe without a reader."""
    output = select.poll()
    output.register(STANDARD_OUTPUT, 0)  # errors are always reported
    if any(event & select.POLLERR for _fd, event in output.poll(0)):
        raise BrokenPipeError


def let_go_of_refused(stream: TextIO | None) -> None:
    """Flush a stream; drop its buffered bytes if that fails.

    Python would flush again at the end of the process, and fail with its own message
    and exit code. `stream` is None if it was closed when the process started.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
