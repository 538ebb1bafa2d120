"""Wanted nodes of a broker in ZooKeeper, and the steps to get there. Pure.

Theory of operation: a `BrokerSnapshot` has the identity of a broker and its topics.
`desired_groups` turns it into nodes, in groups: first the broker's own nodes, then one
group per topic, in MetaQ's order of registration. For each group the shell
(`registry.py`) reads the present nodes, calls `plan_group`, and executes the returned
steps in order. Steps are planned only for differences, so the plan for a correct tree
is empty, and repeating everything after any failure is always safe.

How a node is maintained (`Upkeep`) depends on how others watch it. Readers of a topic
watch the children of its parent, so a node with a changed count is deleted and created
again; followers watch the data of the checksum, so it is changed in place. The
catalog's records of a broker stay when the broker withdraws: they are written before
the nodes that they outlive, and deleted with a topic that the broker no longer has.

An ephemeral node of another session is never kept: it belongs to a dead process and
will disappear, or another broker has taken our id. Below `ids/N` the address decides:
our own address is from an earlier run and is replaced; another address raises
BrokerIdTakenError, because two brokers with one id would mix two logs. The leader of a
replica set owns the id by its epoch, which is in a node of its session: another address
is that of a former leader, and is replaced as well. Once that node is ours, so is every
other node of role N, with any content.

Keep in step: `paths.py`, `registry.py`.

Source: docs/metaq-1.4/broker.md 3.2 to 3.5 and rows 11 and 12 of its section 12.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from metaq.model import BrokerAddress
from metaq.zk.errors import BrokerIdTakenError, NodeNameError, PayloadError
from metaq.zk.paths import BrokerRole, NodeKind, NodePaths
from metaq.zk.znodes import (
    Node,
    TopicRegistration,
    decode_address,
    encode_address,
    encode_checksum,
    encode_partition_count,
    encode_registration,
)


@dataclass(frozen=True, slots=True)
class AdvertisedTopic:
    """A topic as clients should see it."""

    name: str
    partition_count: int
    accepts_puts: bool = True
    accepts_gets: bool = True
    has_log: bool = True
    """False for an exchange, which cannot be read and is not recorded."""


@dataclass(frozen=True, slots=True)
class BrokerSnapshot:
    """Everything that a broker advertises at one moment."""

    role: BrokerRole
    address: BrokerAddress
    config_checksum: int
    """Unsigned CRC-32 of the configuration file's bytes."""
    topics: tuple[AdvertisedTopic, ...] = ()
    """Topics in the order of registration; each name once."""
    directories: bytes = b""
    """Payload of the record of its data directories; b"": no record."""
    has_record: bool = True
    """Whether it is recorded in the catalog. False in tests that play MetaQ 1.4, which
    has no catalog. Only leaders write records."""
    title: str = ""
    """Path of the node by which the leader of a replica set owns the id, while its
    session owns that node; another address is then a former leader's, and is
    replaced."""

    @property
    def is_recorded(self) -> bool:
        """Whether this copy of the broker writes its record."""
        return self.has_record and self.role.is_leader


class Upkeep(enum.Enum):
    """Method by which a node is created and updated."""

    CLAIM = "ephemeral; says who we are, and refuses another address"
    SUCCESSION = "ephemeral; says who we are, in the place of a former leader"
    WRITTEN = "persistent; written in place"
    VALUE = "ephemeral; written in place, its data is watched"
    LISTED = "ephemeral; deleted and created again, its parent is watched"
    RECORDED = "persistent; written in place, and left there by a withdrawal"
    ABSENT = "must not exist"


_PERSISTENT: Final = frozenset({Upkeep.WRITTEN, Upkeep.RECORDED})


@dataclass(frozen=True, slots=True)
class DesiredNode:
    """The wanted state of one node."""

    path: str
    data: bytes
    """Exact payload; b"" if the node must not exist."""
    upkeep: Upkeep


@dataclass(frozen=True, slots=True)
class DesiredGroup:
    """Nodes that change together."""

    topic: str | None
    """The topic they belong to; None for the broker's own nodes."""
    nodes: tuple[DesiredNode, ...]


