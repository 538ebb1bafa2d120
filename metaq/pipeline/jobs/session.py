"""A Spark session for one job: its start, its end, waiting for it, and its failure.

A call to the JVM that is interrupted breaks off in the middle of its answer, and the
call that should tidy up after it fails, or waits for ever. So the call is made by
another thread, and the thread that signals come to waits for that one (`run_apart`).
"""

import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from metaq.errors import MetaqError
from metaq.pipeline.errors import JobError
from metaq.spark import register

_OWN: Final = re.compile(r"^(?:.*?: )?metaq\.[\w.]+: (.+)$", re.MULTILINE)
"""Our errors as Python prints them, alone or at the end of a trace that Spark
quotes."""
SPARK_ERRORS: Final = (PySparkException, Py4JError)
"""Errors raised by calls of Spark: of the JVM, with or without a type of Spark's."""
SENTENCE_CHARS_MAX: Final = 2000
"""Longest quotation of Spark's text in a message."""
NOT_FOUND: Final = "[DATA_SOURCE_NOT_FOUND]"
"""Spark's error for an unknown format."""
NOT_FOUND_CURE: Final = (
    "Spark does not find the format metaq in the Python that it starts for its own"
    " work: call metaq.spark.register(spark) first, or set PYSPARK_PYTHON to an"
    " interpreter that has this package"
)

UNREACHABLE: Final = "StatusCode.UNAVAILABLE"
"""In the text of Spark Connect when its server does not answer."""
GONE: Final = "Spark's driver has gone"


def sentence_of(error: Exception) -> str:
    """Return the subject of an error of Spark.

    Our own errors cross from tasks as text; theirs is the sentence that names the
    partition and the offsets. Else it is the first line.
    """
    text = str(error)
    if isinstance(error, Py4JJavaError):
        # Its first line names the call that failed, the next one the cause.
        text = text.partition("\n")[2].removeprefix(": ")
    if NOT_FOUND in text and "metaq" in text:
        return NOT_FOUND_CURE
    own = _OWN.findall(text)
    if UNREACHABLE in text and not own:
        return GONE
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    sentence = own[-1] if own else (lines or [type(error).__name__])[0]
    return sentence[:SENTENCE_CHARS_MAX].strip()


@contextmanager
def job_errors(job: str) -> Iterator[None]:
    """Turn errors of Spark into one sentence.

    Args:
        job: name of the failed job, for the message.

    Raises:
        JobError: Spark failed in the body.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise JobError(f"{job}: {sentence_of(error)}") from error
    except (Py4JError, ConnectionRefusedError) as error:
        reason = getattr(error, "strerror", None) or sentence_of(error)
        raise JobError(f"{job}: {GONE}: {reason}") from error


DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # A query that is killed as it writes the first file of its checkpoint leaves a
    # temporary one, and Spark 4.3 would refuse every start after that.
    "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
}
JAVA_END_S: Final = 10.0
"""Longest wait for the end of a Java process, seconds."""
SIGNAL_S: Final = 1.0
"""A wait is resumed this often, in which a signal is noticed."""
STANDARD_ERROR: Final = 2
LAST_LINES: Final = 5
"""Lines of Spark's log that are shown when it does not start."""
TRACE: Final = ("at ", "... ")
"""Start of lines of a trace that say where in Java something failed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobSession:
    """A session that calls are made in by threads of their own."""

    spark: SparkSession
    """The session, which is not the active one of the thread that started it."""

    def run(
        self, job: Callable[[], T], *, on_interrupt: Callable[[], None] | None = None
    ) -> T:
        """Run a job as `run_apart` does, with the session active in its thread.

        After a signal the job ends when the session is stopped.
        """

        def run() -> T:
            # A write looks for the formats in the active session, and only the thread
            # that started Spark has one. Of all that may be asked of a session, this
            # alone makes it active, and nothing runs for it.
            self.spark.createDataFrame([], "nothing INT")
            return job()

        return run_apart(run, on_interrupt=on_interrupt)

    def count_tasks(self) -> tuple[int, int]:
        """Return how many tasks of the running stages are done, and how many exist."""
        tracker = self.spark.sparkContext.statusTracker()
        found = map(tracker.getStageInfo, tracker.getActiveStageIds())
        stages = [stage for stage in found if stage is not None]
        done = sum(stage.numCompletedTasks for stage in stages)
        return done, sum(stage.numTasks for stage in stages)


@contextmanager
def job_session(
    master: str, settings: Mapping[str, str], log: Path | None = None
) -> Iterator[JobSession]:
    """Run Spark while the body runs.

    Args:
        master: Of any Spark cluster: `local[*]`, `spark://…`, `yarn`, `k8s://…`.
        settings: Spark's own.
        log: File for the log of the driver's JVM; None: it is kept for the message
            when Spark does not start, else lost.

    Raises:
        MetaqError: Spark does not start.
        KeyboardInterrupt: Ctrl-C, at the start or in the body.
    """
    # Its warning, with a trace, is the failure that the job reports.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    if master.startswith("local"):
        # Its workers are ours: they need the Python that has this package.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # No other host asks for it, and not every machine can look its own name up.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    level = "ERROR" if log is None else "WARN"
    with tempfile.TemporaryFile() if log is None else log.open("ab+") as opened:
        file = opened.fileno()
        with _standard_error_to(file):
            try:
                # Started by the main thread it would take Ctrl-C for itself.
                session = run_apart(
                    lambda: start_session(master, settings, log_level=level)
                )
            except MetaqError as error:
                raise MetaqError(f"{error}{_last_words(file)}") from error
        try:
            yield JobSession(session)
        finally:
            # Here as well Ctrl-C would break off a call.
            run_apart(lambda: stop_session(session))


@contextmanager
def _standard_error_to(file: int) -> Iterator[None]:
    """Make a file the standard error of processes that start in the block."""
    sys.stderr.flush()
    before = os.dup(STANDARD_ERROR)
    os.dup2(file, STANDARD_ERROR)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, STANDARD_ERROR)
        os.close(before)


def _last_words(file: int) -> str:
    size = os.fstat(file).st_size
    text = os.pread(file, size, 0).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = [line for line in lines if not line.startswith(TRACE)]
    return "".join(f"; {line}" for line in words[-LAST_LINES:])


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


def stop_session(session: SparkSession) -> None:
    """Stop Spark; a JVM that is gone has nothing to stop."""
    with suppress(*SPARK_ERRORS, OSError):
        session.stop()


def end_java() -> None:
    """End the Java process of the last stopped session, and wait for that.

    By itself it ends when it notices that this process has. A session that is started
    later has another one.
    """
    gateway = SparkContext._gateway  # noqa: SLF001  # PySpark has it nowhere else
    if gateway is None:
        return
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001  # as above
    gateway.shutdown()
    # The end of its input is its sign; `proc` is there to keep it.
    gateway.proc.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(JAVA_END_S)


def run_apart(
    work: Callable[[], T], *, on_interrupt: Callable[[], None] | None = None
) -> T:
    """Run something that calls Spark, and wait for its end.

    After a signal the work goes on by itself until Spark has ended it; its outcome is
    lost then.

    Args:
        work: Run in a thread of its own; its exception is raised here.
        on_interrupt: Called at the first signal, to end the work; it is waited
            for until the next one. None: the first one ends the wait.

    Raises:
        KeyboardInterrupt: Ctrl-C, in the main thread.
        SystemExit: SIGTERM, where a handler raises that.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  # handed on
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
