"""A broker's registration on an in-memory ZooKeeper, in virtual time."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.errors import CoordinationError
from metaq.model import BrokerAddress, BrokerId
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.errors import BrokerIdTakenError
from metaq.zk.paths import BrokerRole, NodePaths
from metaq.zk.plan import (
    AdvertisedTopic,
    BrokerSnapshot,
    desired_groups,
    plan_withdrawal,
)
from metaq.zk.registry import (
    BACKOFF,
    CHECK_INTERVAL_S,
    GROUPS_AT_ONCE,
    REPAIR_DELAY_S,
    BrokerRegistry,
    RegistrationState,
)
from metaq.zk.session import WriteNode
from tests.rigs.virtual_time import VirtualClock, run_virtually
from tests.zk.meddling import MeddledZooKeeper

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "vectors.json").read_text()
)["zookeeper"]
CLOCK = VirtualClock()
MASTER = "/meta/brokers/ids/0/master"
RECORD = "/meta/replicas/0"
TITLE = f"{RECORD}/leader"
TEST_PUB = "/meta/brokers/topics-pub/test/0-m"
CATALOG = "/meta/catalog"
RECORDS = [
    f"{CATALOG}/{name}" for name in ("brokers/0", "directories/0", "partitions/test/0")
]
TWO = (AdvertisedTopic("meta-test", 2), AdvertisedTopic("test", 2))


def snapshot_of(*topics: AdvertisedTopic, port: int = 8123) -> BrokerSnapshot:
    return BrokerSnapshot(
        role=BrokerRole(BrokerId(0)),
        address=BrokerAddress("127.0.0.1", port),
        config_checksum=463763767,
        topics=topics,
    )


SNAPSHOT = snapshot_of(*TWO)


def in_s(seconds: float) -> float:
    return CLOCK.monotonic_s() + seconds


@asynccontextmanager
async def broker_on(
    server: MemoryZooKeeper, *, takeover_wait_s: float = 0.0
) -> AsyncIterator[tuple[BrokerRegistry, MemoryCoordinator]]:
    coordinator = server.coordinator(CLOCK)
    registry = BrokerRegistry(
        coordinator, NodePaths(), clock=CLOCK, takeover_wait_s=takeover_wait_s
    )
    coordinator.start()
    registry.start()
    yield registry, coordinator
    await registry.stop()
    await coordinator.stop(deadline_s=in_s(1))


async def lead(server: MemoryZooKeeper, coordinator: MemoryCoordinator) -> None:
    """Give a session the node by which the leader of a set has the id."""
    await settle()
    server.put(TITLE, b"", session_id=coordinator.status.session_id)
    write_record(server)


@asynccontextmanager
async def two_leaders(
    server: MemoryZooKeeper,
) -> AsyncIterator[
    tuple[BrokerRegistry, MemoryCoordinator, Callable[[], Awaitable[float]]]
]:
    """Have a leader of a set that is registered, and what has another one lead.

    That returns how long the registration of the other one takes, in seconds.
    """
    two = replace(snapshot_of(*TWO, port=8124), title=TITLE)
    async with broker_on(server) as (former, old), broker_on(server) as (later, new):

        async def succeed() -> float:
            await lead(server, new)
            begin_s = CLOCK.monotonic_s()
            await later.register(two, deadline_s=in_s(5))
            return CLOCK.monotonic_s() - begin_s

        await lead(server, old)
        await former.register(replace(SNAPSHOT, title=TITLE), deadline_s=in_s(5))
        yield former, old, succeed


def write_record(server: MemoryZooKeeper) -> None:
    """Change the record of the set, as a claim does, and as others do."""
    version = server.nodes[RECORD].version
    server.transact([WriteNode(RECORD, b"", version)])


def tree_of(server: MemoryZooKeeper) -> dict[str, tuple[str, bool]]:
    return {
        p: (n.data.decode(), bool(n.owner_session_id)) for p, n in server.tree().items()
    }


def catalog_of(snapshot: BrokerSnapshot) -> dict[str, tuple[str, bool]]:
    """Return what a broker records of itself, which MetaQ does not know."""
    catalog, number = "/meta/catalog", snapshot.role.broker_id
    nodes = {
        catalog: "",
        f"{catalog}/brokers": "",
        f"{catalog}/brokers/{number}": str(snapshot.address),
        f"{catalog}/partitions": "",
    }
    for topic in snapshot.topics:
        parent = f"{catalog}/partitions/{topic.name}"
        nodes |= {parent: "", f"{parent}/{number}": str(topic.partition_count)}
    return {path: (data, False) for path, data in nodes.items()}


def recorded(tree: str) -> dict[str, tuple[str, bool]]:
    nodes = {n["path"]: (n["data"], n["ephemeral"]) for n in GOLDEN[tree]}
    return nodes | catalog_of(SNAPSHOT)


async def settle() -> None:
    await asyncio.sleep(0.01)


def test_registration_and_withdrawal_leave_the_recorded_trees() -> None:
    """Start and stop give byte for byte what the Java broker leaves behind.

    And the catalog, which stays.
    """

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            assert await registry.register(SNAPSHOT, deadline_s=in_s(5))
            assert tree_of(server) == recorded("after_broker_start")
            assert registry.statistics().state is RegistrationState.REGISTERED
            assert registry.statistics().topic_count == 2
            await registry.withdraw(deadline_s=in_s(5))
            assert tree_of(server) == recorded("after_clean_stop")
            assert registry.statistics().state is RegistrationState.WITHDRAWN

    run_virtually(scenario())


def test_a_withdrawal_does_not_wait_from_node_to_node() -> None:
    """Consumers that find topics without their broker log an error for each partition.

    All requests are sent, in MetaQ's order, before the first answer has to come.
    """

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            steps = plan_withdrawal(desired_groups(SNAPSHOT, NodePaths())[0])
            asked, are_all_asked = [], asyncio.Event()
            delete = coordinator.delete

            async def delete_with_all(path: str, **when: float) -> bool:
                asked.append(path)
                if len(asked) == len(steps):
                    are_all_asked.set()
                await are_all_asked.wait()
                return await delete(path, **when)

            coordinator.delete = delete_with_all  # type: ignore[method-assign]
            await registry.withdraw(deadline_s=in_s(5))
        assert asked == [step.path for step in steps]
        assert tree_of(server) == recorded("after_clean_stop")

    run_virtually(scenario())


def test_a_node_that_cannot_be_withdrawn_leaves_no_other_one() -> None:
    """Whatever becomes of one node, the rest is gone when the withdrawal returns."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            delete = coordinator.delete

            async def delete_all_but_one(path: str, **when: float) -> bool:
                if path == MASTER:
                    raise CoordinationError("no rights")
                return await delete(path, **when)

            coordinator.delete = delete_all_but_one  # type: ignore[method-assign]
            server.remove(TEST_PUB)
            await registry.withdraw(deadline_s=in_s(5))
            left = {
                path for path, node in server.tree().items() if node.owner_session_id
            }
        assert left == {MASTER}

    run_virtually(scenario())


