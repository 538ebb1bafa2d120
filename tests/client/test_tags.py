"""Tags: one header, for every way of sending, and a field of the message."""

from pathlib import Path
from typing import Any

import pytest

from metaq.client import OutgoingMessage
from metaq.client.produce.runs import sort_runs, tagged, with_tag
from metaq.errors import ConfigError
from metaq.model import HeaderPairs, Message, MessageId, Offset
from tests.brokers import StartBroker
from tests.cases import for_each
from tests.client.worlds import QUICK, WORLDS, partition


@pytest.mark.parametrize("world", WORLDS)
def test_every_way_to_send_stores_the_same_header(
    start_broker: StartBroker, tmp_path: Path, world: str
) -> None:
    """After the headers that were given; also of the first message of a topic."""
    broker = start_broker({"test": 1})
    one: dict[str, Any] = {"headers": {"a": b"1"}, "tag": "bezahlt \u2713"}
    with WORLDS[world](**broker.client_options, **QUICK) as client:
        with client.producer() as producer:
            producer.send("test", b"", **one)
            producer.send_nowait("test", b"", **one)
            producer.send_oneway("test", b"", **one)
            producer.send_many("test", [OutgoingMessage(b"", **one), b"none"])
            producer.flush(10)
            with producer.transaction() as tx:
                tx.send("test", b"", **one)
                tx.send_many("test", [OutgoingMessage(b"", **one)])
        if broker.has_extensions:
            with client.ordered_producer(
                "test", partitions=[partition()], directory=tmp_path
            ) as ordered:
                ordered.send(b"", **one)
        found = [one for one in client.browse("test") if not one.data]
        (plain,) = (one for one in client.browse("test") if one.data)
    assert plain.tag is None
    assert {each.tag for each in found} == {"bezahlt \u2713"}
    headers = (("a", b"1"), ("tag", "bezahlt \u2713".encode()))
    assert [each.header_pairs for each in found] == [headers] * (
        7 if broker.has_extensions else 6
    )


def test_a_selector_finds_the_tag_among_the_headers() -> None:
    """In a list as in a single send, where it is one of them already."""
    seen = list[OutgoingMessage]()

    def select(message: OutgoingMessage) -> tuple[None, bool]:
        seen.append(message)
        return None, True

    sort_runs([OutgoingMessage(b"x", tag="a")], select)
    assert seen == [OutgoingMessage(b"x", headers=(("tag", b"a"),))]
    assert tagged(seen[0]) is seen[0]


def test_a_tag_is_said_once() -> None:
    """Of two there is no right one; nor is a surrogate UTF-8."""
    for headers in ({"tag": b"a"}, [("x", b""), ("tag", b"a")]):
        with pytest.raises(ConfigError, match="tag: expected it once"):
            with_tag(headers, "b")
    with pytest.raises(ConfigError, match="is no UTF-8"):
        with_tag((), "\ud800")


TAGS: list[tuple[HeaderPairs, str | None]] = [
    ((), None),
    ((("x", b"1"),), None),
    ((("tag", b""),), ""),
    ((("tag", b"a"), ("tag", b"b")), "b"),
    ((("tag", b"\xff"),), "\ufffd"),
]


@for_each("headers, tag", TAGS)
def test_the_last_header_is_the_tag(headers: HeaderPairs, tag: str | None) -> None:
    """Text that is no UTF-8 is read with replacement characters, as an attribute."""
    where = MessageId(1), partition(), Offset(0), Offset(9)
    assert Message("test", b"", None, *where, None, headers).tag == tag
