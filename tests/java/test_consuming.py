"""MetaQ's own Java consumers on our broker."""

import json
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from metaq.client import Client, FileOffsets
from metaq.client.names import broadcast_group
from tests.java.client import JavaClient, Listener, Received
from tests.java.jvm import Jvm
from tests.rigs.waiting import wait_until

TEN = [b"%d" % number for number in range(10)]


class EvenOnly:
    """A filter on Java's side."""

    def accept(self, _group: str, message: Any) -> bool:
        return int(bytes(message.getData())) % 2 == 0

    class Java:
        implements = ("com.taobao.metamorphosis.consumer.ConsumerMessageFilter",)


def offset_node(zookeeper: str, group: str, topic: str) -> str:
    """Return the text of an offset node of partition 0-0, "" where there is none."""
    client = KazooClient(zookeeper)
    client.start()
    try:
        path = f"/meta/consumers/{group}/offsets/{topic}/0-0"
        return client.get(path)[0].decode() if client.exists(path) else ""
    finally:
        client.stop()
        client.close()


def test_a_message_that_fails_comes_again(java: JavaClient) -> None:
    """From the message that failed on, until it is handled."""
    java.put("failing", *TEN)
    failures = [0]

    def fail(one: Received) -> bool:
        failures[0] += one.data == b"4" and failures[0] < 3
        return one.data == b"4" and listener.data.count(b"4") <= 3

    listener = Listener(fail)
    java.consumer("failing", "failing", listener)
    wanted = TEN[:4] + [b"4"] * 3 + TEN[4:]
    wait_until(lambda: len(listener.received) >= len(wanted))
    assert listener.data == wanted


def test_a_message_that_never_succeeds_is_put_aside(java: JavaClient) -> None:
    """The others go on behind it, and it lies in Java's own store."""
    java.put("rejected", *TEN)
    listener = Listener(lambda one: one.data == b"4")
    java.consumer("rejected", "rejected", listener, MaxFetchRetries=1)
    wait_until(lambda: listener.data[-1:] == [b"9"])
    assert [one for one in listener.data if one != b"4"] == TEN[:4] + TEN[5:]
    assert list((java.jvm.home / ".meta_recover" / "rejected@rejected").iterdir())


def test_small_gets_grow_until_messages_fit(java: JavaClient) -> None:
    """A get returns what was asked for and no more, so that Java sees what it lacks."""
    data = [b"1", b"x" * 500, b"3"]
    java.put("small", *data)
    listener = Listener()
    java.consumer(
        "small", "small", listener, max_size=10, MaxIncreaseFetchDataRetries=0
    )
    wait_until(lambda: len(listener.received) >= len(data))
    assert listener.data == data


def test_filters_and_threads_of_its_own(java: JavaClient) -> None:
    """A filter of Java's, and handling on an executor."""
    java.put("filtered", *TEN)
    filtered, pooled = Listener(), Listener()
    pooled.executor = java.jvm.package(
        "java.util.concurrent"
    ).Executors.newFixedThreadPool(2)
    java.consumer("filtered", "filtered", filtered, filter_=EvenOnly())
    consumer = java.consumer("pooled", "filtered", pooled)
    wait_until(lambda: len(filtered.received) >= 5 and len(pooled.received) >= 10)
    consumer.shutdown()
    pooled.executor.shutdown()
    assert filtered.data == TEN[::2]
    assert sorted(pooled.data) == TEN


def test_the_end_is_where_the_broker_says(
    java: JavaClient, java_zookeeper: str
) -> None:
    """Java asks for the largest offset and is told the end by a 301."""
    java.put("latest", b"before")
    listener = Listener()
    java.consumer("latest", "latest", listener, Offset=2**63 - 1)
    sent = []

    def arrives() -> bool:
        sent.append(b"%d" % len(sent))
        java.put("latest", sent[-1])
        return bool(listener.received)

    wait_until(arrives)
    assert listener.data[0] != b"before"
    wait_until(lambda: listener.data[-1:] == sent[-1:])
    assert listener.data == sent[-len(listener.data) :]


@pytest.mark.parametrize("text", ["42", "-1-42", "-77-42"])
def test_offsets_of_every_form_are_gone_on_from(
    java: JavaClient, ours: Client, java_zookeeper: str, text: str
) -> None:
    """Java writes on what it finds, and we read what Java wrote."""
    topic, group = "forms", f"forms{text}"
    if not list(ours.browse(topic)):
        java.put(topic, *TEN)
    client = KazooClient(java_zookeeper)
    client.start()
    path = f"/meta/consumers/{group}/offsets/{topic}/0-0"
    client.create(path, text.encode(), makepath=True)
    client.stop()
    client.close()
    listener = Listener()
    consumer = java.consumer(group, topic, listener)
    wait_until(lambda: len(listener.received) >= 8)
    consumer.shutdown()
    assert listener.data == TEN[2:]
    written = offset_node(java_zookeeper, group, topic)
    assert written == f"{listener.received[-1].id}-210"
    with ours.consumer(group, [topic], start="earliest") as own:
        assert own.receive_many(1, timeout=0.3) == []


def test_a_file_of_offsets_is_handed_to_and_fro(
    java: JavaClient, ours: Client, tmp_path: Path
) -> None:
    """Java's local storage goes on where ours ended, and ours where Java did."""
    path = tmp_path / "offsets.json"
    java.put("filed", *TEN[:4])
    with ours.consumer(
        "filed", ["filed"], start="earliest", offsets=FileOffsets(path)
    ) as own:
        assert [one.data for one in own.receive_many(4, timeout=60)] == TEN[:4]
    java.put("filed", *TEN[4:7])
    listener = Listener()
    stored = java.jvm.metaq.client.consumer.storage.LocalOffsetStorage(str(path))
    consumer = java.consumer("filed", "filed", listener, storage=stored)
    wait_until(lambda: len(listener.received) >= 3)
    consumer.shutdown()
    assert listener.data == TEN[4:7]
    (entry,) = json.loads(path.read_text())["filed"]
    assert entry["offset"] == 147
    java.put("filed", *TEN[7:])
    with ours.consumer(
        "filed", ["filed"], start="earliest", offsets=FileOffsets(path)
    ) as own:
        assert [one.data for one in own.receive_many(3, timeout=60)] == TEN[7:]


def test_a_broadcast_s_group_is_named_as_ours(
    jvm: Jvm, java: JavaClient, java_zookeeper: str
) -> None:
    """Each machine has everything, and its address in the name of its group."""
    java.put("everybody", *TEN)
    listener = Listener()
    with JavaClient(
        jvm, java_zookeeper, "extension.MetaBroadcastMessageSessionFactory"
    ) as client:
        config = jvm.metaq.client.consumer.ConsumerConfig("everybody")
        consumer = client.factory.createBroadcastConsumer(config)
        consumer.subscribe("everybody", 1000, listener)
        consumer.completeSubscribe()
        wait_until(lambda: len(listener.received) >= len(TEN))
        group = config.getGroup()
    assert listener.data == TEN
    remoting = jvm.package("com.taobao.gecko.core.util").RemotingUtils
    assert group == broadcast_group(
        "everybody", remoting.getLocalHostAddress().getHostAddress()
    )
