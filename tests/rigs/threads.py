"""A system that refuses to start threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def refused_threads(is_refused: Callable[[threading.Thread], bool]) -> Iterator[None]:
    """Refuse to start threads for which `is_refused` is true, during the block."""
    start = threading.Thread.start

    def start_if_there_is_room(thread: threading.Thread) -> None:
        if is_refused(thread):
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", start_if_there_is_room):
        yield
