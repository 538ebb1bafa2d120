"""The nodes of a set: payloads, reads, changes, and a replica's own nodes."""

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from metaq.errors import CoordinationError
from metaq.fs import SystemFileSystem
from metaq.replication.election import Flag, Presence, PresenceState
from metaq.replication.epochs import Epoch
from metaq.replication.json_values import to_json
from metaq.replication.record import (
    Change,
    LeaderNode,
    Purpose,
    ReplicaSetError,
    encode_record,
    plan_claim,
    plan_force,
    plan_give_up,
    plan_register,
    plan_renew,
    plan_take_in,
    plan_take_out,
)
from metaq.replication.replica import LeaderSeen, View
from metaq.replication.set_nodes import (
    BOOT_ID,
    LeaderData,
    Member,
    Outcome,
    SetNodes,
    Shown,
    decode_leader,
    decode_member,
    decode_present,
    token_of,
)
from metaq.zk.paths import NodePaths
from tests.cases import for_each
from tests.replication.set_nodes_rig import (
    ALL,
    BROKER,
    CLOCK,
    FIRST,
    LEADER,
    MEMBER_2,
    PRESENT_1,
    PRESENT_2,
    RECORD,
    SetRig,
    a_set,
    leader,
    leading,
    member,
    shown,
)
from tests.rigs.virtual_time import run_virtually

# -- payloads -------------------------------------------------------------------------

SHOWN = Shown(
    Presence(2, 5, PresenceState.RECOVERING, 3, 4, Flag.CUT, damaged=1),
    "meta://a:8123",
    "t",
)


def test_payloads_are_the_texts_that_other_versions_read() -> None:
    """Byte for byte, and back."""
    of_member = Member("s", {"b": 2, "a": 1}, 2)
    assert to_json(of_member) == (
        b'{"set_id":"s","directories":{"b":2,"a":1},"incarnation":2}'
    )
    assert decode_member(to_json(of_member)) == of_member
    assert of_member.version == 2
    assert to_json(SHOWN) == (
        b'{"presence":{"replica":2,"incarnation":5,"state":"recovering","revision":3,'
        b'"epoch":4,"flag":"cut","damaged":1},"address":"meta://a:8123","token":"t"}'
    )
    assert decode_present(2, to_json(SHOWN)) == SHOWN
    of_leader = LeaderData(2, Epoch(7, "n"), "meta://a:8123")
    assert to_json(of_leader) == (
        b'{"replica":2,"epoch":[7,"n"],"address":"meta://a:8123"}'
    )
    assert decode_leader(to_json(of_leader)) == of_leader


GOOD_MEMBER: dict[str, Any] = json.loads(to_json(member(4)))
GOOD_PRESENT: dict[str, Any] = json.loads(to_json(SHOWN))
GOOD_LEADER: dict[str, Any] = json.loads(leader(2, Epoch(7, "n")))


def presence(**changes: Any) -> dict[str, Any]:
    return GOOD_PRESENT | {"presence": GOOD_PRESENT["presence"] | changes}


def test_properties_of_later_versions_are_left_out() -> None:
    """A set has replicas of two versions while it is updated."""
    data = [
        json.dumps(fields | {"rack": "r1"}).encode()
        for fields in (GOOD_MEMBER, GOOD_PRESENT, GOOD_LEADER)
    ]
    assert decode_member(data[0]) == member(4)
    assert decode_present(2, data[1]) == SHOWN
    assert decode_leader(data[2]).epoch == Epoch(7, "n")