class Verb(enum.Enum):
    """Change that a step makes to a node."""

    CREATE_EPHEMERAL = "create ephemeral"
    SET_OR_CREATE = "set or create"
    DELETE = "delete"
    DELETE_OR_EMPTY = "delete, or write empty text while it has children"
    DELETE_CHILDLESS = "delete, unless it has children"


@dataclass(frozen=True, slots=True)
class Step:
    """One change; steps are executed in the order of the plan."""

    verb: Verb
    path: str
    data: bytes = b""


# -- wanted nodes ---------------------------------------------------------------------


def broker_group(snapshot: BrokerSnapshot, paths: NodePaths) -> DesiredGroup:
    """Return the broker's own nodes: role; a leader's address, checksum, records."""
    role, address = snapshot.role, encode_address(snapshot.address)
    upkeep = Upkeep.SUCCESSION if snapshot.title else Upkeep.CLAIM
    nodes = [DesiredNode(paths.role(role), address, upkeep)]
    if role.is_leader:
        checksum = encode_checksum(snapshot.config_checksum)
        nodes += [
            DesiredNode(paths.broker(role.broker_id), address, Upkeep.WRITTEN),
            DesiredNode(paths.config_checksum(role.broker_id), checksum, Upkeep.VALUE),
        ]
    if snapshot.is_recorded:
        record = paths.recorded_broker(role.broker_id)
        nodes.append(DesiredNode(record, address, Upkeep.RECORDED))
        if snapshot.directories:
            record = paths.recorded_directories(role.broker_id)
            nodes.append(DesiredNode(record, snapshot.directories, Upkeep.RECORDED))
    return DesiredGroup(topic=None, nodes=tuple(nodes))


def topic_group(
    topic: AdvertisedTopic, role: BrokerRole, paths: NodePaths, *, is_recorded: bool
) -> DesiredGroup:
    """Return the record of a topic, if it is recorded, and the topic's three nodes.

    The oldest of the three ignores the accept flags. An exchange has only the second
    one. A topic that accepts neither puts nor gets is not served, and is not recorded.

    Raises:
        NodeNameError: ZooKeeper does not accept the topic's name.
    """
    json = encode_registration(TopicRegistration(topic.partition_count, role))
    count = encode_partition_count(topic.partition_count)

    def node(
        path: str, data: bytes, is_wanted: bool, upkeep: Upkeep = Upkeep.LISTED
    ) -> DesiredNode:
        if is_wanted:
            return DesiredNode(path, data, upkeep)
        return DesiredNode(path, b"", Upkeep.ABSENT)

    nodes = [
        node(paths.topic(NodeKind.TOPIC, topic.name, role), count, topic.has_log),
        node(
            paths.topic(NodeKind.TOPIC_PUB, topic.name, role), json, topic.accepts_puts
        ),
        node(
            paths.topic(NodeKind.TOPIC_SUB, topic.name, role), json, topic.accepts_gets
        ),
    ]
    if is_recorded:
        record = paths.recorded_partitions(topic.name, role.broker_id)
        is_served = topic.has_log and (topic.accepts_puts or topic.accepts_gets)
        nodes.insert(0, node(record, count, is_served, Upkeep.RECORDED))
    return DesiredGroup(topic=topic.name, nodes=tuple(nodes))


def desired_groups(
    snapshot: BrokerSnapshot, paths: NodePaths
) -> tuple[tuple[DesiredGroup, ...], tuple[str, ...]]:
    """Return all groups in order, and the topics whose names ZooKeeper refuses."""
    groups, refused = [broker_group(snapshot, paths)], []
    for topic in snapshot.topics:
        try:
            groups.append(
                topic_group(
                    topic, snapshot.role, paths, is_recorded=snapshot.is_recorded
                )
            )
        except NodeNameError:
            refused.append(topic.name)
    return tuple(groups), tuple(refused)


# -- how to get there -----------------------------------------------------------------


def _require_no_stranger(wanted: DesiredNode, found: Node) -> None:
    try:
        address = str(decode_address(found.data))
    except PayloadError:
        address = repr(found.data[:80])
    ours = wanted.data.decode()
    if address != ours:
        raise BrokerIdTakenError(
            f"broker id taken: {wanted.path} says {address}, this broker is {ours};"
            " give each broker its own brokerId"
        )


