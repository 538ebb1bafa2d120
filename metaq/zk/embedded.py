"""A real ZooKeeper server as a child process, for one machine and for tests.

Theory of operation: the server is Apache ZooKeeper itself, started from an installed
class path (PySpark's wheel contains all its jars). It runs in `<data_dir>` with one
listening socket on loopback. It guarantees that

* the server replies when `start` returns; if it cannot, the error has the end of its
  log;
* the server dies with its parent, even if SIGKILL kills the parent: the kernel then
  sends it SIGKILL (PR_SET_PDEATHSIG). This is bound to the parent *thread*, so `start`
  must be called on the main thread. A small Python program sets it up and then becomes
  Java by exec; doing so between fork and exec in our own process would be unsafe with
  threads;
* its disk usage is bounded: the log rolls, old snapshots are purged.

Its working directory is `<data_dir>`, so that no path, which may have unusual
characters, is written into Java's property files. Files there: `zoo.cfg` and the two
logging configurations, written from `server/` at each start; `zookeeper.log`, the
server's log; `zookeeper.out`, Java's output; `data/`, its data.
"""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from metaq.errors import CoordinationError
from metaq.fs import DIRECTORY_MODE

CLASSPATH_VARIABLE: Final = "METAQ_ZOOKEEPER_CLASSPATH"
JAVA_MAJOR_MIN: Final = 11
HEAP_MIB: Final = 128
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 5.0
POLL_INTERVAL_S: Final = 0.05
COMMAND_TIMEOUT_S: Final = 1.0
# A port found free may be in use by the time the server binds it.
START_TRIES: Final = 3
# Java's message, in the log of the server.
PORT_TAKEN: Final = "Address already in use"
# Java's stack trace for a port in use has 13 lines; a varying number of lines follow.
LOG_TAIL_LINES: Final = 40
LOOPBACK: Final = "127.0.0.1"

# PySpark's class path logs with log4j 2, ZooKeeper's own distribution with logback;
# each ignores the other's file.
CONFIGURATION: Final = ("zoo.cfg", "log4j2.properties", "logback.xml")

# Run by our own interpreter with -I -S: argv is [-c, parent's pid, program, ...].
_DIE_WITH_PARENT: Final = """\
import ctypes, os, signal, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
# The parent may have died before the line above.
if os.getppid() != parent:
    sys.exit(1)
os.execv(program[0], program)
"""


def dying_with_parent() -> list[str]:
    """Return a command prefix that makes a command, by absolute path, die with us.

    The started process becomes the command; start it on the main thread.
    """
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]


class EmbeddedZooKeeperError(CoordinationError):
    """The server cannot run; the message has the reason or the end of its log."""

    retriable = False


def find_classpath() -> str:
    """Return the class path of a ZooKeeper server.

    METAQ_ZOOKEEPER_CLASSPATH if set, else the jars in the `pyspark` package, which is
    located but not imported.

    Raises:
        EmbeddedZooKeeperError: neither exists.
    """
    given = os.environ.get(CLASSPATH_VARIABLE)
    if given:
        return given
    spec = importlib.util.find_spec("pyspark")
    for location in (spec and spec.submodule_search_locations) or ():
        jars = Path(location) / "jars"
        if any(jars.glob("zookeeper-*.jar")):
            return f"{jars}{os.sep}*"
    raise EmbeddedZooKeeperError(
        "no ZooKeeper server found: install metaq[spark], whose pyspark brings its"
        f" jars, set {CLASSPATH_VARIABLE} to the class path of one, or use one that"
        " runs (--set zk.zkConnect=HOST:PORT)"
    )


