"""A batch that is run again goes where its first run went, or fails with a sentence."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from metaq.client.session import AsyncClient
from metaq.cluster_snapshot import ClusterSnapshot
from metaq.errors import NoBrokerError
from metaq.model import BrokerAddress, TopicPartition
from metaq.spark import cluster as cluster_module
from metaq.spark.errors import SparkError
from metaq.spark.options import SinkOptions
from metaq.spark.routing import WriteRoutes
from metaq.spark.sink import writer as sinks
from metaq.spark.sink.outbox import WriteName
from metaq.spark.sink.writer import BatchWriter, StreamWriter, routes_name
from metaq.spark.versions import HAS_ARROW_STREAM_WRITER
from metaq.testing.embedded import EmbeddedBroker
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths
from tests.spark.brokers import (
    TOPIC,
    data_of,
    forget_clusters,
    numbered,
    own_clusters,
    stored,
    tp,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = StructType(
    [StructField("value", BinaryType()), StructField("key", StringType())]
)
NAMED = StructType([*ROWS.fields, StructField("topic", StringType())])
CHECKPOINT = "/checkpoints/query/"
COUNT = 400


class Brokers:
    """Brokers that share a ZooKeeper; number 0 and 1 run."""

    def __init__(self, directory: Path) -> None:
        self.zookeeper = MemoryZooKeeper()
        self.all = [
            EmbeddedBroker(
                directory / str(number),
                topics={TOPIC: 2},
                zookeeper=self.zookeeper,
                settings={"brokerId": str(number)},
            )
            for number in range(3)
        ]
        for broker in self.all[:2]:
            broker.start()

    def values(self) -> list[bytes]:
        """Return what is stored on the brokers that were started, sorted."""
        there = [broker for broker in self.all if broker.port]
        return sorted(v for broker in there for v in data_of(stored(broker)))

    def kept(self) -> WriteRoutes:
        path = NodePaths().query_routes(routes_name(CHECKPOINT))
        return WriteRoutes.from_json(self.zookeeper.tree()[path].data.decode())


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    found = Brokers(tmp_path)

    def make(zookeeper: str | None, **more: Any) -> AsyncClient:
        if zookeeper is None:
            return AsyncClient(**more)
        del more["brokers"]
        return AsyncClient(coordinator=found.zookeeper.coordinator, **more)

    with own_clusters(make):
        yield found
    for broker in found.all:
        broker.stop()


def sink_options(**more: Any) -> SinkOptions:
    given = {"requestTimeoutMs": 500, "retryTimeoutMs": 500, "zookeeper": "memory"}
    given |= {"batchBytes": 2000, "topic": TOPIC, **more}
    texts = {name: str(value) for name, value in given.items() if value is not None}
    return SinkOptions.from_map(texts)


def as_spark_gives(batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
    """Return what the writer of a micro-batch is given: rows, before Spark 4.2."""
    if HAS_ARROW_STREAM_WRITER:
        return batches
    return (
        row
        for batch in batches
        for row in zip(*batch.to_pydict().values(), strict=True)
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what runs a micro-batch of one task, as a driver that has just started."""
    attempts = iter(range(100))

    def run_batch(
        batch: int,
        first: int = 0,
        *,
        ends: bool = True,
        breaks: bool = False,
        may_double: bool = False,
        query: str = "query",
        **more: Any,
    ) -> None:
        name = WriteName(query, batch, 0, next(attempts))
        monkeypatch.setattr(sinks, "write_name", lambda _write: name)
        forget_clusters()
        options = sink_options(**more)
        schema = ROWS if options.topic else NAMED
        values = numbered(COUNT, first)
        columns: dict[str, Any] = {"value": values, "key": [str(v) for v in values]}
        if not options.topic:
            columns["topic"] = [TOPIC] * COUNT
        rows = pa.RecordBatch.from_pydict(columns)

        def feed() -> Iterator[pa.RecordBatch]:
            yield rows.slice(0, COUNT // 2)
            if breaks:
                raise RuntimeError("the driver dies")
            yield rows.slice(COUNT // 2)

        writer = StreamWriter(options, schema, CHECKPOINT)
        # Spark makes one for the tasks and another one for the commit.
        if breaks:
            with pytest.raises(RuntimeError, match="dies"):
                writer.write(as_spark_gives(feed()))
            return
        done = writer.write(as_spark_gives(feed()))
        assert bool(done.written.doubtful_count) == may_double
        if ends:
            StreamWriter(options, schema, CHECKPOINT).commit([done], batch)

    return run_batch


TOPIC_BY_COLUMN = pytest.mark.parametrize("topic", [TOPIC, None])


@TOPIC_BY_COLUMN
@pytest.mark.parametrize("first_try", ["breaks", "is not committed", "is committed"])
def test_a_rerun_goes_where_the_first_run_went(
    brokers: Brokers, run: Any, topic: str | None, first_try: str
) -> None:
    """Never elsewhere when a broker has left, and never to one that has come."""
    run(0, topic=topic)
    breaks = first_try == "breaks"
    run(1, COUNT, topic=topic, breaks=breaks, ends=first_try == "is committed")
    brokers.all[1].stop()
    with pytest.raises(NoBrokerError) as found:
        run(1, COUNT, topic=topic)
    assert str(found.value) == (
        "this batch was begun with logs/1-0, logs/1-1, where no broker takes puts now:"
        " start broker 1 and run it again; with failOnLostRoute=false it goes"
        " to other partitions, and rows that its first run has stored are stored twice"
    )
    brokers.all[1].start()
    brokers.all[2].start()
    run(1, COUNT, topic=topic)
    assert brokers.values() == numbered(2 * COUNT)
    assert data_of(stored(brokers.all[2])) == []
    # What has not begun goes to any brokers that exist.
    brokers.all[0].stop()
    run(2, 2 * COUNT, topic=topic)
    assert data_of(stored(brokers.all[2])) != []
    brokers.all[0].start()
    assert brokers.values() == numbered(3 * COUNT)
    assert brokers.kept().committed == 2
    assert brokers.kept().next == {}


def test_a_batch_that_has_not_begun_needs_no_broker_that_has_left(
    brokers: Brokers, run: Any
) -> None:
    run(0)
    brokers.all[1].stop()
    run(1, COUNT)
    brokers.all[1].start()
    assert brokers.values() == numbered(2 * COUNT)


def test_a_query_that_begins_anew_in_the_same_place_counts_anew(
    brokers: Brokers, run: Any
) -> None:
    """Its first batches are no reruns of those of the query before."""
    for batch in range(3):
        run(batch, batch * COUNT)
    brokers.all[1].stop()
    run(0, query="another")
    assert set(data_of(stored(brokers.all[0]))) >= set(numbered(COUNT))
    assert (brokers.kept().committed, brokers.kept().query) == (0, "another")


def test_a_broker_that_is_gone_for_good_can_be_given_up(
    brokers: Brokers, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Deliberately, with the doubles that this costs; nothing is lost."""
    run(0, ends=False)
    brokers.all[1].stop()
    run(0, failOnLostRoute="false", may_double=True)
    assert (
        "rows go to other partitions, some are away: logs/1-0, logs/1-1" in caplog.text
    )
    run(1, COUNT)
    here = data_of(stored(brokers.all[0]))
    assert sorted(set(here)) == numbered(2 * COUNT)


def test_a_batch_write_whose_rows_name_topics_leaves_nothing_behind(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks go by what the first of them has found."""
    writer = BatchWriter(sink_options(topic=None), NAMED)
    values = numbered(COUNT)
    columns = {"value": values, "key": [str(v) for v in values]}
    rows = pa.RecordBatch.from_pydict({**columns, "topic": [TOPIC] * COUNT})
    for attempt in range(2):
        name = WriteName("write", 0, 0, attempt)
        monkeypatch.setattr(sinks, "write_name", lambda _write, name=name: name)
        done = writer.write(iter([rows]))
        if not attempt:
            brokers.all[2].start()
    assert [path for path in brokers.zookeeper.tree() if "/write-" in path]
    writer.commit([done])
    assert not [path for path in brokers.zookeeper.tree() if "/write-" in path]
    assert brokers.values() == numbered(COUNT)


def test_without_zookeeper_all_named_brokers_have_to_be_there(
    brokers: Brokers, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is what says where a batch goes; one that is silent is not left out."""
    both = ",".join(broker.address for broker in brokers.all[:2])
    run(0, zookeeper=None, brokers=both)
    cluster = sinks.shared_cluster(sink_options(zookeeper=None, brokers=both).wire)

    def silence(snapshot: ClusterSnapshot) -> ClusterSnapshot:
        return replace(snapshot, silent=frozenset({BrokerAddress("h", 7)}))

    describe = cluster_module.describe_absent
    with monkeypatch.context() as patched:
        patched.setattr(
            cluster_module,
            "describe_absent",
            lambda snapshot, topics: describe(silence(snapshot), topics),
        )
        with pytest.raises(NoBrokerError) as found:
            cluster.targets([TOPIC], is_whole=True)
    assert str(found.value).startswith(
        "broker meta://h:7 has never answered: without ZooKeeper a batch needs all"
    )
    run(0, zookeeper=None, brokers=both)
    assert brokers.values() == numbered(COUNT)


def test_a_query_without_a_known_checkpoint_is_told(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    """Its batches have no name before their tasks run."""
    StreamWriter(sink_options(), ROWS)
    assert "without the option checkpointLocation" in caplog.text
    assert brokers.all[0].address


PARTITIONS = st.builds(tp, st.integers(0, 9), broker=st.integers(0, 9))
ROUTE = st.dictionaries(
    st.just(TOPIC), st.lists(PARTITIONS, unique=True, max_size=4).map(tuple)
)


def test_a_query_has_one_name_however_spark_spells_its_checkpoint() -> None:
    """A flow's first run has it as it was put together, later ones as it is listed."""
    spellings = ("file:/x/alert/0", "file:///x/alert/0", "file:///x/alert/0/")
    assert len({*map(routes_name, spellings)}) == 1
    others = ("hdfs:///x/alert/0", "hdfs://node/x/alert/0", "/x/alert/0", "x:/alert/0")
    assert len({*map(routes_name, (*spellings, *others))}) == 1 + len(others)


def test_the_name_of_a_query_is_as_it_was() -> None:
    """ZooKeeper keeps routes and decisions under it over versions of this package."""
    name = routes_name("hdfs:///checkpoints/orders")
    assert name == "sink-d3c356dd24636892eab9d580"


@given(committed=st.integers(-1, 10**9), last=ROUTE, following=ROUTE)
def test_routes_come_back(
    committed: int,
    last: dict[str, tuple[TopicPartition, ...]],
    following: dict[str, tuple[TopicPartition, ...]],
) -> None:
    """Routes read back as written, in order."""
    routes = WriteRoutes(committed, "query", last, following)
    assert WriteRoutes.from_json(routes.to_json()) == routes


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"committed":0,"last":{"t":["x"]}}'])
def test_what_are_no_routes_is_refused(text: str) -> None:
    """Never taken for a write that has not begun."""
    with pytest.raises(SparkError, match="expected the routes of a write, got"):
        WriteRoutes.from_json(text)