def test_withdrawal_empties_the_persistent_node_while_followers_exist() -> None:
    """`ids/N` with a follower below it stays, with empty text."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.put("/meta/brokers/ids/0/slave1", b"meta://f:1", session_id=99)
            await registry.withdraw(deadline_s=in_s(5))
        tree = tree_of(server)
        assert tree["/meta/brokers/ids/0"] == ("", False)
        assert MASTER not in tree

    run_virtually(scenario())


def test_an_absent_zookeeper_does_not_hold_the_broker_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """register returns at its deadline, warns once, and the rest happens later."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.stop()
        async with broker_on(server) as (registry, _):
            begin = CLOCK.monotonic_s()
            assert not await registry.register(SNAPSHOT, deadline_s=in_s(3))
            assert CLOCK.monotonic_s() - begin == pytest.approx(3, abs=0.1)
            await asyncio.sleep(600)
            assert registry.statistics().state is RegistrationState.PENDING
            server.start()
            await settle()
            assert tree_of(server) == recorded("after_broker_start")

    with caplog.at_level(logging.WARNING):
        run_virtually(scenario())
    assert len([r for r in caplog.records if "registers later" in r.message]) == 1
    assert len(caplog.records) < 5


def test_a_new_session_registers_everything_again() -> None:
    """After an expiry every node is back, owned by the new session, once."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.calls.clear()
            server.expire(coordinator)
            assert MASTER not in server.tree()
            await settle()
            assert tree_of(server) == recorded("after_broker_start")
            owners = {n.owner_session_id for n in server.tree().values()}
            assert owners == {0, coordinator.status.session_id}
            creates = [path for name, path in server.calls if name == "create"]
            assert len(creates) == len(set(creates)) == 8

    run_virtually(scenario())


def test_a_lost_session_is_not_reported_as_registered() -> None:
    """Statistics tell the truth between the loss and the next registration."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.stop()
            await settle()
            assert registry.statistics().state is RegistrationState.REGISTERED
            server.expire(coordinator)
            await settle()
            assert registry.statistics().state is RegistrationState.PENDING

    run_virtually(scenario())


