"""Parting points and tables of epochs, against histories that are known."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.model import Offset
from metaq.replication.epochs import (
    NO_EPOCH,
    CopyFacts,
    Epoch,
    EpochStart,
    EpochTable,
    adopt_table,
    begin_epoch,
    divergence_point,
    load_table,
)
from tests.cases import for_each
from tests.sampling import examples


def table(*pairs: tuple[int, int]) -> EpochTable:
    return tuple(
        EpochStart(Epoch(number, "n"), Offset(start)) for number, start in pairs
    )


def copy(end: int, *pairs: tuple[int, int], start: int = 0, hw: int = 0) -> CopyFacts:
    return CopyFacts(1, Offset(start), Offset(end), Offset(hw), table(*pairs))


@for_each(
    "one, other, point",
    {
        "equal": (copy(9, (1, 0)), copy(9, (1, 0)), 9),
        "one is shorter": (copy(9, (1, 0)), copy(5, (1, 0)), 5),
        "one went on in a later epoch": (copy(9, (1, 0)), copy(9, (1, 0), (2, 6)), 6),
        "both went on": (copy(9, (1, 0), (2, 4)), copy(9, (1, 0), (3, 6)), 4),
        "nothing in common": (copy(9, (1, 0)), copy(9, (2, 0)), 0),
        "an epoch without a byte": (copy(9, (1, 0), (2, 9)), copy(9, (1, 0)), 9),
        "an epoch without a byte, in between": (
            copy(9, (1, 0), (2, 5), (3, 5)),
            copy(9, (1, 0), (3, 5)),
            9,
        ),
        "an epoch that they have in common after others": (
            copy(9, (1, 0), (2, 4), (4, 6)),
            copy(9, (1, 0), (3, 4), (4, 6)),
            4,
        ),
        "a later log start": (copy(9, (1, 0)), copy(9, (1, 4), start=4), 9),
        "all below the log start": (copy(3, (1, 0)), copy(9, (2, 5), start=5), 3),
        "one is empty": (copy(0), copy(9, (1, 0)), 0),
    }.values(),
)
def test_copies_part_where_their_tables_do(
    one: CopyFacts, other: CopyFacts, point: int
) -> None:
    """The last entry that both have says how far, the shorter of the two."""
    assert divergence_point(one, other) == point
    assert divergence_point(other, one) == point


def test_an_epoch_number_used_twice_is_another_epoch() -> None:
    """ZooKeeper may be set back, and give a number again: the nonce differs."""
    other = (EpochStart(Epoch(1, "another"), Offset(0)),)
    again = CopyFacts(1, Offset(0), Offset(9), Offset(0), other)
    assert divergence_point(copy(9, (1, 0)), again) == 0


def write_history(rng: random.Random) -> list[CopyFacts]:
    """Return copies of a log after leaders that each had a part of the last one.

    The bytes of each are told by (epoch, offset), so tables say everything.
    """
    copies = [copy(0) for _ in range(3)]
    for number in range(1, 6):
        leader = rng.randrange(3)
        one = copies[leader]
        begun = begin_epoch(one.table, Epoch(number, "n"), one.end)
        end = Offset(one.end + rng.randrange(4))
        led = CopyFacts(1, one.start, end, one.hw, begun)
        copies[leader] = led
        for follower in {0, 1, 2} - {leader}:
            if rng.random() < 0.6:
                point = divergence_point(led, copies[follower])
                kept = adopt_table(copies[follower].table, led, point)
                got = Offset(rng.randint(point, end))
                copies[follower] = CopyFacts(1, Offset(0), got, Offset(0), kept)
    return copies


def bytes_of(one: CopyFacts) -> list[Epoch]:
    """Return the epoch in which each byte of a copy was written."""
    found = [NO_EPOCH] * one.end
    for entry in one.table:
        for offset in range(entry.start, one.end):
            found[offset] = entry.epoch
    return found


@settings(max_examples=examples(500))
@given(st.integers(0, 2**32))
def test_the_parting_point_is_where_bytes_first_differ(seed: int) -> None:
    """Neither a byte is cut that both have, nor one kept that differs."""
    one, other, _ = write_history(random.Random(seed))
    mine, theirs = bytes_of(one), bytes_of(other)
    point = divergence_point(one, other)
    assert mine[:point] == theirs[:point]
    shorter = min(len(mine), len(theirs))
    assert point == shorter or mine[point] != theirs[point]


def test_a_start_believes_entries_that_have_bytes() -> None:
    """A crash leaves entries at the end or above it, retention some below the start."""
    entries = table((1, 0), (2, 4), (3, 8), (4, 9))
    loaded = load_table(entries, start=Offset(5), end=Offset(8))
    assert loaded == table((2, 4))


def test_an_epoch_that_begins_ends_entries_above_the_end() -> None:
    """They are from before a crash: no byte was written under them."""
    begun = begin_epoch(table((1, 0), (2, 5), (3, 9)), Epoch(4, "n"), Offset(5))
    assert begun == table((1, 0), (4, 5))


def test_a_copy_that_begins_at_a_log_start_has_the_epoch_of_its_first_byte() -> None:
    """The entry that covers the point begins with it."""
    leader = copy(9, (1, 0), (2, 6))
    assert adopt_table((), leader, Offset(4)) == table((1, 4), (2, 6))


def test_the_copy_with_the_later_last_byte_ranks_higher() -> None:
    """An epoch without a byte does not count, a longer end only in one epoch."""
    assert copy(3, (1, 0), (2, 2)).rank > copy(9, (1, 0)).rank
    assert copy(9, (1, 0), (2, 9)).rank == copy(9, (1, 0)).rank
    assert copy(9, (1, 0)).rank > copy(8, (1, 0)).rank
