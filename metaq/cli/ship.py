"""`metaq ship`: put each line of a growing file as a message.

The state file has the position up to which the file was sent. It is written at the
first start, and after these lines are stored, and replaced by a rename: a restart loses
no lines, and after a crash at most the lines of one batch are sent again.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target, find_topic
from metaq.cli.follow import CHECK_BYTES, Bookmark, FileFollower
from metaq.cli.interrupts import Interrupts
from metaq.cli.options import (
    FILE,
    attribute_option,
    declared,
    headers_option,
    json_option,
    metrics_option,
    option,
    put_option,
    serve_while_running,
    takes,
    topic_argument,
)
from metaq.cli.tree import command
from metaq.client import (
    KeyHash,
    OutcomeUnknownError,
    OutgoingMessage,
    PartlySentError,
    Producer,
    Selector,
    SendResult,
)
from metaq.errors import ConfigError, MetaqError, WireError
from metaq.fs import SystemFileSystem
from metaq.model import HeaderPairs, SizeBytes
from metaq.retry import Backoff

POLL_S: Final = 0.1
"""Interval at which a file is checked for new lines, seconds."""
BACKOFF: Final = Backoff(first_s=0.5, max_s=10.0)
"""Pauses between attempts while no broker takes the lines; attempts are unlimited."""
STATE_BYTES_MAX: Final = SizeBytes(64 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipOptions:
    """The options of `metaq ship`."""

    file: Path = declared(click.argument("file", type=FILE))
    """File to follow; it may not exist yet."""
    topic: str = declared(topic_argument)
    state: Path | None = option(
        "--state",
        type=FILE,
        help="File that stores the position in FILE, to continue there after a"
        " restart.",
    )
    from_start: bool = option(
        "--from-start",
        is_flag=True,
        help="On the first run, also send the existing lines.  [default: new lines"
        " only]",
    )
    once: bool = option("--once", is_flag=True, help="Stop at the end of FILE.")
    partition: str | None = declared(put_option("one, selected by the path of FILE"))
    attribute: str | None = declared(attribute_option)
    headers: HeaderPairs = declared(headers_option, default=())
    metrics_port: int | None = declared(metrics_option, default=None)
    as_json: bool = declared(json_option)
    """Print the summary as one object."""


@dataclass(slots=True)
class _Counts:
    line_count: int = 0
    size_bytes: int = 0
    repeated_count: int = 0


@command(
    "ship",
    takes(ShipOptions),
    examples=(
        "metaq ship /var/log/syslog logs",
        "metaq ship app.log logs --state app.state --from-start",
        "metaq ship app.log logs --state app.state --once --json",
    ),
)
def ship(target: Target, options: ShipOptions) -> None:
    """Send each new line of FILE to TOPIC, following log rotation.

    FILE may be renamed and created again, or copied and truncated. A line is sent once
    it ends with a newline. With --state, no line is lost by a restart, and after a
    crash the lines of at most one batch are sent twice. A broker must be available at
    the start; later, the command retries until a broker is available.
    """
    if options.once and not options.file.exists():
        raise ConfigError(f"{options.file}: no such file")
    if options.file.exists() and not options.file.is_file():
        # The open of a pipe would block, and a pipe has no position to return to.
        raise ConfigError(
            f"{options.file}: expected a regular file; 'metaq produce' sends the lines"
            " of a pipe"
        )
    bookmark = None
    if options.state is not None:
        # Messages sent without a stored position would be sent again.
        if not os.access(options.state.parent, os.W_OK):
            raise ConfigError(
                f"{options.state}: cannot store the state there: the directory is"
                " missing or not writable"
            )
        bookmark = read_state(options.state, options.file, options.topic)
    wanted = (options.partition,) if options.partition else ()
    found = find_topic(target, options.topic, wanted, kind="puts")
    name = found.partitions[0].name if wanted else None
    counts = _Counts()
    follower = FileFollower(
        options.file, bookmark=bookmark, from_start=options.from_start
    )
    try:
        with (
            found.target.client() as client,
            # One batch at a time: MetaQ 1.4 does not order puts in flight.
            client.producer(
                timeout_s=target.timeout_s,
                in_flight_batches_max=1,
                selector=_of_file(options.file),
            ) as producer,
            Interrupts() as interrupts,
            serve_while_running(client, options.metrics_port),
        ):
            if bookmark is None:
                # A restart before the first line begins where this run began.
                _keep(follower, options)
            if not options.file.exists():
                render.say(f"waiting for {options.file}, which does not exist yet")
            _run(producer, follower, name, options, counts, interrupts)
    finally:
        lost_count = follower.lost_count
        follower.close()
        _print_summary(counts, lost_count, as_json=options.as_json)


def _of_file(path: Path) -> Selector:
    """Return a selector that maps all lines of a file to one partition."""
    by_key, key = KeyHash(), str(path.absolute())
    return lambda topic, partitions, message: by_key(
        topic, partitions, message._replace(key=key)
    )


def _run(
    producer: Producer,
    follower: FileFollower,
    partition: str | None,
    options: ShipOptions,
    counts: _Counts,
    interrupts: Interrupts,
) -> None:
    while True:
        with interrupts.pause():
            lines = follower.read()
            if not lines:
                if options.once:
                    return
                time.sleep(POLL_S)
                continue
        messages = [
            OutgoingMessage(n, options.attribute, None, partition, options.headers)
            for n in lines
        ]
        _send(producer, options.topic, messages, counts, interrupts)
        counts.line_count += len(lines)
        counts.size_bytes += sum(map(len, lines))
        _keep(follower, options)


def _keep(follower: FileFollower, options: ShipOptions) -> None:
    if options.state is not None:
        write_state(options.state, options.file, options.topic, follower.bookmark)


def _send(
    producer: Producer,
    topic: str,
    messages: list[OutgoingMessage],
    counts: _Counts,
    interrupts: Interrupts,
) -> None:
    """Send lines, with retries, until all are stored; without a time limit."""
    failures = 0
    while True:
        try:
            producer.send_many(topic, messages)
        except PartlySentError as error:
            pairs = list(zip(messages, error.outcomes, strict=True))
            messages = [m for m, what in pairs if not isinstance(what, SendResult)]
            causes = [what for _m, what in pairs if isinstance(what, MetaqError)]
        except MetaqError as error:
            causes = [error] * len(messages)
        else:
            return
        for cause in causes:
            if isinstance(cause, OutcomeUnknownError):
                counts.repeated_count += 1
            elif not cause.retriable and not isinstance(cause, WireError):
                raise cause
        failures += 1
        pause_s = BACKOFF.delay_s(failures)
        render.say(f"lines not stored yet, retrying in {pause_s:.1f} s: {causes[0]}")
        with interrupts.pause():
            time.sleep(pause_s)


# -- the state file -------------------------------------------------------------------


def read_state(path: Path, file: Path, topic: str) -> Bookmark | None:
    """Read the bookmark in a state file; None if there is no such file yet.

    Raises ConfigError if it is not a state file, or of another file or topic.
    """
    files = SystemFileSystem()
    if not files.exists(path):
        return None
    try:
        state = json.loads(files.read_file(path, STATE_BYTES_MAX))
        bookmark = Bookmark(**{name: int(state[name]) for name in _FIELDS})
        known = (state["file"], state["topic"])
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path}: not a state file of metaq ship: {error}") from None
    if not 0 <= bookmark.check_bytes <= min(bookmark.position, CHECK_BYTES):
        raise ConfigError(
            f"{path}: not a state file of metaq ship: expected up to {CHECK_BYTES}"
            f" bytes before position {bookmark.position}, got {bookmark.check_bytes}"
        )
    if known != (str(file.absolute()), topic):
        raise ConfigError(
            f"{path}: expected the state of {file.absolute()} for topic {topic}, got"
            f" that of {known[0]} for {known[1]}"
        )
    return bookmark


_FIELDS: Final = ("inode", "position", "check_bytes", "check")


def write_state(path: Path, file: Path, topic: str, bookmark: Bookmark) -> None:
    """Write a bookmark to a state file.

    *Durability*: on disk on return; after a crash, the old or the new state is there.
    """
    state = {"file": str(file.absolute()), "topic": topic, **asdict(bookmark)}
    SystemFileSystem().write_atomically(path, json.dumps(state).encode() + b"\n")


def _print_summary(counts: _Counts, lost_count: int, *, as_json: bool) -> None:
    if as_json:
        render.print_json(
            {
                "messages": counts.line_count,
                "bytes": counts.size_bytes,
                "may_be_doubled": counts.repeated_count,
                "gaps": lost_count,
            }
        )
    else:
        click.echo(
            f"{render.count_text(counts.line_count, 'message')},"
            f" {render.bytes_text(counts.size_bytes)}"
        )
    if counts.repeated_count:
        render.say(
            f"{render.count_text(counts.repeated_count, 'line')} may be stored twice"
        )
    if lost_count:
        render.say(
            f"{render.count_text(lost_count, 'gap')}, where lines may be missing: a"
            " file was truncated, removed or unreadable before they were read"
        )
