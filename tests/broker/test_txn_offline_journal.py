"""Transactions whose journal could not be opened: what is asked, and what is said."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from metaq.broker.health import Alarm, find_problems
from metaq.broker.jobs import JOURNAL_OPENING_S
from metaq.errors import TransactionError
from metaq.testing.clock import ManualClock
from tests.rigs.broker import Peer, running_broker
from tests.rigs.fs import FaultyFileSystem, keep_all
from tests.rigs.inside import wake_housekeeping
from tests.rigs.waiting import until

DATA = Path("/data")
JOURNAL = DATA / "transactions"
XID = b"XID:1:0a::uq"
COMMANDS = (
    b"transaction null s RECOVER uq 1\r\n",
    b"transaction null s RECOVER 1\r\n",
    b"transaction %b s BEGIN 1\r\n" % XID,
    b"transaction %b s COMMIT_TWO_PHASE 1\r\n" % XID,
    b"transaction %b s FORGET 1\r\n" % XID,
)
GET = b"get test g 0 0 1000 2\r\n"
PUT = b"put test 0 5 0 -1 %b 2\r\nhello" % XID


async def prepare(fs: FaultyFileSystem) -> FaultyFileSystem:
    """Return the disk of a broker that was killed with a transaction prepared."""
    async with running_broker(DATA, fs=fs) as broker, Peer(broker) as peer:
        for words in (COMMANDS[2], PUT, b"transaction %b s PREPARE 1\r\n" % XID):
            assert (await peer.ask(words)).startswith(b"result 200 ")
        return fs.crash(keep_all)


@asynccontextmanager
async def offline_broker(
    disk: FaultyFileSystem, clock: ManualClock, sentence: bytes
) -> AsyncIterator[tuple[Broker, Peer]]:
    """Run a broker that says this sentence, whatever it is asked."""
    async with (
        running_broker(DATA, fs=disk, clock=clock) as broker,
        Peer(broker) as peer,
    ):
        for words in COMMANDS:
            answer = await peer.ask(words)
            assert answer.startswith(b"result 500 "), answer
            assert sentence in answer
        with pytest.raises(TransactionError, match=sentence.decode()):
            broker.context.transactions.views()
        assert Alarm.TRANSACTIONS_OFFLINE in alarms(broker)
        yield broker, peer


def alarms(broker: Broker) -> set[Alarm]:
    return {problem.alarm for problem in find_problems(broker.control.status())}


async def try_again(broker: Broker, clock: ManualClock, *, until_count: int) -> None:
    """Let time pass, and wait until the journal was tried so often."""

    def count() -> int:
        jobs = {job.name: job for job in broker.control.status().jobs}
        return jobs["journal-opening"].run_count

    while count() < until_count:
        before = count()
        clock.advance_s(JOURNAL_OPENING_S)
        wake_housekeeping(broker)
        await until(lambda before=before: count() > before)


def test_a_damaged_journal_is_said_to_everybody_who_asks(fs: FaultyFileSystem) -> None:
    """An empty answer to RECOVER had a transaction manager forget its decision."""

    async def scenario() -> None:
        disk = await prepare(fs)
        disk.unlink(JOURNAL / "redo.1")
        text = b"offline until a restart: journal damaged: file=/data/transactions/redo"
        clock = ManualClock()
        async with offline_broker(disk, clock, text) as (broker, peer):
            await try_again(broker, clock, until_count=3)
            assert text in await peer.ask(COMMANDS[0])

    asyncio.run(scenario())


def test_space_made_later_brings_transactions_back(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a restart; each try is counted, and leaves the files as they were."""

    async def scenario() -> None:
        disk = await prepare(fs)
        before = disk.list_directory(JOURNAL)
        disk.set_capacity(0)
        text, clock = (
            b"transactions are offline until there is free space: ",
            ManualClock(),
        )
        async with offline_broker(disk, clock, text) as (broker, peer):
            await try_again(broker, clock, until_count=3)
            assert set(disk.list_directory(JOURNAL)) == set(before)
            assert text in await peer.ask(COMMANDS[0])
            (job,) = [j for j in broker.control.status().jobs if j.failure_count]
            assert (job.name, job.failure_count) == ("journal-opening", 3)
            disk.set_capacity(1 << 40)
            await try_again(broker, clock, until_count=4)
            assert not {Alarm.TRANSACTIONS_OFFLINE, Alarm.JOB_FAILED} & alarms(broker)
            assert XID in await peer.ask(COMMANDS[0])
            (found,) = broker.context.transactions.views()
            assert found.key == XID.decode()
            assert (await peer.ask(COMMANDS[3])).startswith(b"result 200 ")
            assert b"hello" in await peer.ask(GET)
        async with running_broker(DATA, fs=disk) as broker, Peer(broker) as peer:
            assert b"hello" in await peer.ask(GET)
            assert (await peer.ask(COMMANDS[0])).startswith(b"result 200 0 ")

    asyncio.run(scenario())
    assert caplog.text.count("job failed: job=journal-opening") == 1


def test_a_broker_whose_journal_never_opened_stops_and_gives_it_up(
    fs: FaultyFileSystem,
) -> None:
    """The next start finds what was prepared."""

    async def scenario() -> None:
        disk = await prepare(fs)
        disk.set_capacity(0)
        async with offline_broker(disk, ManualClock(), b"until there is free space"):
            pass
        disk.set_capacity(1 << 40)
        async with running_broker(DATA, fs=disk) as broker, Peer(broker) as peer:
            assert XID in await peer.ask(COMMANDS[0])
        assert not disk.open_paths()

    asyncio.run(scenario())
