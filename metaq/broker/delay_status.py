"""Status of delayed messages for operators: figures, and the listing of `scheduled`."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from metaq.broker.delay_tier import DelayTier
from metaq.delay.due_index import (
    BLOCK_BYTES,
    BLOCK_ENTRIES,
    decode_entries,
    topic_hash,
)
from metaq.delay.plan import DueEntry
from metaq.model import Offset
from metaq.protocol.commands import ListScheduled
from metaq.stats import counter, gauge

HOUR_MS: Final = 3_600_000
HOURS_MAX: Final = 1000
"""Maximum hours in a listing."""
SOONEST_MAX: Final = 8192
"""Maximum records that a listing reads to find the soonest messages."""
ALL_TOPICS: Final = "*"
_CANCELLED: Final = b"\xff\xff"
"""Among the bytes of each entry of a cancelled message: its count, which is from
-RECORD_MESSAGES_MAX to -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayStatus:
    """Figures of the delayed messages of a broker."""

    waiting_count: int = gauge(
        "metaq_delayed_messages",
        "Messages that wait for their time; those of deleted topics until it comes.",
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
    """One sentence for each problem that stops deliveries."""
    clock_problem: str = ""


async def list_scheduled(
    tiers: Sequence[DelayTier],
    dropped: Mapping[str, Sequence[int]],
    command: ListScheduled,
    *,
    soonest_max: int = SOONEST_MAX,
) -> dict[str, Any]:
    """Return the listing of waiting messages, the answer to `scheduled`.

    Args:
        tiers: all tiers.
        dropped: deleted topics: of each tier, records below an offset are void.
        command: topics and due times to list, and the number of records to name.
        soonest_max: maximum records that are read to find the soonest messages.

    Raises:
        StorageError: the disk cannot be read.
    """
    messages = size_bytes = 0
    hours, cancelled = Counter[int](), Counter[tuple[int, int]]()
    freed_bytes = Counter[tuple[int, int]]()
    soonest = list[tuple[int, int, int, int]]()
    wanted = None if command.topic == ALL_TOPICS else topic_hash(command.topic)
    ends = [(topic_hash(each), dropped[each]) for each in dropped]
    async for number, entries in _entries(tiers, _CANCELLED):
        for each in entries:
            if each.messages < 0 and wanted in (None, each.topic):
                cancelled[number, each.offset] += 1
                freed_bytes[number, each.offset] += each.size_bytes
    async for number, entries in _entries(tiers):
        for each in entries:
            left = each.messages - cancelled[number, each.offset]
            if left <= 0 or wanted not in (None, each.topic):
                continue
            if not command.from_ms <= each.due_ms < command.to_ms or any(
                each.topic == name and each.offset < end[number] for name, end in ends
            ):
                continue
            messages += left
            size_bytes += each.size_bytes - freed_bytes[number, each.offset]
            hours[each.due_ms // HOUR_MS * HOUR_MS] += left
            soonest.append((*each.key, number, left))
        if len(soonest) > soonest_max:
            soonest = sorted(soonest)[: soonest_max // 2]
    return {
        "count": messages,
        "bytes": size_bytes,
        "hours": sorted(hours.items())[:HOURS_MAX],
        "first": await _describe(tiers, soonest, command),
    }


async def _entries(
    tiers: Sequence[DelayTier], having: bytes = b""
) -> AsyncIterator[tuple[int, Iterable[DueEntry]]]:
    """Yield waiting records by tier; skip index blocks without the given bytes."""
    for number, tier in enumerate(tiers):
        late = tuple(tier.late)
        for at in range(0, len(late), BLOCK_ENTRIES):
            yield number, late[at : at + BLOCK_ENTRIES]
            await asyncio.sleep(0)
        for run in tier.index.runs:
            for block in await tier.blocks_of(run):
                for at in range(0, len(block), BLOCK_BYTES):
                    some = block[at : at + BLOCK_BYTES]
                    if having in some:
                        yield number, decode_entries(some)
                    await asyncio.sleep(0)


async def _describe(
    tiers: Sequence[DelayTier],
    soonest: Sequence[tuple[int, int, int, int]],
    command: ListScheduled,
) -> list[dict[str, Any]]:
    found = list[dict[str, Any]]()
    for due_ms, offset, number, count in sorted(soonest):
        if len(found) >= command.limit:
            break
        read = await tiers[number].read_head(Offset(offset))
        if read is None or command.topic not in (ALL_TOPICS, read[0].topic):
            continue
        head = read[0]
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