def _is_as_wanted(wanted: DesiredNode, found: Node | None, session_id: int) -> bool:
    if wanted.upkeep is Upkeep.ABSENT:
        return found is None
    if found is None or found.data != wanted.data:
        return False
    if wanted.upkeep in _PERSISTENT:
        return True
    return found.owner_session_id == session_id


def plan_group(
    group: DesiredGroup, found: Mapping[str, Node | None], session_id: int
) -> tuple[Step, ...]:
    """Return the steps that make a group match: deletions, records, other nodes.

    In this order, because a broker that appears before its record would be taken for
    one of MetaQ 1.4.

    Args:
        group: the wanted nodes.
        found: for each path of the group, the present node or None.
        session_id: our session, owner of our ephemeral nodes.

    Returns:
        Steps in order; none if everything matches.

    Raises:
        BrokerIdTakenError: another broker is registered under our id.
    """
    deletes, records, writes = list[Step](), list[Step](), list[Step]()
    for wanted in group.nodes:
        node = found[wanted.path]
        if _is_as_wanted(wanted, node, session_id):
            continue
        is_ours = node is not None and node.owner_session_id == session_id
        if wanted.upkeep is Upkeep.CLAIM and node is not None and not is_ours:
            _require_no_stranger(wanted, node)
        is_written_in_place = wanted.upkeep in _PERSISTENT or (
            wanted.upkeep is Upkeep.VALUE and is_ours
        )
        if is_written_in_place:
            steps = records if wanted.upkeep is Upkeep.RECORDED else writes
            steps.append(Step(Verb.SET_OR_CREATE, wanted.path, wanted.data))
            continue
        if node is not None:
            deletes.append(Step(Verb.DELETE, wanted.path))
        if wanted.upkeep is not Upkeep.ABSENT:
            writes.append(Step(Verb.CREATE_EPHEMERAL, wanted.path, wanted.data))
    return (*deletes, *records, *writes)


def find_stranger(
    group: DesiredGroup, found: Mapping[str, Node | None]
) -> bytes | None:
    """Return the address of a broker that has the id of a set, and is none of its.

    That of a leader before this one is in the record. Arguments as for `plan_group`.
    """
    records = [found[n.path] for n in group.nodes if n.upkeep is Upkeep.RECORDED]
    known = {n.data for n in (*group.nodes, *records) if n is not None}
    claims = (found[n.path] for n in group.nodes if n.upkeep is Upkeep.SUCCESSION)
    return next((n.data for n in claims if n is not None and n.data not in known), None)


def plan_removal(group: DesiredGroup, *, is_sure: bool = True) -> tuple[Step, ...]:
    """Return the steps that remove a topic's nodes, its record first.

    Args:
        group: group of the topic.
        is_sure: whether its nodes match; if not, even ABSENT ones may exist.
    """
    steps: list[Step] = []
    for node in group.nodes:
        if node.upkeep is Upkeep.RECORDED:
            steps += plan_record_removal(node.path)
        elif not is_sure or node.upkeep is not Upkeep.ABSENT:
            steps.append(Step(Verb.DELETE, node.path))
    return tuple(steps)


def plan_record_removal(path: str) -> tuple[Step, ...]:
    """Return the steps that remove one record of a topic.

    The last step deletes the topic's node if it is empty, so that the catalog names no
    topic without a broker.
    """
    parent = path.rpartition("/")[0]
    return Step(Verb.DELETE, path), Step(Verb.DELETE_CHILDLESS, parent)


def plan_withdrawal(groups: tuple[DesiredGroup, ...]) -> tuple[Step, ...]:
    """Return the steps of a graceful stop, in MetaQ's order.

    The role's node goes first, so that no new client comes; then the checksum; then the
    broker's persistent node, which stays with empty text while it has followers; then
    the topics. The records in the catalog stay.
    """
    steps: list[Step] = []
    for group in groups:
        ours = [node for node in group.nodes if node.upkeep is not Upkeep.RECORDED]
        if group.topic is not None:
            steps += plan_removal(replace(group, nodes=tuple(ours)))
            continue
        # The sort is stable: nodes that are written in place go last.
        for node in sorted(ours, key=lambda node: node.upkeep is Upkeep.WRITTEN):
            is_kept = node.upkeep is Upkeep.WRITTEN
            verb = Verb.DELETE_OR_EMPTY if is_kept else Verb.DELETE
            steps.append(Step(verb, node.path))
    return tuple(steps)
