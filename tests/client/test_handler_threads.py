"""Ctrl-C while threads handle messages: raised after running handlers."""

import _thread
import signal
import threading
from typing import Any

import pytest

from metaq.client.sync import handler_threads
from metaq.client.sync.client import Client
from metaq.model import Message
from tests.brokers import AnyBroker, StartBroker
from tests.client.scripted import TIMEOUT_S


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


def test_an_interrupt_waits_for_the_handler_at_work(
    broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message at work is handled; the next one is not begun."""
    seen, workers = list[bytes](), []
    run = handler_threads.Workers.run

    def noted(self, *args: Any) -> None:
        workers.append(self)
        run(self, *args)

    def handler(message: Message) -> None:
        seen.append(message.data)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        assert workers[0].is_over.wait(TIMEOUT_S)

    monkeypatch.setattr(handler_threads.Workers, "run", noted)
    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            for text in (b"a", b"b"):
                producer.send("test", text, partition="0-0")
        with client.consumer("g", ["test"]) as consumer:
            with pytest.raises(KeyboardInterrupt):
                consumer.run(handler)
            message = consumer.receive(TIMEOUT_S)
            assert message is not None
            assert message.data == b"b"
    assert seen == [b"a"]


@pytest.mark.slow
def test_an_interrupt_that_wakes_nobody_is_heard_too(broker: AnyBroker) -> None:
    """As one that comes when a wait without end is just about to begin."""
    go_on = threading.Event()

    def handler(_message: Message) -> None:
        # Notes the signal, and sends none.
        _thread.interrupt_main()
        go_on.wait(TIMEOUT_S)

    with (
        Client(**broker.client_options) as client,
        client.consumer("g", ["test"], revoke_timeout_s=0.01) as consumer,
    ):
        threading.Timer(0.1, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            consumer.receive()
        with client.producer() as producer:
            producer.send("test", b"a", partition="0-0")
        with pytest.raises(KeyboardInterrupt):
            consumer.run(handler)
        go_on.set()


@pytest.mark.slow
def test_an_interrupt_while_a_thread_begins_waits_for_its_handler(
    broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may be at work before the call that began it has returned."""
    at_work, go_on = threading.Event(), threading.Event()
    start, seen = threading.Thread.start, list[bytes]()

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("metaq-handler"):
            assert at_work.wait(TIMEOUT_S)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

    def handler(message: Message) -> None:
        at_work.set()
        assert go_on.wait(TIMEOUT_S)
        seen.append(message.data)

    with Client(**broker.client_options) as client:
        with client.producer() as producer:
            for text in (b"a", b"b"):
                producer.send("test", text, partition="0-0")
        with client.consumer("g", ["test"]) as consumer:
            monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                consumer.run(handler)
            assert seen == [b"a"]
            message = consumer.receive(TIMEOUT_S)
            assert message is not None
            assert message.data == b"b"
