"""Gets with a filter: what is sent, where to go on, and when it is answered plainly."""

import asyncio
from pathlib import Path

import pytest

from metaq.broker.handlers.filtered_get import SCAN_BYTES, WINDOW_BYTES
from metaq.filter.language import has_parser, parse_filter
from metaq.fs import ReadFile, SystemFileSystem
from metaq.model import Offset
from metaq.protocol.commands import NO_NEXT, Result, Value
from metaq.protocol.encoding import encode
from metaq.protocol.version import decode_version_body
from metaq.storage.segment import Damage
from tests.broker.filter_reader import FilterReader, matches_in, put, run
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

PAID = "tag = 'paid'"


def value(reply: Value | Result) -> Value:
    assert isinstance(reply, Value), reply
    return reply


def test_matches_come_in_runs_with_the_next_offset(data_dir: Path) -> None:
    """Neighbours are one run; what does not match is not sent, and is passed over."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put(peer, "paid", "paid", "void", None, "paid", "void")
        reply = value(await reader.get(0, PAID))
        assert reply.next_offset == puts[-1][1]
        assert list(matches_in(reply)) == [puts[0][0], puts[1][0], puts[4][0]]
        runs = 2
        size = sum(end - start for start, end in (puts[0], puts[1], puts[4]))
        assert len(reply.payload) == size + 12 * runs
        nothing = value(await reader.get(0, "tag = 'other'"))
        assert (nothing.payload, nothing.next_offset) == (b"", puts[-1][1])
        counters = broker.context.counters
        assert (counters.cmd_get, counters.filtered, counters.filter_plain) == (2, 2, 0)
        assert counters.filter_scanned_bytes == 2 * puts[-1][1]

    run(data_dir, scenario)


def test_the_rows_of_a_get_are_as_without_a_filter(data_dir: Path) -> None:
    """No log, no data, no size, moved; and one row more, for what is no filter."""

    async def scenario(_broker, peer, reader) -> None:
        assert (await reader.get(0, PAID)).status == 404
        puts = await put(peer, "paid")
        end = puts[-1][1]
        assert (await reader.get(0, PAID, size=0)).status == 400
        assert (await reader.get(end, PAID)).status == 404
        assert (await reader.get(end + 1, PAID)).status == 301
        for offset in (0, end):
            reply = await reader.get(offset, "tag = ")
            assert reply.status == 400
            assert reply.text.startswith("filter, column 7: expected text in single")

    run(data_dir, scenario)


def test_it_is_announced_unless_it_is_off(data_dir: Path) -> None:
    """Or a line may be too short for a filter; gets with one are answered plainly."""

    async def announced(overrides: dict[str, str]) -> bool:
        async with running_broker(data_dir, overrides) as broker, Peer(broker) as peer:
            await put(peer, "void")
            reply = value(await FilterReader(peer).get(0, PAID))
            assert (reply.next_offset == NO_NEXT) is ("filterBytesPerS" in overrides)
            body = (await peer.ask(b"version 7\r\n")).split(b"\r\n", 1)[1]
            return decode_version_body(body.decode()).filters

    assert asyncio.run(announced({}))
    assert not asyncio.run(announced({"filterBytesPerS": "0"}))
    assert not asyncio.run(announced({"lineBytesMax": "4096"}))


def test_a_reply_keeps_the_size_of_the_get(data_dir: Path) -> None:
    """The next offset is then that of the first match which is not in it."""

    async def scenario(_broker, peer, reader) -> None:
        puts = await put(peer, *["paid", "void"] * 5)
        size = puts[0][1] - puts[0][0] + 12
        for wanted, count in ((size, 1), (3 * size, 3), (3 * size - 1, 2)):
            reply = value(await reader.get(0, PAID, size=wanted))
            assert len(reply.payload) == count * size
            assert reply.next_offset == puts[2 * count][0]
        # A record fits where only what a run adds is too much.
        reply = value(await reader.get(0, PAID, size=size - 12))
        assert reply.next_offset == puts[2][0]

    run(data_dir, scenario)


def test_a_message_larger_than_the_get_is_answered_plainly(data_dir: Path) -> None:
    """At its own offset alone; a larger one than a window is read whole."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put(peer, "void")
        puts += await put(peer, "paid", "void", size=3 * WINDOW_BYTES)
        puts += await put(peer, "paid")
        reply = value(await reader.get(0, PAID))
        assert list(matches_in(reply)) == [puts[1][0], puts[3][0]]
        assert reply.next_offset == puts[3][1]
        small = 2 * WINDOW_BYTES
        reply = value(await reader.get(0, PAID, size=small))
        assert (reply.payload, reply.next_offset) == (b"", puts[1][0])
        for at in (1, 2):
            reply = value(await reader.get(puts[at][0], PAID, size=small))
            assert (len(reply.payload), reply.next_offset) == (small, NO_NEXT)
        assert broker.context.counters.filter_plain == 2
        assert broker.context.counters.cmd_get == 4

    run(data_dir, scenario)


