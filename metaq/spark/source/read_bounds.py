"""Start and end of a read in each partition, from the options."""

from collections.abc import Mapping
from typing import assert_never

from metaq.model import Millis, Offset, TopicPartition
from metaq.spark.cluster import Cluster
from metaq.spark.errors import InnerOffsetError, LateStartError
from metaq.spark.options import AtTime, Edge, SourceOptions
from metaq.spark.plan import LogSpan
from metaq.spark.rows import OnCorrupt
from metaq.spark.source.facts import PlanningFacts

NOTHING = LogSpan(Offset(0), Offset(0))
"""A log that a broker does not have yet: its first record will lie at 0."""


def resolve_starts(
    cluster: Cluster,
    facts: PlanningFacts,
    options: SourceOptions,
    spans: Mapping[TopicPartition, LogSpan | None],
) -> dict[TopicPartition, Offset]:
    """Return where reading starts in each partition.

    Args:
        cluster: asked for the offsets of a group.
        facts: asked for times.
        options: options of the read.
        spans: present spans of the logs.

    Raises:
        LateStartError: no message is as young as the asked time.
        InnerOffsetError: a named offset lies inside a record.
        CannotAnswerError: a time is asked of a MetaQ 1.4 broker.
    """
    committed: dict[TopicPartition, Offset] = {}
    if options.starting.edge is Edge.GROUP and options.start_group is not None:
        committed = cluster.read_progress(options.start_group, spans)
    starts: dict[TopicPartition, Offset] = {}
    for partition, found in sorted(spans.items()):
        span, wanted = found or NOTHING, options.starting.of(partition)
        match wanted:
            case Edge.EARLIEST:
                starts[partition] = span.start
            case Edge.LATEST:
                starts[partition] = span.end
            case Edge.GROUP:
                starts[partition] = committed.get(partition, span.start)
            case AtTime(time_ms):
                at = _first_since(facts, partition, span, time_ms)
                if at is None and options.is_late_start_error:
                    raise LateStartError(
                        f"{partition}: no message was put at {time_ms} ms since 1970 or"
                        " later; startingOffsetsByTimestampStrategy=latest starts at"
                        " the log end there"
                    )
                starts[partition] = span.end if at is None else at
            case int():
                _require_record(facts, options, partition, span, wanted)
                starts[partition] = wanted
            case _:
                assert_never(wanted)
    return starts


def resolve_ends(
    facts: PlanningFacts,
    options: SourceOptions,
    spans: Mapping[TopicPartition, LogSpan | None],
) -> dict[TopicPartition, Offset]:
    """Return where a batch ends in each partition; raises as `resolve_starts`."""
    ends: dict[TopicPartition, Offset] = {}
    for partition, found in sorted(spans.items()):
        span, wanted = found or NOTHING, options.ending.of(partition)
        ends[partition] = span.end
        if isinstance(wanted, AtTime):
            at = _first_since(facts, partition, span, wanted.time_ms)
            ends[partition] = span.end if at is None else at
        elif isinstance(wanted, int):
            _require_record(facts, options, partition, span, wanted)
            ends[partition] = wanted
    return ends


def _require_record(
    facts: PlanningFacts,
    options: SourceOptions,
    partition: TopicPartition,
    span: LogSpan,
    named: Offset,
) -> None:
    """Refuse an offset within the log at which no record begins, unless `skip` asks."""
    is_within = span.start < named < span.end
    if not is_within or options.on_corrupt is OnCorrupt.SKIP:
        return
    begins = facts.record_from(partition, named, span.end)
    if begins != named:
        where = "none is in sight" if begins is None else f"the next one is at {begins}"
        raise InnerOffsetError(
            f"{partition}: no record begins at offset {named}, which lies inside one,"
            f" or at damage; {where}. Offsets are byte positions: take those of the"
            " column offset"
        )


def _first_since(
    facts: PlanningFacts, partition: TopicPartition, span: LogSpan, time_ms: Millis
) -> Offset | None:
    """Return where the messages of a time begin; None where none is that young."""
    if not span.size_bytes:
        return None
    at = facts.offset_for_time(partition, time_ms)
    return None if at is None or at >= span.end else at
