"""MetaQ's own Java producers on our broker."""

from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from metaq.client import Client
from tests.cli.runner import run
from tests.java.client import Callback, JavaClient, Outcome, outcome_of
from tests.java.jvm import Jvm
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until


class Selector:
    """A partition selector that takes the place it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jvm: Any = None

    def getPartition(self, _topic: str, _partitions: Any, _message: Any) -> Any:
        return self.jvm.metaq.cluster.Partition(self.name)

    class Java:
        implements = ("com.taobao.metamorphosis.client.producer.PartitionSelector",)


def error_of(call: Any, *arguments: Any) -> str:
    """Return what Java raised, class and text."""
    with pytest.raises(Py4JJavaError) as caught:
        call(*arguments)
    return str(caught.value.java_exception.toString())


def test_waiting_and_not_waiting(java: JavaClient, ours: Client) -> None:
    """Java goes round the partitions, beginning with the second."""
    producer = java.producer("rounds")
    waited = [java.send(producer, "rounds", b"%d" % n) for n in range(3)]
    callbacks = [Callback() for _ in range(300)]
    for number, callback in enumerate(callbacks):
        message = java.message("rounds", b"%d" % (number + 3))
        producer.sendMessage(message, callback)
    outcomes: list[Any] = waited + [callback.wait() for callback in callbacks]
    names = [f"0-{number % 3}" for number in range(1, 304)]
    assert [one.is_success for one in outcomes] == [True] * 303
    assert [one.partition for one in outcomes] == names
    stored = {
        (f"0-{one.partition.partition}", one.offset): one.data
        for one in ours.browse("rounds")
    }
    assert stored == {
        (one.partition, one.offset): b"%d" % number
        for number, one in enumerate(outcomes)
    }


def test_one_way(jvm: Jvm, java_zookeeper: str, ours: Client) -> None:
    """A message without a waiter is stored all the same."""
    wanted = {b"%d" % number for number in range(100)}
    with JavaClient(
        jvm, java_zookeeper, "extension.AsyncMetaMessageSessionFactory"
    ) as client:
        producer = client.factory.createAsyncProducer()
        producer.publish("oneway")
        for data in wanted:
            producer.asyncSendMessage(client.message("oneway", data))
        wait_until(lambda: {one.data for one in ours.browse("oneway")} == wanted)


def test_without_zookeeper(jvm: Jvm, java_broker: BrokerProcess, ours: Client) -> None:
    """A client that is told a broker leaves the partition to it, and gets as well."""
    config = jvm.metaq.client.MetaClientConfig()
    config.setServerUrl(f"meta://127.0.0.1:{java_broker.port}")
    factory = jvm.metaq.client.MetaMessageSessionFactory(config)
    producer = factory.createProducer()
    producer.publish("direct")
    message = jvm.metaq.Message("direct", b"hello")
    assert outcome_of(producer.sendMessage(message)) == Outcome(True, None, "-1-0", 0)
    group = jvm.metaq.client.consumer.ConsumerConfig("direct")
    place = jvm.metaq.cluster.Partition("0-0")
    found = factory.createConsumer(group).get("direct", place, 0, 1000)
    assert bytes(found.next().getData()) == b"hello"
    assert [one.data for one in ours.browse("direct")] == [b"hello"]
    # Without ZooKeeper the end of a factory fails in Java itself.
    factory.getRemotingClient().stop()


def test_a_closed_partition_is_403(
    java: JavaClient, java_broker: BrokerProcess, ours: Client
) -> None:
    """A failed result, not an exception, and the next put is stored when it opens."""
    producer = java.producer("closed")
    place = ("closed", "--data-dir", str(java_broker.data))
    assert run("partitions", "close", *place).exit_code == 0
    refused = Outcome(False, "403", None, -1)
    assert java.send(producer, "closed", b"1") == refused
    callback = Callback()
    producer.sendMessage(java.message("closed", b"2"), callback)
    assert callback.wait() == refused
    assert run("partitions", "open", *place).exit_code == 0
    assert java.send(producer, "closed", b"3").is_success
    assert [one.data for one in ours.browse("closed")] == [b"3"]


def test_what_is_wrong_is_told(java: JavaClient) -> None:
    """Refusals are failed results with the broker's sentence; the producer lives on."""
    producer = java.producer("wrong", "nobody-serves-it")
    assert "no aviable partition" in error_of(
        java.send, producer, "nobody-serves-it", b"x"
    )
    selector = Selector("0-77")
    selector.jvm = java.jvm
    choosy = java.factory.createProducer(selector)
    choosy.publish("wrong")
    outcome = java.send(choosy, "wrong", b"x")
    assert not outcome.is_success
    assert "wrong partition 77" in str(outcome.error)
    other = java.factory.createProducer()
    other.setDefaultTopic("wrong")
    outcome = java.send(other, "of-no-broker", b"x")
    assert not outcome.is_success
    assert "do not accept topic of-no-broker" in str(outcome.error)
    assert java.send(producer, "wrong", b"x").is_success


def test_statistics(java: JavaClient, java_broker: BrokerProcess) -> None:
    """Java's map of them has MetaQ's names, and what was put is counted."""
    java.put("counted", *[b"x"] * 5)
    (everything,) = dict(java.factory.getStats()).values()
    values = dict(everything.getAllValues())
    assert values["broker_id"] == "0"
    assert values["port"] == str(java_broker.port)
    assert values["slave"] == "false"
    assert int(values["cmd_put"]) >= 5
    (topic,) = dict(java.factory.getStats("counted")).values()
    assert topic.getValue("message_count") == "5"
    assert topic.getValue("bytes") == "105"
