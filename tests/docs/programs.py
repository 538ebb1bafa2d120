"""Programs of the pages: their blocks as files, and how they are run and ended."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kazoo.client import KazooClient

from tests.docs.blocks import ROOT

ADDRESS = "127.0.0.1:2181"
"""ZooKeeper in the pages."""
WAIT_S = 120.0


def python_files(text: str) -> dict[str, str]:
    """Return the blocks of a page that name a file in their first line, in order."""
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL))


@contextmanager
def local_zookeeper(directory: Path, *settings: str) -> Iterator[str]:
    """Run `metaq local`, as the pages say; give its ZooKeeper's address."""
    command = [sys.executable, "-m", "metaq", "local", "--port", "0", "--zk-port", "0"]
    command += ["--data-dir", str(directory / "data")]
    command += [word for setting in settings for word in ("--set", setting)]
    with (directory / "log").open("wb") as log:
        local = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log)
    try:
        assert local.stdout is not None
        line = local.stdout.readline().decode()
        assert line.startswith("ready "), (directory / "log").read_text()
        words = dict(word.partition("=")[::2] for word in line.split()[1:])
        yield words["zookeeper"]
    finally:
        local.terminate()
        local.wait(WAIT_S)
        assert local.stdout is not None
        local.stdout.close()


def make_chroot(zookeeper: str, name: str) -> str:
    """Make a tree of its own in a ZooKeeper; return its address."""
    client = KazooClient(zookeeper)
    client.start()
    client.ensure_path(f"/{name}")
    client.stop()
    client.close()
    return f"{zookeeper}/{name}"


class Program:
    """A program of a page while it runs; it is killed at the end of the block."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self._output = directory / f"output-{time.monotonic_ns()}"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", *command],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        """Return what it has written so far, its errors too."""
        return self._output.read_text()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until it has written a text so often."""
        end_s = time.monotonic() + WAIT_S
        while self.output().count(text) < count:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end_s, f"no {text!r}: {self.output()}"
            time.sleep(0.02)

    def end(self, number: int | None = None) -> int:
        """Send a signal, if any, and return its exit code; negative if one ended it."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


INTERRUPTED = {-signal.SIGINT, 130}
"""Exit codes of a program that Ctrl-C ended."""
