"""The jobs against a real broker: archive, audit, replay, ingest, stats."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.errors import NoBrokerError
from metaq.pipeline.errors import ArchiveError, JobError
from metaq.pipeline.jobs.archive import archive
from metaq.pipeline.jobs.archive_store import open_archive, read_archive
from metaq.pipeline.jobs.audit import AuditFindingKind, audit_archive, audit_copy
from metaq.pipeline.jobs.compact import compact
from metaq.pipeline.jobs.ingest import ingest
from metaq.pipeline.jobs.replay import replay
from metaq.pipeline.jobs.window_stats import WindowStats, follow_stats, stats
from metaq.spark.errors import OptionError
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import (
    TOPIC,
    data_of,
    numbered,
    options_of,
    publish,
    stored,
    tp,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with a topic and room for a copy."""
    with embedded_broker(topics={TOPIC: 2, "copy": 3, "same": 2, "less": 1}) as found:
        yield found


def options(broker: EmbeddedBroker, **more: str) -> dict[str, str]:
    return {name: str(value) for name, value in options_of(broker, **more).items()}


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
    behind = audit_archive(spark, path, wire, [TOPIC])
    assert behind.is_right
    assert {k.value: n for k, n in behind.counts.items() if n} == {"behind": 30}
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


def test_what_an_archive_has_lost_is_lost(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Its last files, a whole partition, rows of a file; not what it never had."""
    path = tmp_path / "archive"
    wire = options(broker)
    for first in (0, 30):
        publish(broker, numbered(30, first))
        publish(broker, numbered(10, 100 + first), partition=tp(1))
        archive(spark, str(path), {**wire, "subscribe": TOPIC})
    publish(broker, numbered(5, 200))

    def audited() -> dict[str, int]:
        found = audit_archive(spark, str(path), wire, [TOPIC])
        assert found.is_right == (not found.counts[AuditFindingKind.LOST])
        return {kind.value: n for kind, n in found.counts.items() if n}

    assert audited() == {"behind": 5}
    files = open_archive(str(path)).files()
    place = {(file.log.partition, file.log.first > 0): file for file in files}
    assert sorted(file.message_count for file in files) == [10, 10, 30, 30]
    last = path / place[tp(1), True].path
    rows = spark.read.parquet(str(last)).limit(6).coalesce(1)
    rows.write.parquet(str(tmp_path / "less"))
    (less,) = (tmp_path / "less").glob("*.parquet")
    less.rename(last)
    assert audited() == {"lost": 4, "behind": 5}
    (path / place[tp(0), True].path).unlink()
    assert audited() == {"lost": 34, "behind": 5}
    last.unlink()
    (path / place[tp(1), False].path).unlink()
    assert audited() == {"lost": 30 + 20, "behind": 5}
    Path(path, place[tp(0), False].path).write_bytes(b"PAR1 no more")
    with pytest.raises(ArchiveError, match=place[tp(0), False].path):
        audited()
    with pytest.raises(NoBrokerError, match="no broker has topic 'lgos'; topics with"):
        audit_archive(spark, str(path), wire, ["lgos"])
    with pytest.raises(ArchiveError, match=r"never given topic 'copy'; its .*: logs$"):
        audit_archive(spark, str(path), wire, ["copy"])
    archive(spark, str(path), {**wire, "subscribe": "copy"})
    assert audit_archive(spark, str(path), wire, ["copy"]).is_right


def test_what_was_put_together_and_lost_is_lost(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """The table has how many messages a file had, and between which partitions."""
    path, wire = str(tmp_path / "archive"), options(broker)
    for first in (0, 30):
        publish(broker, numbered(30, first))
        publish(broker, numbered(10, 100 + first), partition=tp(1))
        archive(spark, path, {**wire, "subscribe": TOPIC})
    assert compact(path).written_count > 0
    publish(broker, numbered(5, 200))
    found = audit_archive(spark, path, wire, [TOPIC])
    assert {kind.value: n for kind, n in found.counts.items() if n} == {"behind": 5}
    for file in open_archive(path).files():
        Path(path, file.path).unlink()
    found = audit_archive(spark, path, wire, [TOPIC])
    counts = {kind.value: n for kind, n in found.counts.items() if n}
    assert counts == {"lost": 80, "behind": 5}


def test_a_topic_that_was_made_anew_has_an_archive_of_its_own(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Messages in front of the archive's end would never be archived."""
    path = str(tmp_path / "archive")
    publish(broker, numbered(10))
    archive(spark, path, options(broker, subscribe=TOPIC))
    with embedded_broker(topics={TOPIC: 2}) as other:
        publish(other, numbered(5, 100))
        audit = audit_archive(spark, path, options(other), [TOPIC])
        counts = {kind.value: n for kind, n in audit.counts.items() if n}
        assert counts == {"corrupted": 5, "extra": 5}
        publish(other, numbered(15, 105))
        with pytest.raises(ArchiveError, match=r"logs/0-0: .* topic was made anew"):
            archive(spark, path, options(other, subscribe=TOPIC))
    publish(broker, numbered(1, 10))
    done = archive(spark, path, options(broker, subscribe=TOPIC))
    assert (done.message_count, done.total_message_count) == (1, 11)


def test_failures_are_one_sentence(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """An option that is wrong, an archive that is none, a condition that is none."""
    path = str(tmp_path / "archive")
    with pytest.raises(OptionError, match="expected exactly one of subscribe"):
        archive(spark, path, options(broker))
    with pytest.raises(ArchiveError, match="no archive"):
        replay(spark, path, options(broker, topic="copy"))
    publish(broker, numbered(5))
    archive(spark, path, options(broker, subscribe=TOPIC))
    with pytest.raises(JobError, match=r"replay: .*nonsense"):
        replay(spark, path, options(broker, topic="copy"), where="nonsense = 1")
    with pytest.raises(OptionError, match=r"window: expected 1\.\.1000000000 seconds"):
        stats(spark, options(broker, subscribe=TOPIC), window_s=10**13)


def test_anything_that_spark_reads_goes_to_a_topic(
    spark: SparkSession, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """A column `value`, the whole row, or what expressions say."""
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\nthree\n")
    wire = options(broker, topic="copy")
    done = ingest(spark, wire, source_format="text", paths=[str(lines)])
    assert (done.message_count, done.size_bytes) == (3, 11)
    table = tmp_path / "table.csv"
    table.write_text("name,age\nann,3\nbob,4\n")
    header = {"header": "true"}
    ingest(spark, wire, source_format="csv", paths=[str(table)], source_options=header)
    objects = [b'{"name":"ann","age":"3"}', b'{"name":"bob","age":"4"}']
    wanted = sorted([b"one", b"two", b"three", *objects])
    assert data_of(stored(broker, "copy")) == wanted
    ingest(
        spark,
        options(broker, topic="same"),
        source_format="csv",
        paths=[str(table)],
        source_options=header,
        value="upper(name)",
        attribute="age",
        key="'one key'",
    )
    found = [messages for messages in stored(broker, "same").values() if messages]
    assert len(found) == 1
    assert [(m.data, m.attribute) for m in found[0]] == [(b"ANN", "3"), (b"BOB", "4")]


def test_windows_count_messages_bytes_and_delay(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Together they are the topic; a message that set out earlier is later."""
    publish(broker, numbered(100))
    publish(broker, numbered(20), partition=tp(0, topic="copy"))
    wire = options(broker, subscribe=f"{TOPIC},copy")
    found = stats(spark, wire, window_s=3600)
    assert sum(w.message_count for w in found if w.topic == TOPIC) == 100
    assert sum(w.size_bytes for w in found if w.topic == "copy") == 20 * 15
    assert all(w.start_ms is not None and w.start_ms % 3_600_000 == 0 for w in found)
    for window in found:
        assert window.delay_mean_s is not None
        assert window.delay_max_s is not None
        assert 0 <= window.delay_mean_s <= window.delay_max_s < 3600
    hours = stats(spark, wire, since="timestamp - INTERVAL 2 HOURS")
    assert all(w.delay_mean_s is not None and w.delay_mean_s >= 7200 for w in hours)


def test_windows_of_what_arrives(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """Each batch tells what it adds; stopping the query ends the job."""
    publish(broker, numbered(40))
    seen: list[WindowStats] = []
    is_through = threading.Event()

    def take(windows: tuple[WindowStats, ...]) -> None:
        seen.extend(windows)
        if sum(w.message_count for w in seen) == 40:
            publish(broker, numbered(2))
        if sum(w.message_count for w in seen) == 42:
            is_through.set()

    def stop() -> None:
        # A query cannot be stopped from inside of its batch: it waits for the batch.
        assert is_through.wait(400)
        for query in spark.streams.active:
            query.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    wire = options(broker, subscribe=TOPIC, startingOffsets="earliest")
    with pytest.raises(OptionError, match="unknown option"):
        follow_stats(spark, {**wire, "x": "1"}, take, interval_s=0.1)
    follow_stats(spark, wire, take, interval_s=0.1)
    stopper.join()
    assert sum(w.message_count for w in seen) == 42


def test_who_does_not_take_windows_ends_the_job_with_his_error(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """As it is: that the reader of the output has gone is no failure of Spark."""
    publish(broker, numbered(10))

    def refuse(_windows: tuple[WindowStats, ...]) -> None:
        raise BrokenPipeError("nobody reads")

    wire = options(broker, subscribe=TOPIC, startingOffsets="earliest")
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        follow_stats(spark, wire, refuse, interval_s=0.1)
