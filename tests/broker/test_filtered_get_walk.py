"""A random machine: a reader with a filter gets what a plain reader gets and matches.

Each walk appends, rolls, trims, flips bytes and reads, from any record on, with gets of
any size, and from a disk that is warm or cold. It makes an index of tags and keys,
damages it, and cuts the log. A list of all records says what is to come, and where
damage has to stop the reader: with an index, where a record is damaged that matched.
"""

import asyncio
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from metaq.config.settings import DeleteKind, DeletePolicy
from metaq.filter.language import parse_filter
from metaq.fs import SystemFileSystem
from metaq.model import Offset
from metaq.protocol.commands import NO_NEXT, Put, Result, Value
from metaq.protocol.encoding import encode
from metaq.record.flags import decode_payload, encode_payload
from metaq.record.layout import HEADER_BYTES
from metaq.storage.cut import cut_log
from metaq.storage.key_index import keys_path
from metaq.storage.retention_run import remove_segment
from tests.broker.filter_reader import INDEX_SETTINGS, FilterReader, make_index
from tests.broker.test_queue_part import ColdDisk
from tests.rigs.broker import CONFIG, Peer, running_broker
from tests.rigs.inside import log_manager_of
from tests.rigs.waiting import until

INDEXED = CONFIG.replace("[topic=test]", "[topic=test]\nindex=tag,key")

FILTERS = (
    "tag = 'paid'",
    "tag IN ('paid', 'void') AND amount > 5",
    "tag = 'it''s' OR key = 'k2'",
    "NOT tag = 'paid'",
    "tag IS NULL",
    "attribute LIKE 'Ja%' OR key = 'k1'",
    "tag = 'never'",
    "attribute IS NULL OR attribute IS NOT NULL",
)
STEPS = 40


class Entry(NamedTuple):
    """A record of the log."""

    offset: int
    end: int
    payload: bytes
    flag: int

    def matches(self, where: str) -> bool:
        found = decode_payload(self.payload, self.flag)
        return parse_filter(where).matches(found.key, found.headers, found.attribute)


