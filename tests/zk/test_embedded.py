"""The embedded server: what it needs, how it lives, and that it never outlives us."""

import os
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from metaq.zk import embedded
from metaq.zk.embedded import (
    CLASSPATH_VARIABLE,
    EmbeddedZooKeeper,
    EmbeddedZooKeeperError,
    find_classpath,
    find_java,
)
from tests.rigs.ports import reserved_port
from tests.rigs.waiting import wait_until
from tests.rigs.zookeeper import HandledZooKeeper

ROOT = Path(__file__).parents[2]


def fake_java(home: Path, version: str, code: int = 0, *, server: str = "") -> Path:
    """Write a program that tells a version, and does `server` when asked for more."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f'#!/bin/sh\nif [ "$1" = -version ]; then\n'
        f"echo 'openjdk version \"{version}\"' >&2\nexit {code}\nfi\n{server}\n"
    )
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    return java


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")


def use_server(monkeypatch: pytest.MonkeyPatch, home: Path, server: str) -> None:
    """Have the embedded server be a shell script."""
    fake_java(home, "17", server=server)
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("METAQ_ZOOKEEPER_CLASSPATH", "x")


@pytest.mark.parametrize("version", ["11.0.1", "17.0.15", "21-ea", "25"])
@pytest.mark.usefixtures("no_java")
def test_java_11_and_later_will_do(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAVA_HOME names the runtime; its version is asked for."""
    java = fake_java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() == str(java)


@pytest.mark.usefixtures("no_java")
def test_an_old_or_broken_java_is_passed_over_for_the_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JAVA_HOME that does not serve is no reason to fail when PATH has one."""
    fake_java(tmp_path / "old", "1.8.0_402")
    good = fake_java(tmp_path / "good", "17")
    monkeypatch.setenv("PATH", str(good.parent))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert find_java() == str(good)


@pytest.mark.usefixtures("no_java")
def test_without_java_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, too old and broken runtimes are all named."""
    with pytest.raises(EmbeddedZooKeeperError, match="openjdk-17-jre-headless"):
        find_java()
    fake_java(tmp_path / "old", "1.8.0_402")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    with pytest.raises(EmbeddedZooKeeperError, match="is version 8"):
        find_java()
    fake_java(tmp_path / "broken", "17", code=1)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "broken"))
    with pytest.raises(EmbeddedZooKeeperError, match="is not runnable"):
        find_java()


def test_the_class_path_comes_from_the_environment_or_pyspark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable wins; else the package's jars, found without importing it."""
    monkeypatch.setenv("METAQ_ZOOKEEPER_CLASSPATH", "/some/*")
    assert find_classpath() == "/some/*"
    monkeypatch.delenv("METAQ_ZOOKEEPER_CLASSPATH")
    package = tmp_path / "pyspark"
    (package / "jars").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    with pytest.raises(EmbeddedZooKeeperError, match=r"metaq\[spark\]"):
        find_classpath()
    (package / "jars" / "zookeeper-3.9.5.jar").touch()
    assert find_classpath() == f"{package}/jars/*"


