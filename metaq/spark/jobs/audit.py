"""Compare a topic with its archive, or with a copy: lost, doubled, changed messages.

    against an archive   messages are matched by partition and offset
    against a copy       messages are matched by their content, or by an id in it

The table tells what an archive should hold, never the files that are left: a message up
to the recorded end of its partition that is not there is lost. Archived messages of
partitions that no broker serves now are away: they cannot be compared.

A copy has offsets of its own. Where content occurs several times, the numbers have to
agree; order is judged by messages that occur once on either side.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as sf

from metaq.model import Offset, TopicPartition
from metaq.spark.clusters import shared_cluster
from metaq.spark.columns import partition_of
from metaq.spark.jobs.archive_store import ArchiveStore, open_archive
from metaq.spark.jobs.data_files import ArchivedLog, DataFile
from metaq.spark.jobs.failures import job_errors
from metaq.spark.options import SourceOptions

EXAMPLES_MAX: Final = 10
"""So many findings of a kind are named; all are counted."""
PLACE: Final = ("topic", "broker_id", "partition", "offset")
_LOG: Final = PLACE[:-1]
_NO_ENDS: Final[Mapping[TopicPartition, Offset]] = {}


class AuditFindingKind(enum.Enum):
    """Kind of a difference; the value is the word for reports."""

    LOST = "lost"
    """The message is in the source, not in the target."""
    DOUBLED = "doubled"
    """More often in the target than in the source."""
    CORRUPTED = "corrupted"
    """The same place or id with other content."""
    REORDERED = "reordered"
    """Behind a message of its partition that it was in front of."""
    EXTRA = "extra"
    """The message is in the target, never in the source."""
    AWAY = "away"
    """Archived, of a partition that no broker serves now: it cannot be compared."""
    BEHIND = "behind"
    """After the end of the partition's archive: no fault, not yet there."""
    EXPIRED = "expired"
    """Archived, and before the start of the log: no fault, retention took it."""


