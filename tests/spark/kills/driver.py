"""A driver that a test talks to: `... MASTER`, a job per line of standard input.

Each line is an object: `job`, and the words of that function. The answer is a line that
begins with `ANSWER`: what the job returned, or the sentence with which it failed.
"""

import dataclasses
import json
import os
import sys
from typing import Any

from pyspark.sql import SparkSession

from metaq.pipeline.jobs.archive import archive
from metaq.pipeline.jobs.archive_store import read_archive
from metaq.pipeline.jobs.ingest import ingest
from metaq.pipeline.jobs.replay import replay
from tests.spark.kills.steps import DIRECTORY, DyingDataSource, dying_archive

ANSWER = "answer: "
TIMEOUT_S = 240
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50",
    # As many executors as a round of kills takes.
    "spark.deploy.maxExecutorRetries": "-1",
}
EXECUTOR_VARIABLES = ("PYTHONPATH", DIRECTORY)


def copy(
    spark: SparkSession,
    *,
    source: dict[str, str],
    target: dict[str, str],
    checkpoint: str,
) -> None:
    """Copy what is there of a topic, partition by partition."""
    rows = spark.readStream.format("metaq").options(**source).load()
    query = (
        rows.select("value", "attribute", "broker_id", "partition")
        .writeStream.format("metaq")
        .options(**target)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TIMEOUT_S)


def spread(
    spark: SparkSession,
    *,
    source: dict[str, str],
    target: dict[str, str],
    checkpoint: str,
) -> None:
    """Copy what is there of a topic to all partitions of another one, by key."""
    rows = spark.readStream.format("metaq").options(**source).load()
    query = (
        rows.selectExpr("value", "string(value) AS key")
        .writeStream.format("metaq")
        .options(**target)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TIMEOUT_S)


def write(
    spark: SparkSession, *, source: dict[str, str], target: dict[str, str]
) -> None:
    """Copy what is there of a topic as one batch."""
    rows = spark.read.format("metaq").options(**source).load()
    named = rows.select("value", "attribute", "broker_id", "partition")
    named.write.format("metaq").options(**target).mode("append").save()


def archived(spark: SparkSession, *, path: str) -> dict[str, list[str]]:
    """Return what an archive holds: partition → messages by offset."""
    found: dict[str, list[str]] = {}
    for row in read_archive(spark, path).orderBy("partition", "offset").collect():
        name = f"{row['broker_id']}-{row['partition']}"
        found.setdefault(name, []).append(row["value"].decode())
    return found


def start(master: str) -> SparkSession:
    builder = SparkSession.builder.master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    for name in EXECUTOR_VARIABLES:
        builder = builder.config(f"spark.executorEnv.{name}", os.environ[name])
    spark = builder.getOrCreate()
    spark.dataSource.register(DyingDataSource)
    return spark


JOBS: tuple[Any, ...] = (copy, spread, write, archive, archived, replay, ingest)


def run(spark: SparkSession, job: str, words: dict[str, Any]) -> Any:
    jobs = {each.__name__: each for each in JOBS}
    with dying_archive():
        done: Any = jobs[job](spark, **words)
    return dataclasses.asdict(done) if hasattr(done, "message_count") else done


def main(master: str) -> None:
    spark = start(master)
    print(f"{ANSWER}{{}}", flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        try:
            answer = {"done": run(spark, words.pop("job"), words)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
