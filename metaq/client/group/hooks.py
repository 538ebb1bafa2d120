"""A consumer's hooks: functions of the user, called for changes of its assignment.

Theory of operation. Each call is a task, and a lock lets them run one at a time, in the
order of events. A rebalance waits for `on_revoked` only. In the async world a hook runs
on the loop; in the sync world the loop passes it to a thread that reads or closes the
consumer (`sync/thread_calls.py`), and does not block.

    assigned   held --> on_assigned returned --> handed out
    revoked    message being handled is back --> on_revoked --> last commit --> release
    lost       dropped --> on_lost

A partition is known to the user from the beginning of its `on_assigned` call, or, if
there is no such hook, from its assignment.

    Invariant: a known partition ends with one `on_revoked` that returned or raised
    while the partition was still owned; without that, with one `on_lost`.
    Invariant: no hook is called for a partition that is lost before it is known.
    Invariant: no message of a partition is handed out before its `on_assigned`
    returned.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from metaq.client.names import name_some
from metaq.client.options import HOOKS, ConsumerOptions, Hook
from metaq.errors import ClientError, ConfigError, MetaqError, OwnershipLostError
from metaq.model import TopicPartition

_log = logging.getLogger(__name__)

Caller: TypeAlias = Callable[[Callable[[], object]], Awaitable[object]]
"""Runs a function on a thread of the user, and waits for its result."""

Partitions = frozenset[TopicPartition]


@dataclass(slots=True, eq=False)
class HookCall:
    """One call of a hook."""

    hooks: "Hooks"
    name: str
    partitions: Partitions
    has_begun: bool = False
    is_active: bool = False
    """Whether the user's function is running."""
    has_returned: bool = False
    is_ours: bool = True
    """Whether offsets of its partitions may still be committed."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Set `is_active`, and the current call, inside the block."""
        token, self.is_active = _inside.set(self), True
        try:
            yield
        finally:
            self.is_active = False
            _inside.reset(token)


_inside: ContextVar[HookCall | None] = ContextVar("metaq_hook", default=None)
"""The hook call in which this task or thread runs. Tasks created there inherit it, and
may outlive the call."""


def _call_inside(hooks: "Hooks") -> HookCall | None:
    call = _inside.get()
    is_inside = call is not None and call.is_active and call.hooks is hooks
    return call if is_inside else None


def refuse_inside(hooks: "Hooks", what: str) -> None:
    """Raise ClientError inside one of these hooks, for which `what` would wait."""
    call = _call_inside(hooks)
    if call is not None:
        raise ClientError(
            f"{what}: not possible in {call.name}, because it waits for {call.name} to"
            " end"
        )


def commits_inside(hooks: "Hooks") -> bool:
    """Return whether the caller runs in one of these hooks.

    Raises:
        OwnershipLostError: the partitions of that call are lost.
    """
    call = _call_inside(hooks)
    if call is not None and not call.is_ours:
        raise OwnershipLostError(
            f"{name_some(call.partitions)}: lost, nothing can be committed in"
            f" {call.name}; what is not committed will be delivered again"
        )
    return call is not None


