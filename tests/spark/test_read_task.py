"""One task against a real broker, without a Spark session: what if the log moved on?"""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from metaq.errors import NoBrokerError
from metaq.model import Offset
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.errors import DamagedRecordError, DataLossError
from metaq.spark.options import SourceOptions
from metaq.spark.plan import ReadRange
from metaq.spark.source.batch import BatchReader
from metaq.spark.source.read_task import ReadTask, read_rows
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.fake_broker import FaultKind
from tests.brokers import StartBroker
from tests.rigs.flipping import FlippingProxy
from tests.rigs.waiting import wait_until
from tests.spark.brokers import TOPIC, numbered, options_of, publish, tp
from tests.spark.segment_dirs import flip

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SIZE = 35
COUNT = 1000
PER_SEGMENT = 100


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    """Return a broker with a log of ten segments."""
    settings = {"maxSegmentSize": str(PER_SEGMENT * SIZE)}
    with embedded_broker(topics={TOPIC: 1}, settings=settings) as found:
        for first in range(0, COUNT, PER_SEGMENT):
            publish(found, numbered(PER_SEGMENT, first))
        yield found


def segments(broker: EmbeddedBroker) -> list[Any]:
    return sorted((broker.data_path / f"{TOPIC}-0").glob("*.meta"))


def lose_segments(broker: EmbeddedBroker, count: int) -> None:
    """Take the first segments away, as retention does."""
    broker.stop()
    for path in segments(broker)[:count]:
        for file in path.parent.glob(f"{path.stem}.*"):
            file.unlink()
    # Retention writes it again; as it was it would call them lost.
    (broker.data_path / "holdings").unlink()
    broker.start()


def options(broker: EmbeddedBroker, **more: Any) -> SourceOptions:
    given = options_of(broker, subscribe=TOPIC, **more)
    texts = {name: str(value) for name, value in given.items()}
    return SourceOptions.from_map(texts, is_stream=False)


def values(
    broker: EmbeddedBroker,
    start: int = 0,
    end: int = COUNT,
    *,
    address: str | None = None,
    **more: Any,
) -> list[bytes]:
    """Read from message to message."""
    wanted = ReadRange(tp(0), Offset(start * SIZE), Offset(end * SIZE))
    task = ReadTask(wanted, address or broker.address)
    batches = list(read_rows(task, options(broker, **more)))
    assert all(batch.schema.equals(ROW_SCHEMA) for batch in batches)
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def test_a_range_is_read_over_all_its_segments(broker: EmbeddedBroker) -> None:
    """Nothing before it and nothing after it."""
    assert len(segments(broker)) >= COUNT // PER_SEGMENT
    assert values(broker) == numbered(COUNT)
    assert values(broker, 150, 950) == numbered(800, 150)
    assert values(broker, 5, 5) == []


