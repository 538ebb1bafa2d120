"""Sync forms of async methods, derived where they only forward their arguments.

    class Transaction(SyncPart[AsyncTransaction]):
        commit = blocking(AsyncTransaction.commit)

`Transaction.commit` has the arguments, types, defaults and docstring of the async
method, for type checkers, editors and `help`, and returns the result of its coroutine.
Methods that do more on the caller's thread are written out.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Coroutine
from operator import attrgetter
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

from metaq.client.options import names_arguments, no_option, with_signature
from metaq.client.own_process import OfOneProcess
from metaq.client.timeouts import Closable
from metaq.loop_thread import LoopThread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
C_co = TypeVar("C_co", bound=Closable, covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_CLOSED: Final = "ClosedError: the client is closed."

SYNC_WORDS: Final = {
    "`Async": "`",
    "Messages of one task": "Messages of one thread",
    # Calls that never wait may be made on any thread.
    "ClosedError: it belongs to another event loop.": _CLOSED,
    "ClosedError: the producer is of another event loop.": _CLOSED,
    "Cancellation:": "Interrupt:",
    "`async with`": "`with`",
    "another task is reading": "another thread is reading",
    "belongs to another event loop": "is called on its own thread",
    "of another event loop": "called on its own thread",
}
"""Words in docstrings of async methods → their replacement for blocking calls."""


class SyncObject(OfOneProcess, Generic[T_co]):
    """An object for any thread; its async twin runs on a loop thread."""

    _twin: T_co

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in vars(cls).items():
            if inspect.isfunction(value) and hasattr(value, "__wrapped__"):
                value.__module__, value.__name__ = cls.__module__, name
                value.__qualname__ = f"{cls.__qualname__}.{name}"

    def _require_thread(self) -> LoopThread:
        """Return the twin's loop thread; raise ClosedError if there is none."""
        raise NotImplementedError


class SyncPart(SyncObject[T_co]):
    """An object created by a started client."""

    def __init__(self, twin: T_co, thread: LoopThread) -> None:
        """Wrap the async twin; use a method of the client to create one."""
        self._twin = twin
        self._thread = thread

    def _require_thread(self) -> LoopThread:
        return self._thread

    def __repr__(self) -> str:
        return self._thread.describe(self._twin)


class SyncClosable(SyncPart[C_co]):
    """An object that is closed at the end of its `with` block."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or could not be started."""
        self._thread.require_own()
        return self._twin.is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._thread.run_close(self._twin.close())


def like(
    method: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a written-out method with the signature and docstring of its async twin.

    An unknown keyword raises a TypeError that suggests the nearest one.
    """

    def decorate(function: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        full = _with_result(method, function)
        return with_signature(function, full, _sync_text(method))

    return decorate


def like_in_place(
    method: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a method as `like` does, but without another call around it.

    For methods that a program calls for each message, and for those that handle Ctrl-C:
    it would not be handled at the end of that call. The latter take `**unknown`
    keywords, for which they raise `unknown_option`.
    """

    def decorate(function: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        vars(function)["__signature__"] = _with_result(method, function)
        function.__doc__ = _sync_text(method)
        return function

    return decorate


def unknown_option(
    method: Callable[..., object], unknown: Collection[str]
) -> TypeError:
    """Return the error for unknown keywords of a method, with the nearest name."""
    names = [*inspect.signature(method).parameters][1:]
    return no_option(method.__qualname__, next(iter(unknown)), names)


def _with_result(
    method: Callable[..., object], function: Callable[..., object]
) -> inspect.Signature:
    """Return the signature of a method, with the result of a function."""
    result = inspect.signature(function).return_annotation
    return inspect.signature(method).replace(return_annotation=result)


def same(name: str, text: str) -> Any:
    """Return a property with the value of the twin's attribute; `text` is its help."""
    return property(attrgetter(f"_twin.{name}"), doc=text)


def blocking(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncObject[T], P], R]:
    """Return the sync form of a coroutine method: it waits for the result."""

    def call(self: SyncObject[T], /, *args: P.args, **keywords: P.kwargs) -> R:
        thread = self._require_thread()
        return thread.run(method(self._twin, *args, **keywords))

    return _named_like(method, call)


def closing(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[SyncPart[T], P], None]:
    """Return the sync form of a `close`; it does nothing if the client is closed."""

    def call(self: SyncPart[T], /, *args: P.args, **keywords: P.kwargs) -> None:
        self._thread.run_close(method(self._twin, *args, **keywords))

    return _named_like(method, call)


def direct(
    method: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[SyncPart[T], P], R]:
    """Return the sync form of a method that never waits and is safe on any thread."""

    def call(self: SyncPart[T], /, *args: P.args, **keywords: P.kwargs) -> R:
        self._thread.require_own()
        return method(self._twin, *args, **keywords)

    return _named_like(method, call)


def making(
    method: Callable[Concatenate[T, P], R], part: Callable[[R, LoopThread], S]
) -> Callable[Concatenate[SyncObject[T], P], S]:
    """Return the sync form of a method that creates an object; `part` wraps it."""

    def call(self: SyncObject[T], /, *args: P.args, **keywords: P.kwargs) -> S:
        thread = self._require_thread()
        work = on_loop(method, self._twin, *args, **keywords)
        return part(thread.run(work), thread)

    call.__annotations__["return"] = part
    return like(method)(call)


async def on_loop(make: Callable[P, R], *args: P.args, **keywords: P.kwargs) -> R:
    """Call a function on the loop thread, which runs this coroutine."""
    return make(*args, **keywords)


def _named_like(method: Callable[..., object], call: Callable[P, R]) -> Callable[P, R]:
    named = names_arguments(functools.update_wrapper(call, method))
    named.__doc__ = _sync_text(method)
    return named


def _sync_text(method: Callable[..., object]) -> str:
    """Return the docstring of a method, in words for a blocking call."""
    text = method.__doc__ or ""
    for word, sync_word in SYNC_WORDS.items():
        text = text.replace(word, sync_word)
    return text
