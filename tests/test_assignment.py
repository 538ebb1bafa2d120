"""Assignment: MetaQ's vectors, and properties of every group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.assignment import (
    Strategy,
    assign,
    member_points,
    partition_hash,
    ring_assignment,
    string_order,
)

ELEVEN = [f"0-{number}" for number in range(11)]
THREE = ["g_c1", "g_c2", "g_c3"]
HASHES = {
    "0-0": (53638855, "g_c3"),
    "0-1": (556329922, "g_c3"),
    "0-2": (2969223135, "g_c2"),
    "0-3": (1104905568, "g_c1"),
    "1-0": (1097442028, "g_c1"),
    "1-1": (1824548586, "g_c3"),
    "1-2": (3270690456, "g_c2"),
    "1-10": (2276939485, "g_c2"),
}

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
member_lists = st.lists(names, max_size=8)
partition_lists = st.lists(
    st.builds("{}-{}".format, st.integers(0, 3), st.integers(0, 30)), max_size=40
)
strategies = st.sampled_from(Strategy)


def test_strings_stand_in_javas_order() -> None:
    """UTF-16 code units: a supplementary character stands before U+E000 and above."""
    assert string_order(["0-2", "0-10", "0-1"]) == ["0-1", "0-10", "0-2"]
    assert string_order(["\uffee", "\U00010000", "b", "a", "a"]) == [
        "a",
        "b",
        "\U00010000",
        "\uffee",
    ]
    assert string_order(["\ue000", "\ud800"]) == ["\ud800", "\ue000"]


def test_default_gives_the_runs_of_metaq() -> None:
    """Eleven partitions, three members: 4, 4 and 3 neighbours in string order."""
    assert assign(Strategy.DEFAULT, THREE, ELEVEN) == {
        "g_c1": ("0-0", "0-1", "0-10", "0-2"),
        "g_c2": ("0-3", "0-4", "0-5", "0-6"),
        "g_c3": ("0-7", "0-8", "0-9"),
    }


def test_default_orders_members_as_java_does() -> None:
    """The member with the supplementary character comes first, and gets more."""
    plan = assign(Strategy.DEFAULT, ["g_\uffee", "g_\U0001f600"], ["0-0", "0-1", "0-2"])
    assert plan == {"g_\U0001f600": ("0-0", "0-1"), "g_\uffee": ("0-2",)}


def test_default_leaves_members_without_partitions() -> None:
    """More members than partitions: the last ones get nothing."""
    assert assign(Strategy.DEFAULT, THREE, ["0-0", "0-1"]) == {
        "g_c1": ("0-0",),
        "g_c2": ("0-1",),
        "g_c3": (),
    }


@pytest.mark.parametrize(("partition", "expected"), HASHES.items())
def test_consist_hashes_as_metaq(partition: str, expected: tuple[int, str]) -> None:
    """Hash and owner of each of MetaQ's vectors."""
    place, owner = expected
    assert partition_hash(partition) == place
    assert assign(Strategy.CONSIST, THREE, HASHES)[owner].count(partition) == 1


def test_a_member_has_160_points() -> None:
    """Forty digests of four numbers each."""
    points = member_points("g_c1")
    assert len(points) == 160
    assert all(0 <= point < 2**32 for point in points)


def test_a_partition_on_a_point_belongs_to_it_and_the_ring_wraps() -> None:
    """At or behind the hash; behind the last point comes the first; later wins ties."""
    points = {"a": [10, 30], "b": [20, 30]}
    hashes = {"at": 10, "after": 11, "tie": 30, "wrap": 31}
    plan = ring_assignment(points, hashes)
    assert plan == {"a": ("at", "wrap"), "b": ("after", "tie")}


@given(strategy=strategies, members=member_lists, partitions=partition_lists)
def test_every_partition_has_one_owner(
    strategy: Strategy, members: list[str], partitions: list[str]
) -> None:
    """Nothing is read twice, nothing is left out, every member is named."""
    plan = assign(strategy, members, partitions)
    assert plan.keys() == set(members)
    assigned = [partition for share in plan.values() for partition in share]
    assert sorted(assigned) == (sorted(set(partitions)) if members else [])
    assert all(list(share) == string_order(share) for share in plan.values())


@given(
    strategy=strategies,
    members=member_lists,
    partitions=partition_lists,
    data=st.data(),
)
def test_the_order_of_what_is_seen_does_not_matter(
    strategy: Strategy, members: list[str], partitions: list[str], data: st.DataObject
) -> None:
    """Members that list the same sets in other orders agree."""
    other_members = data.draw(st.permutations(members))
    other_partitions = data.draw(st.permutations(partitions))
    assert assign(strategy, members, partitions) == assign(
        strategy, other_members, other_partitions
    )


@given(members=member_lists, partitions=partition_lists)
def test_default_is_even(members: list[str], partitions: list[str]) -> None:
    """Shares differ by one partition at most, the longer ones first."""
    plan = assign(Strategy.DEFAULT, members, partitions)
    sizes = [len(plan[member]) for member in string_order(members)]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] - sizes[-1] <= 1


@given(members=member_lists, newcomer=names, partitions=partition_lists)
def test_consist_moves_only_what_the_newcomer_gets(
    members: list[str], newcomer: str, partitions: list[str]
) -> None:
    """A newcomer takes; no partition moves between others. Going is the mirror."""
    rest = [member for member in members if member != newcomer]
    before = assign(Strategy.CONSIST, rest, partitions)
    after = assign(Strategy.CONSIST, [*rest, newcomer], partitions)
    for member in rest:
        assert set(after[member]) <= set(before[member])
