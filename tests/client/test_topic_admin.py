"""Administration of topics on our brokers in this process: both worlds."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from metaq.client import (
    Client,
    ConfigError,
    Effect,
    GroupInUseError,
    NoBrokerError,
    NoTopicError,
    RequestTimeoutError,
    TopicExistsError,
)
from metaq.client.errors import BrokerRegisteredError, TopicRefusedError
from metaq.clock import Clock
from metaq.errors import ClientError, MetaqError
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.definitions import TopicDefinition, encode_definition
from metaq.zk.errors import CoordinationTimeoutError
from tests.client.worlds import QUICK, WORLDS, parts_of
from tests.rigs.inside import change_settings, running_inside
from tests.rigs.waiting import wait_until
from tests.zk.meddling import MeddledZooKeeper

ONE_BROKER = {"Cluster": "a MetaQ 1.4 broker takes no definitions"}
MORE = {"unflushInterval": "5000", "deletePolicy": "delete,72h"}


class Cluster:
    """Brokers of ours on one ZooKeeper in memory."""

    def __init__(self, directory: Path) -> None:
        self.zookeeper = MeddledZooKeeper()
        self.brokers = [
            EmbeddedBroker(
                directory / str(number),
                topics={"mine": 1} if number == 0 else {"wild-*": 1},
                zookeeper=self.zookeeper,
                settings={"brokerId": str(number)},
            )
            for number in (0, 1)
        ]

    def names(self, path: str) -> tuple[str, ...]:
        return self.zookeeper.names(f"/meta{path}") or ()

    def write(self, path: str, text: str) -> None:
        self.zookeeper.write(f"/meta{path}", text.encode())

    def problems(self, number: int = 0) -> tuple[str, ...]:
        return running_inside(self.brokers[number]).control.status().definition_problems

    def directories(self, number: int = 0) -> set[str]:
        return {
            path.name
            for path in self.brokers[number].data_path.iterdir()
            if path.is_dir()
        }


@contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    found = Cluster(directory)
    with ExitStack() as stack:
        for broker in found.brokers:
            stack.enter_context(broker)
        yield found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path) as found:
        yield found


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(coordinator=cluster.zookeeper.coordinator, **QUICK) as made:
        yield made


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Return a client of brokers with topic orders, for what changes nothing."""
    with (
        running(tmp_path_factory.mktemp("refused")) as found,
        Client(coordinator=found.zookeeper.coordinator, **QUICK) as made,
    ):
        made.admin().create_topic("orders", partitions=2)
        yield made


def send(client: Client, topic: str, *data: bytes, partition: str = "0-0") -> list[int]:
    with client.producer() as producer:
        return [
            producer.send(topic, each, partition=partition, timeout=20).offset
            for each in data
        ]


def delete_but_for(admin: Any, topic: str, left: str) -> None:
    """Delete a topic until the error says that nothing but `left` is missing."""
    errors: list[MetaqError] = []
    # The first is enough, unless the machine is busy.
    for timeout in (0.5, 1, 2, 4, 8):
        with pytest.raises(MetaqError) as late:
            admin.delete_topic(topic, timeout=timeout)
        errors.append(late.value)
        if isinstance(late.value, RequestTimeoutError) and left in str(late.value):
            return
    raise AssertionError(f"no error says {left!r}: {errors}")


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_topic_is_made_used_altered_and_deleted(cluster: Cluster, world: str) -> None:
    """At once, on every broker, without a line in a file."""
    with WORLDS[world](coordinator=cluster.zookeeper.coordinator, **QUICK) as client:
        admin = client.admin()
        made = admin.create_topic("orders", partitions=2, settings=MORE)
        assert [(b.broker_id, b.partitions, b.effect) for b in made.brokers] == [
            (0, 2, Effect.IN_EFFECT),
            (1, 2, Effect.IN_EFFECT),
        ]
        names = [p.name for p in client.partitions("orders")]
        assert names == ["0-0", "0-1", "1-0", "1-1"]
        with client.producer() as producer:
            producer.send("orders", b"one", partition="1-1")
        assert [m.data for m in client.browse("orders")] == [b"one"]
        altered = admin.alter_topic("orders", partitions=3, settings={"stat": "true"})
        assert [b.partitions for b in altered.brokers] == [3, 3]
        assert altered.definition.settings == {**MORE, "stat": "true"}
        assert admin.describe_topic("orders") == altered
        assert [d.topic for d in admin.topics()] == ["mine", "orders", "wild-*"]
        admin.delete_topic("orders")
        with pytest.raises(NoTopicError, match=r"there is no topic 'orders'"):
            admin.describe_topic("orders")
        assert "orders" not in client.topics()


