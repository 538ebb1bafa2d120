"""Decisions of a group: all of one request, or nothing; and what they say."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from metaq.model import (
    BrokerId,
    GroupOffset,
    MessageId,
    Offset,
    TopicPartition,
    XaTransactionId,
)
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.decisions import (
    DECISION_BYTES_MAX,
    GroupBatch,
    GroupDecision,
    GroupDecisions,
    Place,
    TooLargeError,
    batch_xid,
    parse_batch_xid,
)
from metaq.zk.errors import (
    NodeChangedError,
    NodeExistsError,
    NodeNotEmptyError,
    PayloadError,
)
from metaq.zk.paths import NodePaths
from metaq.zk.session import CheckNode, WriteNode
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
        assert await decisions.read_all(deadline_s=in_s()) == {
            one: Place(decision=MADE, decision_version=1) for one in (ZERO, ONE)
        }

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


DAMAGED = [
    b"",
    b"[]",
    b"{}",
    b'{"xid":"x"}',
    b'{"xid":1,"brokers":[0]}',
    b'{"xid":"x","brokers":[null]}',
    b'{"xid":"x","brokers":[true]}',
    b'{"xid":"x","brokers":"01"}',
    b'{"xid":"x","brokers":1}',
    b"\xff",
]


@pytest.mark.parametrize("data", DAMAGED)
def test_bytes_that_are_no_decision_are_quoted(data: bytes) -> None:
    with pytest.raises(PayloadError, match="expected the decision"):
        GroupDecision.decode(data)


def test_a_decision_has_the_bytes_that_are_drawn() -> None:
    """The node of each partition; other programs read it too."""
    data = b'{"xid":"XID:1:0a:0b:group-g","brokers":[0,2]}'
    assert MADE.encode() == data
    assert GroupDecision.decode(data) == MADE
    spaced = b'{ "brokers": [], "xid": "XID:1:0a:0b:group-g", "more": 1 }'
    assert GroupDecision.decode(spaced) == replace(MADE, brokers=())


def test_the_id_of_a_batch_has_the_bytes_that_are_drawn() -> None:
    """Token and number; the member in 64 bytes; the group in the qualifier."""
    token = "0123456789abcdef" * 2
    xid = batch_xid("g", "g_" + "\u00e4" * 40, token, 258)
    assert xid == XaTransactionId(
        0x4D514731,
        bytes.fromhex(token) + b"\0\0\0\0\0\0\x01\x02",
        ("g_" + "\u00e4" * 31).encode(),
        "group-g",
    )
    assert parse_batch_xid(xid) == GroupBatch("g", "g_" + "\u00e4" * 31, token, 258)
    cut = batch_xid("g", "x" + "\u00e4" * 40, token, 258)
    assert len(cut.branch) == 64
    parsed = parse_batch_xid(cut)
    assert parsed is not None
    assert parsed.member == "x" + "\u00e4" * 31


@pytest.mark.parametrize(
    "other",
    [
        {"format_id": 1},
        {"global_id": b"1" * 23},
        {"global_id": b"1" * 25},
        {"qualifier": "billing"},
    ],
    ids=repr,
)
def test_an_id_of_another_program_is_none_of_a_batch(other: dict[str, Any]) -> None:
    xid = batch_xid("g", "g_one", "0a" * 16, 1)
    assert parse_batch_xid(replace(xid, **other)) is None


def test_a_request_names_token_owners_and_versions_in_the_order_drawn() -> None:
    """Checks first; then offset and decision of each partition, at their versions."""

    async def scenario() -> None:
        decisions = await decisions_of(MemoryZooKeeper())
        stored = GroupOffset(Offset(10), MessageId(7))
        moves = {
            ZERO: (Place(), stored),
            ONE: (Place(stored, 4, MADE, 5), stored),
        }
        found = await decisions.plan(MADE, TOKEN, moves, deadline_s=in_s())
        made = b'{"xid":"XID:1:0a:0b:group-g","brokers":[0,2]}'
        root = "/meta/exactly-once/g"
        assert found == [
            CheckNode(f"{root}/tokens/{TOKEN}", 0),
            CheckNode("/meta/consumers/g/owners/t/0-0", 0),
            CheckNode("/meta/consumers/g/owners/t/0-1", 0),
            WriteNode("/meta/consumers/g/offsets/t/0-0", b"7-10", None),
            WriteNode(f"{root}/decisions/t/0-0", made, None),
            WriteNode("/meta/consumers/g/offsets/t/0-1", b"7-10", 4),
            WriteNode(f"{root}/decisions/t/0-1", made, 5),
        ]

    run_virtually(scenario())


@pytest.mark.parametrize("damaged", ["decision", "offset"])
def test_a_damaged_node_is_named(damaged: str) -> None:
    """By who reads one partition, and by who reads all: the rest is not guessed."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        decisions = await decisions_of(server)
        await decide(decisions, await places_of(decisions), 10)
        path = getattr(PATHS, f"group_{damaged}")("g", ONE)
        server.write(path, b"damaged")
        with pytest.raises(PayloadError, match=f"{path}: .*damaged"):
            await decisions.read(ONE, deadline_s=in_s())
        assert (await decisions.read(ZERO, deadline_s=in_s())).decision == MADE
        if damaged == "decision":
            with pytest.raises(PayloadError, match=f"{path}: .*damaged"):
                await decisions.read_all(deadline_s=in_s())

    run_virtually(scenario())


