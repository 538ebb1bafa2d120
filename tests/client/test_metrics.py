"""A client's metrics are the values of its snapshot."""

import asyncio
import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metaq.client import AsyncClient, Client, LruDuplicateIds
from metaq.client.client_statistics import ClientStatistics, ConsumerSnapshot
from metaq.client.consume.duplicate_filter import DuplicateStatistics
from metaq.client.consume.fetch_buffer import PartitionBufferStatistics
from metaq.client.consume.fetcher import FetchStatistics
from metaq.client.consume.handling import HandlingStatistics
from metaq.client.consume.progress import ConsumerState, ConsumerStatistics, Health, Lag
from metaq.client.metrics import (
    METRICS,
    PARTITION_SERIES_MAX,
    ClientCollector,
    serve_metrics,
)
from metaq.client.produce.ordered_producer import OrderedStatistics
from metaq.client.produce.producer_counters import (
    ProducerStatistics,
    TransactionStatistics,
)
from metaq.client.queue.prefetch import QueueStatistics
from metaq.client.request.requester import RequestStatistics
from metaq.errors import ClosedError, ConfigError
from metaq.model import (
    BrokerAddress,
    BrokerId,
    GroupOffset,
    MessageId,
    Offset,
    TopicPartition,
)
from metaq.peer.connection import ConnectionStatistics
from metaq.peer.pool import PoolStatistics
from metaq.stats import HistogramSnapshot, MetricKind
from metaq.zk.session import SessionState, SessionStatus
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS, take
from tests.exposition import changed
from tests.rigs.inside import move_consumer

SPECS = [metric.spec for metric in METRICS]
PART = TopicPartition("t", BrokerId(3), 1)