@pytest.mark.slow
def test_settings_are_those_of_the_definition(cluster: Cluster, client: Client) -> None:
    """Settings that it lacks come from the broker's [system]."""
    client.admin().create_topic("orders", partitions=2, settings=MORE)
    broker = running_inside(cluster.brokers[0])
    topic = broker.context.config.topic("orders")
    assert topic.unflush_interval_ms == 5000
    assert str(topic.delete_policy) == "delete,72h"
    assert topic.delete_when == broker.context.config.system.delete_when
    client.admin().alter_topic("orders", settings={"unflushInterval": " "})
    topic = broker.context.config.topic("orders")
    assert topic.unflush_interval_ms == 10_000
    assert str(topic.delete_policy) == "delete,72h"


@pytest.mark.slow
def test_a_topic_that_nobody_may_use_yet_is_made(client: Client) -> None:
    """It is registered nowhere, and opened later."""
    closed = {"acceptPublish": "false", "acceptSubscribe": "false"}
    made = client.admin().create_topic("orders", partitions=1, settings=closed)
    assert [b.is_hidden for b in made.brokers] == [True] * 2
    assert [b.text for b in made.brokers] == ["takes no puts, gives no gets"] * 2
    assert client.partitions("orders") == ()
    client.admin().alter_topic("orders", settings=dict.fromkeys(closed, ""))
    assert send(client, "orders", b"x") == [0]


@pytest.mark.slow
def test_a_topic_of_some_brokers_is_served_by_them_alone(client: Client) -> None:
    """Messages put elsewhere before stay readable there."""
    admin = client.admin()
    admin.create_topic("orders", partitions=1, brokers=[1])
    assert [str(p) for p in client.partitions("orders")] == ["orders/1-0"]
    admin.alter_topic("orders", brokers="all")
    assert len(client.partitions("orders")) == 2
    assert send(client, "orders", b"a") == [0]
    admin.alter_topic("orders", brokers=[1])
    wait_until(lambda: "0" not in _put_brokers(client))
    assert [m.data for m in client.browse("orders")] == [b"a"]


def _put_brokers(client: Client) -> set[str]:
    snapshot = parts_of(client).metadata.snapshot
    return {str(broker_id) for broker_id in snapshot.puts.get("orders", {})}


