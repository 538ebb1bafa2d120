"""Delayed messages of a broker: delivered once, not early, whatever happens."""

import asyncio
import json
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.broker.delay_service import DelayService
from metaq.broker.delay_status import list_scheduled
from metaq.broker.handlers.stats import handle_version
from metaq.errors import NoSpaceError, StorageError
from metaq.protocol import texts
from metaq.protocol.commands import Cancel, ListScheduled
from tests.broker.delay_rig import DelayRig, SteppedDelays, ask, mput_of
from tests.broker.queue_worker import stored
from tests.rigs.broker import Peer, running_broker
from tests.rigs.fs import keep_all
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until


def test_a_message_is_delivered_when_it_is_due_and_not_before() -> None:
    """Its order is that of the due times; a tick delivers all that is due."""

    async def main() -> None:
        rig = await DelayRig().start()
        now = rig.now_ms
        await rig.schedule(b"late", due_ms=now + 2000)
        await rig.schedule(b"early", b"with it", due_ms=now + 1000)
        assert await rig.tick() == 0
        assert await rig.pass_s(0.999) == 0
        assert await rig.pass_s(0.001) == 1
        assert rig.payloads() == [b"early", b"with it"]
        assert await rig.pass_s(60.0) == 1
        assert rig.payloads() == [b"early", b"with it", b"late"]
        again = await rig.again()
        assert await again.tick() == 0
        assert again.payloads() == [b"early", b"with it", b"late"]
        await again.kill()

    asyncio.run(main())


def test_a_topic_that_refuses_delays_its_own_messages_alone() -> None:
    """They are tried again, less and less often; the alarm names it until they go."""

    async def main() -> None:
        rig = await DelayRig().start()
        topics, due_ms = rig.context.topics, rig.now_ms + 1000
        await rig.schedule(b"a", b"b", due_ms=due_ms, partition=0)
        await rig.schedule(b"c", due_ms=due_ms, partition=1)
        topics.close_partitions("test", start=0, end=0)
        assert await rig.pass_s(1.0) == 1
        assert rig.payloads(0) == []
        assert rig.payloads(1) == [b"c"]
        (problem,) = rig.service.status().problems
        assert problem.startswith("delayed messages wait for topic 'test': ")
        assert [await rig.pass_s(0.5) for _ in range(8)] == [0, 1, 0, 0, 0, 1, 0, 0]
        rig = await rig.again()
        rig.context.topics.close_partitions("test", start=0, end=0)
        for _ in range(10):
            await rig.pass_s(60.0)
        assert rig.service.status().waiting_count == 2
        rig.context.topics.open_partitions("test")
        await rig.pass_s(60.0)
        assert rig.payloads(0) == [b"a", b"b"]
        assert rig.service.status().problems == ()
        await rig.kill()

    asyncio.run(main())


def test_a_message_of_any_partition_takes_an_open_one() -> None:
    """It is chosen when the time has come."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"a", due_ms=rig.now_ms + 1000, partition=-1)
        rig.context.topics.close_partitions("test", start=0, end=0)
        await rig.pass_s(1.0)
        assert rig.payloads(0) == []
        assert rig.payloads(1) == [b"a"]
        await rig.kill()

    asyncio.run(main())


def test_what_waits_for_a_deleted_topic_goes() -> None:
    """Also after a restart; what is sent to a later topic of that name stays."""

    async def main() -> None:
        rig = await DelayRig().start()
        due_ms = rig.now_ms + 1000
        tier, offset, number = await rig.schedule(b"old", due_ms=due_ms)
        await rig.drop("test")
        assert rig.service.dropped == {"test": (offset + 76, 0, 0, 0)}
        body = b"%d %d %d %d" % (tier, offset, due_ms, number)
        assert (await rig.ask(Cancel("test", body, 1))).body == b"unknown"
        reply = await rig.ask(ListScheduled("*", 9, 1))
        assert json.loads(reply.text)["count"] == 0
        await rig.schedule(b"new", due_ms=due_ms)
        rig = await rig.again()
        await rig.pass_s(2.0)
        assert rig.payloads() == [b"new"]
        await rig.kill()

    asyncio.run(main())


def test_nothing_waits_for_a_topic_that_is_deleted_where_nothing_was_sent() -> None:
    """No log is made for it."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.drop("test")
        assert rig.service.dropped == {}
        assert all(tier.log is None for tier in rig.service.tiers)
        await rig.kill()

    asyncio.run(main())


