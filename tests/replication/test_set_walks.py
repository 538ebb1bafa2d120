"""Seeded walks over three brokers: networks, disks, loops and ZooKeeper all fail."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from metaq.replication import following, leading
from tests.replication.set_walk import SETTLE_S, TIMES, Walk, direct, run_walk
from tests.rigs.waiting import until
from tests.sampling import IS_QUICK, IS_WHOLE, SEED

pytestmark = pytest.mark.timeout(400)

Prepare = Callable[[Walk, int], Awaitable[None]]
WALKS = range(SEED, SEED + (20 if IS_WHOLE else 1 if IS_QUICK else 3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", WALKS)
def test_nothing_that_was_promised_is_lost_on_a_walk(seed: int, tmp_path: Path) -> None:
    """And the set is well some time after the last fault."""

    async def act(walk: Walk) -> None:
        # Without power cuts also the numbers of batches are remembered.
        await direct(walk, length_s=8.0, has_power=seed % 2 == 0)

    run_walk(seed, tmp_path, act)


def test_a_set_at_rest_keeps_its_streams() -> None:
    """A leader without bytes answers one pull after the other: also the last one has
    its answer long before its deadline, with the times of a walk too."""
    pull_s, idle_s = following.PULL_S, leading.IDLE_S
    assert pull_s > 3 * following.PULLS * idle_s
    pull_s = TIMES["metaq.replication.following.PULL_S"]
    idle_s = TIMES["metaq.replication.leading.IDLE_S"]
    assert pull_s > 3 * following.PULLS * idle_s


# -- the power of all -----------------------------------------------------------------


async def leave_out(walk: Walk, number: int) -> None:
    """Have a replica stop, and the others go on without it."""
    walk.note(f"stop {number}")
    walk.busy.add(number)
    await walk.rig[number].stop()
    await until(lambda: number not in walk.rig.record.in_sync, SETTLE_S, walk.describe)


async def hold(walk: Walk, number: int) -> None:
    """Have a replica stand still, for less than the lag time or for more."""
    walk.note(f"hold {number}")
    for way in walk.rig.links.of(number):
        way.stall()
    walk.rig[number].disk.hang()
    await walk.pause(0.0, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEED, SEED + (8 if IS_WHOLE else 1)))
@pytest.mark.parametrize("before", [None, leave_out, hold], ids=["all", "out", "held"])
def test_nothing_is_lost_when_all_lose_power(
    seed: int, before: Prepare | None, tmp_path: Path
) -> None:
    """Each disk keeps another part of what was not synced, and tears it elsewhere."""

    async def act(walk: Walk) -> None:
        for _ in range(3):
            number = walk.rig.follower()
            if before is not None:
                await before(walk, number)
            await walk.pause(0.2, 1.0)
            there = [each.number for each in walk.rig.running]
            walk.note(f"cut power of {there}")
            for each in there:
                walk.cut_power(each)
            for way in walk.rig.links.of(number):
                way.pass_all()
            if number not in there:
                await walk.pause(0.0, 2.0)
                await walk.bring_up(number)
            await walk.heal()

    run_walk(seed, tmp_path, act)
