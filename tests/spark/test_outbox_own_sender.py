"""Base of senders: a thread and connections of their own, until the close."""

import asyncio
import threading

import pytest

from metaq.errors import ClosedError, NoBrokerError
from metaq.model import BrokerAddress, BrokerId
from metaq.spark.sink.outbox import OwnSender
from tests.rigs.ports import reserved_port

NAME = "own-sender-test"
TIMEOUT_S = 0.5


class Sender(OwnSender):
    """Connects, and does nothing else."""

    def connect(self, broker_id: BrokerId) -> None:
        async def work() -> None:
            address = self._address_of(broker_id)
            assert address is not None
            await self._pool.get(address, deadline_s=self._deadline_s())

        self._thread.run(work())

    def address_of(self, broker_id: BrokerId) -> BrokerAddress | None:
        return self._address_of(broker_id)


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == NAME]


def test_its_thread_lives_until_the_close() -> None:
    """Harmless twice; nothing can be asked of it then."""
    with Sender(NAME, {}, TIMEOUT_S) as sender:
        assert threads() == [NAME]
    assert threads() == []
    sender.close()
    with pytest.raises(ClosedError):
        sender.connect(BrokerId(0))


def test_addresses_may_be_added_until_they_are_asked_for() -> None:
    """With and without their scheme; a broker without one has none."""
    addresses: dict[BrokerId, str] = {}
    with Sender(NAME, addresses, TIMEOUT_S) as sender:
        assert sender.address_of(BrokerId(1)) is None
        addresses[BrokerId(1)], addresses[BrokerId(2)] = "meta://h:1", "h:2"
        found = [sender.address_of(BrokerId(number)) for number in (1, 2)]
    assert found == [BrokerAddress("h", 1), BrokerAddress("h", 2)]


@pytest.mark.slow
def test_a_call_ends_with_its_time_where_nobody_listens() -> None:
    """The error is of the broker; the close waits for no attempt."""
    with reserved_port() as port:
        addresses = {BrokerId(0): f"127.0.0.1:{port}"}
        with Sender(NAME, addresses, TIMEOUT_S) as sender, pytest.raises(NoBrokerError):
            sender.connect(BrokerId(0))
        assert threads() == []


def test_a_start_that_fails_is_the_error_of_the_constructor() -> None:
    """A subclass begins its parts on the thread."""

    class Broken(Sender):
        async def _start(self) -> None:
            await asyncio.sleep(0)
            raise ValueError("no parts")

    with pytest.raises(ValueError, match="no parts"):
        Broken(NAME, {}, TIMEOUT_S)
