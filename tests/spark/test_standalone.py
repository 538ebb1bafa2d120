"""A standalone cluster of Spark, with this package sent along as docs/spark.md says.

A master and two workers are processes of their own, as PySpark's wheel brings them; the
driver is another one. All of it runs once for the tests of this module.
"""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

from metaq.testing.embedded import EmbeddedBroker
from metaq.zk.embedded import EmbeddedZooKeeper
from tests.spark.test_executors import RealZooKeeper

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
WORKERS = 2
COUNT = 20_000
START_S = 120.0
JOB_S = 400.0


@contextmanager
def daemon(log: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of Spark's daemons, which writes to a file."""
    env = {**os.environ, "SPARK_DAEMON_MEMORY": "192m", "SPARK_LOCAL_IP": "127.0.0.1"}
    with log.open("wb") as out:
        child = subprocess.Popen(
            [str(SPARK_CLASS), f"org.apache.spark.deploy.{name}", *arguments],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """Run a master and its workers; yield the master's URL."""
    log = directory / "master.log"
    with ExitStack() as stack:
        where = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        master = stack.enter_context(daemon(log, "master.Master", *where))
        until_s = time.monotonic() + START_S
        while (
            found := re.search(r"spark://127\.0\.0\.1:\d+", log.read_text())
        ) is None:
            assert master.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.1)
        for number in range(WORKERS):
            size = ["--cores", "1", "--memory", "600m"]
            place = ["--work-dir", str(directory / f"worker-{number}")]
            stack.enter_context(
                daemon(
                    directory / f"worker-{number}.log",
                    "worker.Worker",
                    *where,
                    *size,
                    *place,
                    found[0],
                )
            )
        yield found[0]


def zip_packages(path: Path) -> None:
    """Zip the package and the names by which PySpark finds its formats."""
    with zipfile.ZipFile(path, "w") as zipped:
        sources = [*ROOT.glob("pyspark_metaq*.py"), *(ROOT / "metaq").rglob("*.py")]
        for source in sources:
            zipped.write(source, source.relative_to(ROOT))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the job on a cluster, and return what it prints."""
    place = tmp_path_factory.mktemp("standalone")
    zip_packages(place / "metaq.zip")
    with ExitStack() as stack:
        zookeeper = stack.enter_context(EmbeddedZooKeeper(place / "zookeeper"))
        broker = EmbeddedBroker(
            place / "broker",
            topics={"many": 4, "copy": 2},
            zookeeper=RealZooKeeper(zookeeper.address),  # type: ignore[arg-type]  # it will do
        )
        broker.start()
        stack.callback(broker.stop)
        master = stack.enter_context(cluster(place))
        job = ["-m", "tests.spark.standalone_job", master, zookeeper.address]
        done = subprocess.run(
            [sys.executable, *job, str(place / "metaq.zip"), str(place), str(COUNT)],
            cwd=ROOT,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=JOB_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


WHOLE = {"rows": COUNT, "distinct": COUNT, "sum": COUNT * (COUNT - 1) // 2}


def test_executors_have_the_packages_that_were_sent(told: dict[str, Any]) -> None:
    """They come from the zip, also where others are installed."""
    assert {file.partition("metaq.zip")[2] for file in told["files"]} == {
        "/metaq/spark/source/task_reader.py"
    }


def test_what_executors_write_is_read_by_executors(told: dict[str, Any]) -> None:
    """Rows with keys, at least once, and a batch read of all."""
    assert told["batch"] == WHOLE


def test_a_stream_writes_exactly_once_and_is_archived(told: dict[str, Any]) -> None:
    """In more than one micro-batch; the archive has each message of the copy."""
    assert told["batches"] >= 2
    assert told["archive"] == WHOLE
