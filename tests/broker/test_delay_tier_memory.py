"""Many messages that wait take little memory, and a start reads little of them."""

import asyncio
import gc
import random
import tracemalloc

import pytest

from metaq.broker.delay_tier import DelayTier
from metaq.delay.due_index import ENTRY
from metaq.delay.records import TOPIC, encode_head
from metaq.model import LogId, MessageId
from metaq.record.layout import encode_record
from tests.broker.delay_rig import DelayRig
from tests.rigs.storage import Ticket
from tests.sampling import IS_WHOLE

COUNT = 1_000_000 if IS_WHOLE else 40_000
MEMORY_MAX = COUNT * ENTRY.size // 2
"""Half of what all entries would be, packed; 14 MB for a million."""
SEGMENT_BYTES = 16 << 20 if IS_WHOLE else 1 << 19
AT_ONCE = 5000
SPAN_MS = 3_000_000


def fill(rig: DelayRig, tier: int, source: random.Random) -> None:
    """Append records with random times, many at once."""
    log = rig.context.topics.internal_log(LogId(TOPIC, tier))
    start_ms = rig.now_ms + 1000
    for _ in range(COUNT // AT_ONCE):
        first = rig.context.ids.reserve(AT_ONCE)
        records = [
            encode_record(
                encode_head(
                    start_ms + source.randrange(SPAN_MS), MessageId(7), "test", 0, 1
                )
                + encode_record(b"x", id=MessageId(0)),
                id=first,
            )
            for _ in range(AT_ONCE)
        ]
        ticket = Ticket()
        log.append(
            records,
            size_bytes=sum(map(len, records)),
            record_count=AT_ONCE,
            last_id=first,
            ticket=ticket,
        )
        rig.bench.run()
        assert ticket.is_stored


@pytest.mark.slow
def test_what_waits_is_on_the_disk(rng: random.Random) -> None:
    """In memory is the segment that is written, and a directory of each file."""

    async def main() -> None:
        rig = await DelayRig(segment_bytes=SEGMENT_BYTES).start()
        fill(rig, 0, rng)
        await rig.tick()
        rig = await rig.again()
        gc.collect()
        tracemalloc.start()
        tier: DelayTier = rig.service.tiers[0]
        tier.unload()
        rig.clock.advance_s(11.0)
        await rig.tick()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < MEMORY_MAX
        assert tier.waiting_messages == COUNT - len(rig.payloads())
        tracemalloc.stop()
        await rig.kill()

    asyncio.run(main())