def test_a_clock_that_jumps_delivers_nothing_early_and_nothing_twice() -> None:
    """Forward it is believed after a minute; back it leaves what is done done."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"a", due_ms=rig.now_ms + 1000)
        await rig.schedule(b"b", due_ms=rig.now_ms + 3_000_000)
        rig.clock.jump_wall_ms(3_600_000)
        assert await rig.pass_s(0.5) == 0
        assert rig.service.status().clock_problem.startswith("the clock has jumped by")
        await rig.pass_s(1.0)
        assert rig.payloads() == [b"a"]
        await rig.pass_s(60.0)
        assert rig.payloads() == [b"a", b"b"]
        assert rig.service.status().clock_problem == ""
        rig.clock.jump_wall_ms(-3_600_000)
        rig = await rig.again()
        assert await rig.tick() == 0
        await rig.schedule(b"c", due_ms=rig.now_ms + 1000)
        assert await rig.pass_s(0.9) == 0
        await rig.pass_s(0.2)
        assert rig.payloads() == [b"a", b"b", b"c"]
        await rig.kill()

    asyncio.run(main())


def test_all_that_is_overdue_at_a_start_is_delivered_oldest_first() -> None:
    """After days, from all tiers, in batches."""

    async def main() -> None:
        rig = await DelayRig(segment_bytes=1 << 20).start()
        now, wanted = rig.now_ms, list[tuple[int, bytes]]()
        for number in range(30):
            due_ms = now + 1000 + number * 7 * 3_600_000 % (40 * 86_400_000)
            datas = [b"%d:%d" % (number, k) for k in range(400)]
            await rig.schedule(*datas, due_ms=due_ms)
            wanted += [(due_ms, data) for data in datas]
        rig = await rig.again()
        rig.clock.advance_s(41 * 86_400.0)
        assert await rig.tick() == 15
        wanted.sort(key=lambda each: each[0])
        assert rig.payloads() == [data for _due, data in wanted]
        await rig.kill()

    asyncio.run(main())


def test_a_full_disk_delays_and_loses_nothing() -> None:
    """Puts with a time are refused; what waits is delivered when there is space.

    Till then it is counted and listed, also what was due, and the reason is named.
    """

    async def main() -> None:
        rig = await DelayRig().start()
        due_ms = rig.now_ms + 1000
        await rig.schedule(b"a", due_ms=due_ms)
        rig.fs.set_capacity(rig.fs.used_bytes())
        reply = await rig.send(mput_of(b"b", due_ms=due_ms))
        assert reply.text.endswith("[no-room]"), reply
        rig.clock.advance_s(2.0)
        await rig.try_tick()
        assert "no free space" in rig.problem, rig.problem
        assert rig.payloads() == []
        assert rig.service.status().waiting_count == 1
        found = await list_scheduled(rig.service.tiers, {}, ListScheduled("*", 9, 0))
        assert (found["count"], len(found["first"])) == (1, 1)
        rig.fs.set_capacity(1 << 40)
        await rig.pass_s(11.0)
        assert rig.payloads() == [b"a"]
        await rig.kill()

    asyncio.run(main())


class _FullForAWhile(SteppedDelays):
    """Ticks by itself, on a disk whose room changes while it is too little."""

    on_start = DelayService.on_start
    ticks = 0

    async def tick(self) -> int:
        self.ticks += 1
        if self.ticks < 5:
            raise NoSpaceError(f"low on space: got {self.ticks}")
        return 0


def test_what_keeps_messages_waiting_is_logged_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where the error has other figures at each try; the alarm has the newest."""

    async def main() -> None:
        rig = DelayRig(make=_FullForAWhile)
        await rig.service.start()
        await asyncio.sleep(1)
        (problem,) = rig.service.status().problems
        assert problem.startswith("delayed messages are not delivered: low on space")
        await asyncio.sleep(60)
        assert rig.service.status().problems == ()
        await rig.service.stop()

    caplog.set_level("INFO", "metaq.broker.delay_service")
    run_virtually(main())
    assert [record.getMessage() for record in caplog.records] == [
        "delayed messages are not delivered: low on space: got 1",
        "delayed messages are delivered again",
    ]


