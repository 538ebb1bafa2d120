"""An in-memory ZooKeeper: ephemerals, watches, suspension and expiry as calls.

`MemoryZooKeeper` is the server, `MemoryCoordinator` a client of it with the contract of
`metaq.zk.session.Coordinator`; one suite of contract tests runs on it and on the real
ZooKeeper. Requests are answered at once, except while `stall` is set: then they wait
for their deadline. Sessions do not time out: a session ends when a test calls `expire`.

Concurrency: the server may be used from any thread, and its clients may be on loops of
different threads. The server's state is guarded by its lock; a client's state is used
on its loop's thread only, where the server's reports arrive as callbacks.
`MemoryZooKeeper.coordinator` is a factory `(clock) -> Coordinator`, as clients of the
package take it.

    server = MemoryZooKeeper()
    coordinator = server.coordinator(clock)
    coordinator.start()
    server.suspend(coordinator)      # connection lost, session alive
    server.expire(coordinator)       # session gone; a new one begins by itself
    server.expire(server.owner_of("/meta/brokers/ids/0/master"))
    server.stop(); server.start()    # unreachable, and back; sessions survive
    server.stop(); server.start(is_wiped=True)
    backup = server.tree(); ...; server.restore(backup)
    server.lag(coordinator)          # it reads an old state until it syncs or writes
    server.lose_answer(coordinator, is_carried_out=True)   # of its next change
    server.refusal = "no rights"     # every request is refused, until ""
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from metaq.clock import Clock
from metaq.errors import CoordinationError, SessionLostError, SessionSuspendedError
from metaq.zk.errors import (
    CoordinationTimeoutError,
    NodeChangedError,
    NodeExistsError,
    NodeNotEmptyError,
    NoNodeError,
    cut_off,
    no_answer,
)
from metaq.zk.paths import require_legal_path
from metaq.zk.session import (
    NO_VERSION,
    Cancel,
    CheckNode,
    ChildrenCallback,
    CreateEphemeral,
    DataCallback,
    DeleteNode,
    Operation,
    SessionEvent,
    SessionState,
    SessionStatus,
    SessionTracker,
    StatusCallback,
    WriteNode,
)
from metaq.zk.znodes import Node

SESSION_TIMEOUT_S: Final = 20.0
"""Session timeout as reported to clients; only `expire` ends a session."""


class MemoryZooKeeper:
    """The server: one tree of nodes, any number of sessions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """All requests carried out, as (name, path), oldest first."""
        self.stall = False
        """Whether requests get no answer before their deadline."""
        self.refusal = ""
        """Reason for which all requests are refused; "": they are not."""
        self.nodes: dict[str, Node] = {}
        """All nodes by path. Tests change it by `put`, `write`, `remove` and `wipe`."""
        self.is_running = True
        self._coordinators: list[MemoryCoordinator] = []
        self._children: dict[str, list[str]] = {}
        self._session_count = 0
        self._sessions: set[int] = set()
        self._lock = threading.RLock()

    def coordinator(self, clock: Clock) -> "MemoryCoordinator":
        """Return a new client of this server, not started; from any thread."""
        coordinator = MemoryCoordinator(self, clock)
        with self._lock:
            self._coordinators.append(coordinator)
        return coordinator

    @property
    def coordinators(self) -> "tuple[MemoryCoordinator, ...]":
        """Clients that were created and not stopped, oldest first."""
        with self._lock:
            return tuple(self._coordinators)

    def owner_of(self, path: str) -> "MemoryCoordinator":
        """Return the client whose session owns an ephemeral node.

        Raises:
            LookupError: no such node, or no client has its session.
        """
        with self._lock:
            number = self.nodes[path].owner_session_id
            for coordinator in self._coordinators:
                if number != 0 and coordinator.status.session_id == number:
                    return coordinator
        raise LookupError(f"{path}: no coordinator has its session {number}")

    # -- what a test may do to it -----------------------------------------------------

    def suspend(self, coordinator: "MemoryCoordinator") -> None:
        """Disconnect a client; its session and nodes stay."""
        coordinator.report(SessionEvent.DISCONNECTED)

    def resume(self, coordinator: "MemoryCoordinator") -> None:
        """Reconnect a client, to its session or, if that has ended, to a new one."""
        coordinator.connect()

    def expire(self, coordinator: "MemoryCoordinator") -> None:
        """Expire a client's session; the client begins a new one if the server runs."""
        with self._lock:
            self.reap(coordinator.status.session_id)
            coordinator.report(SessionEvent.EXPIRED)
            if self.is_running:
                coordinator.connect_soon()

    def abandon(self, coordinator: "MemoryCoordinator") -> None:
        """Remove a client as if it was killed; its nodes stay until `reap`."""
        with self._lock:
            self._coordinators.remove(coordinator)
            coordinator.is_stopped = True

    def forget(self, coordinator: "MemoryCoordinator") -> None:
        """Stop notifying a client, because it has stopped."""
        with self._lock:
            if coordinator in self._coordinators:
                self._coordinators.remove(coordinator)

    def reap(self, session_id: int) -> None:
        """Expire the session of an abandoned client."""
        with self._lock:
            self._sessions.discard(session_id)
            if session_id:
                nodes = self.nodes.items()
                self._remove([p for p, n in nodes if n.owner_session_id == session_id])

    def stop(self) -> None:
        """Become unreachable for every client; sessions and nodes stay."""
        with self._lock:
            self.is_running = False
            for coordinator in self._coordinators:
                coordinator.report(SessionEvent.DISCONNECTED)

    def start(self, *, is_wiped: bool = False) -> None:
        """Become reachable again; with `is_wiped`, without nodes and sessions."""
        with self._lock:
            self.is_running = True
            if is_wiped:
                self.nodes.clear()
                self._children.clear()
                self._sessions.clear()
            for coordinator in self._coordinators:
                if is_wiped:
                    coordinator.report(SessionEvent.EXPIRED)
                coordinator.connect()

    def restore(self, backup: Mapping[str, Node]) -> None:
        """Restart with the nodes and versions of a backup, made by `tree`.

        All clients begin new sessions, because a server refuses clients that have seen
        a later state than its own. Ephemeral nodes of the backup stay until their
        sessions are ended by `reap`.
        """
        with self._lock:
            self.stop()
            self.start(is_wiped=True)
            self.nodes = dict(backup)
            self._sessions |= {node.owner_session_id for node in backup.values()} - {0}
            self._touch()

    def lag(self, coordinator: "MemoryCoordinator") -> None:
        """Let a client read the present state until it syncs, writes or reconnects."""
        with self._lock:
            coordinator.source = MemoryZooKeeper()
            coordinator.source.nodes = dict(self.nodes)

    def lose_answer(self, client: "MemoryCoordinator", *, is_carried_out: bool) -> None:
        """Disconnect a client at its next change, until `resume`.

        Args:
            client: client whose change gets an unknown outcome.
            is_carried_out: True: disconnect after the change; False: before it.
        """
        client.loses = is_carried_out

    def wipe(self) -> None:
        """Delete all nodes; sessions stay."""
        with self._lock:
            self._remove(list(self.nodes))

    def put(self, path: str, data: bytes, *, session_id: int = 0) -> None:
        """Write a node as another client would, and create its parents.

        Args:
            path: absolute path; an existing node is replaced.
            data: payload of the node.
            session_id: owner of an ephemeral node; 0: the node is persistent.
        """
        with self._lock:
            self.ensure_parents(path)
            self.nodes[path] = Node(data, owner_session_id=session_id, version=0)
            self._touch()

    def write(self, path: str, data: bytes) -> None:
        """Set a node's payload, or create it as a persistent node.

        Args:
            path: absolute path; an existing node keeps its owner.
            data: payload of the node.
        """
        with self._lock:
            old = self.nodes.get(path)
            self.put(path, data)
            if old is not None:
                self.nodes[path] = replace(old, data=data, version=old.version + 1)

    def remove(self, path: str) -> None:
        """Delete a node as another client would."""
        with self._lock:
            self._remove([path])

    def tree(self) -> dict[str, Node]:
        """Return a copy of all nodes by path."""
        with self._lock:
            return dict(sorted(self.nodes.items()))

    # -- requests of clients ----------------------------------------------------------

    def begin_session(self) -> int:
        """Begin a session; return its id."""
        with self._lock:
            self._session_count += 1
            self._sessions.add(self._session_count)
            return self._session_count

    @contextlib.contextmanager
    def serving(self, what: str, path: str, session_id: int) -> Iterator[None]:
        """Carry out a request in the block, atomically.

        Args:
            what: name of the request, for errors and `calls`.
            path: path of its node.
            session_id: session of the client.

        Yields:
            Nothing; no other request is carried out during the block.

        Raises:
            SessionSuspendedError: the server is stopped.
            SessionLostError: the session has ended; its client gets a report.
            CoordinationError: `refusal` is set.
        """
        with self._lock:
            if not self.is_running:
                raise SessionSuspendedError(f"{what} {path}: connection lost")
            if session_id not in self._sessions:
                raise SessionLostError(f"{what} {path}: session {session_id} has ended")
            if self.refusal:
                raise CoordinationError(f"{what} {path}: {self.refusal}")
            self.calls.append((what, path))
            yield

    def transact(
        self, operations: Sequence[Operation], *, session_id: int = 0
    ) -> tuple[int, ...]:
        """Carry out all operations or none; watches see the tree after all of them.

        Args:
            operations: operations in order.
            session_id: session of the client, the owner of new ephemeral nodes.

        Returns:
            The version of each node after its operation, in the same order.

        Raises:
            CoordinationError: as `Coordinator.transact`.
        """
        with self._lock:
            nodes = dict(self.nodes)
            versions = tuple(_apply(nodes, each, session_id) for each in operations)
            # Other threads see the tree before or after all operations.
            self.nodes = nodes
            self._touch()
            return versions

    def ensure_parents(self, path: str) -> None:
        """Create missing parents of a node."""
        parent = path.rpartition("/")[0]
        if parent and parent not in self.nodes:
            self.ensure_parents(parent)
            self.nodes[parent] = Node(b"", owner_session_id=0, version=0)

    def _remove(self, paths: list[str]) -> None:
        for path in paths:
            self.nodes.pop(path, None)
        self._touch()

    def names(self, path: str) -> tuple[str, ...] | None:
        """Return the sorted names of a node's children; None if there is no node."""
        with self._lock:
            if path not in self.nodes:
                return None
            if not self._children:
                # One pass serves all requests between two changes.
                for child in sorted(self.nodes):
                    parent, _, name = child.rpartition("/")
                    self._children.setdefault(parent, []).append(name)
            return tuple(self._children.get(path, ()))

    def _touch(self) -> None:
        self._children.clear()
        for coordinator in self._coordinators:
            coordinator.refresh_watches()


