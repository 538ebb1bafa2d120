"""Puts with a time: receipts, refusals, repetitions, transactions."""

import asyncio
import json
from typing import Any

import pytest

from metaq.broker.handlers.put import handle_mput
from metaq.delay.plan import RECORD_MESSAGES_MAX
from metaq.errors import WireError
from metaq.model import Offset
from metaq.protocol.commands import Cancel, ListScheduled
from metaq.record.layout import HEADER_BYTES
from tests.broker.delay_rig import DelayRig, FakeSession, mput_of, receipts_of
from tests.rigs.fs import keep_all

DAY_MS = 86_400_000


def test_the_receipt_names_where_a_batch_waits() -> None:
    """Its id, the partition that was named, no offset, tier and offset there."""

    async def main() -> None:
        rig = await DelayRig().start()
        now = rig.now_ms
        for delay_ms, tier in ((1, 0), (DAY_MS, 1), (30 * DAY_MS, 2), (99 * DAY_MS, 3)):
            reply = await rig.send(mput_of(b"a", due_ms=now + delay_ms, partition=-1))
            words = reply.text.split()
            assert words[1:] == ["-1", "-1", str(tier), "0"], reply
        await rig.kill()

    asyncio.run(main())


@pytest.mark.parametrize("lead_ms", [0, 1, 10**12])
def test_a_time_that_has_passed_is_none(lead_ms: int) -> None:
    """It is a plain put, with its offset."""

    async def main() -> None:
        rig = await DelayRig().start()
        reply = await rig.send(mput_of(b"a", due_ms=rig.now_ms - lead_ms))
        assert reply.text.split()[1:] == ["0", "0"], reply
        assert rig.payloads() == [b"a"]
        await rig.kill()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"due_in_ms": 401 * DAY_MS}, "expected a time within 400d, got one in 401d"),
        ({"topic": "none"}, "none"),
        ({"partition": 9}, "9"),
        ({"topic": "__delays"}, "__delays"),
        ({"checksum": 5}, "hecksum"),
        ({"count": 2}, "expected 2 records"),
    ],
)
def test_what_a_put_would_be_refused_for_is_refused_at_once(
    changes: dict[str, Any], text: str
) -> None:
    """And nothing is kept."""

    async def main() -> None:
        rig = await DelayRig().start()
        due_ms = rig.now_ms + changes.pop("due_in_ms", 1000)
        topic = changes.pop("topic", "test")
        fields = {name: changes.pop(name) for name in [*changes] if name != "partition"}
        command = mput_of(b"a", due_ms=due_ms, topic=topic, **changes)
        for name, value in fields.items():
            object.__setattr__(command, name, value)
        reply = await rig.send(command)
        assert reply.status == 500, reply
        assert text in reply.text
        assert all(tier.log is None for tier in rig.service.tiers)
        await rig.kill()

    asyncio.run(main())


def test_a_closed_partition_takes_nothing_with_a_time() -> None:
    """As a plain put, it is forbidden."""

    async def main() -> None:
        rig = await DelayRig().start()
        rig.context.topics.close_partitions("test", start=0, end=None)
        reply = await rig.send(mput_of(b"a", due_ms=rig.now_ms + 1000))
        assert reply.status == 403, reply
        await rig.kill()

    asyncio.run(main())


def test_a_batch_may_be_as_large_as_a_message_with_its_head() -> None:
    """One byte more is refused."""

    async def main() -> None:
        limit = 1000
        rig = await DelayRig(payload_bytes_max=limit).start()
        room = limit - 29 - len("test") - HEADER_BYTES
        due_ms = rig.now_ms + 1000
        await rig.schedule(b"x" * room, due_ms=due_ms)
        reply = await rig.send(mput_of(b"x" * (room + 1), due_ms=due_ms))
        assert reply.status == 500
        assert f"expected at most {limit} bytes, got {limit + 1}" in reply.text
        await rig.kill()

    asyncio.run(main())


def test_what_waits_has_a_bound_on_the_disk() -> None:
    """Beyond it puts with a time are refused with a code; others are taken."""

    async def main() -> None:
        rig = await DelayRig(delay_bytes_max=500).start()
        due_ms = rig.now_ms + 1000
        await rig.schedule(b"x" * 500, due_ms=due_ms)
        reply = await rig.send(mput_of(b"x", due_ms=due_ms))
        assert reply.status == 500
        assert reply.text.endswith("[no-room]")
        assert (await rig.send(mput_of(b"x", due_ms=None))).status == 200
        await rig.kill()

    asyncio.run(main())


