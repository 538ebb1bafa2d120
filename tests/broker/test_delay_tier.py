"""One tier: files of sealed segments, trimming, and what is made again."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.delay_tier import KEPT_S
from metaq.broker.dispatch import dispatch
from metaq.delay.due_index import DUE_SUFFIX
from metaq.protocol.commands import ListScheduled
from tests.broker.delay_rig import AtOnce, DelayRig, FakeSession, result_of
from tests.rigs.fs import FaultyFileSystem, keep_all


def index_files(fs: FaultyFileSystem, tier: int = 0) -> list[Path]:
    directory = Path(f"/data/__delays-{tier}")
    names = fs.names_in(directory)
    return [directory / name for name in names if name.endswith(DUE_SUFFIX)]


async def scheduled(rig: DelayRig, count: int, delay_ms: int = 1000) -> list[bytes]:
    """Schedule messages with delays up to a second more; return their data."""
    datas = [b"%d:" % number + b"x" * 60 for number in range(count)]
    for number, data in enumerate(datas):
        due_ms = rig.now_ms + delay_ms + 17 * number % 1000
        await rig.schedule(data, due_ms=due_ms)
    return datas


@pytest.mark.parametrize("what", ["kept", "removed", "cut", "damaged", "of another"])
def test_an_index_file_never_changes_what_is_delivered(what: str) -> None:
    """One that is not right is made again, also where that is seen only later."""

    async def main() -> None:
        rig = await DelayRig().start()
        datas = await scheduled(rig, 60)
        await rig.tick()
        files = index_files(rig.fs)
        assert len(files) > 2
        for path in files:
            data = rig.fs.content(path)
            match what:
                case "removed":
                    rig.fs.discard(path)
                case "cut":
                    rig.fs.write_atomically(path, data[:-1])
                case "damaged":
                    rig.fs.flip_bit(path, 8 * (len(data) - 3))
                case "of another":
                    rig.fs.write_atomically(path, rig.fs.content(files[-1]))
        if what != "damaged":
            rig = await rig.again()
        await rig.pass_s(5.0)
        await rig.pass_s(11.0)  # a tier that could not be read is read again
        assert sorted(rig.payloads()) == sorted(datas)
        assert rig.is_healthy
        await rig.kill()

    asyncio.run(main())


class Held(AtOnce):
    """Threads that do nothing before they are told to."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []
        self.makings: list[Future[Any]] = []

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.makings.append(done)
        self.works.append(lambda: done.set_result(work(*args, **kwargs)))
        return done


def test_what_is_due_waits_for_no_index_file() -> None:
    """It is in memory until then; the file has what the segment says."""

    async def main() -> None:
        rig = await DelayRig().start()
        threads, rig.context.upkeep = rig.context.upkeep, (held := Held())
        datas = await scheduled(rig, 60)
        await rig.pass_s(1.5)
        half = rig.payloads()
        assert 0 < len(half) < len(datas)
        assert index_files(rig.fs) == []
        rig.context.upkeep = threads
        for work in held.works:
            work()
        await rig.tick()
        contents = {path: rig.fs.content(path) for path in index_files(rig.fs)}
        assert len(contents) > 2
        for path in contents:
            rig.fs.discard(path)
        rig = await rig.again()  # which reads the segments
        assert contents == {each: rig.fs.content(each) for each in contents}
        assert rig.payloads() == half
        await rig.pass_s(1.0)
        assert sorted(rig.payloads()) == sorted(datas)
        await rig.kill()

    asyncio.run(main())


def test_an_index_file_that_was_not_made_is_named_when_its_tier_is_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is made then, and the failure is in the log."""

    async def main() -> None:
        rig = await DelayRig().start()
        threads, rig.context.upkeep = rig.context.upkeep, (held := Held())
        datas = await scheduled(rig, 60)
        await rig.tick()
        assert index_files(rig.fs) == []
        tier = rig.service.tiers[0]
        for making in held.makings:
            making.set_exception(OSError("no space for an index"))
        rig.context.upkeep = threads
        tier.unload()
        await rig.pass_s(5.0)
        assert "partition=__delays-0 error=no space for an index" in caplog.text
        assert len(index_files(rig.fs)) > 2
        assert sorted(rig.payloads()) == sorted(datas)
        assert rig.is_healthy
        await rig.kill()

    asyncio.run(main())


def test_what_is_due_waits_for_nothing_that_comes_meanwhile() -> None:
    """However much is scheduled."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"due", due_ms=rig.now_ms + 100)
        rig.clock.advance_s(0.2)
        tick = asyncio.ensure_future(rig.tick())
        number = 0
        while not tick.done() and number < 5000:
            later_ms = rig.now_ms + 60_000
            each = [rig.schedule(b"%d" % n, due_ms=later_ms) for n in range(5)]
            await asyncio.gather(*each)
            number += 5
        assert number < 5000
        assert rig.payloads() == [b"due"]
        await rig.kill()

    asyncio.run(main())


