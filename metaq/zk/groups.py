"""One member of a consumer group: its registration and its claims.

Theory of operation: a member is an ephemeral node, and so is each partition it owns.
Both end with the session, so a member that hangs or is cut off loses its partitions
automatically. Both carry the member's name, which shows MetaQ's consumers the owner.

A name is not enough, because nodes of several sessions of one member may exist: a
session that has ended for us may live on in ZooKeeper for up to its time-out, and a
node of it that looks like ours then disappears. So a node counts as ours if it carries
our name *and* belongs to the current session. A node of an earlier session is not
deleted; we wait until it disappears. A request to delete it could instead delete the
claim that another member has just made, and no ZooKeeper request distinguishes the two
(docs/decisions/0042).

    node holds    of session            register        claim           release
    our payload   the current one       is registered   True            deleted
    our payload   any other             taken: error    False           left alone
    anything else any                   taken: error    False           left alone
    overwritten   the current one       created again   created again   deleted

A node of the current session that was written after its creation counts as overwritten,
because no member writes in place; it is ours if we were registered or had the claim.

    Invariant: `_claims` maps each claimed partition to the version of its session; a
    claim counts only while that session is the current one.

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

# Two members that create and delete the same node may alternate.
TAKE_TRIES: Final = 3
GROUP_REFUSED: Final = frozenset("~!#$%^&*()+=`'\",;/?[]<>.: ")
"""Characters that MetaQ allows in no group name."""

GROUP_BYTES_MAX: Final = 1024
"""Maximum length of the name of a group to join: it is a word of command lines, of at
most 8 KiB with all other words."""

Members = Mapping[str, tuple[str, ...]]
"""Member → the topics it subscribes to; names ascending."""
MembersCallback = Callable[[Members], None]


def member_name(group: str, consumer_id: str) -> str:
    """Return the name of a member: `<group>_<consumer id>`."""
    return f"{group}_{consumer_id}"


def check_group_name(group: str) -> str:
    """Return the name of a group to join, after a check.

    Raises:
        ConfigError: MetaQ or ZooKeeper does not accept it.
    """
    refused = sorted(GROUP_REFUSED.intersection(group))
    if refused:
        raise ConfigError(
            f"group {group!r}: expected a name without {' '.join(map(repr, refused))}"
        )
    size_bytes = len(check_group_node(group).encode())
    if size_bytes > GROUP_BYTES_MAX:
        raise ConfigError(
            f"group {group[:20]!r}...: expected at most {GROUP_BYTES_MAX} bytes, got"
            f" {size_bytes}"
        )
    return group


def check_group_node(group: str) -> str:
    """Return the name of a group whose nodes are read or written; dots are allowed.

    Raises:
        ConfigError: ZooKeeper does not accept it, or it has blanks.
    """
    if not group.strip() or not is_legal_step(group) or len(group.split()) > 1:
        raise ConfigError(f"group: expected a name without blanks, got {group!r}")
    return group


async def list_groups(
    coordinator: Coordinator, paths: NodePaths, *, deadline_s: float
) -> tuple[str, ...]:
    """Return the names of all groups that ever existed, ascending."""
    return await coordinator.children(paths.groups(), deadline_s=deadline_s)


async def read_members(
    coordinator: Coordinator, paths: NodePaths, group: str, *, deadline_s: float
) -> Members:
    """Return the members of a group now, with their topics."""
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
    """Return the owner of each owned partition of a topic now, in numeric order."""
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
    session; then `claim` and `release` as the group's plan requires; `unregister` at
    the end. The caller owns the coordinator.

    Every request raises the errors of `Coordinator`; after an error with an unknown
    outcome, repeating the same call is right.

    Concurrency: one event loop. Claims and releases of different partitions may run
    concurrently, those of one partition may not.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        paths: NodePaths,
        *,
        group: str,
        consumer_id: str,
    ) -> None:
        """Create a membership; nothing is written until `register`.

        Membership and ownership are bound to the coordinator's session. The consumer id
        must be unique among all consumers of the group, on all machines.
        """
        self._coordinator = coordinator
        self._paths = paths
        self.group = group
        self.member = member_name(group, consumer_id)
        """Our name in the group; also the payload of the owner nodes."""
        self._registered_session_version = 0
        self._payloads: set[bytes] = set()
        self._claims: dict[TopicPartition, int] = {}
        self._unanswered: set[TopicPartition] = set()

    @property
    def claims(self) -> frozenset[TopicPartition]:
        """Partitions owned under the current session; empty once it is lost."""
        status = self._coordinator.status
        if status.state is SessionState.LOST:
            return frozenset()
        return self.claims_of_session_version(status.session_version)

    @property
    def unanswered_claims(self) -> frozenset[TopicPartition]:
        """Partitions whose last claim failed: their nodes may exist, and be ours.

        The caller must claim them again or release them; otherwise no member can own
        them while our session lives.
        """
        return frozenset(self._unanswered)

    def claims_of_session_version(
        self, session_version: int
    ) -> frozenset[TopicPartition]:
        """Return the partitions claimed under a session and not released."""
        return frozenset(
            p for p, bound in self._claims.items() if bound == session_version
        )

    # -- the group --------------------------------------------------------------------

    async def register(self, topics: Iterable[str], *, deadline_s: float) -> int:
        """Register as a member, or change the topics of the registration.

        Returns:
            The version of the session that the membership is bound to.

        Raises:
            MemberTakenError: our name is registered by another session. If that is an
                earlier one of ours, or a killed process's, it expires: retry for longer
                than the session time-out.
        """
        data = encode_member_topics(sorted(set(topics)))
        path = self._paths.member(self.group, self.member)
        # Before the request, because its outcome may remain unknown.
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
        """Delete our member node, but no other's. Does not release claims."""
        path = self._paths.member(self.group, self.member)
        await self._delete_ours(
            path,
            self._payloads,
            deadline_s,
            has_session=self._registered_session_version,
        )
        self._registered_session_version = 0

    async def is_registered(self, *, deadline_s: float) -> bool:
        """Read and return whether our member node exists, of the current session."""
        path = self._paths.member(self.group, self.member)
        return await self._is_ours(path, self._payloads, deadline_s)

    def watch_members(self, on_members: MembersCallback) -> Cancel:
        """Call `on_members` on the loop with the group's members, now and on change.

        One call for each burst of changes, with a whole snapshot, never equal to the
        last one. The last one stays valid while ZooKeeper is unreachable.

        Returns:
            A function that ends the watch; no callback is called after it.
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
            Whether it is ours now. False: another member owns it, or an ended session,
            even one of ours, has not expired in ZooKeeper yet; retry, with back-off,
            for longer than the session time-out.

        Raises:
            SessionLostError: we are not registered under the current session.
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
        """Release a partition; call it after its offset was committed.

        Also allowed after a claim that failed (`unanswered_claims`). If it does not
        raise, the partition is no longer ours.

        Returns:
            Whether a node of ours was deleted.
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
        """Read and return whether a partition is ours under the current session."""
        path = self._paths.owner(self.group, partition)
        return await self._is_ours(path, {encode_owner(self.member)}, deadline_s)

    def watch_owner(
        self, partition: TopicPartition, on_change: Callable[[], None]
    ) -> Cancel:
        """Call `on_change` on the loop when the owner node does not have our name."""
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
        """Make a node ours, with this payload and of the current session.

        Replaces our payloads `mine` of the current session. `has_session` is the
        version of the session under which we had the node; 0: none.

        Returns:
            The session of the node, and the foreign node, if there is one.
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
            # While our session lives, its nodes cannot become another member's.
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
        """Delete a node if it is ours and of the current session."""
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
        """Return whether a node is of the current session and has one of our payloads.

        With `has_session`, also if it had one before it was overwritten; see `_take`.
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
        """Raise if the results were read under another session than the current one."""
        present = self._coordinator.status
        if present.session_version != status.session_version:
            raise SessionLostError(
                f"{path}: expected session version {status.session_version}, got"
                f" {present.session_version}"
            )


def _is_overwritten(node: Node, status: SessionStatus, has_session: int) -> bool:
    """Return whether a node of the current session was ours and then overwritten."""
    return node.version > 0 and has_session == status.session_version
