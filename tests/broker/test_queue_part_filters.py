"""Queue groups with a filter: what does not match is done, and is nobody's."""

from pathlib import Path

import pytest

from metaq.protocol.commands import Put
from metaq.protocol.encoding import encode
from metaq.protocol.queue_frames import SettleVerb, Word
from tests.broker.filter_reader import put as put_tagged
from tests.broker.queue_worker import Worker, queue_of, run
from tests.broker.test_queue_part import ColdDisk
from tests.rigs.broker import Peer
from tests.rigs.waiting import until

PAID = {"where": "tag = 'paid'"}


async def drain(worker: Worker, wanted: int) -> list[int]:
    """Take and ack messages; return their offsets."""
    found: list[int] = []
    while len(found) < wanted:
        got = await worker.take(7, wait_ms=20_000)
        found += [each.offset for each in got]
        entries = [each.says(SettleVerb.ACK) for each in got]
        assert await worker.settle(0, entries) == [Word.OK] * len(got)
    return found


def test_a_worker_gets_what_matches_alone(tmp_path: Path) -> None:
    """The rest is done and counted; the floor reaches the end of the log."""

    async def scenario(broker, peer) -> None:
        puts = []
        for _ in range(20):
            puts += await put_tagged(peer, "void", "paid", None)
        assert await drain(Worker(peer), 20) == [start for start, _ in puts[1::3]]
        queue = queue_of(broker)
        assert await Worker(peer).take(1) == []
        state = queue.state
        assert (state.done_count, state.passed_count) == (60, 40)
        assert state.floor == queue.log.high_watermark
        assert state.open_count == 0

    run(tmp_path, scenario, **PAID)


def test_a_take_waits_for_a_match(tmp_path: Path) -> None:
    """Messages that are passed over end no wait."""

    async def scenario(broker, peer) -> None:
        async with Peer(broker) as other:
            worker = Worker(other)
            await other.send(encode(worker.taking(1, wait_ms=20_000)))
            await until(lambda: other.session.taker_count == 1)
            await put_tagged(peer, *["void"] * 5)
            queue = queue_of(broker)
            await until(lambda: queue.state.passed_count == 5)
            assert other.session.taker_count == 1
            ((start, _),) = await put_tagged(peer, "paid")
            assert (await other.read_some()).startswith(b"value ")
            assert queue.state.leases.holders() == {"w1": 1}
            assert queue.state.floor == start

    run(tmp_path, scenario, **PAID)


@pytest.mark.slow
def test_many_windows_without_a_match_are_passed_over(tmp_path: Path) -> None:
    """Also from a disk of which nothing is in memory, and over segments."""

    async def scenario(_broker, peer) -> None:
        for _ in range(30):
            await put_tagged(peer, *["void"] * 10, size=1000)
        puts = await put_tagged(peer, "paid", "void")
        assert await drain(Worker(peer), 1) == [puts[0][0]]

    run(tmp_path / "warm", scenario, **PAID)
    run(
        tmp_path / "cold",
        scenario,
        broker={"maxSegmentSize": "50000"},
        fs=ColdDisk(),
        **PAID,
    )


def test_a_restart_gives_out_nothing_that_was_passed_over(tmp_path: Path) -> None:
    """It looks again where nothing was stored, and comes to the same."""
    broker = {"queueReclaimMs": "0"}

    async def before(_broker, peer) -> None:
        await put_tagged(peer, "void", "paid", "void", "paid", "void")
        await drain(Worker(peer), 1)

    async def after(broker, peer) -> None:
        await Worker(peer).take(9)
        state = queue_of(broker).state
        assert state.floor == state.scan_offset

    run(tmp_path, before, broker=broker, **PAID)
    run(tmp_path, after, broker=broker, **PAID)


def test_what_a_transaction_ended_after_passed_messages_stays_done(
    tmp_path: Path,
) -> None:
    """Its range is stored by the transaction, and what was passed over is not."""
    broker = {"queueReclaimMs": "0"}

    async def before(_broker, peer) -> None:
        await put_tagged(peer, "paid", "void", "void", "paid", "paid")
        worker = Worker(peer)
        got = await worker.take(9)
        await peer.ask(b"transaction TX:s:1 s BEGIN 1\r\n")
        assert await worker.ack(got[1], "TX:s:1") is Word.OK
        reply = await peer.ask(b"transaction TX:s:1 s COMMIT_ONE_PHASE 2\r\n")
        assert reply.startswith(b"result 200")

    async def after(_broker, peer) -> None:
        puts = [each.offset for each in await Worker(peer).take(9, wait_ms=20_000)]
        assert len(puts) == 2
        assert puts[0] == 0

    run(tmp_path, before, broker=broker, **PAID)
    run(tmp_path, after, broker=broker, **PAID)


def test_a_returned_message_is_given_out_by_a_changed_filter(tmp_path: Path) -> None:
    """Also after a restart, where the messages are read again: it had matched."""
    broker = {"queueReclaimMs": "0"}
    known: list[int] = []

    async def before(_broker, peer) -> None:
        puts = await put_tagged(peer, "paid", "void", "paid", "paid", "void")
        worker = Worker(peer)
        got = await worker.take(9)
        entries = [each.says(SettleVerb.NACK) for each in got[:2]]
        assert await worker.settle(0, entries) == [Word.OK] * 2
        known.extend(puts[at][0] for at in (0, 2, 3))

    async def after(broker, peer) -> None:
        got = await Worker(peer).take(9, wait_ms=20_000)
        assert [each.offset for each in got] == known
        assert [each.deliveries for each in got[:2]] == [2, 2]

    run(tmp_path, before, broker=broker, retry_delays_ms=(0,), **PAID)
    run(tmp_path, after, broker=broker, retry_delays_ms=(0,), where="tag = 'new'")


def test_a_block_that_cannot_be_read_is_given_out(tmp_path: Path) -> None:
    """The worker finds that, as without a filter."""

    async def scenario(broker, peer) -> None:
        payload = b"\0\0\0\x63h.tag=void"
        reply = await peer.ask(encode(Put("test", 0, payload, 3, -1, 1)))
        assert reply.startswith(b"result 200")
        await peer.send(encode(Worker(peer).taking(1, wait_ms=20_000)))
        await until(lambda: queue_of(broker).state.leases.holders() == {"w1": 1})

    run(tmp_path, scenario, **PAID)
