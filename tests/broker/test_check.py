"""The command `check`: stored bytes are compared with their checksums on request."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from metaq.broker.handlers import check
from metaq.fs import ReadFile, SystemFileSystem
from metaq.model import Offset
from metaq.protocol import texts
from metaq.protocol.texts import split_code
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.segment import Damage
from metaq.storage.span_index import ENTRY_BYTES, HEADER, spans_path
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

HELLO = b"put test 0 5 0 907060870 1\r\nhello"
RECORD_BYTES = 25
TWO_SEGMENTS = {"maxSegmentSize": "100"}
PAYLOAD, ID, LENGTH = 22, 15, 3
"""A byte of a record."""


def run(data: Path, scenario, **options) -> None:
    async def main() -> None:
        async with running_broker(data, **options) as broker, Peer(broker) as peer:
            await peer.ask(HELLO * 4)
            log = broker.context.topics.find_log("test", 0)
            await until(lambda: has_index(log))
            await scenario(log, peer)
            await until(lambda: broker.context.check_count == 0)

    asyncio.run(main())


def has_index(log: PartitionLog) -> bool:
    path = spans_path(log.segments.first.path, Offset(0))
    return path.stat().st_size >= HEADER.size + ENTRY_BYTES


def flip(log: PartitionLog, offset: int) -> None:
    segment = log.segments.find(Offset(offset))
    with segment.path.open("r+b") as file:
        file.seek(offset - segment.base_offset)
        byte = file.read(1)[0]
        file.seek(offset - segment.base_offset)
        file.write(bytes([byte ^ 1]))


async def ask(peer: Peer, offset: int, size: int = 1) -> tuple[int, str]:
    """Return status and body of the answer to a check."""
    reply = await peer.ask(b"check test 0 %d %d 9\r\n" % (offset, size))
    line, _, body = reply.partition(b"\r\n")
    word, status, length, opaque = line.split()
    assert (word, int(length), opaque) == (b"result", len(body), b"9")
    return int(status), body.decode()


def code_of(body: str) -> tuple[str, dict[str, str]]:
    _text, code = split_code(body)
    assert code is not None, body
    return code.word, dict(code.values)


async def assert_damaged(peer: Peer, offset: int, start: int, end: int) -> None:
    """A check and a get at an offset name a damaged range."""
    status, body = await ask(peer, offset, RECORD_BYTES)
    word, values = code_of(body)
    assert (status, word) == (500, "damaged")
    assert (values["from"], values["to"]) == (str(start), str(end))
    got = await peer.ask(b"get test g 0 %d 100 9\r\n" % offset)
    assert got.partition(b"\r\n")[2].decode() == body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offset", "size", "end"),
    [(0, 1, 1), (0, 100, 100), (30, 7, 37), (75, 1000, 100), (99, 2**31 - 1, 100)],
)
def test_good_bytes_are_called_good_up_to_an_offset(
    data_dir: Path, offset: int, size: int, end: int
) -> None:
    """Within a record too, and up to the end of the log at the most."""

    async def scenario(log, peer) -> None:
        assert await ask(peer, offset, size) == (200, str(end))
        assert log.state is LogState.OPEN

    run(data_dir, scenario)


@pytest.mark.slow
def test_a_check_ends_with_a_segment(data_dir: Path) -> None:
    """As a get does; the next one begins in the next segment."""

    async def scenario(_log, peer) -> None:
        await peer.ask(HELLO)
        assert await ask(peer, 75, 50) == (200, "100")
        assert await ask(peer, 100, 50) == (200, "125")

    run(data_dir, scenario, overrides=TWO_SEGMENTS)


@pytest.mark.slow
def test_only_so_much_is_checked_at_once(data_dir: Path) -> None:
    """The answer says how far it went."""
    large = b"put test 0 %d 0 -1 1\r\n" % (16 << 20) + bytes(16 << 20)

    async def scenario(log, peer) -> None:
        while log.high_watermark < check.CHECK_BYTES_MAX + 200:
            await peer.ask(large)
        assert await ask(peer, 50, 2**31 - 1) == (200, str(check.CHECK_BYTES_MAX + 50))

    run(data_dir, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [25, 26, 49])
def test_a_flipped_bit_stops_a_log_that_is_the_only_copy(
    data_dir: Path, asked: int
) -> None:
    """The answer is that to a get there, whichever byte of the record was named."""

    async def scenario(log, peer) -> None:
        flip(log, RECORD_BYTES + PAYLOAD)
        await assert_damaged(peer, asked, 25, 50)
        assert log.state is LogState.STOPPED
        assert (await peer.ask(HELLO)).startswith(b"result 500 ")

    run(data_dir, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("byte", [PAYLOAD, ID, LENGTH])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_any_byte_of_a_span_counts(data_dir: Path, byte: int, is_sealed: bool) -> None:
    """Also one that no record's checksum covers: then it may be all of the span."""

    async def scenario(log, peer) -> None:
        flip(log, 50 + byte)
        status, body = await ask(peer, 50, RECORD_BYTES)
        assert (status, code_of(body)[0]) == (500, "damaged")
        (damage,) = log.damage
        assert damage.covers(Offset(50))

    run(data_dir, scenario, overrides=TWO_SEGMENTS if is_sealed else {})


