"""Failing handlers: attempts, pauses, invalid policies, the log.

The first failure of each kind is logged with its traceback, later ones without.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client import read_origin
from metaq.client.consume.redelivery import (
    KINDS_MAX,
    FailureLog,
    Reject,
    RetryPolicy,
    dead_letter_topic,
    next_delay_s,
)
from metaq.client.errors import MessageTooLargeError
from metaq.client.produce.producer import AsyncProducer
from metaq.errors import ConfigError
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS
from tests.rigs.waiting import wait_until

POLICY = RetryPolicy(attempts_max=4, first_s=1.0, max_s=3.0)

LOG = logging.getLogger("handlers")


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


def failure(make: Callable[[], Exception]) -> Exception:
    try:
        raise make()
    except Exception as error:
        return error


def other_place() -> Exception:
    try:
        raise ValueError
    except ValueError as error:
        return error


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    with caplog.at_level(logging.DEBUG):
        yield caplog


def test_the_first_of_a_kind_is_a_warning_with_traceback(lines: Any) -> None:
    """A kind is a type and a line of code; repetitions are logged at DEBUG."""
    failures = FailureLog(LOG)
    for error in (
        failure(ValueError),
        failure(ValueError),
        failure(KeyError),
        other_place(),
    ):
        failures.write("handler failed", error, is_last=False)
    assert [(one.levelname, bool(one.exc_info)) for one in lines.records] == [
        ("WARNING", True),
        ("DEBUG", False),
        ("WARNING", True),
        ("WARNING", True),
    ]


def test_a_message_that_is_given_up_is_never_told_in_a_whisper(lines: Any) -> None:
    """Its traceback was logged before."""
    failures = FailureLog(LOG)
    failures.write("handler failed", failure(ValueError), is_last=False)
    failures.write("handler failed", failure(ValueError), is_last=True)
    assert lines.records[1].levelname == "WARNING"
    assert not lines.records[1].exc_info


def test_kinds_without_end_are_told_with_an_end(lines: Any) -> None:
    """Generated code raises at new lines all the time."""
    failures = FailureLog(LOG)
    for number in range(KINDS_MAX + 5):
        kind = type(f"Error{number}", (Exception,), {})
        failures.write("handler failed", failure(kind), is_last=False)
    assert sum(bool(one.exc_info) for one in lines.records) == KINDS_MAX


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1, "test.dead": 1})


def break_down(message: Any) -> None:
    raise ValueError(message.data)


async def break_down_async(message: Any) -> None:
    break_down(message)


def handle(consumer: Any, world: str, policy: RetryPolicy) -> int:
    """Handle for a while; return how many dead letters there are."""
    handler = break_down if world == "sync" else break_down_async
    consumer.run(handler, retry=policy, timeout=0.1)
    return consumer.statistics().handling.dead_letter_count  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sync", "async"])
def test_a_handler_that_raises_is_found_in_log_and_dead_letter(
    broker: AnyBroker, lines: Any, world: str
) -> None:
    """Each of three messages fails twice, with one traceback in the log for all."""
    policy = RetryPolicy(attempts_max=2, first_s=0.001, max_s=0.001, then="dead_letter")
    broker.put(b"a", b"b", b"c")
    with WORLDS[world](brokers=[broker.address], **QUICK) as client:
        with client.consumer("g", ["test"], **IDLE) as consumer:
            wait_until(lambda: handle(consumer, world, policy) == 3)
        dead = list(client.browse("test.dead"))
    logged = [
        one for one in lines.records if one.getMessage().startswith("handler failed")
    ]
    assert [bool(one.exc_info) for one in logged].count(True) >= 1
    assert logged[0].exc_info
    for one in dead:
        origin = read_origin(one)
        assert origin is not None
        assert "in break_down" in origin.traceback
        assert origin.traceback.endswith(f"ValueError: {one.data!r}\n")


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sync", "async"])
def test_a_large_message_goes_without_its_traceback(
    start_broker: StartBroker, world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optional part keeps no message from being a dead letter."""
    sent: list[bool] = []
    send = AsyncProducer.send

    async def send_small(
        self: AsyncProducer, topic: str, data: bytes, **named: Any
    ) -> Any:
        sent.append("dead-letter.traceback" in dict(named["headers"]))
        if sent[-1]:
            raise MessageTooLargeError("too large")
        return await send(self, topic, data, **named)

    broker = start_broker({"test": 1, "test.dead": 1})
    broker.put(b"a")
    policy = RetryPolicy(attempts_max=1, then="dead_letter")
    monkeypatch.setattr(AsyncProducer, "send", send_small)
    with WORLDS[world](brokers=[broker.address], **QUICK) as client:
        with client.consumer("g", ["test"], **IDLE) as consumer:
            wait_until(lambda: handle(consumer, world, policy) == 1)
        (dead,) = client.browse("test.dead")
    origin = read_origin(dead)
    assert origin is not None
    assert (origin.error, origin.traceback) == ("ValueError", "")
    assert sent == [True, False]
