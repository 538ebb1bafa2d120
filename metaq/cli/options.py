"""Options that several commands share, and how they reach them."""

import datetime as dt
import functools
import logging
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_type_hints

import click

from metaq.cli import logs
from metaq.cli.cluster import Target, check_target
from metaq.client import Client
from metaq.client.names import check_group
from metaq.errors import ConfigError
from metaq.model import HeaderPairs, Millis

ZOOKEEPER: Final = "localhost:2181"
ROOT: Final = "/meta"
TIMEOUT_S: Final = 10.0
INTERVAL_S_MAX: Final = 86_400
"""Longest pause of what is repeated, seconds."""
DIGITS_OF_MILLISECONDS: Final = 12
"""A number of so many digits, or more, is in milliseconds."""

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T")


class SecondsRange(click.FloatRange):
    """Seconds between bounds; `nan` lies between all of them, and is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number that a word means; fails when it is none of the range."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


def _be_verbose(_context: click.Context, _option: click.Parameter, count: int) -> None:
    if count:
        logs.tell(logging.INFO if count == 1 else logging.DEBUG)


TARGET_OPTIONS: Final = (
    click.option(
        "-v",
        "--verbose",
        count=True,
        expose_value=False,
        callback=_be_verbose,
        help="Log to standard error; -vv logs everything.",
    ),
    click.option(
        "--timeout",
        type=SecondsRange(0.01, 3600),
        default=TIMEOUT_S,
        show_default=True,
        help="Longest wait for one answer, seconds.",
    ),
    click.option(
        "--broker",
        "brokers",
        multiple=True,
        metavar="HOST:PORT",
        help="Ask this broker instead of ZooKeeper; may be repeated.",
    ),
    click.option(
        "--zk-root",
        default=ROOT,
        show_default=True,
        help="Node of the cluster in ZooKeeper.",
    ),
    click.option(
        "--zookeeper",
        envvar="METAQ_ZOOKEEPER",
        default=ZOOKEEPER,
        show_default=True,
        metavar="HOST:PORT,...",
        help="ZooKeeper; METAQ_ZOOKEEPER in the environment says the same.",
    ),
)


def example(*lines: str) -> str:
    """Return the text below a command's options."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def target_options(command: F) -> F:
    """Add the options that say which cluster is meant, as the argument `target`."""

    @functools.wraps(command)
    def with_target(
        *args: Any,
        zookeeper: str,
        zk_root: str,
        brokers: tuple[str, ...],
        timeout: float,
        **kwargs: Any,
    ) -> Any:
        target = Target(zookeeper, zk_root, brokers, timeout)
        check_target(target)
        return command(*args, target=target, **kwargs)

    wrapped: Any = with_target
    for option in TARGET_OPTIONS:
        wrapped = option(wrapped)
    return cast("F", wrapped)


def place_options(command: F) -> F:
    """Add the options that say which broker on this machine is meant."""
    for option in (
        click.option(
            "--config",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Configuration of the broker; its dataPath is the data directory.",
        ),
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path),
            help="Data directory of the broker.  [default: that of 'metaq local']",
        ),
    ):
        command = option(command)
    return command


def takes(
    kind: type[T], name: str = "options"
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Add the options that a dataclass declares, as one argument.

    Args:
        kind: each field is `Annotated` with the `click.option` or `click.argument` of
            its name; help comes in the order of the fields.
        name: name of the argument.
    """
    hints = get_type_hints(kind, include_extras=True)

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def with_options(*args: Any, **given: Any) -> R:
            own = {field: given.pop(field) for field in hints}
            return command(*args, **{name: kind(**own)}, **given)

        wrapped: Callable[..., R] = with_options
        for hint in reversed(hints.values()):
            for declare in hint.__metadata__:
                wrapped = declare(wrapped)
        return wrapped

    return decorate


json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object per line, for machines."
)

yes_option = click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")


def parse_time(text: str) -> Millis:
    """Read ISO 8601, or a number of seconds (or, from 12 digits on, ms) since 1970.

    Args:
        text: `2026-01-31`, `2026-01-31T12:00`, `2026-01-31T12:00:00+01:00`, or a
            number; without a zone it is local time.

    Raises:
        ValueError: it is neither.
    """
    if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text, re.ASCII):
        whole = text.partition(".")[0]
        is_ms = len(whole) >= DIGITS_OF_MILLISECONDS
        return Millis(int(whole) if is_ms else int(float(text) * 1000))
    try:
        # Python reads more than people write: digits without any sign among them.
        is_date = re.match(r"\d{4}-\d\d-\d\d", text, re.ASCII)
        moment = dt.datetime.fromisoformat(text if is_date else "")
        # A time without a zone is the user's local time.
        return Millis(int(moment.astimezone().timestamp() * 1000))
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(
            f"expected a time such as 2026-01-31T12:00 or 1769857200, got '{text}'"
        ) from error


def _read_pairs(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"expected KEY=VALUE, got {text!r}")
        found[key] = value
    return found


def pairs_option(
    flag: str, name: str, text: str
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return an option `KEY=VALUE` that may be repeated; its value is a dict."""
    return click.option(
        flag,
        name,
        multiple=True,
        callback=_read_pairs,
        metavar="KEY=VALUE",
        help=f"{text}; may be repeated.",
    )


attribute_option = click.option("--attribute", help="Attribute of every message.")


def _read_headers(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> HeaderPairs:
    pairs = []
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"expected NAME=VALUE, got '{text}'")
        # Bytes of the command line that are no UTF-8 stay what they are.
        pairs.append((name, value.encode(errors="surrogateescape")))
    return tuple(pairs)


headers_option = click.option(
    "--header",
    "headers",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_read_headers,
    help="Header of every message; may be given more than once.",
)


def read_group(_context: click.Context, _option: click.Parameter, group: str) -> str:
    """Return the name of a group that members could have.

    Raises:
        click.BadParameter: MetaQ or ZooKeeper would not take it.
    """
    try:
        return check_group(group)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


group_option = click.option(
    "--group",
    required=True,
    callback=read_group,
    help="Read as a member of this group.",
)


def max_option(text: str) -> Callable[[F], F]:
    """Return the option that ends a command after so many of something."""
    return click.option("--max", "count_max", type=click.IntRange(0), help=text)


def count_option(default: int) -> Callable[[F], F]:
    """Return the option that says how many messages."""
    return click.option(
        "--count",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        help="Messages in all.",
    )


metrics_option = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Answer http://127.0.0.1:PORT/metrics while it runs.  [default: no port]",
)


def serve_while_running(
    client: Client, port: int | None
) -> AbstractContextManager[object]:
    """Answer scrapes inside the block; without a port, do nothing.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        return nullcontext()
    from metaq.client.metrics import serve_metrics  # noqa: PLC0415  # rarely wanted

    return serve_metrics(client, port=port)
