"""Gets with a filter that look records up: what is passed over, and what never is."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.handlers.filtered_get import NEAR_BYTES, WINDOW_BYTES
from metaq.fs import FileSystem, ReadFile, SystemFileSystem
from metaq.model import Offset
from metaq.protocol.commands import NO_NEXT
from metaq.record.layout import encode_record
from metaq.storage.key_index import KEYS_SUFFIX, field_names, keys_path
from metaq.storage.key_merge import BlockMaker
from metaq.storage.segment import Damage, Segments
from tests.broker.filter_reader import (
    indexed,
    matches_in,
    put,
)
from tests.broker.filter_reader import run as run_with
from tests.broker.test_filtered_get import ColdDisk, value
from tests.rigs.broker import Peer

PAID = "tag = 'paid'"
run = partial(run_with, index="tag")
Puts = list[tuple[int, int]]


class WatchedDisk(SystemFileSystem):
    """A disk that says when an index is opened, and when a read begins."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        """Times that an index was opened."""
        self.on_check: Callable[[], object] = lambda: None
        self.on_read: Callable[[], object] = lambda: None

    def open_read(self, path: Path) -> ReadFile:
        file = super().open_read(path)
        if path.suffix == KEYS_SUFFIX:
            self.looks += 1
            self.on_check()
        else:
            file.__class__ = WatchedFile
            file.disk = self
        return file


class WatchedFile(ReadFile):
    """A file of it."""

    def is_cached(self, *range_: Any) -> bool:
        self.disk.on_read()
        return super().is_cached(*range_)


async def put_each(peer: Peer, *tags: str | None, size: int = 4) -> Puts:
    """Append messages one by one, so that each has a span."""
    return [each for tag in tags for each in await put(peer, tag, size=size)]


def scanned(broker: Any) -> int:
    """Return the bytes that were looked at since the last call."""
    counters = broker.context.counters
    count, counters.filter_scanned_bytes = counters.filter_scanned_bytes, 0
    return count


def log_of(broker: Any) -> Any:
    """Return the log."""
    return broker.context.topics.find_log("test", 0)


def test_only_what_may_match_is_looked_at(data_dir: Path) -> None:
    """The rest of the blocks is passed over, and what has no block is walked."""

    async def scenario(broker, peer, reader) -> None:
        tags = "void", "paid", "void", "void", "paid", "void", "void"
        puts = await put_each(peer, *tags)
        indexed_end = await indexed(broker, puts[-2][0])
        puts += await put_each(peer, "void", "paid")
        end, offsets = puts[-1][1], [puts[number][0] for number in (1, 4, 8)]
        looked_at = sum(end - at for at, end in (puts[1], puts[4])) + end - indexed_end
        for where, wanted in (
            (PAID, offsets),
            ("tag = 'paid' AND amount > 1", []),
            ("tag IN ('none', 'paid')", offsets),
        ):
            seen = await reader.read(0, where, dict(puts))
            assert seen == (wanted, [], end, 0)
            assert scanned(broker) == looked_at
        for where in ("tag <> 'void'", "tag = 'paid' OR amount = 1", "key = 'paid'"):
            await reader.read(0, where, dict(puts))
            assert scanned(broker) == end

    run(data_dir, scenario)


@pytest.mark.slow
def test_blocks_of_all_segments_are_passed_over(data_dir: Path) -> None:
    """In one get, where nothing matches."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, *["void"] * 60, "paid", "void", "void")
        assert len(log_of(broker).segments) > 2
        indexed_end = await indexed(broker, puts[-3][1])
        reply = value(await reader.get(puts[3][0], "tag = 'none'"))
        assert reply.next_offset == puts[-1][1]
        assert scanned(broker) == puts[-1][1] - indexed_end
        seen = await reader.read(puts[3][0], PAID, dict(puts))
        assert seen == ([puts[-3][0]], [], puts[-1][1], 0)

    run(data_dir, scenario, {"maxSegmentSize": "1000"})


