"""Responders: their replies, and messages that request none."""

import asyncio
import threading
from typing import Any

import pytest

from metaq.client import AsyncClient, Client, ConfigError
from metaq.errors import ClosedError
from metaq.model import BrokerId
from metaq.record.reply_to import ReplyAddress
from metaq.testing.embedded import EmbeddedBroker
from tests.client.request.conftest import responding
from tests.client.worlds import QUICK
from tests.rigs.waiting import wait_until

ONE_BROKER = {
    "test_a_message_that_asks_for_no_reply_is_handled": "MetaQ has no queue groups",
    "test_a_requester_that_has_left_stops_no_responder": "MetaQ has no queue groups",
    "test_two_responders_share_the_requests": "MetaQ has no queue groups",
    "test_no_request_waits_for_a_busy_responder": "MetaQ has no queue groups",
    "test_a_plain_function_is_no_async_responder": "MetaQ has no queue groups",
    "test_a_new_group_drops_what_it_gives_up": "MetaQ has no queue groups",
    "test_a_responder_is_closed_with_its_block": "MetaQ has no queue groups",
}


@pytest.mark.slow
def test_a_message_that_asks_for_no_reply_is_handled(client: Any) -> None:
    """And acked, like one whose headers make no sense."""
    handled = list[bytes]()
    with client.producer() as producer:
        producer.send("prices", b"plain")
        producer.send("prices", b"odd", headers={"reply-to": b"x"})
    with responding(client, lambda message: handled.append(message.data) or b""):
        wait_until(lambda: sorted(handled) == [b"odd", b"plain"])
        assert client.request("prices", b"last", timeout=30) == b""
        # The reply leaves first: what is not acked at the end would come again.
        wait_until(lambda: not open_count(client))
    assert not open_count(client)


def open_count(client: Any) -> int:
    described = client.admin().describe_queue_group("quotes")
    return sum(each.open_count for each in described.queues)


@pytest.mark.slow
def test_a_requester_that_has_left_stops_no_responder(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its mailbox is gone, or its broker: the next request is answered.

    Of a broker that is away the log says so, and names the request.
    """
    gone = ReplyAddress(BrokerId(0), "f" * 32, 1)
    away = ReplyAddress(BrokerId(9), "f" * 32, 1)
    with client.producer() as producer:
        for each in (gone, away):
            headers = {**dict(each.headers()), "expires-in": b"2000"}
            sent = producer.send("prices", b"?", headers=headers)
    with responding(client, lambda message: message.data):
        assert client.request("prices", b"next", timeout=30) == b"next"
        text = f"group=quotes request={sent.partition}@{sent.offset} broker=9 error="
        wait_until(lambda: text in caplog.text)


@pytest.mark.slow
def test_two_responders_share_the_requests(client: Any, broker: EmbeddedBroker) -> None:
    """Each request is handled by one of the group."""
    count, together = 0, threading.Barrier(2, timeout=30)

    def meet(message: Any) -> bytes:
        nonlocal count
        count += 1
        together.wait()
        return bytes(message.data)

    with (
        Client(**broker.client_options, **QUICK) as second,
        responding(client, meet, prefetch=1),
        responding(second, meet, prefetch=1),
    ):
        threads = [
            threading.Thread(target=client.request, args=("prices", b"x")) for _ in "ab"
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
    assert count == 2


@pytest.mark.slow
def test_no_request_waits_for_a_busy_responder(broker: EmbeddedBroker) -> None:
    """It takes none while it handles one, and the other answers them all."""
    at_work, is_over = threading.Event(), threading.Event()

    def handle(message: Any) -> bytes:
        if message.data == b"slow":
            at_work.set()
            assert is_over.wait(60)
        return bytes(message.data)

    with (
        Client(**broker.client_options, **QUICK) as one,
        Client(**broker.client_options, **QUICK) as other,
        responding(one, handle),
        responding(other, handle),
    ):
        slow = threading.Thread(target=one.request, args=("prices", b"slow"))
        slow.start()
        assert at_work.wait(30)
        for _ in range(10):
            assert one.request("prices", b"x", timeout=30) == b"x"
        is_over.set()
        slow.join(30)


@pytest.mark.slow
def test_a_new_group_drops_what_it_gives_up(client: Any) -> None:
    """Unless the options say something else."""
    with responding(client, lambda message: message.data):
        client.request("prices", b"x", timeout=30)
    described = client.admin().describe_queue_group("quotes")
    assert described.definition.dead_letter_topic is None
    with pytest.raises(ConfigError, match="prefetch"):
        client.responder("prices", group="quotes", prefetch=0)


def test_a_plain_function_is_no_async_responder(broker: EmbeddedBroker) -> None:
    """Its `run` ends with the cure, and no request with an error about `await`."""

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options, **QUICK) as client:
            responder = client.responder("prices", group="quotes")
            request = asyncio.ensure_future(
                client.request("prices", b"ACME", timeout=30)
            )
            plain: Any = lambda message: message.data  # noqa: E731
            with pytest.raises(ConfigError, match="async function, got one"):
                await responder.run(plain, timeout=20)
            assert not request.done()
            request.cancel()

    asyncio.run(scenario())


def test_a_responder_is_closed_with_its_block(client: Any) -> None:
    """As consumers, producers and queues are."""
    with client.responder("prices", group="quotes") as responder:
        assert not responder.is_closed
    assert responder.is_closed
    with pytest.raises(ClosedError):
        responder.run(lambda message: message.data)
