"""`__queues`: what a restart knows, snapshots, trimming, a disk that is full."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.broker.queue_log import QUEUES
from metaq.broker.queue_part import SNAPSHOT_CHANGES
from metaq.clock import SystemClock
from metaq.errors import StorageError
from metaq.model import Millis, Position
from metaq.protocol.commands import Result, Value
from metaq.protocol.queue_frames import SettleVerb, Word
from metaq.record.layout import Record
from metaq.record.scan import read_record
from tests.broker.queue_worker import (
    QUICK,
    Worker,
    define,
    got_of,
    put,
    queue_of,
    run,
)
from tests.rigs.broker import Peer, running_broker
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.waiting import until

COUNT = 512
RECLAIM = {"queueReclaimMs": "2000"}


@pytest.mark.slow
def test_a_restart_knows_what_is_done_and_how_often_the_rest_was_given(
    tmp_path: Path,
) -> None:
    """Acked messages are never given out again; counts go on."""

    async def before() -> tuple[Any, Any]:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            await put(peer, b"a", b"b", b"c", b"d")
            worker = Worker(peer)
            a, b, c, d = await worker.take(4)
            assert (
                await worker.settle(
                    0,
                    [
                        a.says(SettleVerb.ACK),
                        c.says(SettleVerb.ACK),
                        b.says(SettleVerb.NACK, 0),
                    ],
                )
                == [Word.OK] * 3
            )
            return b, d

    async def after(b: Any, d: Any) -> None:
        # Longer than a busy machine takes for the first two requests.
        async with running_broker(tmp_path, RECLAIM) as broker, Peer(broker) as peer:
            define(broker)
            worker = Worker(peer)
            # The other message is its worker's for the reclaim time.
            (again,) = await worker.take(9, wait_ms=20_000)
            assert await worker.say(d, SettleVerb.EXTEND, 30_000) is Word.OK
            assert (again.data, again.deliveries) == (b"b", 2)
            assert again.delivery > max(b.delivery, d.delivery)
            assert await worker.ack(b) is Word.LOST
            assert await worker.ack(d) is Word.OK
            assert await worker.ack(again) is Word.OK
            assert await worker.take(9, wait_ms=50) == []

    b, d = asyncio.run(before())
    asyncio.run(after(b, d))


@pytest.mark.slow
def test_what_is_put_after_a_start_waits_for_no_worker_of_before(
    tmp_path: Path,
) -> None:
    """Also before a worker asks. The others wait until the reclaim time is over: a kill
    says nothing of what was given out."""
    hours = {"queueReclaimMs": "7200000"}
    first, killed = tmp_path / "a", tmp_path / "killed"

    async def before() -> None:
        async with (
            running_broker(first, QUICK) as broker,
            Peer(broker) as peer,
        ):
            define(broker)
            await put(peer, b"a")
            await Worker(peer).take(1)
            shutil.copytree(first, killed, ignore=shutil.ignore_patterns("*.sock"))

    async def after() -> None:
        async with running_broker(killed, hours) as broker, Peer(broker) as peer:
            define(broker)
            await put(peer, b"b")
            worker = Worker(peer, "w2")
            got = await worker.take(9, wait_ms=20_000)
            assert [each.data for each in got] == [b"b"]
            assert await worker.take(9) == []
            queues: Any = broker.context.queues
            state, now = queue_of(broker).state, queues.now()
            begun = state.reclaim
            await until(lambda: queues.now().mono_ms > now.mono_ms)
            queues.restart_reclaim()  # clients find the broker from now on
            assert state.reclaim.until_ms > begun.until_ms
            assert state.reclaim.end == begun.end == got[0].offset

    async def at_last() -> None:
        async with running_broker(killed, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            got = await Worker(peer).take(9, wait_ms=20_000)
            assert [each.data for each in got] == [b"a", b"b"]

    asyncio.run(before())
    asyncio.run(after())
    asyncio.run(at_last())


def test_a_backlog_waits_for_no_worker_after_a_stop(tmp_path: Path) -> None:
    """A message that a worker has is kept for it, and counts; the rest is given out."""
    hours = {"queueReclaimMs": "7200000"}

    async def live(*wanted: bytes, acked: int) -> Any:
        async with running_broker(tmp_path, hours) as broker, Peer(broker) as peer:
            define(broker)
            await put(peer, *wanted)
            worker = Worker(peer, f"w{acked}")
            got = await worker.take(2, wait_ms=20_000)
            assert len(got) == 2
            for each in got[:acked]:
                assert await worker.ack(each) is Word.OK
            for each in got[acked + 1 :]:
                assert await worker.say(each, SettleVerb.RELEASE) is Word.OK
            return got

    async def after(reservations: Any) -> None:
        async with running_broker(tmp_path, hours) as broker, Peer(broker) as peer:
            define(broker)
            worker = Worker(peer, "w5")
            (free,) = await worker.take(9, wait_ms=20_000)
            assert (free.data, free.deliveries) == (b"d", 1)
            assert await worker.ack(reservations) is Word.OK
            assert queue_of(broker).state.open_count == 1

    asyncio.run(live(b"a", b"b", b"c", b"d", acked=2))
    reservations, _released = asyncio.run(live(acked=0))
    asyncio.run(after(reservations))


@pytest.mark.slow
def test_what_a_stop_kept_for_a_worker_comes_again_when_it_is_not_back(
    tmp_path: Path,
) -> None:
    """In its place, and with the count of before."""

    async def main() -> None:
        for number in range(2):
            async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
                define(broker)
                if not number:
                    await put(peer, b"a", b"b")
                    assert len(await Worker(peer).take(1)) == 1
                else:
                    got = list[Any]()
                    while len(got) < 2:
                        got += await Worker(peer, "w2").take(9, wait_ms=20_000)
                    assert {(each.data, each.deliveries) for each in got} == {
                        (b"a", 1),
                        (b"b", 1),
                    }

    asyncio.run(main())


class JumpingClock(SystemClock):
    """The machine's, and its wall clock is set forward or back."""

    jump_ms = passed_ms = 0

    def boot_s(self) -> float:
        return super().boot_s() + self.passed_ms / 1000

    def wall_ms(self) -> Millis:
        return Millis(super().wall_ms() + self.jump_ms + self.passed_ms)


