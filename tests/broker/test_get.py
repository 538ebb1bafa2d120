"""The rows of a get's table that need no wait, over a real socket."""

import asyncio
from pathlib import Path

from tests.rigs.broker import Peer, running_broker

PUT = b"put test 0 5 0 1\r\nhello"


def test_each_row_has_its_answer(data_dir: Path) -> None:
    """A missing log, a wrong size, data, the end, and an offset after the end."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            assert (await peer.ask(b"get test g 0 0 9 1\r\n")).startswith(b"result 404")
            await peer.ask(PUT)
            assert (await peer.ask(b"get test g 0 0 0 2\r\n")).startswith(b"result 400")
            assert (await peer.ask(b"get test g 0 0 99 3\r\n")).startswith(
                b"value 25 3"
            )
            assert (await peer.ask(b"get test g 0 25 9 4\r\n")).startswith(
                b"result 404"
            )
            assert (await peer.ask(b"get test g 0 99 9 5\r\n")).startswith(
                b"result 404"
            )
            counters = broker.context.counters
            assert (counters.cmd_get, counters.get_miss) == (5, 3)

    asyncio.run(scenario())
