"""Options without an address are wrong usage: exit code 2, before any request."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from metaq.cli.main import main
from tests.brokers import AnyBroker, StartBroker
from tests.rigs.waiting import PATIENCE_S, wait_until


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["topics", "--zookeeper", ":::"], "--zookeeper"),
        (["topics", "--zookeeper", ""], "--zookeeper"),
        (["cat", "t", "--zookeeper", "here:99999"], "--zookeeper"),
        (["stats", "--zk-root", "a//b"], "--zk-root"),
        (["topics", "--broker", "here"], "--broker"),
        (["consume", "t", "--group", "a b"], "--group"),
        (["consume", "t", "--group", "a/b", "--broker", "127.0.0.1:1"], "--group"),
        (["offsets", "reset", "a b", "t", "--to", "latest"], "GROUP"),
        (["offsets", "copy", "a", "a.b"], "TO_GROUP"),
    ],
)
def test_an_option_that_says_nowhere_is_wrong_usage(
    words: list[str], option: str
) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2, done.output
    assert f"Invalid value for {option}" in done.output.replace("'", "")


def test_zookeeper_of_the_environment_does_not_matter_beside_a_broker(
    start_broker: StartBroker,
) -> None:
    broker = start_broker({"test": 1})
    words = ["topics", "--broker", broker.address]
    done = CliRunner().invoke(main, words, env={"METAQ_ZOOKEEPER": ":::"})
    assert (done.exit_code, "test" in done.output) == (0, True)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1})


@pytest.mark.slow
@pytest.mark.parametrize("is_typing", [True, False])
def test_what_is_said_after_ctrl_c_has_a_line_of_its_own(
    broker: AnyBroker, is_typing: bool
) -> None:
    """A terminal shows `^C` for the key, and stays on its line; a bar clears it."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "metaq", "produce", "test", "--broker", broker.address],
        stdin=slave if is_typing else subprocess.PIPE,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    typed = master if is_typing else process.stdin.fileno()  # type: ignore[union-attr]
    os.write(typed, b"line\n")
    wait_until(broker.stored)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    if process.stdin is not None:
        process.stdin.close()
    shown = b""
    with contextlib.suppress(OSError):  # everything was read, and no writer is left
        while True:
            shown += os.read(master, 1000)
    os.close(master)
    before = b"line\r\n\r\n" if is_typing else b"\x1b[1A\x1b[2K"
    assert before + b"1 message, 4 B" in shown
