"""`metaq cat`: the messages of a topic, without a group, on standard output."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target, choose_partitions
from metaq.cli.times import format_time, parse_time
from metaq.client.browser import TopicBrowser
from metaq.client.seek import offset_at
from metaq.clock import SystemClock
from metaq.model import MAX_OFFSET, Message, Millis, Offset, TopicPartition, id_time

EARLIEST: Final = "earliest"
LATEST: Final = "latest"


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


def cat(target: Target, options: CatOptions) -> None:
    """Print messages; one partition after the other unless it follows.

    Raises:
        MetaqError: reading cannot go on; what could be read has been printed.
    """
    cluster = target.read()
    partitions = choose_partitions(
        cluster, options.topic, cluster.gets, options.partitions
    )
    left = options.count_max
    with TopicBrowser(
        cluster, timeout_s=target.timeout_s, clock=SystemClock()
    ) as browser:
        if left == 0:
            return
        for messages in _messages(browser, target, options, partitions):
            shown = messages if left is None else messages[:left]
            write_messages(shown, as_json=options.as_json)
            if left is not None:
                left -= len(shown)
                if left == 0:
                    return


def _messages(
    browser: TopicBrowser,
    target: Target,
    options: CatOptions,
    partitions: tuple[TopicPartition, ...],
) -> Iterator[list[Message]]:
    moment = parse_moment(options.start)
    starts = [
        (partition, _start(browser, target, partition, options.start, moment))
        for partition in partitions
    ]
    if options.follows:
        yield from browser.follow(starts)
        return
    for partition, start in starts:
        yield from browser.read(partition, start)


def parse_moment(text: str, *, hint: str = "--from") -> Millis | None:
    """Return the time that an option names; None for `earliest` and `latest`.

    Raises:
        click.BadParameter: it is none of the three.
    """
    if text in {EARLIEST, LATEST}:
        return None
    try:
        return parse_time(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=hint) from error


def _start(
    browser: TopicBrowser,
    target: Target,
    partition: TopicPartition,
    start: str,
    moment: Millis | None,
) -> Offset:
    if moment is not None:
        return offset_at(browser, partition, moment, timeout_s=target.timeout_s)
    if start == EARLIEST:
        return Offset(0)
    ends = browser.range_of(partition)
    # Without a log yet, its first message is the first one that comes.
    return min(ends[1], MAX_OFFSET) if ends else Offset(0)


def write_messages(messages: list[Message], *, as_json: bool) -> None:
    """Print messages, each followed by a line end, and let nobody wait for them."""
    if as_json:
        for message in messages:
            render.print_json(to_json(message))
        sys.stdout.flush()
        return
    output = sys.stdout.buffer
    output.write(b"".join([part for m in messages for part in (m.data, b"\n")]))
    output.flush()


def to_json(message: Message) -> dict[str, object]:
    """Return what `--json` says of a message; bytes that are no text as base64."""
    return {
        "topic": message.topic,
        "broker": message.partition.broker_id,
        "partition": message.partition.partition,
        "offset": message.offset,
        "id": message.id,
        "time": format_time(id_time(message.id)),
        "attribute": message.attribute,
        **render.data_fields(message.data),
    }
