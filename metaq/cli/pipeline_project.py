"""`metaq pipeline init`, `run` and `status`: a declared pipeline as a service.

Spark is imported inside functions, because it is optional and slow to load.
"""

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target, check_target, find_missing
from metaq.cli.groups import describe_groups, print_progress, to_json
from metaq.cli.interrupts import Interrupts
from metaq.cli.options import (
    DIRECTORY,
    INTERVAL_S_MAX,
    ROOT,
    TIMEOUT_S,
    ZOOKEEPER,
    SecondsRange,
    declared,
    directory_argument,
    flag,
    metrics_option,
    option,
    takes,
)
from metaq.cli.pipeline import JobRun
from metaq.cli.replicas import find_sets
from metaq.cli.topics import TopicOptions, create
from metaq.cli.tree import command
from metaq.client import AsyncClient
from metaq.errors import ClientError, ConfigError, NoBrokerError
from metaq.model import Millis

BATCH_WIDTHS: Final = {
    "time": 23, "flow": 12, "batch": 6, "rows_in": 9, "rows_out": 9, "seconds": 8,
    "lag_bytes": 12,
}  # fmt: skip
ONE_PARTITION: Final = TopicOptions(partitions=1, served_by=None, settings={})
"""Settings of topics that `init` creates."""
FLOW_COLUMNS: Final = ("flow", "target", "batch", "finished")


@command(
    "pipeline init",
    click.argument("directory", type=click.Path(file_okay=False, path_type=Path)),
    click.option(
        "--topic",
        "source",
        default="logs",
        show_default=True,
        help="Topic of the log lines.",
    ),
    click.option(
        "--alerts", default="alerts", show_default=True, help="Topic of the alerts."
    ),
    flag(
        "--create-topics",
        "creates_topics",
        help="Create missing topics, with one partition on each broker.",
    ),
    short_help="Create a declared pipeline in DIRECTORY.",
    examples=("metaq pipeline init errors --topic logs --alerts alerts",),
)
def init(
    directory: Path, target: Target, *, source: str, alerts: str, creates_topics: bool
) -> None:
    """Create a declared pipeline in DIRECTORY: log lines → counts → alerts.

    It runs as created, and is meant to be changed. Refused if DIRECTORY is not empty.
    Prints the names of topics that no broker serves.
    """
    from metaq.pipeline.declared.scaffold import create_project, write_at_least_once

    if target.brokers:
        raise click.UsageError(
            "a pipeline finds its brokers in ZooKeeper: leave out --broker"
        )
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
        render.say(f"cannot find out which topics are missing: {error}")
        missing = topics = ()
    if creates_topics:
        for topic in missing:
            create(target, topic, ONE_PARTITION, as_json=False)
    elif missing:
        render.say(_cure(missing))
    written = topics[1:] if creates_topics else set(topics[1:]).difference(missing)
    if sets := _sets_of(target, written):
        write_at_least_once(directory)
        render.say(
            f"broker {', '.join(map(str, sets))} is a replica set, which has no"
            " transactions: alerts and dead letters are written at least once"
            f" (metaq.delivery in {directory}/spark-pipeline.yml)"
        )
    click.echo(f"{directory}: created; start it with metaq pipeline run {directory}")


def _sets_of(target: Target, topics: Collection[str]) -> list[int]:
    """Return the replica sets among the brokers of existing topics."""

    async def look(client: AsyncClient) -> set[int]:
        return {p.broker_id for topic in topics for p in await client.partitions(topic)}

    return sorted(target.run(look) & find_sets(target)) if topics else []


def _cure(missing: Sequence[str]) -> str:
    """Return the sentence about topics that no broker serves, with commands to run."""
    commands = (f"metaq topics create {name} --partitions 1" for name in missing)
    return f"no broker serves {', '.join(missing)}; create with: {'; '.join(commands)}"


def require_topics(directory: Path, configuration: Mapping[str, str]) -> None:
    """Refuse a project with missing topics, for which Spark would retry without end.

    Raises:
        click.UsageError: topics are missing; the message names them.
        NoBrokerError: the cluster does not answer.
    """
    from metaq.pipeline.declared.scaffold import TOPICS, ZOOKEEPER

    texts = (configuration[name] for name in TOPICS if name in configuration)
    topics = [topic.strip() for text in texts for topic in text.split(",")]
    if not topics or ZOOKEEPER not in configuration:
        return
    if missing := find_missing(_target_of(configuration), topics):
        raise click.UsageError(f"{directory}: {_cure(missing)}")