@pytest.mark.parametrize(
    ("call", "error", "wanted"),
    [
        (lambda a: a.create_topic("orders", partitions=1), TopicExistsError,
         "topic 'orders' exists: it is defined with 2 partitions"),
        (lambda a: a.create_topic("mine", partitions=1), TopicExistsError,
         "topic 'mine' exists: server.ini of broker 0 defines it (/"),
        (lambda a: a.create_topic("a b", partitions=1), ConfigError,
         "topic 'a b': expected a name of at most 244 bytes, no blanks or"),
        (lambda a: a.create_topic("new", partitions=0), ConfigError,
         "partitions: expected 1 to 10000, got 0"),
        (lambda a: a.create_topic("new", partitions=1, brokers=[]), ConfigError,
         "brokers: expected at least one id"),
        (lambda a: a.create_topic("new", partitions=1, brokers=[7]), NoBrokerError,
         "broker 7 cannot serve the topic, because it is away; brokers that can: 0, 1"),
        (lambda a: a.create_topic("new", partitions=1, settings={"dleteWhen": "x"}),
         ConfigError, "do you mean 'deleteWhen'"),
        (lambda a: a.alter_topic("orders", partitions=1), ConfigError,
         "the number of partitions cannot be reduced: expected at least 2, got 1"),
        (lambda a: a.alter_topic("oders", partitions=1), NoTopicError,
         "there is no topic 'oders'; did you mean orders"),
        (lambda a: a.delete_topic("oders"), NoTopicError, "did you mean orders"),
        (lambda a: a.delete_topic("mine"), TopicRefusedError,
         "topic 'mine' is not deleted: server.ini of broker 0 defines it (/"),
        (lambda a: a.create_topic("a,b", partitions=1), ConfigError,
         "expected names without blanks, commas and slashes, got 'a,b'"),
        (lambda a: a.create_topic("new", partitions=1, brokers=["0"]), TypeError,
         "brokers: expected a whole number (int), got str '0'"),
        (lambda a: a.create_topic("new", partitions=1, brokers=0), TypeError,
         "brokers: expected ids or 'all', got 0"),
        (lambda a: a.create_topic("new", partitions=1, settings={"stat": True}),
         TypeError, "setting stat: expected str, got bool True"),
        (lambda a: a.alter_topic("orders", settings="stat=true"), TypeError,
         "settings: expected a dict of texts, got str"),
        (lambda a: a.forget_broker("0"), TypeError,
         "broker_id: expected a whole number (int), got str '0'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_a_sentence(
    refused: Client, call: Callable[[Any], Any], error: type[Exception], wanted: str
) -> None:
    """It names topic, broker, file and numbers."""
    before = refused.admin().topics()
    with pytest.raises(error) as caught:
        call(refused.admin())
    assert wanted in str(caught.value)
    assert refused.admin().topics() == before


def test_what_a_file_defines_is_not_altered(client: Client) -> None:
    """The definition is there for the day on which the file has the topic no more."""
    with pytest.raises(TopicRefusedError) as caught:
        client.admin().alter_topic("mine", partitions=2)
    assert "topic 'mine': the section of that name in server.ini of broker 0" in str(
        caught.value
    )


@pytest.mark.parametrize("call", ["describe_topic", "alter_topic", "delete_topic"])
def test_what_is_no_name_costs_the_client_nothing(refused: Client, call: str) -> None:
    """Its topics are sorted by name for each snapshot of the cluster."""
    with pytest.raises(TypeError, match="topic: expected str, got NoneType"):
        getattr(refused.admin(), call)(None)
    made = refused.admin().create_topic(f"after_{call}", partitions=1)
    assert [b.partitions for b in made.brokers] == [1, 1]


class Overtaken:
    """A coordinator that is told of a node before another client writes it."""

    def __init__(self, inner: MemoryCoordinator, write: Callable[[], None]) -> None:
        self._inner = inner
        self._write = write
        self.node = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, path: str, **named: Any) -> Any:
        found = await self._inner.get(path, **named)
        if path == self.node:
            self.node = ""
            self._write()
        return found


@pytest.mark.parametrize("call", ["alter_topic", "delete_topic"])
def test_what_others_alter_meanwhile_is_not_overwritten(
    cluster: Cluster, call: str
) -> None:
    """Not even between two looks at the definition."""
    definition = TopicDefinition(partitions=3)

    def write() -> None:
        cluster.write("/catalog/topics/orders", encode_definition(definition).decode())

    def connect(clock: Clock) -> Any:
        made.append(Overtaken(cluster.zookeeper.coordinator(clock), write))
        return made[0]

    made: list[Overtaken] = []
    with Client(coordinator=connect, **QUICK) as client:
        client.admin().create_topic("orders", partitions=1)
        made[0].node = "/meta/catalog/topics/orders"
        wanted = {"partitions": 2} if call == "alter_topic" else {}
        with pytest.raises((ClientError, ConfigError), match="topic 'orders'"):
            getattr(client.admin(), call)("orders", **wanted)
        assert client.admin().describe_topic("orders").definition == definition


@pytest.mark.slow
def test_a_broker_that_restarts_is_waited_for(cluster: Cluster, client: Client) -> None:
    """It has no nodes for a moment, and a record that says that it will be back."""
    cluster.brokers[1].stop()
    wait_until(lambda: 1 not in parts_of(client).metadata.snapshot.brokers)
    with pytest.raises(NoBrokerError, match=r"broker 1 cannot .*, because it is away"):
        client.admin().create_topic("new", partitions=1, brokers=[1], timeout=2)
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(
            client.admin().create_topic, "new", partitions=1, brokers=[1], timeout=30
        )
        cluster.brokers[1].start()
        assert [b.broker_id for b in making.result().brokers] == [1]


def test_time_that_ends_in_a_look_tells_what_the_one_before_saw(
    cluster: Cluster, client: Client
) -> None:
    """Not that ZooKeeper was late, which it was not."""
    cluster.brokers[1].stop()
    wait_until(lambda: 1 not in parts_of(client).metadata.snapshot.brokers)
    looks = Counter[str]()

    async def end_in_the_second_look(path: str) -> None:
        looks[path] += 1
        if looks[path] > 1:
            raise CoordinationTimeoutError("no time was left")

    cluster.zookeeper.before["children"] = end_in_the_second_look
    with pytest.raises(NoBrokerError, match=r"broker 1 cannot .*, because it is away"):
        client.admin().create_topic("new", partitions=1, brokers=[1], timeout=30)


@pytest.mark.slow
def test_a_schedule_that_no_broker_understands_is_told(
    cluster: Cluster, client: Client
) -> None:
    """Brokers judge it; the topic can be mended, and the alarm goes."""
    admin = client.admin()
    with pytest.raises(
        TopicRefusedError, match=r"cannot serve the topic as defined:.*tom"
    ):
        admin.create_topic("orders", partitions=1, settings={"deleteWhen": "tomorrow"})
    assert "orders" not in {str(p.topic) for p in client.partitions("orders")}
    (problem,) = cluster.problems()
    assert "definition of topic 'orders' is refused" in problem
    found = admin.describe_topic("orders")
    assert [b.effect for b in found.brokers] == [Effect.REFUSED, Effect.REFUSED]
    admin.alter_topic("orders", settings={"deleteWhen": ""})
    assert cluster.problems() == ()


def test_a_client_of_named_brokers_makes_no_topics(cluster: Cluster) -> None:
    """And says why."""
    with (
        Client(brokers=[cluster.brokers[0].address], **QUICK) as client,
        pytest.raises(ConfigError, match=r"through ZooKeeper: expected its address"),
    ):
        client.admin().create_topic("orders", partitions=1)


def test_a_client_of_named_brokers_finds_topics_that_were_made(
    cluster: Cluster, client: Client
) -> None:
    """The broker tells of them as of what was set over its file."""
    client.admin().create_topic("orders", partitions=3)
    with Client(brokers=[cluster.brokers[1].address], **QUICK) as other:
        assert len(other.partitions("orders")) == 3


def java_broker(zookeeper: MemoryZooKeeper, topic: str | None = None) -> None:
    """Register a broker that keeps no record, as MetaQ 1.4 does."""
    zookeeper.write("/meta/brokers/ids/5/master", b"meta://127.0.0.1:1")
    for kind in ("pub", "sub") if topic else ():
        node = b'{"numParts":1,"broker":"5-m"}'
        zookeeper.write(f"/meta/brokers/topics-{kind}/{topic}/5-m", node)


@pytest.mark.slow
def test_brokers_of_metaq_1_4_are_given_no_topics() -> None:
    """They do not look at definitions."""
    zookeeper = MemoryZooKeeper()
    java_broker(zookeeper, "old")
    with Client(coordinator=zookeeper.coordinator, **QUICK) as client:
        admin = client.admin()
        with pytest.raises(NoBrokerError, match=r"from their server.ini only: 5"):
            admin.create_topic("new", partitions=1)
        with pytest.raises(
            NoBrokerError, match=r"broker 5 cannot .* it is of MetaQ 1.4"
        ):
            admin.create_topic("new", partitions=1, brokers=[5])
        with pytest.raises(TopicRefusedError, match=r"broker 5 is of MetaQ 1.4, which"):
            admin.delete_topic("old")
        assert zookeeper.names("/meta/catalog") is None


@pytest.mark.slow
def test_a_name_that_is_used_again_begins_at_offset_0(
    cluster: Cluster, client: Client
) -> None:
    """Nothing of the old topic is left: no data, no offset of a group."""
    admin = client.admin()
    admin.create_topic("orders", partitions=1)
    assert send(client, "orders", b"old", b"old") == [0, 23]
    with client.consumer("g", ["orders"]) as consumer:
        assert [m.data for m in consumer.receive_many(9, timeout=20)] == [b"old"] * 2
        consumer.commit()
    assert "0-0" in cluster.names("/consumers/g/offsets/orders")
    admin.delete_topic("orders")
    assert cluster.names("/consumers/g/offsets") == ()
    assert "orders-0" not in cluster.directories()
    admin.create_topic("orders", partitions=1)
    assert send(client, "orders", b"new") == [0]
    with client.consumer("g", ["orders"]) as consumer:
        message = consumer.receive(timeout=20)
        assert message is not None
        assert (message.data, message.offset) == (b"new", 0)


@pytest.mark.slow
def test_zookeeper_counts_no_partitions_of_a_deleted_topic(
    cluster: Cluster, client: Client
) -> None:
    """At once, although other brokers have it still; or a data directory without its
    record would be one that lost something."""

    def count(number: int) -> int:
        node = cluster.zookeeper.tree()[f"/meta/catalog/directories/{number}"]
        ((_identity, found),) = json.loads(node.data).values()
        assert isinstance(found, int)
        return found

    admin = client.admin()
    admin.create_topic("orders", partitions=2)
    send(client, "mine", b"kept")
    send(client, "orders", b"a", partition="0-0")
    send(client, "orders", b"b", partition="0-1")
    wait_until(lambda: count(0) == 3)
    cluster.brokers[1].stop()
    delete_but_for(admin, "orders", "still have it: 1 (away)")
    wait_until(lambda: count(0) == 1)


@pytest.mark.slow
def test_a_topic_that_is_read_is_not_deleted(cluster: Cluster, client: Client) -> None:
    """The reader would commit offsets of a topic that is gone."""
    client.admin().create_topic("orders", partitions=1)
    with client.consumer("g", ["orders"]):
        wait_until(lambda: cluster.names("/consumers/g/ids"))
        with pytest.raises(GroupInUseError, match=r"group g: expected no live member"):
            client.admin().delete_topic("orders")
    client.admin().delete_topic("orders")


@pytest.mark.slow
def test_a_broker_that_is_away_does_its_part_when_it_comes_back(
    cluster: Cluster, client: Client
) -> None:
    """Until then the name is taken, and it is told who is waited for."""
    admin = client.admin()
    admin.create_topic("orders", partitions=1)
    send(client, "orders", b"a", partition="1-0")
    cluster.brokers[1].stop()
    delete_but_for(admin, "orders", "still have it: 1 (away)")
    with pytest.raises(TopicExistsError, match=r"being deleted, .*: 1 \(away\)"):
        admin.create_topic("orders", partitions=1)
    with pytest.raises(ClientError, match=r"'orders' is being deleted"):
        admin.alter_topic("orders", partitions=2)
    assert "orders-0" in cluster.directories(1)
    cluster.brokers[1].start()
    wait_until(lambda: "orders" not in cluster.names("/catalog/topics"))
    assert "orders-0" not in cluster.directories(1)
    admin.create_topic("orders", partitions=1)
    assert list(client.browse("orders")) == []


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_deletion_does_not_wait_for_a_broker_that_is_forgotten(
    cluster: Cluster, world: str
) -> None:
    """Nothing of it is left in the catalog, and what the other one told stays."""
    with WORLDS[world](coordinator=cluster.zookeeper.coordinator, **QUICK) as client:
        admin = client.admin()
        admin.create_topic("orders", partitions=2)
        wait_until(lambda: "1" in cluster.names("/catalog/directories"))
        with pytest.raises(BrokerRegisteredError, match="broker 1 is registered at"):
            admin.forget_broker(1)
        cluster.brokers[1].stop()
        delete_but_for(admin, "orders", "still have it: 1 (away)")
        wait_until(lambda: [b.is_present for b in admin.brokers()] == [True, False])
        assert admin.forget_broker(1).broker_id == 1
        wait_until(lambda: "orders" not in cluster.names("/catalog/topics"))
        left = [
            path.rpartition("/meta/catalog")[2] for path in cluster.zookeeper.tree()
        ]
        assert not [path for path in left if path.endswith("/1")]
        assert cluster.names("/catalog/status") == ("mine",)
        # What was watched before is told anew a moment later.
        wait_until(lambda: [broker.broker_id for broker in admin.brokers()] == [0])
        with pytest.raises(ClientError, match="no record of broker 1; brokers are: 0"):
            admin.forget_broker(1)


@pytest.mark.slow
def test_a_start_without_zookeeper_knows_the_topics(
    cluster: Cluster, client: Client
) -> None:
    """The same partitions and retention, from the copy in the data directory."""
    client.admin().create_topic("orders", partitions=4, settings=MORE)
    broker = cluster.brokers[0]
    broker.stop()
    cluster.zookeeper.stop()
    change_settings(broker, **{"zk.zkConnectionTimeoutMs": "100"})
    broker.start()
    inner = running_inside(broker)
    topic = inner.context.config.topic("orders")
    assert (topic.partition_count, str(topic.delete_policy)) == (4, "delete,72h")
    with Client(brokers=[broker.address], **QUICK) as other:
        assert len(other.partitions("orders")) == 4
        assert send(other, "orders", b"x", partition="0-3") == [0]
    cluster.zookeeper.start()


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
def test_a_start_registers_when_it_knows_the_topics(
    cluster: Cluster, client: Client, is_late: bool
) -> None:
    """Without the copy too, and where ZooKeeper comes later: or the record of a topic
    without data would go and come back, and its partitions would not be missed
    meanwhile.
    """
    client.admin().create_topic("orders", partitions=2)
    broker, server = cluster.brokers[0], cluster.zookeeper
    broker.stop()
    (broker.data_path / "topics.json").unlink()
    if is_late:
        server.stop()
        change_settings(broker, **{"zk.zkConnectionTimeoutMs": "100"})
    server.calls.clear()
    broker.start()
    server.start()
    wait_until(lambda: "0-m" in cluster.names("/brokers/topics-pub/orders"))
    assert ("delete", "/meta/catalog/partitions/orders/0") not in server.calls


@pytest.mark.slow
def test_a_damaged_copy_costs_time_and_no_data(
    cluster: Cluster, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Until ZooKeeper is read nothing of unlisted topics ages."""
    client.admin().create_topic("orders", partitions=1, settings=MORE)
    send(client, "orders", b"x")
    broker = cluster.brokers[0]
    broker.stop()
    copy = broker.data_path / "topics.json"
    assert json.loads(copy.read_text().partition("\n")[2])["orders"]["partitions"] == 1
    copy.write_bytes(b"junk")
    cluster.zookeeper.stop()
    change_settings(broker, **{"zk.zkConnectionTimeoutMs": "100"})
    broker.start()
    assert "copy of definitions is left out" in caplog.text
    inner = running_inside(broker)
    schedules = inner.control.deletion_schedules(inner.context.config)
    assert schedules.keys() == {"mine"}
    cluster.zookeeper.start()
    wait_until(lambda: inner.context.config.topic("orders").unflush_interval_ms == 5000)
    schedules = inner.control.deletion_schedules(inner.context.config)
    assert schedules.keys() == {"mine", "orders"}


@pytest.mark.slow
def test_a_definition_that_is_gone_stays_in_effect_with_an_alarm(
    cluster: Cluster, client: Client
) -> None:
    """A node removed by hand deletes nothing; altering the topic writes it again."""
    admin = client.admin()
    admin.create_topic("orders", partitions=2, settings=MORE)
    send(client, "orders", b"x")
    cluster.zookeeper.remove("/meta/catalog/topics/orders")
    wait_until(cluster.problems)
    assert "is missing in ZooKeeper" in cluster.problems()[0]
    assert [m.data for m in client.browse("orders")] == [b"x"]
    found = admin.alter_topic("orders", settings=MORE)
    assert found.definition is not None
    assert found.definition.partitions == 2
    wait_until(lambda: not cluster.problems())


@pytest.mark.slow
def test_a_definition_that_cannot_be_read_changes_nothing(
    cluster: Cluster, client: Client
) -> None:
    """It is an alarm, and neither a crash nor a missing topic."""
    admin = client.admin()
    admin.create_topic("orders", partitions=2)
    cluster.write("/catalog/topics/orders", "{")
    wait_until(cluster.problems)
    assert "cannot be read: topic definition: expected JSON" in cluster.problems()[0]
    assert len(client.partitions("orders")) == 4
    assert "expected JSON" in admin.describe_topic("orders").problem
    with pytest.raises(TopicExistsError, match="expected JSON"):
        admin.create_topic("orders", partitions=1)
    with pytest.raises(ClientError, match=r"cannot be altered: .*expected JSON"):
        admin.alter_topic("orders", partitions=3)


@pytest.mark.slow
def test_a_section_that_comes_later_wins(cluster: Cluster, client: Client) -> None:
    """A reload is enough, and a command says which file it is."""
    admin = client.admin()
    admin.create_topic("orders", partitions=3)
    cluster.brokers[0].create_topic("orders", 5)
    wait_until(
        lambda: admin.describe_topic("orders").brokers[0].effect is Effect.OVERRIDDEN
    )
    wait_until(lambda: admin.describe_topic("orders").brokers[0].partitions == 5)
    assert admin.describe_topic("orders").brokers[0].text.endswith("server.ini")
    with pytest.raises(TopicRefusedError, match=r"server.ini of broker 0 defines it"):
        admin.delete_topic("orders")


def test_commands_at_once_make_one_topic(cluster: Cluster) -> None:
    """The others hear that there is one."""
    from metaq.client import AsyncClient

    async def main() -> list[object]:
        async with AsyncClient(
            coordinator=cluster.zookeeper.coordinator, **QUICK
        ) as client:
            calls = [client.admin().create_topic("t", partitions=n) for n in (1, 2, 3)]
            return list(await asyncio.gather(*calls, return_exceptions=True))

    results = asyncio.run(main())
    failed = [one for one in results if isinstance(one, Exception)]
    assert [type(one) for one in failed] == [TopicExistsError] * 2


@pytest.mark.slow
def test_a_topic_is_not_taken_up_before_it_is_remembered(
    cluster: Cluster, client: Client
) -> None:
    """Without the copy a start would not know it; the broker goes on when it can."""
    copy = cluster.brokers[1].data_path / "topics.json"
    wait_until(copy.exists)
    copy.unlink()
    copy.mkdir()
    topic, timeout_s = "orders", 1.0
    while True:
        with pytest.raises(RequestTimeoutError, match=r"not served yet .* 1 ") as late:
            client.admin().create_topic(topic, partitions=1, timeout=timeout_s)
        if "by brokers 1 " in str(late.value):
            break
        # The other one needs more time, on a machine that is busy.
        topic, timeout_s = f"{topic}-more", timeout_s * 2
    assert "topics.json" in cluster.problems(1)[0]
    assert [str(p) for p in client.partitions(topic)] == [f"{topic}/0-0"]
    copy.rmdir()
    wait_until(lambda: len(client.partitions(topic)) == 2)
    assert cluster.problems(1) == ()
