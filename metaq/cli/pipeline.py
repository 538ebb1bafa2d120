"""Parts that the commands of `metaq pipeline` share: Spark, its progress, the brokers.

Spark is imported inside of functions: it is optional, and slow to load.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from metaq.cli import render
from metaq.cli.cluster import Target, find_topic
from metaq.cli.options import (
    FILE,
    declared,
    json_option,
    option,
    pairs_option,
    takes,
    target_options,
)
from metaq.cli.tree import SHARED, group

CLUSTER_OPTIONS: Final = {"zookeeper", "zkroot", "brokers"}
"""Options of the format that may name another cluster than the command's own do."""
PROGRESS_INTERVAL_S: Final = 0.25

R = TypeVar("R")

group("pipeline", "Run pipelines; archive, replay, ingest and compare topics.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """Options of a Spark run."""

    master: str = option(
        "--master",
        envvar="METAQ_SPARK_MASTER",
        default="local[*]",
        show_default=True,
        help="Spark cluster to run on.",
    )
    settings: Mapping[str, str] = declared(
        pairs_option("--conf", "settings", "Setting of Spark")
    )
    log: Path | None = option(
        "--spark-log", type=FILE, help="Append Spark's log to this file."
    )
    as_json: bool = declared(json_option)

    @contextmanager
    def session(self) -> Iterator[Any]:
        """Run Spark while the body runs; refuse an installation without it.

        Yields:
            A `JobSession`; its type is not named, because Spark is optional.
        """
        from metaq.pipeline.installed import require_spark

        require_spark()
        from metaq.pipeline.jobs.session import job_session

        with job_session(self.master, self.settings, self.log) as session:
            yield session


def run_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the options that say where a job runs, as the argument `run`.

    The command says so when Ctrl-C ends it.
    """

    @functools.wraps(command)
    def interruptible(*args: Any, **given: Any) -> R:
        try:
            return command(*args, **given)
        except KeyboardInterrupt:
            render.say("interrupted")
            raise

    return takes(JobRun, "run")(interruptible)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Cluster of brokers, and more options of `format("metaq")`."""

    target: Target = declared(target_options)
    options: Mapping[str, str] = declared(
        pairs_option(
            "--option", "options", 'Option of format("metaq"), see docs/spark.md'
        )
    )
    """Values of `--option`, which win."""

    def to_map(self, **more: str) -> dict[str, str]:
        """Return options for `format("metaq")`; the user's own win.

        Args:
            more: options that the command's own words say.

        Raises:
            click.UsageError: the user gives one of these another value.
        """
        given = {name.lower() for name in self.options}
        for name in more:
            if name.lower() in given:
                raise click.UsageError(
                    f"--option {name} contradicts the topics that the command names"
                )
        timeout_ms = round(self.target.timeout_s * 1000)
        found = {"requestTimeoutMs": str(timeout_ms), **more}
        if self.target.brokers:
            names = (name.removeprefix("meta://") for name in self.target.brokers)
            found["brokers"] = ",".join(names)
        else:
            found |= {"zookeeper": self.target.zookeeper, "zkRoot": self.target.root}
        kept = {k: v for k, v in found.items() if k.lower() not in given}
        return {**kept, **self.options}

    def require(self, *topics: str, kind: Literal["puts", "gets"] = "gets") -> None:
        """Refuse topics that no broker serves, before Spark starts.

        A job would find no message in them, and call that well; or try to put some
        until `retryTimeoutMs` is over.

        Args:
            topics: their names.
            kind: use of the topics by the job.

        Raises:
            NoBrokerError: no broker serves one of them.
        """
        if any(name.lower() in CLUSTER_OPTIONS for name in self.options):
            return
        for topic in topics:
            find_topic(self.target, topic, (), kind=kind, is_partial=True)


SHARED.update(wire=takes(Wire, "wire"), run=run_options)
