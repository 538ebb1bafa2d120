"""Groups from outside: correct descriptions, and plans for changes."""

import asyncio
import datetime as dt
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from metaq.client import AsyncClient, Client, Lag
from metaq.client.admin.cluster_admin import (
    AdminGroup,
    GroupDescription,
    OffsetChange,
)
from metaq.client.cluster.catalog import read_cluster
from metaq.client.cluster.context import ClientContext
from metaq.client.errors import CannotAnswerError, GroupInUseError
from metaq.client.offsets.offset_reset import NO_MESSAGE, find_goal
from metaq.errors import (
    ClientError,
    ConfigError,
    MetaqError,
    NoBrokerError,
    RequestTimeoutError,
    ServerError,
    UnavailableError,
)
from metaq.model import BrokerId, GroupOffset, MessageId, Offset, TopicPartition
from metaq.protocol.commands import Command, Get, OffsetQuery, Reply, Result, Version
from metaq.protocol.texts import no_record_starts
from metaq.protocol.version import Capabilities, encode_version_body
from metaq.zk.errors import PayloadError
from metaq.zk.groups import GroupMembership
from tests.brokers import AnyBroker, StartBroker
from tests.client.scripted import ScriptedBroker, ok
from tests.client.worlds import parts_of

ONE_BROKER = {"ScriptedBroker": "it refuses as the test says"}
T = TypeVar("T")
PATIENCE_S = 60.0
RECORD_BYTES = 20 + 2
"""Of each message that `fill` puts: header and payload."""
FIRST = TopicPartition("test", BrokerId(0), 0)
SECOND = TopicPartition("test", BrokerId(0), 1)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 2})


def with_context(
    broker: AnyBroker, work: Callable[[ClientContext, float], Awaitable[T]]
) -> T:
    async def run() -> T:
        async with AsyncClient(**broker.client_options) as client:
            context = parts_of(client)
            deadline_s = context.clock.monotonic_s() + PATIENCE_S
            await context.metadata.wait_newer(0, deadline_s=deadline_s)
            await read_cluster(context, {"test"}, deadline_s=deadline_s)
            return await work(context, deadline_s)

    return asyncio.run(run())


def fill(broker: AnyBroker, partition: str = "0-0", count: int = 10) -> None:
    with Client(**broker.client_options) as client, client.producer() as producer:
        for number in range(count):
            producer.send("test", b"%02d" % number, partition=partition)


async def commit(
    context: ClientContext, deadline_s: float, group: str, **offsets: int
) -> None:
    changes = [
        OffsetChange(partition, None, GroupOffset(Offset(offset), MessageId(7)))
        for partition, offset in zip((FIRST, SECOND), offsets.values(), strict=False)
    ]
    await AdminGroup(context, group, deadline_s).write_offsets(changes)


async def join(
    context: ClientContext, deadline_s: float, *claims: TopicPartition
) -> str:
    assert context.coordinator is not None
    member = GroupMembership(
        context.coordinator, context.paths, group="g", consumer_id="one"
    )
    await member.register(["test"], deadline_s=deadline_s)
    for partition in claims:
        assert await member.claim(partition, deadline_s=deadline_s)
    return member.member


@pytest.mark.slow
def test_a_group_is_described(broker: AnyBroker) -> None:
    """Members, owners, offsets and lag; a partition without an owner shows."""
    fill(broker)

    async def work(context: ClientContext, deadline_s: float) -> GroupDescription:
        await commit(context, deadline_s, "g", first=4 * RECORD_BYTES)
        await join(context, deadline_s, FIRST)
        return await AdminGroup(context, "g", deadline_s).describe()

    found = with_context(broker, work)
    assert found.members == {"g_one": ("test",)}
    first, second = found.partitions
    assert (first.partition, first.owner, first.is_wanted) == (FIRST, "g_one", True)
    assert first.committed == 4 * RECORD_BYTES
    assert first.lag is not None
    assert first.lag.bytes == 6 * RECORD_BYTES
    if broker.has_extensions:
        assert first.lag.messages == 6
        assert first.lag.seconds is not None
        assert 0 <= first.lag.seconds < PATIENCE_S
    else:
        assert (first.lag.messages, first.lag.seconds) == (None, None)
    assert (second.partition, second.owner, second.is_wanted) == (SECOND, None, True)
    # Nothing is committed, and nothing was put: that is known.
    nothing = Lag(messages=0, bytes=0, seconds=0.0)
    assert (second.committed, second.lag, second.problem) == (None, nothing, None)


