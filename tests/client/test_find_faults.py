"""`find` and filters combined with XA, expiry, damage and restarts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.client import Client
from metaq.errors import CorruptRecordError
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.client.worlds import QUICK

ONE_BROKER = {
    "broker": "MetaQ looks nothing up, and has no filters",
    "client": "likewise",
    "test_messages_of_xa_are_found_from_their_commit_on": "likewise",
    "test_damage_is_never_passed_over_by_a_filter": "likewise",
    "test_a_damaged_message_ends_a_search": "likewise",
}
TOPICS = ("indexed", "plain")
WHERE = "key = 'k'"


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    settings = {"maxSegmentSize": "2000"}
    with embedded_broker(topics={"other": 1}, settings=settings) as one:
        yield one


@pytest.fixture
def client(broker: EmbeddedBroker) -> Iterator[Client]:
    with Client(**broker.client_options, **QUICK) as one:
        admin = one.admin()
        admin.create_topic("indexed", partitions=1, settings={"index": "key"})
        admin.create_topic("plain", partitions=1)
        yield one


def send(client: Client, topic: str, *datas: bytes, **more: Any) -> None:
    with client.producer() as producer:
        for data in datas:
            producer.send(topic, data, key="k" if b"k" in data else "x", **more)


def found(client: Client, topic: str) -> list[bytes]:
    """Return what is found, oldest first; reading with a filter has the same."""
    by_key = [each.data for each in client.find(topic, key="k")][::-1]
    assert [each.data for each in client.browse(topic, where=WHERE)] == by_key
    return by_key


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
def test_messages_of_xa_are_found_from_their_commit_on(
    broker: EmbeddedBroker, client: Client, topic: str
) -> None:
    """Neither before nor after a rollback, also over a start of the broker."""
    send(client, topic, b"k1", b"x1")
    xids = {}
    for name in (b"kept", b"gone"):
        xa = client.xa("q")
        xids[name] = xa.xid(1, name)
        xa.begin(xids[name])
        for number in range(60):
            xa.send(topic, b"k%d %s" % (number, name), key="k")
            xa.send(topic, b"x", key="x")
        xa.prepare()
    assert found(client, topic) == [b"k1"]
    broker.restart()
    assert found(client, topic) == [b"k1"]
    xa = client.xa("q")
    assert set(xa.recover()) == set(xids.values())
    xa.commit(xids[b"kept"])
    xa.rollback(xids[b"gone"])
    send(client, topic, b"k2")
    wanted = [b"k%d kept" % number for number in range(60)]
    assert found(client, topic) == [b"k1", *wanted, b"k2"]
    broker.restart()
    assert found(client, topic) == [b"k1", *wanted, b"k2"]
    with client.consumer("g", [topic], start="earliest", where=WHERE) as consumer:
        datas = [each.data for each in consumer.receive_many(62, 20.0, fill=True)]
        assert datas == [b"k1", *wanted, b"k2"]
        assert consumer.receive(0.1) is None


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
def test_a_message_that_has_expired_is_found_and_is_not_delivered(
    client: Client, topic: str
) -> None:
    """A filter changes nothing of it: what matches and has expired is counted."""
    send(client, topic, b"k old", b"x old", expires_in=0.001)
    send(client, topic, b"k new", b"x new", expires_in="1h")
    assert found(client, topic) == [b"k old", b"k new"]
    with client.consumer("g", [topic], start="earliest", where=WHERE) as consumer:
        message = consumer.receive(20.0)
        assert message is not None
        assert message.data == b"k new"
        assert consumer.receive(0.1) is None
        assert consumer.statistics().expired_count == 1
        consumer.commit()
    with client.queue(topic, group="w", then="drop", where=WHERE) as queue:
        job = queue.receive(20.0)
        assert job is not None
        assert job.data == b"k new"
        job.ack()
        assert queue.receive(0.1) is None


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("word", [b"k", b"x"])
def test_damage_is_never_passed_over_by_a_filter(
    broker: EmbeddedBroker, client: Client, topic: str, word: bytes
) -> None:
    """Whether it would match or not; consumers may skip it, and say so."""
    datas = [b"%s%d" % (letter, n) for n in range(80) for letter in (b"k", b"x")]
    send(client, topic, *datas)
    assert len(found(client, topic)) == 80
    flip(broker.data_path / f"{topic}-0", word + b"40")
    wanted = [each for each in datas if b"k" in each]
    read, messages = list[bytes](), client.browse(topic, where=WHERE)
    with pytest.raises(CorruptRecordError, match="damaged record at offset"):
        read.extend(each.data for each in messages)
    assert read == [each for each in wanted if int(each[1:]) < 40 + (word == b"x")]
    wanted = [each for each in wanted if each != word + b"40"]
    skipping: Any = {"start": "earliest", "where": WHERE, "on_corrupt": "skip"}
    with client.consumer("g", [topic], **skipping) as consumer:
        many = consumer.receive_many(len(wanted), 20.0, fill=True)
        assert [each.data for each in many] == wanted
        (fetches,) = consumer.statistics().fetches.values()
        assert fetches.skipped_count == 1


@pytest.mark.parametrize("topic", TOPICS)
def test_a_damaged_message_ends_a_search(
    broker: EmbeddedBroker, client: Client, topic: str
) -> None:
    """With an error, after all that are newer."""
    send(client, topic, *[b"k%d" % number for number in range(80)])
    flip(broker.data_path / f"{topic}-0", b"k40")
    newer = [b"k%d" % number for number in range(79, 40, -1)]
    many = client.find(topic, key="k", limit=len(newer))
    assert [each.data for each in many] == newer
    read = list[bytes]()
    with pytest.raises(CorruptRecordError, match="damaged") as caught:
        read.extend(each.data for each in client.find(topic, key="k"))
    assert read == newer
    assert caught.value.path is not None


def flip(directory: Path, data: bytes) -> None:
    """Change a byte of a message's data where it is stored."""
    for path in sorted(directory.glob("*.meta")):
        content = bytearray(path.read_bytes())
        at = content.find(data)
        if at >= 0:
            with open(path, "r+b") as file:
                file.seek(at + 1)
                file.write(bytes([content[at + 1] ^ 1]))
            return
    raise AssertionError(data)
