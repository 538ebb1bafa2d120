"""A reader with a filter, byte for byte, against a broker in this process."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from metaq.filter.language import parse_filter
from metaq.fs import FileSystem
from metaq.protocol.commands import NO_NEXT, Get, Put, Result, Value
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.record.flags import decode_payload, encode_payload
from metaq.record.layout import HEADER_BYTES, Record
from metaq.record.runs import decode_runs, records_of
from metaq.record.scan import read_record
from metaq.storage.key_builder import KeyStep, KeyTarget, run_key_step
from metaq.storage.log_snapshots import key_logs
from tests.rigs.broker import CONFIG, Peer, running_broker
from tests.rigs.waiting import until

# A broker in this process has its parser.
parse_filter("key IS NULL")


class Seen(NamedTuple):
    """Outcome of reading a partition to its end."""

    offsets: list[int]
    """Of the records that it was given, and that match."""
    damaged: list[int]
    """Offsets at which it was stopped."""
    end: int
    """Offset at which nothing more was there."""
    plain_count: int
    """Answers with bytes of the log."""


class FilterReader:
    """One connection."""

    def __init__(self, peer: Peer, topic: str = "test") -> None:
        self.peer = peer
        self.topic = topic
        self._opaques = count(1)
        self._connection = Connection(Role.CLIENT, WireLimits())

    async def get(
        self, offset: int, where: str | None, *, size: int = 1 << 20, wait_ms: int = 0
    ) -> Value | Result:
        """Return the reply to one get."""
        command = self.getting(offset, where, size=size, wait_ms=wait_ms)
        self._connection.receive_data(await self.peer.ask(encode(command)))
        reply = self._connection.next_event()
        assert isinstance(reply, Value | Result), reply
        assert reply.opaque == command.opaque
        assert self._connection.next_event() is NEED_DATA
        return reply

    def getting(
        self, offset: int, where: str | None, *, size: int = 1 << 20, wait_ms: int = 0
    ) -> Get:
        """Return a get with an opaque of its own."""
        opaque = next(self._opaques)
        return Get(self.topic, "g", 0, offset, size, opaque, wait_ms, where)

    async def read(
        self, offset: int, where: str, bounds: dict[int, int], *, size: int = 1 << 20
    ) -> Seen:
        """Read on to the end, as a client does.

        Args:
            offset: where a record begins.
            where: the filter.
            bounds: offset of each record → that of the next one, to pass over damage.
            size: of each get.
        """
        wanted, seen, damaged, plain_count = parse_filter(where), [], [], 0
        for _ in range(10 * len(bounds) + 10):
            reply = await self.get(offset, where, size=size)
            if isinstance(reply, Result) and reply.status == 301:
                offset = int(reply.text)
                continue
            if isinstance(reply, Result) and reply.status == 404:
                return Seen(seen, damaged, offset, plain_count)
            if isinstance(reply, Value) and reply.next_offset != NO_NEXT:
                assert reply.next_offset > offset
                found = list(matches_in(reply))
                assert all(offset <= each < reply.next_offset for each in found)
                seen += found
                offset = reply.next_offset
                continue
            assert isinstance(reply, Value), reply
            plain_count += 1
            position, before = 0, offset
            while isinstance(record := read_record(reply.payload, position), Record):
                decoded = decode_payload(record.payload, record.flag)
                if wanted.matches(decoded.key, decoded.headers, decoded.attribute):
                    seen.append(offset)
                position += record.size_bytes
                offset += record.size_bytes
            if offset == before:
                # Damaged, or larger than the get: what is one record is read whole.
                end = bounds[offset]
                reply = await self.get(offset, None, size=end - offset)
                assert isinstance(reply, Value), reply
                record = read_record(reply.payload)
                if not isinstance(record, Record):
                    damaged.append(offset)
                else:
                    decoded = decode_payload(record.payload, record.flag)
                    if wanted.matches(decoded.key, decoded.headers, decoded.attribute):
                        seen.append(offset)
                offset = end
        raise AssertionError("it comes to no end")


def matches_in(reply: Value) -> Iterator[int]:
    """Yield the offsets of the records in runs; each is whole and good."""
    for run in decode_runs(reply.payload):
        for record in records_of(run):
            assert isinstance(read_record(record.data), Record)
            yield record.offset


INDEX_SETTINGS = {"indexBytesPerS": "0", "spanBytesMin": "1"}
"""The broker makes no index, and each append has a span: `indexed` makes one."""


def make_index(broker: Any, block_bytes: int = 1) -> int:
    """Make the blocks of an index that can be made; return where those end."""
    context, end = broker.context, 0
    log = context.topics.find_log("test", 0)
    ((log_id, names, segments, durable),) = key_logs({log.log_id: log}, context.config)
    for segment in (*segments.settled(durable), segments.readable_active(durable)):
        is_sealed = segment.base_offset < segments.active.base_offset
        target = KeyTarget(log_id, segment, is_sealed, names)
        step = KeyStep(target, block_bytes, False)
        while (result := run_key_step(context.fs, step)).read_bytes:
            if result.is_stuck:
                break
            # As the builder does: what is damaged is made again.
            step = replace(step, is_new=result.is_damaged)
        end = result.end
        if target.is_sealed and end < target.segment.end_offset:
            break
    return end


Scenario = Callable[[Any, Peer, FilterReader], Awaitable[None]]


def run(
    data: Path,
    scenario: Scenario,
    overrides: dict[str, str] | None = None,
    fs: FileSystem | None = None,
    *,
    index: str = "",
) -> None:
    """Run a scenario with a broker; with `index` its filters look these names up."""

    async def main() -> None:
        settings, text = overrides or {}, CONFIG
        if index:
            text = text.replace("[topic=test]", f"[topic=test]\nindex={index}")
            settings = INDEX_SETTINGS | settings
        started = running_broker(data, settings, text=text, fs=fs)
        async with started as broker, Peer(broker) as peer:
            if index:
                broker.context.filter_look_bytes = 1
            await scenario(broker, peer, FilterReader(peer))
            assert broker.context.filtered_count == 0

    asyncio.run(main())


async def indexed(broker: Any, end: int, block_bytes: int = 1) -> int:
    """Make an index up to an offset at least, whose spans may come a little later.

    Returns:
        Its end. The last span may grow, or be written later: it is in no block.
    """
    await until(lambda: make_index(broker, block_bytes) >= end)
    return make_index(broker, block_bytes)


async def put(peer: Peer, *tags: str | None, size: int = 4) -> list[tuple[int, int]]:
    """Append messages with these tags; return their offsets and ends."""
    payloads = [
        encode_payload(
            bytes(size), headers=[] if tag is None else {"tag": tag.encode()}
        )
        for tag in tags
    ]
    puts = [Put("test", 0, data, flag, -1, 1) for data, flag in payloads]
    reply = await peer.ask(b"".join(map(encode, puts)))
    lines = reply.split(b"result ")[1:]
    starts = [int(line.split(b"\r\n")[1].split()[2]) for line in lines]
    assert len(starts) == len(tags), reply
    return [
        (at, at + HEADER_BYTES + len(data))
        for at, (data, _) in zip(starts, payloads, strict=True)
    ]
