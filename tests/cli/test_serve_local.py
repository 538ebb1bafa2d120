"""`metaq local` as a process, with a real ZooKeeper."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from metaq.cli.main import main
from tests.rigs.fork_server import executable
from tests.rigs.ports import reserved_port
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow]

READY = re.compile(
    r"ready broker=meta://127\.0\.0\.1:(\d+) zookeeper=(127\.0\.0\.1:\d+|none)"
    r" data=(\S+)\n"
)
TIMEOUT_S = 120.0
METAQ = [sys.executable, "-m", "metaq"]
LINES = b"first\n\nwith CR\r\n\xff\x00 binary\nlast\n"


class Done(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: bytes
    stderr: bytes


def run_metaq(*words: str, data: bytes = b"", **environment: str) -> Done:
    """Run a command as a process that ends by itself."""
    done = subprocess.run(
        [executable(), "-m", "metaq", *words],
        input=data,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=TIMEOUT_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Local:
    """A running `metaq local`."""

    def __init__(self, data_dir: Path, *words: str) -> None:
        command = [*METAQ, "local", "--port", "0", "--zk-port", "0"]
        self.errors = data_dir.parent / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--data-dir", str(data_dir), *words],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().decode()
        match = READY.fullmatch(self.line)
        assert match is not None, (self.line, self.errors.read_text())
        self.port, self.zookeeper, self.data = int(match[1]), match[2], match[3]

    def metaq(self, *words: str) -> Done:
        """Run a command that finds this ZooKeeper, in this process."""
        runner = CliRunner(env={"METAQ_ZOOKEEPER": self.zookeeper})
        done = runner.invoke(main, words)
        return Done(done.exit_code, done.stdout_bytes, done.stderr_bytes)

    def produce(self, *words: str, data: bytes) -> Done:
        """Run `metaq produce` as a process: it reads the descriptor of its input."""
        environment = {"METAQ_ZOOKEEPER": self.zookeeper}
        return run_metaq("produce", *words, data=data, **environment)

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, bytes]:
        """Signal it; return its exit code and what else it printed."""
        self.process.send_signal(number)
        rest, _errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, rest


@contextmanager
def local(data_dir: Path, *words: str) -> Iterator[Local]:
    running = Local(data_dir, *words)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """Return one that runs as long as the tests of this module; none harms it."""
    topics = [f"--topic={topic}=2" for topic in ("closed", "typed", "large", "shown")]
    with (
        reserved_port() as port,
        local(
            tmp_path_factory.mktemp("served") / "data",
            *("--set", f"httpPort={port}"),
            *topics,
        ) as broker,
    ):
        yield broker
        assert broker.end() == (0, b"")


def java_of(pid: int) -> list[int]:
    """Return the Java processes whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = path.read_text().rsplit(")", 1)
        except OSError:
            continue
        if "(java" in name and int(rest.split()[1]) == pid:
            found.append(int(path.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process listens, as the kernel writes them."""
    held = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            held.add(os.readlink(path))
    found = set()
    for name in ("tcp", "tcp6"):
        lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        for _number, here, _remote, state, *rest in map(str.split, lines):
            if state == "0A" and f"socket:[{rest[5]}]" in held:
                found.add(here.split(":")[0])
    return found


def test_it_listens_on_loopback_alone(served: Local) -> None:
    """Broker, its HTTP port and ZooKeeper: no other machine gets in."""
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    (java,) = java_of(served.process.pid)
    for pid in (served.process.pid, java):
        assert listening(pid)
        assert listening(pid) <= loopback


def test_it_starts_serves_stops_and_starts_again(data_dir: Path) -> None:
    """One line when ready; every byte comes back; a restart has all of it."""
    with local(data_dir, "--topic", "orders=3") as broker:
        assert broker.data == str(data_dir)
        done = broker.produce("test", "--partition", "0-1", data=LINES)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(b"5 messages, ")
        assert broker.metaq("cat", "test").stdout == LINES
        topics = broker.metaq("topics").stdout
        assert topics.count(b"orders\t") == 3
        done = broker.metaq("stats")
        assert b"total_messages 5" in done.stdout
        assert broker.metaq("verify", str(data_dir)).returncode == 0
        assert broker.end() == (0, b"")
    assert java_of(broker.process.pid) == []
    done = broker.metaq("verify", str(data_dir))
    assert (done.returncode, done.stdout[:12]) == (0, b"1 partition,")
    with reserved_port(broker.port), local(data_dir) as again:
        assert again.metaq("cat", "test").stdout == LINES
        assert again.port == broker.port
        assert again.end(signal.SIGINT) == (0, b"")


def test_administration_reaches_the_broker(served: Local) -> None:
    """Close, refuse, open, reload, through the socket in the data directory."""
    place = ["--data-dir", served.data]
    done = served.metaq("partitions", "close", "closed", *place)
    assert done.stdout == b"closed: closed partitions: 0, 1\n", done.stderr
    for timeout_s in (1, 4, 16):  # a busy machine may take longer to ask it
        words = ["closed", "--timeout", str(timeout_s)]
        done = served.produce(*words, data=LINES)
        assert done.returncode == 1
        if b"has been closed" in done.stderr:
            break
    assert b"has been closed" in done.stderr
    done = served.metaq("partitions", "open", "closed", *place)
    assert done.stdout == b"closed: closed partitions: none\n"
    assert served.produce("closed", data=LINES).returncode == 0
    done = served.metaq("reload", *place)
    assert done.returncode == 0, done.stderr
    who, what = done.stdout.decode().splitlines()
    assert who.startswith("broker 0 at meta://127.0.0.1:")
    assert who.endswith(f", data directory {served.data}")
    assert what == "reloaded: no topic changed"
    for word, text in (
        ("status", f"broker_id 0\naddress meta://127.0.0.1:{served.port}\n"),
        ("logs", "\topen\tFalse\t0\t"),
        ("directories", f"{served.data}\tonline\t-\t"),
        ("scrub", "pass "),
    ):
        done = served.metaq("brokers", word, *place)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout.decode()


@pytest.mark.crash
def test_a_kill_leaves_no_zookeeper_and_the_next_start_is_quick(
    data_dir: Path,
) -> None:
    """After kill -9 no Java process is left; acknowledged lines are there again.

    The next start does not wait for the end of the old session.
    """
    session = ("--set", "zk.zkSessionTimeoutMs=60000")
    with local(data_dir, *session) as broker:
        done = broker.produce("test", data=LINES)
        assert done.returncode == 0
        servers = java_of(broker.process.pid)
        assert len(servers) == 1
        broker.end(signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, servers)))
    started_s = time.monotonic()
    with local(data_dir, *session) as again:
        assert time.monotonic() - started_s < 45
        assert again.metaq("cat", "test").stdout == LINES
        again.end()


@pytest.mark.crash
def test_it_ends_with_one_sentence_when_its_zookeeper_ends(data_dir: Path) -> None:
    """A broker that clients cannot find any more does not go on alone."""
    with local(data_dir) as running:
        (java,) = java_of(running.process.pid)
        os.kill(java, signal.SIGKILL)
        running.process.communicate(timeout=TIMEOUT_S)
        assert running.process.returncode == 1
        last = running.errors.read_text().splitlines()[-1]
        assert "ZooKeeper ended by itself; its log is in" in last
    with local(data_dir) as again:
        assert again.end()[0] == 0


def test_one_directory_serves_one_at_a_time(served: Local) -> None:
    """A second one is refused with one sentence; the first goes on."""
    words = ["--port", "0", "--zk-port", "0", "--data-dir", served.data]
    done = run_metaq("local", *words)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"metaq: ")
    assert done.stderr.count(b"\n") == 1
    assert served.metaq("stats").returncode == 0


def test_ctrl_c_ends_produce_with_what_it_has(served: Local) -> None:
    """Lines that were read are acknowledged and counted; the exit code is 130."""
    process = subprocess.Popen(
        [*METAQ, "produce", "typed", "--zookeeper", served.zookeeper],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\nhalf a li")
    process.stdin.flush()
    deadline_s = time.monotonic() + TIMEOUT_S
    while served.metaq("cat", "typed").stdout != b"one\ntwo\n":
        assert time.monotonic() < deadline_s
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert output.startswith(b"2 messages, 6 B in ")
    assert errors == b""


def test_a_reader_that_goes_away_ends_cat_quietly(served: Local) -> None:
    """A closed pipe is no error message; the exit code is the shells' 141."""
    served.produce("large", data=b"x" * 100 + b"\n" + b"y\n" * 100_000)
    process = subprocess.Popen(
        [*METAQ, "cat", "large", "--zookeeper", served.zookeeper],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(TIMEOUT_S) == 141


def test_it_runs_without_zookeeper_when_told_so(data_dir: Path) -> None:
    """zk.zkEnable=false: no server is started; clients name the broker."""
    with local(data_dir, "--set", "zk.zkEnable=false") as broker:
        assert broker.zookeeper == "none"
        assert java_of(broker.process.pid) == []
        direct = ["--broker", f"127.0.0.1:{broker.port}"]
        assert broker.produce("test", *direct, data=LINES).returncode == 0
        assert broker.metaq("cat", "test", *direct).stdout == LINES
        assert broker.end() == (0, b"")


def test_follow_shows_lines_of_another_process_at_once(served: Local) -> None:
    """A line arrives while `cat --follow` waits; Ctrl-C ends it with 130."""
    process = subprocess.Popen(
        [*METAQ, "cat", "shown", "--follow", "--zookeeper", served.zookeeper],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    for line in (b"one\n", b"two\n"):
        served.produce("shown", data=line)
        assert process.stdout.readline() == line
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=TIMEOUT_S) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"JAVA_HOME": "", "PATH": "/nonexistent"}, b"no Java runtime"),
        ({"METAQ_ZOOKEEPER_CLASSPATH": "/nonexistent"}, b"its log is in "),
    ],
)
def test_a_zookeeper_that_cannot_run_is_one_sentence(
    data_dir: Path, environment: dict[str, str], text: bytes
) -> None:
    """The sentence names the missing part, or the log; the exit code is 1."""
    words = ["--port", "0", "--zk-port", "0", "--data-dir", str(data_dir)]
    done = run_metaq("local", *words, **environment)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"metaq: ")
    assert text in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_port_that_is_taken_is_one_sentence(served: Local, data_dir: Path) -> None:
    """The start fails as a whole: ZooKeeper does not go on alone."""
    words = ["--port", str(served.port), "--zk-port", "0"]
    done = run_metaq("local", *words, "--data-dir", str(data_dir))
    assert (done.returncode, done.stdout) == (1, b"")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(b"metaq: ")
    assert str(served.port).encode() in last
