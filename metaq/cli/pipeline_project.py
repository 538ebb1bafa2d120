"""`metaq pipeline init`, `run` and `status`: a declared pipeline as a service.

Spark is imported inside of functions: it is optional, and slow to load.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target, check_target, find_missing
from metaq.cli.groups import describe_groups, print_progress, to_json
from metaq.cli.interrupts import Interrupts
from metaq.cli.options import (
    INTERVAL_S_MAX,
    ROOT,
    TIMEOUT_S,
    ZOOKEEPER,
    SecondsRange,
    metrics_option,
)
from metaq.cli.pipeline_jobs import JobRun
from metaq.cli.topics import Wishes, create
from metaq.errors import ConfigError, NoBrokerError
from metaq.model import Millis

BATCH_WIDTHS: Final = {
    "time": 23, "flow": 12, "batch": 6, "rows_in": 9, "rows_out": 9, "seconds": 8,
    "lag_bytes": 12,
}  # fmt: skip
ONE_PARTITION: Final = Wishes(partitions=1, served_by=None, settings={})
"""Of a topic that `init` creates."""
FLOW_COLUMNS: Final = ("flow", "target", "batch", "finished")


def init(
    directory: Path, target: Target, *, source: str, alerts: str, creates_topics: bool
) -> None:
    """Write a new project, and say how to run it; see `create_project`.

    Args:
        directory: see `create_project`.
        target: the cluster of the project.
        source: topic of the log lines.
        alerts: topic for the alerts.
        creates_topics: create the topics that are missing, else name them.
    """
    from metaq.pipeline.declared.scaffold import create_project

    if target.brokers:
        raise click.UsageError("a pipeline finds its brokers in ZooKeeper: no --broker")
    topics = create_project(
        directory,
        zookeeper=target.zookeeper,
        root=target.root,
        source=source,
        alerts=alerts,
    )
    try:
        missing = find_missing(target, topics)
    except NoBrokerError as error:
        if creates_topics:
            raise
        render.say(f"it is unknown which topics are missing: {error}")
        missing = ()
    if creates_topics:
        for topic in missing:
            create(target, topic, ONE_PARTITION, as_json=False)
    elif missing:
        render.say(_cure(missing))
    click.echo(f"{directory}: now metaq pipeline run {directory}")


def _cure(missing: Sequence[str]) -> str:
    """Return the sentence about topics that no broker serves."""
    commands = (f"metaq topics create {name} --partitions 1" for name in missing)
    return f"no broker serves {', '.join(missing)}: {'; '.join(commands)}"


def require_topics(directory: Path, configuration: Mapping[str, str]) -> None:
    """Refuse a project whose topics are missing: Spark would retry without end.

    Raises:
        click.UsageError: names them.
        NoBrokerError: the cluster cannot be asked.
    """
    from metaq.pipeline.declared.scaffold import TOPICS, ZOOKEEPER

    texts = (configuration[name] for name in TOPICS if name in configuration)
    topics = [topic.strip() for text in texts for topic in text.split(",")]
    if not topics or ZOOKEEPER not in configuration:
        return
    if missing := find_missing(_target_of(configuration), topics):
        raise click.UsageError(f"{directory}: {_cure(missing)}")


def _target_of(configuration: Mapping[str, str]) -> Target:
    """Return the cluster that the configuration of a project names.

    Raises:
        click.BadParameter: it names none.
    """
    from metaq.pipeline.declared import scaffold

    target = Target(
        configuration.get(scaffold.ZOOKEEPER, ZOOKEEPER),
        configuration.get(scaffold.ZK_ROOT, ROOT),
        (),
        TIMEOUT_S,
    )
    check_target(target)
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `metaq pipeline run` beside those of a job."""

    is_once: Annotated[
        bool,
        click.option("--once", "is_once", is_flag=True, help="End behind one update."),
    ]
    """Make one update."""
    interval_s: Annotated[
        float,
        click.option(
            "--every",
            "interval_s",
            type=SecondsRange(0, INTERVAL_S_MAX),
            default=5.0,
            show_default=True,
            help="Seconds between the end of an update and the next one.",
        ),
    ]
    """Pause behind each update, seconds."""
    refreshed: Annotated[
        tuple[str, ...],
        click.option(
            "--full-refresh",
            "refreshed",
            multiple=True,
            metavar="TABLE",
            help="Compute this table from the start, once; may be repeated.",
        ),
    ]
    """Tables to compute from the start."""
    refreshes_all: Annotated[
        bool,
        click.option(
            "--full-refresh-all",
            "refreshes_all",
            is_flag=True,
            help="Compute everything from the start, once.",
        ),
    ]
    """Whether these are all of them."""
    metrics_port: Annotated[int | None, metrics_option]
    """Port that answers scrapes; None: none."""


