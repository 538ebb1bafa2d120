"""`Publisher.send_records`: batches that are recognised in another run."""

from collections.abc import Iterator

import pytest

from metaq.client import Client
from metaq.client.discovery import Cluster
from metaq.client.publish import Publisher, PublishStatistics
from metaq.client.session import parse_address
from metaq.model import BrokerId, TopicPartition
from metaq.record.flags import encode_payload
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.zk.paths import partition_name

pytestmark = pytest.mark.slow

PARTITION = TopicPartition("test", BrokerId(0), 0)


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with one partition."""
    with embedded_broker() as found:
        yield found


def cluster_of(broker: EmbeddedBroker) -> Cluster:
    return Cluster({BrokerId(0): parse_address(broker.address)})


def run(
    broker: EmbeddedBroker, batches: list[list[bytes]], spare: str
) -> PublishStatistics:
    """Send batches as one run of a task does."""
    publisher = Publisher(cluster_of(broker), producer="run", timeout_s=20.0)
    sequence = 0
    for number, payloads in enumerate(batches):
        publisher.send_records(
            PARTITION,
            payloads,
            [0] * len(payloads),
            producer="task",
            sequence=sequence,
            spare=f"{spare}-{number}",
        )
        sequence += len(payloads)
    publisher.flush()
    publisher.close()
    return publisher.statistics()


def stored(broker: EmbeddedBroker) -> list[bytes]:
    with Client(brokers=[broker.address]) as client:
        names = [partition_name(PARTITION)]
        messages = client.browse(PARTITION.topic, partitions=names)
        return [message.data for message in messages]


def test_another_run_stores_nothing_twice(broker: EmbeddedBroker) -> None:
    """Batches of one message are named too; what is new is stored."""
    batches = [[b"a", b"b"], [b"c"], [b"d", b"e"]]
    run(broker, batches[:2], "first")
    done = run(broker, batches, "second")
    assert stored(broker) == [b"a", b"b", b"c", b"d", b"e"]
    assert (done.message_count, done.renamed_count) == (5, 0)


def test_other_messages_under_the_same_numbers_are_never_lost(
    broker: EmbeddedBroker,
) -> None:
    """They are sent under a name of their own, and counted."""
    run(broker, [[b"a", b"b"], [b"c", b"d"]], "first")
    done = run(broker, [[b"b", b"a"], [b"c", b"d"], [b"x", b"y", b"z"]], "second")
    assert sorted(stored(broker)) == sorted(b"abcdbaxyz"[i : i + 1] for i in range(9))
    assert (done.message_count, done.renamed_count) == (7, 2)


def test_each_message_keeps_its_own_flag(broker: EmbeddedBroker) -> None:
    """Messages with and without attribute travel in one batch."""
    with_one, flag = encode_payload(b"data", "attribute")
    publisher = Publisher(cluster_of(broker), producer="run", timeout_s=20.0)
    publisher.send_records(
        PARTITION, [with_one, b"bare"], [flag, 0], producer="p", sequence=0, spare="s"
    )
    publisher.flush()
    publisher.close()
    assert stored(broker) == [b"data", b"bare"]
