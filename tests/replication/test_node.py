"""Replicas of a set that begin, join, lead and follow: three brokers on one loop."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from metaq.broker.health import Alarm, find_problems
from metaq.broker.http import render_metrics
from metaq.errors import MetaqError, NoSpaceError
from metaq.replication.election import Flag
from metaq.replication.node import CHECK_S
from metaq.replication.operator import (
    change_set,
)
from metaq.replication.record import plan_settings
from metaq.replication.replica import ReplicaRole as R
from metaq.replication.set_file import read_set_file
from metaq.replication.set_nodes import decode_member, decode_present, token_of
from tests.replication.replicas import DATA, LAG_MS, RECORD, SOON_S, Replicas, run, soon
from tests.rigs.fs import FaultyFileSystem

MEMBER = f"{RECORD}/members"
HOLDINGS = "metaq.replication.store.HOLDINGS_INTERVAL_S"


async def refusal_of(rig: Replicas, number: int) -> str:
    """Return why a broker does not start."""
    with pytest.raises(MetaqError) as caught:
        await rig[number].start()
    return str(caught.value)


def flag_of(rig: Replicas, number: int) -> Flag | None:
    """Return the flag on the disk of a replica."""
    file = read_set_file(rig[number].disk, DATA)
    return None if file is None else file.flag


# -- begin ----------------------------------------------------------------------------


def test_an_empty_replica_that_starts_first_creates_no_set() -> None:
    """Else the others, which have the data, would cut their logs to its end."""

    async def scenario(rig: Replicas) -> None:
        rig.zookeeper.wipe()
        before = rig.zookeeper.tree()
        text = await refusal_of(rig, 2)
        assert text == (
            "broker 0 is not a replica set yet: run 'metaq replicas init' where its"
            " data is"
        )
        assert rig.zookeeper.tree() == before
        assert read_set_file(rig[2].disk, DATA) is None

    run(scenario, are_started=False)


def test_a_replica_that_is_not_in_the_record_is_not_let_in() -> None:
    """An operator adds it first."""

    async def scenario(rig: Replicas) -> None:
        async with rig.operator() as nodes:
            await change_set(
                nodes,
                lambda view, record: plan_settings(
                    replace(record, in_sync=frozenset({1, 2})),
                    view.view.version,
                    replicas={1, 2},
                ),
            )
        text = await refusal_of(rig, 3)
        advice = "run 'metaq replicas add 3' first"
        assert text == f"expected one of replicas [1, 2], got 3: {advice}"

    run(scenario, are_started=False)


@pytest.mark.slow
def test_a_replica_that_is_removed_while_it_runs_rings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It takes part in nothing more, and says so in `/health` and in its log."""
    caplog.set_level(logging.INFO, logger="metaq.replication.node")

    async def scenario(rig: Replicas) -> None:
        await rig.in_sync(1, 2, 3)
        gone = next(number for number in (2, 3) if number != rig.leader())
        async with rig.operator() as nodes:
            await change_set(
                nodes,
                lambda view, record: plan_settings(
                    record, view.view.version, replicas={1, 2, 3} - {gone}
                ),
            )
        broker = rig[gone].broker
        assert broker is not None
        await soon(lambda: find_problems(broker.control.status()))
        (problem,) = find_problems(broker.control.status())
        assert problem.alarm is Alarm.REPLICA_FROZEN
        assert problem.text.endswith(f"or run 'metaq replicas add {gone}'")
        async with rig.operator() as nodes:
            await change_set(
                nodes,
                lambda view, record: plan_settings(
                    record, view.view.version, replicas={1, 2, 3}
                ),
            )
        await soon(lambda: not find_problems(broker.control.status()))

    run(scenario)
    said = [(each.levelname, each.message) for each in caplog.records]
    said = [each for each in said if each[1].startswith("replica is frozen")]
    assert [level for level, _text in said] == ["ERROR", "INFO"]
    assert "run 'metaq replicas add" in said[0][1]
    assert said[1][1].startswith("replica is frozen no more: ")