@for_each(
    "path, fields, text",
    {
        "no JSON": (PRESENT_2, b"{", "expected JSON, got b'{'"),
        "no object": (LEADER, b"7", "leader: expected an object, got 7"),
        "nested too deep": (LEADER, b"[" * 100_000, "expected JSON"),
        "a missing property": (
            PRESENT_2,
            {k: v for k, v in GOOD_PRESENT.items() if k != "token"},
            "token: expected a text, got None",
        ),
        "another kind": (
            LEADER,
            GOOD_LEADER | {"epoch": ["7", "n"]},
            "number: expected 0 to 9223372036854775807, got '7'",
        ),
        "a truth for a number": (
            PRESENT_2,
            presence(damaged=True),
            "damaged: expected 0 to 9223372036854775807, got True",
        ),
        "below zero": (
            MEMBER_2,
            GOOD_MEMBER | {"incarnation": -1},
            "incarnation: expected 0 to 9223372036854775807, got -1",
        ),
        "a state of no meaning": (
            PRESENT_2,
            presence(state="happy"),
            "'failed', 'frozen'], got 'happy'",
        ),
        "a flag of no meaning": (
            PRESENT_2,
            presence(flag="red"),
            "flag: expected one of ['', 'cut', 'incomplete'], got 'red'",
        ),
        "of another replica": (
            PRESENT_2,
            presence(replica=3),
            "expected replica 2, got 3",
        ),
        "a directory without version": (
            MEMBER_2,
            GOOD_MEMBER | {"directories": {"d": "x"}},
            "directories d: expected 0 to 9223372036854775807, got 'x'",
        ),
        "a damaged record": (RECORD, b"{}", "set_id: expected a text, got None"),
    }.values(),
)
def test_a_node_that_cannot_be_read_is_named(
    path: str, fields: bytes | dict[str, Any], text: str
) -> None:
    """The error names node and fault; nothing is guessed from the rest."""
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()

    async def scenario() -> None:
        async with a_set() as rig:
            rig.server.write(path, data)
            with pytest.raises(ReplicaSetError) as caught:
                await rig.nodes[1].read(synced=True)
            assert str(caught.value).startswith(f"{path}: ")
            assert text in str(caught.value)

    run_virtually(scenario())


# -- reading --------------------------------------------------------------------------


async def claim(rig: SetRig, replica: int, nonce: str = "n") -> Change:
    """Let a replica lead, and return the change with which it did."""
    view = (await rig.nodes[replica].read(synced=True)).view
    assert view.record is not None
    change = plan_claim(view.record, view.version, replica, nonce, frozenset())
    assert change is not None
    data = leading(replica, change.record.epoch)
    outcome = await rig.nodes[replica].propose(change, member=None, leader=data)
    assert outcome is Outcome.APPLIED
    return change


async def propose(
    rig: SetRig, replica: int, change: Change | None, *, own: Member | None = None
) -> Outcome:
    assert change is not None
    data = leading(replica, change.record.epoch)
    nodes = rig.nodes[replica]
    return await nodes.propose(change, member=own, leader=data)


def test_a_read_finds_all_nodes_and_whose_the_leader_is() -> None:
    """Each replica reads the same, but for whether the leader is its own session."""

    async def scenario() -> None:
        async with a_set() as rig:
            change = await claim(rig, 1)
            await rig.nodes[2].show(shown(2))
            await rig.nodes[1].show(shown(1))
            epoch = change.record.epoch
            for replica in (1, 2):
                found = await rig.nodes[replica].read(synced=replica == 1)
                assert found.view == View(
                    change.record,
                    rig.server.tree()[RECORD].version,
                    LeaderSeen(1, epoch, is_own=replica == 1),
                    (shown(1).presence, shown(2).presence),
                    is_synced=replica == 1,
                )
                assert found.shown == {1: shown(1), 2: shown(2)}
                assert found.members == {1: member(4)}
                assert found.leader_address == "meta://host1:8123"

    run_virtually(scenario())


def test_presences_are_read_before_the_record() -> None:
    """One that is ahead of the record proves then that ZooKeeper was set back."""

    async def scenario() -> None:
        async with a_set() as rig:
            await rig.nodes[1].show(shown(1))
            rig.server.calls.clear()
            await rig.nodes[2].read(synced=True)
            calls = rig.server.calls
            assert calls[0] == ("sync", RECORD)
            order = [path for what, path in calls if what == "get"]
            assert order.index(PRESENT_1) < order.index(RECORD) < order.index(LEADER)

    run_virtually(scenario())


