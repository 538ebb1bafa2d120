"""Decisions of the members of a group that write exactly once, in ZooKeeper.

    /exactly-once/{group}/tokens/{token}                    ephemeral: may decide
    /exactly-once/{group}/decisions/{topic}/{partition}     the last decision

A *decision* moves the offsets of some partitions and names the transaction that holds
the results of their messages. It is one request, which is executed only if

* the member owns each partition, and its *token* exists, so its session is alive;
* no client has written the offset or the decision of any of them since they were read.

So each decision about a partition follows the one that its member has read, in one line
without forks, even if two members believe that they own it. And a transaction whose
token is gone, and which no decision names, will never be named, because a token is
created once and never again.

    {"xid": "XID:...", "brokers": [0, 1]}       in the node of each partition it moved

The transaction of a batch has the id

    qualifier  group-<name of the group>
    global id  token (16 bytes) | number of the batch (int64)
    branch     name of the member, cut to 64 bytes

Keep in step: `offsets.py`; `metaq/client/decisions`, which has the rules.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from struct import Struct
from typing import Final, NamedTuple

from metaq.errors import CoordinationError
from metaq.model import BrokerId, GroupOffset, TopicPartition, XaTransactionId
from metaq.zk.errors import NodeChangedError, PayloadError
from metaq.zk.paths import NodeKind, NodePaths, parse_partition
from metaq.zk.session import CheckNode, Coordinator, Operation, WriteNode
from metaq.zk.znodes import decode_group_offset, encode_group_offset

DECISION: Final = NodeKind.GROUP_DECISION
DECISION_BYTES_MAX: Final = 1_000_000
"""Largest request of a decision, in bytes; ZooKeeper accepts 1 MiB
(`jute.maxbuffer`)."""
OPERATION_BYTES: Final = 64
"""Upper bound of the size of an operation without its path and payload, in bytes."""


FORMAT_ID: Final = int.from_bytes(b"MQG1")
"""Format of the ids below: groups, first layout."""
TOKEN_BYTES: Final = 16
"""Length of a token, in bytes; in ZooKeeper it is hexadecimal."""
PREFIX: Final = "group-"
BRANCH_BYTES_MAX: Final = 64
"""Longest branch that XA allows, in bytes."""

_GLOBAL: Final = Struct(f">{TOKEN_BYTES}sq")


def qualifier_of(group: str) -> str:
    """Return the qualifier of a group's transactions."""
    return PREFIX + group


def batch_xid(group: str, member: str, token: str, number: int) -> XaTransactionId:
    """Return the id of a batch's transaction."""
    return XaTransactionId(
        FORMAT_ID,
        _GLOBAL.pack(bytes.fromhex(token), number),
        member.encode()[:BRANCH_BYTES_MAX],
        qualifier_of(group),
    )


class GroupBatch(NamedTuple):
    """Parts of the id of a batch's transaction."""

    group: str
    member: str
    """Name of the member, truncated to its first 64 bytes."""
    token: str
    number: int


def parse_batch_xid(xid: XaTransactionId) -> GroupBatch | None:
    """Return the parts of an id made by `batch_xid`; None for any other id."""
    is_ours = xid.format_id == FORMAT_ID and xid.qualifier.startswith(PREFIX)
    if not is_ours or len(xid.global_id) != _GLOBAL.size:
        return None
    token, number = _GLOBAL.unpack(xid.global_id)
    member = xid.branch.decode(errors="ignore")
    return GroupBatch(xid.qualifier.removeprefix(PREFIX), member, token.hex(), number)


class TooLargeError(CoordinationError):
    """A request larger than ZooKeeper accepts; nothing was sent."""

    retriable = False


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """A transaction that must become readable."""

    xid: str
    """Key of the transaction on the brokers."""
    brokers: tuple[BrokerId, ...]
    """Brokers that have prepared a branch of it, sorted; () if no message was sent."""

    def encode(self) -> bytes:
        """Return the bytes of the node."""
        fields = {"xid": self.xid, "brokers": list(self.brokers)}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> "GroupDecision":
        """Decode the bytes of `encode`.

        Raises:
            PayloadError: they are not a decision.
        """
        try:
            fields = json.loads(data)
            xid, brokers = fields["xid"], tuple(fields["brokers"])
        except (ValueError, KeyError, TypeError):
            xid, brokers = None, ()
        if not isinstance(xid, str) or {*map(type, brokers)} - {int}:
            raise PayloadError(
                f"expected the decision of an exactly-once batch, got {data[:200]!r}"
            )
        return cls(xid, tuple(map(BrokerId, brokers)))


