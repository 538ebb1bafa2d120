"""The session over kazoo: threads in, loop callbacks out, errors mapped.

Theory of operation: kazoo runs three threads of its own per client. Nothing of ours
runs on them except the `_post...` functions, which hand *values* (never kazoo's
objects) to the event loop through `call_soon_threadsafe`; all state of this module is
touched on the loop alone. kazoo keeps a session alive, or begins a new one, for as
long as its connection thread lives. That thread ends by itself in two cases (an
answer that it cannot read, and refused credentials), and does not always say so.
Because a broker never gives up on ZooKeeper, `_check_client` checks that thread while
there is no connection, and replaces a dead client. `_client_version` distinguishes late
reports of a replaced client from those of the present one.

A session counts as alive for LIFE of its time-out after the last answered beat was
sent, even if kazoo still reports a connection; then the client is replaced. The server
counts from the arrival of a request, which is later: so a client knows that it lost its
session before others see its nodes go. kazoo alone needs up to a whole time-out to
notice a silent network, and longer while requests are sent. The time-out is the one
that the server chose (`_kazoo_client.py`), not the requested one: a server that allows
less would give a member's partitions away while the member still relied on its session.
A beat is a request of ours every BEAT of the time-out; one at a time, because requests
delay kazoo's own pings, which find a dead connection.

That also ends a state that a client cannot detect: a server that came back without its
data refuses clients that have seen a later transaction than it has, for ever, without a
word about their sessions. If the session does live on, at a server that was away, its
client ends it when it finds that server again.

A request is only handed to kazoo while the session is connected. kazoo would queue it
otherwise, and carry it out later, when the caller has stopped waiting.

Keep in step: `session.py`, `watch.py`, `metaq/testing/zk.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from kazoo import exceptions as kz
from kazoo.protocol.states import EventType, KazooState

from metaq.clock import Clock
from metaq.errors import CoordinationError, SessionLostError, SessionSuspendedError
from metaq.retry import wait_set
from metaq.zk._kazoo_client import (
    Close,
    CloseOrder,
    begin_closer,
    close_nothing,
    make_client,
)
from metaq.zk.errors import (
    CoordinationTimeoutError,
    NodeChangedError,
    NodeExistsError,
    NodeNameError,
    NodeNotEmptyError,
    NoNodeError,
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
from metaq.zk.watch import Watch
from metaq.zk.znodes import Node

_log = logging.getLogger(__name__)

# A dead client is replaced slowly: its cause is likely to be there still.
REVIVE_DELAY_S: Final = 5.0
# Parts of the session time-out; the rest beyond LIFE is for timers that come late.
BEAT: Final = 1 / 6
LIFE: Final = 0.9
DEAD_CLIENT_STATES: Final = frozenset({"CLOSED", "AUTH_FAILED"})
WATCH_TIMEOUT_S: Final = 10.0
# A broker of many topics has thousands of watches, and reads all of them when it comes
# back; a question that is not about them has to wait for so many answers at most.
WATCH_READS_AT_ONCE: Final = 64
# A set that finds no node and a create that finds one may alternate when another client
# keeps creating and deleting it; this often is coincidence enough.
SET_OR_CREATE_TRIES: Final = 3
ANY_VERSION: Final = -1
"""ZooKeeper's own number for it."""

T = TypeVar("T")

