"""Delayed messages as operators see them: figures, and the listing of `scheduled`."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from metaq.broker.delay_tier import DelayTier
from metaq.delay.due_index import decode_entries, topic_hash
from metaq.delay.plan import Waiting
from metaq.model import Offset
from metaq.stats import counter, gauge

HOUR_MS: Final = 3_600_000
HOURS_MAX: Final = 1000
"""Hours with messages that a listing names."""
SOONEST_MAX: Final = 8192
"""Records that a listing looks at for the soonest ones."""
NO_END_MS: Final = 2**63
ALL_TOPICS: Final = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayStatus:
    """Delayed messages of a broker, as operators see them."""

    waiting_count: int = gauge(
        "metaq_delayed_messages", "Messages that wait for their time."
    )
    waiting_bytes: int = gauge(
        "metaq_delayed_bytes", "Bytes of records of messages that wait for their time."
    )
    delivered_count: int = counter(
        "metaq_delayed_delivered_messages_total",
        "Messages that were delivered when their time came.",
    )
    cancelled_count: int = counter(
        "metaq_delayed_cancelled_messages_total",
        "Messages that were taken back before their time came.",
    )
    late_ms: int = gauge(
        "metaq_delayed_late_seconds",
        "Time by which the oldest message of the last batch was late.",
        read=lambda milliseconds: milliseconds / 1000,
    )
    problems: tuple[str, ...] = ()
    """One sentence for each thing that keeps messages from being delivered."""
    clock_problem: str = ""


class ScheduledMessages(Protocol):
    """The service as a listing uses it."""

    @property
    def tiers(self) -> Sequence[DelayTier]:
        """Return the tiers, in order."""

    @property
    def dropped(self) -> Mapping[str, Sequence[int]]:
        """Return the deleted topics; what is below an offset of each tier is gone."""


async def list_scheduled(
    delays: ScheduledMessages,
    topic: str,
    limit: int,
    from_ms: int = 0,
    to_ms: int = NO_END_MS,
) -> dict[str, Any]:
    """Return what waits for a topic, or for all (`*`), as `scheduled` says it.

    Raises:
        StorageError: the disk does not give it.
    """
    messages = size_bytes = 0
    hours: Counter[int] = Counter()
    soonest = list[tuple[int, int, int, int]]()
    wanted = None if topic == ALL_TOPICS else topic_hash(topic)
    async for number, entries in _entries(delays):
        for each in entries:
            if wanted not in (None, each.topic):
                continue
            if not from_ms <= each.due_ms < to_ms or _is_gone(delays, number, each):
                continue
            messages += each.messages
            size_bytes += each.size_bytes if each.messages > 0 else 0
            hours[each.due_ms // HOUR_MS * HOUR_MS] += each.messages
            soonest.append((*each.key, number, each.messages))
        if len(soonest) > SOONEST_MAX:
            soonest = sorted(soonest)[: SOONEST_MAX // 2]
    shown = sorted((hour, count) for hour, count in hours.items() if count)
    return {
        "count": messages,
        "bytes": size_bytes,
        "hours": shown[:HOURS_MAX],
        "first": await _describe(delays, soonest, topic, limit),
    }


async def _entries(
    delays: ScheduledMessages,
) -> AsyncIterator[tuple[int, Iterable[Waiting]]]:
    for number, tier in enumerate(delays.tiers):
        yield number, tuple(tier.late)
        for run in tier.index.runs:
            for block in await tier.blocks_of(run):
                yield number, decode_entries(block)
                await asyncio.sleep(0)


def _is_gone(delays: ScheduledMessages, number: int, each: Waiting) -> bool:
    """Return whether an entry is of a topic that was deleted since."""
    return any(
        each.topic == topic_hash(topic) and each.offset < ends[number]
        for topic, ends in delays.dropped.items()
    )


async def _describe(
    delays: ScheduledMessages,
    soonest: Sequence[tuple[int, int, int, int]],
    topic: str,
    limit: int,
) -> list[dict[str, Any]]:
    left: Counter[tuple[int, int, int]] = Counter()
    for due_ms, offset, number, count in sorted(soonest):
        left[due_ms, offset, number] += count
    found = list[dict[str, Any]]()
    for (due_ms, offset, number), count in left.items():
        if len(found) >= limit:
            break
        head = await delays.tiers[number].read_head(Offset(offset))
        is_same = head is not None and topic in (ALL_TOPICS, head.topic)
        if head is None or count <= 0 or not is_same:
            continue
        found.append(
            {
                "due": due_ms,
                "topic": head.topic,
                "partition": head.partition,
                "count": count,
                "tier": number,
                "offset": offset,
                "id": head.id,
            }
        )
    return found
