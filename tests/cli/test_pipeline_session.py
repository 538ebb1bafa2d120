"""The Spark session of a command: refusals before it starts, progress while it runs."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from metaq.cli import pipeline
from tests.cli.runner import run
from tests.rigs.waiting import wait_until

ROOT = Path(__file__).parents[2]


def test_without_spark_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional; nothing is started."""
    monkeypatch.setitem(sys.modules, "pyspark", None)  # it cannot be imported
    result = run("pipeline", "verify", "/nowhere")
    assert result.exit_code == 1
    assert result.output == (
        "metaq: pipelines run on Spark, which is not installed:"
        " pip install 'metaq[pipeline]'\n"
    )


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


class Session:
    """A session whose tasks the test counts."""

    def __init__(self) -> None:
        self.done = (0, 0)
        self.asked = threading.Event()

    def count_tasks(self) -> tuple[int, int]:
        self.asked.set()
        return self.done


@pytest.mark.slow
def test_a_terminal_sees_how_many_tasks_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers of the session, and the thread that asks for them ends with the job."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    session, seen = Session(), ""
    with pipeline.task_progress(session, "replay"):
        session.done = (3, 8)

        def shows_them() -> bool:
            nonlocal seen
            seen += capsys.readouterr().err
            return "replay" in seen and "3/8" in seen

        wait_until(shows_them)
    assert not [t for t in threading.enumerate() if t.name == "progress"]


def test_without_a_terminal_nobody_asks_for_tasks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Logs of a nightly job stay free of bars."""
    session: Any = Session()
    with pipeline.task_progress(session, "replay"):
        assert not [t for t in threading.enumerate() if t.name == "progress"]
    assert not session.asked.is_set()
    assert capsys.readouterr().err == ""