def test_where_there_is_no_set_a_view_has_no_record() -> None:
    """And the read makes no node."""

    async def scenario() -> None:
        rig = SetRig()
        nodes = await rig.join(1)
        found = await nodes.read(synced=True)
        assert found.view == View(None, 0, None, (), is_synced=True)
        assert (found.shown, found.members, found.leader_address) == ({}, {}, "")
        assert rig.server.tree() == {}

    run_virtually(scenario())


def test_an_empty_replica_that_starts_first_creates_no_part_of_a_set() -> None:
    """It would make the others cut their logs to its own: only `init` makes a set."""

    async def scenario() -> None:
        rig = SetRig()
        nodes = await rig.join(1)
        await nodes.read(synced=True)
        with pytest.raises(
            ReplicaSetError, match="create one with `metaq replicas init`"
        ):
            await nodes.show(shown(1))
        register = plan_register(FIRST, 0, (1, 1), None)
        assert await propose(rig, 1, register, own=member(1)) is Outcome.REFUSED
        claiming = plan_claim(FIRST, 0, 1, "n", ALL)
        assert await propose(rig, 1, claiming) is Outcome.REFUSED
        assert await nodes.write_member(member(1)) is Outcome.REFUSED
        await nodes.withdraw()
        assert rig.server.tree() == {}

    run_virtually(scenario())


def test_a_watch_reports_the_record_the_leader_and_each_presence() -> None:
    """And a change of the session; nothing any more when it has ended."""

    async def scenario() -> None:
        async with a_set() as rig:
            count = 0

            def on_change() -> None:
                nonlocal count
                count += 1

            async def counted_after(change: Any) -> int:
                before = count
                await change
                await asyncio.sleep(0.01)
                return count - before

            cancel = rig.nodes[2].watch(on_change)
            assert await counted_after(asyncio.sleep(0)) > 0
            assert await counted_after(claim(rig, 1)) == 2
            assert await counted_after(rig.nodes[1].show(shown(1))) == 1
            failed = shown(1, state=PresenceState.FAILED)
            assert await counted_after(rig.nodes[1].show(failed)) == 1
            assert await counted_after(rig.nodes[1].write_member(member(4, 9))) == 0
            assert await counted_after(rig.nodes[1].withdraw()) == 1
            rig.server.remove(PRESENT_1)
            assert await counted_after(asyncio.sleep(0)) == 1
            rig.server.suspend(rig.clients[2])
            assert await counted_after(asyncio.sleep(0)) == 1
            rig.server.resume(rig.clients[2])
            await asyncio.sleep(0.01)
            cancel()
            assert await counted_after(rig.nodes[1].show(shown(1))) == 0

    run_virtually(scenario())


# -- changes --------------------------------------------------------------------------


def test_a_claim_writes_record_and_leader_at_once() -> None:
    """The second one over the same record is refused, whichever of both it finds."""

    async def scenario() -> None:
        async with a_set() as rig:
            view = (await rig.nodes[2].read(synced=True)).view
            change = await claim(rig, 1)
            late = plan_claim(FIRST, view.version, 2, "m", frozenset())
            assert await propose(rig, 2, late) is Outcome.REFUSED
            assert rig.data(RECORD) == encode_record(change.record)
            assert rig.data(LEADER) == leader(1, change.record.epoch)
            # Over the record that it left, the leader's node alone refuses.
            view = (await rig.nodes[2].read(synced=True)).view
            later = plan_claim(change.record, view.version, 2, "m", frozenset())
            assert await propose(rig, 2, later) is Outcome.REFUSED
            assert rig.data(RECORD) == encode_record(change.record)

    run_virtually(scenario())


