"""How often, how long in between, and what a policy may not say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.consume.redelivery import (
    Reject,
    RetryPolicy,
    dead_letter_topic,
    next_delay_s,
)
from metaq.errors import ConfigError

POLICY = RetryPolicy(attempts_max=4, first_s=1.0, max_s=3.0)


@pytest.mark.parametrize(
    ("attempts", "low_s", "high_s"), [(1, 0.5, 1.0), (2, 1.0, 2.0), (3, 1.5, 3.0)]
)
def test_the_pause_doubles_up_to_its_bound(
    attempts: int, low_s: float, high_s: float
) -> None:
    delay_s = next_delay_s(POLICY, attempts, ValueError())
    assert delay_s is not None
    assert low_s <= delay_s <= high_s


@pytest.mark.parametrize(
    ("attempts", "error"), [(4, ValueError()), (5, ValueError()), (1, Reject("never"))]
)
def test_the_last_attempt_and_a_rejection_give_up(
    attempts: int, error: Exception
) -> None:
    assert next_delay_s(POLICY, attempts, error) is None


@given(st.integers(1, 10**6))
def test_pauses_are_bounded_for_any_number_of_attempts(attempts: int) -> None:
    policy = RetryPolicy(attempts_max=10**7, first_s=0.1, max_s=5.0)
    delay_s = next_delay_s(policy, attempts, ValueError())
    assert delay_s is not None
    assert 0.05 <= delay_s <= 5.0


def test_by_default_a_handler_gets_a_message_as_often_as_in_metaq() -> None:
    assert RetryPolicy().attempts_max == 6


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"attempts_max": 0}, ["attempts_max", "0"]),
        ({"first_s": 0.0}, ["first_s", "0.0"]),
        ({"first_s": 2.0, "max_s": 1.0}, ["2.0", "1.0"]),
        ({"then": "retry"}, ["dead_letter", "retry"]),
        ({"then": "park"}, ["park_dir"]),
        ({"replay_interval_s": 0.0}, ["replay_interval_s", "0.0"]),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(
    options: dict, names: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        RetryPolicy(**options)
    for name in names:
        assert name in str(caught.value)


def test_dead_letters_have_a_topic_of_their_own() -> None:
    assert dead_letter_topic(RetryPolicy(), "orders") == "orders.dead"
    policy = RetryPolicy(then="dead_letter", dead_letter_topic="cemetery")
    assert dead_letter_topic(policy, "orders") == "cemetery"
