"""Power cuts before the first sync of a commit: some of its pages are on the disk.

The records in one page are whole then, and those in another one are not. Checksums are
written after the sync, so none says which (`recovery.py`).
"""

import random

import pytest

from metaq.model import LogId, MessageId, Offset
from metaq.record.checksum import checksum
from metaq.txn.records import (
    BatchLocation,
    RedoOperation,
    encode_operation,
    encode_put,
)
from metaq.txn.recovery import Replay
from metaq.txn.sums import Sums, decode_sums, encode_head, encode_span
from tests.rigs.disk import PAGE_BYTES, Choose
from tests.rigs.fs import FaultyFileSystem, crash_points
from tests.sampling import sample
from tests.txn.support import DATA, JOURNAL, A, B, each_once, opened

KEY, XA = "TX:s:1", "XID:1:0a::uq"
REDO = JOURNAL / "redo.1"


def torn_after(number: int) -> Choose:
    """Return what is left of a new file: its first page is torn, the rest is kept.

    It has `number` bytes after the first one that is not zero, or is whole.
    """
    choices = iter((None, 2, number))

    def choose(count: int) -> int:
        choice = next(choices, None)
        return count - 1 if choice is None else choice

    return choose


@pytest.mark.slow
@pytest.mark.parametrize("sync_mode", [0, 1, 2])
@pytest.mark.parametrize("size", [10, 3000])
def test_what_is_committed_is_what_was_put(
    size: int, sync_mode: int, rng: random.Random
) -> None:
    """Wherever the page of its puts is torn: in a payload, a line, an id, a length."""
    bench = opened(FaultyFileSystem(), sync_mode=sync_mode)
    bench.begin(KEY)
    payloads = [b"%d:%b" % (n, b"x" * size) for n in range(12_000 // (60 + size))]

    def go_on() -> None:
        for number, payload in enumerate(payloads):
            bench.put(KEY, (A, B)[number % 2], payload)
        bench.commit(KEY)
        bench.run()

    point = crash_points(bench.fs, go_on, lambda: None)[0]
    assert point.operation is not None
    assert point.operation.path == REDO
    for path in (DATA / ".lock", JOURNAL / ".lock"):
        point.disk.write_back(path)
    whole = point.disk.content(REDO)
    assert len(whole) > 2 * PAGE_BYTES
    cuts = [
        *sample(range(PAGE_BYTES - 9), 100, rng),
        *range(PAGE_BYTES - 9, PAGE_BYTES),
    ]
    is_torn = set[bool]()
    for cut in cuts:
        disk = point.disk.crash(torn_after(cut))
        is_whole = disk.content(REDO) == whole
        is_torn.add(not is_whole)
        again = opened(disk)
        assert each_once(again.payloads()) == (set(payloads) if is_whole else set())
        assert not again.coordinator.views()
        again.kill()
    assert is_torn == {True, False}


@pytest.mark.parametrize(
    ("sent", "sums", "is_read"),
    [
        (checksum(b"x"), b"", True),
        (checksum(b"y"), b"", False),
        (-1, b"", True),
        (checksum(b"y"), None, True),
    ],
    ids=["whole", "torn", "without a checksum", "of a Java broker"],
)
def test_a_prepare_counts_if_its_puts_have_the_checksums_that_were_sent(
    sent: int, sums: bytes | None, *, is_read: bool
) -> None:
    """A Java broker takes any; it makes no file of checksums, not even an empty one."""
    data = put_and_prepare(sent)
    replay = Replay()
    replay.read(data, Sums() if sums is None else decode_sums(sums, 1), "redo.1")
    assert [each.key for each in replay.prepared()] == ([XA] if is_read else [])
    torn = f"torn tail of the journal ignored: file=redo.1 position=0 bytes={len(data)}"
    assert replay.notes == ([] if is_read else [torn])


def test_a_commit_of_what_is_over_is_read_over() -> None:
    """Nothing of it is in the journal, so there is nothing to compare."""
    place = BatchLocation(LogId("test", 0), Offset(0), 21, 5)
    kind = RedoOperation.LOCAL_COMMIT
    data = encode_operation(kind, KEY, locations=[place], has_bounds=True)
    replay = Replay()
    replay.read(data + put_and_prepare(-1), Sums(), "redo.1")
    assert ([each.key for each in replay.prepared()], replay.notes) == ([XA], [])


def test_a_put_that_is_none_ends_what_is_read_without_checksums() -> None:
    """Its length is right, and a page of its line is missing."""
    whole = put_and_prepare(-1)
    replay = Replay()
    replay.read(whole + whole.replace(b" -1 ", b" \0\0 "), Sums(), "redo.1")
    assert [each.key for each in replay.prepared()] == [XA]
    size = len(whole)
    torn = f"torn tail of the journal ignored: file=redo.1 position={size} bytes={size}"
    assert replay.notes == [torn]


def test_bytes_that_have_their_checksum_are_believed() -> None:
    """They are what was written, also where a broker took a put by mistake."""
    data = put_and_prepare(checksum(b"y"))
    span = encode_span(0, data, is_synced=False)
    replay = Replay()
    replay.read(data, decode_sums(encode_head(1) + span, 1), "redo.1")
    assert [each.key for each in replay.prepared()] == [XA]


def put_and_prepare(sent: int) -> bytes:
    """Return the records of a transaction whose put has a checksum in its line."""
    line = b"put test 0 1 0 %d %b 1\r\nx" % (sent, XA.encode())
    prepare = encode_operation(RedoOperation.XA_PREPARE, XA)
    return encode_put(MessageId(1 << 40), line) + prepare
