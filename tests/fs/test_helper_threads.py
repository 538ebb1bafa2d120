"""Threads that call what may hang: order, bounds, and their end."""

import threading
from concurrent.futures import CancelledError

import pytest

from metaq.fs.helper_threads import HelperThreads
from tests.rigs.threads import refused_threads


@pytest.fixture
def threads():
    made = HelperThreads(2, "helper")
    yield made
    made.shutdown()


def test_results_and_errors_are_those_of_the_call(threads: HelperThreads) -> None:
    """As with any executor."""
    assert threads.submit(divmod, 7, 2).result(30) == (3, 1)
    assert threads.submit(int, "11", base=2).result(30) == 3
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(30)


def test_as_many_calls_at_once_as_there_are_threads(threads: HelperThreads) -> None:
    """One that hangs leaves the others the rest of the threads."""
    may_end = threading.Event()
    hanging = threads.submit(may_end.wait, 60)
    names = {
        threads.submit(lambda: threading.current_thread().name).result(30)
        for _ in range(4)
    }
    assert len(names) == 1
    may_end.set()
    assert hanging.result(30)


def test_a_shutdown_ends_the_threads_behind_the_queue() -> None:
    """Calls made before are carried out, unless they are called off."""
    threads = HelperThreads(1, "helper")
    may_end = threading.Event()
    running, queued = threads.submit(may_end.wait, 60), threads.submit(int)
    threads.shutdown(wait=False)
    may_end.set()
    assert (running.result(30), queued.result(30)) == (True, 0)
    with pytest.raises(RuntimeError, match="helper: a call after the shutdown"):
        threads.submit(int)


def test_a_shutdown_may_cancel_what_has_not_begun() -> None:
    """A running call is not touched."""
    threads = HelperThreads(1, "helper")
    has_begun, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        has_begun.set()
        return may_end.wait(60)

    running, queued = threads.submit(work), threads.submit(int)
    assert has_begun.wait(30)
    threads.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        queued.result(30)
    may_end.set()
    assert running.result(30)


def test_a_system_without_room_for_threads_is_found_out_at_the_start() -> None:
    """No call fails for it later, and the threads that have begun end."""
    threads = HelperThreads(2, "helper").begin()
    begun: list[threading.Thread] = []

    def is_second(thread: threading.Thread) -> bool:
        begun.append(thread)
        return len(begun) > 1

    with (
        refused_threads(is_second),
        pytest.raises(RuntimeError, match="can't start"),
    ):
        HelperThreads(2, "more").begin()
    begun[0].join(30)
    assert not begun[0].is_alive()
    assert threads.submit(int, "7").result(30) == 7
    threads.shutdown()
