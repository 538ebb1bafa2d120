"""Batches that follow a refused one of their producer are not stored before it."""

import errno
from pathlib import Path

import pytest

from metaq.broker.acks import HELD_BACK_MAX
from metaq.model import LogId, MessageId
from metaq.protocol.commands import Mput, Result
from metaq.protocol.encoding import encode
from metaq.protocol.texts import NO_ROOM, split_code
from metaq.record.layout import encode_record
from tests.broker.test_acks_repeated_batches import DATA, mput, receipts, replies, run
from tests.rigs.broker import Peer
from tests.rigs.fs import FaultyFileSystem, Operation


def close(broker) -> None:
    broker.context.topics.close_partitions("test", start=0, end=None)


def reopen(broker) -> None:
    broker.context.topics.open_partitions("test", start=0, end=None)


def code_of(reply: Result) -> str | None:
    _text, code = split_code(reply.text)
    return None if code is None else code.word


def statuses(data: bytes) -> list[int]:
    return [reply.status for reply in replies(data)]


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_in_flight_with_a_refused_batch_is_refused(
    data_dir: Path, count: int
) -> None:
    """It waits until the refused one has come again; batches of one alone as well."""

    async def scenario(broker, peer) -> None:
        close(broker)
        assert statuses(await peer.ask(mput(0, count=count))) == [403]
        reopen(broker)
        later = [mput(n * count, n, count=count) for n in (1, 2)]
        for each in later:
            assert statuses(await peer.ask(each)) == [403]
        counters = broker.context.counters
        assert counters.rejections["closed"] == counters.cmd_put == 3 * count
        again = [mput(0, count=count), *later]
        size = 21 * count
        found = [receipts(await peer.ask(each))[0].offset for each in again]
        assert found == [0, size, 2 * size]
        assert not peer.session.held_back

    run(data_dir, scenario)


def test_what_was_received_together_is_refused_as_a_whole(data_dir: Path) -> None:
    """Also where the partition opens between two of them."""

    async def scenario(broker, peer) -> None:
        close(broker)
        frames = [mput(2 * n, n) for n in range(5)]
        assert statuses(await peer.ask(b"".join(frames[:3]))) == [403] * 3
        reopen(broker)
        assert statuses(await peer.ask(b"".join(frames[3:]))) == [403] * 2
        stored = receipts(await peer.ask(b"".join(frames)))
        assert sorted(each.offset for each in stored) == [42 * n for n in range(5)]

    run(data_dir, scenario)


def test_a_gap_in_the_numbers_ends_it(data_dir: Path) -> None:
    """The refused one does not come again: its time is over, or it went elsewhere."""

    async def scenario(broker, peer) -> None:
        close(broker)
        assert statuses(await peer.ask(mput(0))) == [403]
        reopen(broker)
        assert statuses(await peer.ask(mput(3) + mput(5, 2))) == [200, 200]

    run(data_dir, scenario)


def test_a_refusal_that_is_remembered_holds_no_payload(data_dir: Path) -> None:
    """Frames of a traceback would."""

    async def scenario(broker, peer) -> None:
        close(broker)
        assert statuses(await peer.ask(mput(0) + mput(2, 2))) == [403, 403]
        (held,) = peer.session.held_back.values()
        assert held.error.__traceback__ is held.error.__context__ is None

    run(data_dir, scenario)


def test_others_do_not_wait(data_dir: Path) -> None:
    """Other connections, partitions and producers, and what has no producer."""

    async def scenario(broker, peer) -> None:
        close(broker)
        assert statuses(await peer.ask(mput(0))) == [403]
        reopen(broker)
        record = encode_record(b"x", id=MessageId(0))
        plain = encode(Mput("test", 0, 1, -1, 4, record))
        other = encode(Mput("test", 0, 1, -1, 5, record, "q", 2))
        frames = [mput(2, partition=1), plain, other]
        for frame in frames:
            assert statuses(await peer.ask(frame)) == [200], frame
        async with Peer(broker) as second:
            assert statuses(await second.ask(mput(2))) == [200]

    run(data_dir, scenario)


def test_a_batch_that_can_never_be_stored_keeps_back_no_other(data_dir: Path) -> None:
    """Its producer does not send it again."""

    async def scenario(broker, peer) -> None:
        wrong = bytearray(mput(0))
        wrong[-1] ^= 1
        assert statuses(await peer.ask(bytes(wrong) + mput(2))) == [500, 200]

    run(data_dir, scenario)


def test_a_full_disk_refuses_what_follows_until_the_batch_is_there(
    fs: FaultyFileSystem,
) -> None:
    """The refusal comes from the disk, after the batch was appended."""

    def fill(operation: Operation) -> None:
        if operation.name == "write" and operation.path.suffix == ".meta":
            fs.on_call(None)
            raise OSError(errno.ENOSPC, "full", str(operation.path))

    async def main(broker, peer) -> None:
        assert statuses(await peer.ask(mput(0))) == [200]
        fs.on_call(fill)
        (reply,) = replies(await peer.ask(mput(2)))
        assert (reply.status, code_of(reply)) == (500, NO_ROOM)
        (reply,) = replies(await peer.ask(mput(4)))
        assert (reply.status, code_of(reply)) == (500, NO_ROOM)
        assert statuses(await peer.ask(mput(2) + mput(4, 2))) == [200, 200]

    run(DATA, main, fs=fs)


def test_refusals_that_are_remembered_are_bounded(data_dir: Path) -> None:
    """A peer may name a producer in each batch."""

    async def scenario(broker, peer) -> None:
        close(broker)
        names = [f"p{n}" for n in range(HELD_BACK_MAX + 1)]
        frames = [encode(Mput("test", 0, 1, -1, 1, bytes(20), n, 0)) for n in names]
        await peer.ask(b"".join(frames))
        assert len(peer.session.held_back) == HELD_BACK_MAX
        assert ("p0", LogId("test", 0)) not in peer.session.held_back

    run(data_dir, scenario)
