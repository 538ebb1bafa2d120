"""A broker as one replica of a set: what it opens, and what clients see of it."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from metaq.broker.replica_part import HUNG_S, LOOK_S, ReplicaPart, open_set
from metaq.client import AsyncAdmin, AsyncClient
from metaq.clock import SystemClock
from metaq.errors import DiskError
from metaq.model import MAX_OFFSET, LogId
from metaq.replication.election import Flag
from metaq.replication.leading import GONE_S
from metaq.replication.replica import ReplicaRole
from metaq.replication.set_file import read_set_file
from metaq.replication.store import StartFacts
from metaq.storage.log_manager import LogManager
from metaq.zk.definitions import COPY_NAME
from metaq.zk.registry import RegistrationState
from metaq.zk.session import SessionEvent, SessionState
from tests.replication.replicas import (
    DATA,
    SET_INI,
    Replicas,
    replicas,
    run,
    soon,
)
from tests.rigs.broker import make_config
from tests.rigs.inside import store_of

SEGMENT = DATA / "test-0" / "00000000000000000000.meta"
COPY = DATA / COPY_NAME
MASTER = "/meta/brokers/ids/0/master"


async def taken(rig: Replicas, place: str) -> bool:
    """Return whether the leader acknowledges a put."""
    answer = await rig.put(rig.leader(), place=place)
    return answer.startswith(b"result 200 ")


async def says(rig: Replicas, number: int, end: bytes) -> bool:
    """Return whether a replica answers so where it is asked for an end."""
    return (await rig.ask(number, b"offset test g 0 25 2\r\n")).endswith(end)


def torn(rig: Replicas, number: int) -> None:
    """Leave half a record at the end of partition 0 of a replica that has stopped."""
    file = rig[number].disk.open_append(SEGMENT, create=False)
    file.write(b"half a rec")
    file.close()


def opened(rig: Replicas, number: int) -> StartFacts:
    """Open the logs of a replica's disk without a broker, and return the facts."""
    disk = rig[number].disk
    config = make_config(DATA, {"replicaId": str(number)}, SET_INI)
    logs = LogManager(disk, SystemClock(), lambda task: task(), config)
    try:
        return open_set(disk, config, logs, [DATA])
    finally:
        logs.abandon()


@pytest.mark.slow
def test_the_flag_is_on_the_disk_before_a_torn_tail_goes() -> None:
    """A crash in between would forget that bytes were promised which are gone."""

    async def scenario(rig: Replicas) -> None:
        await rig.store()
        await rig.equal()
        other = rig.follower()
        rig.zookeeper.reap(await rig[other].kill())
        torn(rig, other)
        rig[other].save_error = DiskError("write", "/data/set", "EIO")
        with pytest.raises(DiskError):
            opened(rig, other)
        assert rig.bytes_of(other).endswith(b"half a rec")
        rig[other].save_error = None
        facts = opened(rig, other)
        assert facts.is_cut
        assert not facts.lacks_bytes
        file = read_set_file(rig[other].disk, DATA)
        assert file is not None
        assert file.flag is Flag.CUT
        assert facts.file == file
        assert len(rig.bytes_of(other)) == 25

    run(scenario)


@pytest.mark.slow
def test_a_tail_of_an_incomplete_replica_says_nothing_more() -> None:
    """Its flag is the stronger one."""

    async def scenario(rig: Replicas) -> None:
        await rig.store()
        await rig.equal()
        other = rig.follower()
        rig.zookeeper.reap(await rig[other].kill())
        torn(rig, other)
        file = read_set_file(rig[other].disk, DATA)
        assert file is not None
        flagged = replace(file, flag=Flag.INCOMPLETE)
        rig[other].save(rig[other].disk, DATA, flagged)
        assert opened(rig, other).file == flagged

    run(scenario)


@pytest.mark.slow
def test_clients_see_the_leader_alone() -> None:
    """MetaQ's nodes are its own; a follower has none to miss."""

    async def scenario(rig: Replicas) -> None:
        def seen() -> str:
            node = rig.zookeeper.nodes.get(MASTER)
            return node.data.decode() if node else ""

        first = rig.leader()
        await soon(lambda: seen() == rig[first].address)
        for number in (1, 2, 3):
            broker = rig[number].broker
            assert broker is not None
            registration = broker.control.status().registration
            assert registration is not None
            is_leader = number == first
            assert (registration.state is RegistrationState.REGISTERED) == is_leader
            assert (
                registration.session.session_id == rig[number].client.status.session_id
            )
        await rig[first].stop()
        await rig.led()
        await soon(lambda: seen() == rig[rig.leader()].address)

    run(scenario)


