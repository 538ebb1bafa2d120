"""Audits of archives against a real broker: what is lost, and of which topic."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from metaq.errors import NoBrokerError
from metaq.model import LogId
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive import archive
from metaq.pipeline.jobs.archive_store import ArchiveStore
from metaq.pipeline.jobs.audit import AuditFindingKind, audit_archive
from metaq.pipeline.jobs.compact import compact
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.fake_broker import FakeBroker
from tests.spark.brokers import TOPIC, numbered, publish, tp
from tests.spark.brokers import wire as options

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


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
    files = ArchiveStore(str(path)).files()
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
    with pytest.raises(NoBrokerError, match="no broker has topic 'lgos'; similar"):
        audit_archive(spark, str(path), wire, ["lgos"])
    with pytest.raises(
        ArchiveError, match=r"the archive has no topic 'copy'; its .*: logs$"
    ):
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
    for file in ArchiveStore(path).files():
        Path(path, file.path).unlink()
    found = audit_archive(spark, path, wire, [TOPIC])
    counts = {kind.value: n for kind, n in found.counts.items() if n}
    assert counts == {"lost": 80, "behind": 5}


def test_a_topic_that_was_created_again_has_an_archive_of_its_own(
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
        with pytest.raises(ArchiveError, match=r"logs/0-0: .* topic was created again"):
            archive(spark, path, options(other, subscribe=TOPIC))
    publish(broker, numbered(1, 10))
    done = archive(spark, path, options(broker, subscribe=TOPIC))
    assert (done.message_count, done.total_message_count) == (1, 11)


def test_what_a_broker_of_metaq_1_4_forgot_at_its_start_is_away(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It knows it again with the next put, so nothing is said against the archive."""
    path = str(tmp_path / "archive")
    with FakeBroker({TOPIC: 2}) as legacy:
        wire = {"brokers": f"{legacy.address.host}:{legacy.address.port}"}
        for partition in (0, 1):
            for data in numbered(5):
                legacy.add(data, topic=TOPIC, partition=partition)
        archive(spark, path, {**wire, "subscribe": TOPIC})
        legacy.metaq.logs.pop(LogId(TOPIC, 1))
        found = audit_archive(spark, path, wire, [TOPIC])
    assert {kind.value: n for kind, n in found.counts.items() if n} == {"away": 5}
    assert found.away == (tp(1),)
    assert not found.is_right
