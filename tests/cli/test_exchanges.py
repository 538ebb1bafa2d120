"""`metaq exchanges`: made, bound, listed, asked for a route."""

import json
from collections.abc import Iterator

import pytest

from metaq.cli.cluster import Target, find_topic
from metaq.cli.exchanges import (
    BindingOptions,
    bind,
    create,
    delete,
    list_exchanges,
    route,
    unbind,
)
from metaq.client import ExchangeError
from metaq.errors import ClientError
from metaq.testing.embedded import embedded_broker

ONE_BROKER = {"target": "MetaQ has no exchanges"}
ORDERS = BindingOptions(key="order.#", headers=(), is_any=False)


@pytest.fixture
def target() -> Iterator[Target]:
    with embedded_broker(topics={"orders": 1, "other": 1}) as broker:
        yield Target("memory", "/meta", (), 5.0, broker.coordinator_factory)


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_an_exchange_is_made_bound_asked_and_listed(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """In tables, or as objects."""
    create(target, "events", "topic", "other", as_json=False)
    assert rows(capsys)[1] == ["events", "topic", "other", "-", "-", "-", "-"]
    bind(target, "events", "orders", ORDERS, as_json=False)
    assert rows(capsys)[1][:2] == ["orders", "order.#"]
    assert route(target, "events", "order.paid.eu", (), as_json=True)
    assert json.loads(capsys.readouterr().out)["topic"] == "orders"
    assert not route(target, "events", "else", (), as_json=False)
    assert "no binding of exchange 'events' matches" in capsys.readouterr().err
    list_exchanges(target, as_json=False)
    assert rows(capsys)[-1][3:5] == ["orders", "order.#"]
    list_exchanges(target, as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert (listed["exchange"], listed["topic"]) == ("events", "orders")


@pytest.mark.slow
def test_a_binding_by_headers_is_named_in_one_way_everywhere(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options that bound it unbind it."""
    create(target, "regions", "headers", None, as_json=True)
    assert json.loads(capsys.readouterr().out)["topic"] is None
    options = BindingOptions(key="", headers=("region=eu", "vip"), is_any=True)
    bind(target, "regions", "orders", options, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["headers"], found["match"]) == ("region=eu vip", "any")
    assert route(target, "regions", "", (("vip", b"1"),), as_json=False)
    capsys.readouterr()
    names = {"exchange": "regions", "topic": "orders"}
    for is_there in (True, False):
        assert is_there == unbind(target, "regions", "orders", options, as_json=True)
        printed = json.loads(capsys.readouterr().out)
        assert printed == {**names, "is_deleted": is_there}
    assert not route(target, "regions", "", (("vip", b"1"),), as_json=False)


@pytest.mark.slow
def test_an_exchange_is_deleted_after_a_question(
    target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run changes nothing."""
    create(target, "events", "fanout", None, as_json=False)
    capsys.readouterr()
    for is_dry in (True, False):
        delete(target, "events", is_dry=is_dry, is_sure=not is_dry, as_json=True)
        printed = json.loads(capsys.readouterr().out)
        assert printed == {"exchange": "events", "is_deleted": not is_dry}
    with pytest.raises(ClientError, match="no exchange 'events'"):
        delete(target, "events", is_dry=False, is_sure=True, as_json=False)


@pytest.mark.slow
@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("wanted", [(), ("0-0",)])
def test_no_command_reads_an_exchange(
    target: Target, wanted: tuple[str, ...], is_partial: bool
) -> None:
    """`cat`, `consume` and `find` look for their topic in this one way."""
    create(target, "events", "topic", None, as_json=False)
    with pytest.raises(ExchangeError, match="'events' is an exchange"):
        find_topic(target, "events", wanted, kind="gets", is_partial=is_partial)
    assert find_topic(target, "events", wanted, kind="puts").partitions