class Hooks:
    """Calls the hooks of one consumer, which owns it. Concurrency: its event loop."""

    def __init__(
        self,
        consumer: object,
        options: ConsumerOptions,
        *,
        on_ready: Callable[[Collection[TopicPartition]], None],
        on_failed: Callable[[MetaqError], None],
    ) -> None:
        """Create it without partitions.

        Args:
            consumer: first argument of the hooks; error messages begin with its text.
            options: options with the hooks.
            on_ready: called with partitions that may be handed out.
            on_failed: called with the error of a hook that raised.
        """
        self._consumer = consumer
        self._hooks: dict[str, Hook | None] = {n: getattr(options, n) for n in HOOKS}
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._caller: Caller | None = None
        self.held: set[TopicPartition] = set()
        """Partitions whose `on_assigned` has not returned."""
        self._known: set[TopicPartition] = set()
        """Partitions that are known to the user."""
        self._turn = asyncio.Lock()
        self._calls: dict[asyncio.Task[None], HookCall] = {}
        """Calls that have not ended, in order."""
        self.error: ClientError | None = None
        """Error of the first hook call that raised."""

    @property
    def are_set(self) -> bool:
        """Whether the user set at least one hook."""
        return any(self._hooks.values())

    def waiting_for(self) -> list[str]:
        """Return the `on_assigned` for which messages are held, or an empty list."""
        return [f"on_assigned of {name_some(self.held)}"] if self.held else []

    def call_in_threads(self, consumer: object, caller: Caller) -> None:
        """Call hooks through `caller`, with the consumer of the sync world."""
        self._consumer, self._caller = consumer, caller

    # -- events -----------------------------------------------------------------------

    def begin(self, partition: TopicPartition) -> None:
        """Add a newly assigned partition; call `announce` next."""
        is_held = self._hooks["on_assigned"] is not None
        (self.held if is_held else self._known).add(partition)

    def announce(self, partitions: Collection[TopicPartition]) -> None:
        """Schedule `on_assigned` for the partitions of one assignment."""
        fresh = self.held.intersection(partitions)
        last = next(reversed(self._calls.values()), None)
        if last is not None and last.name == "on_assigned" and not last.has_begun:
            last.partitions |= fresh
        elif fresh:
            self._spawn(HookCall(self, "on_assigned", frozenset(fresh)))

    async def revoke(self, partitions: Partitions, *, timeout_s: float) -> bool:
        """Call `on_revoked`, and wait until it ends, for at most `timeout_s` seconds.

        Returns:
            Whether the last commit may follow. False if the hook raised, or did not
            return in time; then it is cancelled, except on a thread, and `on_lost`
            follows.

        Cancellation: the hook continues; another `revoke` of the same partitions waits
        for it.
        """
        self.held -= partitions
        if self._hooks["on_revoked"] is None:
            self._known -= partitions
        rest = self._known & partitions
        waiting: dict[asyncio.Task[None], HookCall] = {}
        for task, call in self._calls.items():
            if call.name == "on_revoked" and call.partitions & rest:
                waiting[task] = call
                rest -= call.partitions
        if rest and timeout_s > 0:
            call = HookCall(self, "on_revoked", frozenset(rest))
            waiting[self._spawn(call)] = call
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        late = self._known & partitions
        if late:
            text = "on_revoked has not ended within its time, partitions go: %s %s"
            _log.error(text, self._consumer, name_some(late))
            self.lose(late)
        return not late and all(call.has_returned for call in waiting.values())

    def lose(self, partitions: Collection[TopicPartition]) -> None:
        """End other calls for lost partitions, which others may own; call `on_lost`."""
        gone = self._known.intersection(partitions)
        self.held.difference_update(partitions)
        self._known -= gone
        for task, call in self._calls.items():
            is_over = call.has_begun and call.partitions <= gone
            if is_over or (call.name == "on_revoked" and call.partitions & gone):
                call.is_ours = False
                task.cancel()
        if gone and self._hooks["on_lost"] is not None:
            self._spawn(HookCall(self, "on_lost", frozenset(gone), is_ours=False))

    async def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the last calls, then cancel them."""
        if self._calls:
            await asyncio.wait(tuple(self._calls), timeout=timeout_s)
        for task, call in self._calls.items():
            if task.cancel():
                text = "%s has not ended before the consumer did: %s partitions=%s"
                _log.error(text, call.name, self._consumer, name_some(call.partitions))

    # -- calls ------------------------------------------------------------------------

    def _spawn(self, call: HookCall) -> asyncio.Task[None]:
        task = asyncio.create_task(self._call(call), name=call.name)
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)
        return task

    async def _call(self, call: HookCall) -> None:
        async with self._turn:
            if call.name == "on_assigned":
                call.partitions &= self.held - self._known
                self._known |= call.partitions
            call.has_begun = True
            if not call.partitions:
                return
            try:
                await self._run(call)
                call.has_returned = True
            except Exception as error:  # noqa: BLE001  # all that users raise
                self._fail(call, error)
            if call.name == "on_revoked" and call.is_ours:
                self._known -= call.partitions
            elif call.name == "on_assigned" and call.has_returned:
                # Partitions lost since are not known; if assigned again, they are held.
                ready = call.partitions & self.held & self._known
                self.held -= ready
                self._on_ready(ready)

    async def _run(self, call: HookCall) -> None:
        hook = self._hooks[call.name]
        assert hook is not None
        run = partial(hook, self._consumer, call.partitions)
        if self._caller is not None:
            result = await self._caller(call.entered()(run))
            if inspect.iscoroutine(result):
                result.close()
                raise ConfigError("it returned a coroutine, which is not awaited here")
            return
        with call.entered():
            result = run()
            if inspect.isawaitable(result):
                await result

    def _fail(self, call: HookCall, error: Exception) -> None:
        names = name_some(call.partitions)
        text = "%s raised: %s partitions=%s"
        _log.error(text, call.name, self._consumer, names, exc_info=error)
        # Ignore a hook that fails because its partitions were lost while it ran.
        if call.is_ours or call.name == "on_lost":
            failure = ClientError(f"{self._consumer}: {call.name} raised {error!r}")
            failure.__cause__ = error
            self.error = self.error or failure
            self._on_failed(failure)
