"""One partition that follows a leader, and one that leads."""

from collections.abc import Sequence

import pytest

from metaq.errors import (
    ClosedError,
    MayBeStoredError,
    NoSpaceError,
    OffsetOutOfRangeError,
    StorageError,
)
from metaq.model import MessageId, Offset, SizeBytes
from metaq.record.layout import encode_record
from metaq.storage.append_request import CopiedAppends
from metaq.storage.cut import cut_log
from metaq.storage.log_snapshots import ScrubbedLogs, take_directory_snapshot
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.storage.segment import Damage
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import (
    DATA,
    LOG,
    RECORD,
    content_of,
    log_of,
    opened,
    put,
)
from tests.storage.test_partition_log_batches import known, send


def following(
    fs: FaultyFileSystem, count: int = 1, **system: int
) -> tuple[StorageBench, PartitionLog]:
    """Return a log with so many records that follows."""
    bench = opened(fs, **system)
    log = log_of(bench)
    put(bench, log, count)
    bench.run()
    log.follow()
    bench.run()
    return bench, log


def copy(
    bench: StorageBench,
    log: PartitionLog,
    count: int = 1,
    batches: Sequence[StoredBatch] = (),
) -> Ticket:
    """Append so many records as of the leader."""
    ids = range(bench.next_id, bench.next_id + count)
    bench.next_id += count
    data = b"".join(
        encode_record(b"y" * (RECORD - 20), id=MessageId(each)) for each in ids
    )
    ticket = Ticket()
    log.append_copy(
        CopiedAppends(
            log.next_offset,
            (data,),
            SizeBytes(len(data)),
            count,
            MessageId(ids[-1]),
            batches,
        ),
        ticket,
    )
    return ticket


# -- following


def test_a_copy_is_answered_by_the_sync_and_read_by_the_leaders_word(
    fs: FaultyFileSystem,
) -> None:
    """The leader's high watermark counts as far as the bytes are synced here."""
    bench, log = following(fs)
    ticket = copy(bench, log, 2)
    log.set_bound(Offset(2 * RECORD))
    assert log.high_watermark == RECORD
    bench.run()
    assert ticket.is_stored
    assert log.high_watermark == 2 * RECORD
    log.set_bound(Offset(RECORD))
    assert log.high_watermark == 2 * RECORD
    log.set_bound(Offset(9 * RECORD))
    assert log.high_watermark == 3 * RECORD
    assert len(content_of(log)) == 3 * RECORD
    assert log.record_count == 3
    bench.close()


def test_a_log_that_follows_takes_no_puts(fs: FaultyFileSystem) -> None:
    """Nor does one that leads take copies; a copy has to begin where the log ends."""
    bench, log = following(fs)
    with pytest.raises(ClosedError, match="partition test-0 follows its leader"):
        put(bench, log)
    twice = CopiedAppends(Offset(0), (b"x",), SizeBytes(1), 1, MessageId(9))
    with pytest.raises(StorageError, match=f"expected offset {RECORD}, got 0"):
        log.append_copy(twice, Ticket())
    log.lead()
    with pytest.raises(ClosedError):
        log.append_copy(twice, Ticket())
    assert put(bench, log)
    bench.run()
    bench.close()


def test_a_wait_sleeps_until_the_leader_allows_more(fs: FaultyFileSystem) -> None:
    """It ends when the role changes; one that begins after that sleeps again."""
    bench, log = following(fs)
    woken: list[str] = []
    log.wait(log.high_watermark, lambda: woken.append("data"))
    copy(bench, log)
    bench.run()
    assert not woken
    log.set_bound(Offset(2 * RECORD))
    assert woken == ["data"]
    log.wait(log.high_watermark, lambda: woken.append("role"))
    log.lead()
    assert woken == ["data", "role"]
    log.wait(log.high_watermark, lambda: woken.append("role again"))
    log.follow()
    assert woken == ["data", "role", "role again"]
    bench.close()


