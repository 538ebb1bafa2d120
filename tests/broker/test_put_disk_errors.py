"""Errors that clients and operators see when the disk fails."""

import asyncio
import errno
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from metaq.broker.health import Alarm, find_problems
from metaq.client import AsyncClient
from metaq.client.errors import OutcomeUnknownError
from metaq.client.produce.ordered_producer import Spooled
from metaq.errors import ServerError
from metaq.fs import AppendFile, FileSystem, ReadFile, SystemFileSystem
from metaq.fs.calls import LinuxCalls
from metaq.protocol.texts import DAMAGED, split_code
from metaq.testing.clock import ManualClock
from tests.rigs.broker import CONFIG, Peer, running_broker
from tests.rigs.fs import FaultyFileSystem, Operation
from tests.rigs.inside import check_sessions
from tests.rigs.waiting import until

HELLO = b"put test 0 5 0 907060870 1\r\nhello"
DATA = Path("/data")
WAIT_S = 60.0
GET = b"get test g 0 0 1000 2\r\n"


def run(scenario, fs: FaultyFileSystem, overrides=None) -> None:
    async def main() -> None:
        async with running_broker(DATA, overrides, fs=fs) as broker:
            await scenario(broker)

    asyncio.run(main())


def fail_syncs(fs: FaultyFileSystem) -> None:
    """Make every sync of a file fail from now on."""

    def fail(operation: Operation) -> None:
        if operation.name == "write":
            # The call behind the write is its sync.
            fs.fail_at(operation.number + 1, errno.EIO)

    fs.on_call(fail)


