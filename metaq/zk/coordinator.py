"""A ZooKeeper session: kept alive, replaced when lost, read and watched, on one loop.

Theory of operation. One task keeps a connection to one of the servers
(`_connection.py`); when it ends, it connects to the next server and presents the
session that it had. The server resumes that session or reports that it has expired.
These events go to the `SessionTracker`.

A session counts as alive for LIFE of its time-out, from when the last answered beat or
connect request was sent; after that it is given up. The server counts from the arrival
of a request, which is later, so a client knows that its session is lost before others
see its nodes disappear. The time-out is the one that the server chose: if a server
allowed less than was requested, it would give a member's partitions away while the
member still relied on its session. A beat is a request sent every BEAT of the time-out.
A connection that receives nothing for SILENCE of it is dropped, and the next server is
tried.

Giving up a session also ends a state that a client cannot detect: a server that came
back without its data always refuses clients that have seen a later transaction than it
has, and does not report on their sessions. If the session is in fact alive, on a server
that was away, it is closed once a server is found that knows it; otherwise its nodes
would block the next session for a whole time-out.

A request is sent only while the session is connected; it does not wait for that.

Keep in step: `session.py`, `watch.py`, `metaq/testing/zk.py`.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from kazoo import exceptions as kz
from kazoo.protocol import serialization as jute
from kazoo.security import OPEN_ACL_UNSAFE

from metaq.clock import Clock
from metaq.errors import CoordinationError, SessionLostError, SessionSuspendedError
from metaq.retry import Backoff
from metaq.zk._connection import ServerConnection, ZooKeeperSession, connect
from metaq.zk.errors import (
    CoordinationTimeoutError,
    NodeChangedError,
    NodeExistsError,
    NodeNameError,
    NodeNotEmptyError,
    NoNodeError,
    cut_off,
    no_answer,
)
from metaq.zk.paths import require_legal_path
from metaq.zk.servers import parse_servers
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
from metaq.zk.watch import Watch
from metaq.zk.znodes import Node

_log = logging.getLogger(__name__)

RECONNECT_BACKOFF: Final = Backoff(first_s=0.2, max_s=5.0)
"""Pauses between rounds over all servers in which none replied."""
REPORT_S: Final = 30.0
"""Interval of the log lines while no server replies, in seconds."""
# A starting server may accept a connection and never reply (ZooKeeper 3.9 does, if a
# client connects before its data is loaded). With a single server, waiting for it must
# not cost the session.
GREETINGS_PER_SESSION_TIMEOUT: Final = 3
GREETING_S_MIN: Final = 0.25
# Parts of the session time-out. The part above LIFE allows for late timers.
BEAT: Final = 1 / 6
SILENCE: Final = 0.6
LIFE: Final = 0.9
SILENT_S: Final = 0.5
"""A server that was asked, and says nothing for so long, is sent the end of its session
and not waited for any longer."""
WATCH_TIMEOUT_S: Final = 10.0
# A broker of many topics has thousands of watches, and reads all of them when it
# reconnects. Another request waits for at most this many of their replies.
WATCH_READS_AT_ONCE: Final = 64
# A set that finds no node and a create that finds one may alternate while another
# client keeps creating and deleting it.
SET_OR_CREATE_TRIES: Final = 3
ANY_VERSION: Final = -1
"""Version that matches any version, in ZooKeeper's protocol."""
EPHEMERAL: Final = 1
"""Flag of a node that is deleted with its session."""

T = TypeVar("T")

_MAPPED: Final[tuple[tuple[type[Exception], type[CoordinationError]], ...]] = (
    (kz.NoNodeError, NoNodeError),
    (kz.NodeExistsError, NodeExistsError),
    (kz.BadVersionError, NodeChangedError),
    (kz.NotEmptyError, NodeNotEmptyError),
    (kz.BadArgumentsError, NodeNameError),
    (kz.SessionExpiredError, SessionLostError),
    (kz.AuthFailedError, SessionLostError),
    (kz.SessionMovedError, SessionSuspendedError),
    (kz.OperationTimeoutError, SessionSuspendedError),
)


def _map_error(error: BaseException, what: str) -> CoordinationError:
    for theirs, ours in _MAPPED:
        if isinstance(error, theirs):
            return ours(f"{what}: {type(error).__name__}")
    return CoordinationError(f"{what}: {type(error).__name__} {error}".rstrip())


def _node(value: Any) -> Node:
    data, stat = value
    return Node(
        data=data or b"", owner_session_id=stat.ephemeralOwner, version=stat.version
    )