def test_segments_begin_where_those_of_the_leader_do(fs: FaultyFileSystem) -> None:
    """Neither their size nor an order that comes twice makes others."""
    bench, log = following(fs, segment_bytes_max=4 * RECORD)
    for _ in range(9):
        copy(bench, log)
    log.roll(log.next_offset)
    log.roll(log.next_offset)
    copy(bench, log)
    bench.run()
    log.roll(log.next_offset)
    bench.run()
    assert [each.base_offset for each in log.segments] == [0, 10 * RECORD, 11 * RECORD]
    bench.close()
    again = opened(fs, segment_bytes_max=4 * RECORD)
    assert [each.base_offset for each in log_of(again).segments] == [
        0,
        10 * RECORD,
        11 * RECORD,
    ]
    again.close()


def test_a_roll_after_a_copy_without_room_is_ordered_again(
    fs: FaultyFileSystem,
) -> None:
    """It would come before that copy, where no segment of the leader begins."""
    bench, log = following(fs)
    fs.set_capacity(0)
    refused = copy(bench, log)
    log.roll(log.next_offset)
    bench.run()
    assert isinstance(refused.error, NoSpaceError)
    fs.set_capacity(1 << 40)
    bench.run()
    copy(bench, log)
    log.roll(log.next_offset)
    copy(bench, log)
    bench.run()
    assert [each.base_offset for each in log.segments] == [0, 2 * RECORD]
    bench.close()


def test_a_roll_that_finds_no_room_comes_before_the_next_copy(
    fs: FaultyFileSystem,
) -> None:
    """The copies after it are refused until there is room, and lie where they would."""
    bench, log = following(fs)
    fs.set_capacity(0)
    log.roll(log.next_offset)
    bench.run()
    assert len(log.segments) == 1
    refused = copy(bench, log)
    bench.run()
    assert isinstance(refused.error, NoSpaceError)
    assert log.next_offset == RECORD
    fs.set_capacity(1 << 40)
    bench.run()
    copied = copy(bench, log)
    bench.run()
    assert copied.is_stored
    assert [each.base_offset for each in log.segments] == [0, RECORD]
    bench.close()


def test_an_order_to_roll_that_found_no_room_ends_with_a_cut(
    fs: FaultyFileSystem,
) -> None:
    """It was about an end that another leader has not: later copies do not roll."""
    bench, log = following(fs, 1)
    copy(bench, log, 2)
    bench.run()
    fs.set_capacity(0)
    log.roll(log.next_offset)
    bench.run()
    fs.set_capacity(1 << 40)
    done: list[Exception | None] = []
    cut_log(bench.manager, LOG, Offset(RECORD), done.append)
    bench.run()
    assert done == [None]
    for _ in range(4):
        copy(bench, log)
        bench.run()
    assert [each.base_offset for each in log.segments] == [0]
    bench.close()


def test_a_log_that_has_passed_over_copies_does_not_roll_where_it_ends(
    fs: FaultyFileSystem,
) -> None:
    """It was stopped while they came; a segment of its leader begins after them, and
    the first copy of that comes while the log is opened again."""
    bench, log = following(fs, 2)
    done: list[Exception | None] = []
    cut_log(bench.manager, LOG, log.next_offset, done.append)
    log.roll(Offset(5 * RECORD))
    with pytest.raises(ClosedError, match="follows its leader"):
        copy(bench, log)
    bench.run()
    assert done == [None]
    copy(bench, log, 3)
    log.roll(log.next_offset)
    copy(bench, log)
    bench.run()
    assert [each.base_offset for each in log.segments] == [0, 5 * RECORD]
    bench.close()


def test_a_log_that_leads_again_rolls_by_size(fs: FaultyFileSystem) -> None:
    """A segment that became too large while it followed ends before the next put."""
    bench, log = following(fs, segment_bytes_max=2 * RECORD)
    for _ in range(4):
        copy(bench, log)
    bench.run()
    assert len(log.segments) == 1
    log.lead()
    log.set_bound(Offset(5 * RECORD))
    put(bench, log)
    bench.run()
    assert [each.base_offset for each in log.segments] == [0, 5 * RECORD]
    bench.close()