CONNECTION = ConnectionStatistics(
    address=BrokerAddress("host", 8123),
    peer="10.0.0.1:8123",
    broker_version="1",
    in_flight_count=2,
    in_flight_bytes=3,
    queued_bytes=4,
    sent_bytes=5,
    received_bytes=6,
    request_count=7,
    timeout_count=8,
    unknown_reply_count=9,
    heartbeat_count=10,
)
PRODUCER = ProducerStatistics(
    appended_count=20,
    acknowledged_bytes=22,
    by_partition={PART: 21},
    doubtful_count=23,
    failed={"NoBrokerError": 24},
    dropped={"BufferFullError": 25},
    buffered_count=26,
    buffered_bytes=27,
    full_count=28,
    in_flight_count=29,
    retried_count=30,
    moved_count=31,
    batch_counts=HistogramSnapshot((1.0, 4.0), (1, 2, 3), 40.0),
    latency_s=HistogramSnapshot((0.1,), (4, 5), 2.5),
    transactions=TransactionStatistics(
        begun_count=37,
        prepared_count=38,
        committed_count=39,
        rolled_back_count=40,
        in_doubt_count=41,
        recovered_count=42,
        commit_s=HistogramSnapshot((0.01,), (30, 9), 1.5),
    ),
)
CONSUMER = ConsumerSnapshot(
    group="g",
    health=Health(
        state=ConsumerState.RUNNING,
        is_ok=True,
        partition_count=50,
        idle_s=51.5,
        uncommitted_count=52,
        problems=("one", "two", "three"),
    ),
    counters=ConsumerStatistics(
        delivered_count=60,
        filtered_count=61,
        expired_count=62,
        repeat_count=62,
        rebalance_count=67,
        reset_count=63,
        missing_bytes=64,
        commit_count=65,
        commit_failure_count=66,
        fetches={PART: FetchStatistics(70, 71, 72, 73, 74, 75)},
        handling=HandlingStatistics(80, 81, 82, 83, 84, 85, 86),
        duplicates=DuplicateStatistics(90, 91, 92),
    ),
    buffers={
        PART: PartitionBufferStatistics(
            GroupOffset(Offset(95), MessageId(1)), 96, True, 1.0
        )
    },
    lags={PART: Lag(97, 98, 99.5)},
)
FULL = ClientStatistics(
    pool=PoolStatistics(
        (CONNECTION,), attempt_count=11, failure_count=12, lost_count=13
    ),
    session=SessionStatus(SessionState.CONNECTED, 14, 1),
    producers=(PRODUCER,),
    ordered_producers=(OrderedStatistics(32, 33, 34, 35, {PART: 36}, ()),),
    consumers=(CONSUMER,),
    requests=RequestStatistics(111, 112, 113, 114),
    queues=(QueueStatistics("w", 101, 102, 103, 104, 105, 107, 108),),
)
OF_PART = "{group=g,partition=3-1,topic=t}"
EXPECTED = {
    "metaq_client_connections{address=host:8123}": 1,
    "metaq_client_connect_attempts_total{}": 11,
    "metaq_client_connect_failures_total{}": 12,
    "metaq_client_connections_lost_total{}": 13,
    "metaq_client_in_flight_requests{address=host:8123}": 2,
    "metaq_client_in_flight_bytes{address=host:8123}": 3,
    "metaq_client_queued_bytes{address=host:8123}": 4,
    "metaq_client_sent_bytes_total{address=host:8123}": 5,
    "metaq_client_received_bytes_total{address=host:8123}": 6,
    "metaq_client_requests_total{address=host:8123}": 7,
    "metaq_client_request_timeouts_total{address=host:8123}": 8,
    "metaq_client_unknown_replies_total{address=host:8123}": 9,
    "metaq_client_heartbeats_total{address=host:8123}": 10,
    "metaq_client_zookeeper_connected{}": 1,
    "metaq_client_zookeeper_sessions_total{}": 14,
    "metaq_producers{}": 1,
    "metaq_producer_appended_messages_total{}": 20,
    "metaq_producer_acknowledged_messages_total{partition=3-1,topic=t}": 21,
    "metaq_producer_acknowledged_bytes_total{}": 22,
    "metaq_producer_doubtful_messages_total{}": 23,
    "metaq_producer_failed_messages_total{error=NoBrokerError}": 24,
    "metaq_producer_dropped_messages_total{error=BufferFullError}": 25,
    "metaq_producer_buffered_messages{}": 26,
    "metaq_producer_buffered_bytes{}": 27,
    "metaq_producer_full_total{}": 28,
    "metaq_producer_in_flight_commands{}": 29,
    "metaq_producer_retried_commands_total{}": 30,
    "metaq_producer_moved_batches_total{}": 31,
    "metaq_producer_batch_messages_bucket{le=1.0}": 1,
    "metaq_producer_batch_messages_bucket{le=4.0}": 3,
    "metaq_producer_batch_messages_bucket{le=+Inf}": 6,
    "metaq_producer_batch_messages_sum{}": 40,
    "metaq_producer_latency_seconds_bucket{le=0.1}": 4,
    "metaq_producer_latency_seconds_count{}": 9,
    "metaq_producer_latency_seconds_sum{}": 2.5,
    "metaq_producer_transactions_begun_total{}": 37,
    "metaq_producer_transactions_prepared_total{}": 38,
    "metaq_producer_transactions_committed_total{}": 39,
    "metaq_producer_transactions_rolled_back_total{}": 40,
    "metaq_producer_transactions_in_doubt_total{}": 41,
    "metaq_producer_transactions_recovered_total{}": 42,
    "metaq_producer_transaction_commit_seconds_bucket{le=0.01}": 30,
    "metaq_producer_transaction_commit_seconds_count{}": 39,
    "metaq_producer_transaction_commit_seconds_sum{}": 1.5,
    "metaq_ordered_producer_sent_messages_total{}": 32,
    "metaq_ordered_producer_spooled_messages_total{}": 33,
    "metaq_ordered_producer_replayed_messages_total{}": 34,
    "metaq_ordered_producer_refused_messages_total{}": 35,
    "metaq_ordered_producer_waiting_messages{partition=3-1,topic=t}": 36,
    "metaq_consumers{group=g,state=running}": 1,
    "metaq_consumers{group=g,state=failed}": 0,
    "metaq_consumer_healthy{group=g}": 1,
    "metaq_consumer_problems{group=g}": 3,
    "metaq_consumer_partitions{group=g}": 50,
    "metaq_consumer_idle_seconds{group=g}": 51.5,
    "metaq_consumer_uncommitted_partitions{group=g}": 52,
    "metaq_consumer_delivered_messages_total{group=g}": 60,
    "metaq_consumer_expired_messages_total{group=g}": 62,
    "metaq_consumer_filtered_messages_total{group=g}": 61,
    "metaq_consumer_repeated_messages_total{group=g}": 62,
    "metaq_consumer_duplicate_messages_total{group=g}": 90,
    "metaq_consumer_duplicate_ids_failures_total{group=g}": 91,
    "metaq_consumer_duplicate_ids_forgotten_total{group=g}": 92,
    "metaq_consumer_rebalances_total{group=g}": 67,
    "metaq_consumer_resets_total{group=g}": 63,
    "metaq_consumer_missing_bytes_total{group=g}": 64,
    "metaq_consumer_commits_total{group=g}": 65,
    "metaq_consumer_commit_failures_total{group=g}": 66,
    f"metaq_consumer_handled_bytes{OF_PART}": 95,
    f"metaq_consumer_buffered_messages{OF_PART}": 96,
    f"metaq_consumer_lag_messages{OF_PART}": 97,
    f"metaq_consumer_lag_bytes{OF_PART}": 98,
    f"metaq_consumer_lag_seconds{OF_PART}": 99.5,
    f"metaq_consumer_gets_total{OF_PART}": 70,
    f"metaq_consumer_empty_gets_total{OF_PART}": 71,
    f"metaq_consumer_get_failures_total{OF_PART}": 72,
    f"metaq_consumer_skipped_ranges_total{OF_PART}": 73,
    f"metaq_consumer_received_bytes_total{OF_PART}": 74,
    f"metaq_consumer_damaged_answers_total{OF_PART}": 75,
    "metaq_consumer_handled_messages_total{group=g}": 80,
    "metaq_consumer_handler_failures_total{group=g}": 81,
    "metaq_consumer_dead_letters_total{group=g}": 82,
    "metaq_consumer_dropped_messages_total{group=g}": 83,
    "metaq_consumer_parked_messages_total{group=g}": 84,
    "metaq_consumer_replayed_messages_total{group=g}": 85,
    "metaq_consumer_parked_messages{group=g}": 86,
    "metaq_queue_taken_messages_total{group=w}": 101,
    "metaq_queue_acked_messages_total{group=w}": 102,
    "metaq_queue_returned_messages_total{group=w}": 103,
    "metaq_queue_rejected_messages_total{group=w}": 104,
    "metaq_queue_lost_leases_total{group=w}": 105,
    "metaq_queue_handler_failures_total{group=w}": 107,
    "metaq_queue_held_messages{group=w}": 108,
    "metaq_requests_total{}": 111,
    "metaq_requests_answered_total{}": 112,
    "metaq_requests_timed_out_total{}": 113,
    "metaq_replies_late_total{}": 114,
}


