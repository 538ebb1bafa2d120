"""A Spark session for one command: quiet, and with progress on a terminal."""

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from metaq.errors import ConfigError, MetaqError

STANDARD_ERROR: Final = 2
LAST_LINES: Final = 5
"""Lines of Spark's log that are shown when it does not start."""
TRACE: Final = ("at ", "... ")
"""Start of lines of a trace that say where in Java something failed."""
PROGRESS_INTERVAL_S: Final = 0.25

T = TypeVar("T")


def require_spark() -> None:
    """Raise ConfigError where Spark is not installed."""
    if find_spec("pyspark") is None:
        raise ConfigError(
            "pipelines run on Spark, which is not installed: pip install 'metaq[spark]'"
        )


@contextmanager
def spark_session(
    master: str, settings: Mapping[str, str], log: Path | None
) -> Iterator[Any]:
    """Run Spark while the body runs.

    Args:
        master: Of any Spark cluster: `local[*]`, `spark://…`, `yarn`, `k8s://…`.
        settings: Spark's own.
        log: File for the log of the driver's JVM; None: it is kept for the message
            when Spark does not start, else lost.

    Yields:
        The `SparkSession`, which is not the active one of this thread; its type is not
        named, because Spark is optional.

    Raises:
        ConfigError: Spark is not installed.
        MetaqError: It does not start.
        KeyboardInterrupt: Ctrl-C, at the start or in the body.
    """
    require_spark()
    from metaq.spark.jobs.session import run_apart, start_session, stop_session

    # Its warning, with a trace, is the failure that the job reports.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    if master.startswith("local"):
        # Its workers are ours: they need the Python that has this package.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # No other host asks for it, and not every machine can look its own name up.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    level = "ERROR" if log is None else "WARN"
    with _log_file(log) as file:
        with _standard_error_to(file):
            try:
                # Started by the main thread it would take Ctrl-C for itself.
                session = run_apart(
                    lambda: start_session(master, settings, log_level=level)
                )
            except MetaqError as error:
                raise MetaqError(f"{error}{_last_words(file)}") from error
        try:
            yield session
        finally:
            # Here as well Ctrl-C would break off a call.
            run_apart(lambda: stop_session(session))


def run_in_session(
    session: Any,
    job: Callable[[], T],
    *,
    on_interrupt: Callable[[], None] | None = None,
) -> T:
    """Run a job, and wait for its end.

    Args:
        session: The `SparkSession` that the job uses.
        job: Run in a thread of its own; its exception is raised here.
        on_interrupt: Called at the first Ctrl-C, to tell the job to end; it is waited
            for until the next one. None: the first one ends the wait.

    Raises:
        KeyboardInterrupt: Ctrl-C; the job ends when the session is stopped.
    """
    from metaq.spark.jobs.session import activate, run_apart

    def run() -> T:
        activate(session)
        return job()

    return run_apart(run, on_interrupt=on_interrupt)


@contextmanager
def _log_file(path: Path | None) -> Iterator[int]:
    if path is None:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()
        return
    with path.open("ab+") as file:
        yield file.fileno()


@contextmanager
def _standard_error_to(file: int) -> Iterator[None]:
    """Give processes that start meanwhile a file as their standard error."""
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


@contextmanager
def task_progress(session: Any, what: str) -> Iterator[None]:
    """Show how many tasks of the running stages are done; nothing without a terminal.

    Args:
        session: The `SparkSession` whose tasks they are.
        what: The words beside the bar.
    """
    from metaq.spark.jobs.session import count_tasks

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(),
        MofNCompleteColumn(), TextColumn("tasks"), TimeElapsedColumn(),
    )  # fmt: skip
    ended = threading.Event()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def watch() -> None:
            while not ended.wait(PROGRESS_INTERVAL_S):
                done, total = count_tasks(session)
                bar.update(task, completed=done, total=total or None)

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
