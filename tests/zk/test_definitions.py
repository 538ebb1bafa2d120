"""Definitions of topics and their statuses: golden bytes, tolerance, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import BrokerId
from metaq.zk.definitions import (
    Effect,
    TopicDefinition,
    TopicState,
    TopicStatus,
    decode_copy,
    decode_definition,
    decode_status,
    encode_copy,
    encode_definition,
    encode_status,
)
from metaq.zk.errors import PayloadError

GOLDEN_DEFINITION = (
    b'{"brokers":[0,10],"partitions":4,"settings":{"deletePolicy":"delete,72h",'
    b'"deleteWhen":"0 0 6,18 * * ?"},"state":"active"}'
)
DEFINITION = TopicDefinition(
    partitions=4,
    brokers=(BrokerId(0), BrokerId(10)),
    settings={"deleteWhen": "0 0 6,18 * * ?", "deletePolicy": "delete,72h"},
)
GOLDEN_STATUS = (
    '{"definition":463763767,"effect":"server.ini","text":"/etc/mé.ini"}'.encode()
)
STATUS = TopicStatus(definition=463763767, effect=Effect.OVERRIDDEN, text="/etc/mé.ini")
GOLDEN_CLOSED = (
    b'{"definition":1,"effect":"in effect","gets":false,"puts":false,"text":"closed"}'
)
CLOSED = TopicStatus(
    definition=1,
    effect=Effect.IN_EFFECT,
    text="closed",
    takes_puts=False,
    gives_gets=False,
)


def test_a_definition_has_these_bytes() -> None:
    """They lie in clusters: added to, never changed."""
    assert encode_definition(DEFINITION) == GOLDEN_DEFINITION
    assert decode_definition(GOLDEN_DEFINITION) == DEFINITION
    everywhere = TopicDefinition(partitions=1, state=TopicState.DELETING)
    assert encode_definition(everywhere) == (
        b'{"brokers":null,"partitions":1,"settings":{},"state":"deleting"}'
    )


def test_a_status_has_these_bytes() -> None:
    """They lie in clusters, too."""
    assert encode_status(STATUS) == GOLDEN_STATUS
    assert decode_status(GOLDEN_STATUS) == STATUS
    assert encode_status(CLOSED) == GOLDEN_CLOSED
    assert decode_status(GOLDEN_CLOSED) == CLOSED


def test_the_checksum_of_a_definition_is_that_of_its_bytes() -> None:
    """By any writer, and in any order."""
    assert DEFINITION.checksum == 3305325827
    shuffled = decode_definition(
        b'{ "state": "active", "partitions": 4, "brokers": [10, 0, 0], "settings":'
        b' {"deleteWhen": "0 0 6,18 * * ?", "deletePolicy": "delete,72h"} }'
    )
    assert shuffled.checksum == DEFINITION.checksum


def test_what_a_later_version_wrote_is_kept() -> None:
    """Altering a definition does not cut it down to what this version knows."""
    data = (
        b'{"brokers":null,"copies":{"n":2},"partitions":1,"settings":{},'
        b'"state":"active"}'
    )
    assert encode_definition(decode_definition(data)) == data


@given(
    partitions=st.integers(1, 10_000),
    brokers=st.none() | st.lists(st.integers(0, 1023), min_size=1),
    settings=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
    state=st.sampled_from(TopicState),
)
def test_definitions_survive_encode_and_decode(
    partitions: int,
    brokers: list[int] | None,
    settings: dict[str, str],
    state: TopicState,
) -> None:
    """Lone surrogates aside, which are no text."""
    definition = TopicDefinition(
        partitions=partitions,
        brokers=None if brokers is None else tuple(sorted({*map(BrokerId, brokers)})),
        settings=settings,
        state=state,
    )
    assert decode_definition(encode_definition(definition)) == definition


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "JSON, got ''"),
        (b"\xff", "JSON"),
        (b"[" * 100_000, "JSON"),
        (rb'{"partitions":1,"settings":{"a":"\ud800"},"state":"active"}', "JSON"),
        (b"[1]", "a JSON object"),
        (b'{"state":"active"}', "partitions from 1 to 10000"),
        (b'{"partitions":0,"state":"active"}', "partitions from 1 to 10000"),
        (b'{"partitions":true,"state":"active"}', "partitions from 1 to 10000"),
        (b'{"partitions":1,"state":"odd"}', "a state, active or deleting"),
        (b'{"partitions":1,"state":[]}', "a state, active or deleting"),
        (b'{"partitions":1,"brokers":[],"state":"active"}', "list of broker ids"),
        (b'{"partitions":1,"brokers":[0,"1"],"state":"active"}', "list of broker ids"),
        (b'{"partitions":1,"brokers":5,"state":"active"}', "list of broker ids"),
        (b'{"partitions":1,"settings":[],"state":"active"}', "an object of texts"),
        (b'{"partitions":1,"settings":{"a":1},"state":"active"}', "object of texts"),
    ],
)
def test_nonsense_is_no_definition(data: bytes, wanted: str) -> None:
    """The error says what was expected, and shows the beginning."""
    with pytest.raises(PayloadError, match=f"topic definition: expected.*{wanted}"):
        decode_definition(data)


def test_a_copy_is_a_file_that_people_can_read() -> None:
    """Its first line is the checksum of the rest, which has a line for each."""
    one = TopicDefinition(partitions=1)
    data = encode_copy({"ö": one, "p": one}, encode_definition)
    fields = '{"brokers":null,"partitions":1,"settings":{},"state":"active"}'
    assert data.decode() == f'8102b4f6\n{{"p": {fields},\n"ö": {fields}}}\n'
    copied = {"ö": DEFINITION, "t": TopicDefinition(partitions=2)}
    written = encode_copy(copied, encode_definition)
    assert decode_copy(written, decode_definition) == copied
    assert decode_copy(encode_copy({}, encode_definition), decode_definition) == {}
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        if position < len(data) - 1:
            with pytest.raises(PayloadError, match="copy of definitions: expected"):
                decode_copy(bytes(damaged), decode_definition)
        with pytest.raises(PayloadError):
            decode_copy(data[: position - len(data) - 1], decode_definition)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"definition":1,"effect":"x"}',
     b'{"definition":1,"effect":{}}', b'{"definition":-1,"effect":"refused"}',
     b'{"definition":1,"effect":"refused","text":1}'],
)  # fmt: skip
def test_nonsense_is_no_status(data: bytes) -> None:
    """As with definitions."""
    with pytest.raises(PayloadError, match="topic status: expected"):
        decode_status(data)


def test_a_definition_names_all_brokers_or_some() -> None:
    """None stands for all of them, those that come later too."""
    assert TopicDefinition(partitions=1).names(BrokerId(7))
    assert DEFINITION.names(BrokerId(10))
    assert not DEFINITION.names(BrokerId(7))
