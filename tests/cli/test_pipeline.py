"""`metaq pipeline`: words in, options of jobs out; results printed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import astuple
from pathlib import Path

import pytest

from metaq.cli.cluster import Target
from metaq.cli.pipeline_jobs import Wire, print_windows
from metaq.model import Millis
from metaq.pipeline.jobs.window_stats import WindowStats
from tests.brokers import StartBroker
from tests.cli.runner import run

ROOT = Path(__file__).parents[2]
JOBS = ("archive", "replay", "ingest", "stats", "audit", "verify")


@pytest.mark.parametrize("job", JOBS)
def test_every_job_has_help_with_examples(job: str) -> None:
    """Also without Spark."""
    result = run("pipeline", job, "--help")
    assert result.exit_code == 0
    assert f"metaq pipeline {job}" in result.output
    assert "--master" in result.output


def test_taking_over_has_help_with_an_example() -> None:
    """It needs no cluster."""
    assert "metaq pipeline adopt /archive" in run("pipeline", "adopt", "--help").output


def test_an_old_archive_is_taken_over_once(tmp_path: Path) -> None:
    """The second time there is none."""
    manifests = tmp_path / "_metaq" / "manifest"
    manifests.mkdir(parents=True)
    fields = {"version": 1, "number": 2, "query": "q", "batch": -1, "files": []}
    (manifests / f"{2:020}.json").write_text(json.dumps(fields))
    result = run("pipeline", "adopt", str(tmp_path), "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == {"archive_messages": 0, "archive_files": 0}
    assert run("pipeline", "adopt", str(tmp_path)).exit_code == 1


def test_what_is_no_old_archive_is_not_taken_over(tmp_path: Path) -> None:
    """One sentence, and nothing is made."""
    result = run("pipeline", "adopt", str(tmp_path))
    assert result.exit_code == 1
    assert "no archive of an older version" in result.output
    assert not list(tmp_path.iterdir())


def test_without_spark_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional; nothing is started."""
    monkeypatch.setitem(sys.modules, "pyspark", None)  # it cannot be imported
    result = run("pipeline", "verify", "/nowhere")
    assert result.exit_code == 1
    assert result.output == (
        "metaq: pipelines run on Spark, which is not installed:"
        " pip install 'metaq[pipeline]'\n"
    )


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


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("archive", "t"), "--to"),
        (("archive", "--to", "x"), "TOPIC"),
        (("audit", "t"), "exactly one of --archive and --copy"),
        (("audit", "t", "--archive", "a", "--copy", "b"), "exactly one of"),
        (("archive", "t", "--to", "x", "--option", "y"), "expected KEY=VALUE, got 'y'"),
        (("verify", "x", "--conf", "=y"), "expected KEY=VALUE, got '=y'"),
        (("stats", "t", "--window", "0"), "--window"),
        (("audit", "t", "--archive", "a", "--id", "key"), "--id has no effect without"),
        *(
            ((*words, "--option", option), f"{name} contradicts the topics that")
            for name, option, *words in (
                ("subscribe", "subscribe=u", "archive", "t", "--to", "x"),
                ("subscribe", "Subscribe=u", "stats", "t"),
                ("subscribe", "subscribe=u", "audit", "t", "--archive", "a"),
                ("subscribe", "subscribe=u", "audit", "t", "--copy", "c"),
                ("topic", "topic=u", "ingest", "t", "x", "--format", "text"),
                ("topic", "TOPIC=u", "replay", "x", "--topic", "t"),
            )
        ),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], what: str) -> None:
    """Before Spark starts, which takes seconds."""
    result = run("pipeline", *words)
    assert result.exit_code == 2
    assert what in result.output


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


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_java_one_sentence_says_so() -> None:
    """With what was said by the program that should have started it."""
    done = metaq("verify", "/nowhere", JAVA_HOME="/nonexistent")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("metaq: Spark does not start on local[1]: ")
    assert "/nonexistent/bin/java" in done.stderr
    assert done.stderr.count("\n") == 1


def metaq(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own: it stops the Spark of its process."""
    quick = ("--conf", "spark.sql.shuffle.partitions=1", "--master", "local[1]")
    return subprocess.run(
        [sys.executable, "-m", "metaq", "pipeline", *words, *quick, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def test_the_window_is_that_of_the_job() -> None:
    """Said twice, because the command does not load Spark for its help."""
    from metaq.cli.pipeline import WINDOW_S
    from metaq.pipeline.jobs import window_stats

    assert window_stats.WINDOW_S == WINDOW_S
