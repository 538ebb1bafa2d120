"""Groups through `client.admin()`: described, moved, copied, deleted; both worlds.

Members and offsets are written by hand, as MetaQ's Java consumers keep them.
"""

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.client import (
    Client,
    ConfigError,
    GroupInUseError,
    GroupOffset,
    MetaqError,
    NoBrokerError,
    OffsetChange,
    PartitionsAwayError,
)
from metaq.client.errors import CannotAnswerError
from metaq.errors import ClientError
from metaq.model import BrokerId, MessageId, Offset
from metaq.testing.zk import MemoryZooKeeper
from tests.brokers import PYTHON, AnyBroker, StartBroker, broker_of
from tests.client.worlds import WORLDS, partition, payloads, take

PATIENCE_S = 60.0
RECORD_BYTES = 20 + 2
COUNT = 10
ONE_BROKER = {
    "pair": "MetaQ 1.4 records nothing: its partitions are unknown, not away",
    "test_what_retention_removed_before_it_was_handled_is_a_problem": (
        "the stand-in removes a segment on cue; the client asks both alike"
    ),
}
ZERO, ONE = partition(), partition(1)
GROUP = "/meta/consumers/g"


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    made = start_broker({"test": 2, "other": 1})
    made.put(*(b"%02d" % number for number in range(COUNT)), topic="test")
    return made


@pytest.fixture(params=WORLDS)
def admin(request: pytest.FixtureRequest, broker: AnyBroker) -> Iterator[Any]:
    with WORLDS[request.param](**broker.client_options) as client:
        yield client.admin()


def commit(
    broker: AnyBroker, offset: int, name: str = "test/0-0", group: str = "g"
) -> None:
    """Write an offset as a Java consumer does: `<message id>-<offset>`."""
    path = f"/meta/consumers/{group}/offsets/{name}"
    broker.zookeeper.put(path, b"7-%d" % offset)


def join(broker: AnyBroker, topics: bytes = b"test", group: str = "g") -> None:
    """Register a member as a Java consumer does."""
    path = f"/meta/consumers/{group}/ids/{group}_10.0.0.7-1-x"
    broker.zookeeper.put(path, topics, session_id=99)


def stored(offset: int) -> GroupOffset:
    return GroupOffset(Offset(offset), MessageId(7))


def chosen(offset: int) -> GroupOffset:
    """Return an offset that no message was read before."""
    return GroupOffset(Offset(offset), MessageId(-1))


def test_groups_are_seen_without_joining_them(broker: AnyBroker, admin: Any) -> None:
    """Names, members, owners, offsets and lag; no node is made."""
    commit(broker, 4 * RECORD_BYTES)
    join(broker)
    owner = b"g_10.0.0.7-1-x"
    broker.zookeeper.put(f"{GROUP}/owners/test/0-0", owner, session_id=99)
    commit(broker, 0, group="another")
    before = broker.zookeeper.tree()
    assert admin.groups() == ("another", "g")
    found = admin.describe_group("g")
    assert found.members == {owner.decode(): ("test",)}
    first, second = found.partitions
    assert (first.partition, first.owner) == (ZERO, owner.decode())
    assert first.committed == 4 * RECORD_BYTES
    assert first.lag.bytes == 6 * RECORD_BYTES
    assert first.lag.messages == (6 if broker.has_extensions else None)
    assert (second.partition, second.owner, second.is_wanted) == (ONE, None, True)
    assert admin.describe_group("nobody").partitions == ()
    assert broker.zookeeper.tree() == before


def test_what_retention_removed_before_it_was_handled_is_a_problem(
    start_metaq_1_4: StartBroker,
) -> None:
    """The lag counts what there is, and would be 0 of a log that lost all of it."""
    broker: Any = start_metaq_1_4({"test": 1})
    broker.put(b"aa", b"bb")
    broker.inner.roll()
    broker.put(b"cc")
    broker.inner.trim()
    commit(broker, RECORD_BYTES)
    commit(broker, 2 * RECORD_BYTES, group="at-the-start")
    with Client(**broker.client_options) as client:
        (found,) = client.admin().describe_group("g").partitions
        (other,) = client.admin().describe_group("at-the-start").partitions
    assert found.lag.bytes == other.lag.bytes == RECORD_BYTES
    assert found.problem == (
        f"test/0-0: offset {RECORD_BYTES} is before the log start {2 * RECORD_BYTES}:"
        f" {RECORD_BYTES} bytes that the group has not handled are gone"
    )
    assert other.problem is None


