"""Drivers that may be killed, and the account of what was to arrive."""

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from metaq.spark.versions import HAS_LIMITS
from metaq.testing.embedded import EmbeddedBroker
from tests.conftest import LATE_WORKER, LATE_WORKER_TRIES
from tests.rigs.fork_server import executable
from tests.sampling import sample
from tests.spark.brokers import publish, stored, tp
from tests.spark.kills.driver import ANSWER
from tests.spark.kills.steps import (
    DIRECTORY,
    DRIVER_GROUP,
    Order,
    give_orders,
    is_done,
)

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300.0
ROUNDS = int(os.environ.get("METAQ_KILL_ROUNDS", "1"))
"""Times that steps are chosen to be passed with a death."""
ERRORS = "driver.log"
OWN_FORMAT = pytest.mark.skipif(
    not HAS_LIMITS,
    reason="the dying format takes the place of ours as it is from PySpark 4.2 on",
)
"""Of tests that use it."""
DRIVER_MARKS = [
    pytest.mark.slow,
    pytest.mark.crash,
    OWN_FORMAT,
    pytest.mark.zookeeper,
    pytest.mark.timeout(2400 * ROUNDS),
]
"""Of tests that kill drivers of Spark, whose mark is in their files."""
MEND_S = 0.05
"""Interval of the looks after servers."""
MASTER = "local[2,3]"
"""Of drivers; tasks that die are run again."""
CLUSTER = "local-cluster[2,1,1024]"
"""Of drivers whose executors are processes of their own."""


class DriverDied(Exception):
    """It was killed, or ended by itself."""


class Driver:
    """A Spark driver in a process of its own."""

    def __init__(
        self, directory: Path, master: str, *, python: str = sys.executable
    ) -> None:
        self._directory = directory
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYSPARK_PYTHON": executable(),
            DIRECTORY: str(directory),
        }
        with (directory / ERRORS).open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "tests.spark.kills.driver", master],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.is_ready = True
        """Whether it has answered, and is not dead."""
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, job: str, **words: Any) -> dict[str, Any]:
        """Run a job and return its answer: `done`, or `error`.

        A job that failed for a Python that Spark did not wait for is run again.

        Raises:
            DriverDied: There is no answer, and there will be none.
        """
        assert self._process.stdin is not None
        self.is_ready = False
        # It leads its group, and its JVM is in it: who is to kill the driver may know
        # no other one, whichever was started last.
        group = self._directory / DRIVER_GROUP
        group.write_text(json.dumps(self._process.pid))
        for _ in range(LATE_WORKER_TRIES):
            self._process.stdin.write(json.dumps({"job": job, **words}) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
            if LATE_WORKER not in answer.get("error", ""):
                break
        self.is_ready = True
        return answer

    def close(self) -> None:
        """End it, no matter what it does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            with suppress(BrokenPipeError):
                end.close()

    def said(self) -> str:
        """Return the end of what the driver and its JVM have said."""
        return (self._directory / ERRORS).read_text(errors="replace")[-4000:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER))
        self._answers.put(None)

    def _answer(self) -> dict[str, Any]:
        line = self._answers.get(timeout=TIMEOUT_S)
        if line is None:
            raise DriverDied(self.said())
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def driver(directory: Path, master: str) -> Iterator[Driver]:
    """Run a driver inside the block."""
    started = Driver(directory, master)
    try:
        yield started
    finally:
        started.close()


class Drivers:
    """One driver for each master, which tests share until it dies."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: dict[str, Driver] = {}

    def get(self, master: str = MASTER) -> Driver:
        """Return a driver that is ready, started where there is none."""
        found = self._started.get(master)
        if found is None or not found.is_ready:
            self._end(master)
            found = self._started[master] = Driver(self._directory, master)
        return found

    def close(self) -> None:
        """End them all."""
        for master in [*self._started]:
            self._end(master)

    def _end(self, master: str) -> None:
        if master in self._started:
            self._started.pop(master).close()


def ask_mending(
    alive: Driver, job: str, words: dict[str, Any], mend: Callable[[], None]
) -> dict[str, Any]:
    """Run a job as `Driver.ask`, and mend what it needs and has killed."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(alive.ask, job, **words)
        while not answer.done():
            mend()
            time.sleep(MEND_S)
        return answer.result()


class Killing:
    """Victims, one after the other."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        self.rng = rng
        self._number = 0
        self._orders: list[Order] = []

    def order(self, step: str, victim: str, *, skip_max: int = 0) -> None:
        """Have a process die at a step, the first time or a later one."""
        self._give(self._next(step, victim, skip_max))

    def order_all(self, deaths: Iterable[tuple[str, str]]) -> None:
        """Have processes die at steps, one after the other."""
        self._give(*(self._next(step, victim, 0) for step, victim in deaths))

    def assert_done(self, answer: object = None) -> None:
        """The steps were reached often enough for all to die."""
        left = [order for order in self._orders if not is_done(self.directory, order)]
        assert not left, answer

    def some_of(self, steps: Sequence[T], count: int) -> list[T]:
        """Return `count` of the steps for each round, in any order.

        In a whole run each round has all of them.
        """
        return [s for _ in range(ROUNDS) for s in sample(steps, count, self.rng)]

    def _next(self, step: str, victim: str, skip_max: int) -> Order:
        self._number += 1
        order = Order(self._number, step, victim, self.rng.randint(0, skip_max))
        print(f"{order.number}: {victim} dies at '{step}' after {order.skip}")
        return order

    def _give(self, *orders: Order) -> None:
        self._orders = list(orders)
        give_orders(self.directory, *orders)


class Ledger:
    """Messages published to a topic of two partitions, and bounds of a copy."""

    def __init__(self, broker: EmbeddedBroker, topic: str) -> None:
        self._broker = broker
        self.topic = topic
        self.due: dict[str, list[bytes]] = {"0-0": [], "0-1": []}
        """Partition → messages that are to arrive, in order."""
        self._published = 0

    @property
    def count(self) -> int:
        """Messages that are to arrive."""
        return sum(map(len, self.due.values()))

    @property
    def texts(self) -> dict[str, list[str]]:
        """The same messages as JSON has them."""
        return {name: [d.decode() for d in due] for name, due in self.due.items()}

    def publish(self, count: int, *, is_due: bool = True) -> None:
        """Put so many messages into each partition."""
        for number, due in enumerate(self.due.values()):
            first = self._published
            data = [b"%d: %07d" % (number, n) for n in range(first, first + count)]
            publish(self._broker, data, partition=tp(number, topic=self.topic))
            if is_due:
                due += data
        self._published += count

    def check(self, copy: str, *, doubles_max: int = 0, is_whole: bool = True) -> int:
        """Hold a copy against the account; return how many messages are doubled.

        Args:
            copy: the topic.
            doubles_max: so many may be there once more than once.
            is_whole: everything has to be there; else the beginning of each partition.
        """
        doubled = 0
        for partition, messages in stored(self._broker, copy).items():
            there = [message.data for message in messages]
            first = list(dict.fromkeys(there))
            due = self.due[partition]
            assert first == (due if is_whole else due[: len(first)]), partition
            doubled += len(there) - len(first)
        assert doubled <= doubles_max
        return doubled


def die_in(dying: Driver, killing: Killing, job: str, words: dict[str, Any]) -> None:
    """Run a job in a driver that does not survive it."""
    with pytest.raises(DriverDied):
        killing.assert_done(dying.ask(job, **words))
    killing.assert_done()
