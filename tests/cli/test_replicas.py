"""`metaq replicas`: what it shows, and what an operator does to a set."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from metaq.cli import replicas
from metaq.cli.cluster import Target
from metaq.clock import Clock
from metaq.errors import ConfigError, LogDirLockedError, NoBrokerError
from metaq.fs import SystemFileSystem
from metaq.model import BrokerId
from metaq.protocol.commands import Result, Stats
from metaq.replication.election import Flag, Presence, PresenceState
from metaq.replication.epochs import Epoch
from metaq.replication.facts import FollowerLag, HeldLog, ReplicaFacts, encode_facts
from metaq.replication.json_values import to_json
from metaq.replication.record import (
    ReplicaSetError,
    SetRecord,
    decode_record,
    encode_record,
    make_record,
)
from metaq.replication.set_file import read_set_file
from metaq.replication.set_nodes import (
    LeaderData,
    Shown,
    decode_member,
)
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths
from metaq.zk.session import Coordinator
from tests.broker.delay_rig import ask, mput_of
from tests.cli.runner import run
from tests.client.memory_broker import MemoryBroker
from tests.rigs.broker import Peer, running_broker

ONE_BROKER = {
    "MemoryBroker": "it answers as a replica in the state that the test wants",
    "store": "what it has stored becomes the first replica",
    "test_a_broker_that_has_messages_that_wait_is_not_made_a_set": "likewise",
}

PATHS, ID = NodePaths("/meta"), BrokerId(0)
RECORD = PATHS.replica_set(ID)
FIRST = make_record("s1", 1, {1, 2, 3}, min_in_sync=2, nonce="n1")
LED = FIRST.at(7, "n7", leader=1, in_sync=frozenset({1, 2}))


class Scene:
    """A set in ZooKeeper, and replicas that say what they are."""

    def __init__(self) -> None:
        self.zookeeper = MemoryZooKeeper()
        self.target = Target("memory", "/meta", (), 5.0, self.zookeeper.coordinator)
        self.brokers: dict[int, MemoryBroker] = {}

    def write(self, record: SetRecord) -> None:
        self.zookeeper.write(RECORD, encode_record(record))

    @property
    def record(self) -> SetRecord:
        return decode_record(self.zookeeper.tree()[RECORD].data)

    def lead(self, replica: int, epoch: Epoch = LED.epoch) -> None:
        data = to_json(LeaderData(replica, epoch, "meta://h:1"))
        self.zookeeper.write(PATHS.set_leader(ID), data)

    def show(
        self, facts: ReplicaFacts | None, replica: int = 0, **presence: Any
    ) -> None:
        """Have a replica be there; without facts it does not say what it has."""
        replica = facts.replica if facts else replica
        broker = self.brokers.setdefault(replica, MemoryBroker())

        def answer(command: object) -> Result | None:
            if not (isinstance(command, Stats) and command.item == "replica"):
                return None
            line = encode_facts(facts) if facts else "resultCode 1"
            body = f"STATS\r\n{line}\r\nEND\r\n".encode()
            return Result(200, body, command.opaque)

        broker.refuse = answer
        seen = Presence(replica, 5, PresenceState.READY, LED.revision, 7)
        shown = Shown(replace(seen, **presence), str(broker.address), "t")
        path = f"{PATHS.set_presences(ID)}/{replica}"
        self.zookeeper.write(path, to_json(shown))


@pytest.fixture
def scene() -> Iterator[Scene]:
    one = Scene()
    try:
        yield one
    finally:
        for broker in one.brokers.values():
            broker.__exit__()


def facts(replica: int, role: str = "following", **changes: Any) -> ReplicaFacts:
    return replace(ReplicaFacts(replica, role, "", 7, LED), **changes)


# -- looking --------------------------------------------------------------------------


def show_set(scene: Scene) -> None:
    """One leads, one follows, one is away and was never in sync."""
    scene.write(LED)
    scene.lead(1)
    lag = (FollowerLag(2, "in sync", True, 512, 0.25),)
    scene.show(facts(1, "leading", lag=lag))
    scene.show(facts(2), damaged=3, flag=Flag.CUT)


def test_a_set_is_shown_for_machines(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object, with a row for each replica."""
    show_set(scene)
    assert replicas.show_replicas(scene.target, None, as_json=True)
    seen = json.loads(capsys.readouterr().out)
    rows = {row["id"]: row for row in seen.pop("replicas")}
    assert seen == {
        "set": "s1",
        "leader": 1,
        "epoch": 7,
        "revision": 2,
        "in_sync": [1, 2],
        "min": 2,
    }
    address = str(scene.brokers[2].address)
    assert rows[2] == {
        "id": 2,
        "state": "ready",
        "role": "following",
        "is_in_sync": True,
        "flag": "cut",
        "address": address,
        "epoch": 7,
        "revision": 2,
        "damaged": 3,
        "mended": 0,
        "end_bytes": 0,
        "lag_bytes": 512,
        "lag_s": 0.25,
        "reason": None,
    }
    assert (rows[1]["role"], rows[1]["lag_bytes"]) == ("leading", None)
    assert (rows[3]["state"], rows[3]["is_in_sync"]) == ("away", False)
    assert rows[3]["address"] is None


