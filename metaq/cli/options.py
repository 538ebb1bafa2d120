"""Options that commands share, and dataclasses that declare options."""

import datetime as dt
import functools
import logging
import math
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import click

from metaq.broker.admin_socket import SOCKET_NAME
from metaq.cli import logs
from metaq.cli.cluster import Target, check_target
from metaq.client import Client
from metaq.config.load import load_config
from metaq.config.topic_rules import TOPIC_NAME, is_safe_topic
from metaq.errors import AdminError, ConfigError
from metaq.filter.language import parse_filter
from metaq.model import TAG, HeaderPairs, Millis
from metaq.zk.groups import check_group_name
from metaq.zk.paths import is_legal_step

ZOOKEEPER: Final = "localhost:2181"
ROOT: Final = "/meta"
TIMEOUT_S: Final = 10.0
INTERVAL_S_MAX: Final = 86_400
ADD: Final = "add"
DIGITS_OF_MILLISECONDS: Final = 12
"""Minimum number of digits of a time in milliseconds; shorter ones are seconds."""
SETTINGS_BYTES_MAX: Final = 1024 * 1024
"""Maximum size of a configuration file, which usually has about ten KiB."""

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
Moment = Literal["earliest", "latest"] | dt.datetime


class SecondsRange(click.FloatRange):
    """Float within bounds; NaN is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse a word; fail if the number is out of range."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


def _be_verbose(_context: click.Context, _option: click.Parameter, count: int) -> None:
    if count:
        logs.show(logging.INFO if count == 1 else logging.DEBUG)


def target_options(command: F) -> F:
    """Add the options that select a cluster, as the argument `target`."""

    @click.option(
        "--zookeeper",
        envvar="METAQ_ZOOKEEPER",
        default=ZOOKEEPER,
        show_default=True,
        metavar="HOST:PORT,...",
        show_envvar=True,
        help="ZooKeeper servers of the cluster.",
    )
    @click.option(
        "--zk-root",
        default=ROOT,
        show_default=True,
        help="Root node of the cluster in ZooKeeper (zk.zkRoot of its brokers).",
    )
    @click.option(
        "--broker",
        "brokers",
        multiple=True,
        metavar="HOST:PORT",
        help="Connect to this broker instead of using ZooKeeper; may be repeated.",
    )
    @click.option(
        "--timeout",
        type=SecondsRange(0.01, 3600),
        default=TIMEOUT_S,
        show_default=True,
        help="Timeout for connecting and for each reply, in seconds.",
    )
    @click.option(
        "-v",
        "--verbose",
        count=True,
        expose_value=False,
        callback=_be_verbose,
        help="Log to standard error; -vv includes debug messages.",
    )
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

    return cast("F", with_target)


def declared(add: Callable[[F], F], **default: Any) -> Any:
    """Return a field of a dataclass of options; `takes` adds its options.

    Args:
        add: decorator, as returned by `click.option`.
        default: `default` of the field, for callers that create the dataclass.
    """
    return field(metadata={ADD: add}, **default)


def option(*words: str, **attributes: Any) -> Any:
    """Return a field whose option is a `click.option` of these arguments."""
    return declared(click.option(*words, **attributes))


def takes(
    kind: type[Any], name: str = "options"
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Add the options that a dataclass declares, as one argument.

    Args:
        kind: dataclass whose fields were created by `option` or `declared`. A field
            names its option; the help has the order of the fields.
        name: name of the argument.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def with_options(*args: Any, **given: Any) -> R:
            own = {each.name: given.pop(each.name) for each in fields(kind)}
            return command(*args, **{name: kind(**own)}, **given)

        wrapped: Callable[..., R] = with_options
        for each in reversed(fields(kind)):
            before = len(getattr(wrapped, "__click_params__", ()))
            wrapped = each.metadata[ADD](wrapped)
            added = vars(wrapped)["__click_params__"][before:]
            # Several options may form one value, as those of a cluster do.
            if len(added) == 1:
                added[0].name = each.name
        return wrapped

    return decorate


flag = functools.partial(click.option, is_flag=True)
DIRECTORY: Final = click.Path(exists=True, file_okay=False, path_type=Path)
FILE: Final = click.Path(dir_okay=False, path_type=Path)
"""A file, which need not exist."""
directory_argument = click.argument("directory", type=DIRECTORY)
json_option = flag("--json", "as_json", help="Print JSON, one object per line.")
yes_option = flag("--yes", "is_sure", help="Do not ask for confirmation.")
dry_option = flag(
    "--dry-run", "is_dry", help="Print the plan without changing anything."
)


def parse_time(text: str) -> Millis:
    """Parse ISO 8601, or seconds (from 12 digits on, milliseconds) since 1970.

    Args:
        text: `2026-01-31`, `2026-01-31T12:00`, `2026-01-31T12:00:00+01:00`, or a
            number; without a zone it is local time.

    Raises:
        ValueError: the text is neither.
    """
    if re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text, re.ASCII):
        whole = text.partition(".")[0]
        is_ms = len(whole) >= DIGITS_OF_MILLISECONDS
        return Millis(int(whole) if is_ms else int(float(text) * 1000))
    try:
        # Python also accepts forms that are not meant here, such as 20260131.
        is_date = re.match(r"\d{4}-\d\d-\d\d", text, re.ASCII)
        moment = dt.datetime.fromisoformat(text if is_date else "")
        # A time without a zone is the user's local time.
        return Millis(int(moment.astimezone().timestamp() * 1000))
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(
            f"expected a time such as 2026-01-31T12:00 or 1769857200, got '{text}'"
        ) from error


def parse_start(text: str, *, hint: str = "--from") -> Moment:
    """Parse `earliest`, `latest` or a time; an error names the option `hint`."""
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    try:
        return _moment(text)
    except ValueError as error:
        raise click.BadParameter(
            "expected earliest, latest, or a time such as 2026-01-31T12:00 or"
            f" 1769857200, got '{text}'",
            param_hint=hint,
        ) from error


def start_option(
    text: str, *, metavar: str = "earliest|latest|TIME"
) -> Callable[[F], F]:
    """Return the option `--from`, whose value `parse_start` parses."""
    return click.option(
        "--from",
        "start",
        default="earliest",
        show_default=True,
        metavar=metavar,
        help=text,
    )


class ReadWord(click.ParamType[Any]):
    """Type of a word that a function parses; its errors are usage errors."""

    name = "text"

    def __init__(self, read: Callable[[str], object]) -> None:
        """`read` raises ValueError or ConfigError."""
        self._read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Parse a word; fail if the function raises ValueError or ConfigError."""
        try:
            return self._read(value)
        except (ConfigError, ValueError) as error:
            return self.fail(str(error), param, ctx)