HARMLESS: Final = frozenset({AuditFindingKind.BEHIND, AuditFindingKind.EXPIRED})


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One message that is not as it should be."""

    kind: AuditFindingKind
    """Kind of the difference."""
    partition: TopicPartition
    """Partition of the difference: in the source, or else in the target."""
    offset: Offset
    """The first byte of its record there."""
    detail: str
    """The numbers that show it."""

    def __str__(self) -> str:
        where = f"{self.partition}: {self.kind.value} at offset {self.offset}"
        return f"{where}: {self.detail}"


@dataclass(frozen=True, slots=True)
class AuditSummary:
    """Result of a comparison."""

    source_count: int
    """Messages of the source."""
    target_count: int
    """Messages of the target."""
    counts: Mapping[AuditFindingKind, int]
    """Messages of each kind; every kind is there."""
    findings: tuple[AuditFinding, ...]
    """The first of each kind, by kind and place; at most `EXAMPLES_MAX` of one."""
    away: tuple[TopicPartition, ...] = ()
    """Partitions that no broker serves now, archived or not: they are not compared."""

    @property
    def is_right(self) -> bool:
        """Whether everything was compared, without a difference."""
        has_fault = any(n for kind, n in self.counts.items() if kind not in HARMLESS)
        return not has_fault and not self.away


def audit_archive(
    spark: SparkSession, path: str, options: Mapping[str, str], topics: Sequence[str]
) -> AuditSummary:
    """Compare topics with an archive of them.

    Messages that come while it runs may count as behind. Partitions of a broker that is
    away are named, and make the summary a wrong one; `failOnDataLoss=true` fails
    instead.

    Args:
        spark: The session.
        path: Path or URL of the archive.
        options: Of a batch read with `format("metaq")`, without the topics.
        topics: Those that are compared, one or more.

    Raises:
        ArchiveError: There is no archive, or it is damaged.
        JobError: Reading failed.
        NoBrokerError: No broker has one of the topics.
        OptionError: An option is wrong.
    """
    # Of two spellings of one name Spark would take either.
    given = {name.lower(): text for name, text in options.items()}
    asked = {"failondataloss": "false", **given, "subscribe": ",".join(topics)}
    wanted = SourceOptions.from_map(asked, is_stream=False)
    store = open_archive(path)
    files = store.files(*topics)
    there, missing = _look_at(store, files)
    archived = {file.log.partition for file in files if file.log.up_to is None}
    with job_errors("audit"):
        archived |= _mixed(store.read(spark, [f for f in there if f.log.up_to]))
    cluster = shared_cluster(wanted.wire)
    cluster.require_whole(wanted, archived)
    away = cluster.away(wanted, archived)
    ends = _ends(store, {*archived, *cluster.partitions(wanted)})
    with job_errors("audit"):
        source = spark.read.format("metaq").options(**asked).load()
        return compare_by_offset(
            source, store.read(spark, there), ends=ends, missing=missing, away=away
        )


def _mixed(rows: DataFrame) -> set[TopicPartition]:
    """Return the partitions in files of several, of which the table has the range."""
    return set(map(partition_of, rows.select(*_LOG).distinct().collect()))


def _ends(
    store: ArchiveStore, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, Offset]:
    """Return the last offset of those partitions that are archived."""
    ends = ((partition, store.end(partition)) for partition in partitions)
    return {partition: last for partition, last in ends if last is not None}


def _look_at(
    store: ArchiveStore, files: Sequence[DataFile]
) -> tuple[list[DataFile], list[ArchivedLog]]:
    """Return the files that are there, and what is missing of those and of others."""
    counts = store.count_rows(files)
    missing = []
    for file in files:
        lack = file.message_count - counts.get(file.path, 0)
        if lack > 0:
            missing.append(replace(file.log, message_count=lack))
    return [file for file in files if file.path in counts], missing


def audit_copy(
    spark: SparkSession,
    source_options: Mapping[str, str],
    target_options: Mapping[str, str],
    *,
    message_id: str | None = None,
) -> AuditSummary:
    """Compare a topic with a copy of it, while neither is written.

    Args:
        spark: The session.
        source_options: Of a batch read with `format("metaq")`.
        target_options: The same for the copy.
        message_id: SQL expression over the columns of the source that tells messages
            apart; None: value, attribute, key and headers do, and a changed message
            counts as one that is lost and one that is extra.

    Raises:
        JobError: Reading failed.
        OptionError: An option is wrong.
    """
    for asked in (source_options, target_options):
        SourceOptions.from_map(asked, is_stream=False)
    with job_errors("audit"):
        source = spark.read.format("metaq").options(**source_options).load()
        target = spark.read.format("metaq").options(**target_options).load()
        return compare_by_content(source, target, message_id=message_id)


def compare_by_offset(
    source: DataFrame,
    target: DataFrame,
    *,
    ends: Mapping[TopicPartition, Offset] = _NO_ENDS,
    missing: Sequence[ArchivedLog] = (),
    away: Sequence[TopicPartition] = (),
) -> AuditSummary:
    """Compare two frames of the source's columns, place by place.

    Args:
        source: Rows of the topics.
        target: Rows that are left of the archive.
        ends: Offset of the last archived message of each partition. Without one a
            partition ends with its last message left.
        missing: What is missing of files of the archive.
        away: Partitions of which the source tells nothing.
    """
    body = sf.md5(sf.to_json(sf.struct(*_body(), "flag", "message_id")))
    ones = _counted(source, "source", [sf.col(name) for name in PLACE], body)
    others = _counted(target, "target", [sf.col(name) for name in PLACE], body)
    with _kept(ones, others) as totals:
        both = _with_ends(ones, others, ends, away)
        both = both.na.fill(0, ["source_count", "target_count"])
        offset = sf.col("offset")
        last, first = sf.col("target_last"), sf.col("source_first")
        kind = (
            sf.when(
                (sf.col("target_count") == 0) & (last.isNull() | (offset > last)),
                "behind",
            )
            .when(sf.col("target_count") == 0, "lost")
            .when((sf.col("source_count") == 0) & sf.col("is_away"), "away")
            .when(
                (sf.col("source_count") == 0) & (first.isNull() | (offset < first)),
                "expired",
            )
            .when(sf.col("source_count") == 0, "extra")
            .when(_differs(), "corrupted")
            .when(sf.col("target_count") > sf.col("source_count"), "doubled")
        )
        found = _findings(both, kind)
        lost = _lost_on_both_sides(found, missing)
        summary = _summary(totals, found)
    return _with_lost(replace(summary, away=tuple(sorted(away))), lost)


def _with_ends(
    ones: DataFrame,
    others: DataFrame,
    ends: Mapping[TopicPartition, Offset],
    away: Sequence[TopicPartition],
) -> DataFrame:
    """Return the messages of either side, beside the bounds of their partition."""
    spark = ones.sparkSession
    first = ones.groupBy(*_LOG).agg(sf.min("offset").alias("source_first"))
    recorded = spark.createDataFrame(
        [(*_fields(partition), last) for partition, last in ends.items()],
        "topic STRING, broker_id INT, partition INT, offset BIGINT",
    )
    there = others.select(*PLACE).unionByName(recorded)
    last = there.groupBy(*_LOG).agg(sf.max("offset").alias("target_last"))
    gone = spark.createDataFrame(
        [(*_fields(partition), True) for partition in away],
        "topic STRING, broker_id INT, partition INT, is_away BOOLEAN",
    )
    both = ones.join(others, list(PLACE), "full")
    for frame in (first, last, gone):
        both = both.join(frame, list(_LOG), "left")
    return both.na.fill(False, ["is_away"])


def _fields(partition: TopicPartition) -> tuple[str, int, int]:
    return partition.topic, int(partition.broker_id), partition.partition


def _lost_on_both_sides(
    found: DataFrame, missing: Sequence[ArchivedLog]
) -> list[tuple[int, AuditFinding]]:
    """Return the count of messages that an archive lacks and the source has lost too.

    Messages that the source still has are among the findings, one by one.
    """
    if not missing:
        return []
    shown = found.where("kind = 'lost'").groupBy(*_LOG).count().collect()
    named = {partition_of(row): row["count"] for row in shown}
    lost = []
    # Those of one partition first: the others take what is left.
    for log in sorted(missing, key=lambda log: (log.up_to is not None, log.first)):
        count = log.message_count
        for partition in filter(log.may_hold, named):
            taken = min(count, named[partition])
            named[partition] -= taken
            count -= taken
        if count > 0:
            among = "" if log.up_to is None else f" of partitions up to {log.up_to}"
            detail = (
                f"{count} messages{among} that the table has up to offset {log.last}"
                " are not in the archive, nor in the source any more"
            )
            where = AuditFinding(
                AuditFindingKind.LOST, log.partition, log.first, detail
            )
            lost.append((count, where))
    return lost


def _with_lost(
    summary: AuditSummary, lost: Sequence[tuple[int, AuditFinding]]
) -> AuditSummary:
    """Return a summary with more that is lost; each finding stands for several."""
    counts = dict(summary.counts)
    counts[AuditFindingKind.LOST] += sum(count for count, _finding in lost)
    more = [finding for _count, finding in lost][:EXAMPLES_MAX]
    findings = sorted([*more, *summary.findings], key=_order)
    return replace(summary, counts=counts, findings=tuple(findings))


def compare_by_content(
    source: DataFrame, target: DataFrame, *, message_id: str | None = None
) -> AuditSummary:
    """Compare two frames of the source's columns, message by message."""
    content = sf.md5(sf.to_json(sf.struct(*_body())))
    key = content if message_id is None else sf.expr(message_id).cast("string")
    ones = _counted(source, "source", [key.alias("key")], content)
    others = _counted(target, "target", [key.alias("key")], content)
    with _kept(ones, others) as totals:
        same = sf.col("key").eqNullSafe(sf.col("other_key"))
        both = ones.join(others.withColumnRenamed("key", "other_key"), same, "full")
        both = both.na.fill(0, ["source_count", "target_count"])
        place = sf.coalesce("source_place", "target_place")
        both = both.select("*", *(place[name].alias(name) for name in PLACE))
        kind = (
            sf.when(sf.col("source_count") == 0, "extra")
            .when(sf.col("target_count") < sf.col("source_count"), "lost")
            .when(_differs(), "corrupted")
            .when(sf.col("target_count") > sf.col("source_count"), "doubled")
        )
        found = _findings(both, kind).unionByName(_reordered(both))
        return _summary(totals, found)