def test_committed_offsets_are_read_back(broker: AnyBroker, admin: Any) -> None:
    """Of all topics or some; a node that holds none has the error that it is."""
    commit(broker, RECORD_BYTES)
    commit(broker, 0, "other/0-0")
    broker.zookeeper.put(f"{GROUP}/offsets/test/0-1", b"x")
    found = admin.committed_offsets("g", ["test"])
    assert found[ZERO] == stored(RECORD_BYTES)
    assert isinstance(found[ONE], MetaqError)
    assert f"{GROUP}/offsets/test/0-1" in str(found[ONE])
    assert len(admin.committed_offsets("g")) == 3
    assert admin.committed_offsets("nobody") == {}


Write = Callable[..., Any]
WRITES: dict[str, tuple[Write, set[str]]] = {
    "reset": (
        lambda admin, **more: admin.reset_offsets("g", to="earliest", **more),
        {f"{GROUP}/offsets/test/0-0", f"{GROUP}/offsets/test/0-1"},
    ),
    "copy": (
        lambda admin, **more: admin.copy_offsets("source", "g", **more),
        {f"{GROUP}/offsets/test/0-0"},
    ),
    "delete offsets": (
        lambda admin, **more: admin.delete_offsets("g", **more),
        {f"{GROUP}/offsets/test/0-0"},
    ),
    "delete group": (
        lambda admin, **more: admin.delete_group("g", **more),
        {GROUP, f"{GROUP}/offsets", f"{GROUP}/offsets/test/0-0"},
    ),
}
"""Ways to change a group, and nodes that change then."""


@pytest.mark.parametrize("name", WRITES)
def test_a_plan_says_what_a_write_does_and_changes_nothing(
    broker: AnyBroker, admin: Any, name: str
) -> None:
    """The same values come of the write."""
    commit(broker, RECORD_BYTES)
    commit(broker, 2 * RECORD_BYTES, group="source")
    write, touched = WRITES[name]
    before = broker.zookeeper.tree()
    planned = write(admin, plan=True)
    assert broker.zookeeper.tree() == before
    assert planned[0].old == stored(RECORD_BYTES)
    assert write(admin) == planned
    after = broker.zookeeper.tree()
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    assert touched <= changed
    assert all(path.startswith(GROUP) for path in changed)
    news = {f"{GROUP}/offsets/test/{one.partition.name}": one.new for one in planned}
    for path, new in news.items():
        data = after[path].data if path in after else None
        assert data == (new and b"%d-%d" % (new.message_id, new.offset))


@pytest.mark.parametrize("name", WRITES)
def test_a_group_with_a_live_member_is_left_alone(
    broker: AnyBroker, admin: Any, name: str
) -> None:
    """It would overwrite what is written; so a plan is refused as the write is."""
    commit(broker, RECORD_BYTES)
    commit(broker, 2 * RECORD_BYTES, group="source")
    join(broker)
    write, _touched = WRITES[name]
    before = broker.zookeeper.tree()
    for more in ({}, {"plan": True}):
        with pytest.raises(GroupInUseError, match=r"got 1 \(g_10\.0\.0\.7-1-x\)"):
            write(admin, **more)
    assert broker.zookeeper.tree() == before


@pytest.mark.parametrize("name", ["reset", "copy"])
def test_force_moves_a_group_that_reads(
    broker: AnyBroker, admin: Any, name: str
) -> None:
    commit(broker, RECORD_BYTES)
    commit(broker, 2 * RECORD_BYTES, group="source")
    join(broker)
    write, _touched = WRITES[name]
    before = broker.zookeeper.tree()
    planned = write(admin, plan=True, force=True)
    assert broker.zookeeper.tree() == before
    assert write(admin, force=True) == planned
    assert admin.committed_offsets("g")[ZERO] == planned[0].new


def test_a_member_of_another_topic_is_in_nobodys_way(
    broker: AnyBroker, admin: Any
) -> None:
    """But the group as a whole is not deleted under it."""
    commit(broker, RECORD_BYTES)
    join(broker, b"other")
    admin.reset_offsets("g", to="latest")
    admin.delete_offsets("g", topics=["test"])
    assert admin.committed_offsets("g") == {}
    with pytest.raises(GroupInUseError):
        admin.delete_group("g")


@pytest.mark.parametrize(
    ("count", "left"), [(1, 6), (7, 0), (COUNT, 0)], ids=["one", "all", "more"]
)
def test_a_group_goes_back_by_messages(
    broker: AnyBroker, admin: Any, count: int, left: int
) -> None:
    """From its committed offset, to the log start at most; then it reads them again."""
    commit(broker, 7 * RECORD_BYTES)
    (change,) = admin.reset_offsets("g", to=-count)
    wanted = OffsetChange(ZERO, stored(7 * RECORD_BYTES), chosen(left * RECORD_BYTES))
    assert change == wanted
    with (
        Client(**broker.client_options) as client,
        client.consumer("g", ["test"]) as consumer,
    ):
        read = payloads(take(consumer, 2))
    assert read == [b"%02d" % left, b"%02d" % (left + 1)]


