"""Messages of MetaQ's own Java client and of ours: either reads what either wrote."""

from metaq.client import Client, OutgoingMessage
from tests.brokers import until
from tests.java.client import JavaClient, Listener

MESSAGES: list[tuple[bytes, str | None]] = [
    (b"hello", None),
    (b"", None),
    (b"", ""),
    (b"with an attribute", "color=red"),
    (b"an empty one", ""),
    (bytes(range(256)), "\r\n\t \0 \u00e9 \u6d88\u606f \U0001f600"),
    (b"x" * 1_000_000, "large" * 1000),
]


def test_either_reads_what_either_wrote(java: JavaClient, ours: Client) -> None:
    """Data and attributes, in order, with the same ids and offsets."""
    producer = java.producer("bytes")
    for data, attribute in MESSAGES:
        result = java.send(producer, "bytes", data, attribute)
        assert result.isSuccess(), result.getErrorMessage()
    with ours.producer() as own:
        own.send_many("bytes", [OutgoingMessage(*one) for one in MESSAGES])
    found = list(ours.browse("bytes"))
    assert [(one.data, one.attribute) for one in found] == MESSAGES * 2
    listener = Listener()
    java.consumer("readers", "bytes", listener, max_size=4 << 20)
    until(lambda: len(listener.received) >= len(found))
    assert [(one.data, one.attribute) for one in listener.received] == MESSAGES * 2
    assert [one.id for one in listener.received] == [one.id for one in found]
