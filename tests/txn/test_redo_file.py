"""Offsets that are rewritten in a redo file, many by one write."""

import errno
from pathlib import Path

import pytest

from metaq.model import Offset
from metaq.txn.records import OFFSET
from metaq.txn.redo_file import BLOCK_BYTES_MAX, OffsetBlock, OffsetsFile, make_blocks
from tests.rigs.fs import FaultyFileSystem

REDO = Path("/redo.1")
START = 100
"""Bytes of the file in front of the data."""


def places_file(fs: FaultyFileSystem, data: bytes) -> OffsetsFile:
    file = fs.open_append(REDO, create=True)
    file.write(bytes(START) + data)
    file.close()
    return OffsetsFile(fs.open_update(REDO))


def content(fs: FaultyFileSystem) -> bytes:
    return fs.read_file(REDO, 1 << 20)[START:]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranges", "shared"),
    [
        ([(10, 18)], [0]),
        ([(10, 18), (300, 340), (BLOCK_BYTES_MAX + 2, BLOCK_BYTES_MAX + 10)], [0] * 3),
        ([(10, 18), (BLOCK_BYTES_MAX + 3, BLOCK_BYTES_MAX + 11)], [0, 1]),
        ([(0, 2 * BLOCK_BYTES_MAX), (40_000, 40_008), (40_100, 40_108)], [0, 1, 1]),
    ],
    ids=["one", "as long as may be", "too long", "one record is longer"],
)
def test_records_that_lie_close_together_share_a_block(
    ranges: list[tuple[int, int]], shared: list[int]
) -> None:
    """Whatever is noted in which of them, no other byte of the file changes."""
    data = bytes(range(256)) * 200
    fs = FaultyFileSystem()
    file = places_file(fs, data)
    blocks = make_blocks(file, START, data, ranges)
    first_seen = list(dict.fromkeys(blocks))
    assert [first_seen.index(block) for block in blocks] == shared
    wanted = bytearray(data)
    for (low, high), block in zip(ranges, blocks, strict=True):
        for at in {low, high - OFFSET.size}:
            block.note(START + at, Offset(at + 7))
            OFFSET.pack_into(wanted, at, at + 7)
    for block in first_seen:
        block.write()
    assert content(fs) == wanted


def test_what_another_thread_has_written_is_not_written_again() -> None:
    """Two partitions have batches of one group: the second finds its place there."""
    data = bytes(64)
    fs = FaultyFileSystem()
    block: OffsetBlock = make_blocks(places_file(fs, data), START, data, [(8, 64)])[0]
    block.note(START + 40, Offset(5))
    block.note(START + 8, Offset(6))
    before = len(fs.log)
    block.write()
    block.write()
    assert [(each.name, each.size) for each in fs.log[before:]] == [("write", 40)]
    block.note(START + 16, Offset(7))
    block.write()
    assert fs.log[-1].size == OFFSET.size
    assert content(fs)[8:24] == OFFSET.pack(6) + OFFSET.pack(7)


def test_a_file_that_is_closed_or_refuses_is_left_alone() -> None:
    """Its descriptor may be another file's; a place that is not written costs less."""
    data = bytes(64)
    fs = FaultyFileSystem()
    file = places_file(fs, data)
    block = make_blocks(file, START, data, [(8, 64)])[0]
    block.note(START + 8, Offset(1))
    fs.fail_at(fs.calls + 1, errno.EIO, taken=0)
    block.write()
    file.close()
    block.note(START + 16, Offset(2))
    block.write()
    assert content(fs) == data
