"""Twenty members on forty partitions of a real ZooKeeper, coming and going at random.

At no moment do two of them read the same partition; at rest each partition is read and
owned by exactly the member that MetaQ's strategy names. METAQ_CHURN_ROUNDS makes it
longer; METAQ_SEED repeats it.
"""

import asyncio
import os
import random
from collections import Counter

import pytest

from metaq.assignment import Strategy, assign
from metaq.errors import CoordinationError
from metaq.model import TopicPartition
from metaq.zk.groups import read_owners
from metaq.zk.paths import NodeKind
from metaq.zk.znodes import TopicRegistration, encode_registration
from tests.integration.test_zk_rebalance import PATHS, ROLE, Book, Member, in_s, part
from tests.rigs.waiting import until

ROUNDS = int(os.environ.get("METAQ_CHURN_ROUNDS", "4"))
MEMBER_COUNT = 20
PARTITION_COUNT = 40

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow, pytest.mark.timeout(900)]


class _Group:
    """Members that come and go; a session ends by force now and then."""

    def __init__(self, hosts: str, rng: random.Random) -> None:
        self.hosts = hosts
        self.rng = rng
        self.book = Book()
        self.members: list[Member] = []
        self.number = 0

    async def join(self) -> None:
        self.number += 1
        member = Member(self.hosts, self.book, f"c{self.number}")
        member.coordinator.start()
        await member.metadata.start()
        member.topics.start()
        await member.source.start(member.sink)
        self.members.append(member)

    async def leave(self) -> None:
        member = self.members.pop(self.rng.randrange(len(self.members)))
        await member.source.stop()
        assert member.reading == set()
        await member.metadata.stop()
        await member.coordinator.stop(deadline_s=in_s())

    async def settle(self) -> None:
        """Wait until who reads, who owns and who should are the same."""
        names = [part(number).name for number in range(PARTITION_COUNT)]
        shares = assign(Strategy.DEFAULT, [m.name for m in self.members], names)
        expected = {name: member for member, many in shares.items() for name in many}
        await until(lambda: self._is_at_rest(expected))
        assert Counter(self.book.readers.values()) == {
            member: len(many) for member, many in shares.items()
        }

    async def _is_at_rest(self, expected: dict[str, str]) -> bool:
        def by_name(readers: dict[TopicPartition, str]) -> dict[str, str]:
            return {p.name: member for p, member in readers.items()}

        try:
            coordinator = self.members[0].coordinator
            owners = await read_owners(coordinator, PATHS, "g", "t", deadline_s=in_s(2))
        except CoordinationError:
            return False
        # The readers last: they may change while ZooKeeper answers.
        return (
            all(member.source.unsettled_since_s is None for member in self.members)
            and by_name(dict(owners)) == by_name(self.book.readers) == expected
        )


async def _serve(member: Member) -> None:
    await until(lambda: member.coordinator.status.session_version)
    await member.coordinator.set_or_create(
        PATHS.topic(NodeKind.TOPIC_SUB, "t", ROLE),
        encode_registration(TopicRegistration(PARTITION_COUNT, ROLE)),
        deadline_s=in_s(),
    )


def test_every_partition_has_exactly_one_owner_at_rest(
    zookeeper: str, rng: random.Random
) -> None:
    """Any member joins, leaves or loses its session, whatever was under way then."""

    async def scenario() -> None:
        group = _Group(zookeeper, rng)
        await group.join()
        await _serve(group.members[0])
        await asyncio.gather(*(group.join() for _ in range(MEMBER_COUNT - 1)))
        await group.settle()
        for _ in range(ROUNDS):
            goings = [group.leave() for _ in range(rng.randrange(1, 6))]
            comings = [group.join() for _ in range(rng.randrange(1, 6))]
            steps = goings + comings
            rng.shuffle(steps)
            await asyncio.gather(*steps)
            await group.settle()
            assert group.book.violations == []
            expired = rng.choice(group.members)
            fences = expired.sink.fence_count
            await expired.expire()
            await until(lambda: expired.sink.fence_count > fences)  # noqa: B023
            # Its owner hears of a session that was ended by force after the others.
            await group.settle()
            group.book.violations.clear()
        await asyncio.gather(*(group.leave() for _ in tuple(group.members)))
        assert group.book.readers == {}

    asyncio.run(scenario())