class Told:
    """A client that says what it is told to."""

    def __init__(self, *answers: ClientStatistics) -> None:
        self.answers = list(answers)

    def statistics(self) -> ClientStatistics:
        if not self.answers:
            raise ClosedError("the client is closed")
        return self.answers[-1]


def samples_of(text: str) -> dict[str, float]:
    """Return every sample by its name and labels; refuse what comes twice."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}"
            assert key not in found
            found[key] = sample.value
    return found


def page(*clients: Any) -> str:
    registry = CollectorRegistry()
    registry.register(ClientCollector(*clients))
    return generate_latest(registry).decode()


def samples(*clients: Any) -> dict[str, float]:
    return samples_of(page(*clients))


# -- the table ------------------------------------------------------------------------


def test_each_metric_shows_its_figure() -> None:
    """Every figure of the snapshot differs, so none can stand in for another."""
    found = samples(Told(FULL))
    assert {key: found.get(key) for key in EXPECTED} == EXPECTED


def test_dashboards_find_what_they_found() -> None:
    """Names, labels, sentences and numbers are those of the golden page."""
    assert changed(page(Told(FULL)), "client.txt") == {}


def test_every_metric_is_tried_and_named_once() -> None:
    """A new metric needs a line above."""
    histograms = {spec.name for spec in SPECS if spec.kind is MetricKind.HISTOGRAM}
    tried = set()
    for key in EXPECTED:
        name = key.partition("{")[0]
        bare = re.sub(r"_(bucket|count|sum)$", "", name)
        tried.add(bare if bare in histograms else name)
    names = [spec.name for spec in SPECS]
    assert tried == set(names)
    assert len(names) == len(set(names))


def test_a_collector_of_a_registry_is_the_only_one() -> None:
    """A second one would double every family; all clients go into the first."""
    registry = CollectorRegistry()
    registry.register(ClientCollector(Told()))
    with pytest.raises(ValueError, match="metaq_client_connections"):
        registry.register(ClientCollector(Told()))


def test_what_shares_its_labels_is_put_together() -> None:
    """Counters are added, conditions are those of the worst."""
    ill = replace(CONSUMER.health, is_ok=False, idle_s=3.0, state=ConsumerState.FAILED)
    other = replace(
        FULL, consumers=(CONSUMER, replace(CONSUMER, health=ill)), session=None
    )
    found = samples(Told(FULL), Told(other))
    assert found["metaq_consumer_healthy{group=g}"] == 0
    assert found["metaq_consumer_idle_seconds{group=g}"] == 51.5
    assert found["metaq_consumers{group=g,state=running}"] == 2
    assert found["metaq_consumers{group=g,state=failed}"] == 1
    assert found["metaq_consumer_delivered_messages_total{group=g}"] == 180
    assert found[f"metaq_consumer_handled_bytes{OF_PART}"] == 95
    assert found["metaq_client_zookeeper_connected{}"] == 1
    assert found["metaq_producer_latency_seconds_count{}"] == 18
    assert found["metaq_client_connections{address=host:8123}"] == 2


def test_series_by_partition_are_bounded() -> None:
    """The first ones by name; what is told by group has all of them in it."""
    numbers = range(1000 + PARTITION_SERIES_MAX, 1000, -1)
    parts = [TopicPartition("t", BrokerId(0), number) for number in (*numbers, 1000)]
    many = replace(CONSUMER, buffers=dict.fromkeys(parts, CONSUMER.buffers[PART]))
    found = samples(Told(replace(FULL, consumers=(many,))))
    assert [key for key in found if "handled_bytes" in key] == [
        f"metaq_consumer_handled_bytes{{group=g,partition=0-{number},topic=t}}"
        for number in range(1000, 1000 + PARTITION_SERIES_MAX)
    ]


def test_who_has_nothing_to_say_has_no_series() -> None:
    """Closed, and without ZooKeeper, producers or consumers."""
    assert samples(Told()) == {}
    empty = ClientStatistics(PoolStatistics((), 0, 0, 0), None, (), (), ())
    assert set(samples(Told(empty), Told())) == {
        "metaq_client_connect_attempts_total{}",
        "metaq_client_connect_failures_total{}",
        "metaq_client_connections_lost_total{}",
        "metaq_producers{}",
    }


# -- clients --------------------------------------------------------------------------


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker()


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def measured(client: Any) -> Client | AsyncClient:
    twin: Client | AsyncClient = getattr(client, "twin", client)
    return twin


def test_a_client_at_work_is_measured_and_no_gauge_is_left_of_closed_consumers(
    broker: Any, client: Any
) -> None:
    """Scraped from another thread than the one its loop runs on."""
    broker.put(b"a", b"b", b"c")
    part = "{group=g,partition=0-0,topic=test}"
    options = {"duplicate_ids": LruDuplicateIds()}
    with client.consumer("g", ["test"], **options) as consumer:
        take(consumer, 2)
        found = samples(measured(client))
        assert found["metaq_consumer_delivered_messages_total{group=g}"] == 3
        assert found[f"metaq_consumer_handled_bytes{part}"] > 0
        assert found[f"metaq_consumer_gets_total{part}"] >= 1
        assert found["metaq_consumer_duplicate_messages_total{group=g}"] == 0
        assert not [key for key in found if "_lag_" in key]
        lag = next(iter(consumer.lag().values()))
        found = samples(measured(client))
        if broker.has_extensions:
            assert found[f"metaq_consumer_lag_messages{part}"] == lag.messages == 2
        assert found[f"metaq_consumer_lag_bytes{part}"] == lag.bytes
        connections = f"metaq_client_connections{{address={broker.address}}}"
        assert found[connections] == 1
        move_consumer(consumer, next(iter(consumer.assignment())), 1_000_000)
        consumer.lag()  # unknown behind the log end, and no zero
        assert not [key for key in samples(measured(client)) if "_lag_" in key]
    found = samples(measured(client))
    assert found["metaq_consumer_delivered_messages_total{group=g}"] == 3
    left = [key for key in found if "consumer" in key]
    assert not [key for key in left if not key.endswith("_total{group=g}")]
    client.close()
    assert samples(measured(client)) == {}


def test_every_producer_of_a_client_is_counted(tmp_path: Path, broker: Any) -> None:
    """Those under ordered producers too; what closed ones counted stays."""

    async def scenario() -> None:
        async with AsyncClient(brokers=[broker.address], **QUICK) as client:
            async with client.producer() as producer:
                await producer.send("test", b"a")
                spool = tmp_path / "spool"
                async with client.ordered_producer("test", "0:1", spool) as ordered:
                    await ordered.send(b"b")
                    found = samples(client)
            assert found["metaq_producers{}"] == 2
            stored = (
                "metaq_producer_acknowledged_messages_total{partition=0-0,topic=test}"
            )
            assert found[stored] == 2
            assert found["metaq_ordered_producer_sent_messages_total{}"] == 1
            closed = samples(client)
            assert closed["metaq_producers{}"] == 0
            assert closed[stored] == 2
            assert closed["metaq_ordered_producer_sent_messages_total{}"] == 1

    asyncio.run(scenario())


# -- a port ---------------------------------------------------------------------------


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
        return samples_of(page.read().decode())


@pytest.mark.slow
def test_a_port_answers_inside_the_block() -> None:
    with serve_metrics(Told(FULL), port=0) as port:
        assert EXPECTED.items() <= scraped(port).items()
        with (
            pytest.raises(ConfigError, match=f"metrics port {port}: "),
            serve_metrics(Told(FULL), port=port),
        ):
            pass
    with pytest.raises(OSError, match="refused"):
        scraped(port)


@pytest.mark.slow
def test_scrapes_while_a_client_works_fail_nobody(broker: Any) -> None:
    """They come from threads of their own, at any moment."""
    is_over = threading.Event()

    def scrape(client: Client) -> int:
        count = 0
        # The client gets the interpreter now and then, too.
        while not is_over.wait(0.002):
            samples(client)
            count += 1
        return count

    with (
        ThreadPoolExecutor(2) as threads,
        Client(brokers=[broker.address], **QUICK) as client,
    ):
        scrapes = [threads.submit(scrape, client) for _ in range(2)]
        try:
            for number in range(5):
                with client.producer() as producer:
                    producer.send("test", b"%d" % number)
                with client.consumer("g", ["test"]) as consumer:
                    take(consumer, 1)
        finally:
            is_over.set()
        assert all(one.result(20) for one in scrapes)
