"""Commits during another one, and explicit offsets of the user."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from metaq.client.group.assignments import Fence
from metaq.client.offsets.committer import CommitOrder, Committer
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.errors import (
    ClosedError,
    MetaqError,
    OwnershipLostError,
    RequestTimeoutError,
    SessionLostError,
    SessionSuspendedError,
)
from metaq.model import BrokerId, GroupOffset, Offset, TopicPartition
from tests.rigs.virtual_time import VirtualClock, run_virtually

CLOCK = VirtualClock()
P0 = TopicPartition("t", BrokerId(0), 0)
P1 = TopicPartition("t", BrokerId(0), 1)


def at(**offsets: int) -> dict[TopicPartition, GroupOffset]:
    """Return offsets by the names of partitions: `at(p0=5)`."""
    named = {"p0": P0, "p1": P1}
    return {named[name]: GroupOffset(Offset(each)) for name, each in offsets.items()}


class Gate(MemoryOffsets):
    """A store whose commits wait until they are let through, one by one."""

    def __init__(self, *, is_open: bool = False) -> None:
        super().__init__()
        self.asked: list[dict[TopicPartition, int]] = []
        self.fences: list[Fence | None] = []
        self.error: MetaqError | None = None
        self._passes = asyncio.Semaphore(10**6 if is_open else 0)

    def let(self) -> None:
        self._passes.release()

    async def commit(
        self, group: str, offsets: Any, *, fence: Fence | None, deadline_s: float
    ) -> Mapping[TopicPartition, MetaqError]:
        self.asked.append({one: each.offset for one, each in offsets.items()})
        self.fences.append(fence)
        await self._passes.acquire()
        if self.error is not None:
            raise self.error
        return await super().commit(group, offsets, fence=fence, deadline_s=deadline_s)


class Rig:
    def __init__(self, *, is_open: bool = False) -> None:
        self.store = Gate(is_open=is_open)
        self.fence: Fence | None = None
        self.committer = Committer(
            self.store,
            group="g",
            clock=CLOCK,
            timeout_s=5.0,
            fence=lambda: self.fence,
        )
        for partition in (P0, P1):
            self.committer.admit(partition)

    def handled(self, *, is_asked: bool = False, **offsets: int) -> "Asked":
        order = CommitOrder() if is_asked else None
        request = self.committer.request(at(**offsets), order)
        return asyncio.ensure_future(request.wait())

    def named(
        self, *, handled: int = 0, may_go_back: bool = False, **offsets: int
    ) -> "Asked":
        order = CommitOrder(at(**offsets), may_go_back)
        request = self.committer.request(at(p0=handled, p1=handled), order)
        return asyncio.ensure_future(request.wait())

    async def stored(self) -> int | None:
        found = await self.store.load("g", P0, deadline_s=0.0)
        return None if found is None else found.offset


Asked = asyncio.Future[Mapping[TopicPartition, MetaqError]]


def run(scenario: Callable[[Rig], Coroutine[Any, Any, None]], **how: Any) -> None:
    async def begin() -> None:
        await scenario(Rig(**how))

    run_virtually(begin())


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# -- one write at a time --------------------------------------------------------------


def test_commits_during_a_write_become_one_with_the_newest_offsets() -> None:
    """Each of them ends with its write, and not before."""

    async def scenario(rig: Rig) -> None:
        first = rig.handled(p0=1)
        await turn()
        later = [rig.handled(p0=n) for n in (2, 3)] + [rig.handled(p0=4, p1=9)]
        await turn()
        assert rig.store.asked == [{P0: 1}]
        rig.store.let()
        await turn()
        assert first.done()
        assert not any(one.done() for one in later)
        rig.store.let()
        assert [await one for one in later] == [{}] * 3
        assert rig.store.asked == [{P0: 1}, {P0: 4, P1: 9}]
        assert rig.committer.commit_count == 2

    run(scenario)


def test_commits_of_one_turn_are_one_write() -> None:
    """A reader that commits each message of a batch writes once."""

    async def scenario(rig: Rig) -> None:
        commits = [rig.handled(p0=n) for n in range(1, 101)]
        assert [await one for one in commits] == [{}] * 100
        assert rig.store.asked == [{P0: 100}]
        assert rig.committer.commit_count == 1

    run(scenario, is_open=True)


def test_a_commit_that_writes_nothing_is_not_counted() -> None:
    """Nor does it ask the store."""

    async def scenario(rig: Rig) -> None:
        assert await rig.handled(p0=1) == {}
        assert await rig.handled(p0=1) == {}
        assert await rig.named(p0=1) == {}
        assert rig.store.asked == [{P0: 1}]
        assert rig.committer.commit_count == 1
        rig.store.error = SessionSuspendedError("away")
        assert (await rig.handled(p0=2)).keys() == {P0}
        assert rig.committer.commit_count == 1
        assert rig.committer.failure_count == 1

    run(scenario, is_open=True)


def test_an_offset_under_way_is_waited_for() -> None:
    """A commit of the same offset is durable when it returns, too."""

    async def scenario(rig: Rig) -> None:
        first = rig.handled(p0=7)
        await turn()
        again, before = rig.handled(p0=7), rig.named(p0=5)
        await turn()
        assert not any(one.done() for one in (again, before))
        rig.store.let()
        assert [await first, await again, await before] == [{}] * 3
        assert rig.store.asked == [{P0: 7}]

    run(scenario)


def test_a_failure_is_that_of_all_who_waited_for_the_write() -> None:
    """And of no partition that they did not commit."""

    async def scenario(rig: Rig) -> None:
        rig.store.error = SessionSuspendedError("away")
        first, second = rig.handled(p0=1), rig.handled(p1=1)
        assert (await first).keys() == {P0}
        assert (await second).keys() == {P1}
        assert rig.committer.changed(at(p0=1, p1=1)) == at(p0=1, p1=1)

    run(scenario, is_open=True)


def test_another_fence_has_a_write_of_its_own() -> None:
    """Messages handled under one session are not committed under the next."""

    async def scenario(rig: Rig) -> None:
        fences = [Fence("g_c1", version) for version in (1, 1, 2, 2)]
        commits = []
        for number, fence in enumerate(fences, 1):
            rig.fence = fence
            commits.append(rig.handled(p0=number))
        await asyncio.gather(*commits)
        assert rig.store.asked == [{P0: 2}, {P0: 4}]
        assert rig.store.fences == [fences[0], fences[2]]

    run(scenario, is_open=True)


def test_a_partition_that_goes_is_not_written_by_who_waits() -> None:
    """It may belong to another member by the time of the write."""

    async def scenario(rig: Rig) -> None:
        first = rig.handled(p0=1)
        await turn()
        waits = rig.handled(p0=2, p1=2)
        rig.committer.dismiss([P0])
        rig.store.let()
        rig.store.let()
        assert await first == {}
        failed = await waits
        assert failed.keys() == {P0}
        assert isinstance(failed[P0], OwnershipLostError)
        assert rig.store.asked == [{P0: 1}, {P1: 2}]
        assert (await rig.named(p0=9)).keys() == {P0}

    run(scenario)


def test_a_partition_that_comes_again_is_not_written_by_who_waited() -> None:
    """Another member may have gone on in between; only later commits count."""

    async def scenario(rig: Rig) -> None:
        first = rig.handled(p1=1)
        await turn()
        waits = rig.named(p0=2, p1=2)
        rig.committer.dismiss([P0])
        rig.committer.admit(P0)
        later = rig.handled(p0=9)
        for _ in range(3):
            rig.store.let()
        assert await first == {}
        failed = await waits
        assert failed.keys() == {P0}
        assert isinstance(failed[P0], OwnershipLostError)
        assert await later == {}
        assert rig.store.asked == [{P1: 1}, {P1: 2}, {P0: 9}]

    run(scenario)


def test_a_partition_that_is_not_ours_fails_at_once_and_for_good() -> None:
    """Though it is ours when those before have been written."""

    async def scenario(rig: Rig) -> None:
        rig.committer.dismiss([P0])
        first = rig.handled(p1=1)
        await turn()
        early = rig.named(p0=2, p1=3)
        rig.committer.admit(P0)
        rig.store.let()
        rig.store.let()
        assert await first == {}
        assert (await early).keys() == {P0}
        assert rig.store.asked == [{P1: 1}, {P1: 3}]

    run(scenario)


def test_a_message_is_not_after_what_fails_with_its_session() -> None:
    """An offset under way of the last claim is not the newest one of this claim."""

    async def scenario(rig: Rig) -> None:
        rig.fence = Fence("g_c1", 1)
        old = rig.handled(p0=17)
        await turn()
        rig.store.error = SessionLostError("over")
        rig.committer.dismiss([P0])
        rig.fence = Fence("g_c1", 2)
        rig.committer.admit(P0)
        fresh = rig.named(p0=16)
        rig.store.let()
        await old
        rig.store.error = None
        rig.store.let()
        assert await fresh == {}
        assert rig.store.asked == [{P0: 17}, {P0: 16}]

    run(scenario)


def test_an_offset_read_before_a_write_does_not_hide_it() -> None:
    """`rollback` reads what is committed while commits go on."""

    async def scenario(rig: Rig) -> None:
        await rig.handled(p0=5)
        rig.committer.begin(P0, GroupOffset(Offset(2)))
        assert await rig.handled(p0=2) == {}
        assert await rig.stored() == 2

    run(scenario, is_open=True)


# -- ends -----------------------------------------------------------------------------


def test_a_caller_that_goes_does_not_end_the_write_of_others() -> None:
    async def scenario(rig: Rig) -> None:
        first, second = rig.handled(p0=1), rig.handled(p0=1)
        await turn()
        first.cancel()
        rig.store.let()
        assert await second == {}
        assert await rig.stored() == 1

    run(scenario)


def test_a_caller_s_time_is_its_own() -> None:
    """The write goes on for those who have more."""

    async def scenario(rig: Rig) -> None:
        deadline_s = CLOCK.monotonic_s() + 1.0
        short = rig.committer.request(at(p0=1), deadline_s=deadline_s)
        long = rig.handled(p0=1)
        failed = await short.wait()
        assert isinstance(failed[P0], RequestTimeoutError)
        assert not long.done()
        rig.store.let()
        assert await long == {}

    run(scenario)


def test_a_store_that_hangs_is_abandoned_and_asked_again() -> None:
    """A commit that waits has its own bound, and the next commit its own write."""

    async def scenario(rig: Rig) -> None:
        begun_s = CLOCK.monotonic_s()
        first = rig.handled(p0=1)
        await turn()
        second = rig.handled(p0=2)
        for one in (first, second):
            assert isinstance((await one)[P0], RequestTimeoutError)
        assert CLOCK.monotonic_s() - begun_s < 11.0
        rig.store.let()
        assert await rig.handled(p0=3) == {}
        assert await rig.stored() == 3

    run(scenario)


def test_close_ends_what_is_under_way_and_what_waits() -> None:
    async def scenario(rig: Rig) -> None:
        first = rig.handled(p0=1)
        await turn()
        second = rig.handled(p0=2)
        await turn()
        await rig.committer.close()
        for one in (first, second):
            assert isinstance((await one)[P0], ClosedError)
        assert rig.store.asked == [{P0: 1}]
        await rig.committer.close()

    run(scenario)


def test_settle_waits_for_what_has_been_asked() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.committer.settle()
        commits = [rig.handled(p0=1)]
        await turn()
        commits.append(rig.handled(p0=2))
        await turn()
        settled = asyncio.ensure_future(rig.committer.settle())
        rig.store.let()
        await turn()
        assert not settled.done()
        rig.store.let()
        await settled
        assert all(one.done() for one in commits)
        commits.append(rig.handled(p0=3))
        await turn()
        await rig.committer.settle(deadline_s=CLOCK.monotonic_s() + 1.0)
        assert not commits[-1].done()
        rig.store.let()
        await commits[-1]

    run(scenario)


# -- offsets that the user names ------------------------------------------------------


def test_automatic_commits_do_not_set_a_named_offset_back() -> None:
    """Until more than it is handled."""

    async def scenario(rig: Rig) -> None:
        await rig.named(p0=50, handled=10)
        for handled in (10, 49, 50):
            assert rig.committer.changed(at(p0=handled)) == {}
            await rig.handled(p0=handled)
            await rig.handled(p0=handled, is_asked=True)
        assert rig.store.asked == [{P0: 50}]
        await rig.handled(p0=51)
        assert await rig.stored() == 51

    run(scenario, is_open=True)


def test_what_the_user_set_back_stays_until_more_is_handled() -> None:
    """Or until he commits what is handled."""

    async def scenario(rig: Rig) -> None:
        await rig.handled(p0=100)
        for is_asked in (False, True):
            await rig.named(p0=5, handled=100, may_go_back=True)
            await rig.handled(p0=100)
            assert await rig.stored() == 5
            await rig.handled(p0=100 + (not is_asked), is_asked=is_asked)
            assert await rig.stored() == 100 + (not is_asked)
            await rig.handled(p0=100)

    run(scenario, is_open=True)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_message_before_the_newest_offset_changes_nothing(is_written: bool) -> None:
    """Messages go forward only, beside a write that is under way, too."""

    async def scenario(rig: Rig) -> None:
        ahead = rig.handled(p0=100)
        await turn()
        if is_written:
            rig.store.let()
            await ahead
        before = rig.named(p0=80)
        rig.store.let()
        rig.store.let()
        assert [await ahead, await before] == [{}, {}]
        assert rig.store.asked == [{P0: 100}]

    run(scenario)


def test_a_message_after_what_the_user_set_back_goes_forward() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.handled(p0=100)
        await rig.named(p0=5, handled=100, may_go_back=True)
        await rig.named(p0=60, handled=100)
        assert await rig.stored() == 60
        await rig.named(p0=50, handled=100)
        assert await rig.stored() == 60
        await rig.handled(p0=100)
        assert await rig.stored() == 100

    run(scenario, is_open=True)


def test_a_named_offset_that_failed_is_tried_again_by_the_next_commit() -> None:
    async def scenario(rig: Rig) -> None:
        rig.store.error = SessionSuspendedError("away")
        assert (await rig.named(p0=50)).keys() == {P0}
        rig.store.error = None
        await rig.handled(p0=10)
        assert await rig.stored() == 50

    run(scenario, is_open=True)


@pytest.mark.parametrize("how", ["admit", "dismiss"])
def test_another_begin_forgets_named_offsets(how: str) -> None:
    """After `seek`, `rollback` and an assignment what is handled counts."""

    async def scenario(rig: Rig) -> None:
        await rig.named(p0=50)
        if how == "dismiss":
            rig.committer.dismiss([P0])
        rig.committer.admit(P0)
        await rig.handled(p0=10)
        assert await rig.stored() == 10

    run(scenario, is_open=True)
