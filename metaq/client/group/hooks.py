"""A consumer's hooks: functions of the user, called when partitions come and go.

Theory of operation. Each call is a task, and all wait for one turn: hooks are called
one at a time, in the order of events. `on_revoked` is the only one that a rebalance
waits for. In the async world a hook runs on the loop; in the sync world the loop hands
it to a thread that reads or closes the consumer (`sync/thread_calls.py`) and goes on.

    assigned   held back --> on_assigned returned --> handed out
    revoked    message being handled is back --> on_revoked --> last commit --> release
    lost       dropped --> on_lost

    Invariant: a partition that the user knows ends with one `on_revoked` that returned
    or raised while it was ours; or, if there was none, with one `on_lost`.
    Invariant: what goes before its `on_assigned` began is not mentioned to the user.
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
"""Has a thread call a function, and waits for its result."""

Partitions = frozenset[TopicPartition]


@dataclass(slots=True, eq=False)
class HookCall:
    """One call of a hook."""

    hooks: "Hooks"
    name: str
    partitions: Partitions
    has_begun: bool = False
    is_active: bool = False
    """Whether the user's function runs."""
    has_returned: bool = False
    is_ours: bool = True
    """Whether offsets of these partitions may still be committed."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Mark the time of the block as that of the user's function."""
        token, self.is_active = _inside.set(self), True
        try:
            yield
        finally:
            self.is_active = False
            _inside.reset(token)


_inside: ContextVar[HookCall | None] = ContextVar("metaq_hook", default=None)
"""The call that this task or thread is in. Requests made there inherit it, and so do
tasks, which may outlive it."""


def _call_inside(hooks: "Hooks") -> HookCall | None:
    call = _inside.get()
    is_inside = call is not None and call.is_active and call.hooks is hooks
    return call if is_inside else None


def refuse_inside(hooks: "Hooks", what: str) -> None:
    """Raise ClientError in one of these hooks, which such a call would wait for."""
    call = _call_inside(hooks)
    if call is not None:
        raise ClientError(
            f"{what}: not possible in {call.name}, because it waits for {call.name} to"
            " end"
        )


def commits_inside(hooks: "Hooks") -> bool:
    """Return whether this commit is made in one of these hooks.

    Raises:
        OwnershipLostError: in one whose partitions are not ours any more.
    """
    call = _call_inside(hooks)
    if call is not None and not call.is_ours:
        raise OwnershipLostError(
            f"{name_some(call.partitions)}: lost, nothing can be committed in"
            f" {call.name}; what is not committed will be delivered again"
        )
    return call is not None


class Hooks:
    """The hooks of one consumer. Owner: the consumer. Concurrency: its event loop."""

    def __init__(
        self,
        consumer: object,
        options: ConsumerOptions,
        *,
        on_ready: Callable[[Collection[TopicPartition]], None],
        on_failed: Callable[[MetaqError], None],
    ) -> None:
        """Begin without partitions.

        Args:
            consumer: first argument of the hooks; its text begins errors.
            options: have the hooks.
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
        """Partitions that the user knows to be ours."""
        self._turn = asyncio.Lock()
        self._calls: dict[asyncio.Task[None], HookCall] = {}
        """Calls that have not ended, in order."""
        self.error: ClientError | None = None
        """Error of the first hook that raised."""

    @property
    def are_set(self) -> bool:
        """Whether there is any hook."""
        return any(self._hooks.values())

    def waiting_for(self) -> list[str]:
        """Return which hook keeps messages from being handed out, if one does."""
        return [f"on_assigned of {name_some(self.held)}"] if self.held else []

    def call_in_threads(self, consumer: object, caller: Caller) -> None:
        """Have hooks called by threads, with the consumer of the sync world."""
        self._consumer, self._caller = consumer, caller

    # -- events -----------------------------------------------------------------------

    def begin(self, partition: TopicPartition) -> None:
        """Note a partition that will be announced."""
        is_held = self._hooks["on_assigned"] is not None
        (self.held if is_held else self._known).add(partition)

    def announce(self, partitions: Collection[TopicPartition]) -> None:
        """Have `on_assigned` called with the partitions of one assignment."""
        fresh = self.held.intersection(partitions)
        last = next(reversed(self._calls.values()), None)
        if last is not None and last.name == "on_assigned" and not last.has_begun:
            last.partitions |= fresh
        elif fresh:
            self._spawn(HookCall(self, "on_assigned", frozenset(fresh)))

    async def revoke(self, partitions: Partitions, *, timeout_s: float) -> bool:
        """Have `on_revoked` called; wait for its end, at most so long.

        Returns:
            Whether the last commit may follow. False when it raised, or has not
            returned in time: then it is cancelled, if it is not in a thread, and
            `on_lost` follows.

        Cancellation: the hook goes on; another `revoke` of the same partitions waits
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
        """Have `on_lost` called: the partitions may be another member's already."""
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
        """Wait for the last calls, at most so long; then cancel them."""
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
                # Those that were lost since are not known, and may be held again.
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
        # A hook may well fail because its partitions went while it ran.
        if call.is_ours or call.name == "on_lost":
            failure = ClientError(f"{self._consumer}: {call.name} raised {error!r}")
            failure.__cause__ = error
            self.error = self.error or failure
            self._on_failed(failure)
