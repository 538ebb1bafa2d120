"""Comparing topics: every kind of fault is counted and named, and nothing else is."""

import datetime as dt
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.pipeline.jobs.archive_store import ARCHIVE_DDL
from metaq.pipeline.jobs.audit import (
    EXAMPLES_MAX,
    SPAN_BITS,
    AuditFindingKind,
    AuditSummary,
    compare_by_content,
    compare_by_offset,
)
from metaq.pipeline.jobs.day_files import ArchivedLog
from tests.pipeline.jobs.archives import DAY, SECOND, Row, frame, log_rows, row

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


def counts(found: AuditSummary) -> dict[str, int]:
    """Return the kinds that there are."""
    return {kind.value: count for kind, count in found.counts.items() if count}


def named(found: AuditSummary) -> list[tuple[str, int, int]]:
    """Return the findings as (kind, partition, offset)."""
    return [(f.kind.value, f.partition.partition, f.offset) for f in found.findings]


def by_offset(
    spark: SparkSession, source: Sequence[Row], target: Sequence[Row]
) -> AuditSummary:
    return compare_by_offset(frame(spark, source), frame(spark, target))


def test_an_archive_is_compared_place_by_place(spark: SparkSession) -> None:
    """Messages gone, twice, changed or unknown; the ends are distinguished."""
    source = log_rows("t", 0, 10, start=2) + log_rows("t", 1, 3)
    assert by_offset(spark, source, source).is_right
    target = log_rows("t", 0, 9)  # two more at the start, three fewer at the end
    del target[5]  # offset 250
    target.append(target[4])  # offset 200
    target[3] = row("t", 0, 150, b"changed")
    target.append(row("t", 0, 275, b"never sent"))
    target += log_rows("t", 2, 1)
    found = by_offset(spark, source, target)
    assert (found.source_count, found.target_count) == (13, 11)
    assert counts(found) == {
        "lost": 1,
        "doubled": 1,
        "corrupted": 1,
        "extra": 1 + 1,  # the other one is of a partition that never was
        "behind": 3 + 3,
        "expired": 2,
    }
    assert not found.is_right
    assert named(found)[:4] == [
        ("lost", 0, 250),
        ("doubled", 0, 200),
        ("corrupted", 0, 150),
        ("extra", 0, 275),
    ]
    first = found.findings[0]
    assert first.partition == TopicPartition("t", BrokerId(0), 0)
    assert str(first) == (
        "t/0-0: lost at offset 250: 1 times in the source, 0 times in the target"
    )


@pytest.mark.parametrize("day", [DAY.date(), None])
def test_times_and_dates_are_compared_as_well(
    spark: SparkSession, day: dt.date | None
) -> None:
    """Each column of an archive is one that may be damaged, or updated (issue 30)."""
    old = DAY - 60 * 365 * 24 * 3600 * SECOND
    times = [DAY, DAY + SECOND, None, old]  # before midnight; none; before 1970
    source = [row("t", 0, 50 * n, time=time) for n, time in enumerate(times)]
    dates = [time and time.date() for time in times]
    changed = [*source[:1], row("t", 0, 50, time=DAY), *source[2:]]
    other_dates = [*dates[:3], day]

    def compare(rows: Sequence[Row], days: Sequence[dt.date | None]) -> AuditSummary:
        dated = [(*r, d) for r, d in zip(rows, days, strict=True)]
        target = spark.createDataFrame(dated, ARCHIVE_DDL)
        return compare_by_offset(frame(spark, source), target)

    assert compare(source, dates).is_right
    assert named(compare(changed, dates)) == [("corrupted", 0, 50)]
    assert named(compare(source, other_dates)) == [("corrupted", 0, 150)]


def test_ends_that_differ_are_no_fault(spark: SparkSession) -> None:
    """Retention and an archive that is not there yet."""
    source = log_rows("t", 0, 5, start=3)
    found = by_offset(spark, source, log_rows("t", 0, 5))
    assert counts(found) == {"behind": 3, "expired": 3}
    assert found.is_right
    assert counts(by_offset(spark, source, [])) == {"behind": 5}


