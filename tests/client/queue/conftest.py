"""A broker with queue groups, and a client of either world."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.waiting import wait_until

TOPICS = {"orders": 2, "single": 1, "dead": 1}


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with embedded_broker(topics=TOPICS, settings={"queueReclaimMs": "200"}) as one:
        yield one


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: EmbeddedBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options, **QUICK) as one:
        yield one


def send(client: Any, topic: str, *data: bytes, **options: Any) -> None:
    """Send messages, each acknowledged."""
    with client.producer() as producer:
        for one in data:
            producer.send(topic, one, **options)


def run_until(
    queue: Any,
    handler: Callable[[Any], object],
    is_done: Callable[[Any], object],
    **options: Any,
) -> None:
    """Run a handler, again and again, until the counters of its queue are right."""

    def has_done() -> object:
        queue.run(handler, timeout=0.2, **options)
        return is_done(queue.statistics())

    wait_until(has_done)