def test_notes_come_with_the_bytes_and_stay_over_a_restart(
    fs: FaultyFileSystem,
) -> None:
    """Several with one copy; as in the log that leads."""
    leader = opened(FaultyFileSystem())
    batches = [send(leader, 3 * number)[0] for number in range(3)]
    leader.run()
    data = content_of(log_of(leader))
    leader.close()
    bench = opened(fs)
    log = log_of(bench)
    log.follow()
    ticket = Ticket()
    log.append_copy(
        CopiedAppends(
            Offset(0), (data,), SizeBytes(len(data)), 9, MessageId(9), batches
        ),
        ticket,
    )
    bench.run()
    assert ticket.is_stored
    assert list(log.producers) == batches
    bench.close()
    again = opened(fs)
    assert list(log_of(again).producers) == batches
    assert content_of(log_of(again)) == data
    again.close()


# -- a change of role


def test_no_offset_answers_a_put_of_another_role(fs: FaultyFileSystem) -> None:
    """Other bytes come to its offsets, and the leader's word passes them."""
    bench = opened(fs)
    log = log_of(bench)
    ticket = put(bench, log)
    log.follow()
    assert isinstance(ticket.error, MayBeStoredError)
    bench.run()
    copy(bench, log)
    bench.run()
    log.set_bound(Offset(2 * RECORD))
    assert log.high_watermark == 2 * RECORD
    assert not ticket.is_stored
    assert log.record_count == 2
    bench.close()


def test_a_batch_of_another_role_is_known_by_its_bytes_and_never_by_its_note(
    fs: FaultyFileSystem,
) -> None:
    """While the log follows it is in doubt; when it leads it waits for the copies."""
    bench = opened(fs)
    log = log_of(bench)
    batch, ticket = send(bench, 0)
    log.follow()
    bench.run()
    assert isinstance(ticket.error, MayBeStoredError)
    assert known(log, batch)
    repeat = Ticket()
    log.join(batch, repeat)
    assert isinstance(repeat.error, MayBeStoredError)
    log.lead()
    bench.run()
    waiting = Ticket()
    log.join(batch, waiting)
    assert not waiting.is_answered
    log.set_bound(batch.end_offset)
    assert waiting.is_stored
    bench.close()


def test_a_put_without_room_leaves_no_note_in_the_other_role(
    fs: FaultyFileSystem,
) -> None:
    """Its bytes are not there, so other bytes at its offset must not answer it."""
    bench = opened(fs)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    batch, ticket = send(bench, 0)
    log.follow()
    fs.set_capacity(0)
    bench.run()
    fs.set_capacity(1 << 40)
    assert isinstance(ticket.error, MayBeStoredError)
    assert not known(log, batch)
    assert log.next_offset == RECORD
    bench.close()


def test_to_follow_twice_is_to_follow_once(fs: FaultyFileSystem) -> None:
    """A step-down that was begun is done again."""
    bench, log = following(fs)
    log.follow()
    bench.run()
    assert log.state is LogState.FOLLOWING
    assert copy(bench, log)
    bench.run()
    bench.close()


# -- leading, with copies elsewhere


def test_the_high_watermark_waits_for_the_copies(fs: FaultyFileSystem) -> None:
    """It stops where an append ends, however much of the next one they have."""
    bench, log = following(fs)
    log.lead()
    first, second = put(bench, log, 2), put(bench, log, 3)
    bench.run()
    assert not first.is_answered
    assert log.high_watermark == RECORD
    log.set_bound(Offset(2 * RECORD))
    assert log.high_watermark == RECORD
    log.set_bound(Offset(5 * RECORD))
    assert log.high_watermark == 3 * RECORD
    assert (first.is_stored, second.is_answered) == (True, False)
    log.set_bound(Offset(6 * RECORD))
    assert second.is_stored
    assert len(content_of(log)) == 6 * RECORD
    bench.close()