@lru_cache(maxsize=8)
def _java_major(java: str) -> int | None:
    """Return the major version of a `java` program, None if it does not run."""
    try:
        done = subprocess.run(  # noqa: S603  # found on PATH or named by JAVA_HOME
            [java, "-version"], capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # "1.8.0_402" is Java 8; "17.0.15", "21-ea" and "9" begin with the major version.
    match = re.search(rb'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match[1]) if match and done.returncode == 0 else None


def find_java() -> str:
    """Return a `java` program of version 11 or later, from JAVA_HOME or PATH.

    Raises:
        EmbeddedZooKeeperError: there is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    candidates = [str(Path(home) / "bin" / "java")] if home else []
    on_path = shutil.which("java")
    if on_path:
        candidates.append(on_path)
    found = []
    for java in candidates:
        major = _java_major(java)
        if major is not None and major >= JAVA_MAJOR_MIN:
            return java
        found.append(f"{java} is {f'version {major}' if major else 'not runnable'}")
    raise EmbeddedZooKeeperError(
        f"no Java runtime of version {JAVA_MAJOR_MIN} or later found"
        f" ({', '.join(found) or 'neither JAVA_HOME nor PATH has one'});"
        " on Debian and Ubuntu: apt-get install openjdk-17-jre-headless"
    )


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


class EmbeddedZooKeeper:
    """One server process and its data directory.

    Lifecycle: `start` and `stop` any number of times; the data stays. As a context
    manager it starts and stops once. Blocking; call it on the main thread.
    """

    def __init__(self, data_dir: str | os.PathLike[str], *, port: int = 0) -> None:
        """Create a server; it runs from `start`.

        Args:
            data_dir: its data directory; created if missing, and not to be shared while
                the server runs.
            port: TCP port on loopback; 0 picks a free one at the first start, and
                another one later only if that is in use.
        """
        self.data_dir = Path(data_dir).resolve()
        self._port_wanted = port
        self.port = port
        """The port it listens on; 0 until the first start if a free one is picked."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """`host:port`, as in zk.zkConnect."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None if it does not run."""
        return self._process.pid if self._process and self.is_running else None

    @property
    def is_running(self) -> bool:
        """Whether the process is alive (it may be paused)."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    # -- life -------------------------------------------------------------------------

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the server and wait until it replies; does nothing if it runs.

        Raises:
            EmbeddedZooKeeperError: Java or the jars are missing, the port is in use, or
                no reply came in time; no process is left running.
        """
        if self.is_running:
            return
        if threading.current_thread() is not threading.main_thread():
            # The server would be killed when this thread ends.
            raise RuntimeError("the embedded zookeeper is started on the main thread")
        # Jars installed by pip come before those of the system's packages.
        classpath, java = find_classpath(), find_java()
        deadline_s = time.monotonic() + timeout_s
        for attempt in range(START_TRIES):
            if self._port_wanted == 0 and (self.port == 0 or attempt):
                self.port = free_port()
            try:
                self._require_free_port()
                self._spawn(java, classpath)
                self._wait_until_serving(deadline_s)
            except EmbeddedZooKeeperError as error:
                self.kill()
                is_race = PORT_TAKEN in str(error)
                is_last = attempt == START_TRIES - 1
                if self._port_wanted or not is_race or is_last:
                    raise
            except BaseException:
                self.kill()
                raise
            else:
                return

    def stop(self) -> None:
        """Terminate the server, by SIGKILL if it takes too long, and reap it."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Kill the server (SIGKILL) and reap it; its data stays."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    # -- inside -----------------------------------------------------------------------

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            # Does nothing if the process was already reaped.
            self._process.send_signal(number)

    def _require_free_port(self) -> None:
        # Another ZooKeeper on this port would reply instead of ours.
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, self.port))
            except OSError as error:
                raise EmbeddedZooKeeperError(
                    f"zookeeper cannot listen on {self.address}: {error.strerror}"
                ) from error

    def _write_configuration(self) -> None:
        self.data_dir.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        for name in CONFIGURATION:
            text = Path(__file__).with_name("server").joinpath(name).read_text()
            (self.data_dir / name).write_text(text.replace("{port}", str(self.port)))

    def _spawn(self, java: str, classpath: str) -> None:
        self._write_configuration()
        command = [
            *dying_with_parent(),
            java,
            f"-Xmx{HEAP_MIB}m",
            "-XX:+UseSerialGC",
            # The thread that waits for requests also reads them: one wake-up less.
            "-Dzookeeper.nio.numWorkerThreads=0",
            "-Dlog4j2.configurationFile=log4j2.properties",
            "-Dlogback.configurationFile=logback.xml",
            "-cp", classpath,
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            "./zoo.cfg",
        ]  # fmt: skip
        with (self.data_dir / "zookeeper.out").open("wb") as out:
            self._process = subprocess.Popen(  # noqa: S603  # no shell, our own words
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.data_dir,
                # On Ctrl-C in the terminal, the parent stops it in its own order.
                start_new_session=True,
            )

    def _wait_until_serving(self, deadline_s: float) -> None:
        while not self._is_serving():
            assert self._process is not None
            code = self._process.poll()
            if code is not None:
                raise EmbeddedZooKeeperError(
                    f"zookeeper ended with code {code} before it answered"
                    f" on {self.address}\n{self._log_tail()}"
                )
            if time.monotonic() >= deadline_s:
                raise EmbeddedZooKeeperError(
                    f"zookeeper did not answer on {self.address} in time"
                    f"\n{self._log_tail()}"
                )
            time.sleep(POLL_INTERVAL_S)

    def _is_serving(self) -> bool:
        try:
            with socket.create_connection(
                (LOOPBACK, self.port), COMMAND_TIMEOUT_S
            ) as connection:
                connection.settimeout(COMMAND_TIMEOUT_S)
                connection.sendall(b"srvr")
                answer = b""
                while chunk := connection.recv(4096):
                    answer += chunk
        except OSError:
            return False
        # A server that has not loaded its data replies that it is not serving requests.
        return b"Mode: " in answer

    def _log_tail(self) -> str:
        lines: list[str] = []
        for name in ("zookeeper.log", "zookeeper.out"):
            path = self.data_dir / name
            if path.exists():
                text = path.read_text(errors="replace")
                lines += text.splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(lines) or "(no output)"
