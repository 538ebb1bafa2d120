"""A damaged length that is too large is reported, or skipped, on both brokers."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client.errors import NoProgressError
from metaq.errors import CorruptRecordError, ServerError
from tests.brokers import AnyBroker, Metaq14Broker, PythonBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads, take

ZERO = partition(0)
LENGTHS = [5000, 30 * 1024 * 1024, 2**31 - 1]
"""Beyond the end of the log; the same in many pieces; more than is fetched."""


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def set_length(broker: AnyBroker, offset: int, length: int) -> None:
    if isinstance(broker, Metaq14Broker):
        broker.inner.corrupt(offset, length=length)
        return
    assert isinstance(broker, PythonBroker)
    (segment,) = broker.inner.data_path.glob("**/test-0/*.meta")
    fd = os.open(segment, os.O_WRONLY)
    os.pwrite(fd, length.to_bytes(4, "big"), offset)
    os.close(fd)


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_what_lies_behind_is_read_when_damage_is_skipped(
    broker: AnyBroker, client: Any, length: int
) -> None:
    """Also what is appended later, and the place is counted once.

    A broker of ours was asked about it, and takes no puts there from then on.
    """
    offsets = broker.put(b"a", b"b", b"c", b"d")
    set_length(broker, offsets[1], length)
    options = {"on_corrupt": "skip", **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 3)) == [b"a", b"c", b"d"]
        if isinstance(broker, Metaq14Broker):
            broker.put(b"e")
            assert payloads(take(consumer, 1)) == [b"e"]
        else:
            with pytest.raises(ServerError, match=f"offset={offsets[1]} next"):
                broker.put(b"e")
        statistics = consumer.statistics()
        assert statistics.fetches[ZERO].skipped_count == 1
        assert statistics.missing_bytes == offsets[1] - offsets[0]


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_an_error_that_names_the_next_good_record(
    broker: AnyBroker, client: Any, length: int
) -> None:
    """Of a consumer, of a browser, and of a single get."""
    offsets = broker.put(b"a", b"b", b"c", b"d")
    set_length(broker, offsets[1], length)
    with client.consumer("g", ["test"], **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == [b"a"]
        with pytest.raises(CorruptRecordError, match=f"offset {offsets[1]}") as caught:
            take(consumer, 1)
        assert caught.value.next_good_offset == offsets[2]
    with pytest.raises(CorruptRecordError, match=f"offset {offsets[1]}"):
        client.get("test", "0-0", offsets[1], 1000)


def test_a_message_that_is_larger_than_what_is_fetched_is_not_skipped(
    broker: AnyBroker, client: Any
) -> None:
    """It is whole, and a larger fetch can read it."""
    offsets = broker.put(b"a", bytes(200_000), b"b")
    options = {"on_corrupt": "skip", "fetch_bytes": 70_000, "fetch_bytes_max": 100_000}
    with client.consumer("g", ["test"], **options, **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == [b"a"]
        with pytest.raises(NoProgressError, match=r"record of 200020 bytes \(at most"):
            take(consumer, 1)
        assert consumer.statistics().fetches[ZERO].skipped_count == 0
    with client.consumer("g", ["test"], start=offsets[1], **IDLE) as consumer:
        assert payloads(take(consumer, 2)) == [bytes(200_000), b"b"]
