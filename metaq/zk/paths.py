"""Every path of MetaQ's tree in ZooKeeper.

Theory of operation: path texts are written only in `NodeKind`. Builders fill in a
template, completely or up to a parent; a test compares the table in this package's
README with it. A `{name}` is one step of the path, or the end of a step.

Keep in step: `README.md` of this package, `znodes.py` (payloads).

Source: docs/metaq-1.4/broker.md 3.1, 3.2 and 3.6, docs/metaq-1.4/client.md 4.
"""

import enum
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from metaq.errors import ConfigError
from metaq.model import BrokerId, TopicPartition
from metaq.zk.errors import NodeNameError

DEFAULT_ROOT: Final = "/meta"

NUMBER: Final = r"\d{1,20}"
"""A number in a name; its length is limited, as int() refuses very long ones."""

# Compiled once: a producer may name the partition of each message.
_PARTITION: Final = re.compile(rf"({NUMBER})-({NUMBER})", re.ASCII)


# Below the root. Paths keep MetaQ's own words ("master", "slave", "consumers");
# everything else uses the vocabulary of this project (leader, follower, member).
class NodeKind(enum.Enum):
    """Purpose of a node of the tree, and the template of its path."""

    BROKER = "broker", "/brokers/ids/{broker}"
    LEADER = "leader", "/brokers/ids/{broker}/master"
    FOLLOWER = "follower", "/brokers/ids/{broker}/slave{follower}"
    CONFIG_CHECKSUM = "config checksum", "/brokers/ids/{broker}/master_config_checksum"
    TOPIC = "topic", "/brokers/topics/{topic}/{role}"
    TOPIC_PUB = "topic, puts", "/brokers/topics-pub/{topic}/{role}"
    TOPIC_SUB = "topic, gets", "/brokers/topics-sub/{topic}/{role}"
    MEMBER = "member", "/consumers/{group}/ids/{member}"
    OWNER = "owner", "/consumers/{group}/owners/{topic}/{partition}"
    GROUP_OFFSET = "group offset", "/consumers/{group}/offsets/{topic}/{partition}"
    # Only ours: MetaQ has no queries.
    QUERY_START = "query start", "/queries/{query}/start"
    QUERY_ROUTES = "query routes", "/queries/{query}/routes"
    QUERY_DECISION = "query decision", "/queries/{query}/decision"
    # Also ours. Not below the group's node, because MetaQ's tools list its children.
    GROUP_DECISION = (
        "group decision",
        "/exactly-once/{group}/decisions/{topic}/{partition}",
    )
    GROUP_TOKEN = "group token", "/exactly-once/{group}/tokens/{token}"
    GROUP_FILTER = "group filter", "/filters/{group}"
    # Only ours: a broker on several machines. The first node has the set's record.
    REPLICA_SET = "replica set", "/replicas/{broker}"
    SET_LEADER = "set, leader", "/replicas/{broker}/leader"
    SET_MEMBER = "set, member", "/replicas/{broker}/members/{replica}"
    SET_PRESENT = "set, present", "/replicas/{broker}/present/{replica}"
    # The catalog: what exists while its broker is away. Not used by MetaQ.
    RECORDED_BROKER = "recorded broker", "/catalog/brokers/{broker}"
    RECORDED_PARTITIONS = "recorded partitions", "/catalog/partitions/{topic}/{broker}"
    TOPIC_DEFINITION = "topic definition", "/catalog/topics/{topic}"
    QUEUE_GROUP = "queue group", "/catalog/groups/{group}"
    EXCHANGE = "exchange", "/catalog/exchanges/{exchange}"
    BINDING = "binding", "/catalog/bindings/{exchange}/{binding}"
    RECORDED_DIRECTORIES = "recorded directories", "/catalog/directories/{broker}"
    TOPIC_STATUS = "topic status", "/catalog/status/{topic}/{broker}"

    def __init__(self, purpose: str, template: str) -> None:
        """Name the two texts of a member."""
        self.purpose = purpose
        self.template = template


LEADER_NAME: Final = NodeKind.LEADER.template.rpartition("/")[2]

# Refused by ZooKeeper inside a path (PathUtils.validatePath): NUL and the other control
# characters, surrogates, the private use area and the specials at the end of the basic
# plane. A topic may legally contain some of these, so this is checked as data.
_REFUSED_CHARACTERS: Final = re.compile(
    "[\u0000-\u001f\u007f-\u009f\ud800-\uf8ff\ufff0-\uffff]"
)


