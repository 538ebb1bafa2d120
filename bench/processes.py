"""The floor programs as child processes, and the resources of a process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.java.jars import NoJarsError, cache_dir

ROOT = Path(__file__).parents[1]
SERVER_JAVA = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")
"""Options of measured Java processes: those of Kafka's own script."""


@contextmanager
def floor(module: str, *args: object) -> Iterator[int]:
    """Run a floor program; yield the port that it prints."""
    child = subprocess.Popen(
        [sys.executable, "-m", f"bench.floor.{module}", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


@contextmanager
def killed(child: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill a child at the end of the block."""
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no VmRSS for {pid}")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def add_wheels(*wanted: str) -> None:
    """Make wheels of PyPI importable; they are cached beside the tests' jars.

    Raises:
        NoJarsError: a wheel is not available.
    """
    for one in wanted:
        place = cache_dir() / one
        if not place.exists():
            words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            done = subprocess.run(
                [*words, "--target", str(place), one],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise NoJarsError(f"pip gave no {one}: {done.stderr.strip()[-200:]}")
        if str(place) not in sys.path:
            sys.path.append(str(place))
