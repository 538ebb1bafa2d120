"""Blocks are made step by step, of good bytes, and made again when they are lost."""

import contextlib
import errno
import math
from dataclasses import replace
from functools import partial

from metaq.errors import StorageError
from metaq.model import Millis, Offset, SizeBytes
from metaq.record.checksum import crc32
from metaq.record.flags import encode_payload
from metaq.storage.key_builder import (
    IDLE_S,
    LOOK_S,
    KeyBuilder,
    KeyStep,
    KeyTarget,
    run_key_step,
)
from metaq.storage.key_index import keys_path, read_blocks
from metaq.storage.segment import Segment
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


def block_ends(fs: FaultyFileSystem, segment: Segment) -> list[int]:
    """Return where the blocks of a segment end."""
    path = keys_path(segment.path, segment.base_offset)
    if not fs.exists(path):
        return []
    with fs.open_read(path) as file:
        blocks = read_blocks(file, segment.base_offset, segment.end_offset, NAMES)
    return [each.end for each in blocks]


def build(fs: FaultyFileSystem, target: KeyTarget, block_bytes: int) -> list[int]:
    """Make all blocks; return where they end."""
    while True:
        step = run_key_step(fs, KeyStep(target, block_bytes, is_new=False))
        if not step.read_bytes or step.is_stuck:
            return block_ends(fs, target.segment)


def test_a_block_has_so_many_bytes_and_the_last_one_the_rest() -> None:
    """Of an active segment there is no rest, and its last span may grow."""
    fs, segment = small_log(*RECORDS)
    size = segment.size_bytes // 10
    blocks = 3 * size - 1
    assert build(fs, target_of(segment, is_sealed=False), blocks) == [
        3 * size, 6 * size, 9 * size
    ]  # fmt: skip
    assert build(fs, target_of(segment), blocks) == [
        3 * size, 6 * size, 9 * size, 10 * size
    ]  # fmt: skip
    fs, segment = small_log(*RECORDS)
    active = target_of(segment, is_sealed=False)
    assert build(fs, active, 5 * size) == [5 * size]


def test_damaged_bytes_have_no_block() -> None:
    """Those before them have one; mended bytes get theirs after the next look."""
    fs, segment = small_log(*RECORDS)
    size = segment.size_bytes // 10
    fs.flip_bit(segment.path, 8 * (7 * size + 12))
    assert build(fs, target_of(segment), 5 * size) == [5 * size]
    fs.flip_bit(segment.path, 8 * (7 * size + 12))
    assert build(fs, target_of(segment), 5 * size) == [5 * size, 10 * size]


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
    builder, target = KeyBuilder(100, block_bytes=10**6), target_of(segment)
    step = builder.take_step([target], 5.0)
    assert step is not None
    builder.finish_step(step, run_key_step(fs, step), 5.0)
    due_s = 5.0 + segment.size_bytes / 100
    assert builder.delay_s(5.0) == due_s - 5.0
    assert builder.take_step([target], due_s - 0.1) is None
    assert builder.take_step([target], due_s) is None
    assert builder.delay_s(due_s) == IDLE_S
    assert builder.take_step([target], due_s + LOOK_S) is not None
    never = KeyBuilder(0)
    assert never.take_step([target], 0.0) is None
    assert never.delay_s(0.0) == math.inf


def test_a_step_that_fails_holds_up_no_other() -> None:
    """It is tried again after the next look."""
    fs, segment = small_log(*RECORDS)
    broken = replace(segment, path=segment.path.with_name("none"))
    builder = KeyBuilder(1 << 40, block_bytes=10**6)
    targets = [target_of(broken), target_of(replace(segment, base_offset=Offset(0)))]
    targets[0] = targets[0]._replace(log_id=OTHER)
    step = builder.take_step(targets, 0.0)
    assert step is not None
    assert step.target is targets[0]
    assert builder.delay_s(0.0) == IDLE_S
    step = builder.take_step(targets, IDLE_S)
    assert step is not None
    assert step.target is targets[1]
    builder.finish_step(step, run_key_step(fs, step), IDLE_S)
    assert builder.take_step(targets, 2 * IDLE_S) is None
    step = builder.take_step(targets, LOOK_S)
    assert step is not None
    assert step.target is targets[0]


def test_an_index_that_is_distrusted_is_made_again() -> None:
    """All of it, at once."""
    fs, segment = small_log(*RECORDS)
    builder, target = KeyBuilder(1 << 40, block_bytes=10**6), target_of(segment)
    step = builder.take_step([target], 0.0)
    assert step is not None
    builder.finish_step(step, run_key_step(fs, step), 0.0)
    path = keys_path(segment.path, segment.base_offset)
    good = fs.read_file(path, SizeBytes(10**6))
    fs.flip_bit(path, 8 * (len(good) - 1))
    assert builder.take_step([target], 1.0) is None
    builder.distrust(target.key)
    step = builder.take_step([target], 3.0)
    assert step is not None
    builder.finish_step(step, run_key_step(fs, step), 3.0)
    assert fs.read_file(path, SizeBytes(10**6)) == good
    assert builder.take_step([target], 4.0) is None


def test_a_block_that_ends_within_a_span_is_made_again() -> None:
    """Its bytes cannot be compared with a span any more, nor those after it."""
    fs, segment = small_log(*RECORDS)
    size = segment.size_bytes // 10
    assert build(fs, target_of(segment), 5 * size) == [5 * size, 10 * size]
    path = keys_path(segment.path, segment.base_offset)
    with fs.open_append(path, create=False) as file:
        file.truncate(SizeBytes(file.size() - 1))
    data = fs.read_file(segment.path, segment.size_bytes)
    spans = [
        Span(
            Offset(at),
            SizeBytes(2 * size),
            2,
            Millis(0),
            crc32(data[at : at + 2 * size]),
        )
        for at in range(0, 10 * size, 2 * size)
    ]
    write_index(fs, segment.path, SpanIndex(Offset(0), spans=tuple(spans)))
    assert build(fs, target_of(segment), 5 * size) == [6 * size, 10 * size]


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


def test_a_disk_that_refuses_leaves_an_index_that_changes_no_answer() -> None:
    """At any call; the next step makes it whole, with the bytes that it always has."""
    fs, segment = small_log(*RECORDS)
    path = keys_path(segment.path, segment.base_offset)
    target, size = target_of(segment), segment.size_bytes // 2
    before = fs.calls
    build(fs, target, size)
    calls, whole = fs.calls - before, fs.read_file(path, SizeBytes(1 << 20))
    for number, error in failures(calls, (errno.EIO, errno.ENOSPC)):
        disk, _ = small_log(*RECORDS)
        disk.fail_at(disk.calls + number, error)
        with contextlib.suppress(StorageError):
            build(disk, target, size)
        for each in range(10):
            field = field_of(b"k%d" % each)
            assert len(ask(disk, segment, field)[0]) == 1, (number, error)
        assert build(disk, target, size) == [size, segment.size_bytes]
        assert disk.read_file(path, SizeBytes(1 << 20)) == whole, (number, error)
        assert disk.open_paths() == []
