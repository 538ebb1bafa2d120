"""Time of a message; times as users give them."""

from metaq.client.produce.scheduling import span_s
from metaq.model import (
    BrokerId,
    Message,
    MessageId,
    Offset,
    TopicPartition,
    span_text,
)

PARTITION = TopicPartition("t", BrokerId(0), 0)


def message(message_id: int) -> Message:
    return Message(
        "t", b"x", None, MessageId(message_id), PARTITION, Offset(0), Offset(21)
    )


def test_time_is_that_of_the_id() -> None:
    stamped = message((5_500 << 22) | (3 << 12) | 7)
    assert stamped.timestamp_ms == 1_303_895_660_503 + 5_500
    assert stamped.timestamp == (1_303_895_660_503 + 5_500) / 1000


def test_a_java_broker_tells_no_time() -> None:
    assert message(-7).timestamp_ms is None
    assert message(-7).timestamp is None


def test_a_time_is_said_as_users_give_it() -> None:
    """A time that is said may be given again."""
    texts = "400d", "1d12h", "30m", "1h1ms", "59s999ms"
    assert [span_text(round(span_s("x", text) * 1000)) for text in texts] == [*texts]
    assert span_text(0) == "0s"
