"""Announcements of brokers, and the client's reading of any body."""

import pytest

from metaq.protocol.version import (
    SERVER_VERSION,
    Capabilities,
    decode_version_body,
    encode_version_body,
)

FULL = Capabilities(
    "1.0",
    True,
    30000,
    34_560_000_000,
    16777216,
    8388608,
    65536,
    dedup=True,
    spans=True,
    codes=True,
    mput_tx=True,
    together=True,
    check=True,
    follow=True,
    queues=True,
    filters=True,
    find=True,
    delay_each=True,
)


def test_a_body_lists_what_the_broker_can_do() -> None:
    """The form that docs/protocol.md shows."""
    body = (
        "metaq/1.0;mput;dedup;spans;codes;mput-tx;together;check;follow;queues"
        ";filter;find;delay-each;wait=30000;delay=34560000000;payload=16777216"
        ";batch=8388608,65536"
    )
    assert encode_version_body(FULL) == body
    assert decode_version_body(body) == FULL


def test_a_bare_broker_announces_its_version_alone() -> None:
    """No capability, no word."""
    bare = Capabilities(SERVER_VERSION)
    assert encode_version_body(bare) == f"metaq/{SERVER_VERSION}"
    assert decode_version_body(encode_version_body(bare)) == bare


@pytest.mark.parametrize("body", ["1.4.6.3-SNAPSHOT", "0.1", "", "mput;wait=5"])
def test_a_foreign_body_announces_nothing(body: str) -> None:
    """A MetaQ broker is used as MetaQ."""
    assert decode_version_body(body) == Capabilities(body)


@pytest.mark.parametrize(
    "body",
    [
        "metaq/2;wait=;payload=x;batch=5",
        "metaq/2;wait=-1;payload;batch=5,;delay=soon",
        "metaq/2;wait=1e3;payload=٣;batch=,5",
        "metaq/2;shiny=1;;wait=" + "9" * 30 + ";batch=1,2,3",
    ],
)
def test_unreadable_values_count_as_not_announced(body: str) -> None:
    """A hostile or later broker never makes a client fail."""
    assert decode_version_body(body) == Capabilities("2")
