"""`metaq find`: the newest messages with a key, a header or an id."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from metaq.client import Client
from tests.brokers import AnyBroker, StartBroker
from tests.cli.runner import run


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    made = start_broker({"t": 2}, broker_id=7)
    with Client(**made.client_options) as client, client.producer() as producer:
        for number in range(12):
            key = f"k{number % 2}"
            producer.send(
                "t", b"m%d" % number, key=key, headers={"n": b"%d" % number},
                partition="7-1",
            )  # fmt: skip
    return made


@pytest.mark.slow
def test_the_newest_messages_are_printed_first(broker: AnyBroker) -> None:
    """Ten of them, or as many as were asked for."""
    result = run("find", "t", "--key", "k1", broker=broker)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "m11\nm9\nm7\nm5\nm3\nm1\n"
    result = run("find", "t", "--key", "k0", "--limit", "2", broker=broker)
    assert result.stdout == "m10\nm8\n"
    result = run("find", "t", "--header", "n=3", "--json", broker=broker)
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["key"] == "k1"


def test_nothing_found_is_an_exit_code(broker: AnyBroker) -> None:
    """It is no error that has a text."""
    result = run("find", "t", "--key", "none", broker=broker)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "")


@pytest.mark.parametrize(
    "words", [(), ("--key", "a", "--id", "5"), ("--header", "n"), ("--header", "=n")]
)
def test_what_makes_no_sense_is_refused(broker: AnyBroker, words: tuple[str]) -> None:
    """The usage says how it is meant."""
    result = run("find", "t", *words, broker=broker)
    assert result.exit_code == 2


def test_more_than_so_much_is_not_read(broker: AnyBroker) -> None:
    """The sentence says what to do."""
    result = run("find", "t", "--key", "none", "--read-max", "0", broker=broker)
    assert result.exit_code == 1
    assert "give it one (index=key)" in result.stderr


@pytest.mark.slow
def test_a_terminal_shows_what_is_read_and_then_the_messages(broker: AnyBroker) -> None:
    """The bar is gone before the first line, so that it gets between none."""
    address = f"127.0.0.1:{broker.port}"
    words = ["find", "t", "--key", "k0", "--limit", "2", "--broker", address]
    master, slave = os.openpty()
    with (
        os.fdopen(master, "rb", buffering=0) as terminal,
        os.fdopen(slave, "wb", buffering=0) as screen,
    ):
        subprocess.run(
            [sys.executable, "-m", "metaq", *words],
            stdout=screen,
            stderr=screen,
            env={**os.environ, "TERM": "xterm"},
            timeout=60,
            check=True,
        )
        screen.close()
        shown = bytearray()
        with contextlib.suppress(OSError):  # all that was written is read
            # A busy machine draws the bar often, and one read has 4 KiB at most.
            while some := terminal.read(65536):
                shown += some
    assert b"find" in shown
    assert shown.endswith(b"m10\r\nm8\r\n")