@pytest.mark.slow
def test_without_an_index_records_are_walked(data_dir: Path) -> None:
    """From where one is known to start: no client's offset is believed."""

    async def scenario(log, peer) -> None:
        spans_path(log.segments.first.path, Offset(0)).unlink()
        for offset in (0, 30, 99):
            assert await ask(peer, offset) == (200, str(offset + 1))
        assert log.damage == ()
        flip(log, 50 + PAYLOAD)
        assert await ask(peer, 30, 1000) == (200, "50")
        await assert_damaged(peer, 60, 50, 75)

    run(data_dir, scenario)


@pytest.mark.slow
def test_bytes_before_known_damage_are_good(data_dir: Path) -> None:
    """The answer ends where damage begins; after it records are good again."""

    async def scenario(log, peer) -> None:
        flip(log, 50 + PAYLOAD)
        assert await ask(peer, 0, 1000) == (200, "50")
        before = log.damage
        assert await ask(peer, 30, 1000) == (200, "50")
        assert await ask(peer, 75, 1000) == (200, "100")
        await assert_damaged(peer, 50, 50, 75)
        assert log.damage == before

    run(data_dir, scenario)


@pytest.mark.slow
def test_nothing_after_the_high_watermark_counts(data_dir: Path) -> None:
    """A span may go past it, and what is there may be cut off again."""

    async def scenario(log, peer) -> None:
        flip(log, 75 + PAYLOAD)
        log.follow()
        log.lower_high_watermark(Offset(50))
        assert await ask(peer, 0, 1000) == (200, "50")
        assert log.damage == ()
        assert (await ask(peer, 50))[0] == 404
        flip(log, 25 + PAYLOAD)
        await assert_damaged(peer, 30, 25, 50)

    run(data_dir, scenario)


@pytest.mark.slow
def test_a_file_that_was_cut_short_is_damage(data_dir: Path) -> None:
    """As for a get: all that is missing is named."""

    async def scenario(log, peer) -> None:
        with log.segments.first.path.open("r+b") as file:
            file.truncate(60)
        status, body = await ask(peer, 75, RECORD_BYTES)
        assert (status, code_of(body)[0]) == (500, "damaged")
        assert log.state is LogState.STOPPED

    run(data_dir, scenario)


@pytest.mark.slow
def test_what_is_not_there_cannot_be_checked(data_dir: Path) -> None:
    """With the texts that a get has."""

    async def scenario(log, peer) -> None:
        assert await ask(peer, 100) == (404, texts.nothing_at(100))
        assert await ask(peer, -1) == (404, texts.nothing_at(-1))
        assert await ask(peer, 0, -1) == (200, "1")
        reply = await peer.ask(b"check test 1 0 1 9\r\n")
        assert reply.endswith(texts.no_such_log("test", 1).encode())
        log.state = LogState.CLOSED
        status, body = await ask(peer, 0)
        log.state = LogState.OPEN
        assert status == 500
        assert "partition test-0 is closed" in body

    run(data_dir, scenario)


