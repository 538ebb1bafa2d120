"""The fakes beside a real ZooKeeper: a registration in it, and a proxy before it."""

import asyncio

import pytest

from metaq.client import AsyncClient
from metaq.clock import SystemClock
from metaq.model import BrokerId
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.proxy import Proxy
from metaq.zk.coordinator import ZooKeeperCoordinator
from metaq.zk.session import SessionState, SessionStatus
from tests.client.worlds import parts_of
from tests.rigs.waiting import until

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow]

CLOCK = SystemClock()
PATIENCE_S = 60.0
SESSION_TIMEOUT_MS = 20_000
"""No session ends by itself, however long this machine stands still."""


def test_a_fake_broker_registers_in_a_real_zookeeper(zookeeper: str) -> None:
    """Found while it is there, and not when it has gone away."""

    async def brokers() -> dict[BrokerId, int | None]:
        async with AsyncClient(zookeeper) as client:
            metadata = parts_of(client).metadata
            deadline_s = CLOCK.monotonic_s() + PATIENCE_S
            cluster = await metadata.wait_newer(0, deadline_s=deadline_s)
            return {
                number: copies.leader.port if copies.leader else None
                for number, copies in cluster.brokers.items()
            }

    def make(clock: SystemClock) -> ZooKeeperCoordinator:
        return ZooKeeperCoordinator(
            zookeeper, session_timeout_ms=SESSION_TIMEOUT_MS, clock=clock
        )

    with FakeBroker(broker_id=7, coordinator=make) as broker:
        assert asyncio.run(brokers()) == {7: broker.port}
        broker.go_away()
        assert asyncio.run(brokers()) == {}
        broker.come_back(port=0)
        assert asyncio.run(brokers()) == {7: broker.port}
    assert asyncio.run(brokers()) == {}


def test_a_proxy_suspends_a_session_and_gives_it_back(zookeeper: str) -> None:
    """A cut and a short refusal: the same session afterwards."""
    address, _, root = zookeeper.partition("/")
    host, _, port = address.rpartition(":")

    async def scenario(proxy: Proxy) -> None:
        coordinator = ZooKeeperCoordinator(
            f"127.0.0.1:{proxy.port}/{root}",
            session_timeout_ms=SESSION_TIMEOUT_MS,
            clock=CLOCK,
        )
        heard: list[SessionStatus] = []
        coordinator.add_listener(heard.append)
        coordinator.start()
        await until(lambda: coordinator.status.state is SessionState.CONNECTED)
        proxy.refuse()
        proxy.cut()
        await until(lambda: coordinator.status.state is SessionState.SUSPENDED)
        proxy.accept()
        await until(lambda: coordinator.status.state is SessionState.CONNECTED)
        assert {status.session_version for status in heard} == {1}
        await coordinator.stop(deadline_s=CLOCK.monotonic_s() + PATIENCE_S)

    with Proxy(host, int(port)) as proxy:
        asyncio.run(scenario(proxy))