def test_what_retention_took_fails_the_task_or_is_left_out(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """The lost range is named in both cases."""
    lose_segments(broker, 3)
    with pytest.raises(DataLossError, match=r"logs/0-0: lost \[1750, 10500\)"):
        values(broker, 50)
    assert values(broker, 50, failOnDataLoss="false") == numbered(700, 300)
    assert "lost [1750, 10500)" in caplog.text
    assert values(broker, 50, 250, failOnDataLoss="false") == []


def test_a_log_that_ends_early_fails_the_task_or_ends_it(
    broker: EmbeddedBroker,
) -> None:
    """Bytes that were there when the batch was planned."""
    with pytest.raises(DataLossError, match=r"lost \[35000, 70000\)"):
        values(broker, 0, 2 * COUNT)
    found = values(broker, 0, 2 * COUNT, failOnDataLoss="false")
    assert found == numbered(COUNT)


def test_a_batch_names_what_retention_took(broker: EmbeddedBroker) -> None:
    """The driver sees it already."""
    wanted = '{"logs": {"0-0": 35}}'
    lose_segments(broker, 2)
    value_type = ROW_SCHEMA.field("value").type
    strict = options(broker, startingOffsets=wanted)
    with pytest.raises(DataLossError, match=r"lost \[35, 7000\)"):
        BatchReader(strict, value_type).partitions()
    lenient = options(broker, startingOffsets=wanted, failOnDataLoss="false")
    (partition,) = BatchReader(lenient, value_type).partitions()
    assert partition.value[0].range.start == 2 * PER_SEGMENT * SIZE


def test_damage_fails_the_task_or_is_left_out(broker: EmbeddedBroker) -> None:
    """The next good record is where reading goes on."""
    flip(segments(broker)[4], 25 + 7 * SIZE)
    with pytest.raises(DamagedRecordError) as caught:
        values(broker)
    assert caught.value.offset == 407 * SIZE
    found = values(broker, onCorrupt="skip")
    assert found == numbered(407) + numbered(COUNT - 408, 408)


@pytest.mark.parametrize("on_corrupt", ["fail", "skip"])
def test_a_bit_that_flips_on_the_way_costs_no_message(
    broker: EmbeddedBroker, on_corrupt: str
) -> None:
    """The broker says that its bytes are good, and they are read again from there."""
    with FlippingProxy(broker.port, numbered(1, 407)[0], left=1) as proxy:
        found = values(broker, address=str(proxy.address), onCorrupt=on_corrupt)
    assert found == numbered(COUNT)


def test_bytes_that_are_damaged_each_time_are_read_twice(
    broker: EmbeddedBroker,
) -> None:
    """They are damage in the end, also where the broker calls them good."""
    with FlippingProxy(broker.port, numbered(1, 407)[0], left=100) as proxy:
        with pytest.raises(DamagedRecordError) as caught:
            values(broker, address=str(proxy.address))
        assert caught.value.offset == 407 * SIZE
        assert proxy.flip_count == 2
        found = values(broker, address=str(proxy.address), onCorrupt="skip")
    assert found == numbered(407) + numbered(COUNT - 408, 408)


@pytest.mark.parametrize("kind", ["flipped bit", "truncated segment"])
def test_damage_that_the_broker_names_is_damage(
    broker: EmbeddedBroker, kind: str
) -> None:
    """A restart finds it; what is on both sides is read, up to the last row."""
    end = COUNT + 50
    publish(broker, numbered(50, COUNT))
    broker.stop()
    if kind == "flipped bit":
        path, first, last = segments(broker)[-1], COUNT + 20, COUNT + 21
        flip(path, first * SIZE - int(path.stem) + 25)
    else:
        path, first, last = segments(broker)[4], 490, 500
        os.truncate(path, 90 * SIZE + 7)
    broker.start()
    with pytest.raises(DamagedRecordError) as caught:
        values(broker, end=end)
    error = caught.value
    assert (error.offset, error.next_good_offset) == (first * SIZE, last * SIZE)
    found = values(broker, end=end, onCorrupt="skip")
    assert found == numbered(first) + numbered(end - last, last)
    assert values(broker, first, last, onCorrupt="skip") == []


def test_damage_that_a_broker_cannot_name_is_found(
    start_metaq_1_4: StartBroker,
) -> None:
    """As consumers find it: MetaQ 1.4 answers as at the end of the log, for ever."""
    broker: Any = start_metaq_1_4({TOPIC: 1})
    for first in (0, 10):
        broker.put(*numbered(10, first), topic=TOPIC)
        broker.inner.roll(TOPIC, 0)
    broker.inner.lose(8 * SIZE + 3, 10 * SIZE, topic=TOPIC)
    with pytest.raises(DamagedRecordError) as caught:
        values(broker, 0, 20)
    assert caught.value.next_good_offset == 10 * SIZE
    found = values(broker, 0, 20, onCorrupt="skip")
    assert found == numbered(8) + numbered(10, 10)


def test_a_task_whose_broker_was_away_fails(broker: EmbeddedBroker) -> None:
    """Spark runs it again, or plans again."""
    task = ReadTask(ReadRange(tp(0), Offset(0), Offset(SIZE)), None)
    with pytest.raises(NoBrokerError, match="broker 0 is away"):
        list(read_rows(task, options(broker)))


def test_an_interrupt_is_what_the_caller_hears_and_the_connection_is_closed(
    start_metaq_1_4: StartBroker,
) -> None:
    """The answer that was waited for is given up by then."""
    broker: Any = start_metaq_1_4({TOPIC: 1})
    broker.put(b"m", topic=TOPIC)
    broker.inner.inject(FaultKind.SWALLOW, verb="get")
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        wait_until(lambda: broker.inner.statistics().commands.get("get"))
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        values(broker, 0, 1)
    wait_until(lambda: not broker.inner.statistics().open_connection_count)
