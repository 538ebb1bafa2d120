"""One partition: reads, and waits for what can be read."""

import errno
from pathlib import Path

import pytest

from metaq.errors import DiskError, OffsetOutOfRangeError
from metaq.model import Offset
from metaq.storage.log_state import LogState
from metaq.storage.segment import Damage
from tests.rigs.fs import FaultyFileSystem
from tests.storage.support import RECORD, content_of, filled, log_of, opened, put

# -- reads


NEAREST = [
    (-100, 0),
    (0, 0),
    (1023, 0),
    (1024, 1024),
    (2000, 1024),
    (2049, 2048),
    (3073, 3072),
    (4096, 4096),
    (16384, 4096),
]


@pytest.mark.parametrize(("offset", "nearest"), NEAREST)
def test_the_nearest_offset_is_a_segment_start_or_a_bound(
    fs: FaultyFileSystem, offset: int, nearest: int
) -> None:
    """MetaQ's matrix: four segments of 1024 bytes from 0 on."""
    bench, log = filled(fs)
    assert log.nearest_offset(Offset(offset)) == nearest
    bench.close()


@pytest.mark.parametrize(
    ("offset", "size", "position", "expected"),
    [
        (0, 10, 0, 10),
        (1, 10, 1, 10),
        (1000, 4096, 1000, 24),
        (1023, 4096, 1023, 1),
        (1024, 4096, 0, 1024),
        (4000, 4096, 928, 96),
        (0, 1, 0, 1),
    ],
)
def test_a_slice_ends_with_its_segment(
    fs: FaultyFileSystem, offset: int, size: int, position: int, expected: int
) -> None:
    """A slice never spans two segments; offsets need not be record boundaries."""
    bench, log = filled(fs)
    found = log.read(Offset(offset), size)
    assert (found.position, found.size_bytes) == (position, expected)
    assert found.read() == content_of(log)[offset : offset + expected]
    found.release()
    bench.close()


@pytest.mark.parametrize("offset", [-1, 4096, 10_000, 2**63 - 1])
def test_an_offset_without_a_readable_byte_is_out_of_range(
    fs: FaultyFileSystem, offset: int
) -> None:
    """The error carries both bounds; the high watermark itself is out of range."""
    bench, log = filled(fs)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        log.read(Offset(offset), 10)
    assert (caught.value.log_start, caught.value.high_watermark) == (0, 4096)
    assert caught.value.offset == offset
    bench.close()


def test_bytes_in_flight_cannot_be_read(fs: FaultyFileSystem) -> None:
    """A slice stops at the high watermark although the file is longer."""
    bench = opened(fs, unflush_threshold=100)
    log = log_of(bench)
    put(bench, log)
    bench.run()
    with pytest.raises(OffsetOutOfRangeError):
        log.read(Offset(0), 10)
    assert log.statistics().log_end == RECORD
    bench.close()


def test_a_slice_in_flight_survives_the_end_of_its_segment(
    fs: FaultyFileSystem,
) -> None:
    """A get that is being sent goes on while retention removes the file."""
    bench, log = filled(fs)
    held = log.read(Offset(100), 50)
    expected = held.read()
    segment = log.segments.first
    fs.unlink(segment.path)
    log.on_removed(segment, 2)
    assert held.read() == expected
    held.release()
    assert log.log_start_offset == 1024
    assert log.record_count == 6
    with pytest.raises(OffsetOutOfRangeError):
        log.read(Offset(100), 50)
    assert log.nearest_offset(Offset(0)) == 1024
    bench.close()
    assert fs.open_paths() == []


def test_a_file_that_cannot_be_opened_fails_that_get_alone(
    fs: FaultyFileSystem,
) -> None:
    """EIO on opening is the answer to one get; the log stays open."""
    bench, log = filled(fs)
    found = log.read(Offset(100), 50)
    fs.fail_at(fs.calls + 1, errno.EIO)
    with pytest.raises(DiskError):
        found.open()
    assert len(found.read()) == 50
    found.release()
    assert log.state is LogState.OPEN
    bench.close()


# -- waiters


def test_a_waiter_is_woken_once_when_its_byte_is_readable(fs: FaultyFileSystem) -> None:
    """A long poll at the end of the log hears of the next put."""
    bench = opened(fs)
    log = log_of(bench)
    woken: list[str] = []
    log.wait(Offset(0), lambda: woken.append("first"))
    log.wait(Offset(RECORD), lambda: woken.append("second"))
    cancelled = log.wait(Offset(0), lambda: woken.append("cancelled"))
    assert log.statistics().waiter_count == 3
    cancelled.cancel()
    cancelled.cancel()
    put(bench, log)
    bench.run()
    assert woken == ["first"]
    put(bench, log)
    bench.run()
    assert woken == ["first", "second"]
    assert log.statistics().waiter_count == 0
    bench.close()


def test_a_waiter_for_a_readable_byte_is_called_at_once(fs: FaultyFileSystem) -> None:
    """No put is needed when the byte is there already."""
    bench, log = filled(fs, 1)
    woken: list[bool] = []
    handle = log.wait(Offset(0), lambda: woken.append(True))
    assert woken == [True]
    handle.cancel()
    bench.close()


@pytest.mark.parametrize("event", ["damage", "offline", "close"])
def test_a_waiter_hears_that_the_log_stops(fs: FaultyFileSystem, event: str) -> None:
    """No waiter is left on a log that takes no more puts."""
    bench = opened(fs)
    log = log_of(bench)
    woken: list[bool] = []
    log.wait(Offset(0), lambda: woken.append(True))
    if event == "damage":
        log.on_damage(Damage(Path("x"), Offset(0), None, "rot"))
    elif event == "offline":
        put(bench, log)
        fs.fail_at(fs.calls + 1, errno.EIO)
        bench.run()
    else:
        bench.close()
    assert woken == [True]
    bench.run()
