"""The Spark part of the demo: archive a topic, count its lines, audit the archive."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from metaq.cli import render
from metaq.errors import MetaqError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER: Final = "local[2]"
SETTINGS: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
ROWS_MAX: Final = 12
COMPONENT_CHARS_MAX: Final = 40

# The level is the first word that is one; the component is the program of a syslog
# line, and else the file that the line comes from.
COUNTS: Final = r"""
    SELECT coalesce(nullif(upper(regexp_extract(line,
               '(?i)\\b(TRACE|DEBUG|INFO|NOTICE|WARN|ERROR|FATAL)', 1)), ''), '-')
               AS level,
           coalesce(nullif(regexp_extract(line,
               '^\\S+ +[0-9]+ [0-9:]+ \\S+ ([\\w./-]+)(?:\\[[0-9]+\\])?:', 1), ''),
               attribute, '-') AS component,
           count(*) AS lines
    FROM (SELECT cast(value AS STRING) AS line, attribute FROM archived)
    GROUP BY level, component
    ORDER BY lines DESC, level, component
"""


def run_pipeline(zookeeper: str, topic: str, archive: Path, wanted_count: int) -> None:
    """Archive a topic to a table, count it with Spark SQL, audit it against the topic.

    Raises:
        MetaqError: Spark does not start, a job fails, or the archive is not the topic.
    """
    from metaq.pipeline.jobs.session import job_session  # noqa: PLC0415  # the same

    print("Archiving the topic to a Delta table with Spark ...", flush=True)
    started_s = time.monotonic()
    with job_session(MASTER, SETTINGS) as session:
        spark = session.spark
        print(f"  Spark {spark.version}, ", end="")
        print(f"ready after {time.monotonic() - started_s:.1f} s", flush=True)
        _run_jobs(spark, zookeeper, topic, archive, wanted_count)


def _run_jobs(
    spark: "SparkSession", zookeeper: str, topic: str, path: Path, wanted_count: int
) -> None:
    from metaq.pipeline.jobs.archive import archive  # noqa: PLC0415  # Spark is optional
    from metaq.pipeline.jobs.archive_store import read_archive  # noqa: PLC0415  # the same
    from metaq.pipeline.jobs.audit import audit_archive  # noqa: PLC0415  # the same

    started_s = time.monotonic()
    wire = {"zookeeper": zookeeper}
    done = archive(spark, str(path), {**wire, "subscribe": topic})
    seconds = time.monotonic() - started_s
    files = render.count_text(done.total_file_count, "file")
    size = f"{files}, {done.total_bytes / 2**20:.1f} MiB"
    print(f"  {done.message_count:,} messages in {size}: {seconds:.1f} s", flush=True)
    read_archive(spark, str(path)).createOrReplaceTempView("archived")
    print_table(spark)
    audit = audit_archive(spark, str(path), wire, [topic])
    for finding in audit.findings:
        print(f"  {finding}", file=sys.stderr)
    if not audit.is_right or audit.target_count != wanted_count:
        raise MetaqError(
            f"the archive is not the topic: {audit.target_count} messages archived,"
            f" {audit.source_count} in the topic, {wanted_count} sent"
        )
    print(f"  audit: all {audit.source_count:,} messages of the topic", end="")
    print(" are archived, none lost, doubled or changed", flush=True)


def print_table(spark: "SparkSession") -> None:
    """Print how many lines of which level each component wrote."""
    rows = spark.sql(COUNTS).collect()
    print(f"  {'level':<8} {'component':<{COMPONENT_CHARS_MAX}} {'lines':>9}")
    for row in rows[:ROWS_MAX]:
        component = row["component"][:COMPONENT_CHARS_MAX]
        print(f"  {row['level']:<8} {component:<{COMPONENT_CHARS_MAX}}", end="")
        print(f" {row['lines']:>9,}")
    if rest := rows[ROWS_MAX:]:
        lines = sum(row["lines"] for row in rest)
        print(f"  {'':<8} {f'{len(rest)} more':<{COMPONENT_CHARS_MAX}} {lines:>9,}")