@pytest.mark.slow
def test_a_leader_that_hung_names_no_end_before_it_knows_who_leads() -> None:
    """Others may have put more: its first answer after a thaw is a refusal."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        await rig.store()
        await rig.equal()
        beyond = b"get test g 0 %d 10 3\r\n" % MAX_OFFSET
        await soon(lambda: says(rig, leader, b"25"))
        rig.zookeeper.suspend(rig[leader].client)
        clock: Any = rig[leader].clock
        clock.boot_s = lambda: SystemClock().boot_s() + 2 * HUNG_S
        assert await says(rig, leader, b"[not-settled]")
        assert (await rig.ask(leader, beyond)).startswith(b"result 404 ")
        assert (await rig.ask(leader, b"get test g 0 0 10 4\r\n")).startswith(b"value")
        await asyncio.sleep(3 * LOOK_S)
        assert await says(rig, leader, b"[not-settled]")
        rig.zookeeper.resume(rig[leader].client)
        await soon(lambda: says(rig, leader, b"25"))

    run(scenario)


@pytest.mark.slow
def test_a_leader_whose_session_is_over_names_ends_while_all_others_pull() -> None:
    """No other has claimed then; when one is silent, it may lead, and have more."""

    async def scenario() -> None:
        settings = {"replicaLagTimeoutMs": "60000"}
        async with replicas(settings=settings, has_links=True) as rig:
            leader = rig.leader()
            await rig.store()
            await rig.equal()
            rig.zookeeper.stop()
            rig[leader].client.report(SessionEvent.EXPIRED)
            await asyncio.sleep(2 * GONE_S)
            assert rig[leader].client.status.state is SessionState.LOST
            # On a busy machine one that pulls may be silent for a moment.
            await soon(lambda: says(rig, leader, b"25"))
            for way in rig.links.of(rig.follower()):
                way.stall()
            await soon(lambda: says(rig, leader, b"[not-settled]"))
            assert rig[leader].role == ReplicaRole.LEADING
            for way in rig.links.of(rig.follower()):
                way.pass_all()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_follower_names_no_end() -> None:
    """It is late, and may be a leader of before to which a client is connected."""

    async def scenario(rig: Replicas) -> None:
        await rig.store()
        await rig.equal()
        other = rig.follower()
        answer = await rig.ask(other, b"offset test g 0 25 2\r\n")
        assert answer.endswith(b"[not-settled]")
        answer = await rig.ask(other, b"get test g 0 %d 10 3\r\n" % MAX_OFFSET)
        assert answer.startswith(b"result 404 ")
        answer = await rig.ask(other, b"get test g 0 0 10 4\r\n")
        assert answer.startswith(b"value")

    run(scenario)


@pytest.mark.slow
def test_ids_of_a_new_leader_are_above_those_of_the_last() -> None:
    """Also where its clock is late."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        before = (await rig.store()).split()[4]
        await rig.equal()
        await rig[first].stop()
        await rig.led()
        await rig.in_sync(*{1, 2, 3} - {first})
        after = (await rig.store()).split()[4]
        assert int(after) > int(before)

    run(scenario)


@pytest.mark.slow
def test_a_broker_that_is_no_replica_loads_nothing_of_the_protocol() -> None:
    """Its start is as short as before there were sets."""
    code = "import sys, metaq.broker.app; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True)
    names = set(loaded.stdout.split())
    assert "metaq.broker.app" in names
    assert not names & {f"metaq.replication.{each}" for each in ("node", "messages")}


def numbers(rig: Replicas) -> list[int | None]:
    """Return the number that each replica has for the log of the topic `own`."""
    logs = [store_of(each.node).logs.get(LogId("own", 0)) for each in rig.running]
    return [None if log is None else log.number for log in logs]


async def make_topic(rig: Replicas, admin: AsyncAdmin) -> None:
    """Make the topic `own`, and wait until all replicas have its log."""
    await admin.create_topic("own", partitions=1)
    await soon(lambda: taken(rig, "own 0"))
    await soon(lambda: len({*numbers(rig)}) == 1, show=rig.describe)


@pytest.mark.slow
def test_a_deleted_topic_is_gone_from_all_replicas_and_can_be_made_again() -> None:
    """A set takes no transactions: their journal is not asked before the data goes."""

    async def scenario(rig: Replicas) -> None:
        async with AsyncClient(coordinator=rig.zookeeper.coordinator) as client:
            admin = client.admin()
            await make_topic(rig, admin)
            first = numbers(rig)
            await admin.delete_topic("own")
            await soon(lambda: numbers(rig) == [None] * 3, show=rig.describe)
            await make_topic(rig, admin)
            assert numbers(rig) != first

    run(scenario)


@pytest.mark.slow
def test_a_replica_that_starts_while_a_topic_is_deleted_lacks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader has its log until the number is gone, and so has everyone else."""
    is_open = asyncio.Event()
    bury = ReplicaPart.bury

    async def bury_later(self: ReplicaPart, topic: str) -> None:
        await is_open.wait()
        await bury(self, topic)

    monkeypatch.setattr(ReplicaPart, "bury", bury_later)

    async def scenario(rig: Replicas) -> None:
        async with AsyncClient(coordinator=rig.zookeeper.coordinator) as client:
            admin = client.admin()
            await make_topic(rig, admin)
            first, other = numbers(rig), rig.follower()
            deleting = asyncio.create_task(admin.delete_topic("own"))
            await soon(lambda: b"deleting" in rig[other].disk.content(COPY))
            await rig[other].stop()
            await rig[other].start()
            await rig.in_sync(1, 2, 3)
            assert rig[other].node.replica.file.flag is Flag.NONE
            assert numbers(rig) == first
            is_open.set()
            await deleting
            await soon(lambda: numbers(rig) == [None] * 3, show=rig.describe)

    run(scenario)


@pytest.mark.slow
def test_a_deletion_that_a_kill_has_cut_short_is_finished_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number is gone, and the files are there still: no leader asks for them."""

    async def scenario(rig: Replicas) -> None:
        async with AsyncClient(coordinator=rig.zookeeper.coordinator) as client:
            admin = client.admin()
            await make_topic(rig, admin)
            (number, *_), other = numbers(rig), rig.follower()
            store = store_of(rig[other].node)
            with monkeypatch.context() as patch:
                patch.setattr(store.logs, "set_logs_aside", lambda *_: None)
                await admin.delete_topic("own")
                await soon(lambda: number in store.tables.gone)
                rig.zookeeper.reap(await rig[other].kill())
            assert "own-0" in rig[other].disk.names_in(DATA)
            await rig[other].start()
            await soon(lambda: "own-0" not in rig[other].disk.names_in(DATA))
            assert LogId("own", 0) not in store_of(rig[other].node).logs.logs()
            await make_topic(rig, admin)

    run(scenario)
