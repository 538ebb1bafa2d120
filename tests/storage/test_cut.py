"""The end of a log is cut off: what stays, after any failure, kill or power cut."""

import errno
import random
from collections.abc import Callable

import pytest

from metaq.config.settings import SPAN_BYTES_MIN
from metaq.errors import ClosedError, DiskError, NoSpaceError, StorageError
from metaq.model import Millis, Offset, SizeBytes
from metaq.storage.cut import KEPT_BYTES_MAX, cut_files, cut_log
from metaq.storage.log_state import LogState
from metaq.storage.log_writer import UNSYNCED_BYTES_MAX
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.storage.recovery import recover_log
from metaq.storage.segment import Damage
from metaq.storage.verify import verify_directory
from tests.cases import for_each
from tests.rigs.fs import FaultyFileSystem, Operation, keep_none, keep_random
from tests.rigs.storage import StorageBench, Ticket
from tests.sampling import examples, failures
from tests.storage.support import DATA, LOG, RECORD, content_of, log_of, opened
from tests.storage.test_partition_log_batches import known, send
from tests.storage.test_partition_log_following import copy

PARTITION = DATA / "test-0"
PRODUCERS_MAX = 100
RECORD_BYTES = 23
BATCH = 3 * RECORD_BYTES
"""Size of a batch that `send` makes."""
CUT = Offset(3 * BATCH)
"""In the second of five segments."""
SEGMENT_BYTES = 2 * BATCH


class KilledError(BaseException):
    """The process is gone: nothing catches this on the way."""


def led(fs: FaultyFileSystem) -> tuple[StorageBench, PartitionLog, list[StoredBatch]]:
    """Return a log with nine batches, of which it has acknowledged two, and follows."""
    bench = opened(fs, segment_bytes_max=SEGMENT_BYTES)
    log, batches = log_of(bench), []
    for number in range(9):
        batches.append(send(bench, 100 + 3 * number)[0])
        bench.run()
        if number == 1:
            log.follow()
            bench.run()
            log.lead()
    log.follow()
    bench.run()
    assert log.high_watermark == 2 * BATCH
    assert [each.base_offset for each in log.segments] == [
        0, 2 * BATCH, 4 * BATCH, 6 * BATCH, 8 * BATCH
    ]  # fmt: skip
    return bench, log, batches


def cut(bench: StorageBench, offset: int) -> list[Exception | None]:
    """Cut the log, and return what was reported."""
    done: list[Exception | None] = []
    cut_log(bench.manager, log_of(bench).log_id, Offset(offset), done.append)
    bench.run()
    return done


def untouched() -> tuple[FaultyFileSystem, bytes, list[StoredBatch]]:
    """Return the disk of such a log, its content, and the batches in it."""
    fs = FaultyFileSystem(has_syncs=False)
    bench, log, batches = led(fs)
    disk = fs.snapshot()
    log.set_bound(Offset(9 * BATCH))
    whole = content_of(log)
    bench.close()
    return disk, whole, batches


DISK, WHOLE, BATCHES = untouched()


def cut_disk(disk: FaultyFileSystem) -> None:
    cut_files(disk, PARTITION, PRODUCERS_MAX, offset=CUT)


def calls_of_a_cut() -> int:
    disk = DISK.snapshot()
    cut_disk(disk)
    return disk.calls


CALLS = calls_of_a_cut()


def check_prefix(disk: FaultyFileSystem) -> int:
    """Start on a disk: it has the bytes below the cut, and maybe some after it."""
    bench = opened(disk, segment_bytes_max=SEGMENT_BYTES)
    log = log_of(bench)
    assert not log.damage
    found = content_of(log)
    assert WHOLE.startswith(found)
    assert len(found) >= CUT
    for batch in log.producers:
        assert batch in BATCHES
        assert batch.end_offset <= len(found)
    bench.close()
    findings = verify_directory(
        disk, DATA, in_use=False, unsynced_bytes_max=SizeBytes(1 << 20)
    ).findings
    assert not findings
    return len(found)


# -- what a cut leaves


def test_a_log_that_was_cut_is_one_that_never_had_more(fs: FaultyFileSystem) -> None:
    """Batches that were forgotten for those that went are known again."""
    bench, log, batches = led(fs)
    assert list(log.producers) == batches[-5:]
    assert cut(bench, CUT) == [None]
    assert log.state is LogState.FOLLOWING
    assert log.next_offset == CUT
    assert log.record_count == 9
    assert list(log.producers) == batches[:3]
    assert [each.base_offset for each in log.segments] == [0, 2 * BATCH]
    log.set_bound(Offset(9 * BATCH))
    assert content_of(log) == WHOLE[:CUT]
    kept = fs.read_file(PARTITION / f"{2 * BATCH:020d}.meta.torn-{CUT}", KEPT_BYTES_MAX)
    assert kept == WHOLE[CUT:]
    log.lead()
    again, ticket = send(bench, 109)
    bench.run()
    log.set_bound(again.end_offset)
    assert ticket.is_stored
    bench.close()
    late = opened(fs)
    assert content_of(log_of(late))[:CUT] == WHOLE[:CUT]
    assert list(log_of(late).producers) == [*batches[:3], again]
    late.close()


