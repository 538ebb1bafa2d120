"""The nodes of a set in ZooKeeper: reads, and writes of a replica or a command.

    /replicas/N             the record (`record.py`)
    /replicas/N/leader      ephemeral: {"replica":2,"epoch":[7,"9f"],"address":..}
    /replicas/N/members/K   {"set_id":..,"directories":{identity:version},
                            "incarnation":5}
    /replicas/N/present/K   ephemeral: state, flag and copy of the record of replica K

Reads take the presences first and the record after them: a presence with a newer copy
than the record then proves that ZooKeeper was set back. A change of the record is one
request, with three possible outcomes:

    APPLIED   it was executed
    REFUSED   it was not, and will not be: the nodes have changed since they were read
    UNKNOWN   the reply was lost; it may have been executed, or may still be

After the last two, the nodes are read again after a sync; no change is simply repeated.

Invariants:

* only `create_record` creates a record: an empty replica that starts first creates no
  node of a set, and a frozen one only the parents of its `present/K`;
* versions are compared only in the session that read them, in which they are unique;
* a node of another process is never deleted. Exceptions are the nodes of the own
  replica from an earlier session: a `leader` node, while the record's version excludes
  claims in between, and a `present/K` of the same address and machine.
"""

import asyncio
import enum
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from metaq.clock import Clock
from metaq.errors import (
    CoordinationError,
    SessionLostError,
    SessionSuspendedError,
    StorageError,
)
from metaq.fs import FileSystem
from metaq.model import BrokerId, SizeBytes
from metaq.replication.election import Presence, PresenceState
from metaq.replication.epochs import Epoch
from metaq.replication.json_values import to_json
from metaq.replication.record import (
    REPLICA_MAX,
    Change,
    LeaderNode,
    ReplicaSetError,
    SetRecord,
    decode,
    decode_record,
    encode_record,
)
from metaq.replication.replica import LeaderSeen, View
from metaq.retry import Backoff, retry
from metaq.zk.errors import CoordinationTimeoutError, NodeChangedError, NoNodeError
from metaq.zk.paths import NodePaths, parse_broker_id
from metaq.zk.session import (
    Cancel,
    CheckNode,
    Coordinator,
    CreateEphemeral,
    DeleteNode,
    Operation,
    WriteNode,
)
from metaq.zk.znodes import Node

