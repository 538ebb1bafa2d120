"""Jobs of `metaq pipeline`: options of Spark out of words, and what is printed."""

import json
import os
import signal
import socket
import sys
import threading
from dataclasses import astuple

import click
import pytest

from metaq.cli.cluster import Target
from metaq.cli.pipeline import Wire
from metaq.cli.pipeline_jobs import print_facts, print_findings, print_windows
from metaq.model import Millis
from metaq.pipeline.jobs.window_stats import WindowStats
from tests.brokers import StartBroker
from tests.cli.runner import run


def test_ctrl_c_before_spark_starts_is_told_as_well() -> None:
    """Brokers that are away are asked for a while."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)

        def interrupt() -> None:
            with silent.accept()[0]:
                os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = ("archive", "t", "--to", "x", "--broker", address)
        result = run("pipeline", *words)
        thread.join()
    assert (result.exit_code, result.output) == (130, "metaq: interrupted\n")


def test_what_the_user_gives_wins() -> None:
    """Options of the command become those of the format."""
    target = Target("zk:2181", "/meta", (), 2.5)
    assert Wire(target=target, options={}).to_map(subscribe="t") == {
        "zookeeper": "zk:2181",
        "zkRoot": "/meta",
        "requestTimeoutMs": "2500",
        "subscribe": "t",
    }
    named = Target("zk:2181", "/meta", ("meta://a:1", "b:2"), 2.5)
    options = {"requesttimeoutms": "7"}
    assert Wire(target=named, options=options).to_map() == {
        "brokers": "a:1,b:2",
        "requesttimeoutms": "7",
    }


@pytest.mark.parametrize(
    "words",
    [
        ("archive", "t", "nobody", "--to", "x"),
        ("stats", "nobody"),
        ("audit", "nobody", "--archive", "x"),
        ("audit", "t", "--copy", "nobody"),
        ("ingest", "nobody", "x", "--format", "text"),
        ("replay", "x", "--topic", "nobody"),
    ],
)
def test_a_topic_that_nobody_serves_is_refused_before_spark_starts(
    words: tuple[str, ...], start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would find nothing to do, every night, and say that all is well."""
    monkeypatch.setitem(sys.modules, "pyspark", None)  # it cannot be imported
    result = run("pipeline", *words, broker=start_broker({"t": 1}))
    assert result.exit_code == 1
    assert "metaq: no broker serves topic 'nobody'" in result.stderr


def test_options_that_name_a_cluster_are_believed() -> None:
    """The command's own cluster is not asked then."""
    target = Target("nowhere:1", "/meta", (), 0.1)
    Wire(target=target, options={"Brokers": "b:1"}).require("t")


def test_windows_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages without a time have no window and no delay."""
    print_windows(
        [
            astuple(WindowStats("t", Millis(1_700_000_000_000), 3, 30, 0.5, 1.25)),
            astuple(WindowStats("t", None, 1, 10, None, None)),
        ],
        as_json=True,
    )
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["window"] is not None
    assert (one["messages"], one["bytes"], one["delay_max_s"]) == (3, 30, 1.25)
    assert (other["window"], other["delay_mean_s"]) == (None, None)


def test_an_option_that_the_command_says_is_refused() -> None:
    """In any case of letters: Spark does not distinguish them."""
    wire = Wire(target=Target("zk:2181", "/meta", (), 1.0), options={"Topic": "u"})
    with pytest.raises(click.UsageError, match="--option topic is set by"):
        wire.to_map(topic="t")


def test_a_summary_is_a_table_or_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of fields are words for people."""
    print_facts({"archive_files": 1234}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"archive_files": 1234}
    print_facts({"archive_files": 1234}, as_json=False)
    assert "archive files" in capsys.readouterr().out


def test_no_finding_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty table would look like one."""
    for as_json in (True, False):
        print_findings(("file", "offset"), [], as_json=as_json)
    assert capsys.readouterr().out == ""
    print_findings(("file", "offset"), [("f", 7)], as_json=True)
    assert json.loads(capsys.readouterr().out) == {"file": "f", "offset": 7}
