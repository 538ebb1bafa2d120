"""`metaq local --replicas 3` as a process, with a real ZooKeeper."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import pytest
from click.testing import CliRunner

from metaq.cli.main import main
from metaq.client import Client
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(900)]

READY = re.compile(r"ready broker=(meta://\S+) zookeeper=(\S+) data=(\S+)\n")
REPLICA = re.compile(
    r"replica id=(\d) pid=(\d+) role=(leader|follower) address=(meta://\S+)"
    r" data=(\S+)\n"
)
PATIENCE_S: Final = 120.0


class LocalSet:
    """A running `metaq local --replicas 3`."""

    def __init__(self, data_dir: Path) -> None:
        self.errors = data_dir.parent / "stderr"
        words = ["local", "--port", "0", "--zk-port", "0", "--topic", "test=2"]
        words += ["--data-dir", str(data_dir), "--replicas", "3"]
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "metaq", *words],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.lines: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        ready = READY.fullmatch(self.line())
        assert ready is not None
        self.leader, self.zookeeper = ready[1], ready[2]
        self.replicas = dict(self.replica() for _ in range(3))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.decode())

    def line(self) -> str:
        """Return its next line."""
        return self.lines.get(timeout=PATIENCE_S)

    def replica(self) -> tuple[int, re.Match[str]]:
        """Return what its next line says of a replica."""
        line = self.line()
        found = REPLICA.fullmatch(line)
        assert found is not None, (line, self.errors.read_text())
        return int(found[1]), found

    def status(self) -> Any:
        """Return what `metaq replicas` says."""
        runner = CliRunner(env={"METAQ_ZOOKEEPER": self.zookeeper})
        done = runner.invoke(main, ["replicas", "--json"])
        return json.loads(done.stdout)

    def end(self) -> int:
        """Ask it to end; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def local_set(data_dir: Path) -> Iterator[LocalSet]:
    running = LocalSet(data_dir)
    try:
        yield running
    finally:
        running.kill()


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_set_runs_on_this_machine_and_mends_itself(tmp_path: Path) -> None:
    """A line for each replica; one that is killed comes back, and so does its line."""
    data = tmp_path / "data"
    with local_set(data) as running:
        assert sorted(running.replicas) == [1, 2, 3]
        roles = [found[3] for found in running.replicas.values()]
        assert sorted(roles) == ["follower", "follower", "leader"]
        assert len({found[4] for found in running.replicas.values()}) == 3
        assert len({found[5] for found in running.replicas.values()}) == 3
        wait_until(lambda: running.status()["in_sync"] == [1, 2, 3], PATIENCE_S)
        leader = running.status()["leader"]
        assert running.replicas[leader][3] == "leader"
        assert running.replicas[leader][4] == running.leader
        with Client(zookeeper=running.zookeeper) as client:
            with client.producer(timeout_s=60) as producer:
                producer.send_many("test", [b"before"] * 10)
                pid = int(running.replicas[leader][2])
                os.kill(pid, signal.SIGKILL)
                producer.send_many("test", [b"after"] * 10)
            number, again = running.replica()
            assert number == leader
            assert int(again[2]) != pid
            assert again.group(4, 5) == running.replicas[leader].group(4, 5)
            found = [message.data for message in client.browse("test")]
        assert sorted(found) == [b"after"] * 10 + [b"before"] * 10
        wait_until(lambda: running.status()["in_sync"] == [1, 2, 3], PATIENCE_S)
        pids = [row["id"] for row in running.status()["replicas"]]
        assert pids == [1, 2, 3]
        children = {int(f[2]) for f in running.replicas.values()} | {int(again[2])}
        assert running.end() == 0
        assert not any(map(is_alive, children))
    with local_set(data) as running, Client(zookeeper=running.zookeeper) as client:
        assert len(list(client.browse("test"))) == 20
        children = {int(f[2]) for f in running.replicas.values()}
        running.kill()
        # The kernel ends them with their parent.
        wait_until(lambda: not any(map(is_alive, children)), PATIENCE_S)


def test_a_new_pipeline_writes_to_a_set_without_transactions(tmp_path: Path) -> None:
    """Its flows were refused by the set, minutes after its start."""
    with local_set(tmp_path / "data") as running:
        runner = CliRunner(env={"METAQ_ZOOKEEPER": running.zookeeper})
        words = ["pipeline", "init", str(tmp_path / "errors"), "--create-topics"]
        done = runner.invoke(main, words)
        assert done.exit_code == 0, done.output
        assert "broker 0 is a replica set, which has no transactions" in done.output
    spec = (tmp_path / "errors/spark-pipeline.yml").read_text()
    assert 'metaq.delivery: "at-least-once"' in spec
