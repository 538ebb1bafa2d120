"""`metaq pipeline init`, `run` and `status`: a declared pipeline as a service.

Spark is imported inside of functions: it is optional, and slow to load.
"""

import os
import re
import secrets
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import click

from metaq.cli import pipeline_scaffold as scaffold
from metaq.cli import render
from metaq.cli.cluster import Target, check_target
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
from metaq.cli.spark_session import spark_session
from metaq.client.consume.redelivery import DEAD_LETTER_SUFFIX
from metaq.client.names import check_group, check_topics
from metaq.errors import ConfigError
from metaq.model import Millis

BATCH_WIDTHS: Final = {
    "time": 23, "flow": 12, "batch": 6, "rows_in": 9, "rows_out": 9, "seconds": 8,
    "lag_bytes": 12,
}  # fmt: skip
_LOCAL: Final = re.compile(r"(?:file:(?://)?)?(/.*)", re.DOTALL)
"""A path of this machine."""
_ESCAPED: Final = re.compile(r"[^\w\-!.~'()*,;:$&+=/@\x80-\U0010ffff]")
"""Spark escapes them in the path of a storage, and takes what comes of it for names."""
FLOW_COLUMNS: Final = ("flow", "target", "batch", "finished")
INSTALL: Final = "pip install 'metaq[pipelines]'"
CONNECT: Final = "sc://"
"""Begins the address of a Spark Connect server, which is there already."""
GATEWAY: Final = "PYSPARK_GATEWAY_PORT"
"""Variable by which `spark-submit` names a Java that is there already: it has no token
of ours, and does not end with us."""
TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105  # its name
"""Variable by which a Spark of ours and its client know each other: others on this
machine may not run code as us."""


