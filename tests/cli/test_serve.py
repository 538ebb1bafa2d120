"""Settings that `metaq local` makes of its options."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from metaq.cli import serve
from metaq.cli.serve import LocalOptions, installed_settings
from metaq.config.settings import BrokerConfig
from metaq.errors import ConfigError
from tests.cli.runner import run


def config(
    data_dir: Path, *settings: str, topics: tuple[str, ...] = ()
) -> BrokerConfig:
    options = LocalOptions(
        data_dir=data_dir,
        port=0,
        zookeeper_port=0,
        settings=dict(text.split("=") for text in settings),
        topics=topics,
        replica_count=1,
    )
    return serve.local_config(options, data_dir, "127.0.0.1:2181")


def test_local_is_metaqs_example_on_this_machine(tmp_path: Path) -> None:
    """The installed settings, in this directory, for clients on this machine."""
    settings = config(tmp_path)
    assert settings.path == str(installed_settings())
    assert {n: t.partition_count for n, t in settings.topics.items()} == {
        "test": 2,
        "meta-test": 2,
    }
    system = settings.system
    assert (system.host_name, system.server_port) == ("127.0.0.1", 0)
    assert system.data_path == system.data_log_path == str(tmp_path)
    assert system.unflush_threshold <= 0
    assert system.update_consumer_offsets
    assert system.delete_when == "0 0 6,18 * * ?"
    assert all(t.data_path == str(tmp_path) for t in settings.topics.values())
    assert settings.zookeeper.connect == "127.0.0.1:2181"


def test_topics_are_added(tmp_path: Path) -> None:
    """With a number of partitions, or the default of the settings."""
    settings = config(tmp_path, topics=("orders=4", "plain"))
    assert settings.topics["orders"].partition_count == 4
    assert settings.topics["plain"].partition_count == 1
    assert "test" in settings.topics


def test_set_wins_over_everything(tmp_path: Path) -> None:
    """Any key of the file, of a topic, and what `local` sets itself."""
    settings = config(
        tmp_path,
        "unflushThreshold= 100",
        "test:numPartitions=7",
        "hostName=broker.example.org",
        "scrubBytesPerS=0",
        topics=("test=3",),
    )
    assert settings.system.unflush_threshold == 100
    assert settings.topics["test"].partition_count == 7
    assert settings.system.host_name == "broker.example.org"
    assert settings.limits.scrub_bytes_per_s == 0


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    """The error is one sentence; nothing was created."""
    data_dir = tmp_path / "data"
    result = run("local", "--data-dir", str(data_dir), "--set", "serverPrt=1")
    assert result.exit_code == 1
    assert "do you mean 'serverPort'?" in result.stderr
    assert not data_dir.exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file in the way is one sentence and exit code 1."""
    (tmp_path / "file").write_text("")
    result = run("local", "--data-dir", str(tmp_path / "file" / "data"))
    assert result.exit_code == 1
    assert f"cannot create the data directory {tmp_path}" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["--port", pytest.param("--zk-port", marks=pytest.mark.zookeeper)]
)
def test_a_port_that_is_taken_names_the_option_for_another(
    tmp_path: Path, option: str
) -> None:
    """A port of the user's settings has no such option."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = ["--data-dir", str(tmp_path), "--port", "0", "--zk-port", "0"]
        if option == "--port":
            words += ["--set", "zk.zkEnable=false"]
        child = metaq_local(*words, option, port)
        sentence = (
            f"127.0.0.1:{port}: Address already in use; choose another with {option}"
        )
        assert child.returncode == 1
        assert sentence in child.stderr.splitlines()[-1]
        if option == "--port":
            child = metaq_local(*words, "--set", f"httpPort={port}")
            assert child.returncode == 1
            assert "choose another" not in child.stderr


def metaq_local(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "metaq", "local", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_a_broker_that_no_client_finds_is_not_ready(tmp_path: Path) -> None:
    """A ZooKeeper of the settings is not there: a sentence says so, and no `ready`."""
    settings = ("zk.zkConnect=127.0.0.1:1", "zk.zkConnectionTimeoutMs=1000")
    words = ["--data-dir", str(tmp_path), "--port", "0"]
    for setting in settings:
        words += ["--set", setting]
    with subprocess.Popen(
        [sys.executable, "-m", "metaq", "local", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("metaq: "):
                break
        child.terminate()
        output, _errors = child.communicate(timeout=60)
    assert line.startswith(
        "metaq: not ready: the broker is not registered in ZooKeeper at 127.0.0.1:1: "
    )
    assert (output, child.returncode) == ("", 0)


def test_the_last_port_is_used_again_if_it_is_free(tmp_path: Path) -> None:
    """A port that is taken, and nonsense in the file, give 0."""
    memory = tmp_path / "port"
    assert serve.last_port(memory) == 0
    memory.write_text("nonsense")
    assert serve.last_port(memory) == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        memory.write_text(f"{port}\n")
        assert serve.last_port(memory) == 0
    assert serve.last_port(memory) == port


def test_the_installed_settings_are_found_in_a_wheel_and_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the package first, else beside it; nowhere is an error."""
    package = tmp_path / "metaq"
    package.mkdir()
    (tmp_path / "config").mkdir()
    monkeypatch.setattr("metaq.cli.serve.resources.files", lambda _name: package)
    with pytest.raises(ConfigError, match=r"server\.ini is missing"):
        installed_settings()
    (tmp_path / "config" / "server.ini").write_text("")
    assert installed_settings() == tmp_path / "config" / "server.ini"
    (package / "server.ini").write_text("")
    assert installed_settings() == package / "server.ini"


def test_a_zookeeper_that_is_named_is_used_instead_of_ours(tmp_path: Path) -> None:
    """No server is started for zk.zkConnect or zk.zkEnable=false."""
    for setting, connect in (
        ("zk.zkConnect=zk.example.org:2181", "zk.example.org:2181"),
        ("zk.zkEnable=false", "127.0.0.1:0"),
    ):
        options = LocalOptions(
            data_dir=tmp_path,
            port=0,
            zookeeper_port=0,
            settings=dict([setting.split("=")]),
            topics=(),
            replica_count=1,
        )
        settings = serve.local_config(options, tmp_path, "127.0.0.1:0")
        with serve.local_zookeeper(options, settings, tmp_path) as given:
            assert given == (connect, None)
    assert not (tmp_path / "local").exists()


@pytest.mark.parametrize("text", ["nonsense", "=1", " = 1"])
def test_settings_without_a_key_are_wrong_usage(text: str) -> None:
    """Both sides of the '=' are needed, the right one may be blank."""
    assert run("local", "--set", text).exit_code == 2


def test_a_configuration_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    """`metaq broker` names the file."""
    result = run("broker", "--config", str(tmp_path / "none.ini"))
    assert result.exit_code == 1
    assert result.stderr == f"metaq: {tmp_path}/none.ini: No such file or directory\n"
