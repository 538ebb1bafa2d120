"""Parts shared by the commands of `metaq pipeline`: Spark, progress, brokers.

Spark is imported inside functions, because it is optional and slow to load.
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
"""Options of the format that may select another cluster than the command's options."""
PROGRESS_INTERVAL_S: Final = 0.25

R = TypeVar("R")

group("pipeline", "Run declared pipelines; archive, replay, ingest or compare topics.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """Options of a Spark run."""

    master: str = option(
        "--master",
        envvar="METAQ_SPARK_MASTER",
        default="local[*]",
        show_default=True,
        show_envvar=True,
        help="Spark master to run on.",
    )
    settings: Mapping[str, str] = declared(
        pairs_option("--conf", "settings", "Spark setting")
    )
    log: Path | None = option(
        "--spark-log", type=FILE, help="Append Spark's log to this file."
    )
    as_json: bool = declared(json_option)

    @contextmanager
    def session(self) -> Iterator[Any]:
        """Run Spark during the block; raise an error if it is not installed.

        Yields:
            A `JobSession`; not in the type, because Spark is optional.
        """
        from metaq.pipeline.installed import require_spark

        require_spark()
        from metaq.pipeline.jobs.session import job_session

        with job_session(self.master, self.settings, self.log) as session:
            yield session


def run_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the options of a Spark run, as the argument `run`.

    The command prints a sentence when Ctrl-C ends it.
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
    """Show the completed tasks of the running stages; without a terminal, nothing.

    Args:
        session: `JobSession` of the tasks.
        what: text beside the bar.
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
    """The cluster, and further options of `format("metaq")`."""

    target: Target = declared(target_options)
    options: Mapping[str, str] = declared(
        pairs_option(
            "--option", "options", 'Option of format("metaq"), see docs/spark.md'
        )
    )
    """Values of `--option`, which take precedence."""

    def to_map(self, **more: str) -> dict[str, str]:
        """Return options for `format("metaq")`; those of the user take precedence.

        Args:
            more: options that the command sets, from its arguments.

        Raises:
            click.UsageError: the user has set one of these too.
        """
        given = {name.lower() for name in self.options}
        for name in more:
            if name.lower() in given:
                raise click.UsageError(
                    f"--option {name} is set by the topics of the command: leave it out"
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

        A job would read no messages and report success, or retry puts until
        `retryTimeoutMs`.

        Args:
            topics: names of the topics.
            kind: whether the job puts to the topics or reads them.

        Raises:
            NoBrokerError: no broker serves one of the topics.
        """
        if any(name.lower() in CLUSTER_OPTIONS for name in self.options):
            return
        for topic in topics:
            find_topic(self.target, topic, (), kind=kind, is_partial=True)


SHARED.update(wire=takes(Wire, "wire"), run=run_options)
