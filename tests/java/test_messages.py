"""Messages of MetaQ's own Java client and of ours: either reads what either wrote."""

from metaq.client import Client, OutgoingMessage
from tests.java.client import JavaClient, Listener
from tests.rigs.waiting import wait_until

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
    """Data and attributes, in order, with the same ids."""
    producer = java.producer("bytes")
    for data, attribute in MESSAGES:
        outcome = java.send(producer, "bytes", data, attribute)
        assert outcome.is_success, outcome.error
    with ours.producer() as own:
        own.send_many("bytes", [OutgoingMessage(*one) for one in MESSAGES])
    found = list(ours.browse("bytes"))
    assert [(one.data, one.attribute) for one in found] == MESSAGES * 2
    listener = Listener()
    java.consumer("readers", "bytes", listener, max_size=4 << 20)
    wait_until(lambda: len(listener.received) >= len(found))
    assert [(one.data, one.attribute) for one in listener.received] == MESSAGES * 2
    assert [one.id for one in listener.received] == [one.id for one in found]


def test_java_reads_key_and_headers_as_text(java: JavaClient, ours: Client) -> None:
    """The data is what was sent; key and headers stand in front of the attribute."""
    headers = {"trace": b"00-4b", "cause": b"bad row"}
    with ours.producer() as own:
        own.send("keyed", b"hello", key="order-17", partition="0-0")
        own.send("keyed", b"more", attribute="k=v", headers=headers, partition="0-0")
        own.send("keyed", b"plain", partition="0-0")
    listener = Listener()
    java.consumer("keyed", "keyed", listener)
    wait_until(lambda: len(listener.received) >= 3)
    assert [(one.data, one.attribute) for one in listener.received] == [
        (b"hello", "key=order-17"),
        (b"more", "h.trace=00-4b&h.cause=bad%20row\nk=v"),
        (b"plain", None),
    ]


def test_java_s_browser_sees_what_ours_sees(java: JavaClient, ours: Client) -> None:
    """Partition by partition, each to its end, with what is asked for cut anywhere."""
    with ours.producer() as own:
        own.send_many("browsed", [b"%d" % n * 50 for n in range(200)])
    unit = java.jvm.package("java.util.concurrent").TimeUnit.SECONDS
    browser = java.factory.createTopicBrowser("browsed", 1000, 10, unit)
    found = []
    iterator = browser.iterator()
    while iterator.hasNext():
        found.append(bytes(iterator.next().getData()))
    assert found == [one.data for one in ours.browse("browsed")]
    places = [one.toString() for one in java.factory.getPartitionsForTopic("browsed")]
    assert places == ["0-0", "0-1", "0-2"]
    browser.shutdown()