def test_a_directory_with_logs_of_no_set_is_not_let_in() -> None:
    """They may be the only copy of something: an operator discards them."""

    async def scenario(rig: Replicas) -> None:
        rig[2].disk.make_directory(DATA)
        rig[2].disk.make_directory(DATA / "test-0")
        name = DATA / "test-0" / "00000000000000000000.meta"
        rig[2].disk.open_append(name, create=True).close()
        text = await refusal_of(rig, 2)
        assert text == (
            "replica 2 has 1 partitions that do not belong to the set: run"
            " 'metaq replicas join --discard' to start without them"
        )

    run(scenario, are_started=False)


def test_a_directory_of_another_replica_is_not_taken() -> None:
    """A promise of one replica must not be forgotten by another one."""

    async def scenario(rig: Replicas) -> None:
        rig[2].disk = rig[1].disk.snapshot()
        text = await refusal_of(rig, 2)
        assert text == "the data directory is that of replica 1, and replicaId=2"

    run(scenario, are_started=False)


@pytest.mark.slow
def test_a_number_that_is_in_use_changes_nothing() -> None:
    """A second broker of one number would make the first one's directory unknown."""

    async def scenario(rig: Replicas) -> None:
        twin = Replicas()
        twin.zookeeper = rig.zookeeper
        second = twin[2]
        second.zookeeper = rig.zookeeper
        before = rig.zookeeper.nodes[f"{MEMBER}/2"].data
        seen = decode_present(2, rig.zookeeper.nodes[f"{RECORD}/present/2"].data)
        machines = {
            each.rpartition("-")[0]
            for each in (seen.token, token_of(rig[2].disk, "a7"))
        }
        assert len(machines) == 1
        try:
            await second.start()
            await soon(lambda: second.node.facts().reason)
            assert (
                f"replica 2 runs twice, at {rig[2].address}"
                in second.node.facts().reason
            )
            assert second.role == "starting"
            assert rig.zookeeper.nodes[f"{MEMBER}/2"].data == before
            await rig[2].stop()
            await soon(lambda: second.role == R.FOLLOWING)
        finally:
            await second.stop()

    run(scenario)


@pytest.mark.slow
def test_three_replicas_come_in_sync_and_have_the_same_bytes() -> None:
    """The first one has the data, the others begin with nothing."""

    async def scenario(rig: Replicas) -> None:
        await rig.start(1)
        await rig.in_sync(1)
        assert rig.leader() == 1
        await rig.start(2, 3)
        await rig.in_sync(1, 2, 3)
        for _ in range(3):
            await rig.store()
        await rig.equal()
        assert len(rig.bytes_of(3)) == 75
        assert [flag_of(rig, k) for k in (1, 2, 3)] == [Flag.NONE] * 3
        await rig.stop()
        assert [each.failure for each in rig.all.values()] == [None] * 3
        assert len({rig.bytes_of(k) for k in (1, 2, 3)}) == 1

    run(scenario, are_started=False)


@pytest.mark.slow
def test_a_set_at_rest_looks_at_its_clocks_seldom() -> None:
    """Nothing else runs there, on the leader and on the others."""

    async def scenario(rig: Replicas) -> None:
        looks = Counter[int]()
        for number in (1, 2, 3):
            mender = rig[number].node.mender
            real = mender.check

            def check(number: int = number, real: Callable[[], None] = real) -> None:
                looks[number] += 1
                real()

            mender.check = check  # type: ignore[method-assign]
        began_s = asyncio.get_running_loop().time()
        await soon(lambda: min(looks[number] for number in (1, 2, 3)) >= 4)
        most = (asyncio.get_running_loop().time() - began_s) / CHECK_S + 1
        assert max(looks.values()) <= most

    run(
        scenario,
        times={"metaq.replication.node.CHECKS_PER_LAG": LAG_MS / 1000 / CHECK_S},
    )


@pytest.mark.slow
def test_a_put_waits_for_no_set_that_is_too_small() -> None:
    """It is refused before it is appended, and another one a moment later is not."""

    async def scenario(rig: Replicas) -> None:
        await rig.start(1)
        await rig.in_sync(1)
        answer = await rig.put(1)
        assert answer.startswith(b"result 503 ")
        assert answer.endswith(b"[too-few-replicas]")
        assert b"needs 2 replicas that sync it: in sync are [1]" in answer
        assert rig[1].log() is None
        await rig.start(2)
        await rig.in_sync(1, 2)
        await rig.store()

    run(scenario, are_started=False)


