"""A system that has no room for another thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def refused_threads(is_refused: Callable[[threading.Thread], bool]) -> Iterator[None]:
    """Begin no thread inside the block for which `is_refused` says so."""
    start = threading.Thread.start

    def start_if_there_is_room(thread: threading.Thread) -> None:
        if is_refused(thread):
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", start_if_there_is_room):
        yield
