"""Status of queue groups for operators: lines of `stats queues`, metrics, alarms."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from metaq.broker.queue_groups import QueueGroup
from metaq.broker.queue_part import ServedQueue
from metaq.model import Offset
from metaq.queues.rules import Now
from metaq.stats import counter, gauge
from metaq.storage.partition_log import PartitionLog

HOLDERS_MAX: Final = 20
"""Maximum workers in a line: those with the most messages."""
LOSS_SHOWN_MS: Final = 24 * 3600 * 1000
"""Time for which an alarm reports messages lost to retention."""

Place: TypeAlias = tuple[PartitionLog, ServedQueue | None, Offset]
"""A partition of a group, its queue if it is in memory, and its floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGroupStatus:
    """Figures of a queue group on this broker, summed over the queues in memory."""

    group: str
    topic: str
    open_count: int = gauge(
        "metaq_queue_open_messages",
        "Messages of a queue group that were looked at and are not done.",
    )
    ready_count: int = gauge(
        "metaq_queue_ready_messages", "Open messages that can be given out now."
    )
    delayed_count: int = gauge(
        "metaq_queue_delayed_messages",
        "Open messages that wait for the end of their delay.",
    )
    unread_bytes: int = gauge(
        "metaq_queue_unread_bytes", "Bytes of the log that were not looked at yet."
    )
    done_count: int = counter(
        "metaq_queue_done_messages_total",
        "Messages that are done: handled, passed over, dropped or dead.",
    )
    passed_count: int = counter(
        "metaq_queue_passed_messages_total",
        "Of these, messages that are not the group's, by its filter.",
        default=0,
    )
    expired_count: int = counter(
        "metaq_queue_expired_leases_total",
        "Leases that ended before their messages were settled.",
    )
    letter_count: int = counter(
        "metaq_queue_dead_letters_total",
        "Messages that were given up: stored as dead letters, or dropped.",
    )
    skipped_bytes: int = counter(
        "metaq_queue_skipped_bytes_total",
        "Damaged bytes of the log that were passed over by command.",
        default=0,
    )
    full: tuple[str, ...] = ()
    """One sentence for each partition with the maximum of open messages."""
    lost: tuple[str, ...] = ()
    """One sentence for each partition that recently lost messages to retention."""


def status_of(group: QueueGroup, places: Iterable[Place], now: Now) -> QueueGroupStatus:
    """Return the figures of a group, summed over its partitions."""
    found = list(places)
    queues = [queue for _log, queue, _floor in found if queue is not None]
    sums = Counter[str]()
    for queue in queues:
        sums.update(_figures(queue))
    return QueueGroupStatus(
        group=group.name,
        topic=group.definition.topic,
        unread_bytes=sum(
            log.high_watermark - (floor if queue is None else queue.state.scan_offset)
            for log, queue, floor in found
        ),
        skipped_bytes=sum(queue.state.skipped_bytes for queue in queues),
        full=tuple(_full(queue) for queue in queues if not queue.state.has_room),
        lost=tuple(
            f"{queue}: retention deleted {queue.lost_count} open messages, and"
            f" {queue.state.lost_bytes} bytes that were not read yet"
            for queue in queues
            if queue.lost_ms and now.mono_ms - queue.lost_ms < LOSS_SHOWN_MS
        ),
        **sums,
    )


def _figures(queue: ServedQueue) -> dict[str, int]:
    """Return the figures of a queue, by their names in `metaq.client.admin`."""
    state = queue.state
    return {
        "open_count": state.open_count,
        "ready_count": state.ready_count,
        "delayed_count": state.delayed_count,
        "done_count": state.done_count,
        "passed_count": state.passed_count,
        "expired_count": state.expired_count,
        "letter_count": state.letter_count + state.dropped_count,
    }


def _full(queue: ServedQueue) -> str:
    state = queue.state
    of_all = "" if state.is_full else f" of {state.bound.count} on this broker"
    text = (
        f"{queue}: {state.open_count} messages are open{of_all}: no other is delivered"
        " until one of them is settled"
    )
    holders = state.leases.holders()
    if holders:
        most = max(holders, key=lambda name: (holders[name], name))
        text += f"; worker {most} has most, {holders[most]}"
    hot = state.hot_key()
    if hot is not None:
        where = f"with worker {hot.worker}" if hot.worker else "with no worker"
        text += (
            f"; {hot.open_count} are of the key with hash {hot.lock:08x}, whose first"
            f" one, at offset {hot.offset}, is {where}"
        )
    return text


def line_of(
    group: QueueGroup, log: PartitionLog, queue: ServedQueue | None, floor: Offset
) -> str:
    """Return a line of `stats queues`, a JSON object; `metaq.client.admin` reads it.

    Args:
        group: group of the queue.
        log: the partition.
        queue: the queue; None if no worker has asked for it since the broker started,
            so that only its `floor` is known.
        floor: every message below it is done.
    """
    fields: dict[str, object] = {
        "group": group.name,
        "topic": log.log_id.topic,
        "partition": log.log_id.partition,
        "floor": floor,
        "end": log.high_watermark,
        "held": {},
    }
    if queue is not None:
        holders = queue.state.leases.holders()
        most = sorted(holders.items(), key=lambda each: (-each[1], each[0]))
        fields |= {
            **_figures(queue),
            "read_offset": queue.state.scan_offset,
            "held": dict(most[:HOLDERS_MAX]),
        }
    return json.dumps(fields)