@pytest.mark.slow
@for_each("number", range(2, 10))
def test_any_offset_from_the_high_watermark_on_can_be_cut_at(number: int) -> None:
    """The beginnings of segments, the end of the log, and those in between."""
    fs = FaultyFileSystem()
    bench, log, batches = led(fs)
    offset = number * BATCH
    assert cut(bench, offset) == [None]
    assert log.next_offset == offset
    # The notes of the first four are in the file still, whatever has forgotten them.
    assert list(log.producers) == batches[max(0, number - 5) : number]
    assert log.segments.active.base_offset == (number - 1) // 2 * 2 * BATCH
    copied = copy(bench, log, 2)
    bench.run()
    assert copied.is_stored
    log.set_bound(Offset(offset + 2 * RECORD))
    assert content_of(log)[:offset] == WHOLE[:offset]
    bench.close()
    findings = verify_directory(
        fs, DATA, in_use=False, unsynced_bytes_max=SizeBytes(1 << 20)
    ).findings
    assert not findings
    again = opened(fs)
    assert len(content_of(log_of(again))) == offset + 2 * RECORD
    again.close()


def test_what_is_left_of_a_span_is_covered_again(fs: FaultyFileSystem) -> None:
    """A cut within a span, in a segment without others."""
    bench = opened(fs)
    log = log_of(bench)
    log.follow()
    bench.run()
    for _ in range(10):
        copy(bench, log)
    bench.run()
    assert cut(bench, 7 * RECORD) == [None]
    assert log.record_count == 7
    copy(bench, log)
    bench.run()
    log.set_bound(Offset(8 * RECORD))
    assert log.record_count == 8
    bench.close()
    assert not verify_directory(
        fs, DATA, in_use=False, unsynced_bytes_max=SizeBytes(0)
    ).findings


def test_a_log_can_be_cut_to_nothing(fs: FaultyFileSystem) -> None:
    """Its first segment stays, and a start finds an empty log."""
    bench = opened(fs)
    log = log_of(bench)
    log.follow()
    copy(bench, log, 3)
    bench.run()
    assert cut(bench, 0) == [None]
    assert (log.next_offset, log.record_count) == (0, 0)
    assert copy(bench, log)
    bench.run()
    bench.close()
    again = opened(fs)
    assert len(content_of(log_of(again))) == RECORD
    again.close()


def test_a_log_without_files_is_cut_where_it_begins(fs: FaultyFileSystem) -> None:
    """Nothing was copied to it yet, or there was no room for it."""
    bench = opened(fs)
    settings = bench.config.topic("test")
    log = bench.manager.get_or_create(LOG, settings, start_offset=Offset(700))
    log.follow()
    assert cut(bench, 700) == [None]
    assert log.state is LogState.FOLLOWING
    fs.set_capacity(0)
    refused = copy(bench, log)
    assert cut(bench, 700) == [None]
    fs.set_capacity(1 << 40)
    assert refused.error is not None
    ticket = copy(bench, log)
    bench.run()
    assert ticket.is_stored
    log.set_bound(Offset(700 + RECORD))
    assert len(content_of(log)) == RECORD
    bench.close()


# -- what is refused, and what goes on


def test_no_byte_below_the_high_watermark_is_cut(fs: FaultyFileSystem) -> None:
    """Nor anything of a log that takes puts, and nothing twice at once."""
    bench, log, _batches = led(fs)
    with pytest.raises(StorageError, match=f"offsets {2 * BATCH} to {9 * BATCH}, got"):
        cut(bench, 2 * BATCH - 1)
    with pytest.raises(StorageError, match=f"got {9 * BATCH + 1}"):
        cut(bench, 9 * BATCH + 1)
    log.lead()
    with pytest.raises(StorageError, match="is not opened again: it is open"):
        cut(bench, 3 * BATCH)
    log.follow()
    cut_log(bench.manager, log.log_id, CUT, lambda _error: None)
    with pytest.raises(StorageError, match="it is reopening"):
        cut(bench, CUT)
    bench.run()
    assert log.next_offset == CUT
    bench.close()


