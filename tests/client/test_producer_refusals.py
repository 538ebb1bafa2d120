"""Brokers that refuse puts, or do not answer and may have stored them."""

import asyncio

import pytest

from metaq.errors import ForbiddenError
from metaq.protocol.version import Capabilities
from tests.client.producing import (
    FORGETFUL,
    JAVA,
    OURS,
    Act,
    StandInBroker,
    at,
    producing,
)
from tests.rigs.virtual_time import run_virtually


def test_partitions_that_all_refuse_are_not_pestered() -> None:
    """A message does not go to and fro; its error is the brokers' own."""

    async def main() -> None:
        brokers = StandInBroker(0), StandInBroker(1)
        for broker in brokers:
            broker.default = Act.CLOSED
        async with producing(*brokers, timeout_s=2) as world:
            with pytest.raises(ForbiddenError, match="as the test says"):
                await world.producer.send("test", b"x")
            assert 2 <= sum(len(broker.commands) for broker in brokers) < 40
            brokers[1].default = Act.STORE
            await world.producer.send("test", b"y")
        assert brokers[1].stored() == [b"y"]

    run_virtually(main())


def test_what_a_broker_that_is_gone_refused_moves_when_another_may_be_asked() -> None:
    """No event reports that moment."""

    async def main() -> None:
        brokers = StandInBroker(0), StandInBroker(1)
        async with producing(*brokers, timeout_s=8) as world:
            for broker in brokers:
                await world.producer.send(
                    "test", b"", partition=f"{broker.broker_id}-0"
                )
                broker.default = Act.CLOSED
            future = await world.producer.send_nowait("test", b"x")
            await asyncio.sleep(0.1)
            other, last = sorted(brokers, key=lambda one: len(one.commands))
            assert len(other.commands) == 2
            other.default = Act.STORE
            world.only(other)
            async with asyncio.timeout(3):
                assert (await future).partition == at(0, other.broker_id)
        assert last.stored() == [b""]

    run_virtually(main())


@pytest.mark.parametrize(
    ("capabilities", "count"), [(OURS, 0), (FORGETFUL, 1), (JAVA, 1)]
)
def test_what_may_be_stored_twice_is_counted(
    capabilities: Capabilities, count: int
) -> None:
    """Only where the broker does not recognise what it has stored."""

    async def main() -> None:
        broker = StandInBroker(capabilities=capabilities)
        broker.acts.append(Act.CUT_STORED)
        async with producing(broker) as world:
            await world.producer.send("test", b"once or twice")
            await world.producer.send("test", b"once")
            seen = world.producer.statistics()
        assert seen.doubtful_count == count
        assert seen.by_partition == {at(0): 2}

    run_virtually(main())


def test_a_broker_that_came_back_gets_nothing_before_it_has_registered() -> None:
    """A put in between can make the start of a MetaQ 1.4 broker fail."""

    async def main() -> None:
        broker = StandInBroker(capabilities=JAVA)
        async with producing(broker) as world:
            await world.producer.send("test", b"before")
            broker.go_away()
            world.metadata.tell({}, {})
            future = await world.producer.send_nowait("test", b"x", partition="0-0")
            broker.come_back()
            world.metadata.tell({}, {0: broker.address})
            await asyncio.sleep(3)
            assert broker.stored() == [b"before"]
            world.metadata.tell({0: 1}, {0: broker.address})
            assert (await future).partition == at(0)
        assert broker.stored() == [b"before", b"x"]

    run_virtually(main())
