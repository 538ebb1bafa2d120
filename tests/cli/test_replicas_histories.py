"""`metaq replicas` where something is lost: every way out of it, to its end."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metaq.cli import replicas
from metaq.cli.cluster import Target
from metaq.client import AsyncClient
from metaq.model import Millis
from metaq.replication.operator import leave_set
from metaq.replication.record import ReplicaSetError
from metaq.replication.replica import ReplicaRole as R
from tests.cli.test_replicas import write_settings
from tests.replication.replicas import DATA, RECORD, SOON_S, Replicas, run, soon


async def command(rig: Replicas, work: Callable[..., Any], *args: Any) -> Any:
    """Run a command, in a thread and on a loop of its own, and say yes."""
    target = Target("memory", "/meta", (), SOON_S, rig.zookeeper.coordinator)
    return await asyncio.to_thread(work, target, *args, is_sure=True)


async def restore(rig: Replicas, *missing: int) -> None:
    def work(target: Target, *, is_sure: bool) -> None:
        replicas.restore(target, None, missing, is_dry=False, is_sure=is_sure)

    await command(rig, work)


async def discard(rig: Replicas, number: int, tmp_path: Path) -> None:
    """Do what `metaq replicas join --discard` does, on a disk in memory."""
    path = write_settings(tmp_path, tmp_path / "empty", number)

    def work(_target: Target, *, is_sure: bool) -> bool:
        return replicas.join(
            path,
            {},
            is_discarding=True,
            is_sure=is_sure,
            new_coordinator=rig.zookeeper.coordinator,
        )

    assert await command(rig, work)
    leave_set(rig[number].disk, [DATA], Millis(0))


async def kill(rig: Replicas, *numbers: int) -> None:
    """Kill replicas, and end their sessions."""
    for number in numbers:
        rig.zookeeper.reap(await rig[number].kill())


async def part(rig: Replicas) -> None:
    """Have 3 lead by force, and then 1 and 2 by a ZooKeeper from before that."""
    await rig.store(b"both!")
    await rig.equal()
    backup = rig.zookeeper.tree()
    await kill(rig, 1, 2)
    assert await command(rig, replicas.elect, 3, None)
    await rig.role(3, R.LEADING)
    await kill(rig, 3)
    rig.zookeeper.restore(backup)
    for session in {each.owner_session_id for each in backup.values()} - {0}:
        rig.zookeeper.reap(session)
    await rig.start(1, 2)
    await rig.in_sync(1, 2)
    await rig.store(b"pair!")
    await rig.start(3)
    await rig.role(3, R.FROZEN)
    with pytest.raises(ReplicaSetError, match=r"two histories .* as missing"):
        await restore(rig)


async def is_well(rig: Replicas, *, has_pair: bool) -> None:
    """Wait until the set takes puts, and all have the same."""
    await rig.in_sync(1, 2, 3)
    await rig.store(b"after")
    await rig.equal()
    held = rig.bytes_of(1)
    assert [held.count(each) for each in (b"both!", b"pair!", b"after")] == [
        1,
        has_pair,
        1,
    ]


@pytest.mark.slow
def test_the_history_of_those_that_lead_is_believed(tmp_path: Path) -> None:
    """The other replica is stopped, discards what it has, and joins."""

    async def scenario(rig: Replicas) -> None:
        await part(rig)
        await rig[3].stop()
        await restore(rig, 3)
        await rig.start(3)  # as it is, it has no part
        await rig.role(3, R.FROZEN)
        await rig[3].stop()
        await discard(rig, 3, tmp_path)
        await rig.start(3)
        await is_well(rig, has_pair=True)

    run(scenario)


@pytest.mark.slow
def test_the_history_of_the_one_that_was_forced_is_believed(tmp_path: Path) -> None:
    """The others are stopped; it is forced to lead where it does not by itself."""

    async def scenario(rig: Replicas) -> None:
        await part(rig)
        for number in (1, 2):
            await rig[number].stop()
        await restore(rig, 1, 2)
        assert rig.record.in_sync == {3}
        assert await command(rig, replicas.elect, 3, None)
        for number in (1, 2):
            await discard(rig, number, tmp_path)
        await rig.start(1, 2)
        await is_well(rig, has_pair=False)

    run(scenario)


@pytest.mark.slow
def test_a_replica_that_is_left_alone_with_a_lost_record_is_forced_to_lead(
    tmp_path: Path,
) -> None:
    """It was out of the set; those that had more come back after it leads."""

    async def scenario(rig: Replicas) -> None:
        await rig.store(b"both!")
        await rig.equal()
        await kill(rig, 3)
        await rig.in_sync(1, 2)
        await rig.store(b"pair!")
        await rig.equal()
        await kill(rig, 1, 2)
        rig.zookeeper.stop()
        rig.zookeeper.start(is_wiped=True)
        await rig.start(3)
        await rig.role(3, R.FROZEN)
        with pytest.raises(ReplicaSetError, match=r"\[1, 2\] have not reported"):
            await restore(rig)
        await restore(rig, 1, 2)
        await soon(lambda: RECORD in rig.zookeeper.nodes)
        assert await command(rig, replicas.elect, 3, None)
        await rig.start(1, 2)
        await is_well(rig, has_pair=False)

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("has_committed", [True, False])
def test_a_member_that_runs_while_a_replica_is_forced_loses_no_new_message(
    caplog: pytest.LogCaptureFixture, has_committed: bool
) -> None:
    """It goes on at the lowered offset, or commits over it and begins again."""

    async def scenario(rig: Replicas) -> None:
        await rig.store(b"both!")
        await rig.equal()
        await kill(rig, 3)
        await rig.in_sync(1, 2)
        for _ in range(3):
            await rig.store(b"pair!")
        client = AsyncClient(coordinator=rig.zookeeper.coordinator)
        async with client, client.consumer("g", ["test"], start="earliest") as member:

            async def receive() -> bytes | None:
                message = await member.receive(SOON_S)
                return message and message.data

            assert [await receive() for _ in range(4)] == [b"both!", *[b"pair!"] * 3]
            if has_committed:
                await member.commit()
            await rig.start(3)
            await kill(rig, 1, 2)
            assert await command(rig, replicas.elect, 3, None)
            await rig.start(1, 2)
            await rig.in_sync(1, 2, 3)
            if not has_committed:
                # Until now the last message was being handled.
                assert await receive() == b"both!"
            aloud = "committed offset is outside the log: partition=test/0-0"
            assert (aloud in caplog.text) != has_committed
            await rig.store(b"after")
            assert await receive() == b"after"

    run(scenario)
