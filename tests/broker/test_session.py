"""Bad peers of a connection: slow, in pieces, too much, or garbage."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest

from metaq.fs.calls import Buffer, LinuxCalls
from metaq.fs.file_system import FileSystem
from metaq.testing.clock import ManualClock
from tests.rigs.broker import Peer, reset_on_close, running_broker
from tests.rigs.inside import check_sessions
from tests.rigs.waiting import until


def put(payload: bytes, opaque: int = 1, topic: str = "test") -> bytes:
    checksum = crc32(payload) & 0x7FFFFFFF
    return b"put %b 0 %d 0 %d %d\r\n%b" % (
        topic.encode(), len(payload), checksum, opaque, payload,
    )  # fmt: skip


def run(data: Path, scenario, overrides=None, **options) -> None:
    async def main() -> None:
        async with running_broker(data, overrides, **options) as broker:
            await scenario(broker)

    asyncio.run(main())


def test_a_frame_in_single_bytes_is_answered(data_dir: Path) -> None:
    """A put that arrives byte by byte is one put."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            frame = put(b"hello")
            for at in range(len(frame) - 1):
                await peer.send(frame[at : at + 1])
            assert (await peer.ask(frame[-1:])).startswith(b"result 200 ")

    run(data_dir, scenario)


class WrittenFrom(LinuxCalls):
    """The system, and the sizes of the objects that bytes were written from."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def writev(self, fd: int, buffers: Sequence[Buffer], /) -> int:
        self.sizes += [len(memoryview(buffer).obj) for buffer in buffers]
        return super().writev(fd, buffers)


def test_a_large_put_keeps_nothing_that_came_behind_it(data_dir: Path) -> None:
    """Its bytes wait for the disk; others that were received with them do not."""
    calls = WrittenFrom()

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(put(b"first"))
            calls.sizes.clear()
            await peer.ask(put(bytes(400_000)) + b"version 2\r\n" * 9)
            await until(lambda: sum(calls.sizes) == 400_020)

    run(data_dir, scenario, fs=FileSystem(calls))


def test_half_a_frame_stores_nothing(data_dir: Path) -> None:
    """A connection cut inside a put leaves no trace of it."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(put(b"hello"))
            await peer.send(put(b"cut off")[:-1])
            reset_on_close(peer.writer.get_extra_info("socket"))
        await until(lambda: not broker.sessions)
        log = broker.context.topics.find_log("test", 0)
        assert log.high_watermark == log.next_offset == 25

    run(data_dir, scenario)


@pytest.mark.parametrize(
    "pieces", [[b"put test 0 5 0 -1 1\r\nhel"], [b"version"], [b"v", b"e", b"r"]]
)
def test_a_frame_that_does_not_end_is_cut_off(
    data_dir: Path, pieces: list[bytes]
) -> None:
    """Slow-loris: bytes that trickle do not extend the deadline of a frame."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            clock = broker.context.clock
            for piece in pieces:
                await peer.send(piece)
                clock.advance_s(40)
                check_sessions(broker)
            assert not peer.is_closed() or len(pieces) > 2
            clock.advance_s(101)
            check_sessions(broker)
            assert peer.is_closed()
            assert await peer.read_some() == b""

    run(data_dir, scenario, {"idleTimeoutMs": "100000"}, clock=ManualClock())


def test_frames_that_end_are_not_cut_off_for_those_that_begin(data_dir: Path) -> None:
    """A steady producer whose reads end inside a head is as good as any other."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(put(b"first"))
            frame = put(b"hello")
            await peer.send(frame[:8])
            for _ in range(4):
                broker.context.clock.advance_s(60)
                await peer.ask(frame[8:] + frame[:8])
                check_sessions(broker)
                assert not peer.is_closed()

    run(data_dir, scenario, {"idleTimeoutMs": "100000"}, clock=ManualClock())


def test_a_silent_connection_is_closed_and_a_busy_one_is_not(data_dir: Path) -> None:
    """Idle connections go after idleTimeoutMs; a heartbeat keeps one."""

    async def scenario(broker) -> None:
        async with Peer(broker) as silent, Peer(broker) as busy:
            broker.context.clock.advance_s(60)
            await busy.ask(b"version 1\r\n")
            broker.context.clock.advance_s(60)
            check_sessions(broker)
            assert silent.is_closed()
            assert not busy.is_closed()

    run(data_dir, scenario, {"idleTimeoutMs": "100000"}, clock=ManualClock())