_log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 5.0
"""Longest wait for a reply of ZooKeeper, in seconds."""
FIRST_BACKOFF: Final = Backoff(first_s=0.05, max_s=0.5)
"""Pauses between attempts of the first read."""
TRIES: Final = 3
"""Attempts to replace a node. A node to be deleted may disappear with its session
between the read and the request; that is not a coincidence so many times."""

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""File with a random id of the current boot, on Linux."""
REPLICAS: Final = range(1, REPLICA_MAX + 1)
UNANSWERED: Final = (SessionSuspendedError, SessionLostError, CoordinationTimeoutError)
"""Errors after which a request may have been executed, or may still be."""

T = TypeVar("T")


# -- payloads -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """Payload of `members/K`: the registered data of a replica."""

    set_id: str
    directories: Mapping[str, int]
    """Identity of each data directory → its holdings version."""
    incarnation: int
    """Holdings version with which this process of the replica started."""

    @property
    def version(self) -> int:
        """The holdings version; a directory may have got it late."""
        return max(self.directories.values(), default=0)


@dataclass(frozen=True, slots=True)
class Shown:
    """Payload of `present/K`, which exists while the session of the replica does."""

    presence: Presence
    address: str
    """`meta://host:port` of its broker."""
    token: str
    """Text of this process, which it also sends when it joins; from `token_of`."""


@dataclass(frozen=True, slots=True)
class LeaderData:
    """Payload of the `leader` node."""

    replica: int
    epoch: Epoch
    address: str
    """`meta://host:port` of its broker."""


def decode_member(data: bytes) -> Member:
    """Decode `members/K`.

    Raises:
        ReplicaSetError: the payload is invalid; also in the functions below.
    """
    return decode(Member, data, "member")


def decode_present(replica: int, data: bytes) -> Shown:
    """Decode `present/K`.

    Args:
        replica: K.
        data: the payload.
    """
    shown = decode(Shown, data, "presence")
    if (found := shown.presence.replica) != replica:
        raise ReplicaSetError(f"presence: expected replica {replica}, got {found}")
    return shown


def decode_leader(data: bytes) -> LeaderData:
    """Decode the `leader` node."""
    return decode(LeaderData, data, "leader")


def token_of(fs: FileSystem, digits: str) -> str:
    """Return the token of a new process: the machine, a dash, and random digits.

    The machine is its host name, which may not be unique, and Linux's boot id.
    """
    boot = b""
    with suppress(StorageError):  # another system
        boot = fs.read_file(BOOT_ID, SizeBytes(64)).strip()
    return f"{socket.gethostname()}-{boot.decode('ascii')}-{digits}"


def require_former_process(there: Shown, *, address: str, token: str) -> None:
    """Refuse to replace a replica that may be running, unless it is on this machine.

    On this machine it cannot run: its port would be in use, and its data locked.

    Args:
        there: the present payload of `present/K`.
        address: address of the process that will be shown.
        token: its token.

    Raises:
        ReplicaSetError: the other has another address, or is on another machine.
    """
    machine, other = (each.rpartition("-")[0] for each in (token, there.token))
    if (there.address, other) != (address, machine):
        where = (
            " and at" if there.address != address else " and, on another machine, at"
        )
        raise ReplicaSetError(
            f"replica {there.presence.replica} runs twice, at {there.address}{where}"
            f" {address}; give each its own replicaId"
        )


def _read(path: str, decode: Callable[[bytes], T], data: bytes) -> T:
    """Decode a payload; an error names its node."""
    try:
        return decode(data)
    except ReplicaSetError as error:
        raise ReplicaSetError(f"{path}: {error}") from error


# -- reading and writing --------------------------------------------------------------


class Outcome(enum.Enum):
    """Outcome of a change; see the top of this file."""

    APPLIED = "applied"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SetView:
    """All nodes of a set, as read together."""

    view: View
    shown: Mapping[int, Shown]
    """Replicas that are present."""
    members: Mapping[int, Member]
    """Replicas that have registered their data."""
    leader_address: str
    """`meta://host:port` of the leader; "" if there is none."""


class SetNodes:
    """The nodes of one set, for one of its replicas or for an operator's command.

    Used on the coordinator's event loop, one call at a time, except `read`. Calls raise
    the `CoordinationError`s of `Coordinator`.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        paths: NodePaths,
        broker_id: BrokerId,
        replica: int,
        *,
        clock: Clock,
    ) -> None:
        """Create access to the nodes; sends nothing.

        Args:
            coordinator: started and stopped by its creator.
            paths: paths of the tree.
            broker_id: broker id of the set.
            replica: our number, from 1 to 9; `NO_REPLICA` for a command.
            clock: the coordinator's.
        """
        self.coordinator: Final = coordinator
        """Session with ZooKeeper."""
        self.paths: Final = paths
        """Paths of its nodes."""
        self.broker_id: Final = broker_id
        """Broker id of the set."""
        self._replica = replica
        self.clock: Final = clock
        """The coordinator's clock."""
        self._record = paths.replica_set(broker_id)
        self._leader = paths.set_leader(broker_id)
        self._members = paths.set_members(broker_id)
        self._presences = paths.set_presences(broker_id)
        self._session_version = 0
        self._known: Mapping[int, Member] = {}

    def _deadline_s(self) -> float:
        return self.clock.monotonic_s() + REQUEST_TIMEOUT_S

    async def _get(self, path: str) -> Node | None:
        return await self.coordinator.get(path, deadline_s=self._deadline_s())

    async def _make(self, parent: str) -> None:
        deadline_s = self._deadline_s()
        await self.coordinator.set_or_create(parent, b"", deadline_s=deadline_s)

    async def _transact(self, steps: Sequence[Operation]) -> None:
        await self.coordinator.transact(steps, deadline_s=self._deadline_s())

    def _is_mine(self, node: Node) -> bool:
        return node.owner_session_id == self.coordinator.status.session_id

    # -- reading ----------------------------------------------------------------------

    async def read(self, *, synced: bool) -> SetView:
        """Read all nodes of the set; without a record, the view has none.

        Args:
            synced: read after a sync, so that the result is not out of date.

        Raises:
            ReplicaSetError: a payload is invalid; the text has its path.
            SessionLostError: there is no session, or another one began during the read.
        """
        session_version = self.coordinator.status.session_version
        if synced:
            await self.coordinator.sync(self._record, deadline_s=self._deadline_s())
        shown = await self._each(self._presences, decode_present)
        node = await self._get(self._record)
        led = await self._get(self._leader)
        members = await self._each(self._members, lambda _, data: decode_member(data))
        if self.coordinator.status.session_version != session_version:
            raise SessionLostError(f"read {self._record}: the session ended in between")
        record = leader = seen = None
        # A node without payload is the parent of frozen replicas that show themselves.
        if node is not None and node.data:
            record = _read(self._record, decode_record, node.data)
        if led is not None:
            leader = _read(self._leader, decode_leader, led.data)
            seen = LeaderSeen(leader.replica, leader.epoch, self._is_mine(led))
        self._session_version, self._known = session_version, members
        version = 0 if node is None else node.version
        presences = tuple(each.presence for each in shown.values())
        view = View(record, version, seen, presences, is_synced=synced)
        return SetView(view, shown, members, leader.address if leader else "")

    async def read_first(self, timeout_s: float) -> SetView:
        """Read all nodes for the first time; the session may not have started yet.

        Raises:
            ReplicaSetError: as `read`.
            CoordinationError: ZooKeeper did not reply within `timeout_s`.
        """
        until_s = self.clock.monotonic_s() + timeout_s
        return await retry(
            partial(self.read, synced=True),
            backoff=FIRST_BACKOFF,
            deadline_s=until_s,
            clock=self.clock,
        )

    async def _each(
        self, parent: str, decode: Callable[[int, bytes], T]
    ) -> dict[int, T]:
        """Return the decoded node of each replica below a parent."""
        deadline_s = self._deadline_s()
        names = await self.coordinator.children(parent, deadline_s=deadline_s)
        there = [replica for replica in REPLICAS if str(replica) in names]
        paths = [f"{parent}/{replica}" for replica in there]
        nodes = await asyncio.gather(*map(self._get, paths))
        return {
            replica: _read(path, partial(decode, replica), node.data)
            for replica, path, node in zip(there, paths, nodes, strict=True)
            if node is not None
        }

    async def list_sets(self, *, deadline_s: float) -> frozenset[int]:
        """Return the broker ids of all replica sets."""
        parent = self.paths.replica_sets()
        names = await self.coordinator.children(parent, deadline_s=deadline_s)
        return frozenset(int(one) for one in names if parse_broker_id(one) is not None)

    async def _member(self, replica: int) -> tuple[str, Member | None, int | None]:
        """Read `members/K`; return its path, payload and version."""
        path = f"{self._members}/{replica}"
        node = await self._get(path)
        if node is None:
            return path, None, None
        return path, _read(path, decode_member, node.data), node.version

    def watch(self, on_change: Callable[[], None]) -> Cancel:
        """Call `on_change` now and when a node or the session changes; `read` then.

        Watches the record, the leader and the presences of all replicas.

        Returns:
            A function that ends the watches.
        """
        paths = [self._record, self._leader]
        paths += [f"{self._presences}/{replica}" for replica in REPLICAS]
        watch_data = self.coordinator.watch_data
        cancels = [self.coordinator.add_listener(lambda _: on_change())]
        cancels += [watch_data(path, lambda _: on_change()) for path in paths]

        def cancel() -> None:
            for each in cancels:
                each()

        return cancel

    # -- changes of the record --------------------------------------------------------

    async def propose(
        self,
        change: Change,
        *,
        member: Member | None = None,
        leader: LeaderData | None = None,
        shown: Shown | None = None,
    ) -> Outcome:
        """Send a change, which takes effect as a whole or not at all.

        It is refused without being sent if the session is not that of the last `read`,
        because versions of nodes may repeat in a ZooKeeper that was set back.

        A `leader` node of an earlier session of this replica does not prevent a change
        that creates one; the change deletes it. The own `members/K` is written over the
        version that `read` found.

        Args:
            change: planned from the last `read`.
            member: payload of the own `members/K`; None if the change has none.
            leader: payload of the `leader` node; None if the change has none.
            shown: for a start: payload of `present/K`, written in the same request, so
                that of two processes with one number only one registers.

        Raises:
            ReplicaSetError: as `show`.
            CoordinationError: ZooKeeper refused for another reason (rights, quota).
        """
        return await self._carry_out(self._steps(change, member, leader, shown))

    async def _steps(
        self,
        change: Change,
        member: Member | None,
        leader: LeaderData | None,
        shown: Shown | None,
    ) -> Sequence[Operation]:
        """Return the request of a change."""
        steps: list[Operation] = [
            CheckNode(self._record, change.version)
            if change.is_check
            else WriteNode(self._record, encode_record(change.record), change.version)
        ]
        steps += await self._leader_steps(change.leader_node, leader)
        if change.member is not None:
            assert member is not None, f"{change.purpose} without its member"
            path, found, version = await self._member(change.member[0])
            if found != self._known.get(change.member[0]):
                raise NodeChangedError(f"{path}: another one has registered")
            steps.append(WriteNode(path, to_json(member), version))
        if change.member_check is not None:
            path, found, version = await self._member(change.member_check[0])
            if found is None or found.incarnation != change.member_check[1]:
                raise NodeChangedError(
                    f"{path}: not incarnation {change.member_check[1]}"
                )
            steps.append(CheckNode(path, version))
        if shown is not None:
            steps += await self._show_steps(shown)
        if (now := self.coordinator.status.session_version) != self._session_version:
            raise NodeChangedError(
                f"read in session {self._session_version}, now {now}"
            )
        return steps

    async def _leader_steps(
        self, part: LeaderNode, leader: LeaderData | None
    ) -> Sequence[Operation]:
        """Return the operations of a change on the `leader` node."""
        path = self._leader
        if part is LeaderNode.LEFT:
            return ()
        node = await self._get(path)
        if part is LeaderNode.CHECKED:
            if node is None or not self._is_mine(node):
                raise NodeChangedError(f"{path}: not of this session")
            return (CheckNode(path, node.version),)
        is_made = part is LeaderNode.CREATED
        created = [CreateEphemeral(path, to_json(leader))] if is_made else []
        is_old = node is not None and not self._is_mine(node) and self._is_ours(node)
        if node is not None and (is_old or not created):
            return DeleteNode(path, node.version), *created
        return created

    def _is_ours(self, leader: Node) -> bool:
        """Return whether this replica created a `leader` node, in any session."""
        return _read(self._leader, decode_leader, leader.data).replica == self._replica

    async def _carry_out(self, steps: Awaitable[Sequence[Operation]]) -> Outcome:
        """Build a request, and send it."""
        is_sent = False
        try:
            request = await steps
            is_sent = True
            await self._transact(request)
        except (NodeChangedError, NoNodeError) as error:
            _log.info("change of a set refused: path=%s error=%s", self._record, error)
            return Outcome.REFUSED
        except UNANSWERED as error:
            _log.warning("no answer to a change: path=%s error=%s", self._record, error)
            return Outcome.UNKNOWN if is_sent else Outcome.REFUSED
        return Outcome.APPLIED

    async def create_record(
        self, record: SetRecord, members: Mapping[int, Member]
    ) -> Outcome:
        """Create the nodes of a set, for `init`, or for `restore` if all are gone.

        Args:
            record: its record; refused if there is one.
            members: replicas whose data is known; others join with none.
        """
        for parent in (self._members, self._presences):
            await self._make(parent)
        return await self._carry_out(self._creation(record, members))

    async def _creation(
        self, record: SetRecord, members: Mapping[int, Member]
    ) -> Sequence[Operation]:
        node = await self._get(self._record)
        if node is None or node.data:
            raise NodeChangedError(f"{self._record}: there is a record")
        return [
            WriteNode(self._record, encode_record(record), node.version),
            *[
                WriteNode(f"{self._members}/{replica}", to_json(member), None)
                for replica, member in members.items()
            ],
        ]

    # -- nodes of this replica --------------------------------------------------------

    async def write_member(self, member: Member) -> Outcome:
        """Write the own `members/K`, with newer versions of the directories.

        Refused if it does not exist, or another process of this replica has registered.
        """
        return await self._carry_out(self._member_steps(member))

    async def _member_steps(self, member: Member) -> Sequence[Operation]:
        path, found, version = await self._member(self._replica)
        if found is None or replace(found, directories=member.directories) != member:
            raise NodeChangedError(f"{path}: another one has registered")
        return (WriteNode(path, to_json(member), version),)

    async def show(self, shown: Shown) -> None:
        """Create the own `present/K`, or write it if it differs.

        Replaces a node that an earlier session of this replica left; call it again in
        each new session. Parents are created only for a frozen replica, which an
        operator must find even if ZooKeeper has lost the set.

        Raises:
            ReplicaSetError: another broker shows this replica, or there is no set.
        """
        if shown.presence.state is PresenceState.FROZEN:
            await self._make(self._presences)
        try:
            await self._insist(partial(self._show_steps, shown))
        except NoNodeError as error:
            raise ReplicaSetError(
                f"{self._presences}: no such node; replica {self._replica} cannot"
                " register without a set: create one with `metaq replicas init`"
            ) from error

    async def _show_steps(self, shown: Shown) -> Sequence[Operation]:
        path, data = f"{self._presences}/{self._replica}", to_json(shown)
        node = await self._get(path)
        if node is None:
            return (CreateEphemeral(path, data),)
        if self._is_mine(node):
            is_same = node.data == data
            return () if is_same else (WriteNode(path, data, node.version),)
        there = _read(path, partial(decode_present, self._replica), node.data)
        require_former_process(there, address=shown.address, token=shown.token)
        return DeleteNode(path, node.version), CreateEphemeral(path, data)

    async def withdraw(self) -> None:
        """Delete the `leader` node if this replica created it, in any session."""
        await self._insist(self._withdrawal)

    async def _withdrawal(self) -> Sequence[Operation]:
        record = await self._get(self._record)
        node = await self._get(self._leader)
        if record is None or node is None or not self._is_ours(node):
            return ()
        # A claim of another replica in between changes the record.
        check = CheckNode(self._record, record.version)
        return check, DeleteNode(self._leader, node.version)

    async def _insist(
        self, steps: Callable[[], Awaitable[Sequence[Operation]]]
    ) -> None:
        """Build and send a request; repeat if others were faster."""
        for _ in range(TRIES):
            with suppress(NodeChangedError):
                await self._transact(await steps())
                return
        raise CoordinationError(f"{self._record}: changed by others, {TRIES} times")