def test_a_closed_partition_is_not_checked(data_dir: Path) -> None:
    """Nobody reads there."""

    async def main() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            await peer.ask(HELLO)
            broker.context.topics.close_partitions("test", start=0, end=0)
            assert await ask(peer, 0) == (403, texts.get_closed(0, 0))

    asyncio.run(main())


@pytest.mark.slow
def test_a_segment_that_retention_took_is_asked_for_again(data_dir: Path) -> None:
    """The next get finds the new log start."""

    async def scenario(log, peer) -> None:
        await peer.ask(HELLO)
        log.segments.first.path.unlink()
        spans_path(log.segments.first.path, Offset(0)).unlink()
        assert await ask(peer, 0) == (503, texts.LOG_START_MOVED)
        assert log.damage == ()

    run(data_dir, scenario, overrides=TWO_SEGMENTS)


@pytest.mark.slow
def test_a_bug_is_a_500_with_a_traceback(data_dir: Path, caplog) -> None:
    """It is counted, and the connection goes on."""

    class Buggy(SystemFileSystem):
        def try_open_read(self, path: Path) -> ReadFile | None:
            if path.suffix == ".spans":
                raise ZeroDivisionError
            return super().try_open_read(path)

    async def scenario(_log, peer) -> None:
        assert await ask(peer, 0) == (500, texts.INTERNAL_ERROR)
        assert "ZeroDivisionError" in caplog.text
        assert (await peer.ask(HELLO)).startswith(b"result 200 ")

    run(data_dir, scenario, fs=Buggy())


@pytest.mark.slow
def test_checks_that_are_not_answered_are_bounded(data_dir: Path) -> None:
    """One more is refused at once, and may come again."""

    async def scenario(log, peer) -> None:
        gate = Event()
        for _ in range(2):
            log.log_dir.reader.submit(gate.wait, 30)
        await peer.send(b"check test 0 0 1 9\r\n" * check.CHECKS_MAX)
        await peer.send(HELLO)
        assert (await peer.read_some()).startswith(b"result 200 ")
        await peer.send(b"check test 0 0 1 8\r\n")
        text = texts.too_many_checks(check.CHECKS_MAX).encode()
        refused = b"result 503 %d 8\r\n%s" % (len(text), text)
        assert await peer.reader.readexactly(len(refused)) == refused
        gate.set()
        for _ in range(check.CHECKS_MAX):
            assert await peer.reader.readexactly(17) == b"result 200 1 9\r\n1"
        assert peer.session.unanswered_count == 0

    run(data_dir, scenario)


def run_in_a_set(
    data: Path, act: Callable[[PartitionLog], None], answer: Callable[[int, str], None]
) -> None:
    """Check a damaged record of a log of a set, and act while the check waits."""

    async def scenario(log, peer) -> None:
        log.number = 7
        flip(log, 25 + PAYLOAD)
        asking = asyncio.ensure_future(ask(peer, 30, RECORD_BYTES))
        await until(lambda: log.damage)
        assert log.state is LogState.OPEN
        act(log)
        answer(*await asking)

    run(data, scenario)


@pytest.mark.slow
def test_in_a_set_the_answer_waits_for_the_mending(data_dir: Path) -> None:
    """Then the bytes are good, and got again."""

    def mend(log: PartitionLog) -> None:
        flip(log, 25 + PAYLOAD)
        log.on_mended(log.damage[0])

    def answer(status: int, body: str) -> None:
        assert (status, body) == (200, "55")

    run_in_a_set(data_dir, mend, answer)