def run(job: JobRun, directory: Path, options: RunOptions) -> None:
    """Make updates of a project until a signal comes, or one alone.

    Each micro-batch is a line. Where a signal is the only end it is a good one.

    Raises:
        click.UsageError: options contradict each other, or a topic is missing.
        ConfigError: a library is missing, or the metrics port cannot be had.
        JobError: an update failed.
        KeyboardInterrupt: Ctrl-C before the one update was done.
        SystemExit: SIGTERM before the one update was done.
    """
    from metaq.pipeline.declared import require_declarative
    from metaq.pipeline.installed import CONNECT

    if job.master.startswith(CONNECT) and (job.settings or job.log):
        raise click.UsageError("a server of Spark Connect has its own --conf and log")
    # They speak of the way in which PySpark calls itself.
    warnings.filterwarnings("ignore", module="pyspark")
    require_declarative()
    from metaq.pipeline.declared.progress import BatchProgress, PipelineCounters
    from metaq.pipeline.declared.updates import (
        Refresh,
        connect_server,
        read_project,
        run_updates,
    )
    from metaq.pipeline.jobs.session import job_errors

    counters = PipelineCounters()

    def on_batch(batch: BatchProgress) -> None:
        counters.add(batch)
        _print_batch(batch, as_json=job.as_json)

    with job_errors(f"pipeline {directory}"), Interrupts() as interrupts:
        project = read_project(directory)
        home = project.spec_path.parent
        require_topics(directory, project.spec.configuration)
        with (
            _metrics(counters, options.metrics_port),
            interrupts.pause(),
            connect_server(job.master, job.settings, job.log, home) as url,
        ):
            if not job.as_json:
                render.print_header(BATCH_WIDTHS)
            run_updates(
                url,
                project,
                is_own=url != job.master,
                refresh=Refresh(tables=options.refreshed, is_all=options.refreshes_all),
                interval_s=None if options.is_once else options.interval_s,
                on_batch=on_batch,
                on_failure=render.say,
                on_update=counters.add_update,
            )
        if options.is_once:
            # A signal that has broken the only update off is raised here.
            with interrupts.pause():
                pass


def _metrics(counters: Any, port: int | None) -> AbstractContextManager[object]:
    if port is None:
        return nullcontext()
    from metaq.client.metrics import serve_statistics
    from metaq.pipeline.declared.progress import METRICS

    return serve_statistics(METRICS, [counters], port=port)


def _print_batch(batch: Any, *, as_json: bool) -> None:
    moment = render.format_time(Millis(round(time.time() * 1000)))
    if as_json:
        render.print_json({"time": moment, **asdict(batch)})
        return
    lag = ",".join(f"{topic}={size}" for topic, size in batch.lag_bytes.items())
    cells = (
        moment, batch.flow, batch.batch, batch.row_in_count, batch.row_out_count,
        round(batch.duration_s, 3), lag or None,
    )  # fmt: skip
    render.print_aligned(BATCH_WIDTHS, cells)


# -- status ---------------------------------------------------------------------------


def status(directory: Path, *, as_json: bool) -> None:
    """Print the last batch of each flow, and the lag of the project's groups.

    Raises:
        ConfigError: the project names no ZooKeeper or no group.
        ClientError: ZooKeeper does not know the group: nothing was read yet.
    """
    from metaq.pipeline.declared import require_declarative, scaffold
    from metaq.pipeline.declared.progress import flows_of

    require_declarative()
    from metaq.pipeline.declared.updates import read_project
    from metaq.pipeline.jobs.session import job_errors

    with job_errors(f"pipeline {directory}"):
        spec = read_project(directory).spec
    group = spec.configuration.get(scaffold.PROGRESS_GROUP)
    if group is None:
        raise ConfigError(
            f"{directory}: its configuration names no {scaffold.PROGRESS_GROUP}, the"
            " group to which its sources commit"
        )
    flows = flows_of(spec.storage)
    groups = describe_groups(_target_of(spec.configuration), group, with_parts=True)
    if as_json:
        value = {
            "pipeline": spec.name,
            "flows": [
                {
                    "flow": each.flow,
                    "target": each.target,
                    "batch": each.batch,
                    "finished": render.format_time(each.finished_ms),
                }
                for each in flows
            ],
            "groups": [to_json(each) for each in groups],
        }
        render.print_json(value)
        return
    rows = [
        (each.flow, each.target, each.batch, render.format_time(each.finished_ms))
        for each in flows
    ]
    render.print_rows(FLOW_COLUMNS, rows, as_json=False)
    for each in groups:
        click.echo(f"\ngroup {each.group}")
        print_progress(each)
