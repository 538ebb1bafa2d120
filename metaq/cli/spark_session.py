"""The Spark session of one command, with progress on a terminal."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

PROGRESS_INTERVAL_S: Final = 0.25


@contextmanager
def spark_session(
    master: str, settings: Mapping[str, str], log: Path | None
) -> Iterator[Any]:
    """Run Spark while the body runs; refuse an installation without it.

    Yields:
        A `JobSession`; its type is not named, because Spark is optional.
    """
    from metaq.pipeline.installed import require_spark

    require_spark()
    from metaq.pipeline.jobs.session import job_session

    with job_session(master, settings, log) as session:
        yield session


@contextmanager
def task_progress(session: Any, what: str) -> Iterator[None]:
    """Show how many tasks of the running stages are done; nothing without a terminal.

    Args:
        session: the `JobSession` whose tasks they are.
        what: the words beside the bar.
    """
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
                done, total = session.count_tasks()
                bar.update(task, completed=done, total=total or None)

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
