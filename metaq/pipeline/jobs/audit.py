"""Compare a topic with its archive, or with a copy: lost, doubled, changed messages.

    against an archive   messages are matched by partition and offset
    against a copy       messages are matched by their content, or by an id in it

The table decides what an archive should hold, not the files that are left: a message up
to the recorded end of its partition that is not there is lost. Archived messages of
partitions that no broker serves now are away: they cannot be compared.

A copy has offsets of its own. Where content occurs several times, the numbers have to
agree; order is judged by messages that occur once on either side.

Content is compared by digests: of 64 bits where place or id say which message it is, of
128 where only content does. Against an archive the digests of each span of a log are
added up first. Only spans whose sums differ are read again, and compared message by
message, so an archive that is right costs no more than to read both sides.
"""

import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as sf

from metaq.model import Offset, TopicPartition
from metaq.pipeline.jobs.archive_store import ArchiveStore
from metaq.pipeline.jobs.day_files import ArchivedLog, DataFile
from metaq.pipeline.jobs.session import job_errors
from metaq.spark.columns import partition_of
from metaq.spark.offsets import Offsets
from metaq.spark.options import SourceOptions
from metaq.spark.topics import find_partitions, log_starts

EXAMPLES_MAX: Final = 10
"""So many findings of a kind are named; all are counted."""
PLACE: Final = ("topic", "broker_id", "partition", "offset")
DAY_MICROS: Final = 86_400_000_000
SPAN_BITS: Final = 26
"""Sums of digests are of the messages that begin in 64 MiB of a partition, about."""
_HALF_BITS: Final = 32
_LOG: Final = PLACE[:-1]
_LOG_DDL: Final = "topic STRING, broker_id INT, partition INT"
_NO_OFFSETS: Final[Offsets] = {}
_Span: TypeAlias = tuple[TopicPartition, int]
LogStarts: TypeAlias = Callable[[Collection[TopicPartition]], Offsets]
"""Returns the log start of partitions, as far as it is known."""


class AuditFindingKind(enum.Enum):
    """Kind of a difference; the value is the word for reports."""

    LOST = "lost"
    """The message is in the source, not in the target."""
    DOUBLED = "doubled"
    """More often in the target than in the source."""
    CORRUPTED = "corrupted"
    """The same place or id with other content."""
    REORDERED = "reordered"
    """After a message of its partition that it preceded."""
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
    partition: TopicPartition
    """Partition of the difference: in the source, or else in the target."""
    offset: Offset
    detail: str

    def __str__(self) -> str:
        where = f"{self.partition}: {self.kind.value} at offset {self.offset}"
        return f"{where}: {self.detail}"


