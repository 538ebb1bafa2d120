"""Damage on one replica, or on all at different places: served and mended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metaq.errors import DiskError, StorageError
from metaq.fs import UpdateFile
from metaq.model import Offset
from metaq.record.checksum import crc32
from metaq.record.layout import HEADER_BYTES
from metaq.replication import mending
from metaq.replication.messages import TailReply
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Damage
from metaq.storage.span_index import try_read_index
from metaq.storage.watermarks import WATERMARKS_NAME
from tests.replication.replicas import DATA, Replicas, run, soon

PAYLOAD = b"0123456789" * 10
RECORD = HEADER_BYTES + len(PAYLOAD)
COUNT = 12


async def filled(rig: Replicas, count: int = COUNT) -> int:
    """Put records of one size; return who leads."""
    leader = rig.leader()
    for number in range(count):
        await put(rig, b"%010d" % number * 10)
    await rig.equal()
    await soon(lambda: all(is_indexed(rig, n) for n in (1, 2, 3)), rig.describe)
    return leader


async def put(rig: Replicas, payload: bytes = PAYLOAD) -> None:
    """Put a record."""
    await rig.store(payload)


def is_indexed(rig: Replicas, number: int) -> bool:
    """Return whether every byte has a span: headers have no checksum before."""
    log = log_of(rig, number)
    path = log.segments.first.path
    index = try_read_index(rig[number].disk, path, Offset(0))
    return index is not None and index.end_offset == log.synced_end


def log_of(rig: Replicas, number: int) -> PartitionLog:
    log = rig[number].log()
    assert log is not None
    return log


def flip(rig: Replicas, number: int, record: int, byte: int = 50) -> None:
    """Turn a bit of a record over on the disk of a replica."""
    path = log_of(rig, number).segments.first.path
    rig[number].disk.flip_bit(path, 8 * (RECORD * record + byte))


def report(rig: Replicas, number: int) -> tuple[Damage, ...]:
    """Have a replica look at its log as the scrub does; return what it found."""
    log = log_of(rig, number)
    part = log.read(Offset(0), 1 << 20)
    found = part.damage(log.synced_end)
    part.release()
    for each in found:
        log.on_damage(each)
    return found


async def mended(rig: Replicas) -> None:
    """Wait until no replica has damage, and all have the same bytes."""
    numbers = [each.number for each in rig.running]

    def is_mended() -> bool:
        # One that copies all again has none for a moment.
        logs = [rig[n].log() for n in numbers]
        return all(log is not None and not log.damage for log in logs)

    await soon(is_mended, rig.describe)
    await rig.equal()


async def get(rig: Replicas, number: int, record: int) -> bytes:
    return await rig.ask(
        number, b"get test g 0 %d %d 7\r\n" % (record * RECORD, RECORD)
    )


def is_record(answer: bytes, number: int) -> bool:
    return answer.endswith(b"%010d" % number * 10)


@pytest.mark.slow
@pytest.mark.parametrize("byte", [5, 10, 18, 50], ids=["crc", "id", "flag", "payload"])
def test_a_bit_on_each_replica_at_different_places_is_mended(byte: int) -> None:
    """Everything is served all the time, and every copy is good at the end."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        good = rig.bytes_of(leader)
        for number in (1, 2, 3):
            flip(rig, number, 2 * number, byte)
        for number in (1, 2, 3):
            assert report(rig, number)
        for number in (1, 2, 3):
            assert is_record(await get(rig, leader, 2 * number), 2 * number)
        await put(rig)
        await mended(rig)
        assert rig.bytes_of(leader).startswith(good)
        assert {rig[n].node.mender.mended_count for n in (1, 2, 3)} == {1}
        assert rig.record.in_sync == {1, 2, 3}

    run(scenario)


