"""Alarms from their cause to their end, by the cure that docs/operations.md names."""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.broker.health import Alarm, find_problems
from metaq.broker.orders import perform
from metaq.testing.clock import ManualClock
from tests.replication.replicas import Replicas, soon
from tests.replication.replicas import run as run_set
from tests.replication.test_mending import filled, flip, get, is_record, report
from tests.rigs.broker import Peer, running_broker
from tests.rigs.faulty_calls import Operation
from tests.rigs.fs import FaultyFileSystem, keep_none
from tests.rigs.inside import wake_housekeeping
from tests.rigs.waiting import until

DATA = Path("/data")
PUT = b"put test 0 5 0 907060870 1\r\nhello"
GET = b"get test g 0 0 1000 2\r\n"
XID = b"XID:1:0a::uq"
TX_PUT = b"put test 0 5 0 -1 %b 2\r\nhello" % XID
LOOK_S = 6.0
"""Time after which the broker has looked at its logs and disks again."""

Scenario = Callable[[Broker, Peer], Awaitable[None]]


def run(
    fs: FaultyFileSystem, clock: ManualClock, scenario: Scenario, **settings: str
) -> None:
    async def main() -> None:
        async with served(fs, clock, **settings) as (broker, peer):
            await scenario(broker, peer)

    asyncio.run(main())


@asynccontextmanager
async def served(
    fs: FaultyFileSystem, clock: ManualClock, **settings: str
) -> AsyncIterator[tuple[Broker, Peer]]:
    async with (
        running_broker(DATA, settings, fs=fs, clock=clock) as broker,
        Peer(broker) as peer,
    ):
        yield broker, peer


def ringing(broker: Broker) -> set[Alarm]:
    return {problem.alarm for problem in find_problems(broker.control.status())}


async def pass_until(
    broker: Broker, clock: ManualClock, condition: Callable[[], object]
) -> None:
    """Let time pass, with the turns of the jobs that are due, until it is true."""

    async def is_met() -> object:
        clock.advance_s(LOOK_S)
        wake_housekeeping(broker)
        return condition()

    await until(is_met)


async def good(peer: Peer, words: bytes) -> bytes:
    answer = await peer.ask(words)
    assert answer.startswith(b"result 200 "), answer
    return answer


