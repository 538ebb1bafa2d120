"""Which batches are recognised, which are new, and which are refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.errors import SequenceError
from metaq.model import MessageId, Offset, SizeBytes
from metaq.storage.producers import (
    BATCHES_KEPT,
    NO_CHECKSUM,
    ProducerTable,
    StoredBatch,
)
from tests.sampling import examples


def batch(
    sequence: int, count: int = 1, producer: str = "p", checksum: int = NO_CHECKSUM
) -> StoredBatch:
    return StoredBatch(
        producer,
        sequence,
        count,
        checksum,
        MessageId(1000 + sequence),
        Offset(sequence * 21),
        SizeBytes(count * 21),
    )


def table(*batches: StoredBatch, producer_count_max: int = 3) -> ProducerTable:
    made = ProducerTable(producer_count_max)
    for one in batches:
        made.add(one)
    return made


def test_the_last_five_batches_are_recognised() -> None:
    """As many as a producer may have in flight; older ones are refused."""
    batches = [batch(10 * number, 10) for number in range(BATCHES_KEPT + 1)]
    known = table(*batches)
    for one in batches[1:]:
        assert known.find("p", one.sequence, 10, 77) is one
    with pytest.raises(SequenceError, match="sequence 0 of producer p is already"):
        known.find("p", 0, 10, 77)


@pytest.mark.parametrize(
    ("sequence", "count"), [(0, 9), (1, 9), (5, 10), (10, 1), (19, 5), (15, 10)]
)
def test_overlapping_numbers_are_refused_with_both_numbers(sequence, count) -> None:
    """Neither stored nor answered: the sender's meaning is unknown."""
    known = table(batch(0, 10), batch(10, 10))
    with pytest.raises(SequenceError) as error:
        known.find("p", sequence, count, NO_CHECKSUM)
    expected = f"sequence {sequence} of producer p is already stored or overlapping"
    assert str(error.value) == f"{expected}: expected 20 or more"


@pytest.mark.parametrize("sequence", [20, 21, 10**12])
def test_what_follows_is_new_also_behind_a_gap(sequence: int) -> None:
    """A sender that gave a batch up goes on after it."""
    assert table(batch(0, 10), batch(10, 10)).find("p", sequence, 10, 0) is None


def test_an_unknown_producer_may_begin_anywhere() -> None:
    """It may have been forgotten."""
    assert table(batch(0)).find("q", 4711, 3, 0) is None


@pytest.mark.parametrize(
    ("stored", "sent", "is_same"), [(7, 7, True), (7, -1, True), (-1, 7, True)]
)
def test_a_checksum_is_compared_where_both_are_known(stored, sent, is_same) -> None:
    """The numbers alone decide otherwise."""
    known = table(batch(3, checksum=stored))
    assert (known.find("p", 3, 1, sent) is not None) == is_same
    with pytest.raises(SequenceError, match="was used for other records: expected"):
        table(batch(3, checksum=7)).find("p", 3, 1, 8)


def test_a_batch_that_failed_is_new_again() -> None:
    """Also the only one of its producer; removing it twice is harmless."""
    known = table(batch(0, 10), batch(10, 10))
    for _ in range(2):
        known.remove(batch(10, 10))
    assert known.find("p", 10, 4, 0) is None
    known.remove(batch(0, 10))
    assert len(known) == 0
    assert known.find("p", 0, 1, 0) is None


def test_the_producer_that_was_silent_for_longest_is_forgotten() -> None:
    """A repeated batch counts as a word from its producer."""
    known = table(*(batch(0, producer=name) for name in "abc"))
    assert known.find("a", 0, 1, 0) is not None
    known.add(batch(0, producer="d"))
    assert (len(known), known.forgotten_count) == (3, 1)
    assert [one.producer for one in known] == ["c", "a", "d"]
    assert known.find("b", 0, 9, 0) is None


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), max_size=40))
def test_a_table_made_of_what_one_remembers_is_the_same(steps) -> None:
    """The order of iteration is the order to add in: that is how a file is written."""
    known, ends = ProducerTable(3), dict.fromkeys("abcd", 0)
    for name, gap in steps:
        known.add(batch(ends[name] + gap, 2, name))
        ends[name] += gap + 2
    again = table(*known)
    assert list(again) == list(known)
    assert len(known) <= 3
    for one in list(known):
        assert known.find(one.producer, one.sequence, 2, 0) is one
