"""The load of a work queue, the same for ours and the peers: producer and workers.

    python -m bench.queue_load MODULE produce|work JOB

Each module has `produce(job)` and `work(job)`, written for its client. Each runs in its
own process; they and the bench share numbers in a mapped file (`Job.open_board`).
"""

import importlib
import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from subprocess import Popen

from bench.processes import ROOT, cpu_seconds

TICK_S = 0.0002
POLL_S = 0.001
START_TIMEOUT_S = 60.0
ROUND_TIMEOUT_S = 300.0
SETTLE_S = 0.3
"""Pause before the clock starts, in which ready workers begin to wait for messages."""
STAMP_BYTES = 20
BEGUN, PRODUCER, WORKERS, DONE, FIRST_DELAY = range(5)
"""Indexes on the board: clock started, producer ready, ready workers, acks, delays."""


@dataclass(frozen=True, slots=True)
class Job:
    """Parameters of a round, as its processes get them."""

    count: int
    workers: int
    prefetch: int
    rate: int = 0
    """Messages per second, each with its send time; 0: as fast as possible."""
    lines: str = ""
    """Path of the file with the lines to send."""
    address: str = ""
    board: str = ""

    def open_board(self) -> memoryview:
        """Map the shared numbers of a round; each is written by one process."""
        size = 8 * (FIRST_DELAY + self.count)
        with Path(self.board).open("a+b") as file:
            file.truncate(size)
            return memoryview(mmap.mmap(file.fileno(), size)).cast("q")


class Feed:
    """Messages of the producer, at the rate of the job."""

    def __init__(self, job: Job) -> None:
        self._board = job.open_board()
        self._lines = cycle(Path(job.lines).read_bytes().split(b"\n"))
        self.left = job.count
        self.rate = job.rate
        self._sent = 0
        self._begin_s = 0.0

    def first(self) -> bytes:
        """Return the message that is stored before the clock starts."""
        self.left -= 1
        return b"0" * STAMP_BYTES + next(self._lines)

    def wait(self) -> None:
        """Report ready, and wait for the start of the clock."""
        self._board[PRODUCER] = 1
        while not self._board[BEGUN]:
            time.sleep(POLL_S)
        self._begin_s = time.monotonic()

    def take(self, most: int) -> list[bytes]:
        """Return at most `most` messages that are due."""
        count = min(most, self.left)
        if self.rate:
            due = int((time.monotonic() - self._begin_s) * self.rate) + 1
            count = max(0, min(count, due - self._sent))
        self._sent += count
        self.left -= count
        if not self.rate:
            return [next(self._lines) for _ in range(count)]
        stamp = b"%020d" % time.monotonic_ns()
        return [stamp + next(self._lines)[STAMP_BYTES:] for _ in range(count)]

    def batches(self, most: int) -> Iterator[list[bytes]]:
        """Yield batches of at most `most` messages until the end."""
        while self.left:
            if batch := self.take(most):
                yield batch
            else:
                time.sleep(TICK_S)


class Tally:
    """Counts of the workers."""

    def __init__(self, job: Job) -> None:
        self._board = job.open_board()
        self._is_stamped = bool(job.rate)
        self._next = FIRST_DELAY

    def ready(self) -> None:
        """Count a worker that is ready."""
        self._board[WORKERS] += 1

    def deliver(self, data: bytes) -> None:
        """Record the time that a message took to a worker."""
        if self._is_stamped:
            self._board[self._next] = time.monotonic_ns() - int(data[:STAMP_BYTES])
            self._next += 1

    def done(self, count: int = 1) -> None:
        """Count acks."""
        self._board[DONE] += count


@dataclass(frozen=True, slots=True)
class Side:
    """A server and the module of its clients."""

    module: str
    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Round:
    """Result of a round."""

    per_second: float
    delays_ms: list[float]
    """Delays of all deliveries without those of the first half second."""


def run_round(side: Side, job: Job, directory: Path) -> Round:
    """Run one round; print its rate and used cores to standard error."""
    path = directory / f"board-{time.monotonic_ns()}"
    job = replace(job, address=side.address, board=str(path))
    board = job.open_board()

    def wait_until(is_met: Callable[[], object], timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while not is_met():
            assert time.monotonic() < end_s, (side, board[:FIRST_DELAY].tolist())
            time.sleep(POLL_S)

    with ExitStack() as stack:

        def start(role: str) -> Popen[bytes]:
            command = [sys.executable, "-m", "bench.queue_load", side.module, role]
            command.append(json.dumps(asdict(job)))
            child = stack.enter_context(Popen(command, cwd=ROOT))
            stack.callback(child.kill)
            return child

        workers = start("work")
        wait_until(lambda: board[WORKERS] == job.workers, START_TIMEOUT_S)
        producer = start("produce")
        wait_until(lambda: board[PRODUCER] and board[DONE] == 1, START_TIMEOUT_S)
        time.sleep(SETTLE_S)
        pids = (side.pid, producer.pid, workers.pid)
        before = [cpu_seconds(pid) for pid in pids]
        begin_s = time.perf_counter()
        board[BEGUN] = 1
        wait_until(lambda: board[DONE] >= job.count, ROUND_TIMEOUT_S)
        seconds = time.perf_counter() - begin_s
        used = [cpu_seconds(pid) for pid in pids]
        producer.wait(START_TIMEOUT_S)
        workers.terminate()
        workers.wait(START_TIMEOUT_S)
    per_second = (job.count - 1) / seconds
    shares = [(b - a) / seconds for a, b in zip(before, used, strict=True)]
    print(
        f"  {side.module}: {per_second:,.0f}/s; cores of broker, producer, workers:",
        *(f"{share:.2f}" for share in shares),
        file=sys.stderr,
    )
    path.unlink()
    first = FIRST_DELAY + max(1, job.rate // 2)
    return Round(per_second, [one / 1e6 for one in board[first:]])


def main() -> None:
    module, role, words = sys.argv[1:]
    getattr(importlib.import_module(f"bench.{module}"), role)(Job(**json.loads(words)))


if __name__ == "__main__":
    main()
