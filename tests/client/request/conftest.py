"""A broker, a requester and a responder of either world."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.client.worlds import QUICK, WORLDS


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics={"prices": 2}) as one:
        yield one


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: EmbeddedBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


@contextlib.contextmanager
def responding(
    client: Any, handler: Callable[[Any], Any], *, concurrency: int = 1, **options: Any
) -> Iterator[Any]:
    """Answer the requests of the topic in the block."""
    responder = client.responder("prices", group="quotes", **options)
    errors = list[BaseException]()

    def run() -> None:
        try:
            responder.run(handler, concurrency=concurrency)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield responder
    finally:
        responder.close()
        thread.join(30)
        assert not thread.is_alive()
        assert errors == []
