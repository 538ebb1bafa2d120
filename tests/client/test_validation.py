"""Invalid numbers are refused at the call, by name, in both worlds."""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from metaq.client import LruDuplicateIds
from metaq.client.consume.redelivery import RetryPolicy
from metaq.client.options import ClientOptions, ConsumerOptions, ProducerOptions
from metaq.client.validation import (
    SECONDS_MAX,
    WHOLE_MAX,
    check_offset,
    check_seconds,
    check_timeout,
    check_whole,
)
from metaq.errors import ConfigError
from metaq.model import MAX_OFFSET, Offset
from tests.brokers import StartBroker
from tests.client.worlds import QUICK, WORLDS, partition, take

NO_TIMES = [math.nan, math.inf, -math.inf, -0.001, True, "5", 2 * SECONDS_MAX, 10**400]
NO_WHOLES = [math.nan, math.inf, -1, True, "5", 1.5, 1 << 63, -(10**400)]


@pytest.mark.parametrize("value", NO_TIMES)
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(
        (TypeError, ConfigError), match=r"^x_s: expected .*, got .{1,26}$"
    ):
        check_seconds("x_s", value)
    with pytest.raises((TypeError, ConfigError), match=r"^timeout: expected "):
        check_timeout(value)


@pytest.mark.parametrize("value", NO_WHOLES)
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(
        (TypeError, ConfigError), match=r"^x: expected .*, got .{1,26}$"
    ):
        check_whole("x", value, 0)


def test_the_ends_of_the_ranges_are_accepted() -> None:
    for seconds in (0, 0.0, 5, 0.25, SECONDS_MAX, float(SECONDS_MAX)):
        check_seconds("x_s", seconds)
        check_timeout(seconds)
    check_timeout(None)
    check_whole("x", 3, 3, 3)
    check_whole("x", WHOLE_MAX, 0)
    check_offset("x", MAX_OFFSET)
    with pytest.raises(ConfigError, match="expected more than 0 to 1000000000 seconds"):
        check_seconds("x_s", 0, may_be_zero=False)
    with pytest.raises((TypeError, ConfigError), match="x: expected 3 to 4, got 5"):
        check_whole("x", 5, 3, 4)
    with pytest.raises(ConfigError, match=f"x: expected 0 to {WHOLE_MAX}, got about"):
        check_whole("x", WHOLE_MAX + 1, 0)
    with pytest.raises(ConfigError, match="x: expected 0 or more, got -1"):
        check_whole("x", -1, 0)


@pytest.mark.parametrize(
    "options", [ClientOptions, ProducerOptions, ConsumerOptions, RetryPolicy]
)
def test_every_option_that_is_a_number_refuses_what_is_none(options: type[Any]) -> None:
    for field in fields(options):
        if field.type in (float, float | None):
            values = NO_TIMES
        elif field.type is int:
            values = NO_WHOLES
        else:
            continue
        for value in values:
            with pytest.raises(
                (TypeError, ConfigError), match=rf"^{field.name}: expected"
            ):
                options(**{field.name: value})


@pytest.mark.parametrize("start", [True, -1, 1 << 63, {partition(0): -1}, math.nan])
def test_no_consumer_starts_where_no_offset_is(start: Any) -> None:
    with pytest.raises((TypeError, ConfigError), match=r"^start"):
        ConsumerOptions(start=start)


def test_a_start_by_the_name_of_a_partition_is_refused() -> None:
    """It would be ignored: all would begin at the log start."""
    with pytest.raises(
        (TypeError, ConfigError), match=r"start: expected TopicPartition.*'0-0'"
    ):
        ConsumerOptions(start={"0-0": Offset(5)})  # type: ignore[dict-item]


def test_what_goes_over_the_wire_is_bounded_by_it() -> None:
    """ZooKeeper has 32 bits for milliseconds, and a get as many for bytes."""
    with pytest.raises(ConfigError, match="session_timeout_s: expected at most"):
        ClientOptions(session_timeout_s=2**31 / 1000)
    with pytest.raises(ConfigError, match="fetch_bytes_max: expected 1 to"):
        ConsumerOptions(fetch_bytes_max=1 << 31)
    with pytest.raises(ConfigError, match="capacity: expected 1 or more"):
        LruDuplicateIds(0)


# -- calls ----------------------------------------------------------------------------


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, start_broker: StartBroker) -> Iterator[Any]:
    broker = start_broker()
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def refuses(call: Callable[..., object], *args: object) -> None:
    for value in NO_TIMES:
        with pytest.raises((TypeError, ConfigError), match=r"^timeout: expected"):
            call(*args, timeout=value)


def test_every_call_refuses_a_timeout_that_is_none(client: Any, tmp_path: Path) -> None:
    """And does nothing: a call that is right succeeds behind it."""
    for call in (client.topics, client.stats, client.close):
        refuses(call)
    refuses(client.partitions, "test")
    refuses(client.get, "test", "0-0", 0)
    with pytest.raises((TypeError, ConfigError), match=r"^timeout: expected"):
        list(client.browse("test", timeout=math.nan))
    with client.producer() as producer:
        for _ in range(2):
            refuses(producer.prepare, "test")
            refuses(producer.send, "test", b"x")
            refuses(producer.send_nowait, "test", b"x")
            refuses(producer.send_many, "test", [b"x"])
            producer.send("test", b"a")
        future = producer.send_nowait("test", b"b")
        refuses(producer.flush)
        refuses(future.result)
        refuses(future.exception)
        refuses(producer.close)
        producer.send("test", b"c", timeout=5)
    made = client.ordered_producer("test", "0:1", tmp_path)
    refuses(made.start)
    with made as ordered:
        refuses(ordered.send, b"x")
        refuses(ordered.close)
        ordered.send(b"d")
    consumer = client.consumer("g", ["test"])
    refuses(consumer.start)
    with consumer:
        assert len(take(consumer, 5)) == 5
        for call in (
            consumer.receive,
            consumer.commit,
            consumer.rollback,
            consumer.lag,
            consumer.close,
        ):
            refuses(call)
        refuses(consumer.receive_many, 1)
        refuses(consumer.seek, partition(0), 0)
        refuses(consumer.run, lambda message: None)
        assert consumer.receive(0) is None


def test_counts_and_offsets_are_checked_too(client: Any) -> None:
    with client.producer() as producer:
        producer.send("test", b"a")
    for value in (-1, True, 1 << 63, 0.5):
        with pytest.raises((TypeError, ConfigError), match=r"^offset: expected"):
            client.get("test", "0-0", value)
    for value in (0, True, 1 << 31, 0.5):
        with pytest.raises((TypeError, ConfigError), match=r"^max_bytes: expected"):
            client.get("test", "0-0", 0, value)
    with client.consumer("g", ["test"]) as consumer:
        for value in (0, True, 1.5):
            with pytest.raises((TypeError, ConfigError), match=r"^count_max: expected"):
                consumer.receive_many(value)
            with pytest.raises(
                (TypeError, ConfigError), match=r"^concurrency: expected"
            ):
                consumer.run(lambda message: None, concurrency=value)
        assert take(consumer, 1)
        for value in (-1, True, 1 << 63):
            with pytest.raises((TypeError, ConfigError), match=r"^offset: expected"):
                consumer.seek(partition(0), value)