def test_a_failed_sync_is_500_for_every_waiter_and_for_ever(
    fs: FaultyFileSystem,
) -> None:
    """Fault 16: nothing is acknowledged that the disk does not have; status says so."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")
            fail_syncs(fs)
            answer = await peer.ask(HELLO * 20)
            assert answer.count(b"result 500 ") == 20
            assert answer.count(b": outcome unknown [in-doubt]") == 20
            fs.on_call(None)
            answer = await peer.ask(HELLO)
            assert b"failed.Detail:data directory is offline until a restart" in answer
            assert b"/data" in answer
            assert broker.context.counters.put_failed == 21
            (directory,) = broker.control.status().directories
            assert directory.offline_cause is not None
            rejections = broker.control.status().commands.rejections
            assert rejections["offline"] + rejections.get("other", 0) == 21
            assert (await peer.ask(b"version 1\r\n")).startswith(b"result 200 ")

    run(scenario, fs)


class CallsThatFail(LinuxCalls):
    """A kernel whose syncs fail from a moment on."""

    is_failing = False

    def fdatasync(self, fd: int, /) -> None:  # type: ignore[override]
        if self.is_failing:
            raise OSError(errno.EIO, "the bytes stay in the page cache")
        os.fdatasync(fd)


@pytest.mark.slow
def test_a_put_whose_sync_failed_may_be_found_by_the_restart(tmp_path: Path) -> None:
    """The sender hears that it is in doubt; later puts are certainly not stored."""
    calls = CallsThatFail()

    async def send() -> None:
        async with (
            running_broker(tmp_path / "data", fs=FileSystem(calls)) as broker,
            AsyncClient(brokers=[f"127.0.0.1:{broker.port}"]) as client,
            client.producer() as producer,
        ):
            await producer.send("test", b"synced", partition="0-0")
            calls.is_failing = True
            with pytest.raises(OutcomeUnknownError, match="outcome unknown"):
                await producer.send("test", b"written", partition="0-0")
            with pytest.raises(ServerError, match="offline until a restart"):
                await producer.send("test", b"refused", partition="0-0")

    async def look() -> list[bytes]:
        async with (
            running_broker(tmp_path / "data") as broker,
            AsyncClient(brokers=[f"127.0.0.1:{broker.port}"]) as client,
        ):
            return [message.data async for message in client.browse("test")]

    asyncio.run(send())
    assert asyncio.run(look()) == [b"synced", b"written"]


def test_no_space_refuses_puts_and_serves_gets_and_passes(fs: FaultyFileSystem) -> None:
    """Fault 12: 500 that says so, gets go on, puts go on when there is room again."""

    async def scenario(broker) -> None:
        async with Peer(broker) as peer:
            first = await peer.ask(HELLO)
            fs.set_capacity(0)
            answer = await peer.ask(HELLO * 3)
            assert answer.count(b"result 500 ") == 3
            assert b"failed.Detail:no room: " in answer
            assert answer.count(b" [no-room]") == 3
            assert (await peer.ask(GET)).startswith(b"value 25 2\r\n")
            fs.set_capacity(1 << 40)
            assert (await peer.ask(HELLO)).endswith(b" 0 25")
            assert first.startswith(b"result 200 ")
            assert broker.control.status().commands.rejections == {"no_space": 3}

    run(scenario, fs, {"freeBytesMin": "0"})


@pytest.mark.slow
def test_clients_wait_for_room_or_spool(fs: FaultyFileSystem, tmp_path: Path) -> None:
    """A full disk is an outage that passes: a send waits, order goes to the spool."""

    async def scenario(broker) -> None:
        rejections = broker.context.counters.rejections
        async with (
            AsyncClient(brokers=[f"127.0.0.1:{broker.port}"]) as client,
            client.producer(timeout_s=30) as producer,
            client.ordered_producer("meta-test", ["0-0"], tmp_path) as ordered,
        ):
            fs.set_capacity(0)
            waiting = await producer.send_nowait("test", b"x", partition="0-0")
            spooled = None
            while spooled is None:
                # The attempt that is under way at the end of the time is refused.
                with suppress(OutcomeUnknownError):
                    spooled = await ordered.send(b"y", timeout=2)
            assert isinstance(spooled, Spooled)
            await until(lambda: rejections["no_space"] >= 2)
            fs.set_capacity(1 << 40)
            assert (await waiting).offset == 0
            await until(lambda: not any(ordered.statistics().waiting.values()))

    run(scenario, fs, {"freeBytesMin": "0"})


def test_a_damaged_partition_refuses_and_the_others_serve(tmp_path: Path) -> None:
    """Fault 7: the answer names file, offset and next good offset."""
    data = tmp_path / "data"

    async def write() -> None:
        async with running_broker(data) as broker, Peer(broker) as peer:
            await peer.ask(HELLO * 10)
            await peer.ask(HELLO.replace(b"test", b"meta-test"))

    asyncio.run(write())
    segment = data / "test-0" / f"{0:020}.meta"
    raw = bytearray(segment.read_bytes())
    raw[3 * 25 + 22] ^= 1
    segment.write_bytes(raw)

    async def read() -> None:
        async with running_broker(data) as broker, Peer(broker) as peer:
            answer = await peer.ask(HELLO)
            assert answer.startswith(b"result 500 ")
            assert segment.name.encode() in answer
            assert b"offset=75" in answer
            assert b"next_good_offset=100" in answer
            assert (await peer.ask(GET)).startswith(b"value 75 2\r\n")
            inside = await peer.ask(b"get test g 0 80 1000 2\r\n")
            assert inside.startswith(b"result 500 ")
            text, code = split_code(inside.decode())
            assert code is not None
            assert (code.word, code.number("from"), code.number("to")) == (
                DAMAGED,
                75,
                100,
            )
            assert code.values["file"] == str(segment)
            assert code.values["why"] in text
            behind = await peer.ask(b"get test g 0 100 1000 2\r\n")
            assert behind.startswith(b"value 150 2\r\n")
            assert broker.control.status().commands.rejections == {"damaged": 1}
            other = await peer.ask(HELLO.replace(b"test", b"meta-test"))
            assert other.startswith(b"result 200 ")
            damaged = [log for log in broker.control.status().logs if log.damage]
            assert [str(log.log_id) for log in damaged] == ["test-0"]

    asyncio.run(read())


@pytest.mark.slow
def test_a_segment_from_a_good_copy_ends_the_damage(tmp_path: Path) -> None:
    """As docs/operations.md says: with its spans, while the broker is down."""
    data, backup = tmp_path / "data", tmp_path / "backup"

    async def write() -> None:
        settings = {"maxSegmentSize": "100"}
        async with running_broker(data, settings) as broker, Peer(broker) as peer:
            for _ in range(12):
                assert (await peer.ask(HELLO)).startswith(b"result 200 ")

    async def check(*, is_stopped: bool) -> None:
        settings = {"scrubBytesPerS": "10485760", "maxSegmentSize": "100"}
        async with running_broker(data, settings) as broker, Peer(broker) as peer:

            def is_over() -> bool:
                scrub = broker.control.status().scrub
                return scrub is not None and scrub.passes > 0

            await until(is_over)
            problems = find_problems(broker.control.status())
            assert [each.alarm for each in problems] == [Alarm.LOG_STOPPED] * is_stopped
            is_taken = (await peer.ask(HELLO)).startswith(b"result 200 ")
            assert is_taken != is_stopped

    asyncio.run(write())
    shutil.copytree(data, backup, ignore=shutil.ignore_patterns("*.sock"))
    first = data / "test-0" / f"{0:020}.meta"
    raw = bytearray(first.read_bytes())
    raw[30] ^= 1
    first.write_bytes(raw)
    asyncio.run(check(is_stopped=True))
    for name in (first.name, first.with_suffix(".spans").name):
        shutil.copy(backup / "test-0" / name, first.with_name(name))
    asyncio.run(check(is_stopped=False))


@pytest.mark.parametrize("interval", ["0", "-5"])
def test_without_an_interval_every_write_is_synced(
    tmp_path: Path, interval: str
) -> None:
    """As in MetaQ: what is older than no time at all is to be synced."""
    overrides = {"unflushThreshold": "1000", "unflushInterval": interval}

    async def scenario() -> None:
        async with (
            running_broker(tmp_path / "data", overrides) as broker,
            Peer(broker) as peer,
        ):
            for count in (1, 2, 3):
                assert (await peer.ask(HELLO)).startswith(b"result 200 ")
                log = broker.context.topics.find_log("test", 0)
                assert log.high_watermark == 25 * count
            assert b"durability synced-before-ack" in await peer.ask(b"stats\r\n")

    asyncio.run(scenario())


def test_threshold_mode_acknowledges_first_and_shows_it(tmp_path: Path) -> None:
    """unflushThreshold=1000: acknowledged at once, readable after the interval."""
    overrides = {"unflushThreshold": "1000", "unflushInterval": "30"}

    async def scenario() -> None:
        async with (
            running_broker(tmp_path / "data", overrides) as broker,
            Peer(broker) as peer,
        ):
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")
            assert b"durability synced-later after 1000 messages or 30 ms" in (
                await peer.ask(b"stats\r\n")
            )
            log = broker.context.topics.find_log("test", 0)
            await until(lambda: log.high_watermark == 25)

    asyncio.run(scenario())


class HangingDisk(SystemFileSystem):
    """Opening a file of one directory to read it takes until the test lets it."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self.is_hanging = threading.Event()
        self.may_go_on = threading.Event()
        self.hangs_in_writes = False

    def open_append(
        self, path: Path, *, create: bool, is_synced: bool = True
    ) -> AppendFile:
        if self.hangs_in_writes:
            self.is_hanging.set()
            assert self.may_go_on.wait(WAIT_S)
        return super().open_append(path, create=create, is_synced=is_synced)

    def open_read(self, path: Path) -> ReadFile:
        if path.is_relative_to(self._directory):
            self.is_hanging.set()
            assert self.may_go_on.wait(WAIT_S)
        return super().open_read(path)