def test_a_batch_that_is_sent_again_waits_once() -> None:
    """Also in another tier, after its delivery, and after a kill."""

    async def main() -> None:
        rig = await DelayRig().start()
        due_ms = rig.now_ms + 4_000_000
        command = mput_of(b"a", b"b", due_ms=due_ms, producer="p", sequence=0)
        first = await rig.send(command)
        assert first.text.split()[3] == "1"
        rig.clock.advance_s(600.0)
        assert await rig.send(command) == first  # it would be in tier 0 now
        rig = await rig.again(keep_all)
        assert await rig.send(command) == first
        await rig.pass_s(4000.0)
        assert await rig.send(command) == first
        await rig.tick()
        assert rig.payloads() == [b"a", b"b"]
        assert rig.context.counters.batch_repeated == 2
        await rig.kill()

    asyncio.run(main())


@pytest.mark.parametrize("partition", [0, -1])
def test_a_batch_that_was_not_delayed_is_not_after_the_clock_went_back(
    partition: int,
) -> None:
    """Its time had come when it was sent first."""

    async def main() -> None:
        rig = await DelayRig().start()
        fields = {"producer": "p", "sequence": 0, "partition": partition}
        command = mput_of(b"a", due_ms=rig.now_ms, **fields)
        first = await rig.send(command)
        rig.clock.jump_wall_ms(-3_600_000)
        rig = await rig.again(keep_all)
        assert (await rig.send(command)).text == first.text
        await rig.pass_s(4000.0)
        assert rig.payloads(0) + rig.payloads(1) == [b"a"]
        await rig.kill()

    asyncio.run(main())


def test_numbers_that_were_used_for_something_else_are_refused() -> None:
    """In their tier; a batch with a longer delay may have been overtaken."""

    async def main() -> None:
        rig = await DelayRig().start()
        now = rig.now_ms
        later = mput_of(b"b", due_ms=now + 1000, producer="p", sequence=5)
        assert (await rig.send(later)).status == 200
        earlier = mput_of(b"a", due_ms=now + 2000, producer="p", sequence=0)
        reply = await rig.send(earlier)
        assert reply.text.endswith("[sequence-used]"), reply
        far = mput_of(b"a", due_ms=now + DAY_MS, producer="p", sequence=0)
        assert (await rig.send(far)).status == 200
        elsewhere = mput_of(
            b"a", due_ms=now + 2000, producer="p", sequence=0, partition=1
        )
        assert (await rig.send(elsewhere)).status == 200
        await rig.kill()

    asyncio.run(main())


@pytest.mark.parametrize("wait_s", [0.0, 0.5, 3600.0])
def test_a_transaction_schedules_with_its_commit(wait_s: float) -> None:
    """Nothing before it; where the time has passed by then, at once."""

    async def main() -> None:
        rig = await DelayRig().start()
        command = mput_of(b"a", due_ms=rig.now_ms + 1000)
        await rig.schedule(b"other", due_ms=rig.now_ms + 1000)
        assert await rig.commit(command, wait_s)
        before = [b"other"] if wait_s > 1 else []
        assert rig.payloads() == before
        await rig.tick()
        await rig.pass_s(1.0)
        assert sorted(rig.payloads()) == [b"a", b"other"]
        rig = await rig.again()
        await rig.tick()
        assert len(rig.payloads()) == 2
        await rig.kill()

    asyncio.run(main())


def test_a_transaction_that_is_rolled_back_schedules_nothing() -> None:
    """The answer of the put promises nothing."""

    async def main() -> None:
        rig = await DelayRig().start()
        command = mput_of(b"a", due_ms=rig.now_ms + 1000)
        assert not await rig.commit(command, 0.0, is_committed=False)
        await rig.pass_s(2.0)
        assert rig.payloads() == []
        await rig.kill()

    asyncio.run(main())


def test_each_message_may_have_its_own_time() -> None:
    """One append to the tier of the latest; receipts, deliveries and cancels apart."""

    async def main() -> None:
        rig = await DelayRig().start()
        now, datas = rig.now_ms, [b"a", b"bb", b"c", b"d", b"e"]
        times = [now + each for each in (5000, 1000, 1000, DAY_MS, -5)]
        reply = await rig.send(mput_of(*datas, times=times, partition=-1))
        receipts = receipts_of(reply, datas, times)
        assert {tier for tier, *_ in receipts} == {1}
        assert receipts[1][1] == receipts[2][1]
        for data, (tier, offset, due_ms, _) in zip(datas, receipts, strict=True):
            read = await rig.play(rig.service.tiers[tier].read_head(Offset(offset)))
            assert read is not None
            head = read[0]
            assert (head.due_ms, head.topic) == (due_ms, "test")
            assert head.messages == 1 + (data in {b"bb", b"c"})
        await rig.tick()
        assert sorted(rig.payloads(0) + rig.payloads(1)) == [b"e"]  # at once
        body = b"%d %d %d %d" % receipts[2]
        assert (await rig.ask(Cancel("test", body, 1))).body == b"cancelled"
        await rig.pass_s(1.0)
        assert sorted(rig.payloads(0) + rig.payloads(1)) == [b"bb", b"e"]
        rig = await rig.again(keep_all)
        await rig.pass_s(4.0)
        assert sorted(rig.payloads(0) + rig.payloads(1)) == [b"a", b"bb", b"e"]
        listed = json.loads((await rig.ask(ListScheduled("*", 9, 1))).body)
        assert [each["id"] for each in listed["first"]] == [receipts[3][3]]
        await rig.kill()

    asyncio.run(main())