@pytest.mark.slow
def test_an_offset_behind_the_log_end_has_no_lag(broker: AnyBroker) -> None:
    """Of a log that was cut, and of a partition that nothing was put to."""
    fill(broker)

    async def work(context: ClientContext, deadline_s: float) -> GroupDescription:
        await commit(context, deadline_s, "g", first=460, second=9)
        return await AdminGroup(context, "g", deadline_s).describe()

    first, second = with_context(broker, work).partitions
    assert (first.committed, first.lag, second.lag) == (460, None, None)
    assert first.problem is not None
    assert f"test/0-0: offset 460 is beyond the log end {10 * RECORD_BYTES}:" in (
        first.problem
    )
    assert "test/0-1: offset 9 is beyond the log end 0:" in str(second.problem)
    may_know_it = "a MetaQ 1.4 broker may know it again" in str(second.problem)
    assert may_know_it == (not broker.has_extensions)


def test_members_may_write_anything(broker: AnyBroker) -> None:
    """A topic that cannot be hides nothing; names are escaped in errors."""
    path = "/meta/consumers/g/ids/g_\u202ebad"
    broker.zookeeper.put(path, b"test,a/b,x\x1b[2J", session_id=99)

    async def work(context: ClientContext, deadline_s: float) -> GroupDescription:
        with pytest.raises(GroupInUseError, match=r"\(g_\\u202ebad\)"):
            await AdminGroup(context, "g", deadline_s).require_idle(["test"])
        return await AdminGroup(context, "g", deadline_s).describe()

    found = with_context(broker, work)
    assert {each.partition.topic for each in found.partitions} == {"test"}
    assert found.members == {"g_\u202ebad": ("test", "a/b", "x\x1b[2J")}


def test_a_broker_that_is_gone_costs_its_lag_alone(broker: AnyBroker) -> None:
    """The offset is told all the same, and why the lag is not."""
    gone = TopicPartition("test", BrokerId(5), 0)

    async def work(context: ClientContext, deadline_s: float) -> GroupDescription:
        change = OffsetChange(gone, None, GroupOffset(Offset(9)))
        await AdminGroup(context, "g", deadline_s).write_offsets([change])
        return await AdminGroup(context, "g", deadline_s).describe()

    last = with_context(broker, work).partitions[-1]
    assert (last.partition, last.committed, last.lag) == (gone, 9, None)
    assert last.problem == "test/5-0: broker 5 is not registered"
    assert not last.is_wanted


def test_a_group_that_never_was_is_empty(broker: AnyBroker) -> None:
    """No members, no partitions, no error."""
    found = with_context(
        broker, lambda context, at_s: AdminGroup(context, "nobody", at_s).describe()
    )
    assert (found.members, found.partitions) == ({}, ())


def test_without_zookeeper_there_are_no_groups(broker: AnyBroker) -> None:
    """A client of named brokers is told so."""

    async def run() -> None:
        async with AsyncClient(brokers=[broker.address]) as client:
            await AdminGroup(parts_of(client), "g", 0.0).describe()

    with pytest.raises(ConfigError, match="kept in ZooKeeper"):
        asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("goal", "offset"),
    [
        ("earliest", 0),
        ("latest", 10 * RECORD_BYTES),
        (Offset(3 * RECORD_BYTES), 3 * RECORD_BYTES),
        (Offset(10 * RECORD_BYTES), 10 * RECORD_BYTES),
        (dt.datetime(2020, 1, 1, tzinfo=dt.UTC), 0),
        (dt.datetime(2200, 1, 1, tzinfo=dt.UTC), 10 * RECORD_BYTES),
    ],
)
def test_every_goal_has_an_offset(broker: AnyBroker, goal: Offset, offset: int) -> None:
    """Both ends of the log, a boundary within, times before and after everything.

    MetaQ 1.4's logs know no time, and say so.
    """
    fill(broker)
    if isinstance(goal, dt.datetime) and not broker.has_extensions:
        with pytest.raises(CannotAnswerError, match="no times"):
            with_context(
                broker,
                lambda context, at_s: find_goal(context, FIRST, goal, deadline_s=at_s),
            )
        return
    found = with_context(
        broker,
        lambda context, at_s: find_goal(context, FIRST, goal, deadline_s=at_s),
    )
    assert found == offset