def test_a_plain_disconnect_causes_no_request() -> None:
    """The same session comes back to nodes that are still there."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.calls.clear()
            server.suspend(coordinator)
            await asyncio.sleep(5)
            server.resume(coordinator)
            await asyncio.sleep(5)
            assert server.calls == []

    run_virtually(scenario())


def test_nodes_that_vanish_under_a_living_session_come_back() -> None:
    """Nodes deleted by others are put back, also those deleted during a disconnect."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.remove(TEST_PUB)
            await asyncio.sleep(CHECK_INTERVAL_S + 1)
            assert tree_of(server) == recorded("after_broker_start")
            assert registry.statistics().repair_count == 1
            server.suspend(coordinator)
            await asyncio.sleep(2 * CHECK_INTERVAL_S)
            server.wipe()
            server.resume(coordinator)
            await asyncio.sleep(2 * CHECK_INTERVAL_S)
            assert tree_of(server) == recorded("after_broker_start")
            # Three nodes of the broker, three of each topic, and their three records.
            assert registry.statistics().repair_count == 1 + 9 + 3

    run_virtually(scenario())


def test_a_node_that_others_delete_or_overwrite_is_back_within_two_seconds() -> None:
    """Meanwhile the registration counts as pending, and names the node."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            recording = replace(SNAPSHOT, directories=b'{"/data":["4be1",2]}')
            await registry.register(recording, deadline_s=in_s(5))
            before = tree_of(server)
            for path in (MASTER, "/meta/brokers/ids/0", TEST_PUB, *RECORDS):
                for ruin in (
                    server.remove,
                    lambda p: server.write(p, b"x"),
                ):
                    ruin(path)
                    await settle()
                    statistics = registry.statistics()
                    assert statistics.state is RegistrationState.PENDING
                    assert path in statistics.last_error
                    await asyncio.sleep(2)
                    assert tree_of(server) == before
                    statistics = registry.statistics()
                    assert statistics.state is RegistrationState.REGISTERED
                    assert statistics.last_error == ""

    run_virtually(scenario())


def test_everything_that_others_delete_is_back_within_two_seconds() -> None:
    """A tree that was removed costs one pass, and a sentence that stays short."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        topics = [AdvertisedTopic(f"t{number}", 2) for number in range(50)]
        async with broker_on(server) as (registry, _):
            await registry.register(snapshot_of(*topics), deadline_s=in_s(5))
            before, passes = tree_of(server), registry.statistics().pass_count
            for path in before:
                if path.startswith("/meta/brokers/"):
                    server.remove(path)
            await settle()
            assert registry.statistics().last_error.endswith(" and 150 more")
            await asyncio.sleep(2)
            assert tree_of(server) == before
            assert registry.statistics().pass_count == passes + 1
            assert registry.statistics().state is RegistrationState.REGISTERED

    run_virtually(scenario())


def test_the_periodic_check_finds_what_is_not_watched() -> None:
    """A node that looks like ours and is not."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            before = server.tree()
            server.put(TEST_PUB, before[TEST_PUB].data, session_id=99)
            await asyncio.sleep(CHECK_INTERVAL_S + 1)
            assert server.tree()[TEST_PUB] == before[TEST_PUB]

    run_virtually(scenario())


def test_what_the_broker_changes_itself_is_no_alarm() -> None:
    """Updates and new sessions are no repairs."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            registry.update(snapshot_of(AdvertisedTopic("test", 4), port=8124))
            await asyncio.sleep(5)
            server.expire(coordinator)
            await asyncio.sleep(5)
            assert registry.statistics().state is RegistrationState.REGISTERED
            assert registry.statistics().repair_count == 0
            assert registry.statistics().last_error == ""
            # The watches are those of the new nodes.
            server.remove(TEST_PUB)
            await asyncio.sleep(2)
            assert TEST_PUB in server.tree()

    run_virtually(scenario())


