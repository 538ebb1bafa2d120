"""A write that is ended by hand; `test_exactly_once_steps.py` has the command."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from metaq.client import AsyncClient
from metaq.model import BrokerId
from metaq.spark.errors import IncompleteError
from metaq.spark.sink.decisions import (
    Decision,
    QueryRecord,
    TaskBranch,
    WriteTerms,
    branch_xid,
)
from metaq.spark.sink.exact_sink import BranchSender
from metaq.spark.sink.exactly_once import TransactionManager, settle_write
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.client.worlds import parts_of
from tests.spark.brokers import data_of, stored, tp

NAME = "write-settled"
QUERY = "0f8fad5b-d9cb-469f-a165-70867728950e"
PATIENCE_S = 60.0


def prepare(address: str) -> TaskBranch:
    """Run a task of one row."""
    branch = TaskBranch(0, 1, (BrokerId(0),))
    xid = branch_xid(NAME, QUERY, 0, branch)
    with BranchSender({BrokerId(0): address}, xid, timeout_s=PATIENCE_S) as sender:
        sender.send(tp(0, broker=0, topic="t"), [b"x"], [0])
        sender.prepare()
    return branch


@pytest.mark.slow
def test_what_was_prepared_and_not_decided_is_rolled_back(tmp_path: Path) -> None:
    """A task has prepared, and its driver has ended without a decision."""
    with EmbeddedBroker(
        tmp_path, topics={"t": 1}, zookeeper=MemoryZooKeeper()
    ) as broker:
        prepare(broker.address)

        async def settle() -> object:
            turns = map(str, count())
            async with AsyncClient(**broker.client_options) as client:
                decision = await settle_write(
                    client, NAME, is_batch_write=True, draw_turn=lambda: next(turns)
                )
                async with client.xa(NAME) as xa:
                    return decision, await xa.recover()

        assert asyncio.run(settle()) == (None, [])


@pytest.mark.slow
def test_a_batch_write_that_is_not_complete_says_how_it_will_be(tmp_path: Path) -> None:
    """Written again it would be there twice; it is settled, and there once."""
    with EmbeddedBroker(
        tmp_path, topics={"t": 1}, zookeeper=MemoryZooKeeper()
    ) as broker:
        decision = Decision(QUERY, 0, (prepare(broker.address),))
        turns = map(str, count())

        async def decide() -> None:
            async with AsyncClient(**broker.client_options) as client:
                context = parts_of(client)
                manager = TransactionManager(
                    context,
                    context.clock.monotonic_s() + 2.0,
                    name=NAME,
                    place=NAME,
                    draw_turn=lambda: next(turns),
                )
                turn = await manager.decide(decision, WriteTerms(""))
                await asyncio.to_thread(broker.stop)
                await manager.complete(decision, turn)

        async def settle() -> object:
            async with AsyncClient(**broker.client_options) as client:
                return await settle_write(
                    client, NAME, is_batch_write=True, draw_turn=lambda: next(turns)
                )

        words = r"stay prepared.*Do not write the rows again: .metaq txn settle write-"
        with pytest.raises(IncompleteError, match=words):
            asyncio.run(decide())
        broker.start()
        assert asyncio.run(settle()) == decision
        assert data_of(stored(broker, "t")) == [b"x"]


@pytest.mark.slow
def test_a_metaq_1_4_broker_has_the_time_in_which_it_is_believed() -> None:
    """It knows no more of what it has committed, for longer than an answer may take."""
    zookeeper, turns = MemoryZooKeeper(), map(str, count())
    with FakeBroker({"t": 1}, coordinator=zookeeper.coordinator) as broker:
        decision = Decision(QUERY, 0, (prepare(str(broker.address)),))
        kept = QueryRecord("1", NAME, decision).encode()
        zookeeper.put(NodePaths().query_decision(NAME), kept)

        async def settle() -> object:
            options: Any = {"coordinator": zookeeper.coordinator}
            async with AsyncClient(**options, request_timeout_s=4.0) as client:
                return await settle_write(
                    client,
                    NAME,
                    is_batch_write=True,
                    draw_turn=lambda: next(turns),
                    foreign_start_s=4.5,
                )

        assert asyncio.run(settle()) == decision
        assert broker.payloads("t") == [b"x"]