def test_only_the_leader_of_this_session_changes_the_in_sync_set() -> None:
    """A former one that wakes up is refused, also over the right version."""

    async def scenario() -> None:
        async with a_set() as rig:
            led = (await claim(rig, 1)).record
            view = (await rig.nodes[2].read(synced=True)).view
            out = plan_take_out(led, view.version, 3, ALL)
            assert await propose(rig, 2, out) is Outcome.REFUSED
            assert await propose(rig, 1, out) is Outcome.APPLIED
            record = (await rig.nodes[1].read(synced=True)).view.record
            assert record is not None
            assert record.in_sync == {1, 2}
            rig.server.remove(LEADER)
            version = rig.server.tree()[RECORD].version
            renewed = plan_renew(record, version)
            checked = replace(renewed, leader_node=LeaderNode.CHECKED)
            assert await propose(rig, 1, checked) is Outcome.REFUSED

    run_virtually(scenario())


def test_a_replica_is_taken_in_by_the_life_that_joined() -> None:
    """Another directory under its number is refused; a newer version of it is not."""

    async def scenario() -> None:
        async with a_set({1: member(4), 2: member(6)}) as rig:
            led = (await claim(rig, 1)).record
            version = rig.server.tree()[RECORD].version
            await propose(rig, 1, plan_take_out(led, version, 2, ALL))
            view = (await rig.nodes[1].read(synced=True)).view
            assert view.record is not None
            assert await rig.nodes[2].write_member(member(6, 60)) is Outcome.APPLIED
            for life in (5, 7):
                joining = plan_take_in(view.record, view.version, (2, life))
                assert await propose(rig, 1, joining) is Outcome.REFUSED
            joining = plan_take_in(view.record, view.version, (2, 6))
            rig.server.remove(MEMBER_2)
            assert await propose(rig, 1, joining) is Outcome.REFUSED
            rig.server.put(MEMBER_2, to_json(member(6, 61)))
            assert await propose(rig, 1, joining) is Outcome.APPLIED

    run_virtually(scenario())


def test_a_start_registers_over_the_member_that_it_read() -> None:
    """Of two processes of one replica the second is refused, with all it proposed."""

    async def scenario() -> None:
        async with a_set() as rig:
            one, other = (
                rig.nodes[2],
                SetNodes(rig.clients[1], NodePaths(), BROKER, 2, clock=CLOCK),
            )
            view = (await one.read(synced=True)).view
            await other.read(synced=True)
            change = plan_register(FIRST, view.version, (2, 1), None)
            landed = await one.propose(change, member=member(1))
            assert landed is Outcome.APPLIED
            assert rig.data(MEMBER_2) == to_json(member(1))
            late = await other.propose(change, member=member(1))
            assert late is Outcome.REFUSED
            # Again, over the one that is there now.
            await one.read(synced=True)
            change = plan_register(FIRST, view.version, (2, 2), frozenset({1, 3}))
            landed = await one.propose(change, member=member(2))
            assert landed is Outcome.APPLIED
            assert rig.data(MEMBER_2) == to_json(member(2))
            record = (await one.read(synced=True)).view.record
            assert record is not None
            assert record.in_sync == {1, 3}

    run_virtually(scenario())


def test_giving_up_deletes_the_leader_with_the_change() -> None:
    """A record without a leader and a node of one are never there together."""

    async def scenario() -> None:
        async with a_set() as rig:
            led = (await claim(rig, 1)).record
            version = rig.server.tree()[RECORD].version
            change = plan_give_up(led, version, None, target=2)
            assert await propose(rig, 1, change) is Outcome.APPLIED
            assert rig.data(LEADER) is None
            assert rig.data(RECORD) == encode_record(change.record)
            # "If it is there": without one it lands as well.
            change = plan_force(change.record, version + 1, 2, "f")
            await rig.nodes[0].read(synced=True)
            assert await propose(rig, 0, change) is Outcome.APPLIED

    run_virtually(scenario())


def test_an_operator_deletes_the_leader_of_another_session() -> None:
    """`elect --force` while a leader is there that cannot be reached."""

    async def scenario() -> None:
        async with a_set() as rig:
            led = (await claim(rig, 1)).record
            view = (await rig.nodes[0].read(synced=True)).view
            change = plan_force(led, view.version, 2, "f")
            assert await propose(rig, 0, change) is Outcome.APPLIED
            assert rig.data(LEADER) is None

    run_virtually(scenario())


