"""Orders to a broker on this machine."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from metaq.cli.admin import parse_span
from metaq.cli.options import default_data_dir, find_data_dir, read_bytes
from metaq.cli.serve import installed_settings
from metaq.errors import AdminError, ConfigError
from tests.cli.runner import run


class AdminSocket:
    """Answers one request instead of a broker."""

    def __init__(self, directory: Path, reply: dict[str, object]) -> None:
        self.request: dict[str, object] = {}
        self._reply = reply
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(directory / "admin.sock"))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _peer = self._server.accept()
        with connection, connection.makefile("rwb") as stream:
            self.request = json.loads(stream.readline())
            stream.write(json.dumps(self._reply).encode() + b"\n")

    def close(self) -> None:
        self._thread.join(30)
        self._server.close()


def ask(
    directory: Path, reply: dict[str, object], *words: str
) -> tuple[dict[str, object], int, str]:
    admin = AdminSocket(directory, reply)
    result = run(*words, "--data-dir", str(directory))
    admin.close()
    return admin.request, result.exit_code, result.output


@pytest.mark.parametrize("as_json", [False, True])
def test_reload_tells_who_answered_and_what_changed(
    tmp_path: Path, as_json: bool
) -> None:
    """The broker, topics that changed, and what takes a restart; or all as JSON."""
    reply = {
        "ok": True,
        "broker_id": 7,
        "address": "meta://host:8123",
        "data_dir": "/var/lib/metaq",
        "added": ["new"],
        "removed": [],
        "changed": ["a", "b"],
        "needs_restart": ["[system] serverPort: 1 -> 2"],
    }
    request, code, output = ask(tmp_path, reply, "reload", *["--json"][:as_json])
    assert (request, code) == ({"command": "reload"}, 0)
    if as_json:
        assert json.loads(output) == {k: v for k, v in reply.items() if k != "ok"}
        return
    assert output.splitlines() == [
        "broker 7 at meta://host:8123, data directory /var/lib/metaq",
        "reloaded: added new; changed a, b",
        "requires a restart: [system] serverPort: 1 -> 2",
    ]


def test_a_reload_that_is_refused_says_why(tmp_path: Path) -> None:
    """The broker's sentence, and exit code 1."""
    reply = {"ok": False, "error": "server.ini: [system]: unknown key"}
    _request, code, output = ask(tmp_path, reply, "reload")
    assert (code, output) == (1, "metaq: server.ini: [system]: unknown key\n")


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["close", "t"], {"command": "close_partitions"}),
        (["close", "t", "2"], {"command": "close_partitions", "start": 2, "end": 2}),
        (["open", "t", "0-3"], {"command": "open_partitions", "start": 0, "end": 3}),
    ],
)
def test_partitions_are_named_to_the_broker(
    tmp_path: Path, words: list[str], fields: dict[str, object]
) -> None:
    """A topic, and a range only where one was given."""
    reply = {"ok": True, "closed": {"t": [2, 3], "other": [1]}}
    request, code, output = ask(tmp_path, reply, "partitions", *words)
    assert request == {"topic": "t", **fields}
    assert (code, output) == (0, "t: closed partitions: 2, 3\n")


HEALTH = {
    "ok": True,
    "status": "failing",
    "problems": [
        {"alarm": "low_space", "severity": "failing", "text": "/data refuses puts"}
    ],
    "broker_id": 7,
    "address": "meta://host:8123",
}
LOG = {
    "topic": "t",
    "partition": 0,
    "state": "open",
    "is_closed": False,
    "is_group_commit": True,
    "log_start": 0,
    "high_watermark": 21,
    "log_end": 21,
    "size_bytes": 21,
    "segment_count": 1,
    "record_count": 1,
    "damage": ["offset 5"],
}
DIRECTORY = {
    "path": "/data",
    "state": "online",
    "offline_cause": None,
    "size_bytes": 21,
    "free_bytes": 4096,
    "is_low_on_space": True,
    "is_silent": False,
    "is_read_only": False,
}
SCRUB = {
    "is_on": True,
    "passes": 2,
    "log": "t-0",
    "offset": 5,
    "checked_bytes": 1024,
    "total_bytes": 4096,
    "damage_count": 1,
}


