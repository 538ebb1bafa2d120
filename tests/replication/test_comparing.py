"""Sealed segments are compared between replicas, by their index and not by bytes."""

import asyncio
from dataclasses import replace

import pytest

from metaq.model import Offset, Position
from metaq.record.checksum import crc32
from metaq.replication.comparing import Comparison, answer_sum
from metaq.replication.messages import SumReply, SumRequest
from metaq.replication.operator import change_set
from metaq.replication.record import Change, SetRecord, plan_settings
from metaq.replication.serving import facts_of
from metaq.replication.set_nodes import SetView
from metaq.storage.span_index import read_index, write_index
from metaq.testing.servers import reserve_port
from tests.replication.replicas import Replicas, run, soon
from tests.replication.test_mending import RECORD, filled, log_of, mended, put
from tests.rigs.fs import FaultyFileSystem


async def sealed(rig: Replicas) -> int:
    """Have a sealed segment on all replicas; return who leads."""
    leader = await filled(rig)
    log = log_of(rig, leader)
    log.roll(log.next_offset)
    await put(rig)
    await rig.equal()
    logs = [log_of(rig, number) for number in (1, 2, 3)]
    await soon(lambda: all(len(log.segments) == 2 for log in logs), rig.describe)
    return leader


def change(rig: Replicas, number: int, *, is_indexed: bool) -> None:
    """Give a sealed segment other bytes, with a checksum of them in the index or not.

    Without one it is that of yet other bytes.
    """
    segment = log_of(rig, number).segments.first
    disk = rig[number].disk
    index = read_index(disk, segment.path, Offset(0))
    assert index is not None
    with disk.open_update(segment.path) as file:
        file.write_at(Position(2 * RECORD + 12), b"\x77")
        file.sync()
    data = disk.read_file(segment.path, 1 << 20)
    spans = [
        each._replace(
            checksum=crc32(data[each.base_offset : each.end_offset])
            if is_indexed
            else each.checksum ^ 1
        )
        for each in index.spans
    ]
    write_index(disk, segment.path, replace(index, spans=tuple(spans)), is_sealed=True)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metaq.replication.mending.COMPARE_S", 0.0)


@pytest.mark.slow
def test_copies_that_are_equal_are_compared_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is found, and no byte of a segment is read."""
    found: list[object] = []
    real = Comparison.compare

    async def compare(self: Comparison, *args: object) -> None:
        await real(self, *args)  # type: ignore[arg-type]
        found.append(self.differing)

    monkeypatch.setattr(Comparison, "compare", compare)
    hurry(monkeypatch)

    async def scenario(rig: Replicas) -> None:
        await sealed(rig)
        await soon(lambda: len(found) >= 6, rig.describe)
        assert set(found) == {""}

    run(scenario)


@pytest.mark.slow
def test_copies_that_differ_though_each_agrees_with_its_index_are_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No replica can know which is right; the log goes on."""

    async def scenario(rig: Replicas) -> None:
        await sealed(rig)
        follower = rig.follower()
        change(rig, follower, is_indexed=True)
        hurry(monkeypatch)
        mender = rig[follower].node.mender
        await soon(lambda: mender.comparison.differing, rig.describe)
        assert rig[follower].node.status().differing
        assert not log_of(rig, follower).damage
        await put(rig)
        # There is nothing to compare any more when retention has had it.
        log = log_of(rig, follower)
        segment = log.segments.first
        rig[follower].disk.unlink(segment.path)
        log.on_removed(segment, 0)
        await soon(lambda: not rig[follower].node.status().differing, rig.describe)

    run(scenario)


async def set_replicas(rig: Replicas, *numbers: int) -> None:
    """Do what `metaq replicas remove` and `add` do."""

    def plan(view: SetView, record: SetRecord) -> Change:
        return plan_settings(record, view.view.version, replicas=set(numbers))

    async with rig.operator() as nodes:
        await change_set(nodes, plan)


@pytest.mark.slow
def test_the_alarm_ends_when_the_replica_with_the_odd_copy_begins_with_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the replicas that stay, too, and when the new machine has another address."""

    async def scenario(rig: Replicas) -> None:
        await sealed(rig)
        odd = rig.follower()
        others = [k for k in (1, 2, 3) if k != odd]
        change(rig, odd, is_indexed=True)
        hurry(monkeypatch)

        def ringing(*numbers: int) -> list[int]:
            return [k for k in numbers if rig[k].node.status().differing]

        await soon(lambda: ringing(*others) == others, rig.describe)
        await rig[odd].stop()
        assert ringing(*others) == others
        await set_replicas(rig, *others)
        await soon(lambda: not ringing(*others), rig.describe)
        await set_replicas(rig, 1, 2, 3)
        rig[odd].disk = FaultyFileSystem(has_loop_syncs=True)
        await rig[odd].start()
        await rig.in_sync(1, 2, 3)
        await rig.equal()
        await asyncio.sleep(0.2)
        assert not ringing(1, 2, 3)

    run(scenario)


@pytest.mark.slow
def test_the_alarm_ends_when_the_odd_copy_is_copied_again_at_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine was replaced under its number, which takes no command."""

    async def scenario(rig: Replicas) -> None:
        await sealed(rig)
        odd = rig.follower()
        change(rig, odd, is_indexed=True)
        hurry(monkeypatch)
        there = [rig[k].node for k in (1, 2, 3) if k != odd]
        await soon(lambda: all(each.status().differing for each in there))
        await rig[odd].stop()
        rig[odd].port = reserve_port(rig)
        rig[odd].disk = FaultyFileSystem(has_loop_syncs=True)
        await rig[odd].start()
        await rig.in_sync(1, 2, 3)
        await soon(
            lambda: not any(each.status().differing for each in there), rig.describe
        )

    run(scenario)


@pytest.mark.slow
def test_bytes_that_contradict_their_index_are_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the replica that is asked as on the one that asks; the others say no."""

    async def scenario(rig: Replicas) -> None:
        await sealed(rig)
        follower = rig.follower()
        segment = log_of(rig, follower).segments.first
        index = read_index(rig[follower].disk, segment.path, Offset(0))
        change(rig, follower, is_indexed=False)
        hurry(monkeypatch)
        await soon(lambda: log_of(rig, follower).damage, rig.describe)
        assert index is not None
        write_index(rig[follower].disk, segment.path, index, is_sealed=True)
        await mended(rig)

    run(scenario)


@pytest.mark.slow
def test_what_the_other_one_cannot_tell_is_no_difference() -> None:
    """Another log, an offset that it lacks, and a range in which spans do not end."""

    async def scenario(rig: Replicas) -> None:
        await sealed(rig)
        follower, leader = rig.follower(), rig.leader()
        node, log = rig[leader].node, log_of(rig, leader)
        own = log_of(rig, follower)
        tables = node.answers.store.tables
        copy = facts_of(log, tables)
        logs = {log.log_id: log}

        async def ask(start: int, end: int, number: int = copy.number) -> SumReply:
            theirs = replace(copy, number=number)
            asked = SumRequest("s1", theirs, Offset(start), Offset(end), 5)
            return await answer_sum(logs, tables, asked)

        unknown = SumReply(is_known=False, is_equal=False)
        assert own.number == log.number
        assert await ask(0, log.segments.first.end_offset, copy.number + 1) == unknown
        assert await ask(0, log.synced_end + 1) == unknown
        assert await ask(5, 7) == unknown
        assert await ask(7, 7) == unknown
        whole = await ask(0, log.segments.first.end_offset)
        assert whole == SumReply(is_known=True, is_equal=False)
        assert not log.damage

    run(scenario)
