"""Acts of an operator: facts of replicas, changes of the record, data directories."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from errno import EIO
from pathlib import Path

import pytest

from metaq.errors import CoordinationError, StorageError
from metaq.fs.frame_file import read_frames
from metaq.model import LogId, Millis, Offset
from metaq.replication.epoch_journal import (
    EPOCHS_FILE,
    MAGIC,
    Entry,
    EpochJournal,
    LogCreated,
    decode_entries,
)
from metaq.replication.facts import (
    FollowerLag,
    HeldLog,
    ReplicaFacts,
    decode_facts,
    encode_facts,
)
from metaq.replication.operator import (
    TRIES,
    LogLoss,
    begin_set,
    change_set,
    find_losses,
    leave_set,
    wait_until_leads,
)
from metaq.replication.record import (
    NO_REPLICA,
    Change,
    Purpose,
    ReplicaSetError,
    SetRecord,
    decode_record,
    encode_record,
    make_record,
    plan_settings,
    plan_transfer,
)
from metaq.replication.set_file import SET_FILE, read_set_file
from metaq.replication.set_nodes import Member, SetNodes, SetView
from metaq.storage.holdings import HOLDINGS_FILE, Extent, Holdings
from metaq.storage.inventory import read_holdings, write_holdings
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.replication.set_nodes_rig import BROKER, CLOCK, leader
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until

RECORD = make_record("s1", 1, {1, 2, 3}, min_in_sync=2, nonce="n1")
NOW = Millis(1_700_000_000_000)

# -- facts ----------------------------------------------------------------------------

FACTS = ReplicaFacts(
    1,
    "leading",
    "",
    7,
    RECORD,
    (FollowerLag(2, "in sync", True, 100, 0.5),),
    (HeldLog("t-0", 2**64 - 1, 0, 100, 60),),
)


def replay(entries: Iterable[Entry]) -> EpochJournal:
    """Return the contents of a journal with these entries."""
    journal = EpochJournal()
    journal.apply(entries)
    return journal


@pytest.mark.parametrize("facts", [FACTS, replace(FACTS, record=None, lag=(), logs=())])
def test_facts_come_back_as_they_were_said(facts: ReplicaFacts) -> None:
    """In the frame of a `stats` reply, among lines of other names."""
    body = "\r\n".join(["STATS", "pid 1", encode_facts(facts), "END", ""])
    assert decode_facts(body) == facts


@pytest.mark.parametrize(
    "line",
    [
        "resultCode 1",
        "replica 1",
        'replica {"replica":1}',
        encode_facts(FACTS).replace('"t-0",', '"t-0","x",'),
        encode_facts(FACTS).replace('"lag_bytes":100', '"lag_bytes":-1'),
        encode_facts(FACTS).replace('"min":2', '"min":9'),
    ],
)
def test_what_is_no_facts_is_refused(line: str) -> None:
    """A broker without a set, an older one, or one that says something else."""
    with pytest.raises(ReplicaSetError):
        decode_facts(f"STATS\r\n{line}\r\nEND\r\n")


def logs_of(replica: int, *logs: HeldLog) -> ReplicaFacts:
    return ReplicaFacts(replica, "idle", "", 1, RECORD, logs=logs)


def test_losses_are_what_others_have_and_the_chosen_one_lacks() -> None:
    """Bytes, logs, others of the same name, and what was once acknowledged."""
    facts = {
        1: logs_of(
            1,
            HeldLog("equal-0", 1, 0, 50, 50),
            HeldLog("more-0", 2, 0, 90, 50),
            HeldLog("less-0", 3, 0, 40, 40),
            HeldLog("other-0", 4, 0, 90, 10),
            HeldLog("lost-0", 6, 0, 50, 70),
        ),
        2: logs_of(
            2,
            HeldLog("equal-0", 1, 0, 50, 20),
            HeldLog("more-0", 2, 0, 60, 60),
            HeldLog("less-0", 3, 0, 80, 60),
            HeldLog("other-0", 5, 0, 30, 0),
            HeldLog("new-0", 7, 0, 20, 0),
        ),
        3: logs_of(3, HeldLog("less-0", 3, 0, 70, 0)),
    }
    assert find_losses(facts, 1) == [
        LogLoss("less-0", 40, 80, 60, (2, 3)),
        LogLoss("lost-0", 50, 50, 70, ()),
        LogLoss("new-0", 0, 20, 0, (2,)),
        LogLoss("other-0", 90, 30, 10, (2,)),
    ]


# -- the record -----------------------------------------------------------------------


def with_set(
    scenario: Callable[[MemoryZooKeeper, MemoryCoordinator, SetNodes], Awaitable[None]],
    record: SetRecord | None,
) -> None:
    async def main() -> None:
        server = MemoryZooKeeper()
        paths = NodePaths("/meta")
        if record is not None:
            server.put(paths.replica_set(BROKER), encode_record(record))
        coordinator = server.coordinator(CLOCK)
        coordinator.start()
        await until(lambda: coordinator.status.session_version == 1)
        nodes = SetNodes(coordinator, paths, BROKER, NO_REPLICA, clock=CLOCK)
        try:
            await scenario(server, coordinator, nodes)
        finally:
            await coordinator.stop(deadline_s=CLOCK.monotonic_s() + 5)

    run_virtually(main())


def read_record(server: MemoryZooKeeper) -> SetRecord:
    path = NodePaths("/meta").replica_set(BROKER)
    return decode_record(server.tree()[path].data)


def require_three(view: SetView, record: SetRecord) -> Change | None:
    """Have the set need three replicas of a put."""
    if record.min == 3:
        return None
    return plan_settings(record, view.view.version, min_in_sync=3)


WHOLE = RECORD.then(in_sync=frozenset({1, 2, 3}))


def test_a_change_that_others_were_faster_than_is_planned_again() -> None:
    """From what is there then, so nothing of theirs is lost."""

    async def scenario(
        server: MemoryZooKeeper, _: MemoryCoordinator, nodes: SetNodes
    ) -> None:
        asked = 0

        def plan(view: SetView, record: SetRecord) -> Change | None:
            nonlocal asked
            asked += 1
            change = require_three(view, record)
            if asked == 1:
                faster = encode_record(record.then(target=2))
                server.write(NodePaths("/meta").replica_set(BROKER), faster)
            return change

        after = await change_set(nodes, plan)
        assert (after.min, after.target, asked) == (3, 2, 2)
        assert read_record(server) == after

    with_set(scenario, WHOLE)


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_change_without_an_answer_is_looked_up_and_made_once(
    is_carried_out: bool,
) -> None:
    """Never repeated blindly: the record says whether it is there."""

    async def scenario(
        server: MemoryZooKeeper, coordinator: MemoryCoordinator, nodes: SetNodes
    ) -> None:
        server.lose_answer(coordinator, is_carried_out=is_carried_out)

        def plan(view: SetView, record: SetRecord) -> Change | None:
            return require_three(view, record)

        change = asyncio.ensure_future(change_set(nodes, plan))
        await asyncio.sleep(1.0)
        server.resume(coordinator)
        with pytest.raises(CoordinationError):
            await change
        # The operator types it again.
        after = await change_set(nodes, plan)
        assert read_record(server) == after
        assert after.revision == WHOLE.revision + 1

    with_set(scenario, WHOLE)


def test_others_that_are_always_faster_end_it() -> None:
    """With an error that says to try again."""

    async def scenario(
        server: MemoryZooKeeper, _: MemoryCoordinator, nodes: SetNodes
    ) -> None:
        asked = 0

        def plan(view: SetView, record: SetRecord) -> Change | None:
            nonlocal asked
            asked += 1
            server.write(
                NodePaths("/meta").replica_set(BROKER), encode_record(record.then())
            )
            return Change(Purpose.OPERATOR, record.then(), view.view.version)

        with pytest.raises(CoordinationError, match="try again"):
            await change_set(nodes, plan)
        assert asked == TRIES

    with_set(scenario, WHOLE)


def test_a_set_that_is_not_there_is_not_changed() -> None:
    """The error names what makes one."""

    async def scenario(
        _: MemoryZooKeeper, __: MemoryCoordinator, nodes: SetNodes
    ) -> None:
        with pytest.raises(ReplicaSetError, match="metaq replicas init"):
            await change_set(nodes, require_three)

    with_set(scenario, None)


def test_a_leader_is_waited_for() -> None:
    """Up to a bound."""

    async def scenario(
        server: MemoryZooKeeper, _: MemoryCoordinator, nodes: SetNodes
    ) -> None:
        assert not await wait_until_leads(nodes, 2, timeout_s=1)
        waiting = asyncio.ensure_future(wait_until_leads(nodes, 2, timeout_s=60))
        await asyncio.sleep(1)
        assert not waiting.done()
        server.put(NodePaths("/meta").set_leader(BROKER), leader(2, WHOLE.epoch))
        assert await waiting

    with_set(scenario, WHOLE)


def test_only_a_leader_hands_over_and_to_one_in_sync() -> None:
    """The record names the one that is to lead; epoch and leader stay."""
    led = WHOLE.then(leader=1, in_sync=frozenset({1, 2}))
    change = plan_transfer(led, 4, 2)
    assert (change.version, change.purpose) == (4, Purpose.OPERATOR)
    assert change.record == led.then(target=2)
    with pytest.raises(ReplicaSetError, match="no replica leads"):
        plan_transfer(led.then(leader=NO_REPLICA), 4, 2)
    with pytest.raises(ReplicaSetError, match=r"in-sync replicas \[1, 2\], got 3"):
        plan_transfer(led, 4, 3)


# -- data directories -----------------------------------------------------------------

FIRST, SECOND = Path("/one"), Path("/two")
PATHS = (FIRST, SECOND)


def make_data() -> FaultyFileSystem:
    """Two data directories with logs; the first one has a record of its contents."""
    fs = FaultyFileSystem()
    for path, logs in ((FIRST, {"t-0": 0, "t-1": 4096}), (SECOND, {"u-0": None})):
        fs.make_directory(path)
        for name, base in logs.items():
            fs.make_directory(path / name)
            if base is not None:
                fs.open_append(path / name / f"{base:020}.meta", create=True).close()
                fs.open_append(
                    path / name / f"{base + 99:020}.meta", create=True
                ).close()
    held = Holdings(
        identity="abc", written_ms=NOW, partitions={"t-0": Extent(Offset(0), Offset(9))}
    )
    write_holdings(fs, FIRST, held)
    return fs


def begin(
    fs: FaultyFileSystem, record: SetRecord, replica: int, *, found: SetRecord | None
) -> tuple[SetRecord, Member]:
    return begin_set(fs, PATHS, record, replica, NOW, found=found, draw=os.urandom)


def births(fs: FaultyFileSystem, path: Path) -> dict[LogId, LogCreated]:
    frames = read_frames(fs, path / EPOCHS_FILE, MAGIC)
    entries = [entry for frame in frames for entry in decode_entries(frame.body)]
    return {one.log_id: one for one in replay(entries).logs.values()}


def check_begun(
    fs: FaultyFileSystem, record: SetRecord, *, is_readable: bool = True
) -> None:
    file = read_set_file(fs, FIRST)
    assert file is not None
    assert (file.record, file.replica, file.flag) == (record, 1, "")
    assert file.epoch == file.completed == 1
    starts = {str(k): (b.start, b.epoch) for k, b in births(fs, FIRST).items()}
    assert starts == {"t-0": (0, record.epoch), "t-1": (4096, record.epoch)}
    assert [str(log_id) for log_id in births(fs, SECOND)] == ["u-0"]
    held = read_holdings(fs, FIRST)
    assert held is not None
    assert held.version == 1
    if is_readable:
        assert held.identity == "abc"
        assert held.partitions == {"t-0": (0, 9)}


def test_a_set_begins_with_the_logs_that_are_there() -> None:
    """Each with a number and an epoch from its start on; no log counts as lost."""
    fs = make_data()
    record, member = begin(fs, RECORD, 1, found=None)
    assert record == RECORD
    check_begun(fs, RECORD)
    second = read_holdings(fs, SECOND)
    assert second is not None
    assert member.directories == {"abc": 1, second.identity: 1}
    assert (member.set_id, member.incarnation) == ("s1", 1)
    # A log without a segment would count as lost.
    assert fs.list_directory(SECOND / "u-0") == (f"{0:020}.meta",)
    numbers = [b.number for p in PATHS for b in births(fs, p).values()]
    assert len(set(numbers)) == 3


def test_a_set_begins_once() -> None:
    """Again is harmless while it is new; another set, or a later state, is refused."""
    fs = make_data()
    begin(fs, RECORD, 1, found=None)
    other = make_record("s2", 1, {1, 2}, min_in_sync=1, nonce="n2")
    again, _ = begin(fs, other, 1, found=None)
    assert again == RECORD
    later = RECORD.then(in_sync=frozenset({1, 2}))
    assert begin(fs, other, 1, found=later)[0] == later
    check_begun(fs, RECORD)
    with pytest.raises(ReplicaSetError, match=r"set s2 of replicas \[1, 2\]"):
        begin(fs, RECORD, 1, found=other)
    with pytest.raises(ReplicaSetError, match="is replica 1 of set s1 already"):
        begin(fs, RECORD, 2, found=None)


@pytest.mark.slow
def test_what_failed_while_a_set_began_is_repeated() -> None:
    """Each call once; without the `set` file nothing has begun."""
    fs = make_data()
    before = fs.calls
    begin(fs, RECORD, 1, found=None)
    count = fs.calls - before
    for number in range(1, count + 1):
        fs = make_data()
        fs.fail_at(fs.calls + number, EIO)
        try:
            begin(fs, RECORD, 1, found=None)
        except StorageError:
            record, _ = begin(fs, RECORD, 1, found=None)
        # What cannot be read is made again, as at a start.
        failed = fs.log[before + number - 1]
        is_read = failed.name in {"open", "read", "stat"}
        is_lost = failed.path.name == HOLDINGS_FILE and is_read
        check_begun(fs, record, is_readable=not is_lost)


@pytest.mark.slow
def test_what_is_discarded_is_moved_aside_and_forgotten() -> None:
    """The next start finds an empty directory; each call that fails is repeated."""
    fs = make_data()
    begin(fs, RECORD, 1, found=None)
    before = fs.calls
    assert leave_set(fs, PATHS, NOW) == 3
    for number in range(1, fs.calls - before + 1):
        fs = make_data()
        begin(fs, RECORD, 1, found=None)
        fs.fail_at(fs.calls + number, EIO)
        try:
            leave_set(fs, PATHS, NOW)
        except StorageError:
            leave_set(fs, PATHS, NOW)
        for path in PATHS:
            left = set(fs.list_directory(path))
            assert left == {"aside"}
        aside = [
            name
            for path in PATHS
            for stamp in fs.list_directory(path / "aside")
            for name in fs.list_directory(path / "aside" / stamp)
        ]
        assert sorted(aside) == ["t-0", "t-1", "u-0"]
        assert not fs.exists(FIRST / SET_FILE)
        assert not fs.exists(FIRST / HOLDINGS_FILE)
