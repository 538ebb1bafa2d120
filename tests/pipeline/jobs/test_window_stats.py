"""Windows of the messages of a real broker, and of those that arrive."""

import threading

import pytest
from pyspark.sql import SparkSession

from metaq.pipeline.jobs.window_stats import WindowStats, follow_stats, stats
from metaq.spark.errors import OptionError
from metaq.testing.embedded import EmbeddedBroker
from tests.spark.brokers import TOPIC, numbered, publish, tp
from tests.spark.brokers import wire as options

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


def test_windows_count_messages_bytes_and_delay(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """Together they are the topic; a message that set out earlier is later."""
    publish(broker, numbered(100))
    publish(broker, numbered(20), partition=tp(0, topic="copy"))
    wire = options(broker, subscribe=f"{TOPIC},copy")
    found = stats(spark, wire, window_s=3600)
    assert sum(w.message_count for w in found if w.topic == TOPIC) == 100
    assert sum(w.size_bytes for w in found if w.topic == "copy") == 20 * 15
    assert all(w.start_ms is not None and w.start_ms % 3_600_000 == 0 for w in found)
    for window in found:
        assert window.delay_mean_s is not None
        assert window.delay_max_s is not None
        assert 0 <= window.delay_mean_s <= window.delay_max_s < 3600
    hours = stats(spark, wire, since="timestamp - INTERVAL 2 HOURS")
    assert all(w.delay_mean_s is not None and w.delay_mean_s >= 7200 for w in hours)


def test_windows_of_what_arrives(spark: SparkSession, broker: EmbeddedBroker) -> None:
    """Each batch reports what it adds; stopping the query ends the job."""
    publish(broker, numbered(40))
    seen: list[WindowStats] = []
    is_through = threading.Event()

    def take(windows: tuple[WindowStats, ...]) -> None:
        seen.extend(windows)
        if sum(w.message_count for w in seen) == 40:
            publish(broker, numbered(2))
        if sum(w.message_count for w in seen) == 42:
            is_through.set()

    def stop() -> None:
        # A query cannot be stopped from inside of its batch: it waits for the batch.
        assert is_through.wait(400)
        for query in spark.streams.active:
            query.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    wire = options(broker, subscribe=TOPIC, startingOffsets="earliest")
    with pytest.raises(OptionError, match="unknown option"):
        follow_stats(spark, {**wire, "x": "1"}, take, interval_s=0.1)
    follow_stats(spark, wire, take, interval_s=0.1)
    stopper.join()
    assert sum(w.message_count for w in seen) == 42


def test_who_does_not_take_windows_ends_the_job_with_his_error(
    spark: SparkSession, broker: EmbeddedBroker
) -> None:
    """As it is: that the reader of the output has gone is no failure of Spark."""
    publish(broker, numbered(10))

    def refuse(_windows: tuple[WindowStats, ...]) -> None:
        raise BrokenPipeError("nobody reads")

    wire = options(broker, subscribe=TOPIC, startingOffsets="earliest")
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        follow_stats(spark, wire, refuse, interval_s=0.1)