def test_a_peer_that_never_reads_stops_being_served_and_is_cut_off(
    data_dir: Path,
) -> None:
    """Gets wait while replies are unread: the queue keeps its bound, then it ends."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(put(b"x" * 100_000))
            raw = socket.create_connection(("127.0.0.1", broker.port))
            raw.setblocking(False)
            await until(lambda: len(broker.sessions) == 2)
            session = broker.sessions[1]
            gets = b"get test g 0 0 100020 1\r\n" * 2_000
            raw.send(gets)
            sent = [-1]

            async def are_buffers_full() -> bool:
                """Whether nothing more leaves, although much is queued."""
                sent.append(session.channel.sent_bytes)
                # Nothing tells that nothing happens.
                await asyncio.sleep(0.02)
                return sent[-1] == sent[-2] and session.channel.queued_bytes >= 150_000

            await until(are_buffers_full)
            # One reply may go over the bound; the other gets have not been looked at.
            assert session.channel.queued_bytes < 300_000 + 100_100
            assert session.channel.stalled_s(broker.context.clock.monotonic_s()) == 0
            for _ in range(2):
                broker.context.clock.advance_s(151)
                # Another connection is served all along.
                assert (await peer.ask(b"version 1\r\n")).startswith(b"result 200")
                check_sessions(broker)
            await until(lambda: len(broker.sessions) == 1)
            raw.close()

    overrides = {"connectionBufferBytesMax": "300000"}
    run(data_dir, scenario, overrides, clock=ManualClock())


def test_a_peer_that_reads_late_gets_every_reply(data_dir: Path) -> None:
    """Over the bound nothing is dropped: commands wait until there is room."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(put(b"x" * 50_000))
            session, count = peer.session, 400
            gets = b"".join(b"get test g 0 0 99999 %d\r\n" % n for n in range(count))
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's
            peer.writer.write(gets)
            await until(lambda: session.is_paused and session.channel.queued_bytes)
            peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
            expected = count * 50_020 + sum(
                len(b"value 50020 %d\r\n" % n) for n in range(count)
            )
            async with asyncio.timeout(30):
                data = await peer.reader.readexactly(expected)
            at = 0
            for number in range(count):
                line = b"value 50020 %d\r\n" % number
                assert data[at : at + len(line)] == line
                at += len(line) + 50_020

    run(data_dir, scenario, {"connectionBufferBytesMax": "100000"})


@pytest.mark.parametrize("limit", ["connectionInFlightBytesMax", "inFlightBytesMax"])
def test_puts_in_flight_are_bounded_and_all_answered(
    data_dir: Path, limit: str
) -> None:
    """Over the bound the socket is left alone; every put is stored and answered."""

    async def scenario(broker) -> None:
        seen = []
        load = broker.context.load
        hold = load.hold
        load.hold = lambda size: (hold(size), seen.append(load.in_flight_bytes))[0]
        async with Peer(broker) as peer, Peer(broker) as other:
            await peer.ask(put(b"first"))
            count = 2_000
            block = b"".join(put(b"x" * 1_000, n) for n in range(count))
            answers = await asyncio.gather(peer.ask(block), other.ask(block))
            for answer in answers:
                assert answer.count(b"result 200") == count
        # One read of the socket may go over the bound, on each connection.
        assert max(seen) < 100_000 + 2 * 300_000
        assert load.in_flight_bytes == 0

    overrides = {limit: "100000", "payloadBytesMax": "50000", "batchBytesMax": "50000"}
    if limit == "inFlightBytesMax":
        overrides["connectionInFlightBytesMax"] = "100000"
    run(data_dir, scenario, overrides)


def test_a_command_larger_than_the_bound_of_its_connection_is_taken_alone(
    data_dir: Path,
) -> None:
    """It waits for those before it; so do those behind it."""

    async def scenario(broker) -> None:
        seen, size, load = [], 400_000, broker.context.load
        hold = load.hold
        load.hold = lambda size: (hold(size), seen.append(load.in_flight_bytes))[0]
        async with Peer(broker) as peer:
            answer = await peer.ask(put(b"x" * size, 1) * 5)
            assert answer.count(b"result 200") == 5
        assert size < max(seen) < 2 * size
        assert load.in_flight_bytes == 0

    run(data_dir, scenario, {"connectionInFlightBytesMax": "1000"})


def test_what_was_put_before_a_quit_or_an_end_is_answered(data_dir: Path) -> None:
    """Closing waits for the disk: earlier puts get their answers first."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            answer = await peer.ask(put(b"a", 1) * 50 + b"quit\r\nversion 2\r\n")
            assert answer.count(b"result 200") == 50
            assert peer.is_closed()
        async with Peer(broker) as peer:
            peer.writer.write(put(b"a", 1) * 50)
            peer.writer.write_eof()
            async with asyncio.timeout(30):
                assert (await peer.reader.read(-1)).count(b"result 200") == 50

    run(data_dir, scenario)


def test_a_peer_that_is_gone_takes_nothing_with_it(data_dir: Path) -> None:
    """Puts of a connection that was reset are stored; nothing is left in flight."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(put(b"a"))
            await peer.send(put(b"a") * 100)
            reset_on_close(peer.writer.get_extra_info("socket"))
        await until(lambda: not broker.sessions)
        log = broker.context.topics.find_log("test", 0)
        await until(lambda: log.high_watermark == 101 * 21)
        assert broker.context.load.in_flight_bytes == 0
        assert broker.context.connection_count == 0

    run(data_dir, scenario)


