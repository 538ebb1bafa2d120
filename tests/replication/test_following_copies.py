"""A follower's stream: joins, appends, refusals, and what is left of a broken one."""

import asyncio
import errno
from dataclasses import replace
from typing import Any

import pytest

from metaq.errors import (
    ClosedError,
    ConnectionLostError,
    MetaqError,
    NoSpaceError,
    RequestTimeoutError,
    StorageError,
)
from metaq.model import LogId, Offset
from metaq.protocol.version import Capabilities
from metaq.replication.election import Flag
from metaq.replication.epochs import NO_EPOCH, Epoch
from metaq.replication.following import PULL_S, PULLS
from metaq.replication.progress import Quorum
from metaq.storage.log_state import LogState
from metaq.storage.segment import Damage
from tests.replication.stream_rig import E3, RECORD, Copy, Stage, play
from tests.storage.support import DATA, LOG, OTHER


async def pair(stage: Stage, count: int = 3) -> tuple[Copy, Any]:
    """Return a leader with so many records, and a follower that has all of them."""
    leader = await stage.lead()
    follower = stage.follow()
    for _ in range(count):
        leader.put()
    await stage.until(lambda: stage.is_equal(follower))
    return leader, follower


async def ended(stage: Stage, follower: Any) -> MetaqError:
    """Return the error with which a stream ends."""
    await stage.until(follower.task.done)
    assert isinstance(follower.error, MetaqError), follower.error
    return follower.error


# -- what a stream brings


def test_all_that_is_put_is_stored_here_with_notes_and_ids() -> None:
    """Byte for byte, in segments with the same offsets, over a restart too."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead()
        follower = stage.follow()
        for count in (1, 3, 2, 1, 4, 1):
            ticket = leader.put(count, producer="p" if count > 1 else "")
            leader.put(count, OTHER)
            await stage.until(lambda: ticket.is_stored)  # noqa: B023
        await stage.until(lambda: stage.is_equal(follower))
        copy = follower.copy
        for log_id in (LOG, OTHER):
            mine, theirs = copy.log(log_id), leader.log(log_id)
            assert copy.content(log_id) == leader.content(log_id)
            bases = [each.base_offset for each in theirs.segments]
            assert [each.base_offset for each in mine.segments] == bases
            assert len(bases) > 2
            assert [*mine.producers] == [*theirs.producers]
            assert mine.record_count == theirs.record_count
            assert mine.number == theirs.number
        assert follower.last_id == leader.bench.next_id - 1
        data = copy.content()
        await follower.end()
        again = stage.copy(await stage.close(copy))
        assert again.content() == data
        assert [*again.log().producers] == [*leader.log().producers]

    play(scenario, segment_bytes_max=4 * RECORD)


@pytest.mark.slow
def test_some_pulls_are_always_on_their_way() -> None:
    """No more, and each acknowledges what was synced since the one before."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 1)
        for _ in range(20):
            leader.put()
            await stage.until(lambda: stage.is_equal(follower))
        pulls = follower.wire.pulls()
        assert len(pulls) - len(follower.wire.data) == PULLS
        ends = [end for pull in pulls for _number, end in pull.acks]
        assert ends == sorted(ends)
        assert ends[-1] == 21 * RECORD
        follower.copy.is_stalled = True
        leader.put()
        await stage.until(lambda: leader.log().synced_end == 22 * RECORD)
        await stage.until(lambda: follower.copy.log().next_offset == 22 * RECORD)
        late = follower.wire.pulls()[len(pulls) :]
        assert all(end < 22 * RECORD for pull in late for _number, end in pull.acks)
        follower.copy.is_stalled = False
        await stage.until(lambda: stage.is_equal(follower))

    play(scenario)


def test_a_log_is_made_and_deleted_while_it_is_followed() -> None:
    """With its number, before its first byte; gone means moved aside, and not back."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage)
        third = LogId("more", 0)
        ticket = leader.put(2, third)
        await stage.until(lambda: ticket.is_stored)
        await stage.until(lambda: stage.is_equal(follower))
        copy, number = follower.copy, leader.log(third).number
        assert copy.log(third).number == number
        assert copy.content(third) == leader.content(third)
        assert number is not None
        await leader.tables.bury([number])
        await stage.until(lambda: third not in copy.logs.logs())
        assert number in copy.tables.gone
        aside = copy.log().log_dir.path / "aside"
        await stage.until(lambda: copy.fs.is_directory(aside))
        leader.put()
        await stage.until(lambda: copy.log().synced_end == leader.log().next_offset)
        assert follower.error is None

    play(scenario)


def test_a_log_that_is_made_again_is_another_one() -> None:
    """Its former copy goes aside, and the new one has the new number."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage)
        number = leader.log().number
        ticket = await replace_log(stage, leader)
        await stage.until(lambda: ticket.is_stored)
        await stage.until(lambda: stage.is_equal(follower))
        assert follower.copy.log().number == leader.log().number != number
        assert follower.copy.content() == leader.content()

    play(scenario)


