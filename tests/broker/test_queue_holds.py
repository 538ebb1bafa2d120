"""Acks in transactions: what is put and the ack are one, whatever ends it."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.app import Broker
from metaq.broker.health import Alarm, find_problems
from metaq.errors import StorageError
from metaq.protocol.commands import (
    Put,
    Result,
    TransactionCommand,
    TransactionType,
    Value,
)
from metaq.protocol.encoding import encode
from metaq.protocol.queue_frames import SettleVerb, Word
from metaq.protocol.transaction_ids import parse_key
from tests.broker.queue_worker import (
    GROUP,
    QUICK,
    Got,
    Worker,
    define,
    got_of,
    put,
    queue_of,
    run,
    stored,
)
from tests.rigs.broker import Peer, running_broker
from tests.rigs.fs import FaultyFileSystem, crash_points
from tests.rigs.waiting import until

TX, OTHER, XA = "TX:s:1", "TX:s:2", "XID:1:0a:0b:q"
COMMIT, ROLLBACK = TransactionType.COMMIT_ONE_PHASE, TransactionType.ROLLBACK
OUTPUT = "meta-test"


async def say(peer: Peer, kind: TransactionType, key: str = TX, **more: Any) -> bytes:
    return await peer.ask(
        encode(TransactionCommand(parse_key(key), "s", kind, 7, **more))
    )


async def begin(peer: Peer, key: str = TX, output: bytes = b"", **more: Any) -> None:
    assert (await say(peer, TransactionType.BEGIN, key, **more)).startswith(
        b"result 200"
    )
    if output:
        command = Put(OUTPUT, 0, output, 0, -1, 1, parse_key(key))
        assert (await peer.ask(encode(command))).startswith(b"result 200")


async def end(peer: Peer, kind: TransactionType, key: str = TX) -> None:
    reply = await say(peer, kind, key)
    assert reply.startswith(b"result 200"), reply


async def outputs(broker: Broker) -> list[bytes]:
    return [each.payload for each in await stored(broker, OUTPUT)]


def test_a_commit_stores_the_output_and_ends_the_message(tmp_path: Path) -> None:
    """Until then the message is held: no lease ends, and no other settle counts."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a", b"b")
        worker = Worker(peer)
        a, b = await worker.take(2, lease_ms=50)
        await begin(peer, output=b"made of a")
        assert await worker.ack(a, TX) is Word.OK
        assert await worker.ack(a, TX) is Word.LOST
        assert await worker.say(a, SettleVerb.NACK) is Word.LOST
        assert await worker.say(a, SettleVerb.EXTEND, 50) is Word.OK
        (again,) = await worker.take(9, wait_ms=20_000)
        assert again.offset == b.offset
        assert (await outputs(broker), queue_of(broker).state.floor) == ([], 0)
        await end(peer, COMMIT)
        assert await outputs(broker) == [b"made of a"]
        assert await worker.ack(a) is Word.DONE

    run(tmp_path, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["rollback", "time-out", "connection"])
def test_a_rollback_gives_the_message_to_its_worker_again(
    how: str, tmp_path: Path
) -> None:
    """As the same delivery; one whose connection is gone has the time to come back."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        async with Peer(broker) as gone:
            worker = Worker(gone)
            (a,) = await worker.take(1)
            await begin(gone, output=b"x", timeout_s=1 if how == "time-out" else 0)
            assert await worker.ack(a, TX) is Word.OK
            if how == "rollback":
                await end(gone, ROLLBACK)
            queue, service = queue_of(broker), broker.context.queues
            service.tick()
            if how != "connection":
                await until(lambda: not queue.state.held_count)
                assert queue.state.leases.holders() == {"w1": 1}
                assert await worker.say(a, SettleVerb.NACK, 0) is Word.OK
        (again,) = await Worker(peer, "w2").take(1, wait_ms=20_000)
        assert (again.data, again.deliveries) == (b"a", 2)
        assert await outputs(broker) == []

    run(tmp_path, scenario)


def test_acks_of_a_transaction_may_be_all_that_it_has(tmp_path: Path) -> None:
    """Of several settles, partitions and transactions; also after a start."""

    async def before(broker: Broker, peer: Peer) -> None:
        for partition in (0, 1):
            await put(peer, b"%d" % partition, b"x", b"y", partition=partition)
        worker = Worker(peer)
        for partition, key in ((0, TX), (1, OTHER)):
            await begin(peer, key)
            got = await worker.take(2, partition)
            entries = [each.says(SettleVerb.ACK) for each in reversed(got)]
            words = await worker.settle(partition, entries, key)
            assert words == [Word.OK, Word.OK]
        (third,) = await worker.take(1, 1)
        assert await worker.ack(third, TX) is Word.OK
        for key in (OTHER, TX):
            await end(peer, COMMIT, key)

    async def after(_broker: Broker, peer: Peer) -> None:
        got = await Worker(peer).take(9, wait_ms=20_000)
        assert [(each.partition, each.data) for each in got] == [(0, b"y")]

    run(tmp_path, before)
    run(tmp_path, after)


def test_what_no_transaction_takes_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Nothing is changed by it."""

    async def scenario(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"a")
        worker = Worker(peer)
        (a,) = await worker.take(1)
        await begin(peer)
        for verb, key, text in (
            (SettleVerb.ACK, XA, f"acks go into a local transaction, got '{XA}'"),
            (SettleVerb.ACK, "null", "acks go into a local transaction, got 'null'"),
            (SettleVerb.NACK, TX, "only acks go into a transaction, got nack"),
            (SettleVerb.ACK, OTHER, f"Local transaction '{OTHER}' has not been"),
        ):
            reply = await worker.ask(worker.settling(0, [a.says(verb)], key))
            assert isinstance(reply, Result)
            assert reply.status == 500
            assert text in reply.text
        assert await worker.ack(a) is Word.OK
        await begin(peer, OTHER)
        assert await worker.ack(a, OTHER) is Word.DONE
        await end(peer, COMMIT, OTHER)

    run(tmp_path, scenario)


