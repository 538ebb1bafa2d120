"""The scrub: what it checks and when, what it finds, the indexes that it makes."""

import errno
import random
from dataclasses import replace

import pytest

from metaq.errors import DiskError
from metaq.model import LogId, Offset, SizeBytes
from metaq.storage.scrub import PASS_S_MIN, Scrub, ScrubTarget, run_step
from metaq.storage.segment import Damage, Segment, segment_file_name
from metaq.storage.span_index import SpanIndex, read_index, read_totals, write_index
from tests.rigs.fs import FaultyFileSystem, Operation
from tests.sampling import quarter
from tests.storage.logs import (
    DIRECTORY,
    SPAN,
    content,
    everything,
    put_file,
    put_segment,
    record,
)
from tests.storage.recovering import BYTES, META, SPANS, UNCOVERED, disk_with_log

LOG = LogId("test", 0)
RATE = 100


def target(
    base: int, size: int, *, sealed: bool = True, log: LogId = LOG
) -> ScrubTarget:
    path = DIRECTORY / segment_file_name(Offset(base))
    return ScrubTarget(log, Segment(path, Offset(base), SizeBytes(size)), sealed)


class Source:
    """Segments, in any order, as the logs that they are of; counts what is asked."""

    def __init__(self, targets: list[ScrubTarget]) -> None:
        self.by_log: dict[LogId, list[ScrubTarget]] = {}
        for each in sorted(targets, key=lambda target: target.key):
            self.by_log.setdefault(each.log_id, []).append(each)
        self.asked: list[LogId | None] = []

    def sizes(self) -> dict[LogId, int]:
        self.asked.append(None)
        return {
            log_id: sum(each.segment.size_bytes for each in targets)
            for log_id, targets in self.by_log.items()
        }

    def targets(self, log_id: LogId) -> list[ScrubTarget]:
        self.asked.append(log_id)
        return self.by_log.get(log_id, [])


class Shell:
    """Part of the housekeeping: ask, run, report; time passes as it is due."""

    def __init__(self, disk: FaultyFileSystem, *, rate: int = RATE, first: int = 0):
        self.disk = disk
        self.damage: list[tuple[LogId, Damage]] = []
        self.scrub = Scrub(
            bytes_per_s=rate,
            span_bytes_min=SPAN,
            first=first,
            on_damage=lambda log_id, damage: self.damage.append((log_id, damage)),
        )
        self.now = 1000.0
        self.steps: list[tuple[str, int, int]] = []

    def step(self, targets: list[ScrubTarget]) -> bool:
        self.source = Source(targets)
        step = self.scrub.take_step(self.source, self.now)
        if step is None:
            return False
        result = run_step(self.disk, step)
        assert self.disk.open_paths() == []
        log = f"{step.target.log_id}:{step.target.segment.base_offset}"
        self.steps.append((log, step.start, result.end))
        self.scrub.finish_step(step, result, self.now)
        self.now += result.checked_bytes / RATE
        return True

    def run_pass(self, targets: list[ScrubTarget]) -> None:
        while self.step(targets):
            pass


def sealed_and_active(*, indexed: bool = True) -> FaultyFileSystem:
    disk = disk_with_log(indexed=indexed)
    put_segment(disk, len(BYTES), [[record(6), record(7)]], indexed=indexed)
    return disk


TARGETS = [target(0, len(BYTES)), target(len(BYTES), 60, sealed=False)]


@pytest.mark.parametrize("indexed", [True, False])
def test_a_pass_checks_every_durable_byte_once(indexed: bool) -> None:
    """Part by part, in order; then nothing until the next day."""
    shell = Shell(sealed_and_active(indexed=indexed))
    shell.run_pass(TARGETS)
    assert [start for _log, start, _end in shell.steps[1:]] == [
        end for _log, _start, end in shell.steps[:-1]
    ]
    assert shell.steps[-1][2] == len(BYTES) + 60
    state = shell.scrub.state()
    assert (state.passes, state.checked_bytes, state.damage_count) == (1, 330, 0)
    assert (state.log_id, state.offset, state.is_enabled) == (None, None, True)
    count = len(shell.steps)
    shell.now = 1000.0 + PASS_S_MIN - 1
    assert not shell.step(TARGETS)
    shell.now += 1
    shell.run_pass(TARGETS)
    assert len(shell.steps) == 2 * count