def transaction(words: bytes) -> bytes:
    return b"transaction %b s %b 1\r\n" % (XID, words)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_a_restart_ends_a_directory_that_was_offline(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """The restart decides from what is there: what was acknowledged is."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await good(peer, PUT)

        def fail(operation: Operation) -> None:
            if operation.name == "write":
                fs.fail_at(operation.number + 1, errno.EIO)

        fs.on_call(fail)
        assert b"outcome unknown" in await peer.ask(PUT)
        fs.on_call(None)
        assert Alarm.DIRECTORY_OFFLINE in ringing(broker)
        assert b"offline until a restart" in await peer.ask(PUT)

    async def again(broker: Broker, peer: Peer) -> None:
        assert not ringing(broker)
        assert b"hello" in await peer.ask(GET)
        await good(peer, PUT)

    run(fs, clock, scenario)
    run(fs.crash(keep_none), ManualClock(), again)


def test_a_disk_that_is_read_only_rings_before_a_put_meets_it(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Gets are served; once the disk takes writes again, all is well."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await good(peer, PUT)
        fs.set_read_only(True)
        rung = {Alarm.DIRECTORY_OFFLINE}
        await pass_until(broker, clock, lambda: ringing(broker) == rung)
        assert b"hello" in await peer.ask(GET)
        fs.set_read_only(False)
        await pass_until(broker, clock, lambda: not ringing(broker))
        await good(peer, PUT)

    run(fs, clock, scenario)


def test_a_disk_that_answers_again_ends_its_silence(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Directory and journal: what waits is answered then, and nothing is restarted."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await good(peer, PUT)
        await good(peer, transaction(b"BEGIN"))
        fs.hang()
        try:
            async with Peer(broker) as other:
                await other.send(PUT.replace(b"test 0", b"test 1"))
                await peer.send(TX_PUT + transaction(b"PREPARE"))
                silent = {Alarm.DIRECTORY_SILENT, Alarm.TRANSACTIONS_SILENT}
                await pass_until(broker, clock, lambda: ringing(broker) == silent)
                fs.go_on()
                assert (await other.read_some()).startswith(b"result 200 ")
                await until(lambda: not ringing(broker))
        finally:
            fs.go_on()
        async with Peer(broker) as other:
            await good(other, transaction(b"COMMIT_TWO_PHASE"))

    run(fs, clock, scenario)


def test_room_ends_a_transaction_that_is_stuck(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """It is committed while its partition has no room for it, and once at the end."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await good(peer, PUT)
        for words in (transaction(b"BEGIN"), TX_PUT, transaction(b"PREPARE")):
            await good(peer, words)

        def fill(operation: Operation) -> None:
            if operation.name == "write" and operation.path.suffix == ".meta":
                raise OSError(errno.ENOSPC, "full", str(operation.path))

        fs.on_call(fill)
        answer = await peer.ask(transaction(b"COMMIT_TWO_PHASE"))
        assert b"code=-7,msg=committed, and not in every partition yet" in answer
        assert Alarm.TRANSACTIONS_STUCK in ringing(broker)
        fs.on_call(None)
        await pass_until(broker, clock, lambda: not ringing(broker))
        assert (await peer.ask(GET)).count(b"hello") == 2

    run(fs, clock, scenario, freeBytesMin="0")


def test_connections_that_close_end_the_alarm_of_the_cap(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """One more than the cap is refused, and taken when another has gone."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        assert not ringing(broker)
        async with Peer(broker):
            assert ringing(broker) == {Alarm.CONNECTIONS_FULL}
            reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
            assert await reader.read() == b""
            writer.close()
        await until(lambda: not ringing(broker))
        async with Peer(broker) as other:
            await good(other, PUT)

    run(fs, clock, scenario, connectionCountMax="2")


def test_partitions_that_are_opened_again_ring_no_more(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """They refuse puts and gets until then, and keep what they have."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await good(peer, PUT)
        await perform(broker.control, {"command": "close_partitions", "topic": "test"})
        assert ringing(broker) == {Alarm.PARTITIONS_CLOSED}
        assert (await peer.ask(PUT)).startswith(b"result 403 ")
        assert (await peer.ask(GET)).startswith(b"result 403 ")
        await perform(broker.control, {"command": "open_partitions", "topic": "test"})
        assert not ringing(broker)
        assert b"hello" in await peer.ask(GET)

    run(fs, clock, scenario)


def test_the_next_run_ends_the_alarm_of_retention(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """A segment that may not go stays, is served, and goes when it may."""
    first = DATA / "test-0" / f"{0:020d}.meta"

    async def scenario(broker: Broker, peer: Peer) -> None:
        def forbid(operation: Operation) -> None:
            if operation.name == "unlink" and operation.path == first:
                raise OSError(errno.EPERM, "forbidden", str(first))

        fs.on_call(forbid)
        for _ in range(3):
            await good(peer, PUT)
        failed = {Alarm.RETENTION_FAILED}
        await pass_until(broker, clock, lambda: ringing(broker) == failed)
        assert b"hello" in await peer.ask(GET)
        await good(peer, PUT.replace(b"test 0", b"test 1"))
        fs.on_call(None)
        await pass_until(broker, clock, lambda: not ringing(broker))
        assert not fs.exists(first)

    settings = {"maxSegmentSize": "20", "logBytesMax": "60"}
    run(fs, clock, scenario, deleteWhen="0 * * * * ?", **settings)


def test_a_clock_that_was_set_right_is_believed_after_a_restart(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Nothing goes by the wrong time."""
    settings = {"deletePolicy": "delete,1h", "deleteWhen": "0 * * * * ?"}

    async def doubted(broker: Broker, peer: Peer) -> None:
        for _ in range(3):
            await good(peer, PUT)
        clock.jump_wall_ms(7_200_000)
        rung = {Alarm.CLOCK_DOUBTED}
        await pass_until(broker, clock, lambda: ringing(broker) == rung)
        clock.jump_wall_ms(-7_200_000)

    async def again(broker: Broker, peer: Peer) -> None:
        runs = "retention"
        jobs = broker.control.status
        await pass_until(
            broker,
            clock,
            lambda: any(j.name == runs and j.run_count for j in jobs().jobs),
        )
        assert not ringing(broker)
        assert (await peer.ask(GET)).count(b"hello") == 1

    run(fs, clock, doubted, maxSegmentSize="20", **settings)
    run(fs, clock, again, maxSegmentSize="20", **settings)


def test_a_job_that_succeeds_rings_no_more(
    fs: FaultyFileSystem, clock: ManualClock
) -> None:
    """Files of a deleted topic may not be removed for a while."""
    aside = DATA / "deleted"
    for directory in (DATA, aside, aside / "20261122T101501.123Z"):
        fs.make_directory(directory)
    path = aside / "20261122T101501.123Z" / "orders-0"
    fs.open_append(path, create=True).close()

    def forbid(operation: Operation) -> None:
        if operation.name == "unlink" and operation.path == path:
            raise OSError(errno.EPERM, "forbidden", str(path))

    async def scenario(broker: Broker, peer: Peer) -> None:
        fs.on_call(forbid)
        failed = {Alarm.JOB_FAILED}
        await pass_until(broker, clock, lambda: ringing(broker) == failed)
        await good(peer, PUT)
        fs.on_call(None)
        await pass_until(broker, clock, lambda: not ringing(broker))
        assert not fs.exists(aside / path.parent)

    run(fs, clock, scenario)


def of_set(rig: Replicas, number: int) -> set[Alarm]:
    """Return the alarms of a replica."""
    broker = rig[number].broker
    return set() if broker is None else ringing(broker)


@pytest.mark.slow
def test_damage_rings_until_another_replica_has_mended_it() -> None:
    """The log goes on, and its gets are served in the end."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        flip(rig, leader, 4)
        assert report(rig, leader)
        assert of_set(rig, leader) == {Alarm.LOG_DAMAGED}
        await soon(lambda: not of_set(rig, leader), rig.describe)
        assert is_record(await get(rig, leader, 4), 4)

    run_set(scenario)


@pytest.mark.slow
def test_a_lost_range_rings_until_a_replica_has_it_again() -> None:
    """From a backup: it is asked for again by itself."""

    async def scenario(rig: Replicas) -> None:
        leader, other = await filled(rig), rig.follower()
        for number in (1, 2, 3):
            flip(rig, number, 4)
        assert report(rig, leader)
        lost = {Alarm.LOG_LOST}
        await soon(lambda: of_set(rig, leader) == lost, rig.describe)
        flip(rig, other, 4)
        await rig[other].stop()
        await rig[other].start()
        await soon(lambda: not of_set(rig, leader), rig.describe)
        assert is_record(await get(rig, leader, 4), 4)

    run_set(scenario, times={"metaq.replication.mending.AGAIN_S": 0.2})


@pytest.mark.slow
def test_a_replica_with_an_empty_disk_rings_until_it_has_all() -> None:
    """It waits for a leader to copy from."""

    async def scenario(rig: Replicas) -> None:
        leader, empty = await filled(rig), rig.follower()
        await rig[empty].stop()
        rig[empty].disk = FaultyFileSystem(has_loop_syncs=True)
        others = {1, 2, 3} - {empty}
        await rig.in_sync(*others)
        for number in others:
            await rig[number].stop()
        await rig[empty].start()
        await soon(lambda: Alarm.REPLICA_INCOMPLETE in of_set(rig, empty), rig.describe)
        for number in others:
            await rig[number].start()
        await rig.in_sync(1, 2, 3)
        await soon(lambda: not of_set(rig, empty), rig.describe)
        assert rig.bytes_of(empty) == rig.bytes_of(leader)

    run_set(scenario)
