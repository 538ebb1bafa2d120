"""Settles of a message: the entry that each sends, once, and its recipient."""

import asyncio
import copy
import gc
import pickle
import time
from typing import Any

import pytest

from metaq.client import AsyncClient, Client
from metaq.client.errors import AlreadySettledError, LeaseLostError
from metaq.errors import ClosedError, ConfigError
from metaq.testing.embedded import EmbeddedBroker
from tests.client.queue.conftest import send
from tests.client.test_client_blocking import in_child
from tests.client.worlds import QUICK
from tests.rigs.waiting import until

DROP: dict[str, Any] = {"group": "g", "then": "drop"}
SHORT: dict[str, Any] = {**DROP, "lease_s": 1.0, "handle_s_max": 0.1, "prefetch": 1}
"""Of a worker that loses its message; one that takes more may have it once more."""
WAIT_S = 60.0


@pytest.mark.slow
def test_a_nack_comes_again_and_a_release_does_not_count(client: Any) -> None:
    """After the delay, with its number."""
    send(client, "single", b"a")
    with client.queue("single", **DROP) as queue:
        queue.receive(WAIT_S).nack(delay=0.05)
        again = queue.receive(WAIT_S)
        assert again.deliveries == 2
        again.release()
        third = queue.receive(WAIT_S)
        assert third.deliveries == 2
        third.ack()


def test_a_message_is_settled_once_and_by_its_queue(client: Any) -> None:
    """The error names the message."""
    send(client, "single", b"a", b"b")
    other = client.queue("single", group="g")
    with client.queue("single", **DROP) as queue:
        first = queue.receive(WAIT_S)
        first.ack()
        for settle in (first.ack, first.release, lambda: first.extend(5)):
            with pytest.raises(AlreadySettledError, match="single/0-0"):
                settle()
        second = queue.receive(WAIT_S)
        with pytest.raises(AlreadySettledError, match="another queue object"):
            other.ack_many([second])
        queue.ack_many([second])
    with pytest.raises(ClosedError):
        second.nack()


@pytest.mark.slow
def test_ack_nowait_has_its_outcome_later(client: Any) -> None:
    """Many of them are one request."""
    send(client, "single", *[b"%d" % n for n in range(30)])
    with client.queue("single", **DROP) as queue:
        futures = []
        while len(futures) < 30:
            many = queue.receive_many(30, WAIT_S)
            futures += [one.ack_nowait() for one in many]
        for future in futures:
            future.result(WAIT_S)
        assert queue.statistics().acked_count == 30


@pytest.mark.slow
def test_a_lease_is_renewed_while_a_message_is_here(client: Any) -> None:
    """For longer than it is; another worker does not get it."""
    send(client, "single", b"a")
    # A busy machine may be late to renew it.
    with client.queue("single", lease_s=4.0, **DROP) as queue:
        message = queue.receive(WAIT_S)
        before = message.lease_until
        with client.queue("single", group="g") as other:
            assert other.receive(4.5) is None
        assert message.lease_until > before
        message.ack()


@pytest.mark.slow
def test_a_lease_that_is_not_renewed_is_lost(client: Any) -> None:
    """After `handle_s_max`: the next worker has the message."""
    send(client, "single", b"a")
    with client.queue("single", **SHORT) as queue:
        message = queue.receive(WAIT_S)
        with client.queue("single", group="g") as other:
            again = other.receive(WAIT_S)
            assert again.deliveries == 2
            with pytest.raises(LeaseLostError, match="it was delivered again"):
                message.ack()
            again.ack()


def test_arguments_have_their_ranges(client: Any) -> None:
    """Refused before anything is said."""
    send(client, "single", b"a")
    with client.queue("single", **DROP) as queue:
        message = queue.receive(WAIT_S)
        with pytest.raises(ConfigError, match="delay"):
            message.nack(delay=86_401)
        with pytest.raises(ConfigError, match="seconds"):
            message.extend(0.5)
        with pytest.raises(TypeError, match="reason"):
            message.reject(5)
        message.ack()


def test_the_lease_is_on_the_monotonic_clock(client: Any) -> None:
    """As the docstring says."""
    send(client, "single", b"a")
    with client.queue("single", **DROP) as queue:
        message = queue.receive(WAIT_S)
        assert 0 < message.lease_until - time.monotonic() <= 30.5
        message.ack()


def test_a_message_is_neither_copied_nor_sent_to_another_process(client: Any) -> None:
    """The error says what to do: there it could not be settled."""
    send(client, "single", b"a")
    with client.queue("single", **DROP) as queue:
        message = queue.receive(WAIT_S)
        plain = getattr(message, "twin", message)
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="pass its data to the other process"):
                call(plain)
        message.ack()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_message_is_not_settled_in_the_child_of_a_fork(
    broker: EmbeddedBroker,
) -> None:
    """By no ack that is not waited for either: its future would never end."""
    with Client(**broker.client_options, **QUICK) as client:
        send(client, "single", b"a")
        with client.queue("single", **DROP) as queue:
            message = queue.receive(WAIT_S)
            assert message is not None
            calls = {"ack": message.ack, "ack_nowait": message.ack_nowait}
            assert in_child(calls) == []
            message.ack()


@pytest.mark.slow
def test_an_ack_that_is_lost_and_not_waited_for_is_no_traceback(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Asyncio logs a future that has an error and is dropped; one line is ours."""

    async def main() -> None:
        async with AsyncClient(**broker.client_options, **QUICK) as client:
            async with client.producer() as producer:
                await producer.send("single", b"a")
            async with client.queue("single", **SHORT) as queue:
                message = await queue.receive(WAIT_S)
                assert message is not None
                async with client.queue("single", group="g") as other:
                    again = await other.receive(WAIT_S)
                    assert again is not None
                    message.ack_nowait()
                    await until(lambda: queue.statistics().lost_count == 1)
                    await again.ack()
        gc.collect()

    asyncio.run(main())
    assert "never retrieved" not in caplog.text
    assert caplog.text.count("verb=ack messages=1") == 1
