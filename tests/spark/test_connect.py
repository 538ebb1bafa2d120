"""A client of Spark Connect, in a process that has no JVM."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.pipeline.errors import JobError
from metaq.pipeline.jobs.session import sentence_of
from metaq.testing.embedded import embedded_broker
from tests.spark.brokers import TOPIC, wire
from tests.spark.conftest import HAS_CONNECT, ROOT

pytest.importorskip("grpc")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_CONNECT, reason="was tried from PySpark 4.2 on"),
]

WAIT_S = 600.0
CONNECT = """
import json, sys
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
import metaq.spark

url, options, place = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
spark = SparkSession.builder.remote(url).getOrCreate()
metaq.spark.register(spark)
metaq.spark.register(spark)
rows = spark.range(10).selectExpr("concat('line ', id) AS value")
rows.write.format("metaq").options(**options, topic="logs").mode("append").save()
ours = spark.read.format("metaq").options(**options)
found = {"read": ours.option("subscribe", "logs").load().count()}
(
    spark.readStream.format("metaq")
    .options(**options, subscribe="logs", startingOffsets="earliest")
    .load()
    .selectExpr("string(value) AS line")
    .writeStream.format("parquet")
    .option("path", place + "/lines")
    .option("checkpointLocation", place + "/checkpoint")
    .trigger(availableNow=True)
    .start()
    .awaitTermination()
)
found["streamed"] = spark.read.parquet(place + "/lines").count()
try:
    ours.option("subscribe", "nobody").load().count()
except PySparkException as error:
    found["error"] = str(error)
spark.stop()
print(json.dumps(found))
"""


def test_a_client_of_spark_connect_reads_writes_streams_and_hears_of_errors(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The formats are registered there as in a session of its own process."""
    from metaq.pipeline.declared.updates import server_url

    script = tmp_path / "client.py"
    script.write_text(CONNECT)
    with embedded_broker(topics={TOPIC: 2}) as broker:
        options = json.dumps(wire(broker, retryTimeoutMs=1000))
        done = subprocess.run(
            [sys.executable, str(script), server_url(spark), options, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["read"], found["streamed"]) == (10, 10)
    assert "no broker has topic 'nobody'" in sentence_of(JobError(found["error"]))


WITHOUT_PACKAGE = """
import sys
sys.path.insert(0, sys.argv[1])
from pyspark.sql import SparkSession
import metaq.spark
from metaq.errors import MetaqError

spark = SparkSession.builder.remote("local[1]").getOrCreate()
try:
    metaq.spark.register(spark)
except MetaqError as error:
    print(f"refused: {error}")
spark.stop()
"""


def test_a_server_whose_python_lacks_this_package_is_named_with_the_cure(
    tmp_path: Path,
) -> None:
    """When the formats are registered, in place of a trace with the first query."""
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    # A session of another test leaves the gateway of its JVM in the environment.
    left = ("PYSPARK_", "SPARK_REMOTE", "SPARK_LOCAL", "SPARK_CONNECT")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(left)}
    # SPARK_TESTING: the server takes a free port, and others run beside this test.
    own = {"PYTHONPATH": "", "PYSPARK_PYTHON": str(bare), "SPARK_TESTING": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, str(ROOT)],
        env={**clean, **own},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    sentence = "".join(done.stdout.splitlines()[-1:])
    # Without site-packages PySpark is there only where SPARK_HOME has it.
    wanted = r"refused: the Python of the server of Spark Connect has no module \w+:"
    assert re.match(wanted, sentence), done.stderr[-4000:]
    assert "PYSPARK_PYTHON set to an interpreter" in sentence, done.stderr[-4000:]