@pytest.mark.parametrize("goal", ["earliest", "latest", dt.datetime.now(dt.UTC)])
def test_a_partition_without_a_log_begins_at_0(
    broker: AnyBroker, goal: dt.datetime
) -> None:
    """Its first message is the first that comes."""
    found = with_context(
        broker,
        lambda context, at_s: find_goal(context, FIRST, goal, deadline_s=at_s),
    )
    assert found == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "text"),
    [
        (RECORD_BYTES + 1, "test/0-0: 23 is not a message boundary; nearest: 22, 44"),
        (10 * RECORD_BYTES + 1, "expected an offset from 0 to 220, got 221"),
    ],
)
def test_an_offset_that_is_none_is_refused(
    broker: AnyBroker, offset: int, text: str
) -> None:
    """A group that went on there would read rubbish, or lose its place."""
    fill(broker)
    with pytest.raises(ClientError, match=text):
        with_context(
            broker,
            lambda context, at_s: find_goal(
                context, FIRST, Offset(offset), deadline_s=at_s
            ),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "text", "kind", "said"),
    [
        (500, no_record_starts("test-0", 7), ClientError, "7 is not a message bound"),
        (500, "internal error", ServerError, "^internal error$"),
        (503, "the partition is moving", UnavailableError, "^the partition is moving$"),
    ],
)
def test_a_broker_that_cannot_say_where_messages_begin_is_told_as_it_says(
    status: int, text: str, kind: type[Exception], said: str
) -> None:
    """That no message begins there is another answer."""

    def answer(command: Command) -> Reply | None:
        if isinstance(command, Version):
            body = encode_version_body(Capabilities("test", spans=True))
            return Result(200, body.encode(), command.opaque)
        if isinstance(command, Get):
            return Result(404, b"", command.opaque)
        if not isinstance(command, OffsetQuery):
            return ok(command)
        if command.question is not None:
            return Result(status, text.encode(), command.opaque)
        return Result(200, b"%d" % min(command.offset, 40), command.opaque)

    async def scenario() -> None:
        async with ScriptedBroker() as broker:
            broker.answer = answer
            address = f"127.0.0.1:{broker.address.port}"
            async with AsyncClient(brokers=[address]) as client:
                context = parts_of(client)
                partition = TopicPartition("test", BrokerId(7), 0)

                async def refusal() -> MetaqError:
                    # One that is asked again goes on to the end.
                    deadline_s = context.clock.monotonic_s() + 3.0
                    with pytest.raises(MetaqError) as caught:
                        await find_goal(
                            context, partition, Offset(7), deadline_s=deadline_s
                        )
                    return caught.value

                error = await refusal()
                while isinstance(error, RequestTimeoutError):
                    # It was asked for the last time too late for an answer.
                    error = await refusal()
                assert type(error) is kind
                assert re.search(said, str(error))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_reset_is_planned_then_written(broker: AnyBroker) -> None:
    """The plan says old and new; nothing changes before it is carried out."""
    fill(broker)

    async def work(
        context: ClientContext, deadline_s: float
    ) -> tuple[tuple[OffsetChange, ...], list[dict[TopicPartition, Any]]]:
        await commit(context, deadline_s, "g", first=RECORD_BYTES)
        changes = await AdminGroup(context, "g", deadline_s).plan_reset(
            {SECOND: "latest", FIRST: "latest"}
        )
        seen = [await AdminGroup(context, "g", deadline_s).read_offsets(None)]
        await AdminGroup(context, "g", deadline_s).write_offsets(changes)
        seen.append(await AdminGroup(context, "g", deadline_s).read_offsets(["test"]))
        return changes, seen

    changes, (before, after) = with_context(broker, work)
    old = GroupOffset(Offset(RECORD_BYTES), MessageId(7))
    end = GroupOffset(Offset(10 * RECORD_BYTES), NO_MESSAGE)
    nothing = GroupOffset(Offset(0), NO_MESSAGE)
    assert changes == (
        OffsetChange(FIRST, old, end),
        OffsetChange(SECOND, None, nothing),
    )
    assert before == {FIRST: old}
    assert after == {FIRST: end, SECOND: nothing}