class FilterWalk:
    """The machine. One walk is one seed."""

    def __init__(
        self, seed: int, broker: Any, peer: Peer, make: type[FilterReader]
    ) -> None:
        self.rng = random.Random(seed)
        self.broker = broker
        self.peer = peer
        self.reader = make(peer)
        self.log: list[Entry] = []
        self.damaged: set[int] = set()
        self.read_count = 0
        self.cut_count = 0

    async def run(self) -> None:
        await self.append()
        moves = [self.append] * 4 + [self.read] * 5 + [self.flip, self.trim]
        moves += [self.index] * 3 + [self.damage_index, self.cut]
        for _ in range(STEPS):
            await self.rng.choice(moves)()
        await self.read()

    @property
    def partition(self) -> Any:
        return self.broker.context.topics.find_log("test", 0)

    async def append(self) -> None:
        payloads = [self._payload() for _ in range(self.rng.randrange(1, 12))]
        puts = [Put("test", 0, data, flag, -1, 1) for data, flag in payloads]
        reply = await self.peer.ask(b"".join(map(encode, puts)))
        lines = reply.split(b"result 200 ")[1:]
        assert len(lines) == len(payloads), reply
        for line, (data, flag) in zip(lines, payloads, strict=True):
            start = int(line.split(b"\r\n")[1].split()[2])
            self.log.append(Entry(start, start + HEADER_BYTES + len(data), data, flag))

    def _payload(self) -> tuple[bytes, int]:
        rng = self.rng
        headers = [
            ("tag", rng.choice((b"paid", b"void", b"it's", b"\xff"))),
            ("amount", rng.choice((b"1", b"10", b"much"))),
        ][: rng.randrange(3)]
        return encode_payload(
            rng.randbytes(rng.choice((1, 9, 60, 3000))),
            rng.choice((None, None, "Java", "")),
            rng.choice((None, "k1", "k2")),
            headers,
        )

    async def flip(self) -> None:
        """Change a byte that a checksum covers, or one of length and checksum."""
        found = [e for e in self._present() if e.offset not in self.damaged]
        if not found:
            return
        entry = self.rng.choice(found)
        covered = [*range(8), *range(HEADER_BYTES, entry.end - entry.offset)]
        at = entry.offset + self.rng.choice(covered)
        segment = (
            self.partition.segments.find(Offset(at)) or self.partition.segments.active
        )
        with segment.path.open("r+b") as file:
            file.seek(at - segment.base_offset)
            (before,) = file.read(1)
            file.seek(at - segment.base_offset)
            file.write(bytes([before ^ 1 << self.rng.randrange(8)]))
        self.damaged.add(entry.offset)

    async def trim(self) -> None:
        segments = self.partition.segments
        if len(segments.sealed) > 1:
            # With its files: a cut opens the log again, with all that there are.
            policy = DeletePolicy(kind=DeleteKind.DELETE)
            remove_segment(self.broker.context.fs, segments.first, policy)
            self.partition.on_removed(segments.first, 0)

    async def index(self) -> None:
        make_index(self.broker, self.rng.choice((1, 500, 3000)))

    async def damage_index(self) -> None:
        """Change a bit of an index, cut it, or remove it."""
        segments = self.partition.segments
        paths = [keys_path(each.path, each.base_offset) for each in segments]
        paths = [path for path in paths if path.exists() and path.stat().st_size]
        if not paths:
            return
        path = self.rng.choice(paths)
        data = bytearray(path.read_bytes())
        match self.rng.randrange(3):
            case 0:
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                path.write_bytes(data)
            case 1:
                path.write_bytes(data[: self.rng.randrange(len(data))])
            case _:
                path.unlink()

    async def cut(self) -> None:
        """Drop the end of the log, as after a leader that had less."""
        present = list(self._present())
        if self.damaged or len(present) < 2:
            return
        end = self.rng.choice(present[-10:]).offset
        log, manager, done = self.partition, log_manager_of(self.broker), list[Any]()
        if end == log.log_start_offset:
            return
        log.follow()
        manager.lower_high_watermarks({log.log_id: end}, done.append)
        await until(lambda: len(done) == 1)
        cut_log(manager, log.log_id, Offset(end), done.append)
        await until(lambda: len(done) == 2)
        assert done == [None, None]
        log.lead()
        log.set_bound(Offset(1 << 60))
        await until(lambda: log.high_watermark == end)
        self.log = [each for each in self.log if each.offset < end]
        self.cut_count += 1

    def _present(self) -> Iterator[Entry]:
        start = self.partition.log_start_offset
        return (each for each in self.log if each.offset >= start)

    async def read(self) -> None:
        where = self.rng.choice(FILTERS)
        first = self.rng.choice(self.log).offset
        size = self.rng.choice((50, 200, 4_000, 1 << 20))
        bounds = {each.offset: each.end for each in self.log}
        seen = await self.reader.read(first, where, bounds, size=size)
        wanted = [each for each in self._present() if each.offset >= first]
        damaged = [e.offset for e in wanted if e.offset in self.damaged]
        if parse_filter(where).fields:
            lost = {e.offset for e in wanted if e.matches(where)} & self.damaged
            assert lost <= set(seen.damaged) <= set(damaged)
        else:
            assert seen.damaged == damaged
        good = [e for e in wanted if e.offset not in self.damaged]
        assert seen.offsets == [e.offset for e in good if e.matches(where)]
        assert seen.end == self.partition.high_watermark
        self.read_count += 1


async def walk(data: Path, seed: int, make: type[FilterReader] = FilterReader) -> None:
    fs = random.Random(seed).choice((SystemFileSystem, ColdDisk))()
    settings = {"maxSegmentSize": "9000", **INDEX_SETTINGS}
    started = running_broker(data, settings, text=INDEXED, fs=fs)
    async with started as broker, Peer(broker) as peer:
        broker.context.filter_look_bytes = 1
        await FilterWalk(seed, broker, peer, make).run()
        assert broker.context.filtered_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
@pytest.mark.sampled(4)
def test_a_walk_reads_what_is_there(data_dir: Path, number: int, seed: int) -> None:
    """Nothing that matches is passed over, nothing comes twice, damage is named."""
    asyncio.run(walk(data_dir, seed * 8 + number))


class PassesOver(FilterReader):
    """Its broker names a next offset after a match that did not fit in."""

    async def get(
        self, offset: int, where: str | None, *, size: int = 1 << 20, wait_ms: int = 0
    ) -> Value | Result:
        reply = await super().get(offset, where, size=size, wait_ms=wait_ms)
        if isinstance(reply, Value) and reply.next_offset != NO_NEXT:
            again = await super().get(reply.next_offset, None, size=HEADER_BYTES)
            if isinstance(again, Value):
                (length,) = struct.unpack_from(">i", again.payload)
                end = reply.next_offset + HEADER_BYTES + length
                return replace(reply, next_offset=end)
        return reply


def test_a_broken_rule_is_found(data_dir: Path, seed: int) -> None:
    """By one of some walks; it may also come to where no record begins."""
    with pytest.raises((AssertionError, KeyError)):
        walk_often(data_dir, seed)


def walk_often(data: Path, seed: int) -> None:
    for number in range(20):
        path = data / str(number)
        path.mkdir()
        asyncio.run(walk(path, seed * 20 + number, PassesOver))
