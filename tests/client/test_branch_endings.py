"""Ends of prepared branches by the decision of their transaction manager."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from metaq.client import AsyncClient, Client, XaTransactionId
from metaq.client.errors import LostBranchError
from metaq.client.produce.branch_endings import BranchEndings
from metaq.client.produce.branch_fates import Placed
from metaq.client.produce.xa_commands import ROLLBACK
from metaq.client.session import context_of
from metaq.model import BrokerId
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.zk import MemoryZooKeeper
from tests.client.worlds import payloads

QUALIFIER = "manager"
ONE_BROKER = {"broker": "asks the broker where each branch is"}
Broker: TypeAlias = "EmbeddedBroker"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with embedded_broker(
        topics={"test": 1},
        data_path=tmp_path,
        zookeeper=MemoryZooKeeper(),
        settings={"brokerId": "0"},
    ) as one:
        yield one


def prepare(broker: Broker, *numbers: int) -> list[XaTransactionId]:
    """Prepare a message in a transaction for each number."""
    found = []
    with Client(**broker.client_options) as client:
        for number in numbers:
            with client.xa(QUALIFIER) as xa:
                found.append(xa.xid(7, b"%d" % number))
                xa.begin(found[-1])
                xa.send("test", b"%d" % number)
                xa.prepare()
    return found


def test_branches_are_found_committed_and_rolled_back(broker: Broker) -> None:
    """One that is committed already is committed, if the commit may have been sent."""
    first, second = prepare(broker, 1, 2)
    left, kept = (BrokerId(0), first), (BrokerId(0), second)

    async def scenario() -> None:
        async with AsyncClient(**broker.client_options) as client:
            context = context_of(client)

            def endings() -> BranchEndings:
                return BranchEndings(context, context.deadline_s(), name=QUALIFIER)

            found: Any = await endings().look()
            assert set(found[0]) == {first, second}
            assert await endings().commit([kept], was_sent=False) == {}
            await endings().end(ROLLBACK, [left])
            assert await endings().look() == {BrokerId(0): ()}
            assert await endings().commit([kept], was_sent=True) == {}
            lost: dict[Placed, Any] = await endings().commit([left], was_sent=False)
            assert {one: type(error) for one, error in lost.items()} == {
                left: LostBranchError
            }

    asyncio.run(scenario())
    with Client(**broker.client_options) as client:
        assert payloads(client.browse("test")) == [b"2"]
