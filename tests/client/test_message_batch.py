"""Batches for users: immutable lists with the offsets of partitions."""

from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client.consume.message_batch import ListedMessages, check_bounds
from metaq.errors import ConfigError
from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition

FIRST = TopicPartition("test", BrokerId(0), 0)


def message(number: int) -> Message:
    start, end = Offset(number * 10), Offset(number * 10 + 10)
    number_id = MessageId(number)
    return Message("test", b"x", None, number_id, FIRST, start, end, None, ())


def batch_of(count: int) -> tuple[ListedMessages[str], Any]:
    """Return a batch, and the list of the reader that it came from."""
    filling: Any = SimpleNamespace(
        messages=[message(number) for number in range(count)],
        offsets={FIRST: Offset(count * 10)},
        begins={FIRST: Offset(0)},
        is_last=True,
    )
    return ListedMessages("consumer", filling), filling


def test_a_batch_is_a_sequence_of_its_messages() -> None:
    """One, some, the last, all; it says whose it is and where it ends."""
    batch, _ = batch_of(3)
    messages = [message(number) for number in range(3)]
    assert (len(batch), list(batch), batch.consumer) == (3, messages, "consumer")
    assert (batch[-1], batch[:2]) == (messages[2], messages[:2])
    assert messages[1] in batch
    assert repr(batch) == f"<ListedMessages of 3 messages: {FIRST} 0 to 30>"


def test_a_batch_is_the_last_until_more_is_requested() -> None:
    """Then its messages count as handled."""
    batch, filling = batch_of(1)
    assert batch.is_last
    filling.is_last = False
    assert not batch.is_last


@pytest.mark.parametrize("bounds", [(0, None, 1.0), (1, 0, 1.0), (1, None, -1.0)])
def test_bounds_that_mean_nothing_are_refused(bounds: tuple[Any, Any, Any]) -> None:
    """A list of no message, of no byte, or before it was asked for."""
    check_bounds(1, None, 0.0)
    check_bounds(1, 1, 1.5)
    with pytest.raises(ConfigError):
        check_bounds(*bounds)