@pytest.mark.slow
def test_a_queue_that_was_dropped_from_memory_refuses_the_commit(
    tmp_path: Path,
) -> None:
    """Another worker has the message by then."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        service: Any = broker.context.queues
        await put(peer, b"a")
        worker = Worker(peer)
        (a,) = await worker.take(1)
        await begin(peer, output=b"x")
        assert await worker.ack(a, TX) is Word.OK
        service.fail(StorageError("x"))
        await until(lambda: not service.problems())
        async with Peer(broker) as other:
            (again,) = await Worker(other, "w2").take(1, wait_ms=20_000)
            assert b"Transaction rolled back" in await say(peer, COMMIT)
            assert await outputs(broker) == []
            assert await Worker(other, "w2").ack(again) is Word.OK

    run(tmp_path, scenario)


@pytest.mark.parametrize("gone", ["group", "topic"])
def test_a_queue_that_was_deleted_refuses_the_commit(gone: str, tmp_path: Path) -> None:
    """Its name may be another queue's by then, which keeps its messages."""

    async def scenario(broker: Broker, peer: Peer) -> None:
        service: Any = broker.context.queues
        await put(peer, b"a")
        worker = Worker(peer)
        (a,) = await worker.take(1)
        await begin(peer, output=b"x")
        assert await worker.ack(a, TX) is Word.OK
        if gone == "group":
            define(broker, generation=1)
        else:
            service.drop_topic("test")
        assert b"Transaction rolled back" in await say(peer, COMMIT)
        (again,) = await worker.take(1, wait_ms=20_000)
        assert (again.data, again.deliveries) == (b"a", 1)

    run(tmp_path, scenario)


@pytest.mark.slow
def test_a_partition_is_not_read_again_before_a_commit_is_in_it(
    fs: FaultyFileSystem,
) -> None:
    """The message is committed, and would be given out again."""

    async def main() -> None:
        async with running_broker(Path("/data"), QUICK, fs=fs) as broker:
            service: Any = broker.context.queues
            define(broker)
            async with Peer(broker) as peer:
                await put(peer, b"a", b"b")
                worker = Worker(peer)
                a, b = await worker.take(2)
                await begin(peer, output=b"made of a")
                assert await worker.ack(a, TX) is Word.OK
                with fs.held():
                    peer.write(
                        encode(TransactionCommand(parse_key(TX), "s", COMMIT, 7))
                    )
                    await until(lambda: broker.context.transactions.views()[0].state)
                    await until(
                        lambda: (
                            broker.context.transactions.views()[0].state == "committing"
                        )
                    )
                    service.fail(StorageError("x"))
                    await asyncio.sleep(0)
                    await until(lambda: any(TX in each for each in service.problems()))
                await until(lambda: not service.problems())
                assert await outputs(broker) == [b"made of a"]
            async with Peer(broker) as other:
                got = await Worker(other, "w2").take(9, wait_ms=20_000)
                assert [each.offset for each in got] == [b.offset]

    asyncio.run(main())


# -- power cuts ------------------------------------------------------------------------

Ack = Callable[[Peer, Worker, Got], Awaitable[None]]


