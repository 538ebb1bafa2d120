"""Processes of Spark import what they use: Spark starts, and forks, many of them."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from metaq.model import Offset
from metaq.pipeline.jobs.day_files import write_task
from metaq.spark.options import SinkOptions, SourceOptions
from metaq.spark.plan import ReadRange
from metaq.spark.sink.exact_sink import ExactSink
from metaq.spark.sink.writer import batch_writer, stream_writer
from metaq.spark.source.batch import BatchReader
from metaq.spark.source.read_task import ReadTask, read_rows
from metaq.spark.source.stream import StreamReader
from metaq.spark.versions import tasks_of
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import TOPIC, data_of, numbered, publish, stored, tp, wire

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIBRARIES = {
    "aiohttp", "apscheduler", "click", "configobj", "deltalake", "fastavro", "kazoo",
    "lark", "prometheus_client", "rich", "sqlalchemy",
}  # fmt: skip
"""Without pandas, which PyArrow imports by itself where it is installed."""
OF_THE_DRIVER = {
    "metaq.client.cluster.context", "metaq.client.public", "metaq.client.session",
    "metaq.config.load", "metaq.config.settings", "metaq.spark.cluster",
    "metaq.spark.sink.exactly_once", "metaq.spark.source.dead_letters",
    "metaq.spark.source.facts", "metaq.zk.coordinator",
}  # fmt: skip
ROWS = StructType([StructField("value", BinaryType())])
MODULES = "print(*sorted(sys.modules))"


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={TOPIC: 1}) as found:
        yield found


def modules_after(code: str, *pickled: Any) -> set[str]:
    """Return what a process has imported that was handed objects, and ran code."""
    done = subprocess.run(
        [sys.executable, "-c", f"import pickle, sys\n{code}\n{MODULES}"],
        cwd=ROOT,
        input=pickle.dumps(pickled),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return set(done.stdout.decode().splitlines()[-1].split())


def test_the_formats_are_found_at_the_cost_of_their_names() -> None:
    """Each first use of a format in a session imports both."""
    found = modules_after("import pyspark_metaq, pyspark_metaq_segments")
    assert "metaq.spark.data_source" in found
    assert found & (LIBRARIES | OF_THE_DRIVER | {"asyncio", "pyarrow"}) == set()
    assert {name for name in found if name.startswith("metaq.client")} == set()


def test_a_task_that_reads_imports_no_client(broker: EmbeddedBroker) -> None:
    """It is given everything, and connects to one broker."""
    publish(broker, numbered(10))
    (log,) = stored(broker).values()
    span = ReadRange(tp(0), Offset(0), Offset(log[-1].offset))
    (task,) = tasks_of([(ReadTask(span, broker.address),)])
    for kind, is_stream in ((BatchReader, False), (StreamReader, True)):
        options = SourceOptions.from_map(
            wire(broker, subscribe=TOPIC), is_stream=is_stream
        )
        reader = kind(options, pa.binary())
        found = modules_after(
            "reader, task = pickle.load(sys.stdin.buffer)\n"
            "assert sum(batch.num_rows for batch in reader.read(task)) == 9",
            reader,
            task,
        )
        assert found & (LIBRARIES | OF_THE_DRIVER) == set()


def test_a_task_of_an_archive_imports_no_library_of_tables(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """It reads as others do, and writes files alone."""
    (log,) = stored(broker).values()
    if not log:
        publish(broker, numbered(10))
        (log,) = stored(broker).values()
    task = ReadTask(ReadRange(tp(0), Offset(0), Offset(log[-1].offset)), broker.address)
    options = SourceOptions.from_map(wire(broker, subscribe=TOPIC), is_stream=True)
    read = partial(read_rows, options=options)
    write = partial(write_task, read=read, root=str(tmp_path), staging="staging")
    found = modules_after(
        "write, task = pickle.load(sys.stdin.buffer)\n"
        f"assert sum(file.message_count for file in write(task)) == {len(log) - 1}",
        write,
        task,
    )
    assert found & (LIBRARIES | OF_THE_DRIVER) == set()


def test_a_task_that_writes_imports_no_client_with_zookeeper(
    broker: EmbeddedBroker,
) -> None:
    """It is given where the partitions are; so is one of a stream."""
    options = wire(broker, topic=TOPIC)
    before = len(data_of(stored(broker)))
    for number, writer in enumerate(
        (
            batch_writer(options, ROWS, is_overwrite=False),
            stream_writer(options, ROWS, is_planned=True),
        ),
        1,
    ):
        found = modules_after(
            "import pyarrow as pa\n"
            "(writer,) = pickle.load(sys.stdin.buffer)\n"
            "values = pa.array([b'one', b'two'], pa.binary())\n"
            "writer.write(iter([pa.RecordBatch.from_arrays([values], ['value'])]))",
            writer,
        )
        assert found & (LIBRARIES | OF_THE_DRIVER) == set()
        assert len(data_of(stored(broker))) == before + 2 * number


def test_a_task_that_prepares_imports_no_transaction_manager() -> None:
    """Nor a client, before it has prepared: then it looks at the turn of its driver."""
    options = SinkOptions.from_map(
        {"zookeeper": "127.0.0.1:2181", "topic": TOPIC, "delivery": "exactly-once"}
    )
    sink = ExactSink(options, name="n", place="p", write=None, is_planned=False)
    found = modules_after("pickle.load(sys.stdin.buffer)", sink)
    assert "metaq.spark.sink.exact_sink" in found
    assert found & (LIBRARIES | OF_THE_DRIVER) == set()
