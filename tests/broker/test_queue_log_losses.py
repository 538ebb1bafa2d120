"""`__queues` that lacks something: a backup, `accept-loss`, retention."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.cli.accept_loss import accept_loss
from metaq.errors import StorageError
from metaq.protocol.queue_frames import Word
from tests.broker.queue_worker import QUICK, Worker, define, put, queue_of
from tests.rigs.broker import CONFIG, Peer, running_broker

SMALL = {**QUICK, "maxSegmentSize": "1000"}


def start(
    data: Path,
    work: Callable[[Broker, Peer], Awaitable[None]],
    *,
    text: str = CONFIG,
) -> None:
    """Run a broker on a directory until some work is done."""

    async def main() -> None:
        async with (
            running_broker(data, SMALL, text=text) as broker,
            Peer(broker) as peer,
        ):
            define(broker)
            await work(broker, peer)

    asyncio.run(main())


async def ack_one(peer: Peer) -> bytes:
    """Take and ack the first message that there is; return it."""
    worker = Worker(peer)
    (got,) = await worker.take(1, wait_ms=20_000)
    assert await worker.ack(got) is Word.OK
    return got.data


async def ack_all(peer: Peer) -> list[bytes]:
    """Ack what there is, at least one message; return that."""
    found = [await ack_one(peer)]
    worker = Worker(peer)
    while got := await worker.take(9, wait_ms=100):
        found += [each.data for each in got]
        for each in got:
            assert await worker.ack(each) is Word.OK
    return found


async def put_three(_broker: Broker, peer: Peer) -> None:
    await put(peer, b"a", b"b", b"c")
    assert await ack_one(peer) == b"a"


@pytest.mark.slow
def test_a_backup_of_all_has_the_acks_of_its_moment(tmp_path: Path) -> None:
    """Later acks are not known; new messages at the same offsets are given out."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    start(data, put_three)
    shutil.copytree(data, backup)

    async def later(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"later")
        assert await ack_all(peer) == [b"b", b"c", b"later"]

    async def restored(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"other")
        assert await ack_all(peer) == [b"b", b"c", b"other"]

    start(data, later)
    start(backup, restored)


@pytest.mark.slow
@pytest.mark.parametrize("is_older", [False, True], ids=["gone", "older"])
def test_what_queues_lack_is_repeated_once_that_is_accepted(
    tmp_path: Path, *, is_older: bool
) -> None:
    """Before, the groups are refused, or the start is; nothing is taken for new."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    start(data, put_three)
    shutil.copytree(data, backup)

    async def later(_broker: Broker, peer: Peer) -> None:
        assert await ack_one(peer) == b"b"

    start(data, later)
    (reservations,) = data.glob("__queues-*")
    shutil.rmtree(reservations)
    if is_older:
        shutil.copytree(backup / reservations.name, reservations)

    async def refused(_broker: Broker, peer: Peer) -> None:
        worker = Worker(peer)
        reply = await worker.ask(worker.taking(1, wait_ms=20_000))
        assert reply.status == 503
        raise StorageError(reply.text)

    with pytest.raises(StorageError, match="__queues"):
        start(data, refused)
    accept_loss(data, None, is_sure=True)

    async def accepted(_broker: Broker, peer: Peer) -> None:
        found = await ack_all(peer)
        assert found == ([b"b", b"c"] if is_older else [b"a", b"b", b"c"])

    start(data, accepted)


@pytest.mark.slow
def test_what_retention_took_while_no_worker_was_there_is_lost_and_counted(
    tmp_path: Path,
) -> None:
    """Also where the messages in front of it were done before a start."""

    async def before(_broker: Broker, peer: Peer) -> None:
        await put(peer, *[b"%05d" % n for n in range(100)])
        assert await ack_one(peer) == b"00000"

    async def after(broker: Broker, peer: Peer) -> None:
        log = broker.context.topics.find_log("test", 0)
        assert log is not None
        log.on_removed(log.segments.first, 0)
        assert log.log_start_offset > 0
        worker = Worker(peer)
        (first,) = await worker.take(1, wait_ms=20_000)
        assert first.offset == log.log_start_offset
        assert queue_of(broker).state.lost_bytes > 0
        assert await worker.ack(first) is Word.OK

    start(tmp_path, before)
    start(tmp_path, after)


@pytest.mark.slow
@pytest.mark.parametrize("is_older", [False, True], ids=["gone", "older"])
def test_a_topic_whose_disk_was_set_back_loses_no_new_message(
    tmp_path: Path, *, is_older: bool
) -> None:
    """Offsets at which a group had done messages are those of others then.

    They were passed over as done, with no alarm, and once there were as many bytes as
    before the group read from the middle of a message and stopped.
    """
    data, disk, backup = (tmp_path / each for each in ("data", "disk", "backup"))
    text = CONFIG.replace("[topic=test]\n", f"[topic=test]\ndataPath={disk}\n")

    async def before(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"old a", b"old b")
        assert await ack_one(peer) == b"old a"

    async def later(_broker: Broker, peer: Peer) -> None:
        await put(peer, b"c", b"d")
        assert await ack_all(peer) == [b"old b", b"c", b"d"]

    async def put_one(_broker: Broker, peer: Peer) -> None:
        await put(peer, *[b"new %d" % n for n in range(9)])

    async def after(_broker: Broker, peer: Peer) -> None:
        assert await ack_all(peer) == [b"new %d" % n for n in range(9)]

    start(data, before, text=text)
    if is_older:
        shutil.copytree(disk, backup)
    start(data, later, text=text)
    shutil.rmtree(disk)
    if is_older:
        shutil.copytree(backup, disk)
    else:
        with pytest.raises(StorageError, match="not what it was"):
            start(data, put_one, text=text)
        accept_loss(disk, None, is_sure=True)
    start(data, put_one, text=text)  # before the first worker is back
    start(data, after, text=text)


def test_a_late_ack_ends_no_message_of_a_topic_that_was_made_again(
    tmp_path: Path,
) -> None:
    """Its number is of another life, though offset and count are the same."""

    async def work(broker: Broker, peer: Peer) -> None:
        await put(peer, b"old")
        worker, other = Worker(peer), Worker(peer, "w2")
        (old,) = await worker.take(1, wait_ms=20_000)
        queues = broker.context.queues
        assert queues is not None
        queues.drop_topic("test")
        (new,) = await other.take(1, wait_ms=20_000)  # it begins at the log start
        assert new.offset == old.offset
        assert await worker.ack(old) is Word.LOST
        assert await other.ack(new) is Word.OK

    start(tmp_path, work)