def test_gets_go_on_during_a_cut_and_nothing_is_appended(fs: FaultyFileSystem) -> None:
    """The leader's word does not pass the cut before it is done."""
    bench, log, _batches = led(fs)
    found = log.read(Offset(0), 1 << 20)
    cut_log(bench.manager, log.log_id, CUT, lambda _error: None)
    assert log.state is LogState.REOPENING
    log.set_bound(Offset(9 * BATCH))
    assert log.high_watermark == 2 * BATCH
    with pytest.raises(ClosedError):
        copy(bench, log)
    assert found.read() == WHOLE[: 2 * BATCH]
    found.release()
    bench.run()
    log.set_bound(Offset(9 * BATCH))
    assert log.high_watermark == CUT
    bench.close()


def test_copies_in_flight_are_cut_with_the_rest(fs: FaultyFileSystem) -> None:
    """They are written first, and end in doubt; their notes go with their bytes."""
    bench, log, batches = led(fs)
    ticket = copy(bench, log)
    cut_log(bench.manager, log.log_id, CUT, lambda _error: None)
    assert ticket.error is not None
    bench.run()
    assert log.next_offset == CUT
    assert all(known(log, each) for each in batches[:3])
    bench.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stop_in_the_middle_of_a_cut_closes_everything(
    fs: FaultyFileSystem, is_late: bool
) -> None:
    """The cut is reported, as done or as called off."""
    bench, log, _batches = led(fs)
    done: list[Exception | None] = []
    job = bench.manager.begin_retention() if is_late else None
    cut_log(bench.manager, log.log_id, CUT, done.append)
    closed: list[bool] = []
    bench.manager.close(lambda: closed.append(True))
    if job is not None:
        job()
    bench.run()
    assert closed
    assert len(done) == 1
    assert isinstance(done[0], ClosedError) == is_late
    assert log.state is LogState.CLOSED
    assert fs.open_paths() == []
    again = opened(fs)
    assert len(content_of(log_of(again))) == (9 * BATCH if is_late else CUT)
    again.close()


# -- a log that was stopped


def test_a_stopped_log_is_opened_again_when_its_damage_is_mended(
    fs: FaultyFileSystem,
) -> None:
    """Without a restart; damage that is left keeps it stopped."""
    bench, log, _batches = led(fs)
    path = log.segments.first.path
    one = Damage(path, Offset(0), Offset(RECORD_BYTES), "checksum mismatch")
    two = Damage(path, Offset(2 * RECORD_BYTES), Offset(BATCH), "checksum mismatch")
    log.on_damage(one), log.on_damage(two)
    done: list[Exception | None] = []
    for left in ((two,), ()):
        bench.manager.reopen(
            log.log_id,
            lambda *_: None,
            done.append,
            is_mended=lambda damage, left=left: damage not in left,
        )
        bench.run()
        assert log.damage == left
        assert log.state is (LogState.STOPPED if left else LogState.FOLLOWING)
    assert done == [None, None]
    log.lead()
    _batch, ticket = send(bench, 127)
    bench.run()
    log.set_bound(log.next_offset)
    assert ticket.is_stored
    bench.close()


def test_a_log_that_a_start_has_stopped_is_opened_again(fs: FaultyFileSystem) -> None:
    """Its files were not even opened; the bytes are written again in place."""
    bench, log, _batches = led(fs)
    bench.close()
    active = log.segments.active
    fs.flip_bit(active.path, 8 * 30)
    bench = opened(fs, segment_bytes_max=SEGMENT_BYTES)
    log = log_of(bench)
    assert log.state is LogState.STOPPED
    bench.manager.reopen(
        log.log_id,
        lambda disk, _directory, _count: disk.flip_bit(active.path, 8 * 30),
        lambda _error: None,
        is_mended=lambda _damage: True,
    )
    bench.run()
    assert log.state is LogState.FOLLOWING
    log.lead()
    assert content_of(log) == WHOLE
    _batch, ticket = send(bench, 127)
    bench.run()
    log.set_bound(log.next_offset)
    assert ticket.is_stored
    bench.close()


def test_damage_in_the_end_goes_with_it(fs: FaultyFileSystem) -> None:
    """Damage before the cut does not."""
    bench, log, _batches = led(fs)
    before = Damage(log.segments.first.path, Offset(0), Offset(RECORD_BYTES), "rot")
    after = Damage(log.segments.active.path, Offset(8 * BATCH), None, "rot")
    log.on_damage(before), log.on_damage(after)
    assert cut(bench, CUT) == [None]
    assert log.damage == (before,)
    assert log.state is LogState.STOPPED
    bench.close()


def test_bytes_that_are_gone_below_the_high_watermark_stop_the_log(
    fs: FaultyFileSystem,
) -> None:
    """However they went: nothing is appended over a hole."""
    bench, log, _batches = led(fs)

    def lose(disk: FaultyFileSystem, *_rest: object) -> None:
        cut_files(disk, PARTITION, PRODUCERS_MAX, offset=Offset(BATCH))

    bench.manager.reopen(
        log.log_id, lose, lambda _error: None, is_mended=lambda _damage: True
    )
    bench.run()
    assert log.state is LogState.STOPPED
    text = f"log ends too early: expected {2 * BATCH}, got {BATCH}"
    assert text in str(log.damage[0])
    bench.close()