def test_a_record_is_created_once_with_what_is_known_of_members() -> None:
    """A second `init` overwrites nothing."""

    async def scenario() -> None:
        async with a_set({1: member(4)}) as rig:
            other = replace(FIRST, set_id="t")
            assert await rig.nodes[0].create_record(other, {}) is Outcome.REFUSED
            found = await rig.nodes[0].read(synced=True)
            assert found.view.record == FIRST
            assert found.members == {1: member(4)}

    run_virtually(scenario())


def test_a_member_is_written_by_the_life_that_registered() -> None:
    """One that another life of the replica overwrote is left alone."""

    async def scenario() -> None:
        async with a_set({1: member(4)}) as rig:
            nodes = rig.nodes[1]
            assert await nodes.write_member(member(4, 9)) is Outcome.APPLIED
            assert (await nodes.read(synced=False)).members[1].version == 9
            for other in (member(5), replace(member(4), set_id="t")):
                assert await nodes.write_member(other) is Outcome.REFUSED
            assert await rig.nodes[2].write_member(member(1)) is Outcome.REFUSED
            assert (await nodes.read(synced=False)).members == {1: member(4, 9)}

    run_virtually(scenario())


def test_a_member_is_made_known_again_after_the_record_was_restored() -> None:
    """ZooKeeper lost all nodes; replicas that live on register once more."""

    async def scenario() -> None:
        async with a_set() as rig:
            await rig.nodes[2].read(synced=True)
            rig.server.wipe()
            frozen = shown(2, state=PresenceState.FROZEN)
            await rig.nodes[2].show(frozen)
            found = await rig.nodes[0].read(synced=True)
            assert (found.view.record, found.shown) == (None, {2: frozen})
            assert await rig.nodes[0].create_record(FIRST, {}) is Outcome.APPLIED
            view = (await rig.nodes[2].read(synced=True)).view
            change = Change(
                Purpose.REGISTER, FIRST, view.version, member=(2, 6), is_check=True
            )
            assert await propose(rig, 2, change, own=member(6)) is Outcome.APPLIED
            assert (await rig.nodes[2].read(synced=True)).members == {2: member(6)}

    run_virtually(scenario())


# -- the own nodes --------------------------------------------------------------------


def test_a_replica_shows_itself_and_what_changes() -> None:
    """The node is made once, and written in place; the same again asks for nothing."""

    async def scenario() -> None:
        async with a_set() as rig:
            nodes = rig.nodes[2]
            await nodes.show(shown(2))
            made = rig.server.tree()[PRESENT_2]
            assert made.data == to_json(shown(2))
            assert made.owner_session_id == rig.clients[2].status.session_id
            await nodes.show(shown(2, flag=Flag.CUT))
            assert rig.server.tree()[PRESENT_2].version == made.version + 1
            rig.server.calls.clear()
            await nodes.show(shown(2, flag=Flag.CUT))
            assert {what for what, _ in rig.server.calls} == {"get"}

    run_virtually(scenario())


def test_a_replica_number_that_is_used_twice_is_refused() -> None:
    """Both addresses are named; the one that was there stays."""

    async def scenario() -> None:
        async with a_set() as rig:
            await rig.nodes[2].show(shown(2))
            other = await rig.join(2)
            with pytest.raises(ReplicaSetError) as caught:
                await other.show(shown(2, address="meta://elsewhere:8123"))
            assert str(caught.value) == (
                "replica 2 runs twice, at meta://host2:8123 and at meta://elsewhere:8123;"
                " give each its own replicaId"
            )
            assert rig.data(PRESENT_2) == to_json(shown(2))

    run_virtually(scenario())


def test_a_token_tells_machines_of_one_name_apart_and_lives_of_a_machine() -> None:
    """By what the kernel has drawn; the last part is of the life."""
    lives = [token_of(SystemFileSystem(), digits) for digits in ("a7", "b8")]
    machines = {each.rpartition("-")[0] for each in lives}
    assert machines == {f"{socket.gethostname()}-{BOOT_ID.read_text().strip()}"}
    assert [each[-3:] for each in lives] == ["-a7", "-b8"]


