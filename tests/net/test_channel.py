"""A channel over a socket pair: order, bounds, ranges, and how it ends."""

import asyncio
import socket
import threading

import pytest

from metaq.net import channel as channel_module
from metaq.net.channel import ChannelState
from tests.net.rig import ROOM, ColdRange, Range, Rig, run, sorry
from tests.rigs.inside import wrap_socket
from tests.rigs.waiting import until


def test_replies_of_one_turn_leave_in_one_write() -> None:
    """A group of replies is one system call."""

    async def scenario(rig: Rig) -> None:
        for number in range(100):
            rig.channel.send(b"%d," % number)
        assert rig.channel.sent_bytes == 0
        expected = b"".join(b"%d," % number for number in range(100))
        await until(lambda: rig.channel.sent_bytes)
        assert rig.channel.sent_bytes == len(expected)
        assert await rig.read(len(expected)) == expected

    run(scenario)


def test_room_to_receive_follows_what_comes() -> None:
    """Small messages take little memory each, a stream is read in large pieces.

    What a large frame of it lacks comes at once, up to a bound.
    """
    sizes: list[int] = []

    class Watched:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def recv(self, size: int) -> bytes:
            sizes.append(size)
            return self._sock.recv(size)

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

    async def scenario(rig: Rig) -> None:
        wrap_socket(rig.channel, Watched)
        small, large = channel_module.RECEIVE_BYTES_MIN, channel_module.RECEIVE_BYTES
        for data, lacking, asked in (
            (b"put", 0, small),
            (b"put", 5000, small),
            (b"x" * small, 0, small),
            (b"x" * small, large, large),
            (b"x" * small, large + 1, large + 1 + small),
            (b"x" * small, 1 << 30, channel_module.RECEIVE_FRAME_BYTES),
            (b"put", 0, large),
            (b"put", 0, small),
        ):
            rig.lacking_bytes = lacking
            rig.peer.sendall(data)
            received = rig.channel.received_bytes + len(data)
            await until(
                lambda received=received: rig.channel.received_bytes == received
            )
            assert sizes[-1] == asked

    run(scenario)


def test_queued_bytes_leave_with_the_next() -> None:
    """In front of them, in one system call; alone when that is asked for."""

    async def scenario(rig: Rig) -> None:
        rig.channel.queue(b"first,")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rig.channel.sent_bytes == 0
        rig.channel.send_now(b"second,")
        assert rig.channel.sent_bytes == 13
        assert (rig.channel.queued_bytes, rig.channel.held_bytes) == (0, 0)
        assert await rig.read(13) == b"first,second,"
        rig.channel.queue(b"third,")
        rig.channel.send_now(b"")
        assert await rig.read(6) == b"third,"
        rig.channel.queue(b"fourth,")
        rig.channel.send_queued()
        assert await rig.read(7) == b"fourth,"

    run(scenario)


def test_gathered_bytes_leave_when_they_are_many() -> None:
    """The first ones before the turn is over, and the rest at its end."""

    async def scenario(rig: Rig) -> None:
        for each in (b"first,", b"second,", b"third,"):
            rig.channel.send_gathered(each, 10)
        assert (rig.channel.sent_bytes, rig.channel.queued_bytes) == (13, 6)
        assert await rig.read(19) == b"first,second,third,"
        assert rig.channel.held_bytes == 0
        big = bytes(8 << 20)
        rig.channel.send_gathered(b"fourth,", 10)
        rig.channel.send_gathered(big, 10)  # more than the socket takes
        rig.channel.send_gathered(b"last", 10)
        assert await rig.read(7 + len(big) + 4) == b"fourth," + big + b"last"

    run(scenario)


def test_an_owner_that_waits_for_an_empty_queue_is_told() -> None:
    """Also when what is queued leaves with a reply that leaves at once."""

    async def scenario(rig: Rig) -> None:
        rig.channel.queue(b"first,")
        rig.channel.want_empty()
        rig.channel.send_now(b"second,")
        assert await rig.read(13) == b"first,second,"
        await until(lambda: rig.events == ["room"])

    run(scenario)