# -- joins


def test_a_join_cuts_what_the_leader_lacks_and_fetches_the_rest() -> None:
    """At the point where both part, not below its high watermark; epochs follow."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 3)
        copy = follower.copy
        await follower.end()
        stage.leader.end()
        await stage.lead(copy, in_sync=(2,), epoch=Epoch(3, "alone"))
        theirs = copy.put(1)
        await stage.until(lambda: copy.log().synced_end == 4 * RECORD)
        assert not theirs.is_answered
        stage.leader.end()
        await stage.lead(leader, in_sync=(1,), epoch=Epoch(4, "b"))
        ours = leader.put(2)
        await stage.until(lambda: ours.is_stored)
        again = stage.follow(copy, epoch=Epoch(4, "b"))
        await stage.until(lambda: stage.is_equal(again))
        assert copy.content() == leader.content()
        (number,) = copy.tables.numbers.values()
        table = copy.tables.table(number)
        assert table == leader.tables.table(number)
        assert [each.epoch.number for each in table] == [2, 4]
        assert again.saves == ["joined"]

    play(scenario)


def test_a_log_that_contradicts_the_own_high_watermark_is_refused() -> None:
    """Nothing is cut then, and the stream ends well: there is nothing to try again."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 3)
        copy = follower.copy
        await follower.end()
        data = copy.content()
        other = stage.copy(first=1)
        await stage.lead(other, in_sync=(1,), epoch=E3)
        assert other.log().number == copy.log().number
        again = stage.follow(copy, epoch=E3)
        await stage.until(again.task.done)
        assert again.error is None
        assert again.refused == [LOG]
        assert copy.content() == data
        assert leader.content() == data

    play(scenario)


def test_a_copy_without_logs_gets_all_of_them_and_is_complete_then() -> None:
    """The flag goes before the acknowledgement that counts, and once."""

    async def scenario(stage: Stage) -> None:
        leader = await stage.lead(in_sync=(1,))
        for _ in range(3):
            leader.put(2)
            last = leader.put(1, OTHER)
        await stage.until(lambda: last.is_stored)
        new = stage.follow(flag=Flag.INCOMPLETE)
        await stage.until(lambda: "complete" in new.saves)
        assert new.copy.log().synced_end == 6 * RECORD
        assert stage.leader.caught_up == []
        await stage.until(lambda: stage.leader.caught_up)
        await stage.until(lambda: stage.is_equal(new))
        assert new.saves == ["joined", "complete"]
        assert new.replica.file.flag is Flag.NONE
        assert new.copy.content() == leader.content()

    play(scenario)


def test_a_copy_that_may_lack_bytes_begins_again() -> None:
    """Its logs are moved aside, whatever is in them: kept until it is complete."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 3)
        await follower.end()
        copy = follower.copy
        again = stage.follow(copy, flag=Flag.INCOMPLETE)
        await stage.until(lambda: "complete" in again.saves)
        await stage.until(lambda: stage.is_equal(again))
        assert copy.content() == leader.content()
        assert copy.log().number == leader.log().number
        assert copy.fs.is_directory(DATA / "aside")

    play(scenario)


def test_a_member_that_lost_bytes_hears_so_before_it_cuts() -> None:
    """It declares itself incomplete, and the leader hears of it too."""

    async def scenario(stage: Stage) -> None:
        _leader, follower = await pair(stage, 3)
        await follower.end()
        await stage.close(follower.copy)
        before = len(stage.leader.caught_up)
        wiped = stage.follow(stage.copy())
        await stage.until(wiped.task.done)
        assert wiped.error is None
        assert wiped.is_lost
        assert wiped.replica.file.flag is Flag.INCOMPLETE
        assert wiped.saves == []
        assert stage.leader.lost == [2]
        assert len(stage.leader.caught_up) == before

    play(scenario)


def test_a_torn_tail_that_was_promised_is_a_loss() -> None:
    """Recovery cuts it, and the join finds that the copy ends too early."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 3)
        await follower.end()
        path = follower.copy.log().segments.active.path
        disk = await stage.close(follower.copy)
        disk.write_atomically(path, disk.synced_bytes(path)[: 2 * RECORD + 50])
        torn = stage.follow(stage.copy(disk))
        await stage.until(torn.task.done)
        assert torn.is_lost
        assert stage.leader.lost == [2]
        waits = leader.put()
        await asyncio.sleep(1)
        assert not waits.is_answered

    play(scenario)


