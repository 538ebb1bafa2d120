"""`metaq pipeline` as commands: a process each, a real broker, what a person sees.

Each command is here once; what else it says is in `test_command_output.py`. Starting a
JVM takes most of a command's time: where its start and its end are not the question,
commands find one that is there (`warm_jvm`), and start and stop their Spark in it.
"""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from deltalake import DeltaTable
from pyspark.java_gateway import launch_gateway

from metaq.fs import SystemFileSystem
from metaq.model import Offset
from metaq.storage.span_index import read_index
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.rigs.fork_server import executable
from tests.rigs.waiting import wait_until
from tests.spark.brokers import TOPIC, data_of, numbered, publish, stored, tp
from tests.spark.segment_dirs import flip

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 800.0
RECORD_BYTES = 35
LINES = 5000
QUICK = (
    "--conf",
    "spark.sql.shuffle.partitions=1",
    "--conf",
    "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
)
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Sequences that move the cursor of a terminal, and colour it."""
CHECKPOINTS = "spark.sql.streaming.checkpointLocation"
INTERRUPTED = (130, "", "metaq: interrupted\n")
"""Exit code, output and errors of a command after Ctrl-C."""
Done = subprocess.CompletedProcess[str]
Process = subprocess.Popen[str]


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 2, "copy": 2}) as found:
        yield found


@pytest.fixture(scope="module")
def gateway() -> Iterator[dict[str, str]]:
    """Run a JVM; return the variables by which PySpark finds it."""
    found = launch_gateway()
    try:
        where = found.java_parameters
        yield {
            "PYSPARK_GATEWAY_PORT": str(where.port),
            "PYSPARK_GATEWAY_SECRET": where.auth_token,
        }
    finally:
        found.shutdown()
        # The end of its input is its sign.
        found.proc.stdin.close()
        found.proc.wait(TIMEOUT_S)


@pytest.fixture
def warm_jvm(gateway: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands use that JVM, one after the other."""
    for name, value in gateway.items():
        monkeypatch.setenv(name, value)


def command(
    *words: str,
    master: str = "local[1]",
    settings: Sequence[str] = QUICK,
    program: str | None = None,
) -> list[str]:
    head = [program or executable(), "-m", "metaq", "pipeline"]
    return [*head, *words, *settings, "--master", master]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": executable()}


def pipeline(
    *words: str, master: str = "local[1]", settings: Sequence[str] = QUICK
) -> Done:
    return subprocess.run(
        command(*words, master=master, settings=settings),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def facts(done: Done) -> dict[str, int]:
    """Return the summary of a job that went well, printed for a pipe."""
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert head == ["summary", "count"]
    return {name: int(count) for name, count in rows}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("master", ["local[1]", "local-cluster[1,1,1024]"])
def test_a_topic_is_ingested_archived_audited_and_replayed(
    broker: EmbeddedBroker,
    tmp_path: Path,
    master: str,
    request: pytest.FixtureRequest,
) -> None:
    """Tables for people and pipes, objects for machines; with executors apart too.

    Progress is shown on standard error; results stay clean, and Spark says nothing
    there either.
    """
    lines = tmp_path / "lines"
    lines.write_bytes(b"\n".join(numbered(LINES)))
    path, wire = str(tmp_path / "archive"), ("--broker", broker.address)
    executors = ("--conf", f"spark.executorEnv.PYTHONPATH={ROOT}")
    words = ("ingest", TOPIC, str(lines), "--format", "text", "--json", *executors)
    with on_terminal() as (terminal, seen):
        process = start(*words, *wire, stderr=terminal, master=master)
        result, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, json.loads(result)["messages"]) == (0, LINES)
    assert re.search(r"ingest .*\d+/\d+ tasks", shown(seen))
    assert "None" not in shown(seen)
    assert b"WARN" not in seen
    request.getfixturevalue("warm_jvm")
    found = facts(pipeline("archive", TOPIC, "--to", path, *wire))
    assert (found["messages"], found["archive messages"]) == (LINES, LINES)
    done = pipeline("audit", TOPIC, "--archive", path, *wire)
    assert facts(done) == {
        **dict.fromkeys(("lost", "doubled", "corrupted", "reordered", "extra"), 0),
        "source": LINES,
        "target": LINES,
        "away": 0,
        "behind": 0,
        "expired": 0,
    }
    done = pipeline("replay", path, "--topic", "copy", "--json", *wire)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"messages": LINES, "bytes": LINES * 15}
    assert data_of(stored(broker, "copy")) == numbered(LINES)


