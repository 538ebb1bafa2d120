"""Rows of a task in a transaction: promised, or rolled back with a sentence."""

from collections.abc import Iterator

import pyarrow as pa
import pytest

from metaq.client import Client
from metaq.errors import MetaqError
from metaq.model import BrokerId
from metaq.spark.errors import RowError, SparkError
from metaq.spark.sink.decisions import branch_xid
from metaq.spark.sink.exact_sink import BranchOutbox
from metaq.spark.sink.outbox import RowTargets, Targets, WriteName
from metaq.testing.clock import ManualClock
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.fake_broker import FakeBroker
from tests.spark.brokers import TOPIC, data_of, numbered, stored, tp

pytestmark = pytest.mark.slow

QUERY = "0f8fad5b-d9cb-469f-a165-70867728950e"
NAME = "sink-outbox"


def rows(values: list[bytes | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})


def box(targets: Targets, *, attempt: int = 1) -> BranchOutbox:
    return BranchOutbox(
        WriteName(QUERY, 7, 3, attempt),
        RowTargets(TOPIC, targets, lambda _topics: targets),
        qualifier=NAME,
        timeout_s=20.0,
    )


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker that holds little."""
    settings = {"txBytesMax": "1048576"}
    with embedded_broker(topics={TOPIC: 2}, settings=settings) as found:
        yield found


def targets_of(broker: EmbeddedBroker) -> Targets:
    return {TOPIC: {tp(0): broker.address, tp(1): broker.address}}


def test_rows_are_promised_under_the_id_of_their_task(broker: EmbeddedBroker) -> None:
    """Not readable before the commit; then each partition in its order."""
    values = numbered(1000)
    with box(targets_of(broker)) as outbox:
        for first in range(0, 1000, 250):
            outbox.put(rows([*values[first : first + 250]]))
        written, branch = outbox.prepare()
    assert (written.message_count, written.size_bytes) == (1000, sum(map(len, values)))
    assert branch == (3, 1, (BrokerId(0),))
    assert data_of(stored(broker)) == []
    xid = branch_xid(NAME, QUERY, 7, branch)
    with Client(brokers=[broker.address]) as client, client.xa(NAME) as xa:
        assert list(xa.recover()) == [xid]
        xa.commit(xid)
    found = stored(broker)
    assert data_of(found) == values
    for messages in found.values():
        there = [message.data for message in messages]
        assert there == sorted(there)


def test_a_task_without_rows_has_no_branch(broker: EmbeddedBroker) -> None:
    with box(targets_of(broker), attempt=2) as outbox:
        outbox.put(rows([]))
        assert outbox.prepare()[1].brokers == ()


def test_a_task_that_fails_leaves_nothing_prepared(broker: EmbeddedBroker) -> None:
    """Also one that fails after the promise, before the driver hears of it."""

    def fail(attempt: int, *, is_prepared: bool) -> None:
        with box(targets_of(broker), attempt=attempt) as outbox:
            outbox.put(rows([b"lost"]))
            if is_prepared:
                outbox.prepare()
            outbox.put(rows([None]))

    for attempt in (3, 4):
        with pytest.raises(RowError):
            fail(attempt, is_prepared=attempt == 4)
    with Client(brokers=[broker.address]) as client, client.xa(NAME) as xa:
        assert list(xa.recover()) == []
    assert b"lost" not in data_of(stored(broker))


def send_all(outbox: BranchOutbox, value: bytes, times: int) -> None:
    with outbox:
        for _ in range(times):
            outbox.put(rows([value] * 100))
        outbox.prepare()


def test_rows_that_a_broker_does_not_hold_name_the_setting(
    broker: EmbeddedBroker,
) -> None:
    """The limit, what it would have been, and where it is changed."""
    with pytest.raises(SparkError, match=r"1048576 bytes.*raise txBytesMax"):
        send_all(box(targets_of(broker), attempt=5), b"x" * 1000, 20)


def test_a_task_that_takes_too_long_names_the_setting() -> None:
    """The broker has rolled it back; nothing was prepared."""
    clock = ManualClock()
    with FakeBroker({TOPIC: 1}, clock=clock) as broker:
        outbox = box({TOPIC: {tp(0): str(broker.address)}})
        with outbox:
            outbox.put(rows([b"first"]))
            outbox.put(rows([b"second"]))
            clock.advance_s(48 * 3600)
            with pytest.raises(SparkError, match="maxTxTimeoutInSeconds"):
                outbox.prepare()
        assert broker.payloads(TOPIC) == []


def test_a_broker_that_is_away_fails_the_task(broker: EmbeddedBroker) -> None:
    """Its error is the broker's own: Spark runs the task again."""
    with FakeBroker({TOPIC: 1}) as away:
        outbox = BranchOutbox(
            WriteName(QUERY, 7, 3, 6),
            RowTargets(TOPIC, {TOPIC: {tp(0): str(away.address)}}, lambda _topics: {}),
            qualifier=NAME,
            timeout_s=0.2,
        )
        away.go_away()
        with pytest.raises(MetaqError):
            send_all(outbox, b"x", 1)