def test_nothing_that_a_log_lacks_at_its_leader_is_deleted() -> None:
    """Unless its number is gone: absence deletes nothing."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 1)
        copy, extra = follower.copy, LogId("extra", 0)
        ticket = leader.put(1, extra)
        await stage.until(lambda: ticket.is_stored)
        await follower.end()
        bare = stage.copy()
        await stage.lead(bare, in_sync=(1,), epoch=E3)
        again = stage.follow(copy, epoch=E3)
        await stage.until(lambda: stage.leader.caught_up)
        assert set(copy.logs.logs()) == {LOG, extra}
        await again.end()
        numbers = [copy.log(LOG).number, copy.log(extra).number]
        await bare.tables.bury([each for each in numbers if each is not None])
        last = stage.follow(copy, epoch=E3)
        await stage.until(lambda: len(last.saves) == 1)
        assert not copy.logs.logs()

    play(scenario)


def test_bytes_below_the_leaders_log_start_are_dropped_with_the_copy() -> None:
    """A copy that ends before there begins again at the leader's log start."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 2)
        await follower.end()
        stage.leader.set_quorum(Quorum(1, frozenset({1}), 1))
        for _ in range(6):
            ticket = leader.put()
            await stage.until(lambda: ticket.is_stored)  # noqa: B023
        remove_first(leader, 2)
        await stage.until(lambda: leader.log().log_start_offset == 4 * RECORD)
        again = stage.follow(follower.copy)
        await stage.until(lambda: stage.is_equal(again))
        assert again.copy.log().log_start_offset == 4 * RECORD
        assert again.copy.content() == leader.content()

    play(scenario, segment_bytes_max=2 * RECORD)


# -- what ends a stream


def test_data_of_an_epoch_that_is_over_is_not_appended() -> None:
    """A promise to a claimer ends the stream, at once or while a log is made."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage)
        end = follower.copy.log().next_offset
        follower.replica = replace(follower.replica, stream=NO_EPOCH)
        leader.put()
        assert isinstance(await ended(stage, follower), ClosedError)
        assert follower.copy.log().next_offset == end

        again = stage.follow(follower.copy)
        await stage.until(lambda: stage.is_equal(again))
        again.copy.is_stalled = True
        await replace_log(stage, leader)
        await stage.until(lambda: any(each.chunks for each in again.wire.data[-2:]))
        await asyncio.sleep(0.1)
        again.replica = replace(again.replica, stream=NO_EPOCH)
        again.copy.is_stalled = False
        assert isinstance(await ended(stage, again), ClosedError)
        assert all(not log.next_offset for log in again.copy.logs.logs().values())

    play(scenario)


def test_without_space_a_copy_is_refused_and_comes_again() -> None:
    """Bytes that were written count; no other is acknowledged, and no note stays."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage)
        copy = follower.copy
        copy.fs.set_capacity(0)
        ticket = leader.put(2, producer="p")
        error = await ended(stage, follower)
        assert isinstance(error, NoSpaceError)
        assert copy.log().next_offset == 3 * RECORD
        assert [*copy.log().producers] == []
        assert not ticket.is_answered
        copy.fs.set_capacity(1 << 40)
        again = stage.follow(copy)
        await stage.until(lambda: ticket.is_stored)
        await stage.until(lambda: stage.is_equal(again))
        assert [*copy.log().producers] == [ticket.batch]

    play(scenario)


def test_a_disk_that_fails_ends_the_stream() -> None:
    """Its directory is offline, and nothing of it is acknowledged any more."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage)
        copy = follower.copy
        copy.fs.fail_at(copy.fs.calls + 1, errno.EIO)
        ticket = leader.put()
        error = await ended(stage, follower)
        assert isinstance(error, StorageError)
        assert copy.log().state is LogState.OFFLINE
        again = stage.follow(copy)
        await stage.until(again.task.done)
        assert isinstance(again.error, StorageError)
        assert not ticket.is_answered

    play(scenario)


@pytest.mark.slow
def test_a_log_that_is_damaged_here_goes_on_unless_it_is_stopped() -> None:
    """The others go on; the leader sees that one that is stopped stays where it is."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage)
        first = leader.put(1, OTHER)
        await stage.until(lambda: first.is_stored)
        log = follower.copy.log()
        path = log.segments.active.path
        log.on_damage(Damage(path, Offset(0), Offset(RECORD), "checksum mismatch"))
        copied = leader.put()
        await stage.until(lambda: copied.is_stored)
        log.on_damage(Damage(path, Offset(0), None, "file ends too early"))
        lost, kept = leader.put(), leader.put(1, OTHER)
        await stage.until(lambda: kept.is_stored)
        assert not lost.is_answered
        await stage.until(lambda: stage.leader.streams.stalled() == {2})
        assert follower.error is None

    play(scenario)


