"""Blocks are made step by step, of good bytes, and made again when they are lost."""

import contextlib
import errno
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from metaq.errors import StorageError
from metaq.model import LogId, Millis, Offset, SizeBytes
from metaq.record.checksum import crc32
from metaq.record.flags import encode_payload
from metaq.storage.key_builder import (
    DEAD_PARTS,
    IDLE_S,
    LOOK_COUNT,
    LOOK_PAUSE_S,
    LOOK_S,
    READY_PARTS,
    SCAN_S,
    STEP_S_MIN,
    WAIT_S,
    KeyBuilder,
    KeyLog,
    KeyStep,
    KeyStepResult,
    KeyTarget,
    run_key_step,
)
from metaq.storage.key_index import keys_path, read_blocks
from metaq.storage.segment import Segment, Segments
from metaq.storage.span_index import Span, SpanIndex, write_index
from tests.rigs.fs import FaultyFileSystem, Operation
from tests.sampling import failures
from tests.storage.key_machine import (
    BLOCK_BYTES,
    NAMES,
    KeyMachine,
    field_of,
)
from tests.storage.support import LOG, OTHER
from tests.storage.test_key_lookup import ask, small_log

RECORDS = [encode_payload(b"x" * 50, None, b"k%d" % number) for number in range(10)]


def target_of(segment: Segment, *, is_sealed: bool = True) -> KeyTarget:
    """Return a segment that is to have an index."""
    return KeyTarget(LOG, segment, is_sealed, NAMES)


def log_of(target: KeyTarget) -> KeyLog:
    """Return the log of a segment; a sealed one has an active one after it, empty."""
    one, names = target.segment, target.names
    after = Segment(one.path.with_name("next"), one.end_offset, SizeBytes(0))
    segments = Segments((one, after) if target.is_sealed else (one,))
    return KeyLog(target.log_id, names, segments, one.end_offset)


def block_ends(fs: FaultyFileSystem, segment: Segment) -> list[int]:
    """Return where the blocks of a segment end."""
    path = keys_path(segment.path, segment.base_offset)
    if not fs.exists(path):
        return []
    with fs.open_read(path) as file:
        blocks = read_blocks(file, segment.base_offset, segment.end_offset, NAMES)
    return [each.end for each in blocks]


def build(fs: FaultyFileSystem, target: KeyTarget, step_bytes: int) -> list[int]:
    """Make all blocks; return where they end."""
    while True:
        step = run_key_step(fs, KeyStep(target, step_bytes, is_new=False))
        if not step.read_bytes or step.is_stuck:
            return block_ends(fs, target.segment)


