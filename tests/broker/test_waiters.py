"""Gets that wait for data: how each wait ends, and what it answers."""

import asyncio
from pathlib import Path

import pytest

from metaq.broker import session
from metaq.broker.orders import perform
from metaq.fs import FileSystem
from metaq.fs.calls import LinuxCalls
from metaq.protocol import texts
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

PUT = b"put test 0 5 0 907060870 1\r\nhello"
NOTHING_AT_25 = b"result 404 37 9\r\nCould not find message at position 25"


def run(data: Path, scenario, overrides=None) -> None:
    async def main() -> None:
        async with running_broker(data, overrides) as broker:
            await scenario(broker)

    asyncio.run(main())


async def begin(broker, peer: Peer, request: bytes) -> None:
    """Send a get and wait until it has begun to wait; a short wait may be over."""
    waiters, has_begun = broker.context.waiters, asyncio.Event()
    add = waiters.add

    def note(*args, **named) -> None:
        add(*args, **named)
        has_begun.set()

    waiters.add = note
    peer.write(request)
    async with asyncio.timeout(30):
        await has_begun.wait()
    waiters.add = add


def test_a_wait_ends_with_the_data(data_dir: Path) -> None:
    """A put wakes the get that waits at the end of its log, within the commit."""

    async def scenario(broker) -> None:
        async with Peer(broker) as reader, Peer(broker) as writer:
            await writer.ask(PUT)
            await begin(broker, reader, b"get test g 0 25 1024 9 wait=30000\r\n")
            await writer.ask(PUT)
            answer = await reader.read_some()
            assert answer.startswith(b"value 25 9\r\n")
            assert answer.endswith(b"hello")
            assert broker.context.waiters.count == 0

    run(data_dir, scenario)


def test_a_wait_for_a_log_that_does_not_exist_ends_with_its_first_put(
    data_dir: Path,
) -> None:
    """A consumer may come before the first producer."""

    async def scenario(broker) -> None:
        async with Peer(broker) as reader, Peer(broker) as writer:
            await begin(broker, reader, b"get wild-new g 0 0 1024 9 wait=30000\r\n")
            await writer.ask(PUT.replace(b"test", b"wild-new"))
            assert (await reader.read_some()).startswith(b"value 25 9\r\n")

    run(data_dir, scenario)


