"""Ctrl-C at any line of the client while a loop or `receive` requests messages.

A reader that continues after it, as in notebooks, gets every message.
"""

import linecache
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest

from metaq.client import ConsumerState
from metaq.client.sync.client import Client, Consumer
from metaq.model import Message
from tests.brokers import AnyBroker, StartBroker
from tests.rigs.inside import twin_of
from tests.rigs.waiting import PATIENCE_S, wait_until
from tests.sampling import sample

COUNT = 40
ARRIVES_S = 5.0
FULL_S = 20.0
LIVES = 12
CLIENT = "/metaq/client/"


class Interrupt:
    """Raises KeyboardInterrupt at one line of the client; counts them all."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.line_count = 0
        self.where = "nowhere"

    def __enter__(self) -> None:
        sys.settrace(self._on_call)

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, _value: object) -> Any:
        return self._on_line if CLIENT in frame.f_code.co_filename else None

    def _on_line(self, frame: FrameType, event: str, _value: object) -> Any:
        path, line = frame.f_code.co_filename, frame.f_lineno
        # No signal is heard where a block begins or ends: its `__exit__` is called.
        lines = [linecache.getline(path, number).strip() for number in (line - 1, line)]
        is_edge = lines[1] == "try:" or any(each.startswith("with ") for each in lines)
        if event == "line" and not is_edge:
            self.line_count += 1
            if self.line_count == self._at:
                self.where = f"{path}:{line}"
                raise KeyboardInterrupt
        return self._on_line


def receive(consumer: Consumer, interrupt: Interrupt) -> Iterator[Message]:
    while True:
        with interrupt:
            message = consumer.receive(ARRIVES_S)
        if message is None:
            return
        yield message


def receive_many(consumer: Consumer, interrupt: Interrupt) -> Iterator[Message]:
    while True:
        with interrupt:
            messages = consumer.receive_many(3, ARRIVES_S)
        if not messages:
            return
        yield from messages


def loop(consumer: Consumer, interrupt: Interrupt) -> Iterator[Message]:
    messages = iter(consumer)
    while True:
        with interrupt:
            message = next(messages)
        yield message


def live(
    broker: AnyBroker,
    read: Callable[[Consumer, Interrupt], Iterator[Message]],
    at: int,
) -> tuple[list[int], Interrupt]:
    """Return what a reader got that was interrupted at a line, and read on."""
    interrupt, found = Interrupt(at), list[int]()
    with (
        Client(**broker.client_options) as client,
        client.consumer(
            f"{read.__name__}-{at}", ["test"], buffer_bytes_max=4000, fetch_bytes=2048
        ) as consumer,
    ):
        messages = read(consumer, interrupt)
        while {*found} != {*range(COUNT)}:
            try:
                found.append(int(next(messages).data[:4]))
            except KeyboardInterrupt:
                messages = read(consumer, interrupt)
            except StopIteration:
                break
    return found, interrupt


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("read", [receive, receive_many, loop])
def test_a_reader_that_goes_on_behind_an_interrupt_gets_every_message(
    start_broker: StartBroker,
    rng: random.Random,
    read: Callable[[Consumer, Interrupt], Iterator[Message]],
) -> None:
    """In order from where it was; some again, none left out. A run tries some lines."""
    broker = start_broker()
    with Client(**broker.client_options) as client, client.producer() as producer:
        for first in range(0, COUNT, 5):
            texts = [b"%04d" % number for number in range(first, first + 5)]
            producer.send_many("test", [text + b"x" * 200 for text in texts])
    found, interrupt = live(broker, read, 0)
    assert sorted(found) == [*range(COUNT)]
    hit_count = 0
    for at in sample(range(1, interrupt.line_count), LIVES, rng):
        found, interrupt = live(broker, read, at)
        assert {*found} == {*range(COUNT)}, interrupt.where
        # Some lives wait less often than others.
        hit_count += interrupt.where != "nowhere"
    assert hit_count, "no life was interrupted"


@pytest.mark.parametrize("read", [receive, receive_many])
def test_an_interrupt_behind_the_end_of_the_client_is_heard_as_one(
    start_broker: StartBroker,
    read: Callable[[Consumer, Interrupt], Iterator[Message]],
) -> None:
    """There is no loop any more that could be called."""
    with (
        Client(**start_broker().client_options) as client,
        client.consumer("g", ["test"]) as consumer,
    ):
        pass
    with pytest.raises(KeyboardInterrupt):
        next(read(consumer, Interrupt(1)))


def read_batches(consumer: Consumer) -> Iterator[Sequence[Message]]:
    return consumer.batches(max_count=3, max_wait_s=ARRIVES_S)


def read_full_lists(consumer: Consumer) -> Iterator[Sequence[Message]]:
    while True:
        # A signal that comes just before the wait is heard at its end.
        yield consumer.receive_many(3, FULL_S, fill=True)


@pytest.mark.slow
@pytest.mark.parametrize("read", [read_batches, read_full_lists])
def test_an_interrupt_of_a_wait_closes_the_consumer_and_commits_nothing(
    start_broker: StartBroker, read: Callable[[Consumer], Iterator[Sequence[Message]]]
) -> None:
    """A real signal, while the third list waits; the first one was committed."""
    broker = start_broker()
    broker.put(*(b"%d" % number for number in range(6)))
    found: list[bytes] = []
    with Client(**broker.client_options) as client:
        options: dict[str, Any] = {"commit_interval_s": None}
        consumer = client.consumer("g", ["test"], **options)

        def interrupt() -> None:
            wait_until(lambda: len(found) == 6)
            wait_until(lambda: twin_of(consumer).fetch_buffer.has_waiters)
            os.kill(os.getpid(), signal.SIGINT)

        def work() -> None:
            with consumer:
                for messages in read(consumer):
                    found.extend(message.data for message in messages)
                    if len(found) == 3:
                        consumer.commit()

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                work()
        finally:
            interrupting.join(PATIENCE_S)
        assert found == [b"%d" % number for number in range(6)]
        assert consumer.health().state is ConsumerState.CLOSED
        with client.consumer("g", ["test"], **options) as again:
            left = again.receive_many(3, PATIENCE_S, fill=True)
            assert [message.data for message in left] == [b"3", b"4", b"5"]
