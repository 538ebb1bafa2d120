"""Child processes of a run: the broker and the floor programs."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 60.0

SERVER_INI = """\
[system]
brokerId=0
numPartitions=1
serverPort={port}
dataPath={data}
unflushThreshold=0
unflushInterval=10000
maxSegmentSize={segment_bytes}
maxTransferSize=1024*1024
[zookeeper]
zk.zkEnable=false
[topic=bench]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


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


class BrokerProcess:
    """A broker of its own process on a data directory that outlives it."""

    def __init__(self, data: Path, *, segment_bytes: int = 1 << 30) -> None:
        """Prepare a broker on `data`; its settings and log lie beside it."""
        self.port = free_port()
        self.data = data
        self.child: subprocess.Popen[bytes] | None = None
        data.mkdir(parents=True, exist_ok=True)
        self.ini = data.parent / f"{data.name}.ini"
        self.log = data.parent / f"{data.name}.log"
        self.ini.write_text(
            SERVER_INI.format(port=self.port, data=data, segment_bytes=segment_bytes)
        )

    def start(self) -> float:
        """Start it and wait for its first `version` reply; return the seconds."""
        started = time.perf_counter()
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "metaq", "broker", "--config", str(self.ini)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        while True:
            if self.child.poll() is not None:
                raise RuntimeError(f"broker did not start:\n{self.log.read_text()}")
            if self._answers():
                return time.perf_counter() - started
            if time.perf_counter() - started > START_TIMEOUT_S:
                raise RuntimeError("broker did not answer in time")
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as sock:
                sock.sendall(b"version 1\r\n")
                return sock.recv(100).startswith(b"result 200")
        except OSError:
            return False

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def kill(self) -> None:
        """Kill -9."""
        assert self.child is not None
        self.child.kill()
        self.child.wait()

    def stop(self) -> None:
        """SIGTERM, and wait."""
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        self.child.wait(30)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no VmRSS for {pid}")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