def test_a_reset_mends_a_node_that_holds_no_offset(broker: AnyBroker) -> None:
    """Its members cannot begin before; the others are told as ever."""

    async def work(context: ClientContext, deadline_s: float) -> None:
        await commit(context, deadline_s, "g", first=0, second=0)
        path = context.paths.group_offset("g", FIRST)
        assert context.coordinator is not None
        await context.coordinator.set_or_create(path, b"x", deadline_s=deadline_s)
        found = await AdminGroup(context, "g", deadline_s).read_offsets(None)
        assert found[SECOND] == GroupOffset(Offset(0), MessageId(7))
        assert str(found[FIRST]).startswith(f"{path}: group offset: expected a number")
        with pytest.raises(PayloadError, match=path):
            await AdminGroup(context, "h", deadline_s).plan_copy("g", None)
        await commit(context, deadline_s, "source", first=0)
        for changes in (
            await AdminGroup(context, "g", deadline_s).plan_copy("source", None),
            await AdminGroup(context, "g", deadline_s).plan_reset({FIRST: "latest"}),
        ):
            assert [change.old for change in changes] == [None]
        await AdminGroup(context, "g", deadline_s).write_offsets(changes)
        found = await AdminGroup(context, "g", deadline_s).read_offsets(None)
        assert found[FIRST] == GroupOffset(Offset(0), NO_MESSAGE)

    with_context(broker, work)


@pytest.mark.slow
def test_a_consumer_goes_on_where_a_reset_says(broker: AnyBroker) -> None:
    """The next member of the group begins at the written offset."""
    fill(broker)

    async def work(context: ClientContext, deadline_s: float) -> None:
        changes = await AdminGroup(context, "g", deadline_s).plan_reset(
            {FIRST: Offset(7 * RECORD_BYTES)}
        )
        await AdminGroup(context, "g", deadline_s).write_offsets(changes)

    with_context(broker, work)
    with (
        Client(**broker.client_options) as client,
        client.consumer("g", ["test"]) as consumer,
    ):
        messages = [consumer.receive(PATIENCE_S) for _ in range(3)]
    assert [message.data for message in messages if message] == [b"07", b"08", b"09"]


def test_a_reset_of_a_broker_that_is_gone_fails_at_once(broker: AnyBroker) -> None:
    """Nothing is planned for the others."""
    gone = TopicPartition("test", BrokerId(5), 0)
    with pytest.raises(NoBrokerError, match="broker 5 is not registered"):
        with_context(
            broker,
            lambda context, at_s: AdminGroup(context, "g", at_s).plan_reset(
                {FIRST: "latest", gone: "latest"}
            ),
        )


def test_offsets_are_copied_as_they_are(broker: AnyBroker) -> None:
    """Ids included; what the second group has elsewhere stays."""

    async def work(
        context: ClientContext, deadline_s: float
    ) -> dict[TopicPartition, Any]:
        await commit(context, deadline_s, "a", first=5)
        await commit(context, deadline_s, "b", first=1, second=2)
        changes = await AdminGroup(context, "b", deadline_s).plan_copy("a", None)
        assert [change.old for change in changes] == [
            GroupOffset(Offset(1), MessageId(7))
        ]
        await AdminGroup(context, "b", deadline_s).write_offsets(changes)
        return await AdminGroup(context, "b", deadline_s).read_offsets(None)

    found = with_context(broker, work)
    assert {p: offset.offset for p, offset in found.items()} == {FIRST: 5, SECOND: 2}


def test_there_must_be_something_to_copy(broker: AnyBroker) -> None:
    """A misspelt group is no success."""
    with pytest.raises(ClientError, match="group a has no offsets of topic test"):
        with_context(
            broker,
            lambda context, at_s: AdminGroup(context, "b", at_s).plan_copy(
                "a", ["test"]
            ),
        )


def test_a_group_that_reads_is_not_moved(broker: AnyBroker) -> None:
    """Its member is named; a group that reads other topics may be moved."""

    async def work(context: ClientContext, deadline_s: float) -> None:
        await join(context, deadline_s)
        await AdminGroup(context, "g", deadline_s).require_idle({"other"})
        with pytest.raises(GroupInUseError, match=r"got 1 \(g_one\)"):
            await AdminGroup(context, "g", deadline_s).require_idle({"test"})

    with_context(broker, work)