def time_option(flag: str, text: str) -> Callable[[F], F]:
    """Return an option whose value is a time, parsed by `parse_time`."""
    return click.option(flag, metavar="TIME", type=ReadWord(_moment), help=text)


def _moment(text: str) -> dt.datetime:
    return dt.datetime.fromtimestamp(parse_time(text) / 1000, dt.UTC)


def check_utf8(text: str) -> str:
    """Return the text; raise ValueError if its bytes were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected UTF-8, got {text!r}") from None
    return text


UTF8: Final = ReadWord(check_utf8)
"""Text that becomes part of a message."""


def _check_topic(text: str) -> str:
    if not is_safe_topic(text) or not is_legal_step(text):
        raise ValueError(f"expected {TOPIC_NAME}, got {text!r}")
    return text


TOPIC: Final = ReadWord(_check_topic)
topic_argument = click.argument("topic", type=TOPIC)


def check_tag(tag: str | None, headers: HeaderPairs) -> None:
    """Refuse a tag together with a header of that name."""
    if tag is not None and TAG in dict(headers):
        raise click.UsageError(f"--tag and --header {TAG}=... exclude each other")


def _read_pairs(option: click.Parameter, given: tuple[str, ...]) -> list[list[str]]:
    pairs = []
    for text in given:
        key, equals, value = text.partition("=")
        if not key.strip() or not equals:
            raise click.BadParameter(f"expected {option.metavar}, got '{text}'")
        pairs.append([key.strip(), value])
    return pairs


def pairs_option(
    flag: str, name: str, text: str
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return an option `KEY=VALUE` that may be repeated; its value is a dict."""
    return click.option(
        flag,
        name,
        multiple=True,
        callback=lambda _context, option, given: dict(_read_pairs(option, given)),
        metavar="KEY=VALUE",
        help=f"{text}; may be repeated.",
    )


attribute_option = click.option(
    "--attribute", type=UTF8, help="Attribute of every message."
)