@pytest.mark.parametrize(
    ("word", "reply", "texts"),
    [
        ("status", HEALTH, ["broker_id 7", "failing\tlow_space\t/data refuses puts"]),
        (
            "logs",
            {"ok": True, "logs": [LOG]},
            ["t\t0\topen\tFalse\t0\t21\t21\t1\toffset"],
        ),
        ("directories", {"ok": True, "directories": [DIRECTORY]}, ["/data\tonline\t-"]),
        ("scrub", {"ok": True, **SCRUB}, ["pass 3: 1.0 KiB of 4.0 KiB", "1 damaged"]),
        (
            "scrub",
            {"ok": True, **SCRUB, "log": None, "offset": None},
            ["4.0 KiB checked, waiting for the next pass; 1 damaged"],
        ),
    ],
)
def test_a_broker_here_says_how_it_is(
    tmp_path: Path, word: str, reply: dict[str, Any], texts: list[str]
) -> None:
    """As text and as JSON; the exit code is 1 where an operator has to look."""
    request, code, output = ask(tmp_path, reply, "brokers", word)
    assert (request, code) == ({"command": word}, 1)
    assert [text for text in texts if text not in output] == []
    (tmp_path / "admin.sock").unlink()
    _request, code, output = ask(tmp_path, reply, "brokers", word, "--json")
    wanted = {name: value for name, value in reply.items() if name != "ok"}
    if word in {"logs", "directories"}:
        (wanted,) = wanted[word]
    assert (code, json.loads(output)) == (1, wanted)


@pytest.mark.parametrize(
    ("word", "reply"),
    [
        ("status", {**HEALTH, "problems": []}),
        ("logs", {"ok": True, "logs": [{**LOG, "damage": []}]}),
        ("directories", {"ok": True, "directories": []}),
        ("scrub", {"ok": True, **SCRUB, "damage_count": 0}),
        ("scrub", {"ok": True, "is_on": False}),
    ],
)
def test_a_broker_without_problems_is_exit_code_0(
    tmp_path: Path, word: str, reply: dict[str, Any]
) -> None:
    _request, code, _output = ask(tmp_path, reply, "brokers", word)
    assert code == 0


def test_no_broker_there_is_one_sentence(tmp_path: Path) -> None:
    """The directory is named."""
    result = run("reload", "--data-dir", str(tmp_path))
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr
    assert result.stderr.count("\n") == 1


def test_ranges() -> None:
    """One number, two, or none at all."""
    assert parse_span("") == {}
    assert parse_span("7") == {"start": 7, "end": 7}
    assert parse_span("0-0") == {"start": 0, "end": 0}


@pytest.mark.parametrize("text", ["3-1", "-1", "a", "1-", "1-2-3", "12345678"])
def test_other_ranges_are_refused(text: str) -> None:
    """Backwards, open or not numbers."""
    with pytest.raises(click.BadParameter, match="FIRST-LAST"):
        parse_span(text)


def test_the_data_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As given; else from the configuration; else where `local` keeps its data."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    config = tmp_path / "server.ini"
    data = tmp_path / "data"
    text = installed_settings().read_text()
    config.write_text(text.replace("\n[system]\n", f"\n[system]\ndataPath={data}\n"))
    assert find_data_dir(tmp_path, config) == tmp_path
    share = tmp_path / "share" / "metaq"
    with pytest.raises(AdminError, match=f"{share}.*'metaq local'.*--data-dir.*--conf"):
        find_data_dir(None, None)
    share.mkdir(parents=True)
    (share / "admin.sock").touch()
    assert find_data_dir(None, None) == share
    # Nothing listens there: it may have been started with another path.
    with pytest.raises(AdminError, match=f"{data}.*--set dataPath.*--data-dir"):
        find_data_dir(None, config)
    data.mkdir()
    (data / "admin.sock").touch()
    assert find_data_dir(None, config) == data


def test_a_relative_data_home_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the standard of that variable says."""
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".local" / "share" / "metaq"


def test_a_configuration_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """The file is named."""
    with pytest.raises(ConfigError, match="nothing: No such file"):
        read_bytes(str(tmp_path / "nothing"))
