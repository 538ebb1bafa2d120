"""A broker as one replica of a set: what it opens, and what clients see of it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from metaq.broker.replica_part import SetStart
from metaq.client import AsyncClient
from metaq.clock import SystemClock
from metaq.errors import DiskError
from metaq.replication.election import Flag
from metaq.replication.set_file import read_set_file
from metaq.replication.store import StartFacts
from metaq.storage.log_manager import LogManager
from metaq.zk.registry import RegistrationState
from tests.replication.replicas import DATA, SET_INI, Replicas, run, soon
from tests.rigs.broker import make_config

SEGMENT = DATA / "test-0" / "00000000000000000000.meta"
MASTER = "/meta/brokers/ids/0/master"


async def taken(rig: Replicas, place: str) -> bool:
    """Return whether the leader acknowledges a put."""
    answer = await rig.put(rig.leader(), place=place)
    return answer.startswith(b"result 200 ")


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
    start = SetStart(disk, config)
    try:
        return start.open(logs, [DATA], frozenset())
    finally:
        logs.abandon()


def test_the_flag_is_on_the_disk_before_a_torn_tail_goes() -> None:
    """A crash in between would forget that bytes were promised which are gone."""

    async def scenario(rig: Replicas) -> None:
        await rig.put(rig.leader())
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
        assert not facts.is_short
        file = read_set_file(rig[other].disk, DATA)
        assert file is not None
        assert file.flag is Flag.CUT
        assert facts.file == file
        assert len(rig.bytes_of(other)) == 25

    run(scenario)


def test_a_tail_of_an_incomplete_replica_says_nothing_more() -> None:
    """Its flag is the stronger one."""

    async def scenario(rig: Replicas) -> None:
        await rig.put(rig.leader())
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


def test_ids_of_a_new_leader_are_above_those_of_the_last() -> None:
    """Also where its clock is late."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        before = (await rig.put(first)).split()[4]
        await rig.equal()
        await rig[first].stop()
        await rig.led()
        await rig.in_sync(*{1, 2, 3} - {first})
        after = (await rig.put(rig.leader())).split()[4]
        assert int(after) > int(before)

    run(scenario)


def test_a_broker_that_is_no_replica_loads_nothing_of_the_protocol() -> None:
    """Its start is as short as before there were sets."""
    code = "import sys, metaq.broker.app; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True)
    names = set(loaded.stdout.split())
    assert "metaq.broker.app" in names
    assert not names & {f"metaq.replication.{each}" for each in ("node", "messages")}


def test_a_deleted_topic_is_gone_from_all_replicas_and_can_be_made_again() -> None:
    """A set takes no transactions: their journal is not asked before the data goes."""

    async def scenario(rig: Replicas) -> None:
        own = "own 0"

        def numbers() -> list[int | None]:
            logs = [each.log("own") for each in rig.running]
            return [None if log is None else log.number for log in logs]

        async with AsyncClient(coordinator=rig.zookeeper.coordinator) as client:
            admin = client.admin()
            await admin.create_topic("own", partitions=1)
            await soon(lambda: taken(rig, own))
            await soon(lambda: len({*numbers()}) == 1, show=rig.describe)
            first = numbers()
            await admin.delete_topic("own")
            await soon(lambda: numbers() == [None] * 3, show=rig.describe)
            await admin.create_topic("own", partitions=1)
            await soon(lambda: taken(rig, own))
            await soon(lambda: len({*numbers()}) == 1, show=rig.describe)
            assert numbers() != first

    run(scenario)
