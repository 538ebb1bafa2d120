"""The sums keep the counters of closed objects, and nothing else of them."""

import weakref
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from metaq.client import Client, HandlerFailedError, LruDuplicateIds, RetryPolicy
from metaq.client.client_statistics import CLOSED_GROUPS_MAX, total_of_groups
from metaq.client.consume.duplicate_filter import DuplicateStatistics
from metaq.client.consume.handling import HandlingStatistics, total_of_runs
from metaq.client.produce.ordered_producer import OrderedStatistics
from metaq.model import BrokerId, TopicPartition
from metaq.stats import HistogramSnapshot, Totals, total_of
from tests.brokers import StartBroker
from tests.client.test_metrics import CONSUMER, FULL, PART, PRODUCER, samples
from tests.client.worlds import QUICK, WORLDS

NEXT_PART = TopicPartition("t", BrokerId(3), 2)


def falling(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Return the sums that are lower than they were, or gone."""
    return [
        key
        for key, value in before.items()
        if ("producer" in key or "{group=g}" in key)
        and ("_total{" in key or "_bucket{" in key or "_sum{" in key)
        and after.get(key, -1) < value
    ]


def test_no_counter_of_producers_falls_while_they_come_and_go(
    tmp_path: Path, start_broker: StartBroker
) -> None:
    """A rate over a sum that falls takes what is left of it for new."""
    with Client(brokers=[start_broker().address], **QUICK) as client:
        seen = come_and_go(client, tmp_path)
    assert [falling(*pair) for pair in pairwise(seen)] == [[]] * (len(seen) - 1)
    assert seen[-1]["metaq_producers{}"] == 0
    assert seen[-1]["metaq_producer_appended_messages_total{}"] == 6
    assert seen[-1]["metaq_producer_latency_seconds_count{}"] == 6
    assert seen[-1]["metaq_producer_buffered_messages{}"] == 0
    assert seen[-1]["metaq_ordered_producer_sent_messages_total{}"] == 3


def come_and_go(client: Client, tmp_path: Path) -> list[dict[str, float]]:
    """Return what was measured in between."""
    seen = [samples(client)]
    for number in range(3):
        with client.producer() as producer:
            producer.send("test", b"a")
            seen.append(samples(client))
        seen.append(samples(client))
        spool = tmp_path / f"spool-{number}"
        with client.ordered_producer("test", "0:1", spool) as ordered:
            ordered.send(b"c")
            seen.append(samples(client))
        seen.append(samples(client))
    return seen


def test_what_closed_producers_counted_is_added_and_nothing_of_them_waits() -> None:
    """Whatever was buffered or in flight has its outcome, or is on the disk."""
    other = replace(
        PRODUCER,
        by_partition={PART: 1, NEXT_PART: 2},
        failed={"ServerError": 3},
    )
    total = total_of([PRODUCER, other])
    gauges = {"buffered_count", "buffered_bytes", "in_flight_count"}
    for field in fields(PRODUCER):
        one = getattr(PRODUCER, field.name)
        if isinstance(one, int):
            expected = 0 if field.name in gauges else 2 * one
            assert getattr(total, field.name) == expected, field.name
    assert total.by_partition == {PART: 22, NEXT_PART: 2}
    assert total.failed == {"NoBrokerError": 24, "ServerError": 3}
    assert total.dropped == {"BufferFullError": 50}
    assert total.batch_counts == HistogramSnapshot((1.0, 4.0), (2, 4, 6), 80.0)
    assert total.latency_s == HistogramSnapshot((0.1,), (8, 10), 5.0)
    ordered = total_of([*FULL.ordered_producers, *FULL.ordered_producers])
    assert ordered == OrderedStatistics(64, 66, 68, 70, {}, ())


class Closing:
    """An object that counts on while it is being closed."""

    def __init__(self) -> None:
        self.is_closed = self.has_ended = False
        self.count = 0


def test_what_is_closed_counts_until_it_has_ended_and_is_forgotten_then() -> None:
    counts: Totals[Closing, int] = Totals(lambda one: one.count, sum)
    assert counts.split() == ((), None)
    assert counts.total() is None
    one, other = Closing(), Closing()
    counts.add(one)
    one.count = 1
    assert counts.split() == ((one,), None)
    assert counts.total() == 1
    one.is_closed = True
    counts.add(other)
    one.count = 2
    assert counts.split() == ((other,), 2)
    one.has_ended = True
    forgotten = weakref.ref(one)
    del one
    other.count = 40
    counts.add(Closing())
    assert forgotten() is None
    opened, closed = counts.split()
    assert (len(opened), closed, counts.total()) == (2, 2, 42)


# -- consumers ------------------------------------------------------------------------


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, start_broker: StartBroker) -> Any:
    broker = start_broker()
    broker.put(b"a", b"b", b"c")
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def refuse(_message: object) -> None:
    raise ValueError("refused")


def run_once(consumer: Any) -> None:
    """Have a handler fail once, which ends the run."""
    with pytest.raises(HandlerFailedError):
        consumer.run(refuse, retry=RetryPolicy(attempts_max=1), timeout=20)


def test_no_counter_of_a_group_falls_while_its_consumers_come_and_go(
    client: Any,
) -> None:
    """One member goes and another stays: what the first counted is no news later."""
    measured = getattr(client, "twin", client)
    options = {"duplicate_ids": LruDuplicateIds()}
    seen = []
    with client.consumer("g", ["test"]) as staying:
        run_once(staying)
        for _ in range(3):
            with client.consumer("g", ["test"], **options) as going:
                run_once(going)
                seen.append(samples(measured))
            seen.append(samples(measured))
    seen.append(samples(measured))
    assert [falling(*pair) for pair in pairwise(seen)] == [[]] * (len(seen) - 1)
    assert seen[-1]["metaq_consumer_delivered_messages_total{group=g}"] == 12
    assert seen[-1]["metaq_consumer_handler_failures_total{group=g}"] == 4


def test_a_second_run_goes_on_counting_where_the_first_ended(client: Any) -> None:
    """The first is over; who looks at the counters does not know of runs."""
    with client.consumer("g", ["test"]) as consumer:
        for count in (1, 2, 3):
            run_once(consumer)
            assert consumer.statistics().handling.failure_count == count


def test_what_runs_counted_is_added_and_the_last_one_says_what_is_parked() -> None:
    run = HandlingStatistics(1, 2, 3, 4, 5, 6, waiting_count=7)
    last = replace(run, waiting_count=0)
    assert total_of_runs([run, last]) == HandlingStatistics(2, 4, 6, 8, 10, 12, 0)
    assert total_of_runs([last, run]).waiting_count == 7


def test_what_closed_consumers_counted_is_added_by_group() -> None:
    """A part that one of them lacks, a cache of ids, is what the others have of it."""
    whole = CONSUMER.counters
    plain = replace(whole, handling=None, duplicates=None)
    groups = total_of_groups([{"g": whole}, {"h": plain}, {"g": plain}, {"g": whole}])
    assert list(groups) == ["h", "g"]
    assert groups["h"] == replace(plain, fetches={})
    for field in fields(whole):
        one = getattr(whole, field.name)
        if isinstance(one, int):
            assert getattr(groups["g"], field.name) == 3 * one, field.name
    assert groups["g"].fetches == {}
    assert groups["g"].handling == HandlingStatistics(160, 162, 164, 166, 168, 170, 0)
    assert groups["g"].duplicates == DuplicateStatistics(180, 182, 184)


def test_closed_groups_are_bounded() -> None:
    """Those stay with which a consumer was closed last."""
    names = [*map(str, range(CLOSED_GROUPS_MAX + 1)), "0"]
    parts = [{name: CONSUMER.counters} for name in names]
    assert list(total_of_groups(parts)) == names[2:]
