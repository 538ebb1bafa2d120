"""Lost data is named to the byte, and fatal or reported as was asked."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.spark.errors import BackwardRangeError, DataLossError, LostRange
from metaq.spark.plan import LogSpan, Settled, settle

PARTITION = TopicPartition("logs", BrokerId(0), 1)
LOG = (500, 600)


def span(start: int, end: int) -> LogSpan:
    return LogSpan(Offset(start), Offset(end))


@pytest.mark.parametrize(
    ("wanted", "readable", "lost"),
    [
        ((500, 600), (500, 600), []),
        ((520, 560), (520, 560), []),
        ((600, 600), (600, 600), []),
        ((400, 600), (500, 600), [(400, 500, "the log starts at 500")]),
        ((400, 450), (500, 500), [(400, 450, "the log starts at 500")]),
        ((400, 400), (500, 500), [(400, 500, "the log starts at 500")]),
        ((550, 700), (550, 600), [(600, 700, "the log ends at 600")]),
        (
            (650, 700),
            (600, 600),
            [(600, 700, "the log ends at 600, before the next byte to read, 650")],
        ),
        (
            (650, 650),
            (600, 600),
            [(600, 650, "the log ends at 600, before the next byte to read, 650")],
        ),
        (
            (400, 700),
            (500, 600),
            [(400, 500, "the log starts at 500"), (600, 700, "the log ends at 600")],
        ),
    ],
)
def test_what_is_lost_is_named_exactly(
    wanted: tuple[int, int],
    readable: tuple[int, int],
    lost: list[tuple[int, int, str]],
) -> None:
    """Both ways of failOnDataLoss speak of the same ranges."""
    ranges = tuple(
        LostRange(PARTITION, Offset(a), Offset(b), why) for a, b, why in lost
    )
    settled = settle(PARTITION, span(*wanted), span(*LOG), fail_on_data_loss=False)
    assert settled == Settled(span(*readable), ranges)
    if lost:
        with pytest.raises(DataLossError) as caught:
            settle(PARTITION, span(*wanted), span(*LOG), fail_on_data_loss=True)
        assert caught.value.lost == ranges
        for a, b, why in lost:
            text = f"logs/0-1: lost [{a}, {b}), {b - a} bytes: {why}"
            assert text in str(caught.value)
    else:
        kept = settle(PARTITION, span(*wanted), span(*LOG), fail_on_data_loss=True)
        assert kept == settled


def test_a_partition_that_is_gone_is_lost_from_there_on() -> None:
    """The end of its log is unknown."""
    settled = settle(PARTITION, span(7, 7), None, fail_on_data_loss=False)
    assert settled.span == span(7, 7)
    with pytest.raises(DataLossError, match="lost from 7 on: the partition is gone"):
        settle(PARTITION, span(7, 7), None, fail_on_data_loss=True)


def test_the_error_comes_whole_from_an_executor() -> None:
    """Its ranges and its sentence."""
    lost = (LostRange(PARTITION, Offset(1), Offset(2), "why"),)
    error = DataLossError(lost)
    again = pickle.loads(pickle.dumps(error))
    assert (again.lost, str(again)) == (lost, str(error))
    assert "failOnDataLoss=false" in str(error)


def test_a_wanted_span_that_goes_back_is_refused() -> None:
    """Neither empty nor a loss: a mistake of the caller's offsets."""
    with pytest.raises(BackwardRangeError, match="from 9 to 8"):
        settle(PARTITION, span(9, 8), span(0, 10), fail_on_data_loss=False)


@given(*[st.integers(0, 40)] * 4)
def test_nothing_readable_is_left_out_and_nothing_lost_is_read(
    a: int, b: int, c: int, d: int
) -> None:
    """Wanted bytes are either read or within a range that is named."""
    wanted, log = span(*sorted((a, b))), span(*sorted((c, d)))
    settled = settle(PARTITION, wanted, log, fail_on_data_loss=False)
    lost = [(r.start, r.end) for r in settled.lost if r.end is not None]
    assert log.start <= settled.span.start <= settled.span.end <= log.end
    for at in range(wanted.start, wanted.end):
        is_read = settled.span.start <= at < settled.span.end
        assert is_read != any(low <= at < high for low, high in lost)