def test_the_rate_is_kept() -> None:
    """The next step is due when its share of time has passed, not before."""
    shell = Shell(sealed_and_active())
    assert shell.step(TARGETS)
    _log, start, end = shell.steps[0]
    state = shell.scrub.state()
    assert (state.log_id, state.offset, state.total_bytes) == (LOG, end, 330)
    shell.now = 1000.0 + (end - start) / RATE - 0.01
    assert not shell.step(TARGETS)
    shell.now += 0.02
    assert shell.step(TARGETS)


def test_without_a_rate_or_a_log_nothing_is_done() -> None:
    """0 switches it off; an empty broker has nothing to check."""
    shell = Shell(sealed_and_active(), rate=0)
    assert not shell.step(TARGETS)
    assert not shell.scrub.state().is_enabled
    assert not Shell(sealed_and_active()).step([])


@pytest.mark.slow
@pytest.mark.parametrize("indexed", [True, False])
def test_every_flipped_bit_is_found(indexed: bool, rng: random.Random) -> None:
    """As by verification: with an index all bits, else what checksums cover."""
    disk = sealed_and_active(indexed=indexed)
    for bit in quarter(range(len(BYTES) * 8), rng):
        shell = Shell(disk.snapshot())
        shell.disk.flip_bit(DIRECTORY / META, bit)
        before = content(shell.disk, META)
        shell.run_pass(TARGETS)
        assert content(shell.disk, META) == before
        unseen = not indexed and bit // 8 in UNCOVERED
        assert (not shell.damage) is unseen, bit
        if unseen:
            continue
        log_id, damage = shell.damage[0]
        assert log_id == LOG
        assert damage.offset <= bit // 8
        assert damage.next_good_offset is not None
        assert len(shell.damage) == shell.scrub.state().damage_count
        if not indexed:
            assert not shell.disk.exists(DIRECTORY / SPANS)


def test_a_sealed_segment_without_an_index_gets_one() -> None:
    """With all records, sealed; that of an active segment is its writer's business."""
    disk = sealed_and_active(indexed=False)
    Shell(disk).run_pass(TARGETS)
    index = read_index(disk, DIRECTORY / META, Offset(0))
    assert index is not None
    assert (index.end_offset, index.record_count) == (len(BYTES), 5)
    assert read_totals(disk, DIRECTORY / META, Offset(0)).record_count == 5
    assert sum(name.endswith(".spans") for name in everything(disk)) == 1
    calls = disk.calls
    Shell(disk).run_pass(TARGETS)
    assert not any(call.name in {"create", "write"} for call in disk.log[calls:])


def test_an_index_that_ends_early_is_completed() -> None:
    """Its entries are kept, missing ones are made from the records."""
    disk = disk_with_log()
    good = read_index(disk, DIRECTORY / META, Offset(0))
    put_file(disk, META, record(6) + record(7))
    Shell(disk).run_pass([target(0, len(BYTES) + 60)])
    index = read_index(disk, DIRECTORY / META, Offset(0))
    assert index is not None
    assert good is not None
    assert index.spans[: len(good.spans)] == good.spans
    assert (index.end_offset, index.record_count) == (len(BYTES) + 60, 7)


def test_want_of_room_only_delays_an_index() -> None:
    """The check itself is complete."""
    disk = sealed_and_active(indexed=False)
    disk.set_capacity(1)
    shell = Shell(disk)
    shell.run_pass(TARGETS)
    assert shell.scrub.state().passes == 1
    assert not disk.exists(DIRECTORY / SPANS)


