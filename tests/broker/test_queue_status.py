"""Queue groups as operators see them."""

import asyncio
import json
from pathlib import Path
from typing import Any

from metaq.broker.app import Broker
from metaq.protocol.queue_frames import SettleVerb, Word
from tests.broker.queue_worker import QUICK, Worker, define, put, run
from tests.rigs.broker import Peer, running_broker


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
        figures = ("open", "ready", "delayed", "done", "letters", "workers")
        assert [line[each] for each in figures] == [4, 0, 1, 2, 1, 2]
        assert 0 < line["floor"] < line["scanned"] < line["end"]

    run(tmp_path, scenario, dead_letter_topic="meta-test")


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