def test_a_match_is_answered_before_another_index_is_asked(data_dir: Path) -> None:
    """Nothing is held in memory while a disk works."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, "void", "paid", *["void"] * 60, "paid", "void")
        await indexed(broker, puts[-1][0])
        reply = value(await reader.get(0, PAID))
        first = log_of(broker).segments.first
        assert list(matches_in(reply)) == [puts[1][0]]
        assert reply.next_offset == first.end_offset

    run(data_dir, scenario, {"maxSegmentSize": "1000"})


def test_known_damage_is_not_passed_over(data_dir: Path) -> None:
    """Between two hits, and before the first one: a get ends before it."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, "void", "paid", "void", "void", "paid", "void")
        await indexed(broker, puts[-2][0])
        log, (at, end) = log_of(broker), puts[2]
        path = log.segments.active.path
        log.on_damage(Damage(path, Offset(at), Offset(end), "zeros"))
        for where, wanted in ((PAID, [puts[1][0]]), ("tag = 'none'", [])):
            reply = value(await reader.get(0, where))
            assert (list(matches_in(reply)), reply.next_offset) == (wanted, at)
            assert "[damaged" in (await reader.get(at, where)).text
        reply = value(await reader.get(end, PAID))
        assert list(matches_in(reply)) == [puts[4][0]]

    run(data_dir, scenario)


def test_a_listed_record_that_is_damaged_stops_a_get(data_dir: Path) -> None:
    """It may have matched; at its own offset it is answered plainly."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, *["void", "paid"] * 3, "void", "void")
        await indexed(broker, puts[-2][0])
        path = log_of(broker).segments.active.path
        data = bytearray(path.read_bytes())
        data[puts[3][1] - 1] ^= 1
        path.write_bytes(data)
        reply = value(await reader.get(0, PAID))
        assert (list(matches_in(reply)), reply.next_offset) == (
            [puts[1][0]],
            puts[3][0],
        )
        reply = value(await reader.get(puts[3][0], PAID))
        assert (reply.payload, reply.next_offset) == (data[puts[3][0] :], NO_NEXT)
        # What the index does not name is of no account.
        reply = value(await reader.get(0, "tag = 'none'"))
        assert reply.next_offset == puts[-1][1]

    run(data_dir, scenario)


@pytest.mark.slow
def test_a_damaged_index_is_made_again_and_the_log_walked(data_dir: Path) -> None:
    """As where the disk does not give the index."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, *["void", "paid"] * 40)
        log, distrusted = log_of(broker), []
        sealed_end = log.segments.active.base_offset
        await indexed(broker, sealed_end, block_bytes=1 << 20)
        broker.context.key_builder.distrust = distrusted.append
        segment = log.segments.first
        path = keys_path(segment.path, segment.base_offset)
        good = path.read_bytes()
        path.write_bytes(good[:60] + bytes(len(good) - 60))
        seen = await reader.read(0, PAID, dict(puts))
        assert seen == ([start for start, _ in puts[1::2]], [], puts[-1][1], 0)
        assert set(distrusted) == {(log.log_id, segment.base_offset, (b"h.tag=",))}
        path.unlink()
        path.mkdir()  # reading it is an error
        seen = await reader.read(0, PAID, dict(puts))
        assert seen == ([start for start, _ in puts[1::2]], [], puts[-1][1], 0)

    run(data_dir, scenario, {"maxSegmentSize": "1000"})


def claim(log: Any, hits: Puts) -> None:
    """Write an index that names no other records: that of other bytes."""
    maker, end = BlockMaker(Offset(0), field_names(("tag",))), log.high_watermark
    record = encode_record(b"\0\0\0\x0ah.tag=paid", flag=3, id=1)
    for at, _end in hits:
        maker.add(record, Offset(at))
    path = keys_path(log.segments.active.path, Offset(0))
    path.write_bytes(b"".join(maker.encode(Offset(0), end)))


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("is_lower", [False, True])
def test_a_cut_during_a_look_voids_what_it_said(
    data_dir: Path, is_cut: bool, is_lower: bool
) -> None:
    """Its files are opened again, or the high watermark is before that."""
    disk = WatchedDisk()

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, "void", "paid", "void", "void")
        log = log_of(broker)
        end = log.high_watermark
        claim(log, [])

        def cut() -> None:
            if disk.looks == 1 and is_lower:
                log.high_watermark = Offset(puts[1][1])
            elif disk.looks == 1:
                log.segments = Segments([replace(each) for each in log.segments])
                keys_path(log.segments.active.path, Offset(0)).unlink()

        disk.on_check = cut if is_cut else disk.on_check
        reply = value(await reader.get(0, PAID))
        assert list(matches_in(reply)) == ([puts[1][0]] if is_cut else [])
        assert reply.next_offset == log.high_watermark
        assert disk.looks
        log.high_watermark = end

    run(data_dir, scenario, None, disk)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_cut_between_two_steps_voids_it_too(data_dir: Path, is_cut: bool) -> None:
    """Records after the hit that was read are not passed over."""
    disk = WatchedDisk()

    async def scenario(broker, peer, reader) -> None:
        tags = "void", "paid", "paid", "paid"
        puts = await put_each(peer, *tags, size=NEAR_BYTES)
        log, reads = log_of(broker), []
        claim(log, [puts[1], puts[3]])

        def cut() -> None:
            reads.append(1)
            if len(reads) == 2:  # all of the first hit
                log.segments = Segments([replace(each) for each in log.segments])
                keys_path(log.segments.active.path, Offset(0)).unlink()

        await reader.get(0, None)  # opens the file
        disk.on_read = cut if is_cut else disk.on_read
        seen = await reader.read(0, PAID, dict(puts))
        assert seen.offsets == [puts[n][0] for n in ((1, 2, 3) if is_cut else (1, 3))]

    run(data_dir, scenario, None, disk)


