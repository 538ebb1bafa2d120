"""Segments and their list: who holds which byte."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import Offset, Position, SizeBytes
from metaq.storage.segment import Damage, Segment, Segments, segment_file_name


def segment(base: int, size: int = 1024) -> Segment:
    path = Path("/data/test-0") / segment_file_name(Offset(base))
    return Segment(path, Offset(base), SizeBytes(size))


FOUR = Segments(segment(base) for base in (0, 1024, 2048, 3072))


@pytest.mark.parametrize(
    ("offset", "is_inside"), [(-1, False), (0, True), (1023, True), (1024, False)]
)
def test_a_segment_contains_its_bytes_and_no_others(
    offset: int, is_inside: bool
) -> None:
    """Of 1024 bytes at 0 the last one has the offset 1023."""
    assert segment(0).contains(Offset(offset)) is is_inside


def test_offsets_and_positions_convert_both_ways() -> None:
    """A position is an offset less the base offset."""
    one = segment(1024)
    assert one.position_of(Offset(1030)) == 6
    assert one.offset_at(Position(6)) == 1030
    assert one.end_offset == 2048


def test_names_have_twenty_digits() -> None:
    """The name is the base offset, padded with zeros."""
    assert segment_file_name(Offset(4096)) == "00000000000000004096.meta"
    assert segment_file_name(Offset(2**63 - 1)) == "09223372036854775807.meta"


@pytest.mark.parametrize(
    ("offset", "base"),
    [
        (-1, None),
        (0, 0),
        (1023, 0),
        (1024, 1024),
        (2047, 1024),
        (2048, 2048),
        (3072, 3072),
        (4095, 3072),
    ],
)
def test_find_gives_the_segment_that_holds_the_byte(
    offset: int, base: int | None
) -> None:
    """Boundaries belong to the segment that starts there."""
    found = FOUR.find(Offset(offset))
    assert (found.base_offset if found else None) == base


def test_find_gives_the_active_segment_for_everything_behind_it() -> None:
    """The list does not know how long the active segment is."""
    assert FOUR.find(Offset(1 << 40)) is FOUR.active


def test_find_gives_nothing_in_a_hole() -> None:
    """An offset in a hole of a damaged log has no segment, but one that follows."""
    broken = Segments([segment(0, 10), segment(100, 10), segment(110, 0)])
    assert broken.find(Offset(10)) is None
    assert broken.following(Offset(10)) == segment(100, 10)
    assert broken.following(Offset(200)) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(-5, 1100))
def test_find_agrees_with_a_search_from_the_front(
    sizes: list[int], offset: int
) -> None:
    """Bisection finds what looking at every segment finds, empty ones included."""
    items, base = [], 0
    for size in sizes:
        # Two segments of one base offset exist only in damaged logs.
        items.append(segment(base, size or 1))
        base += size or 1
    items.append(segment(base, 0))
    found = Segments(items).find(Offset(offset))
    expected = next((s for s in items if s.contains(Offset(offset))), None)
    if offset >= base:
        expected = items[-1]
    assert found == expected


def test_a_roll_seals_the_active_segment_and_keeps_the_list_contiguous() -> None:
    """The old value of the list is not changed by a roll."""
    rolled = FOUR.rolled(segment(3072, 1030), segment(4102, 0))
    assert [s.base_offset for s in rolled] == [0, 1024, 2048, 3072, 4102]
    assert len(FOUR) == 4
    for one, two in pairwise(rolled):
        assert one.end_offset == two.base_offset


def test_a_roll_that_would_leave_a_hole_is_a_bug() -> None:
    """The new base offset is the end of the sealed segment."""
    with pytest.raises(AssertionError):
        FOUR.rolled(segment(3072, 1024), segment(5000, 0))


def test_segments_go_from_the_front_and_the_active_one_never_goes() -> None:
    """Only the first segment can be taken out, and never the last one left."""
    rest = FOUR.without(segment(0))
    assert rest.first.base_offset == 1024
    assert [s.base_offset for s in rest.sealed] == [1024, 2048]
    with pytest.raises(AssertionError):
        FOUR.without(segment(1024))
    with pytest.raises(AssertionError):
        Segments([segment(0)]).without(segment(0))


def test_damage_covers_up_to_the_next_good_offset() -> None:
    """Without a next good offset it covers everything after it."""
    damage = Damage(Path("a.meta"), Offset(10), Offset(20), "checksum mismatch")
    covered = [offset for offset in range(30) if damage.covers(Offset(offset))]
    assert covered == list(range(10, 20))
    assert str(damage) == (
        "checksum mismatch: file=a.meta offset=10 next_good_offset=20"
    )
    endless = Damage(Path("a.meta"), Offset(10), None, "cut")
    assert endless.covers(Offset(1 << 60))
    assert not endless.covers(Offset(9))
    assert str(endless).endswith("next_good_offset=none")


@pytest.mark.parametrize(
    ("end", "count"), [(0, 0), (1023, 0), (1024, 1), (3071, 2), (3072, 3), (9999, 3)]
)
def test_settled_segments_end_below(end: int, count: int) -> None:
    """The active one is never among them; what there is of it ends there."""
    assert FOUR.settled(Offset(end)) == FOUR.sealed[:count]
    assert FOUR.readable_active(Offset(end)).size_bytes == max(0, end - 3072)


def test_a_hole_settles_no_segment() -> None:
    """One that has bytes above is not settled by a segment that begins above."""
    broken = Segments([segment(0, 10), segment(100, 10), segment(200, 0)])
    assert broken.settled(Offset(105)) == broken.sealed[:1]