def test_an_active_segment_is_checked_to_where_it_is_durable() -> None:
    """Bytes and entries that came after the target was named are left for later."""
    disk = sealed_and_active()
    put_file(disk, segment_file_name(Offset(len(BYTES))), b"being written")
    for size in (0, 30, 60):
        shell = Shell(disk)
        shell.run_pass([target(len(BYTES), size, sealed=False)])
        assert shell.damage == []
        assert shell.scrub.state().checked_bytes == size


def test_an_active_segment_that_grows_is_read_on() -> None:
    """The index is read again when the part of it that is known is used up."""
    disk = disk_with_log()
    shell = Shell(disk)
    assert shell.step([target(0, 160, sealed=False)])
    grown = [target(0, len(BYTES), sealed=False)]
    shell.now += 10
    shell.run_pass(grown)
    assert shell.damage == []
    assert shell.steps[-1][2] == len(BYTES)


def test_a_segment_that_is_sealed_while_it_is_checked_keeps_its_index() -> None:
    """Later records are checked by the entries that their writer made."""
    disk = disk_with_log()
    before = content(disk, SPANS)
    shell = Shell(disk)
    assert shell.step([target(0, 160, sealed=False)])
    shell.now += 10
    shell.run_pass([target(0, len(BYTES))])
    assert shell.steps[-1][2] == len(BYTES)
    assert (shell.damage, content(disk, SPANS)) == ([], before)


def test_segments_may_come_and_go_during_a_pass() -> None:
    """Deleted segments are skipped, new ones are checked, the pass ends."""
    disk = sealed_and_active()
    shell = Shell(disk)
    assert shell.step(TARGETS)
    disk.unlink(DIRECTORY / META)
    shell.now += 10
    assert shell.step(TARGETS)
    put_segment(disk, len(BYTES) + 60, [[record(8)]])
    shell.run_pass([TARGETS[1], target(len(BYTES) + 60, 30, sealed=False)])
    assert shell.damage == []
    assert shell.scrub.state().passes == 1
    assert shell.steps[-1] == (f"{LOG}:{len(BYTES) + 60}", len(BYTES) + 60, 360)


def test_a_list_of_names_that_omits_one_is_no_damage() -> None:
    """A list that is read while a broker works may; what is missing twice is damage."""
    disk = sealed_and_active()
    last, aside = len(BYTES) + 60, DIRECTORY / "aside"
    put_segment(disk, last, [[record(8)]])
    middle = DIRECTORY / segment_file_name(Offset(len(BYTES)))
    first = replace(TARGETS[0], is_first=True)
    targets = [first, TARGETS[1], target(last, 30, sealed=False)]

    def damage(omitted_count: int) -> list[tuple[LogId, Damage]]:
        lists, shell = 0, Shell(disk)

        def omit(call: Operation) -> None:
            nonlocal lists
            if call.name == "list":
                lists += 1
                if lists == 1:
                    disk.rename(middle, aside)
                if lists == 1 + omitted_count:
                    disk.rename(aside, middle)

        disk.on_call(omit)
        assert shell.step(targets)
        disk.on_call(None)
        return shell.damage

    assert damage(omitted_count=1) == []
    assert damage(omitted_count=2) != []


def test_the_first_pass_begins_anywhere_and_goes_round() -> None:
    """Whatever number chooses, every segment has its turn once."""
    disk = sealed_and_active()
    put_segment(disk, len(BYTES) + 60, [[record(8)]])
    targets = [*TARGETS, target(len(BYTES) + 60, 30, sealed=False)]
    bases = [0, len(BYTES), len(BYTES) + 60]
    for first in range(5):
        shell = Shell(disk, first=first)
        shell.run_pass(targets)
        order = list(dict.fromkeys(int(log.split(":")[1]) for log, *_ in shell.steps))
        start = first % 3
        assert order == bases[start:] + bases[:start]
        assert shell.scrub.state().checked_bytes == 360
        assert shell.scrub.state().passes == 1


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_pass_does_not_begin_with_a_log_that_has_nothing_to_check(first: int) -> None:
    """The high watermark of a replica that restarts may be within a sealed segment."""
    disk, other = sealed_and_active(), LogId("a", 0)

    class Sizes(Source):
        def sizes(self) -> dict[LogId, int]:
            return {other: 10, **super().sizes()}

    shell = Shell(disk, first=first)
    for targets in ([], TARGETS):
        while step := shell.scrub.take_step(Sizes(targets), shell.now):
            result = run_step(disk, step)
            shell.scrub.finish_step(step, result, shell.now)
            shell.now += 10
    assert shell.scrub.state().checked_bytes == len(BYTES) + 60
    assert shell.scrub.state().passes == 1