def test_a_repair_that_fails_still_names_what_is_missing() -> None:
    """The alarm lasts as long as the node is not there."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))

            async def refuse(*_: object, **__: object) -> None:
                raise CoordinationError("no rights")

            coordinator.create_ephemeral = refuse  # type: ignore[method-assign]
            server.remove(TEST_PUB)
            await asyncio.sleep(20)
            assert TEST_PUB in registry.statistics().last_error
            assert "no rights" in registry.statistics().last_error
            del coordinator.create_ephemeral
            await asyncio.sleep(BACKOFF.max_s + 1)
            assert registry.statistics().state is RegistrationState.REGISTERED
            assert registry.statistics().last_error == ""

    run_virtually(scenario())


def test_two_that_overwrite_each_other_do_so_slowly() -> None:
    """A node that another process wrongly takes for its own costs little."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            passes, rival = registry.statistics().pass_count, server.coordinator(CLOCK)
            rival.start()
            path = "/meta/brokers/ids/0"

            def overwrite(data: bytes | None) -> None:
                if data != b"mine":
                    server.write(path, b"mine")

            rival.watch_data(path, overwrite)
            await asyncio.sleep(10)
            assert registry.statistics().pass_count - passes <= 10 / REPAIR_DELAY_S
            await rival.stop(deadline_s=in_s(1))

    run_virtually(scenario())


def test_the_catalog_forgets_what_a_broker_has_no_more_and_nothing_else() -> None:
    """Also what went while the broker was not here; others' records are theirs."""
    parent = "/meta/catalog/partitions"

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.put(f"{parent}/gone/0", b"2")
        server.put(f"{parent}/gone/1", b"3")
        server.put(f"{parent}/gone/10", b"4")
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            await settle()
            assert not await coordinator.exists(f"{parent}/gone/0", deadline_s=in_s(5))
            assert await coordinator.exists(f"{parent}/test/0", deadline_s=in_s(5))
            # Gone while there is no session: its nodes are, and the record is not.
            server.suspend(coordinator)
            registry.update(snapshot_of(TWO[0]))
            server.expire(coordinator)
            await settle()
            assert f"{parent}/test/0" not in server.tree()
            registry.update(snapshot_of())
            await settle()
            await registry.withdraw(deadline_s=in_s(5))
        left = [path for path in server.tree() if path.startswith(f"{parent}/")]
        assert [path for path in left if path.rpartition("/")[2].isdigit()] == [
            f"{parent}/gone/1",
            f"{parent}/gone/10",
        ]

    run_virtually(scenario())


def test_a_start_writes_no_record_that_is_as_it_should_be() -> None:
    """Thousands of topics cost thousands of reads, and not as many writes."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            await registry.withdraw(deadline_s=in_s(5))
        server.calls.clear()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
        written = [path for verb, path in server.calls if verb == "set"]
        assert written == ["/meta/brokers/ids/0"]

    run_virtually(scenario())


def test_a_check_that_failed_half_way_is_done_again() -> None:
    """An error during the check does not make the rest of it forgotten."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.remove(TEST_PUB)
            server.stall = True
            await asyncio.sleep(CHECK_INTERVAL_S + 20)
            assert registry.statistics().failure_count > 0
            server.stall = False
            await asyncio.sleep(2 * BACKOFF.max_s)
            assert TEST_PUB in server.tree()

    run_virtually(scenario())


def test_a_wiped_server_gets_everything_back() -> None:
    """A server that returns without data and sessions is filled again at once."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.stop()
            await asyncio.sleep(100)
            server.start(is_wiped=True)
            await settle()
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())


def test_a_silent_server_is_asked_with_growing_delays_and_never_given_up() -> None:
    """Attempts are bounded and rare; the first answer heals everything."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.stall = True
        async with broker_on(server) as (registry, _):
            assert not await registry.register(SNAPSHOT, deadline_s=in_s(1))
            await asyncio.sleep(3600)
            # One attempt takes 5 s and waits for 5 to 10 s, but for the first ones.
            assert 235 < registry.statistics().failure_count < 365
            assert "no answer from ZooKeeper in" in registry.statistics().last_error
            server.stall = False
            await asyncio.sleep(2 * BACKOFF.max_s)
            assert tree_of(server) == recorded("after_broker_start")
            assert registry.statistics().last_error == ""

    run_virtually(scenario())


