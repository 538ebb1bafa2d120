"""A follower and its leader: joins, data, acknowledgements, and what goes wrong."""

import asyncio
from dataclasses import replace

import pytest

from metaq.errors import MetaqError
from metaq.model import LogId
from metaq.replication.election import Flag
from metaq.replication.epochs import Epoch
from metaq.replication.messages import decode_data
from tests.replication.streams import Leader, Site, Stream, same
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until
from tests.storage.support import LOG

OTHER = LogId("other", 3)


async def pair(**system: int) -> tuple[Leader, Site, Stream]:
    """Return a leader with some records, and a follower that has joined."""
    leader = await Leader(**system).begin()
    leader.put(3)
    follower = Site(2, **system)
    stream = Stream(follower, leader)
    await until(lambda: same(leader, follower))
    return leader, follower, stream


def test_a_put_is_acknowledged_when_the_follower_has_synced_it() -> None:
    """Not before, and the bytes, numbers, epochs and high watermarks are equal then."""

    async def scenario() -> None:
        leader = await Leader().begin()
        before = leader.put(3)
        await asyncio.sleep(1)
        assert not before.is_answered
        follower = Site(2)
        stream = Stream(follower, leader)
        await until(lambda: before.is_stored)
        assert follower.content() == leader.content()
        after = leader.put(2, producer="a-producer")
        await until(lambda: after.is_stored)
        await until(lambda: same(leader, follower))
        number = leader.log().number
        assert follower.tables.table(number) == leader.tables.table(number)
        assert follower.events == ["joined"]
        assert follower.last_id == 5
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_a_follower_that_hangs_holds_back_every_acknowledgement() -> None:
    """Its disk hangs: the put waits, and is answered when the disk goes on."""

    async def scenario() -> None:
        leader, follower, stream = await pair()
        follower.workers[0].hang(is_hanging=True)
        ticket = leader.put()
        await asyncio.sleep(2)
        assert leader.log().synced_end > leader.log().high_watermark
        assert not ticket.is_answered
        follower.workers[0].hang(is_hanging=False)
        await until(lambda: ticket.is_stored)
        await stream.end()
        await leader.end()

    run_virtually(scenario())


@pytest.mark.slow
def test_idle_logs_cost_an_empty_message_every_half_second() -> None:
    """Many small logs at rest: nothing but that, and the stream stays up."""

    async def scenario() -> None:
        leader, follower, stream = await pair()
        for number in range(300):
            leader.put(log_id=LogId("many", number))
        await until(lambda: same(leader, follower))
        await asyncio.sleep(1)
        count = len(stream.wire.sent)
        await asyncio.sleep(10)
        idle = stream.wire.datas()[count - 3 :]
        assert 15 <= len(idle) <= 22
        assert not any(each.chunks or each.marks for each in idle[3:])
        assert not leader.streams.stalled()
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_a_high_watermark_without_bytes_comes_a_moment_later() -> None:
    """At once only where gets wait for it."""

    async def lateness(leader: Leader, follower: Site) -> float:
        ticket = leader.put()
        await until(lambda: ticket.is_stored)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        hw = leader.log().high_watermark
        await until(lambda: follower.log().high_watermark == hw)
        return loop.time() - start_s

    async def scenario() -> None:
        leader, follower, stream = await pair()
        await asyncio.sleep(2)
        assert 0.05 < await lateness(leader, follower) < 0.2
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_logs_that_are_made_while_it_follows_come_with_their_numbers() -> None:
    """Also in place of a log of that name that the leader has deleted."""

    async def scenario() -> None:
        leader, follower, stream = await pair()
        ticket = leader.put(2, log_id=OTHER)
        await until(lambda: ticket.is_stored)
        await until(lambda: same(leader, follower))
        assert leader.events.count("caught up 2") >= 2
        number = leader.log(OTHER).number
        assert number is not None
        await leader.tables.bury([number])
        leader.streams.remove_log(number)
        leader.logs.set_logs_aside([OTHER], lambda _error: None)
        await until(lambda: OTHER not in follower.logs.logs())
        again = leader.put(1, log_id=OTHER)
        await until(lambda: again.is_stored)
        await until(lambda: same(leader, follower))
        assert follower.log(OTHER).number not in {number, None}
        assert number in follower.tables.gone
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_it_rolls_where_the_leader_does() -> None:
    """Segments begin at the same offsets, after catching up as well."""

    async def scenario() -> None:
        leader = await Leader(segment_bytes_max=500).begin()
        for _ in range(20):
            leader.put(2)
            await asyncio.sleep(0.01)
        follower = Site(2, segment_bytes_max=1 << 20)
        stream = Stream(follower, leader)
        await until(lambda: leader.log().high_watermark == leader.log().synced_end)
        for _ in range(20):
            ticket = leader.put(2)
            await until(lambda ticket=ticket: ticket.is_stored)
        await until(lambda: same(leader, follower))
        assert len(follower.log().segments) > 10
        await stream.end()
        await leader.end()

    run_virtually(scenario())


