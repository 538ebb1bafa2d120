"""Standard error of a command: one sentence, and log lines on request."""

import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from metaq.cli import logs
from tests.brokers import StartBroker

ONE_BROKER = {
    "test_an_error_that_ends_reading_is_said_once": "a damaged record on cue",
}

DEAD = "127.0.0.1:1"
SENTENCE = re.compile(rf"metaq: no broker answers at {DEAD} \(waited [34][0-9.]* s\)")


def metaq(*words: str) -> tuple[int, list[str]]:
    """Return the exit code of a command, and the lines of its standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "metaq", *words],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr.decode().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("consume", "test", "--group", "g"), ("topics",)])
def test_a_command_that_reaches_nobody_says_so_in_one_sentence(
    command: tuple[str, ...],
) -> None:
    """It is tried for as long as a log line about it comes, which is not shown."""
    code, lines = metaq(*command, "--broker", DEAD, "--timeout", "4")
    assert (code, len(lines)) == (1, 1)
    assert SENTENCE.fullmatch(lines[0])


@pytest.mark.slow
def test_who_asks_for_it_is_told_what_went_on_inside() -> None:
    """Level and name say whose word it is."""
    code, lines = metaq("topics", "-v", "--broker", DEAD, "--timeout", "4")
    assert code == 1
    assert SENTENCE.fullmatch(lines[-1])
    warnings = lines[:-1]
    assert warnings
    assert all(" WARNING metaq.client.cluster.metadata " in line for line in warnings)


@pytest.mark.slow
def test_an_error_that_ends_reading_is_said_once(start_metaq_1_4: StartBroker) -> None:
    broker: Any = start_metaq_1_4()
    broker.inner.corrupt(broker.put(b"x" * 100)[0])
    code, lines = metaq("consume", "test", "--group", "g", "--broker", broker.address)
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith("metaq: test/0-0: ")


def speak() -> None:
    for name in (
        "metaq.cli.follow",
        "metaq.client.offsets.offset_reset",
        logs.RAISED,
        "apscheduler.x",
    ):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            text = f"{logging.getLevelName(level)} {name}"
            logging.getLogger(name).log(level, "said %s", text)


def test_by_default_errors_are_shown_and_warnings_of_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A consumer's last error is raised too, and printed as the command's sentence."""
    logs.be_quiet()
    logs.be_quiet()
    speak()
    assert capsys.readouterr().err.splitlines() == [
        "metaq: said WARNING metaq.cli.follow",
        "metaq: said ERROR metaq.cli.follow",
        "metaq: said ERROR metaq.client.offsets.offset_reset",
        "metaq: said ERROR apscheduler.x",
    ]


@pytest.mark.parametrize(
    ("level", "ours", "theirs"), [(logging.INFO, 3, 2), (logging.DEBUG, 4, 4)]
)
def test_more_is_shown_on_request(
    capsys: pytest.CaptureFixture[str],
    level: int,
    ours: int,
    theirs: int,
) -> None:
    logs.be_quiet()
    logs.show(level)
    speak()
    lines = capsys.readouterr().err.splitlines()
    assert all(line.split()[2:4] == line.split()[5:] for line in lines)
    for name in ("metaq.cli.follow", "metaq.client.offsets.offset_reset", logs.RAISED):
        assert sum(line.endswith(name) for line in lines) == ours
    assert sum(line.endswith("apscheduler.x") for line in lines) == theirs


@pytest.mark.parametrize("level", [None, logging.DEBUG])
def test_a_name_in_a_line_makes_no_second_one(
    capsys: pytest.CaptureFixture[str], level: int | None
) -> None:
    """Nor a command for the terminal; a traceback has its own lines."""
    logs.be_quiet()
    if level is not None:
        logs.show(level)
    try:
        raise ValueError("a\x1b[2Jb")
    except ValueError:
        logging.getLogger("metaq.cli.follow").exception("no group: %s", "a\x1b\nfaked")
    first, *trace = capsys.readouterr().err.splitlines()
    assert first.endswith(r"no group: a\x1b\nfaked")
    assert trace[0].startswith("Traceback")
    assert trace[-1] == r"ValueError: a\x1b[2Jb"