async def within(peer: Peer, worker: Worker, got: Got) -> None:
    await begin(peer, output=b"made of a")
    assert await worker.ack(got, TX) is Word.OK
    await end(peer, COMMIT)


async def before_it(peer: Peer, worker: Worker, got: Got) -> None:
    await begin(peer, output=b"made of a")
    assert await worker.ack(got) is Word.OK
    await end(peer, COMMIT)


async def after_it(peer: Peer, worker: Worker, got: Got) -> None:
    await begin(peer, output=b"made of a")
    await end(peer, COMMIT)
    assert await worker.ack(got) is Word.OK


@pytest.mark.slow
def test_a_crash_leaves_both_or_neither(fs: FaultyFileSystem) -> None:
    """At every sync: a power cut that keeps what was synced, and a kill."""
    outcomes = play(fs, within)
    assert {True, False} == set(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [before_it, after_it])
def test_an_ack_beside_the_transaction_is_found(
    beside: Ack, fs: FaultyFileSystem
) -> None:
    """By the same cuts: the broken rule leaves one of both."""
    with pytest.raises(AssertionError, match="one of both"):
        play(fs, beside)


def play(fs: FaultyFileSystem, ack: Ack) -> list[bool]:
    """Return after each crash whether both are there; the commit's answer binds."""
    answered = list[bytes]()

    def scenario() -> None:
        async def main() -> None:
            async with running_broker(Path("/data"), QUICK, fs=fs) as broker:
                define(broker)
                async with Peer(broker) as peer:
                    await put(peer, b"a")
                    worker = Worker(peer)
                    (got,) = await worker.take(1)
                    answered.append(b"put")
                    await ack(peer, worker, got)
                    answered.append(b"committed")

        asyncio.run(main())

    points = crash_points(fs, scenario, lambda: tuple(answered))
    outcomes = list[bool]()
    for point in points:
        if point.progress:
            for disk in (point.disk.snapshot(), point.disk.crash()):
                outcomes.append(asyncio.run(has_both(disk)))
                assert outcomes[-1] or b"committed" not in point.progress
    return outcomes


async def has_both(disk: FaultyFileSystem) -> bool:
    """Return whether the output is there and the message is done."""
    async with running_broker(Path("/data"), QUICK, fs=disk) as broker:
        define(broker)
        made = await outputs(broker) == [b"made of a"]
        async with Peer(broker) as peer:
            worker, offset = Worker(peer), 0
            while True:
                reply = await worker.ask(worker.taking(1, wait_ms=0))
                assert isinstance(reply, Value)
                got, queue = got_of(reply), queue_of(broker)
                if got or queue.state.floor:
                    break
                await asyncio.sleep(0.01)
        assert [each.offset for each in got] in ([], [offset])
        assert made is not bool(got), f"one of both: output {made}, given {bool(got)}"
        return made


async def rings_for_groups(disk: FaultyFileSystem) -> None:
    """A start without the journal gives the message out, and rings for its group."""
    async with running_broker(Path("/data"), QUICK, fs=disk) as broker:
        define(broker)
        async with Peer(broker) as peer:
            (again,) = await Worker(peer, "w2").take(1, wait_ms=5_000)
        assert again.data == b"a"
        problems = find_problems(broker.control.status())
        texts = {each.alarm: each.text for each in problems}
        assert f"queue groups '{GROUP}' may" in texts[Alarm.TRANSACTION_JOURNAL]


@pytest.mark.slow
def test_a_message_whose_commit_is_in_doubt_is_given_out_by_a_start(
    fs: FaultyFileSystem,
) -> None:
    """Not before: the journal may have the commit. One that is damaged rings for it."""

    async def main() -> None:
        async with running_broker(Path("/data"), QUICK, fs=fs) as broker:
            define(broker)
            async with Peer(broker) as peer:
                await put(peer, b"a")
                worker = Worker(peer)
                (a,) = await worker.take(1)
                await begin(peer, output=b"made of a")
                assert await worker.ack(a, TX) is Word.OK
                fs.on_call(
                    lambda call: (
                        fs.fail_at(call.number + 1, errno.EIO)
                        if call.name == "write"
                        else None
                    )
                )
                assert b"known after a restart" in await say(peer, COMMIT)
                fs.on_call(None)
            async with Peer(broker) as other:
                assert await Worker(other, "w2").take(1, wait_ms=500) == []
            assert queue_of(broker).state.held_count == 1
            for disk in (fs.crash(), fs.snapshot()):
                await has_both(disk)
            disk = fs.snapshot()
            disk.unlink(Path("/data/transactions/redo.1"))
            await rings_for_groups(disk)

    asyncio.run(main())
