"""`metaq consume`: print the messages of a topic as a member of a group."""

import os
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cat import LOOK_S, write_message
from metaq.cli.cluster import Target, find_topic
from metaq.cli.interrupts import Interrupts
from metaq.cli.options import (
    SecondsRange,
    declared,
    group_option,
    json_option,
    max_option,
    metrics_option,
    option,
    parse_start,
    serve_while_running,
    start_option,
    takes,
    where_option,
)
from metaq.cli.tree import command
from metaq.client import Client, Consumer, ConsumerOptions, TopicPattern
from metaq.errors import ConfigError
from metaq.net.own_host import own_host
from metaq.zk.groups import member_name

PATTERN_SIGNS: Final = frozenset("*?[")
COUNT_MAX: Final = 1000
"""Messages printed at a time; after a crash as many may be printed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeOptions:
    """The options of `metaq consume`."""

    topic: str | TopicPattern = declared(
        click.argument(
            "topic", callback=lambda _context, _argument, text: parse_topic(text)
        )
    )
    group: str = declared(group_option)
    start: str = declared(
        start_option(
            "Start position in partitions without a committed offset; TIME as in"
            " 'metaq cat'.",
        )
    )
    where: str | None = declared(where_option, default=None)
    count_max: int | None = declared(max_option("Stop after this many messages."))
    idle_s: float | None = option(
        "--idle",
        type=SecondsRange(0),
        metavar="SECONDS",
        help="Stop after this many seconds without a message.  [default: never]",
    )
    no_commit: bool = option(
        "--no-commit",
        is_flag=True,
        help="Start at the committed offsets of the group, but do not commit.",
    )
    metrics_port: int | None = declared(metrics_option, default=None)
    as_json: bool = declared(json_option)
    """Print one object per message instead of its bytes and a line end."""


@command(
    "consume",
    takes(ConsumeOptions),
    examples=(
        "metaq consume test --group billing",
        "metaq consume test --group billing --max 10 --no-commit --json",
        "metaq consume test --group nightly --idle 5 --from 2026-01-31T12:00",
        "metaq consume 'orders-*' --group billing",
        "metaq consume orders --group large --where 'amount > 100'",
    ),
)
def consume(target: Target, options: ConsumeOptions) -> None:
    """Print messages of TOPIC as a member of a consumer group.

    Each message is followed by a newline. A TOPIC with '*', '?' or '[' is a pattern,
    which also matches topics created later. All members of the group, including Java
    consumers, share its partitions and must use the same --where. With --broker instead
    of ZooKeeper there is no group, and all partitions are read. SIGTERM and Ctrl-C
    commit the printed messages and leave the group; after a crash the last messages are
    printed again.
    """
    if isinstance(options.topic, TopicPattern):
        target.ask(target.find_brokers)
    else:
        target = find_topic(
            target, options.topic, (), kind="gets", is_partial=True
        ).target
    with (
        target.client() as client,
        Interrupts() as interrupts,
        serve_while_running(client, options.metrics_port),
    ):
        consumer_id = f"{own_host()}-{os.getpid()}-{uuid.uuid4()}"
        name = (
            f"member {member_name(options.group, consumer_id)} of group {options.group}"
        )
        if target.brokers:
            name = "a reader of all partitions: without ZooKeeper there is no group"
        with _consumer(client, options, consumer_id) as consumer:
            _print_all(consumer, options, interrupts, name)
        with interrupts.pause():
            """Raise the signal that ended the loop: it decides the exit code."""


def parse_topic(text: str) -> str | TopicPattern:
    """Return a name unchanged, and a text with a wildcard as a pattern."""
    if not PATTERN_SIGNS.intersection(text):
        return text
    try:
        return TopicPattern(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def _consumer(client: Client, options: ConsumeOptions, consumer_id: str) -> Consumer:
    interval_s = ConsumerOptions().commit_interval_s
    return client.consumer(
        options.group,
        [options.topic],
        start=parse_start(options.start),
        where=options.where,
        commit_interval_s=None if options.no_commit else interval_s,
        consumer_id=consumer_id,
    )


def _print_all(
    consumer: Consumer, options: ConsumeOptions, interrupts: Interrupts, name: str
) -> None:
    left = options.count_max
    last_s = time.monotonic()
    is_waiting = False
    while left != 0 and not interrupts.is_pending:
        count = COUNT_MAX if left is None else min(left, COUNT_MAX)
        many = consumer.receive_many(count, LOOK_S)
        if many:
            for message in many:
                write_message(message, as_json=options.as_json)
            sys.stdout.flush()
            last_s = time.monotonic()
            left = None if left is None else left - len(many)
            continue
        if options.idle_s is not None and time.monotonic() - last_s > options.idle_s:
            break
        if not is_waiting and sys.stderr.isatty():
            topics = str(options.topic)
            if isinstance(options.topic, TopicPattern):
                topics = options.topic.glob + ("" if consumer.topics else " (none yet)")
            render.say(f"waiting for messages of {topics} as {name}")
        is_waiting = True
        render.require_reader()
