"""The command `find`: over real sockets, with an index and without."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.broker.handlers.find import FINDS_MAX, RECORDS_BYTES_MAX
from metaq.clock import SystemClock
from metaq.model import Offset
from metaq.protocol.commands import Find, Put
from metaq.protocol.encoding import encode
from metaq.protocol.find_pages import FIND_PARTITIONS_MAX, FoundPage, decode_pages
from metaq.record.checksum import checksum
from metaq.record.flags import encode_payload
from metaq.record.runs import decode_runs
from metaq.storage.key_index import keys_path
from metaq.storage.segment import Damage
from tests.rigs.broker import CONFIG, TIMEOUT_S, Peer, running_broker
from tests.rigs.waiting import until
from tests.sampling import SEED

INDEXED = CONFIG.replace("[topic=test]", "[topic=test]\nindex=key,order-id")
SEGMENTS = {"maxSegmentSize": "2000"}
COUNT = 100
Scenario = Callable[[Broker, Peer], Awaitable[None]]


def put(number: int, size: int = 60) -> bytes:
    """Return a put with a key and a header; opaque and data are its number."""
    data = b"%d " % number + b"x" * size
    headers = {"order-id": b"%d" % (number % 10), "other": b"1"}
    payload, flag = encode_payload(data, None, b"k%d" % (number % 7), headers)
    return encode(Put("test", 0, payload, flag, checksum(payload), number))


def run(
    data: Path, scenario: Scenario, *, text: str = CONFIG, count: int = COUNT
) -> None:
    """Run a scenario with a broker that has so many messages."""

    async def main() -> None:
        broker_running = running_broker(data, SEGMENTS, text=text)
        async with broker_running as broker, Peer(broker) as peer:
            for first in range(0, count, 10):
                await peer.ask(b"".join(map(put, range(first, first + 10))))
            await scenario(broker, peer)

    asyncio.run(main())


async def ask(peer: Peer, command: Find) -> tuple[list[int], int, int]:
    """Return the numbers of what is found, where to go on, and the bytes read."""
    reply = await peer.ask(encode(command))
    line, _, payload = reply.partition(b"\r\n")
    word, length, opaque, after, *read = line.split()
    assert (word, int(length), int(opaque)) == (b"value", len(payload), command.opaque)
    return found_in(payload), int(after[5:]), int(read[0][5:]) if read else 0


def found_in(runs: bytes) -> list[int]:
    """Return the numbers of the records in runs."""
    return [
        int(run.data.rpartition(b"other=1")[2].split()[0]) for run in decode_runs(runs)
    ]


async def whole(
    peer: Peer, command: Find, numbers: list[int], after: int | None = 0
) -> tuple[int, int]:
    """Ask until a look-up finds this: on a busy machine its time may be over before.

    Args:
        peer: asks.
        command: the question.
        numbers: of all that it finds.
        after: where it is to go on; None: anywhere.

    Returns:
        Where it goes on, and the bytes read.
    """
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            found, goes_on, read = await ask(peer, command)
            assert found == numbers[: len(found)]
            if found == numbers and after in (None, goes_on):
                return goes_on, read


async def retried(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await is_so():
            await asyncio.sleep(0.01)


async def refusal(peer: Peer, command: Find) -> bytes:
    """Return the answer to a look-up that is refused."""
    reply = await peer.ask(encode(command))
    assert reply.startswith(b"result ")
    return reply


def test_a_look_up_gives_the_newest_records_first(data_dir: Path) -> None:
    """All of them, the newest few, those of a time, those below an offset."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        log = broker.context.topics.find_log("test", 0)
        assert log is not None
        wanted = [number for number in reversed(range(COUNT)) if number % 7 == 3]
        everything = log.high_watermark - log.log_start_offset
        key = Find("test", 0, b"key=k3", 9, 1000)
        assert await whole(peer, key, wanted) == (0, everything)
        few = Find("test", 0, b"key=k3", 9, 2)
        after, _read = await whole(peer, few, wanted[:2], None)
        assert after > 0
        rest = Find("test", 0, b"key=k3", 9, 1000, below=after)
        await whole(peer, rest, wanted[2:])
        header = Find("test", 0, b"h.order-id=4", 9, 1000)
        await whole(peer, header, list(range(94, 0, -10)))
        now_ms = broker.context.clock.wall_ms()
        late = Find("test", 0, b"key=k3", 9, 1000, since_ms=now_ms + 60_000)
        assert await ask(peer, late) == ([], 0, 0)
        early = Find("test", 0, b"key=k3", 9, 1000, until_ms=now_ms - 60_000)
        await whole(peer, early, [])

    run(data_dir, scenario)