def test_a_flood_of_connections_is_refused_and_the_others_are_served(
    data_dir: Path,
) -> None:
    """Over connectionCountMax a connection is closed at once; admin is not affected."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            flood = [
                socket.create_connection(("127.0.0.1", broker.port)) for _ in range(50)
            ]
            await until(
                lambda: broker.control.status().listener.refused_count == 50 - 9
            )
            assert len(broker.sessions) == 10
            assert (await peer.ask(put(b"a"))).startswith(b"result 200")
            for sock in flood:
                sock.close()
            await until(lambda: len(broker.sessions) == 1)

    run(data_dir, scenario, {"connectionCountMax": "10"})


def test_a_bug_in_a_handler_is_500_with_a_traceback(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception is logged, answered, and the connection goes on."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            monkeypatch.setattr(
                "metaq.broker.dispatch.handle_offset", lambda *_a: 1 // 0
            )
            answer = await peer.ask(b"offset test g 0 0 1\r\nversion 2\r\n")
            assert answer.startswith(
                b"result 500 37 1\r\nInternal error, see the broker's log.result 200 "
            )
            assert broker.context.counters.error_count == 1

    run(data_dir, scenario)
    assert "ZeroDivisionError" in caplog.text


def test_stats_config_sends_the_file_each_time(data_dir: Path) -> None:
    """Row 16: the same opaque is answered again; the body is the file's bytes."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            data = broker.context.config.data
            one = b"result 200 %d 5\r\n%b" % (len(data), data)
            assert await peer.ask(b"stats config 5\r\n" * 2) == one * 2

    run(data_dir, scenario)


@pytest.mark.slow
def test_memory_stays_constant_under_garbage(data_dir: Path, rng) -> None:
    """Thousands of broken connections leave nothing behind."""
    import gc
    import tracemalloc

    words = [
        b"put ",
        b"test ",
        b"0 ",
        b"5 ",
        b"\r\n",
        b"get ",
        b"-1 ",
        b"\x00\xff",
        b"q",
    ]

    async def scenario(broker) -> None:
        async def abuse(count: int) -> None:
            for _ in range(count):
                async with Peer(broker) as peer:
                    junk = b"".join(rng.choices(words, k=20)) + rng.randbytes(50)
                    await peer.send(junk)
            await until(lambda: not broker.sessions)

        await abuse(100)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        await abuse(1_000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 300_000
        assert broker.context.load.in_flight_bytes == 0

    run(data_dir, scenario)


def test_logs_are_named_by_topic_and_partition(data_dir: Path) -> None:
    """A topic that is not ASCII has its own log."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            assert (await peer.ask(put(b"a", topic="wild-é"))).startswith(b"result 200")
            assert broker.context.topics.find_log("wild-é", 0) is not None

    run(data_dir, scenario)


def test_half_received_frames_are_bounded_over_all_connections(data_dir: Path) -> None:
    """A connection that goes over the bound with a half frame is closed; the rest go
    on."""

    async def scenario(broker) -> None:
        load = broker.context.load
        async with Peer(broker) as first, Peer(broker) as second:
            half = b"put test 0 90000 0 -1 1\r\n" + b"x" * 60_000
            await first.send(half)
            await until(lambda: load.partial_bytes == 60_000)  # it comes in pieces
            second.writer.write(half)
            assert await second.read_some() == b""
            assert load.partial_bytes == 60_000
            answer = await first.ask(b"x" * 30_000)
            assert answer.startswith(b"result 200 ")
            assert load.partial_bytes == 0

    limits = ("inFlightBytesMax", "connectionInFlightBytesMax")
    sizes = {"payloadBytesMax": "90000", "batchBytesMax": "90000"}
    run(data_dir, scenario, {**dict.fromkeys(limits, "100000"), **sizes})


def test_refused_puts_are_counted_by_cause(data_dir: Path) -> None:
    """One word for each cause, from a fixed set."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(
                put(b"a", topic="nosuch") + b"put test 0 9 0 5 1\r\nxxxxxxxxx"
            )
            broker.context.topics.close_partitions("test", start=0, end=0)
            await peer.ask(put(b"a"))
            await peer.send(b"put test 0 99999999 0 -1 5\r\n")
            assert broker.control.status().commands.rejections == {
                "invalid": 2,
                "closed": 1,
                "oversized": 1,
            }

    run(data_dir, scenario)
