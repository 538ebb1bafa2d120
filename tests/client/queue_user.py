"""Steps of a user of queues and delayed messages, for tests of the final state."""

from typing import Any

from metaq.client import Client


def handle(client: Client, topic: str, count: int, **options: Any) -> list[bytes]:
    """Acknowledge so many messages of a queue; return their data."""
    done = []
    with client.queue(topic, **options) as queue:
        for _ in range(count):
            message = queue.receive(20.0)
            assert message is not None
            message.ack()
            done.append(message.data)
    return done


def data_of(client: Client, topic: str) -> list[bytes]:
    """Return the data of all messages of a topic."""
    return [each.data for each in client.browse(topic)]
