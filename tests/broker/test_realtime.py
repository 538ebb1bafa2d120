"""Realtime statistics as MetaQ writes them (docs/metaq-1.4/broker.md 7.2)."""

import pytest

from metaq.broker.realtime import TOPIC_COUNT_MAX, Realtime
from metaq.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def realtime(clock: ManualClock) -> Realtime:
    return Realtime(clock)


def test_the_text_of_the_specification(realtime: Realtime, clock: ManualClock) -> None:
    """The example of the specification, character by character."""
    realtime.record("put", "a", count=4, value=12)
    realtime.record("put", "b", count=2, value=6)
    clock.advance_s(96.9)
    assert realtime.describe("put") == (
        "Count=6,Value=18,Value/Count=3,Count/Duration=0.06,Duration=96"
    )


@pytest.mark.parametrize(
    ("count", "value", "seconds", "text"),
    [
        (1, None, 0, "Value/Count=1,Count/Duration=invalid,Duration=0"),
        (3, 10, 3, "Value/Count=3.33,Count/Duration=1,Duration=3"),
        (2, 5, 4, "Value/Count=2.5,Count/Duration=0.5,Duration=4"),
        (1, 0, 1000, "Value/Count=0,Count/Duration=0,Duration=1000"),
    ],
)
def test_quotients_have_two_decimals_at_most(
    realtime: Realtime,
    clock: ManualClock,
    count: int,
    value: int | None,
    seconds: int,
    text: str,
) -> None:
    """Trailing zeros go, a divisor of 0 is `invalid`."""
    realtime.record("put", "a", count=count, value=value)
    clock.advance_s(seconds)
    assert realtime.describe("put").endswith(text)


def test_what_was_never_counted_is_told_apart(realtime: Realtime) -> None:
    """No operation is `null`; no such topic under a known one is `Invalid keyTwo`."""
    assert realtime.describe("put") == "null"
    assert realtime.describe_topic("put", "a") == "null"
    realtime.record("put", "a")
    assert realtime.describe_topic("put", "b") == "Invalid keyTwo:b"
    assert realtime.describe_topic("put", "a").startswith("Count=1,Value=1,")


def test_reset_sets_to_zero_and_keeps_the_keys(
    realtime: Realtime, clock: ManualClock
) -> None:
    """After a reset what was counted once is listed with zeros."""
    realtime.record("put", "a")
    clock.advance_s(10)
    realtime.reset()
    text = "Count=0,Value=0,Value/Count=invalid,Count/Duration=invalid,Duration=0"
    assert realtime.describe("put") == realtime.describe_topic("put", "a") == text


def test_strangers_cannot_fill_the_memory(realtime: Realtime) -> None:
    """Beyond the bound topics count for their operation only."""
    for name in (*map(str, range(TOPIC_COUNT_MAX)), "c", "c"):
        realtime.record("get", name)
    assert realtime.describe("get").startswith(f"Count={TOPIC_COUNT_MAX + 2},")
    assert realtime.describe_topic("get", "0").startswith("Count=1,")
    assert realtime.describe_topic("get", "c") == "Invalid keyTwo:c"