def test_queued_bytes_leave_before_the_end() -> None:
    """A close that waits for the queue loses nothing."""

    async def scenario(rig: Rig) -> None:
        rig.channel.queue(b"last words")
        rig.channel.close_after_flush("test")
        assert await rig.read(10) == b"last words"

    run(scenario)


def test_a_lonely_reply_leaves_at_once() -> None:
    """It leaves without a wait for the end of the turn when nothing could join."""

    async def scenario(rig: Rig) -> None:
        rig.channel.send_now(b"")
        rig.channel.send_now(b"reply")
        assert rig.channel.sent_bytes == 5
        assert rig.channel.queued_bytes == 0
        assert rig.peer.recv(100) == b"reply"

    run(scenario)


def test_a_lonely_reply_does_not_overtake() -> None:
    """Earlier bytes leave before it, and the rest that does not fit stays."""

    async def scenario(rig: Rig) -> None:
        rig.channel.send(b"first,")
        rig.channel.send_now(b"second,")
        assert rig.channel.sent_bytes == 0
        assert await rig.read(13) == b"first,second,"
        big = b"x" * (4 * 1024 * 1024)
        rig.channel.send_now(big)
        assert 0 < rig.channel.queued_bytes < len(big)
        rig.channel.send_now(b"last")
        assert await rig.read(len(big) + 4) == big + b"last"

    run(scenario)


def test_a_lonely_reply_to_a_peer_that_is_gone_calls_nothing_back() -> None:
    """The error is found, and reported, at the end of the turn."""

    async def scenario(rig: Rig) -> None:
        rig.channel.pause_reading()
        rig.peer.close()
        rig.channel.send_now(b"reply")
        assert rig.events == []
        await until(lambda: rig.events)
        assert rig.events[0].startswith("closed: send failed")

    run(scenario)


def test_bytes_and_ranges_keep_their_order() -> None:
    """The queue leaves in its order, bytes or ranges; each range is released."""

    async def scenario(rig: Rig) -> None:
        first, second = Range(b"0123456789", 2, 5), Range(b"x" * 100_000)
        rig.channel.send(b"a")
        rig.channel.send_range(b"head1:", first, explain=sorry)
        rig.channel.send_range(b"head2:", second, explain=sorry)
        rig.channel.send(b"z")
        expected = b"ahead1:23456head2:" + b"x" * 100_000 + b"z"
        assert await rig.read(len(expected)) == expected
        await until(lambda: rig.channel.queued_bytes == 0)
        assert (first.release_count, second.release_count) == (1, 1)

    run(scenario)


def test_a_cold_range_is_warmed_on_a_thread_and_keeps_its_place() -> None:
    """A range outside the page cache never goes to sendfile on the loop's thread."""

    async def scenario(rig: Rig) -> None:
        cold = ColdRange(b"payload")
        rig.channel.send_range(b"head:", cold, explain=sorry)
        rig.channel.send(b"after")
        assert await rig.read(17) == b"head:payloadafter"
        assert cold.warmed == [(0, 7)]
        assert threading.get_ident() not in cold.warmers

    run(scenario)


def test_a_fresh_range_leaves_at_once() -> None:
    """Without a check of the cache, and without a wait for the end of the turn."""

    async def scenario(rig: Rig) -> None:
        fresh = ColdRange(b"0123456789", 2, 5)
        rig.channel.send_range(b"head:", fresh, explain=sorry, is_fresh=True)
        assert fresh.release_count == 1
        assert rig.channel.queued_bytes == 0
        assert rig.channel.sent_bytes == 10
        assert rig.peer.recv(100) == b"head:23456"
        assert not fresh.question_count

    run(scenario)