@pytest.mark.slow
def test_a_follower_catches_up_from_the_files() -> None:
    """Far more than a message holds, records and batches larger than a chunk among it;
    a batch is remembered when all of it is there."""

    async def scenario() -> None:
        leader = await Leader(in_sync=frozenset({1}), minimum=1).begin()
        for number in range(20):
            leader.put(300, 2000, producer=f"p{number % 3}")
            await asyncio.sleep(0.01)
        leader.put(1, 3 << 20)
        leader.put(900, 2000, producer="large")
        await asyncio.sleep(0.1)
        follower = Site(2)
        stream = Stream(follower, leader)
        await until(lambda: same(leader, follower))
        assert "caught up 2" in leader.events
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_a_follower_from_nothing_names_no_end_that_its_leader_had_passed() -> None:
    """It may have named a later one in a former life: readers would be sent back."""

    async def scenario() -> None:
        leader = await Leader(in_sync=frozenset({1}), minimum=1).begin()
        ticket = leader.put(3)
        await until(lambda: ticket.is_stored)
        follower = Site(2)
        stream = Stream(follower, leader)

        async def joined(epoch: Epoch) -> None:
            await Site.on_joined(follower, epoch)
            stream.wire.stall(is_stalled=True)

        follower.on_joined = joined  # type: ignore[method-assign]
        await until(lambda: follower.events == ["joined"])
        await asyncio.sleep(1)
        assert not follower.log().is_settled
        stream.wire.stall(is_stalled=False)
        await until(lambda: follower.log().is_settled)
        assert follower.log().high_watermark == leader.log().high_watermark > 0
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_a_follower_that_was_killed_joins_again() -> None:
    """Its disk is as the crash left it; a new life with what was synced."""

    async def scenario() -> None:
        leader, follower, stream = await pair()
        for _ in range(5):
            leader.put(4)
        await asyncio.sleep(0.002)
        disk = follower.fs.snapshot()
        await stream.end()
        leader.put(4)
        second = Site(2, disk)
        second.replica = joined_before(second, incarnation=2)
        stream = Stream(second, leader)
        await until(lambda: same(leader, second))
        assert second.events == ["joined"]
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def joined_before(site: Site, *, incarnation: int, flag: Flag = Flag.NONE):
    file = replace(site.replica.file, flag=flag)
    return replace(site.replica, incarnation=incarnation, file=file)


