"""Jobs of `metaq pipeline` on Spark, local or on a cluster, and their output.

Spark is imported inside functions, because it is optional and slow to load.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple
from itertools import islice
from typing import Any, Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target, find_topic
from metaq.cli.options import (
    INTERVAL_S_MAX,
    SecondsRange,
    count_option,
    flag,
    pairs_option,
    parse_start,
    start_option,
)
from metaq.cli.pipeline import JobRun, Wire, task_progress
from metaq.cli.tree import command
from metaq.client import Client, Start

WINDOW_S: Final = 60
SAMPLE_COUNT: Final = 1000
SAMPLE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum bytes of sampled messages; the last message may exceed it."""

topics_argument = click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
every_option = click.option(
    "--every",
    "interval_s",
    type=SecondsRange(0.01, INTERVAL_S_MAX),
    help="Run until Ctrl-C, and start a batch at this interval, in seconds.",
)


@command(
    "pipeline archive",
    topics_argument,
    click.option(
        "--to", "path", required=True, help="Directory or URL of the archive."
    ),
    every_option,
    short_help="Append new messages of topics to a Delta table.",
    examples=(
        "metaq pipeline archive orders --to /archive",
        "metaq pipeline archive orders logs --to hdfs:///archive --every 60",
    ),
)
def archive(
    run: JobRun,
    wire: Wire,
    topics: tuple[str, ...],
    path: str,
    interval_s: float | None,
) -> None:
    """Append new messages of topics to a Delta table, each message once.

    Stops when all messages that were there at the start are archived; with --every,
    runs until Ctrl-C. The archive stores its position, and the next run continues
    there, also after Ctrl-C or a kill.
    """
    options = wire.to_map(subscribe=",".join(topics))
    wire.require(*topics)
    stop = threading.Event()
    with run.session() as session:
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


@command(
    "pipeline replay",
    click.argument("path", metavar="ARCHIVE"),
    click.option(
        "--topic", help="Topic to send to.  [default: original topic of each message]"
    ),
    click.option("--where", help="SQL condition over the columns of the archive."),
    flag(
        "--keep-partitions",
        "keeps_partitions",
        help="Send each message to its original broker and partition.",
    ),
    flag(
        "--keep-origin",
        "keeps_origin",
        help="Add headers replay.origin and replay.timestamp: original partition,"
        " offset and time.",
    ),
    examples=(
        "metaq pipeline replay /archive --topic orders-again",
        "metaq pipeline replay /archive --topic t --where \"date >= '2026-01-31'\"",
    ),
)
def replay(run: JobRun, wire: Wire, path: str, topic: str | None, **asked: Any) -> None:
    """Send the messages of ARCHIVE back to topics, at least once.

    Messages of one partition go to one partition, in order. A MetaQ 1.4 broker may swap
    messages that are in flight together.
    """
    options = wire.to_map() if topic is None else wire.to_map(topic=topic)
    if topic is not None:
        wire.require(topic, kind="puts")

    def work(spark: Any) -> Any:
        from metaq.pipeline.jobs.replay import replay as run_job

        return run_job(spark, path, options, **asked)

    _put(run, "replay", work)


@command(
    "pipeline ingest",
    click.argument("topic"),
    click.argument("paths", nargs=-1, metavar="[PATH]..."),
    click.option(
        "--format",
        "source_format",
        required=True,
        help="Format to read: text, csv, json, parquet, orc, jdbc, ...",
    ),
    pairs_option("--read", "source_options", "Option of the format"),
    click.option(
        "--value",
        help="SQL expression for the data.  [default: column value, else row as JSON]",
    ),
    click.option("--attribute", help="SQL expression for the attribute."),
    click.option(
        "--key",
        help="SQL expression for the key; messages of one key go to one partition.",
    ),
    short_help="Send data that Spark can read to TOPIC.",
    examples=(
        "metaq pipeline ingest logs /var/log/*.log --format text",
        "metaq pipeline ingest people people.csv --format csv --read header=true",
    ),
)
def ingest(run: JobRun, wire: Wire, topic: str, **asked: Any) -> None:
    """Send data that Spark can read to TOPIC, one message per row, at least once."""
    options = wire.to_map(topic=topic)
    wire.require(topic, kind="puts")

    def work(spark: Any) -> Any:
        from metaq.pipeline.jobs.ingest import ingest as run_job

        return run_job(spark, options, **asked)

    _put(run, "ingest", work)


def _put(run: JobRun, name: str, work: Callable[[Any], Any]) -> None:
    """Run a job that puts messages; print the number of messages and bytes."""
    with run.session() as session, task_progress(session, name):
        done = session.run(lambda: work(session.spark))
    print_facts(
        {"messages": done.message_count, "bytes": done.size_bytes}, as_json=run.as_json
    )


@command(
    "pipeline stats",
    topics_argument,
    click.option(
        "--window",
        "window_s",
        type=click.IntRange(1),
        default=WINDOW_S,
        show_default=True,
        help="Length of a window, in seconds.",
    ),
    click.option(
        "--since",
        default="timestamp",
        show_default=True,
        help="SQL expression for the start of the delay, which ends when the message"
        " is read here.",
    ),
    every_option,
    examples=(
        "metaq pipeline stats orders --window 3600",
        "metaq pipeline stats orders --every 10 --json",
    ),
)
def stats(
    run: JobRun,
    wire: Wire,
    topics: tuple[str, ...],
    interval_s: float | None,
    **asked: Any,
) -> None:
    """Print messages, bytes and delay of topics per time window.

    With --every, covers messages that arrive from now on: each line is what one batch
    added to a window.
    """
    options = wire.to_map(subscribe=",".join(topics))
    wire.require(*topics)

    def show(windows: Iterable[Any]) -> None:
        print_windows(map(astuple, windows), as_json=run.as_json)

    with run.session() as session:
        from metaq.pipeline.jobs import window_stats

        if interval_s is not None:
            session.run(
                lambda: window_stats.follow_stats(
                    session.spark, options, show, interval_s=interval_s, **asked
                )
            )
            return
        with task_progress(session, "stats"):
            found = session.run(
                lambda: window_stats.stats(session.spark, options, **asked)
            )
    show(found)