def _names(value: Any) -> tuple[str, ...]:
    return tuple(sorted(value))


def _version_after(operation: Operation, result: Any) -> int:
    """Return the version of a node after an operation that was executed."""
    match operation:
        case CheckNode(_, version) if version is not None:
            return version
        case WriteNode(_, _, None) | CreateEphemeral():
            return 0
        case WriteNode():
            return int(result.version)
    return NO_VERSION


def _raise_unfit(operations: Sequence[Operation], results: Sequence[Any]) -> None:
    """Raise the error of the first operation that failed, if there is one."""
    for operation, result in zip(operations, results, strict=True):
        # Those before it are reported as rolled back, those after it as not executed.
        if isinstance(result, kz.RolledBackError) or not isinstance(result, Exception):
            continue
        error = _map_error(result, f"transact {operation.path}")
        is_write = isinstance(operation, WriteNode) and operation.version is None
        is_create = is_write or isinstance(operation, CreateEphemeral)
        if isinstance(error, NodeExistsError) or (
            isinstance(error, NoNodeError) and not is_create
        ):
            raise NodeChangedError(f"{error}, expected {operation}") from result
        raise error from result


class ZooKeeperCoordinator:
    """The production `Coordinator`; see there for lifecycle and errors.

    Concurrency: created, used and stopped on one event loop.
    """

    def __init__(self, hosts: str, *, session_timeout_ms: int, clock: Clock) -> None:
        """Create a coordinator; it connects on `start`.

        Args:
            hosts: `host:port,host:port` and optionally `/chroot`, as zk.zkConnect.
            session_timeout_ms: the requested time-out; the server may change it.
            clock: clock of the deadlines.

        Raises:
            ConfigError: `hosts` is not of that form.
        """
        servers = parse_servers(hosts)
        self._hosts, self._root = hosts, servers.root
        self._count = len(servers.addresses)
        # Spread the clients of an ensemble over its servers.
        mixed = random.sample(servers.addresses, self._count)
        self._servers = itertools.cycle(mixed)
        self._wanted = self._session = ZooKeeperSession(session_timeout_ms)
        shares = max(self._count, GREETINGS_PER_SESSION_TIMEOUT)
        self._greeting_s = max(session_timeout_ms / 1000 / shares, GREETING_S_MIN)
        self._clock = clock
        self._tracker = SessionTracker()
        self._listeners: list[StatusCallback] = []
        self._watches: dict[str, set[Watch[Any]]] = {}
        """Full path → its watches."""
        self._watch_reads = asyncio.Semaphore(WATCH_READS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._connection: ServerConnection | None = None
        """Connection that carries the session; None: not connected, or no session."""
        self._failures = 0
        """Attempts to connect since the last answered beat."""
        self._refusal = ""
        """Server that did not greet last, and its error."""
        self._is_stopped = False
        self._check: asyncio.TimerHandle | None = None
        self._beat_at_s = 0.0

    # -- session ----------------------------------------------------------------------

    @property
    def status(self) -> SessionStatus:
        """The current status of the session."""
        return self._tracker.status

    def add_listener(self, callback: StatusCallback) -> Cancel:
        """Call `callback` on the loop with each new status, in order."""
        self._listeners.append(callback)

        def cancel() -> None:
            with suppress(ValueError):
                self._listeners.remove(callback)

        return cancel

    def start(self) -> None:
        """Start to connect, and retry until `stop`."""
        self._keeper = self._spawn(self._keep_connected())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"zookeeper {self._hosts}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep_connected(self) -> None:
        """Keep a connection open, replacing it when it ends; runs until cancelled."""
        since_s = self._clock.monotonic_s()
        while True:
            rounds, place = divmod(self._failures, self._count)
            if rounds and not place:
                if self._clock.monotonic_s() - since_s >= REPORT_S:
                    since_s = self._clock.monotonic_s()
                    _log.warning(
                        "no zookeeper server replies: hosts=%s last=%s",
                        self._hosts,
                        self._refusal,
                    )
                await asyncio.sleep(RECONNECT_BACKOFF.delay_s(rounds))
            self._failures += 1
            one = await self._greet(self._session)
            if one is None:
                continue
            if one.session.timeout_ms > 0:
                self._begin(one)
                await asyncio.wait([one.ended])
                since_s = self._clock.monotonic_s()
            else:
                one.drop("its session is over")
                self._session = replace(self._wanted, zxid=one.session.zxid)
                self._apply(SessionEvent.EXPIRED)

    async def _greet(self, session: ZooKeeperSession) -> ServerConnection | None:
        """Return a connection to the next server; None if it does not reply in time."""
        host, port = next(self._servers)
        try:
            async with asyncio.timeout(self._greeting_s):
                return await connect(
                    host, port, session, clock=self._clock, on_event=self._on_event
                )
        except Exception as error:  # noqa: BLE001  # no descriptor, thread or memory as well
            self._refusal = f"{host}:{port} error={error!r}"
            _log.debug("no greeting: server=%s", self._refusal)
            return None

    def _begin(self, one: ServerConnection) -> None:
        """Use a connection, with the session that its server has granted."""
        self._connection, self._session = one, one.session
        one.ended.add_done_callback(partial(self._on_ended, one))
        timeout_s = one.session.timeout_ms / 1000
        self._beat_at_s = max(self._beat_at_s, one.sent_s)
        self._apply(SessionEvent.ESTABLISHED, one.session.session_id, timeout_s)

    def _on_ended(self, one: ServerConnection, ended: "asyncio.Future[str]") -> None:
        """Handle the end of a connection, before those waiting for its replies do."""
        if one is self._connection and not self._is_stopped:
            reason = ended.result()
            _log.debug("connection ended: hosts=%s reason=%s", self._hosts, reason)
            self._connection = None
            self._apply(SessionEvent.DISCONNECTED)

    def _apply(
        self, event: SessionEvent, session_id: int = 0, timeout_s: float = 0.0
    ) -> None:
        status = self._tracker.apply(event, session_id, timeout_s)
        if status is None:
            return
        loop = asyncio.get_running_loop()
        for callback in tuple(self._listeners):
            # Separate calls, so that an exception in one does not stop the others.
            loop.call_soon(callback, status)
        if status.state is SessionState.CONNECTED:
            for watch in itertools.chain.from_iterable([*self._watches.values()]):
                watch.refresh()
        self._schedule_check()

    def _life_left_s(self) -> float:
        """Return the time for which the session is certainly alive, in seconds."""
        return self._remaining_s(self._beat_at_s + LIFE * self.status.timeout_s)

    def _schedule_check(self) -> None:
        if self._check is not None:
            self._check.cancel()
        state = self.status.state
        if state is SessionState.LOST or self._is_stopped:
            return
        delay_s = self._life_left_s()
        if state is SessionState.CONNECTED:
            delay_s = min(delay_s, BEAT * self.status.timeout_s)
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(max(0.0, delay_s), self._check_session)

    def _check_session(self) -> None:
        """Give up a session that may be over; drop a silent connection, or beat."""
        one = self._connection
        if self._life_left_s() <= 0:
            self._give_up()
            return
        if one is not None:
            silence_s = self._clock.monotonic_s() - one.heard_s
            if silence_s > SILENCE * self.status.timeout_s:
                one.drop(f"silent for {silence_s:.1f} s")
            else:
                self._beat(one)
        self._schedule_check()

    def _beat(self, one: ServerConnection) -> None:
        """Send a request that shows that the session is alive."""
        sent_s = self._clock.monotonic_s()

        def on_answer(answer: "asyncio.Future[Any]") -> None:
            if answer.exception() is None:
                self._failures = 0
                self._beat_at_s = max(self._beat_at_s, sent_s)

        one.ask(jute.Exists(self._whole("/"), None)).add_done_callback(on_answer)

    def _give_up(self) -> None:
        """Start another session; the last one is over, or will be closed."""
        one, self._connection = self._connection, None
        last = self._session
        _log.warning(
            "zookeeper session abandoned, it may have expired: hosts=%s session=%#x",
            self._hosts,
            last.session_id,
        )
        self._session, self._failures = self._wanted, 0
        if one is not None:
            one.drop("its session may be over")
        self._apply(SessionEvent.EXPIRED)
        assert self._keeper is not None
        self._keeper.cancel()
        self._keeper = self._spawn(self._keep_connected())
        # After the listeners ran: with the session, its nodes may go to others.
        self._spawn(self._end_session(last))

    async def _end_session(self, last: ZooKeeperSession) -> None:
        """Close a session that may still be alive, once a server can be reached."""
        with suppress(TimeoutError):
            async with asyncio.timeout(last.timeout_ms / 1000):
                failures = 0
                while (one := await self._greet(last)) is None:
                    failures += 1
                    await asyncio.sleep(RECONNECT_BACKOFF.delay_s(failures))
                await _close(one)

    async def stop(self, *, deadline_s: float) -> None:
        """Close the session, which removes its ephemeral nodes; never raises."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._check is not None:
            self._check.cancel()
        for watch in itertools.chain.from_iterable(self._watches.values()):
            watch.cancel()
        if self.status.state is not SessionState.LOST:
            await self._close_session(deadline_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._connection = None
        self._apply(SessionEvent.EXPIRED)

    async def _close_session(self, deadline_s: float) -> None:
        one, limit_s = self._connection, self._remaining_s(deadline_s)
        if one is not None and one.silent_s > 0:
            limit_s = min(limit_s, SILENT_S - one.silent_s)
        try:
            async with asyncio.timeout(limit_s):
                if one is not None and await _close(one):
                    return
        except TimeoutError:
            pass
        _log.warning("zookeeper session not closed in time, it will expire")

    # -- requests ---------------------------------------------------------------------

    def _remaining_s(self, deadline_s: float) -> float:
        return deadline_s - self._clock.monotonic_s()

    def _whole(self, path: str) -> str:
        """Return a path with the root prepended."""
        return (self._root + path).rstrip("/") or "/"

    async def _ask(self, what: str, path: str, request: Any, deadline_s: float) -> Any:
        """Send a kazoo request and return its reply as kazoo decodes it."""
        require_legal_path(path)
        return await self._send(what, path, request, deadline_s)

    async def _send(self, what: str, path: str, request: Any, deadline_s: float) -> Any:
        self.status.require_connected()
        remaining_s = self._remaining_s(deadline_s)
        if remaining_s <= 0:
            raise CoordinationTimeoutError(f"{what} {path}: no time left, not asked")
        assert self._connection is not None
        answer = self._connection.ask(request)
        timer = answer.get_loop().call_later(remaining_s, _end_wait, answer)
        try:
            return await answer
        except TimeoutError as error:
            raise no_answer(what, path, remaining_s) from error
        except kz.ConnectionLoss as error:
            raise cut_off(what, path) from error
        except kz.KazooException as error:
            raise _map_error(error, f"{what} {path}") from error
        finally:
            timer.cancel()

    async def sync(self, path: str, *, deadline_s: float) -> None:
        """Wait until our server has all changes made before this call."""
        await self._ask("sync", path, jute.Sync(self._whole(path)), deadline_s)

    async def get(self, path: str, *, deadline_s: float) -> Node | None:
        """Return a node, or None if it does not exist."""
        request = jute.GetData(self._whole(path), None)
        try:
            return _node(await self._ask("get", path, request, deadline_s))
        except NoNodeError:
            return None

    async def exists(self, path: str, *, deadline_s: float) -> bool:
        """Return whether a node exists."""
        request = jute.Exists(self._whole(path), None)
        return await self._ask("exists", path, request, deadline_s) is not None

    async def children(self, path: str, *, deadline_s: float) -> tuple[str, ...]:
        """Return the sorted names of a node's children; () if it does not exist."""
        request = jute.GetChildren(self._whole(path), None)
        try:
            return _names(await self._ask("children", path, request, deadline_s))
        except NoNodeError:
            return ()

    async def create_ephemeral(
        self, path: str, data: bytes, *, deadline_s: float
    ) -> None:
        """Create a node that lives as long as this session, and missing parents."""
        require_legal_path(path)
        await self._create(path, data, deadline_s, EPHEMERAL)

    async def set_or_create(self, path: str, data: bytes, *, deadline_s: float) -> None:
        """Write a persistent node, creating it and missing parents."""
        for _ in range(SET_OR_CREATE_TRIES):
            with suppress(NoNodeError):
                await self._set("set", path, data, ANY_VERSION, deadline_s)
                return
            with suppress(NodeExistsError):
                await self._create(path, data, deadline_s)
                return
        raise CoordinationError(
            f"set {path}: created and deleted by others, {SET_OR_CREATE_TRIES} times"
        )

    async def _set(
        self, what: str, path: str, data: bytes, version: int, deadline_s: float
    ) -> None:
        request = jute.SetData(self._whole(path), data, version)
        await self._ask(what, path, request, deadline_s)

    async def _create(
        self, path: str, data: bytes, deadline_s: float, flags: int = 0
    ) -> None:
        """Create a node and its missing parents, up to the root but not above it."""
        request = jute.Create(self._whole(path), data, OPEN_ACL_UNSAFE, flags)
        try:
            await self._send("create", path, request, deadline_s)
        except NoNodeError as error:
            if path == "/":
                text = f"{error}; create {self._root} of zk.zkConnect first"
                raise NoNodeError(text) from error
        else:
            return
        with suppress(NodeExistsError):
            await self._create(path.rpartition("/")[0] or "/", b"", deadline_s)
        await self._send("create", path, request, deadline_s)

    async def replace(
        self, path: str, data: bytes, *, version: int | None, deadline_s: float
    ) -> None:
        """Write a persistent node, unless it has changed since it was read."""
        require_legal_path(path)
        try:
            if version is None:
                await self._create(path, data, deadline_s)
            else:
                await self._set("replace", path, data, version, deadline_s)
        except (NodeExistsError, NoNodeError) as error:
            raise NodeChangedError(f"{error}, expected version {version}") from error

    async def delete(
        self, path: str, *, version: int | None = None, deadline_s: float
    ) -> bool:
        """Delete a node; return False if there was none."""
        number = ANY_VERSION if version is None else version
        request = jute.Delete(self._whole(path), number)
        try:
            await self._ask("delete", path, request, deadline_s)
        except NoNodeError:
            return False
        return True

    async def transact(
        self, operations: Sequence[Operation], *, deadline_s: float
    ) -> tuple[int, ...]:
        """Execute all operations or none, in one request and one write to disk."""
        if not operations:
            return ()
        for operation in operations:
            require_legal_path(operation.path)
        request = jute.Transaction([*map(self._part, operations)])
        results = await self._send("transact", operations[0].path, request, deadline_s)
        _raise_unfit(operations, results)
        return tuple(map(_version_after, operations, results))

    def _part(self, operation: Operation) -> Any:
        """Return kazoo's request for an operation of a transaction."""
        path = self._whole(operation.path)
        match operation:
            case CheckNode(_, version):
                return jute.CheckVersion(
                    path, ANY_VERSION if version is None else version
                )
            case WriteNode(_, data, None):
                return jute.Create(path, data, OPEN_ACL_UNSAFE, 0)
            case WriteNode(_, data, version):
                return jute.SetData(path, data, version)
            case CreateEphemeral(_, data):
                return jute.Create(path, data, OPEN_ACL_UNSAFE, EPHEMERAL)
            case DeleteNode(_, version):
                return jute.Delete(path, ANY_VERSION if version is None else version)

    # -- watches ----------------------------------------------------------------------

    def watch_children(self, path: str, callback: ChildrenCallback) -> Cancel:
        """Call `callback` on the loop with the node's children, now and on change."""
        return self._watch(jute.GetChildren, path, _names, callback)

    def watch_data(self, path: str, callback: DataCallback) -> Cancel:
        """Call `callback` on the loop with the node's payload, now and on change."""
        return self._watch(jute.GetData, path, lambda v: _node(v).data, callback)

    def _watch(
        self,
        reading: Callable[[str, bool], Any],
        path: str,
        convert: Callable[[Any], T],
        callback: Callable[[T | None], None],
    ) -> Cancel:
        require_legal_path(path)
        whole = self._whole(path)
        read_it, look_for_it = reading(whole, True), jute.Exists(whole, True)

        async def read_now() -> T | None:
            deadline_s = self._clock.monotonic_s() + WATCH_TIMEOUT_S
            # Reading a missing node sets no watch, `exists` does. The node may be
            # created between the two, hence the loop.
            while True:
                with suppress(NoNodeError):
                    return convert(await self._ask("watch", path, read_it, deadline_s))
                found = await self._ask("watch", path, look_for_it, deadline_s)
                if found is None:
                    return None

        async def read() -> T | None:
            async with self._watch_reads:
                return await read_now()

        def cancel() -> None:
            watches = self._watches.get(whole, set())
            watches.discard(watch)
            if not watches:
                self._watches.pop(whole, None)
            watch.cancel()

        watch = Watch(path, read, callback)
        self._watches.setdefault(whole, set()).add(watch)
        watch.refresh()
        return cancel

    def _on_event(self, path: str) -> None:
        """Make the watches of a node read it again."""
        for watch in tuple(self._watches.get(path, ())):
            watch.refresh()


def _end_wait(answer: "asyncio.Future[Any]") -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


async def _close(one: ServerConnection) -> bool:
    """Close the session of a connection; return whether the server has confirmed."""
    try:
        await one.ask(jute.CloseInstance)
    except kz.KazooException:
        return False
    finally:
        one.drop("its session was closed")
    return True