def test_a_cached_range_leaves_at_once() -> None:
    """Nothing could join it, so it does not wait for the end of the turn."""

    async def scenario(rig: Rig) -> None:
        cached = Range(b"0123456789", 2, 5)
        rig.channel.send_range(b"head:", cached, explain=sorry)
        assert cached.release_count == 1
        assert rig.channel.queued_bytes == 0
        assert rig.peer.recv(100) == b"head:23456"

    run(scenario)


def test_a_fresh_range_does_not_overtake() -> None:
    """Earlier bytes leave before it, and the rest that does not fit stays."""

    async def scenario(rig: Rig) -> None:
        rig.channel.send(b"first,")
        big = Range(b"x" * (4 * 1024 * 1024))
        rig.channel.send_range(b"a:", Range(b"1"), explain=sorry, is_fresh=True)
        assert rig.channel.sent_bytes == 0
        assert await rig.read(9) == b"first,a:1"
        rig.channel.send_range(b"b:", big, explain=sorry, is_fresh=True)
        assert 0 < rig.channel.queued_bytes < big.size_bytes
        assert big.release_count == 0
        rig.channel.send_now(b"last")
        expected = b"b:" + b"x" * big.size_bytes + b"last"
        assert await rig.read(len(expected)) == expected
        await until(lambda: big.release_count == 1)
        await until(lambda: rig.events)
        assert rig.events == ["room"]

    run(scenario)


def test_a_fresh_range_to_a_peer_that_is_gone_calls_nothing_back() -> None:
    """The error is reported at the end of the turn; the range is released."""

    async def scenario(rig: Rig) -> None:
        rig.channel.pause_reading()
        rig.peer.close()
        fresh = Range(b"payload")
        rig.channel.send_range(b"head:", fresh, explain=sorry, is_fresh=True)
        assert rig.events == []
        await until(lambda: rig.events)
        assert rig.events[0].startswith("closed: send failed")
        assert fresh.release_count == 1

    run(scenario)


def test_a_range_that_the_disk_cannot_read_becomes_its_substitute() -> None:
    """An unreadable range is answered with an error, and the stream stays in step."""

    class Broken(ColdRange):
        def warm(self, position: int, size_bytes: int) -> None:
            raise OSError(5, "Input/output error")

    async def scenario(rig: Rig) -> None:
        broken = Broken(b"payload")
        rig.channel.send_range(b"head:", broken, explain=sorry)
        rig.channel.send(b"after")
        expected = b"sorry: [Errno 5] Input/output errorafter"
        assert await rig.read(len(expected)) == expected
        assert broken.release_count == 1
        await until(lambda: rig.channel.queued_bytes == 0)

    run(scenario)


def test_a_file_is_opened_by_a_reader_thread() -> None:
    """Whatever is known of its pages: the directory may be on a disk that hangs."""

    async def scenario(rig: Rig) -> None:
        threads: list[str] = []

        class Closed(Range):
            is_open = False

            def open(self) -> None:
                threads.append(threading.current_thread().name)
                super().open()

        fresh = Closed(b"payload")
        rig.channel.send_range(b"head:", fresh, explain=sorry, is_fresh=True)
        assert await rig.read(12) == b"head:payload"
        again = Range(b"more")
        rig.channel.send_range(b"head:", again, explain=sorry, is_fresh=True)
        assert await rig.read(9) == b"head:more"
        assert len(threads) == 1
        assert threads[0] != threading.main_thread().name

    run(scenario)


def test_a_range_that_is_shorter_than_promised_ends_the_connection() -> None:
    """The header has left: no other bytes may be sent instead of the range."""

    async def scenario(rig: Rig) -> None:
        short = Range(b"0123456789", 0, 20)
        rig.channel.send_range(b"head:", short, explain=sorry)
        await until(lambda: rig.events)
        assert rig.events[-1].startswith("closed: send failed: range ends")
        assert short.release_count == 1

    run(scenario)


