"""The session of a command, without Spark: which thread talks to it."""

import os
import sys
import threading
from typing import Any

import pytest

from metaq.pipeline.jobs import session as jobs_session
from metaq.pipeline.jobs.session import job_session


class Session:
    """Notes who calls it."""

    def __init__(self) -> None:
        self.calls = {"start": threading.current_thread()}

    def createDataFrame(self, *_arguments: Any) -> None:  # Spark's name
        self.calls["activate"] = threading.current_thread()

    def stop(self) -> None:
        self.calls["stop"] = threading.current_thread()


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Start such sessions in place of Spark; return the address that each is given."""
    seen: list[str | None] = []

    def start(*_arguments: Any, **_more: Any) -> Session:
        seen.append(os.environ.get("SPARK_LOCAL_IP"))
        return Session()

    monkeypatch.setattr(jobs_session, "start_session", start)
    return seen


def test_no_call_is_made_where_ctrl_c_would_break_it_off() -> None:
    """Signals come to the main thread; the job's thread has the session active."""
    with job_session("yarn", {}) as session:
        at_work = session.run(threading.current_thread)
    assert set(session.spark.calls) == {"start", "activate", "stop"}
    assert threading.current_thread() not in session.spark.calls.values()
    assert session.spark.calls["activate"] is at_work


@pytest.mark.parametrize(
    ("master", "given", "wanted"),
    [
        ("local[2]", None, "127.0.0.1"),
        ("local[2]", "192.0.2.7", "192.0.2.7"),
        ("yarn", None, None),
    ],
)
def test_a_local_spark_needs_no_name_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
    addresses: list[str | None],
    master: str,
    given: str | None,
    wanted: str | None,
) -> None:
    """Spark looks it up, and ends where it is unknown; a cluster has to find it."""
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    # What was there before comes back after the test.
    monkeypatch.setenv("SPARK_LOCAL_IP", given or "")
    if given is None:
        del os.environ["SPARK_LOCAL_IP"]
    with job_session(master, {}):
        assert addresses == [wanted]
