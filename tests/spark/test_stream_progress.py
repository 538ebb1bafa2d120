"""Plans of a stream reader on the driver, without a Spark session."""

import asyncio
import pickle
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.offsets.query_progress import commit_progress
from metaq.client.session import AsyncClient
from metaq.model import MessageId, Offset, TopicPartition
from metaq.pipeline.declared.progress import lag_of
from metaq.spark.cluster import Cluster
from metaq.spark.clusters import CLUSTERS, shared_cluster
from metaq.spark.errors import (
    BackwardRangeError,
    DataLossError,
    OptionError,
    SparkError,
)
from metaq.spark.offsets import LAG_KEY, offsets_to_json
from metaq.spark.options import SourceOptions
from metaq.spark.plan import LogSpan
from metaq.spark.source.read_task import ReadTask
from metaq.spark.source.stream import OldStreamReader, StreamProgress, StreamReader
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.rigs.waiting import wait_until
from tests.spark.brokers import (
    TOPIC,
    numbered,
    options_of,
    own_clusters,
    publish,
    stored,
    tp,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SIZE = 35
P0, P1 = tp(0), tp(1)
VALUE = pa.binary()


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker whose ZooKeeper in memory is what every address leads to."""
    with embedded_broker(topics={TOPIC: 2}) as found:

        def make(zookeeper: str | None, **more: Any) -> AsyncClient:
            if zookeeper is None:
                return AsyncClient(**more)
            del more["brokers"]
            return AsyncClient(coordinator=found.coordinator_factory, **more)

        with own_clusters(make):
            yield found


class ToldCluster(Cluster):
    """A cluster that shows `told` to streams, and refuses what they commit."""

    told: Mapping[TopicPartition, LogSpan | None] | None = None
    is_told_twice = True
    """Also when it is asked to confirm a loss."""
    refuses = False

    def watched_spans(self, partitions: Any) -> Any:
        return self.told or super().watched_spans(partitions)

    def spans(self, partitions: Any, *, is_confirmed: bool = False) -> Any:
        if is_confirmed and self.told and self.is_told_twice:
            return {partition: self.told[partition] for partition in partitions}
        return super().spans(partitions, is_confirmed=is_confirmed)

    def ask(self, question: Any, *args: Any) -> Any:
        if self.refuses and question is commit_progress:
            raise DataLossError(())
        return super().ask(question, *args)


def told_cluster(options: SourceOptions) -> ToldCluster:
    """Have queries with these options ask a cluster with given answers."""
    found = CLUSTERS[options.wire] = ToldCluster(options.wire)
    return found


def cluster_of(options: SourceOptions, *, idle_s: float) -> Cluster:
    """Have queries with these options ask a cluster whose client is soon idle."""
    found = CLUSTERS[options.wire] = Cluster(options.wire, idle_s=idle_s)
    return found


def progress(broker: EmbeddedBroker, **more: Any) -> StreamProgress:
    return StreamProgress(source_options(broker, **more))


def source_options(broker: EmbeddedBroker, **more: Any) -> SourceOptions:
    options = {"subscribe": TOPIC, "startingOffsets": "earliest", **more}
    given = options_of(broker, **options)
    if "zookeeper" in more:
        del given["brokers"]
    texts = {name: str(value) for name, value in given.items() if value is not None}
    return SourceOptions.from_map(texts, is_stream=True)


def offsets(first: int, second: int) -> dict[TopicPartition, Offset]:
    """Return where so many messages of each partition end."""
    return {P0: Offset(first * SIZE), P1: Offset(second * SIZE)}


def test_batches_follow_the_log_and_its_limits(broker: EmbeddedBroker) -> None:
    """Each ends on a record; what is done is done."""
    publish(broker, numbered(100), partition=P0)
    publish(broker, numbered(50), partition=P1)
    query = progress(broker, maxOffsetsPerTrigger=60)
    start = query.start()
    assert start == offsets(0, 0)
    first = query.advance(start)
    assert first == offsets(40, 20)
    assert query.spans(start, first) == {
        P0: LogSpan(start[P0], first[P0]),
        P1: LogSpan(start[P1], first[P1]),
    }
    last = query.advance(query.advance(first))
    assert last == offsets(100, 50)
    assert query.advance(last) == last
    assert query.ends == last


def test_progress_says_how_far_behind_a_query_is(broker: EmbeddedBroker) -> None:
    """In messages and bytes of each topic, once it has planned a micro-batch."""
    publish(broker, numbered(100), partition=P0)
    publish(broker, numbered(50), partition=P1)
    reader = StreamReader(source_options(broker, maxOffsetsPerTrigger=60), VALUE)
    assert reader.reportLatestOffset() is None
    end = reader.initialOffset()
    for left in (90, 30, 0):
        end = reader.latestOffset(end, None)
        lag = {TOPIC: {"bytes": left * SIZE, "records": left}}
        ends = offsets_to_json(offsets(100, 50))
        latest = reader.reportLatestOffset()
        assert latest == {**ends, LAG_KEY: lag}
        assert lag_of({"latestOffset": latest}) == {TOPIC: left * SIZE}


def test_a_frozen_query_reads_what_was_there(broker: EmbeddedBroker) -> None:
    """Also without enough messages for a batch, and with a start of its own."""
    publish(broker, numbered(10), partition=P0)
    query = progress(broker, minOffsetsPerTrigger=1000)
    start = query.start()
    assert query.advance(start) == start
    query.freeze()
    publish(broker, numbered(10), partition=P0)
    end = query.advance(start)
    assert end == offsets(10, 0)
    assert query.advance(end) == end


def test_a_batch_waits_no_longer_than_it_may(broker: EmbeddedBroker) -> None:
    """`maxTriggerDelay` ends the wait for `minOffsetsPerTrigger`."""
    publish(broker, numbered(10), partition=P0)
    query = progress(broker, minOffsetsPerTrigger=1000, maxTriggerDelay="1ms")
    start = query.start()
    assert query.advance(start) == start
    assert query.advance(start) == offsets(10, 0)


def test_a_partition_that_comes_later_is_read_from_its_start(
    broker: EmbeddedBroker,
) -> None:
    """A query that knows one partition finds the other."""
    publish(broker, numbered(10), partition=P0)
    publish(broker, numbered(20), partition=P1)
    query = progress(broker)
    reached = {P0: Offset(10 * SIZE)}
    end = query.advance(reached)
    assert end == offsets(10, 20)
    assert query.spans(reached, end) == {P1: LogSpan(Offset(0), end[P1])}


@pytest.mark.parametrize(
    "chosen",
    [
        {"assign": '{"logs": ["0-1"]}', "subscribe": None},
        {"subscribe": "others", "waitForTopic": "true"},
        {"subscribePattern": "log", "subscribe": None, "waitForTopic": "true"},
    ],
)
def test_what_is_chosen_no_more_is_not_read_any_more(
    broker: EmbeddedBroker, chosen: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint keeps the offsets there; chosen again, it goes on from there."""
    publish(broker, numbered(10), partition=P0)
    publish(broker, numbered(10), partition=P1)
    reached = offsets(2, 10)
    query = progress(broker, **chosen)
    assert query.advance(reached) == reached == query.advance(reached)
    assert caplog.text.count("partitions no longer chosen are not read: logs/0-0") == 1
    assert "away" not in caplog.text
    end = progress(broker).advance(reached)
    assert end == offsets(10, 10)
    # What was planned before is read all the same.
    assert query.spans(reached, end) == {P0: LogSpan(reached[P0], end[P0])}


def test_a_range_that_goes_back_is_an_error(broker: EmbeddedBroker) -> None:
    """Never an empty one; on request the query goes on at the log end, loudly."""
    publish(broker, numbered(10), partition=P0)
    reached = offsets(25, 0)
    query = progress(broker)
    end = query.advance(reached)
    assert end == offsets(10, 0)
    with pytest.raises(BackwardRangeError, match="from 875 to 350"):
        query.spans(reached, end)
    query = progress(broker, failOnDataLoss="false")
    end = query.advance(reached)
    assert query.spans(reached, end) == {}


def test_queries_with_other_patterns_have_topics_of_their_own(
    broker: EmbeddedBroker,
) -> None:
    """Spark plans many queries in one process, one soon after the other."""
    broker.create_topic("metrics", 1)
    metrics = {tp(0, topic="metrics")}
    for pattern, chosen in [("l.*", {P0, P1}), ("m.*", metrics), ("l.*", {P0, P1})]:
        query = progress(broker, subscribe=None, subscribePattern=pattern)
        assert query.start().keys() == chosen


def test_an_idle_query_asks_nobody(broker: EmbeddedBroker) -> None:
    """Neither broker nor ZooKeeper, however often Spark wants to know."""
    publish(broker, numbered(10), partition=P0)
    options = source_options(broker, zookeeper="memory", progressGroup="idle")
    query = StreamProgress(options, idle_wait_s=0.0)
    reached = query.advance(query.advance(query.start()))
    cluster = shared_cluster(source_options(broker, zookeeper="memory").wire)
    before = request_count(cluster), len(broker.zookeeper.calls)
    for _ in range(200):
        assert query.advance(reached) == reached
    after = request_count(cluster), len(broker.zookeeper.calls)
    # A wait that ends early is followed by another one.
    assert after[0] - before[0] <= len(reached)
    assert after[1] == before[1]


def request_count(cluster: Cluster) -> int:
    """Return how many requests were sent to brokers."""

    async def count(context: ClientContext, deadline_s: float) -> int:
        del deadline_s
        found = context.pool.statistics().connections
        return sum(connection.request_count for connection in found)

    return cluster.run(count)


def test_what_retention_took_is_named_or_left_out(broker: EmbeddedBroker) -> None:
    """Both ways of `failOnDataLoss`, from the log start that is there now."""
    publish(broker, numbered(10), partition=P0)
    cluster = told_cluster(source_options(broker))
    query = progress(broker)
    start, end = offsets(0, 0), query.advance(offsets(0, 0))
    spans = {P0: LogSpan(Offset(4 * SIZE), Offset(10 * SIZE)), P1: None}
    cluster.told = spans
    with pytest.raises(DataLossError, match=r"lost \[0, 140\)"):
        query.spans(start, end)
    query = progress(broker, failOnDataLoss="false")
    assert query.spans(start, end) == {P0: spans[P0]}


@pytest.mark.parametrize("log", [LogSpan(Offset(0), Offset(4 * SIZE)), None])
def test_a_loss_that_the_leader_does_not_confirm_is_none(
    broker: EmbeddedBroker, log: LogSpan | None
) -> None:
    """A replica that led before names an old end, or has no log: nothing ends."""
    publish(broker, numbered(10), partition=P0)
    cluster = told_cluster(source_options(broker))
    query = progress(broker)
    start, end = offsets(0, 0), query.advance(offsets(0, 0))
    cluster.told, cluster.is_told_twice = {P0: log, P1: None}, False
    assert query.advance(end) == end
    assert query.ends == end
    assert query.spans(start, end) == {P0: LogSpan(Offset(0), Offset(10 * SIZE))}
    cluster.is_told_twice = True
    with pytest.raises(DataLossError):
        query.spans(start, end)


def test_a_new_driver_waits_until_it_knows_the_cluster(
    broker: EmbeddedBroker,
) -> None:
    """It plans a batch first that its predecessor logged; no broker is away then.

    A partition that comes new in that batch would be read from 0, and be called lost
    where retention has been.
    """
    publish(broker, numbered(10), partition=P0)
    found = shared_cluster(source_options(broker).wire).watched_spans([P0])
    assert found == {P0: LogSpan(Offset(0), Offset(10 * SIZE))}


def test_the_start_is_kept_until_the_first_commit(broker: EmbeddedBroker) -> None:
    """A restart before that starts where the first one did; then it is forgotten."""
    publish(broker, numbered(10), partition=P0)
    options = {"zookeeper": "memory", "startingOffsets": "latest", "pinStart": "q"}
    first = progress(broker, **options).start()
    assert first == offsets(10, 0)
    publish(broker, numbered(5), partition=P0)
    again = progress(broker, **options)
    assert again.start() == first
    assert progress(broker, **{**options, "pinStart": "other"}).start() == offsets(
        15, 0
    )
    again.commit(offsets(15, 0))
    assert progress(broker, **options).start() == offsets(15, 0)


def test_a_start_that_is_in_the_checkpoint_is_forgotten(broker: EmbeddedBroker) -> None:
    """Also where Spark commits nothing: a new query with the name starts again."""
    publish(broker, numbered(10), partition=P0)
    options = {"zookeeper": "memory", "startingOffsets": "latest", "pinStart": "q"}
    query = progress(broker, **options)
    first = query.start()
    publish(broker, numbered(5), partition=P0)
    query.reach(first)  # asked for the first micro-batch
    assert progress(broker, **options).start() == first
    query.reach(offsets(15, 0))
    publish(broker, numbered(5), partition=P0)
    assert progress(broker, **options).start() == offsets(20, 0)


def test_the_start_of_another_query_is_none_of_this_one(broker: EmbeddedBroker) -> None:
    """Its own topics would be read from their log starts, no matter what was asked."""
    broker.create_topic("metrics", 1)
    options = {"zookeeper": "memory", "progressGroup": "g"}
    assert progress(broker, **options).start() == offsets(0, 0)
    other = progress(broker, **options, subscribe="metrics")
    text = r"'g' stores the start .* reads logs/0-0, logs/0-1"
    with pytest.raises(OptionError, match=text):
        other.start()


def test_another_message_at_a_place_is_noticed(broker: EmbeddedBroker) -> None:
    """By its id; what is not there any more, or not yet, shows nothing."""
    publish(broker, numbered(10), partition=P0)
    last = {name: found[-1] for name, found in stored(broker).items() if found}["0-0"]
    query = progress(broker)
    at, others = Offset(9 * SIZE), {tp(0, broker=9): (Offset(0), MessageId(7))}
    assert query.changed({P0: (at, last.id), P1: (at, last.id), **others}) == []
    assert query.changed({P0: (at, MessageId(last.id + 1)), **others}) == [P0]
    assert query.changed({P0: (Offset(at - 1), last.id)}) == [P0]
    assert query.changed({P0: (Offset(at + SIZE), last.id)}) == []
    assert progress(broker, subscribe="others").changed({P0: (at, MessageId(7))}) == []


def test_progress_is_committed_for_a_group_and_never_goes_back(
    broker: EmbeddedBroker,
) -> None:
    """Tools see the lag of the query; another query goes on from there."""
    publish(broker, numbered(10), partition=P0)
    query = progress(broker, zookeeper="memory", progressGroup="g")
    query.commit(offsets(8, 0))
    query.commit(offsets(3, 0))
    options = {"zookeeper": "memory", "startingOffsets": "group", "group": "g"}
    assert progress(broker, **options).start() == offsets(8, 0)


def test_a_commit_costs_what_has_moved(broker: EmbeddedBroker) -> None:
    """A read and a write of ZooKeeper for each partition that did."""
    query = progress(broker, zookeeper="memory", progressGroup="g")
    query.commit(offsets(1, 1))
    before = len(broker.zookeeper.calls)
    query.commit(offsets(1, 1))
    assert len(broker.zookeeper.calls) == before
    query.commit(offsets(2, 1))
    paths = {path for _what, path in broker.zookeeper.calls[before:]}
    assert [path.rpartition("/")[2] for path in paths] == ["0-0"]


def test_the_last_batch_of_a_run_that_ends_is_told(broker: EmbeddedBroker) -> None:
    """Spark never commits it, but asks for more after it; it is committed once."""
    publish(broker, numbered(5), partition=P0)
    options = source_options(broker, zookeeper="memory", progressGroup="g")
    reader = StreamReader(options, VALUE)
    reached = offsets_to_json(offsets(5, 0))
    reader.latestOffset(reached, None)
    group = {"zookeeper": "memory", "startingOffsets": "group", "group": "g"}
    assert progress(broker, **group).start() == offsets(5, 0)
    before = len(broker.zookeeper.calls)
    reader.latestOffset(reached, None)
    assert len(broker.zookeeper.calls) == before


def test_a_failed_commit_is_no_failed_query(
    broker: EmbeddedBroker, caplog: Any
) -> None:
    """The offsets of the query are Spark's; those of the group are for others."""
    options = source_options(broker, zookeeper="memory", progressGroup="g")
    told_cluster(options).refuses = True
    query = StreamProgress(options)
    for commit in (query.commit, query.reach):
        caplog.clear()
        commit(offsets(1, 0))
        assert "progress is not committed" in caplog.text


def test_a_start_by_time_is_the_first_message_of_it(broker: EmbeddedBroker) -> None:
    """If none is that young, the user's choice decides."""
    publish(broker, numbered(10), partition=P0)
    old = progress(
        broker, startingTimestamp=0, subscribe=None, assign='{"logs":["0-0"]}'
    )
    assert old.start() == {P0: Offset(0)}
    young = {"startingTimestamp": 2**42}
    with pytest.raises(SparkError, match="logs/0-0"):
        progress(broker, **young).start()
    late = progress(broker, **young, startingOffsetsByTimestampStrategy="latest")
    assert late.start() == offsets(10, 0)


def test_a_client_that_nobody_asks_is_closed_and_comes_back(
    broker: EmbeddedBroker,
) -> None:
    """Spark never says that a query is over."""
    options = source_options(broker)
    cluster = cluster_of(options, idle_s=0.05)
    query = StreamProgress(options)
    start = query.start()
    wait_until(lambda: not cluster.is_open)
    assert query.start() == start


def test_a_call_that_comes_while_the_client_is_closed_has_another_one(
    broker: EmbeddedBroker,
) -> None:
    """A call at that very moment is not cut off."""
    publish(broker, numbered(10), partition=P0)
    clients = set()

    async def read(context: ClientContext, deadline_s: float) -> Any:
        clients.add(context)
        return await LogQueries(context, P0, deadline_s).ends()

    with own_clusters(SlowToClose):
        # A client is idle at each turn of the loop between two calls.
        cluster = cluster_of(source_options(broker), idle_s=0.0)
        while len(clients) < 5:
            assert cluster.run(read) == (0, offsets(10, 0)[P0])


class SlowToClose(AsyncClient):
    """Its connections are open a while yet, when it is being closed."""

    begun_count = closed_count = 0

    async def close(self, **more: Any) -> None:
        SlowToClose.begun_count += 1
        await asyncio.sleep(0.1)
        await super().close(**more)
        SlowToClose.closed_count += 1


def test_the_end_waits_for_a_client_that_is_being_closed(
    broker: EmbeddedBroker,
) -> None:
    """Else its connections would be left to the garbage, with the loop gone."""
    options = source_options(broker)
    with own_clusters(SlowToClose):
        cluster = cluster_of(options, idle_s=0.05)
        before = SlowToClose.begun_count
        StreamProgress(options).start()
        wait_until(lambda: not cluster.is_open)
        cluster.close()
        assert SlowToClose.closed_count == SlowToClose.begun_count > before


def test_calls_that_come_at_once_share_one_client(broker: EmbeddedBroker) -> None:
    """Queries of one session ask from threads of their own."""
    cluster = shared_cluster(source_options(broker).wire)

    async def read(context: ClientContext, deadline_s: float) -> ClientContext:
        del deadline_s
        return context

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(cluster.run, [read] * 3)
    assert all(context is first for context in others)


def test_readers_of_old_and_new_spark_plan_the_same(broker: EmbeddedBroker) -> None:
    """Before 4.2 a reader has to know by itself the offsets of the query."""
    publish(broker, numbered(100), partition=P0)
    options = source_options(broker, maxOffsetsPerTrigger=40)
    old, new = OldStreamReader(options, VALUE), StreamReader(options, VALUE)
    start = old.initialOffset()
    assert start == new.initialOffset() == offsets_to_json(offsets(0, 0))
    end = old.latestOffset()
    assert end == new.latestOffset(start, None) == offsets_to_json(offsets(40, 0))
    tasks = [task.value for task in old.partitions(start, end)]
    assert tasks == [task.value for task in new.partitions(start, end)]
    ((task,),) = tasks
    assert (task.range.start, task.range.end) == (0, 40 * SIZE)
    assert old.latestOffset() == offsets_to_json(offsets(80, 0))
    # After a restart it is not known yet.
    again = OldStreamReader(options, VALUE).latestOffset()
    assert again == offsets_to_json(offsets(100, 0))


def test_a_partition_that_is_gone_is_told_once(
    broker: EmbeddedBroker, caplog: Any
) -> None:
    """If that is no error; however often Spark asks, and again if it comes back."""
    publish(broker, numbered(10), partition=P0)
    cluster = told_cluster(source_options(broker))
    reached = offsets(10, 0)
    query = progress(broker, failOnDataLoss="false")
    cluster.told = dict.fromkeys(reached)
    for _ in range(3):
        assert query.advance(reached) == reached
    (said,) = [r for r in caplog.messages if "the partition is gone" in r]
    assert str(P0) in said
    cluster.told = None
    assert query.advance(reached) == reached
    cluster.told = dict.fromkeys(reached)
    assert query.advance(reached) == reached
    assert caplog.text.count("the partition is gone") == 2


def test_a_micro_batch_waits_for_a_broker_that_is_restarted(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks are given where it is, and cannot find it out by themselves."""
    publish(broker, numbered(10), partition=P0)
    reader = StreamReader(source_options(broker, zookeeper="memory"), VALUE)
    broker.stop()
    starting = threading.Thread(target=broker.start)

    plan_tasks = StreamProgress.plan_tasks

    def plan(*words: Any) -> list[ReadTask]:
        starting.start()
        return plan_tasks(*words)

    monkeypatch.setattr(StreamProgress, "plan_tasks", plan)
    start, end = (offsets_to_json(offsets(count, 0)) for count in (0, 10))
    (found,) = reader.partitions(start, end)
    starting.join()
    assert found.value[0].address is not None


def test_an_old_spark_goes_on_with_a_broker_that_was_away(
    broker: EmbeddedBroker,
) -> None:
    """Messages of it read before the restart do not come again."""
    publish(broker, numbered(30), partition=P0)
    publish(broker, numbered(20), partition=P1)
    cluster = told_cluster(source_options(broker))
    reader = OldStreamReader(source_options(broker), VALUE)
    cluster.told = {P0: LogSpan(Offset(0), offsets(30, 0)[P0])}
    start, end = offsets_to_json(offsets(10, 15)), reader.latestOffset()
    assert end == offsets_to_json({P0: offsets(30, 0)[P0]})
    (task,) = reader.partitions(start, end)
    assert task.value[0].range.start == 10 * SIZE
    cluster.told = None
    last = reader.latestOffset()
    assert last == offsets_to_json(offsets(30, 20))
    (task,) = reader.partitions(end, last)
    span = task.value[0].range
    assert (span.partition, span.start) == (P1, 15 * SIZE)


def test_a_reader_travels_without_its_client(broker: EmbeddedBroker) -> None:
    """Tasks get it in pickled form, from a driver that has asked already."""
    publish(broker, numbered(10), partition=P0)
    reader = StreamReader(source_options(broker), VALUE)
    start = reader.initialOffset()
    end = reader.latestOffset(start, None)
    (task,) = reader.partitions(start, end)
    nothing = {TOPIC: {"bytes": 0, "records": 0}}
    assert reader.reportLatestOffset() == {**end, LAG_KEY: nothing}
    copy = pickle.loads(pickle.dumps(reader))
    batches = list(copy.read(pickle.loads(pickle.dumps(task))))
    assert [v for b in batches for v in b.column("value").to_pylist()] == numbered(10)