def test_nodes_of_a_killed_predecessor_are_taken_over_at_once() -> None:
    """A fast restart does not wait for the old session to expire."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, old):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            dead = old.status.session_id
            server.abandon(old)
        assert MASTER in server.tree()
        async with broker_on(server) as (registry, new):
            begin = CLOCK.monotonic_s()
            assert await registry.register(SNAPSHOT, deadline_s=in_s(5))
            assert CLOCK.monotonic_s() - begin < 0.1
            server.reap(dead)
            assert tree_of(server) == recorded("after_broker_start")
            assert server.tree()[MASTER].owner_session_id == new.status.session_id

    run_virtually(scenario())


def test_a_second_broker_with_the_same_id_is_refused_and_changes_nothing() -> None:
    """The second one gets an error at once; the first one never notices."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (first, _), broker_on(server) as (second, _):
            await first.register(SNAPSHOT, deadline_s=in_s(5))
            server.calls.clear()
            with pytest.raises(BrokerIdTakenError, match=r"8123.*8124"):
                await second.register(snapshot_of(*TWO, port=8124), deadline_s=in_s(60))
            assert second.statistics().state is RegistrationState.REFUSED
            await second.withdraw(deadline_s=in_s(5))
            await asyncio.sleep(2 * CHECK_INTERVAL_S)
            assert {name for name, _ in server.calls} == {"get"}
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())


def test_a_broker_that_moved_may_wait_for_its_old_session_to_expire() -> None:
    """With takeover_wait_s a start on another port waits for the old node to go."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.put(MASTER, b"meta://127.0.0.1:1", session_id=99)
        loop = asyncio.get_running_loop()
        loop.call_later(8, server.reap, 99)
        async with broker_on(server, takeover_wait_s=10) as (registry, _):
            assert await registry.register(SNAPSHOT, deadline_s=in_s(30))
            assert server.tree()[MASTER].data == b"meta://127.0.0.1:8123"
        server.put(MASTER, b"meta://127.0.0.1:1", session_id=99)
        async with broker_on(server, takeover_wait_s=10) as (registry, coordinator):
            begin = CLOCK.monotonic_s()
            with pytest.raises(BrokerIdTakenError):
                await registry.register(SNAPSHOT, deadline_s=in_s(30))
            assert 10 <= CLOCK.monotonic_s() - begin < 12
            server.reap(99)
            server.expire(coordinator)  # the next session changes nothing of this
            await asyncio.sleep(2 * CHECK_INTERVAL_S)
            assert coordinator.status.session_version == 2
            assert MASTER not in server.tree()

    run_virtually(scenario())


def test_a_leader_of_a_set_succeeds_another_whose_session_is_still_there() -> None:
    """It does not wait for that session; the former one deletes nothing of it."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with two_leaders(server) as (former, old, succeed):
            server.suspend(old)
            assert await succeed() < 0.1
            tree = server.tree()
            assert tree[MASTER].data == b"meta://127.0.0.1:8124"
            server.resume(old)
            await former.withdraw(deadline_s=in_s(5))
            await settle()
            assert server.tree() == tree

    run_virtually(scenario())


def test_a_former_leader_with_a_new_session_takes_nothing_back() -> None:
    """It hung, and does not know yet that another leads."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with two_leaders(server) as (former, old, succeed):
            await succeed()
            tree = server.tree()
            server.expire(old)
            await asyncio.sleep(2)
            assert server.tree() == tree
            found = former.statistics()
            assert found.state is RegistrationState.PENDING
            assert f"{TITLE} is not of session" in found.last_error
            await lead(server, old)
            await asyncio.sleep(10)
            assert server.tree()[MASTER].data == b"meta://127.0.0.1:8123"
            assert former.statistics().last_error == ""

    run_virtually(scenario())


def test_a_leader_that_hands_over_deletes_nothing_of_the_next_one() -> None:
    """The next one claims and registers while the former one withdraws."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with two_leaders(server) as (former, _old, succeed):
            server.remove(TITLE)
            tree = server.tree()

            async def look(path: str) -> None:
                is_asked = path in {MASTER, TITLE}
                if is_asked and server.after.pop("get", None):
                    await succeed()
                    tree.clear()
                    tree.update(server.tree())

            server.after["get"] = look
            await former.withdraw(deadline_s=in_s(5))
            assert tree[MASTER].data == b"meta://127.0.0.1:8124"
            assert server.tree() == tree

    run_virtually(scenario())


