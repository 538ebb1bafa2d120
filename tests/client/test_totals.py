"""Producers that are closed: what they counted stays in the sums, and nothing else."""

import weakref
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

from metaq.client import Client
from metaq.client.ordered import OrderedStatistics
from metaq.client.totals import Totals, total_of_ordered, total_of_producers
from metaq.model import BrokerId, TopicPartition
from metaq.stats import HistogramSnapshot
from tests.brokers import StartBroker
from tests.client.test_metrics import FULL, PART, PRODUCER, samples
from tests.client.worlds import QUICK

NEXT_PART = TopicPartition("t", BrokerId(3), 2)


def falling(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Return the producers' counters that are lower than they were, or gone."""
    return [
        key
        for key, value in before.items()
        if "producer" in key
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
    total = total_of_producers([PRODUCER, other])
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
    ordered = total_of_ordered([*FULL.ordered_producers, *FULL.ordered_producers])
    assert ordered == OrderedStatistics(64, 66, 68, {}, ())


class Closing:
    """A producer that counts on while it is being closed."""

    def __init__(self) -> None:
        self.is_closed = self.has_ended = False
        self.count = 0

    def statistics(self) -> OrderedStatistics:
        return OrderedStatistics(self.count, 0, 0, {}, ())


def test_a_producer_counts_until_it_has_ended_and_is_forgotten_then() -> None:
    totals = Totals(total_of_ordered)
    assert totals.snapshot() == ((), None)
    one, other = Closing(), Closing()
    totals.add(one)
    one.count = 1
    assert totals.snapshot() == ((one.statistics(),), None)
    one.is_closed = True
    totals.add(other)
    one.count = 2
    opened, closed = totals.snapshot()
    assert opened == (other.statistics(),)
    assert closed is not None
    assert closed.sent_count == 2
    one.has_ended = True
    forgotten = weakref.ref(one)
    del one
    totals.add(Closing())
    assert forgotten() is None
    opened, closed = totals.snapshot()
    assert len(opened) == 2
    assert closed is not None
    assert closed.sent_count == 2
