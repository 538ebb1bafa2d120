"""The rebalancer during failures: sinks, ZooKeeper, and names in use."""

import asyncio
import contextlib
from collections.abc import Collection

import pytest

from metaq.client.errors import QueueGroupError
from metaq.errors import ConfigError, CoordinationError, NoBrokerError
from metaq.model import TopicPartition
from metaq.zk.errors import CoordinationTimeoutError, MemberTakenError
from metaq.zk.group_definitions import QueueGroupDefinition, encode_group
from metaq.zk.znodes import Node
from tests.client.group_members import (
    CLOCK,
    GROUP,
    ID,
    OPTIONS,
    PATHS,
    TOPIC,
    Group,
    Member,
    owner_path,
    owners,
    part,
    parts,
    refusing,
    run_group,
    serve,
)
from tests.rigs.waiting import until


def test_a_partition_that_cannot_be_read_holds_up_no_other() -> None:
    """Its broker is away: it is tried again, and reported until then."""

    async def scenario(group: Group, one: Member) -> None:
        away = NoBrokerError("broker 0 is away")
        one.sink.on_assign = refusing(away, part(1))
        await one.join()
        assert one.reading == parts(0, 2)
        assert one.source.last_error is away
        assert not one.is_settled
        one.sink.on_assign = refusing(away)
        await until(lambda: one.is_settled)
        assert one.reading == parts(0, 1, 2)
        assert one.source.last_error is None

    run_group(scenario, 3, is_joined=False)


def test_a_broken_sink_is_told_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error of no known kind does not end the task in silence."""

    async def scenario(group: Group, one: Member) -> None:
        one.sink.on_assign = refusing(NoBrokerError("away"), part(0))
        await one.join()
        one.sink.on_assign = refusing(ValueError("a bug"), part(0))
        await until(lambda: "a bug" in str(one.source.last_error))
        one.sink.on_assign = refusing(NoBrokerError("away"))
        await until(lambda: one.is_settled)
        assert one.reading == parts(0)

    run_group(scenario, 1, is_joined=False)
    assert "rebalance failed: group=g" in caplog.text


@pytest.mark.parametrize("is_answered_first", [True, False])
def test_a_session_that_ends_with_the_last_answer_leaves_nothing_read(
    is_answered_first: bool,
) -> None:
    """Both wait for the loop; nor is the member settled with what it does not read."""

    async def scenario(group: Group, one: Member) -> None:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def assign(partitions: Collection[TopicPartition]) -> None:
            await answered
            one.sink.reading.update(partitions)

        one.sink.assign = assign  # type: ignore[method-assign]
        serve(group.server, 1)
        await until(lambda: owners(group.server))
        group.server.stop()
        if is_answered_first:
            answered.set_result(None)
        group.server.expire(one.coordinator)
        if not is_answered_first:
            answered.set_result(None)
        await asyncio.sleep(1)
        assert one.reading == set()
        assert not one.is_settled
        group.server.start()
        await until(lambda: one.is_settled)
        assert one.reading == parts(0)

    run_group(scenario, 0)


def test_a_store_that_ignores_its_cancellation_begins_nothing_without_a_session() -> (
    None
):
    """It is the user's, and may catch what it likes."""

    async def scenario(group: Group, one: Member) -> None:
        async def assign(partitions: Collection[TopicPartition]) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3)
            one.sink.reading.update(partitions)

        one.sink.assign = assign  # type: ignore[method-assign]
        serve(group.server, 1)
        await until(lambda: owners(group.server))
        group.server.stop()
        group.server.expire(one.coordinator)
        await asyncio.sleep(5)
        assert one.reading == set()
        assert not one.is_settled
        group.server.start()
        await until(lambda: one.is_settled)
        assert one.reading == parts(0)

    run_group(scenario, 0)


def test_what_will_never_work_fails_the_start() -> None:
    """A start that no broker can find is the user's to hear of; nothing is left."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        one.sink.on_assign = refusing(ConfigError("no such start"), part(1))
        with pytest.raises(ConfigError, match="no such start"):
            await one.join()
        assert one.reading == set()
        assert owners(server) == {}
        assert ID not in server.nodes
        await one.quit()

    run_group(scenario, 2, is_joined=False)


def test_a_name_of_a_queue_group_fails_the_start_before_anything_is_read() -> None:
    """Nothing of the member is left."""

    async def scenario(group: Group, one: Member) -> None:
        server, definition = group.server, QueueGroupDefinition(topic=TOPIC)
        server.put(PATHS.queue_group(GROUP), encode_group(definition))
        with pytest.raises(QueueGroupError, match="'g' is a queue group"):
            await one.join()
        assert one.sink.calls == []
        assert owners(server) == {}
        assert ID not in server.nodes
        await one.quit()

    run_group(scenario, 2, is_joined=False)


def test_a_join_outlives_that_the_kind_of_the_group_cannot_be_asked() -> None:
    """It is asked again, and nothing is read before the answer."""

    async def scenario(group: Group, one: Member) -> None:
        get = one.coordinator.get
        is_failing = True

        async def failing(path: str, *, deadline_s: float) -> Node | None:
            if is_failing and path == PATHS.queue_group(GROUP):
                raise CoordinationTimeoutError("the answer got lost")
            return await get(path, deadline_s=deadline_s)

        one.coordinator.get = failing  # type: ignore[method-assign]
        await one.join()
        assert "the answer got lost" in str(one.source.last_error)
        await asyncio.sleep(30)
        assert one.sink.calls == []
        is_failing = False
        await until(lambda: one.is_settled)
        assert one.reading == parts(0, 1)

    run_group(scenario, 2, is_joined=False)


def test_a_start_without_zookeeper_fails() -> None:
    """Within the time-out of a request; nothing runs on."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        server.stop()
        began_s = CLOCK.monotonic_s()
        with pytest.raises(CoordinationError, match=r"^cannot reach ZooKeeper"):
            await one.join()
        assert CLOCK.monotonic_s() - began_s <= 2 * OPTIONS.request_timeout_s
        assert not {t for t in asyncio.all_tasks() if t.get_name().startswith("group")}
        server.start()
        await asyncio.sleep(60)
        assert ID not in server.nodes
        await one.quit()

    run_group(scenario, 0, is_joined=False)


