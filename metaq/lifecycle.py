"""Services: things that start in order, own their tasks, and stop in reverse order.

Theory of operation. A service keeps one stack of its parts: services it owns, tasks it
runs, and clean-ups. `stop`, a failed `start` and a failure all unwind this stack in the
same way, so each part is released once, in reverse order.

    new ──start──▶ starting ──started──▶ running ──stop──▶ stopping ──stopped──▶ stopped
                      │                     │                  │
                      └────────fail─────────┴──────fail────────┴──▶ failed

A task that ends with an exception fails its service; a failed service fails its owner.
The failure is logged once, with its traceback, where it happened; the topmost
`on_failure` reacts, nearly always by stopping everything. A failed service still holds
its parts until it is stopped. A failed start is not logged: its parts are released and
the error is raised to the caller.

Invariant: after `stop` has returned, the stack is empty, and no owned task is running
unless a time-out was logged for it.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from metaq.errors import ClosedError

_log = logging.getLogger(__name__)

_GRACE_S: Final = 0.05
"""Least time for each part after the time-out has passed: enough to be cancelled."""


class State(enum.Enum):
    """State of a service."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Event(enum.Enum):
    """Event in the life of a service."""

    START = "start"
    STARTED = "started"
    STOP = "stop"
    STOPPED = "stopped"
    FAIL = "fail"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.NEW, Event.START): State.STARTING,
    (State.NEW, Event.STOP): State.STOPPING,
    (State.STARTING, Event.STARTED): State.RUNNING,
    (State.STARTING, Event.STOP): State.STOPPING,
    (State.STARTING, Event.FAIL): State.FAILED,
    (State.RUNNING, Event.STOP): State.STOPPING,
    (State.RUNNING, Event.FAIL): State.FAILED,
    (State.STOPPING, Event.STOPPED): State.STOPPED,
    (State.STOPPING, Event.FAIL): State.FAILED,
    # The parts of a failed service are released, and it stays failed.
    (State.FAILED, Event.STOP): State.FAILED,
    (State.FAILED, Event.STOPPED): State.FAILED,
    (State.FAILED, Event.FAIL): State.FAILED,
    (State.STOPPED, Event.STOP): State.STOPPED,
}
"""All valid transitions; any other event is a bug of the caller."""


def apply(state: State, event: Event) -> State:
    """Return the state after `event`.

    Raises:
        RuntimeError: The event is not possible in this state.
    """
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise RuntimeError(f"service cannot {event.value} while it is {state.value}")
    return after


@dataclass(slots=True, eq=False)
class _Owned:
    """One entry of the stack."""

    name: str
    release: Callable[[], Awaitable[None]]