@pytest.mark.slow
def test_a_set_is_shown_for_people(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row each, and a sentence; the exit code says whether puts are taken."""
    show_set(scene)
    assert replicas.show_replicas(scene.target, 0, as_json=False)
    output = capsys.readouterr()
    assert output.out.splitlines()[3].startswith("3\taway\t-\tFalse")
    assert (
        "replica 1 leads in epoch 7; in sync and present: replica 1, replica 2; 2 must"
        in output.err
    )
    scene.show(facts(2, "frozen", reason="set back"), state=PresenceState.FROZEN)
    assert not replicas.show_replicas(scene.target, 0, as_json=False)
    output = capsys.readouterr()
    assert "2\tfrozen\tfrozen" in output.out
    assert "set back" in output.out
    scene.zookeeper.remove(PATHS.set_leader(ID))
    show_set(scene)
    scene.zookeeper.remove(PATHS.set_leader(ID))
    assert not replicas.show_replicas(scene.target, 0, as_json=False)
    error = capsys.readouterr().err
    assert "no replica leads" in error
    assert "metaq replicas elect" not in error, "others lead in a moment"
    for each in 1, 2:
        scene.show(facts(each, "idle"), flag=Flag.INCOMPLETE)
    assert not replicas.show_replicas(scene.target, 0, as_json=False)
    assert "'metaq replicas elect' shows" in capsys.readouterr().err


def test_a_replica_that_says_nothing_is_shown_with_the_reason(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZooKeeper has the rest of the row."""
    show_set(scene)
    scene.show(None, 2)
    replicas.show_replicas(scene.target, None, as_json=True)
    row = json.loads(capsys.readouterr().out)["replicas"][1]
    assert (row["state"], row["role"]) == ("ready", None)
    assert "expected JSON" in row["reason"]


@pytest.mark.slow
def test_a_set_is_named_where_there_are_several(scene: Scene) -> None:
    """And where there is none, the error says so."""
    none = r"no replica set below /meta/replicas: 'metaq replicas init' .* --zk-root"
    with pytest.raises(ReplicaSetError, match=none):
        replicas.show_replicas(scene.target, None, as_json=True)
    scene.write(LED)
    scene.zookeeper.write(PATHS.replica_set(BrokerId(4)), encode_record(LED))
    with pytest.raises(ReplicaSetError, match="got 0, 4: name it with --id"):
        replicas.show_replicas(scene.target, None, as_json=True)
    with pytest.raises(
        ReplicaSetError,
        match=r"no .* set of broker 5; existing sets: 0, 4; .* restore'",
    ):
        replicas.show_replicas(scene.target, 5, as_json=True)


def test_replicas_are_not_asked_for_at_a_broker() -> None:
    """The option of other commands is refused in one sentence."""
    result = run("replicas", "--broker", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "leave out --broker" in result.stderr


# -- changing -------------------------------------------------------------------------


def test_a_zookeeper_that_is_away_is_named(scene: Scene) -> None:
    """With its address, and for how long it was waited for."""
    scene.zookeeper.stop()
    target = replace(scene.target, timeout_s=0.2)
    with pytest.raises(NoBrokerError, match=r"no ZooKeeper answers at memory \(wait"):
        replicas.show_replicas(target, None, as_json=False)


@pytest.mark.slow
def test_replicas_come_and_go(scene: Scene) -> None:
    """And the minimum with them; repeated, nothing changes."""
    scene.write(LED)
    replicas.add(scene.target, 4, None, None)
    assert scene.record == LED.then(replicas=frozenset({1, 2, 3, 4}))
    replicas.add(scene.target, 4, None, None)
    assert scene.record.revision == LED.revision + 1
    replicas.add(scene.target, 4, None, 1)
    assert scene.record.min == 1
    replicas.remove(scene.target, 2, None, None)
    assert scene.record.replicas == {1, 3, 4}
    assert scene.record.in_sync == {1}
    with pytest.raises(ReplicaSetError, match="replica 1 leads; hand over first"):
        replicas.remove(scene.target, 1, None, None)
    with pytest.raises(ReplicaSetError, match="expected 2 in-sync replicas or more"):
        replicas.remove(scene.target, 3, None, 2)


@pytest.mark.slow
def test_a_leader_is_asked_to_hand_over(scene: Scene) -> None:
    """The exit code says whether the other one leads."""
    show_set(scene)
    assert not replicas.transfer(scene.target, 2, None, leads_s=0.2)
    assert scene.record == LED.then(target=2)
    scene.lead(1)
    assert replicas.transfer(scene.target, 1, None, leads_s=0.2)
    assert scene.record.target == 1, "the request was withdrawn"
    assert not replicas.transfer(scene.target, 2, None, leads_s=0.2)
    scene.lead(2)
    assert replicas.transfer(scene.target, 2, None, leads_s=0.2)
    assert scene.record.target == 2
    with pytest.raises(
        ReplicaSetError, match="replica 3 cannot lead: it is away, or not ready"
    ):
        replicas.transfer(scene.target, 3, None)


@pytest.mark.slow
def test_a_replica_is_forced_to_lead_after_what_is_lost_was_shown(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for, by log; the record then has it alone in sync."""
    scene.write(LED)
    scene.lead(1)
    logs = (HeldLog("t-0", 5, 0, 60, 40), HeldLog("u-0", 6, 0, 10, 10))
    scene.show(facts(2, logs=logs))
    scene.show(facts(3, logs=(HeldLog("t-0", 5, 0, 90, 70),)))
    with pytest.raises(click.UsageError, match="use --yes to confirm"):
        replicas.elect(scene.target, 2, None, is_sure=False)
    assert scene.record == LED
    capsys.readouterr()
    assert not replicas.elect(scene.target, 2, None, is_sure=True, leads_s=0.2)
    output = capsys.readouterr()
    assert output.out.splitlines()[1:] == ["t-0\t60\t90\t70\t3"]
    assert "1 logs of 2 are shorter at replica 2" in output.err
    assert "replicas without an answer: 1" in output.err
    assert "in sync, and" not in output.err
    assert "0 committed offsets lowered to the log ends of replica 2" in output.err
    record = scene.record
    assert record.in_sync == {2}
    assert (record.leader, record.forced) == (0, (8,))
    assert record.epoch.number == 8
    assert PATHS.set_leader(ID) not in scene.zookeeper.tree()
    with pytest.raises(ReplicaSetError, match="replica 1 does not report its logs"):
        replicas.elect(scene.target, 1, None, is_sure=True, leads_s=0.2)


def test_what_no_replica_can_say_is_lost_is_named_before_a_replica_is_forced(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """No log has less than elsewhere where no other replica is asked."""
    scene.write(replace(LED, in_sync=frozenset({1, 3})))
    scene.show(facts(2, logs=(HeldLog("t-0", 5, 0, 60, 40),)))
    with pytest.raises(click.UsageError, match="use --yes to confirm"):
        replicas.elect(scene.target, 2, None, is_sure=False)
    assert "replica 2 is not in sync, and no answer came from 1, 3" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_groups_go_on_at_the_log_ends_of_a_replica_that_is_forced_to_lead(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """Above these they would pass over what comes next; other offsets stay."""
    nodes = {
        "g/offsets/t/0-0": b"77-70",
        "g/offsets/t/0-1": b"78-5",
        "g/offsets/u/0-0": b"79-10",
        "g/offsets/u/1-0": b"80-90",
        "java/offsets/t/0-0": b"no offset",
        "away/offsets/t/0-0": b"61",
    }
    for path, data in nodes.items():
        scene.zookeeper.write(f"/meta/consumers/{path}", data)
    scene.write(LED)
    logs = (HeldLog("t-0", 5, 0, 60, 40), HeldLog("u-0", 6, 0, 10, 10))
    scene.show(facts(2, logs=logs))

    def stored() -> dict[str, bytes]:
        tree = scene.zookeeper.tree()
        return {path: tree[f"/meta/consumers/{path}"].data for path in nodes}

    with pytest.raises(click.UsageError, match="use --yes to confirm"):
        replicas.elect(scene.target, 2, None, is_sure=False)
    assert stored() == nodes
    assert not replicas.elect(scene.target, 2, None, is_sure=True, leads_s=0.2)
    assert stored() == nodes | {
        "g/offsets/t/0-0": b"-1-60",
        "g/offsets/t/0-1": b"-1-0",
        "away/offsets/t/0-0": b"-1-60",
    }
    said = capsys.readouterr().err
    assert "group g: committed offset 70 of t/0-0 will be set to 60" in said
    assert "3 committed offsets lowered to the log ends of replica 2" in said
    assert "replica 2 does not lead after 0.2 s" in said


def test_nothing_is_said_of_offsets_where_no_replica_was_forced(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is removed while the operator is asked: the election lands nowhere."""
    scene.write(LED)
    scene.show(facts(2, logs=(HeldLog("t-0", 5, 0, 60, 40),)))
    path = "/meta/consumers/g/offsets/t/0-0"
    scene.zookeeper.write(path, b"77-70")
    scene.write(replace(LED, replicas=frozenset({1, 3}), in_sync=frozenset({1, 3})))
    with pytest.raises(ReplicaSetError, match=r"expected one of \[1, 3\], got 2"):
        replicas.elect(scene.target, 2, None, is_sure=True, leads_s=0.2)
    assert "lowered" not in capsys.readouterr().err
    assert scene.zookeeper.tree()[path].data == b"77-70"


def frozen(scene: Scene, *copies: ReplicaFacts) -> None:
    for each in copies:
        scene.show(each, state=PresenceState.FROZEN)


@pytest.mark.slow
@pytest.mark.parametrize("has_older", [True, False])
def test_a_lost_record_is_made_again_from_the_copies(
    scene: Scene, has_older: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest counts; all but those named as missing have to be there."""
    if has_older:
        scene.write(FIRST)
    older = FIRST.at(6, "n6", leader=2)
    newest = older.at(7, "n7", leader=1, in_sync=frozenset({1, 2}))
    frozen(scene, facts(1, record=newest), facts(2, record=older))
    with pytest.raises(ReplicaSetError, match=r"replicas \[3\] have not reported"):
        replicas.restore(scene.target, None, (), is_dry=False, is_sure=True)
    replicas.restore(scene.target, None, (3,), is_dry=True, is_sure=True)
    before = scene.zookeeper.tree().get(RECORD)
    assert (before.data if before else b"") == (
        encode_record(FIRST) if has_older else b""
    )
    capsys.readouterr()
    replicas.restore(scene.target, None, (3,), is_dry=False, is_sure=True)
    rows = [line.split("\t")[:2] for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [["1", "frozen"], ["2", "frozen"], ["3", "away"]]
    record = scene.record
    assert (record.set_id, record.leader) == ("s1", 0)
    assert record.in_sync == {1, 2}
    assert record.epoch.number == 1_000_007
    assert record.revision > newest.revision + 999_999
    # Replicas that have not read it yet show their old copies.
    replicas.restore(scene.target, None, (), is_dry=False, is_sure=True)
    assert "nothing to restore" in capsys.readouterr().err
    assert scene.record == record


def test_a_record_that_changed_while_the_operator_was_asked_is_not_restored(
    scene: Scene,
) -> None:
    """Another one may lead by it."""
    newest = FIRST.at(7, "n7", leader=1, in_sync=frozenset({1, 2}))
    scene.write(FIRST)
    frozen(scene, *(facts(k, record=newest) for k in (1, 2, 3)))
    claimed = FIRST.at(2, "other", leader=2)

    def write_first(clock: Clock) -> Coordinator:
        looks.append(clock)
        if len(looks) == 2:
            scene.write(claimed)
        return scene.zookeeper.coordinator(clock)

    looks: list[Clock] = []
    target = replace(scene.target, coordinator=write_first)
    with pytest.raises(ReplicaSetError, match="the record of the set has changed"):
        replicas.restore(target, None, (), is_dry=False, is_sure=True)
    assert scene.record == claimed


@pytest.mark.slow
def test_copies_of_two_histories_are_not_mixed(scene: Scene) -> None:
    """Whose are not believed are stopped, and named as missing."""
    one, other = (FIRST.at(6, nonce, leader=1) for nonce in ("a", "b"))
    frozen(scene, facts(1, record=one), facts(2, record=other))
    with pytest.raises(ReplicaSetError, match="two histories"):
        replicas.restore(scene.target, 0, (3,), is_dry=False, is_sure=True)
    scene.zookeeper.remove(f"{PATHS.set_presences(ID)}/1")
    replicas.restore(scene.target, 0, (1, 3), is_dry=False, is_sure=True)
    assert [claim.epoch.nonce for claim in scene.record.claims[:2]] == ["n1", "b"]


# -- data directories -----------------------------------------------------------------

SETTINGS = """
[system]
brokerId=0
numPartitions=2
dataPath={data}
unflushThreshold=0
unflushInterval=10000
maxSegmentSize=1048576
maxTransferSize=1048576
[zookeeper]
zk.zkConnect=memory:2181
zk.zkConnectionTimeoutMs=5000
[replication]
replicaId={replica}
[topic=test]
"""


def write_settings(tmp_path: Path, data: Path, replica: int = 1) -> Path:
    path = tmp_path / "server.ini"
    path.write_text(SETTINGS.format(data=data, replica=replica))
    return path


@pytest.fixture
def data_of_a_broker(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    asyncio.run(store(data))
    return data


async def store(data: Path) -> None:
    async with running_broker(data) as broker, Peer(broker) as peer:
        await peer.ask(b"put test 0 5 0 907060870 1\r\nhello")


def init(scene: Scene, path: Path, **options: Any) -> None:
    wanted = {"others": (2, 3), "min_in_sync": 2, "is_sure": True, **options}
    replicas.init(path, {}, new_coordinator=scene.zookeeper.coordinator, **wanted)


def join(scene: Scene, path: Path, *, is_discarding: bool = True) -> bool:
    return replicas.join(
        path,
        {},
        is_discarding=is_discarding,
        is_sure=True,
        new_coordinator=scene.zookeeper.coordinator,
    )


@pytest.mark.slow
def test_a_set_is_made_from_the_data_of_one_broker(
    scene: Scene, data_of_a_broker: Path, tmp_path: Path
) -> None:
    """In its files and in ZooKeeper; again it does nothing, elsewhere it is refused."""
    path = write_settings(tmp_path, data_of_a_broker)
    with pytest.raises(click.UsageError, match="use --yes to confirm"):
        init(scene, path, is_sure=False)
    assert RECORD not in scene.zookeeper.tree()
    init(scene, path)
    record = scene.record
    assert record.in_sync == {1}
    assert record.replicas == {1, 2, 3}
    assert record.min == 2
    assert (record.leader, record.epoch.number) == (0, 1)
    file = read_set_file(SystemFileSystem(), data_of_a_broker)
    assert file is not None
    assert file.record == record
    registered = scene.zookeeper.tree()[f"{PATHS.set_members(ID)}/1"].data
    member = decode_member(registered)
    assert list(member.directories.values()) == [1]
    init(scene, path)
    assert scene.record == record
    other = write_settings(tmp_path, tmp_path / "empty", 2)
    with pytest.raises(ReplicaSetError, match="to join it, start a replica"):
        init(scene, other)


def test_a_broker_that_has_messages_that_wait_is_not_made_a_set(
    scene: Scene, tmp_path: Path
) -> None:
    """They were never delivered, and nothing said so."""

    async def schedule() -> None:
        async with running_broker(tmp_path / "data") as broker, Peer(broker) as peer:
            due_ms = broker.context.clock.wall_ms() + 3_600_000
            assert (await ask(peer, mput_of(b"later", due_ms=due_ms))).status == 200

    asyncio.run(schedule())
    path = write_settings(tmp_path, tmp_path / "data")
    with pytest.raises(
        ReplicaSetError, match="the data directory has 1 scheduled messages"
    ):
        init(scene, path)
    assert RECORD not in scene.zookeeper.tree()
    assert read_set_file(SystemFileSystem(), tmp_path / "data") is None


def test_a_running_broker_is_not_made_a_set(scene: Scene, tmp_path: Path) -> None:
    """Nothing is changed below it."""
    data = tmp_path / "data"
    path = write_settings(tmp_path, data)
    SystemFileSystem().make_directory(data)
    lock = SystemFileSystem().lock_directory(data)
    try:
        with pytest.raises(LogDirLockedError):
            init(scene, path)
    finally:
        lock.release()
    assert read_set_file(SystemFileSystem(), data) is None
    assert RECORD not in scene.zookeeper.tree()


def test_settings_without_a_replica_are_refused(scene: Scene, tmp_path: Path) -> None:
    """The error names the section."""
    path = write_settings(tmp_path, tmp_path / "data")
    text = path.read_text()
    path.write_text(text.replace("[replication]\nreplicaId=1\n", ""))
    with pytest.raises(ConfigError, match=r"expected a section \[replication\]"):
        init(scene, path)


@pytest.mark.slow
def test_data_that_is_no_part_of_a_set_is_discarded_on_request(
    scene: Scene, data_of_a_broker: Path, tmp_path: Path
) -> None:
    """Not without a word, not for a stranger, and not the only copy that is there."""
    path = write_settings(tmp_path, data_of_a_broker, 2)
    with pytest.raises(ReplicaSetError, match="run 'metaq replicas init'"):
        join(scene, path)
    scene.write(LED)
    assert not join(scene, path, is_discarding=False)
    with pytest.raises(ReplicaSetError, match="no other in-sync replica is present"):
        join(scene, path)
    assert (data_of_a_broker / "test-0").is_dir()
    scene.show(facts(1))
    assert join(scene, path)
    assert list(data_of_a_broker.glob("aside/*/test-0"))
    assert not (data_of_a_broker / "test-0").exists()
    assert join(scene, path, is_discarding=False)