def is_indexed(segment: Path) -> bool:
    """Tell whether the index has the bytes that damage is to be found in by."""
    index = read_index(SystemFileSystem(), segment, Offset(0))
    return index is not None and index.end_offset == segment.stat().st_size


@pytest.mark.usefixtures("warm_jvm")
def test_damage_is_an_exit_code_and_a_place(broker: EmbeddedBroker) -> None:
    """Of who checks the files of a broker."""
    publish(broker, numbered(100))
    (segment,) = broker.data_path.glob(f"**/{TOPIC}-0/*.meta")
    wait_until(lambda: is_indexed(segment))
    flip(segment, 10 * RECORD_BYTES + 30)
    done = pipeline("verify", str(broker.data_path))
    assert (done.returncode, done.stderr) == (1, "")
    (row,) = [line for line in done.stdout.splitlines() if str(segment) in line]
    assert row.split("\t")[1:3] == [str(10 * RECORD_BYTES), str(11 * RECORD_BYTES)]
    assert "problems\t1" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("master", "reason"),
    [
        ("local[x]", "Could not parse Master URL: 'local[x]'"),
        ("nonsense", "Master must either be"),
    ],
)
def test_a_spark_that_does_not_start_says_why(master: str, reason: str) -> None:
    """In one line, whether its JVM came up or not."""
    done = pipeline("verify", "/", master=master)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"metaq: Spark does not start on {master}: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert "; at " not in done.stderr


def shown(seen: bytearray) -> str:
    """Return the characters of what was written to a terminal."""
    return CONTROL.sub("", seen.decode(errors="replace"))


@contextmanager
def on_terminal() -> Iterator[tuple[int, bytearray]]:
    """Give a terminal, and what was written to it; whole when the block has ended."""
    screen, terminal = pty.openpty()
    seen = bytearray()

    def look() -> None:
        while True:
            try:
                seen.extend(os.read(screen, 65536))
            except OSError:  # the other end is closed
                return

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield terminal, seen
    finally:
        os.close(terminal)
        looking.join()
        os.close(screen)


@pytest.mark.usefixtures("warm_jvm")
def test_ctrl_c_ends_a_job_with_one_line(broker: EmbeddedBroker) -> None:
    """While a task works; what is shown of its progress is taken back."""
    value = "reflect('java.lang.Thread', 'sleep', 600000L)"
    words = ("ingest", TOPIC, str(Path(__file__)), "--format", "text", "--value", value)
    with on_terminal() as (terminal, seen):
        process = start(*words, "--broker", broker.address, stderr=terminal)
        result, _ = interrupt(process, lambda: "0/1 tasks" in shown(seen))
    assert (process.returncode, result) == (130, "")
    said = shown(seen)
    _before, *lines = said.rpartition("tasks")[2].split()
    assert lines == ["metaq:", "interrupted"], said


def test_ctrl_c_ends_a_start_of_spark_with_one_line(tmp_path: Path) -> None:
    """While the JVM comes up."""
    process = start("verify", str(tmp_path), program=sys.executable)

    def has_child() -> bool:
        found = []
        for path in Path(f"/proc/{process.pid}/task").glob("*/children"):
            with suppress(OSError):  # this thread has ended since
                found.append(path.read_text())
        return any(found)

    ended = interrupt(process, has_child)
    assert (process.returncode, *ended) == INTERRUPTED