def init(directory: Path, target: Target, *, source: str, alerts: str) -> None:
    """Write a new project.

    Raises:
        ConfigError: the directory is not empty, its name is no name of a group, or its
            path none that Spark takes as it stands; a topic is none, or there twice; an
            installed PySpark is too old for the project.
    """
    # A watermark in SQL came with it.
    _require_version((4, 2), "a new project")
    if target.brokers:
        raise click.UsageError("a pipeline finds its brokers in ZooKeeper: no --broker")
    group = check_group(directory.resolve().name)
    if marks := sorted(set(_ESCAPED.findall(str(directory.resolve())))):
        raise ConfigError(
            f"{directory}: Spark would keep the checkpoints in another directory:"
            f" expected a path without {' '.join(map(repr, marks))}"
        )
    check_topics((source, alerts))
    if source == alerts:
        raise ConfigError(f"alerts in the topic {source} would be lines of it")
    scaffold.write_project(
        directory,
        {
            scaffold.ZOOKEEPER: target.zookeeper,
            scaffold.ZK_ROOT: target.root,
            scaffold.PROGRESS_GROUP: group,
            scaffold.SOURCE_TOPIC: source,
            scaffold.ALERTS_TOPIC: alerts,
            scaffold.DEAD_LETTER_TOPIC: source + DEAD_LETTER_SUFFIX,
        },
    )
    click.echo(f"{directory}: now metaq pipeline run {directory}")


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
        ConfigError: a library is missing, or the metrics port cannot be had.
        JobError: an update failed.
        KeyboardInterrupt: Ctrl-C before the one update was done.
        SystemExit: SIGTERM before the one update was done.
    """
    # They speak of the way in which PySpark calls itself.
    warnings.filterwarnings("ignore", module="pyspark")
    _require_libraries()
    from metaq.spark.declared.progress import BatchProgress, PipelineCounters
    from metaq.spark.declared.updates import PipelineRun, Refresh, read_project
    from metaq.spark.errors import JobError
    from metaq.spark.jobs.failures import job_errors, sentence_of
    from metaq.spark.jobs.session import run_apart

    counters = PipelineCounters()

    def on_batch(batch: BatchProgress) -> None:
        counters.add(batch)
        _print_batch(batch, as_json=job.as_json)

    def on_failure(text: str) -> None:
        what, _, cause = text.partition("\n")
        sentence = sentence_of(JobError(cause.removeprefix("Error: ")))
        render.say(f"{what} {sentence}")

    with job_errors(f"pipeline {directory}"), Interrupts() as interrupts:
        project = read_project(directory)
        with (
            _metrics(counters, options.metrics_port),
            interrupts.pause(),
            _connect_server(job, project.spec_path.parent) as url,
        ):
            is_own = url != job.master
            work = PipelineRun(url, project, on_batch, on_failure, is_own=is_own)
            if not job.as_json:
                render.print_header(BATCH_WIDTHS)
            run_apart(
                lambda: work.run(
                    Refresh(tables=options.refreshed, is_all=options.refreshes_all),
                    interval_s=None if options.is_once else options.interval_s,
                    on_update=counters.add_update,
                ),
                on_interrupt=work.stop,
            )
        if options.is_once:
            # A signal that has broken the only update off is raised here.
            with interrupts.pause():
                pass


@contextmanager
def _connect_server(job: JobRun, directory: Path) -> Iterator[str]:
    """Yield the address of Spark Connect: of a server that is there, or of our own."""
    from metaq.spark.declared.updates import (
        CONNECT_SETTINGS,
        catalog_settings,
        connect_mode,
        server_url,
    )
    from metaq.spark.jobs.session import end_java

    if job.master.startswith(CONNECT):
        with connect_mode():
            yield job.master
        return
    if GATEWAY in os.environ:
        raise ConfigError(
            "a declared pipeline starts a Java of its own: run this command by itself,"
            " not by spark-submit"
        )
    os.environ.setdefault(TOKEN, secrets.token_hex())
    # Of the driver's own Python processes, also where executors are others.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**CONNECT_SETTINGS, **catalog_settings(directory), **job.settings}
    try:
        with spark_session(job.master, settings, job.log) as session, connect_mode():
            yield server_url(session)
    finally:
        end_java()


def _require_libraries() -> None:
    _require_version((4, 1), "a declared pipeline")
    wanted = ("pyspark", "grpc", "yaml")
    if any(find_spec(name) is None for name in wanted):
        raise ConfigError(
            "a declared pipeline takes PySpark 4.1 or newer with Spark Connect, which"
            f" is not installed: {INSTALL}"
        )
    try:
        # It takes functions of PySpark that are not public.
        import metaq.spark.declared.updates  # noqa: F401  # to see that they are there
    except ImportError as error:
        raise ConfigError(
            f"a declared pipeline takes PySpark 4.1 to 4.3, and"
            f" {installed_version('pyspark')} has it otherwise ({error}): run it with"
            " spark-pipelines"
        ) from error


def _require_version(least: tuple[int, int], what: str) -> None:
    """Refuse an installed PySpark that is older."""
    try:
        found = installed_version("pyspark")
    except PackageNotFoundError:
        return
    if tuple(map(int, found.split(".")[:2])) < least:
        raise ConfigError(
            f"{what} takes PySpark {least[0]}.{least[1]} or newer, and {found} is"
            f" installed: {INSTALL}"
        )


def _metrics(counters: Any, port: int | None) -> AbstractContextManager[object]:
    if port is None:
        return nullcontext()
    from metaq.client.metrics import serve_statistics
    from metaq.spark.declared.progress import METRICS

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowStatus:
    """A flow as its checkpoint tells."""

    flow: str
    """Its name."""
    target: str
    """Table or sink that it writes to."""
    batch: int | None
    """The last finished micro-batch; None for none."""
    finished_ms: Millis | None
    """Time of its end."""


def status(directory: Path, *, as_json: bool) -> None:
    """Print the last batch of each flow, and the lag of the progress group.

    Raises:
        ConfigError: the project names no ZooKeeper or no group.
        ClientError: ZooKeeper does not know the group: nothing was read yet.
    """
    _require_libraries()
    from metaq.spark.declared.updates import read_project
    from metaq.spark.jobs.failures import job_errors

    with job_errors(f"pipeline {directory}"):
        spec = read_project(directory).spec
    group = spec.configuration.get(scaffold.PROGRESS_GROUP)
    if group is None:
        raise ConfigError(
            f"{directory}: its configuration names no {scaffold.PROGRESS_GROUP}, the"
            " group to which its sources commit"
        )
    target = Target(
        spec.configuration.get(scaffold.ZOOKEEPER, ZOOKEEPER),
        spec.configuration.get(scaffold.ZK_ROOT, ROOT),
        (),
        TIMEOUT_S,
    )
    check_target(target)
    flows = flows_of(spec.storage)
    found = describe_groups(target, group)[0]
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
            **to_json(found),
        }
        render.print_json(value)
        return
    rows = [
        (each.flow, each.target, each.batch, render.format_time(each.finished_ms))
        for each in flows
    ]
    render.print_rows(FLOW_COLUMNS, rows, as_json=False)
    click.echo()
    print_progress(found)


def flows_of(storage: str) -> list[FlowStatus]:
    """Return the flows that have a checkpoint, by target and name.

    Args:
        storage: of a pipeline, as path or URL; none is seen where that is not one of
            this machine.
    """
    local = _LOCAL.fullmatch(storage)
    if local is None:
        return []
    place = _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", local[1])
    root = Path(place) / "_checkpoints"
    # <target, a step for each part of its name>/<flow>/<version>/commits/<batch>
    found = [
        _flow_status(root, path)
        for path in root.glob("**/[0-9]*/metadata")
        if path.is_file()
    ]
    found.sort(key=lambda pair: pair[0])
    newest = {(each.target, each.flow): each for _version, each in found}
    return [newest[key] for key in sorted(newest)]


def _flow_status(root: Path, metadata: Path) -> tuple[int, FlowStatus]:
    version = metadata.parent
    commits = {
        int(path.name): path
        for path in version.glob("commits/*")
        if path.name.isdigit()
    }
    last = max(commits, default=None)
    steps = version.relative_to(root).parts
    return int(version.name), FlowStatus(
        flow=steps[-2],
        target=steps[-3],
        batch=last,
        finished_ms=(
            None if last is None
            else Millis(round(commits[last].stat().st_mtime * 1000))
        ),
    )  # fmt: skip
