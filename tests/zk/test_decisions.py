"""Decisions of a group: all of one request, or nothing; and what they say."""

import asyncio

import pytest

from metaq.model import BrokerId, GroupOffset, MessageId, Offset, TopicPartition
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.decisions import (
    DECISION_BYTES_MAX,
    GroupDecision,
    GroupDecisions,
    Place,
    TooLargeError,
)
from metaq.zk.errors import NodeChangedError, PayloadError
from metaq.zk.paths import NodePaths
from tests.rigs.virtual_time import VirtualClock, run_virtually

CLOCK = VirtualClock()
PATHS = NodePaths()
ZERO = TopicPartition("t", BrokerId(0), 0)
ONE = TopicPartition("t", BrokerId(0), 1)
MADE = GroupDecision("XID:1:0a:0b:group-g", (BrokerId(0), BrokerId(2)))
TOKEN = "0a"


def in_s(seconds: float = 5.0) -> float:
    return CLOCK.monotonic_s() + seconds


async def decisions_of(server: MemoryZooKeeper) -> GroupDecisions:
    """Return those of a member with a token that owns both partitions."""
    coordinator: MemoryCoordinator = server.coordinator(CLOCK)
    coordinator.start()
    while not coordinator.status.session_id:
        await asyncio.sleep(0.01)
    for partition in (ZERO, ONE):
        path = PATHS.owner("g", partition)
        await coordinator.create_ephemeral(path, b"g_one", deadline_s=in_s())
    decisions = GroupDecisions(coordinator, PATHS, group="g")
    await decisions.make_token(TOKEN, "g_one", deadline_s=in_s())
    return decisions


async def decide(
    decisions: GroupDecisions, places: dict[TopicPartition, Place], offset: int
) -> dict[TopicPartition, Place]:
    stored = GroupOffset(Offset(offset), MessageId(7))
    moves = {partition: (place, stored) for partition, place in places.items()}
    operations = await decisions.plan(MADE, TOKEN, moves, deadline_s=in_s())
    return await decisions.decide(MADE, moves, operations, deadline_s=in_s())


async def places_of(decisions: GroupDecisions) -> dict[TopicPartition, Place]:
    return {one: await decisions.read(one, deadline_s=in_s()) for one in (ZERO, ONE)}


def test_a_decision_moves_all_offsets_and_names_itself_at_each() -> None:
    async def scenario() -> None:
        decisions = await decisions_of(MemoryZooKeeper())
        places = await places_of(decisions)
        assert places == {ZERO: Place(), ONE: Place()}
        for offset in (10, 20):
            places = await decide(decisions, places, offset)
            assert places == await places_of(decisions)
            assert {p.decision for p in places.values()} == {MADE}
            assert {p.offset and p.offset.offset for p in places.values()} == {offset}
        assert await decisions.read_all(deadline_s=in_s()) == {ZERO: MADE, ONE: MADE}

    run_virtually(scenario())


@pytest.mark.parametrize("what", ["token", "owner", "offset", "decision"])
def test_a_decision_that_does_not_fit_moves_nothing(what: str) -> None:
    """Without the token, an owner node, or over what others have written."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        decisions = await decisions_of(server)
        places = await decide(decisions, await places_of(decisions), 10)
        if what == "token":
            await decisions.drop_token(TOKEN, deadline_s=in_s())
        elif what == "owner":
            server.remove(PATHS.owner("g", ONE))
        elif what == "offset":
            server.write(PATHS.group_offset("g", ONE), b"7-10")
        else:
            server.write(PATHS.group_decision("g", ONE), MADE.encode())
        before = await places_of(decisions)
        with pytest.raises(NodeChangedError):
            await decide(decisions, places, 20)
        assert await places_of(decisions) == before

    run_virtually(scenario())


def test_tokens_are_read_after_a_write() -> None:
    """A server that is late would not have a token that was just made."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        decisions = await decisions_of(server)
        del server.calls[:]
        assert await decisions.read_tokens(deadline_s=in_s()) == {TOKEN: "g_one"}
        assert [what for what, _path in server.calls][:2] == ["set", "children"]

    run_virtually(scenario())


def test_more_partitions_than_a_request_takes_are_refused_with_both_numbers() -> None:
    async def scenario() -> None:
        decisions = await decisions_of(MemoryZooKeeper())
        topic = "t" * 200
        many = {
            TopicPartition(topic, BrokerId(0), n): Place(
                GroupOffset(Offset(1)), 1, MADE, 1
            )
            for n in range(2000)
        }
        with pytest.raises(
            TooLargeError, match=f"2000 partitions.*{DECISION_BYTES_MAX}"
        ):
            await decide(decisions, many, 10)

    run_virtually(scenario())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"xid":"x"}', b'{"xid":1,"brokers":[null]}']
)
def test_bytes_that_are_no_decision_are_quoted(data: bytes) -> None:
    assert GroupDecision.decode(MADE.encode()) == MADE
    with pytest.raises(PayloadError, match="expected the decision"):
        GroupDecision.decode(data)
