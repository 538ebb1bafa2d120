"""Commands of `metaq pipeline`: run a job, or look at messages; print what it gave.

Spark is imported inside of functions: it is optional, and slow to load.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import click

from metaq.cli import render
from metaq.cli.cluster import Target, find_topic
from metaq.cli.options import json_option, pairs_option
from metaq.cli.spark_session import spark_session, task_progress
from metaq.client import Start

CLUSTER_OPTIONS: Final = {"zookeeper", "zkroot", "brokers"}
"""Options of the format that may name another cluster than the command's own do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """Options of a Spark run."""

    master: Annotated[
        str,
        click.option(
            "--master",
            envvar="METAQ_SPARK_MASTER",
            default="local[*]",
            show_default=True,
            help="Spark cluster to run on.",
        ),
    ]
    """URL of the Spark master."""
    settings: Annotated[
        Mapping[str, str], pairs_option("--conf", "settings", "Setting of Spark")
    ]
    """Spark settings."""
    log: Annotated[
        Path | None,
        click.option(
            "--spark-log",
            "log",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Append Spark's log to this file.",
        ),
    ]
    """File for Spark's log."""
    as_json: Annotated[bool, json_option]
    """Objects instead of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Cluster of brokers, and more options of `format("metaq")`."""

    target: Target
    """Address of the cluster."""
    options: Mapping[str, str]
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


def archive(
    run: JobRun, wire: Wire, topics: Sequence[str], path: str, interval_s: float | None
) -> None:
    """Archive topics, and print the summary; see the job.

    After Ctrl-C as well, where it is the only end.
    """
    options = wire.to_map(subscribe=",".join(topics))
    wire.require(*topics)
    stop = threading.Event()
    with spark_session(run.master, run.settings, run.log) as session:
        from metaq.pipeline.jobs.archive import archive as run_job

        with render.progress("archive", None) as advance:
            done = session.run(
                lambda: run_job(
                    session.spark,
                    path,
                    options,
                    interval_s=interval_s,
                    on_progress=lambda progress: advance(progress.written_bytes),
                    stop=stop,
                ),
                on_interrupt=None if interval_s is None else stop.set,
            )
    print_facts(
        {
            "messages": done.message_count,
            "bytes": done.written_bytes,
            "batches": done.batch_count,
            "files_put_together": done.compacted_count,
            "archive_messages": done.total_message_count,
            "archive_files": done.total_file_count,
            "archive_bytes": done.total_bytes,
        },
        as_json=run.as_json,
    )
    if stop.is_set():
        raise KeyboardInterrupt


