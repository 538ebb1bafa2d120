"""`metaq cat`: print the messages of a topic, without a group."""

import datetime as dt
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target, find_topic
from metaq.cli.options import (
    declared,
    flag,
    json_option,
    max_option,
    option,
    parse_start,
    partitions_option,
    start_option,
    takes,
    time_option,
    topic_argument,
    where_option,
)
from metaq.cli.tree import command
from metaq.client import Client, MemoryOffsets, Start
from metaq.model import MAX_OFFSET, Message, TopicPartition
from metaq.protocol.commands import NO_GROUP

FOLLOW_COUNT_MAX: Final = 1000
"""Maximum number of messages received at a time while following."""
LOOK_S: Final = 0.2
"""Interval at which a wait checks whether to end, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatOptions:
    """The options of `metaq cat`."""

    topic: str = declared(topic_argument)
    start: str = declared(
        start_option(
            "Start position; TIME is ISO 8601 (local time unless it has a zone) or"
            " seconds since 1970. Messages whose ids come from a Java broker have no"
            " time.",
        )
    )
    last: int | None = option(
        "--last",
        type=click.IntRange(0),
        metavar="N",
        help="Print the newest N messages of all partitions together, oldest first.",
    )
    since: dt.datetime | None = declared(
        time_option("--since", "Start at the first message of this time or later."),
        default=None,
    )
    until: dt.datetime | None = declared(
        time_option("--until", "Stop before the first message of this time or later."),
        default=None,
    )
    where: str | None = declared(where_option, default=None)
    count_max: int | None = declared(max_option("Stop after this many messages."))
    follows: bool = option(
        "--follow",
        is_flag=True,
        help="Wait for new messages and print them as they arrive.",
    )
    partitions: tuple[str, ...] = declared(partitions_option("Read"))
    is_partial: bool = declared(
        flag(
            "--partial",
            help="Skip partitions whose broker is away.  [default: fail]",
        ),
        default=False,
    )
    as_json: bool = declared(json_option)
    """Print one object per message instead of its bytes and a line end."""


@command(
    "cat",
    takes(CatOptions),
    examples=(
        "metaq cat test --max 10",
        "metaq cat test --from 2026-01-31T12:00 --json",
        "metaq cat test --since 2026-01-31T12:00 --until 2026-01-31T13:00",
        "metaq cat test --last 10 --where \"tag = 'paid'\"",
        "metaq cat test --from latest --follow",
    ),
)
def cat(target: Target, options: CatOptions) -> None:
    """Print the messages of TOPIC, each followed by a newline.

    Needs no consumer group and commits no offsets. If the broker of a partition is
    away, the command waits for it until --timeout and then fails, unless --partial is
    given.

    Partitions are printed one after the other, each up to its log end at that moment;
    with --follow, messages are printed as they arrive. Messages of one partition are in
    log order. --last selects by time over all partitions and does not read older
    messages; with --where, it selects the newest messages that match.
    """
    begins = (
        options.start != "earliest",
        options.since is not None,
        options.last is not None,
    )
    if sum(begins) > 1:
        raise click.UsageError(
            "--from, --since and --last exclude each other: each is a start position"
        )
    start = options.since or parse_start(options.start)
    if options.follows and options.until is not None:
        raise click.UsageError(
            "--follow and --until exclude each other: --follow does not stop"
        )
    found = find_topic(
        target,
        options.topic,
        options.partitions,
        kind="gets",
        is_partial=options.is_partial,
    )
    if options.count_max == 0:
        return
    with found.target.client() as client:
        if options.follows:
            messages = _follow(client, found.partitions, start, options)
        else:
            messages = client.browse(
                options.topic,
                partitions=found.partitions,
                start=start,
                last=options.last,
                until=options.until,
                where=options.where,
            )
        with closing(messages):
            for message in islice(messages, options.count_max):
                write_message(message, as_json=options.as_json)
                if options.follows:
                    sys.stdout.flush()


def _follow(
    client: Client,
    partitions: Sequence[TopicPartition],
    start: Start,
    options: CatOptions,
) -> Generator[Message, None, None]:
    """Yield messages; raises BrokenPipeError when standard output has no reader."""
    topic, last, where = partitions[0].topic, options.last, options.where
    if last is not None:
        ends = {one: client.get(topic, one, MAX_OFFSET) for one in partitions}
        places = {one: end.next_offset for one, end in ends.items()}
        for message in client.browse(
            topic, partitions=partitions, last=last, where=where
        ):
            places[message.partition] = message.next_offset
            yield message
        start = places
    with client.consumer(
        NO_GROUP,
        [topic],
        partitions=partitions,
        offsets=MemoryOffsets(),
        start=start,
        commit_interval_s=None,
        where=where,
    ) as consumer:
        while True:
            yield from consumer.receive_many(FOLLOW_COUNT_MAX, LOOK_S)
            render.require_reader()


def write_message(message: Message, *, as_json: bool) -> None:
    """Print a message and a line end; do not flush."""
    if as_json:
        render.print_json(to_json(message))
    else:
        sys.stdout.buffer.write(message.data + b"\n")


def to_json(message: Message) -> dict[str, object]:
    """Return the `--json` object of a message."""
    return {
        "topic": message.topic,
        "broker": message.partition.broker_id,
        "partition": message.partition.partition,
        "offset": message.offset,
        "id": message.id,
        "time": render.format_time(message.timestamp_ms),
        **render.message_fields(
            message.data, message.attribute, message.key, message.header_pairs
        ),
    }
