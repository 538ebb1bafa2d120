"""A stream over a topic that has a work queue, delayed messages and a filter."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.client import Client
from metaq.testing.embedded import EmbeddedBroker
from tests.rigs.waiting import wait_until
from tests.spark.brokers import TOPIC
from tests.spark.test_executors import RealZooKeeper
from tests.spark.test_stream import Archive, wait_for

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.zookeeper,
    pytest.mark.timeout(900),
]


def test_a_stream_has_what_matches_whatever_workers_do(
    spark: SparkSession, zookeeper: str, tmp_path: Path
) -> None:
    """Rows are there once: acknowledged, returned and rejected ones, delayed ones when
    their time has come, none of the dead letters or of what is cancelled."""
    broker = EmbeddedBroker(
        tmp_path / "data",
        topics={TOPIC: 2, "dead": 1},
        zookeeper=RealZooKeeper(zookeeper),  # type: ignore[arg-type]  # it will do
    )
    broker.start()
    archive = Archive(spark, tmp_path / "archive")
    paid = {b"paid %d" % number for number in range(40)}
    late = {b"late %d" % number for number in range(10)}
    try:
        with Client(zookeeper) as client, client.producer() as producer:
            query = archive.start(
                broker, startingOffsets="earliest", where="tag = 'paid'"
            )
            try:
                for data in sorted(late):
                    producer.send(TOPIC, data, tag="paid", delay=3.0)
                never = producer.send(TOPIC, b"never", tag="paid", delay=3.0)
                assert producer.cancel(never)
                for data in sorted(paid):
                    producer.send(TOPIC, data, tag="paid")
                    producer.send(TOPIC, b"void of " + data, tag="void")
                returned, rejected, done = set[bytes](), set[bytes](), set[bytes]()
                with client.queue(
                    TOPIC, group="workers", dead_letter_topic="dead", where="tag='paid'"
                ) as queue:
                    for message in queue:
                        data = message.data
                        if data.endswith(b"1") and data not in returned:
                            returned.add(data)
                            message.nack(delay=0)
                        elif data.endswith(b"2"):
                            rejected.add(data)
                            message.reject("no")
                        else:
                            done.add(data)
                            message.ack()
                        if done | rejected == paid | late:
                            break
                wait_for(query, lambda: set(archive.values()) >= paid | late)
            finally:
                query.stop()
            assert archive.values() == sorted(paid | late)
            wait_until(lambda: len(list(client.browse("dead"))) == len(rejected))
            assert rejected
            assert returned
    finally:
        broker.stop()