def test_a_registration_without_an_answer_leaves_no_ghost() -> None:
    """An unknown member node would be given partitions for ever."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        await one.connect()
        create = one.coordinator.create_ephemeral

        async def unheard(path: str, data: bytes, *, deadline_s: float) -> None:
            await create(path, data, deadline_s=deadline_s)
            raise CoordinationTimeoutError("the answer got lost")

        one.coordinator.create_ephemeral = unheard  # type: ignore[method-assign]
        starting = asyncio.create_task(one.source.start(one.sink))
        await until(lambda: ID in server.nodes)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert ID not in server.nodes
        await one.quit()

    run_group(scenario, 1, is_joined=False)


def test_a_name_left_behind_is_waited_for() -> None:
    """A restarted process with a fixed id outlives what its predecessor left."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        server.put(ID, b"t", session_id=77)
        began_s = CLOCK.monotonic_s()
        joining = asyncio.create_task(one.join())
        await asyncio.sleep(15)
        server.remove(ID)
        await joining
        assert one.reading == parts(0)
        assert CLOCK.monotonic_s() - began_s < 21

    run_group(scenario, 1, is_joined=False)


def test_a_name_in_use_fails_the_start() -> None:
    """After longer than the session time-out; the other one's node stays."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        server.put(ID, b"t", session_id=77)
        began_s = CLOCK.monotonic_s()
        with pytest.raises(MemberTakenError, match="consumer ids are unique"):
            await one.join()
        assert CLOCK.monotonic_s() - began_s >= OPTIONS.session_timeout_s
        assert ID in server.nodes
        await one.quit()

    run_group(scenario, 1, is_joined=False)


def test_claims_without_an_answer_are_claimed_again_or_released() -> None:
    """An unknown owner node would stay for as long as the session.

    Before the next attempt gets anywhere the plan changes: one of them is another's.
    """

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        create = one.coordinator.create_ephemeral

        async def unheard(path: str, data: bytes, *, deadline_s: float) -> None:
            await create(path, data, deadline_s=deadline_s)
            if path != ID:
                raise CoordinationTimeoutError("the answer got lost")

        one.coordinator.create_ephemeral = unheard  # type: ignore[method-assign]
        await one.join()
        assert one.reading == set()
        assert len(owners(server)) == 2

        async def barred(path: str, data: bytes, *, deadline_s: float) -> None:
            raise CoordinationError(f"no rights to create {path}")

        one.coordinator.create_ephemeral = barred  # type: ignore[method-assign]
        two = await group.join("c2")
        await until(lambda: two.is_settled)
        assert (one.reading, two.reading) == (set(), parts(1))
        one.coordinator.create_ephemeral = create  # type: ignore[method-assign]
        await until(lambda: one.is_settled)
        assert one.reading == parts(0)
        assert owners(server) == {"0-0": "g_c1", "0-1": "g_c2"}

    run_group(scenario, 2, is_joined=False)


def test_a_check_that_fails_is_made_again() -> None:
    """At once, not when the next one is due."""

    async def scenario(group: Group, one: Member) -> None:
        server = group.server
        get = one.coordinator.get
        failed: list[str] = []

        async def failing(path: str, *, deadline_s: float) -> Node | None:
            if not failed:
                failed.append(path)
                raise CoordinationTimeoutError("the answer got lost")
            return await get(path, deadline_s=deadline_s)

        one.coordinator.get = failing  # type: ignore[method-assign]
        began_s = CLOCK.monotonic_s()
        server.remove(owner_path(part(0)))
        await until(lambda: one.sink.called("fence") == parts(0))
        await until(lambda: one.is_settled)
        assert failed
        assert CLOCK.monotonic_s() - began_s < 1

    run_group(scenario, 1)


def test_a_release_that_fails_is_tried_again() -> None:
    """The partition is not read until then, and goes to the other as soon as it can."""

    async def scenario(group: Group, one: Member) -> None:
        delete = one.coordinator.delete

        async def failing(path: str, *, deadline_s: float) -> bool:
            raise CoordinationError(f"no rights to delete {path}")

        one.coordinator.delete = failing  # type: ignore[method-assign]
        two = await group.join("c2")
        await asyncio.sleep(30)
        assert one.reading == parts(0)
        assert "no rights" in str(one.source.last_error)
        assert one.sink.called("revoke") == parts(1)
        one.coordinator.delete = delete  # type: ignore[method-assign]
        await until(lambda: one.is_settled and two.is_settled)
        assert two.reading == parts(1)
        assert [call for call, _ in one.sink.calls].count("revoke") == 1

    run_group(scenario, 2)
