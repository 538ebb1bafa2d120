"""Exchanges with their bindings, followed on an in-memory ZooKeeper."""

import asyncio
from dataclasses import replace

from metaq.routing.match import Binding, ExchangeKind
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.exchange_definitions import (
    ExchangeDefinition,
    binding_name,
    encode_binding,
    encode_exchange,
)
from metaq.zk.exchange_watch import ExchangeWatch
from metaq.zk.paths import NodePaths
from tests.rigs.virtual_time import VirtualClock, run_virtually

PATHS = NodePaths("/meta")
TOPIC = ExchangeDefinition(kind=ExchangeKind.TOPIC)
BOUND = Binding("orders", "order.#")


def test_exchanges_and_bindings_are_followed_one_by_one() -> None:
    """One that cannot be read says why, one that is over has no bindings any more."""

    async def scenario() -> None:
        server, changes = MemoryZooKeeper(), list[None]()
        coordinator = server.coordinator(VirtualClock())
        coordinator.start()
        node = PATHS.binding("events", binding_name(BOUND))
        server.put(PATHS.exchange("events"), encode_exchange(TOPIC))
        server.put(node, encode_binding(BOUND))
        watch = ExchangeWatch(coordinator, PATHS, lambda: changes.append(None))
        assert not watch.is_complete
        await asyncio.sleep(1)
        assert watch.is_complete
        bound = replace(TOPIC, bindings={binding_name(BOUND): BOUND})
        assert watch.values == {"events": bound}
        server.put(PATHS.exchange("odd"), b"{}")
        server.remove(node)
        await asyncio.sleep(1)
        assert watch.values["events"] == TOPIC
        server.put(PATHS.binding("events", "odd"), b'{"topic":"a","where":"x"}')
        await asyncio.sleep(1)
        (unread,) = watch.values["events"].unread.items()
        assert unread[0] == "odd"
        assert "expected no property where" in unread[1]
        assert "expected a kind" in str(watch.values["odd"])
        over = ExchangeDefinition(kind=ExchangeKind.TOPIC, is_deleted=True)
        server.put(PATHS.exchange("events"), encode_exchange(over))
        server.put(node, encode_binding(BOUND))
        await asyncio.sleep(1)
        assert watch.values["events"] == over
        count = len(changes)
        watch.cancel()
        server.remove(PATHS.exchange("odd"))
        await asyncio.sleep(1)
        assert len(changes) == count

    run_virtually(scenario())