def test_a_replica_of_a_set_without_a_leader_does_not_register() -> None:
    """It hung: its session is a new one, and the set has no leader by now."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await lead(server, coordinator)
            server.remove(TITLE)
            one = replace(SNAPSHOT, title=TITLE)
            assert not await registry.register(one, deadline_s=in_s(5))
            assert MASTER not in server.tree()
            assert "is not seen to lead its set" in registry.statistics().last_error

    run_virtually(scenario())


@pytest.mark.parametrize("has_follower", [False, True])
def test_a_leader_that_hands_over_withdraws_while_others_change_the_set(
    *, has_follower: bool
) -> None:
    """A change that is no claim leaves the nodes to it."""

    async def scenario() -> None:
        server = MeddledZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await lead(server, coordinator)
            one = replace(SNAPSHOT, title=TITLE)
            await registry.register(one, deadline_s=in_s(5))
            server.remove(TITLE)
            if has_follower:
                server.put("/meta/brokers/ids/0/slave1", b"meta://127.0.0.1:9")

            async def change(path: str) -> None:
                if path == TITLE and server.after.pop("get", None):
                    write_record(server)

            server.after["get"] = change
            await registry.withdraw(deadline_s=in_s(5))
            tree = server.tree()
            assert MASTER not in tree
            assert TEST_PUB not in tree
            broker = tree.get("/meta/brokers/ids/0")
            assert (broker and broker.data) == (b"" if has_follower else None)

    run_virtually(scenario())


def test_a_broker_outside_of_a_set_that_has_its_id_is_replaced_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of Java knows no sets. A leader before this one is as it should be."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with two_leaders(server) as (_former, _old, succeed):
            await succeed()
            assert "another broker" not in caplog.text
            server.put(MASTER, b"meta://java:8123", session_id=99)
            await asyncio.sleep(5)
            assert server.tree()[MASTER].data == b"meta://127.0.0.1:8124"
        (line,) = [text for text in caplog.messages if "another broker" in text]
        assert line.endswith("address=meta://java:8123 by=meta://127.0.0.1:8124")

    caplog.set_level("WARNING")
    run_virtually(scenario())


def test_an_id_found_taken_while_running_is_tried_until_it_is_free() -> None:
    """A broker that serves already cannot refuse to start: it says so and waits."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        server.stop()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(1))
            server.put(MASTER, b"meta://thief:1", session_id=99)
            server.start()
            await asyncio.sleep(5)
            assert registry.statistics().state is RegistrationState.REFUSED
            server.suspend(coordinator)
            await asyncio.sleep(5)
            server.reap(99)
            server.resume(coordinator)
            await asyncio.sleep(2)
            assert tree_of(server) == recorded("after_broker_start")
            assert registry.statistics().state is RegistrationState.REGISTERED

    run_virtually(scenario())


def test_an_update_touches_only_the_topics_that_changed() -> None:
    """A reload makes no consumer of another topic rebalance."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.calls.clear()
            registry.update(snapshot_of(TWO[0], AdvertisedTopic("test", 4)))
            await settle()
            assert {path for _, path in server.calls} == {
                f"/meta/brokers/{parent}/test/0-m"
                for parent in ("topics", "topics-pub", "topics-sub")
            } | {"/meta/catalog/partitions/test/0"}
            assert server.tree()[TEST_PUB].data == b'{"numParts":4,"broker":"0-m"}'
            registry.update(snapshot_of(TWO[0]))
            await settle()
            assert not [path for path in server.tree() if path.endswith("/test/0-m")]
            await asyncio.sleep(1)
            statistics = registry.statistics()
            assert statistics.state is RegistrationState.REGISTERED
            assert statistics.last_error == ""

    run_virtually(scenario())


def test_many_new_topics_are_registered_in_the_background_in_few_passes() -> None:
    """Updates coalesce: a hundred first puts cost a pass or two, and no waiting."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            passes = registry.statistics().pass_count
            topics = [*TWO]
            for number in range(100):
                topics.append(AdvertisedTopic(f"t{number}", 1))
                registry.update(snapshot_of(*topics))
            await settle()
            assert registry.statistics().topic_count == 102
            assert registry.statistics().pass_count - passes <= 2

    run_virtually(scenario())


