"""A Spark session for one job: its start, its end, and waiting for it.

A call to the JVM that is interrupted breaks off in the middle of its answer, and the
call that should tidy up behind it fails, or waits for ever. So the call is made by
another thread, and the thread that signals come to waits for that one (`run_apart`).
"""

import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Final, TypeVar

from pyspark import SparkContext
from pyspark.sql import SparkSession

from metaq.client.timeouts import SIGNAL_S
from metaq.spark.data_source import register
from metaq.spark.errors import JobError
from metaq.spark.jobs.failures import SPARK_ERRORS, sentence_of

DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
"""Default settings of a job's session."""
JAVA_END_S: Final = 10.0
"""Longest wait for the end of a Java process, seconds."""


def start_session(
    master: str, settings: Mapping[str, str], *, log_level: str
) -> SparkSession:
    """Start Spark, with our formats registered.

    Args:
        master: Of any Spark cluster: `local[*]`, `spark://…`, `yarn`, `k8s://…`.
        settings: Spark's own, over `DEFAULTS`.
        log_level: Of the driver's JVM: `ERROR`, `WARN`, …

    Raises:
        JobError: It does not start.
    """
    builder = SparkSession.Builder().master(master).appName("metaq pipeline")
    for name, value in {**DEFAULTS, **settings}.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel(log_level)
        register(session)
    except (*SPARK_ERRORS, OSError) as error:
        raise JobError(
            f"Spark does not start on {master}: {sentence_of(error)}"
        ) from error
    return session


def activate(session: SparkSession) -> None:
    """Make a session the active one of this thread.

    A write looks for the formats in the active session, and only the thread that
    started Spark has one.
    """
    # Of all that may be asked of a session, this alone makes it active, and nothing
    # runs for it.
    session.createDataFrame([], "nothing INT")


def stop_session(session: SparkSession) -> None:
    """Stop Spark; a JVM that is gone has nothing to stop."""
    with suppress(*SPARK_ERRORS, OSError):
        session.stop()


def end_java() -> None:
    """End the Java process of the last stopped session, and wait for that.

    By itself it ends when it notices that this process has. A session that is started
    later has another one.
    """
    gateway = SparkContext._gateway  # noqa: SLF001  # PySpark tells it nowhere else
    if gateway is None:
        return
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001  # as above
    gateway.shutdown()
    # The end of its input is its sign; `proc` is there to keep it.
    gateway.proc.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(JAVA_END_S)


def count_tasks(session: SparkSession) -> tuple[int, int]:
    """Return how many tasks of the running stages are done, and how many there are."""
    tracker = session.sparkContext.statusTracker()
    found = map(tracker.getStageInfo, tracker.getActiveStageIds())
    stages = [stage for stage in found if stage is not None]
    done = sum(stage.numCompletedTasks for stage in stages)
    return done, sum(stage.numTasks for stage in stages)


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
