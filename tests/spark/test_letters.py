"""The headers of a dead letter, from the columns of its row."""

from metaq.spark.letters import headers_of

ROW = {
    "topic": "logs",
    "broker_id": 0,
    "partition": 0,
    "offset": 40,
    "message_id": 7,
    "headers": [{"key": "own", "value": b"x"}],
}


ORIGIN = (
    ("dead-letter.origin", b"logs/0-0@40"),
    ("dead-letter.id", b"7"),
    ("dead-letter.cause", b"no UTF-8"),
)


def test_a_dead_letter_has_its_own_headers_and_its_origin() -> None:
    """As consumers write them."""
    assert headers_of(ROW, "no UTF-8") == (("own", b"x"), *ORIGIN)
    assert headers_of({**ROW, "headers": None}, "no UTF-8") == ORIGIN
