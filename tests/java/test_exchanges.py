"""MetaQ's own Java producers and consumers, and an exchange."""

from metaq.client import Client
from tests.integration.registered import make_topic
from tests.java.client import Callback, JavaClient, Listener, Outcome
from tests.rigs.waiting import wait_until


def test_a_java_producer_sends_to_an_exchange_and_its_attribute_is_the_routing_key(
    java: JavaClient, ours: Client
) -> None:
    """Java consumers of the bound topics get the messages; of the exchange, none."""
    admin = ours.admin()
    for topic in ("routed-all", "routed-paid", "routed-rest"):
        make_topic(ours, topic)
    admin.create_exchange("events", alternate="routed-rest")
    admin.bind("events", "routed-all", key="order.#")
    admin.bind("events", "routed-paid", key="*.paid")
    producer = java.producer("events")
    everything, paid, none = Listener(), Listener(), Listener()
    consumers = [
        java.consumer("all-readers", "routed-all", everything),
        java.consumer("paid-readers", "routed-paid", paid),
        java.consumer("event-readers", "events", none),
    ]
    sent = java.send(producer, "events", b"a", "order.paid")
    assert (sent.is_success, sent.partition) == (True, "0-0"), sent
    callback = Callback()
    producer.sendMessage(java.message("events", b"b", "order.new"), callback)
    outcome = callback.wait()
    assert isinstance(outcome, Outcome)
    assert outcome.is_success
    assert java.send(producer, "events", b"c", "invoice.new").is_success
    wait_until(lambda: len(everything.received) == 2 and len(paid.received) == 1)
    assert everything.data == [b"a", b"b"]
    assert paid.received[0].attribute == "order.paid"
    assert [each.data for each in ours.browse("routed-rest")] == [b"c"]
    with ours.exchange("events") as events:
        events.send("order.paid", b"d", key="k")
    wait_until(lambda: paid.data == [b"a", b"d"])
    producer.beginTransaction()
    assert java.send(producer, "events", b"e", "order.paid").is_success
    producer.commit()
    wait_until(lambda: paid.data == [b"a", b"d", b"e"])
    wait_until(lambda: everything.data == [b"a", b"b", b"d", b"e"])
    assert not none.received
    for consumer in consumers:
        consumer.shutdown()
