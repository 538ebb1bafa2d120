"""Runs commands, in this process or in one whose reader goes away."""

import io
import subprocess
import sys
from collections.abc import Callable
from typing import Final

import click
from click.testing import CliRunner, Result

from metaq.cli.main import main
from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, MessageId
from tests.brokers import AnyBroker
from tests.client.memory_broker import MemoryBroker

PATIENCE_S: Final = 60.0


def run(*words: str, broker: AnyBroker | MemoryBroker | None = None) -> Result:
    """Run `metaq WORDS`; with a broker, that one is asked."""
    target = ["--broker", f"127.0.0.1:{broker.port}"] if broker else []
    return CliRunner().invoke(main, [*words, *target])


class Terminal(io.BytesIO):
    """Input that is typed."""

    def isatty(self) -> bool:
        return True


def at_terminal(work: Callable[[], object], typed: bytes) -> Result:
    """Call the function of a command where a person types the answers."""
    return CliRunner().invoke(click.Command("it", callback=work), input=Terminal(typed))


def id_at(wall_ms: int, sequence: int = 0) -> MessageId:
    """Return the id of a message that was stored at some time."""
    return MessageId(((wall_ms - ID_ZERO_MS) << ID_MS_SHIFT) | sequence)


def assert_ends_without_reader(words: list[str], output: bytes) -> None:
    """Run `metaq WORDS`; when its output has been read, the reader goes away."""
    process = subprocess.Popen(
        [sys.executable, "-m", "metaq", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(len(output)) == output
            process.stdout.close()
            assert process.wait(PATIENCE_S) == 141
            assert process.stderr.read() == b""
        finally:
            process.kill()