@contextmanager
def _kept(ones: DataFrame, others: DataFrame) -> Iterator[tuple[int, int]]:
    """Read each side once, also where its log grows meanwhile; return the numbers."""
    ones.persist()
    others.persist()
    try:
        yield _total(ones, "source_count"), _total(others, "target_count")
    finally:
        ones.unpersist()
        others.unpersist()


def _total(rows: DataFrame, column: str) -> int:
    (total,) = rows.agg(sf.sum(column).alias("total")).collect()
    return total["total"] or 0


def _body() -> list[Column]:
    # JSON would write bytes as Base64, several times as long as their digest.
    return [
        sf.md5("value").alias("value"),
        *map(sf.col, ("attribute", "key", "headers")),
    ]


def _counted(
    rows: DataFrame, side: str, key: Sequence[Column], body: Column
) -> DataFrame:
    """Return the number, content and first place of each key."""
    names = PLACE if len(key) > 1 else ("key",)
    place = sf.struct(*PLACE).alias("place")
    keyed = rows.select(*key, body.alias("body"), place)
    return keyed.groupBy(*names).agg(
        sf.count(sf.lit(1)).alias(f"{side}_count"),
        sf.min("body").alias(f"{side}_least"),
        sf.max("body").alias(f"{side}_most"),
        sf.min("place").alias(f"{side}_place"),
    )