@pytest.mark.slow
def test_damage_that_no_replica_can_mend_is_the_answer(data_dir: Path) -> None:
    """The client's option applies to it."""

    def lose(log: PartitionLog) -> None:
        log.on_lost(log.damage[0])

    def answer(status: int, body: str) -> None:
        assert status == 500
        assert code_of(body)[1]["from"] == "25"
        assert code_of(body)[1]["to"] == "50"

    run_in_a_set(data_dir, lose, answer)


@pytest.mark.slow
def test_a_mending_that_takes_too_long_is_asked_for_again(data_dir: Path) -> None:
    """The damage may end at any moment, so it is not named yet."""

    def answer(status: int, body: str) -> None:
        assert status == 503
        assert code_of(body) == ("not-settled", {})
        assert "test-0 is not mended yet at offset 30" in body

    run_in_a_set(data_dir, lambda _log: None, answer)


@pytest.mark.slow
def test_the_mending_of_another_range_does_not_end_the_wait(data_dir: Path) -> None:
    """All waits of a log are woken together."""

    async def scenario(log, peer) -> None:
        log.number = 7
        flip(log, 25 + PAYLOAD)
        flip(log, 75 + PAYLOAD)
        asking = asyncio.ensure_future(ask(peer, 25, 3 * RECORD_BYTES))
        await until(lambda: len(log.damage) == 2)
        log.on_mended(log.damage[1])
        await asyncio.sleep(0)
        assert peer.session.unanswered_count == 1
        flip(log, 25 + PAYLOAD)
        log.on_mended(log.damage[0])
        assert await asking == (200, "100")

    run(data_dir, scenario)


@pytest.mark.slow
def test_a_wait_that_is_over_is_not_over_once_more(data_dir: Path) -> None:
    """Bytes that were mended in time may be verified for longer than the wait."""

    async def scenario(log, peer) -> None:
        log.number = 7
        flip(log, 25 + PAYLOAD)
        flawed = Damage(log.segments.first.path, Offset(25), Offset(50), "a test")
        log.on_damage(flawed)
        await peer.send(b"check test 0 25 25 9\r\n")
        gate = Event()
        for _ in range(2):
            log.log_dir.reader.submit(gate.wait, 30)
        flip(log, 25 + PAYLOAD)
        log.on_mended(flawed)
        await asyncio.sleep(check.MEND_S + 0.1)
        gate.set()
        assert await peer.read_some() == b"result 200 2 9\r\n50"
        assert await peer.ask(b"check test 0 0 5 9\r\n") == b"result 200 1 9\r\n5"

    run(data_dir, scenario)


def test_a_broker_that_stops_answers_what_is_not_verified(data_dir: Path) -> None:
    """Its disk may hang; the log is not read any more."""

    async def main() -> None:
        gate = Event()
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            await peer.ask(HELLO)
            log = broker.context.topics.find_log("test", 0)
            for _ in range(2):
                log.log_dir.reader.submit(gate.wait, 30)
            await peer.send(b"check test 0 0 1 9\r\n")
            await until(lambda: broker.context.check_count == 1)
            log.log_dir.reader.shutdown(wait=False, cancel_futures=True)
            text = b"partition test-0 is being closed"
            refused = b"result 500 %d 9\r\n%s" % (len(text), text)
            assert await peer.read_some() == refused
            assert await peer.ask(b"check test 0 0 1 9\r\n") == refused
            gate.set()

    asyncio.run(main())


def test_a_connection_that_ends_leaves_no_check_to_count(data_dir: Path) -> None:
    """The wait ends as if it were there, and counts for no other connection then."""

    async def main() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            await peer.ask(HELLO * 2)
            log = broker.context.topics.find_log("test", 0)
            log.number = 7
            flip(log, 25 + PAYLOAD)
            await peer.send(b"check test 0 25 1 9\r\n")
            await until(lambda: log.damage)
            peer.session.abort("a test")
            assert broker.context.check_count == 1
            log.on_lost(log.damage[0])
            assert broker.context.check_count == 0

    asyncio.run(main())
