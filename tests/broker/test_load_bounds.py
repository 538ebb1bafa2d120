"""Bounds shared by connections: one on memory, and turns of the loop."""

import asyncio
import contextlib
import itertools
import re
import resource
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from metaq.broker import acks
from metaq.broker.acks import LIGHT_BYTES, Receipts, append_run
from metaq.broker.handlers.stats import LOGS_PER_STEP
from metaq.broker.load import LARGE_READ_BYTES, TURN_S, Turns, call_after_sockets
from metaq.broker.waiters import Waiter, Waiters
from metaq.model import MessageId, Offset, SizeBytes
from metaq.net.channel import RECEIVE_BYTES, RECEIVE_FRAME_BYTES
from metaq.protocol.commands import Get, Mput
from metaq.protocol.encoding import encode
from metaq.record.layout import encode_record
from metaq.record.scan import read_record
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from metaq.testing.clock import ManualClock
from tests.rigs.broker import CONFIG, Peer, running_broker, take_nothing
from tests.rigs.inside import wrap_socket
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import until

HALF = b"put test 0 90000 0 -1 1\r\n" + b"x" * 60_000


class BusyClock(ManualClock):
    """A clock on which every look at it takes a third of a turn."""

    spent_s = 0.0

    def monotonic_s(self) -> float:
        self.spent_s += TURN_S / 3
        return super().monotonic_s() + self.spent_s


def put(payload: bytes, partition: int = 0, checksum: int | None = None) -> bytes:
    if checksum is None:
        checksum = crc32(payload) & 0x7FFFFFFF
    head = b"put test %d %d 0 %d 1\r\n" % (partition, len(payload), checksum)
    return head + payload


def mput(count: int, *payloads: bytes) -> bytes:
    records = b"".join(encode_record(text, id=MessageId(0)) for text in payloads)
    records *= count // len(payloads)
    checksum = crc32(records) & 0x7FFFFFFF
    return encode(Mput("test", 0, count, checksum, 1, records))


def run(data: Path, scenario, overrides=None, **options) -> None:
    async def main() -> None:
        async with running_broker(data, overrides, **options) as broker:
            await scenario(broker)

    asyncio.run(main())


# -- memory


def deaf_peer(broker) -> socket.socket:
    """Connect as a peer that reads nothing, with the smallest buffer there is."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", broker.port))
    sock.setblocking(False)
    return sock


@pytest.mark.slow
def test_replies_that_are_not_read_have_one_bound(data_dir: Path) -> None:
    """Many deaf peers: half the bound and one reply each; others are served."""
    bound, count = 2_000_000, 8

    async def scenario(broker) -> None:
        load, body_bytes = broker.context.load, len(broker.context.config.data)
        assert body_bytes > 90_000
        deaf = [deaf_peer(broker) for _ in range(count)]
        await until(lambda: len(broker.sessions) == count)
        for sock in deaf:
            sock.send(b"stats config 1\r\n" * 200)
        sent = [-1]

        def is_stuck() -> bool:
            """Whether all wait, and nothing has left since the last look."""
            seen = [each.channel.sent_bytes for each in broker.sessions]
            sent.append(sum(seen))
            return sent[-1] == sent[-2] and all(s.is_paused for s in broker.sessions)

        await until(is_stuck)
        async with Peer(broker) as peer:
            assert (await peer.ask(put(b"x"))).startswith(b"result 200 ")
            assert load.reply_bytes < bound // 2 + (count + 1) * (body_bytes + 100)
        assert load.dropped_count == 0
        # Who reads after all gets everything.
        size_bytes = 200 * (len(b"result 200 %d 1\r\n" % body_bytes) + body_bytes)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(30):
            while size_bytes:
                size_bytes -= len(await loop.sock_recv(deaf[0], 1 << 20))
        for sock in deaf:
            sock.close()
        await until(lambda: not broker.sessions)
        assert load.reply_bytes == load.partial_bytes == load.in_flight_bytes == 0

    limits = ("inFlightBytesMax", "connectionInFlightBytesMax", "payloadBytesMax")
    sizes = dict.fromkeys((*limits, "batchBytesMax"), str(bound))
    topics = "".join(f"[topic={'long' * 40}-{number}]\n" for number in range(600))
    run(data_dir, scenario, sizes, text=CONFIG + topics)


def test_small_gets_of_a_deaf_peer_are_bounded_by_what_they_hold(
    data_dir: Path,
) -> None:
    """A body of one byte that waits for the socket holds more than its byte."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(put(b"x" * 200_000))
            deaf = deaf_peer(broker)
            await until(lambda: len(broker.sessions) == 2)
            session = broker.sessions[1]
            deaf.send(b"get test g 0 0 200020 1\r\n" * 30)
            deaf.send(b"get test g 0 0 1 1\r\n" * 5_000)
            await until(lambda: session.is_paused)
            assert session.channel.held_bytes <= 10_000_000
            deaf.close()

    limits = {"connectionBufferBytesMax": "10000000"}
    run(data_dir, scenario, limits)


