"""Settings that Spark starts with, in this process and in those it starts.

Few of its Java machines live long enough for the second compiler and the parallel
collector, and a third of their first minute goes into classes, loaded and checked one
by one. `python -m tests.spark.classes` stores these as Java wants them in memory, once
for each checkout; a Java machine that finds no such file, or one that is not its own,
goes on without.

A session starts a Python for each kind of work, and these look for PySpark in archives
of its sources below Spark's home first: each compiles them again, for most of a second.
So the home that is made here has none, and the installed PySpark is found, compiled.
"""

import os
import shlex
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pyspark

from tests.sampling import IS_WHOLE

VERSION = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
"""Of the PySpark that runs; `metaq/spark/versions.py` says what it has."""

CHECKPOINTS = "org.apache.spark.sql.execution.streaming" + (
    ".checkpointing" if VERSION >= (4, 1) else ""
)
CHEAP = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{CHECKPOINTS}.FileSystemBasedCheckpointFileManager"
    ),
}
"""Settings of queries of few rows: these take longer to plan again and to compile than
to run, and Spark starts a process of the system for each file of a checkpoint that it
renames. A whole run has Spark's own."""

STORE = Path(__file__).parents[2] / ".cache"
NAME = f"spark-{version('pyspark')}"
FILE = STORE / f"{NAME}.jsa"
HOME = STORE / NAME
SETTINGS = "PYSPARK_SUBMIT_ARGS"


def start_quickly(*options: str) -> None:
    """Give options to the Java machines of all sessions that start from now on."""
    java = shlex.join(
        ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xlog:disable", *options]
    )
    settings = {
        "spark.driver.defaultJavaOptions": java,
        "spark.executor.defaultJavaOptions": java,
        **({} if IS_WHOLE else CHEAP),
    }
    words = [f"--conf={name}={value}" for name, value in settings.items()]
    os.environ[SETTINGS] = shlex.join([*words, "pyspark-shell"])
    # Of masters and workers of a cluster, which read no settings of a session.
    os.environ["SPARK_DAEMON_JAVA_OPTS"] = java
    if (HOME / "jars").is_dir():
        os.environ["SPARK_HOME"] = str(HOME)


def use_stored() -> None:
    """Start with the stored classes, where there are any."""
    if SETTINGS not in os.environ:
        start_quickly(f"-XX:SharedArchiveFile={FILE}")


def make_home() -> None:
    """Make a home of Spark without Python sources, from the installed one."""
    HOME.mkdir(parents=True, exist_ok=True)
    for part in ("bin", "jars"):
        (HOME / part).unlink(missing_ok=True)
        (HOME / part).symlink_to(Path(pyspark.__file__).parent / part)


def store() -> None:
    """Store what a session loads that reads, sorts, joins, writes and streams."""
    from pyspark.sql import SparkSession

    draft = FILE.with_suffix(f".{os.getpid()}")
    start_quickly(f"-XX:ArchiveClassesAtExit={draft}")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/table"
        rows = session.range(9).selectExpr("id", "cast(id AS STRING) AS text")
        rows.rdd.map(lambda row: row.id).collect()
        rows.write.partitionBy("id").parquet(path)
        table = session.read.parquet(path)
        table.join(rows, "id").groupBy("id").count().orderBy("id").collect()
        stream = session.readStream.schema(table.schema).parquet(path)
        query = (
            stream.writeStream.foreachBatch(lambda frame, _number: frame.collect())
            .option("checkpointLocation", f"{directory}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    machine = session.sparkContext._gateway.proc  # type: ignore[union-attr]
    session.stop()
    machine.stdin.close()
    machine.wait()
    # Not every Java does.
    if draft.exists():
        draft.rename(FILE)


if __name__ == "__main__":
    make_home()
    if not FILE.exists():
        store()