NAMES_KEPT: Final = 4096
"""Size of each cache of checked names and paths: commits repeat the same ones."""


@lru_cache(NAMES_KEPT)
def is_legal_step(text: str) -> bool:
    """Return whether ZooKeeper accepts `text` as one step of a path."""
    return (
        bool(text)
        and text not in {".", ".."}
        and "/" not in text
        and not _REFUSED_CHARACTERS.search(text)
    )


def normalize_root(text: str) -> str:
    """Return a root with a leading '/' and no trailing one; "" for ZooKeeper's root.

    Raises:
        ConfigError: ZooKeeper refuses a step of the path.
    """
    root = "/" + text.strip().strip("/")
    if root == "/":
        return ""
    for step in root[1:].split("/"):
        if not is_legal_step(step):
            raise ConfigError(
                f"zk.zkRoot={text!r}: expected a path such as {DEFAULT_ROOT},"
                f" got the step {step!r}"
            )
    return root


@dataclass(frozen=True, slots=True, order=True)
class BrokerRole:
    """The copy of a broker's partitions that a process serves."""

    broker_id: BrokerId
    follower_id: int | None = None
    """None for the leader, which takes puts; K for the follower `slaveK`."""

    @property
    def is_leader(self) -> bool:
        """Whether this copy takes puts."""
        return self.follower_id is None

    def __str__(self) -> str:
        """Return the name of this role's topic nodes: `0-m` or `0-s1`."""
        copy = "m" if self.follower_id is None else f"s{self.follower_id}"
        return f"{self.broker_id}-{copy}"


def parse_role(text: str) -> BrokerRole | None:
    """Return the role that `0-m` or `0-s1` names, or None for anything else."""
    match = re.fullmatch(rf"({NUMBER})-(?:m|s({NUMBER}))", text, re.ASCII)
    if match is None:
        return None
    follower = match[2]
    return BrokerRole(BrokerId(int(match[1])), int(follower) if follower else None)


def parse_broker_id(text: str) -> BrokerId | None:
    """Return the id that a broker's node is named by, or None for anything else."""
    is_number = re.fullmatch(NUMBER, text, re.ASCII) is not None
    return BrokerId(int(text)) if is_number and str(int(text)) == text else None


def parse_follower(text: str) -> int | None:
    """Return K of the child name `slaveK`, or None for anything else."""
    match = re.fullmatch(rf"slave({NUMBER})", text, re.ASCII)
    return int(match[1]) if match else None


