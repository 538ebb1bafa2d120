"""One member of a consumer group: its registration and its claims.

Theory of operation: a member is an ephemeral node, and so is every partition it owns.
Both live and die with the session, so a member that hangs or is cut off loses its
partitions by itself; and both carry the member's name, by which MetaQ's consumers know
whose they are.

A name is not enough, because nodes of several sessions of one member may exist: a
session that ended for us may live on in ZooKeeper for up to its time-out, and a node of
it that looks like ours disappears when that time is over. So a node counts as ours if
it carries our name *and* belongs to the present session. We wait until one of an
earlier session disappears: a request that deletes it may hit the claim that another
member has just made instead, and no request of ZooKeeper distinguishes the two
(docs/decisions/0042).

    node holds    of session            register        claim           release
    our payload   the present one       is registered   True            deleted
    our payload   any other             taken: error    False           left alone
    anything else any                   taken: error    False           left alone
    overwritten   the present one       made again      made again      deleted

A node of the present session that was written after it was made counts as overwritten,
for no member writes in place; it is ours if we were registered, or had the claim.

    Invariant: `_claims` maps each claimed partition to the version of the session it
    was claimed under; a claim counts only while that is the present session.

Keep in step: `offsets.py` (which commits for owners only), this package's README.

Source: docs/metaq-1.4/client.md 4, 14.1, 14.4 and 14.6.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Final

from metaq.errors import ConfigError, SessionLostError
from metaq.model import TopicPartition
from metaq.zk.children import Settler, ValuesWatch, read_values
from metaq.zk.errors import MemberTakenError, NodeChangedError, NodeExistsError
from metaq.zk.paths import NodeKind, NodePaths, is_legal_step, parse_partition
from metaq.zk.session import Cancel, Coordinator, SessionState, SessionStatus
from metaq.zk.znodes import (
    Node,
    decode_member_topics,
    decode_owner,
    encode_member_topics,
    encode_owner,
)

_log = logging.getLogger(__name__)

# Two members that create and delete the same node alternate this often at most.
TAKE_TRIES: Final = 3
GROUP_REFUSED: Final = frozenset("~!#$%^&*()+=`'\",;/?[]<>.: ")
"""Characters that MetaQ allows in no group name."""

Members = Mapping[str, tuple[str, ...]]
"""Member → the topics it subscribes to; names ascending."""
MembersCallback = Callable[[Members], None]


def member_name(group: str, consumer_id: str) -> str:
    """Return the name of a member: `<group>_<consumer id>`."""
    return f"{group}_{consumer_id}"


def check_group_name(group: str) -> str:
    """Return the name of a group to join.

    Raises:
        ConfigError: MetaQ or ZooKeeper would not take it.
    """
    refused = sorted(GROUP_REFUSED.intersection(group))
    if refused:
        raise ConfigError(
            f"group {group!r}: a name without {' '.join(map(repr, refused))} is"
            " expected"
        )
    return check_group_node(group)


def check_group_node(group: str) -> str:
    """Return the name of a group whose nodes are read or written; pipelines use dots.

    Raises:
        ConfigError: ZooKeeper would not take it, or it has blanks.
    """
    if not group.strip() or not is_legal_step(group) or len(group.split()) > 1:
        raise ConfigError(f"group: expected a name without blanks, got {group!r}")
    return group


async def list_groups(
    coordinator: Coordinator, paths: NodePaths, *, deadline_s: float
) -> tuple[str, ...]:
    """Return the names of all groups there have ever been, ascending."""
    return await coordinator.children(paths.groups(), deadline_s=deadline_s)


async def read_members(
    coordinator: Coordinator, paths: NodePaths, group: str, *, deadline_s: float
) -> Members:
    """Return who is in a group now, and with which topics."""
    path = paths.members(group)
    return MappingProxyType(
        await read_values(
            coordinator, path, decode_member_topics, deadline_s=deadline_s
        )
    )


async def read_owners(
    coordinator: Coordinator,
    paths: NodePaths,
    group: str,
    topic: str,
    *,
    deadline_s: float,
) -> Mapping[TopicPartition, str]:
    """Return which member owns which partition of a topic now; numeric order."""
    path = paths.group_partitions(NodeKind.OWNER, group, topic)
    found = await read_values(coordinator, path, decode_owner, deadline_s=deadline_s)
    owners = {
        TopicPartition(topic, *parsed): owner
        for name, owner in found.items()
        if (parsed := parse_partition(name)) is not None
    }
    return MappingProxyType(dict(sorted(owners.items())))


class GroupMembership:
    """Membership of one consumer in one group.

    Lifecycle: `register` when the session is connected, and again after every new
    session; then `claim` and `release` as the plan of the group says; `unregister` at
    the end. The caller owns the coordinator.

    Every request raises what `Coordinator` raises; after an error whose outcome is
    unknown the same call is right again.

    Concurrency: one event loop. Claims and releases of different partitions may run at
    once, those of one partition may not.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        paths: NodePaths,
        *,
        group: str,
        consumer_id: str,
    ) -> None:
        """Prepare a membership; nothing is written before `register`.

        Membership and ownership are bound to the coordinator's session. The consumer id
        is unique among all consumers of the group, on all machines.
        """
        self._coordinator = coordinator
        self._paths = paths
        self.group = group
        self.member = member_name(group, consumer_id)
        """Our name in the group, also the payload of the owner nodes."""
        self._registered_session_version = 0
        self._payloads: set[bytes] = set()
        self._claims: dict[TopicPartition, int] = {}
        self._unanswered: set[TopicPartition] = set()

    @property
    def claims(self) -> frozenset[TopicPartition]:
        """Partitions owned under the present session; empty once it is lost."""
        status = self._coordinator.status
        if status.state is SessionState.LOST:
            return frozenset()
        return self.claims_of_session_version(status.session_version)

    @property
    def unanswered_claims(self) -> frozenset[TopicPartition]:
        """Partitions whose last claim failed: their nodes may be there, and be ours.

        The caller has to claim them again or release them; otherwise no member can own
        them for as long as our session lives.
        """
        return frozenset(self._unanswered)

    def claims_of_session_version(
        self, session_version: int
    ) -> frozenset[TopicPartition]:
        """Return the partitions claimed under a session and not released since."""
        return frozenset(
            p for p, bound in self._claims.items() if bound == session_version
        )

    # -- the group --------------------------------------------------------------------

    async def register(self, topics: Iterable[str], *, deadline_s: float) -> int:
        """Become a member, or become one with other topics.

        Returns:
            The version of the session that the membership is bound to.

        Raises:
            MemberTakenError: our name is registered by another session. That may be an
                earlier one of ours, or a killed process's, and its node goes with it:
                try again for longer than the session time-out.
        """
        data = encode_member_topics(sorted(set(topics)))
        path = self._paths.member(self.group, self.member)
        # Before the request: its outcome may never be known.
        self._payloads.add(data)
        mine = frozenset(self._payloads)
        status, other = await self._take(
            path, data, mine, deadline_s, has_session=self._registered_session_version
        )
        if other is not None:
            raise MemberTakenError(
                f"member {self.member} of group {self.group}: expected to register"
                f" with topics {data.decode()!r}, found topics"
                f" {other.data.decode(errors='replace')!r} of session"
                f" {other.owner_session_id:#x}; consumer ids are unique in a group,"
                " and a broken session keeps its name for up to its time-out"
            )
        self._registered_session_version = status.session_version
        _log.info(
            "member registered: member=%s session_version=%d",
            self.member,
            status.session_version,
        )
        return status.session_version

    async def unregister(self, *, deadline_s: float) -> None:
        """Leave the group; a node that is not ours stays. Claims are not released."""
        path = self._paths.member(self.group, self.member)
        await self._delete_ours(
            path,
            self._payloads,
            deadline_s,
            has_session=self._registered_session_version,
        )
        self._registered_session_version = 0

    async def is_registered(self, *, deadline_s: float) -> bool:
        """Return whether our node is there, of the present session, asked now."""
        path = self._paths.member(self.group, self.member)
        return await self._is_ours(path, self._payloads, deadline_s)

    def watch_members(self, on_members: MembersCallback) -> Cancel:
        """Call `on_members` on the loop with the group's members, now and on change.

        One call for each burst of changes, whole snapshots, no two equal ones in a
        row. The last one holds while ZooKeeper is out of reach.

        Returns:
            A function that ends it; nothing is delivered after it was called.
        """
        last: Members | None = None

        def publish() -> None:
            nonlocal last
            members = watch.values
            if members != last:
                last = members
                on_members(MappingProxyType(members))

        settler = Settler(self._coordinator, lambda: watch.is_complete, publish)
        watch = ValuesWatch(
            self._coordinator,
            self._paths.members(self.group),
            decode_member_topics,
            settler.note,
        )

        def cancel() -> None:
            watch.cancel()
            settler.cancel()

        return cancel

    # -- ownership --------------------------------------------------------------------

    async def claim(self, partition: TopicPartition, *, deadline_s: float) -> bool:
        """Try to become the owner of a partition.

        Returns:
            Whether it is ours now. False: another member owns it, or a session that is
            over for its member, ours too, did not end in ZooKeeper yet; try again, with
            back-off, for longer than the session time-out.

        Raises:
            SessionLostError: we are not registered under the present session.
        """
        session_version = self._coordinator.status.session_version
        if session_version != self._registered_session_version:
            raise SessionLostError(
                f"member {self.member}: expected a registration under session version"
                f" {session_version}, got {self._registered_session_version}"
            )
        data = encode_owner(self.member)
        path = self._paths.owner(self.group, partition)
        self._unanswered.add(partition)
        status, other = await self._take(
            path,
            data,
            frozenset({data}),
            deadline_s,
            has_session=self._claims.get(partition, 0),
        )
        self._unanswered.discard(partition)
        if other is not None:
            _log.debug(
                "partition has another owner: partition=%s owner=%s session=%x",
                partition,
                other.data.decode(errors="replace"),
                other.owner_session_id,
            )
            self._claims.pop(partition, None)
            return False
        self._claims[partition] = status.session_version
        return True

    async def release(self, partition: TopicPartition, *, deadline_s: float) -> bool:
        """Release a partition; its offset has been committed.

        Right also after a claim that failed (`unanswered_claims`). If it raises
        nothing, the partition is no longer ours.

        Returns:
            Whether there was a node of ours to delete.
        """
        path = self._paths.owner(self.group, partition)
        is_deleted = await self._delete_ours(
            path,
            {encode_owner(self.member)},
            deadline_s,
            has_session=self._claims.get(partition, 0),
        )
        self._claims.pop(partition, None)
        self._unanswered.discard(partition)
        return is_deleted

    async def owns(self, partition: TopicPartition, *, deadline_s: float) -> bool:
        """Return whether a partition is ours under the present session, asked now."""
        path = self._paths.owner(self.group, partition)
        return await self._is_ours(path, {encode_owner(self.member)}, deadline_s)

    def watch_owner(
        self, partition: TopicPartition, on_change: Callable[[], None]
    ) -> Cancel:
        """Call `on_change` on the loop when an owner node does not have our name."""
        wanted = encode_owner(self.member)

        def on_data(data: bytes | None) -> None:
            if data != wanted:
                on_change()

        path = self._paths.owner(self.group, partition)
        return self._coordinator.watch_data(path, on_data)

    # -- nodes of ours ----------------------------------------------------------------

    async def _take(
        self,
        path: str,
        data: bytes,
        mine: frozenset[bytes],
        deadline_s: float,
        *,
        has_session: int,
    ) -> tuple[SessionStatus, Node | None]:
        """Make a node ours, of the present session and with this payload.

        It replaces our payloads `mine` in the present session. `has_session` is the
        version of the session under which we had the node; 0: none.

        Returns:
            The session that the node belongs to, and the foreign node, if there is one.
        """
        for _ in range(TAKE_TRIES):
            status = self._coordinator.status
            status.require_connected()
            try:
                await self._coordinator.create_ephemeral(
                    path, data, deadline_s=deadline_s
                )
            except NodeExistsError:
                node = await self._coordinator.get(path, deadline_s=deadline_s)
            else:
                node = Node(data, owner_session_id=status.session_id, version=0)
            self._require_same_session(status, path)
            if node is None:
                continue
            is_present = node.owner_session_id == status.session_id
            if is_present and node.data == data:
                return status, None
            is_overwritten = _is_overwritten(node, status, has_session)
            # While our session lives, no node of it can become another member's.
            if not is_present or not (node.data in mine or is_overwritten):
                return status, node
            if is_overwritten:
                _log.warning("node overwritten by others, made again: path=%s", path)
            await self._coordinator.delete(path, deadline_s=deadline_s)
        raise NodeChangedError(
            f"take {path}: created and deleted by others, {TAKE_TRIES} times"
        )

    async def _delete_ours(
        self,
        path: str,
        payloads: AbstractSet[bytes],
        deadline_s: float,
        *,
        has_session: int,
    ) -> bool:
        """Delete a node of ours, of the present session; leave any other."""
        if not await self._is_ours(path, payloads, deadline_s, has_session=has_session):
            return False
        return await self._coordinator.delete(path, deadline_s=deadline_s)

    async def _is_ours(
        self,
        path: str,
        payloads: AbstractSet[bytes],
        deadline_s: float,
        *,
        has_session: int = 0,
    ) -> bool:
        """Return whether a node holds one of our payloads, of the present session.

        With `has_session` also whether it did; see `_take`.
        """
        status = self._coordinator.status
        node = await self._coordinator.get(path, deadline_s=deadline_s)
        self._require_same_session(status, path)
        return (
            node is not None
            and node.owner_session_id == status.session_id
            and (node.data in payloads or _is_overwritten(node, status, has_session))
        )

    def _require_same_session(self, status: SessionStatus, path: str) -> None:
        """Refuse to go on with results read under another session."""
        present = self._coordinator.status
        if present.session_version != status.session_version:
            raise SessionLostError(
                f"{path}: expected session version {status.session_version}, got"
                f" {present.session_version}"
            )


def _is_overwritten(node: Node, status: SessionStatus, has_session: int) -> bool:
    """Return whether a node of the present session was ours before it was written."""
    return node.version > 0 and has_session == status.session_version