def parse_header(text: str) -> tuple[str, bytes]:
    """Parse `NAME=VALUE`; raise ValueError if the text is not of that form."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise ValueError(f"expected NAME=VALUE, got '{text}'")
    # Bytes of the command line that are not UTF-8 are kept.
    return check_utf8(name.strip()), value.encode(errors="surrogateescape")


headers_option = click.option(
    "--header",
    "headers",
    metavar="NAME=VALUE",
    multiple=True,
    type=ReadWord(parse_header),
    help="Message header; may be repeated.",
)


where_option = click.option(
    "--where",
    metavar="CONDITION",
    type=ReadWord(lambda text: parse_filter(text).text),
    help="Print only messages that match this filter on tag, key, attribute and"
    " headers, such as \"tag IN ('paid', 'void') AND amount > 100\".",
)


def _check_partition(text: str) -> str:
    if re.fullmatch(r"(\d+-)?\d+", text, re.ASCII) is None:
        raise ValueError(f"expected BROKER-NUMBER, or a number, got '{text}'")
    return text


PARTITION: Final = ReadWord(_check_partition)


def put_option(default: str) -> Callable[[F], F]:
    """Return the option that selects one partition for all puts."""
    return click.option(
        "--partition",
        metavar="BROKER-NUMBER",
        type=PARTITION,
        help=f"Send all messages to this partition.  [default: {default}]",
    )


def partitions_option(verb: str) -> Callable[[F], F]:
    """Return the option that selects partitions; by default all."""
    return click.option(
        "--partition",
        "partitions",
        multiple=True,
        metavar="BROKER-NUMBER",
        type=PARTITION,
        help=f"{verb} only this partition; may be repeated.  [default: all]",
    )


GROUP: Final = ReadWord(check_group_name)
group_option = click.option(
    "--group", required=True, type=GROUP, help="Consumer group to join."
)


def max_option(text: str) -> Callable[[F], F]:
    """Return the option for the maximum number of results."""
    return click.option("--max", "count_max", type=click.IntRange(0), help=text)


def count_option(default: int) -> Callable[[F], F]:
    """Return the option for the number of messages."""
    return click.option(
        "--count",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        help="Number of messages.",
    )


metrics_option = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve metrics at http://127.0.0.1:PORT/metrics.  [default: none]",
)


def serve_while_running(
    client: Client, port: int | None
) -> AbstractContextManager[object]:
    """Serve metrics during the block; without a port, do nothing."""
    if port is None:
        return nullcontext()
    from metaq.client.metrics import serve_metrics  # noqa: PLC0415  # rarely wanted

    return serve_metrics(client, port=port)


# -- a broker on this machine ---------------------------------------------------------


def default_data_dir() -> Path:
    """Return the default data directory of `metaq local`."""
    base = os.environ.get("XDG_DATA_HOME", "")
    # The XDG standard requires that relative paths are ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".local" / "share"
    return root / "metaq"


def read_bytes(path: str) -> bytes:
    """Return the bytes of a configuration file; raise ConfigError if unreadable."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(SETTINGS_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(data) > SETTINGS_BYTES_MAX:
        raise ConfigError(
            f"{path}: expected at most {SETTINGS_BYTES_MAX} bytes, got more"
        )
    return data


def find_data_dir(data_dir: Path | None, config: Path | None) -> Path:
    """Return the data directory of the options.

    Raises AdminError if no broker runs there, except with `--data-dir`, without which a
    directory that was set by `--set` cannot be found.
    """
    if data_dir is not None:
        return data_dir
    if config is None:
        found = default_data_dir()
        hint = (
            "the data directory of 'metaq local'; name another one with --data-dir, or"
            " its configuration with --config"
        )
    else:
        found = Path(load_config(str(config), read_bytes).system.data_path)
        hint = (
            f"the dataPath of {config}; if it was started with --set dataPath=...,"
            " name that directory with --data-dir"
        )
    if not (found / SOCKET_NAME).exists():
        raise AdminError(f"no broker is running on {found}, {hint}")
    return found


def here_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add the options that select a broker on this machine, as `data_dir`."""

    @functools.wraps(function)
    def with_directory(
        *args: Any, data_dir: Path | None, config: Path | None, **given: Any
    ) -> R:
        return function(*args, data_dir=find_data_dir(data_dir, config), **given)

    add_directory = click.option(
        "--data-dir",
        type=click.Path(path_type=Path),
        help="Data directory of the broker.  [default: that of 'metaq local']",
    )
    add_config = click.option(
        "--config",
        type=FILE,
        help="Configuration file of the broker; its dataPath is the data directory.",
    )
    return add_directory(add_config(with_directory))
