"""`cancel`: a message that waits is taken back, and only that one."""

import asyncio

import pytest

from metaq.protocol.commands import Cancel
from tests.broker.delay_rig import DelayRig


async def cancel(rig: DelayRig, *numbers: int, topic: str = "test") -> str:
    body = " ".join(map(str, numbers)).encode()
    reply = await rig.ask(Cancel(topic, body, 1))
    assert reply.status == 200, reply
    return reply.text


def test_a_message_that_was_taken_back_is_never_delivered() -> None:
    """Of a batch it is the only one; also after a power cut."""

    async def main() -> None:
        rig = await DelayRig().start()
        due = rig.now_ms + 1000
        tier, offset, first = await rig.schedule(b"a", b"b", b"c", due_ms=due)
        assert await cancel(rig, tier, offset, due, first + 1) == "cancelled"
        assert await cancel(rig, tier, offset, due, first + 1) == "cancelled"
        rig = await rig.again()
        assert await rig.pass_s(1.0) == 1
        assert rig.payloads() == [b"a", b"c"]
        assert await cancel(rig, tier, offset, due, first) == "delivered"
        await rig.kill()

    asyncio.run(main())


def test_a_batch_of_which_all_are_taken_back_is_nothing() -> None:
    """Others with the same time are delivered."""

    async def main() -> None:
        rig = await DelayRig().start()
        due = rig.now_ms + 1000
        tier, offset, first = await rig.schedule(b"a", b"b", due_ms=due)
        await rig.schedule(b"c", due_ms=due)
        for number in range(2):
            assert await cancel(rig, tier, offset, due, first + number) == "cancelled"
        await rig.pass_s(1.0)
        assert rig.payloads() == [b"c"]
        assert rig.service.status().cancelled_count == 2
        assert rig.service.status().waiting_count == 0
        await rig.kill()

    asyncio.run(main())


def test_a_tier_waits_for_a_cancel_that_is_being_stored() -> None:
    """Its time has come since; others of the tier go on when it is stored."""

    async def main() -> None:
        rig = await DelayRig().start()
        due = rig.now_ms + 1000
        tier, offset, first = await rig.schedule(b"a", due_ms=due)
        await rig.schedule(b"b", due_ms=due)
        asking = asyncio.ensure_future(cancel(rig, tier, offset, due, first))
        await asyncio.sleep(0)
        rig.service.hold((tier, due, offset))
        rig.clock.advance_s(1.0)
        assert await rig.tick() == 0
        rig.service.release((tier, due, offset))
        assert await asking == "delivered"
        assert await rig.tick() == 1
        assert rig.payloads() == [b"a", b"b"]
        await rig.kill()

    asyncio.run(main())


def test_a_receipt_of_something_else_takes_nothing_back() -> None:
    """Another topic, time, place or id, a tier that is none, and a long gone one."""

    async def main() -> None:
        rig = await DelayRig().start()
        due = rig.now_ms + 1000
        tier, offset, first = await rig.schedule(b"a", due_ms=due)
        for numbers in (
            (tier, offset + 1, due, first),
            (tier, offset + 10**6, due, first),
            (tier, -1, due, first),
            (tier, offset, due + 1, first),
            (tier, offset, due, first + 1),
            (tier + 1, offset, due, first),
            (4, offset, due, first),
            (-1, offset, due, first),
        ):
            assert await cancel(rig, *numbers) == "unknown"
        whole = tier, offset, due, first
        assert await cancel(rig, *whole, topic="meta-test") == "unknown"
        await rig.pass_s(1.0)
        assert rig.payloads() == [b"a"]
        await rig.kill()

    asyncio.run(main())


def test_a_cancel_holds_when_the_clock_goes_back_and_on() -> None:
    """The message is late by what was delivered before, and stays cancelled."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"before", due_ms=rig.now_ms + 10)
        await rig.pass_s(1.0)
        rig.clock.jump_wall_ms(-3_600_000)
        rig = await rig.again()
        due = rig.now_ms + 1000
        tier, offset, first = await rig.schedule(b"a", b"b", due_ms=due)
        await rig.tick()
        assert await cancel(rig, tier, offset, due, first) == "cancelled"
        rig.clock.advance_s(2.0)
        rig = await rig.again()
        await rig.tick()
        assert rig.payloads() == [b"before", b"b"]
        await rig.kill()

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"", b"1 2 3", b"1 2 3 4 5", b"a b c d", b"0 0 0 x"])
def test_a_payload_that_is_no_receipt_is_refused(body: bytes) -> None:
    """With a 500 that says why."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.tick()
        reply = await rig.ask(Cancel("test", body, 1))
        assert reply.status == 500, reply
        assert reply.text.startswith("cancel: ")
        await rig.kill()

    asyncio.run(main())


def test_a_cancel_that_is_not_stored_is_refused_and_changes_nothing() -> None:
    """The disk is full; the message is delivered when its time comes."""

    async def main() -> None:
        rig = await DelayRig().start()
        due = rig.now_ms + 1000
        tier, offset, first = await rig.schedule(b"a", due_ms=due)
        rig.fs.set_capacity(rig.fs.used_bytes())
        body = b"%d %d %d %d" % (tier, offset, due, first)
        reply = await rig.ask(Cancel("test", body, 1))
        assert reply.status == 500, reply
        rig.fs.set_capacity(1 << 40)
        assert await rig.pass_s(12.0) == 1
        assert rig.payloads() == [b"a"]
        await rig.kill()

    asyncio.run(main())
