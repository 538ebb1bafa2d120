"""Definitions of exchanges and bindings: golden bytes, tolerance, refusals."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.routing.match import Binding, ExchangeKind
from metaq.zk.definitions import decode_copy, encode_copy
from metaq.zk.errors import PayloadError
from metaq.zk.exchange_definitions import (
    ExchangeDefinition,
    binding_name,
    decode_binding,
    decode_exchange,
    encode_binding,
    encode_copied,
    encode_exchange,
)
from tests.cases import for_each

NAMES = st.text(min_size=1, max_size=5)
EXCHANGES = st.builds(
    ExchangeDefinition,
    kind=st.sampled_from(ExchangeKind),
    alternate=st.none() | NAMES,
    is_deleted=st.booleans(),
    others=st.just({}) | st.just({"owner": "shop"}),
)
HEADERS = st.dictionaries(NAMES, st.none() | st.text(max_size=3), min_size=1)
BINDINGS = st.builds(Binding, NAMES, st.text(max_size=5)) | st.builds(
    Binding,
    NAMES,
    headers=HEADERS.map(lambda pairs: tuple(sorted(pairs.items()))),
    matches_any=st.booleans(),
)


def test_definitions_have_these_bytes() -> None:
    """They are in clusters: added to, never changed."""
    topic = ExchangeDefinition(kind=ExchangeKind.TOPIC)
    assert encode_exchange(topic) == (
        b'{"alternate":null,"kind":"topic","state":"active"}'
    )
    bound = Binding("orders", "order.#")
    assert encode_binding(bound) == b'{"key":"order.#","topic":"orders"}'
    assert binding_name(bound) == "45d259f3e6de95ce2d8cf0ea1668de77"
    pairs = Binding("orders", "", (("region", "eu"), ("vip", None)))
    assert encode_binding(pairs) == (
        b'{"headers":{"region":"eu","vip":null},"match":"all","topic":"orders"}'
    )


@given(EXCHANGES, st.lists(BINDINGS, max_size=3))
def test_definitions_read_back(
    definition: ExchangeDefinition, bindings: list[Binding]
) -> None:
    """Unknown properties of an exchange are kept, in the copy of a broker as well."""
    assert decode_exchange(encode_exchange(definition)) == definition
    assert [decode_binding(encode_binding(each)) for each in bindings] == bindings
    named = {binding_name(each): each for each in bindings}
    unread = {"odd": "made by a newer version"}
    copied = {"events": replace(definition, bindings=named, unread=unread)}
    assert decode_copy(encode_copy(copied, encode_copied), decode_exchange) == copied


@for_each(
    "change, wanted",
    [
        ({"kind": "x"}, "a kind of direct, fanout, topic, headers"),
        ({"state": "gone"}, "a state, active or deleted"),
        ({"alternate": ""}, "alternate to be a topic, or null"),
        ({"bindings": []}, "objects of bindings"),
        ({"bindings": 5}, "objects of bindings"),
        ({"bindings": {"a": 5}}, "objects of bindings"),
        ({"unread": "abc"}, "objects of bindings and of unread ones"),
        ({"unread": {"a": 5}}, "objects of bindings and of unread ones"),
    ],
)
def test_a_property_of_an_exchange_that_makes_no_sense_is_named(
    change: dict[str, Any], wanted: str
) -> None:
    fields = json.loads(encode_exchange(ExchangeDefinition(kind=ExchangeKind.TOPIC)))
    with pytest.raises(PayloadError, match=wanted):
        decode_exchange(json.dumps({**fields, **change}).encode())


@for_each(
    "fields, wanted",
    [
        ({"key": "a"}, "a topic, and key to be a text"),
        ({"topic": "t", "key": 5}, "a topic, and key to be a text"),
        ({"topic": "t", "headers": []}, "headers to be an object of texts"),
        ({"topic": "t", "headers": {"x": 5}}, "headers to be an object of texts"),
        ({"topic": "t", "match": "one"}, "match to be all or any"),
    ],
)
def test_a_property_of_a_binding_that_makes_no_sense_is_named(
    fields: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(PayloadError, match=wanted):
        decode_binding(json.dumps(fields).encode())