@pytest.mark.parametrize("fs", [None, ColdDisk()], ids=["warm", "cold"])
def test_large_records_are_looked_up_whole(data_dir: Path, fs: FileSystem | None):
    """One that is larger than the get is answered plainly, at its own offset."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, "void", "paid", "paid", "void", size=5000)
        puts += await put_each(peer, "paid", "void", size=2 * WINDOW_BYTES)
        puts += await put_each(peer, "paid", "void", "void")
        await indexed(broker, puts[-2][0])
        seen = await reader.read(0, PAID, dict(puts))
        offsets = [puts[number][0] for number in (1, 2, 4, 6)]
        assert seen == (offsets, [], puts[-1][1], 0)
        reply = value(await reader.get(puts[3][0], PAID, size=WINDOW_BYTES))
        assert (reply.payload, reply.next_offset) == (b"", puts[4][0])
        reply = value(await reader.get(puts[4][0], PAID, size=WINDOW_BYTES))
        assert (len(reply.payload), reply.next_offset) == (WINDOW_BYTES, NO_NEXT)

    run(data_dir, scenario, None, fs)


@pytest.mark.slow
def test_a_reply_keeps_its_size_and_a_get_its_steps(data_dir: Path) -> None:
    """The next offset is that of the first match which is not in it."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, *["paid", "void"] * 40)
        await indexed(broker, puts[-2][0])
        size = puts[0][1] - puts[0][0] + 12
        reply = value(await reader.get(0, PAID, size=3 * size))
        assert len(reply.payload) == 3 * size
        assert reply.next_offset == puts[6][0]
        broker.context.filter_work.turn_s = 0.0
        reply = value(await reader.get(0, PAID))
        assert len(list(matches_in(reply))) <= 16 * 16
        seen = await reader.read(0, PAID, dict(puts))
        assert seen.offsets == [start for start, _ in puts[::2]]

    run(data_dir, scenario)


def test_common_fields_are_walked(data_dir: Path) -> None:
    """The index is asked once in a get."""
    disk = WatchedDisk()

    async def scenario(broker, peer, reader) -> None:
        puts = await put(peer, *["paid"] * 200)
        more = await put_each(peer, "void", "void")
        await indexed(broker, puts[-1][1], block_bytes=puts[-1][1])
        reply = value(await reader.get(0, PAID))
        assert len(list(matches_in(reply))) == 200
        assert (scanned(broker), disk.looks > 0) == (more[-1][1], True)

    run(data_dir, scenario, None, disk)


def test_the_last_bytes_of_a_log_are_not_looked_up(data_dir: Path) -> None:
    """A consumer that keeps up has no use for an index."""
    disk = WatchedDisk()

    async def scenario(broker, peer, reader) -> None:
        puts = await put_each(peer, "paid", "void", "void", size=5000)
        await indexed(broker, puts[0][1])
        disk.looks = 0
        broker.context.filter_look_bytes = puts[-1][1] - puts[1][0] + 1
        value(await reader.get(puts[1][0], PAID))
        assert not disk.looks
        value(await reader.get(puts[0][0], PAID))
        assert disk.looks

    run(data_dir, scenario, None, disk)
