"""`metaq find`: print the messages with a key, a header or an id."""

import datetime as dt
import sys
from contextlib import closing
from dataclasses import dataclass

import click

from metaq.cli import render
from metaq.cli.cat import write_message
from metaq.cli.cluster import Target, find_topic
from metaq.cli.options import (
    UTF8,
    ReadWord,
    declared,
    json_option,
    option,
    parse_header,
    partitions_option,
    takes,
    time_option,
    topic_argument,
)
from metaq.cli.tree import command
from metaq.model import MAX_OFFSET, Message

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FindOptions:
    """The options of `metaq find`."""

    topic: str = declared(topic_argument)
    key: str | None = option("--key", type=UTF8, help="Find messages with this key.")
    header: tuple[str, bytes] | None = option(
        "--header",
        metavar="NAME=VALUE",
        type=ReadWord(parse_header),
        help="Find messages with this header.",
    )
    id: int | None = option(
        "--id",
        type=click.IntRange(-(1 << 63), MAX_OFFSET),
        help="Find the message with this id.",
    )
    since: dt.datetime | None = declared(
        time_option("--since", "Find messages of this time or later."), default=None
    )
    until: dt.datetime | None = declared(
        time_option("--until", "Find messages before this time."), default=None
    )
    limit: int = option(
        "--limit",
        type=click.IntRange(1),
        default=10,
        show_default=True,
        help="Maximum number of messages.",
    )
    read_mib: int = option(
        "--read-max",
        type=click.IntRange(0),
        default=1024,
        show_default=True,
        metavar="MIB",
        help="Maximum MiB of the log to read if there is no index.",
    )
    partitions: tuple[str, ...] = declared(partitions_option("Search"))
    as_json: bool = declared(json_option)
    """Print one object per message instead of its bytes and a line end."""


@command(
    "find",
    takes(FindOptions),
    examples=(
        "metaq find orders --key 42",
        "metaq find orders --header order-id=7 --since 2026-01-31T12:00 --json",
        "metaq find orders --id 1661382015569637376",
    ),
)
def find(target: Target, options: FindOptions) -> bool:
    """Print the newest messages of TOPIC that have a key, a header or an id.

    The newest message is printed first. Brokers search the index of the topic, if it
    has one (see --set index=key of 'metaq topics alter'); otherwise the log is read,
    with a progress bar on a terminal, and the number of MiB read is printed at the end.
    The exit code is 1 if no message is found.
    """
    if sum(each is not None for each in (options.key, options.header, options.id)) != 1:
        raise click.UsageError("expected exactly one of --key, --header and --id")
    found = find_topic(target, options.topic, options.partitions, kind="gets")
    read_bytes, count, kept = 0, 0, list[Message]()
    with found.target.client() as client, render.progress("find", None) as advance:

        def on_read(size_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes = size_bytes
            advance(size_bytes)

        messages = client.find(
            options.topic,
            key=options.key,
            header=options.header,
            id=options.id,
            partitions=found.partitions,
            since=options.since,
            until=options.until,
            limit=options.limit,
            read_bytes_max=options.read_mib * MIB,
            on_read=on_read,
        )
        with closing(messages):
            for message in messages:
                count += 1
                if sys.stdout.isatty():
                    kept.append(message)  # printed below the bar
                else:
                    write_message(message, as_json=options.as_json)
    for message in kept:
        write_message(message, as_json=options.as_json)
    if read_bytes >= MIB:
        sys.stdout.flush()
        click.echo(f"read without an index: {read_bytes // MIB} MiB", err=True)
    return count > 0