@pytest.mark.slow
@pytest.mark.parametrize("days", [1 / 24, -1 / 24, 3_650, -3_650])
def test_a_wall_clock_that_jumps_repeats_nothing_and_holds_nothing_up(
    tmp_path: Path, days: float
) -> None:
    """While messages are leased and delayed, and over a start."""
    clock = JumpingClock()

    async def take_all(worker: Worker, count: int) -> list[bytes]:
        found = set[bytes]()
        while len(found) < count:  # on a busy machine some are ready again
            got = await worker.take(9, wait_ms=20_000, lease_ms=200)
            found |= {each.data for each in got}
        return sorted(found)

    async def main() -> None:
        async with (
            running_broker(tmp_path, QUICK, clock=clock) as broker,
            Peer(broker) as peer,
        ):
            define(broker)
            await put(peer, b"a", b"b", b"c")
            worker = Worker(peer)
            a, b, _c = await worker.take(3, lease_ms=200)
            assert await worker.ack(a) is Word.OK
            assert await worker.say(b, SettleVerb.NACK, 200) is Word.OK
            clock.jump_ms = int(days * 86_400_000)
            assert await take_all(worker, 2) == [b"b", b"c"]
            await put(peer, b"d")
            d = b
            while d.data != b"d":  # on a busy machine others are ready again
                (d,) = await worker.take(1, wait_ms=20_000, lease_ms=200)
            assert await worker.ack(d) is Word.OK
            await until(lambda: queue_of(broker).state.ready_count == 2)
            clock.jump_ms = 0
            for each in await worker.take(1) + await worker.take(1):
                assert await worker.say(each, SettleVerb.NACK, 200) is Word.OK
            clock.jump_ms = int(days * 86_400_000)
        async with (
            running_broker(tmp_path, QUICK, clock=clock) as broker,
            Peer(broker) as peer,
        ):
            define(broker)
            worker, found = Worker(peer), list[bytes]()
            for _ in range(2):
                (got,) = await worker.take(1, wait_ms=20_000)
                found.append(got.data)
                assert await worker.ack(got) is Word.OK
            assert sorted(found) == [b"b", b"c"]
            assert await worker.take(9, wait_ms=300) == []

    asyncio.run(main())


def test_a_wall_clock_that_jumps_has_no_message_expire(tmp_path: Path) -> None:
    """Before it has run evenly for a minute; a mistake is set right by then."""
    clock = JumpingClock()

    async def main() -> None:
        async with (
            running_broker(tmp_path, QUICK, clock=clock) as broker,
            Peer(broker) as peer,
        ):
            define(broker)
            datas = (b"a", b"b", b"c", b"d")
            await put(peer, *datas, headers={"expires-in": b"3000000"})
            worker = Worker(peer)
            clock.jump_ms = 10 * 365 * 86_400_000
            assert [each.data for each in await worker.take(1)] == [b"a"]
            clock.jump_ms = 0
            assert [each.data for each in await worker.take(1)] == [b"b"]
            clock.jump_ms = 3_600_000
            assert [each.data for each in await worker.take(1)] == [b"c"]
            clock.passed_ms = 61_000
            assert await worker.take(1) == []

    asyncio.run(main())