@pytest.mark.slow
def test_a_step_looks_at_one_log() -> None:
    """However many there are; all have their turn, and no log is asked in between."""
    disk = sealed_and_active()
    logs = [LogId("test", number) for number in range(50)]
    targets = [
        replace(each, log_id=log_id) for log_id in reversed(logs) for each in TARGETS
    ]
    for first in (0, 7, 99, 1234):
        shell = Shell(disk, first=first)
        assert shell.step(targets)
        # The list, and the log that the pass begins with.
        assert len(shell.source.asked) == 3
        while shell.step(targets):
            assert len(shell.source.asked) <= 2
        checked = [(log, start) for log, start, _end in shell.steps]
        assert len(checked) == len(set(checked))
        assert {log for log, _ in checked} >= {f"{log_id}:0" for log_id in logs}
        assert shell.scrub.state().checked_bytes == 330 * len(logs)
        assert shell.scrub.state().passes == 1
        assert not shell.step(targets)
        assert shell.source.asked == []


def test_a_segment_that_the_disk_cannot_read_is_damaged(caplog) -> None:
    """The rest of it is named; the pass goes on with the next one.

    An index that it cannot read is logged, and made again where it has no writer.
    """
    disk = sealed_and_active()
    calls = disk.calls
    Shell(disk).run_pass(TARGETS)
    for operation in disk.log[calls:]:
        trial = sealed_and_active()
        before = content(trial, SPANS)
        shell = Shell(trial)
        trial.fail_at(operation.number - calls + trial.calls, errno.EIO)
        caplog.clear()
        shell.run_pass(TARGETS)
        assert shell.scrub.state().passes == 1
        assert trial.open_paths() == []
        details = [damage.detail for _log, damage in shell.damage]
        if operation.name == "close":
            continue
        reported = f"{operation.path} error=EIO"
        if operation.path.suffix == ".meta":
            (detail,) = details
            assert reported in detail
        else:
            assert details == []
            assert "going on without a span index" in caplog.text
            assert reported in caplog.text
            is_sealed = operation.path.name == SPANS
            assert (content(trial, SPANS) != before) == is_sealed
            totals = read_totals(trial, DIRECTORY / META, Offset(0))
            assert totals.end_offset == len(BYTES)


def test_what_says_nothing_about_the_disk_is_tried_again() -> None:
    """Want of descriptors passes: the step comes again, and nothing is damaged."""
    disk = sealed_and_active()
    shell = Shell(disk)
    for _ in range(2):
        disk.fail_at(disk.calls + 1, errno.EMFILE)
        with pytest.raises(DiskError, match="EMFILE"):
            shell.step(TARGETS)
    shell.run_pass(TARGETS)
    assert (shell.damage, shell.scrub.state().passes) == ([], 1)


def test_a_wrong_count_is_told(caplog) -> None:
    """The bytes are good, so the log goes on."""
    disk = disk_with_log()
    index = read_index(disk, DIRECTORY / META, Offset(0))
    assert index is not None
    first, *rest = index.spans
    wrong = (first._replace(record_count=9), *rest)
    write_index(disk, DIRECTORY / META, SpanIndex(Offset(0), spans=wrong))
    shell = Shell(disk)
    shell.run_pass([target(0, len(BYTES))])
    assert shell.damage == []
    assert "span index counts wrongly" in caplog.text
