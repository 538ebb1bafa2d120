"""An exchange of a replica set: its leader routes, and the next one goes on."""

import asyncio

import pytest

from metaq.client import AsyncClient
from metaq.routing.match import Binding, ExchangeKind
from metaq.zk.exchange_definitions import (
    ExchangeDefinition,
    binding_name,
    encode_binding,
    encode_exchange,
)
from metaq.zk.paths import NodePaths
from tests.replication.replicas import Replicas, run, soon

PATHS = NodePaths("/meta")
BOUND = Binding("test", "#"), Binding("meta-test", "*.even")
KILLS = 2


@pytest.mark.slow
def test_each_topic_has_each_message_once_over_the_ends_of_leaders() -> None:
    """No send fails; what is sent again is known by the next leader."""

    async def scenario(rig: Replicas) -> None:
        exchange = ExchangeDefinition(kind=ExchangeKind.TOPIC)
        rig.zookeeper.put(PATHS.exchange("events"), encode_exchange(exchange))
        for each in BOUND:
            node = PATHS.binding("events", binding_name(each))
            rig.zookeeper.put(node, encode_binding(each))
        sent = list[bytes]()

        async def load() -> None:
            new = rig.zookeeper.coordinator
            async with (
                AsyncClient(coordinator=new) as client,
                client.exchange("events") as events,
            ):
                while True:
                    key = "n.odd" if len(sent) % 2 else "n.even"
                    payload = b"m%d." % len(sent)
                    await events.send(key, payload)
                    sent.append(payload)

        async def more() -> None:
            until = len(sent) + 6
            await soon(lambda: len(sent) >= until, show=rig.describe)

        sending = asyncio.create_task(load())
        try:
            await more()
            for _ in range(KILLS):
                leader = rig.leader()
                epoch = rig[leader].node.epoch
                rig.zookeeper.reap(await rig[leader].kill())
                await rig.led(after=epoch)
                await more()
                await rig.start(leader)
                await rig.in_sync(1, 2, 3)
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            assert sending.cancelled(), sending.exception()
        await rig.equal()
        for topic, wanted in (("test", sent), ("meta-test", sent[::2])):
            stored = b"".join(
                rig.bytes_of(rig.leader(), f"{topic}-{p}")
                for p in range(3)
                if rig[rig.leader()].log(topic, p) is not None
            )
            counts = {payload: stored.count(payload) for payload in wanted}
            assert {*counts.values()} == {1}, counts

    run(scenario)