@dataclass(frozen=True, slots=True)
class Place:
    """Offset and decision of a partition, as read; the base of its next decision."""

    offset: GroupOffset | None = None
    offset_version: int | None = None
    """Version of the offset's node; None: no offset was ever stored."""
    decision: GroupDecision | None = None
    decision_version: int | None = None
    """Version of the decision's node; None: there was never a decision."""


class GroupDecisions:
    """The decisions and tokens of one group. Holds no state of its own.

    Every request raises the errors of `Coordinator`. Concurrency: one event loop.
    """

    def __init__(
        self, coordinator: Coordinator, paths: NodePaths, *, group: str
    ) -> None:
        """Prepare access to the decisions of `group`."""
        self._coordinator = coordinator
        self._paths = paths
        self._group = group

    # -- reading ----------------------------------------------------------------------

    async def is_used(self, *, deadline_s: float) -> bool:
        """Return whether a member of the group ever had a token."""
        path = self._paths.group_decisions(self._group)
        return await self._coordinator.exists(path, deadline_s=deadline_s)

    async def read(self, partition: TopicPartition, *, deadline_s: float) -> Place:
        """Return the offset and the last decision of a partition.

        Raises:
            PayloadError: a node has another payload; the text names it.
        """
        place = await self._read_decision(partition, deadline_s)
        path = self._paths.group_offset(self._group, partition)
        node = await self._coordinator.get(path, deadline_s=deadline_s)
        if node is None:
            return place
        with _naming(path):
            offset = decode_group_offset(node.data)
        return replace(place, offset=offset, offset_version=node.version)

    async def read_all(self, *, deadline_s: float) -> dict[TopicPartition, Place]:
        """Return the last decision about each partition, without its offset.

        Raises:
            PayloadError: a node has another payload: which branches count is unknown.
        """
        found = {}
        for topic in await self._topics(deadline_s):
            path = self._paths.group_partitions(DECISION, self._group, topic)
            names = await self._coordinator.children(path, deadline_s=deadline_s)
            for parsed in filter(None, map(parse_partition, names)):
                partition = TopicPartition(topic, *parsed)
                place = await self._read_decision(partition, deadline_s)
                if place.decision is not None:
                    found[partition] = place
        return found

    async def _topics(self, deadline_s: float) -> tuple[str, ...]:
        path = self._paths.group_topics(DECISION, self._group)
        return await self._coordinator.children(path, deadline_s=deadline_s)

    async def _read_decision(
        self, partition: TopicPartition, deadline_s: float
    ) -> Place:
        path = self._paths.group_decision(self._group, partition)
        node = await self._coordinator.get(path, deadline_s=deadline_s)
        if node is None:
            return Place()
        with _naming(path):
            decision = GroupDecision.decode(node.data)
        return Place(decision=decision, decision_version=node.version)

    async def read_tokens(self, *, deadline_s: float) -> dict[str, str]:
        """Return the tokens that exist now, with the names of their members.

        A ZooKeeper server may reply to a read with an older state, from before an
        existing token was created. After a write, its replies are at least as new as
        that write; so this method writes first.
        """
        path = self._paths.group_tokens(self._group)
        await self._coordinator.set_or_create(path, b"", deadline_s=deadline_s)
        tokens = {}
        for token in await self._coordinator.children(path, deadline_s=deadline_s):
            node = await self._coordinator.get(f"{path}/{token}", deadline_s=deadline_s)
            if node is not None:
                tokens[token] = node.data.decode(errors="replace")
        return tokens

    # -- deciding ---------------------------------------------------------------------

    async def make_token(self, token: str, member: str, *, deadline_s: float) -> None:
        """Create a token, which must be new; after an error it may not be used."""
        path = self._token_path(token)
        await self._coordinator.create_ephemeral(
            path, member.encode(), deadline_s=deadline_s
        )

    async def drop_token(self, token: str, *, deadline_s: float) -> None:
        """Delete a token: no decision can be made with it any more."""
        path = self._token_path(token)
        await self._coordinator.delete(path, deadline_s=deadline_s)

    async def plan(
        self,
        decision: GroupDecision,
        token: str,
        moves: Mapping[TopicPartition, tuple[Place, GroupOffset]],
        *,
        deadline_s: float,
    ) -> list[Operation]:
        """Return the request that moves offsets and names their transaction.

        Creates the missing parents of its nodes.

        Args:
            decision: the transaction.
            token: token of the session under which the partitions were claimed.
            moves: the read offset and decision of each partition, and its new offset.
            deadline_s: absolute.

        Raises:
            TooLargeError: the partitions are too many for one request.
        """
        data = decision.encode()
        checks: list[Operation] = [CheckNode(self._token_path(token), 0)]
        writes: list[Operation] = []
        for partition, (place, offset) in moves.items():
            await self._make_parents(partition, place, deadline_s)
            checks.append(CheckNode(self._paths.owner(self._group, partition), 0))
            path = self._paths.group_offset(self._group, partition)
            stored = encode_group_offset(offset)
            writes.append(WriteNode(path, stored, place.offset_version))
            path = self._paths.group_decision(self._group, partition)
            writes.append(WriteNode(path, data, place.decision_version))
        _check_size(checks + writes, len(moves))
        return checks + writes

    async def decide(
        self,
        decision: GroupDecision,
        moves: Mapping[TopicPartition, tuple[Place, GroupOffset]],
        operations: Sequence[Operation],
        *,
        deadline_s: float,
    ) -> dict[TopicPartition, Place]:
        """Execute the request that `plan` returned for these arguments, all or nothing.

        Durability: on return, a majority of ZooKeeper's servers has it on disk.

        Returns:
            The new offset and decision of each partition.

        Raises:
            NodeChangedError: a partition or the token is not ours any more, or another
                client has written; nothing was done. If an earlier request had an
                unknown outcome, the change may be its own.
        """
        versions = await self._coordinator.transact(operations, deadline_s=deadline_s)
        ends = versions[len(moves) + 1 :]
        return {
            partition: Place(offset, ends[2 * at], decision, ends[2 * at + 1])
            for at, (partition, (_place, offset)) in enumerate(moves.items())
        }

    async def forget(
        self, kept: Mapping[TopicPartition, Place], *, deadline_s: float
    ) -> None:
        """Delete all nodes of the group below `/exactly-once`.

        After an error some of them are deleted; `read_all` and this may be repeated.

        Args:
            kept: the result of `read_all`; all these transactions are complete.
            deadline_s: absolute.

        Raises:
            NodeNotEmptyError: a member has a token.
            NodeChangedError: a member has decided since `read_all`.
        """
        delete = partial(self._coordinator.delete, deadline_s=deadline_s)
        # First, because without a token there are no further decisions.
        await delete(self._paths.group_tokens(self._group))
        for partition, place in kept.items():
            path = self._paths.group_decision(self._group, partition)
            await delete(path, version=place.decision_version)
        for topic in await self._topics(deadline_s):
            await delete(self._paths.group_partitions(DECISION, self._group, topic))
        await delete(self._paths.group_topics(DECISION, self._group))
        await delete(self._paths.group_decisions(self._group))

    def _token_path(self, token: str) -> str:
        return self._paths.group_token(self._group, token)

    async def _make_parents(
        self, partition: TopicPartition, place: Place, deadline_s: float
    ) -> None:
        paths = []
        if place.offset_version is None:
            paths.append(self._paths.group_offset(self._group, partition))
        if place.decision_version is None:
            paths.append(self._paths.group_decision(self._group, partition))
        for path in paths:
            parent = path.rpartition("/")[0]
            with suppress(NodeChangedError):
                await self._coordinator.replace(
                    parent, b"", version=None, deadline_s=deadline_s
                )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Prefix the error of a payload with the path of its node."""
    try:
        yield
    except PayloadError as error:
        raise PayloadError(f"{path}: {error}") from error


def _check_size(operations: Sequence[Operation], count: int) -> None:
    size = sum(
        OPERATION_BYTES
        + len(one.path.encode())
        + (len(one.data) if isinstance(one, WriteNode) else 0)
        for one in operations
    )
    if size > DECISION_BYTES_MAX:
        raise TooLargeError(
            f"the decision of a batch of {count} partitions takes {size} bytes, and"
            f" ZooKeeper takes {DECISION_BYTES_MAX}: read batches of fewer messages"
            " (max_count), or have more members"
        )