def test_a_follower_that_was_wiped_is_sent_away_and_begins_again() -> None:
    """A member without the bytes that it promised hears of it before it cuts; flagged,
    it takes everything, and the flag ends before its acknowledgement says so."""

    async def scenario() -> None:
        leader, _follower, stream = await pair()
        await stream.end()
        wiped = Site(2)
        wiped.replica = joined_before(wiped, incarnation=2)
        stream = Stream(wiped, leader)
        await asyncio.wait_for(stream.task, 5)
        assert wiped.events == ["lost"]
        assert "lost 2" in leader.events
        assert wiped.replica.file.flag is Flag.INCOMPLETE
        stream = Stream(wiped, leader)
        await until(lambda: same(leader, wiped))
        await until(lambda: wiped.events == ["lost", "joined", "caught up"])
        assert wiped.replica.file.flag is Flag.NONE
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_a_follower_is_sure_of_its_copy_when_it_has_caught_up() -> None:
    """Not when it has joined: it may come from a backup, and lack what it promised."""

    async def scenario() -> None:
        leader, _follower, stream = await pair()
        leader.put(5)
        await stream.end()
        other = Site(3)
        other.replica = replace(other.replica, is_sure=False)
        stream = Stream(other, leader)
        await until(lambda: "joined" in other.events)
        assert not other.replica.is_sure
        await until(lambda: other.replica.is_sure)
        assert same(leader, other)
        assert other.events == ["joined", "caught up"]
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_a_cut_wire_ends_the_stream_and_a_join_goes_on() -> None:
    """Acknowledgements from before count, and nothing is there twice."""

    async def scenario() -> None:
        leader, follower, stream = await pair()
        for turn in range(6):
            tickets = [leader.put(5) for _ in range(4)]
            await asyncio.sleep(0.0004 * turn)
            stream.wire.close("cut")
            with pytest.raises(MetaqError):
                await stream.task
            stream = Stream(follower, leader)
            await until(lambda tickets=tickets: all(t.is_stored for t in tickets))
        await until(lambda: same(leader, follower))
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_a_wire_that_stalls_ends_the_stream_in_seconds() -> None:
    """The leader counts the follower as stalled, and nothing is acknowledged."""

    async def scenario() -> None:
        leader, _follower, stream = await pair()
        stream.wire.stall(is_stalled=True)
        ticket = leader.put()
        with pytest.raises(MetaqError, match="late"):
            await stream.task
        await until(lambda: leader.streams.stalled() == {2})
        assert not ticket.is_answered
        await leader.end()

    run_virtually(scenario())


def test_a_flipped_bit_on_the_wire_is_never_appended() -> None:
    """The stream ends; the next one brings the bytes as they are."""

    async def scenario() -> None:
        leader, follower, stream = await pair()

        def flip(payload: bytes) -> bytes:
            if payload[:4] != b"dat1" or not decode_data(payload).chunks:
                return payload
            return payload[:-1] + bytes([payload[-1] ^ 1])

        stream.wire.change = flip
        ticket = leader.put()
        with pytest.raises(MetaqError, match="checksum"):
            await stream.task
        stream = Stream(follower, leader)
        await until(lambda: ticket.is_stored)
        assert follower.content() == leader.content()
        await stream.end()
        await leader.end()

    run_virtually(scenario())


def test_a_broker_without_a_set_is_not_followed() -> None:
    """It would close the connection at the first word."""

    async def scenario() -> None:
        leader = await Leader().begin()
        stream = Stream(Site(2), leader)
        stream.wire.capabilities = stream.wire.capabilities.__class__("1")
        with pytest.raises(MetaqError, match="is not a replica of a set"):
            await stream.task
        await leader.end()

    run_virtually(scenario())


def test_a_tail_that_the_next_leader_lacks_is_cut() -> None:
    """Then the bytes of the new epoch come in its place, and the table says so."""

    async def scenario() -> None:
        leader, follower, stream = await pair()
        await until(lambda: same(leader, follower))
        await stream.end()
        leader.put(4)
        await asyncio.sleep(0.1)
        await leader.end()
        leader.log().follow()
        await asyncio.sleep(0.1)
        epoch = Epoch(2, "two")
        disk = follower.fs.snapshot()
        new = await Leader(2, disk, epoch=epoch).begin()
        new.next_id = 100
        ticket = new.put(2)
        stream = Stream(leader, new)
        await until(lambda: ticket.is_stored)
        await until(lambda: same(new, leader))
        number = new.log().number
        assert [e.epoch.number for e in leader.tables.table(number)] == [1, 2]
        assert leader.events[-1] == "joined"
        await stream.end()
        await new.end()

    run_virtually(scenario())


def test_a_leader_that_contradicts_the_own_high_watermark_is_refused() -> None:
    """Nothing is cut; the replica freezes."""

    async def scenario() -> None:
        leader, follower, stream = await pair()
        await until(lambda: same(leader, follower))
        await stream.end()
        content = follower.content()
        empty = await Leader(3, in_sync=frozenset({3, 1})).begin()
        number = follower.log().number
        empty.logs.assign_number = lambda log_id, directory, start: (
            empty.tables.adopt_log(log_id, number, directory, start, empty.term.epoch)
            or number
        )
        empty.log()
        stream = Stream(follower, empty)
        await asyncio.wait_for(stream.task, 5)
        assert follower.events[-1] == f"refuse {LOG}"
        assert follower.content() == content
        await empty.end()
        await leader.end()

    run_virtually(scenario())
