"""`metaq exchanges`: list, create, delete and bind exchanges; show routes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.options import (
    TOPIC,
    UTF8,
    ReadWord,
    check_utf8,
    headers_option,
    option,
    takes,
    topic_argument,
)
from metaq.cli.tree import command, group
from metaq.client import Binding, ExchangeDefinition
from metaq.model import HeaderPairs

BINDING_COLUMNS = ("topic", "key", "headers", "match")
NO_BINDING: tuple[render.Cell, ...] = (None,) * len(BINDING_COLUMNS)
COLUMNS = ("exchange", "kind", "alternate", *BINDING_COLUMNS)


def _check_header(text: str) -> str:
    if not text.partition("=")[0]:
        raise ValueError(f"expected NAME, or NAME=VALUE, got '{text}'")
    return check_utf8(text)


group("exchanges", "List exchanges; create, bind, unbind or delete one; test routes.")
exchange_argument = click.argument("exchange", type=TOPIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingOptions:
    """Condition of a binding."""

    key: str = option(
        "--key",
        default="",
        type=UTF8,
        help="Routing key (direct exchange) or pattern (topic exchange).",
    )
    headers: tuple[str, ...] = option(
        "--header",
        "headers",
        multiple=True,
        metavar="NAME[=VALUE]",
        type=ReadWord(_check_header),
        help="Header to match (headers exchange), with any value if none is given; may"
        " be repeated.",
    )
    is_any: bool = option(
        "--any",
        "is_any",
        is_flag=True,
        help="Match if any of the headers matches.  [default: all]",
    )

    def given(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `AsyncAdmin.bind` and `unbind`."""
        match = "any" if self.is_any else "all"
        return {"key": self.key, "headers": _pairs(self.headers), "match": match}


@command(
    "exchanges list", examples=("metaq exchanges list", "metaq exchanges list --json")
)
def list_exchanges(target: Target, *, as_json: bool) -> bool:
    """List exchanges, one row per binding.

    Definitions written by a newer version are named on standard error; the exit code is
    1 then.
    """
    show = partial(_print_exchanges, as_json=as_json)
    return target.show_defined(lambda admin: admin.exchanges(), show)


@command(
    "exchanges create",
    exchange_argument,
    click.option(
        "--kind",
        type=click.Choice(["direct", "fanout", "topic", "headers"]),
        default="topic",
        show_default=True,
        help="How bindings match messages.",
    ),
    click.option(
        "--alternate", type=TOPIC, help="Topic for messages that match no binding."
    ),
    examples=(
        "metaq exchanges create events",
        "metaq exchanges create audit --kind fanout --alternate unrouted",
    ),
)
def create(
    target: Target,
    exchange: str,
    kind: Literal["direct", "fanout", "topic", "headers"],
    alternate: str | None,
    *,
    as_json: bool,
) -> None:
    """Create EXCHANGE, which forwards messages to the topics bound to it."""
    made = target.ask(
        lambda admin: admin.create_exchange(exchange, kind, alternate=alternate)
    )
    _print_exchanges({exchange: made}, as_json=as_json)


@command(
    "exchanges delete",
    exchange_argument,
    examples=("metaq exchanges delete events --dry-run",),
)
def delete(
    target: Target, exchange: str, *, is_dry: bool, is_sure: bool, as_json: bool
) -> None:
    """Delete EXCHANGE and its bindings; the topics stay.

    Asks for confirmation.
    """
    question = f"Delete exchange {exchange}?"
    is_deleted = render.may_change(question, is_dry=is_dry, is_sure=is_sure)
    if is_deleted:
        target.ask(lambda admin: admin.delete_exchange(exchange))
    if as_json:
        render.print_json({"exchange": exchange, "is_deleted": is_deleted})
    elif is_deleted:
        render.say(f"exchange {exchange} is deleted")


@command(
    "exchanges bind",
    exchange_argument,
    topic_argument,
    takes(BindingOptions, "options"),
    examples=(
        "metaq exchanges bind events orders --key 'order.#'",
        "metaq exchanges bind regions europe --header region=eu --header vip",
    ),
)
def bind(
    target: Target, exchange: str, topic: str, options: BindingOptions, *, as_json: bool
) -> None:
    """Bind TOPIC to EXCHANGE, so that it receives matching messages.

    Returns when the brokers use the binding.
    """
    bound = target.ask(lambda admin: admin.bind(exchange, topic, **options.given()))
    _print_bindings([bound], as_json=as_json)


@command(
    "exchanges unbind",
    exchange_argument,
    topic_argument,
    takes(BindingOptions, "options"),
    examples=("metaq exchanges unbind events orders --key 'order.#'",),
)
def unbind(
    target: Target, exchange: str, topic: str, options: BindingOptions, *, as_json: bool
) -> bool:
    """Delete the binding of TOPIC to EXCHANGE that has these options.

    The exit code is 1 if there is no such binding.
    """
    found = target.ask(lambda admin: admin.unbind(exchange, topic, **options.given()))
    if as_json:
        names = {"exchange": exchange, "topic": topic}
        render.print_json({**names, "is_deleted": found})
    else:
        render.say("binding deleted" if found else "no such binding")
    return found


@command(
    "exchanges route",
    exchange_argument,
    click.argument("routing_key", default="", type=UTF8),
    headers_option,
    examples=("metaq exchanges route events order.paid.eu",),
)
def route(
    target: Target,
    exchange: str,
    routing_key: str,
    headers: HeaderPairs,
    *,
    as_json: bool,
) -> bool:
    """Print the bindings that would route a message, without sending one.

    A topic receives a message once, however many of its bindings match. The exit code
    is 1 if no binding matches.
    """
    found = target.ask(
        lambda admin: admin.route(exchange, routing_key, headers=headers)
    )
    _print_bindings(found, as_json=as_json)
    if not found:
        render.say(f"no binding of exchange '{exchange}' matches")
    return bool(found)


def _pairs(headers: Iterable[str]) -> dict[str, str | None]:
    parts = (each.partition("=") for each in headers)
    return {name: value if equals else None for name, equals, value in parts}


def _cells(binding: Binding) -> tuple[render.Cell, ...]:
    pairs = [n if v is None else f"{n}={v}" for n, v in binding.headers]
    match = ("any" if binding.matches_any else "all") if pairs else None
    return binding.topic, binding.key, " ".join(pairs), match


def _print_exchanges(
    exchanges: Mapping[str, ExchangeDefinition], *, as_json: bool
) -> None:
    rows = [
        (name, each.kind.value, each.alternate, *cells)
        for name, each in exchanges.items()
        for cells in _rows(each.bindings.values()) or [NO_BINDING]
    ]
    render.print_rows(COLUMNS, rows, as_json=as_json)


def _rows(bindings: Iterable[Binding]) -> list[tuple[render.Cell, ...]]:
    return [_cells(each) for each in sorted(bindings, key=str)]


def _print_bindings(found: Iterable[Binding], *, as_json: bool) -> None:
    render.print_rows(BINDING_COLUMNS, _rows(found), as_json=as_json)