def _differs() -> Column:
    """Whether any two of the messages of a key have different content."""
    least = sf.least("source_least", "target_least")
    return least != sf.greatest("source_most", "target_most")


def _findings(both: DataFrame, kind: Column) -> DataFrame:
    difference = sf.abs(sf.col("source_count") - sf.col("target_count"))
    times = "%d times in the source, %d times in the target"
    detail = sf.format_string(times, "source_count", "target_count")
    content = sf.lit("the target has other content")
    found = both.select(
        kind.alias("kind"),
        sf.when(kind == "corrupted", sf.lit(1)).otherwise(difference).alias("count"),
        *PLACE,
        sf.when(kind == "corrupted", content).otherwise(detail).alias("detail"),
    )
    return found.where("kind IS NOT NULL")


def _reordered(both: DataFrame) -> DataFrame:
    """Return messages that stand behind one which they were in front of."""
    one, other = sf.col("source_place"), sf.col("target_place")
    # The same order is only promised from one partition into one.
    logs = [place[name] for place in (one, other) for name in _LOG]
    before = Window.partitionBy(*logs).orderBy(one["offset"])
    before = before.rowsBetween(Window.unboundedPreceding, -1)
    pairs = both.where("source_count = 1 AND target_count = 1")
    pairs = pairs.withColumn("ahead", sf.max(other["offset"]).over(before))
    detail = sf.format_string(
        "at offset %d of the target, behind offset %d",
        other["offset"],
        sf.col("ahead"),
    )
    return pairs.where(sf.col("ahead") > other["offset"]).select(
        sf.lit("reordered").alias("kind"),
        sf.lit(1).cast("bigint").alias("count"),
        *PLACE,
        detail.alias("detail"),
    )


def _summary(totals: tuple[int, int], found: DataFrame) -> AuditSummary:
    found = found.persist()
    try:
        counted = found.groupBy("kind").agg(sf.sum("count").alias("count")).collect()
        numbers = {row["kind"]: row["count"] for row in counted}
        in_order = Window.partitionBy("kind").orderBy(*PLACE)
        ranked = found.withColumn("rank", sf.row_number().over(in_order))
        first = ranked.where(sf.col("rank") <= EXAMPLES_MAX).collect()
    finally:
        found.unpersist()
    findings = sorted(map(_to_finding, first), key=_order)
    return AuditSummary(
        *totals,
        {kind: numbers.get(kind.value, 0) for kind in AuditFindingKind},
        tuple(findings),
    )


_KINDS: Final = tuple(AuditFindingKind)


def _order(finding: AuditFinding) -> tuple[int, TopicPartition, Offset]:
    return _KINDS.index(finding.kind), finding.partition, finding.offset


def _to_finding(row: Any) -> AuditFinding:
    kind, offset = AuditFindingKind(row["kind"]), Offset(row["offset"])
    return AuditFinding(kind, partition_of(row), offset, row["detail"])
