"""The session of a command, without Spark: which thread talks to it."""

import threading
from typing import Any

import pytest

from metaq.cli.spark_session import run_in_session, spark_session
from metaq.spark.jobs import session as jobs_session


class Session:
    """Notes who calls it."""

    def __init__(self) -> None:
        self.calls = {"start": threading.current_thread()}

    def createDataFrame(self, *_arguments: Any) -> None:  # Spark's name
        self.calls["activate"] = threading.current_thread()

    def stop(self) -> None:
        self.calls["stop"] = threading.current_thread()


def test_no_call_is_made_where_ctrl_c_would_break_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Signals come to the main thread; the job's thread has the session active."""
    monkeypatch.setattr(
        jobs_session, "start_session", lambda *_arguments, **_more: Session()
    )
    with spark_session("yarn", {}, None) as session:
        at_work = run_in_session(session, threading.current_thread)
    assert set(session.calls) == {"start", "activate", "stop"}
    assert threading.current_thread() not in session.calls.values()
    assert session.calls["activate"] is at_work
