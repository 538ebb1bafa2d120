"""A batch that is sent again is stored once and answered as often as it is sent."""

import asyncio
import errno
from pathlib import Path
from zlib import crc32

import pytest

from metaq.errors import SequenceUsedError
from metaq.model import MessageId
from metaq.peer.replies import PutReceipt, parse_receipt
from metaq.protocol.commands import NO_CHECKSUM, Mput, Result
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.record.layout import encode_record
from tests.rigs.broker import Peer, running_broker
from tests.rigs.fs import FaultyFileSystem

END = b"offset test g 0 9223372036854775807 99\r\n"
DATA = Path("/data")


def mput(
    sequence: int,
    opaque: int = 1,
    *,
    count: int = 2,
    partition: int = 0,
    text: bytes = b"x",
    checked: bool = True,
) -> bytes:
    records = encode_record(text, id=MessageId(0)) * count
    checksum = crc32(records) & 0x7FFFFFFF if checked else NO_CHECKSUM
    return encode(
        Mput("test", partition, count, checksum, opaque, records, "p", sequence)
    )


def replies(data: bytes) -> list[Result]:
    connection = Connection(Role.CLIENT, WireLimits())
    connection.receive_data(data)
    found = []
    while (event := connection.next_event()) is not NEED_DATA:
        assert isinstance(event, Result)
        found.append(event)
    return found


def receipts(data: bytes) -> list[PutReceipt]:
    return [parse_receipt(reply) for reply in replies(data)]


async def end_of(peer: Peer) -> int:
    (reply,) = replies(await peer.ask(END))
    return int(reply.text)


def run(data: Path, scenario, **options) -> None:
    async def main() -> None:
        async with running_broker(data, **options) as broker, Peer(broker) as peer:
            await scenario(broker, peer)

    asyncio.run(main())


def test_a_repeated_batch_gets_the_same_receipt(data_dir: Path) -> None:
    """On another connection, too, and it is counted; the next batch is stored."""

    async def scenario(broker, peer) -> None:
        (first,) = receipts(await peer.ask(mput(0)))
        assert receipts(await peer.ask(mput(0, 2))) == [first]
        async with Peer(broker) as other:
            assert receipts(await other.ask(mput(0, 3, checked=False))) == [first]
        assert await end_of(peer) == 42
        assert broker.context.counters.batch_repeated == 2
        assert broker.control.status().commands.batch_repeated == 2
        (log,) = broker.control.status().logs
        assert (log.producer_count, log.forgotten_count, log.record_count) == (1, 0, 2)
        (second,) = receipts(await peer.ask(mput(2)))
        assert second.offset == 42

    run(data_dir, scenario)


def test_batches_in_flight_are_answered_once_they_are_stored(data_dir: Path) -> None:
    """Five pipelined and all sent again behind them: ten answers, five batches."""

    async def scenario(broker, peer) -> None:
        frames = [mput(2 * number, number) for number in range(5)]
        answer = replies(await peer.ask(b"".join(frames * 2)))
        assert sorted(reply.opaque for reply in answer) == sorted([*range(5)] * 2)
        by_opaque: dict[int, set[str]] = {}
        for reply in answer:
            by_opaque.setdefault(reply.opaque, set()).add(reply.text)
            assert reply.status == 200
        assert all(len(texts) == 1 for texts in by_opaque.values())
        assert await end_of(peer) == 5 * 42

    run(data_dir, scenario)


def test_a_large_batch_that_comes_twice_at_once_is_stored_once(data_dir: Path) -> None:
    """Both are checked in steps, in turn; the second one is known when checked."""
    frame = mput(7, count=30_000, text=b"x" * 100)

    async def scenario(broker, peer) -> None:
        async with Peer(broker) as other:
            first, second = await asyncio.gather(peer.ask(frame), other.ask(frame))
        assert receipts(first) == receipts(second)
        assert await end_of(peer) == 30_000 * 120
        assert broker.context.counters.batch_repeated == 1
        assert broker.context.load.in_flight_bytes == 0

    run(data_dir, scenario)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (mput(0, text=b"y"), "sequence 0 of producer p was used for other records"),
        (mput(1), "sequence 1 of producer p is already stored or overlapping"),
        (mput(0, count=3), "sequence 0 of producer p is already stored or overlapping"),
    ],
)
def test_numbers_that_were_used_are_refused(data_dir: Path, frame, text) -> None:
    """With the reason, and counted by it; nothing is stored."""

    async def scenario(broker, peer) -> None:
        await peer.ask(mput(0))
        (reply,) = replies(await peer.ask(frame))
        with pytest.raises(SequenceUsedError, match=text):
            parse_receipt(reply)
        assert reply.text.startswith("Put message to [broker 'meta://")
        assert broker.context.counters.rejections["sequence"] > 0
        assert await end_of(peer) == 42

    run(data_dir, scenario)