def test_a_broker_that_is_no_replica_is_not_followed() -> None:
    """The connection is closed, and nothing is sent."""

    async def scenario(stage: Stage) -> None:
        await stage.lead()
        wire = stage.wire()
        wire.capabilities = Capabilities("1.4")
        follower = stage.follow(wire=wire)
        error = await ended(stage, follower)
        assert str(error) == "meta://leader:8123 is not a replica of a set"
        assert wire.sent == []
        assert not wire.is_open

    play(scenario)


@pytest.mark.slow
def test_a_leader_that_is_silent_is_left() -> None:
    """After ten times the interval in which it sends; and one that closes, at once."""

    async def scenario(stage: Stage) -> None:
        _leader, follower = await pair(stage)
        follower.wire.is_stalled = True
        await stage.until(follower.task.done, wait_s=PULL_S + 1)
        assert isinstance(follower.error, RequestTimeoutError)
        again = stage.follow(follower.copy)
        await stage.until(lambda: again.saves)
        again.wire.close("cut")
        assert isinstance(await ended(stage, again), ConnectionLostError)

    play(scenario)


def test_a_cut_that_is_on_its_way_comes_before_the_next_join() -> None:
    """Another leader may have these bytes: what is being cut is not promised to it."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 3)
        copy = follower.copy
        await follower.end()
        stage.leader.end()
        await stage.lead(copy, in_sync=(1,), epoch=E3)
        third = stage.follow(epoch=E3)
        copy.put(1)
        await stage.until(lambda: stage.is_equal(third))
        await third.end()
        stage.leader.end()
        copy.log().lower_high_watermark(Offset(3 * RECORD))
        await stage.lead(leader, in_sync=(1,), epoch=Epoch(4, "b"))
        leader.put(1)
        first = stage.follow(copy, epoch=Epoch(4, "b"))
        await stage.until(lambda: first.wire.sent)
        copy.is_stalled = True
        await stage.until(lambda: copy.log().state is LogState.REOPENING)
        await first.end()
        stage.leader.end()
        await stage.lead(third.copy, in_sync=(1,), epoch=Epoch(5, "c"))
        again = stage.follow(copy, epoch=Epoch(5, "c"))
        await asyncio.sleep(1)
        copy.is_stalled = False
        await stage.until(lambda: stage.is_equal(again))
        assert again.error is None
        assert copy.content() == third.copy.content()

    play(scenario)


@pytest.mark.parametrize("steps", range(0, 40, 3))
def test_a_join_that_is_called_off_can_be_done_again(steps: int) -> None:
    """After any step of it: cuts, logs begun again, new ones, and asides."""

    async def scenario(stage: Stage) -> None:
        leader, follower = await pair(stage, 3)
        copy, extra = follower.copy, LogId("extra", 0)
        for log_id in (OTHER, extra):
            ticket = leader.put(1, log_id)
            await stage.until(lambda: ticket.is_stored)  # noqa: B023
        await stage.until(lambda: stage.is_equal(follower))
        await follower.end()
        stage.leader.end()
        await stage.lead(copy, in_sync=(2,), epoch=Epoch(3, "alone"))
        copy.put(1)  # is cut
        await stage.until(lambda: copy.log().synced_end == 4 * RECORD)
        stage.leader.end()
        await stage.lead(leader, in_sync=(1,), epoch=Epoch(4, "b"))
        numbers = [leader.log(each).number for each in (OTHER, extra)]
        await leader.tables.bury([each for each in numbers if each is not None])
        gone: list[object] = []
        leader.logs.set_logs_aside((OTHER, extra), gone.append)
        await stage.until(lambda: gone)
        for log_id in (OTHER, LogId("new", 0)):
            ticket = leader.put(1, log_id)
            await stage.until(lambda: ticket.is_stored)  # noqa: B023
        first = stage.follow(copy, epoch=Epoch(4, "b"))
        await stage.until(lambda: first.wire.sent)
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        await first.end()
        again = stage.follow(copy, epoch=Epoch(4, "b"))
        await stage.until(lambda: stage.is_equal(again))
        for log_id in leader.logs.logs():
            assert copy.content(log_id) == leader.content(log_id)
        assert set(copy.tables.numbers) == set(leader.logs.logs())

    play(scenario)


async def replace_log(stage: Stage, leader: Copy) -> Any:
    """Delete a log, and put to the next one of its name."""
    number, gone = leader.log().number, list[object]()
    assert number is not None
    await leader.tables.bury([number])
    leader.logs.delete_topic("test", gone.append)
    await stage.until(lambda: gone)
    assert gone == [None]
    return leader.put(1)


def remove_first(copy: Copy, count: int) -> None:
    """Remove the first segments of a log, as retention does."""
    for segment in copy.log().segments.sealed[:count]:
        copy.fs.unlink(segment.path)
        copy.log().on_removed(segment, 0)
