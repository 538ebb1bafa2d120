"""Output of commands, for people and for machines."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from metaq.cli import render

COLUMNS = ("name", "count", "note")
ROWS = [("a", 1, None), ("b c", 20, "x")]


class Terminal(io.StringIO):
    """Text that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_of(
    width: int, monkeypatch: pytest.MonkeyPatch, kind: str = "dumb"
) -> Terminal:
    """Return a terminal without colours that is so many columns wide."""
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "25")
    return Terminal()


def test_a_pipe_gets_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    """A header and one line per row; what is not known is a dash."""
    render.print_rows(COLUMNS, ROWS, as_json=False)
    assert capsys.readouterr().out == "name\tcount\tnote\na\t1\t-\nb c\t20\tx\n"


HOSTILE = "a\x1b[2J\tb\nc\x9b"
SHOWN = r"a\x1b[2J\tb\nc\x9b"


def test_no_cell_and_no_sentence_speaks_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unprintable characters are escaped; a sentence may have several lines."""
    render.print_rows(["name"], [(HOSTILE,)], as_json=False)
    render.print_aligned({"name": 0}, [HOSTILE])
    assert capsys.readouterr().out == f"name\n{SHOWN}\n{SHOWN}\n"
    render.say(HOSTILE)
    assert capsys.readouterr().err == "metaq: a\\x1b[2J\\tb\nc\\x9b\n"


def test_what_does_not_print_is_escaped_in_json_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Parsers get the same text."""
    render.print_json({"name": HOSTILE + "\U000e0001ä"})
    line = capsys.readouterr().out
    assert json.loads(line) == {"name": HOSTILE + "\U000e0001ä"}
    assert line.rstrip("\n").isprintable()
    assert "ä" in line


def test_machines_get_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Values keep their types."""
    render.print_rows(COLUMNS, ROWS, as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"name": "a", "count": 1, "note": None},
        {"name": "b c", "count": 20, "note": "x"},
    ]


def test_a_terminal_gets_aligned_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers to the right, text to the left, markup in data is only text."""
    terminal = terminal_of(60, monkeypatch)
    with redirect_stdout(terminal):
        render.print_rows(COLUMNS, [*ROWS, ("[red]", 3, "")], as_json=False)
    assert terminal.getvalue().splitlines() == [
        "name   count  note",
        "a          1  -   ",
        "b c       20  x   ",
        "[red]      3      ",
    ]


def test_a_column_that_nobody_knows_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column without owners does not move to the side of the numbers."""
    terminal = terminal_of(60, monkeypatch)
    rows = [("a", 1, None), ("b", None, None)]
    with redirect_stdout(terminal):
        render.print_rows(COLUMNS, rows, as_json=False)
    assert terminal.getvalue().splitlines() == [
        "name  count  note",
        "a         1  -   ",
        "b         -  -   ",
    ]


def test_a_narrow_terminal_gets_whole_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are left to the terminal to break, so that cells can be copied."""
    terminal = terminal_of(12, monkeypatch)
    with redirect_stdout(terminal):
        render.print_rows(COLUMNS, [("meta://10.0.0.1:8123", 1, "a b")], as_json=False)
    assert terminal.getvalue().splitlines() == [
        "name                  count  note",
        "meta://10.0.0.1:8123      1  a b ",
    ]


def test_rows_that_come_one_by_one_are_padded_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Columns keep their width; a pipe gets tabs."""
    widths = {"offset": 8, "text": 0}
    render.print_header(widths)
    render.print_aligned(widths, (5, "x"))
    assert capsys.readouterr().out == "offset\ttext\n5\tx\n"
    with redirect_stdout(Terminal()) as terminal:
        render.print_header(widths)
        render.print_aligned(widths, (5, "x"))
    assert terminal.getvalue() == "offset    text\n5         x\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (2**40, "1.0 TiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    """The largest unit that leaves a number of one or more."""
    assert render.bytes_text(size) == text


def test_counts_agree_with_their_noun() -> None:
    """One message, two messages."""
    assert render.count_text(1, "message") == "1 message"
    assert render.count_text(2000, "message") == "2,000 messages"
    assert render.count_text(0, "entry", "entries") == "0 entries"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain", "plain"),
        (b"a\tb\r\n\x1b[31m", "a·b···[31m"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 60, "x" * 60),
        (b"x" * 61, "x" * 59 + "…"),
        ("ü".encode() * 500, "ü" * 59 + "…"),
    ],
)
def test_previews_fit_a_line_and_harm_no_terminal(data: bytes, text: str) -> None:
    """Control characters are dots, long payloads are cut."""
    assert render.preview(data) == text


def test_progress_is_silent_where_nobody_looks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a terminal the progress bar writes nothing."""
    with render.progress("work", 100) as advance:
        advance(50)
    assert capsys.readouterr() == ("", "")


def test_progress_shows_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a terminal the bar names its work."""
    terminal = terminal_of(100, monkeypatch, kind="xterm")
    with redirect_stderr(terminal), render.progress("publishing", 100) as advance:
        advance(50)
    assert "publishing" in terminal.getvalue()
    terminal.truncate(0)
    with (
        redirect_stderr(terminal),
        render.progress("publishing", None, is_typing=True) as advance,
    ):
        advance(50)
    assert "publishing" not in terminal.getvalue()


def test_progress_keeps_to_one_line_of_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bar gives way, not the figures; all of them are in one kind of unit."""
    terminal = terminal_of(56, monkeypatch, kind="xterm")
    with (
        redirect_stderr(terminal),
        render.progress("publishing", 400 * 2**20) as advance,
    ):
        advance(100 * 2**20)
        advance(200 * 2**20)
    lines = [line for line in terminal.getvalue().splitlines() if "B" in line]
    assert lines
    assert all("publishing" in line for line in lines)
    assert "200.0/400.0 MiB" in lines[-1]
    assert "MB/s" not in lines[-1]


def test_payloads_are_text_or_base64() -> None:
    """JSON holds UTF-8 as it is and everything else in base64."""
    headers = (("trace", b"1"), ("raw", b"\xff"))
    fields = render.message_fields("grüße".encode(), "k=v", b"\xff\x00", headers)
    assert fields == {
        "attribute": "k=v",
        "key": None,
        "key_base64": "/wA=",
        "headers": [
            {"name": "trace", "value": "1", "value_base64": None},
            {"name": "raw", "value": None, "value_base64": "/w=="},
        ],
        "data": "grüße",
        "data_base64": None,
    }
    assert render.message_fields(b"", None, None, ())["key_base64"] is None


@pytest.mark.slow
def test_closed_standard_descriptors_are_filled() -> None:
    """The next file that is opened is never taken for standard error."""
    program = (
        "import os; from metaq.cli.render import fill_standard_descriptors as fill;"
        "os.close(0); os.close(2); fill();"
        "print([os.readlink(f'/proc/self/fd/{n}') for n in (0, 2)],"
        " os.open('/', os.O_RDONLY) > 2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['/dev/null', '/dev/null'] True\n"
