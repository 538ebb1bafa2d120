"""A broker for the jobs."""

from collections.abc import Iterator

import pytest

from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import TOPIC


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with a topic and room for a copy."""
    with embedded_broker(topics={TOPIC: 2, "copy": 3, "same": 2, "less": 1}) as found:
        yield found
