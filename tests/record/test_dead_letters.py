"""The headers of a dead letter, as consumers and brokers write them."""

from metaq.model import BrokerId, MessageId, Millis, Offset, TopicPartition
from metaq.record.dead_letters import Origin, letter_headers
from metaq.record.flags import FIELDS_MAX, decode_payload, encode_payload

ORIGIN = Origin(
    TopicPartition("orders", BrokerId(0), 3),
    Offset(4096),
    MessageId(7),
    "rejected",
    "no number",
    group="workers",
    attempts=2,
    at_ms=Millis(1_700_000_000_000),
)


def test_a_letter_says_where_it_came_from_and_why() -> None:
    """After the headers of the message, but for one: it does not expire."""
    assert letter_headers((("trace", b"1"), ("expires-in", b"5")), ORIGIN) == (
        ("trace", b"1"),
        ("dead-letter.origin", b"orders/0-3@4096"),
        ("dead-letter.id", b"7"),
        ("dead-letter.cause", b"rejected: no number"),
        ("dead-letter.group", b"workers"),
        ("dead-letter.attempts", b"2"),
        ("dead-letter.at_ms", b"1700000000000"),
    )


def test_a_letter_of_a_letter_has_the_last_origin_alone() -> None:
    """The one before is replaced."""
    first = letter_headers((), ORIGIN)
    again = letter_headers(first, ORIGIN._replace(offset=Offset(1)))
    assert [name for name, _ in again] == [name for name, _ in first]
    assert dict(again)["dead-letter.origin"] == b"orders/0-3@1"


def test_a_letter_of_a_message_with_many_headers_has_its_origin() -> None:
    """It can be written, and read."""
    own = tuple((f"h{each}", b"") for each in range(FIELDS_MAX - 1))
    headers = letter_headers(own, ORIGIN)
    payload, flag = encode_payload(b"data", None, "key", headers)
    assert decode_payload(payload, flag).headers == headers
    assert headers[0] == own[0]
    assert dict(headers)["dead-letter.id"] == b"7"
