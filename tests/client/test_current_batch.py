"""One task or thread reads a consumer; a loop and `receive` of it take turns."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from metaq.client import Client, Consumer
from metaq.errors import ClientError
from tests.brokers import StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, payloads
from tests.rigs.inside import twin_of
from tests.rigs.waiting import wait_until


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def test_a_loop_and_receive_take_turns(broker: Any, client: Any) -> None:
    """Each message once, and all handed out before count when more are asked for."""
    sent = [b"%d" % number for number in range(9)]
    broker.put(*sent)
    seen: list[bytes] = []
    with client.consumer("g", ["test"], **IDLE) as consumer:
        for message in consumer:
            seen.append(message.data)
            seen += payloads(consumer.receive_many(2, 30))
            if len(seen) == 9:
                break
        consumer.commit()
    assert seen == sent


def test_a_second_reader_that_waits_is_refused(broker: Any, client: Any) -> None:
    """It took the batch of the first one, whose partition then stood still."""
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(consumer.receive, 60)
        twin = twin_of(consumer) if isinstance(consumer, Consumer) else consumer.twin
        wait_until(lambda: twin.fetch_buffer.has_waiters)
        for _ in range(2):
            with pytest.raises(ClientError, match="two tasks or threads read this"):
                consumer.receive(60)
        broker.put(b"a", b"b")
        assert first.result().data == b"a"
        assert consumer.receive(60).data == b"b"


def test_a_reader_beside_a_loop_is_refused(broker: Any) -> None:
    """It would count the message as handled that the loop is busy with."""
    broker.put(b"a", b"b")
    with (
        Client(brokers=[broker.address], **QUICK) as client,
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        loop = iter(consumer)
        assert next(loop).data == b"a"
        for read in (lambda: consumer.receive(60), lambda: next(iter(consumer))):
            with pytest.raises(ClientError, match="two tasks or threads read this"):
                pool.submit(read).result()
        assert next(loop).data == b"b"