def test_a_batch_with_times_of_its_own_is_stored_once_or_not_at_all() -> None:
    """Sent again it has the same receipt; a refusal says which message it is for."""

    async def main() -> None:
        rig = await DelayRig().start()
        now, datas = rig.now_ms, [b"a", b"b", b"c"]
        for wrong in (-1, now + 401 * DAY_MS):
            command = mput_of(*datas, times=[now + 5, now + 5, wrong])
            reply = await rig.send(command)
            assert reply.status == 500
            assert "mput: message 2: expected a time within 400d" in reply.text
            assert reply.text.endswith(" [too-far messages=2]")
        far = now + 401 * DAY_MS
        reply = await rig.send(mput_of(*datas, times=[far, now + 5, far + DAY_MS]))
        assert "mput: message 0 and 1 more: expected" in reply.text
        assert reply.text.endswith(" got one in 401d [too-far messages=0,2]")
        assert all(tier.log is None for tier in rig.service.tiers)
        times = [now + 500, now + 4_000_000, now + 100]
        command = mput_of(*datas, times=times, producer="p", sequence=0)
        first = await rig.send(command)
        rig = await rig.again(keep_all)
        rig.clock.advance_s(600.0)
        assert await rig.send(command) == first
        await rig.pass_s(4000.0)
        assert await rig.send(command) == first
        await rig.tick()
        assert rig.payloads() == [b"c", b"a", b"b"]
        await rig.kill()

    asyncio.run(main())


def test_a_transaction_may_have_times_of_their_own() -> None:
    """Nothing is there before the commit."""

    async def main() -> None:
        rig = await DelayRig().start()
        times = [rig.now_ms + 1000, rig.now_ms + 100, rig.now_ms + 100]
        command = mput_of(b"a", b"b", b"c", times=times)
        assert not await rig.commit(command, 0.0, is_committed=False)
        assert await rig.commit(command, 0.5)
        await rig.tick()
        assert rig.payloads() == [b"b", b"c"]
        await rig.pass_s(1.0)
        assert rig.payloads() == [b"b", b"c", b"a"]
        await rig.kill()

    asyncio.run(main())


def test_all_times_of_a_batch_may_have_passed() -> None:
    """It is a plain put then."""

    async def main() -> None:
        rig = await DelayRig().start()
        reply = await rig.send(mput_of(b"a", b"b", times=[rig.now_ms - 1, rig.now_ms]))
        assert reply.text.split()[1:] == ["0", "0"], reply
        assert rig.payloads() == [b"a", b"b"]
        await rig.kill()

    asyncio.run(main())


def test_a_record_has_a_bound_of_messages() -> None:
    """More with one time are refused, however many a batch may have."""

    async def main() -> None:
        rig = await DelayRig(batch_records_max=RECORD_MESSAGES_MAX + 1).start()
        command = mput_of(*[b"x"] * (RECORD_MESSAGES_MAX + 1), due_ms=rig.now_ms + 1000)
        reply = await rig.send(command)
        assert reply.status == 500
        assert f"expected at most {RECORD_MESSAGES_MAX} messages with one" in reply.text
        await rig.kill()

    asyncio.run(main())


def test_a_topic_that_is_deleted_while_a_batch_is_checked_takes_nothing() -> None:
    """It would wait for ever, or for another topic of the name."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"before", due_ms=rig.now_ms + 1000)
        session: Any = FakeSession(rig.context)
        times = [rig.now_ms + 1000 + number for number in range(600)]
        command = mput_of(*[b"%d" % each for each in times], times=times)
        steps = handle_mput(command, [command.payload], session)
        next(steps)
        rig.bench.topics.withdraw(frozenset({"test"}))
        await rig.drop("test")
        with pytest.raises(WireError, match="do not accept topic test"):
            for _ in steps:
                pass
        await rig.pass_s(5.0)
        assert rig.service.status().waiting_count == 0
        await rig.kill()

    asyncio.run(main())
