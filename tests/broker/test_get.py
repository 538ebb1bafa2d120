"""The rows of a get's table that need no wait, over a real socket."""

import asyncio
from pathlib import Path

from metaq.model import Offset
from metaq.storage.segment import Damage
from tests.rigs.broker import Peer, running_broker

ROWS = (
    (b"get test g 0 0 9 1\r\n", b"result 404"),
    (b"put test 0 5 0 1\r\nhello", b"result 200"),
    (b"get test g 0 0 0 2\r\n", b"result 400"),
    (b"get test g 0 0 99 3\r\n", b"value 25 3"),
    (b"get test g 0 25 9 4\r\n", b"result 404"),
    # 301, because updateConsumerOffsets is on.
    (b"get test g 0 99 9 5\r\n", b"result 301 2 5\r\n25"),
)


def test_each_row_has_its_answer(data_dir: Path) -> None:
    """A missing log, a wrong size, data, the end, and an offset after the end."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            for request, head in ROWS:
                answer = await peer.ask(request)
                assert answer.startswith(head), (request, answer)
            counters = broker.context.counters
            assert (counters.cmd_get, counters.get_miss) == (5, 3)

    asyncio.run(scenario())


def test_damage_of_a_replica_that_has_not_joined_is_no_answer(data_dir: Path) -> None:
    """Others have those bytes: a reader is to ask again, not to skip them."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            await peer.ask(b"put test 0 5 0 1\r\nhello")
            log = broker.context.topics.find_log("test", 0)
            assert log is not None
            log.on_damage(Damage(Path("file"), Offset(0), None, "too short"))
            log.is_settled = False
            answer = await peer.ask(b"get test g 0 0 99 2\r\n")
            assert answer.startswith(b"result 503")
            assert b"[not-settled]" in answer
            log.is_settled = True
            answer = await peer.ask(b"get test g 0 0 99 3\r\n")
            assert answer.startswith(b"result 500")
            assert b"[damaged from=0" in answer

    asyncio.run(scenario())
