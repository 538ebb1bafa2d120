"""Plans: desired nodes against recorded trees, and steps that always get there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import BrokerAddress, BrokerId
from metaq.zk.errors import BrokerIdTakenError
from metaq.zk.paths import BrokerRole, NodePaths
from metaq.zk.plan import (
    AdvertisedTopic,
    BrokerSnapshot,
    DesiredGroup,
    Step,
    Upkeep,
    Verb,
    desired_groups,
    plan_group,
    plan_removal,
    plan_withdrawal,
)
from metaq.zk.znodes import Node

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "vectors.json").read_text()
)["zookeeper"]
PATHS = NodePaths()
US, THEM = 7, 8
LEADER = BrokerRole(BrokerId(0))
FOLLOWER = BrokerRole(BrokerId(0), follower_id=1)
ADDRESS = BrokerAddress("127.0.0.1", 8123)


def snapshot_of(checksum: int, *topics: AdvertisedTopic, **changes: Any) -> Any:
    fields: dict[str, Any] = {"role": LEADER, "address": ADDRESS} | changes
    return BrokerSnapshot(config_checksum=checksum, topics=topics, **fields)


TWO = (AdvertisedTopic("meta-test", 2), AdvertisedTopic("test", 2))
RECORDED = {
    "after_broker_start": snapshot_of(463763767, *TWO),
    "broker_with_acceptPublish_false": snapshot_of(
        2064703032,
        AdvertisedTopic("meta-test", 2, accepts_puts=False),
        AdvertisedTopic("test", 2, accepts_puts=False),
    ),
    "topic_with_4_partitions_and_acceptSubscribe_false": snapshot_of(
        2152732052,
        AdvertisedTopic("meta-test", 2),
        AdvertisedTopic("test", 4, accepts_gets=False),
    ),
}


def nodes_of(snapshot: BrokerSnapshot) -> dict[str, tuple[str, bool]]:
    groups, refused = desired_groups(snapshot, PATHS)
    assert refused == ()
    return {
        node.path: (node.data.decode(), node.upkeep is not Upkeep.WRITTEN)
        for group in groups
        for node in group.nodes
        if node.upkeep not in {Upkeep.ABSENT, Upkeep.RECORDED}
    }


def records_of(snapshot: BrokerSnapshot) -> dict[str, bytes]:
    groups, _ = desired_groups(snapshot, PATHS)
    return {
        node.path.removeprefix("/meta/catalog/"): node.data
        for group in groups
        for node in group.nodes
        if node.upkeep is Upkeep.RECORDED
    }


@pytest.mark.parametrize("tree", RECORDED)
def test_desired_nodes_are_those_of_a_recorded_broker(tree: str) -> None:
    """Every node with data, its bytes and its kind are what the Java broker writes."""
    recorded = {
        node["path"]: (node["data"], node["ephemeral"])
        for node in GOLDEN[tree]
        if node["data"]
    }
    assert nodes_of(RECORDED[tree]) == recorded


def test_a_leader_records_its_address_and_what_it_serves() -> None:
    """A topic that takes neither puts nor gets is not recorded."""
    snapshot = snapshot_of(
        1,
        AdvertisedTopic("both", 2),
        AdvertisedTopic("puts", 3, accepts_gets=False),
        AdvertisedTopic("neither", 4, accepts_puts=False, accepts_gets=False),
    )
    assert records_of(snapshot) == {
        "brokers/0": b"meta://127.0.0.1:8123",
        "partitions/both/0": b"2",
        "partitions/puts/0": b"3",
    }
    assert records_of(replace(snapshot, role=FOLLOWER)) == {}
    assert records_of(replace(snapshot, has_record=False)) == {}


def test_an_exchange_is_there_for_producers_alone() -> None:
    """No consumer finds it, and no record says that it has messages."""
    exchange = AdvertisedTopic("events", 1, accepts_gets=False, has_log=False)
    snapshot = snapshot_of(1, exchange)
    assert records_of(snapshot) == {"brokers/0": b"meta://127.0.0.1:8123"}
    _, group = desired_groups(snapshot, PATHS)[0]
    there = [node.path for node in group.nodes if node.upkeep is not Upkeep.ABSENT]
    assert there == ["/meta/brokers/topics-pub/events/0-m"]


def test_a_record_outlives_a_withdrawal_and_goes_with_its_topic() -> None:
    """The record of a broker is still there when the broker is not."""
    groups, _ = desired_groups(snapshot_of(1, AdvertisedTopic("t", 2)), PATHS)
    assert not [s for s in plan_withdrawal(groups) if "/catalog/" in s.path]
    assert plan_removal(groups[1])[0] == Step(
        Verb.DELETE, "/meta/catalog/partitions/t/0"
    )


def test_a_record_is_written_where_it_differs_and_whoever_wrote_it() -> None:
    """A start that finds its records as they should be writes none of them."""
    path = "/meta/catalog/partitions/t/0"
    for data in (b"2", b"3", None):
        found = as_wanted(TOPIC, US)
        found[path] = None if data is None else Node(data, 0, 5)
        steps = plan_group(TOPIC, found, US)
        expected = () if data == b"2" else (Step(Verb.SET_OR_CREATE, path, b"2"),)
        assert steps == expected


def test_registration_follows_the_order_of_metaq() -> None:
    """Role, address, checksum, then topic by topic: topics, topics-pub, topics-sub.

    The record of the broker comes before the broker, that of a topic before the topic.
    """
    groups, _ = desired_groups(RECORDED["after_broker_start"], PATHS)
    steps = [
        (step.verb, step.path.removeprefix("/meta/").removeprefix("brokers/"))
        for group in groups
        for step in plan_group(group, dict.fromkeys(paths_of(group)), US)
    ]
    assert steps == [
        (Verb.SET_OR_CREATE, "catalog/brokers/0"),
        (Verb.CREATE_EPHEMERAL, "ids/0/master"),
        (Verb.SET_OR_CREATE, "ids/0"),
        (Verb.CREATE_EPHEMERAL, "ids/0/master_config_checksum"),
        (Verb.SET_OR_CREATE, "catalog/partitions/meta-test/0"),
        (Verb.CREATE_EPHEMERAL, "topics/meta-test/0-m"),
        (Verb.CREATE_EPHEMERAL, "topics-pub/meta-test/0-m"),
        (Verb.CREATE_EPHEMERAL, "topics-sub/meta-test/0-m"),
        (Verb.SET_OR_CREATE, "catalog/partitions/test/0"),
        (Verb.CREATE_EPHEMERAL, "topics/test/0-m"),
        (Verb.CREATE_EPHEMERAL, "topics-pub/test/0-m"),
        (Verb.CREATE_EPHEMERAL, "topics-sub/test/0-m"),
    ]


def test_withdrawal_follows_the_order_of_metaq() -> None:
    """Role, checksum, the persistent node (or its text), then the topics."""
    groups, _ = desired_groups(snapshot_of(1, AdvertisedTopic("t", 2)), PATHS)
    steps = [
        (step.verb, step.path.removeprefix("/meta/brokers/"))
        for step in plan_withdrawal(groups)
    ]
    assert steps == [
        (Verb.DELETE, "ids/0/master"),
        (Verb.DELETE, "ids/0/master_config_checksum"),
        (Verb.DELETE_OR_EMPTY, "ids/0"),
        (Verb.DELETE, "topics/t/0-m"),
        (Verb.DELETE, "topics-pub/t/0-m"),
        (Verb.DELETE, "topics-sub/t/0-m"),
    ]


def test_a_follower_writes_neither_the_persistent_node_nor_a_checksum() -> None:
    """Only the leader speaks to clients before 1.4, and for the configuration."""
    snapshot = snapshot_of(1, AdvertisedTopic("t", 2), role=FOLLOWER)
    assert set(nodes_of(snapshot)) == {
        "/meta/brokers/ids/0/slave1",
        "/meta/brokers/topics/t/0-s1",
        "/meta/brokers/topics-pub/t/0-s1",
        "/meta/brokers/topics-sub/t/0-s1",
    }
    groups, _ = desired_groups(snapshot, PATHS)
    assert plan_withdrawal(groups)[0].path == "/meta/brokers/ids/0/slave1"
    assert all(step.verb is Verb.DELETE for step in plan_withdrawal(groups))


def test_a_topic_name_that_zookeeper_refuses_stops_no_other_topic() -> None:
    """One odd name is reported; the rest of the broker is registered."""
    odd = AdvertisedTopic("\ue000", 1)
    groups, refused = desired_groups(snapshot_of(1, odd, *TWO), PATHS)
    assert [group.topic for group in groups] == [None, "meta-test", "test"]
    assert refused == ("\ue000",)


def paths_of(group: DesiredGroup) -> list[str]:
    return [node.path for node in group.nodes]


GROUPS, _ = desired_groups(snapshot_of(1, AdvertisedTopic("t", 2)), PATHS)
BROKER, TOPIC = GROUPS
CLAIM = BROKER.nodes[0].path
LASTING = {Upkeep.WRITTEN, Upkeep.RECORDED}


def as_wanted(group: DesiredGroup, session_id: int) -> dict[str, Node | None]:
    return {
        node.path: None
        if node.upkeep is Upkeep.ABSENT
        else Node(node.data, 0 if node.upkeep in LASTING else session_id, 0)
        for node in group.nodes
    }


def test_what_is_as_it_should_be_is_left_alone() -> None:
    """No needless deletion: each one makes consumers rebalance."""
    for group in GROUPS:
        assert plan_group(group, as_wanted(group, US), US) == ()


@pytest.mark.parametrize("group", GROUPS, ids=["broker", "topic"])
def test_nodes_of_a_dead_session_of_ours_are_replaced(group: DesiredGroup) -> None:
    """A broker that restarts before its old session expired takes its nodes over."""
    steps = plan_group(group, as_wanted(group, THEM), US)
    ephemeral = [n.path for n in group.nodes if n.upkeep not in LASTING]
    assert [s.path for s in steps if s.verb is Verb.DELETE] == ephemeral
    assert [s.path for s in steps if s.verb is Verb.CREATE_EPHEMERAL] == ephemeral
    assert len(steps) == 2 * len(ephemeral)


@pytest.mark.parametrize(
    "data", [b"meta://127.0.0.1:8124", b"meta://other:8123", b"junk", b""]
)
def test_another_address_under_our_id_is_refused(data: bytes) -> None:
    """Two brokers with one id: the second one is told, in one sentence."""
    found = as_wanted(BROKER, US) | {CLAIM: Node(data, THEM, 0)}
    with pytest.raises(BrokerIdTakenError, match=r"brokerId$") as caught:
        plan_group(BROKER, found, US)
    assert "meta://127.0.0.1:8123" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_leader_of_a_set_takes_the_place_of_a_former_one() -> None:
    """Its epoch gives it the id: another address is deleted, whatever it says."""
    entitled = replace(snapshot_of(1), title="/meta/replicas/0/leader")
    group = desired_groups(entitled, PATHS)[0][0]
    assert group.nodes[0].data == BROKER.nodes[0].data
    for data in (b"meta://127.0.0.1:8124", b"junk"):
        found = as_wanted(group, US) | {CLAIM: Node(data, THEM, 0)}
        steps = plan_group(group, found, US)
        assert [step.verb for step in steps] == [Verb.DELETE, Verb.CREATE_EPHEMERAL]
        assert {step.path for step in steps} == {CLAIM}
    assert plan_group(group, as_wanted(group, US), US) == ()


def test_our_own_session_may_change_its_address() -> None:
    """Another address written by this very session is no stranger."""
    found = as_wanted(BROKER, US) | {CLAIM: Node(b"meta://old:1", US, 0)}
    assert [step.verb for step in plan_group(BROKER, found, US)] == [
        Verb.DELETE,
        Verb.CREATE_EPHEMERAL,
    ]


def test_a_changed_count_disappears_and_comes_back() -> None:
    """All three nodes go before any returns: watchers see children only."""
    after, _ = desired_groups(snapshot_of(1, AdvertisedTopic("t", 4)), PATHS)
    steps = plan_group(after[1], as_wanted(TOPIC, US), US)
    assert [step.verb for step in steps] == [
        *[Verb.DELETE] * 3,
        Verb.SET_OR_CREATE,
        *[Verb.CREATE_EPHEMERAL] * 3,
    ]
    assert steps[-1].data == b'{"numParts":4,"broker":"0-m"}'


def test_a_topic_that_stops_accepting_puts_loses_that_node_only() -> None:
    """Consumers of the topic see no change."""
    closed = AdvertisedTopic("t", 2, accepts_puts=False)
    after, _ = desired_groups(snapshot_of(1, closed), PATHS)
    assert plan_group(after[1], as_wanted(TOPIC, US), US) == (
        Step(Verb.DELETE, "/meta/brokers/topics-pub/t/0-m"),
    )


def test_a_changed_checksum_is_written_in_place() -> None:
    """Followers watch the data of that node."""
    after, _ = desired_groups(snapshot_of(2), PATHS)
    path = "/meta/brokers/ids/0/master_config_checksum"
    assert plan_group(after[0], as_wanted(BROKER, US), US) == (
        Step(Verb.SET_OR_CREATE, path, b"2"),
    )


def test_a_topic_is_removed_from_all_three_places_it_was_in() -> None:
    """A removal names the nodes that were wanted, no others."""
    closed = AdvertisedTopic("t", 2, accepts_gets=False)
    groups, _ = desired_groups(snapshot_of(1, closed), PATHS)
    assert [step.path for step in plan_removal(groups[1])] == [
        "/meta/catalog/partitions/t/0",
        "/meta/catalog/partitions/t",
        "/meta/brokers/topics/t/0-m",
        "/meta/brokers/topics-pub/t/0-m",
    ]


found_nodes = st.none() | st.builds(
    Node,
    data=st.sampled_from(
        [b"", b"2", b"9", b"meta://127.0.0.1:8123", b'{"numParts":2,"broker":"0-m"}']
    ),
    owner_session_id=st.sampled_from([0, US, THEM]),
    version=st.just(0),
)


@given(st.data(), st.booleans(), st.booleans())
def test_steps_lead_from_any_state_to_the_wanted_one(
    data: st.DataObject, accepts_puts: bool, accepts_gets: bool
) -> None:
    """Whatever is there, the plan's steps succeed, and then nothing is left to do."""
    topic = AdvertisedTopic("t", 2, accepts_puts, accepts_gets)
    groups, _ = desired_groups(snapshot_of(1, topic), PATHS)
    for group in groups:
        state = {path: data.draw(found_nodes) for path in paths_of(group)}
        try:
            steps = plan_group(group, state, US)
        except BrokerIdTakenError:
            assert group.topic is None
            continue
        for step in steps:
            node = state[step.path]
            if step.verb is Verb.DELETE:
                assert node is not None
                state[step.path] = None
            elif step.verb is Verb.CREATE_EPHEMERAL:
                assert node is None
                state[step.path] = Node(step.data, US, 0)
            else:
                owner = node.owner_session_id if node else 0
                state[step.path] = Node(step.data, owner, 1)
        assert plan_group(group, state, US) == ()
