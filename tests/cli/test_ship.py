"""`metaq ship`: lines arrive in order, and a restart goes on where it was."""

import json
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.cli import ship as module
from metaq.cli.cluster import Target
from metaq.cli.follow import Bookmark
from metaq.cli.ship import ShipOptions, read_state, ship, write_state
from metaq.client import Client
from metaq.errors import ConfigError
from metaq.model import Message
from metaq.testing.fake_broker import FakeBroker, FaultKind
from tests.brokers import AnyBroker, StartBroker

ONE_BROKER = {
    "test_a_broker_that_fails_for_a_while_is_waited_for": "it fails on cue",
}


STATE = {
    "file": "app.log",
    "topic": "logs",
    "inode": 1,
    "position": 256,
    "check_bytes": 256,
    "check": 0,
}


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"logs": 4})


@pytest.fixture
def target(broker: AnyBroker) -> Target:
    return Target("memory", "/meta", (), 10.0, broker.coordinator_factory)


def options(directory: Path, *, attribute: str | None = None) -> ShipOptions:
    return ShipOptions(
        file=directory / "app.log",
        topic="logs",
        state=directory / "state",
        from_start=True,
        once=True,
        partition=None,
        attribute=attribute,
        as_json=True,
    )


def messages(broker: AnyBroker) -> list[Message]:
    with Client(**broker.client_options) as client:
        return list(client.browse("logs"))


@pytest.mark.slow
def test_lines_of_one_file_stay_in_order(
    broker: AnyBroker,
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They go to one partition, over restarts and rotations, each line once."""
    path = tmp_path / "app.log"
    path.write_bytes(b"1\n2\nhal")
    ship(target, options(tmp_path, attribute="blue"))
    assert json.loads(capsys.readouterr().out) == {
        "messages": 2,
        "bytes": 2,
        "may_be_doubled": 0,
        "gaps": 0,
    }
    with path.open("ab") as file:
        file.write(b"f\n")
    os.rename(path, tmp_path / "app.log.1")
    path.write_bytes(b"3\n")
    for _ in range(2):
        ship(target, options(tmp_path))
    found = messages(broker)
    assert [m.data for m in found[:3]] == [b"1", b"2", b"half"]
    assert [m.attribute for m in found[:3]] == ["blue", "blue", None]
    assert len({message.partition for message in found}) == 1


@pytest.mark.slow
def test_the_place_is_kept_after_the_lines_are_stored(
    broker: AnyBroker,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process killed between the two sends the batch again, and loses nothing."""
    (tmp_path / "app.log").write_bytes(b"1\n2\n")

    def killed(path: Path, file: Path, topic: str, bookmark: Bookmark) -> None:
        if bookmark.position:
            raise SystemExit
        write_state(path, file, topic, bookmark)

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_state", killed)
        with pytest.raises(SystemExit):
            ship(target, options(tmp_path))
    ship(target, options(tmp_path))
    assert [m.data for m in messages(broker)] == [b"1", b"2", b"1", b"2"]
    ship(target, options(tmp_path))
    assert len(messages(broker)) == 4


def test_lines_that_came_while_it_was_stopped_before_its_first_line_are_sent(
    broker: AnyBroker, target: Target, tmp_path: Path
) -> None:
    """The position is stored at the first start: those before it are the old ones."""
    path, wanted = tmp_path / "app.log", replace(options(tmp_path), from_start=False)
    path.write_bytes(b"old\n")
    ship(target, wanted)
    with path.open("ab") as file:
        file.write(b"new\n")
    ship(target, wanted)
    assert [m.data for m in messages(broker)] == [b"new"]


def test_a_broker_that_fails_for_a_while_is_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each failure is printed; the lines arrive."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    (tmp_path / "app.log").write_bytes(b"1\n2\n")
    with FakeBroker(topics={"logs": 1}) as broker:
        broker.inject(FaultKind.REFUSE, count=2)
        target = Target("", "/meta", (str(broker.address),), 3.0)
        ship(target, options(tmp_path))
        assert sorted(broker.payloads("logs")) == [b"1", b"2"]
    assert "retrying in" in capsys.readouterr().err


def test_what_no_broker_ever_takes_ends_it(target: Target, tmp_path: Path) -> None:
    """A wrong attribute would be wrong for ever; the place before it is kept."""
    (tmp_path / "app.log").write_bytes(b"1\n")
    with pytest.raises(ConfigError):
        ship(target, options(tmp_path, attribute="\ud800"))
    kept = read_state(tmp_path / "state", tmp_path / "app.log", "logs")
    assert kept is not None
    assert kept.position == 0


def test_a_state_that_cannot_be_kept_ends_it_before_anything_is_sent(
    broker: AnyBroker, target: Target, tmp_path: Path
) -> None:
    """Lines that are sent and not noted would come again with every start."""
    (tmp_path / "app.log").write_bytes(b"1\n")
    wanted = replace(options(tmp_path), state=tmp_path / "missing" / "state")
    with pytest.raises(ConfigError, match="missing/state: cannot store the state"):
        ship(target, wanted)
    assert messages(broker) == []


def test_a_file_that_is_missing_is_not_waited_for_with_once(
    target: Target, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"app\.log: no such file"):
        ship(target, options(tmp_path))


def test_a_file_that_is_missing_is_named_and_waited_for(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt name would wait for ever, and silently; Ctrl-C ends it."""

    def interrupt() -> None:
        for _ in range(3000):
            if (tmp_path / "state").exists():
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ship(target, replace(options(tmp_path), once=False))
    thread.join()
    err = capsys.readouterr().err
    assert err == f"metaq: waiting for {tmp_path}/app.log, which does not exist yet\n"


def test_a_pipe_is_refused_before_it_is_waited_for(
    broker: AnyBroker, target: Target, tmp_path: Path
) -> None:
    """There is no place in it to come back to, and opening it takes a writer."""
    os.mkfifo(tmp_path / "app.log")
    with pytest.raises(ConfigError, match="expected a regular file"):
        ship(target, options(tmp_path))
    assert messages(broker) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        '{"file": "x"}',
        "[" * 10_000,
        json.dumps({**STATE, "inode": float("inf")}),
        json.dumps({**STATE, "position": -1}),
        json.dumps({**STATE, "check_bytes": -1}),
        json.dumps({**STATE, "check_bytes": 257}),
    ],
)
def test_a_file_that_is_no_state_is_refused(tmp_path: Path, text: str) -> None:
    """It is not overwritten either."""
    path = tmp_path / "state"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a state file of metaq ship"):
        read_state(path, tmp_path / "app.log", "logs")


def test_the_state_of_another_file_is_refused(target: Target, tmp_path: Path) -> None:
    """Two commands that share one by mistake would lose lines."""
    (tmp_path / "app.log").write_bytes(b"1\n")
    ship(target, options(tmp_path))
    for file, topic in (("other.log", "logs"), ("app.log", "other")):
        with pytest.raises(ConfigError, match="expected the state of"):
            read_state(tmp_path / "state", tmp_path / file, topic)
    assert read_state(tmp_path / "none", tmp_path / "app.log", "logs") is None


def test_a_port_for_metrics_that_is_taken_ends_the_command(
    target: Target, tmp_path: Path
) -> None:
    wanted = options(tmp_path)
    (tmp_path / "app.log").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics port {port}: Address"):
            ship(target, replace(wanted, metrics_port=port))
