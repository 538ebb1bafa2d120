"""Queue groups as operators see them."""

import asyncio
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.broker.health import Alarm, find_problems
from metaq.broker.queue_status import LOSS_SHOWN_MS, QueueGroupStatus
from metaq.clock import SystemClock
from metaq.protocol.queue_frames import SettleVerb, Word
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.group_definitions import QueueGroupDefinition, encode_group
from tests.broker.queue_worker import QUICK, Worker, define, put, queue_of, run
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

WITH_ZOOKEEPER = {"zk.zkEnable": "true", "zk.zkConnect": "none:1"}


def lines(broker: Broker) -> list[dict[str, Any]]:
    queues = broker.context.queues
    assert queues is not None
    return [json.loads(each) for each in queues.lines()]


def test_a_line_has_what_a_queue_has_and_who_has_how_much(tmp_path: Path) -> None:
    """Each message is counted where it is; workers that hold most come first."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, *[b"%d" % n for n in range(8)])
        one, other = Worker(peer, "w1"), Worker(peer, "w2")
        done, later, bad = await one.take(3)
        await other.take(2)
        await one.take(1)
        assert await one.ack(done) is Word.OK
        assert await one.say(later, SettleVerb.NACK, 60_000) is Word.OK
        assert await one.say(bad, SettleVerb.REJECT, text="x") is Word.OK
        (line,) = lines(broker)
        assert (line["group"], line["topic"]) == ("workers", "test")
        assert list(line["held"].items()) == [("w2", 2), ("w1", 1)]
        figures = ("open", "ready", "delayed", "done", "letter")
        assert [line[f"{each}_count"] for each in figures] == [4, 0, 1, 2, 1]
        assert 0 < line["floor"] < line["end"]

    run(tmp_path, scenario, dead_letter_topic="meta-test")


def group_of(broker: Broker) -> QueueGroupStatus:
    (group,) = broker.control.status().queue_groups
    return group


def alarms(broker: Broker, alarm: Alarm) -> list[str]:
    found = find_problems(broker.control.status())
    return [each.text for each in found if each.alarm is alarm]


def test_a_group_has_the_sums_of_its_partitions(tmp_path: Path) -> None:
    """Also of those that are not in memory."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        before = group_of(broker)
        await put(peer, b"a", b"b")
        assert before.unread_bytes == 0
        unread_bytes = group_of(broker).unread_bytes
        worker = Worker(peer)
        a, b = await worker.take(9)
        await put(peer, b"c")
        assert await worker.ack(a) is Word.OK
        assert await worker.say(b, SettleVerb.REJECT, text="x") is Word.OK
        group = group_of(broker)
        assert (group.group, group.topic) == ("workers", "test")
        assert (group.done_count, group.letter_count, group.open_count) == (2, 1, 0)
        assert group.unread_bytes == unread_bytes / 2

    run(tmp_path, scenario)


def test_a_full_queue_names_who_has_most(tmp_path: Path) -> None:
    """And a key for whose first message the others wait."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"x")
        await put(peer, b"a", b"b", b"c", key="hot")
        busy, idle = Worker(peer, "busy"), Worker(peer, "idle")
        got = await busy.take(1)
        assert alarms(broker, Alarm.QUEUE_FULL) == []
        got += await busy.take(9)
        assert await idle.take(9) == []
        (text,) = alarms(broker, Alarm.QUEUE_FULL)
        assert text == (
            "queue group 'workers' of test-0: 3 messages are open: no other is"
            " delivered until one of them is settled; worker busy has most, 2; 2 are"
            f" of the key with hash {zlib.crc32(b'hot'):08x}, whose first one, at"
            f" offset {got[1].offset}, is with worker busy"
        )
        assert await busy.ack(got[0]) is Word.OK
        assert alarms(broker, Alarm.QUEUE_FULL) == []

    run(tmp_path, scenario, broker={"queueOpenMax": "3"}, ordered_by="key")


def test_the_bound_of_all_queues_holds_for_each_of_them(tmp_path: Path) -> None:
    """A group waits for what another one settles, or for its end."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a", b"b", b"c")
        names = ("workers", "others")
        groups = {
            each: QueueGroupDefinition(topic="test", dead_letter_topic=None)
            for each in names
        }
        queues = broker.context.queues
        assert queues is not None
        queues.apply_groups(groups)
        first, other = Worker(peer), Worker(peer, "w2", "others")
        a, b = await first.take(9)
        assert await other.take(9) == []
        text = alarms(broker, Alarm.QUEUE_FULL)[0]
        assert "0 messages are open of 2 on this broker: no other" in text
        async with Peer(broker) as late:
            worker = Worker(late, "w2", "others")
            taking = asyncio.create_task(worker.take(9, wait_ms=30_000))
            assert await first.ack(a) is Word.OK
            assert [each.data for each in await taking] == [b"a"]
        assert await first.take(9) == []
        assert await first.ack(b) is Word.OK
        (c,) = await first.take(9)
        queues.apply_groups(
            {**groups, "others": replace(groups["others"], generation=1)}
        )
        assert len(await other.take(9, wait_ms=30_000)) == 1
        assert alarms(broker, Alarm.QUEUE_FULL)
        assert await first.ack(c) is Word.OK

    run(tmp_path, scenario, broker={"queueOpenBrokerMax": "2"})