def test_what_a_new_leader_found_is_readable_in_one_step(fs: FaultyFileSystem) -> None:
    """It does not know where appends end in it."""
    bench, log = following(fs)
    copy(bench, log, 2), copy(bench, log, 2)
    bench.run()
    log.lead()
    ticket = put(bench, log)
    bench.run()
    log.set_bound(Offset(3 * RECORD))
    assert log.high_watermark == RECORD
    log.set_bound(Offset(5 * RECORD))
    assert log.high_watermark == 5 * RECORD
    with pytest.raises(OffsetOutOfRangeError):
        log.read(Offset(5 * RECORD), 1)
    assert not ticket.is_answered
    log.set_bound(Offset(6 * RECORD))
    assert ticket.is_stored
    bench.close()


def test_a_put_that_waits_too_long_for_copies_ends_in_doubt(
    fs: FaultyFileSystem,
) -> None:
    """The high watermark passes it later; sent again it is answered then, and once."""
    bench, log = following(fs)
    log.lead()
    batch, ticket = send(bench, 0)
    later = put(bench, log)
    bench.run()
    log.end_in_doubt("a copy is late", until=batch.end_offset)
    assert isinstance(ticket.error, MayBeStoredError)
    repeat = Ticket()
    log.join(batch, repeat)
    assert log.high_watermark == RECORD
    log.set_bound(batch.end_offset)
    assert log.high_watermark == batch.end_offset
    assert repeat.is_stored
    assert not later.is_answered
    bench.close()


def test_nothing_goes_that_copies_may_lack(fs: FaultyFileSystem) -> None:
    """Retention and the scrub see sealed segments below the high watermark only."""
    bench, log = following(fs, 2, segment_bytes_max=2 * RECORD)
    log.lead()
    for _ in range(2):
        put(bench, log, 2)
        bench.run()
    assert len(log.segments) == 4
    assert log.high_watermark == 2 * RECORD

    def seen_by_retention() -> list[int]:
        (shown,) = take_directory_snapshot(log.log_dir, [log], bench.config, ()).logs
        return [each.base_offset for each in shown.sealed]

    def seen() -> list[int]:
        sealed = seen_by_retention()
        targets = ScrubbedLogs(bench.manager.logs()).targets(log.log_id)
        assert [each.segment.base_offset for each in targets] == sealed
        return sealed

    assert seen() == [0]
    log.set_bound(Offset(5 * RECORD))
    assert seen() == [0, 2 * RECORD]
    log.follow()
    assert seen_by_retention() == []
    bench.run()
    bench.close()


def test_damage_stops_a_log_that_follows(fs: FaultyFileSystem) -> None:
    """Copies are refused; the role changes without it."""
    bench, log = following(fs)
    path = log.segments.active.path
    log.on_damage(Damage(path, Offset(0), Offset(RECORD), "checksum mismatch"))
    assert log.state is LogState.STOPPED
    with pytest.raises(StorageError, match="is stopped"):
        copy(bench, log)
    log.lead()
    log.follow()
    assert log.state is LogState.STOPPED
    bench.close()
    assert fs.exists(DATA / "test-0")


# -- between the log and its replica


