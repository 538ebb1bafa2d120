"""Ranges of damage: apart, in order, bounded."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from metaq.model import Offset
from metaq.storage.damage import DAMAGES_MAX, merge_damage
from metaq.storage.segment import Damage

RANGES = st.lists(
    st.tuples(st.integers(0, 400), st.one_of(st.none(), st.integers(1, 20)))
)


@given(RANGES)
def test_merged_ranges_cover_the_same_offsets_and_do_not_touch(ranges) -> None:
    """And every next good offset is outside all damage."""
    damage = [
        Damage(
            Path("f"), Offset(at), None if size is None else Offset(at + size), "bad"
        )
        for at, size in ranges
    ]
    merged = merge_damage(damage)
    assert len(merged) <= DAMAGES_MAX
    for offset in range(430):
        covered = any(d.covers(Offset(offset)) for d in damage)
        assert any(d.covers(Offset(offset)) for d in merged) == covered
    for one, two in pairwise(merged):
        assert one.next_good_offset is not None
        assert one.next_good_offset < two.offset