def test_there_must_be_an_offset_to_go_back_from(broker: AnyBroker, admin: Any) -> None:
    """Other partitions of the topic are left out, unless they are named."""
    with pytest.raises(ClientError, match="group g has committed no offset"):
        admin.reset_offsets("g", topics=["test"], to=-1)
    commit(broker, RECORD_BYTES)
    changes = admin.reset_offsets("g", topics=["test"], to=-1, plan=True)
    assert [one.partition for one in changes] == [ZERO]
    with pytest.raises(ClientError, match="test/0-1: group g has committed no offset"):
        admin.reset_offsets("g", partitions=[ONE], to=-1)


def test_a_group_goes_to_a_time(broker: AnyBroker, admin: Any) -> None:
    """Before everything, and after; a MetaQ 1.4 broker knows no times."""
    early, late = (dt.datetime(year, 1, 1, tzinfo=dt.UTC) for year in (2020, 2200))
    if not broker.has_extensions:
        with pytest.raises(CannotAnswerError, match="no times"):
            admin.reset_offsets("g", topics=["test"], to=early)
        return
    for moment, offset in ((early, 0), (late, COUNT * RECORD_BYTES)):
        changes = admin.reset_offsets("g", topics=["test"], to=moment)
        assert [one.new for one in changes] == [chosen(offset), chosen(0)]


def test_each_partition_may_have_an_offset_of_its_own(
    broker: AnyBroker, admin: Any
) -> None:
    """Partitions as values, or as names of the one topic."""
    offset = 3 * RECORD_BYTES
    (change,) = admin.reset_offsets("g", to={ZERO: offset}, plan=True)
    assert change == OffsetChange(ZERO, None, chosen(offset))
    changes = admin.reset_offsets("g", topics=["test"], to={"0-0": offset, "0-1": 0})
    assert [one.new for one in changes] == [chosen(offset), chosen(0)]
    with pytest.raises(ClientError, match=r"test/0-0.*\b5\b"):
        admin.reset_offsets("g", to={ZERO: 5})
    assert admin.committed_offsets("g")[ZERO] == chosen(offset)


def test_without_topics_a_group_moves_where_it_has_committed(
    broker: AnyBroker, admin: Any
) -> None:
    """In whole topics; a group without any offset has to be told which."""
    with pytest.raises(ClientError, match="the names of topics"):
        admin.reset_offsets("g", to="earliest")
    commit(broker, RECORD_BYTES)
    changes = admin.reset_offsets("g", to="earliest", plan=True)
    assert [one.partition for one in changes] == [ZERO, ONE]
    changes = admin.reset_offsets(
        "g", topics=["test"], partitions=["0-1"], to="latest", plan=True
    )
    assert [one.partition for one in changes] == [ONE]
    with pytest.raises(NoBrokerError, match="'nosuch'"):
        admin.reset_offsets("g", topics=["nosuch"], to="latest", timeout=0.5)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"to": 5}, ConfigError, "{partition: offset}.* got 5"),
        ({"to": True}, ConfigError, "got True"),
        ({"to": "soon"}, ConfigError, "to: expected earliest or latest, got 'soon'"),
        ({"to": None}, TypeError, "to: expected earliest, latest, a datetime"),
        ({"to": {ZERO: -1}}, ConfigError, "offset of test/0-0"),
        ({"to": {"0-0": 0}}, ConfigError, "'0-0' may be of any of 0 topics"),
        ({"to": {"x": 0}, "topics": ["test"]}, ConfigError, "a name as '0-3'"),
        ({"to": {3: 0}}, TypeError, "expected TopicPartition or str, got int"),
        ({"to": {ZERO: 0}, "partitions": [ZERO]}, ConfigError, "partitions: expected"),
        ({"to": "latest", "partitions": [3]}, TypeError, "TopicPartition or str"),
        ({"to": "latest", "topics": "test"}, TypeError, "topics"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    broker: AnyBroker, admin: Any, arguments: dict[str, Any], kind: Any, text: str
) -> None:
    """Before anything is read or written."""
    before = broker.zookeeper.tree()
    with pytest.raises(kind, match=text):
        admin.reset_offsets("g", **arguments)
    for call in (
        lambda: admin.reset_offsets("a b", to="latest"),
        lambda: admin.copy_offsets("g", "a/b"),
    ):
        with pytest.raises(ConfigError, match="group"):
            call()
    assert broker.zookeeper.tree() == before


