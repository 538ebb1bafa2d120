"""Addresses of brokers: valid forms, and one way to find brokers."""

from typing import Any

import pytest

from metaq.client import AsyncClient, Client
from metaq.client.names import parse_address
from metaq.errors import ConfigError, CoordinationError, NoBrokerError
from metaq.model import BrokerAddress, Offset


@pytest.mark.parametrize(
    "ways",
    [
        {},
        {"zookeeper": "127.0.0.1:2181", "brokers": ["127.0.0.1:8123"]},
        {"brokers": ["127.0.0.1:8123"], "coordinator": lambda _clock: None},
    ],
)
def test_brokers_are_found_in_one_way(ways: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"got {len(ways)} of them"):
        AsyncClient(**ways)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:0", "host:99999", "\udcff:80"]
)
def test_an_address_that_is_none_is_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        AsyncClient(brokers=[text])


@pytest.mark.parametrize("brokers", ["127.0.0.1:8123", "", [], ()])
def test_brokers_that_are_no_list_are_refused_as_that(brokers: Any) -> None:
    """The letters of a text are no addresses."""
    with pytest.raises((TypeError, ConfigError), match=r"^brokers: expected"):
        AsyncClient(brokers=brokers)


def test_addresses_are_taken_with_and_without_their_scheme() -> None:
    assert parse_address("h:1") == parse_address("meta://h:1") == BrokerAddress("h", 1)
    assert parse_address("[::1]:8123") == BrokerAddress("::1", 8123)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind", "text"),
    [
        (
            {"zookeeper": "127.0.0.1:1"},
            CoordinationError,
            "^cannot reach ZooKeeper at 127.0.0.1:1",
        ),
        (
            {"brokers": ["127.0.0.1:1"]},
            NoBrokerError,
            "^no broker answers at meta://127.0.0.1:1",
        ),
    ],
)
def test_an_address_where_nobody_is_is_named(
    way: dict[str, Any], kind: type[Exception], text: str
) -> None:
    """Whatever was asked: the answer to "why?" is the address."""
    with Client(**way) as client:
        for ask in (
            lambda: client.topics(timeout=0.1),
            lambda: client.partitions("t", timeout=0.1),
            lambda: client.stats(timeout=0.1),
            lambda: client.get("t", "0-0", Offset(0), timeout=0.1),
            lambda: client.producer().send("t", b"a", timeout=0.1),
        ):
            with pytest.raises(kind, match=rf"{text} \(waited \d+\.\d+ s\)$"):
                ask()
