"""`metaq reload`, `metaq partitions`: orders to a broker on this machine.

They are sent over the Unix socket in its data directory; its file permissions decide
who may send them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from metaq.broker.admin_socket import call_admin
from metaq.cli import render
from metaq.cli.tree import command, group

TIMEOUT_S: Final = 10.0

Span = Mapping[str, int]
"""Fields `start` and `end` of a request; empty for the whole topic."""


def ask(data_dir: Path, order: str, **fields: object) -> dict[str, Any]:
    """Return the reply of the broker of a data directory, or raise AdminError."""
    return call_admin(data_dir, {"command": order, **fields}, timeout_s=TIMEOUT_S)


@command("reload", examples=("metaq reload", "metaq reload --config config/server.ini"))
def reload(data_dir: Path, *, as_json: bool) -> None:
    """Reload the configuration of a broker on this machine.

    Prints the broker and what has changed. If the file has an error, prints the error
    and changes nothing.
    """
    reply = ask(data_dir, "reload")
    if as_json:
        render.print_json(reply)
        return
    changes = [
        f"{what} {', '.join(reply[what])}"
        for what in ("added", "removed", "changed")
        if reply[what]
    ]
    broker = f"broker {reply['broker_id']} at {reply['address']}"
    click.echo(f"{broker}, data directory {reply['data_dir']}")
    click.echo("reloaded: " + ("; ".join(changes) or "no topic changed"))
    for difference in reply["needs_restart"]:
        click.echo(f"requires a restart: {difference}")


group("partitions", "Close partitions to puts and gets, or reopen them.")


def parse_span(text: str) -> Span:
    """Parse `3` or `0-3`; an empty text is the whole topic."""
    if not text:
        return {}
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text, re.ASCII)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise click.BadParameter(
            f"expected a number or FIRST-LAST, got '{text}'", param_hint="RANGE"
        )
    return {"start": int(match[1]), "end": int(match[2] or match[1])}


topic_argument = click.argument("topic")
# Parsed with the command line, before a broker is looked for.
span_argument = click.argument(
    "span",
    metavar="[RANGE]",
    default="",
    callback=lambda _context, _parameter, text: parse_span(text),
)


@command(
    "partitions close",
    topic_argument,
    span_argument,
    examples=("metaq partitions close test", "metaq partitions close test 0-3"),
)
def close_partitions(topic: str, span: Span, data_dir: Path) -> None:
    """Close partitions of TOPIC: the broker refuses their puts and gets.

    RANGE is a partition number or FIRST-LAST; the default is all partitions. They stay
    closed until they are reopened or the broker restarts.
    """
    _move("close_partitions", topic, span, data_dir)


@command(
    "partitions open",
    topic_argument,
    span_argument,
    examples=("metaq partitions open test", "metaq partitions open test 2"),
)
def open_partitions(topic: str, span: Span, data_dir: Path) -> None:
    """Reopen closed partitions of TOPIC.

    RANGE is a partition number or FIRST-LAST; the default is all partitions.
    """
    _move("open_partitions", topic, span, data_dir)


def _move(order: str, topic: str, span: Span, data_dir: Path) -> None:
    closed = ask(data_dir, order, topic=topic, **span)["closed"].get(topic, ())
    shown = ", ".join(map(str, closed))
    click.echo(f"{topic}: closed partitions: {shown or 'none'}")
