"""Exactly once despite faults: one at each request, and many at random."""

import asyncio
import random

import pytest

from tests.client.exactly_once_model import (
    GROUP,
    INPUTS,
    PATHS,
    Fault,
    Member,
    World,
    check,
    heal,
)
from tests.rigs.virtual_time import run_virtually
from tests.sampling import IS_WHOLE, SEED, quarter

STEPS = 8
RUNS = 2000 if IS_WHOLE else 100
"""Random histories of one run."""


async def one_fault(at: int, fault: Fault) -> int:
    """Have request `at` of a member fail; return how many there were."""
    world = World()
    member, other = Member(world, "g_one"), Member(world, "g_other")
    passed = 0

    def choose(who: Member, what: str) -> Fault | None:
        nonlocal passed
        if who is not member:
            return None
        passed += 1
        return fault if passed == at + 1 else None

    async def meanwhile() -> None:
        await other.run(INPUTS, STEPS)
        await other.close()

    async def sweep() -> None:
        world.lag = lambda count: count
        await other.sweep()
        world.lag = lambda _count: 0

    world.choose, world.meanwhile, world.sweep = choose, meanwhile, sweep
    await asyncio.sleep(1)
    await member.run(INPUTS, STEPS)
    if not member.is_dead:
        await member.close()
    await heal(world, [member, other])
    check(world, [member, other])
    return passed


def test_without_a_fault_each_input_is_written_once() -> None:
    """The model itself: a member alone does all of it."""
    assert run_virtually(one_fault(-2, Fault.FAILED)) > 40


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)
def test_one_fault_at_any_request_neither_loses_nor_doubles(fault: Fault) -> None:
    """Each request to ZooKeeper and to brokers has the fault once."""
    count = run_virtually(one_fault(-2, fault))
    for at in quarter(range(count), random.Random(SEED)):
        run_virtually(one_fault(at, fault))


async def history(seed: int) -> None:
    """Members that come and go, with faults at random."""
    rng = random.Random(seed)
    world = World()
    members: list[Member] = []
    rate = rng.choice([0.01, 0.03, 0.1])
    faults = [one for one in Fault if not one.name.startswith("S")]
    faults += [Fault.SESSION_LOST_BEFORE, Fault.SESSION_LOST_AFTER]

    def choose(who: Member, what: str) -> Fault | None:
        return rng.choice(faults) if rng.random() < rate else None

    world.choose = choose
    slow_s = rng.choice([0.0, 0.02, 0.1])
    world.pause_s = lambda: rng.random() * slow_s
    if rng.random() < 0.5:
        world.lag = lambda count: rng.randint(0, count)
    for number in range(rng.randint(2, 5)):
        member = Member(world, f"g_{number}")
        members.append(member)
    await asyncio.sleep(1)

    async def live(member: Member) -> None:
        for _ in range(rng.randint(1, 6)):
            wanted = rng.sample(INPUTS, rng.randint(1, len(INPUTS)))
            await asyncio.sleep(rng.random() * 3)
            await member.run(wanted, rng.randint(1, 3))
            if member.is_dead:
                await asyncio.sleep(rng.random() * 5)
                member.reap()
                return
            if rng.random() < 0.5:
                await member.leave()

    async def brokers() -> None:
        for _ in range(rng.randint(0, 4)):
            await asyncio.sleep(rng.random() * 4)
            broker = rng.choice(list(world.brokers.values()))
            broker.is_away = True
            if rng.random() < 0.5:
                broker.transactions.restart()
            await asyncio.sleep(rng.random() * 6)
            broker.is_away = False

    async def saboteur() -> None:
        for _ in range(rng.choice([0, 0, 3])):
            await asyncio.sleep(rng.random() * 4)
            world.server.remove(PATHS.owner(GROUP, rng.choice(INPUTS)))

    await asyncio.gather(*map(live, members), brokers(), saboteur())
    await heal(world, members)
    check(world, members)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_members_by_turns_with_faults_write_each_input_once(part: int) -> None:
    """Two to five members claim, release, die; sessions, answers, owners are lost."""
    rng = random.Random(SEED + part)
    for _ in range(RUNS // 4):
        seed = rng.randrange(2**32)
        try:
            run_virtually(history(seed))
        except BaseException as error:
            error.add_note(f"history({seed})")
            raise