def test_a_refused_batch_is_not_remembered(data_dir: Path) -> None:
    """A checksum was wrong on the way; the same numbers come again, and are stored."""

    async def scenario(_broker, peer) -> None:
        broken = bytearray(mput(0))
        broken[-1] ^= 1
        assert b"Checksum failure" in await peer.ask(bytes(broken))
        assert [each.offset for each in receipts(await peer.ask(mput(0)))] == [0]
        assert [each.offset for each in receipts(await peer.ask(mput(9)))] == [42]

    run(data_dir, scenario)


def test_partitions_and_producers_have_numbers_of_their_own(data_dir: Path) -> None:
    """The same sequence elsewhere is another batch."""

    async def scenario(_broker, peer) -> None:
        answer = await peer.ask(mput(0) + mput(0, partition=1))
        assert [each.offset for each in receipts(answer)] == [0, 0]
        other = mput(0).replace(b" p 0 ", b" q 0 ")
        assert [each.offset for each in receipts(await peer.ask(other))] == [42]

    run(data_dir, scenario)


def test_a_restart_forgets_nothing(data_dir: Path) -> None:
    """The receipt is that of before."""
    before: list[PutReceipt] = []

    async def store(_broker, peer) -> None:
        before.extend(receipts(await peer.ask(mput(0) + mput(2))))

    async def repeat(_broker, peer) -> None:
        assert receipts(await peer.ask(mput(0) + mput(2))) == before
        assert await end_of(peer) == 84

    run(data_dir, store)
    run(data_dir, repeat)


def test_the_number_of_producers_is_bounded(data_dir: Path) -> None:
    """The forgotten one may begin anywhere, and its batch is stored again."""

    async def scenario(broker, peer) -> None:
        for name in (b"a", b"b", b"c"):
            await peer.ask(mput(0).replace(b" p 0 ", b" %b 0 " % name))
        (log,) = broker.control.status().logs
        assert (log.producer_count, log.forgotten_count) == (2, 1)
        await peer.ask(mput(0).replace(b" p 0 ", b" a 0 "))
        assert await end_of(peer) == 4 * 42

    run(data_dir, scenario, overrides={"producerCountMax": "2"})


def test_whoever_joined_a_batch_that_fails_is_told(fs: FaultyFileSystem) -> None:
    """The disk refuses; both hear it, and the broker remembers nothing."""

    async def scenario(broker, peer) -> None:
        await peer.ask(mput(0))
        fs.set_capacity(0)
        refused = replies(await peer.ask(mput(2, 5) + mput(2, 6)))
        assert [(each.status, each.opaque) for each in refused] == [(500, 5), (500, 6)]
        assert all("no room" in each.text for each in refused)
        fs.set_capacity(1 << 40)
        assert peer.session.unanswered_count == 0
        assert broker.context.load.in_flight_bytes == 0
        assert [each.offset for each in receipts(await peer.ask(mput(2, 7)))] == [42]
        assert await end_of(peer) == 84

    run(DATA, scenario, fs=fs, overrides={"freeBytesMin": "0"})


def test_a_batch_under_which_the_disk_failed_stays_in_doubt(
    fs: FaultyFileSystem,
) -> None:
    """Sent again it is not refused as if it were certainly not stored."""

    async def scenario(_broker, peer) -> None:
        (stored,) = receipts(await peer.ask(mput(0)))
        fs.fail_at(fs.calls + 2, errno.EIO)
        (first,) = replies(await peer.ask(mput(2, 5)))
        (second,) = replies(await peer.ask(mput(2, 6)))
        assert first.text == second.text
        assert second.text.endswith("outcome unknown [in-doubt]")
        assert receipts(await peer.ask(mput(0, 7))) == [stored]

    run(DATA, scenario, fs=fs, overrides={"freeBytesMin": "0"})


def test_a_batch_is_no_way_around_the_limit_of_a_message(data_dir: Path) -> None:
    """The whole batch is refused, with both numbers; what fits is stored."""

    async def scenario(_broker, peer) -> None:
        (reply,) = replies(await peer.ask(mput(0, text=b"longer")))
        assert reply.status == 500
        assert "record 0: payload of 6 bytes, expected at most 5" in reply.text
        (stored,) = receipts(await peer.ask(mput(0, text=b"short")))
        assert stored.offset == 0

    run(data_dir, scenario, overrides={"payloadBytesMax": "5"})