def test_a_bug_at_the_end_of_a_wait_is_a_500_with_a_traceback(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The waiting client hears of it; it is counted, and the connection goes on."""

    def fail(*_args: object, **_more: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(session, "answer_get", fail)

    async def scenario(broker) -> None:
        async with Peer(broker) as reader:
            await reader.ask(PUT)
            await begin(broker, reader, b"get test g 0 25 1024 9 wait=20\r\n")
            answer = await reader.read_some()
            assert answer.startswith(b"result 500 ")
            assert answer.endswith(texts.INTERNAL_ERROR.encode())
            assert broker.context.counters.error_count == 1
            assert "ZeroDivisionError" in caplog.text
            assert (await reader.ask(PUT)).startswith(b"result 200 ")

    run(data_dir, scenario)


def test_a_wait_ends_when_its_time_is_over(data_dir: Path) -> None:
    """Then the answer is what it would have been without a wait."""

    async def scenario(broker) -> None:
        async with Peer(broker) as reader:
            await reader.ask(PUT)
            await begin(broker, reader, b"get test g 0 25 1024 9 wait=20\r\n")
            assert await reader.read_some() == NOTHING_AT_25
            assert broker.context.counters.get_miss == 1
            assert broker.context.counters.cmd_get == 1

    run(data_dir, scenario)


def test_a_wish_is_cut_to_the_longest_wait(data_dir: Path) -> None:
    """waitMsMax bounds every wait."""

    async def scenario(broker) -> None:
        async with Peer(broker) as reader:
            await reader.ask(PUT)
            await begin(broker, reader, b"get test g 0 25 1024 9 wait=2147483647\r\n")
            assert await reader.read_some() == NOTHING_AT_25

    run(data_dir, scenario, {"waitMsMax": "20"})


def test_one_wait_too_many_is_answered_at_once(data_dir: Path) -> None:
    """waitersMax bounds their number; nothing is refused, it only does not wait."""

    async def scenario(broker) -> None:
        async with Peer(broker) as first, Peer(broker) as second:
            await first.ask(PUT)
            await begin(broker, first, b"get test g 0 25 1024 8 wait=30000\r\n")
            answer = await second.ask(b"get test g 0 25 1024 9 wait=30000\r\n")
            assert answer == NOTHING_AT_25

    run(data_dir, scenario, {"waitersMax": "1"})


def test_closing_the_partition_ends_its_waits(data_dir: Path) -> None:
    """A wait on a closed partition is answered 403."""

    async def scenario(broker) -> None:
        async with Peer(broker) as reader:
            await reader.ask(PUT)
            await begin(broker, reader, b"get test g 0 25 1024 9 wait=30000\r\n")
            order = {"command": "close_partitions", "topic": "test", "end": 0}
            await perform(broker.control, order)
            answer = await reader.read_some()
            assert answer == b"result 403 30 9\r\nPartition[0-0] has been closed"

    run(data_dir, scenario)


def test_the_end_of_the_connection_ends_its_waits(data_dir: Path) -> None:
    """A consumer that is gone leaves no waiter and no timer behind."""

    async def scenario(broker) -> None:
        async with Peer(broker) as reader:
            await reader.ask(PUT)
            await begin(broker, reader, b"get test g 0 25 1024 9 wait=30000\r\n")
        await until(lambda: not broker.sessions)
        assert broker.context.waiters.count == 0
        log = broker.context.topics.find_log("test", 0)
        assert log.statistics().waiter_count == 0

    run(data_dir, scenario)


def test_a_stop_answers_every_wait(data_dir: Path) -> None:
    """SIGTERM: who waits is answered before the connection is closed."""

    async def scenario(broker) -> None:
        reader = await Peer(broker).__aenter__()
        await reader.ask(PUT)
        await begin(broker, reader, b"get test g 0 25 1024 9 wait=30000\r\n")
        stopping = asyncio.create_task(broker.stop())
        assert await reader.read_some() == NOTHING_AT_25
        assert await reader.read_some() == b""
        await reader.__aexit__()
        await stopping

    run(data_dir, scenario)


@pytest.mark.parametrize("offset", [b"26", b"-1", b"9223372036854775807"])
def test_only_the_end_of_a_log_is_waited_for(data_dir: Path, offset: bytes) -> None:
    """An offset outside the log is answered at once: the consumer must move."""

    async def scenario(broker) -> None:
        async with Peer(broker) as reader:
            await reader.ask(PUT)
            request = b"get test g 0 %b 1024 9 wait=30000\r\n" % offset
            assert (await reader.ask(request)).startswith(b"result 301 ")

    run(data_dir, scenario)


def test_waits_do_not_hold_up_other_commands(data_dir: Path) -> None:
    """Commands behind a waiting get on the same connection are answered."""

    async def scenario(broker) -> None:
        async with Peer(broker) as reader:
            await reader.ask(PUT)
            await begin(broker, reader, b"get test g 0 25 1024 9 wait=30000\r\n")
            reader.writer.write(b"version 3\r\n")
            assert (await reader.read_some()).startswith(b"result 200 ")
            assert broker.context.waiters.count == 1

    run(data_dir, scenario)


def test_what_ends_a_wait_leaves_in_the_call_that_tells_of_it(
    data_dir: Path, monkeypatch
) -> None:
    """Neither the put nor the get waits for the end of a turn, or asks the cache.

    Both are on one connection: a get that waits does not hold up the reply to a put.
    """

    asked = []

    class Kernel(LinuxCalls):
        def is_cached(self, *place: int) -> bool:
            asked.append(place)
            return super().is_cached(*place)

    def refuse(*_args, **_kwargs) -> None:
        raise AssertionError("nothing here is queued")

    async def scenario() -> None:
        kernel = FileSystem(Kernel())
        async with running_broker(data_dir, fs=kernel) as broker, Peer(broker) as peer:
            await peer.ask(PUT)
            # The first get of a segment opens its file.
            await peer.ask(b"get test g 0 0 1024 8\r\n")
            await begin(broker, peer, b"get test g 0 25 1024 9 wait=30000\r\n")
            question_count = len(asked)
            monkeypatch.setattr("metaq.net.channel.Channel._flush_soon", refuse)
            peer.writer.write(PUT)
            got = b""
            while not got.endswith(b"hello"):
                got += await peer.read_some()
            assert got.startswith(b"result 200 ")
            assert b"value 25 9\r\n" in got
            assert len(asked) == question_count

    asyncio.run(scenario())