@dataclass(frozen=True, slots=True)
class AuditSummary:
    """Result of a comparison."""

    source_count: int
    target_count: int
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

    Messages that come while it runs may count as not archived yet. Partitions of a
    broker that is away are named, and count as a fault; `failOnDataLoss=true` fails
    instead.

    Args:
        spark: The session.
        path: Path or URL of the archive.
        options: Of a batch read with `format("metaq")`, without the topics.
        topics: Those that are compared, one or more.

    Returns:
        Counts of each kind of difference, and the first of each.

    Raises:
        ArchiveError: There is no archive, it is damaged, or was never given a topic.
        JobError: Reading failed.
        NoBrokerError: No broker has one of the topics.
        OptionError: An option is wrong.
    """
    # Of two spellings of one name Spark would take either.
    given = {name.lower(): text for name, text in options.items()}
    asked = {"failondataloss": "false", **given, "subscribe": ",".join(topics)}
    wanted = SourceOptions.from_map(asked, is_stream=False)
    wanted.require_raw_values()
    store = ArchiveStore(path)
    files = store.files(*topics)
    there, missing = _look_at(store, files)
    archived = {file.log.partition for file in files if file.log.up_to is None}
    if mixed := [file for file in there if file.log.up_to]:
        with job_errors("audit"):
            # Of files of several partitions the table has the range alone.
            logs = store.read(spark, mixed).select(*_LOG).distinct().collect()
            archived |= set(map(partition_of, logs))
    found = find_partitions(wanted, archived)
    store.require_topics(topics)
    ends = {
        partition: last
        for partition in {*archived, *found.served}
        if (last := store.end(partition)) is not None
    }
    with job_errors("audit"):
        source = spark.read.format("metaq").options(**asked).load()
        return compare_by_offset(
            source,
            store.read(spark, there),
            ends=ends,
            missing=missing,
            away=found.away,
            log_starts=lambda logs: log_starts(
                wanted, set(logs).intersection(found.served)
            ),
        )


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
        message_id: SQL expression over the columns of the source that identifies
            messages; None: value, attribute, key and headers do, and a changed message
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
    ends: Offsets = _NO_OFFSETS,
    missing: Sequence[ArchivedLog] = (),
    away: Sequence[TopicPartition] = (),
    log_starts: LogStarts = lambda _partitions: _NO_OFFSETS,
) -> AuditSummary:
    """Compare two frames of the source's columns, place by place.

    Args:
        source: Rows of the topics.
        target: Rows that are left of the archive.
        ends: Offset of the last archived message of each partition. Without one a
            partition ends with its last message left.
        missing: What is missing of files of the archive.
        away: Partitions of which the source has no rows now.
        log_starts: Returns where logs without messages start. What is archived of one
            for which it returns nothing is expired up to its recorded end, and extra
            without one.
    """
    span = sf.shiftright("offset", SPAN_BITS).alias("span")
    ones, others = (
        side.select(*PLACE, span, _digest(side).alias("body"))
        for side in (source, target)
    )
    one, other = _sums_of(ones), _sums_of(others)
    unequal = {s for s in one.keys() | other.keys() if one.get(s) != other.get(s)}
    counts, examples, lost_there = _counts(()), [], {}
    if unequal:
        # Their first spans show where logs start by then.
        firsts = {log: (log, span) for log, span in sorted(one, reverse=True)}
        again = unequal | {firsts[log] for log, _span in unequal if log in firsts}
        with _kept(_only(ones, again), _only(others, unequal)) as sides:
            lasts = _lasts(other, ends)
            starts = _starts(sides[0], {log for log, _span in unequal}, log_starts)
            judged = _compare_spans(
                *sides, unequal, starts, ends, lasts, frozenset(away)
            )
            counts, examples = _counts(_tally(judged)), _examples(judged)
            lost_there = _lost(judged) if missing else {}
    lost = _lost_on_both_sides(lost_there, missing)
    counts[AuditFindingKind.LOST] += sum(count for count, _finding in lost)
    more = [finding for _count, finding in lost][:EXAMPLES_MAX]
    return AuditSummary(
        sum(row["count"] for row in one.values()),
        sum(row["count"] for row in other.values()),
        counts,
        tuple(sorted([*more, *examples], key=_order)),
        tuple(sorted(away)),
    )


def _sums_of(rows: DataFrame) -> dict[_Span, Any]:
    """Return the number, the last offset and the sum of digests of each span."""
    low = sf.col("body").bitwiseAND((1 << _HALF_BITS) - 1)
    sums = rows.groupBy(*_LOG, "span").agg(
        sf.count(sf.lit(1)).alias("count"),
        sf.max("offset").alias("last"),
        # Of both halves, so that no sum is too large for its type.
        sf.sum(low).alias("low"),
        sf.sum(sf.shiftright("body", _HALF_BITS)).alias("high"),
    )
    return {(partition_of(row), row["span"]): row for row in sums.collect()}


def _lasts(sums: Mapping[_Span, Any], ends: Offsets) -> dict[TopicPartition, int]:
    """Return the last offset of each archived partition, recorded or there."""
    lasts: dict[TopicPartition, int] = dict(ends)
    for (log, _span), row in sums.items():
        lasts[log] = max(row["last"], lasts.get(log, row["last"]))
    return lasts


def _only(rows: DataFrame, spans: Collection[_Span]) -> DataFrame:
    """Return the rows of some spans."""
    wanted = rows.sparkSession.createDataFrame(
        [(*_fields(log), span) for log, span in spans], f"{_LOG_DDL}, span BIGINT"
    )
    numbers = [span for _log, span in spans]
    # Parquet's readers skip row groups outside.
    near = sf.col("offset").between(
        min(numbers) << SPAN_BITS, ((max(numbers) + 1) << SPAN_BITS) - 1
    )
    there = rows.where(near)
    return there.join(sf.broadcast(wanted), [*_LOG, "span"], "left_semi")


def _starts(
    ones: DataFrame, partitions: Collection[TopicPartition], log_starts: LogStarts
) -> dict[TopicPartition, int]:
    """Return where logs start: with their first message, while they have any."""
    firsts = ones.groupBy(*_LOG).agg(sf.min("offset").alias("first")).collect()
    starts: dict[TopicPartition, int] = {
        partition_of(row): row["first"] for row in firsts
    }
    # Asked after the reading: retention may have removed what was there before.
    empty = [each for each in partitions if each not in starts]
    return {**(log_starts(empty) if empty else {}), **starts}


def _compare_spans(
    ones: DataFrame,
    others: DataFrame,
    spans: Collection[_Span],
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    lasts: Mapping[TopicPartition, int],
    away: Collection[TopicPartition],
) -> DataFrame:
    """Judge the messages of some spans, place by place."""
    bounds = ones.sparkSession.createDataFrame(
        [
            (
                *_fields(log),
                span,
                *(offsets.get(log) for offsets in (starts, ends, lasts)),
                log in away,
            )
            for log, span in spans
        ],
        f"{_LOG_DDL}, span BIGINT, first BIGINT, recorded BIGINT, last BIGINT,"
        " is_away BOOLEAN",
    )
    both = _matched(ones, others, [*PLACE, "span"])
    both = both.join(sf.broadcast(bounds), [*_LOG, "span"])
    offset, last, first = sf.col("offset"), sf.col("last"), sf.col("first")
    # Of what nothing is recorded a broker has to know where its log starts.
    was_had = sf.coalesce(offset <= sf.col("recorded"), first.isNotNull())
    is_before = first.isNull() | (offset < first)
    kind = (
        sf.when(
            (sf.col("target_count") == 0) & (last.isNull() | (offset > last)), "behind"
        )
        .when(sf.col("target_count") == 0, "lost")
        .when((sf.col("source_count") == 0) & sf.col("is_away"), "away")
        .when((sf.col("source_count") == 0) & is_before & was_had, "expired")
        .when(sf.col("source_count") == 0, "extra")
        .when(_differs(), "corrupted")
        .when(sf.col("target_count") > sf.col("source_count"), "doubled")
    )
    return _judged(both, kind)


def _fields(partition: TopicPartition) -> tuple[str, int, int]:
    return partition.topic, int(partition.broker_id), partition.partition


def _lost(judged: DataFrame) -> dict[TopicPartition, int]:
    """Return how many messages of each partition are lost."""
    lost = judged.where("kind = 'lost'").groupBy(*_LOG).count().collect()
    return {partition_of(row): row["count"] for row in lost}


def _lost_on_both_sides(
    found: Mapping[TopicPartition, int], missing: Sequence[ArchivedLog]
) -> list[tuple[int, AuditFinding]]:
    """Return the count of messages that an archive lacks and the source has lost too.

    Messages that the source still has are among the findings, one by one.
    """
    named = dict(found)
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


def compare_by_content(
    source: DataFrame, target: DataFrame, *, message_id: str | None = None
) -> AuditSummary:
    """Compare two frames of the source's columns, message by message."""
    content = sf.xxhash64(*_content()).alias("body")
    keys = {
        "key": sf.xxhash64(*_content()),
        "more": sf.xxhash64(sf.lit(1), *_content()),
    }
    if message_id is not None:
        keys = {"key": sf.expr(message_id).cast("string")}
    named = [key.alias(name) for name, key in keys.items()]
    log = sf.xxhash64(*_LOG).alias("log")
    place = sf.struct(*PLACE).alias("place")
    ones, others = (
        side.select(*named, content, log, sf.col("offset"), place)
        for side in (source, target)
    )
    tally = _tally(_judged_copy(ones, others, [*keys]))
    counts, examples = _counts(tally), list[AuditFinding]()
    if any(counts.values()):
        examples = _examples(_judged_copy(ones, others, [*keys], "place"))
    return AuditSummary(
        sum(row["source_count"] for row in tally),
        sum(row["target_count"] for row in tally),
        counts,
        tuple(examples),
    )


