"""All members of a log group have one filter; others are refused."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.errors import GroupInUseError
from metaq.zk.session import SessionEvent
from tests.client.group_members import (
    GROUP,
    ID,
    PATHS,
    Group,
    Member,
    owners,
    parts,
    run_group,
)
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until

NODE = PATHS.group_filter(GROUP)
PAID, VOID = "tag = 'paid'", "tag = 'void'"


def node_of(group: Group) -> str | None:
    node = group.server.nodes.get(NODE)
    return None if node is None else node.data.decode() or None


def test_members_that_say_the_same_share_the_partitions() -> None:
    """The first one writes it; it stays when they are gone."""

    async def scenario(group: Group, one: Member) -> None:
        await one.join()
        assert node_of(group) == PAID
        two = await group.join("c2", PAID)
        await until(lambda: len(one.reading) == len(two.reading) == 1)
        await group.leave()
        assert node_of(group) == PAID

    run_group(scenario, 2, where=PAID, is_joined=False)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (PAID, VOID, "reads with where=\"tag = 'paid'\", and this .* where=\"tag = 'v"),
        (PAID, None, "reads with where=\"tag = 'paid'\", and this member with no fil"),
        (None, VOID, "reads with no filter, and this member with where=\"tag = 'void"),
    ],
)
def test_another_filter_is_refused_and_the_group_does_not_notice(
    first: str | None, second: str | None, text: str
) -> None:
    """The sentence has both; no node of ours is written."""

    async def scenario(group: Group, one: Member) -> None:
        await one.join()
        before = dict(group.server.nodes)
        two = group.make("c2", second)
        with pytest.raises(GroupInUseError, match=text):
            await two.join()
        assert two.sink.calls == []
        assert dict(group.server.nodes) == before
        assert one.reading == parts(0, 1)
        assert one.source.rebalance_count == 1
        await two.quit()

    run_group(scenario, 2, where=first, is_joined=False)


def test_a_member_alone_changes_the_filter() -> None:
    """A group that never had one has no node."""

    async def scenario(group: Group, one: Member) -> None:
        await one.join()
        assert not any(
            path.startswith(NODE[: -len(GROUP)]) for path in group.server.nodes
        )
        await one.leave()
        for number, where in enumerate((PAID, VOID, None)):
            member = await group.join(f"m{number}", where)
            assert node_of(group) == where
            assert member.reading == parts(0, 1)
            await member.leave()

    run_group(scenario, 2, is_joined=False)


def test_a_member_whose_session_was_lost_waits_for_those_that_came_since() -> None:
    """Its group filters otherwise now; when they are gone it goes on with its own."""

    async def scenario(group: Group, one: Member) -> None:
        group.server.reap(one.coordinator.status.session_id)
        one.coordinator.report(SessionEvent.EXPIRED)
        two = await group.join("c2", VOID)
        group.server.resume(one.coordinator)
        await until(lambda: isinstance(one.source.last_error, GroupInUseError))
        assert two.reading == parts(0, 1)
        assert one.reading == set()
        assert ID not in group.server.nodes
        await two.leave()
        await until(lambda: one.reading == parts(0, 1))
        assert node_of(group) == PAID

    run_group(scenario, 2, where=PAID)


def test_a_filter_that_others_delete_comes_back() -> None:
    """Members leave, and the first one that is alone writes it again."""

    async def scenario(group: Group, one: Member) -> None:
        two = await group.join("c2", PAID)
        await until(lambda: len(one.reading) == len(two.reading) == 1)
        group.server.remove(NODE)
        await until(lambda: node_of(group) == PAID)
        await until(lambda: len(one.reading) == len(two.reading) == 1)
        await until(lambda: one.is_settled and two.is_settled)

    run_group(scenario, 2, where=PAID)


DELAYED = ("get", "children", "replace", "delete", "create_ephemeral")
WHERES = st.sampled_from([None, PAID, VOID])


@given(
    st.lists(st.tuples(WHERES, st.floats(0, 0.1)), min_size=2, max_size=4),
    st.integers(0, 2**32),
)
def test_members_that_begin_at_once_end_with_one_filter(
    begins: list[tuple[str | None, float]], seed: int
) -> None:
    """In whatever order their requests come; one of them stays in any case."""
    rng = random.Random(seed)

    def slow(ask: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(*args: Any, **named: Any) -> Any:
            await asyncio.sleep(rng.choice([0, 0, 0.01, 0.05]))
            return await ask(*args, **named)

        return answer

    async def main() -> None:
        group = Group(3)
        wheres = dict[Member, str | None]()

        async def begin(number: int, where: str | None, after_s: float) -> None:
            member = group.make(f"c{number}", where)
            wheres[member] = where
            for name in DELAYED:
                setattr(
                    member.coordinator, name, slow(getattr(member.coordinator, name))
                )
            await member.connect()
            await asyncio.sleep(after_s)
            try:
                await member.source.start(member.sink)
            except GroupInUseError:
                await member.quit()

        await asyncio.gather(*(begin(n, *each) for n, each in enumerate(begins)))
        await asyncio.sleep(60)
        readers = [each for each in group.members if each.reading]
        assert {wheres[each] for each in readers} == {node_of(group)}
        assert set().union(*(each.reading for each in readers)) == parts(0, 1, 2)
        assert len(owners(group.server)) == 3
        same = {where for where, _after_s in begins}
        if len(same) == 1:
            assert not any(each.has_quit for each in group.members)
        await group.leave()

    run_virtually(main())