def test_a_listing_has_what_was_answered_before_it() -> None:
    """Also where that came in the middle of a look, behind what it takes in."""

    async def main() -> None:
        rig = await DelayRig().start()
        for data in (b"a", b"b", b"c"):
            await rig.schedule(data, due_ms=rig.now_ms + 60_000)
        tick = asyncio.ensure_future(rig.service.tick())
        await asyncio.sleep(0)
        await rig.schedule(b"d", due_ms=rig.now_ms + 60_000)
        assert not tick.done()
        session: Any = FakeSession(rig.context)
        assert not dispatch(ListScheduled("test", 9, 1), session)
        await asyncio.sleep(0)
        await tick
        for _ in range(9):
            await asyncio.sleep(0)
        assert not session.replies
        await rig.tick()
        while not session.replies:
            await asyncio.sleep(0)
        assert json.loads(result_of(session.replies[0]).body)["count"] == 4
        await rig.kill()

    asyncio.run(main())


def test_segments_go_when_nothing_waits_in_them() -> None:
    """Not at once: a batch may be sent again; and a long delay keeps no other tier."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"far", due_ms=rig.now_ms + 90 * 86_400_000)
        datas = await scheduled(rig, 60)
        await rig.pass_s(2.0)
        log = rig.service.tiers[0].log
        assert log is not None
        rig.trim()
        assert log.log_start_offset == 0
        rig.clock.advance_s(KEPT_S)
        rig.trim()
        assert log.log_start_offset == log.segments.active.base_offset > 0
        rig.trim()
        assert index_files(rig.fs) == []
        assert sorted(rig.payloads()) == sorted(datas)
        rig = await rig.again()
        await rig.pass_s(91 * 86_400.0)
        assert b"far" in rig.payloads()
        await rig.kill()

    asyncio.run(main())


def test_a_segment_stays_while_one_message_waits_in_it() -> None:
    """The first of a tier keeps those after it, and goes last."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"first", due_ms=rig.now_ms + 3_000_000)
        await scheduled(rig, 60)
        await rig.pass_s(2.0)
        rig.trim()
        rig.clock.advance_s(KEPT_S)
        rig.trim()
        log = rig.service.tiers[0].log
        assert log is not None
        assert log.log_start_offset == 0
        await rig.pass_s(3000.0)
        rig.trim()
        rig.clock.advance_s(KEPT_S)
        rig.trim()
        assert log.log_start_offset > 0
        assert b"first" in rig.payloads()
        await rig.kill()

    asyncio.run(main())


def test_a_damaged_tier_stops_alone() -> None:
    """The others are delivered, and a problem names it."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"a", due_ms=rig.now_ms + 1000)
        await rig.schedule(b"b", due_ms=rig.now_ms + 4_000_000)
        log = rig.service.tiers[0].log
        assert log is not None
        rig.fs.flip_bit(log.segments.active.path, 8 * 70)
        await rig.pass_s(5000.0)
        assert rig.payloads() == [b"b"]
        (problem,) = rig.service.status().problems
        assert problem.startswith("delayed messages of __delays-0 are not read: ")
        reply = await rig.ask(ListScheduled("*", 9, 1))
        assert json.loads(reply.text)["problems"] == [problem]
        await rig.kill()

    asyncio.run(main())


def test_a_tier_that_is_gone_is_no_empty_one() -> None:
    """Figures and listing have the others; both say what they lack."""

    async def main() -> None:
        rig = await DelayRig().start()
        await rig.schedule(b"a", due_ms=rig.now_ms + 1000)
        await rig.schedule(b"b", due_ms=rig.now_ms + 4_000_000)
        await rig.close()
        directory = Path("/data/__delays-0")
        for name in rig.fs.names_in(directory):
            rig.fs.discard(directory / name)
        again = await DelayRig(rig.fs.crash(keep_all), rig.clock).start()
        (problem,) = again.service.status().problems
        assert "delayed messages of __delays-0 are not read: " in problem
        reply = await again.ask(ListScheduled("*", 9, 1))
        found = json.loads(reply.text)
        assert (found["count"], found["problems"]) == (1, [problem])
        await again.kill()

    asyncio.run(main())