# -- failures


def test_the_scenario_has_every_step() -> None:
    """The yardstick of the tests below."""
    disk = DISK.snapshot()
    cut_disk(disk)
    assert check_prefix(disk) == CUT
    names = [call.name for call in disk.log]
    assert names.count("unlink") == 6
    assert CALLS > 60


@pytest.mark.slow
@for_each("number", range(1, CALLS + 1))
def test_a_kill_at_any_call_leaves_a_log_that_opens(number: int) -> None:
    """And the power may go at that moment as well; the same cut ends it."""

    def kill(call: Operation) -> None:
        if call.number == number:
            raise KilledError

    disk = DISK.snapshot()
    disk.on_call(kill)
    with pytest.raises(KilledError):
        cut_disk(disk)
    chooses: list[Callable[[int], int]] = [keep_none]
    chooses += [keep_random(number * 100 + seed) for seed in range(examples(3))]
    for found in (disk.snapshot(), *map(disk.crash, chooses)):
        assert check_prefix(found.snapshot()) >= CUT
        recovered = recover_log(
            found,
            PARTITION,
            unsynced_bytes_max=UNSYNCED_BYTES_MAX,
            span_bytes_min=SPAN_BYTES_MIN,
            now_ms=Millis(0),
        )
        assert recovered.spans is not None
        recovered.spans.abandon()
        cut_disk(found)
        assert check_prefix(found) == CUT


@pytest.mark.slow
@for_each("number, error", failures(CALLS, (errno.EIO, errno.ENOSPC, errno.EINTR)))
def test_any_call_may_fail_once(number: int, error: int) -> None:
    """Want of room is reported and the log goes on; else the directory is offline."""
    fs = FaultyFileSystem(has_syncs=False)
    bench, log, _batches = led(fs)
    done: list[Exception | None] = []
    cut_log(bench.manager, log.log_id, CUT, done.append)
    fs.fail_at(fs.calls + number, error)
    bench.run()
    assert len(done) == 1
    if log.state is LogState.OFFLINE:
        assert isinstance(done[0], DiskError) or error == errno.ENOSPC
    else:
        assert log.state is LogState.FOLLOWING
        assert done[0] is None or isinstance(done[0], NoSpaceError)
        assert log.next_offset >= CUT
        assert cut(bench, CUT) == [None]
        assert log.next_offset == CUT
        assert copy(bench, log)
        bench.run()
    bench.close()
    assert fs.open_paths() == []
    again = opened(fs.snapshot())
    assert not log_of(again).damage
    assert content_of(log_of(again))[:CUT] == WHOLE[:CUT]
    again.close()


def test_a_cut_on_a_full_disk_is_done_when_there_is_room(fs: FaultyFileSystem) -> None:
    """The copy aside is left out; a producer file that cannot be written is not."""
    bench, log, batches = led(fs)
    fs.set_capacity(0)
    (error,) = cut(bench, CUT)
    assert isinstance(error, NoSpaceError)
    assert log.state is LogState.FOLLOWING
    assert CUT < log.next_offset < 9 * BATCH
    ticket = Ticket()
    fs.set_capacity(1 << 40)
    log.join(batches[0], ticket)
    assert ticket.is_stored
    assert cut(bench, CUT) == [None]
    assert list(log.producers) == batches[:3]
    bench.close()


# -- any log


@pytest.mark.slow
def test_a_cut_is_the_prefix_of_any_log(rng: random.Random) -> None:
    """Whatever groups, batches and segments it has, and again after more of them."""
    for _ in range(examples(15)):
        fs = FaultyFileSystem()
        bench = opened(fs, segment_bytes_max=rng.choice([100, 400, 5000]))
        log, model = log_of(bench), [0]
        """Offsets at which the log may be cut."""
        log.follow()
        content, sequence = b"", 0
        for _step in range(12):
            log.lead()
            for _ in range(rng.randrange(4)):
                sent = send(bench, sequence, rng.randint(1, 4), rng.choice("pqr"))[0]
                sequence = sent.next_sequence
                model.append(sent.end_offset)
                if rng.random() < 0.5:
                    bench.run()
            bench.run()
            if rng.random() < 0.2:
                log.set_bound(Offset(rng.choice(model)))
            log.follow()
            low = log.high_watermark
            offset = rng.choice([each for each in model if each >= low])
            assert cut(bench, offset) == [None]
            model = [each for each in model if each <= offset]
            assert log.next_offset == offset
            assert all(each.end_offset <= offset for each in log.producers)
            content = content_of(log)
        bench.close()
        again = opened(fs)
        assert content_of(log_of(again)).startswith(content)
        assert len(content_of(log_of(again))) == model[-1]
        again.close()