def _judged_copy(
    ones: DataFrame, others: DataFrame, keys: Sequence[str], *more: str
) -> DataFrame:
    """Judge messages by their keys; with their places only if `more` has them.

    The first place of a key is costly: Spark sorts for it.
    """
    both = _matched(ones, others, keys, "log", "offset", *more)
    is_pair = (sf.col("source_count") == 1) & (sf.col("target_count") == 1)
    # The same order is only promised from one partition into one.
    logs = ("source_log", "target_log", sf.when(~is_pair, sf.xxhash64(*keys)))
    before = Window.partitionBy(*logs).orderBy("source_offset")
    before = before.rowsBetween(Window.unboundedPreceding, -1)
    both = both.withColumn("ahead", sf.max("target_offset").over(before))
    is_moved = is_pair & (sf.col("ahead") > sf.col("target_offset"))
    kind = (
        sf.when(sf.col("source_count") == 0, "extra")
        .when(sf.col("target_count") < sf.col("source_count"), "lost")
        .when(_differs(), "corrupted")
        .when(sf.col("target_count") > sf.col("source_count"), "doubled")
    )
    if more:
        place = sf.coalesce("source_place", "target_place")
        both = both.select("*", *(place[name].alias(name) for name in PLACE))
    return _judged(both, kind, sf.coalesce(is_moved, sf.lit(False)))


@contextmanager
def _kept(ones: DataFrame, others: DataFrame) -> Iterator[tuple[DataFrame, DataFrame]]:
    """Read each side once, also if its log grows."""
    ones.persist()
    others.persist()
    try:
        yield ones, others
    finally:
        ones.unpersist()
        others.unpersist()


