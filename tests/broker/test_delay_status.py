"""Delayed messages as operators see them: figures, `scheduled`, alarms."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from metaq.broker.delay_status import list_scheduled
from metaq.broker.dispatch import dispatch
from metaq.protocol.commands import Cancel, ListScheduled
from tests.broker.delay_rig import DelayRig, FakeSession, mput_of

HOUR_MS = 3_600_000
LISTING = ListScheduled("test", 9, 0)


async def listed(rig: DelayRig, topic: str = "*", limit: int = 9, **more: int) -> Any:
    reply = await rig.ask(ListScheduled(topic, limit, 1, **more))
    assert reply.status == 200, reply
    return json.loads(reply.text)


def test_a_listing_counts_what_waits_by_hour_and_names_the_soonest() -> None:
    """For one topic, or for all; what was cancelled is not in it."""

    async def main() -> None:
        rig = await DelayRig().start()
        assert await listed(rig) == {"count": 0, "bytes": 0, "hours": [], "first": []}
        start = rig.now_ms // HOUR_MS * HOUR_MS + 2 * HOUR_MS
        tier, offset, first = await rig.schedule(b"a", b"b", due_ms=start + 5)
        more = await rig.schedule(b"c", due_ms=start + 3 * HOUR_MS, partition=-1)
        gone = await rig.schedule(b"d", due_ms=start)
        body = b"%d %d %d %d" % (*gone[:2], start, gone[2])
        assert (await rig.ask(Cancel("test", body, 1))).body == b"cancelled"
        body = b"%d %d %d %d" % (tier, offset, start + 5, first)
        assert (await rig.ask(Cancel("test", body, 1))).body == b"cancelled"
        found = await listed(rig)
        assert found["count"] == 2
        assert found["hours"] == [[start, 1], [start + 3 * HOUR_MS, 1]]
        names = "due", "topic", "partition", "count", "tier", "offset", "id"
        ab = (start + 5, "test", 0, 1, tier, offset, first)
        c = (start + 3 * HOUR_MS, "test", -1, 1, *more)
        assert [tuple(each[name] for name in names) for each in found["first"]] == [
            ab, c
        ]  # fmt: skip
        assert await listed(rig, "test") == found
        assert (await listed(rig, "meta-test"))["count"] == 0
        assert len((await listed(rig, limit=1))["first"]) == 1
        late = await listed(rig, from_ms=start + HOUR_MS, to_ms=start + 9 * HOUR_MS)
        assert (late["count"], late["hours"]) == (1, [[start + 3 * HOUR_MS, 1]])
        assert (await listed(rig, to_ms=start))["count"] == 0
        status = rig.service.status()
        assert (status.waiting_count, status.cancelled_count) == (2, 2)
        again = await rig.again()
        assert (await listed(again))["count"] == 2
        assert again.service.status().waiting_count == 2
        await again.kill()

    asyncio.run(main())


@pytest.mark.parametrize("payload", [b"x", b"x" * 900], ids=["one segment", "several"])
def test_what_was_taken_back_takes_no_bytes_and_hides_nothing(payload: bytes) -> None:
    """Also more of it than the records that are looked at for the soonest ones."""

    async def main() -> None:
        rig = await DelayRig().start()
        due, service = rig.now_ms + HOUR_MS, rig.service
        for number in range(6):
            tier, offset, first = await rig.schedule(payload, due_ms=due + number)
            body = b"%d %d %d %d" % (tier, offset, due + number, first)
            assert (await rig.ask(Cancel("test", body, 1))).body == b"cancelled"
        found = await list_scheduled(service.tiers, {}, LISTING)
        assert found == {"count": 0, "bytes": 0, "hours": [], "first": []}
        status = service.status()
        assert (status.waiting_count, status.waiting_bytes) == (0, 0)
        tier, offset, first = await rig.schedule(payload, payload, due_ms=due + 9)
        body = b"%d %d %d %d" % (tier, offset, due + 9, first)
        assert (await rig.ask(Cancel("test", body, 1))).body == b"cancelled"
        await service.tick()
        found = await list_scheduled(service.tiers, {}, LISTING, soonest_max=4)
        assert [each["count"] for each in found["first"]] == [found["count"]] == [1]
        assert found["bytes"] == service.status().waiting_bytes
        assert len(payload) < found["bytes"] < len(payload) + 100
        await rig.kill()

    asyncio.run(main())


@pytest.mark.slow
def test_listings_are_made_one_after_another_and_in_steps() -> None:
    """Many at once would take a step each in every turn of the loop: seconds."""

    async def main() -> None:
        rig = await DelayRig(segment_bytes=1 << 20).start()
        due = rig.now_ms + HOUR_MS
        for number in range(3):
            times = [due + 2000 * number + each for each in range(2000)]
            reply = await rig.send(mput_of(*[b"x"] * 2000, times=times))
            assert reply.status == 200
        asked: list[Any] = [FakeSession(rig.context) for _ in range(3)]
        for each in asked:
            assert not dispatch(ListScheduled("*", 0, 1), each)
        for _ in range(2):
            await asyncio.sleep(0)
            await rig.tick()
        turns = [0] * len(asked)
        while not all(each.replies for each in asked):
            rig.bench.run()
            await asyncio.sleep(0)
            for at, each in enumerate(asked):
                turns[at] += not each.replies
        gaps = [after - before for before, after in pairwise(sorted(turns))]
        assert min(gaps) >= 6, turns  # entries by the thousand
        await rig.kill()

    asyncio.run(main())


def test_a_listing_reads_files_too() -> None:
    """Of segments that are sealed; and what is late."""

    async def main() -> None:
        rig = await DelayRig().start()
        due = rig.now_ms + 1000
        for number in range(60):
            await rig.schedule(b"%d" % number * 50, due_ms=due + number % 7)
        log = rig.service.tiers[0].log
        assert log is not None
        assert len(log.segments.sealed) > 1
        found = await listed(rig)
        assert found["count"] == 60
        assert [each["due"] for each in found["first"]] == [due] * 9
        assert rig.service.status().waiting_bytes == found["bytes"]
        await rig.kill()

    asyncio.run(main())
