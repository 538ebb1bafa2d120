"""A ZooKeeper session as the rest of the package sees it.

Theory of operation: ZooKeeper reports three states to a client that are easily
confused, although they require opposite reactions.

    CONNECTED   the session is alive and this process is connected to it
    SUSPENDED   no connection; the session, with all its ephemeral nodes and owners,
                may still exist. Assume nothing new, give nothing up.
    LOST        there is no session. Every ephemeral node of the last one is gone, or
                will disappear. A session whose server did not reply for nearly its
                time-out counts as lost, so its end is known here before others see it.

`SessionTracker` turns the events of a connection into these states. Each *new* session
gets the next version; reconnecting to the same session keeps it. The creator of
ephemeral nodes remembers their version and compares it: unlike a session id, a version
is never reused within a process.

         ESTABLISHED (version + 1)         DISCONNECTED
    LOST -----------------------> CONNECTED ------------> SUSPENDED
     ^                             |     ^   ESTABLISHED   |     |
     +------------ EXPIRED --------+     +-----------------+     |
     +------------------------------- EXPIRED -------------------+

    Invariant: the version grows exactly when an ESTABLISHED event names a session other
    than the last one, or follows LOST.

`Coordinator` is our whole interface to ZooKeeper. It is implemented by
`coordinator.ZooKeeperCoordinator` and, in memory, by `metaq.testing.zk`; one suite of
contract tests runs on both.

Keep in step: `coordinator.py`, `metaq/testing/zk.py`.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from metaq.errors import SessionLostError, SessionSuspendedError
from metaq.zk.znodes import Node


class SessionState(enum.Enum):
    """State of the session; see the top of this file for what may be assumed in it."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


class SessionEvent(enum.Enum):
    """Event of the connection or the session."""

    ESTABLISHED = "established"
    DISCONNECTED = "disconnected"
    EXPIRED = "expired"


_S = SessionState
_E = SessionEvent
TRANSITIONS: Final[dict[tuple[SessionState, SessionEvent], SessionState]] = {
    (_S.LOST, _E.ESTABLISHED): _S.CONNECTED,
    (_S.LOST, _E.DISCONNECTED): _S.LOST,
    (_S.LOST, _E.EXPIRED): _S.LOST,
    (_S.CONNECTED, _E.ESTABLISHED): _S.CONNECTED,
    (_S.CONNECTED, _E.DISCONNECTED): _S.SUSPENDED,
    (_S.CONNECTED, _E.EXPIRED): _S.LOST,
    (_S.SUSPENDED, _E.ESTABLISHED): _S.CONNECTED,
    (_S.SUSPENDED, _E.DISCONNECTED): _S.SUSPENDED,
    (_S.SUSPENDED, _E.EXPIRED): _S.LOST,
}


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """A snapshot of the session."""

    state: SessionState
    session_version: int
    """Version of the current or last session; 0 before the first one."""
    session_id: int
    """ZooKeeper's id of that session, owner of our ephemeral nodes; 0 if none."""
    timeout_s: float = 0.0
    """Time that the session lives without a request from us, in seconds; chosen by the
    server, less or more than requested. 0 before the first session."""

    def require_connected(self) -> None:
        """Raise if no request can be sent to ZooKeeper now.

        Raises:
            SessionSuspendedError: there is no connection now.
            SessionLostError: there is no session.
        """
        if self.state is SessionState.SUSPENDED:
            raise SessionSuspendedError(
                f"zookeeper session {self.session_id:#x} is suspended"
            )
        if self.state is SessionState.LOST:
            raise SessionLostError("there is no zookeeper session")


class SessionTracker:
    """The session's state machine. Pure; owned by one coordinator."""

    def __init__(self) -> None:
        self.status = SessionStatus(SessionState.LOST, session_version=0, session_id=0)

    def apply(
        self, event: SessionEvent, session_id: int = 0, timeout_s: float = 0.0
    ) -> SessionStatus | None:
        """Apply an event; return the new status if it differs.

        ESTABLISHED has the id and the time-out of the session that is now connected.
        """
        old = self.status
        state = TRANSITIONS[old.state, event]
        session_version, number = old.session_version, old.session_id
        if event is SessionEvent.ESTABLISHED:
            is_new = old.state is SessionState.LOST or session_id != number
            session_version, number = session_version + is_new, session_id
        else:
            timeout_s = old.timeout_s
        self.status = SessionStatus(state, session_version, number, timeout_s)
        return self.status if self.status != old else None


@dataclass(frozen=True, slots=True)
class CheckNode:
    """Operation of `Coordinator.transact`: require a node, with this version."""

    path: str
    version: int | None
    """`Node.version`; None: any."""


@dataclass(frozen=True, slots=True)
class WriteNode:
    """Operation of `Coordinator.transact`: write a node, unless it has changed."""

    path: str
    data: bytes
    version: int | None
    """`Node.version` as read; None creates a persistent node; its parent must exist."""