@pytest.mark.slow
def test_a_snapshot_is_all_that_a_restart_needs(tmp_path: Path) -> None:
    """The records before it may go."""
    first, killed = tmp_path / "a", tmp_path / "killed"

    async def before() -> None:
        async with running_broker(first, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            await put(peer, *[b"%d" % n for n in range(20)])
            worker = Worker(peer)
            got = await worker.take(20)
            acks = [each.says(SettleVerb.ACK) for each in got if int(each.data) % 2]
            assert await worker.settle(0, acks) == [Word.OK] * 10
            nack = got[4].says(SettleVerb.NACK, 0)
            assert await worker.settle(0, [nack]) == [Word.OK]
            queue, outcomes = queue_of(broker), list[object]()
            queue.snapshot(broker.context.queues.now(), outcomes.append)
            await until(lambda: outcomes)
            assert outcomes == [None]
            shutil.copytree(first, killed, ignore=shutil.ignore_patterns("*.sock"))

    async def after() -> None:
        async with running_broker(killed, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            worker, found = Worker(peer), list[tuple[bytes, int]]()
            while len(found) < 10:
                for each in await worker.take(20, wait_ms=20_000):
                    found.append((each.data, each.deliveries))
            assert found == [(b"%d" % n, 2 if n == 4 else 1) for n in range(0, 20, 2)]

    asyncio.run(before())
    only_last_record(killed)
    asyncio.run(after())


@pytest.mark.slow
def test_messages_that_are_returned_for_ever_let_their_records_go(
    tmp_path: Path,
) -> None:
    """RabbitMQ's quorum queues grew until the disk was full (rabbitmq-server 3776)."""

    async def main() -> None:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            define(broker, deliveries_max=1000)
            await put(peer, *[b"x"] * COUNT)
            worker, queues = Worker(peer), broker.context.queues
            log = broker.context.topics.internal_log(QUEUES)
            for _ in range(SNAPSHOT_CHANGES // COUNT + 1):
                got = await worker.take(COUNT)
                nacks = [each.says(SettleVerb.NACK, 0) for each in got]
                assert await worker.settle(0, nacks) == [Word.OK] * COUNT
            grown = log.next_offset
            queues.tick()
            await until(lambda: log.high_watermark > grown)
            queues.tick()
            assert log.trim_offset >= grown
            queues.tick()
            assert log.next_offset - grown < grown / 8  # it is not written each time

    asyncio.run(main())


def only_last_record(data: Path) -> None:
    """Leave nothing of `__queues` but the last record of its partition."""
    (path,) = data.glob("__queues-*/*.meta")
    raw, position = path.read_bytes(), 0
    while isinstance(found := read_record(raw, Position(position)), Record):
        last, position = position, position + found.size_bytes
    reservations = raw[last:position]
    for each in path.parent.iterdir():
        each.unlink()
    path.with_name(f"{0:020d}.meta").write_bytes(reservations)
    (data / "holdings").unlink()


@pytest.mark.slow
def test_a_state_that_is_not_stored_is_no_answer(fs: FaultyFileSystem) -> None:
    """The queue is read again, and what was refused is given out again."""

    async def main() -> None:
        async with running_broker(Path("/data"), QUICK, fs=fs) as broker:
            define(broker)
            async with Peer(broker) as peer:
                await put(peer, b"a")
                worker = Worker(peer)
                (a,) = await worker.take(1)
                fs.set_capacity(fs.used_bytes())
                reply = await worker.ask(worker.settling(0, [a.says(SettleVerb.ACK)]))
                assert reply.status == 500, reply
                fs.set_capacity(1 << 40)
                again = []
                while not again:
                    reply = await worker.ask(worker.taking(1, wait_ms=1_000))
                    again = got_of(reply) if isinstance(reply, Value) else []
                    await asyncio.sleep(0.05)
                assert (again[0].data, again[0].offset) == (b"a", a.offset)
                assert await worker.ack(again[0]) is Word.OK

    asyncio.run(main())


@pytest.mark.slow
def test_a_state_that_was_dropped_from_memory_is_read_again(
    fs: FaultyFileSystem,
) -> None:
    """Takes are refused in that time; what was done stays done."""
    data = Path("/data")

    async def before() -> None:
        async with running_broker(data, QUICK, fs=fs) as broker:
            define(broker)
            async with Peer(broker) as peer:
                await put(peer, b"a", b"b")
                worker = Worker(peer)
                assert await worker.ack((await worker.take(1))[0]) is Word.OK

    async def after() -> None:
        async with running_broker(data, QUICK, fs=fs) as broker:
            service: Any = broker.context.queues
            define(broker)
            async with Peer(broker) as peer:
                worker = Worker(peer)
                service.fail(StorageError("unreadable"))
                reply = await worker.ask(worker.taking(1, wait_ms=0))
                assert isinstance(reply, Result)
                assert reply.status == 503
                await until(lambda: not service.problems())
                got = await worker.take(9, wait_ms=20_000)
                assert [each.data for each in got] == [b"b"]

    asyncio.run(before())
    asyncio.run(after())


@pytest.mark.slow
def test_the_size_of_a_partition_is_no_bound_of_the_states(tmp_path: Path) -> None:
    """They go by what is needed: `logBytesMax` is about messages.

    A queue at rest keeps the records of all others for long; every settle was refused
    then, and the states were read again without end.
    """

    async def scenario(broker: Broker, peer: Peer) -> None:
        worker = Worker(peer)
        await put(peer, b"at rest", partition=1)
        assert len(await worker.take(1, wait_ms=20_000)) == 1
        await put(peer, b"a")
        for _ in range(150):
            (got,) = await worker.take(1, partition=0, wait_ms=20_000)
            assert await worker.say(got, SettleVerb.NACK, 0) is Word.OK
        log = broker.context.topics.find_internal(QUEUES)
        assert log is not None
        assert log.size_bytes > 6000
        assert broker.context.queues.problems() == ()

    small = {"maxSegmentSize": "1000", "logBytesMax": "2000"}
    run(tmp_path, scenario, broker=small, deliveries_max=1000)


@pytest.mark.slow
def test_a_topic_that_is_deleted_while_states_are_unread_has_none(
    tmp_path: Path,
) -> None:
    """Else what comes in another topic of that name would be done already."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        worker, service = Worker(peer), broker.context.queues
        await put(peer, b"a")
        assert await worker.ack((await worker.take(1, wait_ms=20_000))[0]) is Word.OK
        service.fail(StorageError("unreadable"))
        service.drop_topic("test")
        await until(lambda: not service.problems())
        (again,) = await worker.take(1, wait_ms=20_000)
        assert (again.data, again.deliveries) == (b"a", 1)

    run(tmp_path, scenario)


def test_a_damaged_state_refuses_its_groups_and_no_others(tmp_path: Path) -> None:
    """With a sentence that names the partition; it is never taken for an empty one."""

    async def before() -> None:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            await put(peer, b"a")
            worker = Worker(peer)
            assert await worker.ack((await worker.take(1))[0]) is Word.OK

    async def after() -> None:
        async with running_broker(tmp_path, QUICK) as broker, Peer(broker) as peer:
            define(broker)
            worker = Worker(peer)
            reply = await worker.ask(worker.taking(1, wait_ms=20_000))
            assert reply.status == 503
            assert "__queues-" in reply.text
            assert "__queues-" in broker.context.queues.problems()[0]
            shown = await peer.ask(b"stats queues\r\n")
            assert shown.startswith(b"result 503"), shown
            assert b"__queues-" in shown

    asyncio.run(before())
    (path,) = tmp_path.glob("__queues-*/*.meta")
    raw = bytearray(path.read_bytes())
    raw[30] ^= 1
    path.write_bytes(raw)
    asyncio.run(after())


@pytest.mark.slow
def test_what_is_done_is_synced_whatever_topics_are(tmp_path: Path) -> None:
    """Also after a start, with topics that are acknowledged before their sync."""
    later = {**QUICK, "unflushThreshold": "1000", "unflushInterval": "2000"}

    async def main() -> None:
        for _ in range(2):
            async with running_broker(tmp_path, later) as broker, Peer(broker) as peer:
                define(broker)
                await put(peer, b"a")
                worker = Worker(peer)
                assert await worker.ack((await worker.take(1, wait_ms=20_000))[0])
                topics = broker.context.topics
                own = topics.find_internal(QUEUES)
                test = topics.find_log("test", 0)
                assert own is not None
                assert test is not None
                assert (own.is_group_commit, test.is_group_commit) == (True, False)
                assert own.synced_end == own.log_end

    asyncio.run(main())
