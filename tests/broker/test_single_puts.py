"""Single puts of many connections are one append, and each is answered for itself."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from metaq.broker import single_puts
from metaq.broker.app import Broker
from metaq.broker.single_puts import RUN_MAX, SINGLE_OVERHEAD_BYTES, SinglePuts
from metaq.record.checksum import checksum
from metaq.storage.partition_log import PartitionLog
from tests.rigs.broker import Peer, running_broker
from tests.rigs.waiting import until

PAYLOAD = b"hello"


class Session:
    """Session that notes how it was answered."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.is_out = False

    def hold(self, *, count: int, size_bytes: int) -> None:
        raise AssertionError("single puts are held by their session", count, size_bytes)

    def answer(self, replies: bytes, *, count: int, size_bytes: int) -> None:
        assert (count, size_bytes) == (1, SINGLE_OVERHEAD_BYTES + len(PAYLOAD))
        self.replies.append(replies)

    def run_out(self) -> None:
        self.is_out = True


class Rig:
    """Single puts of a broker whose passes end when a test says so."""

    def __init__(self, broker: Broker, log: PartitionLog) -> None:
        self.broker, self.log = broker, log
        self.asked: list[Callable[[], None]] = []
        self.single = SinglePuts(broker.context, self.asked.append)

    def put(self, opaque: int) -> Session:
        session = Session()
        put = (session, PAYLOAD, checksum(PAYLOAD), 0, b"%d" % opaque)
        self.single.add(self.log, put)
        return session

    def end_pass(self) -> None:
        (callback,) = self.asked
        self.asked.clear()
        callback()

    async def until_stored(self, sessions: list[Session]) -> None:
        await until(lambda: all(session.replies for session in sessions))


def run(data: Path, scenario) -> None:
    async def main() -> None:
        async with running_broker(data) as broker, Peer(broker) as peer:
            await peer.ask(b"put test 0 5 0 -1 1\r\nhello")
            log = broker.context.topics.find_log("test", 0)
            assert log is not None
            await scenario(Rig(broker, log))

    asyncio.run(main())


@pytest.mark.parametrize(("count", "appends"), [(1, 1), (5, 1), (RUN_MAX + 1, 2)])
def test_puts_of_one_pass_are_one_append(
    count: int, appends: int, tmp_path: Path
) -> None:
    """Each gets a reply with its own opaque and offset; the disk gets few requests."""

    async def scenario(rig: Rig) -> None:
        before, offset = rig.log.statistics(), rig.log.next_offset
        sessions = [rig.put(100 + k) for k in range(count)]
        assert rig.log.next_offset == offset
        rig.end_pass()
        await rig.until_stored(sessions)
        after = rig.log.statistics()
        assert after.append_count - before.append_count == appends
        assert after.record_count - before.record_count == count
        for number, session in enumerate(sessions):
            (reply,) = session.replies
            assert reply.split()[3] == b"%d" % (100 + number)
            assert int(reply.split()[-1]) == offset + number * (20 + len(PAYLOAD))
        ids = [int(session.replies[0].split()[4]) for session in sessions]
        assert ids == sorted(set(ids))
        assert rig.broker.context.counters.cmd_put == count + 1

    run(tmp_path / "data", scenario)


def test_an_append_in_between_comes_before_them(tmp_path: Path) -> None:
    """Ids and offsets are given out at the end of the pass, so both grow together."""

    async def scenario(rig: Rig) -> None:
        session = rig.put(1)
        async with Peer(rig.broker) as other:
            reply = await other.ask(b"put test 0 5 0 -1 2\r\nhello")
        rig.end_pass()
        await rig.until_stored([session])
        first, second = reply.split(), session.replies[0].split()
        assert int(first[-1]) < int(second[-1])
        assert int(first[4]) < int(second[4])

    run(tmp_path / "data", scenario)


def test_each_is_refused_when_the_log_is(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        sessions = [rig.put(7), rig.put(8)]
        rig.log.begin_close()
        rig.end_pass()
        for opaque, session in zip((b"7", b"8"), sessions, strict=True):
            (reply,) = session.replies
            assert reply.split()[1] == b"500"
            assert reply.split(b"\r\n")[0].endswith(b" " + opaque)
        assert rig.broker.context.counters.put_failed == 2

    run(tmp_path / "data", scenario)


def test_an_error_that_is_a_bug_costs_the_puts_of_its_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are answered; those of another log in the same pass are stored."""

    async def scenario(rig: Rig) -> None:
        broken = rig.put(1)
        async with Peer(rig.broker) as peer:
            await peer.ask(b"put test 1 5 0 -1 1\r\nhello")
        rig.log = rig.broker.context.topics.find_log("test", 1) or rig.log
        whole = rig.put(2)
        append = PartitionLog.append

        def fail_once(log: PartitionLog, *args, **kwargs) -> object:
            if log is not rig.log:
                raise ValueError("a bug")
            return append(log, *args, **kwargs)

        monkeypatch.setattr(PartitionLog, "append", fail_once)
        rig.end_pass()
        assert broken.replies[0].split()[1] == b"500"
        await rig.until_stored([whole])
        assert whole.replies[0].split()[1] == b"200"
        assert "puts failed: partition=test-0 count=1" in caplog.text

    run(tmp_path / "data", scenario)


def lack(*_arguments: object, **_more: object) -> None:
    """Find no memory."""
    raise MemoryError


def test_what_finds_no_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the run is stored, and its connections go on."""

    async def scenario(rig: Rig) -> None:
        monkeypatch.setattr(single_puts, "count_puts", lack)
        offset, sessions = rig.log.next_offset, [rig.put(7), rig.put(8)]
        rig.end_pass()
        assert rig.log.next_offset == offset
        for session in sessions:
            (reply,) = session.replies
            assert reply.startswith(b"result 500 ")
            assert b"no memory to append 2 messages" in reply
        assert not any(session.is_out for session in sessions)

    run(tmp_path / "data", scenario)


def test_without_memory_for_a_refusal_each_connection_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays in flight."""

    async def scenario(rig: Rig) -> None:
        for name in ("count_puts", "refuse_put"):
            monkeypatch.setattr(single_puts, name, lack)
        sessions = [rig.put(7), rig.put(8)]
        rig.end_pass()
        assert all(session.is_out for session in sessions)
        assert [session.replies for session in sessions] == [[b""], [b""]]

    run(tmp_path / "data", scenario)


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_reply_without_memory_ends_its_connection_alone(
    is_stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the run are answered, and nothing stays in flight."""
    name = "encode_put_replies_apart" if is_stored else "encode_result"
    encode, calls = getattr(single_puts, name), list[object]()

    def lack_some(*arguments: object) -> object:
        # All replies at once, or two of three by themselves.
        calls.append(arguments)
        if len(calls) - is_stored in (0, 2, 3):
            raise MemoryError
        return encode(*arguments)

    async def scenario(rig: Rig) -> None:
        monkeypatch.setattr(single_puts, name, lack_some)
        sessions = [rig.put(7), rig.put(8), rig.put(9)]
        if not is_stored:
            rig.log.begin_close()
        rig.end_pass()
        await rig.until_stored(sessions)
        first, *others = sessions
        assert first.replies[0].split()[1] == (b"200" if is_stored else b"500")
        assert [each.is_out for each in sessions] == [False, True, True]
        assert [each.replies for each in others] == [[b""], [b""]]

    run(tmp_path / "data", scenario)