def test_an_empty_log_tells_by_its_start_what_is_expired(spark: SparkSession) -> None:
    """One that was created again starts at 0, and retention took nothing of it."""
    one, two = (TopicPartition("t", BrokerId(0), number) for number in (0, 1))
    asked = []

    def log_starts(
        partitions: Collection[TopicPartition],
    ) -> dict[TopicPartition, Offset]:
        asked.append(set(partitions))
        return {one: Offset(100)}

    target = log_rows("t", 0, 3) + log_rows("t", 1, 4) + log_rows("t", 2, 3)
    source = frame(spark, log_rows("t", 2, 3))
    found = compare_by_offset(
        source,
        frame(spark, target),
        ends={two: Offset(100)},  # the fourth message is after it
        log_starts=log_starts,
    )
    assert counts(found) == {"expired": 2 + 3, "extra": 1 + 1}
    assert named(found)[:2] == [("extra", 0, 100), ("extra", 1, 150)]
    assert asked == [{one, two}]


def test_as_many_messages_may_be_others(spark: SparkSession) -> None:
    """In one span: the numbers agree, and the sums do not."""
    source = log_rows("t", 0, 4)
    found = by_offset(spark, source, [source[0], source[0], *source[2:]])
    assert named(found) == [("lost", 0, 50), ("doubled", 0, 0)]


def test_differences_are_found_in_every_part_of_a_log(spark: SparkSession) -> None:
    """Parts that agree lie between those that do not."""
    half = 1 << (SPAN_BITS - 1)
    source = [*log_rows("t", 0, 12, stride=half), *log_rows("t", 1, 12, stride=half)]
    target = [r for n, r in enumerate(source) if n != 5]  # in the third of six parts
    target[8] = row("t", 0, 9 * half, b"changed")
    found = by_offset(spark, source, target[:-1])
    assert (found.source_count, found.target_count) == (24, 22)
    assert named(found) == [
        ("lost", 0, 5 * half),
        ("corrupted", 0, 9 * half),
        ("behind", 1, 11 * half),
    ]


