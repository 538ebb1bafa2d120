"""Capabilities of each PySpark, and the sentence about missing ones."""

from collections.abc import Callable

import pyspark
import pytest

from metaq.spark import versions
from tests.spark.classes import VERSION


def test_marks_and_numbers_agree() -> None:
    """The manual speaks of numbers; `versions` looks for what is there."""
    assert (VERSION >= (4, 1)) == versions.HAS_FILTERS
    assert (VERSION >= (4, 1)) == versions.HAS_ARROW_STREAM_WRITER
    assert (VERSION >= (4, 2)) == versions.HAS_LIMITS


def test_there_is_a_task_for_each_value_and_one_for_none() -> None:
    """A list without any would be a task that Spark 4.0 and 4.1 cannot hand out."""
    assert [task.value for task in versions.tasks_of(["a", "b"])] == ["a", "b"]
    assert [task.value for task in versions.tasks_of([])] == [None]


@pytest.mark.parametrize(
    ("mark", "report", "text"),
    [
        ("HAS_FILTERS", versions.report_missing_filters, "filterPushdown"),
        ("HAS_LIMITS", versions.report_missing_limits, "limits of a micro-batch"),
    ],
)
def test_what_is_missing_is_said_to_those_who_want_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mark: str,
    report: Callable[[bool], None],
    text: str,
) -> None:
    """And to no other."""
    for has_it in (True, False):
        monkeypatch.setattr(versions, mark, has_it)
        report(has_it)
    assert not caplog.records
    report(True)
    (record,) = caplog.records
    assert text in record.getMessage()
    assert pyspark.__version__ in record.getMessage()
