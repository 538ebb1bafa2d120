"""Messages of a task, and that it sends the same when it is run again."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import ClassVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import ClosedError, NoBrokerError
from metaq.spark.options import SinkOptions
from metaq.spark.sink import outbox as outboxes
from metaq.spark.sink.outbox import Outbox, RowTargets, Targets, WriteName
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from tests.spark.brokers import TOPIC, data_of, numbered, stored, tp

WIRE = SinkOptions.from_map({"brokers": "unused:1", "topic": TOPIC}).wire
NAME = WriteName("query", 7, 3, 11)


def rows(values: Sequence[bytes]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})


def box(targets: Targets, *, attempt: int = 1, batch_bytes: int = 4096) -> Outbox:
    return Outbox(
        WriteName(NAME.query, NAME.batch, NAME.task, attempt),
        RowTargets(TOPIC, targets, lambda _topics: targets),
        batch_bytes=batch_bytes,
        wire=WIRE,
    )


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with a topic of two partitions."""
    with embedded_broker(topics={TOPIC: 2}) as found:
        yield found


def targets_of(broker: EmbeddedBroker) -> Targets:
    return {TOPIC: {tp(0): broker.address, tp(1): broker.address}}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[1000], [300, 700], [999, 1]])
def test_a_task_that_is_run_again_stores_nothing_twice(
    broker: EmbeddedBroker, sizes: list[int]
) -> None:
    """However far it came: names and cuts follow from the rows alone."""
    values = numbered(1000)
    edges = [0, *accumulate(sizes)]
    parts = [rows(values[start:end]) for start, end in pairwise(edges)]
    for attempt, some in enumerate((parts[:1], parts)):
        with box(targets_of(broker), attempt=attempt) as outbox:
            for part in some:
                outbox.put(part)
            done = outbox.finish()
    assert (done.message_count, done.doubtful_count) == (1000, 0)
    assert data_of(stored(broker)) == values


@pytest.mark.slow
def test_other_rows_in_another_run_are_all_stored(broker: EmbeddedBroker) -> None:
    """Indistinguishable rows may be doubled, never lost."""
    values = numbered(500)
    for attempt, some in enumerate((values, values[::-1])):
        with box(targets_of(broker), attempt=attempt) as outbox:
            outbox.put(rows(some))
            done = outbox.finish()
    assert set(data_of(stored(broker))) == set(values)
    assert done.doubtful_count > 0


def test_a_task_that_is_over_sends_nothing() -> None:
    """Its connections and its thread have ended."""
    with box({TOPIC: {tp(0): "127.0.0.1:1"}}) as outbox:
        pass
    with pytest.raises(ClosedError):
        outbox.put(rows([b"late"]))


def test_a_topic_without_partitions_is_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(NoBrokerError, match="'logs'"):
        box({TOPIC: {}})


class Recorder:
    """In the place of the sender: what was sent."""

    last: "ClassVar[Recorder]"
    sent: list[tuple[str, int, tuple[bytes, ...]]]

    def __init__(self, *_args: object, **_more: object) -> None:
        self.sent = []
        Recorder.last = self

    def send(
        self,
        _partition: object,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        *,
        producer: str,
        sequence: int,
        spare: str,
    ) -> None:
        assert len(payloads) == len(flags)
        assert len(producer) <= 64
        assert len(spare) <= 64
        self.sent.append((producer, sequence, tuple(payloads)))


@given(
    sizes=st.lists(st.integers(0, 300), max_size=200),
    cuts=st.sets(st.integers(1, 199)),
    kept=st.integers(0, 10),
)
def test_a_run_that_breaks_off_has_sent_the_beginning_of_a_whole_one(
    sizes: list[int], cuts: set[int], kept: int
) -> None:
    """Batch by batch, with the same names; each within its bound."""
    values = [b"%03d" % number + bytes(size) for number, size in enumerate(sizes)]
    edges = [0, *(cut for cut in sorted(cuts) if cut < len(values)), len(values)]
    parts = [values[start:end] for start, end in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outboxes, "NamedSender", Recorder)
        runs = []
        for some in (parts, parts[:kept]):
            outbox = box({TOPIC: {tp(0): "h:1"}}, batch_bytes=1000)
            for part in some:
                outbox.put(rows(part))
            runs.append(Recorder.last.sent)
    whole, broken = runs
    assert broken == whole[: len(broken)]
    assert [value for _p, _s, batch in whole for value in batch] == values
    for number, (producer, own) in enumerate(groupby(whole, key=itemgetter(0))):
        assert producer == f"{NAME.producer}-{number}"
        batches = [(sequence, batch) for _name, sequence, batch in own]
        assert len(batches) <= 5
        starts = [0, *accumulate(len(batch) for _sequence, batch in batches)]
        assert [sequence for sequence, _batch in batches] == starts[:-1]
    assert all(
        len(batch) == 1 or sum(len(v) + 20 for v in batch) <= 1000
        for _p, _s, batch in whole
    )
