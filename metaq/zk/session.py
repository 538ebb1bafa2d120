"""A ZooKeeper session as the rest of the package sees it.

Theory of operation: ZooKeeper reports three different states to a client that are
easily confused, and the right reactions are opposites.

    CONNECTED   the session is alive and this process talks to it
    SUSPENDED   no connection; the session, with all its ephemeral nodes and owners,
                may still be there. Assume nothing new, give nothing up.
    LOST        there is no session. Every ephemeral node of the last one is gone, or
                will go by itself. A session whose server did not answer for nearly its
                time-out counts as lost, so its end is known here before others see it.

`SessionTracker` turns reports of the client library into these states. Each *new*
session gets the next version; coming back to the same session keeps it. The creator of
ephemeral nodes remembers their version, and compares: it never repeats within a
process, session ids might.

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
    """Assumptions that hold about the session; see the top of this file."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


class SessionEvent(enum.Enum):
    """Event reported by the client library."""

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
    """Number of the current or last session; 0 before the first one."""
    session_id: int
    """ZooKeeper's number for that session, owner of our ephemeral nodes; 0 if none."""
    timeout_s: float = 0.0
    """Seconds that the session lives without a word from us; the server's choice, which
    may be less or more than was asked for. 0 before the first session."""

    def require_connected(self) -> None:
        """Raise when nothing can be asked of ZooKeeper now.

        Raises:
            SessionSuspendedError: no connection at the moment.
            SessionLostError: no session.
        """
        if self.state is SessionState.SUSPENDED:
            raise SessionSuspendedError(
                f"zookeeper session {self.session_id:#x} is suspended"
            )
        if self.state is SessionState.LOST:
            raise SessionLostError("there is no zookeeper session")


class SessionTracker:
    """The session's state machine; pure, owned by one coordinator."""

    def __init__(self) -> None:
        self.status = SessionStatus(SessionState.LOST, session_version=0, session_id=0)

    def apply(
        self, event: SessionEvent, session_id: int = 0, timeout_s: float = 0.0
    ) -> SessionStatus | None:
        """Apply a report of the client library; return the new snapshot if it differs.

        ESTABLISHED has the session that is connected now, and its time-out.
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
    """Operation of `Coordinator.transact`: a node exists, with this version."""

    path: str
    version: int | None
    """`Node.version`; None: any."""


@dataclass(frozen=True, slots=True)
class WriteNode:
    """Operation of `Coordinator.transact`: write a node, unless it was changed."""

    path: str
    data: bytes
    version: int | None
    """`Node.version` as it was read; None creates a persistent node, whose parent has
    to exist before."""


@dataclass(frozen=True, slots=True)
class CreateEphemeral:
    """Operation of `Coordinator.transact`: create a node of this session.

    Its parent has to exist before.
    """

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Operation of `Coordinator.transact`: delete a node that exists."""

    path: str
    version: int | None
    """`Node.version` as it was read; None: any."""


Operation = CheckNode | WriteNode | CreateEphemeral | DeleteNode

NO_VERSION: Final = -1
"""Version after a check of any version."""

StatusCallback = Callable[[SessionStatus], None]
ChildrenCallback = Callable[[tuple[str, ...] | None], None]
DataCallback = Callable[[bytes | None], None]
Cancel = Callable[[], None]


class Coordinator(Protocol):
    """Interface to ZooKeeper; all of it from one event loop.

    Lifecycle: `start` once, then use, then `stop` once; its creator owns it. `start`
    does not wait for a connection: status callbacks report it.

    Deadlines are absolute times of the clock the coordinator was made with. Unless a
    method says otherwise it raises:

        SessionSuspendedError, SessionLostError: not connected; nothing was done, or
            the connection broke before the answer and the outcome is unknown.
        CoordinationTimeoutError: the deadline passed; the outcome is unknown.
        NodeNameError: ZooKeeper does not accept the path.
        CoordinationError: ZooKeeper refused for another reason (rights, quota).

    Cancellation: a cancelled call may still be carried out by ZooKeeper.
    """

    @property
    def status(self) -> SessionStatus:
        """The present snapshot of the session."""

    def add_listener(self, callback: StatusCallback) -> Cancel:
        """Call `callback` on the loop with each new status, in order.

        Returns:
            A function that ends it; calling it twice is harmless.
        """

    def start(self) -> None:
        """Begin to connect, and go on trying until `stop`."""

    async def stop(self, *, deadline_s: float) -> None:
        """Close the session, which removes its ephemeral nodes; never raises.

        Returns at the deadline at the latest; a session that could not be closed in
        time ends by itself after its session time-out.
        """

    async def sync(self, path: str, *, deadline_s: float) -> None:
        """Wait until the server that answers us has all that was changed before.

        A server may lag after the others of its ensemble. What is read after this, in
        the same session, is not older than what was there when it was called.

        Args:
            path: any; there need not be a node.
            deadline_s: when to give up.
        """

    async def get(self, path: str, *, deadline_s: float) -> Node | None:
        """Return a node, or None when there is none."""

    async def exists(self, path: str, *, deadline_s: float) -> bool:
        """Return whether a node exists."""

    async def children(self, path: str, *, deadline_s: float) -> tuple[str, ...]:
        """Return the sorted names of a node's children; () also without the node."""

    async def create_ephemeral(
        self, path: str, data: bytes, *, deadline_s: float
    ) -> None:
        """Create a node that lives as long as this session; parents as needed.

        Raises:
            NodeExistsError: it exists already.
        """

    async def set_or_create(self, path: str, data: bytes, *, deadline_s: float) -> None:
        """Write a persistent node, creating it and its parents as needed.

        An existing node keeps its kind: an ephemeral one stays ephemeral.
        """

    async def replace(
        self, path: str, data: bytes, *, version: int | None, deadline_s: float
    ) -> None:
        """Write a persistent node, unless it was changed since it was read.

        Args:
            path: the node.
            data: its new payload.
            version: `Node.version` as it was read; None when there was no node, which
                creates it and its parents.
            deadline_s: when to give up.

        Raises:
            NodeChangedError: it has another version, is gone, or has come up.
        """

    async def delete(
        self, path: str, *, version: int | None = None, deadline_s: float
    ) -> bool:
        """Delete a node.

        Args:
            path: the node.
            version: `Node.version` as it was read; None: any.
            deadline_s: when to give up.

        Returns:
            False when there was none.

        Raises:
            NodeNotEmptyError: it has children.
            NodeChangedError: it has another version.
        """

    async def transact(
        self, operations: Sequence[Operation], *, deadline_s: float
    ) -> tuple[int, ...]:
        """Carry out all operations or none, in one request and one write to disk.

        Returns:
            The version of each node after it; `NO_VERSION` of a delete, and of a check
            of any version.

        Raises:
            NodeChangedError: an operation did not fit, the first one is named; nothing
                was done.
            NoNodeError: likewise, a node to create has no parent.
            NodeNotEmptyError: likewise, a node to delete has children.
        """

    def watch_children(self, path: str, callback: ChildrenCallback) -> Cancel:
        """Call `callback` on the loop with the node's children, now and on change.

        Delivers whole snapshots: sorted names, or None while the node does not exist.
        Changes in quick succession may come as one. Every reconnect and every new
        session reads again, so nothing is missed; equal snapshots are not repeated.

        Returns:
            A function that ends it; nothing is delivered after it was called.
        """

    def watch_data(self, path: str, callback: DataCallback) -> Cancel:
        """Call `callback` on the loop with the node's payload, now and on change.

        As `watch_children`, with the payload in place of the names.
        """
