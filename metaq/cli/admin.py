"""`metaq reload`, `metaq partitions`: orders to a broker on this machine.

They go through the Unix socket in its data directory; the right to open it is the right
to give them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from metaq.broker.admin_socket import SOCKET_NAME, call_admin
from metaq.cli import render
from metaq.cli.options import example, json_option, place_options
from metaq.cli.serve import default_data_dir, read_bytes
from metaq.config.load import load_config
from metaq.errors import AdminError

TIMEOUT_S: Final = 10.0

Span = Mapping[str, int]
"""Fields of a request, `start` and `end`; none of them is a whole topic."""


def find_data_dir(data_dir: Path | None, config: Path | None) -> Path:
    """Return the data directory that the options name.

    Raises:
        ConfigError: the configuration cannot be read.
        AdminError: no broker runs on its dataPath, or where `metaq local` keeps its
            data; one that was given another by `--set` can only be found by that.
    """
    if data_dir is not None:
        return data_dir
    if config is None:
        found = default_data_dir()
        if not (found / SOCKET_NAME).exists():
            raise AdminError(
                f"no broker runs on {found}, where 'metaq local' keeps its data; name"
                " another with --data-dir, or its configuration with --config"
            )
        return found
    found = Path(load_config(str(config), read_bytes).system.data_path)
    if not (found / SOCKET_NAME).exists():
        raise AdminError(
            f"no broker runs on {found}, the dataPath of {config}; if it was started"
            " with --set dataPath=..., name that with --data-dir"
        )
    return found


def reload(data_dir: Path, *, as_json: bool) -> None:
    """Let the broker read its configuration again; print who it is and what changed.

    Raises:
        AdminError: no broker runs there, or the file has an error.
    """
    reply = call_admin(data_dir, {"command": "reload"}, timeout_s=TIMEOUT_S)
    if as_json:
        render.print_json(reply)
        return
    changes = [
        f"{what} {', '.join(names)}"
        for what in ("added", "removed", "changed")
        if (names := _texts(reply.get(what)))
    ]
    broker = f"broker {reply['broker_id']} at {reply['address']}"
    click.echo(f"{broker}, data directory {reply['data_dir']}")
    click.echo("reloaded: " + ("; ".join(changes) or "no topic changed"))
    for difference in _texts(reply.get("needs_restart")):
        click.echo(f"takes a restart: {difference}")


def close_partitions(data_dir: Path, topic: str, span: Span) -> None:
    """Refuse puts and gets of partitions.

    Raises:
        AdminError: no broker runs there, or it refused.
    """
    _send("close_partitions", data_dir, topic, span)


def open_partitions(data_dir: Path, topic: str, span: Span) -> None:
    """Take puts and gets of partitions again; raises as `close_partitions`."""
    _send("open_partitions", data_dir, topic, span)


def read_span(_context: click.Context, _parameter: click.Parameter, text: str) -> Span:
    """Read `3` or `0-3` while the command line is read: before a broker is looked for.

    Raises:
        click.BadParameter: it is neither.
    """
    return parse_span(text)


def parse_span(text: str) -> Span:
    """Return what `3` or `0-3` means; nothing for a whole topic.

    Raises:
        click.BadParameter: it is neither.
    """
    if not text:
        return {}
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text, re.ASCII)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise click.BadParameter(
            f"expected a number or FIRST-LAST, got '{text}'", param_hint="RANGE"
        )
    return {"start": int(match[1]), "end": int(match[2] or match[1])}


def _send(command: str, data_dir: Path, topic: str, span: Span) -> None:
    request: dict[str, object] = {"command": command, "topic": topic}
    reply = call_admin(data_dir, {**request, **span}, timeout_s=TIMEOUT_S)
    closed = reply.get("closed")
    numbers = closed.get(topic) if isinstance(closed, dict) else None
    shown = ", ".join(_texts(numbers))
    click.echo(f"{topic}: closed partitions: {shown or 'none'}")


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


# -- commands ------------------------------------------------------------------------


@click.command(
    "reload", epilog=example("metaq reload", "metaq reload --config config/server.ini")
)
@json_option
@place_options
def reload_command(data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    """Let a broker on this machine read its configuration again.

    A file with an error changes nothing, and the error is printed.
    """
    reload(find_data_dir(data_dir, config), as_json=as_json)


@click.group()
def partitions() -> None:
    """Close partitions to puts and gets, or open them again."""


@partitions.command(
    "close",
    short_help="Refuse puts and gets of TOPIC, or of some partitions.",
    epilog=example("metaq partitions close test", "metaq partitions close test 0-3"),
)
@click.argument("topic")
@click.argument("span", metavar="[RANGE]", default="", callback=read_span)
@place_options
def close_command(
    topic: str, span: Span, data_dir: Path | None, config: Path | None
) -> None:
    """Refuse puts and gets of TOPIC, all of it or RANGE (a number, FIRST-LAST).

    Lasts until the partitions are opened or the broker restarts.
    """
    close_partitions(find_data_dir(data_dir, config), topic, span)


@partitions.command(
    "open",
    short_help="Take puts and gets of TOPIC again.",
    epilog=example("metaq partitions open test", "metaq partitions open test 2"),
)
@click.argument("topic")
@click.argument("span", metavar="[RANGE]", default="", callback=read_span)
@place_options
def open_command(
    topic: str, span: Span, data_dir: Path | None, config: Path | None
) -> None:
    """Take puts and gets of TOPIC again, all of it or RANGE (a number, FIRST-LAST)."""
    open_partitions(find_data_dir(data_dir, config), topic, span)


COMMANDS: Final = (reload_command, partitions)
"""Of the argument tree."""