def test_a_wheel_alone_says_which_extra_brings_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence, before Java is looked for: pip comes before the system."""
    monkeypatch.delenv("METAQ_ZOOKEEPER_CLASSPATH", raising=False)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "pyspark", None)  # it cannot be imported
    with pytest.raises(EmbeddedZooKeeperError) as refused:
        EmbeddedZooKeeper(tmp_path).start()
    assert str(refused.value) == (
        "no ZooKeeper server found: install metaq[spark], whose pyspark brings its"
        " jars, set METAQ_ZOOKEEPER_CLASSPATH to the class path of one, or use one that"
        " runs (--set zk.zkConnect=HOST:PORT)"
    )


def test_a_server_that_dies_at_start_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error carries the exit code and the end of the output; nothing is left."""
    use_server(monkeypatch, tmp_path, "echo no room on this machine\nexit 3")
    server = EmbeddedZooKeeper(tmp_path / "data")
    with pytest.raises(EmbeddedZooKeeperError, match=r"(?s)code 3.*no room on this"):
        server.start()
    assert not server.is_running
    assert server.pid is None


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is bounded, and the process does not stay behind."""
    use_server(monkeypatch, tmp_path, "echo $$ > pid\nexec sleep 60")
    server = EmbeddedZooKeeper(tmp_path / "data")
    with pytest.raises(EmbeddedZooKeeperError, match="in time"):
        server.start(timeout_s=0.15)
    pid = tmp_path / "data" / "pid"
    # It may be killed before it has written its number.
    number = pid.read_text() if pid.exists() else ""
    assert not number or not is_alive(int(number))


def test_a_port_that_is_taken_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server on the port must not answer in the place of ours."""
    use_server(monkeypatch, tmp_path, "exit 1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = EmbeddedZooKeeper(tmp_path, port=other.getsockname()[1])
        with pytest.raises(EmbeddedZooKeeperError, match="cannot listen"):
            server.start()


@pytest.mark.slow
def test_a_port_that_is_taken_while_java_starts_is_left_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java's trace names the reason first, and the end of its log may be long."""
    trace = "java.net.BindException: Address already in use"
    lines = [trace, *(f"at frame.number{n}" for n in range(25))]
    log = "\\n".join(lines)
    use_server(
        monkeypatch,
        tmp_path,
        f"echo start >> starts\nprintf '{log}\\n' > zookeeper.log\nexit 1",
    )
    server = EmbeddedZooKeeper(tmp_path / "data")
    with pytest.raises(EmbeddedZooKeeperError, match="ended with code 1"):
        server.start()
    starts = (tmp_path / "data" / "starts").read_text().splitlines()
    assert len(starts) == embedded.START_TRIES


def test_a_start_on_another_thread_is_refused(tmp_path: Path) -> None:
    """The kernel would kill the server with that thread."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="main"):
        pool.submit(EmbeddedZooKeeper(tmp_path).start).result()


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process, "" without one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return state_of(pid) not in {"", "Z"}


PARENT_PROGRAM = """
import sys, time
from metaq.zk.embedded import EmbeddedZooKeeper
server = EmbeddedZooKeeper(sys.argv[1])
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.zookeeper
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_server_dies_with_its_parent(tmp_path: Path, number: int) -> None:
    """However the parent ends, kill -9 included, no server stays behind."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_PROGRAM, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert is_alive(pid)
    os.kill(parent.pid, number)
    parent.wait()
    wait_until(lambda: not is_alive(pid))


@pytest.mark.zookeeper
@pytest.mark.slow
def test_a_server_lives_through_all_that_can_be_done_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """start, pause, resume, restart, kill, stop: same port, same data, no zombie."""
    # With the class path that users have, and its log.
    monkeypatch.delenv(CLASSPATH_VARIABLE, raising=False)
    directory = tmp_path / "a $directory with ünusual\\name"
    with reserved_port() as number:
        # It is picked once, and no other program is given it between two starts.
        monkeypatch.setattr(embedded, "free_port", iter([number]).__next__)
        live_through_everything(HandledZooKeeper(directory))


def live_through_everything(server: HandledZooKeeper) -> None:
    assert server.pid is None
    with server:
        first, port = server.pid, server.port
        assert first is not None
        assert port != 0
        server.start()
        assert server.pid == first
        server.pause()
        wait_until(lambda: state_of(first) == "T")
        server.resume()
        server.restart()
        second = server.pid
        assert second not in {None, first}
        assert server.port == port
        server.kill()
        assert not server.is_running
        assert not Path(f"/proc/{second}").exists()
        server.wipe()
        assert not (server.data_dir / "data").exists()
        server.start()
        server.pause()
        third = server.pid
    assert not Path(f"/proc/{third}").exists()
    server.stop()
    log = (server.data_dir / "zookeeper.log").read_text()
    assert f"127.0.0.1:{port}" in log
