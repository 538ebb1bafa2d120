"""One tier: files of sealed segments, trimming, and what is made again."""

import asyncio
from pathlib import Path

import pytest

from metaq.broker.delay_tier import KEPT_S
from metaq.delay.due_index import DUE_SUFFIX
from tests.broker.delay_rig import DelayRig
from tests.rigs.fs import FaultyFileSystem


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
        await rig.kill()

    asyncio.run(main())