def test_room_is_called_when_the_peer_has_read() -> None:
    """on_room comes once, when a full queue fell below half."""

    async def scenario(rig: Rig) -> None:
        big = b"x" * (4 * 1024 * 1024)
        rig.channel.send(big)
        await until(lambda: rig.channel.sent_bytes)
        assert rig.channel.queued_bytes > ROOM
        assert rig.events == []
        assert await rig.read(len(big)) == big
        await until(lambda: rig.events)
        assert rig.events == ["room"]

    run(scenario)


def test_close_after_flush_sends_everything_then_ends() -> None:
    """Queued bytes and ranges arrive before the end of the stream."""

    async def scenario(rig: Rig) -> None:
        rig.channel.send(b"a" * 300_000)
        rig.channel.send_range(b"head:", Range(b"payload"), explain=sorry)
        rig.channel.close_after_flush("done")
        rig.channel.send(b"too late")
        data = await rig.read(1 << 20)
        assert data == b"a" * 300_000 + b"head:payload"
        assert rig.channel.state is ChannelState.LINGERING
        rig.peer.close()
        await until(lambda: rig.events)
        assert rig.events == ["closed: done"]

    run(scenario)


def test_unread_input_does_not_destroy_the_last_replies() -> None:
    """Closing while the peer still sends is a FIN, not a reset."""

    async def scenario(rig: Rig) -> None:
        rig.channel.pause_reading()
        rig.peer.send(b"unread " * 1000)
        rig.channel.send(b"last words")
        rig.channel.close_after_flush("done")
        assert await rig.read(100) == b"last words"

    run(scenario)


def test_lingering_is_bounded() -> None:
    """A peer that never closes does not keep the socket."""

    async def scenario(rig: Rig) -> None:
        rig.channel.close_after_flush("done")
        await until(lambda: rig.events)
        assert rig.events == ["closed: done"]

    run(scenario, linger_s=0.01)