def _digest(side: DataFrame) -> Column:
    """Return the digest of all columns; a side without dates has those of its times."""
    micros, day = sf.unix_micros("timestamp"), sf.lit(DAY_MICROS)
    date = sf.floor((micros - sf.pmod(micros, day)) / day)
    if "date" in side.columns:
        date = sf.unix_date("date")
    times = [sf.isnull(each) for each in (micros, date)]
    facts = ("offset", "message_id", "flag")
    return sf.xxhash64(*facts, *times, micros, date.cast("long"), *_content())


def _content() -> list[Column]:
    """Return what is hashed of a message; nulls alone would leave no trace."""
    names = ("attribute", "key", "headers")
    return [*(sf.isnull(name) for name in names), *map(sf.col, ("value", *names))]


def _matched(
    ones: DataFrame, others: DataFrame, keys: Sequence[str], *more: str
) -> DataFrame:
    """Return for each key the messages of both sides: number, content, least values.

    Args:
        ones: The source.
        others: The target.
        keys: Columns by which messages are matched.
        more: Columns of which the least value of each side is wanted.
    """
    rows = ones.withColumn("is_source", sf.lit(True)).unionByName(
        others.withColumn("is_source", sf.lit(False))
    )
    facts = [sf.min("body").alias("least"), sf.max("body").alias("most")]
    for side, is_its in (
        ("source", sf.col("is_source")),
        ("target", ~sf.col("is_source")),
    ):
        facts.append(sf.count(sf.when(is_its, 1)).alias(f"{side}_count"))
        facts += [
            sf.min(sf.when(is_its, sf.col(name))).alias(f"{side}_{name}")
            for name in more
        ]
    # Most keys are there once on each side: nothing is gained by matching within tasks.
    return rows.repartition(*keys).groupBy(*keys).agg(*facts)


def _differs() -> Column:
    """Whether any two of the messages of a key have different content."""
    return sf.col("least") != sf.col("most")


def _judged(both: DataFrame, kind: Column, is_moved: Column | None = None) -> DataFrame:
    """Return keys with the kind of their difference, null for none, and its count."""
    difference = sf.abs(sf.col("source_count") - sf.col("target_count"))
    return both.withColumns(
        {
            "kind": kind,
            "count": sf.when(kind == "corrupted", sf.lit(1)).otherwise(difference),
            "is_moved": sf.lit(False) if is_moved is None else is_moved,
        }
    )


def _tally(judged: DataFrame) -> list[Any]:
    """Count keys and messages by their difference."""
    sums = ("count", "source_count", "target_count")
    return (
        judged.groupBy("kind", "is_moved")
        .agg(sf.count(sf.lit(1)).alias("keys"), *(sf.sum(n).alias(n) for n in sums))
        .collect()
    )


def _counts(tally: Sequence[Any]) -> dict[AuditFindingKind, int]:
    """Return the number of messages of each kind; every kind is there."""
    counts = dict.fromkeys(AuditFindingKind, 0)
    for row in tally:
        if row["kind"] is not None:
            counts[AuditFindingKind(row["kind"])] += row["count"]
        if row["is_moved"]:
            counts[AuditFindingKind.REORDERED] += row["keys"]
    return counts


def _examples(judged: DataFrame) -> list[AuditFinding]:
    """Return the first findings of each kind."""
    times = "%d times in the source, %d times in the target"
    detail = sf.when(
        sf.col("kind") == "corrupted", "the target has other content"
    ).otherwise(sf.format_string(times, "source_count", "target_count"))
    kinds = [sf.struct("kind", detail.alias("detail"))]
    if "ahead" in judged.columns:
        order = "at offset %d of the target, after offset %d"
        detail = sf.format_string(order, "target_offset", "ahead").alias("detail")
        moved = sf.struct(sf.lit("reordered").alias("kind"), detail)
        kinds.append(sf.when(sf.col("is_moved"), moved))
    found = judged.where("kind IS NOT NULL OR is_moved")
    found = found.select(*PLACE, sf.inline(sf.array(*kinds))).where("kind IS NOT NULL")
    in_order = Window.partitionBy("kind").orderBy(*PLACE)
    ranked = found.withColumn("rank", sf.row_number().over(in_order))
    first = ranked.where(sf.col("rank") <= EXAMPLES_MAX).collect()
    return sorted(map(_to_finding, first), key=_order)


_KINDS: Final = tuple(AuditFindingKind)


def _order(finding: AuditFinding) -> tuple[int, TopicPartition, Offset]:
    return _KINDS.index(finding.kind), finding.partition, finding.offset


def _to_finding(row: Any) -> AuditFinding:
    kind, offset = AuditFindingKind(row["kind"]), Offset(row["offset"])
    return AuditFinding(kind, partition_of(row), offset, row["detail"])