def replay(
    run: JobRun,
    wire: Wire,
    path: str,
    *,
    topic: str | None,
    where: str | None,
    keeps_partitions: bool,
    keeps_origin: bool,
) -> None:
    """Put an archive back into topics, and print the summary; see the job."""
    options = wire.to_map() if topic is None else wire.to_map(topic=topic)
    if topic is not None:
        wire.require(topic, kind="puts")
    with spark_session(run.master, run.settings, run.log) as session:
        from metaq.pipeline.jobs.replay import replay as run_job

        with task_progress(session, "replay"):
            done = session.run(
                lambda: run_job(
                    session.spark,
                    path,
                    options,
                    where=where,
                    keeps_partitions=keeps_partitions,
                    keeps_origin=keeps_origin,
                ),
            )
    print_facts(
        {"messages": done.message_count, "bytes": done.size_bytes}, as_json=run.as_json
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingest:
    """Source and target of `pipeline ingest`."""

    topic: Annotated[str, click.argument("topic")]
    """Target topic."""
    paths: Annotated[
        tuple[str, ...], click.argument("paths", nargs=-1, metavar="[PATH]...")
    ]
    """Arguments of `load`."""
    source_format: Annotated[
        str,
        click.option(
            "--format",
            "source_format",
            required=True,
            help="Format to read: text, csv, json, parquet, orc, jdbc, ...",
        ),
    ]
    """Argument of `spark.read.format`."""
    source_options: Annotated[
        Mapping[str, str],
        pairs_option("--read", "source_options", "Option of that format"),
    ]
    """Options of that source."""
    value: Annotated[
        str | None,
        click.option(
            "--value",
            help="SQL expression for the message.  [default: column value, else row as"
            " JSON]",
        ),
    ]
    """Expression for the message."""
    attribute: Annotated[
        str | None,
        click.option("--attribute", help="SQL expression for the attribute."),
    ]
    """Expression for the attribute."""
    key: Annotated[
        str | None,
        click.option("--key", help="SQL expression; equal keys go to one partition."),
    ]
    """Expression for the key."""


def ingest(run: JobRun, wire: Wire, asked: Ingest) -> None:
    """Put the rows of a Spark source into a topic, and print the summary."""
    options = wire.to_map(topic=asked.topic)
    wire.require(asked.topic, kind="puts")
    with spark_session(run.master, run.settings, run.log) as session:
        from metaq.pipeline.jobs.ingest import ingest as run_job

        with task_progress(session, "ingest"):
            done = session.run(
                lambda: run_job(
                    session.spark,
                    options,
                    source_format=asked.source_format,
                    paths=asked.paths,
                    source_options=asked.source_options,
                    value=asked.value,
                    attribute=asked.attribute,
                    key=asked.key,
                ),
            )
    print_facts(
        {"messages": done.message_count, "bytes": done.size_bytes}, as_json=run.as_json
    )


def stats(
    run: JobRun,
    wire: Wire,
    topics: Sequence[str],
    *,
    window_s: int,
    since: str,
    interval_s: float | None,
) -> None:
    """Print windows of topics, once or as messages come; see the job."""
    options = wire.to_map(subscribe=",".join(topics))
    wire.require(*topics)
    with spark_session(run.master, run.settings, run.log) as session:
        from metaq.pipeline.jobs import window_stats

        if interval_s is not None:
            every_s = interval_s
            session.run(
                lambda: window_stats.follow_stats(
                    session.spark,
                    options,
                    lambda windows: print_windows(
                        map(astuple, windows), as_json=run.as_json
                    ),
                    interval_s=every_s,
                    window_s=window_s,
                    since=since,
                ),
            )
            return
        with task_progress(session, "stats"):
            found = session.run(
                lambda: window_stats.stats(
                    session.spark, options, window_s=window_s, since=since
                ),
            )
    print_windows(map(astuple, found), as_json=run.as_json)


def audit(
    run: JobRun,
    wire: Wire,
    topic: str,
    *,
    path: str | None,
    copy: str | None,
    message_id: str | None,
) -> bool:
    """Compare a topic with its archive or a copy; return whether nothing is wrong."""
    if (path is None) == (copy is None):
        raise click.UsageError("expected exactly one of --archive and --copy")
    if copy is None and message_id is not None:
        raise click.UsageError("--id has no effect without --copy")
    source = wire.to_map(subscribe=topic)
    wire.require(topic, *([] if copy is None else [copy]))
    with spark_session(run.master, run.settings, run.log) as session:
        from metaq.pipeline.jobs.audit import AuditSummary, audit_archive, audit_copy

        def compare() -> AuditSummary:
            if path is not None:
                return audit_archive(session.spark, path, wire.to_map(), [topic])
            return audit_copy(
                session.spark,
                source,
                wire.to_map(subscribe=str(copy)),
                message_id=message_id,
            )

        with task_progress(session, "audit"):
            found: AuditSummary = session.run(compare)
    columns = ("finding", "partition", "offset", "detail")
    rows: list[tuple[render.Cell, ...]] = [
        (each.kind.value, str(each.partition), each.offset, each.detail)
        for each in found.findings
    ]
    rows += [
        ("away", str(partition), None, "no broker serves it now: it is not compared")
        for partition in found.away
    ]
    print_findings(columns, rows, as_json=run.as_json)
    sizes = {"source": found.source_count, "target": found.target_count}
    counts = {kind.value: count for kind, count in found.counts.items()}
    print_facts({**sizes, **counts}, as_json=run.as_json)
    return found.is_right


def verify(run: JobRun, paths: Sequence[str]) -> bool:
    """Check every stored byte of some paths; return whether nothing is wrong."""
    with spark_session(run.master, run.settings, run.log) as session:
        from metaq.pipeline.jobs.verify import verify as run_job

        with render.progress("verify", None) as advance:
            found = session.run(
                lambda: run_job(
                    session.spark,
                    *paths,
                    on_progress=lambda progress: advance(progress.checked_bytes),
                ),
            )
    columns = ("file", "offset", "next_good_offset", "detail")
    rows = [(str(d.path), d.offset, d.next_good_offset, d.detail) for d in found.damage]
    print_findings(columns, rows, as_json=run.as_json)
    print_facts(
        {
            "files": found.file_count,
            "records": found.record_count,
            "bytes": found.checked_bytes,
            "torn_bytes": found.torn_bytes,
            "files_without_checksums": found.unsummed_count,
            "problems": len(found.damage),
        },
        as_json=run.as_json,
    )
    return not found.damage


def print_facts(facts: Mapping[str, int], *, as_json: bool) -> None:
    """Print a summary: a table of two columns, or one object."""
    if as_json:
        render.print_json(facts)
        return
    rows = [(name.replace("_", " "), count) for name, count in facts.items()]
    render.print_rows(("summary", "count"), rows, as_json=False)


def print_findings(
    columns: Sequence[str], rows: Sequence[Sequence[render.Cell]], *, as_json: bool
) -> None:
    """Print the faults; nothing when there are none."""
    if rows:
        render.print_rows(columns, rows, as_json=as_json)


def print_windows(windows: Iterable[tuple[Any, ...]], *, as_json: bool) -> None:
    """Print windows as a table, or as objects.

    Args:
        windows: the fields of `WindowStats`, in order.
        as_json: print objects.
    """
    columns = ("topic", "window", "messages", "bytes", "delay_mean_s", "delay_max_s")
    rows = [
        (
            topic,
            render.format_time(start_ms),
            message_count,
            size_bytes,
            None if mean_s is None else round(mean_s, 3),
            None if max_s is None else round(max_s, 3),
        )
        for topic, start_ms, message_count, size_bytes, mean_s, max_s in windows
    ]
    render.print_rows(columns, rows, as_json=as_json)


def show_schema(
    target: Target, topic: str, *, count: int, start: Start, as_json: bool
) -> bool:
    """Print a schema that fits messages of a topic; return whether there is one.

    Args:
        target: the cluster.
        topic: its name.
        count: messages that are looked at, as many of each partition.
        start: the first of them.
        as_json: print an object.

    Raises:
        PartitionsAwayError: a broker of the topic is away.
        MetaqError: the messages cannot be read.
    """
    from metaq.pipeline.installed import require_spark

    require_spark()
    from metaq.pipeline.decode import proposal
    from metaq.pipeline.decode.sample import read_sample

    cluster = find_topic(target, topic, (), kind="gets")
    partitions = [partition.name for partition in cluster.partitions]
    with cluster.target.client() as client:
        values = read_sample(client, topic, partitions, count=count, start=start)
    found = proposal.propose(values)
    if as_json:
        facts = {} if found is None else proposal.to_json(found)
        render.print_json({"topic": topic, "messages": len(values), **facts})
    elif found is not None:
        render.print_rows(
            ("field", "type", "required", "count"),
            [(f.name, f.type, f.is_required, f.count) for f in found.fields],
            as_json=False,
        )
        click.echo(proposal.expression(found))
    looked_at = render.count_text(len(values), "message")
    if found is None:
        render.say(
            f"topic {topic}: {looked_at} looked at; fewer than half of them have one of"
            " the formats that are known: JSON objects, CSV, log lines, Avro with a"
            " fingerprint"
        )
        return False
    render.say(
        f"topic {topic}: {looked_at} looked at, {found.fit_count} fit as"
        f" {found.form.value}"
    )
    for error, times in found.errors:
        render.say(f"{render.count_text(times, 'message')}: {error}")
    return True
