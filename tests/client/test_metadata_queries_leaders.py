"""Log ends of a replica set: only its registered leader can report a loss."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import pytest

from metaq.client import AsyncClient
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.offsets.offset_reset import first_offset
from metaq.errors import MetaqError
from metaq.model import BrokerId, GroupOffset, MessageId, Offset, TopicPartition
from metaq.protocol.commands import Command, OffsetQuery, Reply, Result, Version
from metaq.protocol.version import Capabilities, encode_version_body
from metaq.testing.zk import MemoryZooKeeper
from tests.client.scripted import ScriptedBroker, ok
from tests.client.worlds import QUICK, parts_of
from tests.rigs.waiting import until

ONE_BROKER = {"ScriptedBroker": "of two replicas one names an old end"}

PARTITION = TopicPartition("test", BrokerId(7), 0)
ROLE = "/meta/brokers/ids/7/master"
TITLE = "/meta/replicas/7/leader"
OLD, NEW = 51, 52
"""Sessions of two replicas."""
OLD_END, NEW_END = 100, 200
SHORT_S, LONG_S = 0.5, 30.0

Scenario: TypeAlias = Callable[["Set", LogQueries], Awaitable[None]]


class Set:
    """Two replicas of broker 7; the older one knows an older end."""

    def __init__(self, old: ScriptedBroker, new: ScriptedBroker) -> None:
        self.zookeeper = MemoryZooKeeper()
        self.old, self.new = old, new
        self.is_set = True
        old.answer, new.answer = (
            partial(self._answer, old, OLD_END),
            partial(self._answer, new, NEW_END),
        )
        self.on_end: Callable[[], None] = lambda: None
        """Called when the older one is asked for its end."""

    def _answer(self, broker: ScriptedBroker, end: int, command: Command) -> Any:
        if isinstance(command, Version):
            body = encode_version_body(Capabilities("test", follow=self.is_set))
            return Result(200, body.encode(), command.opaque)
        if not isinstance(command, OffsetQuery):
            return ok(command)
        if command.offset and broker is self.old:
            self.on_end()
        found = end if command.offset else 0
        reply: Reply = Result(200, b"%d" % found, command.opaque)
        return reply

    def register(self, broker: ScriptedBroker, session: int) -> None:
        """Have clients see a replica as broker 7."""
        self.zookeeper.put(ROLE, str(broker.address).encode(), session_id=session)

    def lead(self, session: int, epoch: int) -> None:
        """Begin a term."""
        self.zookeeper.put(TITLE, b"epoch %d" % epoch, session_id=session)

    def end_asked_count(self, broker: ScriptedBroker) -> int:
        """Return how often a replica was asked for its end."""
        asked = [one for one in broker.commands if isinstance(one, OffsetQuery)]
        return sum(one.offset > 0 for one in asked)


def run(scenario: Scenario, *, seconds: float = LONG_S) -> None:
    """Run with an older replica that leads and is registered."""

    async def main() -> None:
        async with ScriptedBroker() as old, ScriptedBroker() as new:
            rig = Set(old, new)
            rig.register(old, OLD)
            rig.lead(OLD, 1)
            coordinator = rig.zookeeper.coordinator
            async with AsyncClient(coordinator=coordinator, **QUICK) as client:
                parts = parts_of(client)
                await until(lambda: parts.address_of(PARTITION.broker_id))
                deadline_s = parts.clock.monotonic_s() + seconds
                await scenario(rig, LogQueries(parts, PARTITION, deadline_s))

    asyncio.run(main())


def test_the_word_of_the_registered_leader_is_believed() -> None:
    """Nothing else is asked."""

    async def scenario(rig: Set, log: LogQueries) -> None:
        assert await log.confirmed_ends() == (0, OLD_END)
        assert rig.end_asked_count(rig.old) == 1

    run(scenario)


@pytest.mark.slow
def test_a_replica_that_leads_no_more_is_not_believed() -> None:
    """It is still registered, for a moment; the leader is waited for."""

    async def scenario(rig: Set, log: LogQueries) -> None:
        rig.lead(NEW, 2)
        asking = asyncio.ensure_future(log.confirmed_ends())
        await asyncio.sleep(0.2)
        assert not asking.done()
        rig.register(rig.new, NEW)
        assert await asking == (0, NEW_END)
        assert rig.end_asked_count(rig.old) == 0

    run(scenario)


def test_a_term_that_ends_under_the_question_is_no_answer() -> None:
    """Another leader has begun when the answer comes."""

    async def scenario(rig: Set, log: LogQueries) -> None:
        def change() -> None:
            rig.lead(NEW, 2)
            rig.register(rig.new, NEW)

        rig.on_end = change
        assert await log.confirmed_ends() == (0, NEW_END)
        assert rig.end_asked_count(rig.old) == 1

    run(scenario)


@pytest.mark.slow
def test_a_set_without_a_leader_is_waited_for_until_the_deadline() -> None:
    """Then it is an error, no loss; the time may end within the last attempt."""

    async def scenario(rig: Set, log: LogQueries) -> None:
        rig.zookeeper.reap(OLD)
        rig.register(rig.old, OLD)
        with pytest.raises(MetaqError, match=r"not registered as the leader|no time"):
            await log.confirmed_ends()

    run(scenario, seconds=SHORT_S)


def test_a_broker_that_is_no_replica_is_believed() -> None:
    """There is nobody else to ask."""

    async def scenario(rig: Set, log: LogQueries) -> None:
        rig.is_set = False
        rig.zookeeper.reap(OLD)
        rig.register(rig.old, OLD)
        assert await log.confirmed_ends() == (0, OLD_END)

    run(scenario)


def test_a_group_keeps_an_offset_that_a_former_leader_does_not_know() -> None:
    """It would begin at another one, and read all again or leave much out."""

    async def scenario(rig: Set, log: LogQueries) -> None:
        def change() -> None:
            rig.lead(NEW, 2)
            rig.register(rig.new, NEW)

        rig.on_end = change
        committed = GroupOffset(Offset(OLD_END + 50), MessageId(1))
        assert await first_offset(
            log.context, PARTITION, committed, "earliest", deadline_s=log.deadline_s
        ) == (committed, False)

    run(scenario)