def test_offsets_are_copied_by_topic(broker: AnyBroker, admin: Any) -> None:
    """Ids included; what the target has beyond them stays."""
    commit(broker, RECORD_BYTES, group="source")
    commit(broker, 0, "other/0-0", group="source")
    commit(broker, 5, "test/0-1")
    changes = admin.copy_offsets("source", "g", topics=["test"])
    assert changes == (OffsetChange(ZERO, None, stored(RECORD_BYTES)),)
    found = admin.committed_offsets("g")
    assert found == {ZERO: stored(RECORD_BYTES), ONE: stored(5)}
    with pytest.raises(ClientError, match="group nobody has no offsets"):
        admin.copy_offsets("nobody", "g")


def test_offsets_of_some_partitions_are_deleted(broker: AnyBroker, admin: Any) -> None:
    """The same call again deletes nothing, and is no error."""
    commit(broker, RECORD_BYTES)
    commit(broker, 5, "test/0-1")
    (change,) = admin.delete_offsets("g", topics=["test"], partitions=["0-1"])
    assert change == OffsetChange(ONE, stored(5), None)
    assert admin.committed_offsets("g") == {ZERO: stored(RECORD_BYTES)}
    assert admin.delete_offsets("g", partitions=[ONE]) == ()


def test_a_group_is_deleted_with_all_of_its_nodes(
    broker: AnyBroker, admin: Any
) -> None:
    """A node that holds no offset goes too; a name that is none is an error."""
    commit(broker, RECORD_BYTES)
    broker.zookeeper.put(f"{GROUP}/offsets/test/0-1", b"x")
    broker.zookeeper.put("/meta/filters/g", b"tag = 'paid'")
    changes = admin.delete_group("g")
    assert changes == (
        OffsetChange(ZERO, stored(RECORD_BYTES), None),
        OffsetChange(ONE, None, None),
    )
    assert not any(path.startswith(GROUP) for path in broker.zookeeper.tree())
    assert "/meta/filters/g" not in broker.zookeeper.tree()
    commit(broker, 0, group="spelt")
    with pytest.raises(ClientError, match="no group g; existing groups: spelt"):
        admin.delete_group("g")


def test_a_killed_member_that_still_owns_keeps_its_group(
    broker: AnyBroker, admin: Any
) -> None:
    """Until its session ends; the offsets stay."""
    commit(broker, RECORD_BYTES)
    broker.zookeeper.put(f"{GROUP}/owners/test/0-0", b"g_killed", session_id=99)
    with pytest.raises(GroupInUseError, match="still owns partitions"):
        admin.delete_group("g")
    assert admin.committed_offsets("g") == {ZERO: stored(RECORD_BYTES)}


@pytest.mark.parametrize("world", WORLDS)
def test_without_zookeeper_there_are_no_groups(broker: AnyBroker, world: str) -> None:
    with WORLDS[world](brokers=[broker.address]) as client:
        admin = client.admin()
        for call in (
            admin.groups,
            lambda: admin.describe_group("g"),
            lambda: admin.reset_offsets("g", to="latest"),
            lambda: admin.delete_group("g"),
        ):
            with pytest.raises(ConfigError, match="kept in ZooKeeper"):
                call()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[AnyBroker, AnyBroker]]:
    server = MemoryZooKeeper()
    with (
        broker_of(PYTHON, tmp_path / "0", {"t": 1}, zookeeper=server) as first,
        broker_of(
            PYTHON, tmp_path / "1", {"t": 1}, zookeeper=server, broker_id=1
        ) as second,
    ):
        yield first, second


def test_a_partition_that_is_away_is_not_left_out_in_silence(
    pair: tuple[AnyBroker, AnyBroker],
) -> None:
    """The rest is moved by name."""
    first, second = pair
    here = partition(topic="t")
    second.stop()
    with Client(**first.client_options) as client:
        admin = client.admin()
        before = first.zookeeper.tree()
        with pytest.raises(PartitionsAwayError, match="broker 1 is away") as caught:
            admin.reset_offsets("g", topics=["t"], to="latest")
        (gone,) = caught.value.partitions
        with pytest.raises(NoBrokerError, match="broker 1 is not registered"):
            admin.reset_offsets("g", partitions=[here, gone], to="latest")
        assert first.zookeeper.tree() == before
        (change,) = admin.reset_offsets("g", partitions=[here], to="latest")
        assert change.partition == here
        assert gone.broker_id == BrokerId(1)
