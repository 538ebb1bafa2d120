"""Definitions of queue groups: golden bytes, tolerance, refusals."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.zk.definitions import decode_copy, encode_copy
from metaq.zk.errors import PayloadError
from metaq.zk.group_definitions import (
    DELIVERIES_MAX,
    QueueGroupDefinition,
    decode_group,
    encode_group,
)

DEFINITION = QueueGroupDefinition(topic="orders", dead_letter_topic="dead")
GOLDEN = (
    b'{"dead_letter_topic":"dead","deliveries_max":16,"generation":0,'
    b'"lease_ms":30000,"ordered_by":null,"retry_delays_ms":[1000,5000,30000,120000],'
    b'"start":"earliest","state":"active","then":"dead_letter","topic":"orders",'
    b'"type":"queue"}'
)


def test_a_definition_has_these_bytes() -> None:
    """They are in clusters: added to, never changed."""
    assert encode_group(DEFINITION) == GOLDEN
    assert decode_group(GOLDEN) == DEFINITION
    dropped = QueueGroupDefinition(topic="orders", retry_delays_ms=())
    assert b'"then":"drop"' in encode_group(dropped)
    assert decode_group(encode_group(dropped)) == dropped
    some = QueueGroupDefinition(topic="orders", where="tag = 'a'")
    assert b'"type":"queue","where":"tag = \'a\'"}' in encode_group(some)


@given(
    st.builds(
        QueueGroupDefinition,
        topic=st.text(min_size=1, max_size=5),
        lease_ms=st.integers(1_000, 43_200_000),
        deliveries_max=st.integers(1, DELIVERIES_MAX),
        dead_letter_topic=st.none() | st.text(min_size=6, max_size=9),
        retry_delays_ms=st.lists(st.integers(0, 86_400_000), max_size=16).map(tuple),
        ordered_by=st.sampled_from([None, "key"]),
        start=st.sampled_from(["earliest", "latest"]),
        generation=st.integers(0, 2**32 - 1),
        is_deleted=st.booleans(),
        where=st.none() | st.just("tag = 'x'"),
        others=st.just({}) | st.just({"colour": "tag = 'x'"}),
    )
)
def test_definitions_read_back(definition: QueueGroupDefinition) -> None:
    """Unknown properties are kept."""
    assert decode_group(encode_group(definition)) == definition
    copy = encode_copy({"g": definition}, encode_group)
    assert decode_copy(copy, decode_group) == {"g": definition}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"type": "log"}, "type to be one of"),
        ({"topic": ""}, "topic to be a name"),
        ({"lease_ms": 999}, "lease_ms from 1000 to 43200000"),
        ({"lease_ms": True}, "lease_ms"),
        ({"deliveries_max": 0}, "deliveries_max from 1 to 1000"),
        ({"then": "drop"}, "a dead_letter_topic, or then to be drop"),
        ({"dead_letter_topic": 5}, "dead_letter_topic to be a name, or null"),
        ({"dead_letter_topic": "orders"}, "dead_letter_topic to be another topic"),
        ({"then": "keep"}, "then to be one of"),
        ({"dead_letter_topic": None}, "a dead_letter_topic, or then to be drop"),
        ({"retry_delays_ms": [-1]}, "retry_delays_ms"),
        ({"retry_delays_ms": [0] * 17}, "at most 16 numbers"),
        ({"retry_delays_ms": 5}, "retry_delays_ms"),
        ({"ordered_by": "tag"}, "ordered_by"),
        ({"start": "middle"}, "start"),
        ({"where": "tag ="}, "where to be a filter, or null"),
        ({"where": 5}, "where to be a filter, or null"),
        ({"generation": -1}, "generation from 0"),
        ({"state": "gone"}, "state to be one of"),
    ],
)
def test_a_property_that_makes_no_sense_is_named(
    change: dict[str, object], wanted: str
) -> None:
    """With what is expected."""
    data = json.dumps({**json.loads(GOLDEN), **change}).encode()
    with pytest.raises(PayloadError, match=wanted):
        decode_group(data)
