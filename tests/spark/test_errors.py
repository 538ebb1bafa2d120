"""Errors cross from executors in pickled form, and reach Spark as one sentence."""

import os
import pickle
from collections.abc import Iterator

import pytest

from metaq.model import Offset
from metaq.spark.errors import (
    BadRowError,
    DamagedRecordError,
    DataLossError,
    LostRange,
    OptionError,
    one_sentence,
)
from tests.spark.brokers import tp

LOST = LostRange(tp(0), Offset(10), Offset(30), "retention")


@pytest.mark.parametrize(
    "error",
    [
        DataLossError((LOST,)),
        BadRowError(tp(0), Offset(10), "no UTF-8"),
        DamagedRecordError(tp(0), Offset(10), "bad checksum", Offset(40)),
        DamagedRecordError(tp(0), Offset(10), "bad checksum", None),
    ],
)
def test_an_error_of_a_task_has_its_fields_on_the_driver(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found)) == (type(error), str(error))
    assert vars(found) == vars(error)


def test_a_lost_range_names_its_ends_and_its_size() -> None:
    assert str(LOST) == "logs/0-0: lost [10, 30), 20 bytes: retention"
    text = str(LostRange(tp(0), Offset(10), None, "deleted"))
    assert text == "logs/0-0: lost from 10 on: deleted"


def test_a_worker_of_spark_hides_the_trace_of_our_errors_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other error is a bug, and keeps its trace; so does a driver."""

    @one_sentence
    def fail(error: Exception) -> None:
        raise error

    @one_sentence
    def fail_late(error: Exception) -> Iterator[int]:
        yield 1
        raise error

    def hides(error: Exception) -> list[bool]:
        found = []
        for call in (fail, lambda e: list(fail_late(e))):
            monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
            with pytest.raises(type(error)):
                call(error)
            found.append("SPARK_HIDE_TRACEBACK" in os.environ)
        return found

    assert hides(OptionError("wrong")) == [False, False]
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_PORT", "1")
    assert hides(OptionError("wrong")) == [True, True]
    assert hides(LookupError("a bug")) == [False, False]