@pytest.mark.slow
def test_a_follower_names_the_leader_to_producers() -> None:
    """Its refusal says that nothing was stored, and where to go."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        for number in {1, 2, 3} - {leader}:
            answer = await rig.put(number)
            assert answer.startswith(b"result 503 ")
            assert answer.endswith(b"[not-leader]")
            assert f"the leader is {rig[leader].address}".encode() in answer

    run(scenario)


@pytest.mark.slow
def test_a_replica_that_refuses_puts_does_not_send_producers_to_itself() -> None:
    """Its node is there before it leads, and for a moment after it has ended."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        assert str(rig[leader].node.refusal()) == (
            f"replica {leader} does not lead its set: there is no leader now"
        )

    run(scenario)


def test_a_port_that_is_open_before_the_set_was_asked_takes_no_put() -> None:
    """A log without a number would be made, which the set cannot follow."""

    async def scenario(rig: Replicas) -> None:
        rig.zookeeper.stop()
        starting = asyncio.create_task(rig[2].start())
        await soon(lambda: rig[2].starting and rig[2].starting.sessions is not None)
        broker = rig[2].starting
        assert broker is not None
        await soon(lambda: hasattr(broker, "context") and broker.context.port)
        answer = await rig.ask(2, b"put test 0 5 0 9\r\nhello")
        assert answer.endswith(b"[not-leader]")
        answer = await rig.ask(2, b"offset test g 0 0 2\r\n")
        assert answer.startswith(b"result 503 ")
        assert broker.context.topics.find_log("test", 0) is None
        rig.zookeeper.start()
        await starting
        await rig.role(2, R.FOLLOWING, R.IDLE)

    run(scenario, are_started=False)


# -- a start that is interrupted ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_carried_out", [True, False])
def test_an_answer_that_is_lost_at_the_start_is_found_out(
    is_carried_out: bool,
) -> None:
    """The replica registers once more, from what it reads then."""

    async def scenario(rig: Replicas) -> None:
        await rig[2].stop()
        await rig[2].start(loses=is_carried_out)
        await soon(lambda: rig[2].client.loses is None)
        rig.zookeeper.resume(rig[2].client)
        await rig.in_sync(1, 2, 3)

    run(scenario)


@pytest.mark.slow
def test_a_start_goes_on_when_zookeeper_takes_requests_again() -> None:
    """A refusal for want of rights or quota is no reason to wait for ever."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        other = rig.follower()
        await rig[other].kill()
        rig.zookeeper.refusal = "quota"
        await rig[other].start()
        await soon(lambda: "quota" in rig[other].node.facts().reason)
        rig.zookeeper.refusal = ""
        await soon(lambda: rig[other].role == R.FOLLOWING, show=rig.describe)
        assert rig.leader() == leader

    run(scenario)


@pytest.mark.slow
def test_a_set_file_without_space_is_written_later() -> None:
    """And nothing goes on before it is there: nobody follows, nobody is followed."""

    async def scenario(rig: Replicas) -> None:
        other = rig.follower()
        await rig[other].stop()
        rig[other].save_error = NoSpaceError("no room")
        await rig[other].start()
        await soon(lambda: rig[other].refused_count)
        await asyncio.sleep(0.2)
        assert rig[other].role == "starting"
        assert f"{RECORD}/present/{other}" not in rig.zookeeper.nodes
        assert "no room" in rig[other].node.status().lack_of_space
        rig[other].save_error = None
        await rig.in_sync(1, 2, 3)
        assert not rig[other].node.status().lack_of_space

    run(scenario)


@pytest.mark.slow
def test_a_copy_that_waits_for_space_says_so() -> None:
    """Until it goes on; what its alarm says has both numbers."""

    async def scenario(rig: Replicas) -> None:
        other = rig.follower()
        rig[other].settings = {"dataDirBytesMax": "100", "maxSegmentSize": "900"}
        await rig[other].stop()
        await rig[other].start()
        await rig.in_sync(1, 2, 3)
        broker = rig[other].broker
        assert broker is not None
        async with asyncio.timeout(SOON_S):
            while not rig[other].node.status().lack_of_space:
                await rig.put(rig.leader() or other, b"x" * 2000)
        problems = find_problems(broker.control.status())
        assert [each.alarm for each in problems] == [Alarm.LOW_SPACE]
        assert "expected less than" in problems[0].text
        rig[other].settings = {}
        await rig[other].stop()
        await rig[other].start()
        await rig.in_sync(1, 2, 3)
        assert not rig[other].node.status().lack_of_space

    run(scenario)


# -- what clients see -----------------------------------------------------------------


@pytest.mark.slow
def test_transactions_are_refused_in_one_sentence() -> None:
    """Their journal is no log of the set yet."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        answer = await rig.ask(leader, b"transaction TX:0:1 S1 BEGIN 7\r\n")
        assert answer.startswith(b"result 500 ")
        assert b"a replica set takes no transactions yet: send without one" in answer
        assert b"offline" not in answer  # no restart would change it

    run(scenario)