@dataclass(frozen=True, slots=True)
class CreateEphemeral:
    """Operation of `Coordinator.transact`: create a node of this session.

    Its parent must exist.
    """

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Operation of `Coordinator.transact`: delete a node that exists."""

    path: str
    version: int | None
    """`Node.version` as read; None: any."""


Operation = CheckNode | WriteNode | CreateEphemeral | DeleteNode

NO_VERSION: Final = -1
"""Version returned for a delete, and for a check of any version."""

StatusCallback = Callable[[SessionStatus], None]
ChildrenCallback = Callable[[tuple[str, ...] | None], None]
DataCallback = Callable[[bytes | None], None]
Cancel = Callable[[], None]


class Coordinator(Protocol):
    """Interface to ZooKeeper, used from one event loop.

    Lifecycle: `start` once, then use, then `stop` once; owned by its creator. `start`
    does not wait for a connection: status callbacks report it.

    Deadlines are absolute times of the clock passed to the coordinator. Unless
    documented otherwise, a method raises:

        SessionSuspendedError, SessionLostError: not connected; nothing was done, or the
        connection broke before the reply and the outcome is unknown.
        CoordinationTimeoutError: the deadline passed; the outcome is unknown.
        NodeNameError: ZooKeeper does not accept the path.
        CoordinationError: ZooKeeper refused for another reason (rights, quota).

    Cancellation: ZooKeeper may still execute a cancelled call.
    """

    @property
    def status(self) -> SessionStatus:
        """The current status of the session."""

    def add_listener(self, callback: StatusCallback) -> Cancel:
        """Call `callback` on the loop with each new status, in order.

        Returns:
            A function that removes the callback; a second call does nothing.
        """

    def start(self) -> None:
        """Start to connect, and retry until `stop`."""

    async def stop(self, *, deadline_s: float) -> None:
        """Close the session, which removes its ephemeral nodes; never raises.

        Returns at the deadline at the latest; a session that could not be closed in
        time expires after its session time-out.
        """

    async def sync(self, path: str, *, deadline_s: float) -> None:
        """Wait until our server has all changes made before this call.

        A server may be less current than the others of its ensemble. What this session
        reads after `sync` is at least as new as the state when it was called.

        Args:
            path: any path; the node need not exist.
            deadline_s: when to give up.
        """

    async def get(self, path: str, *, deadline_s: float) -> Node | None:
        """Return a node, or None if it does not exist."""

    async def exists(self, path: str, *, deadline_s: float) -> bool:
        """Return whether a node exists."""

    async def children(self, path: str, *, deadline_s: float) -> tuple[str, ...]:
        """Return the sorted names of a node's children; () if it does not exist."""

    async def create_ephemeral(
        self, path: str, data: bytes, *, deadline_s: float
    ) -> None:
        """Create a node that lives as long as this session, and missing parents.

        Raises:
            NodeExistsError: it exists already.
        """

    async def set_or_create(self, path: str, data: bytes, *, deadline_s: float) -> None:
        """Write a persistent node, creating it and missing parents.

        An existing node keeps its kind: an ephemeral one stays ephemeral.
        """

    async def replace(
        self, path: str, data: bytes, *, version: int | None, deadline_s: float
    ) -> None:
        """Write a persistent node, unless it has changed since it was read.

        Args:
            path: the node.
            data: its new payload.
            version: `Node.version` as read; None if there was no node: it and missing
                parents are created.
            deadline_s: when to give up.

        Raises:
            NodeChangedError: it has another version, was deleted, or was created.
        """

    async def delete(
        self, path: str, *, version: int | None = None, deadline_s: float
    ) -> bool:
        """Delete a node.

        Args:
            path: the node.
            version: `Node.version` as read; None: any.
            deadline_s: when to give up.

        Returns:
            False if there was none.

        Raises:
            NodeNotEmptyError: it has children.
            NodeChangedError: it has another version.
        """

    async def transact(
        self, operations: Sequence[Operation], *, deadline_s: float
    ) -> tuple[int, ...]:
        """Execute all operations or none, in one request and one write to disk.

        Returns:
            The new version of each node; `NO_VERSION` for a delete, and for a check of
            any version.

        Raises:
            NodeChangedError: nothing was done; the text names the failed operation.
            NoNodeError: as above: the parent of a node to create does not exist.
            NodeNotEmptyError: as above, because a node to delete has children.
        """

    def watch_children(self, path: str, callback: ChildrenCallback) -> Cancel:
        """Call `callback` on the loop with the node's children, now and on change.

        Delivers complete snapshots: sorted names, or None while the node does not
        exist. Changes in quick succession may be delivered as one. Every reconnect and
        every new session reads again, so no change is missed; equal snapshots are not
        repeated.

        Returns:
            A function that ends the watch; no callback is called after it.
        """

    def watch_data(self, path: str, callback: DataCallback) -> Cancel:
        """Call `callback` on the loop with the node's payload, now and on change.

        As `watch_children`, with the payload instead of the names.
        """