def test_without_a_journal_nothing_is_delivered_by_half() -> None:
    """It waits, and the problem says for what."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"a", due_ms=rig.now_ms + 1000)
        rig.bench.coordinator.disable(StorageError("the journal is damaged"))
        rig.clock.advance_s(2.0)
        await rig.try_tick()
        assert "the journal is damaged" in rig.problem
        assert rig.payloads() == []
        rig = await rig.again()
        await rig.tick()
        assert rig.payloads() == [b"a"]
        await rig.kill()

    asyncio.run(main())


def test_a_lost_partition_of_progress_repeats_and_loses_nothing() -> None:
    """An operator has given it up: what is on the disk is delivered again."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"a", due_ms=rig.now_ms + 1000)
        await rig.schedule(b"b", due_ms=rig.now_ms + 9000)
        await rig.pass_s(2.0)
        await rig.close()
        directory = Path("/data/__delays-4")
        for name in rig.fs.names_in(directory):
            rig.fs.discard(directory / name)
        rig.fs.discard(Path("/data/holdings"))
        again = await DelayRig(rig.fs.crash(keep_all), rig.clock).start()
        await again.pass_s(9.0)
        assert again.payloads() == [b"a", b"a", b"b"]
        await again.kill()

    asyncio.run(main())


@pytest.mark.slow
def test_a_broker_delivers_by_itself(tmp_path: Path) -> None:
    """Over the wire, with its own clock; also what was due while it was down."""

    async def main() -> None:
        async with running_broker(tmp_path) as broker, Peer(broker) as peer:
            now_ms = broker.context.clock.wall_ms()
            reply = await ask(peer, mput_of(b"a", due_ms=now_ms + 600))
            assert reply.text.split()[2:] == ["-1", "0", "0"], reply
            await until(lambda: find_stored(broker))
            assert broker.context.clock.wall_ms() >= now_ms + 600
            now_ms = broker.context.clock.wall_ms()
            reply = await ask(peer, mput_of(b"b", due_ms=now_ms + 400))
            assert reply.status == 200
        async with running_broker(tmp_path) as broker:
            await until(lambda: count_stored(broker, 2))
            found = [each.payload for each in await stored(broker, "test")]
            assert found == [b"a", b"b"]
            status = broker.context.delays.status()
            assert (status.waiting_count, status.problems) == (0, ())

    async def find_stored(broker: Broker) -> bool:
        return await count_stored(broker, 1)

    async def count_stored(broker: Broker, count: int) -> bool:
        return len(await stored(broker, "test")) == count

    asyncio.run(main())


def test_a_broker_that_takes_no_transactions_delays_nothing() -> None:
    """A replica of a set does not announce it, and says so."""

    async def main() -> None:
        rig = await DelayRig().start()
        rig.context.delays = None
        reply = await rig.send(mput_of(b"a", due_ms=rig.now_ms + 1000))
        assert (reply.status, reply.text) == (503, texts.NO_DELAY)
        for command in (Cancel("test", b"0 0 0 0", 1), ListScheduled("*", 1, 1)):
            reply = await rig.ask(command)
            assert (reply.status, reply.text) == (503, texts.NO_DELAY)
        assert b"delay=" not in handle_version(rig.context)
        await rig.kill()

    asyncio.run(main())
