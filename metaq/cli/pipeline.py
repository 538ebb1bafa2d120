"""The argument tree of `metaq pipeline`: jobs on Spark, local or on any cluster."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from metaq.cli import pipeline_jobs as jobs
from metaq.cli import pipeline_project as project
from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.options import (
    INTERVAL_S_MAX,
    SecondsRange,
    count_option,
    json_option,
    pairs_option,
    parse_start,
    takes,
    target_options,
)
from metaq.cli.pipeline_jobs import Ingest, JobRun, Wire
from metaq.cli.tree import example

WINDOW_S: Final = 60
SAMPLE_COUNT: Final = 1000

R = TypeVar("R")


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


def wire_options(command: Callable[..., R]) -> Callable[..., R]:
    """Add the options that say which brokers are meant, as the argument `wire`."""

    @functools.wraps(command)
    def with_wire(
        *args: Any, target: Target, options: dict[str, str], **given: Any
    ) -> R:
        return command(*args, wire=Wire(target=target, options=options), **given)

    text = 'Option of format("metaq"), see docs/spark.md'
    return target_options(pairs_option("--option", "options", text)(with_wire))


every_option = click.option(
    "--every",
    "interval_s",
    type=SecondsRange(0.01, INTERVAL_S_MAX),
    help="Go on until Ctrl-C, a batch every so many seconds.",
)


@click.group()
def pipeline() -> None:
    """Run pipelines; archive, replay, ingest and compare topics."""


@pipeline.command(
    "archive",
    short_help="Write what topics have beyond the last run to a Delta table.",
    epilog=example(
        "metaq pipeline archive orders --to /archive",
        "metaq pipeline archive orders logs --to hdfs:///archive --every 60",
    ),
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--to", "path", required=True, help="Directory or URL of the archive.")
@every_option
@wire_options
@run_options
def archive_command(
    topics: tuple[str, ...],
    path: str,
    interval_s: float | None,
    wire: Wire,
    run: JobRun,
) -> None:
    """Write what topics have beyond the last run to a Delta table, each message once.

    Ends when everything is archived that was there at the start; with --every it goes
    on until Ctrl-C. An archive stores its position; the next run goes on from there,
    after Ctrl-C or a kill as well.
    """
    jobs.archive(run, wire, topics, path, interval_s)


@pipeline.command(
    "replay",
    epilog=example(
        "metaq pipeline replay /archive --topic orders-again",
        "metaq pipeline replay /archive --topic t --where \"date >= '2026-01-31'\"",
    ),
)
@click.argument("path", metavar="ARCHIVE")
@click.option("--topic", help="Target topic.  [default: that of each message]")
@click.option("--where", help="SQL condition over the columns of the archive.")
@click.option(
    "--keep-partitions",
    "keeps_partitions",
    is_flag=True,
    help="To the broker and partition that each message came from.",
)
@click.option(
    "--keep-origin",
    "keeps_origin",
    is_flag=True,
    help="With place and time of each message in its headers, replay.origin and"
    " replay.timestamp.",
)
@wire_options
@run_options
def replay_command(
    path: str,
    topic: str | None,
    where: str | None,
    keeps_partitions: bool,
    keeps_origin: bool,
    wire: Wire,
    run: JobRun,
) -> None:
    """Put the messages of ARCHIVE back into topics, at least once.

    Messages of one partition stay in order, and together in one partition.
    """
    jobs.replay(
        run,
        wire,
        path,
        topic=topic,
        where=where,
        keeps_partitions=keeps_partitions,
        keeps_origin=keeps_origin,
    )


@pipeline.command(
    "ingest",
    short_help="Put what Spark can read into TOPIC.",
    epilog=example(
        "metaq pipeline ingest logs /var/log/*.log --format text",
        "metaq pipeline ingest people people.csv --format csv --read header=true",
    ),
)
@takes(Ingest, "asked")
@wire_options
@run_options
def ingest_command(asked: Ingest, wire: Wire, run: JobRun) -> None:
    """Put what Spark can read into TOPIC, a message for each row, at least once."""
    jobs.ingest(run, wire, asked)


@pipeline.command(
    "stats",
    epilog=example(
        "metaq pipeline stats orders --window 3600",
        "metaq pipeline stats orders --every 10 --json",
    ),
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "--window",
    "window_s",
    type=click.IntRange(1),
    default=WINDOW_S,
    show_default=True,
    help="Seconds of a window.",
)
@click.option(
    "--since",
    default="timestamp",
    show_default=True,
    help="SQL expression for the moment when a message set out; its delay ends when"
    " it is read here.",
)
@every_option
@wire_options
@run_options
def stats_command(
    topics: tuple[str, ...],
    window_s: int,
    since: str,
    interval_s: float | None,
    wire: Wire,
    run: JobRun,
) -> None:
    """Print messages, bytes and delay of topics per window of time.

    With --every, what arrives from now on: each line says what one batch added.
    """
    jobs.stats(run, wire, topics, window_s=window_s, since=since, interval_s=interval_s)


@pipeline.command(
    "audit",
    epilog=example(
        "metaq pipeline audit orders --archive /archive",
        "metaq pipeline audit orders --copy orders-again",
    ),
)
@click.argument("topic")
@click.option("--archive", "path", help="Directory or URL of the archive.")
@click.option("--copy", help="Topic that has the same messages.")
@click.option(
    "--id",
    "message_id",
    help="SQL expression that identifies a message of a copy.  [default: content]",
)
@wire_options
@run_options
def audit_command(
    topic: str,
    path: str | None,
    copy: str | None,
    message_id: str | None,
    wire: Wire,
    run: JobRun,
) -> bool:
    """Compare TOPIC with its archive or with a copy.

    Counts messages that are lost, doubled, corrupted, reordered or extra, and names
    the first of them. The exit code is 1 when there are any.
    """
    return jobs.audit(run, wire, topic, path=path, copy=copy, message_id=message_id)


@pipeline.command(
    "verify",
    short_help="Check every stored byte of data directories or archives.",
    epilog=example("metaq pipeline verify /var/lib/metaq --master local[8]"),
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@run_options
def verify_command(paths: tuple[str, ...], run: JobRun) -> bool:
    """Check every stored byte of data directories or archived segments, in parallel.

    The exit code is 1 when anything is wrong.
    """
    return jobs.verify(run, paths)


@pipeline.command(
    "schema",
    short_help="Propose a schema for the messages of TOPIC.",
    epilog=example(
        "metaq pipeline schema orders",
        "metaq pipeline schema logs --count 10000 --json",
    ),
)
@click.argument("topic")
@count_option(SAMPLE_COUNT)
@click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    metavar="earliest|TIME",
    help="Where to begin in each partition; TIME as of metaq cat.",
)
@json_option
@target_options
def schema_command(
    topic: str, count: int, start: str, as_json: bool, target: Target
) -> bool:
    """Look at messages of TOPIC, and propose how to decode them.

    Recognises JSON objects, CSV records, log lines and Avro with a fingerprint; the
    schema is that which fits most of them. Prints its fields and the expression
    that decodes them, and says how many fit. The exit code is 1 when no format fits
    half of them. No Spark is started.
    """
    begin = parse_start(start)
    return jobs.show_schema(target, topic, count=count, start=begin, as_json=as_json)


# -- declared pipelines ---------------------------------------------------------------


@pipeline.command(
    "init",
    short_help="Write a new declared pipeline into DIRECTORY.",
    epilog=example("metaq pipeline init errors --topic logs --alerts alerts"),
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--topic", default="logs", show_default=True, help="Topic that log lines are in."
)
@click.option(
    "--alerts", default="alerts", show_default=True, help="Topic for the alerts."
)
@click.option(
    "--create-topics",
    "creates_topics",
    is_flag=True,
    help="Create the topics that are missing, with one partition on each broker.",
)
@target_options
def init_command(
    directory: Path, topic: str, alerts: str, creates_topics: bool, target: Target
) -> None:
    """Write a new declared pipeline into DIRECTORY: log lines → counts → alerts.

    It runs as it is written, and is made to be changed. A directory that has something
    in it is refused. Topics that no broker serves are named.
    """
    project.init(
        directory, target, source=topic, alerts=alerts, creates_topics=creates_topics
    )


@pipeline.command(
    "run",
    short_help="Run the declared pipeline of DIRECTORY.",
    epilog=example(
        "metaq pipeline run errors",
        "metaq pipeline run errors --once --full-refresh counts",
        "metaq pipeline run errors --every 60 --json --metrics-port 9400",
    ),
)
@click.argument(
    "directory", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@takes(project.RunOptions)
@run_options
def run_command(directory: Path, options: project.RunOptions, run: JobRun) -> None:
    """Run the declared pipeline of DIRECTORY until SIGTERM or Ctrl-C.

    Its tables are updated every few seconds; an update takes in what is there at its
    start. Prints a line for each micro-batch.
    The exit code is 0 when a signal ended it, and 1 when an update failed; the next
    run goes on where the last one was, after a kill as well.
    """
    if options.refreshed and options.refreshes_all:
        raise click.UsageError("--full-refresh-all leaves no table to name")
    project.run(run, directory, options)


@pipeline.command(
    "status",
    short_help="Print the lag of the pipeline of DIRECTORY.",
    epilog=example("metaq pipeline status errors --json"),
)
@click.argument(
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
)
@json_option
def status_command(directory: Path, as_json: bool) -> None:
    """Print the lag of the pipeline of DIRECTORY, and its last batches.

    Without DIRECTORY, that of the present directory. It need not run.
    """
    project.status(directory, as_json=as_json)