def _apply(nodes: dict[str, Node], operation: Operation, session_id: int) -> int:
    """Carry out one operation of a transaction; return the version after it."""
    path = operation.path
    node = nodes.get(path)
    version = None if isinstance(operation, CreateEphemeral) else operation.version
    is_any = isinstance(operation, CheckNode | DeleteNode) and version is None
    found = None if node is None else node.version
    if found is None if is_any else found != version:
        raise NodeChangedError(f"transact {path}: version {found}, not {operation}")
    match operation:
        case WriteNode(_, data) | CreateEphemeral(_, data) if node is None:
            parent = path.rpartition("/")[0]
            if parent and parent not in nodes:
                raise NoNodeError(f"transact {path}: no parent")
            owner = session_id if isinstance(operation, CreateEphemeral) else 0
            nodes[path] = Node(data, owner_session_id=owner, version=0)
        case WriteNode(_, data) if node is not None:
            nodes[path] = replace(node, data=data, version=node.version + 1)
        case DeleteNode():
            if any(each.startswith(f"{path}/") for each in nodes):
                raise NodeNotEmptyError(f"transact {path}: it has children")
            del nodes[path]
            return NO_VERSION
    return NO_VERSION if is_any else nodes[path].version


@dataclass(eq=False, slots=True)
class _Watch:
    """A watch of one client on one node."""

    read: Callable[[], Any]
    callback: Callable[[Any], None]
    last: Any = None
    has_delivered: bool = False
    is_cancelled: bool = False


