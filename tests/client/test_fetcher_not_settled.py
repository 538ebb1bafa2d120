"""A leader that does not know its log end yet is asked again."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.client import AsyncClient
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.model import GroupOffset, MessageId, Offset, SizeBytes
from metaq.protocol.texts import NOT_SETTLED, with_code
from metaq.testing.fake_broker import FakeBroker, FaultKind
from tests.client.worlds import (
    IDLE,
    QUICK,
    WORLDS,
    partition,
    parts_of,
    payloads,
    take,
)
from tests.rigs.waiting import wait_until

Refusing = FakeBroker
ONE_BROKER = {"broker": "it refuses on request"}

BODY = with_code("the end of the log is not known yet", NOT_SETTLED, {}).encode()


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as one:
        yield one


@pytest.fixture(params=WORLDS)
def client(request: pytest.FixtureRequest, broker: Refusing) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[str(broker.address)], **QUICK) as one:
        yield one


def refuse(broker: Refusing, verb: str, count: int) -> None:
    broker.inject(FaultKind.REFUSE, verb=verb, count=count, status=503, body=BODY)


@pytest.mark.slow
def test_gets_go_on_where_they_were(
    broker: Refusing, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Refusals are neither damage, which may be skipped, nor the end of the log."""
    for number in range(4):
        broker.add(b"%d" % number)
    refuse(broker, "get", 6)
    with client.consumer("g", ["test"], on_corrupt="skip", **IDLE) as consumer:
        assert payloads(take(consumer, 4)) == [b"0", b"1", b"2", b"3"]
        assert broker.statistics().fault_count == 6
        refuse(broker, "get", 2)
        wait_until(lambda: broker.statistics().fault_count == 8)
        broker.add(b"4")
        assert payloads(take(consumer, 1)) == [b"4"]
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.slow
def test_a_committed_offset_is_kept_until_the_log_is_known(
    broker: Refusing, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a new leader's log may seem lower than it was for a moment."""
    broker.add(b"handled")
    stored = {partition(): GroupOffset(broker.log_end(), MessageId(-1))}
    store = MemoryOffsets()
    commit = MemoryOffsets.commit(store, "g", stored, fence=None, deadline_s=0.0)
    asyncio.run(commit)
    refuse(broker, "offset", 4)
    refuse(broker, "get", 2)
    options = {"offsets": store, "on_corrupt": "skip", **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        wait_until(lambda: broker.statistics().fault_count == 6)
        broker.add(b"next")
        assert payloads(take(consumer, 1)) == [b"next"]
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.slow
def test_the_ends_of_a_log_are_asked_for_again(broker: Refusing) -> None:
    """Whoever asks waits for the answer, up to the deadline."""
    broker.add(b"x")
    end = broker.log_end()
    refuse(broker, "offset", 3)
    refuse(broker, "get", 1)

    async def main() -> None:
        async with AsyncClient(brokers=[str(broker.address)], **QUICK) as client:
            parts = parts_of(client)
            log = LogQueries(parts, partition(), parts.deadline_s())
            assert await log.ends() == (0, end)
            assert len(await log.slice(Offset(0), SizeBytes(end))) == end

    asyncio.run(main())
    assert broker.statistics().fault_count == 4
