"""Batches and full lists: over partitions, until count, bytes or time; handled
together."""

from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client.offsets.offset_store import MemoryOffsets
from tests.brokers import StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads
from tests.rigs.inside import twin_of

ZERO = partition(0)
MANUAL: dict[str, Any] = {"commit_interval_s": None, **IDLE}


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1, "two": 2})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"m%05d" % n for n in range(start, stop)]


def async_of(consumer: Any) -> Any:
    """Return the async consumer of either world."""
    return getattr(consumer, "twin", None) or twin_of(consumer)


def test_a_full_list_is_of_several_gets(broker: Any, client: Any) -> None:
    """Each get brings a few messages; the list has as many as requested."""
    broker.put(*numbered(0, 60))
    with client.consumer("g", ["test"], fetch_bytes=200, **IDLE) as consumer:
        assert payloads(consumer.receive_many(50, 60, fill=True)) == numbered(0, 50)
        assert payloads(consumer.receive_many(10, 60, fill=True)) == numbered(50, 60)


def test_a_batch(broker: Any, client: Any) -> None:
    broker.put(*numbered(0, 60))
    store = MemoryOffsets()
    with client.consumer(
        "g", ["test"], offsets=store, fetch_bytes=200, **MANUAL
    ) as consumer:
        for batch in consumer.batches(max_count=25, max_wait_s=0.5):
            print(batch)
            batch.commit()
            if len(batch) < 25:
                break