def test_blocks_are_merged_as_they_grow() -> None:
    """A block takes the place of those of its length; a sealed segment has one."""
    fs, segment = small_log(*10 * RECORDS)
    size, seen = segment.size_bytes // 100, list[list[int]]()
    path = keys_path(segment.path, segment.base_offset)
    step_bytes = 60 * size
    for count in range(1, 101):
        part = replace(segment, size_bytes=SizeBytes(count * size))
        step = KeyStep(target_of(part, is_sealed=False), step_bytes, is_new=False)
        assert run_key_step(fs, step).end == count * size
        ends = block_ends(fs, part)
        lengths = [b - a for a, b in itertools.pairwise([0, *ends])]
        assert all(a > b for a, b in itertools.pairwise(lengths))
        seen.append([each // size for each in lengths])
        used = count * 8 + (len(lengths) + 1) * 80
        assert fs.size_of(path) < 3 * used + step_bytes // DEAD_PARTS, "written again"
    assert seen[:8] == [[1], [2], [2, 1], [4], [4, 1], [4, 2], [4, 2, 1], [8]]
    assert build(fs, target_of(segment), step_bytes) == [100 * size]
    assert fs.size_of(path) < 100 * 8 + 100


def test_small_blocks_are_always_merged() -> None:
    """Else a message a second would make one each."""
    fs, segment = small_log(*RECORDS)
    size = segment.size_bytes // 10
    counts = list[int]()
    for count in range(1, 11):
        part = replace(segment, size_bytes=SizeBytes(count * size))
        target = target_of(part, is_sealed=False)
        run_key_step(fs, KeyStep(target, 64 * 3 * size, is_new=False))
        counts.append(len(block_ends(fs, part)))
    assert counts == [1, 1, 1, 1, 2, 2, 2, 1, 2, 2]


def test_a_span_that_grows_is_indexed_as_far_as_it_goes() -> None:
    """It is compared as a whole each time; damage in it stops what comes."""
    fs, segment = small_log(*RECORDS)
    size = segment.size_bytes // 10
    data = fs.read_file(segment.path, segment.size_bytes)

    def grow(*counts: int) -> KeyTarget:
        at, spans = 0, list[Span]()
        for count in counts:
            length = count * size
            part = data[at : at + length]
            time = Millis(0)
            span = Span(Offset(at), SizeBytes(length), count, time, crc32(part))
            spans.append(span)
            at += length
        write_index(fs, segment.path, SpanIndex(Offset(0), spans=tuple(spans)))
        return target_of(replace(segment, size_bytes=SizeBytes(at)), is_sealed=False)

    assert build(fs, grow(2, 1), 100 * size) == [3 * size]
    assert build(fs, grow(2, 4), 100 * size) == [6 * size]
    target = grow(2, 7)
    late = replace(target.segment, size_bytes=SizeBytes(9 * size - 1))
    assert build(fs, target._replace(segment=late), 100 * size) == [6 * size]
    fs.flip_bit(segment.path, 8 * 3 * size)
    step = run_key_step(fs, KeyStep(target, 100 * size, is_new=False))
    assert (step.end, step.is_stuck) == (6 * size, True)
    fs.flip_bit(segment.path, 8 * 3 * size)
    assert build(fs, target, 100 * size) == [6 * size, 9 * size]
    for number in range(9):
        assert ask(fs, target.segment, field_of(b"k%d" % number))[:2] == ([b"x"], 0)


def test_damaged_bytes_have_no_block() -> None:
    """Those before them have one; mended bytes get theirs after the next look."""
    fs, segment = small_log(*RECORDS)
    size = segment.size_bytes // 10
    fs.flip_bit(segment.path, 8 * (7 * size + 12))
    assert build(fs, target_of(segment), 5 * size) == [5 * size, 7 * size]
    fs.flip_bit(segment.path, 8 * (7 * size + 12))
    assert build(fs, target_of(segment), 5 * size) == [10 * size]


def test_a_damaged_block_is_not_merged_but_made_again() -> None:
    """Whatever bit it is; of the log, since its entries are not believed."""
    fs, segment = small_log(*RECORDS)
    size = segment.size_bytes // 10
    path = keys_path(segment.path, segment.base_offset)
    half = replace(segment, size_bytes=SizeBytes(5 * size))
    builder = KeyBuilder(1 << 40)
    run_key_step(fs, KeyStep(target_of(half, is_sealed=False), 1 << 20, is_new=False))
    fs.flip_bit(path, 8 * 70)
    before = fs.read_file(path, SizeBytes(10**6))
    for is_sealed in (False, True):
        target = target_of(segment, is_sealed=is_sealed)
        log = log_of(target)
        result = run_key_step(fs, KeyStep(target, 1 << 20, is_new=False))
        assert result.is_damaged
        assert fs.read_file(path, SizeBytes(10**6))[: len(before)] == before
    names = fs.names_in(path.parent)
    assert not any(each.endswith(".tmp") for each in names)
    step = builder.take_step([log], 1.0)
    assert step is not None
    builder.finish_step(step, result, 1.0)
    step = builder.take_step([log], 2.0)
    assert step is not None
    assert step.is_new
    builder.finish_step(step, run_key_step(fs, step), 2.0)
    assert block_ends(fs, segment) == [10 * size]
    assert ask(fs, segment, field_of(b"k1"))[:2] == ([b"x"], 0)


def test_a_segment_without_spans_has_no_block() -> None:
    """Its bytes could not be compared: the scrub makes the spans first."""
    fs, segment = small_log(*RECORDS)
    fs.unlink(segment.path.with_suffix(".spans"))
    assert build(fs, target_of(segment), 100) == []


def test_a_segment_that_is_gone_gets_no_index() -> None:
    """Retention may remove it while it is read."""
    fs, segment = small_log(*RECORDS)
    path = keys_path(segment.path, segment.base_offset)

    def remove(operation: Operation) -> None:
        if operation.path == segment.path and operation.name == "read":
            fs.on_call(None)
            fs.unlink(segment.path)

    fs.on_call(remove)
    run_key_step(fs, KeyStep(target_of(segment), 10**6, is_new=False))
    assert not fs.exists(path)


def test_work_has_a_rate_and_what_is_done_is_not_looked_at_again() -> None:
    """Until the next look; idle in between."""
    fs, segment = small_log(*RECORDS)
    builder, log = KeyBuilder(100, step_bytes=10**6), log_of(target_of(segment))
    step = builder.take_step([log], 5.0)
    assert step is not None
    builder.finish_step(step, run_key_step(fs, step), 5.0)
    due_s = 5.0 + segment.size_bytes / 100
    assert builder.delay_s(5.0) == due_s - 5.0
    assert builder.take_step([log], due_s - 0.1) is None
    assert builder.take_step([log], due_s) is None
    assert builder.delay_s(due_s) == IDLE_S
    assert builder.take_step([log], due_s + LOOK_S) is not None
    never = KeyBuilder(0)
    assert never.take_step([log], 0.0) is None
    assert never.delay_s(0.0) == math.inf


def test_many_bytes_are_indexed_at_once_and_few_after_a_while() -> None:
    """A log to which nothing more is written is indexed to its end."""
    fs, segment = small_log(*RECORDS)
    size = segment.size_bytes // 10
    builder, scan_s = KeyBuilder(1 << 40, step_bytes=READY_PARTS * 3 * size), 2 * SCAN_S
    active = log_of(target_of(segment, is_sealed=False))
    sealed = log_of(target_of(replace(segment, size_bytes=SizeBytes(9 * size))))

    def steps(count: int, time_s: float, *, log: KeyLog = active) -> bool:
        log = log._replace(end=Offset(count * size))
        step = builder.take_step([log], time_s)
        if step is None:
            return False
        builder.finish_step(step, run_key_step(fs, step), time_s)
        assert builder.delay_s(time_s) == pytest.approx(STEP_S_MIN), (
            "however little it was"
        )
        return True

    assert steps(1, 1.0)
    assert not steps(5, 1.0 + STEP_S_MIN), "looks cost something, too"
    assert steps(5, 1.0 + scan_s)
    assert not steps(7, 1.0 + 2 * scan_s)
    assert steps(7, 1.0 + scan_s + WAIT_S + IDLE_S)
    assert steps(8, 5.0)
    assert steps(9, 5.0 + scan_s, log=sealed)
    assert not steps(9, 99.0, log=sealed)


def test_a_step_that_fails_holds_up_no_other() -> None:
    """It is tried again after a while."""
    fs, segment = small_log(*RECORDS)
    builder = KeyBuilder(1 << 40, step_bytes=10**6)
    logs = [log_of(target_of(segment)), log_of(target_of(segment))]
    logs[0] = logs[0]._replace(log_id=OTHER)
    step = builder.take_step(logs, 0.0)
    assert step is not None
    assert step.target.log_id == OTHER
    assert builder.delay_s(0.0) == IDLE_S
    step = builder.take_step(logs, IDLE_S)
    assert step is not None
    assert step.target.log_id == LOG
    builder.finish_step(step, run_key_step(fs, step), IDLE_S)
    assert builder.take_step(logs, 2 * IDLE_S) is None
    step = builder.take_step(logs, LOOK_S)
    assert step is not None
    assert step.target.log_id == OTHER


class CountedSegments(Segments):
    """Segments that count how often they are gone through."""

    count = 0

    def settled(self, end: Offset) -> tuple[Segment, ...]:
        self.count += 1
        return super().settled(end)


def test_a_look_goes_through_the_segments_that_are_new() -> None:
    """Of a log with thousands it is many times a second; those that are gone go."""
    segments = CountedSegments(
        Segment(Path(f"/d/{base}.meta"), Offset(base), SizeBytes(10))
        for base in range(0, 90, 10)
    )
    builder, now_s = KeyBuilder(1 << 40), 0.0

    def finish_all(segments: Segments, end: int) -> list[int]:
        """Return the base offsets of all steps until there is nothing to do."""
        nonlocal now_s
        bases, log = list[int](), KeyLog(LOG, NAMES, segments, Offset(end))
        while (step := builder.take_step([log], now_s)) is not None:
            segment = step.target.segment
            bases.append(segment.base_offset)
            result = KeyStepResult(segment.end_offset, 0)
            builder.finish_step(step, result, now_s)
            now_s += 2 * SCAN_S
        now_s += IDLE_S
        return bases

    assert finish_all(segments, 75) == [60, 50, 40, 30, 20, 10, 0], "newest first"
    assert finish_all(segments, 85) == [80, 70]
    looks = segments.count
    assert finish_all(segments, 88) == [80]
    assert segments.count == looks
    after = replace(segments.active, base_offset=Offset(90))
    later = segments.rolled(segments.active, after).without(segments.first)
    assert finish_all(later, 90) == [80]
    now_s += LOOK_S
    assert sorted(finish_all(later, 90)) == list(range(10, 100, 10))


def test_a_look_at_many_logs_has_pauses() -> None:
    """Others are served in them; the last log is found all the same."""
    _fs, segment = small_log(*RECORDS)
    one, seen = log_of(target_of(segment, is_sealed=False)), list[int]()

    def logs() -> Iterator[KeyLog]:
        empty = Segments((replace(segment, size_bytes=SizeBytes(0)),))
        for number in range(2 * LOOK_COUNT):
            seen.append(number)
            yield KeyLog(LogId("empty", number), NAMES, empty, segment.base_offset)
        yield one

    builder, now_s = KeyBuilder(1 << 40), 0.0
    for count in (LOOK_COUNT, 2 * LOOK_COUNT):
        assert builder.take_step(logs(), now_s) is None
        assert len(seen) == count
        assert builder.delay_s(now_s) == pytest.approx(LOOK_PAUSE_S)
        now_s += 2 * LOOK_PAUSE_S
    step = builder.take_step(logs(), now_s)
    assert step is not None
    assert step.target.log_id == one.log_id
    assert len(seen) == 2 * LOOK_COUNT


def test_new_bytes_and_sealed_segments_take_turns() -> None:
    """Those of a topic that has had no index so far do not hold up what comes now."""
    segments = Segments(
        Segment(Path(f"/d/{base}.meta"), Offset(base), SizeBytes(1000))
        for base in range(0, 5000, 1000)
    )
    builder, kinds = KeyBuilder(1 << 40, step_bytes=READY_PARTS), list[bool]()
    for number in range(8):
        log = KeyLog(LOG, NAMES, segments, Offset(4010 + number))
        step = builder.take_step([log], number * 2 * SCAN_S)
        assert step is not None
        kinds.append(step.target.is_sealed)
        end = step.target.segment.end_offset
        end = Offset(end - 500 * (number == 3))
        builder.finish_step(step, KeyStepResult(end, 0), number * 2 * SCAN_S)
    assert kinds == [False, True] * 4


def test_an_index_that_is_distrusted_is_made_again() -> None:
    """All of it, at once."""
    fs, segment = small_log(*RECORDS)
    builder, target = KeyBuilder(1 << 40, step_bytes=10**6), target_of(segment)
    log = log_of(target)
    step = builder.take_step([log], 0.0)
    assert step is not None
    builder.finish_step(step, run_key_step(fs, step), 0.0)
    path = keys_path(segment.path, segment.base_offset)
    good = fs.read_file(path, SizeBytes(10**6))
    fs.flip_bit(path, 8 * (len(good) - 1))
    assert builder.take_step([log], 1.0) is None
    builder.distrust(target.key)
    step = builder.take_step([log], 3.0)
    assert step is not None
    builder.finish_step(step, run_key_step(fs, step), 3.0)
    assert fs.read_file(path, SizeBytes(10**6)) == good
    assert builder.take_step([log], 4.0) is None


def test_a_log_is_not_cut_while_a_block_is_written() -> None:
    """The block of bytes that go is cut with them."""
    machine = KeyMachine(0)
    while machine.log.high_watermark < 3 * BLOCK_BYTES:
        machine.append()

    def run_all(operation: Operation) -> None:
        if operation.path.suffix == ".keys" and operation.name == "write":
            machine.fs.on_call(None)
            machine.bench.run()

    active = KeyTarget(LOG, machine.log.readable_active(), False, NAMES)
    step = KeyStep(active, BLOCK_BYTES, is_new=False)
    work = machine.bench.manager.while_uncut(partial(run_key_step, machine.fs, step))
    machine.fs.on_call(run_all)
    machine.cut(work, kept=1)
    machine.fs.on_call(None)
    segment = replace(machine.log.segments.active, size_bytes=SizeBytes(1 << 40))
    assert all(
        end <= machine.log.next_offset for end in block_ends(machine.fs, segment)
    )


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_disk_that_refuses_leaves_an_index_that_changes_no_answer(
    is_sealed: bool,
) -> None:
    """At any call; the next steps make it whole, with the bytes that it always has."""
    fs, segment = small_log(*RECORDS)
    path = keys_path(segment.path, segment.base_offset)
    target, size = target_of(segment, is_sealed=is_sealed), segment.size_bytes // 4
    before = fs.calls
    ends = build(fs, target, size)
    assert ends[-1] == segment.end_offset
    calls, whole = fs.calls - before, fs.read_file(path, SizeBytes(1 << 20))
    for number, error in failures(calls, (errno.EIO, errno.ENOSPC)):
        disk, _ = small_log(*RECORDS)
        disk.fail_at(disk.calls + number, error)
        with contextlib.suppress(StorageError):
            build(disk, target, size)
        for each in range(10):
            field = field_of(b"k%d" % each)
            assert len(ask(disk, segment, field)[0]) == 1, (number, error)
        assert build(disk, target, size) == ends
        assert disk.read_file(path, SizeBytes(1 << 20)) == whole, (number, error)
        names = disk.names_in(path.parent)
        assert not any(name.endswith(".tmp") for name in names), (number, error)
        assert disk.open_paths() == []