@pytest.mark.slow
def test_stats_say_who_leads() -> None:
    """Clients of named brokers take the leader of the greater epoch."""

    async def scenario(rig: Replicas) -> None:
        leader, other = rig.leader(), rig.follower()
        lines = (await rig.ask(leader, b"stats\r\n")).decode().split("\r\n")
        epoch = rig[leader].node.epoch
        assert "slave false" in lines
        assert f"epoch {epoch}" in lines
        lines = (await rig.ask(other, b"stats\r\n")).decode().split("\r\n")
        assert "slave true" in lines
        assert not [each for each in lines if each.startswith("epoch ")]

    run(scenario)


@pytest.mark.slow
def test_a_replica_states_facts_in_every_role() -> None:
    """`stats replica` is what the commands of an operator read."""

    async def scenario(rig: Replicas) -> None:
        leader, other = rig.leader(), rig.follower()
        await rig.store()
        await rig.equal()
        await rig.in_sync(1, 2, 3)  # a busy machine may take one for late
        led, followed = await rig.facts(leader), await rig.facts(other)
        assert (led.replica, led.role, led.reason) == (leader, "leading", "")
        assert {each.replica for each in led.lag} == {1, 2, 3} - {leader}
        assert {each.state for each in led.lag} == {"in sync"}
        assert (followed.role, followed.lag) == ("following", ())
        assert followed.logs == led.logs
        assert followed.logs[0].name == "test-0"
        assert followed.logs[0].end == 25
        assert followed.completed == led.completed == rig.record.epoch.number

    run(scenario)


@pytest.mark.slow
def test_a_log_that_is_not_settled_says_no_latest_offset() -> None:
    """After a start its high watermark may be old: a consumer would be sent back."""

    async def scenario(rig: Replicas) -> None:
        await rig.store()
        await rig.equal()
        await rig.stop()
        # One that cannot lead alone, whoever was in sync last on a busy machine.
        other = next(k for k in (2, 3, 1) if rig.record.in_sync - {k})
        await rig.start(other)
        await rig.role(other, R.IDLE)
        answer = await rig.ask(other, b"offset test g 0 0 2\r\n")
        assert answer.startswith(b"result 503 ")
        assert answer.endswith(b"[not-settled]")
        log = rig[other].log()
        assert log is not None
        assert not log.is_settled
        await rig.start(*{1, 2, 3} - {other})
        await soon(lambda: rig[other].log().is_settled)

        async def is_told() -> bool:
            """Ask who leads, which need not be that one."""
            answer = await rig.ask(await rig.led(), b"offset test g 0 25 2\r\n")
            return answer.startswith(b"result 200 ") and answer.endswith(b"25")

        await soon(is_told)

    run(scenario)


@pytest.mark.slow
def test_a_get_at_the_end_of_a_follower_waits() -> None:
    """And is answered when the leader's high watermark comes by."""

    async def scenario(rig: Replicas) -> None:
        other = rig.follower()
        await rig.store()
        await rig.equal()
        broker = rig[other].broker
        assert broker is not None
        get = b"get test g 0 25 1000 7 wait=30000\r\n"
        asking = asyncio.create_task(rig.ask(other, get))
        await soon(lambda: broker.context.waiters.count)
        await rig.store(b"more!")
        assert b"more!" in await asking

    run(scenario)


