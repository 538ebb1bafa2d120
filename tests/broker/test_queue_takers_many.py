"""Ten thousand takes that wait: served in their order, and within the bound."""

import asyncio
import tracemalloc
from pathlib import Path

import pytest

from metaq.protocol.commands import Value
from metaq.protocol.connection import Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from tests.broker.queue_worker import QUICK, Worker, define, got_of, put
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

COUNT = 10_000
WAIT_MS = 600_000
"""None of them ends by itself, however long it takes to begin them all."""
TAKE_BYTES_MAX = 4_000
"""Memory of a take that waits."""


@pytest.mark.slow
def test_ten_thousand_takes_wait_in_their_order(tmp_path: Path) -> None:
    """And one more than the bound is answered at once, with nothing."""

    async def main() -> None:
        bounds = {"waitersMax": str(COUNT), "waitMsMax": str(WAIT_MS)}
        settings = {**QUICK, **bounds}
        async with (
            running_broker(tmp_path, settings) as broker,
            Peer(broker) as peer,
            Peer(broker) as other,
        ):
            define(broker)
            worker, late = Worker(peer), Worker(other, "late")
            queues = broker.context.queues
            assert queues is not None
            # The first one opens the queues.
            assert await worker.take(1, wait_ms=0) == []
            takes = [worker.taking(1, wait_ms=WAIT_MS) for _ in range(COUNT)]
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            for at in range(0, COUNT, 500):
                peer.write(b"".join(map(encode, takes[at : at + 500])))
                await until(lambda at=at: queues.takers.count >= at + 500)
            after, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert (after - before) / COUNT < TAKE_BYTES_MAX
            assert await late.take(1, wait_ms=30_000) == []
            connection, values = Connection(Role.CLIENT, WireLimits()), list[Value]()
            await put(other, *[b"%d" % number for number in range(20)])
            while len(values) < 20:
                connection.receive_data(await peer.read_some())
                while isinstance(reply := connection.next_event(), Value):
                    values.append(reply)
            assert [each.opaque for each in values] == [t.opaque for t in takes[:20]]
            data = [got.data for each in values for got in got_of(each)]
            assert data == [b"%d" % number for number in range(20)]
            assert queues.takers.count == COUNT - 20

    asyncio.run(main())
