"""Start of Spark's processes: imports, and the time to the first micro-batches."""

import queue
import statistics
import subprocess
import sys
import time
from pathlib import Path

from pyspark.sql import DataFrame

from bench.figures import TOPIC, Figure
from bench.processes import ROOT
from bench.spark_figures import session
from bench.spark_wire import where
from metaq.client import Client
from metaq.spark.data_source import register
from tests.rigs.process import BrokerProcess

WARM_UP_PUTS = 10
PUTS = 20
PAUSE_S = 0.05
VISIBLE_S = 60.0
IMPORT_SECONDS = """
import time
{before}
started = time.process_time()
{after}
print(time.process_time() - started)
"""


def imports(directory: Path, rounds: int) -> Figure:
    """Processor time of the import by which PySpark finds our formats."""
    del directory
    return _imports("import pyspark_metaq", "import pyspark", rounds)


def task_imports(directory: Path, rounds: int) -> Figure:
    """Processor time of the imports of a reading task, beyond those of its worker."""
    del directory
    worker = "import pyspark.worker, pyspark.sql.pandas.types, pyarrow.compute"
    return _imports("import metaq.spark.source.read_task", worker, rounds)


def _imports(after: str, before: str, rounds: int) -> Figure:
    figure = Figure(
        f"Spark: processor time of `{after}` over `{before}`",
        "s",
        [],
        at_least="0.15",
        aim="0.05",
    )
    code = IMPORT_SECONDS.format(before=before, after=after)
    for sample in range(-1, rounds):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True
        )
        if sample >= 0:
            figure.broker.append(float(done.stdout))
    return figure


def visible(directory: Path, rounds: int) -> Figure:
    """Time from a put until the function of `foreachBatch` has it, default trigger."""
    figure = Figure(
        "Spark: put until visible in foreachBatch, default trigger, p50",
        "ms",
        [],
        at_least="350",
        aim="200",
    )
    seen: queue.Queue[bytes] = queue.Queue()

    def take(frame: DataFrame, _batch: int) -> None:
        for row in frame.select("value").collect():
            seen.put(bytes(row.value))

    with (
        BrokerProcess(directory / "visible", topic=TOPIC) as broker,
        session() as spark,
        Client(brokers=[f"127.0.0.1:{broker.port}"]) as client,
        client.producer() as producer,
    ):
        register(spark)
        options = where(broker, subscribe=TOPIC, startingOffsets="earliest")

        def put_until_seen(number: int) -> float:
            time.sleep(PAUSE_S)
            started = time.perf_counter()
            producer.send(TOPIC, b"%d" % number)
            while seen.get(timeout=VISIBLE_S) != b"%d" % number:
                pass
            return (time.perf_counter() - started) * 1000

        producer.send(TOPIC, b"first")
        query = (
            spark.readStream.format("metaq")
            .options(**options)
            .load()
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(directory / "checkpoint"))
            .start()
        )
        try:
            for number in range(WARM_UP_PUTS):
                put_until_seen(number)
            for _ in range(rounds):
                samples = [put_until_seen(WARM_UP_PUTS + n) for n in range(PUTS)]
                figure.broker.append(statistics.median(samples))
        finally:
            query.stop()
    return figure