def test_nodes_of_others_are_no_partitions() -> None:
    """Whatever is put there by hand is left out of what is read."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        decisions = await decisions_of(server)
        assert not await decisions.read_all(deadline_s=in_s())
        server.write("/meta/exactly-once/g/decisions/t/notes", b"by hand")
        server.write("/meta/exactly-once/g/decisions/empty", b"")
        server.write(PATHS.group_decision("g", ZERO), MADE.encode())
        found = await decisions.read_all(deadline_s=in_s())
        assert found == {ZERO: Place(decision=MADE, decision_version=0)}

    run_virtually(scenario())


def test_a_group_is_used_from_its_first_token_until_it_is_forgotten() -> None:
    """All of its nodes go then; a token, or a later decision, keeps them."""

    async def scenario() -> None:
        server = MemoryZooKeeper()
        decisions = await decisions_of(server)
        assert await decisions.is_used(deadline_s=in_s())
        places = await decide(decisions, await places_of(decisions), 10)
        kept = await decisions.read_all(deadline_s=in_s())
        with pytest.raises(NodeNotEmptyError):
            await decisions.forget(kept, deadline_s=in_s())
        await decide(decisions, places, 20)
        await decisions.drop_token(TOKEN, deadline_s=in_s())
        with pytest.raises(NodeChangedError):
            await decisions.forget(kept, deadline_s=in_s())
        assert await decisions.is_used(deadline_s=in_s())
        kept = await decisions.read_all(deadline_s=in_s())
        assert kept.keys() == {ZERO, ONE}
        await decisions.forget(kept, deadline_s=in_s())
        assert not await decisions.is_used(deadline_s=in_s())
        assert server.names("/meta/exactly-once") == ()
        await decisions.forget({}, deadline_s=in_s())

    run_virtually(scenario())


def test_a_token_is_made_once() -> None:
    """One that is there was not made by us, and may not be used."""

    async def scenario() -> None:
        decisions = await decisions_of(MemoryZooKeeper())
        with pytest.raises(NodeExistsError):
            await decisions.make_token(TOKEN, "g_two", deadline_s=in_s())
        assert await decisions.read_tokens(deadline_s=in_s()) == {TOKEN: "g_one"}
        for _ in range(2):
            await decisions.drop_token(TOKEN, deadline_s=in_s())
        assert await decisions.read_tokens(deadline_s=in_s()) == {}

    run_virtually(scenario())