@pytest.mark.slow
def test_neighbours_in_one_span_are_mended_from_each_other() -> None:
    """A copy that is damaged beside a range has that range all the same."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        for number in (1, 2, 3):
            flip(rig, number, number)
        for number in (1, 2, 3):
            report(rig, number)
        await mended(rig)
        assert is_record(await get(rig, leader, 2), 2)

    run(scenario)


@pytest.mark.slow
def test_a_range_that_is_damaged_everywhere_is_said_to_be_lost() -> None:
    """The damage is the answer then, and not a wait; the log goes on."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        for number in (1, 2, 3):
            flip(rig, number, 4)
        report(rig, leader)
        log = log_of(rig, leader)
        await soon(lambda: log.lost, rig.describe)
        answer = await get(rig, leader, 4)
        assert b" 500 " in answer
        assert b"[damaged " in answer
        assert is_record(await get(rig, leader, 5), 5)
        await put(rig)

    run(scenario)


@pytest.mark.slow
def test_a_range_is_not_lost_while_the_copies_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits of most of them may be right; the get is to be repeated."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        count = 0

        async def fail(*_args: object) -> bytes:
            nonlocal count
            count += 1
            raise StorageError("no read now")

        monkeypatch.setattr(mending, "read_unchecked", fail)
        for number in (1, 2, 3):
            flip(rig, number, 4)
        report(rig, leader)
        await soon(lambda: count, rig.describe)
        assert b" 503 " in await get(rig, leader, 4)
        assert not log_of(rig, leader).lost

    run(scenario)


@pytest.mark.slow
def test_a_range_waits_for_a_replica_that_is_away() -> None:
    """Nothing is said to be lost before all were asked; a get is to be repeated."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        away, other = [n for n in (1, 2, 3) if n != leader]
        flip(rig, leader, 4)
        flip(rig, other, 4)
        await rig[away].stop()
        await rig.in_sync(leader, other)
        report(rig, leader)
        assert b" 503 " in await get(rig, leader, 4)
        assert not log_of(rig, leader).lost
        await rig[away].start()
        await mended(rig)
        assert is_record(await get(rig, leader, 4), 4)

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("is_leader", [True, False], ids=["leader", "follower"])
def test_damage_of_a_start_is_mended_and_the_log_opened_again(is_leader: bool) -> None:
    """Its writer was not open; it follows, or leads, with the end that it had."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        number = leader if is_leader else rig.follower()
        await rig[number].stop()
        path = DATA / "test-0" / f"{0:020d}.meta"
        rig[number].disk.flip_bit(path, 8 * (RECORD * 3 + 50))
        await rig[number].start()
        await rig.in_sync(1, 2, 3)
        await mended(rig)
        assert log_of(rig, number).state is not LogState.STOPPED
        await put(rig)
        await rig.equal()

    run(scenario)


@pytest.mark.slow
def test_damage_above_the_high_watermark_of_a_start_is_mended() -> None:
    """It is a second old after a kill; the stopped log hears the leader's."""

    async def scenario(rig: Replicas) -> None:
        await filled(rig)
        follower = rig.follower()
        await rig[follower].kill()
        rig[follower].disk.discard(DATA / WATERMARKS_NAME)
        path = DATA / "test-0" / f"{0:020d}.meta"
        rig[follower].disk.flip_bit(path, 8 * (RECORD * 3 + 50))
        await rig[follower].start()
        await rig.in_sync(1, 2, 3)
        await mended(rig)
        assert log_of(rig, follower).state is not LogState.STOPPED
        await put(rig)
        await rig.equal()

    run(scenario)


@pytest.mark.slow
def test_a_set_whose_copies_are_all_damaged_at_a_start_leads_and_mends() -> None:
    """Each at another place: one leads with a stopped log until that is mended."""

    async def scenario(rig: Replicas) -> None:
        await filled(rig)
        path = DATA / "test-0" / f"{0:020d}.meta"
        for number in (1, 2, 3):
            await rig[number].stop()
            rig[number].disk.flip_bit(path, 8 * (RECORD * number + 50))
        await rig.start()
        await rig.in_sync(1, 2, 3)
        await mended(rig)
        await put(rig)
        await rig.equal()

    run(scenario)


@pytest.mark.slow
def test_a_put_to_a_log_that_waits_for_good_bytes_may_come_again() -> None:
    """It is not stored, and a client sends it until its deadline: 503."""

    async def scenario(rig: Replicas) -> None:
        await filled(rig)
        path = DATA / "test-0" / f"{0:020d}.meta"
        for number in (1, 2, 3):
            await rig[number].stop()
            rig[number].disk.flip_bit(path, 8 * (RECORD + 50))
        await rig.start()
        await rig.in_sync(1, 2, 3)
        answer = await rig.put(rig.leader(), b"more")
        assert answer.startswith(b"result 503 ")
        assert b"partition test-0 is stopped: checksum" in answer

    run(scenario)


