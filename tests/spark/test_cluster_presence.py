"""A topic that is not there is an error, and what is away is not empty."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from metaq.client import Client, ExchangeError
from metaq.client.cluster.presence import describe_away, find_away
from metaq.client.session import AsyncClient
from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot
from metaq.errors import NoBrokerError
from metaq.model import BrokerAddress, BrokerId, Offset, TopicPartition
from metaq.spark import cluster as cluster_module
from metaq.spark import clusters
from metaq.spark.options import SourceOptions
from metaq.spark.source.batch import BatchReader
from metaq.spark.source.read_task import ReadTask
from metaq.spark.source.stream import StreamProgress
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.zk import MemoryZooKeeper
from tests.spark.brokers import TOPIC, numbered, own_clusters, publish, tp

pytestmark = [pytest.mark.spark, pytest.mark.slow]

HERE, THERE = tp(0), tp(0, broker=1)


class Two:
    """Two brokers with a topic; they record what they have."""

    def __init__(self, directory: Path) -> None:
        self.zookeeper = MemoryZooKeeper()
        self.brokers = [
            EmbeddedBroker(
                directory / str(number),
                topics={TOPIC: 1, **({"lonely": 1} if number else {})},
                zookeeper=self.zookeeper,
                settings={"brokerId": str(number)},
            )
            for number in (0, 1)
        ]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """Return two brokers whose ZooKeeper is what every address leads to."""
    found = Two(tmp_path)

    def make(_zookeeper: str, **more: Any) -> AsyncClient:
        del more["brokers"]
        return AsyncClient(coordinator=found.zookeeper.coordinator, **more)

    for broker in found.brokers:
        broker.start()
    publish(found.brokers[0], numbered(10), partition=HERE)
    publish(found.brokers[1], numbered(20), partition=THERE)
    monkeypatch.setattr(cluster_module, "NEW_TOPIC_S", 0.1)
    with own_clusters(make):
        yield found
    for broker in found.brokers:
        broker.stop()


def options(*, is_stream: bool = False, **more: Any) -> SourceOptions:
    given = {"requestTimeoutMs": 1000, "retryTimeoutMs": 1000, "zookeeper": "memory"}
    if is_stream:
        given["startingOffsets"] = "earliest"
    if not more.keys() & {"assign", "subscribePattern"}:
        given["subscribe"] = TOPIC
    texts = {name: str(value) for name, value in {**given, **more}.items()}
    return SourceOptions.from_map(texts, is_stream=is_stream)


def plan(**more: Any) -> list[ReadTask]:
    tasks = BatchReader(options(**more), pa.binary()).partitions()
    return [one for task in tasks for one in task.value or ()]


def begin(**more: Any) -> Any:
    return StreamProgress(options(is_stream=True, **more)).start()


def go_on(reached: dict[TopicPartition, Offset], **more: Any) -> Any:
    return StreamProgress(options(is_stream=True, **more)).advance(reached)


@pytest.mark.usefixtures("two")
def test_a_topic_that_nobody_has_is_an_error_that_lists_near_names() -> None:
    """Of batches and of streams, before any task runs."""
    for start in (plan, begin, lambda **more: go_on({HERE: Offset(0)}, **more)):
        with pytest.raises(NoBrokerError) as found:
            start(subscribe="logs,lgos")
        assert str(found.value) == ("no broker has topic 'lgos'; similar topics: logs")
        with pytest.raises(NoBrokerError) as found:
            start(subscribePattern="zz.*")
        assert str(found.value) == ("no topic matches 'zz.*'; topics are: logs, lonely")


def test_a_sink_refuses_a_topic_that_nobody_has_and_waits_for_one_that_is_away(
    two: Two,
) -> None:
    """A write whose topic is misspelt does not wait as if its broker came back."""
    cluster = clusters.shared_cluster(options().wire)
    with pytest.raises(NoBrokerError, match=r"no broker has topic 'lgos'; .*: logs$"):
        cluster.targets(["lgos"])
    with Client(coordinator=two.zookeeper.coordinator) as client:
        client.admin().create_exchange("events")
    with pytest.raises(ExchangeError, match="'events' is an exchange"):
        cluster.targets(["events"])
    two.brokers[1].stop()
    with pytest.raises(NoBrokerError, match="takes puts to topic 'lonely'"):
        cluster.targets(["lonely"])


def test_a_pattern_does_not_choose_the_pattern_of_a_broker(
    two: Two, tmp_path: Path
) -> None:
    """A broker shows the names of its sections, and one of them may be a pattern."""
    third = EmbeddedBroker(
        tmp_path / "third",
        topics={"app-*": 1},
        zookeeper=two.zookeeper,
        settings={"brokerId": "2"},
    )
    third.start()
    try:
        chosen = {"subscribePattern": ".*"}
        assert {task.range.partition for task in plan(**chosen)} == {HERE, THERE}
        assert {p.topic for p in begin(**chosen)} == {TOPIC, "lonely"}
    finally:
        third.stop()


def test_a_stream_may_wait_for_a_topic(two: Two) -> None:
    """It reads the topic when that comes, and others before that."""
    for chosen in ({"subscribe": "later"}, {"subscribePattern": "later|latest"}):
        query = StreamProgress(options(is_stream=True, waitForTopic="true", **chosen))
        assert query.start() == {}
        assert query.advance({}) == {}
    two.brokers[0].create_topic("later", 1)
    publish(two.brokers[0], numbered(3), partition=tp(0, topic="later"))
    query = StreamProgress(
        options(is_stream=True, waitForTopic="true", subscribe="later")
    )
    assert set(query.advance({})) == {tp(0, topic="later")}


def test_a_broker_that_has_withdrawn_is_named_and_not_read_as_empty(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    """Batch and stream, a topic of that broker alone as well."""
    assert {task.range.partition for task in plan()} == {HERE, THERE}
    two.brokers[1].stop()
    sentence = (
        "broker 1 is away, and with it logs/1-0: start it, or forget it for good: metaq"
        " brokers forget N; failOnDataLoss=false reads without that"
    )
    for start in (plan, begin, lambda: go_on({HERE: Offset(0)})):
        with pytest.raises(NoBrokerError) as found:
            start()
        assert str(found.value) == sentence
    with pytest.raises(NoBrokerError, match="broker 1 is away, and with it lonely/1-0"):
        plan(subscribe="lonely")
    with pytest.raises(NoBrokerError, match="broker 1 is away, and with it lonely/1-0"):
        plan(subscribePattern="lon.*")
    (task,) = plan(failOnDataLoss="false")
    assert task.range.partition == HERE
    assert plan(subscribe="lonely", failOnDataLoss="false") == []
    assert caplog.text.count("some data is not read: broker 1 is away, and") == 2
    assert plan(assign=json.dumps({TOPIC: ["0-0"]})) == [task]
    two.brokers[1].start()
    assert {task.range.partition for task in plan()} == {HERE, THERE}


def test_a_broker_that_is_about_to_give_gets_is_waited_for(two: Two) -> None:
    """It registers for producers first; the broker itself puts the node back here."""
    two.zookeeper.remove(f"/meta/brokers/topics-sub/{TOPIC}/1-m")
    found = plan(requestTimeoutMs=10_000, retryTimeoutMs=10_000)
    assert {task.range.partition for task in found} == {HERE, THERE}


def test_a_broker_that_comes_back_is_waited_for_until_it_gives_gets(two: Two) -> None:
    """A broker that is known to producers alone is still waited for."""
    path = f"/meta/brokers/topics-pub/{TOPIC}/1-m"
    nodes = [path, "/meta/brokers/ids/1/master"]
    saved = {each: two.zookeeper.tree()[each].data for each in nodes}
    two.brokers[1].stop()
    with ThreadPoolExecutor(1) as pool:
        patient = {"requestTimeoutMs": 60_000, "retryTimeoutMs": 60_000}
        planning = pool.submit(plan, **patient)
        with pytest.raises(TimeoutError):
            planning.result(1.0)  # it is away
        for each, data in saved.items():
            two.zookeeper.put(each, data)
        with pytest.raises(TimeoutError):
            planning.result(0.5)  # it is about to give gets
        for each in saved:
            two.zookeeper.remove(each)
        two.brokers[1].start()
        assert {task.range.partition for task in planning.result(90)} == {HERE, THERE}


def test_without_a_record_what_was_read_before_is_known(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Java brokers: the checkpoint of a query, and the offsets of its group."""
    monkeypatch.setattr(
        cluster_module,
        "describe_away",
        lambda snapshot, *more: describe_away(replace(snapshot, recorded={}), *more),
    )
    query = StreamProgress(options(is_stream=True, progressGroup="g"))
    reached = query.start()
    end = query.advance(reached)
    query.commit(end)
    two.brokers[1].stop()
    sentence = "broker 1 is away, and with it logs/1-0: start it; failOnDataLoss=false"
    for start in (
        lambda: go_on(end),
        lambda: begin(progressGroup="g"),
        lambda: plan(startingOffsets="group", group="g"),
    ):
        with pytest.raises(NoBrokerError, match=sentence):
            start()
    assert go_on(end, failOnDataLoss="false") == end
    # A query that has begun goes on with what is there.
    assert query.advance(end) == end


def test_what_was_forgotten_on_purpose_is_not_missed() -> None:
    """A record that says less than a checkpoint is the newer one."""
    here = BrokerCopies(BrokerAddress("h", 1), {})
    snapshot = ClusterSnapshot(
        version=1,
        brokers={BrokerId(0): here},
        gets={TOPIC: {BrokerId(0): 1}},
        recorded={TOPIC: {BrokerId(0): 2}},
        silent=frozenset({BrokerAddress("h", 7)}),
        topics=frozenset({TOPIC}),
    )

    def is_chosen(_partition: TopicPartition) -> bool:
        return True

    assert find_away(snapshot, [TOPIC], is_chosen, {THERE}) == (tp(1),)
    assert describe_away(snapshot, [TOPIC], is_chosen, ()) == (
        "recorded and not served: logs/0-1; broker"
        f" {BrokerAddress('h', 7)} has never answered: start it, or forget it"
        " for good: metaq brokers forget N"
    )
