"""Log facts for planning, from brokers that know next to nothing."""

from collections.abc import Iterator

import pytest

from metaq.model import Offset
from metaq.spark.cluster import Cluster
from metaq.spark.options import WireOptions
from metaq.spark.plan import BatchLimits, LogSpan, plan_batch_end
from metaq.spark.source import facts as spark_facts
from metaq.spark.source.facts import PlanningFacts
from metaq.testing.fake_broker import FakeBroker
from tests.spark.brokers import TOPIC, numbered, tp

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SIZE = 35
COUNT = 200
P0 = tp(0)
ALL = LogSpan(Offset(0), Offset(COUNT * SIZE))


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """Return a MetaQ 1.4 broker with one segment of messages of one size."""
    with FakeBroker({TOPIC: 1}) as found:
        for data in numbered(COUNT):
            found.add(data, topic=TOPIC)
        yield found


@pytest.fixture
def cluster(broker: FakeBroker) -> Iterator[Cluster]:
    wire = WireOptions(
        zookeeper=None,
        zk_root="/meta",
        brokers=(f"{broker.address.host}:{broker.address.port}",),
        request_timeout_s=20.0,
        retry_timeout_s=20.0,
    )
    found = Cluster(wire)
    # Its broker has to be known before it can be asked.
    found.targets([TOPIC])
    yield found
    found.close()


def batch_end(facts: PlanningFacts, start: int = 0, **limits: int) -> Offset:
    backlog = {P0: LogSpan(Offset(start), ALL.end)}
    ends = plan_batch_end(backlog, BatchLimits(**limits), facts, waited_s=0.0)
    return ends[P0]


def test_a_limit_in_bytes_is_met_although_nobody_names_boundaries(
    cluster: Cluster,
) -> None:
    """No more is read than a batch may hold."""
    facts = PlanningFacts(cluster)
    assert batch_end(facts, bytes_max=10 * SIZE) == 10 * SIZE
    assert batch_end(facts, bytes_max=11 * SIZE - 1) == 10 * SIZE
    assert batch_end(facts, start=10 * SIZE, bytes_max=SIZE) == 11 * SIZE
    assert batch_end(facts, bytes_max=1) == SIZE


def test_a_limit_in_messages_follows_what_was_seen(cluster: Cluster) -> None:
    """Of 512 bytes each before anything was read; of their average then."""
    facts = PlanningFacts(cluster)
    assert batch_end(facts, messages_max=2) < 100 * SIZE
    assert batch_end(facts, messages_max=20) == 20 * SIZE
    assert batch_end(facts, start=20 * SIZE, messages_max=7) == 27 * SIZE


def test_one_search_reads_so_much_and_no_more(
    cluster: Cluster, broker: FakeBroker
) -> None:
    """A limit that is further away is met by several batches."""
    before = broker.statistics().commands
    bounds = {"get_bytes": 10 * SIZE + 5, "walk_bytes_max": 30 * SIZE}
    facts, start = PlanningFacts(cluster, **bounds), 0
    for number in range(1, 4):
        start = batch_end(facts, start=start, bytes_max=100 * SIZE)
        assert start == number * 30 * SIZE
        asked = broker.statistics().commands
        assert asked["get"] - before["get"] == 3 * number
        probed = asked["offset"] - before["offset"]
        assert probed == spark_facts.SEGMENT_PROBES_MAX * number


def test_a_record_that_is_longer_than_a_get_ends_where_its_head_says(
    cluster: Cluster,
) -> None:
    """Nothing else of it has to be there."""
    assert batch_end(PlanningFacts(cluster, get_bytes=20), bytes_max=SIZE) == SIZE


def test_damage_ends_the_search(cluster: Cluster, broker: FakeBroker) -> None:
    """The batch ends before it; the next one meets it."""
    broker.corrupt(5 * SIZE, topic=TOPIC)
    facts = PlanningFacts(cluster)
    assert batch_end(facts, bytes_max=50 * SIZE) == 5 * SIZE
    assert batch_end(facts, start=5 * SIZE, bytes_max=50 * SIZE) == ALL.end


def test_tasks_are_not_cut_by_reading(cluster: Cluster, broker: FakeBroker) -> None:
    """The driver would read what the tasks are there to read."""
    facts = PlanningFacts(cluster)
    before = broker.statistics().commands["get"]
    assert facts.boundaries(P0, ALL.start, ALL.end, 100) == []
    assert broker.statistics().commands["get"] == before