def test_every_move_of_the_ends_is_reported_once(fs: FaultyFileSystem) -> None:
    """After the answers, so that a bound may be set in the call."""
    bench, log = following(fs)
    moves: list[tuple[int, int]] = []

    def allow(log: PartitionLog) -> None:
        moves.append((log.synced_end // RECORD, log.high_watermark // RECORD))
        log.set_bound(log.synced_end)

    log.lead()
    log.on_moved = allow
    ticket = put(bench, log)
    assert moves == []
    bench.run()
    assert moves == [(2, 1), (2, 2)]
    assert ticket.is_stored
    log.set_bound(Offset(9 * RECORD))
    bench.run()
    assert len(moves) == 2, "nothing has moved"
    log.follow()
    log.on_moved = lambda log: moves.append((0, log.high_watermark // RECORD))
    copy(bench, log)
    bench.run()
    log.set_bound(Offset(3 * RECORD))
    assert moves[2:] == [(0, 2), (0, 3)]
    bench.close()


def test_a_log_answers_for_its_high_watermark_when_it_is_no_older_one(
    fs: FaultyFileSystem,
) -> None:
    """It has what the leader had at the join; or it leads, and has committed all that
    it found. That of a single broker answers always."""
    bench = opened(fs)
    assert log_of(bench).is_settled
    bench.close()
    bench = StorageBench(fs, bench.config)
    bench.manager.open(numbers={LOG: 7})
    log = bench.manager.get_or_create(LOG, bench.config.topic("test"), number=7)
    assert not log.is_settled
    copy(bench, log, 2)
    bench.run()
    log.set_bound(Offset(RECORD))
    assert not log.is_settled, "nothing was joined"
    log.set_settled_from(Offset(2 * RECORD))
    log.set_bound(Offset(RECORD))
    assert not log.is_settled
    log.set_bound(Offset(2 * RECORD))
    assert log.is_settled
    copy(bench, log)
    bench.run()
    log.lead()
    put(bench, log)
    bench.run()
    assert not log.is_settled
    log.set_bound(Offset(2 * RECORD))
    assert not log.is_settled
    log.set_bound(Offset(3 * RECORD))
    assert log.is_settled
    log.follow()
    assert log.is_settled
    bench.run()
    bench.close()


def test_a_high_watermark_is_lowered_by_force(fs: FaultyFileSystem) -> None:
    """Of a log that follows: then it may be cut there, and grows again."""
    bench, log = following(fs, 3)
    log.set_bound(Offset(9 * RECORD))
    log.lower_high_watermark(Offset(RECORD))
    assert log.high_watermark == RECORD
    copy(bench, log)
    bench.run()
    assert log.high_watermark == RECORD, "the former leader's word counts no more"
    log.lower_high_watermark(Offset(2 * RECORD))
    assert log.high_watermark == RECORD
    log.set_bound(Offset(4 * RECORD))
    assert log.high_watermark == 4 * RECORD
    log.lead()
    with pytest.raises(StorageError, match="partition test-0 follows no leader"):
        log.lower_high_watermark(Offset(0))
    bench.run()
    bench.close()


def test_of_a_log_that_follows_goes_what_its_leader_has_not(
    fs: FaultyFileSystem,
) -> None:
    """By the next run of retention, whatever its age; nothing else by any policy."""
    bench, log = following(fs)
    for _ in range(3):
        log.roll(log.next_offset)
        copy(bench, log)
        bench.run()
    log.set_bound(Offset(4 * RECORD))

    def run() -> list[int]:
        job = bench.manager.begin_retention(["test"])
        assert job is not None
        job()
        bench.run()
        return [each.base_offset // RECORD for each in log.segments]

    assert run() == [0, 1, 2, 3]
    log.leader_start = Offset(2 * RECORD + 1)
    assert run() == [2, 3]
    assert log.log_start_offset == 2 * RECORD
    log.leader_start = Offset(9 * RECORD)
    assert run() == [3]
    bench.close()


@pytest.mark.parametrize("event", ["damage", "cut"])
def test_a_run_of_retention_ends_where_a_log_changes(
    fs: FaultyFileSystem, event: str
) -> None:
    """Its segments are those that were shown no more."""
    bench, log = following(fs)
    log.roll(log.next_offset)
    copy(bench, log)
    bench.run()
    log.set_bound(Offset(RECORD))
    log.leader_start = Offset(RECORD)
    job = bench.manager.begin_retention(["test"])
    assert job is not None
    if event == "damage":
        log.on_damage(Damage(log.segments.active.path, Offset(0), None, "mismatch"))
    else:
        log.begin_reopen()
    job()
    bench.run()
    assert len(log.segments) == 2
    bench.close()
