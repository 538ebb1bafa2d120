"""Wait for Spark in a way that Ctrl-C ends.

A call to the JVM that is interrupted breaks off in the middle of its answer, and the
call that should tidy up behind it fails, or waits for what nobody ends. So the call is
made by another thread, and the thread that signals come to waits for that one.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_apart(work: Callable[[], T]) -> T:
    """Run something that calls Spark, and wait for its end.

    After Ctrl-C the work goes on by itself until Spark has ended it; what becomes of
    it then is not told.

    Args:
        work: Run in a thread of its own; what it raises is raised here.

    Raises:
        KeyboardInterrupt: Ctrl-C, in the main thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  # handed on, whatever it is
            outcome.set_exception(error)

    threading.Thread(target=run, name="spark", daemon=True).start()
    return outcome.result()