def test_what_retention_takes_between_both_readings_is_expired(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Windows that differ are read again, and judged by the log start of then."""
    begin = 1 << SPAN_BITS
    parts = [log_rows("t", 0, 3), [row("t", 0, begin), row("t", 0, begin + 100)]]
    for number, part in enumerate(parts):
        frame(spark, part).coalesce(1).write.parquet(str(tmp_path / str(number)))
    source = spark.read.option("ignoreMissingFiles", "true").parquet(
        *(str(tmp_path / str(number)) for number in range(len(parts)))
    )
    first = next((tmp_path / "0").glob("*.parquet"))

    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first.unlink(missing_ok=True)
        yield from batches

    changed = [row("t", 0, 50, b"changed"), row("t", 0, begin + 50, b"never sent")]
    rows = frame(
        spark, [parts[0][0], *changed[:1], *parts[0][2:], *parts[1], changed[1]]
    )
    found = compare_by_offset(source, rows.mapInArrow(take, rows.schema))
    assert found.source_count == 5
    assert counts(found) == {"expired": 3, "extra": 1}


def log(number: int, count: int, first: int, last: int) -> ArchivedLog:
    partition = TopicPartition("t", BrokerId(0), number)
    return ArchivedLog(partition, count, Offset(first), Offset(last))


def test_an_archive_is_judged_by_what_it_says_that_it_holds(
    spark: SparkSession,
) -> None:
    """A lost tail and a lost partition are lost, and not unarchived or expired."""
    source = log_rows("t", 0, 9, start=3) + log_rows("t", 1, 4)
    recorded = [log(0, 8, 0, 350), log(1, 3, 0, 100), log(2, 6, 0, 250)]
    whole = log_rows("t", 0, 8) + log_rows("t", 1, 3) + log_rows("t", 2, 6)
    left = [r for r in whole if r[2] == 2 or (r[2] == 0 and 100 <= r[3] < 250)]

    def compare(target: Sequence[Row], *missing: ArchivedLog) -> AuditSummary:
        return compare_by_offset(
            frame(spark, source),
            frame(spark, target),
            ends={log.partition: log.last for log in recorded},
            missing=missing,
            away=[recorded[2].partition],
        )

    found = compare(whole)
    assert counts(found) == {"behind": 4 + 1, "expired": 3, "away": 6}
    assert found.away == (recorded[2].partition,)
    assert not found.is_right
    found = compare(left, log(0, 5, 0, 350), log(1, 3, 0, 100))
    assert counts(found) == {
        "lost": 5 + 3,  # of the first partition two are not in the source either
        "behind": 4 + 1,
        "expired": 1,
        "away": 6,
    }
    assert named(found)[:4] == [
        ("lost", 0, 0),
        ("lost", 0, 250),
        ("lost", 0, 300),
        ("lost", 0, 350),
    ]
    assert found.findings[0].detail == (
        "2 messages that the table has up to offset 350 are not in the archive, nor in"
        " the source any more"
    )
    # A file of both partitions: the table does not say how many are of which.
    both = replace(log(0, 8, 0, 350), up_to=recorded[2].partition)
    found = compare(left, both)
    assert counts(found)["lost"] == 6 + 2
    assert found.findings[0].detail.startswith("2 messages of partitions up to t/0-2")


@pytest.mark.parametrize(
    "other", [{"attribute": "k=v"}, {"key": b"k"}, {"headers": [("trace", b"1")]}]
)
def test_a_body_that_changes_among_doubles_is_corrupted(
    spark: SparkSession, other: dict[str, Any]
) -> None:
    """Attribute, key, headers and id belong to the message."""
    source = log_rows("t", 0, 3)
    target = [*source, row("t", 0, 50, source[1][-1], **other)]
    assert counts(by_offset(spark, source, target)) == {"corrupted": 1}


def copy_of(rows: Sequence[Row]) -> list[Row]:
    """Return the same messages in another topic, with offsets of their own."""
    return [("copy", 0, r[2], 70 * n, -1 - n, *r[5:]) for n, r in enumerate(rows)]


def test_a_copy_is_compared_by_content(spark: SparkSession) -> None:
    """Order within a partition counts; equal messages are counted."""
    source = log_rows("t", 0, 8) + log_rows("t", 1, 2)
    source += [row("t", 0, 1000 + n, b"same") for n in range(3)]

    def compare(target: Sequence[Row]) -> AuditSummary:
        one, other = frame(spark, source), frame(spark, copy_of(target))
        return compare_by_content(one, other)

    assert compare(source).is_right
    swapped = [source[1], source[0], *source[2:]]
    found = compare(swapped)
    assert counts(found) == {"reordered": 1}
    assert named(found) == [("reordered", 0, 50)]
    assert "at offset 0 of the target, after offset 70" in found.findings[0].detail
    assert counts(compare(source[1:])) == {"lost": 1}
    assert counts(compare(source[:-1])) == {"lost": 1}
    assert counts(compare([*source, source[4], source[-1]])) == {"doubled": 2}
    changed = [row("t", 0, 0, b"other"), *source[1:]]
    assert counts(compare(changed)) == {"lost": 1, "extra": 1}


def test_an_id_tells_a_change_from_a_loss(spark: SparkSession) -> None:
    """The rest of the content may then be compared."""
    source = [row("t", 0, 50 * n, b"%d:a" % n) for n in range(4)]
    target = copy_of([row("t", 0, 0, b"0:b"), *source[1:3]])
    found = compare_by_content(
        frame(spark, source),
        frame(spark, target),
        message_id="split(string(value), ':')[0]",
    )
    assert counts(found) == {"corrupted": 1, "lost": 1}
    assert named(found) == [("lost", 0, 150), ("corrupted", 0, 0)]


def test_findings_are_bounded_and_counts_are_not(spark: SparkSession) -> None:
    """The first ones are named."""
    source = log_rows("t", 0, 50)
    found = by_offset(spark, source, source[-1:])
    assert found.counts[AuditFindingKind.LOST] == 49
    assert [f.offset for f in found.findings] == [50 * n for n in range(EXAMPLES_MAX)]
