"""Power cuts that tear the offset of a batch, and take the checksums of the journal.

The offset is written over its bound in place, right before the batch, and not synced;
nor are the checksums (`redo_file.py`).
"""

import pytest

from metaq.errors import StorageError
from metaq.model import LogId, MessageId, Offset
from metaq.testing.clock import ManualClock
from metaq.txn.opening import encode_transaction, journal_numbers
from metaq.txn.records import BatchLocation, OperationRecord, decode_record
from metaq.txn.recovery import ReplayedTransaction, find_unapplied
from tests.rigs.fs import FaultyFileSystem
from tests.txn.support import DATA, JOURNAL, A, TransactionBench, opened

KEY = "TX:s:1"
BEFORE, BESIDE, BATCH = b"b" * 220, b"put beside..", [b"first", b"second"]
BOUND, OFFSET = 0xF0, 0x110
"""End of the log at the commit, and where the batch is: after what came in between."""
TEARS = {6: 0x00F0, 7: 0x01F0, 8: 0x0110}
"""Bytes of the new offset that are on the disk → the value that a start finds."""


def committed(jump_ms: int, *, is_prepared: bool) -> TransactionBench:
    """Return a bench whose clock jumped before a commit that was carried out."""
    bench = opened(FaultyFileSystem(), clock=ManualClock())
    bench.put_outside(A, BEFORE)
    bench.run()
    key = "XID:1:0a::uq" if is_prepared else KEY
    bench.begin(key)
    for payload in BATCH:
        bench.put(key, A, payload)
    if is_prepared:
        bench.prepare(key)
    bench.run()
    bench.clock.jump_wall_ms(jump_ms)
    bench.commit(key, is_two_phase=is_prepared)
    bench.put_outside(A, BESIDE)
    bench.run()
    assert bench.payloads() == [BEFORE, BESIDE, *BATCH]
    return bench


def cut_power(bench: TransactionBench, kept_bytes: int) -> FaultyFileSystem:
    """Return the disk after a power cut: of the journal what was synced is left.

    Of the offset that was rewritten the first bytes are there as well.
    """
    (number,) = journal_numbers(bench.fs, JOURNAL)
    fs, redo, sums = bench.fs, JOURNAL / f"redo.{number}", JOURNAL / f"sums.{number}"
    for directory in (DATA, DATA / "test-0", JOURNAL):
        for name in fs.names_in(directory):
            path = directory / name
            if path not in {redo, sums} and not fs.is_directory(path):
                fs.write_back(path)
    choices = iter({6: (0,), 7: (1, 0), 8: (2,)}[kept_bytes])
    return fs.crash(lambda _count: next(choices, 0))


@pytest.mark.parametrize("jump_ms", [0, -3_600_000, 3_600_000])
@pytest.mark.parametrize("kept_bytes", TEARS)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_batch_is_found_where_its_offset_is_torn_and_its_checksums_are_lost(
    jump_ms: int, kept_bytes: int, *, is_prepared: bool
) -> None:
    """Whatever the wall clock says: it was searched for by that, and stored twice
    where the clock was set back before the commit.
    """
    bench = committed(jump_ms, is_prepared=is_prepared)
    disk = cut_power(bench, kept_bytes)
    (number,) = journal_numbers(disk, JOURNAL)
    assert disk.content(JOURNAL / f"sums.{number}") == b""
    redo = disk.content(JOURNAL / f"redo.{number}")
    value = TEARS[kept_bytes].to_bytes(8, "big")
    assert value in redo
    bench.kill()
    again = opened(disk, clock=bench.clock)
    assert again.payloads() == [BEFORE, BESIDE, *BATCH]
    again.kill()
    assert opened(again.fs).payloads() == [BEFORE, BESIDE, *BATCH]


class Partition:
    """One that ends at an offset, or cannot be read."""

    def __init__(self, end: Offset | None) -> None:
        self._end = end

    def readable_range(self, _log_id: LogId) -> tuple[Offset, Offset]:
        return Offset(0), Offset(100) if self._end is None else self._end

    def read_back(self, _log_id: LogId, _offset: Offset, _size_bytes: int) -> bytes:
        raise StorageError("cannot be read")

    def hold(self, _log_id: LogId, _offset: Offset) -> None:
        raise AssertionError("nothing is cut")


@pytest.mark.parametrize(
    ("end", "known", "wanted"),
    [(7, {}, 7), (7, {A: 7}, 7), (None, {A: 5}, 5), (None, {}, None)],
    ids=["read", "read, and known", "not read, and known", "not read"],
)
def test_what_a_start_writes_again_has_the_bounds_that_are_known(
    end: int | None, known: dict[LogId, Offset], wanted: int | None
) -> None:
    """An offset that may be torn is none, where its partition could not be read."""
    torn = BatchLocation(A, Offset(9), 21, 5)
    put = MessageId(1 << 40), b"put test 0 1 0 -1 TX:s:1 1\r\nx"
    commit = ReplayedTransaction(KEY, {put: None}, locations=(torn,), bounds=known)
    reader = Partition(None if end is None else Offset(end))
    (left,) = find_unapplied([commit], reader)
    data = encode_transaction(left)
    _put, after = decode_record(data, 0, len(data))
    record, _end = decode_record(data, after, len(data))
    assert isinstance(record, OperationRecord)
    assert record.bounds == ({} if wanted is None else {A: wanted})
