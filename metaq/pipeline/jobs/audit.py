"""Compare a topic with its archive, or with a copy: lost, doubled, changed messages.

    against an archive   messages are matched by partition and offset
    against a copy       messages are matched by their content, or by an id in it

The table defines what an archive should contain, not its remaining files: a missing
message up to the recorded end of its partition is lost. Archived messages of partitions
that no broker serves now are "away": they cannot be compared.

A copy has other offsets. If the same content occurs several times, its counts must be
equal; the order is checked only for messages that occur once on each side.

Content is compared by digests: of 64 bits if partition and offset, or an id, identify
the message, of 128 bits if only the content does. Against an archive, the digests of
each span of a log are summed first. Only spans with different sums are read again and
compared message by message, so checking a correct archive costs one read of each side.
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
"""Maximum number of findings listed for each kind; all are counted."""
PLACE: Final = ("topic", "broker_id", "partition", "offset")
DAY_MICROS: Final = 86_400_000_000
SPAN_BITS: Final = 26
"""Digests are summed over the messages that begin in one span of 2^26 bytes, 64 MiB."""
_HALF_BITS: Final = 32
_LOG: Final = PLACE[:-1]
_LOG_DDL: Final = "topic STRING, broker_id INT, partition INT"
_NO_OFFSETS: Final[Offsets] = {}
_Span: TypeAlias = tuple[TopicPartition, int]
LogStarts: TypeAlias = Callable[[Collection[TopicPartition]], Offsets]
"""Returns partition → log start, as far as known."""


class AuditFindingKind(enum.Enum):
    """Kind of a difference; the value is its name in reports."""

    LOST = "lost"
    """In the source, but not in the target."""
    DOUBLED = "doubled"
    """More often in the target than in the source."""
    CORRUPTED = "corrupted"
    """The same offset or id with other content."""
    REORDERED = "reordered"
    """After a message of its partition that it preceded in the source."""
    EXTRA = "extra"
    """In the target, but never in the source."""
    AWAY = "away"
    """Archived, of a partition that no broker serves now: it cannot be compared."""
    BEHIND = "behind"
    """After the end of the partition's archive: not a fault, not archived yet."""
    EXPIRED = "expired"
    """Archived, and before the log start: not a fault, removed by retention."""


HARMLESS: Final = frozenset({AuditFindingKind.BEHIND, AuditFindingKind.EXPIRED})


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One difference."""

    kind: AuditFindingKind
    partition: TopicPartition
    """Partition of the message in the source; in the target if it is only there."""
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
    """Kind → number of messages; contains every kind."""
    findings: tuple[AuditFinding, ...]
    """The first `EXAMPLES_MAX` of each kind, by kind, partition and offset."""
    away: tuple[TopicPartition, ...] = ()
    """Partitions that no broker serves now, archived or not; not compared."""

    @property
    def is_right(self) -> bool:
        """Whether everything was compared, and no fault was found."""
        has_fault = any(n for kind, n in self.counts.items() if kind not in HARMLESS)
        return not has_fault and not self.away


def audit_archive(
    spark: SparkSession, path: str, options: Mapping[str, str], topics: Sequence[str]
) -> AuditSummary:
    """Compare topics with an archive of them.

    Messages put while it runs may count as not archived yet. Partitions of brokers that
    are away are reported, and count as a fault; `failOnDataLoss=true` raises instead.

    Args:
        spark: the session.
        path: path or URL of the archive.
        options: of a batch read with `format("metaq")`, without the topics.
        topics: topics to compare, one or more.

    Returns:
        Counts of each kind of difference, and the first ones of each kind.

    Raises:
        ArchiveError: there is no archive, it is damaged, or a topic was never archived.
        JobError: reading failed.
        NoBrokerError: no broker has one of the topics.
        OptionError: an option is wrong.
    """
    # Given twice in different case, Spark would take an arbitrary one.
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
            # For files of several partitions, the table has only the range.
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
    """Return the existing files, and the rows missing in them and in missing files."""
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
        spark: the session.
        source_options: of a batch read with `format("metaq")`.
        target_options: the same for the copy.
        message_id: SQL expression over the columns of the source that identifies
            messages. With None, value, attribute, key and headers identify them, and a
            changed message counts as one lost and one extra.

    Raises:
        JobError: reading failed.
        OptionError: an option is wrong.
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
    """Compare two frames with the source's columns, by partition and offset.

    Args:
        source: rows of the topics.
        target: rows of the existing files of the archive.
        ends: partition → offset of the last archived message; by default that of the
            last existing row.
        missing: rows missing in files of the archive.
        away: partitions without rows in the source now.
        log_starts: returns the log starts of partitions without messages. Archived
            messages of a partition without one are expired up to its recorded end, and
            extra without that.
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
        # The first spans show the log starts at that time.
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
    """Return for each span the count, the last offset and the sum of digests."""
    low = sf.col("body").bitwiseAND((1 << _HALF_BITS) - 1)
    sums = rows.groupBy(*_LOG, "span").agg(
        sf.count(sf.lit(1)).alias("count"),
        sf.max("offset").alias("last"),
        # Both halves are summed separately, so that no sum overflows.
        sf.sum(low).alias("low"),
        sf.sum(sf.shiftright("body", _HALF_BITS)).alias("high"),
    )
    return {(partition_of(row), row["span"]): row for row in sums.collect()}