@command(
    "pipeline audit",
    click.argument("topic"),
    click.option("--archive", "path", help="Directory or URL of the archive."),
    click.option("--copy", help="Topic with the same messages."),
    click.option(
        "--id",
        "message_id",
        help="SQL expression that identifies a message of a copy.  [default: content]",
    ),
    examples=(
        "metaq pipeline audit orders --archive /archive",
        "metaq pipeline audit orders --copy orders-again",
    ),
)
def audit(
    run: JobRun,
    wire: Wire,
    topic: str,
    path: str | None,
    copy: str | None,
    message_id: str | None,
) -> bool:
    """Compare TOPIC with its archive or with a copy.

    Prints how many messages are lost, doubled, corrupted, reordered or extra, and the
    first of them. The exit code is 1 if there are any.
    """
    if (path is None) == (copy is None):
        raise click.UsageError("expected exactly one of --archive and --copy")
    if copy is None and message_id is not None:
        raise click.UsageError("--id has no effect without --copy")
    source = wire.to_map(subscribe=topic)
    wire.require(topic, *([] if copy is None else [copy]))
    with run.session() as session:
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
        ("away", str(partition), None, "not compared: no broker serves it now")
        for partition in found.away
    ]
    print_findings(columns, rows, as_json=run.as_json)
    sizes = {"source": found.source_count, "target": found.target_count}
    counts = {kind.value: count for kind, count in found.counts.items()}
    print_facts({**sizes, **counts}, as_json=run.as_json)
    return found.is_right


@command(
    "pipeline verify",
    click.argument("paths", nargs=-1, required=True, metavar="PATH..."),
    short_help="Check every stored byte of data directories or archives.",
    examples=("metaq pipeline verify /var/lib/metaq --master local[8]",),
)
def verify(run: JobRun, paths: tuple[str, ...]) -> bool:
    """Check every stored byte of data directories or archived segments, in parallel.

    The exit code is 1 if there are problems.
    """
    with run.session() as session:
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
    """Print a summary as a table of two columns, or as one object."""
    if as_json:
        render.print_json(facts)
        return
    rows = [(name.replace("_", " "), count) for name, count in facts.items()]
    render.print_rows(("summary", "count"), rows, as_json=False)


def print_findings(
    columns: Sequence[str], rows: Sequence[Sequence[render.Cell]], *, as_json: bool
) -> None:
    """Print a table of findings; nothing if there are none."""
    if rows:
        render.print_rows(columns, rows, as_json=as_json)


def print_windows(windows: Iterable[tuple[Any, ...]], *, as_json: bool) -> None:
    """Print windows as a table, or as objects.

    Args:
        windows: fields of each `WindowStats`, in order.
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


@command(
    "pipeline schema",
    click.argument("topic"),
    count_option(SAMPLE_COUNT),
    start_option(
        "Start position in each partition; TIME as in 'metaq cat'.",
        metavar="earliest|TIME",
    ),
    short_help="Propose a schema for the messages of TOPIC.",
    examples=(
        "metaq pipeline schema orders",
        "metaq pipeline schema logs --count 10000 --json",
    ),
)
def schema(
    target: Target, topic: str, *, count: int, start: str, as_json: bool
) -> bool:
    """Sample messages of TOPIC and propose how to decode them.

    Recognises JSON objects, CSV records, log lines and Avro with a fingerprint, and
    selects the schema that fits most messages. Prints its fields, the expression that
    decodes them, and how many messages fit. The exit code is 1 if no format fits half
    of the messages. Does not start Spark.
    """
    begin = parse_start(start)
    from metaq.pipeline.installed import require_spark

    require_spark()
    from metaq.pipeline.decode import proposal

    cluster = find_topic(target, topic, (), kind="gets")
    partitions = [partition.name for partition in cluster.partitions]
    with cluster.target.client() as client:
        values = read_sample(client, topic, partitions, count=count, start=begin)
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
            f"topic {topic}: {looked_at} sampled; no known format fits half of them:"
            " JSON objects, CSV, log lines, Avro with a fingerprint"
        )
        return False
    render.say(
        f"topic {topic}: {looked_at} sampled, {found.fit_count} fit as"
        f" {found.form.value}"
    )
    for error, times in found.errors:
        render.say(f"{render.count_text(times, 'message')}: {error}")
    return True


def read_sample(
    client: Client, topic: str, partitions: Sequence[str], *, count: int, start: Start
) -> list[bytes]:
    """Return the data of messages of a topic, as many of each partition as possible.

    Args:
        client: client of the cluster.
        topic: topic name.
        partitions: names of the partitions to read.
        count: maximum number of messages; `SAMPLE_BYTES_MAX` bounds their bytes.
        start: where to begin in each partition.
    """
    values: list[bytes] = []
    size_bytes = 0
    for number, partition in enumerate(partitions):
        # Later partitions make up for messages that a partition lacks.
        share = -(-(count - len(values)) // (len(partitions) - number))
        messages = client.browse(
            topic, partitions=[partition], start=start, stop_at_end=True
        )
        with closing(messages):
            for message in islice(messages, share):
                values.append(message.data)
                size_bytes += len(message.data)
                if size_bytes >= SAMPLE_BYTES_MAX:
                    return values
    return values
