"""A Spark session for one job: start, end, interruptible waits, and errors.

An interrupt during a call to the JVM leaves its answer half read; then the call that
should clean up fails or hangs. So calls are made in another thread, and the thread that
receives signals waits for that one (`run_apart`).
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
"""Matches our errors as Python prints them, alone or after a traceback quoted by
Spark."""
SPARK_ERRORS: Final = (PySparkException, Py4JError)
"""Errors raised by calls of Spark or its JVM."""
SENTENCE_CHARS_MAX: Final = 2000
"""Maximum characters of Spark's text in a message."""
NOT_FOUND: Final = "[DATA_SOURCE_NOT_FOUND]"
"""Spark's error condition for an unknown format."""
NOT_FOUND_CURE: Final = (
    "Spark does not find the format metaq in the Python that it starts for its own"
    " work: call metaq.spark.register(spark) first, or set PYSPARK_PYTHON to an"
    " interpreter that has this package"
)

UNREACHABLE: Final = "StatusCode.UNAVAILABLE"
"""Part of Spark Connect's error text if its server does not answer."""
GONE: Final = "Spark's driver has gone"


def sentence_of(error: Exception) -> str:
    """Return the one sentence that explains an error of Spark.

    For an error of ours in a task, which Spark passes on as text, that is the text of
    ours, with partition and offsets. Otherwise it is the first line.
    """
    text = str(error)
    if isinstance(error, Py4JJavaError):
        # The first line names the failed call, the second one the cause.
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
    """Convert errors of Spark to JobError, with one sentence.

    Args:
        job: name of the job, for the message.

    Raises:
        JobError: Spark failed in the block.
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
    # A query killed while it writes the first file of its checkpoint leaves a temporary
    # file, and Spark 4.3 would refuse to start it again.
    "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
}
JAVA_END_S: Final = 10.0
"""Maximum wait for the end of a Java process, in seconds."""
SIGNAL_S: Final = 1.0
"""Seconds after which a wait is resumed, so that signals are noticed."""
STANDARD_ERROR: Final = 2
LAST_LINES: Final = 5
"""Number of log lines quoted if Spark does not start."""
TRACE: Final = ("at ", "... ")
"""Prefixes of the lines of a Java stack trace."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobSession:
    """A session for jobs that run in threads of their own."""

    spark: SparkSession
    """The session; not active in the thread that called `job_session`."""

    def run(
        self, job: Callable[[], T], *, on_interrupt: Callable[[], None] | None = None
    ) -> T:
        """Run a job as `run_apart`, with the session active in its thread.

        After a signal the job ends when the session is stopped.
        """

        def run() -> T:
            # A write looks up formats in the active session, but only the thread that
            # started Spark has one. This call makes the session active, and is the only
            # one that does so without running anything.
            self.spark.createDataFrame([], "nothing INT")
            return job()

        return run_apart(run, on_interrupt=on_interrupt)

    def count_tasks(self) -> tuple[int, int]:
        """Return the number of finished tasks, and of all tasks, of running stages."""
        tracker = self.spark.sparkContext.statusTracker()
        found = map(tracker.getStageInfo, tracker.getActiveStageIds())
        stages = [stage for stage in found if stage is not None]
        done = sum(stage.numCompletedTasks for stage in stages)
        return done, sum(stage.numTasks for stage in stages)


@contextmanager
def job_session(
    master: str, settings: Mapping[str, str], log: Path | None = None
) -> Iterator[JobSession]:
    """Run Spark while the block runs.

    Args:
        master: URL of any Spark cluster: `local[*]`, `spark://…`, `yarn`, `k8s://…`.
        settings: Spark settings.
        log: file for the log of the driver's JVM; None quotes its end if Spark does not
            start, and discards it otherwise.

    Raises:
        MetaqError: Spark does not start.
        KeyboardInterrupt: Ctrl-C, at the start or in the block.
    """
    # Its warnings, with a stack trace, repeat failures that the job reports.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    if master.startswith("local"):
        # Local workers need the Python that has this package.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # No other host connects, and some machines cannot resolve their own name.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    level = "ERROR" if log is None else "WARN"
    with tempfile.TemporaryFile() if log is None else log.open("ab+") as opened:
        file = opened.fileno()
        with _standard_error_to(file):
            try:
                # If the main thread started it, Spark would handle Ctrl-C itself.
                session = run_apart(
                    lambda: start_session(master, settings, log_level=level)
                )
            except MetaqError as error:
                raise MetaqError(f"{error}{_last_words(file)}") from error
        try:
            yield JobSession(session)
        finally:
            # Here, too, Ctrl-C must not interrupt a call.
            run_apart(lambda: stop_session(session))


@contextmanager
def _standard_error_to(file: int) -> Iterator[None]:
    """Redirect standard error to a file, for processes started in the block."""
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
        master: URL of any Spark cluster: `local[*]`, `spark://…`, `yarn`, `k8s://…`.
        settings: Spark settings, which override `DEFAULTS`.
        log_level: log level of the driver's JVM: `ERROR`, `WARN`, …

    Raises:
        JobError: Spark does not start.
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
    """Stop Spark; ignores errors, as of a JVM that is gone."""
    with suppress(*SPARK_ERRORS, OSError):
        session.stop()


def end_java() -> None:
    """End the Java process of the last stopped session, and wait for its end.

    Otherwise it would end only after this process. A later session starts a new one.
    """
    gateway = SparkContext._gateway  # noqa: SLF001  # not available elsewhere
    if gateway is None:
        return
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001  # as above
    gateway.shutdown()
    # The process ends at the end of its input, which `proc` keeps open.
    gateway.proc.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(JAVA_END_S)


def run_apart(
    work: Callable[[], T], *, on_interrupt: Callable[[], None] | None = None
) -> T:
    """Run work that calls Spark in another thread, and wait for its end.

    If a signal ends the wait, the work continues until Spark ends it, and its outcome
    is lost.

    Args:
        work: run in a thread of its own; its exception is raised here.
        on_interrupt: called at the first signal, to end the work; the wait then
            continues until the work or a second signal ends it. None: the first signal
            ends the wait.

    Raises:
        KeyboardInterrupt: Ctrl-C, in the main thread.
        SystemExit: SIGTERM, if a handler raises it.
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
    # In steps, as `metaq.client.timeouts.wait_for`, and for the same reason.
    while not outcome.done():
        wait([outcome], SIGNAL_S)
    return outcome.result()