def _lasts(sums: Mapping[_Span, Any], ends: Offsets) -> dict[TopicPartition, int]:
    """Return the last offset of each archived partition, recorded or existing."""
    lasts: dict[TopicPartition, int] = dict(ends)
    for (log, _span), row in sums.items():
        lasts[log] = max(row["last"], lasts.get(log, row["last"]))
    return lasts


def _only(rows: DataFrame, spans: Collection[_Span]) -> DataFrame:
    """Return the rows of spans."""
    wanted = rows.sparkSession.createDataFrame(
        [(*_fields(log), span) for log, span in spans], f"{_LOG_DDL}, span BIGINT"
    )
    numbers = [span for _log, span in spans]
    # By this condition, Parquet readers skip row groups.
    near = sf.col("offset").between(
        min(numbers) << SPAN_BITS, ((max(numbers) + 1) << SPAN_BITS) - 1
    )
    there = rows.where(near)
    return there.join(sf.broadcast(wanted), [*_LOG, "span"], "left_semi")


def _starts(
    ones: DataFrame, partitions: Collection[TopicPartition], log_starts: LogStarts
) -> dict[TopicPartition, int]:
    """Return the log starts: the first message, or `log_starts` for empty logs."""
    firsts = ones.groupBy(*_LOG).agg(sf.min("offset").alias("first")).collect()
    starts: dict[TopicPartition, int] = {
        partition_of(row): row["first"] for row in firsts
    }
    # Read after the rows, because retention may have removed messages since.
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
    """Classify the messages of spans, by partition and offset."""
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
    # Without a recorded end, only a known log start shows that it was in the source.
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
    """Return partition → number of lost messages."""
    lost = judged.where("kind = 'lost'").groupBy(*_LOG).count().collect()
    return {partition_of(row): row["count"] for row in lost}


def _lost_on_both_sides(
    found: Mapping[TopicPartition, int], missing: Sequence[ArchivedLog]
) -> list[tuple[int, AuditFinding]]:
    """Return counts and findings of messages missing in both archive and source.

    Args:
        found: partition → number of lost messages that the source still has, which are
            findings of their own.
        missing: rows missing in files of the archive.
    """
    named = dict(found)
    lost = []
    # Files of one partition first: files of several get the rest of the counts.
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
    """Compare two frames with the source's columns, by content or id of messages."""
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
    """Classify messages by their keys; with partition and offset only if in `more`.

    These are costly, because Spark sorts to find the first of a key.
    """
    both = _matched(ones, others, keys, "log", "offset", *more)
    is_pair = (sf.col("source_count") == 1) & (sf.col("target_count") == 1)
    # Order is guaranteed only from one partition to one partition.
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
    """Cache both sides in the block: each is read once, even if its log grows."""
    ones.persist()
    others.persist()
    try:
        yield ones, others
    finally:
        ones.unpersist()
        others.unpersist()


def _digest(side: DataFrame) -> Column:
    """Return the digest of all columns; the date may be computed from the timestamp."""
    micros, day = sf.unix_micros("timestamp"), sf.lit(DAY_MICROS)
    date = sf.floor((micros - sf.pmod(micros, day)) / day)
    if "date" in side.columns:
        date = sf.unix_date("date")
    times = [sf.isnull(each) for each in (micros, date)]
    facts = ("offset", "message_id", "flag")
    return sf.xxhash64(*facts, *times, micros, date.cast("long"), *_content())


def _content() -> list[Column]:
    """Return the columns to hash; with null flags, because hashes ignore nulls."""
    names = ("attribute", "key", "headers")
    return [*(sf.isnull(name) for name in names), *map(sf.col, ("value", *names))]


def _matched(
    ones: DataFrame, others: DataFrame, keys: Sequence[str], *more: str
) -> DataFrame:
    """Group the messages of both sides by key, with counts, content and minimums.

    Args:
        ones: the source.
        others: the target.
        keys: columns by which messages are matched.
        more: columns whose minimum on each side is returned.
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
    # Most keys occur once on each side, so aggregating before the shuffle is useless.
    return rows.repartition(*keys).groupBy(*keys).agg(*facts)


def _differs() -> Column:
    """Return whether messages of a key differ in content."""
    return sf.col("least") != sf.col("most")


def _judged(both: DataFrame, kind: Column, is_moved: Column | None = None) -> DataFrame:
    """Add the kind of the difference of each key, null for none, and its count."""
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
    """Return kind → number of messages; contains every kind."""
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
