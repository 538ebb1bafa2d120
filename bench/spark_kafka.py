"""Spark with Kafka and with ours: same rows, aggregate and session, brokers included.

Kafka runs with its defaults, on one node: its broker acknowledges records that it has
handed to the system, for which the producer of Spark's connector waits (`acks=all`).
Ours acknowledges records that are on the disk.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pyspark.sql import SparkSession

from bench import load
from bench.figures import TOPIC, Turns, WithLines, batches
from bench.lines import Payloads
from bench.processes import SERVER_JAVA
from bench.spark_figures import WARM_UPS, rows_per_second, session, write_rows
from bench.spark_wire import (
    READ_BATCHES,
    RECORDS,
    TASKS,
    WRITTEN,
    register_all,
    seconds_to_write,
    where,
)
from metaq.pipeline.jobs.session import end_java
from metaq.testing.servers import reserve_port
from metaq.zk.embedded import find_java
from tests.java.jars import Artifact, find_jars
from tests.rigs.process import BrokerProcess

SERVER = Artifact("org.apache.kafka", "kafka_2.13", "4.4.0")
CONNECTOR = Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0")
"""The newest release; it runs with PySpark 4.2 and 4.3."""
ADDED = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")
"""Jars of the connector that Spark does not have."""
CLUSTER_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
WRITE_PARTITIONS = 4

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


class KafkaBroker:
    """One node, broker and controller, in its own process. A context manager.

    `more` has further lines of its properties.
    """

    def __init__(self, home: Path, more: str = "") -> None:
        home.mkdir(parents=True)
        self.address = f"127.0.0.1:{reserve_port(self)}"
        self._log = home / "kafka.log"
        self._properties = home / "server.properties"
        self._properties.write_text(
            PROPERTIES.format(
                port=self.address.partition(":")[2],
                controller=reserve_port(self),
                data=home / "data",
            )
            + more
        )
        classpath = os.pathsep.join(map(str, find_jars(SERVER)))
        self._java = [find_java(), *SERVER_JAVA, "-cp", classpath]

    def __enter__(self) -> Self:
        config = str(self._properties)
        new = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID]
        done = subprocess.run(
            [*self._java, *new, "-c", config],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [*self._java, "kafka.Kafka", config], stdout=log, stderr=log
            )
        return self

    def __exit__(self, *_error: object) -> None:
        self._child.kill()
        self._child.wait()


@contextmanager
def kafka_session() -> Iterator[SparkSession]:
    """Run a session with both formats; real lines and one length share it."""
    jars = [str(p) for p in find_jars(CONNECTOR) if p.name.startswith(ADDED)]
    if SparkSession.getActiveSession() is None:
        end_java()  # another figure's process lacks the jars
    with session({"spark.driver.extraClassPath": os.pathsep.join(jars)}) as spark:
        register_all(spark)
        yield spark


def make_topic(spark: SparkSession, kafka: KafkaBroker, partitions: int) -> None:
    """Create the topic in Kafka; waits until its broker is up."""
    admin = spark._jvm.org.apache.kafka.clients.admin
    client = admin.Admin.create({"bootstrap.servers": kafka.address})
    topic = admin.NewTopic(TOPIC, partitions, 1)
    client.createTopics([topic]).all().get()
    client.close()


def read(directory: Path, payloads: Payloads) -> Turns:
    """Read a topic of one partition into a count and a checksum over value.

    Raises:
        NoJarsError: the jars are not available.
    """
    count = RECORDS * READ_BATCHES
    with (
        KafkaBroker(directory / "kafka") as kafka,
        BrokerProcess(directory / "read", topic=TOPIC) as broker,
        kafka_session() as spark,
    ):
        work = batches(payloads, RECORDS, READ_BATCHES)
        load.pipeline(broker.port, work, 8, load.ok_counter())
        make_topic(spark, kafka, 1)
        rows = spark.read.parquet(write_rows(directory, payloads, count))
        seconds_to_write(rows, "kafka", of_kafka(kafka, topic=TOPIC))
        theirs, ours = (
            spark.read.format(name).options(**place, subscribe=TOPIC).load()
            for name, place in (
                ("kafka", of_kafka(kafka, minPartitions=TASKS)),
                ("metaq", where(broker, minPartitions=TASKS)),
            )
        )
        while True:
            plain = rows_per_second(theirs, count)
            yield plain, rows_per_second(ours, count)


def write(directory: Path, payloads: Payloads) -> Turns:
    """Write rows to a topic of four partitions; Kafka leaves the disk to the system.

    Raises:
        NoJarsError: the jars are not available.
    """
    with (
        KafkaBroker(directory / "kafka") as kafka,
        BrokerProcess(
            directory / "write", topic=TOPIC, partition_count=WRITE_PARTITIONS
        ) as broker,
        kafka_session() as spark,
    ):
        make_topic(spark, kafka, WRITE_PARTITIONS)
        rows = spark.read.parquet(write_rows(directory, payloads, WRITTEN))
        theirs, ours = of_kafka(kafka, topic=TOPIC), where(broker, topic=TOPIC)
        while True:
            plain = WRITTEN / seconds_to_write(rows, "kafka", theirs)
            yield plain, WRITTEN / seconds_to_write(rows, "metaq", ours)


def of_kafka(kafka: KafkaBroker, **more: Any) -> dict[str, Any]:
    return {"kafka.bootstrap.servers": kafka.address, **more}


FIGURES = {
    "spark-kafka-read": WithLines(
        read,
        "Spark: batch read (floor: Kafka's connector and broker)",
        "rows/s",
        "1.0",
        warm_ups=WARM_UPS,
    ),
    "spark-kafka-write": WithLines(
        write,
        "Spark: batch write (floor: Kafka's connector and broker)",
        "rows/s",
        "0.8",
        warm_ups=WARM_UPS,
    ),
}
