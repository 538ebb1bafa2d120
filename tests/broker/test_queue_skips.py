"""Damage that a queue group passes over by order: agreed to, durable, counted."""

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.broker.orders import perform
from metaq.errors import AdminError, MetaqError
from metaq.model import Offset, SizeBytes
from metaq.protocol.commands import Value
from metaq.protocol.queue_frames import SettleVerb, Word
from metaq.record.layout import HEADER
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Damage
from tests.broker.queue_worker import (
    GROUP,
    QUICK,
    TOPIC,
    Worker,
    define,
    got_of,
    put,
    queue_of,
    run,
    stored,
)
from tests.cases import for_each
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

COUNT = 12
SEGMENT = {"maxSegmentSize": "1000"}
DATA = [b"%02d" % number + bytes(198) for number in range(COUNT)]
"""Five of them fill a segment."""
WAIT_MS = 500
SOCKETS = shutil.ignore_patterns("*.sock")


async def order(broker: Broker, **fields: object) -> dict[str, Any]:
    """Give the order on partition 0; without `start` and `end` it shows."""
    request = {"topic": TOPIC, "group": GROUP, "partition": 0, **fields}
    return {**await perform(broker.control, {"command": "skip_damage", **request})}


async def offsets_of(broker: Broker) -> list[int]:
    found, offset = [], 0
    for each in await stored(broker, TOPIC):
        found.append(offset)
        offset += each.size_bytes
    return found


def damage(log: PartitionLog, offset: int, at: int = 0) -> None:
    """Flip a bit of a record: of its length (0), or of its payload."""
    segment = log.segments.find(Offset(offset))
    assert segment is not None
    data = bytearray(segment.path.read_bytes())
    data[offset - segment.base_offset + at] ^= 0x40
    segment.path.write_bytes(data)


async def take_all(worker: Worker) -> list[bytes]:
    """Take and ack until there is no more, or the partition is refused."""
    got = list[bytes]()
    while True:
        reply = await worker.ask(worker.taking(1, wait_ms=WAIT_MS))
        if not isinstance(reply, Value):
            assert reply.status == 500
            return got
        taken = got_of(reply)
        if not taken:
            return got
        for each in taken:
            assert await worker.ack(each) is Word.OK
            got.append(each.data[:2])


@pytest.mark.slow
@for_each("number", [0, 4, 5, 6, COUNT - 1])
def test_a_group_goes_on_after_damage_it_was_told_to_pass_over(
    tmp_path: Path, number: int
) -> None:
    """First, last of a segment, first of one, in the middle, last of all.

    A kill right after the answer changes nothing of it; before it the group waits.
    """

    async def main() -> None:
        data, killed = tmp_path / f"a{number}", tmp_path / f"killed{number}"
        settings = {**QUICK, **SEGMENT}
        async with (
            running_broker(data, settings) as broker,
            Peer(broker) as peer,
        ):
            define(broker)
            await put(peer, *DATA)
            offsets = await offsets_of(broker)
            log = queue_of(broker).log
            damage(log, offsets[number])
            worker = Worker(peer)
            before = await take_all(worker)
            shown = await order(broker)
            start, end = shown["start"], shown["end"]
            assert start <= offsets[number] < end
            assert not any(start <= at < end for at in offsets[: len(before)])
            assert shown["file"].endswith(".meta")
            assert await take_all(worker) == []
            with pytest.raises(AdminError, match="nothing was skipped"):
                await order(broker, start=start, end=end + 1)
            assert await take_all(worker) == []
            await order(broker, start=start, end=end)
            shutil.copytree(data, killed, ignore=SOCKETS)
            assert broker.context.queues.status()[0].skipped_bytes == end - start
        async with running_broker(killed, settings) as broker, Peer(broker) as peer:
            define(broker)
            after = await take_all(Worker(peer))
            assert not broker.context.queues.problems()
        given_up = [n for n, at in enumerate(offsets) if start <= at < end]
        assert [int(each) for each in (*before, *after)] == [
            each for each in range(COUNT) if each not in given_up
        ]

    asyncio.run(main())


def test_without_damage_there_is_nothing_to_pass_over(tmp_path: Path) -> None:
    """Nor is there of a group or partition that is not there."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        with pytest.raises(AdminError, match="there is no damage to skip"):
            await order(broker)
        for wrong, text in (
            ({"group": "others"}, "not defined here"),
            ({"partition": 77}, "partition `77`"),
            ({"partition": True}, "a whole number"),
            ({"topic": None}, "'topic' or 'group' is missing"),
            ({"start": 1}, "whole numbers, or neither"),
        ):
            with pytest.raises(MetaqError, match=text):
                await order(broker, **wrong)

    run(tmp_path, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["returned", "rejected"])
def test_a_message_that_is_damaged_after_it_was_given_out_can_be_given_up(
    tmp_path: Path, ends: str
) -> None:
    """It was returned, or is to be a dead letter, and cannot be read any more."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        queues = broker.context.queues
        await put(peer, b"a" * 200, b"b")
        worker = Worker(peer)
        (a,) = await worker.take(1)
        queue = queue_of(broker)
        queue.drop_window()
        damage(queue.log, a.offset, at=HEADER.size + 5)
        if ends == "rejected":
            reject = a.says(SettleVerb.REJECT)
            assert (await worker.settle(0, [reject]))[0] is not Word.OK
        else:
            queue.log.on_damage(await found_damage(queue.log))
            assert await worker.say(a, SettleVerb.RELEASE) is Word.OK
            await worker.ask(worker.taking(1, wait_ms=WAIT_MS))
        await until(queues.problems)
        await until(lambda: queue.log.damage)
        shown = await order(broker)
        assert shown["open_count"] >= 1
        await order(broker, start=shown["start"], end=shown["end"])
        await take_all(worker)
        await until(lambda: not queue.letters_open)
        await until(lambda: not queues.problems())
        assert queue.state.floor >= shown["end"]

    run(tmp_path, scenario, dead_letter_topic="meta-test")


async def found_damage(log: PartitionLog) -> Damage:
    """Return what the scrub would find."""
    part = log.read(log.log_start_offset, SizeBytes(1))
    (found,) = await part.run(partial(part.damage, log.high_watermark))
    return found
