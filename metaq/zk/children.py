"""The children of a node with their payloads: read once, or watched.

Theory of operation: ZooKeeper can watch a list of names and a payload, but not a list
of payloads. `ValuesWatch` puts one watch on the list and one on each wanted child, so
that it sees a payload that is replaced, in place or by deleting and creating the child,
as well as a child that is created or deleted. Changes made together arrive one by one;
`Settler` waits for a moment and until every wanted child was read.

Children that disappear between the list and the read are left out. So are children with
an unreadable payload, which are logged, once for each payload.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from metaq.model import printable
from metaq.zk.errors import PayloadError
from metaq.zk.session import Cancel, ChildrenCallback, Coordinator, SessionState

_log = logging.getLogger(__name__)

READS_AT_ONCE: Final = 64
SETTLE_S: Final = 0.02
"""Delay after the first change of a burst, to collect the others, in seconds."""
INCOMPLETE_S_MAX: Final = 5.0
"""Time after which partial results are used: a node may never become readable."""

T = TypeVar("T")


async def read_values(
    coordinator: Coordinator,
    path: str,
    decode: Callable[[bytes], T],
    *,
    deadline_s: float,
) -> dict[str, T]:
    """Return name → value of a node's children, names ascending; {} without the node.

    `decode` may raise PayloadError; the deadline is for all reads together.

    Raises:
        CoordinationError: ZooKeeper could not be read; see `Coordinator`.
    """
    names = await coordinator.children(path, deadline_s=deadline_s)
    get = partial(coordinator.get, deadline_s=deadline_s)
    values = {}
    for name, node in await in_batches(lambda name: get(f"{path}/{name}"), names):
        if node is not None:
            value = _value_of(f"{path}/{name}", node.data, decode)
            if value is not None:
                values[name] = value
    return values


def _value_of(path: str, data: bytes, decode: Callable[[bytes], T]) -> T | None:
    """Return the value of a child; None if it cannot be decoded, which is logged."""
    try:
        return decode(data)
    except PayloadError as error:
        _log.warning("node left out: path=%s error=%s", printable(path), error)
        return None


async def in_batches(
    ask: Callable[[str], Awaitable[T]], names: Sequence[str]
) -> list[tuple[str, T]]:
    """Return each name with the result of `ask`; READS_AT_ONCE run concurrently."""
    found: list[tuple[str, T]] = []
    for start in range(0, len(names), READS_AT_ONCE):
        batch = names[start : start + READS_AT_ONCE]
        found += zip(batch, await asyncio.gather(*map(ask, batch)), strict=True)
    return found


class ValuesWatch(Generic[T]):
    """The values of a node's children, kept current. Owned by one loop.

    The last values stay while ZooKeeper is unreachable.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        path: str,
        decode: Callable[[bytes], T],
        on_change: Callable[[], None],
        *,
        wants: Callable[[str], bool] = bool,
    ) -> None:
        """Start to watch the children of `path`, which need not exist.

        `decode` may raise PayloadError; `on_change` is called on the loop after each
        change; `wants` returns whether to read the child of a name.

        Raises:
            NodeNameError: ZooKeeper does not accept the path.
        """
        self._coordinator = coordinator
        self._path = path
        self._decode = decode
        self._on_change = on_change
        self._wants = wants
        self._values: dict[str, T | None] = {}
        self._children: dict[str, Cancel] = {}
        self.has_names = False
        """Whether the list of children was read at least once."""
        self._cancel = coordinator.watch_children(path, self._on_names)

    @property
    def is_complete(self) -> bool:
        """Whether every wanted child was read."""
        return self.has_names and self._children.keys() == self._values.keys()

    @property
    def values(self) -> dict[str, T]:
        """Name → value of every existing and readable child, names ascending."""
        return {
            name: value
            for name, value in sorted(self._values.items())
            if value is not None
        }

    def cancel(self) -> None:
        """End the watch; no callback is called any more. May be repeated."""
        self._cancel()
        for cancel in self._children.values():
            cancel()

    def _on_names(self, names: tuple[str, ...] | None) -> None:
        self.has_names = True
        wanted = set(filter(self._wants, names or ()))
        for name in self._children.keys() - wanted:
            self._children.pop(name)()
            self._values.pop(name, None)
        for name in sorted(wanted - self._children.keys()):
            self._children[name] = self._coordinator.watch_data(
                f"{self._path}/{name}", partial(self._on_data, name)
            )
        self._on_change()

    def _on_data(self, name: str, data: bytes | None) -> None:
        path = f"{self._path}/{name}"
        value = None if data is None else _value_of(path, data, self._decode)
        self._values[name] = value
        self._on_change()


class ChildrenOfEach:
    """The names of the children of several nodes, kept current. Owned by one loop."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """Watch no node yet; `on_change` is called on the loop after each change."""
        self.children: dict[str, tuple[str, ...]] = {}
        """Key of a node → its children; without nodes that have none."""
        self._on_change = on_change
        self._watches: dict[str, Cancel] = {}

    def follow(
        self,
        paths: Mapping[str, str],
        watch: Callable[[str, ChildrenCallback], Cancel],
    ) -> None:
        """Watch these nodes, by key, and no others; they need not exist."""
        for key in self._watches.keys() - paths.keys():
            self._watches.pop(key)()
            self.children.pop(key, None)
        for key in paths.keys() - self._watches.keys():
            self._watches[key] = watch(paths[key], partial(self._on_names, key))

    def cancel(self) -> None:
        """End all watches; no callback is called any more. May be repeated."""
        for cancel in self._watches.values():
            cancel()

    def _on_names(self, key: str, names: tuple[str, ...] | None) -> None:
        self.children.pop(key, None)
        if names:
            self.children[key] = names
        self._on_change()


class Settler:
    """Reports a burst of changes once, at its end. Owned by one loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        is_complete: Callable[[], bool],
        publish: Callable[[], None],
    ) -> None:
        """Create a settler; `publish` is called on the loop once for each burst.

        `is_complete` returns whether every known node was read.
        """
        self._coordinator = coordinator
        self._is_complete = is_complete
        self._publish = publish
        self._settling: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None

    def note(self) -> None:
        """Record a change."""
        loop = asyncio.get_running_loop()
        if self._settling is None:
            self._settling = loop.call_later(SETTLE_S, self._on_settled)
        if self._patience is None:
            self._patience = loop.call_later(INCOMPLETE_S_MAX, self._on_impatient)

    def cancel(self) -> None:
        """Drop the current burst. May be repeated."""
        for timer in (self._settling, self._patience):
            if timer is not None:
                timer.cancel()
        self._settling = self._patience = None

    def _on_settled(self) -> None:
        self._settling = None
        # If a child has not been read yet, its read records another change.
        if self._is_complete():
            self._end()

    def _on_impatient(self) -> None:
        if self._coordinator.status.state is SessionState.CONNECTED:
            self._end()
        else:
            # Keep waiting for the missing children: ZooKeeper cannot be read now.
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(INCOMPLETE_S_MAX, self._on_impatient)

    def _end(self) -> None:
        self.cancel()
        self._publish()
