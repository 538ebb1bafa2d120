"""An archive goes back to topics, in order, by a real broker."""

from itertools import chain
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.client import Client
from metaq.pipeline.errors import ArchiveError, JobError
from metaq.pipeline.jobs.archive import archive
from metaq.pipeline.jobs.archive_store import read_archive
from metaq.pipeline.jobs.audit import audit_archive, audit_copy
from metaq.pipeline.jobs.replay import replay
from metaq.pipeline.jobs.window_stats import stats
from metaq.spark.errors import OptionError
from metaq.testing.embedded import EmbeddedBroker
from tests.spark.brokers import TOPIC, data_of, numbered, publish, stored, tp
from tests.spark.brokers import wire as options

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_topic_goes_to_an_archive_and_back(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Archived in two runs, audited, replayed in order, audited against the copy."""
    path = str(tmp_path / "archive")
    wire = options(broker)
    publish(broker, numbered(100))
    publish(broker, numbered(50, 100), partition=tp(1))
    found = archive(spark, path, {**wire, "subscribe": TOPIC})
    assert found.total_message_count == 150
    publish(broker, numbered(30, 500))
    partial = audit_archive(spark, path, wire, [TOPIC])
    assert partial.is_right
    assert {k.value: n for k, n in partial.counts.items() if n} == {"behind": 30}
    found = archive(spark, path, {**wire, "subscribe": TOPIC})
    assert (found.message_count, found.total_message_count) == (30, 180)
    audit = audit_archive(spark, path, wire, [TOPIC])
    assert audit.is_right
    assert not any(audit.counts.values())
    rows = read_archive(spark, path).collect()
    assert sorted(bytes(r.value) for r in rows) == data_of(stored(broker))

    written = replay(spark, path, {**wire, "topic": "copy"})
    assert written.message_count == 180
    assert written.size_bytes == sum(len(r.value) for r in rows)
    assert audit_copy(
        spark, {**wire, "subscribe": TOPIC}, {**wire, "subscribe": "copy"}
    ).is_right
    for messages in stored(broker, "copy").values():
        for group in (numbered(100) + numbered(30, 500), numbered(50, 100)):
            there = [m.data for m in messages if m.data in set(group)]
            assert there in ([], group)

    some = replay(
        spark,
        path,
        {**wire, "topic": "same"},
        where="partition = 1 AND offset < 350",
        keeps_partitions=True,
    )
    assert some.message_count == 10
    kept = stored(broker, "same")
    assert [m.data for m in kept["0-1"]] == numbered(10, 100)
    assert kept["0-0"] == []
    with pytest.raises(JobError, match="topic less lacks partition 0-1 of the archive"):
        replay(spark, path, {**wire, "topic": "less"}, keeps_partitions=True)
    assert stored(broker, "less") == {"0-0": []}


def test_a_replay_keeps_place_and_time_in_headers_if_asked(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """After the message's own; a second replay leaves them as they are."""
    wire = options(broker)
    with Client(brokers=[broker.address]) as client, client.producer() as producer:
        for number in range(2):
            producer.send(TOPIC, b"%d" % number, headers={"own": b"x"})
    wanted = {
        (
            *(message.data, "own", b"x"),
            *("replay.origin", f"{message.partition}@{message.offset}".encode()),
            *("replay.timestamp", str(message.timestamp_ms).encode()),
        )
        for messages in stored(broker).values()
        for message in messages
    }
    for source, target in ((TOPIC, "copy"), ("copy", "same")):
        path = str(tmp_path / source)
        archive(spark, path, {**wire, "subscribe": source})
        replay(spark, path, {**wire, "topic": target}, keeps_origin=True)
        assert wanted == {
            (message.data, *chain.from_iterable(message.headers.items()))
            for messages in stored(broker, target).values()
            for message in messages
        }


def test_failures_are_one_sentence(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """An option that is wrong, an archive that is none, a condition that is none."""
    path = str(tmp_path / "archive")
    with pytest.raises(OptionError, match="expected exactly one of subscribe"):
        archive(spark, path, options(broker))
    with pytest.raises(ArchiveError, match="not an archive"):
        replay(spark, path, options(broker, topic="copy"))
    publish(broker, numbered(5))
    archive(spark, path, options(broker, subscribe=TOPIC))
    with pytest.raises(JobError, match=r"replay: .*nonsense"):
        replay(spark, path, options(broker, topic="copy"), where="nonsense = 1")
    with pytest.raises(OptionError, match=r"window: expected 1\.\.1000000000 seconds"):
        stats(spark, options(broker, subscribe=TOPIC), window_s=10**13)