_MAPPED: Final[tuple[tuple[type[Exception], type[CoordinationError]], ...]] = (
    (kz.NoNodeError, NoNodeError),
    (kz.NodeExistsError, NodeExistsError),
    (kz.BadVersionError, NodeChangedError),
    (kz.NotEmptyError, NodeNotEmptyError),
    (kz.BadArgumentsError, NodeNameError),
    (kz.SessionExpiredError, SessionLostError),
    (kz.AuthFailedError, SessionLostError),
    (kz.ConnectionLoss, SessionSuspendedError),
    (kz.ConnectionDropped, SessionSuspendedError),
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


def _add_operation(request: Any, operation: Operation) -> None:
    """Add an operation to kazoo's transaction."""
    match operation:
        case CheckNode(path, version):
            request.check(path, ANY_VERSION if version is None else version)
        case WriteNode(path, data, None):
            request.create(path, data)
        case WriteNode(path, data, version):
            request.set_data(path, data, version)
        case CreateEphemeral(path, data):
            request.create(path, data, ephemeral=True)
        case DeleteNode(path, version):
            request.delete(path, ANY_VERSION if version is None else version)


def _version_after(operation: Operation, result: Any) -> int:
    """Return the version of a node after an operation that was carried out."""
    match operation:
        case CheckNode(_, version) if version is not None:
            return version
        case WriteNode(_, _, None) | CreateEphemeral():
            return 0
        case WriteNode():
            return int(result.version)
    return NO_VERSION


def _raise_unfit(operations: Sequence[Operation], results: Sequence[Any]) -> None:
    """Raise for the first operation that did not fit, if there is one."""
    for operation, result in zip(operations, results, strict=True):
        # Those before it are reported as rolled back, those after it as not tried.
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


class KazooCoordinator:
    """The `Coordinator` of real life; see there for lifecycle and errors.

    Concurrency: made, used and stopped on one event loop. kazoo's threads are daemons;
    a stop that could not finish in time leaves them to end with the process.
    """

    def __init__(
        self,
        hosts: str,
        *,
        session_timeout_ms: int,
        clock: Clock,
        revive_delay_s: float = REVIVE_DELAY_S,
    ) -> None:
        """Prepare a coordinator; nothing is connected before `start`.

        Args:
            hosts: `host:port,host:port` and optionally `/chroot`, as zk.zkConnect.
            session_timeout_ms: the wanted time-out; the server may shorten it.
            clock: gives meaning to deadlines.
            revive_delay_s: time between two looks at whether kazoo's thread lives.

        Raises:
            ConfigError: `hosts` is not of that form.
        """
        self._hosts = hosts
        self._revive_delay_s = revive_delay_s
        self._session_timeout_s = session_timeout_ms / 1000
        self._clock = clock
        self._tracker = SessionTracker()
        self._listeners: list[StatusCallback] = []
        self._watches: set[Watch[Any]] = set()
        self._watch_reads = asyncio.Semaphore(WATCH_READS_AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client_version = 0
        self._is_stopped = False
        self._check: asyncio.TimerHandle | None = None
        self._beat_at_s = 0.0
        self._is_beating = False
        self._client: Any = make_client(hosts, self._session_timeout_s)
        self._close: Close = close_nothing

    # -- session ----------------------------------------------------------------------

    @property
    def status(self) -> SessionStatus:
        """The present snapshot of the session."""
        return self._tracker.status

    def add_listener(self, callback: StatusCallback) -> Cancel:
        """Call `callback` on the loop with each new status, in order."""
        self._listeners.append(callback)

        def cancel() -> None:
            with suppress(ValueError):
                self._listeners.remove(callback)

        return cancel

    def start(self) -> None:
        """Begin to connect, and go on trying until `stop`."""
        self._loop = asyncio.get_running_loop()
        self._schedule_check(self._revive_delay_s)
        self._begin()

    def _begin(self) -> None:
        """Start the client, or have it replaced when no descriptor is left for it."""
        client = self._client
        client.add_listener(partial(self._post_report, client, self._client_version))
        try:
            self._close = begin_closer(client)
            client.start_async()
        except (OSError, RuntimeError) as error:
            _log.warning(
                "zookeeper client not started, tried again: hosts=%s error=%s",
                self._hosts,
                error,
            )
            self._close(None)
            client.handler.stop()
            client.close()
            # One that was never started counts as dead: the next check replaces it.
            self._client = make_client(self._hosts, self._session_timeout_s)
            self._close = close_nothing

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        """Run `callback` on the loop; called on kazoo's threads."""
        assert self._loop is not None
        # A closed loop means that no listener is left.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)

    def _post_report(self, client: Any, client_version: int, state: KazooState) -> None:
        """Hand a change of kazoo's state to the loop; called on kazoo's threads."""
        if state == KazooState.CONNECTED:
            identity = client.client_id
            self._post(
                self._on_report,
                client_version,
                SessionEvent.ESTABLISHED,
                identity[0] if identity else 0,
                client.greeted_timeout_ms / 1000,
            )
        elif state == KazooState.SUSPENDED:
            self._post(self._on_report, client_version, SessionEvent.DISCONNECTED)
        else:
            self._post(self._on_report, client_version, SessionEvent.EXPIRED)

    def _on_report(
        self,
        client_version: int,
        event: SessionEvent,
        session_id: int = 0,
        timeout_s: float = 0.0,
    ) -> None:
        if client_version == self._client_version and not self._is_stopped:
            self._apply(event, session_id, timeout_s)

    def _schedule_check(self, delay_s: float) -> None:
        assert self._loop is not None
        if self._check is not None:
            self._check.cancel()
        if self.status.state is not SessionState.LOST:
            delay_s = min(delay_s, self._life_left_s())
        self._check = self._loop.call_later(max(0.0, delay_s), self._check_client)

    def _life_left_s(self) -> float:
        """Return for how long the session is certainly alive."""
        return self._remaining_s(self._beat_at_s + LIFE * self.status.timeout_s)

    def _apply(
        self, event: SessionEvent, session_id: int = 0, timeout_s: float = 0.0
    ) -> None:
        session_version = self.status.session_version
        status = self._tracker.apply(event, session_id, timeout_s)
        if status is None:
            return
        assert self._loop is not None
        for callback in tuple(self._listeners):
            # One callback's failure must not keep the others from being called.
            self._loop.call_soon(callback, status)
        if status.session_version != session_version:
            self._beat_at_s = self._clock.monotonic_s()
        is_connected = status.state is SessionState.CONNECTED
        if is_connected:
            for watch in tuple(self._watches):
                watch.refresh()
        if not self._is_stopped:
            self._schedule_check(0.0 if is_connected else self._revive_delay_s)

    def _check_client(self) -> None:
        """Ask whether the session lives; replace a client beyond hope."""
        state = self.status.state
        is_dead = self._client.client_state in DEAD_CLIENT_STATES
        if state is not SessionState.LOST and self._life_left_s() <= 0:
            self._replace("its session may have expired")
        elif state is SessionState.CONNECTED:
            self._beat()
            self._schedule_check(BEAT * self.status.timeout_s)
        elif is_dead:
            self._replace("it died")
        else:
            self._schedule_check(self._revive_delay_s)

    def _replace(self, reason: str) -> None:
        _log.warning("zookeeper client replaced, %s: hosts=%s", reason, self._hosts)
        assert self._loop is not None
        close, self._close = self._close, close_nothing
        self._client = make_client(self._hosts, self._session_timeout_s)
        self._client_version += 1
        self._is_beating = False
        self._apply(SessionEvent.EXPIRED)
        # After the listeners: what is theirs may go to others with the session.
        patience_s = self.status.timeout_s or self._session_timeout_s
        self._loop.call_soon(close, CloseOrder(lambda: None, patience_s))
        self._begin()
        self._schedule_check(self._revive_delay_s)

    def _beat(self) -> None:
        if self._is_beating:
            return
        self._is_beating = True
        client_version, sent_s = self._client_version, self._clock.monotonic_s()

        def post_answer(result: Any) -> None:
            is_answered = result.exception is None
            self._post(self._on_beat, client_version, sent_s, is_answered)

        self._client.exists_async("/").rawlink(post_answer)

    def _on_beat(self, client_version: int, sent_s: float, is_answered: bool) -> None:
        if client_version != self._client_version:
            return
        self._is_beating = False
        if is_answered:
            self._beat_at_s = max(self._beat_at_s, sent_s)

    async def stop(self, *, deadline_s: float) -> None:
        """Close the session, which removes its ephemeral nodes; never raises."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._loop is None:
            return
        if self._check is not None:
            self._check.cancel()
        for watch in tuple(self._watches):
            watch.cancel()
        closed = asyncio.Event()
        self._close(CloseOrder(lambda: self._post(closed.set), 0.0))
        if not await wait_set(closed, self._remaining_s(deadline_s)):
            _log.warning("zookeeper session not closed in time, it will expire")
        self._apply(SessionEvent.EXPIRED)

    # -- requests ---------------------------------------------------------------------

    def _remaining_s(self, deadline_s: float) -> float:
        return deadline_s - self._clock.monotonic_s()

    async def _ask(
        self,
        what: str,
        path: str,
        request: Callable[[], Any],
        convert: Callable[[Any], T],
        deadline_s: float,
    ) -> T:
        """Send one request and wait for its answer as a value of ours."""
        require_legal_path(path)
        self.status.require_connected()
        assert self._loop is not None
        what = f"{what} {path}"
        remaining_s = self._remaining_s(deadline_s)
        if remaining_s <= 0:
            raise CoordinationTimeoutError(f"{what}: no time left, not asked")
        answer: asyncio.Future[T] = self._loop.create_future()

        def resolve(value: T | None, error: CoordinationError | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]  # set iff no error

        def post_answer(result: Any) -> None:
            if result.exception is not None:
                self._post(resolve, None, _map_error(result.exception, what))
            else:
                self._post(resolve, convert(result.value), None)

        late = CoordinationTimeoutError(f"{what}: no answer in time")
        timer = self._loop.call_later(remaining_s, resolve, None, late)
        try:
            request().rawlink(post_answer)
            return await answer
        except kz.KazooException as error:
            raise _map_error(error, what) from error
        finally:
            timer.cancel()

    async def sync(self, path: str, *, deadline_s: float) -> None:
        """Wait until the server that answers us has all that was changed before."""
        request = partial(self._client.sync_async, path)
        await self._ask("sync", path, request, bool, deadline_s)

    async def get(self, path: str, *, deadline_s: float) -> Node | None:
        """Return a node, or None when there is none."""
        request = partial(self._client.get_async, path)
        try:
            return await self._ask("get", path, request, _node, deadline_s)
        except NoNodeError:
            return None

    async def exists(self, path: str, *, deadline_s: float) -> bool:
        """Return whether a node exists."""
        request = partial(self._client.exists_async, path)
        return await self._ask("exists", path, request, bool, deadline_s)

    async def children(self, path: str, *, deadline_s: float) -> tuple[str, ...]:
        """Return the sorted names of a node's children; () also without the node."""
        request = partial(self._client.get_children_async, path)
        try:
            return await self._ask("children", path, request, _names, deadline_s)
        except NoNodeError:
            return ()

    async def create_ephemeral(
        self, path: str, data: bytes, *, deadline_s: float
    ) -> None:
        """Create a node that lives as long as this session; parents as needed."""
        try:
            await self._create(path, data, deadline_s, ephemeral=True)
        except NoNodeError as error:
            # kazoo makes parents, and of the root itself no more than the last step.
            root = self._client.chroot
            if not root:
                raise
            text = f"{error}; create {root} of zk.zkConnect first"
            raise NoNodeError(text) from error

    async def set_or_create(self, path: str, data: bytes, *, deadline_s: float) -> None:
        """Write a persistent node, creating it and its parents as needed."""
        set_it = partial(self._client.set_async, path, data)
        for _ in range(SET_OR_CREATE_TRIES):
            with suppress(NoNodeError):
                await self._ask("set", path, set_it, bool, deadline_s)
                return
            with suppress(NodeExistsError):
                await self._create(path, data, deadline_s)
                return
        raise CoordinationError(
            f"set {path}: created and deleted by others, {SET_OR_CREATE_TRIES} times"
        )

    async def _create(
        self, path: str, data: bytes, deadline_s: float, *, ephemeral: bool = False
    ) -> None:
        """Create a node, and what is missing above it."""
        create = partial(self._client.create_async, path, data, ephemeral=ephemeral)
        with suppress(NoNodeError):
            await self._ask("create", path, create, bool, deadline_s)
            return
        # Kazoo would look at all parents first, and nearly always one is missing.
        if parent := path.rpartition("/")[0]:
            make_parent = partial(self._client.create_async, parent)
            with suppress(NoNodeError, NodeExistsError):
                await self._ask("create", parent, make_parent, bool, deadline_s)
        make_all = partial(create, makepath=True)
        await self._ask("create", path, make_all, bool, deadline_s)

    async def replace(
        self, path: str, data: bytes, *, version: int | None, deadline_s: float
    ) -> None:
        """Write a persistent node, unless it was changed since it was read."""
        if version is None:
            request = partial(self._client.create_async, path, data, makepath=True)
        else:
            request = partial(self._client.set_async, path, data, version)
        try:
            await self._ask("replace", path, request, bool, deadline_s)
        except (NodeExistsError, NoNodeError) as error:
            raise NodeChangedError(f"{error}, expected version {version}") from error

    async def delete(
        self, path: str, *, version: int | None = None, deadline_s: float
    ) -> bool:
        """Delete a node; False when there was none."""
        number = ANY_VERSION if version is None else version
        request = partial(self._client.delete_async, path, number)
        try:
            await self._ask("delete", path, request, bool, deadline_s)
        except NoNodeError:
            return False
        return True

    async def transact(
        self, operations: Sequence[Operation], *, deadline_s: float
    ) -> tuple[int, ...]:
        """Carry out all operations or none, in one request and one write to disk."""
        if not operations:
            return ()
        for operation in operations:
            require_legal_path(operation.path)

        def request() -> Any:
            transaction = self._client.transaction()
            for operation in operations:
                _add_operation(transaction, operation)
            return transaction.commit_async()

        path = operations[0].path
        results = await self._ask("transact", path, request, tuple, deadline_s)
        _raise_unfit(operations, results)
        return tuple(map(_version_after, operations, results))

    # -- watches ----------------------------------------------------------------------

    def watch_children(self, path: str, callback: ChildrenCallback) -> Cancel:
        """Call `callback` on the loop with the node's children, now and on change."""
        return self._watch("get_children_async", path, _names, callback)

    def watch_data(self, path: str, callback: DataCallback) -> Cancel:
        """Call `callback` on the loop with the node's payload, now and on change."""
        return self._watch("get_async", path, lambda v: _node(v).data, callback)

    def _watch(
        self,
        method: str,
        path: str,
        convert: Callable[[Any], T],
        callback: Callable[[T | None], None],
    ) -> Cancel:
        require_legal_path(path)

        def post_fired(event: Any) -> None:
            # A connection that breaks fires all watches; the next one reads them all.
            if event.type != EventType.NONE:
                self._post(watch.refresh)

        async def read_now() -> T | None:
            deadline_s = self._clock.monotonic_s() + WATCH_TIMEOUT_S
            # Reading a missing node sets no watch, asking for its existence does; it
            # may come to life between the two, hence the loop.
            while True:
                reading = getattr(self._client, method)
                request = partial(reading, path, watch=post_fired)
                with suppress(NoNodeError):
                    return await self._ask("watch", path, request, convert, deadline_s)
                request = partial(self._client.exists_async, path, watch=post_fired)
                if not await self._ask("watch", path, request, bool, deadline_s):
                    return None

        async def read() -> T | None:
            async with self._watch_reads:
                return await read_now()

        def cancel() -> None:
            self._watches.discard(watch)
            watch.cancel()

        watch = Watch(path, read, callback)
        self._watches.add(watch)
        watch.refresh()
        return cancel
