"""MetaQ's own broker, unmodified, in a process of its own: `server.ini` and its jars.

It says what it does in `java.log`. Its home is a directory of the tests.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from metaq.testing.servers import reserve_port
from metaq.zk.embedded import find_java
from tests.java.jvm import QUICK_START, write_log4j_properties
from tests.java.talk import Talk

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
MAIN = "com.taobao.metamorphosis.server.MetamorphosisStartup"

Settings = Mapping[str, Any]
"""Keys of a section of server.ini, and their values."""

SYSTEM: Settings = {
    "hostName": "127.0.0.1",
    "numPartitions": 1,
    "unflushThreshold": 0,
    "unflushInterval": 10_000,
    "maxSegmentSize": "1024*1024",
    "maxTransferSize": "1024*1024",
}


def server_ini(
    zookeeper: str, data: Path, topics: Mapping[str, Settings], system: Settings
) -> str:
    """Return a file that both brokers run with.

    Args:
        zookeeper: connection string; the root in it exists.
        data: data directory of the broker.
        topics: topic → its keys.
        system: keys of the broker; they win over `SYSTEM`.
    """
    sections: dict[str, Settings] = {
        "system": {**SYSTEM, "dataPath": data, **system},
        "zookeeper": {
            "zk.zkConnect": zookeeper,
            "zk.zkSessionTimeoutMs": 3000,
            "zk.zkSyncTimeMs": 100,
        },
    }
    sections |= {f"topic={topic}": keys for topic, keys in topics.items()}
    lines = []
    for name, keys in sections.items():
        lines += [f"[{name}]", *(f"{key}={value}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def metaq(*words: str) -> str:
    """Run a command of ours that has to succeed; return what it prints."""
    command = [sys.executable, "-m", "metaq", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class JavaBroker:
    """A broker started any number of times on one directory and port.

    Lifecycle: a context manager that starts it, and stops what runs at the end.
    """

    def __init__(
        self,
        jars: Sequence[Path],
        home: Path,
        zookeeper: str,
        topics: Mapping[str, Settings],
        system: Settings | None = None,
        *,
        java_options: Sequence[str] = QUICK_START,
    ) -> None:
        self.port = reserve_port(self)
        self.address = f"127.0.0.1:{self.port}"
        self.zookeeper = zookeeper
        self.data = home / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        self.log = home / "java.log"
        self._home = home
        classpath = os.pathsep.join(map(str, (home, *jars)))
        (home / "conf").mkdir()
        self.ini = home / "conf" / "server.ini"
        system = {"brokerId": 0, "serverPort": self.port, **(system or {})}
        self.ini.write_text(server_ini(zookeeper, self.data, topics, system))
        write_log4j_properties(home)
        self._command = [
            find_java(), *java_options, f"-Duser.home={home}",
            "-cp", classpath, MAIN, "-f", str(self.ini),
        ]  # fmt: skip
        self._child: subprocess.Popen[bytes] | None = None
        self._said = 0

    def start(self) -> None:
        """Start it, and wait until it answers, is registered and has recovered."""
        self.launch()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.has_recovered:
            assert self.is_running, self.read_log()
            assert time.monotonic() < deadline_s, self.read_log()
            time.sleep(0.02)

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        self._said = len(self.read_log())
        with (self._home / "java.err").open("ab") as err:
            self._child = subprocess.Popen(self._command, stdout=err, stderr=err)

    @property
    def has_recovered(self) -> bool:
        """Whether the end of its last start is in its log."""
        return (
            "Start metamorphosis server successfully" in self.read_log()[self._said :]
        )

    def stop(self) -> None:
        """Ask it to end (SIGTERM), and wait."""
        child = self._running()
        child.send_signal(signal.SIGTERM)
        child.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill it as the kernel does (SIGKILL)."""
        child = self._running()
        child.kill()
        child.wait()

    @property
    def pid(self) -> int:
        """Return the id of the process that was started last."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._running().poll() is None

    def read_log(self) -> str:
        """Return what it has logged so far."""
        return self.log.read_text() if self.log.exists() else ""

    def talk(self) -> Talk:
        """Return a connection to it."""
        return Talk(self.port)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._child is not None, "never started"
        return self._child

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._child is not None and self._child.poll() is None:
            self.stop()