@pytest.mark.usefixtures("warm_jvm")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["archive", "stats"])
def test_ctrl_c_ends_the_start_of_a_query_with_one_line(
    broker: EmbeddedBroker, tmp_path: Path, name: str
) -> None:
    """While the table, or the checkpoint, is made, which is before the first batch."""
    words = {
        "archive": ("archive", TOPIC, "--to", str(tmp_path)),
        "stats": ("stats", TOPIC, "--conf", f"{CHECKPOINTS}={tmp_path / 'stats'}"),
    }[name]
    process = start(*words, "--every", "0.1", "--broker", broker.address)
    made = tmp_path / ("_metaq/staging" if name == "archive" else name)
    said, errors = interrupt(process, made.exists)
    assert (process.returncode, errors) == (130, "metaq: interrupted\n")
    # What an archive has done until then is printed all the same.
    assert ("archive messages\t0\n" in said) == (name == "archive")


def test_ctrl_c_ends_the_end_of_an_archive_with_one_line(
    broker: EmbeddedBroker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """While Spark stops; the next run finds each message once."""
    words = ("archive", TOPIC, "--to", str(tmp_path), "--broker", broker.address)
    count = 0

    def is_interrupted() -> bool:
        nonlocal count
        publish(broker, numbered(10, count))
        publish(broker, numbered(10, count + 10), partition=tp(1))
        count += 20
        process = start(*words)
        ended = interrupt(process, lambda: archived_count(tmp_path) == count)
        if process.returncode == 0:
            return False
        assert (process.returncode, *ended) == INTERRUPTED
        return True

    # The end may be over when a busy machine lets this process look.
    wait_until(is_interrupted, TIMEOUT_S)
    request.getfixturevalue("warm_jvm")
    found = facts(pipeline(*words))
    assert (found["messages"], found["archive messages"]) == (0, count)


@pytest.mark.usefixtures("warm_jvm")
def test_an_archive_goes_on_until_ctrl_c(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Later messages are archived as well; the end prints the counts."""
    publish(broker, numbered(10))
    words = ("archive", TOPIC, "--to", str(tmp_path), "--broker", broker.address)
    process = start(*words, "--json", "--every", "0.1")
    late = iter([numbered(5, 10)])

    def has_all() -> bool:
        count = archived_count(tmp_path)
        for messages in late if count == 10 else ():
            publish(broker, messages, partition=tp(1))
        return count == 15

    summary, errors = interrupt(process, has_all)
    assert (process.returncode, errors) == (130, "metaq: interrupted\n")
    found = json.loads(summary)
    assert (found["messages"], found["archive_messages"]) == (15, 15)


@pytest.mark.usefixtures("warm_jvm")
def test_windows_are_printed_until_ctrl_c(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Of each batch, as soon as it is there."""
    publish(broker, numbered(10))
    first = ("--option", "startingOffsets=earliest")
    words = ("stats", TOPIC, "--json", "--window", "86400", "--every", "0.1", *first)
    lines = tmp_path / "lines"
    with lines.open("wb") as file:
        process = start(*words, "--broker", broker.address, stdout=file)
        _, errors = interrupt(process, lambda: b"\n" in lines.read_bytes())
    assert (process.returncode, errors) == (130, "metaq: interrupted\n")
    windows = map(json.loads, lines.read_text().splitlines())
    assert sum(window["messages"] for window in windows) == 10


def start(
    *words: str,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    master: str = "local[1]",
    program: str | None = None,
) -> Process:
    """Run a command without waiting for its end."""
    return subprocess.Popen(
        command(*words, master=master, program=program),
        env={**environment(), "TERM": "xterm"},
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def interrupt(process: Process, is_due: Callable[[], bool]) -> tuple[str, str]:
    """Send Ctrl-C when it is due; return what the process says until it ends."""
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while process.poll() is None and not is_due():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def archived_count(archive: Path) -> int:
    """Return how many messages the table of an archive has."""
    is_there = DeltaTable.is_deltatable(str(archive))
    return DeltaTable(archive).count() if is_there else 0
