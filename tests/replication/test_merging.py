"""A claimer takes what the members of the old in-sync set have more."""

import asyncio
from typing import Any

import pytest

from metaq.errors import MetaqError
from metaq.model import LogId, MessageId, Offset
from metaq.replication.epochs import Epoch
from metaq.replication.merging import Merged, Merging
from tests.replication.streams import Leader, Site, Stream, Wire, same
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until
from tests.storage.support import LOG

OTHER = LogId("other", 0)
RECORD = 116
"""Size of a record of `put`."""


async def members(**system: int) -> tuple[Leader, Site]:
    """Return an old leader, which leads no more, and a follower that has all."""
    leader = await Leader(**system).begin()
    leader.put(3)
    follower = Site(2, **system)
    stream = Stream(follower, leader)
    await until(lambda: same(leader, follower))
    await stream.end()
    return leader, follower


async def stop(leader: Leader) -> None:
    await asyncio.sleep(0.2)
    await leader.end()
    for log in leader.logs.logs().values():
        log.follow()
    await asyncio.sleep(0.2)


def merging_of(claimer: Site) -> Merging:
    node: Any = claimer
    return Merging(node, node, Epoch(2, "two"), clock=claimer.clock)


async def merge(claimer: Site, member: Site) -> Merged:
    return await merging_of(claimer).merge_with(Wire(member))


def test_a_claimer_takes_the_tail_that_it_lacks() -> None:
    """From memory or file of the member, with rolls, numbers of producers and epochs;
    logs too that it never heard of. Then it has as much, and nothing is taken again."""

    async def scenario() -> None:
        leader, claimer = await members(segment_bytes_max=3000)
        for _ in range(9):
            leader.put(7, producer="a-producer")
            await asyncio.sleep(0.01)
        leader.put(700, 2000, log_id=OTHER)
        leader.last_id = 5000
        await stop(leader)
        found = await merge(claimer, leader)
        assert found == Merged(MessageId(5000), lacks_bytes=False)
        assert same(leader, claimer)
        for log_id in (LOG, OTHER):
            number = leader.log(log_id).number
            assert claimer.log(log_id).number == number
            assert claimer.tables.table(number) == leader.tables.table(number)
        assert await merge(claimer, leader) == found
        assert same(leader, claimer)

    run_virtually(scenario())


def test_the_claimer_cuts_where_a_later_leader_went_on() -> None:
    """Its bytes of an older epoch there go; its own high watermark stays."""

    async def scenario() -> None:
        leader, follower = await members()
        disk = follower.fs.snapshot()
        leader.put(2)
        await stop(leader)
        later = await Leader(2, disk, epoch=Epoch(3, "three")).begin()
        later.next_id = 900
        later.put(5)
        await stop(later)
        hw = leader.log().high_watermark
        await merge(leader, later)
        assert leader.content() == later.content()
        assert leader.log().high_watermark == hw
        table = leader.tables.table(leader.log().number)
        assert [each.epoch.number for each in table] == [1, 3]

    run_virtually(scenario())


def test_a_member_that_has_less_changes_nothing() -> None:
    """Only its high watermarks are heard: each of them is true."""

    async def scenario() -> None:
        leader, follower = await members()
        leader.put(2)
        await stop(leader)
        content = leader.content()
        follower.log().set_bound(follower.log().synced_end)
        found = await merge(leader, follower)
        assert found == Merged(MessageId(3), lacks_bytes=False)
        assert leader.content() == content
        assert leader.log().high_watermark == 3 * RECORD

    run_virtually(scenario())


def test_a_high_watermark_above_the_own_end_means_that_bytes_are_missing() -> None:
    """The member cannot give them either."""

    async def scenario() -> None:
        leader, claimer = await members()
        await stop(leader)
        number = leader.log().number
        table = leader.tables.table(number)
        short = Site(3)
        log = short.make_log(LOG, Offset(0), number)
        short.tables.adopt_log(LOG, number, log.log_dir, Offset(0), table[0].epoch)
        found = await merge(short, leader)
        assert not found.lacks_bytes
        assert same(short, leader)
        claimer.log().high_watermark = Offset(9999)
        assert (await merge(short, claimer)).lacks_bytes

    run_virtually(scenario())


def test_a_member_that_is_no_replica_is_not_asked() -> None:
    """A broker of an older version, at an address that was used again."""

    async def scenario() -> None:
        site = Site(2)
        with pytest.raises(MetaqError, match="is not a replica of a set"):
            await merging_of(site).merge_with(Wire(Site(1), has_follow=False))

    run_virtually(scenario())
