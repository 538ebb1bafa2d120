"""A broker in a child process, to be measured or killed."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from metaq.testing.servers import reserve_port

ROOT: Final = Path(__file__).parents[2]
"""Directory from which `python -m metaq` imports this package."""
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.005
"""Interval at which a starting broker is asked for its version."""

SERVER_INI: Final = """\
[system]
brokerId=7
numPartitions={partition_count}
serverPort={port}
dataPath={data}
unflushThreshold=0
unflushInterval=10000
maxSegmentSize={segment_bytes}
maxTransferSize=1024*1024
[zookeeper]
zk.zkEnable=false
"""


class BrokerProcess:
    """`metaq broker` as a child process, which can be restarted on the same directory.

    Lifecycle: a context manager that starts it, and stops it if it runs at the end.
    """

    def __init__(
        self,
        data: Path,
        *,
        topic: str,
        partition_count: int = 1,
        segment_bytes: int = 1 << 30,
        arguments: Sequence[str] = (),
        more_topics: Sequence[str] = (),
        index: str = "",
        program: Sequence[str] = ("metaq",),
    ) -> None:
        """Configure a broker; its settings and log are beside the data directory.

        Args:
            data: data directory; it outlives the process.
            topic: topic of the broker.
            partition_count: number of partitions of each topic.
            segment_bytes: size at which segments roll.
            arguments: further arguments of `metaq broker`, such as `--set`.
            more_topics: further topics.
            index: indexed names of all topics; "": none.
            program: module to run, and its own arguments.
        """
        self.port: Final = reserve_port(self)
        """Port of the listener, the same for every start."""
        self.data: Final = data
        """Data directory."""
        self.log: Final = data.parent / f"{data.name}.log"
        """File with the output of all its processes."""
        self._arguments = tuple(arguments)
        self._program = tuple(program)
        self._ini = data.parent / f"{data.name}.ini"
        self._child: subprocess.Popen[bytes] | None = None
        data.mkdir(parents=True, exist_ok=True)
        self._ini.write_text(
            SERVER_INI.format(
                partition_count=partition_count,
                port=self.port,
                data=data,
                segment_bytes=segment_bytes,
            )
            + "".join(
                f"[topic={name}]\nindex={index}\n" if index else f"[topic={name}]\n"
                for name in (topic, *more_topics)
            )
        )

    @property
    def pid(self) -> int:
        """Return the id of the process started last."""
        return self._started().pid

    def start(self) -> float:
        """Start it and wait for its first `version` reply; return the seconds.

        Raises:
            RuntimeError: it ended, or did not answer in time; the message has its log.
        """
        started_s = time.perf_counter()
        command = [sys.executable, "-m", *self._program, "broker"]
        command += ["--config", str(self._ini), *self._arguments]
        with self.log.open("ab") as log:
            child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        self._child = child
        while not self._answers():
            passed_s = time.perf_counter() - started_s
            if child.poll() is not None or passed_s > START_TIMEOUT_S:
                raise RuntimeError(f"no answer in {passed_s:.1f} s: {self.read_log()}")
            time.sleep(POLL_S)
        return time.perf_counter() - started_s

    def read_log(self) -> str:
        """Return the output of its processes so far."""
        return self.log.read_text()

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        child = self._started()
        child.kill()
        child.wait()

    def mend(self) -> None:
        """Restart it if it has ended."""
        if self._started().poll() is not None:
            self.start()

    def stop(self) -> int:
        """Send SIGTERM and wait; return the exit code."""
        child = self._started()
        child.send_signal(signal.SIGTERM)
        return child.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._child is not None and self._child.poll() is None:
            self.stop()

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._child is not None, "never started"
        return self._child

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as sock:
                sock.sendall(b"version 1\r\n")
                return sock.recv(100).startswith(b"result 200")
        except OSError:
            return False
