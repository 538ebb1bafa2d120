"""Options out of range are refused, by name, when they are given."""

import re
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from metaq.client.consume.redelivery import RetryPolicy
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
    (RetryPolicy, "dead_letter_topic", "a b"),
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
        (TypeError, ConfigError),
        match=rf"{name}: expected .*, got (\w+ )?{re.escape(repr(value))}$",
    ):
        options(**{name: value})


class Timeless(datetime):
    """As `datetime.min` is, east of Greenwich."""

    def timestamp(self) -> float:
        raise ValueError("year 0 is out of range")


def test_a_time_before_all_times_is_refused() -> None:
    """It has no place among the milliseconds since 1970."""
    with pytest.raises(ConfigError, match="start: expected a time, got 0001-01-01"):
        ConsumerOptions(start=Timeless.min)


CONTRADICTIONS: list[tuple[type[Any], dict[str, Any], str]] = [
    (
        ClientOptions,
        {"reconnect_first_s": 3.0},
        "reconnect_first_s: expected at most reconnect_max_s, got 3.0 and 2.0",
    ),
    (
        ProducerOptions,
        {"retry_first_s": 0.5, "retry_max_s": 0.25},
        "retry_first_s: expected at most retry_max_s, got 0.5 and 0.25",
    ),
    (
        ProducerOptions,
        {"linger_s": 5, "timeout_s": 5},
        "linger_s: expected less than timeout_s, got 5 and 5",
    ),
    (
        ConsumerOptions,
        {"fetch_bytes_max": 4096},
        "fetch_bytes: expected at most fetch_bytes_max, got 1048576 and 4096",
    ),
    (
        RetryPolicy,
        {"first_s": 2.0, "max_s": 1.0},
        "first_s: expected at most max_s, got 2.0 and 1.0",
    ),
    (
        RetryPolicy,
        {"then": "drop", "dead_letter_topic": "dead"},
        (
            "dead_letter_topic: expected then='dead_letter' with it, got 'dead' and"
            " then='drop'"
        ),
    ),
    (
        RetryPolicy,
        {"park_dir": "/parked"},
        "park_dir: expected then='park' with it, got '/parked' and then='stop'",
    ),
]


@pytest.mark.parametrize(("options", "given", "sentence"), CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(
    options: type[Any], given: dict[str, Any], sentence: str
) -> None:
    """One sentence names both of them, and what both are."""
    with pytest.raises(ConfigError) as refused:
        options(**given)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (ClientOptions, {"reconnect_first_s": 2.0}),
        (ProducerOptions, {"retry_first_s": 1.0}),
        (ProducerOptions, {"linger_s": 9.9}),
        (ProducerOptions, {"buffer_bytes_max": 1000, "buffer_count_max": 1}),
        (ConsumerOptions, {"fetch_bytes": 4096, "fetch_bytes_max": 4096}),
        (ConsumerOptions, {"buffer_bytes_max": 1000}),
        (ConsumerOptions, {"idle_step_s": 9.0, "watchdog_s": 0.1}),
        (RetryPolicy, {"then": "dead_letter", "dead_letter_topic": "dead"}),
    ],
)
def test_options_that_only_look_odd_together_are_accepted(
    options: type[Any], given: dict[str, Any]
) -> None:
    """The smaller bound counts, and what is to be done is done."""
    options(**given)


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


_ON_A_LOOP = """
import asyncio, sys
from metaq.client.options import ConsumerOptions, load_filter
from metaq.errors import FilterError

async def main():
    ConsumerOptions(where="tag =")
    assert "lark" not in sys.modules
    try:
        await load_filter("tag =")
    except FilterError as error:
        assert "column 6" in str(error), error
    assert (await load_filter("tag = 'a'")).text == "tag = 'a'"
    assert "lark" in sys.modules
    try:
        ConsumerOptions(where="tag =")
    except FilterError as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_first_filter_on_a_loop_is_read_on_another_thread() -> None:
    """The parser takes a tenth of a second, which would hold up the loop."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_LOOP], capture_output=True, text=True, check=True
    )
    assert "column 6" in done.stdout
