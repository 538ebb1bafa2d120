"""Wait for Spark in a way that a signal ends.

A call to the JVM that is interrupted breaks off in the middle of its answer, and the
call that should tidy up behind it fails, or waits for ever. So the call is
made by another thread, and the thread that signals come to waits for that one.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from metaq.client.timeouts import SIGNAL_S

T = TypeVar("T")


def run_apart(
    work: Callable[[], T], *, on_interrupt: Callable[[], None] | None = None
) -> T:
    """Run something that calls Spark, and wait for its end.

    After a signal the work goes on by itself until Spark has ended it; its outcome is
    not told then.

    Args:
        work: Run in a thread of its own; its exception is raised here.
        on_interrupt: Called at the first signal, to tell the work to end; it is waited
            for until the next one. None: the first one ends the wait.

    Raises:
        KeyboardInterrupt: Ctrl-C, in the main thread.
        SystemExit: SIGTERM, where a handler raises that.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  # handed on, whatever it is
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="spark", daemon=True)
    try:
        thread.start()
        return _result(outcome)
    except (KeyboardInterrupt, SystemExit):
        has_begun = thread.is_alive() or outcome.done()
        if on_interrupt is None or not has_begun:
            raise
        on_interrupt()
    return _result(outcome)


def _result(outcome: Future[T]) -> T:
    # As `metaq.client.timeouts.wait_for` does, for the same reason.
    while not outcome.done():
        wait([outcome], SIGNAL_S)
    return outcome.result()