class NoMemory:
    """A socket that has no memory for what it would return."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def recv(self, _size: int) -> bytes:
        raise MemoryError

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


def test_lingering_needs_no_memory() -> None:
    """Input is discarded, and the end of the peer is seen, where memory ran out."""

    async def scenario(rig: Rig) -> None:
        failed: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: failed.append(context))
        wrap_socket(rig.channel, NoMemory)
        rig.channel.close_after_flush("done")
        rig.peer.sendall(b"unread " * 10_000)
        await until(lambda: rig.channel.received_bytes == 70_000)
        assert rig.channel.state is ChannelState.LINGERING
        rig.peer.close()
        await until(lambda: rig.channel.state is ChannelState.CLOSED)
        assert failed == []

    run(scenario)


def test_the_end_of_the_peer_is_told_once_and_writing_goes_on() -> None:
    """A peer that will send no more may still read."""

    async def scenario(rig: Rig) -> None:
        rig.peer.send(b"last")
        rig.peer.shutdown(socket.SHUT_WR)
        await until(lambda: rig.events)
        assert (rig.received, rig.events) == ([b"last"], ["end"])
        rig.channel.resume_reading()
        rig.channel.send(b"answer")
        assert await rig.read(6) == b"answer"
        assert rig.events == ["end"]

    run(scenario)


def test_abort_drops_what_is_queued_and_releases_ranges() -> None:
    """After an abort nothing is kept, and nothing is called but on_closed."""

    async def scenario(rig: Rig) -> None:
        queued = [Range(b"payload") for _ in range(3)]
        rig.channel.send(b"x" * (4 * 1024 * 1024))
        for each in queued:
            rig.channel.send_range(b"head:", each, explain=sorry)
        await until(lambda: rig.channel.sent_bytes)
        rig.channel.abort("enough")
        rig.channel.abort("again")
        assert rig.events == ["closed: enough"]
        assert [each.release_count for each in queued] == [1, 1, 1]
        assert rig.channel.queued_bytes == 0
        late = Range(b"payload")
        rig.channel.send_range(b"head:", late, explain=sorry)
        assert late.release_count == 1

    run(scenario)


def test_abort_while_a_range_is_being_warmed_releases_it_once() -> None:
    """The file stays open for the thread that reads it, and no longer."""
    begun, answers = threading.Event(), threading.Event()

    class Slow(ColdRange):
        def warm(self, position: int, size_bytes: int) -> None:
            begun.set()
            answers.wait(30)

    async def scenario(rig: Rig) -> None:
        file = Slow(b"payload")
        rig.channel.send_range(b"head:", file, explain=sorry)
        await until(begun.is_set)
        rig.channel.abort("enough")
        assert file.release_count == 0
        answers.set()
        await until(lambda: file.release_count)
        assert file.release_count == 1

    run(scenario)


def test_silence_and_stalls_are_measured() -> None:
    """idle_s counts silence in both directions, stalled_s unread replies."""

    async def scenario(rig: Rig) -> None:
        now_s = rig.clock.monotonic_s
        rig.clock.advance_s(10)
        assert rig.channel.idle_s(now_s()) == 10
        assert rig.channel.stalled_s(now_s()) == 0
        rig.channel.send(b"x" * (4 * 1024 * 1024))
        await until(lambda: rig.channel.sent_bytes)
        rig.clock.advance_s(7)
        assert rig.channel.stalled_s(now_s()) == 7
        rig.peer.send(b"hello")
        await until(lambda: rig.received)
        assert rig.channel.idle_s(now_s()) == 0

    run(scenario)


@pytest.mark.parametrize("reads_rest", [True, False])
def test_what_the_peer_sent_before_it_closed_is_kept_for_who_wants_it(
    reads_rest: bool,
) -> None:
    """A send that fails before the read of a turn does not cost the last replies."""

    async def scenario(rig: Rig) -> None:
        rig.channel.start(
            on_data=rig.received.append,
            on_end=lambda: rig.events.append("end"),
            on_room=lambda: None,
            on_closed=lambda reason: rig.events.append(f"closed: {reason}"),
            reads_rest=reads_rest,
        )
        rig.peer.sendall(b"last words")
        rig.peer.close()
        rig.channel.send(b"too late")
        await until(lambda: rig.channel.state is ChannelState.CLOSED)
        assert rig.received == ([b"last words"] if reads_rest else [])
        assert rig.events == ["closed: send failed: [Errno 32] Broken pipe"]

    run(scenario)


def test_a_rest_that_there_is_no_memory_for_ends_the_channel() -> None:
    """A send that fails is not tried for ever."""

    async def scenario(rig: Rig) -> None:
        rig.channel.start(
            on_data=rig.received.append,
            on_end=lambda: rig.events.append("end"),
            on_room=lambda: None,
            on_closed=lambda reason: rig.events.append(f"closed: {reason}"),
            reads_rest=True,
        )
        rig.channel.pause_reading()
        wrap_socket(rig.channel, NoMemory)
        rig.peer.close()
        rig.channel.send(b"too late")
        await until(lambda: rig.channel.state is ChannelState.CLOSED)
        assert rig.events == ["closed: send failed: [Errno 32] Broken pipe"]

    run(scenario)


def test_the_owner_may_abort_while_it_gets_the_rest() -> None:
    """The one close that there is happens then and there."""

    async def scenario(rig: Rig) -> None:
        rig.channel.start(
            on_data=lambda _data: rig.channel.abort("enough"),
            on_end=lambda: None,
            on_room=lambda: None,
            on_closed=rig.events.append,
            reads_rest=True,
        )
        rig.peer.sendall(b"last words")
        rig.peer.close()
        rig.channel.send(b"too late")
        await until(lambda: rig.channel.state is ChannelState.CLOSED)
        assert rig.events == ["enough"]

    run(scenario)