class Service:
    """Base of everything that runs: override `on_start`, and `on_stop` if needed.

    Lifecycle: call `start` once, `stop` any number of times, all on one event loop. The
    starter of a service owns it and stops it.
    """

    def __init__(
        self,
        name: str,
        *,
        stop_timeout_s: float,
        on_failure: Callable[["Service", BaseException], None] | None = None,
    ) -> None:
        """Name the service.

        Args:
            name: For logs and task names.
            stop_timeout_s: Longest total time of `stop`, in seconds; after it, each
                remaining part still gets a moment (`_GRACE_S`).
            on_failure: Called once when the running service fails, on the loop; it must
                not block. `start_owned` replaces it with the owner's.
        """
        self.name: Final = name
        self._stop_timeout_s = stop_timeout_s
        self._on_failure = on_failure
        self.state = State.NEW
        """Set by this class only."""
        self.failure: BaseException | None = None
        """The first error that made the service fail; set by this class only."""
        # In start order; a dict, because tasks are removed from the middle.
        self._stack: dict[_Owned, None] = {}
        self._starter: asyncio.Task[None] | None = None
        self._stopper: asyncio.Task[None] | None = None

    # -- for subclasses

    async def on_start(self) -> None:
        """Start the parts of the service, in order, with the three methods below."""

    async def on_stop(self) -> None:
        """Act before the parts are stopped.

        Not called if `on_start` did not complete.
        """

    async def start_owned(self, child: "Service") -> None:
        """Start another service: stopped with this one; its failure fails this one."""
        child._on_failure = self._on_child_failure  # noqa: SLF001  # same class
        self._push(child.name, child.stop)
        await child.start()

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        """Run a task that belongs to this service, and return it.

        Args:
            work: The task's body. It may return at any time; an exception fails the
                service. It is cancelled when the service stops.
            name: For logs, within this service.
        """
        if self.state not in (State.STARTING, State.RUNNING):
            work.close()
            raise ClosedError(f"service {self.name} is {self.state.value}")
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, name=f"{self.name}.{name}")

        async def cancel() -> None:
            task.cancel()
            await asyncio.wait([task])

        owned = self._push(task.get_name(), cancel)

        def on_done(done: asyncio.Task[None]) -> None:
            self._stack.pop(owned, None)
            if not done.cancelled() and (error := done.exception()) is not None:
                self._fail(done.get_name(), error)

        task.add_done_callback(on_done)
        return task

    def on_way_down(self, name: str, release: Callable[[], Awaitable[None]]) -> None:
        """Add a clean-up to the stack; it runs when the service stops."""
        self._push(name, release)

    def _push(self, name: str, release: Callable[[], Awaitable[None]]) -> _Owned:
        owned = _Owned(name, release)
        self._stack[owned] = None
        return owned

    # -- for owners

    async def start(self) -> None:
        """Start the service; if that fails, release everything that was started.

        Raises:
            ClosedError: `stop` was called during the start.
            Exception: Raised by `on_start`, or by a task of this service.

        Cancellation: as a failed start.
        """
        self.state = apply(self.state, Event.START)
        loop = asyncio.get_running_loop()
        starter = loop.create_task(self.on_start(), name=f"{self.name}.start")
        self._starter = starter
        try:
            # wait, not await: a cancelled caller differs from a cancelled start.
            await asyncio.wait([starter])
        except asyncio.CancelledError:
            await self.stop()
            raise
        error = None if starter.cancelled() else starter.exception()
        if error is None and not starter.cancelled() and self.state is State.STARTING:
            self.state = apply(self.state, Event.STARTED)
            return
        if self.state is State.STARTING:
            self.state = apply(self.state, Event.FAIL)
            self.failure = error
        await self.stop()
        if self.failure is not None:
            raise self.failure
        raise ClosedError(f"service {self.name} was stopped while it was starting")

    async def stop(self) -> None:
        """Stop the service and its parts, in reverse order, within the time-out.

        Idempotent, also if called concurrently; safe in every state. A part that fails
        or takes too long is logged, and the other parts are still released. A task of
        the service must not await this call: it would wait for itself.

        Cancellation: the caller stops waiting; the stop continues.
        """
        if self._stopper is None:
            completed = self.state is State.RUNNING or (
                self.state is State.FAILED and self._start_completed()
            )
            self.state = apply(self.state, Event.STOP)
            loop = asyncio.get_running_loop()
            way_down = self._run_way_down(completed=completed)
            self._stopper = loop.create_task(way_down, name=f"{self.name}.stop")
        await asyncio.shield(self._stopper)

    def _start_completed(self) -> bool:
        starter = self._starter
        return (
            starter is not None
            and starter.done()
            and not starter.cancelled()
            and starter.exception() is None
        )

    async def _run_way_down(self, *, completed: bool) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._stop_timeout_s
        starter = self._starter
        if starter is not None and not starter.done():
            starter.cancel()
            await self._release("start", lambda: _ended(starter), deadline_s)
        if completed:
            await self._release("on_stop", self.on_stop, deadline_s)
        while self._stack:
            owned, _ = self._stack.popitem()
            await self._release(owned.name, owned.release, deadline_s)
        self.state = apply(self.state, Event.STOPPED)

    async def _release(
        self, name: str, release: Callable[[], Awaitable[None]], deadline_s: float
    ) -> None:
        grace_s = asyncio.get_running_loop().time() + _GRACE_S
        try:
            async with asyncio.timeout_at(max(deadline_s, grace_s)):
                await release()
        except TimeoutError as error:
            _log.error(
                "stop took too long: service=%s part=%s timeout_s=%s",
                self.name,
                name,
                self._stop_timeout_s,
            )
            # asyncio's error has no text, and owners show the text to users.
            text = f"{name} took longer than {self._stop_timeout_s} s to stop"
            failure = TimeoutError(text)
            failure.__cause__ = error
            self._note_failure(failure)
        except Exception as error:  # noqa: BLE001  # one part must not keep the rest
            _log.exception("stop failed: service=%s part=%s", self.name, name)
            self._note_failure(error)

    # -- failure

    def _on_child_failure(self, child: "Service", error: BaseException) -> None:
        self._fail(child.name, error, is_logged=True)

    def _fail(
        self, part: str, error: BaseException, *, is_logged: bool = False
    ) -> None:
        if not is_logged:
            _log.error(
                "service failed: service=%s part=%s", self.name, part, exc_info=error
            )
        was = self.state
        self._note_failure(error)
        if was is State.STARTING and self._starter is not None:
            self._starter.cancel()
        elif was is State.RUNNING and self._on_failure is not None:
            self._on_failure(self, error)

    def _note_failure(self, error: BaseException) -> None:
        """Record the first failure; a stopped service keeps its state."""
        if self.state is not State.STOPPED:
            self.state = apply(self.state, Event.FAIL)
        if self.failure is None:
            self.failure = error


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])