def alarms(rig: Replicas, number: int) -> set[Alarm]:
    """Return what is wrong with a broker."""
    broker = rig[number].broker
    assert broker is not None
    return {each.alarm for each in find_problems(broker.control.status())}


@pytest.mark.slow
def test_health_says_what_an_operator_has_to_know_of_a_set() -> None:
    """A follower is healthy; a leader without followers is not, nor a frozen one."""

    async def scenario(rig: Replicas) -> None:
        await rig.start(1)
        await rig.in_sync(1)
        await soon(lambda: alarms(rig, 1) == {Alarm.TOO_FEW_REPLICAS})
        await rig.start(2, 3)
        await rig.in_sync(1, 2, 3)
        for number in (1, 2, 3):
            await soon(lambda number=number: not alarms(rig, number))
        broker = rig[1].broker
        assert broker is not None
        found = broker.control.status().replica
        assert found is not None
        assert (found.replica, found.in_sync_count) == (1, 3)
        assert found.epoch == rig.record.epoch.number
        assert [each.replica for each in found.followers] == [2, 3]
        metrics = render_metrics(broker.control.status()).decode()
        assert 'metaq_follower_lag_bytes{replica="3"} 0.0' in metrics
        assert "metaq_replica_in_sync 3.0" in metrics
        rig.zookeeper.wipe()
        for number in (1, 2, 3):
            await soon(lambda n=number: Alarm.REPLICA_FROZEN in alarms(rig, n))

    run(scenario, are_started=False)


# -- life of a directory --------------------------------------------------------------


@pytest.mark.slow
def test_a_directory_from_some_seconds_ago_is_incomplete() -> None:
    """Its version is older than the one that ZooKeeper has: it begins again."""

    async def scenario(rig: Replicas) -> None:
        other = rig.follower()
        copy = rig[other].disk.snapshot()

        def version() -> int:
            return decode_member(rig.zookeeper.nodes[f"{MEMBER}/{other}"].data).version

        before = version()
        await rig.store()
        await soon(lambda: version() > before)
        await rig[other].stop()
        rig[other].disk = copy
        rig[other].saved.clear()
        await rig[other].start()
        await rig.in_sync(1, 2, 3)
        assert rig[other].saved[0].flag is Flag.INCOMPLETE
        await soon(lambda: flag_of(rig, other) is Flag.NONE)
        await rig.equal()

    run(scenario, times={HOLDINGS: 0.05})


@pytest.mark.slow
def test_a_follower_without_its_disk_joins_as_a_newcomer() -> None:
    """It leaves the set before it says a word, and comes in with all bytes."""

    async def scenario(rig: Replicas) -> None:
        other = rig.follower()
        await rig.store()
        await rig[other].stop()
        rig[other].disk = FaultyFileSystem(has_loop_syncs=True)
        rig[other].saved.clear()
        await rig[other].start()
        await rig.in_sync(1, 2, 3)
        assert rig[other].saved[0].flag is Flag.INCOMPLETE
        await rig.equal()
        assert rig.bytes_of(other)

    run(scenario)


@pytest.mark.slow
def test_a_torn_tail_makes_a_replica_a_witness_of_less_until_it_has_followed() -> None:
    """The flag is on the disk before the tail goes, and goes when all is there."""

    async def scenario(rig: Replicas) -> None:
        other = rig.follower()
        await rig.store()
        await rig.equal()
        rig.zookeeper.reap(await rig[other].kill())
        name = DATA / "test-0" / "00000000000000000000.meta"
        file = rig[other].disk.open_append(name, create=False)
        file.write(b"half a rec")
        file.close()
        rig[other].saved.clear()
        await rig[other].start()
        await rig.in_sync(1, 2, 3)
        assert rig[other].saved[0].flag is Flag.CUT
        await soon(lambda: flag_of(rig, other) is Flag.NONE)
        await rig.equal()

    run(scenario)
