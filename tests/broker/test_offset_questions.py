"""Questions about a log: other threads answer them, and disks may refuse to."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from metaq.broker.handlers import offset as offset_handler
from metaq.fs import ReadFile, SystemFileSystem
from metaq.model import Offset
from metaq.protocol import texts
from metaq.storage.segment import Damage
from tests.rigs.broker import Peer, running_broker

HELLO = b"put test 0 5 0 907060870 1\r\nhello"
COUNT = b"offset test g 0 0 2 count=100\r\n"


def run(data: Path, scenario, **options) -> None:
    async def main() -> None:
        async with running_broker(data, **options) as broker, Peer(broker) as peer:
            await peer.ask(HELLO * 4)
            await scenario(broker, peer)

    asyncio.run(main())


def test_other_commands_overtake_a_question(data_dir: Path) -> None:
    """The loop goes on while a thread looks; the answer follows."""

    async def scenario(broker, peer) -> None:
        with ThreadPoolExecutor(1) as busy:
            broker.context.upkeep = busy
            gate = Event()
            busy.submit(gate.wait, 30)
            await peer.send(COUNT + HELLO)
            assert (await peer.read_some()).startswith(b"result 200 ")
            assert peer.session.unanswered_count == 1
            gate.set()
            assert await peer.read_some() == b"result 200 1 2\r\n4"

    run(data_dir, scenario)


def test_questions_in_flight_are_bounded_by_bytes(data_dir: Path) -> None:
    """Each counts for its longest answer, until it was sent."""

    async def scenario(broker, peer) -> None:
        await peer.ask(COUNT)
        assert broker.context.load.in_flight_bytes == 0
        with ThreadPoolExecutor(1) as busy:
            broker.context.upkeep = busy
            gate = Event()
            busy.submit(gate.wait, 30)
            await peer.send(COUNT * 2)
            held = broker.context.load.in_flight_bytes
            gate.set()
            assert held == 2 * offset_handler.ANSWER_BYTES_MAX
            assert await peer.ask(b"version 3\r\n")

    run(data_dir, scenario)
    longest = 20 * offset_handler.BOUNDARIES_MAX
    assert longest <= offset_handler.ANSWER_BYTES_MAX


def test_the_log_start_that_moved_is_said(data_dir: Path) -> None:
    """Retention may take a segment between the question and the look at it."""

    async def scenario(broker, peer) -> None:
        (segment,) = broker.context.topics.find_log("test", 0).segments
        segment.path.unlink()
        segment.path.with_suffix(".spans").unlink()
        reply = await peer.ask(COUNT)
        assert reply.startswith(b"result 503 ")  # clients ask again
        assert b"the log start has moved: ask again" in reply

    run(data_dir, scenario)


def test_segments_without_an_index_are_walked_for_the_first_question(
    data_dir: Path,
) -> None:
    """All questions of a broker share what the first one finds."""

    async def scenario(broker, peer) -> None:
        await peer.ask(HELLO * 4)
        sealed = broker.context.topics.find_log("test", 0).segments.first
        assert sealed.size_bytes == 100
        sealed.path.with_suffix(".spans").unlink()
        for start in (25, 50):
            question = b"offset test g 0 %d 2 count=100\r\n" % start
            answer = b"result 200 1 2\r\n%d" % (4 - start // 25)
            assert await peer.ask(question) == answer
        cuts = b"offset test g 0 25 2 boundaries=75,3\r\n"
        assert await peer.ask(cuts) == b"result 200 8 2\r\n25 50 75"
        assert broker.context.made_indexes.made_count == 1

    run(data_dir, scenario, overrides={"maxSegmentSize": "100"})


def test_a_question_about_damage_is_refused(data_dir: Path) -> None:
    """A question about the rest is not."""

    async def scenario(broker, peer) -> None:
        log = broker.context.topics.find_log("test", 0)
        log.on_damage(Damage(Path("x.meta"), Offset(50), Offset(75), "bad checksum"))
        assert b"result 500 " in await peer.ask(COUNT)
        assert b"partition test-0: bad checksum" in await peer.ask(COUNT)
        assert b" [damaged from=50 to=75 file=x.meta why=" in await peer.ask(COUNT)
        for offset, end, count in [(0, 50, 2), (75, 100, 1)]:
            question = b"offset test g 0 %d 2 count=%d\r\n" % (offset, end)
            assert await peer.ask(question) == b"result 200 1 2\r\n%d" % count

    run(data_dir, scenario)


def test_a_bug_is_a_500_with_a_traceback(data_dir: Path, caplog) -> None:
    """It is counted, and the connection goes on."""

    class Buggy(SystemFileSystem):
        def open_read(self, path: Path) -> ReadFile:
            if path.suffix == ".spans":
                raise ZeroDivisionError
            return super().open_read(path)

    async def scenario(broker, peer) -> None:
        assert (await peer.ask(COUNT)).endswith(texts.INTERNAL_ERROR.encode())
        assert broker.context.counters.error_count == 1
        assert "ZeroDivisionError" in caplog.text
        assert (await peer.ask(HELLO)).startswith(b"result 200 ")

    run(data_dir, scenario, fs=Buggy())