@pytest.mark.slow
def test_an_index_is_made_and_used_and_made_again(data_dir: Path) -> None:
    """To the end of a log that is idle; what is damaged in it is read once more."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        log = broker.context.topics.find_log("test", 0)
        assert log is not None
        command = Find("test", 0, b"h.order-id=4", 9, 1000)

        async def is_indexed() -> bool:
            _after, read = await whole(peer, command, list(range(94, 0, -10)))
            return read == 0

        assert len(log.segments) > 3
        await retried(is_indexed)
        path = keys_path(log.segments.first.path, Offset(0))
        good = path.read_bytes()
        path.write_bytes(good[:60] + bytes(len(good) - 60))
        assert not await is_indexed()
        await retried(is_indexed)
        assert path.read_bytes() == good
        # What is not indexed is read.
        other = Find("test", 0, b"h.other=1", 9, 1000)
        everything = log.high_watermark - log.log_start_offset
        _after, read = await whole(peer, other, list(range(COUNT - 1, -1, -1)))
        assert read == everything

    run(data_dir, scenario, text=INDEXED)


def test_a_reply_has_up_to_a_mebibyte_of_records(data_dir: Path) -> None:
    """But for a first one that is larger; the next one goes on below."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        del broker
        sizes = [100, RECORDS_BYTES_MAX // 2, RECORDS_BYTES_MAX // 2 - 300, 100]
        await peer.ask(b"".join(put(7 * n, size) for n, size in enumerate(sizes)))
        command = Find("test", 0, b"key=k0", 9, 1000)
        await whole(peer, command, [21, 14, 7], None)
        await peer.ask(put(28, 2 * RECORDS_BYTES_MAX))
        after, _read = await whole(peer, command, [28], None)
        rest = Find("test", 0, b"key=k0", 9, 1000, below=after)
        await whole(peer, rest, [21, 14, 7], None)

    run(data_dir, scenario, count=0)


def test_what_makes_no_sense_is_refused(data_dir: Path) -> None:
    """A sentence for each; the connection goes on."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        for payload, limit in ((b"", 1), (b"k", 1), (b"tag=1", 1), (b"key=a", 0)):
            command = Find("test", 0, payload, 9, limit)
            assert (await refusal(peer, command)).startswith(b"result 400 ")
        many = Find("test", 0, b"key=a", 9, 1, others=(1,) * FIND_PARTITIONS_MAX)
        assert b"at most 64 partitions, got 65" in await refusal(peer, many)
        missing = Find("test", 1, b"key=a", 9, 1)
        assert (await refusal(peer, missing)).startswith(b"result 404 ")
        internal = Find("__queues", 0, b"key=a", 9, 1)
        assert (await refusal(peer, internal)).startswith(b"result 404 ")
        broker.context.topics.close_partitions("test", start=0, end=0)
        closed = Find("test", 0, b"key=a", 9, 1)
        assert (await refusal(peer, closed)).startswith(b"result 403 ")

    run(data_dir, scenario, count=10)


@pytest.mark.slow
def test_any_look_up_is_answered(data_dir: Path) -> None:
    """Offsets within records, times and limits of any kind, fields of any bytes."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        rng, last = random.Random(SEED), 1 << 63
        numbers = (0, 1, 59, 1000, 2310, 11_590, 1 << 40, last - 1)
        for _ in range(300):
            payload = rng.choice((b"key=", b"h.other=1", b"h.", b"h.=%", b"key=k1&h."))
            payload += rng.randbytes(rng.choice((0, 0, 3)))
            below, since, until = (rng.choice(numbers) for _ in range(3))
            limit = rng.choice((0, 1, (1 << 31) - 1))
            command = Find("test", rng.randrange(2), payload, 9, limit)
            command = replace(command, below=below, since_ms=since, until_ms=until)
            reply = await peer.ask(encode(command))
            assert reply.startswith((b"value ", b"result 40"))
            if reply.startswith(b"value "):
                (after,) = re.findall(rb" next=(\d+)", reply.partition(b"\r\n")[0])
                assert int(after) < max(1, below)
        assert not broker.context.counters.error_count

    run(data_dir, scenario, text=INDEXED)


def test_look_ups_are_bounded_and_others_overtake_them(data_dir: Path) -> None:
    """One more is refused with a status that passes."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        context = broker.context
        with ThreadPoolExecutor(1) as busy:
            upkeep, context.upkeep = context.upkeep, busy
            gate = Event()
            busy.submit(gate.wait, 30)
            context.find_count = FINDS_MAX - 1
            finds = [Find("test", 0, b"key=k0", opaque, 1) for opaque in (9, 8)]
            await peer.send(b"".join(map(encode, finds)))
            reply = await peer.read_some()
            assert reply.startswith(b"result 503 ")
            assert b" 8\r\n" in reply
            assert context.load.in_flight_bytes == RECORDS_BYTES_MAX, "as it may have"
            gate.set()
            assert (await peer.read_some()).startswith(b"value ")
            assert context.find_count == FINDS_MAX - 1
            context.upkeep = upkeep
        assert context.load.in_flight_bytes == 0

    run(data_dir, scenario, count=10)


@pytest.mark.slow
def test_answers_that_are_not_read_count_as_replies(data_dir: Path) -> None:
    """Those under way exceed the bound of a connection: it gets no more then."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        context, transport = broker.context, peer.writer.transport
        await peer.ask(b"".join(put(7 * n, RECORDS_BYTES_MAX // 3) for n in range(3)))
        finds = [Find("test", 0, b"key=k0", n, 9) for n in range(FINDS_MAX // 2)]
        transport.pause_reading()
        peer.write(b"".join(map(encode, finds)))
        await until(lambda: context.counters.cmd_get == len(finds))
        await until(lambda: not context.find_count)
        held_bytes = context.load.reply_bytes
        assert context.load.in_flight_bytes == 0
        assert held_bytes == peer.session.held_bytes > 8 << 20, "the bound"
        peer.write(encode(finds[0]))
        await until(lambda: peer.session.is_paused)
        assert context.find_count == 0
        transport.resume_reading()
        replies = await peer.ask(b"")
        assert replies.count(b"value ") == len(finds) + 1
        assert context.load.reply_bytes == 0

    run(data_dir, scenario, count=0)


class SlowThreads(SystemClock):
    """A clock on which a second goes by at each look of another thread."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.passed_s = 0.0

    def monotonic_s(self) -> float:
        if current_thread() is not main_thread():
            self.passed_s += self.step_s
        return super().monotonic_s() + self.passed_s


@pytest.mark.parametrize("step_s", [0.0, 1.0])
def test_look_ups_of_one_turn_are_one_job(data_dir: Path, step_s: float) -> None:
    """If none takes long; an error is the answer to one of them."""
    jobs = list[object]()

    class Counted(ThreadPoolExecutor):
        def submit(self, work: Any, /, *args: Any, **options: Any) -> Any:
            jobs.append(work)
            return super().submit(work, *args, **options)

    async def scenario(broker: Broker, peer: Peer) -> None:
        log = broker.context.topics.find_log("test", 0)
        assert log is not None
        broken = log.segments.sealed[1]
        log.on_damage(Damage(broken.path, broken.base_offset, broken.end_offset, "0s"))
        bounds = (log.high_watermark, broken.end_offset, broken.base_offset)
        finds = [
            Find("test", 0, b"h.other=1", number, 1, below=below)
            for number, below in enumerate(bounds)
        ]
        context = broker.context
        old = context.upkeep, context.clock
        with Counted(1) as context.upkeep:
            # Too slow for two in a job, or as if it took no time.
            context.clock = SlowThreads(step_s or -1.0)
            # A busy machine may take more than a turn to read the commands.
            for _ in range(10):
                jobs.clear()
                await peer.send(b"".join(map(encode, finds)))
                replies = b""
                while replies.count(b"value ") < 2 or b"result 500" not in replies:
                    replies += await peer.read_some()
                if step_s or len(jobs) == 1:
                    break
        context.upkeep, context.clock = old
        assert len(jobs) == (3 if step_s else 1)
        assert context.find_count == context.load.in_flight_bytes == 0

    run(data_dir, scenario)


async def ask_together(peer: Peer, command: Find) -> dict[int, FoundPage]:
    """Return the pages of the reply, by partition."""
    reply = await peer.ask(encode(command))
    line, _, payload = reply.partition(b"\r\n")
    assert line == b"value %d %d" % (len(payload), command.opaque)
    return {page.partition: page for page in decode_pages(payload)}


@pytest.mark.parametrize("is_slow", [False, True])
def test_partitions_are_looked_up_together(data_dir: Path, *, is_slow: bool) -> None:
    """Those that take too long, and those that would be refused, are left out."""
    numbers = [number for number in reversed(range(COUNT)) if number % 7 == 3]

    async def scenario(broker: Broker, peer: Peer) -> None:
        context, clock = broker.context, broker.context.clock
        other = [
            put(number).replace(b"put test 0", b"put test 1") for number in range(30)
        ]
        await peer.ask(b"".join(other))
        command = Find("test", 0, b"key=k3", 9, 1000, others=(1, 7))
        if is_slow:
            context.clock = SlowThreads(1.0)
            assert list(await ask_together(peer, command)) == [0]
            context.clock = clock
        else:
            pages = dict[int, FoundPage]()
            async with asyncio.timeout(TIMEOUT_S):
                while [page.next_offset for page in pages.values()] != [0, 0]:
                    pages = await ask_together(peer, command)  # a busy machine is slow
            assert found_in(pages[0].runs) == numbers
            assert found_in(pages[1].runs) == [24, 17, 10, 3]
            assert pages[1].read_bytes > 0
        assert context.find_count == context.load.in_flight_bytes == 0

    run(data_dir, scenario)


def test_a_reply_for_several_partitions_has_a_mebibyte_and_one_record(
    data_dir: Path,
) -> None:
    """A client reads at most 64 MiB: large records of many partitions are too much."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        for partition in (b"0", b"1"):
            large = put(7, RECORDS_BYTES_MAX + 1)
            await peer.ask(large.replace(b"put test 0", b"put test " + partition))
        command = Find("test", 0, b"key=k0", 9, 9, others=(1,))
        assert list(await ask_together(peer, command)) == [0]
        assert broker.context.find_count == 0

    run(data_dir, scenario, count=0)


def test_damage_leaves_a_partition_out_of_a_reply_for_several(data_dir: Path) -> None:
    """The look-up of that partition alone names it."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        log = broker.context.topics.find_log("test", 0)
        assert log is not None
        last, end = log.segments.sealed[-1], log.high_watermark
        log.on_damage(Damage(last.path, last.base_offset, end, "0s"))
        command = Find("test", 0, b"h.other=1", 9, 1, below=end, others=(0,))
        assert await ask_together(peer, command) == {}
        assert b"0s" in await refusal(peer, replace(command, others=()))

    run(data_dir, scenario)


def test_known_damage_is_named_where_a_look_up_comes_to_it(data_dir: Path) -> None:
    """The answer ends above it; the next one is the error that a get has there."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        log = broker.context.topics.find_log("test", 0)
        assert log is not None
        broken = log.segments.sealed[1]
        end = broken.end_offset
        log.on_damage(Damage(broken.path, broken.base_offset, end, "zeros"))
        command = Find("test", 0, b"h.other=1", 9, 1000)

        async def ends(below: int, number: int, after: int) -> bool:
            """Return whether an answer ends there: on a busy machine it may before."""
            found, goes_on, _read = await ask(peer, replace(command, below=below))
            return goes_on == after and number in (found[0], found[-1])

        await retried(lambda: ends(log.high_watermark, COUNT - 1, end))
        reply = await refusal(peer, replace(command, below=end))
        assert reply.startswith(b"result 500 ")
        assert b"damaged from=%d to=%d" % (broken.base_offset, end) in reply
        await retried(lambda: ends(broken.base_offset, 0, 0))

    run(data_dir, scenario)


@pytest.mark.slow
def test_what_is_acknowledged_is_found(data_dir: Path) -> None:
    """At once, wherever the index is just then, and once only."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        async def is_looked_up(last: int) -> bool:
            """Ask for the newest with a key; return whether most is looked up."""
            key = Find("test", 0, b"key=k%d" % (last % 7), 9, 5)
            wanted = list(range(last, -1, -7))[:5]
            _after, read = await whole(peer, key, wanted, None)
            log = broker.context.topics.find_log("test", 0)
            assert log is not None
            return 2 * read < log.high_watermark

        outcomes = set()
        for number in range(600):
            await peer.ask(put(number))
            outcomes.add(await is_looked_up(number))
            if not number % 60:
                # The index is made meanwhile.
                await asyncio.sleep(0.3)
        assert False in outcomes
        await retried(lambda: is_looked_up(599))

    run(data_dir, scenario, text=INDEXED, count=0)


@pytest.mark.slow
def test_a_restart_goes_on_with_the_index(data_dir: Path) -> None:
    """It was made by the broker before."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        del broker

        async def is_indexed() -> bool:
            found, _after, read = await ask(peer, Find("test", 0, b"key=k3", 9, 1000))
            return (found[-1], read) == (3, 0)

        await retried(is_indexed)

    run(data_dir, scenario, text=INDEXED)
    run(data_dir, scenario, text=INDEXED, count=0)
