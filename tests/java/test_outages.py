"""Brokers that end and come back under MetaQ's own Java clients."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest
from py4j.protocol import Py4JJavaError

from tests.java.client import Callback, JavaClient, Listener, Outcome
from tests.java.conftest import until_registered
from tests.java.jvm import Jvm
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

TOPIC = "outages"
BURST = 200
"""Puts in flight when a broker is told to end."""


class Sender(threading.Thread):
    """Sends one message after the other, and keeps accounts."""

    def __init__(self, client: JavaClient) -> None:
        super().__init__(daemon=True)
        self.acked: list[bytes] = []
        self.error: BaseException | None = None
        self._client = client
        self._ending = threading.Event()
        self.producer = client.producer(TOPIC)
        self.start()

    def run(self) -> None:
        number = 0
        try:
            while not self._ending.wait(0.005):
                data = b"%08d" % number
                number += 1
                try:
                    outcome = self._client.send(self.producer, TOPIC, data)
                except Py4JJavaError:
                    continue
                if outcome.is_success:
                    self.acked.append(data)
        except BaseException as error:
            self.error = error

    def burst(self, mark: str) -> list[tuple[bytes, Callback]]:
        """Send many without waiting for any."""
        sent = [(f"{mark}-{n}".encode(), Callback()) for n in range(BURST)]
        for data, callback in sent:
            message = self._client.message(TOPIC, data)
            self.producer.sendMessage(message, callback)
        return sent

    def end(self) -> None:
        self._ending.set()
        self.join(30)
        assert not self.is_alive()
        assert self.error is None, self.error


class Broker:
    """A broker of the cluster, and what may happen to it."""

    def __init__(self, zookeeper: str, number: int, data: Path) -> None:
        self._data = data
        self._arguments = broker_arguments(zookeeper, number, {TOPIC: 2})
        self._process = self._made()

    def _made(self) -> BrokerProcess:
        return BrokerProcess(self._data, topic="unused", arguments=self._arguments)

    def restart(self) -> None:
        self._process.stop()
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.start()

    def move(self) -> None:
        """Stop it, and start it on another port."""
        self._process.stop()
        self._process = self._made()
        self._process.start()

    def __enter__(self) -> Self:
        self._process.start()
        until_registered(self._process)
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.stop()


@pytest.fixture
def brokers(zookeeper: str, tmp_path: Path) -> Iterator[list[Broker]]:
    """Run two brokers."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Broker(zookeeper, number, tmp_path / f"broker-{number}")
            )
            for number in range(2)
        ]


def test_clients_find_brokers_that_come_back(
    jvm: Jvm, zookeeper: str, brokers: list[Broker]
) -> None:
    """Whatever was acknowledged is delivered once, in order; no call waits for ever."""
    with JavaClient(jvm, zookeeper) as client:
        sender, listener = Sender(client), Listener()
        client.consumer("readers", TOPIC, listener)
        wait_until(lambda: len(listener.received) > 50)
        bursts: list[tuple[bytes, Callback]] = []
        faults = [
            brokers[0].restart,
            brokers[1].kill,
            brokers[0].move,
            brokers[0].kill,
            brokers[1].restart,
        ]
        for number, fault in enumerate(faults):
            bursts += sender.burst(str(number))
            fault()
            sent, got = len(sender.acked), len(listener.received)
            wait_until(
                lambda sent=sent, got=got: (
                    len(sender.acked) > sent + 50 and len(listener.received) > got + 50
                )
            )
        sender.end()
        acked = set(sender.acked)
        for data, callback in bursts:
            outcome = callback.wait()
            if isinstance(outcome, Outcome) and outcome.is_success:
                acked.add(data)
        wait_until(lambda: acked <= set(listener.data))
    assert len(listener.data) == len(set(listener.data))
    for name in {one.partition for one in listener.received}:
        ids = [one.id for one in listener.received if one.partition == name]
        assert ids == sorted(ids)
