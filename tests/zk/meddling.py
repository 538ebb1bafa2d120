"""A ZooKeeper in memory on which something happens between a request and its answer."""

from collections.abc import Awaitable, Callable
from typing import Any

from metaq.clock import Clock
from metaq.testing.zk import MemoryZooKeeper

Meddle = Callable[[Any], Awaitable[None]]
"""Called with the path of a request; of a transaction, with its operations."""

MEDDLED = frozenset({"get", "children", "replace", "transact"})
"""Requests that can be meddled with."""

WATCHES = frozenset({"watch_data", "watch_children"})


class MeddledZooKeeper(MemoryZooKeeper):
    """The server; what a test sets happens on each request until it takes it back."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Meddle] = {}
        """By the request's name; before it is carried out."""
        self.after: dict[str, Meddle] = {}
        """Likewise, before its answer comes."""
        self.is_barred: Callable[[str], bool] = lambda _path: False
        """Tells which paths no client may watch."""

    def coordinator(self, clock: Clock) -> Any:
        return _Meddled(self, super().coordinator(clock))


class _Meddled:
    def __init__(self, server: MeddledZooKeeper, inner: Any) -> None:
        self._server = server
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name in WATCHES:
            return lambda path, *words: (
                (lambda: None) if self._server.is_barred(path) else real(path, *words)
            )
        if name not in MEDDLED:
            return real

        async def call(path: str, *words: Any, **named: Any) -> Any:
            if name in self._server.before:
                await self._server.before[name](path)
            answer = await real(path, *words, **named)
            if name in self._server.after:
                await self._server.after[name](path)
            return answer

        return call