def _target_of(configuration: Mapping[str, str]) -> Target:
    """Return the cluster in the configuration of a project.

    Raises:
        click.BadParameter: its address is invalid.
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
    """Options of `metaq pipeline run` in addition to those of a job."""

    is_once: bool = option("--once", is_flag=True, help="Stop after one update.")
    interval_s: float = option(
        "--every",
        type=SecondsRange(0, INTERVAL_S_MAX),
        default=5.0,
        show_default=True,
        help="Pause between two updates, in seconds.",
    )
    refreshed: tuple[str, ...] = option(
        "--full-refresh",
        multiple=True,
        metavar="TABLE",
        help="Recompute this table from the start, once; may be repeated.",
    )
    refreshes_all: bool = option(
        "--full-refresh-all",
        is_flag=True,
        help="Recompute all tables from the start, once.",
    )
    metrics_port: int | None = declared(metrics_option)


@command(
    "pipeline run",
    directory_argument,
    takes(RunOptions),
    short_help="Run the declared pipeline of DIRECTORY.",
    examples=(
        "metaq pipeline run errors",
        "metaq pipeline run errors --once --full-refresh counts",
        "metaq pipeline run errors --every 60 --json --metrics-port 9400",
    ),
)
def run_pipeline(directory: Path, options: RunOptions, run: JobRun) -> None:
    """Run the declared pipeline of DIRECTORY until SIGTERM or Ctrl-C.

    Updates the tables every few seconds; an update processes the data that is there at
    its start. Prints one line per micro-batch. The exit code is 0 after a signal, and 1
    if an update failed; the next run continues where this one ended, also after a kill.
    """
    if options.refreshed and options.refreshes_all:
        raise click.UsageError(
            "--full-refresh and --full-refresh-all exclude each other"
        )
    from metaq.pipeline.declared import require_declarative
    from metaq.pipeline.installed import CONNECT

    if run.master.startswith(CONNECT) and (run.settings or run.log):
        raise click.UsageError(
            "--conf and --spark-log have no effect on a Spark"
            " Connect server: set them there"
        )
    # These warnings concern PySpark's internal calls only.
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
        _print_batch(batch, as_json=run.as_json)

    with job_errors(f"pipeline {directory}"), Interrupts() as interrupts:
        project = read_project(directory)
        home = project.spec_path.parent
        require_topics(directory, project.spec.configuration)
        with (
            _metrics(counters, options.metrics_port),
            interrupts.pause(),
            connect_server(run.master, run.settings, run.log, home) as url,
        ):
            if not run.as_json:
                render.print_header(BATCH_WIDTHS)
            run_updates(
                url,
                project,
                is_own=url != run.master,
                refresh=Refresh(tables=options.refreshed, is_all=options.refreshes_all),
                interval_s=None if options.is_once else options.interval_s,
                on_batch=on_batch,
                on_failure=render.say,
                on_update=counters.add_update,
            )
        if options.is_once:
            # Raise a signal that has interrupted the only update.
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


@command(
    "pipeline status",
    click.argument("directory", type=DIRECTORY, default="."),
    short_help="Print the lag of the pipeline of DIRECTORY.",
    examples=("metaq pipeline status errors --json",),
)
def status(directory: Path, *, as_json: bool) -> None:
    """Print the lag of the pipeline of DIRECTORY, and its last batches.

    DIRECTORY defaults to the current directory. The pipeline need not be running.
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
            f"{directory}: the configuration has no {scaffold.PROGRESS_GROUP}, the"
            " group for which its sources commit"
        )
    flows = flows_of(spec.storage)
    groups = describe_groups(_target_of(spec.configuration), group, with_parts=True)
    if not groups:
        raise ClientError(
            f"{directory}: the project has not run yet: there is no group {group}, for"
            " which its sources commit"
        )
    rows = [
        (each.flow, each.target, each.batch, render.format_time(each.finished_ms))
        for each in flows
    ]
    if as_json:
        render.print_json(
            {
                "pipeline": spec.name,
                "flows": [dict(zip(FLOW_COLUMNS, row, strict=True)) for row in rows],
                "groups": [to_json(each) for each in groups],
            }
        )
        return
    render.print_rows(FLOW_COLUMNS, rows, as_json=False)
    for each in groups:
        click.echo(f"\ngroup {each.group}")
        print_progress(each)
