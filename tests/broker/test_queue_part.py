"""The messages of a queue: found in windows, across segments, from the disk."""

from pathlib import Path

import pytest

from metaq.broker.queue_part import WINDOW_BYTES
from metaq.fs import ReadFile, SystemFileSystem
from metaq.protocol.queue_frames import SettleVerb, Word
from tests.broker.queue_worker import Worker, put, queue_of, run
from tests.rigs.waiting import until


def test_messages_larger_than_a_window_are_found(tmp_path: Path) -> None:
    """One at a time, whole, among small ones."""
    large = bytes(WINDOW_BYTES + 1000)

    async def scenario(_broker, peer) -> None:
        await put(peer, b"a", large, b"b", large)
        worker = Worker(peer)
        got = []
        while len(got) < 4:
            got += await worker.take(9, wait_ms=20_000)
        assert [each.data for each in got] == [b"a", large, b"b", large]
        assert await worker.settle(0, [g.says(SettleVerb.ACK) for g in got]) == (
            [Word.OK] * 4
        )

    run(tmp_path, scenario)


@pytest.mark.slow
def test_messages_are_found_over_many_segments(tmp_path: Path) -> None:
    """In order, and each once; settled ones are passed over."""

    async def scenario(broker, peer) -> None:
        wanted = [b"%05d" % n for n in range(500)]
        await put(peer, *wanted)
        worker, found = Worker(peer), []
        while len(found) < len(wanted):
            got = await worker.take(37, wait_ms=20_000)
            found += [each.data for each in got]
            entries = [each.says(SettleVerb.ACK) for each in got]
            assert await worker.settle(0, entries) == [Word.OK] * len(got)
        assert found == wanted
        queue = queue_of(broker)
        assert queue.state.floor == queue.log.high_watermark
        assert len(queue.log.segments.sealed) > 3

    run(tmp_path, scenario, broker={"maxSegmentSize": "2000"})


def test_bytes_that_are_not_in_memory_are_read_by_the_reader(tmp_path: Path) -> None:
    """First deliveries and repeated ones; the loop waits for no disk."""

    async def scenario(broker, peer) -> None:
        await put(peer, b"a", b"b", b"c")
        worker = Worker(peer)
        a, b = await worker.take(2, wait_ms=20_000)
        assert [a.data, b.data] == [b"a", b"b"]
        assert await worker.say(a, SettleVerb.NACK, 0) is Word.OK
        again, c = await worker.take(9, wait_ms=20_000)
        assert [again.data, c.data] == [b"a", b"c"]
        assert await worker.ack(again) is Word.OK

    run(tmp_path, scenario, fs=ColdDisk())


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
def test_retention_ends_what_it_takes(tmp_path: Path) -> None:
    """Messages that go before they are done are counted, and not waited for."""

    async def scenario(broker, peer) -> None:
        await put(peer, *[b"%05d" % n for n in range(100)])
        worker = Worker(peer)
        first = (await worker.take(1))[0]
        queue = queue_of(broker)
        second = queue.log.segments.sealed[0].end_offset
        broker.context.topics.find_log("test", 0).on_removed(
            queue.log.segments.first, 0
        )
        assert queue.log.log_start_offset == second
        got = await worker.take(200, wait_ms=20_000)
        assert got[0].offset == second
        assert queue.lost_count == 1
        assert queue.state.lost_bytes > 0
        assert await worker.ack(first) is Word.DONE

    run(tmp_path, scenario, broker={"maxSegmentSize": "1000"})


def test_damage_is_named_to_the_taker(tmp_path: Path) -> None:
    """A queue stops where its partition is damaged, and says so."""

    async def scenario(broker, peer) -> None:
        await put(peer, b"a", b"b")
        worker = Worker(peer)
        (a,) = await worker.take(1)
        queue = queue_of(broker)
        queue.drop_window()  # the pump does, unless its turn was over
        path = queue.log.segments.first.path
        path.write_bytes(path.read_bytes()[:30])
        reply = await worker.ask(worker.taking(1, wait_ms=20_000))
        assert reply.status == 500
        assert "test-0" in reply.text
        assert "test-0" in broker.context.queues.problems()[0]
        assert await worker.ack(a) is Word.OK

    run(tmp_path, scenario)


