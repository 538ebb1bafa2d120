"""The alarm of a set that no replica leads, and what ends it."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from metaq.broker.health import Alarm, find_problems
from metaq.replication.operator import change_set
from metaq.replication.record import plan_force
from tests.replication.replicas import Replicas, replicas, soon

TIMES = {
    "metaq.broker.health.LEADERLESS_S": 2.0,
    "metaq.replication.claims.TERM_TRIES_S": 1.0,
    "metaq.replication.claims.MERGE_TIMEOUT_S": 0.3,
    "metaq.replication.claims.LAST_IN_RANK_S": 0.7,
}
"""In the proportions of the real ones: a claim ends before the alarm would ring."""


def play(scenario: Callable[[Replicas], Awaitable[None]]) -> None:
    async def main() -> None:
        async with replicas(times=TIMES, has_links=True) as rig:
            await scenario(rig)

    asyncio.run(main())


def rings(rig: Replicas, *numbers: int) -> bool:
    """Return whether these, and no others, have the alarm."""
    found = set()
    for each in rig.running:
        assert each.broker is not None
        problems = find_problems(each.broker.control.status())
        if Alarm.SET_LEADERLESS in {problem.alarm for problem in problems}:
            found.add(each.number)
    return found == {*numbers}


async def kill(rig: Replicas, *numbers: int) -> None:
    for number in numbers:
        rig.zookeeper.reap(await rig[number].kill())


@pytest.mark.slow
def test_the_alarm_ends_when_a_replica_that_is_in_sync_is_started() -> None:
    """The other one was killed, so it cannot know what it lacks."""

    async def scenario(rig: Replicas) -> None:
        await kill(rig, 1, 2, 3)
        await rig.start(2)
        await soon(partial(rings, rig, 2), rig.describe)
        await rig.start(3)
        await rig.led()
        await soon(partial(rings, rig), rig.describe)

    play(scenario)


@pytest.mark.slow
def test_the_alarm_ends_when_a_replica_is_forced_to_lead() -> None:
    """As `metaq replicas elect` does it."""

    async def scenario(rig: Replicas) -> None:
        await kill(rig, 1, 2, 3)
        await rig.start(2)
        await soon(partial(rings, rig, 2), rig.describe)
        async with rig.operator() as nodes:
            await change_set(
                nodes,
                lambda view, record: plan_force(record, view.view.version, 2, "f"),
            )
        await soon(partial(rings, rig), rig.describe)

    play(scenario)


@pytest.mark.slow
def test_claims_by_which_no_replica_leads_end_no_alarm() -> None:
    """Two reach ZooKeeper, and not each other: they claim in turn, for hours."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        others = {1, 2, 3} - {first}
        for number in others:
            for way in rig.links.of(number):
                way.stall()
        await kill(rig, first)
        await soon(partial(rings, rig, *others), rig.describe)
        for number in others:
            for way in rig.links.of(number):
                way.pass_all()
        await rig.led()
        await soon(partial(rings, rig), rig.describe)

    play(scenario)
