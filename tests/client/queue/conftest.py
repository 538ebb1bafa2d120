"""A broker with queue groups, and a client of either world."""

from collections.abc import Iterator
from typing import Any

import pytest

from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.client.worlds import QUICK, WORLDS

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
