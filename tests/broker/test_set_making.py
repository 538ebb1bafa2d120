"""Messages that wait, and open transactions, are named before a set is made."""

import asyncio
from pathlib import Path

import pytest

from metaq.broker.set_making import find_unfinished
from metaq.errors import CorruptRecordError
from metaq.fs import SystemFileSystem
from metaq.protocol.commands import Cancel
from tests.broker.delay_rig import ask, mput_of
from tests.broker.queue_worker import stored
from tests.broker.test_transactions import XID, command, good, put
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

LATER_MS = 3_600_000 * 30


def unfinished(data: Path) -> str:
    return find_unfinished(SystemFileSystem(), [data])


@pytest.mark.slow
def test_messages_that_wait_are_counted(data_dir: Path) -> None:
    """Without those that were delivered, or taken back."""

    async def main() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            now_ms = broker.context.clock.wall_ms()
            assert (await ask(peer, mput_of(b"due", due_ms=now_ms + 10))).status == 200

            async def is_delivered() -> bool:
                return bool(await stored(broker, "test"))

            await until(is_delivered)
            due_ms = now_ms + LATER_MS
            reply = await ask(peer, mput_of(b"a", b"b", b"c", due_ms=due_ms))
            first_id, _partition, _none, tier, offset = map(int, reply.text.split())
            note = f"{tier} {offset} {due_ms} {first_id}".encode()
            assert (await ask(peer, Cancel("test", note, 1))).status == 200

    asyncio.run(main())
    assert "the data directory has 2 scheduled messages" in unfinished(data_dir)
    (path,) = data_dir.glob("__delays-2/*.meta")
    path.write_bytes(path.read_bytes()[:40] + b"x" + path.read_bytes()[41:])
    with pytest.raises(CorruptRecordError, match="__delays-2"):
        unfinished(data_dir)


@pytest.mark.slow
def test_a_broker_in_which_nothing_waits_may_be_a_set(data_dir: Path) -> None:
    """Delivered ones stay in the log for a while, and count for nothing."""

    async def main() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            due_ms = broker.context.clock.wall_ms() + 10
            assert (await ask(peer, mput_of(b"due", due_ms=due_ms))).status == 200

            async def is_delivered() -> bool:
                return bool(await stored(broker, "test"))

            await until(is_delivered)

    asyncio.run(main())
    assert unfinished(data_dir) == ""


def test_prepared_transactions_are_named(data_dir: Path) -> None:
    """A set would neither commit them nor list them."""

    async def main() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            await good(peer, command(XID, b"BEGIN"))
            await good(peer, put(XID, b"one"))
            assert await good(peer, command(XID, b"PREPARE")) == b"0"

    asyncio.run(main())
    assert XID.decode() in unfinished(data_dir)
