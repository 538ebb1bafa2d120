"""Paths of every template, and names read back."""

import pytest

from metaq.errors import ConfigError
from metaq.model import BrokerId, TopicPartition
from metaq.zk.errors import NodeNameError
from metaq.zk.paths import (
    BrokerRole,
    NodeKind,
    NodePaths,
    normalize_root,
    parse_follower,
    parse_partition,
    parse_role,
)
from tests.zk.golden_nodes import GOLDEN, kind_of

P = NodePaths()
LEADER = BrokerRole(BrokerId(0))
FOLLOWER = BrokerRole(BrokerId(0), follower_id=1)
PARTITION = TopicPartition("t-1", BrokerId(0), 3)

BUILT = {
    P.broker_ids(): "/meta/brokers/ids",
    P.broker(BrokerId(7)): "/meta/brokers/ids/7",
    P.role(LEADER): "/meta/brokers/ids/0/master",
    P.role(FOLLOWER): "/meta/brokers/ids/0/slave1",
    P.config_checksum(BrokerId(0)): "/meta/brokers/ids/0/master_config_checksum",
    P.topics(NodeKind.TOPIC): "/meta/brokers/topics",
    P.topics(NodeKind.TOPIC_SUB): "/meta/brokers/topics-sub",
    P.topic(NodeKind.TOPIC, "test", LEADER): "/meta/brokers/topics/test/0-m",
    P.topic(NodeKind.TOPIC_PUB, "test", LEADER): "/meta/brokers/topics-pub/test/0-m",
    P.topic(NodeKind.TOPIC_SUB, "a-b", FOLLOWER): "/meta/brokers/topics-sub/a-b/0-s1",
    P.topic_children(NodeKind.TOPIC_PUB, "test"): "/meta/brokers/topics-pub/test",
    P.groups(): "/meta/consumers",
    NodePaths("").groups(): "/consumers",
    P.group_topics(NodeKind.OWNER, "g"): "/meta/consumers/g/owners",
    P.group_partitions(NodeKind.GROUP_OFFSET, "g", "t"): "/meta/consumers/g/offsets/t",
    P.members("g"): "/meta/consumers/g/ids",
    P.member("g", "g_c1"): "/meta/consumers/g/ids/g_c1",
    P.owner("g", PARTITION): "/meta/consumers/g/owners/t-1/0-3",
    P.group_offset("g", PARTITION): "/meta/consumers/g/offsets/t-1/0-3",
    P.query_start("q"): "/meta/queries/q/start",
    P.query_routes("q"): "/meta/queries/q/routes",
    P.query_decision("q"): "/meta/queries/q/decision",
    P.group_decisions("g"): "/meta/exactly-once/g",
    P.group_decision("g", PARTITION): "/meta/exactly-once/g/decisions/t-1/0-3",
    P.group_tokens("g"): "/meta/exactly-once/g/tokens",
    P.group_token("g", "0af3"): "/meta/exactly-once/g/tokens/0af3",
    P.recorded_brokers(): "/meta/catalog/brokers",
    P.recorded_broker(BrokerId(7)): "/meta/catalog/brokers/7",
    P.recorded_topics(): "/meta/catalog/partitions",
    P.recorded_topic("t-1"): "/meta/catalog/partitions/t-1",
    P.recorded_partitions("t-1", BrokerId(7)): "/meta/catalog/partitions/t-1/7",
    P.replica_set(BrokerId(7)): "/meta/replicas/7",
    P.set_leader(BrokerId(7)): "/meta/replicas/7/leader",
    P.set_members(BrokerId(7)): "/meta/replicas/7/members",
    P.set_presences(BrokerId(7)): "/meta/replicas/7/present",
    P.topic_definitions(): "/meta/catalog/topics",
    P.topic_definition("t-1"): "/meta/catalog/topics/t-1",
    P.recorded_directories(BrokerId(7)): "/meta/catalog/directories/7",
    P.topics_with_status(): "/meta/catalog/status",
    P.topic_statuses("t-1"): "/meta/catalog/status/t-1",
    P.topic_status("t-1", BrokerId(7)): "/meta/catalog/status/t-1/7",
}


@pytest.mark.parametrize(("built", "expected"), BUILT.items())
def test_builders_write_the_paths_of_metaq(built: str, expected: str) -> None:
    """Each builder gives the path that MetaQ uses."""
    assert built == expected


@pytest.mark.parametrize("tree", GOLDEN)
def test_every_golden_node_with_a_payload_has_a_template(tree: str) -> None:
    """No node that a real broker or client wrote data into is unknown to us."""
    for node in GOLDEN[tree]:
        if node["data"]:
            assert kind_of(node["path"]) is not None, node["path"]


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("/meta", "/meta"),
        ("meta", "/meta"),
        ("/meta/", "/meta"),
        (" meta/x// ", "/meta/x"),
        ("/", ""),
        ("", ""),
    ],
)
def test_roots_gain_a_leading_slash_and_lose_trailing_ones(
    text: str, root: str
) -> None:
    """A root is normalised as MetaQ does it; '/' is the very top."""
    assert normalize_root(text) == root


@pytest.mark.parametrize("text", ["a//b", "a/../b", "/.", "a\0b", "/a\x1f/b"])
def test_roots_that_zookeeper_refuses_are_config_errors(text: str) -> None:
    """A bad root is found when the settings are read, not at the first node."""
    with pytest.raises(ConfigError, match=r"zk\.zkRoot"):
        normalize_root(text)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\0", "\x7f", "\x9f", "\ue000", "\ufff0"]
)
def test_names_that_zookeeper_refuses_are_no_part_of_a_path(name: str) -> None:
    """A name cannot lead out of its place in the tree."""
    with pytest.raises(NodeNameError, match="topic"):
        P.topic(NodeKind.TOPIC, name, LEADER)


@pytest.mark.parametrize("name", ["主题", "a b", "...", "\ufeef", "{x}", "😀"])
def test_other_names_are_welcome(name: str) -> None:
    """Spaces, braces and any script are legal topic names."""
    assert P.topic_children(NodeKind.TOPIC, name) == f"/meta/brokers/topics/{name}"


@pytest.mark.parametrize("role", [LEADER, FOLLOWER, BrokerRole(BrokerId(1023), 12)])
def test_roles_round_trip(role: BrokerRole) -> None:
    """The text of a role names that role."""
    assert parse_role(str(role)) == role


@pytest.mark.parametrize("text", ["", "0", "0-", "0-s", "m-0", "-1-m", "0-m ", "0-mm"])
def test_child_names_that_are_no_roles_are_none(text: str) -> None:
    """Readers skip children that other tools left beside the real ones."""
    assert parse_role(text) is None


def test_follower_and_partition_names_parse_or_are_none() -> None:
    """`slaveK` and `N-p` are read strictly, anything else is None."""
    assert parse_follower("slave12") == 12
    assert parse_follower("slave-1") is None
    assert parse_follower("master") is None
    assert parse_partition("3-14") == (3, 14)
    assert parse_partition("3") is None
    assert parse_partition("0--1") is None
    assert parse_partition("0-" + 5000 * "1") is None