@pytest.mark.slow
def test_what_retention_takes_rings_without_a_worker(tmp_path: Path) -> None:
    """For a day."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, *[b"%05d" % n for n in range(100)])
        await Worker(peer).take(1)
        queue = queue_of(broker)
        queue.log.on_removed(queue.log.segments.first, 0)
        assert alarms(broker, Alarm.QUEUE_LOST_TO_RETENTION) == []
        await until(lambda: alarms(broker, Alarm.QUEUE_LOST_TO_RETENTION))
        (text,) = alarms(broker, Alarm.QUEUE_LOST_TO_RETENTION)
        lost_bytes = queue.state.lost_bytes
        assert lost_bytes > 0
        assert text == (
            "queue group 'workers' of test-0: retention deleted 1 open messages,"
            f" and {lost_bytes} bytes that were not read yet"
        )
        queue.lost_ms -= LOSS_SHOWN_MS
        assert alarms(broker, Alarm.QUEUE_LOST_TO_RETENTION) == []

    run(tmp_path, scenario, broker={"maxSegmentSize": "1000"})


def test_a_group_that_is_used_both_ways_is_named(tmp_path: Path) -> None:
    """For as long as a log group of its name has members, as Java consumers are."""

    async def main() -> None:
        server = MemoryZooKeeper()
        coordinator = server.coordinator(SystemClock())
        async with running_broker(
            tmp_path, WITH_ZOOKEEPER, coordinator=coordinator
        ) as broker:
            server.put("/meta/consumers/before/ids/before_1", b"")
            data = encode_group(QueueGroupDefinition(topic="test"))
            for name in ("before", "later", "never"):
                server.put(f"/meta/catalog/groups/{name}", data)

            def named() -> list[str]:
                return [text.split("'")[1] for text in alarms(broker, both_ways)]

            both_ways = Alarm.GROUP_USED_BOTH_WAYS
            await until(lambda: named() == ["before"])
            server.put("/meta/consumers/later/ids/later_1", b"")
            await until(lambda: named() == ["before", "later"])
            server.remove("/meta/consumers/later/ids/later_1")
            await until(lambda: named() == ["before"])

    asyncio.run(main())


def test_a_partition_that_is_closed_is_shown_with_what_it_has(tmp_path: Path) -> None:
    """It was left out, as if no message waited there."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a", b"b")
        assert len(await Worker(peer).take(1)) == 1
        before = lines(broker)
        broker.context.topics.close_partitions("test", start=0, end=None)
        assert lines(broker) == before
        assert await Worker(peer).take(1, wait_ms=30) == []

    run(tmp_path, scenario)


def test_a_queue_without_workers_is_shown_after_a_start(tmp_path: Path) -> None:
    """Its floor is known before the first take."""

    async def main() -> None:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            await put(peer, b"a", b"b")
            worker = Worker(peer)
            assert await worker.ack((await worker.take(1))[0]) is Word.OK
            (before,) = lines(broker)
        async with running_broker(tmp_path, QUICK) as broker:
            define(broker)
            (after,) = lines(broker)
            assert after["floor"] == before["floor"] > 0
            assert after["end"] == before["end"]

    asyncio.run(main())
