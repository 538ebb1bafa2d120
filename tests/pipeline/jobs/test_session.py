"""Waiting for work in another thread."""

import _thread
import signal
import threading

import pytest

from metaq.pipeline.jobs.session import run_apart


def test_what_the_work_returns_or_raises_comes_back() -> None:
    """From another thread."""
    assert run_apart(threading.current_thread) is not threading.current_thread()

    def fail() -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        run_apart(fail)


def test_ctrl_c_ends_the_wait_and_not_the_work() -> None:
    """It goes on by itself."""
    may_end, has_ended = threading.Event(), threading.Event()
    waiting = threading.get_ident()

    def work() -> None:
        # To the thread that waits: no other one is woken by it.
        signal.pthread_kill(waiting, signal.SIGINT)
        may_end.wait()
        has_ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_apart(work)
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(30)


@pytest.mark.slow
def test_ctrl_c_that_wakes_nobody_is_heard_too() -> None:
    """As one that comes when the wait is just about to begin."""
    may_end = threading.Event()

    def work() -> None:
        # Behind the beginning of the wait, on most machines.
        may_end.wait(0.2)
        # Notes the signal, and sends none.
        _thread.interrupt_main()
        may_end.wait(60)

    with pytest.raises(KeyboardInterrupt):
        run_apart(work)
    may_end.set()


def test_work_that_is_told_of_ctrl_c_is_waited_for_until_the_next() -> None:
    """Its result then is the end; work that ignores it is left."""
    waiting = threading.get_ident()
    called, may_end = threading.Event(), threading.Event()

    def work() -> str:
        signal.pthread_kill(waiting, signal.SIGINT)
        assert called.wait(30)
        return "as far as it came"

    assert run_apart(work, on_interrupt=called.set) == "as far as it came"
    called.clear()

    def deaf() -> None:
        work()
        signal.pthread_kill(waiting, signal.SIGINT)
        may_end.wait()

    with pytest.raises(KeyboardInterrupt):
        run_apart(deaf, on_interrupt=called.set)
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "spark":
            thread.join(30)
