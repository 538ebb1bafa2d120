"""Options out of their range are refused when they are given, by name."""

import re
from typing import Any

import pytest

from metaq.client.options import ClientOptions, ConsumerOptions, ProducerOptions
from metaq.errors import ConfigError

REFUSED: list[tuple[type[Any], str, object]] = [
    (ClientOptions, "session_timeout_s", 0),
    (ClientOptions, "request_timeout_s", -1.0),
    (ClientOptions, "close_timeout_s", -0.1),
    (ProducerOptions, "timeout_s", 0.0),
    (ProducerOptions, "linger_s", -1),
    (ProducerOptions, "in_flight_batches_max", 0),
    (ProducerOptions, "in_flight_batches_max", 6),
    (ProducerOptions, "when_full", "drop"),
    (ConsumerOptions, "commit_interval_s", -5.0),
    (ConsumerOptions, "commit_interval_s", 0),
    (ConsumerOptions, "fetch_bytes", -1),
    (ConsumerOptions, "buffer_count_max", 0),
    (ConsumerOptions, "start", -1),
    (ConsumerOptions, "start", "newest"),
    (ConsumerOptions, "start", None),
    (ConsumerOptions, "start", 1.5),
    (ConsumerOptions, "wait_s", float("nan")),
    (ConsumerOptions, "on_corrupt", "loop"),
    (ClientOptions, "request_timeout_s", "5"),
    (ClientOptions, "heartbeat_s", None),
    (ProducerOptions, "buffer_bytes_max", 1.5),
    (ProducerOptions, "batch_count_max", True),
    (ConsumerOptions, "fetch_bytes", None),
]


@pytest.mark.parametrize(("options", "name", "value"), REFUSED)
def test_what_is_out_of_range_is_refused(
    options: type[Any], name: str, value: object
) -> None:
    """The error names the option and what was given."""
    with pytest.raises(
        ConfigError, match=rf"{name}: expected .*, got {re.escape(repr(value))}"
    ):
        options(**{name: value})


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (ClientOptions, "close_timeout_s", 0),
        (ProducerOptions, "linger_s", 0),
        (ProducerOptions, "in_flight_batches_max", 5),
        (ConsumerOptions, "commit_interval_s", None),
        (ConsumerOptions, "watchdog_s", None),
        (ConsumerOptions, "start", 0),
        (ConsumerOptions, "wait_s", 0),
    ],
)
def test_the_ends_of_ranges_are_accepted(
    options: type[Any], name: str, value: object
) -> None:
    """Nothing, where nothing is a choice; and 0, where it means something."""
    assert getattr(options(**{name: value}), name) == value
