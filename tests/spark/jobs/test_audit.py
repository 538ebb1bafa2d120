"""Comparing topics: every kind of fault is counted and named, and nothing else is."""

from collections.abc import Sequence

import pytest
from pyspark.sql import SparkSession

from metaq.model import BrokerId, TopicPartition
from metaq.spark.jobs.audit import (
    EXAMPLES_MAX,
    AuditSummary,
    FindingKind,
    compare_by_content,
    compare_by_offset,
)
from tests.spark.jobs.archives import Row, frame, log_rows, row

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
    """What is gone, twice, changed or unknown; the ends are told apart."""
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
        "extra": 1,
        "behind": 3 + 3,
        "expired": 2 + 1,
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


def test_ends_that_differ_are_no_fault(spark: SparkSession) -> None:
    """Retention and an archive that is not there yet."""
    source = log_rows("t", 0, 5, start=3)
    found = by_offset(spark, source, log_rows("t", 0, 5))
    assert counts(found) == {"behind": 3, "expired": 3}
    assert found.is_right
    assert counts(by_offset(spark, source, [])) == {"behind": 5}


def test_a_body_that_changes_among_doubles_is_corrupted(spark: SparkSession) -> None:
    """Attribute and id belong to the message."""
    source = log_rows("t", 0, 3)
    target = [*source, row("t", 0, 50, source[1][-1], attribute="k=v")]
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
    assert "at offset 0 of the target, behind offset 70" in found.findings[0].detail
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
    assert found.counts[FindingKind.LOST] == 49
    assert [f.offset for f in found.findings] == [50 * n for n in range(EXAMPLES_MAX)]