@pytest.mark.parametrize("where", [PAID, "attribute IS NULL"])
def test_damage_is_never_passed_over(data_dir: Path, where: str) -> None:
    """A get ends before it, and one at it is answered plainly: the client decides."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put(peer, "void", "void", "void", "paid")
        path = broker.context.topics.find_log("test", 0).segments.first.path
        data = bytearray(path.read_bytes())
        data[puts[1][1] - 1] ^= 1
        path.write_bytes(data)
        reply = value(await reader.get(0, where))
        assert reply.next_offset == puts[1][0]
        reply = value(await reader.get(puts[1][0], where))
        assert (reply.payload, reply.next_offset) == (data[puts[1][0] :], NO_NEXT)
        reply = value(await reader.get(puts[2][0], where))
        assert reply.next_offset == puts[3][1]
        # When the broker knows of it, the answer is that of any get.
        assert (await peer.ask(b"check test 0 %d 9 7\r\n" % puts[1][0])).startswith(
            b"result 500"
        )
        reply = value(await reader.get(0, where))
        assert reply.next_offset == puts[1][0]
        assert "[damaged" in (await reader.get(puts[1][0], where)).text

    run(data_dir, scenario)


def test_a_block_that_is_cut_is_answered_plainly_where_it_may_match(
    data_dir: Path,
) -> None:
    """Its checksum is right, and the client takes it for damage."""

    async def scenario(_broker, peer, reader) -> None:
        (first,) = await put(peer, "void")
        payload = b"\0\0\0\x63h.tag=paid"
        await peer.ask(b"put test 0 %d 3 -1 1\r\n" % len(payload) + payload)
        reply = value(await reader.get(0, "tag IS NULL"))
        assert reply.next_offset == first[1]
        reply = value(await reader.get(first[1], "tag IS NULL"))
        assert reply.next_offset == NO_NEXT

    run(data_dir, scenario)


def test_the_scan_of_one_get_is_bounded(data_dir: Path) -> None:
    """It is answered with where it came to, though nothing matched."""

    async def scenario(_broker, peer, reader) -> None:
        for _ in range(24):
            puts = await put(peer, *["void"] * 4, size=16_000)
        size = puts[-1][1]
        assert size > SCAN_BYTES
        reply = value(await reader.get(0, PAID, wait_ms=30_000))
        assert reply.payload == b""
        assert SCAN_BYTES - WINDOW_BYTES <= reply.next_offset < size

    run(data_dir, scenario)


def test_a_scan_takes_turns_with_others(data_dir: Path) -> None:
    """With turns of no time each piece is one; a version is answered in between."""

    async def scenario(broker, peer, reader) -> None:
        broker.context.filter_work.turn_s = 0.0
        puts = await put(peer, *["paid"] * 40)
        reply = value(await reader.get(0, "tag > 'a' OR tag IS NULL"))
        # Ten turns of sixteen records, at most.
        assert reply.next_offset == puts[32][1] or reply.next_offset == puts[-1][1]
        async with Peer(broker) as other:
            frame = encode(reader.getting(0, PAID)) + b"version 7\r\n"
            assert (await other.ask(frame)).startswith(b"result 200")

    run(data_dir, scenario)


def test_a_get_waits_for_data_and_a_little_for_a_match(data_dir: Path) -> None:
    """It is answered with the first match, or with the next offset after the hold."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put(peer, "void")
        context = broker.context
        async with Peer(broker) as other:
            later = FilterReader(other)
            command = encode(later.getting(puts[0][1], PAID, wait_ms=30_000))
            await other.send(command)
            await until(lambda: context.waiters.count == 1)
            more = await put(peer, "void")
            await until(lambda: context.filtered_count == 1 or is_answered(other))
            more += await put(peer, "void")
            head = (await other.read_some()).split(b"\r\n")[0]
            length, next_offset = int(head.split()[1]), int(head.split(b"next=")[1])
            assert length == 0
            assert next_offset in {more[0][1], more[1][1]}
            assert context.filtered_count == 0

    run(data_dir, scenario)


def is_answered(peer: Peer) -> bool:
    return not peer.session.unanswered_count