@pytest.mark.slow
def test_a_follower_that_lacks_a_damaged_range_gets_it_once_it_is_mended() -> None:
    """It lags in one log for that time, and catches up."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        late, other = [n for n in (1, 2, 3) if n != leader]
        await rig[late].stop()
        await rig.in_sync(leader, other)
        for number in range(COUNT, 2 * COUNT):
            await put(rig, b"%010d" % number * 10)
        flip(rig, leader, COUNT + 3)
        await rig[late].start()
        await rig.in_sync(1, 2, 3)
        await mended(rig)

    run(scenario)


@pytest.mark.slow
def test_a_sealed_segment_that_is_missing_is_made_again() -> None:
    """A hole has an end, and others have the bytes."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        follower = rig.follower()
        own = log_of(rig, follower)
        segment = own.segments.first
        end = own.synced_end
        rig[follower].disk.unlink(segment.path)
        own.on_damage(Damage(segment.path, Offset(0), end, "segment is missing"))
        await mended(rig)
        assert rig.bytes_of(follower) == rig.bytes_of(leader)

    run(scenario)


@pytest.mark.slow
def test_bytes_that_contradict_the_own_index_are_not_believed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that is wrong there spreads nothing; the next one is asked."""

    async def scenario(rig: Replicas) -> None:
        await filled(rig)
        follower = rig.follower()
        flip(rig, follower, 4)
        real, count = mending.ask, 0

        async def ask(*args: Any, **options: Any) -> TailReply:
            nonlocal count
            reply: TailReply = await real(*args, **options)
            chunk = reply.chunk
            count += 1
            if count > 1 or chunk is None:
                return reply
            other = bytes(chunk.size_bytes)
            chunk = replace(chunk, body=(other,), crc32=crc32(other))
            return TailReply(chunk)

        monkeypatch.setattr(mending, "ask", ask)
        assert report(rig, follower)
        await mended(rig)
        assert count == 2
        assert "others have other bytes" in caplog.text

    run(scenario)


@pytest.mark.slow
def test_a_log_without_an_end_makes_its_replica_join_with_nothing() -> None:
    """It is not known how much is missing; it copies all again."""

    async def scenario(rig: Replicas) -> None:
        await filled(rig)
        follower = rig.follower()
        log = log_of(rig, follower)
        path = log.segments.first.path
        log.on_damage(Damage(path, Offset(RECORD), None, "file ends too early"))
        await soon(lambda: rig[follower].log() is not log, rig.describe)
        await rig.in_sync(1, 2, 3)
        await mended(rig)
        await put(rig)

    run(scenario)


@pytest.mark.slow
def test_a_leader_whose_log_has_no_end_hands_over() -> None:
    """Another one leads, and it copies all again."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        epoch = rig[leader].node.epoch
        log = log_of(rig, leader)
        path = log.segments.first.path
        log.on_damage(Damage(path, Offset(RECORD), None, "file ends too early"))
        await rig.led(after=epoch)
        await rig.in_sync(1, 2, 3)
        await mended(rig)

    run(scenario)


@pytest.mark.slow
def test_a_disk_that_refuses_the_bytes_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The range stays damaged until they are written."""

    async def scenario(rig: Replicas) -> None:
        leader = await filled(rig)
        follower = rig.follower()
        flip(rig, follower, 4)
        monkeypatch.setattr("metaq.replication.mending.AGAIN_S", 0.2)
        real = rig[follower].disk.open_update
        failures = 3

        def fail(path: Path, *, create: bool = False) -> UpdateFile:
            nonlocal failures
            if failures and path.suffix == ".meta":
                failures -= 1
                raise DiskError("write", str(path), "EIO")
            return real(path, create=create)

        monkeypatch.setattr(rig[follower].disk, "open_update", fail)
        assert report(rig, follower)
        await mended(rig)
        assert not failures
        assert rig.bytes_of(leader) == rig.bytes_of(follower)

    run(scenario)