class MemoryCoordinator:
    """A client of `MemoryZooKeeper`, with the contract of `Coordinator`."""

    def __init__(self, server: MemoryZooKeeper, clock: Clock) -> None:
        self._server = server
        self._clock = clock
        self._tracker = SessionTracker()
        self._listeners: list[StatusCallback] = []
        self._watches: list[_Watch] = []
        self._is_started = False
        self._is_delivery_due = False
        self.is_stopped = False
        """Whether the client was stopped or abandoned."""
        self.source = server
        """Server that reads go to: an old copy while the client lags."""
        self.loses: bool | None = None
        """`is_carried_out` of a pending `lose_answer`; None: none is pending."""
        self._loop: asyncio.AbstractEventLoop
        self._thread_id = 0

    @property
    def status(self) -> SessionStatus:
        """Snapshot of the session's present status."""
        return self._tracker.status

    def add_listener(self, callback: StatusCallback) -> Cancel:
        """Call `callback` on the loop with each new status, in order."""
        self._listeners.append(callback)

        def cancel() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return cancel

    def start(self) -> None:
        """Begin to connect; all callbacks run on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._is_started = True
        self.connect_soon()

    async def stop(self, *, deadline_s: float) -> None:
        """Close the session; never raises."""
        self._server.forget(self)
        if self.is_stopped or not self._is_started:
            self.is_stopped = True
            return
        self.is_stopped = True
        self._watches.clear()
        if self._server.stall:
            await asyncio.sleep(max(0.0, deadline_s - self._clock.monotonic_s()))
        elif self.status.state is SessionState.CONNECTED:
            self._server.reap(self.status.session_id)
        self._change(SessionEvent.EXPIRED)

    # -- session ----------------------------------------------------------------------

    def connect(self) -> None:
        """Connect: to the session if it still exists, else to a new one."""
        if self._is_started:
            self._on_loop(self._connect)

    def connect_soon(self) -> None:
        """Connect in a later turn of the loop, as after a round trip."""
        if self._is_started:
            self._soon(self._connect)

    def _connect(self) -> None:
        if self.is_stopped or not self._server.is_running:
            return
        self._catch_up()
        number = self.status.session_id
        if self.status.state is SessionState.LOST:
            number = self._server.begin_session()
        self._change(SessionEvent.ESTABLISHED, number)

    def report(self, event: SessionEvent) -> None:
        """Apply an event of the connection, unless stopped."""
        if self._is_started:
            self._on_loop(self._report, event)

    def _report(self, event: SessionEvent) -> None:
        if not self.is_stopped:
            self._change(event)

    def _on_loop(self, callback: Callable[..., None], *args: Any) -> None:
        """Call now if on the loop's thread, else soon on the loop."""
        is_here = threading.get_ident() == self._thread_id
        if is_here and not self._loop.is_closed():
            callback(*args)
        else:
            self._soon(callback, *args)

    def _soon(self, callback: Callable[..., None], *args: Any) -> None:
        is_here = threading.get_ident() == self._thread_id
        call = self._loop.call_soon if is_here else self._loop.call_soon_threadsafe
        # A closed loop has no listeners left.
        with contextlib.suppress(RuntimeError):
            call(callback, *args)

    def _change(self, event: SessionEvent, session_id: int = 0) -> None:
        status = self._tracker.apply(event, session_id, SESSION_TIMEOUT_S)
        if status is None:
            return
        for callback in tuple(self._listeners):
            self._loop.call_soon(callback, status)
        if status.state is SessionState.CONNECTED:
            self.refresh_watches()

    # -- requests ---------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _asking(
        self, what: str, path: str, deadline_s: float
    ) -> AsyncIterator[None]:
        """Carry out a request in the block, after a round trip to the server."""
        require_legal_path(path)
        self.status.require_connected()
        session_version = self.status.session_version
        remaining_s = deadline_s - self._clock.monotonic_s()
        if remaining_s <= 0:
            raise CoordinationTimeoutError(f"{what} {path}: no time left, not asked")
        if self._server.stall:
            await asyncio.sleep(remaining_s)
            raise no_answer(what, path, remaining_s)
        await asyncio.sleep(0)
        self.status.require_connected()
        if self.status.session_version != session_version:
            raise cut_off(what, path)
        is_change = what not in {"get", "exists", "children", "sync"}
        loses = self.loses if is_change else None
        lost = cut_off(what, path)
        if loses is not None:
            self.loses = None
            self._report(SessionEvent.DISCONNECTED)
        if loses is False:
            raise lost
        with self._server.serving(what, path, self.status.session_id):
            if is_change:
                self._catch_up()
            yield
        if loses:
            raise lost

    def _catch_up(self) -> None:
        if self.source is not self._server:
            self.source = self._server
            self.refresh_watches()

    async def sync(self, path: str, *, deadline_s: float) -> None:
        """Wait until the client's server has all earlier changes."""
        async with self._asking("sync", path, deadline_s):
            self._catch_up()

    async def get(self, path: str, *, deadline_s: float) -> Node | None:
        """Return a node, or None if there is none."""
        async with self._asking("get", path, deadline_s):
            return self.source.nodes.get(path)

    async def exists(self, path: str, *, deadline_s: float) -> bool:
        """Return whether a node exists."""
        async with self._asking("exists", path, deadline_s):
            return path in self.source.nodes

    async def children(self, path: str, *, deadline_s: float) -> tuple[str, ...]:
        """Return the sorted names of a node's children; () if there is no node."""
        async with self._asking("children", path, deadline_s):
            return self.source.names(path) or ()

    async def create_ephemeral(
        self, path: str, data: bytes, *, deadline_s: float
    ) -> None:
        """Create an ephemeral node of this session, and missing parents."""
        async with self._asking("create", path, deadline_s):
            if path in self._server.nodes:
                raise NodeExistsError(f"create {path}")
            self._server.put(path, data, session_id=self.status.session_id)

    async def set_or_create(self, path: str, data: bytes, *, deadline_s: float) -> None:
        """Write a persistent node; create it and its parents if missing."""
        async with self._asking("set", path, deadline_s):
            self._server.write(path, data)

    async def replace(
        self, path: str, data: bytes, *, version: int | None, deadline_s: float
    ) -> None:
        """Write a persistent node if it still has the given version."""
        async with self._asking("replace", path, deadline_s):
            self._server.ensure_parents(path)
            self._server.transact((WriteNode(path, data, version),))

    async def delete(
        self, path: str, *, version: int | None = None, deadline_s: float
    ) -> bool:
        """Delete a node; return False if there was none."""
        async with self._asking("delete", path, deadline_s):
            if self._server.names(path):
                raise NodeNotEmptyError(f"delete {path}")
            is_there = path in self._server.nodes
            if is_there and version not in (None, self._server.nodes[path].version):
                raise NodeChangedError(f"delete {path}: not version {version}")
            self._server.remove(path)
            return is_there

    async def transact(
        self, operations: Sequence[Operation], *, deadline_s: float
    ) -> tuple[int, ...]:
        """Carry out all operations or none, in one request."""
        if not operations:
            return ()
        for operation in operations:
            require_legal_path(operation.path)
        async with self._asking("transact", operations[0].path, deadline_s):
            session_id = self.status.session_id
            return self._server.transact(operations, session_id=session_id)

    # -- watches ----------------------------------------------------------------------

    def watch_children(self, path: str, callback: ChildrenCallback) -> Cancel:
        """Call `callback` on the loop with the node's children, now and on change."""
        return self._watch(path, lambda: self.source.names(path), callback)

    def watch_data(self, path: str, callback: DataCallback) -> Cancel:
        """Call `callback` on the loop with the node's payload, now and on change."""

        def read() -> bytes | None:
            node = self.source.nodes.get(path)
            return None if node is None else node.data

        return self._watch(path, read, callback)

    def _watch(
        self, path: str, read: Callable[[], Any], callback: Callable[[Any], None]
    ) -> Cancel:
        require_legal_path(path)
        watch = _Watch(read, callback)
        self._watches.append(watch)

        def cancel() -> None:
            watch.is_cancelled = True
            if watch in self._watches:
                self._watches.remove(watch)

        if self.status.state is SessionState.CONNECTED:
            self.refresh_watches()
        return cancel

    def refresh_watches(self) -> None:
        """Deliver the present state of watched nodes soon; from any thread."""
        if self._is_started and not self.is_stopped and not self._is_delivery_due:
            self._is_delivery_due = True
            self._soon(self._deliver)

    def _deliver(self) -> None:
        # Reset before the first read, so that a later change requests a new delivery.
        self._is_delivery_due = False
        if self.status.state is not SessionState.CONNECTED:
            return
        for watch in tuple(self._watches):
            snapshot = watch.read()
            if watch.is_cancelled or (watch.has_delivered and snapshot == watch.last):
                continue
            watch.last, watch.has_delivered = snapshot, True
            watch.callback(snapshot)