class Counting:
    """A coordinator whose answers to `create_ephemeral` take a turn of the loop."""

    def __init__(self, coordinator: MemoryCoordinator) -> None:
        self._coordinator = coordinator
        self.waiting: set[str] = set()
        self.most = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._coordinator, name)

    async def create_ephemeral(
        self, path: str, data: bytes, *, deadline_s: float
    ) -> None:
        self.waiting.add(path)
        self.most = max(self.most, len(self.waiting))
        await asyncio.sleep(0.01)
        await self._coordinator.create_ephemeral(path, data, deadline_s=deadline_s)
        self.waiting.remove(path)


def test_topics_are_registered_side_by_side_behind_the_role() -> None:
    """So thousands take seconds; a bounded number is under way, of a topic one step."""
    topics = [AdvertisedTopic(f"t{number}", 1) for number in range(100)]

    async def scenario() -> None:
        server = MemoryZooKeeper()
        coordinator = Counting(server.coordinator(CLOCK))
        registry = BrokerRegistry(
            coordinator,  # type: ignore[arg-type]
            NodePaths(),
            clock=CLOCK,
        )
        coordinator.start()  # type: ignore[operator]
        registry.start()
        registering = asyncio.create_task(
            registry.register(snapshot_of(*topics), deadline_s=in_s(60))
        )
        while not coordinator.waiting:
            await asyncio.sleep(0)
        assert coordinator.waiting == {MASTER}
        assert await registering
        assert registry.statistics().topic_count == 100
        assert coordinator.most == GROUPS_AT_ONCE
        await registry.stop()
        await coordinator.stop(deadline_s=in_s(1))  # type: ignore[operator]

    run_virtually(scenario())


def test_an_update_during_a_pass_is_not_lost() -> None:
    """A change made while another is being applied is applied next."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            registering = asyncio.create_task(
                registry.register(SNAPSHOT, deadline_s=in_s(5))
            )
            while not server.calls:
                await asyncio.sleep(0)
            registry.update(snapshot_of(*TWO, AdvertisedTopic("late", 1)))
            assert await registering
            assert "/meta/brokers/topics/late/0-m" in server.tree()

    run_virtually(scenario())


def test_withdrawal_is_bounded_when_zookeeper_is_silent_or_gone() -> None:
    """A stop takes no longer than its deadline."""

    async def scenario() -> None:
        for is_silent in (True, False):
            server = MemoryZooKeeper()
            async with broker_on(server) as (registry, _):
                await registry.register(SNAPSHOT, deadline_s=in_s(5))
                if is_silent:
                    server.stall = True
                else:
                    server.stop()
                begin = CLOCK.monotonic_s()
                await registry.withdraw(deadline_s=in_s(2))
                assert CLOCK.monotonic_s() - begin <= 2.1
                server.stall = False

    run_virtually(scenario())


def test_a_withdrawn_broker_stays_withdrawn() -> None:
    """Neither an update nor a new session brings nodes back after a withdrawal."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, coordinator):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            await registry.withdraw(deadline_s=in_s(5))
            registry.update(snapshot_of(*TWO, AdvertisedTopic("late", 1)))
            server.expire(coordinator)
            await asyncio.sleep(2 * CHECK_INTERVAL_S)
            assert tree_of(server) == recorded("after_clean_stop")
            await registry.withdraw(deadline_s=in_s(5))

    run_virtually(scenario())


def test_withdrawal_leaves_the_nodes_of_another_session_alone() -> None:
    """A broker that was replaced does not take its successor out of ZooKeeper."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            await registry.register(SNAPSHOT, deadline_s=in_s(5))
            server.put(MASTER, b"meta://127.0.0.1:8123", session_id=99)
            await registry.withdraw(deadline_s=in_s(5))
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())


def test_a_node_that_appears_between_reading_and_creating_is_read_again() -> None:
    """Losing that race costs a retry, not the registration."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        async with broker_on(server) as (registry, _):
            registering = asyncio.create_task(
                registry.register(SNAPSHOT, deadline_s=in_s(5))
            )
            while ("get", MASTER) not in server.calls:
                await asyncio.sleep(0)
            server.put(MASTER, b"meta://127.0.0.1:8123", session_id=99)
            assert await registering
            assert registry.statistics().failure_count == 1
            server.reap(99)
            assert tree_of(server) == recorded("after_broker_start")

    run_virtually(scenario())
