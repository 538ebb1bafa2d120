"""Faults under a replica at work: disks that fail or hang, and bugs of its tasks."""

import errno

import pytest

from metaq.errors import DiskError
from metaq.replication import claims, election, follow_task
from metaq.replication.set_nodes import decode_present
from metaq.storage.log_dir import DirState
from tests.replication.replicas import RECORD, Replica, Replicas, run, soon


def state_of(rig: Replicas, number: int) -> str:
    """Return what a replica shows of itself."""
    node = rig.zookeeper.nodes.get(f"{RECORD}/present/{number}")
    return decode_present(number, node.data).presence.state if node else ""


async def taken(rig: Replicas, number: int) -> bool:
    """Return whether a put to a replica is acknowledged."""
    return (await rig.put(number)).startswith(b"result 200 ")


async def took_over(rig: Replicas, first: int, epoch: int) -> None:
    """Wait until others lead, and one that failed says so and serves on."""
    await soon(lambda: rig.record.epoch.number > epoch, show=rig.describe)
    others = {1, 2, 3} - {first}
    await rig.in_sync(*others)
    assert rig.leader() in others
    await rig.store(b"later")
    await soon(lambda: state_of(rig, first) == "failed")
    assert (await rig.put(first)).endswith(b"[not-leader]")
    broker = rig[first].broker
    assert broker is not None
    assert broker.failure is None


def break_disk(replica: Replica) -> None:
    """Have the next calls fail: some of them are repeated, and one is of a log."""
    for number in range(1, 10):
        replica.disk.fail_at(replica.disk.calls + number, errno.EIO)


@pytest.mark.slow
def test_a_leader_whose_disk_fails_gives_up() -> None:
    """Another one leads, without a word of the disk; the broker answers on."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        epoch = rig[first].node.epoch
        await rig.store()
        break_disk(rig[first])
        await rig.put(first)
        broker = rig[first].broker
        assert broker is not None
        log = rig[first].log()
        assert log is not None
        await soon(lambda: log.log_dir.state is DirState.OFFLINE)
        await took_over(rig, first, epoch)
        for _ in range(2):
            # Its disk takes nothing any more; nothing of it is claimed or followed.
            await rig.put(rig.leader())
        assert first not in rig.record.in_sync

    run(scenario)


@pytest.mark.slow
def test_a_put_to_a_leader_whose_disk_has_failed_goes_to_the_next_one() -> None:
    """It is not stored, and no error for a sender that has time, whatever comes next.

    Here ZooKeeper is away, so that the leader cannot give up before.
    """

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        epoch = rig[first].node.epoch
        await soon(lambda: taken(rig, first))
        rig.zookeeper.suspend(rig[first].client)
        break_disk(rig[first])
        log = rig[first].log()
        assert log is not None
        await rig.put(first)
        await soon(lambda: log.log_dir.state is DirState.OFFLINE)
        answer = await rig.put(first)
        assert b"data directory is offline until a restart" in answer
        assert answer.endswith(b"[not-leader]")
        rig.zookeeper.resume(rig[first].client)
        await took_over(rig, first, epoch)

    run(scenario)


@pytest.mark.slow
def test_a_leader_that_cannot_save_the_record_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its `set` file is the first thing that a failing disk refuses.

    The one in-sync replica that is left has followed until now: it leads alone after
    some time, and takes the other one in.
    """
    monkeypatch.setattr(election, "CLAIM_WAIT_MS", 300)
    monkeypatch.setattr(election, "MERGE_WAIT_MS", 300)

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        epoch = rig[first].node.epoch
        rig[first].save_error = DiskError("write", "/data/set", "EIO")
        other = rig.follower()
        await rig[other].stop()
        await soon(lambda: rig[first].refused_count)
        await rig[other].start()
        await took_over(rig, first, epoch)
        rig[first].save_error = None
        await rig.in_sync(1, 2, 3)
        assert state_of(rig, first) == "ready"

    run(scenario)


@pytest.mark.slow
def test_a_claimer_that_cannot_save_its_claim_leaves_it_to_others() -> None:
    """A record that is in no file is no ground to lead on."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        others = sorted({1, 2, 3} - {first})
        rig[others[0]].save_error = DiskError("write", "/data/set", "EIO")
        epoch = rig[first].node.epoch
        await rig[first].stop()
        await soon(lambda: rig[others[0]].refused_count)
        await rig[first].start()
        await soon(lambda: rig.leader() not in {0, others[0]}, show=rig.describe)
        assert rig.record.epoch.number > epoch
        await rig.in_sync(first, others[1])
        rig[others[0]].save_error = None
        await rig.in_sync(1, 2, 3)

    run(scenario)


@pytest.mark.slow
def test_a_follower_whose_disk_fails_is_waited_for_no_longer() -> None:
    """It acknowledges nothing, and is no candidate."""

    async def scenario(rig: Replicas) -> None:
        leader, other = rig.leader(), rig.follower()
        await rig.store()
        await rig.equal()
        break_disk(rig[other])
        await rig.put(leader)
        await rig.in_sync(*{1, 2, 3} - {other})
        await soon(lambda: state_of(rig, other) == "failed")
        await rig.store()
        broker = rig[other].broker
        assert broker is not None
        assert broker.failure is None

    run(scenario)


@pytest.mark.slow
def test_a_leader_whose_disk_hangs_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for its storage thread comes between it and the next leader."""

    async def scenario(rig: Replicas) -> None:
        first = rig.leader()
        epoch = rig[first].node.epoch
        await rig.store()
        log = rig[first].log()
        assert log is not None
        directory = log.log_dir
        monkeypatch.setattr(directory, "submit", lambda *_each, **_how: None)
        directory.watch.is_silent = True
        await took_over(rig, first, epoch)
        monkeypatch.undo()
        directory.watch.is_silent = False

    run(scenario)


def bug(*_args: object, **_keywords: object) -> None:
    raise AssertionError("a bug")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"), [(follow_task, "Follower"), (claims, "Merging")]
)
def test_a_bug_of_a_task_ends_the_broker(
    module: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that silently follows no more, or never leads, would be worse."""

    async def scenario(rig: Replicas) -> None:
        leader = rig.leader()
        monkeypatch.setattr(module, name, bug)
        await rig[leader].stop()

        def failures() -> list[BaseException]:
            found = [each.starting.failure for each in rig.running if each.starting]
            return [each for each in found if each is not None]

        await soon(failures, show=rig.describe)
        assert str(failures()[0]) == "a bug"

    run(scenario)