def parse_partition(text: str) -> tuple[BrokerId, int] | None:
    """Return (broker id, partition number) of `0-1`, or None for anything else."""
    match = _PARTITION.fullmatch(text)
    return (BrokerId(int(match[1])), int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Builds paths below one root.

    Builders raise NodeNameError if ZooKeeper refuses a name; numbers are never refused.
    """

    root: str = DEFAULT_ROOT
    """Normalised by `normalize_root`."""

    def _fill(self, kind: NodeKind, /, **fields: object) -> str:
        """Return a node's path, or that of the parent above the first missing field."""
        texts = {name: str(value) for name, value in fields.items()}
        for name, text in texts.items():
            if not is_legal_step(text):
                raise NodeNameError(
                    f"{kind.purpose} node: {name} {text!r} cannot be part of a path"
                )
        given = kind.template.split("/{")[: len(fields) + 1]
        return self.root + "/{".join(given).format_map(texts)

    # -- brokers ----------------------------------------------------------------------

    def broker_ids(self) -> str:
        """Return the parent of all broker nodes."""
        return self._fill(NodeKind.BROKER)

    def broker(self, broker_id: BrokerId) -> str:
        """Return the persistent node of a broker, parent of its copies' nodes."""
        return self._fill(NodeKind.BROKER, broker=broker_id)

    def role(self, role: BrokerRole) -> str:
        """Return the ephemeral node with the address of a broker's copy."""
        if role.follower_id is None:
            return self._fill(NodeKind.LEADER, broker=role.broker_id)
        return self._fill(
            NodeKind.FOLLOWER, broker=role.broker_id, follower=role.follower_id
        )

    def config_checksum(self, broker_id: BrokerId) -> str:
        """Return the node with the CRC-32 of the leader's configuration file."""
        return self._fill(NodeKind.CONFIG_CHECKSUM, broker=broker_id)

    # -- topics -----------------------------------------------------------------------

    def topics(self, kind: NodeKind) -> str:
        """Return the parent of all topics of one of the three topic kinds."""
        return self._fill(kind)

    def topic(self, kind: NodeKind, topic: str, role: BrokerRole) -> str:
        """Return the node with a topic's partition count on one broker copy.

        Args:
            kind: TOPIC, TOPIC_PUB or TOPIC_SUB.
            topic: topic name.
            role: the copy of the broker.
        """
        return self._fill(kind, topic=topic, role=role)

    def topic_children(self, kind: NodeKind, topic: str) -> str:
        """Return the parent of the `0-m`, `0-s1` ... nodes of one topic."""
        return self._fill(kind, topic=topic)

    # -- consumer groups --------------------------------------------------------------

    def groups(self) -> str:
        """Return the parent of all consumer groups."""
        return self._fill(NodeKind.MEMBER)

    def group(self, group: str) -> str:
        """Return the node of a group, parent of all its nodes."""
        return self.members(group).removesuffix("/ids")

    def members(self, group: str) -> str:
        """Return the parent of a group's member nodes."""
        return self._fill(NodeKind.MEMBER, group=group)

    @lru_cache(NAMES_KEPT)  # noqa: B019  # bounded; roots are few
    def member(self, group: str, member: str) -> str:
        """Return a member's node; `member` is `<group>_<consumerId>`."""
        return self._fill(NodeKind.MEMBER, group=group, member=member)

    def owner(self, group: str, partition: TopicPartition) -> str:
        """Return the node that names the owner of a partition in a group."""
        return self._partition(NodeKind.OWNER, group, partition)

    def group_offset(self, group: str, partition: TopicPartition) -> str:
        """Return the node with a group's next offset for a partition."""
        return self._partition(NodeKind.GROUP_OFFSET, group, partition)

    def group_topics(self, kind: NodeKind, group: str) -> str:
        """Return the parent of a group's topics.

        For `kind` OWNER, GROUP_OFFSET or GROUP_DECISION; also in `group_partitions`.
        """
        return self._fill(kind, group=group)

    def group_partitions(self, kind: NodeKind, group: str, topic: str) -> str:
        """Return the parent of a topic's `0-1` nodes; see `group_topics`."""
        return self._fill(kind, group=group, topic=topic)

    @lru_cache(NAMES_KEPT)  # noqa: B019  # bounded; roots are few
    def _partition(self, kind: NodeKind, group: str, partition: TopicPartition) -> str:
        topic, name = partition.topic, partition.name
        return self._fill(kind, group=group, topic=topic, partition=name)

    # -- queries ----------------------------------------------------------------------

    def query_start(self, query: str) -> str:
        """Return the node with the start offsets of a query."""
        return self._fill(NodeKind.QUERY_START, query=query)

    def query_routes(self, query: str) -> str:
        """Return the node with the target partitions of a query's batches."""
        return self._fill(NodeKind.QUERY_ROUTES, query=query)

    def query_decision(self, query: str) -> str:
        """Return the node with the last batch of a query that must become readable."""
        return self._fill(NodeKind.QUERY_DECISION, query=query)

    # -- exactly once, from topic to topic --------------------------------------------

    def group_decisions(self, group: str) -> str:
        """Return the parent of all nodes of a group's exactly-once batches."""
        return self.group_tokens(group).removesuffix("/tokens")

    def group_decision(self, group: str, partition: TopicPartition) -> str:
        """Return the node with the last decision that moved a partition's offset."""
        return self._partition(NodeKind.GROUP_DECISION, group, partition)

    def group_tokens(self, group: str) -> str:
        """Return the parent of a group's tokens."""
        return self._fill(NodeKind.GROUP_TOKEN, group=group)

    def group_token(self, group: str, token: str) -> str:
        """Return the node that must exist for a member's batches to be decided."""
        return self._fill(NodeKind.GROUP_TOKEN, group=group, token=token)

    def group_filter(self, group: str) -> str:
        """Return the node with the filter of a log group."""
        return self._fill(NodeKind.GROUP_FILTER, group=group)

    # -- replica sets -----------------------------------------------------------------

    def replica_sets(self) -> str:
        """Return the parent of the records of all replica sets."""
        return self._fill(NodeKind.REPLICA_SET)

    def replica_set(self, broker_id: BrokerId) -> str:
        """Return the node with the record of a broker's replica set."""
        return self._fill(NodeKind.REPLICA_SET, broker=broker_id)

    def set_leader(self, broker_id: BrokerId) -> str:
        """Return the ephemeral node that names the leading replica."""
        return self._fill(NodeKind.SET_LEADER, broker=broker_id)

    def set_members(self, broker_id: BrokerId) -> str:
        """Return the parent of the replicas' registrations of their data."""
        return self._fill(NodeKind.SET_MEMBER, broker=broker_id)

    def set_presences(self, broker_id: BrokerId) -> str:
        """Return the parent of the nodes of the replicas that are present."""
        return self._fill(NodeKind.SET_PRESENT, broker=broker_id)

    # -- the catalog ------------------------------------------------------------------

    def recorded_brokers(self) -> str:
        """Return the parent of the records of all brokers."""
        return self._fill(NodeKind.RECORDED_BROKER)

    def recorded_broker(self, broker_id: BrokerId) -> str:
        """Return the node with a broker's last address."""
        return self._fill(NodeKind.RECORDED_BROKER, broker=broker_id)

    def recorded_topics(self) -> str:
        """Return the parent of all recorded topics."""
        return self._fill(NodeKind.RECORDED_PARTITIONS)

    def recorded_topic(self, topic: str) -> str:
        """Return the parent of a topic's partition counts, one child per broker."""
        return self._fill(NodeKind.RECORDED_PARTITIONS, topic=topic)

    def recorded_partitions(self, topic: str, broker_id: BrokerId) -> str:
        """Return the node with the partition count of a topic on a broker."""
        return self._fill(NodeKind.RECORDED_PARTITIONS, topic=topic, broker=broker_id)

    def topic_definitions(self) -> str:
        """Return the parent of the definitions of all topics."""
        return self._fill(NodeKind.TOPIC_DEFINITION)

    def topic_definition(self, topic: str) -> str:
        """Return the node with the definition of a topic."""
        return self._fill(NodeKind.TOPIC_DEFINITION, topic=topic)

    def queue_groups(self) -> str:
        """Return the parent of the definitions of queue groups."""
        return self._fill(NodeKind.QUEUE_GROUP)

    def queue_group(self, group: str) -> str:
        """Return the node with the definition of a queue group."""
        return self._fill(NodeKind.QUEUE_GROUP, group=group)

    def exchanges(self) -> str:
        """Return the parent of the definitions of exchanges."""
        return self._fill(NodeKind.EXCHANGE)

    def exchange(self, exchange: str) -> str:
        """Return the node with the definition of an exchange."""
        return self._fill(NodeKind.EXCHANGE, exchange=exchange)

    def bindings(self, exchange: str) -> str:
        """Return the parent of the bindings of an exchange."""
        return self._fill(NodeKind.BINDING, exchange=exchange)

    def binding(self, exchange: str, binding: str) -> str:
        """Return the node of a binding."""
        return self._fill(NodeKind.BINDING, exchange=exchange, binding=binding)

    def recorded_directories(self, broker_id: BrokerId) -> str:
        """Return the node with the identities of a broker's data directories."""
        return self._fill(NodeKind.RECORDED_DIRECTORIES, broker=broker_id)

    def topics_with_status(self) -> str:
        """Return the parent of the topics with statuses."""
        return self._fill(NodeKind.TOPIC_STATUS)

    def topic_statuses(self, topic: str) -> str:
        """Return the parent of a definition's statuses, one child per broker."""
        return self._fill(NodeKind.TOPIC_STATUS, topic=topic)

    def topic_status(self, topic: str, broker_id: BrokerId) -> str:
        """Return the node with a broker's status of the definition of a topic."""
        return self._fill(NodeKind.TOPIC_STATUS, topic=topic, broker=broker_id)


@lru_cache(NAMES_KEPT)
def require_legal_path(path: str) -> None:
    """Raise if ZooKeeper would refuse a path.

    Raises:
        NodeNameError: it is not an absolute path of legal steps.
    """
    if not path.startswith("/") or not all(map(is_legal_step, path[1:].split("/"))):
        raise NodeNameError(f"{path!r} is not a path that zookeeper accepts")
