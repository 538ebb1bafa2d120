"""A replica that was stopped in good order believes its directories, and no other does.

Then it leads although no other complete member is there: it has waited for them.
"""

from collections.abc import Awaitable, Callable

import pytest

from metaq.replication.election import Flag
from metaq.replication.replica import ReplicaRole as R
from tests.replication.replicas import Replicas, run, soon
from tests.replication.set_walk import new_disk

SOON = {
    "metaq.replication.election.CLAIM_WAIT_MS": 300,
    "metaq.replication.election.MERGE_WAIT_MS": 300,
}


@pytest.mark.slow
def test_the_last_complete_member_leads_again_after_a_clean_stop() -> None:
    """One other is out of the set, one has lost its disk: neither could answer it."""

    async def scenario(rig: Replicas) -> None:
        await rig.store()
        await rig.equal()
        last = rig.leader()
        out, wiped = {1, 2, 3} - {last}
        await rig[out].stop()
        await rig.in_sync(last, wiped)
        await rig[wiped].kill()
        rig[wiped].disk = new_disk()
        epoch = rig.record.epoch.number
        await rig[last].stop()
        await rig.start(last, wiped)
        await rig.role(wiped, R.IDLE)
        assert rig[wiped].node.replica.file.flag is Flag.INCOMPLETE
        assert rig.record.in_sync == {last, wiped}
        assert await rig.led(after=epoch) == last
        await rig.store(b"more!")
        await rig.equal()
        assert rig.bytes_of(wiped).count(b"hello") == 1

    run(scenario, times=SOON)


Act = Callable[[Replicas, int], Awaitable[None]]
"""Begins with the last replica that runs, and ends when it has started again."""


async def is_stopped(rig: Replicas, number: int) -> None:
    await rig[number].stop()
    await rig[number].start()


async def is_stopped_twice(rig: Replicas, number: int) -> None:
    """It had no part in the set in between, and is as it was."""
    await is_stopped(rig, number)
    await rig.role(number, R.IDLE)
    await is_stopped(rig, number)


async def is_stopped_without_zookeeper(rig: Replicas, number: int) -> None:
    """It began, and nothing came of it."""
    await rig[number].stop()
    rig.zookeeper.stop()
    await is_stopped(rig, number)
    await rig[number].stop()
    rig.zookeeper.start()
    await rig[number].start()


async def is_killed(rig: Replicas, number: int) -> None:
    await rig[number].kill()
    await rig[number].start()


async def is_killed_and_stopped(rig: Replicas, number: int) -> None:
    """A stop makes no good directory of one that is not believed."""
    await is_killed(rig, number)
    await rig.role(number, R.IDLE)
    await is_stopped(rig, number)


async def is_killed_at_its_start(rig: Replicas, number: int) -> None:
    await rig[number].stop()
    rig.zookeeper.stop()
    await rig[number].start()
    await rig[number].kill()
    rig.zookeeper.start()
    await rig[number].start()


async def is_killed_before_it_closes(rig: Replicas, number: int) -> None:
    """It has said that it stops; what it did after that nobody has looked at."""
    await rig[number].node.leave()
    await rig[number].kill()
    await rig[number].start()


async def is_killed_before_it_closes_and_stopped(rig: Replicas, number: int) -> None:
    """A life without a part in the set closes what another one has not."""
    await rig[number].node.leave()
    await rig[number].kill()
    rig.zookeeper.stop()
    await is_stopped(rig, number)
    await rig[number].stop()
    rig.zookeeper.start()
    await rig[number].start()


async def is_stopped_and_not_heard(rig: Replicas, number: int) -> None:
    rig.zookeeper.suspend(rig[number].client)
    await is_stopped(rig, number)


async def is_stopped_without_an_answer(rig: Replicas, number: int) -> None:
    """It leads no more; the version of its directories is what it tells last."""
    await rig[number].node.leave()
    rig.zookeeper.lose_answer(rig[number].client, is_carried_out=True)
    await is_stopped(rig, number)


async def is_put_back(rig: Replicas, number: int) -> None:
    """The backup is from before the stop."""
    copy = rig[number].disk.snapshot()
    await rig[number].stop()
    rig[number].disk = copy
    await rig[number].start()


async def is_put_back_as_it_was_stopped(rig: Replicas, number: int) -> None:
    """It had another life since."""
    await rig[number].stop()
    copy = rig[number].disk.snapshot()
    await rig[number].start()
    await rig.role(number, R.IDLE)
    await rig[number].stop()
    rig[number].disk = copy
    await rig[number].start()


@pytest.mark.slow
@pytest.mark.parametrize(
    "act", [is_stopped, is_stopped_twice, is_stopped_without_zookeeper]
)
def test_a_replica_is_sure_after_a_clean_stop(act: Act) -> None:
    """Before any other has answered."""
    check(act, is_sure=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "act",
    [
        is_killed,
        is_killed_and_stopped,
        is_killed_at_its_start,
        is_killed_before_it_closes,
        is_killed_before_it_closes_and_stopped,
        is_stopped_and_not_heard,
        is_stopped_without_an_answer,
        is_put_back,
        is_put_back_as_it_was_stopped,
    ],
)
def test_a_replica_is_not_sure_after_anything_else(act: Act) -> None:
    """Its directories may be older than what it has promised."""
    check(act, is_sure=False)


def check(act: Act, *, is_sure: bool) -> None:
    async def scenario(rig: Replicas) -> None:
        await rig.store()
        await rig.equal()
        last = rig.leader()
        for each in {1, 2, 3} - {last}:
            await rig[each].stop()
        await act(rig, last)
        await rig.role(last, R.IDLE)
        assert rig[last].node.replica.is_sure is is_sure

    run(scenario)


@pytest.mark.slow
def test_a_replica_that_was_killed_is_sure_when_it_has_caught_up() -> None:
    """Its leader knows what it has promised."""

    async def scenario(rig: Replicas) -> None:
        await rig.store()
        other = rig.follower()
        await rig[other].kill()
        await rig.put(rig.leader())  # it lacks this one, whose put ends in doubt
        await rig[other].start()
        await rig.role(other, R.IDLE, R.FOLLOWING)
        await soon(lambda: rig[other].node.replica.is_sure, show=rig.describe)
        await rig.equal()

    run(scenario)


@pytest.mark.slow
def test_a_frozen_replica_is_not_sure() -> None:
    """An operator decides first whose history is believed."""

    async def scenario(rig: Replicas) -> None:
        rig.zookeeper.wipe()
        for number in (1, 2, 3):
            await rig.role(number, R.FROZEN)
            assert not rig[number].node.replica.is_sure

    run(scenario)


@pytest.mark.slow
def test_a_zookeeper_that_was_set_back_makes_no_replica_sure() -> None:
    """Others went on without it, which neither it nor ZooKeeper knows any more."""

    async def scenario(rig: Replicas) -> None:
        other = rig.follower()
        backup = rig.zookeeper.tree()
        await rig[other].stop()
        await rig.in_sync(*{1, 2, 3} - {other})
        await rig.stop()
        rig.zookeeper.restore(backup)
        for session in {node.owner_session_id for node in backup.values()} - {0}:
            rig.zookeeper.reap(session)
        await rig[other].start()
        await rig.role(other, R.IDLE)
        assert not rig[other].node.replica.is_sure

    run(scenario)