def test_gets_from_a_disk_that_hangs_hold_up_nothing_else(tmp_path: Path) -> None:
    """Others on the loop, and gets of another directory, go on; then they do."""
    text = CONFIG.replace("[topic=meta-test]", "[topic=meta-test]\ndataPath={other}")
    text = text.replace("{other}", str(tmp_path / "other"))
    disk = HangingDisk(tmp_path / "other" / "meta-test-0")

    async def scenario() -> None:
        async with (
            running_broker(tmp_path / "data", fs=disk, text=text) as broker,
            Peer(broker) as one,
            Peer(broker) as two,
            Peer(broker) as three,
            Peer(broker) as other,
        ):
            await one.ask(HELLO + HELLO.replace(b"test", b"meta-test"))
            hanging = (one, two, three)
            for peer in hanging:
                await peer.send(GET.replace(b"test", b"meta-test"))
            await asyncio.to_thread(disk.is_hanging.wait, WAIT_S)
            assert (await other.ask(GET)).startswith(b"value 25 2\r\n")
            assert (await other.ask(HELLO)).startswith(b"result 200 ")
            disk.may_go_on.set()
            for peer in hanging:
                assert (await peer.read_some()).startswith(b"value 25 2\r\n")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "command",
    [GET, HELLO.replace(b"test 0", b"test 1"), HELLO.replace(b"test 0", b"test 1") * 9],
    ids=["get", "put", "as much as may be in flight"],
)
def test_who_gives_up_on_a_disk_that_hangs_leaves_no_connection(
    tmp_path: Path, command: bytes
) -> None:
    """Clients that come again and again would take every connection there is."""
    disk = HangingDisk(tmp_path / "data" / "test-0")

    async def scenario() -> None:
        clock = ManualClock()
        bounds = ("payloadBytesMax", "batchBytesMax", "connectionInFlightBytesMax")
        settings = {"idleTimeoutMs": "100000", **dict.fromkeys(bounds, "200")}
        async with (
            running_broker(tmp_path / "data", settings, fs=disk, clock=clock) as broker,
            Peer(broker) as peer,
        ):
            await peer.ask(HELLO)
            disk.hangs_in_writes = True
            await peer.send(command)
            await asyncio.to_thread(disk.is_hanging.wait, WAIT_S)
            peer.writer.write_eof()

            def is_gone() -> bool:
                clock.advance_s(60)
                check_sessions(broker)
                return not broker.sessions

            await until(is_gone)
            disk.may_go_on.set()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_get_of_a_segment_that_is_gone_skips_nothing(
    tmp_path: Path, *, is_reported: bool
) -> None:
    """It is told the log start where that is known, and else which file is missing."""
    data = tmp_path / "data"
    disk = HangingDisk(data / "test-0")

    async def scenario() -> None:
        async with (
            running_broker(data, {"maxSegmentSize": "50"}, fs=disk) as broker,
            Peer(broker) as peer,
        ):
            for _ in range(5):
                await peer.ask(HELLO)
            log = broker.context.topics.find_log("test", 0)
            first = log.segments.first
            await peer.send(GET)
            await asyncio.to_thread(disk.is_hanging.wait, WAIT_S)
            first.path.unlink()
            if is_reported:
                log.on_removed(first, 2)
            disk.may_go_on.set()
            answer = await peer.read_some()
            if is_reported:
                assert answer == b"result 301 2 2\r\n50"
            else:
                assert answer.startswith(b"result 500 ")
                assert f"open failed: path={first.path} error=ENOENT".encode() in answer
            assert broker.context.counters.get_failed == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_sealed_segment_that_is_cut_fails_its_gets_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_open: bool, is_removed: bool
) -> None:
    """The get says what is lost, the connection lives, status and health tell of it."""

    async def scenario() -> None:
        async with (
            running_broker(tmp_path, {"maxSegmentSize": "50"}) as broker,
            Peer(broker) as peer,
        ):
            for _ in range(7):
                assert (await peer.ask(HELLO)).startswith(b"result 200 ")
            if is_open and not is_removed:
                answer = await peer.ask(b"get test g 0 50 1000 2\r\n")
                assert answer.startswith(b"value 50 2\r\n")
            segment = tmp_path / "test-0" / f"{50:020d}.meta"
            lost = 50
            if is_removed:
                segment.unlink()
            else:
                lost = 75
                with segment.open("r+b") as file:
                    file.truncate(lost - 50 + 10)
                answer = await peer.ask(b"get test g 0 50 1000 2\r\n")
                assert answer.startswith(b"result 500 ")
                assert b"file ends within the range" in answer
                answer = await peer.ask(b"get test g 0 50 1000 2\r\n")
                assert answer.startswith(b"value 25 2\r\n")
            told = f"offset={lost} next_good_offset=100".encode()
            for offset in (lost, 99):
                answer = await peer.ask(b"get test g 0 %d 1000 2\r\n" % offset)
                assert answer.startswith(b"result 500 ")
                assert told in answer
            for offset in (0, 100):
                answer = await peer.ask(b"get test g 0 %d 1000 2\r\n" % offset)
                assert answer.startswith(b"value 50 2\r\n")
            status = broker.control.status()
            (damage,) = status.logs[0].damage
            assert damage.encode().endswith(told)
            assert Alarm.LOG_STOPPED in {each.alarm for each in find_problems(status)}
            assert caplog.text.count("log stopped: ") == 1

    asyncio.run(scenario())