def test_who_holds_most_goes_when_all_of_the_bound_waits_for_peers(
    data_dir: Path,
) -> None:
    """A small half frame that comes last does not pay for the large ones."""

    async def scenario(broker) -> None:
        async with Peer(broker) as small, Peer(broker) as large, Peer(broker) as other:
            await large.send(HALF)
            await other.send(HALF[:35_000])
            await small.send(HALF[:10_000])
            assert await large.read_some() == b""
            assert broker.context.load.dropped_count == 1
            for peer, sent in ((small, 10_000), (other, 35_000)):
                rest = HALF[sent:] + b"x" * 30_000
                assert (await peer.ask(rest)).startswith(b"result 200 ")

    limits = ("inFlightBytesMax", "connectionInFlightBytesMax")
    sizes = {"payloadBytesMax": "90000", "batchBytesMax": "90000"}
    run(data_dir, scenario, {**dict.fromkeys(limits, "100000"), **sizes})


class NoMemory:
    """A socket that cannot be received from, for want of memory, `count` times."""

    def __init__(self, sock: socket.socket, count: int) -> None:
        self._sock = sock
        self._count = count

    def recv(self, size: int) -> bytes:
        if self._count:
            self._count -= 1
            raise MemoryError
        return self._sock.recv(size)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


def test_no_memory_to_receive_closes_who_holds_most(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes without room stay in the socket, and are answered then."""

    async def scenario(broker) -> None:
        async with Peer(broker) as large, Peer(broker) as peer:
            await large.send(HALF)
            channel = peer.session.channel
            wrap_socket(channel, lambda sock: NoMemory(sock, 1))
            assert (await peer.ask(put(b"x"))).startswith(b"result 200 ")
            assert await large.read_some() == b""

    run(data_dir, scenario)
    lines = [each for each in caplog.records if "closed for memory" in each.message]
    assert len(lines) == 1
    assert "held_bytes=60000 dropped=1" in lines[0].message


@pytest.mark.slow
def test_no_memory_to_receive_closes_the_connection_itself_if_nothing_is_held(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends once, and is not tried for ever; others go on. Repeats are counted."""

    async def scenario(broker) -> None:
        async with Peer(broker) as other:
            for _ in range(5):
                async with Peer(broker) as peer:
                    channel = peer.session.channel
                    wrap_socket(channel, lambda sock: NoMemory(sock, 1_000_000))
                    peer.writer.write(b"version 1\r\n")
                    await until(peer.is_closed)
            assert (await other.ask(put(b"x"))).startswith(b"result 200 ")
            assert broker.control.status().dropped_count == 5

    run(data_dir, scenario)
    # 1, 2 and 4: each power of two.
    assert sum("closed for memory" in each.message for each in caplog.records) == 3


@pytest.mark.parametrize("name", ["handle_put", "handle_stats"])
def test_no_memory_inside_a_command_ends_its_connection_alone(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Nothing behind the lost command is carried out, and nothing stays in flight."""

    def fail(*_args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(f"metaq.broker.dispatch.{name}", fail)
    command = put(b"x", checksum=-1) if name == "handle_put" else b"stats  1\r\n"

    async def scenario(broker) -> None:
        async with Peer(broker) as peer, Peer(broker) as other:
            take_nothing(peer.session)
            await peer.send(command + b"version 2\r\n")
            await until(peer.is_closed)
            assert (await other.ask(b"version 1\r\n")).startswith(b"result 200 ")
            load = broker.context.load
            assert load.dropped_count == 1
            assert load.in_flight_bytes == load.partial_bytes == load.reply_bytes == 0

    run(data_dir, scenario)


def test_no_memory_for_replies_ends_their_connection_alone(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the group are answered, and nothing stays in flight."""
    encode, calls = acks.encode_put_replies, []

    def fail_first(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return encode(*args)

    monkeypatch.setattr(acks, "encode_put_replies", fail_first)

    async def scenario(broker) -> None:
        async with Peer(broker) as peer, Peer(broker) as other:
            await other.ask(put(b"x"))
            await peer.send(put(b"x") * 2)  # a run: single puts have another ticket
            assert (await other.ask(put(b"x"))).startswith(b"result 200 ")
            await until(peer.is_closed)
            load = broker.context.load
            assert load.dropped_count == 1
            assert load.in_flight_bytes == load.reply_bytes == 0

    run(data_dir, scenario)


class NoMemoryToSend:
    """A socket that cannot be sent to, for want of memory."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, *_data: object) -> int:
        raise MemoryError

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


@pytest.mark.parametrize(
    ("begin", "command"),
    [
        (b"version 1\r\n", put(b"x")),
        (
            b"transaction TX:s:1 s BEGIN 2\r\n",
            b"put test 0 1 0 -1 TX:s:1 3\r\nx",
        ),
    ],
    ids=["put", "transactional"],
)
def test_no_memory_to_send_a_reply_ends_its_connection_alone(
    data_dir: Path, begin: bytes, command: bytes
) -> None:
    """The peer would wait for it, and what it held would never be given back."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer, Peer(broker) as other:
            await other.ask(put(b"x"))
            assert (await peer.ask(begin)).startswith(b"result 200 ")
            wrap_socket(peer.session.channel, NoMemoryToSend)
            await peer.send(command)
            await until(peer.is_closed)
            assert (await other.ask(put(b"x"))).startswith(b"result 200 ")
            load = broker.context.load
            assert load.in_flight_bytes == load.reply_bytes == 0

    run(data_dir, scenario)


@pytest.mark.slow
def test_no_memory_to_end_a_wait_keeps_no_other_wait(data_dir: Path) -> None:
    """Waits end one after the other, and go on behind one that failed."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer, Peer(broker) as other:
            await other.ask(put(b"x"))
            wrap_socket(peer.session.channel, NoMemoryToSend)
            for number, each in enumerate((peer, other)):
                await each.send(b"get test g 0 21 99 %d wait=100\r\n" % number)
            assert (await other.read_some()).startswith(b"result 404 ")
            await until(peer.is_closed)
            assert broker.context.waiters.count == 0

    run(data_dir, scenario)


def test_a_wait_that_fails_keeps_no_other_wait(data_dir: Path) -> None:
    """Whatever it fails with: what ends waits is there for all."""

    async def scenario(broker) -> None:
        waiters, finished = broker.context.waiters, list[int]()

        def finish(waiter: Waiter) -> None:
            finished.append(waiter.command.opaque)
            if waiter.command.opaque == 0:
                raise MemoryError

        def add(number: int) -> None:
            get = Get("test", "g", 0, 21, 100, number)
            waiters.add(Waiter(get, Offset(21), finish), log=None, wait_ms=1)

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        for number in range(3):
            add(number)
        await until(lambda: len(finished) == 3)
        add(3)
        await until(lambda: len(finished) == 4)

    run(data_dir, scenario)


class Lacking:
    """A log that finds no memory for an append."""

    def __init__(self, log: PartitionLog) -> None:
        self._log = log

    def append(self, *_chunks: object, **_more: object) -> None:
        raise MemoryError

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)


def test_no_memory_to_append_a_batch_leaves_nothing_in_flight(data_dir: Path) -> None:
    """The connection ends; the bound on all of them would be used up for ever."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(put(b"x"))
            log: Any = Lacking(broker.context.topics.find_log("test", 0))
            records = encode_record(b"x", id=MessageId(0))
            size = SizeBytes(len(records))
            with pytest.raises(MemoryError):
                append_run(
                    log,
                    [records],
                    peer.session,
                    size_bytes=size,
                    record_count=1,
                    last_id=MessageId(1),
                    receipts=Receipts((b"1",), (1,), (log.next_offset,)),
                    batch=StoredBatch(
                        "p", 0, 1, -1, MessageId(1), log.next_offset, size
                    ),
                )
            assert not peer.session.unanswered_count
            assert not broker.context.load.in_flight_bytes

    run(data_dir, scenario)


@pytest.mark.slow
def test_half_frames_under_a_memory_limit_leave_the_others_served(
    tmp_path: Path,
) -> None:
    """Thirty half puts of 15 MB in a process that may have 100 MB more."""
    half = b"put test 0 15000000 0 -1 1\r\n" + b"x" * 14_000_000
    with BrokerProcess(tmp_path / "data", topic="test") as broker:

        def ask(sock: socket.socket) -> bytes:
            sock.sendall(put(b"hello"))
            return sock.recv(4096)

        first = socket.create_connection(("127.0.0.1", broker.port), timeout=30)
        assert ask(first).startswith(b"result 200 ")
        pages = Path(f"/proc/{broker.pid}/statm").read_text().split()[0]
        size_bytes = int(pages) * resource.getpagesize() + 100_000_000
        resource.prlimit(broker.pid, resource.RLIMIT_AS, (size_bytes, size_bytes))
        greedy = []
        for _ in range(30):
            sock = socket.create_connection(("127.0.0.1", broker.port), timeout=30)
            greedy.append(sock)
            with contextlib.suppress(ConnectionError):  # it may have held most
                sock.sendall(half)
            assert ask(first).startswith(b"result 200 ")
        for sock in greedy:
            sock.close()
        with socket.create_connection(("127.0.0.1", broker.port), timeout=30) as late:
            assert ask(late).startswith(b"result 200 ")
        first.close()
        text = broker.read_log()
    assert "closed for memory" in text
    assert text.count("\n") < 30
    assert "Traceback" not in text


# -- turns


def test_turns_run_one_piece_each_in_rotation() -> None:
    """A caller comes behind those that wait; nothing runs in between."""
    due: list[Callable[[], None]] = []
    turns, seen = Turns(due.append), []

    def work(name: str, count: int) -> None:
        seen.append(f"{name}{count}")
        if count > 1:
            turns.ask(lambda: work(name, count - 1))

    turns.ask(lambda: work("a", 3))
    turns.ask(lambda: work("b", 2))
    assert seen == []
    while due:
        assert len(due) == 1
        before = len(seen)
        due.pop()()
        assert len(seen) == before + 1
    assert seen == ["a3", "b2", "a2", "b1", "a1"]


def test_between_two_pieces_the_sockets_are_served() -> None:
    """Bytes that come during a piece are read before the next one, and handed on."""
    seen: list[str] = []

    async def main() -> None:
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        turns = Turns(partial(call_after_sockets, loop))
        ours, theirs = socket.socketpair()

        def work() -> None:
            seen.append("piece")
            if seen.count("piece") < 3:
                turns.ask(work)
            theirs.send(b"x")

        def on_readable() -> None:
            ours.recv(1)
            seen.append("read")
            loop.call_soon(hand_on)

        def hand_on() -> None:
            seen.append("handed on")
            if seen.count("handed on") == 3:
                is_over.set()

        with ours, theirs:
            loop.add_reader(ours, on_readable)
            turns.ask(work)
            await is_over.wait()
            loop.remove_reader(ours)

    asyncio.run(main())
    assert seen == ["piece", "read", "handed on"] * 3


class Watched:
    """A socket, and the sizes that were asked of it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sizes: list[int] = []

    def recv(self, size: int) -> bytes:
        self.sizes.append(size)
        return self._sock.recv(size)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


@pytest.mark.parametrize("is_alone", [True, False])
def test_one_that_is_alone_receives_a_large_frame_in_few_reads(
    data_dir: Path, is_alone: bool
) -> None:
    """Commands received that wait for their turn are in no other bound."""
    watched: list[Watched] = []

    def watch(sock: socket.socket) -> Watched:
        watched.append(Watched(sock))
        return watched[-1]

    async def scenario(broker) -> None:
        turns, is_over = broker.context.turns, False

        def wait() -> None:
            if not is_over:
                turns.ask(wait)

        async with Peer(broker) as peer:
            wrap_socket(peer.session.channel, watch)
            if not is_alone:
                wait()
            reply = await peer.ask(put(bytes(2_000_000)))
            assert reply.startswith(b"result 200 ")
            is_over = True

    run(data_dir, scenario)
    largest = RECEIVE_FRAME_BYTES if is_alone else RECEIVE_BYTES
    assert max(watched[0].sizes) == largest


def test_a_large_read_lets_a_small_one_go_first(data_dir: Path) -> None:
    """Both are there when the loop looks, the large one since before."""
    warm = put(b"x" * 1_000) * 40  # from here on large reads are expected
    assert len(warm) > 2 * LARGE_READ_BYTES

    async def scenario(broker) -> None:
        async with Peer(broker) as greedy, Peer(broker) as other:
            await greedy.ask(warm)
            await other.ask(put(b"first"))
            log, appended = broker.context.topics.find_log("test", 0), []
            append = log.append

            def note(chunks, **named):
                appended.append(b"".join(chunks)[-5:])
                return append(chunks, **named)

            log.append = note
            greedy.writer.write(put(b"large") * 1_000)
            other.writer.write(put(b"small"))
            await until(lambda: {b"large", b"small"} <= set(appended))
            assert appended[0] == b"small"

    run(data_dir, scenario)


def test_puts_of_a_connection_with_little_in_flight_go_first(data_dir: Path) -> None:
    """A stream of puts comes in runs that are larger than that."""
    small, many = put(b"small"), LIGHT_BYTES // acks.PUT_OVERHEAD_BYTES

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            await peer.ask(small)
            log, seen = broker.context.topics.find_log("test", 0), []
            append = log.append

            def note(chunks, **named):
                seen.append(named["is_light"])
                return append(chunks, **named)

            log.append = note
            await peer.ask(small)
            assert seen == [True]
            await peer.ask(small * many)
            assert seen == [True, False]
            await peer.ask(small)
            assert seen == [True, False, True]

    run(data_dir, scenario)


FLOODS = {
    "plain puts": put(b"x") * 100_000,
    "puts without checksum": put(b"x", checksum=-1) * 100_000,
    "puts to any partition": put(b"x", -1) * 100_000,
    "refused puts": put(b"x", 7) * 2_000,
    "stats": b"stats  1\r\n" * 2_000,
    "offsets": b"offset test g 0 0 1\r\n" * 2_000,
    "gets": b"get test g 0 0 21 1\r\n" * 2_000,
    "long polls": b"get test g 1 0 21 1 wait=30000\r\n" * 2_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_a_put_is_taken_before_a_flood_on_another_connection_is_over(
    data_dir: Path, name: str
) -> None:
    """However much one connection has sent, the others get their turns."""
    flood = FLOODS[name]

    async def scenario(broker) -> None:
        async with Peer(broker) as greedy, Peer(broker) as other:
            await other.ask(put(b"first"))
            await other.ask(put(b"first", 1))
            session, appended = greedy.session, []
            log = broker.context.topics.find_log("test", 0)
            append = log.append

            def note(chunks, **named):
                appended.append(b"".join(chunks)[-5:])
                return append(chunks, **named)

            log.append = note

            def is_over() -> bool:
                received_bytes = session.channel.received_bytes
                return received_bytes == len(flood) and not session.is_paused

            greedy.writer.write(flood)
            await until(lambda: session.channel.received_bytes > 0)
            # Its answer follows when the disk has it, however long that takes.
            other.writer.write(put(b"hello"))
            await until(lambda: b"hello" in appended)
            assert not is_over()
            assert (await other.read_some()).startswith(b"result 200 ")
            await until(is_over)

    run(data_dir, scenario, clock=BusyClock())


@pytest.mark.parametrize("payloads", [[b"x" * 100], [b"x" * 100, b"y" * 99]])
def test_a_large_batch_is_checked_turn_by_turn(
    data_dir: Path, payloads: list[bytes]
) -> None:
    """Between two turns the loop is there for others."""
    frame = mput(60_000, *payloads)

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            session, turns, seen = peer.session, broker.context.turns, []
            ask = turns.ask

            def note(go_on):
                seen.append(session.channel.received_bytes)
                ask(go_on)

            turns.ask = note
            assert (await peer.ask(frame)).startswith(b"result 200 ")
            assert seen.count(len(frame)) >= 8
            assert broker.context.load.in_flight_bytes == 0

    run(data_dir, scenario, clock=BusyClock())


def test_a_large_put_is_checked_turn_by_turn(data_dir: Path) -> None:
    """It is not joined; it is stored, or refused, as one that came whole."""
    payload = bytes(range(256)) * 8_000
    in_transaction = put(payload).replace(b" 1\r\n", b" TX:s:1 1\r\n", 1)

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            turns, seen = broker.context.turns, []
            ask = turns.ask

            def note(go_on):
                seen.append(peer.session.channel.received_bytes)
                ask(go_on)

            turns.ask = note
            frame = put(payload)
            assert (await peer.ask(frame)).startswith(b"result 200 ")
            assert seen.count(len(frame)) >= 1
            refused = await peer.ask(put(payload, checksum=7))
            assert refused == await peer.ask(put(b"x", checksum=7))
            begin = b"transaction TX:s:1 s BEGIN 1\r\n"
            assert (await peer.ask(begin)).startswith(b"result 200 ")
            assert (await peer.ask(in_transaction)).startswith(b"result 200 ")
            assert broker.context.load.in_flight_bytes == 0
            assert broker.context.counters.cmd_put == 4

    run(data_dir, scenario, clock=BusyClock())
    (path,) = data_dir.glob("test-0/*.meta")
    record = read_record(path.read_bytes())
    assert record.payload == payload
    assert record.size_bytes == path.stat().st_size


@pytest.mark.parametrize("item", [b"", b"topics", b"offsets", b"test"])
def test_statistics_of_many_logs_are_gathered_turn_by_turn(
    data_dir: Path, item: bytes
) -> None:
    """The answer is whole and has its place in the order; others are served between."""
    count = 5 * LOGS_PER_STEP

    async def scenario(broker) -> None:
        async with Peer(broker) as peer, Peer(broker) as other:
            await peer.ask(b"".join(put(b"x", number) for number in range(count)))
            turns, seen = broker.context.turns, []
            ask, between = turns.ask, []

            def note(go_on):
                if not seen:
                    between.append(asyncio.ensure_future(other.ask(b"version 3\r\n")))
                seen.append(go_on)
                ask(go_on)

            turns.ask = note
            answer = await peer.ask(b"stats %b 1\r\nversion 2\r\n" % item)
            assert len(seen) >= 2
            opaques = re.findall(rb"result 200 \d+ (\d)\r\n", answer)
            assert opaques == [b"1", b"2"]
            assert (await between[0]).startswith(b"result 200 ")
            told = {
                b"": b"total_messages %d\r\n" % count,
                b"topics": b"test partitions %d message_count %d " % (count, count),
                b"offsets": b"test part %d min_offset 0 max_offset 21\r\n"
                % (count - 1),
                b"test": b"message_count %d\r\n" % count,
            }
            assert told[item] in answer
            assert broker.context.load.in_flight_bytes == 0

    run(data_dir, scenario, {"numPartitions": str(count)}, clock=BusyClock())


class BusyLoop:
    """A loop on which every look at the time takes a third of a turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call_at = loop.call_at
        self._loop = loop
        self._spent_s = 0.0

    def time(self) -> float:
        self._spent_s += TURN_S / 3
        return self._loop.time() + self._spent_s


def test_waits_that_end_together_end_turn_by_turn(data_dir: Path) -> None:
    """A put that wakes thousands costs the loop a piece of them at a time."""
    finished: list[int] = []
    asked: list[int] = []

    class Noted(Turns):
        def ask(self, go_on: Callable[[], None]) -> None:
            asked.append(len(finished))
            super().ask(go_on)

    async def scenario(broker) -> None:
        loop = asyncio.get_running_loop()
        waiters = Waiters(BusyLoop(loop), Noted(loop.call_soon))
        async with Peer(broker) as peer:
            await peer.ask(put(b"x"))
            log = broker.context.topics.find_log("test", 0)
            for number in range(100):
                waiter = Waiter(
                    Get("test", "g", 0, 21, 100, number),
                    Offset(21),
                    lambda waiter: finished.append(waiter.command.opaque),
                )
                waiters.add(waiter, log=log, wait_ms=30_000)
            assert log.statistics().waiter_count == 1
            await peer.ask(put(b"x"))
            await until(lambda: len(finished) == 100)
            assert len(asked) >= 100 // 3
            assert max(b - a for a, b in itertools.pairwise([0, *asked])) <= 3
        assert finished == list(range(100))
        assert waiters.count == 0

    run(data_dir, scenario)
