"""A worker and its messages refuse calls on another event loop."""

import asyncio

import pytest

from metaq.client import AsyncClient
from metaq.errors import ClosedError
from metaq.testing.embedded import EmbeddedBroker
from tests.client.test_other_loops import silent_calls
from tests.client.worlds import QUICK

WAIT_S = 60.0


def test_on_another_loop_every_call_of_a_worker_says_so(broker: EmbeddedBroker) -> None:
    """It waited for ever there, and a message counted as settled that was not."""

    async def main() -> None:
        async with (
            AsyncClient(**broker.client_options, **QUICK) as client,
            client.producer() as producer,
            client.queue("single", group="g", then="drop") as queue,
        ):
            await producer.send("single", b"a")
            message = await queue.receive(WAIT_S)
            assert message is not None
            calls = {
                "iterate": lambda: anext(aiter(queue)),
                "receive": queue.receive,
                "run": lambda: queue.run(lambda _message: asyncio.sleep(0)),
                "ack_many": lambda: queue.ack_many([message]),
                "close": queue.close,
                "ack": message.ack,
                "ack_nowait": message.ack_nowait,
                "nack": message.nack,
                "release": message.release,
                "extend": lambda: message.extend(5),
                "reject": lambda: message.reject("x"),
            }
            found = await asyncio.to_thread(lambda: asyncio.run(silent_calls(calls)))
            assert found == {}
            with pytest.raises(ClosedError, match="none runs in this thread"):
                await asyncio.to_thread(message.ack_nowait)
            await message.ack()

    asyncio.run(main())