@pytest.mark.parametrize(
    "token", ["other-host-6f1c-88", "one-host-93d2-88"], ids=["name", "boot"]
)
def test_a_replica_number_that_is_used_on_another_machine_is_refused(
    token: str,
) -> None:
    """Its configuration was copied, address and all; the first one stays."""

    async def scenario() -> None:
        async with a_set() as rig:
            first = replace(shown(2), token="one-host-6f1c-77")
            await rig.nodes[2].show(first)
            other = await rig.join(2)
            with pytest.raises(ReplicaSetError) as caught:
                await other.show(replace(first, token=token))
            assert str(caught.value) == (
                "replica 2 runs twice, at meta://host2:8123 and, on another machine, at"
                " meta://host2:8123; give each its own replicaId"
            )
            assert rig.data(PRESENT_2) == to_json(first)

    run_virtually(scenario())


def test_of_two_processes_that_start_as_one_replica_one_registers() -> None:
    """The other one read before that: the directories of the first stay known."""

    async def scenario() -> None:
        async with a_set({2: member(4)}) as rig:
            first, other = rig.nodes[2], await rig.join(2)
            ways = ((first, 5, "meta://a:1"), (other, 6, "meta://b:1"))
            changes = []
            for nodes, life, address in ways:
                view = (await nodes.read(synced=True)).view
                change = plan_register(FIRST, view.version, (2, life), None)
                own = shown(2, address=address, incarnation=life)
                changes.append((nodes, change, member(life), own))

            async def register(number: int) -> Outcome:
                nodes, change, own, seen = changes[number]
                return await nodes.propose(change, member=own, shown=seen)

            assert await register(0) is Outcome.APPLIED
            tree = rig.server.tree()
            assert tree[PRESENT_2].data == to_json(changes[0][3])
            assert await register(1) is Outcome.REFUSED
            await other.read(synced=True)
            with pytest.raises(
                ReplicaSetError, match="replica 2 runs twice, at meta://a:1"
            ):
                await register(1)
            assert rig.server.tree() == tree

    run_virtually(scenario())


def test_a_presence_of_a_former_process_is_replaced() -> None:
    """It has our address, so it is not there any more; its session may be."""

    async def scenario() -> None:
        async with a_set() as rig:
            await rig.nodes[2].show(replace(shown(2), token="a-host-1"))
            rig.server.abandon(rig.clients[2])
            again = await rig.join(2)
            later = replace(shown(2), token="a-host-2")
            await again.show(later)
            node = rig.server.tree()[PRESENT_2]
            assert node.data == to_json(later)
            assert node.owner_session_id == rig.clients[2].status.session_id

    run_virtually(scenario())


def test_the_leader_node_is_withdrawn_by_the_replica_that_made_it() -> None:
    """Also one that a former process left; that of another replica is left alone."""

    async def scenario() -> None:
        async with a_set() as rig:
            await claim(rig, 1)
            await rig.nodes[2].withdraw()
            assert rig.data(LEADER) is not None
            rig.server.abandon(rig.clients[1])
            again = await rig.join(1)
            await again.withdraw()
            assert rig.data(LEADER) is None
            await again.withdraw()

    run_virtually(scenario())


def test_what_others_change_all_the_time_is_given_up() -> None:
    """A node that is never as it was read ends in an error, not in a loop."""

    async def scenario() -> None:
        async with a_set() as rig:
            nodes, server = rig.nodes[2], rig.server
            await nodes.show(shown(2))
            client, get = rig.clients[2], rig.clients[2].get

            async def get_and_meddle(path: str, *, deadline_s: float) -> Any:
                found = await get(path, deadline_s=deadline_s)
                server.write(path, to_json(shown(2)))
                return found

            client.get = get_and_meddle  # type: ignore[method-assign]
            with pytest.raises(CoordinationError, match="changed by others, 3 times"):
                await nodes.show(shown(2, flag=Flag.CUT))

    run_virtually(scenario())
