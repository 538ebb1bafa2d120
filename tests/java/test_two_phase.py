"""The example that pays and publishes: both or neither, wherever it is killed."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from metaq.client import Client
from tests.client.database_servers import DatabaseServer, postgresql
from tests.java.server import JavaBroker
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "two_phase.py"
EXAMPLE = runpy.run_path(str(PROGRAM))
STEPS = EXAMPLE["STEPS"]
DECIDED = STEPS[STEPS.index("commit-db") + 1 :]
"""Killed before one of these, the payment is made."""
TOPICS = {"payments": {"numPartitions": 3}}


class Shop(NamedTuple):
    """A database and a broker."""

    database: DatabaseServer
    zookeeper: str

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        url = self.database.url.replace("postgresql+psycopg", "postgresql")
        arguments = ["--database", url, "--zookeeper", self.zookeeper, *words]
        return subprocess.run(
            [sys.executable, str(PROGRAM), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def rows(self) -> list[tuple[object, ...]]:
        return self.database.execute("SELECT id, cents FROM payments ORDER BY id")

    def count(self, text: bytes, *, wanted: int) -> int:
        """Return how many messages have a text.

        MetaQ may answer a commit before it appends: those that are wanted are waited
        for.
        """
        with Client(self.zookeeper) as client:

            def found() -> int:
                return [one.data for one in client.browse("payments")].count(text)

            wait_until(lambda: found() >= wanted)
            return found()

    def prepared(self) -> int:
        """Return how many parts are prepared, on either side."""
        with (
            Client(self.zookeeper) as client,
            client.xa(qualifier=EXAMPLE["QUALIFIER"]) as xa,
        ):
            return len(xa.recover()) + len(
                self.database.execute("SELECT gid FROM pg_prepared_xacts")
            )


@pytest.fixture(scope="module", params=["metaq-1.4", "metaq-python"])
def shop(
    request: pytest.FixtureRequest,
    new_root: Callable[[], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shop]:
    """Return a shop with MetaQ's own broker, and with ours."""
    root = new_root()
    with contextlib.ExitStack() as stack:
        home = tmp_path_factory.mktemp("shop")
        if request.param == "metaq-python":
            stack.enter_context(own_broker(home / "data", root))
        else:
            jars = request.getfixturevalue("server_jars")
            stack.enter_context(JavaBroker(jars, home / "java", root, TOPICS))
        yield Shop(stack.enter_context(postgresql()), root)


def own_broker(data: Path, zookeeper: str) -> BrokerProcess:
    settings = {
        "zk.zkEnable": "true",
        "zk.zkConnect": zookeeper,
        "hostName": "127.0.0.1",
    }
    words = [w for key, text in settings.items() for w in ("--set", f"{key}={text}")]
    return BrokerProcess(data, topic="payments", partition_count=3, arguments=words)


def test_a_payment_is_a_row_and_a_message(shop: Shop) -> None:
    """Made once, however often it is asked for."""
    for _ in range(2):
        done = shop.run("pay", "a-first", "250")
        assert done.returncode == 0, done.stderr
    assert ("a-first", 250) in shop.rows()
    assert shop.count(b"a-first 250", wanted=1) == 1
    assert shop.prepared() == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_before_any_step_leaves_both_or_neither(shop: Shop, step: str) -> None:
    """Recovery finishes the job; a payment that was not made can be made again."""
    payment = f"crash-{step}"
    killed = shop.run("--crash-before", step, "pay", payment, "7")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert step == "end" or not shop.count(b"%s 7" % payment.encode(), wanted=0)
    done = shop.run("recover")
    assert done.returncode == 0, done.stderr
    assert shop.prepared() == 0
    is_paid = (payment, 7) in shop.rows()
    assert is_paid == (step in DECIDED)
    assert shop.count(b"%s 7" % payment.encode(), wanted=is_paid) == is_paid
    again = shop.run("pay", payment, "7")
    assert again.returncode == 0, again.stderr
    assert (payment, 7) in shop.rows()
    assert shop.count(b"%s 7" % payment.encode(), wanted=1) == 1