@pytest.mark.slow
def test_damage_of_one_partition_ends_no_work_on_another(tmp_path: Path) -> None:
    """A worker of all partitions goes on with those that can be read.

    It was refused for good once its turn came to the damaged one, with messages of the
    others waiting; so was each worker after it.
    """

    async def scenario(broker, peer) -> None:
        await put(peer, b"a", b"b")
        await put(peer, *[b"%d" % n for n in range(6)], partition=1)
        path = queue_of(broker).log.segments.first.path
        path.write_bytes(path.read_bytes()[:30])
        worker, got = Worker(peer), list[bytes]()
        for _ in range(9):
            for each in await worker.take(2, wait_ms=300):
                assert await worker.ack(each) is Word.OK
                got.append(each.data)
        assert got == [b"%d" % n for n in range(6)]
        assert "test-0" in broker.context.queues.problems()[0]
        refused = await worker.ask(worker.taking(2, partition=0))
        assert (refused.status, "test-0" in refused.text) == (500, True)

    run(tmp_path, scenario)


def test_what_is_before_a_damage_is_given_out(tmp_path: Path) -> None:
    """A take that wants more than that is no reason to keep it."""

    async def scenario(broker, peer) -> None:
        await put(peer, b"a", b"b", b"c")
        path = queue_of(broker).log.segments.first.path
        data = bytearray(path.read_bytes())
        last = len(data) * 2 // 3
        data[last : last + 4] = (2**30).to_bytes(4, "big")
        path.write_bytes(data)
        worker = Worker(peer)
        got = await worker.take(9, wait_ms=20_000)
        assert [each.data for each in got] == [b"a", b"b"]
        assert await worker.say(got[0], SettleVerb.RELEASE) is Word.OK
        (again,) = await worker.take(9, wait_ms=20_000)
        assert again.data == b"a"
        reply = await worker.ask(worker.taking(9, wait_ms=20_000))
        assert reply.status == 500

    run(tmp_path, scenario)


@pytest.mark.slow
def test_what_cannot_be_read_again_ends_no_work_on_another(tmp_path: Path) -> None:
    """A message that was returned, and is damaged since, is no answer to its taker."""

    async def scenario(broker, peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        (a,) = await worker.take(1, wait_ms=20_000)
        await put(peer, b"1", b"2", partition=1)
        queue = queue_of(broker)
        queue.drop_window()
        path = queue.log.segments.first.path
        path.write_bytes(path.read_bytes()[:10])
        assert await worker.say(a, SettleVerb.RELEASE) is Word.OK
        got = list[bytes]()
        for _ in range(9):
            got += [each.data for each in await worker.take(1, wait_ms=300)]
        assert sorted(got) == [b"1", b"2"]
        assert "test-0" in broker.context.queues.problems()[0]

    run(tmp_path, scenario)


def test_a_length_beyond_the_end_of_the_log_is_damage(tmp_path: Path) -> None:
    """It is not read for, again and again."""

    async def scenario(broker, peer) -> None:
        await put(peer, b"a", b"b")
        worker = Worker(peer)
        (a,) = await worker.take(1)
        queue = queue_of(broker)
        queue.drop_window()  # a turn that was too long has kept it
        path = queue.log.segments.first.path
        data = bytearray(path.read_bytes())
        second = len(data) // 2
        data[second : second + 4] = (2**30).to_bytes(4, "big")
        path.write_bytes(data)
        reply = await worker.ask(worker.taking(1, wait_ms=20_000))
        assert reply.status == 500
        assert f"length {2**30} of the record at offset {second}" in reply.text
        assert await worker.ack(a) is Word.OK

    run(tmp_path, scenario)


def test_at_the_bound_of_open_messages_takes_wait(tmp_path: Path) -> None:
    """Until something is settled."""

    async def scenario(broker, peer) -> None:
        await put(peer, b"a", b"b", b"c")
        worker = Worker(peer)
        a, _b = await worker.take(9)
        assert await worker.take(9, wait_ms=30) == []
        assert await worker.ack(a) is Word.OK
        (c,) = await worker.take(9)
        assert c.data == b"c"
        await until(lambda: queue_of(broker).state.open_count == 2)

    run(tmp_path, scenario, broker={"queueOpenMax": "2"})
