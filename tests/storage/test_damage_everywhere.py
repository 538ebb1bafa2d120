"""Random damage: verify, the scrub, gets and the next start name the same ranges."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from metaq.errors import CorruptRecordError
from metaq.fs import SystemFileSystem
from metaq.model import Offset, SizeBytes
from metaq.storage.log_snapshots import ScrubbedLogs
from metaq.storage.log_writer import UNSYNCED_BYTES_MAX
from metaq.storage.partition_log import PartitionLog
from metaq.storage.scrub import Scrub, run_step
from metaq.storage.segment import Segment, segment_file_name
from metaq.storage.verify import FindingKind, verify_directory
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import LOG, config, content_of, log_of

FS = SystemFileSystem()
SEGMENT_BYTES = 3000
Ranges = list[tuple[int, int | None]]


@dataclass
class Injected:
    """Damage done to a log."""

    offsets: set[int] = field(default_factory=set)
    """Offsets whose bytes are changed or gone."""
    long: set[int] = field(default_factory=set)
    """Offsets at which files should end, and have more bytes."""
    ends: set[int] = field(default_factory=set)
    """Offsets at which a file may be too long, of which nothing is believed."""


def stored(directory: Path, seed: int) -> tuple[StorageBench, PartitionLog]:
    """Return a log of about six segments, with records of all sizes in small spans."""
    settings = config(segment_bytes_max=SEGMENT_BYTES)
    object.__setattr__(settings.system, "data_path", str(directory))
    object.__setattr__(settings.limits, "span_bytes_min", 300)
    bench = StorageBench(FS, settings)
    bench.open()
    log, chance = log_of(bench), random.Random(seed)
    while len(log.segments) < 7:
        sizes = [
            chance.choice([0, 1, 15, 60, 150]) for _ in range(chance.randint(1, 9))
        ]
        bench.append(log, [chance.randbytes(size) for size in sizes], Ticket())
        bench.run()
    return bench, log


def rewrite(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    with path.open("r+b") as file:
        file.write(data)
        file.truncate(len(data))


def flip(segment: Segment, chance: random.Random, injected: Injected) -> None:
    """Flip bits anywhere: in headers, lengths and payloads, close to each other."""
    first = chance.randrange(segment.size_bytes)
    for _ in range(chance.randint(1, 4)):
        at = min(first + chance.choice([0, 1, 9, 40, 200]), segment.size_bytes - 1)
        if segment.base_offset + at in injected.offsets:
            continue

        def change(data: bytearray, at: int = at) -> None:
            data[at] ^= 1 << chance.randrange(8)

        rewrite(segment.path, change)
        injected.offsets.add(segment.base_offset + at)


def zero(segment: Segment, chance: random.Random, injected: Injected) -> None:
    """Make a run of bytes zero, as a lost sector is."""
    start = chance.randrange(segment.size_bytes)
    end = min(start + chance.choice([1, 20, 64, 512]), segment.size_bytes)

    def change(data: bytearray) -> None:
        for at in range(start, end):
            if data[at]:
                injected.offsets.add(segment.base_offset + at)
        data[start:end] = bytes(end - start)

    rewrite(segment.path, change)


def truncate(segment: Segment, chance: random.Random, injected: Injected) -> None:
    """Cut the file anywhere."""
    size = chance.randrange(segment.size_bytes)
    rewrite(segment.path, lambda data: data.__delitem__(slice(size, None)))
    injected.offsets |= {
        segment.base_offset + at for at in range(size, segment.size_bytes)
    }


def remove(segment: Segment, chance: random.Random, injected: Injected) -> None:
    """Remove the file; its index may go too."""
    segment.path.unlink()
    if chance.randrange(2):
        segment.path.with_suffix(".spans").unlink()
    injected.offsets |= set(range(segment.base_offset, segment.end_offset))


def lengthen(segment: Segment, chance: random.Random, injected: Injected) -> None:
    """Append bytes to the file of a sealed segment: garbage, or records."""
    data = segment.path.read_bytes()
    more = chance.choice([b"garbage", data[:700], bytes(100)])
    rewrite(segment.path, lambda data: data.extend(more))
    injected.long.add(segment.end_offset)


def overlap(segment: Segment, chance: random.Random, injected: Injected) -> None:
    """Add a file that begins within a segment; nothing of it is believed."""
    base = Offset(segment.base_offset + chance.randrange(1, segment.size_bytes))
    path = segment.path.with_name(segment_file_name(base))
    path.write_bytes(segment.path.read_bytes()[: chance.choice([0, 50, 5000])])
    injected.offsets |= set(range(base, segment.end_offset))
    injected.ends.add(segment.end_offset)


def scrubbed(bench: StorageBench) -> None:
    """Run one pass of the scrub, as housekeeping does."""
    manager = bench.manager
    scrub = Scrub(
        bytes_per_s=1000, span_bytes_min=300, first=3, on_damage=manager.on_damage
    )
    now = 0.0
    while scrub.state().passes == 0:
        step = scrub.take_step(ScrubbedLogs(manager.logs()), now)
        if step is not None:
            scrub.finish_step(step, run_step(FS, step), now)
        now += 60


def verified(directory: Path, *, in_use: bool) -> Ranges:
    """Return what `metaq verify` names."""
    report = verify_directory(
        FS, directory, in_use=in_use, unsynced_bytes_max=SizeBytes(UNSYNCED_BYTES_MAX)
    )
    return [
        (found.offset or 0, found.next_good_offset)
        for found in report.findings
        if found.kind is FindingKind.DAMAGE
    ]


def named(log: PartitionLog) -> Ranges:
    return [(found.offset, found.next_good_offset) for found in log.damage]


def check_gets(log: PartitionLog, data: bytes) -> None:
    """Gets within a range fail and name it; all others give what was stored."""
    offset = Offset(0)
    while offset < log.high_watermark:
        covering = [found for found in log.damage if found.covers(offset)]
        if covering:
            with pytest.raises(CorruptRecordError, match="next_good_offset") as caught:
                log.read(offset, 1 << 20)
            good = caught.value.next_good_offset
            assert good == covering[0].next_good_offset
            if good is None:
                return
            offset = good
            continue
        found = log.read(offset, 1 << 20)
        got = found.read()
        found.release()
        assert got == data[offset : offset + len(got)]
        offset = Offset(offset + len(got))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("seed", range(60))
def test_what_is_damaged_is_named_by_all_and_nothing_else(
    tmp_path: Path, seed: int
) -> None:
    """Beside the broker, without one, and by the next broker."""
    chance = random.Random(seed)
    bench, log = stored(tmp_path, seed)
    data, injected = content_of(log), Injected()
    # No file is open that is cut later: each get finds out by itself.
    bench.close()
    bench = StorageBench(FS, bench.config)
    bench.open()
    log = log_of(bench)
    sealed = list(log.segments.sealed[1:])
    chance.shuffle(sealed)
    kinds = [flip, flip, zero, truncate, remove, lengthen, overlap]
    for segment in sealed[: chance.randint(1, 4)]:
        kind = chance.choice(kinds)
        is_behind_more = segment.base_offset in injected.long
        is_before_none = segment.end_offset in injected.offsets
        if (kind is remove and is_behind_more) or (kind is lengthen and is_before_none):
            continue  # whole records there pass for those that are missing
        kind(segment, chance, injected)
        if kind is flip and chance.randrange(2):
            flip(segment, chance, injected)
    beside = verified(tmp_path, in_use=True)
    for offset in injected.offsets:
        assert any(a <= offset and (b is None or offset < b) for a, b in beside), offset
    for offset in injected.long:
        assert any(a <= offset and (b is None or offset <= b) for a, b in beside)
    scrubbed(bench)
    assert named(log) == beside
    check_gets(log, data)
    # Nothing that is intact: each range has damage, and ends with its last span.
    for start, good in beside:
        assert good is not None
        touched = {at for at in injected.offsets if start <= at < good}
        assert touched or good in injected.long | injected.ends
        assert start == good or good - max(touched) < 300 + 9 * 170
    bench.close()
    assert verified(tmp_path, in_use=False) == beside
    again = StorageBench(FS, bench.config)
    again.open()
    log = log_of(again)
    scrubbed(again)
    assert named(log) == beside
    check_gets(log, data)
    again.close()
    assert LOG in again.manager.logs()