def test_a_match_ends_the_hold(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, with all that came before it passed over."""

    async def scenario(broker, peer, _reader) -> None:
        broker.context.filter_hold_s = 30.0
        puts = await put(peer, "void")
        async with Peer(broker) as other:
            later = FilterReader(other)
            await other.send(encode(later.getting(0, PAID, wait_ms=30_000)))
            await until(lambda: broker.context.filtered_count == 1)
            puts += await put(peer, "void")
            puts += await put(peer, "paid")
            answer = await other.read_some()
            head = b"value %d 1 next=%d" % (puts[2][1] - puts[2][0] + 12, puts[2][1])
            assert answer.split(b"\r\n")[0] == head

    run(data_dir, scenario)


@pytest.mark.slow
def test_a_hold_of_a_session_that_ends_is_soon_over(data_dir: Path) -> None:
    """Nothing is left behind."""

    async def scenario(broker, peer, _reader) -> None:
        broker.context.filter_hold_s = 2.0
        await put(peer, "void")
        async with Peer(broker) as other:
            later = FilterReader(other)
            await other.send(encode(later.getting(0, PAID, wait_ms=30_000)))
            await until(lambda: broker.context.filtered_count == 1)
        await until(lambda: broker.context.filtered_count == 0)

    run(data_dir, scenario)


def test_a_log_that_stops_ends_a_hold(data_dir: Path) -> None:
    """With how far it came; the next get hears why."""

    async def scenario(broker, peer, _reader) -> None:
        broker.context.filter_hold_s = 30.0
        puts = await put(peer, "void")
        async with Peer(broker) as other:
            later = FilterReader(other)
            await other.send(encode(later.getting(0, PAID, wait_ms=30_000)))
            await until(lambda: broker.context.filtered_count == 1)
            log = broker.context.topics.find_log("test", 0)
            log.on_damage(Damage(Path("file"), Offset(0), None, "too short"))
            answer = await other.read_some()
            assert answer == b"value 0 1 next=%d\r\n" % puts[0][1]

    run(data_dir, scenario)


def test_retention_in_the_middle_moves_the_reader(data_dir: Path) -> None:
    """An offset that is gone is answered with the log start."""

    async def scenario(broker, peer, reader) -> None:
        puts = [each for _ in range(60) for each in await put(peer, "void")]
        log = broker.context.topics.find_log("test", 0)
        log.on_removed(log.segments.first, 0)
        reply = await reader.get(0, PAID)
        assert (reply.status, int(reply.text)) == (301, log.log_start_offset)
        assert log.log_start_offset < puts[-1][1]

    run(data_dir, scenario, {"maxSegmentSize": "1000"})


class ColdDisk(SystemFileSystem):
    """A disk of which nothing is in memory before it was read."""

    def open_read(self, path: Path) -> ReadFile:
        file = super().open_read(path)
        file.__class__ = ColdFile
        return file


class ColdFile(ReadFile):
    """A file that says so."""

    def is_cached(self, *_: object) -> bool:
        return False


@pytest.mark.slow
def test_cold_bytes_are_read_by_the_reader_over_many_segments(data_dir: Path) -> None:
    """A get with matches is answered before it waits for the disk again."""

    async def scenario(broker, peer, reader) -> None:
        puts = [e for _ in range(60) for e in await put(peer, "paid", "void")]
        assert len(broker.context.topics.find_log("test", 0).segments.sealed) > 3
        reply = value(await reader.get(0, PAID))
        assert list(matches_in(reply))
        assert reply.next_offset < puts[-1][1]
        seen = await reader.read(0, PAID, dict(puts))
        assert seen == ([start for start, _ in puts[::2]], [], puts[-1][1], 0)
        # Without a match it goes on from segment to segment.
        reply = value(await reader.get(0, "tag = 'never'"))
        assert reply.next_offset == puts[-1][1]

    run(data_dir, scenario, {"maxSegmentSize": "1000"}, ColdDisk())


def test_a_disk_that_fails_answers_as_without_a_filter(data_dir: Path) -> None:
    """The file is gone: the broker finds that, and says so to the next get."""

    async def scenario(broker, peer, reader) -> None:
        await put(peer, "paid", "void")
        path = broker.context.topics.find_log("test", 0).segments.first.path
        data = path.read_bytes()
        path.write_bytes(data[:30])
        reply = await reader.get(0, PAID)
        assert reply.status == 500
        assert "[damaged" in reply.text

    run(data_dir, scenario, None, ColdDisk())


@pytest.mark.slow
def test_over_its_rate_a_get_is_answered_later(data_dir: Path) -> None:
    """Not wrongly; with too many before it, it is answered without its filter."""

    async def scenario(broker, peer, reader) -> None:
        puts = await put(peer, *["void"] * 50)
        work, loop = broker.context.filter_work, asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(3):
            reply = value(await reader.get(0, PAID))
            assert reply.next_offset == puts[-1][1]
        assert loop.time() - began_s > 2 * puts[-1][1] / 10_000 - 0.1
        for _ in range(300):
            work.add(lambda: False)
        reply = value(await reader.get(0, PAID))
        assert reply.next_offset == NO_NEXT
        assert broker.context.counters.filter_plain == 1

    run(data_dir, scenario, {"filterBytesPerS": "10000"})


def test_the_first_get_of_a_process_does_not_wait_for_the_parser(
    data_dir: Path,
) -> None:
    """It is answered plainly, whatever its filter; the loop goes on meanwhile."""

    async def scenario(_broker, peer, reader) -> None:
        puts = await put(peer, "paid", "void")
        parse_filter.cache_clear()
        for where in (PAID, "tag ="):
            # The thread may have it in between.
            reply = await reader.get(0, where)
            assert isinstance(reply, Value) or where != PAID
        await until(has_parser)
        reply = value(await reader.get(0, PAID))
        assert reply.next_offset == puts[-1][1]

    run(data_dir, scenario)
