"""`__queues`: what a restart knows, snapshots, trimming, a disk that is full."""

import asyncio
from pathlib import Path
from typing import Any

from metaq.protocol.queue_frames import SettleVerb, Word
from tests.broker.queue_worker import QUICK, Worker, define, put
from tests.rigs.broker import Peer, running_broker


def test_a_restart_knows_what_is_done_and_how_often_the_rest_was_given(
    tmp_path: Path,
) -> None:
    """Acked messages are never given out again; counts go on."""

    async def before() -> tuple[Any, Any]:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            await put(peer, b"a", b"b", b"c", b"d")
            worker = Worker(peer)
            a, b, c, d = await worker.take(4)
            assert (
                await worker.settle(
                    0,
                    [
                        a.says(SettleVerb.ACK),
                        c.says(SettleVerb.ACK),
                        b.says(SettleVerb.NACK, 0),
                    ],
                )
                == [Word.OK] * 3
            )
            return b, d

    async def after(b: Any, d: Any) -> None:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            worker = Worker(peer)
            assert await worker.take(9) == []  # the reclaim time
            assert await worker.say(d, SettleVerb.EXTEND, 30_000) is Word.OK
            (again,) = await worker.take(9, wait_ms=20_000)
            assert (again.data, again.deliveries) == (b"b", 2)
            assert again.delivery > max(b.delivery, d.delivery)
            assert await worker.ack(b) is Word.LOST
            assert await worker.ack(d) is Word.OK
            assert await worker.ack(again) is Word.OK
            assert await worker.take(9, wait_ms=50) == []

    b, d = asyncio.run(before())
    asyncio.run(after(b, d))