def test_a_cold_range_that_the_disk_does_not_give_is_told_with_its_file(
    tmp_path: Path,
) -> None:
    """The connection goes on, and so do puts."""

    class Broken(LinuxCalls):
        def is_cached(self, *_range: int) -> bool:
            return False

        def warm(self, *_range: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

    async def scenario() -> None:
        disk = FileSystem(Broken())
        async with running_broker(tmp_path, fs=disk) as broker, Peer(broker) as peer:
            await peer.ask(HELLO)
            answer = await peer.ask(GET)
            assert answer.startswith(b"result 500 ")
            file = tmp_path / "test-0" / f"{0:020d}.meta"
            assert f"read failed: path={file} error=EIO".encode() in answer
            assert (await peer.ask(HELLO)).startswith(b"result 200 ")

    asyncio.run(scenario())


def test_a_file_that_is_cut_behind_its_header_ends_that_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reply cannot be mended; the damage is recorded, and told once."""

    class Late(LinuxCalls):
        def is_cached(self, *_range: int) -> bool:
            return True

    async def scenario() -> None:
        async with running_broker(
            tmp_path, {"maxSegmentSize": "50"}, fs=FileSystem(Late())
        ) as broker:
            async with Peer(broker) as peer:
                for _ in range(5):
                    await peer.ask(HELLO)
                await peer.ask(GET)
                with (tmp_path / "test-0" / f"{0:020d}.meta").open("r+b") as file:
                    file.truncate(0)
                assert await peer.ask(GET) == b"value 50 2\r\n"
                assert peer.is_closed()
            async with Peer(broker) as peer:
                answer = await peer.ask(GET)
                assert b"offset=0 next_good_offset=50" in answer
            assert caplog.text.count("log stopped: ") == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["spans", "producers"])
@pytest.mark.parametrize("fate", ["garbage", "directory", "pipe"])
def test_a_side_file_that_cannot_be_read_is_as_good_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, fate: str
) -> None:
    """One line tells it; this partition goes on, and so do all others."""

    async def scenario() -> None:
        async with running_broker(tmp_path) as broker, Peer(broker) as peer:
            answer = await peer.ask(HELLO)
            assert answer.startswith(b"result 200 ")

    asyncio.run(scenario())
    directory = tmp_path / "test-0"
    path = directory / (f"{0:020d}.spans" if name == "spans" else name)
    path.unlink(missing_ok=True)
    if fate == "garbage":
        path.write_bytes(b"garbage" * 20)
    elif fate == "directory":
        (path / "of somebody").mkdir(parents=True)
    else:
        os.mkfifo(path)
    asyncio.run(scenario())
    asyncio.run(scenario())
    assert (directory / f"{0:020d}.meta").stat().st_size == 75
    assert str(path) in caplog.text
    if fate == "directory":
        assert (directory / f"{path.name}.aside" / "of somebody").is_dir()
        assert caplog.text.count("directory moved aside") == 1


def test_a_pipe_in_the_place_of_a_segment_refuses_one_partition(tmp_path: Path) -> None:
    """The start does not wait for its writer; the others are served."""
    (tmp_path / "test-0").mkdir()
    os.mkfifo(tmp_path / "test-0" / f"{0:020d}.meta")

    async def scenario() -> None:
        async with running_broker(tmp_path) as broker, Peer(broker) as peer:
            answer = await peer.ask(HELLO)
            assert b"segment is not a file" in answer
            answer = await peer.ask(HELLO.replace(b"test 0", b"test 1"))
            assert answer.startswith(b"result 200 ")

    asyncio.run(scenario())
