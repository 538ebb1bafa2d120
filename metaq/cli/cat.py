"""`metaq cat`: the messages of a topic, without a group, on standard output."""

import sys
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

import click

from metaq.cli import render
from metaq.cli.cluster import Target, find_topic
from metaq.cli.times import format_time, parse_time
from metaq.client.options import Start
from metaq.model import Message
from metaq.zk.paths import partition_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CatOptions:
    """The options of the command."""

    topic: str
    """What is read."""
    start: str
    """`earliest`, `latest` or a time."""
    count_max: int | None
    """Stop after so many messages."""
    follows: bool
    """Go on for ever."""
    as_json: bool
    """One object per message instead of its bytes and a line end."""
    partitions: tuple[str, ...]
    """None of them is all."""
    is_partial: bool = False
    """Go on without the partitions of brokers that are away."""


def cat(target: Target, options: CatOptions) -> None:
    """Print messages; one partition after the other unless it follows.

    Raises:
        PartitionsAwayError: a broker of the topic is away; nothing is printed.
        MetaqError: reading cannot go on; what could be read has been printed.
    """
    start = parse_start(options.start)
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
        messages = client.browse(
            options.topic,
            partitions=[partition_name(each) for each in found.partitions],
            start=start,
            stop_at_end=not options.follows,
        )
        with closing(messages):
            for message in islice(messages, options.count_max):
                write_message(message, as_json=options.as_json)
                if options.follows:
                    sys.stdout.flush()


def parse_start(text: str, *, hint: str = "--from") -> Start:
    """Return where to begin: `earliest`, `latest` or a time.

    Raises:
        click.BadParameter: it is none of the three; names the option `hint`.
    """
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    try:
        return datetime.fromtimestamp(parse_time(text) / 1000, UTC)
    except ValueError as error:
        raise click.BadParameter(
            "expected earliest, latest, or a time such as 2026-01-31T12:00 or"
            f" 1769857200, got '{text}'",
            param_hint=hint,
        ) from error


def write_message(message: Message, *, as_json: bool) -> None:
    """Print a message and a line end; whoever waits for it has to flush."""
    if as_json:
        render.print_json(to_json(message))
    else:
        sys.stdout.buffer.write(message.data + b"\n")


def to_json(message: Message) -> dict[str, object]:
    """Return what `--json` says of a message; bytes that are no text as base64."""
    return {
        "topic": message.topic,
        "broker": message.partition.broker_id,
        "partition": message.partition.partition,
        "offset": message.offset,
        "id": message.id,
        "time": format_time(message.timestamp_ms),
        "attribute": message.attribute,
        **render.data_fields(message.data),
    }
