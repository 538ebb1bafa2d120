"""A write that is ended by hand; `test_exactly_once_steps.py` has the command."""

import asyncio
from itertools import count
from pathlib import Path

from metaq.client import AsyncClient
from metaq.model import BrokerId
from metaq.spark.sink.decisions import TaskBranch, branch_xid
from metaq.spark.sink.exact_sink import BranchSender
from metaq.spark.sink.exactly_once import settle_write
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.zk import MemoryZooKeeper
from tests.spark.brokers import tp

NAME = "write-settled"
QUERY = "0f8fad5b-d9cb-469f-a165-70867728950e"
PATIENCE_S = 60.0


def test_what_was_prepared_and_not_decided_is_rolled_back(tmp_path: Path) -> None:
    """A task has prepared, and its driver has ended without a decision."""
    with EmbeddedBroker(
        tmp_path, topics={"t": 1}, zookeeper=MemoryZooKeeper()
    ) as broker:
        branch = TaskBranch(0, 1, ())
        xid = branch_xid(NAME, QUERY, 0, branch)
        addresses = {BrokerId(0): broker.address}
        with BranchSender(addresses, xid, timeout_s=PATIENCE_S) as sender:
            sender.send(tp(0, broker=0, topic="t"), [b"x"], [0])
            sender.prepare()

        async def settle() -> object:
            turns = map(str, count())
            async with AsyncClient(**broker.client_options) as client:
                decision = await settle_write(
                    client, NAME, is_batch_write=True, draw_turn=lambda: next(turns)
                )
                async with client.xa(NAME) as xa:
                    return decision, await xa.recover()

        assert asyncio.run(settle()) == (None, [])
