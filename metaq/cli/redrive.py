"""`metaq queues redrive`: send dead letters of a queue group back to their topics.

A member of the consumer group `GROUP-redrive` reads the dead-letter topic. One
transaction stores the messages of a batch of letters and commits the batch's offsets,
so each letter is sent back once, even if the command is killed. It stops at the ends
that the topic had at the start, so a message that becomes a dead letter again is not
sent in circles.

The offsets also pass letters that are not chosen. The same transaction puts these at
the end of the topic again, so that a later call finds them.
"""

import asyncio
import contextlib
import datetime as dt
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.options import UTF8, declared, takes, time_option
from metaq.cli.queues import group_argument
from metaq.cli.replicas import find_sets
from metaq.cli.tree import command
from metaq.client import AsyncClient, MessageTooLargeError, Origin, read_origin
from metaq.errors import ClientError, RequestTimeoutError
from metaq.model import GroupOffset, HeaderPairs, Message, Offset, TopicPartition
from metaq.record.dead_letters import PREFIX

COLUMNS = ("topic", "cause", "letters")
INTERRUPTED: Final = "interrupted: run the command again to continue; no letter is"
" sent twice"
BATCH_COUNT: Final = 500
CAUSES_MAX: Final = 50
"""Maximum number of causes counted separately; others are counted together."""
CAUSE_CHARS_MAX: Final = 80

Found = tuple[str, Counter[tuple[str, str]], Mapping[TopicPartition, Offset]]
"""The dead-letter topic, the count of letters by topic and cause, and the end of each
partition with letters to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterChoice:
    """Criteria of the dead letters to send back; None: any."""

    key: str | None = declared(
        click.option("--key", type=UTF8, help="Only letters with this key."),
        default=None,
    )
    cause: str | None = declared(
        click.option(
            "--cause", metavar="TEXT", help="Only letters whose cause contains TEXT."
        ),
        default=None,
    )
    since: dt.datetime | None = declared(
        time_option("--since", "Only letters given up at this time or later."),
        default=None,
    )
    until: dt.datetime | None = declared(
        time_option("--until", "Only letters given up before this time."),
        default=None,
    )
    limit: int | None = declared(
        click.option(
            "--limit",
            type=click.IntRange(1),
            metavar="COUNT",
            help="Maximum number of letters to send back.  [default: all]",
        ),
        default=None,
    )

    @property
    def is_all(self) -> bool:
        """Whether all letters are chosen, apart from the limit."""
        return (self.key, self.cause, self.since, self.until) == (None,) * 4

    def has(self, letter: Message, origin: Origin) -> bool:
        """Return whether a letter is chosen."""
        at_s = -1.0 if origin.at_ms is None else origin.at_ms / 1000
        return (
            (self.key is None or letter.key == self.key.encode())
            and (self.cause is None or self.cause in _cause_of(letter))
            and (self.since is None or at_s >= self.since.timestamp())
            and (self.until is None or 0 <= at_s < self.until.timestamp())
        )


@command(
    "queues redrive",
    group_argument,
    takes(LetterChoice, "choice"),
    examples=(
        "metaq queues redrive workers --dry-run",
        "metaq queues redrive workers --limit 10 --yes",
        "metaq queues redrive workers --cause 'no such customer' --since 2026-01-31",
    ),
)
def redrive(
    target: Target,
    group: str,
    choice: LetterChoice,
    *,
    is_dry: bool,
    is_sure: bool,
    as_json: bool,
) -> None:
    """Send dead letters of GROUP back to their topics.

    Prints their number by cause and asks for confirmation. Each letter is sent once:
    the next run continues where this one ended or was killed. The letters become new
    messages of their topics, which all groups of these topics receive. Letters that are
    read but not selected are put at the end of the dead-letter topic.
    """
    topic, counts, ends = target.run(lambda client: _find(client, group, choice))
    if sets := find_sets(target) & {partition.broker_id for partition in ends}:
        raise ClientError(
            f"dead letters of topic {topic} at broker {min(sets)} cannot be sent back:"
            " it is a replica set, which has no transactions; read and send them"
            " with a program"
        )
    rows = [(*origin, count) for origin, count in counts.most_common()]
    render.print_rows(COLUMNS, rows, as_json=as_json)
    total = min(counts.total(), choice.limit or counts.total())
    if not total:
        such = "" if choice.is_all else " that match"
        render.say(
            f"queue group {group} has no dead letters{such} in topic {topic} still to"
            " be sent back"
        )
        return
    letters = render.count_text(total, "dead letter")
    question = f"Send {letters} of queue group {group} back?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        timeout_s = target.timeout_s
        try:
            sent = target.run(
                lambda client: _send(client, group, choice, ends, total, timeout_s)
            )
        except KeyboardInterrupt:
            render.say(INTERRUPTED)
            raise
        render.say(f"{render.count_text(sent, 'dead letter')} sent back")


async def _find(client: AsyncClient, group: str, choice: LetterChoice) -> Found:
    """Count the chosen letters that have not been sent back yet."""
    counts, ends = Counter[tuple[str, str]](), dict[TopicPartition, Offset]()
    letters = await _topic_of(client, group)
    async for letter in _letters(client, group, letters):
        ends[letter.partition] = letter.next_offset
        origin = _origin(letter, group)
        if origin is not None and choice.has(letter, origin):
            topic = origin.partition.topic
            key = (topic, _cause_of(letter)[:CAUSE_CHARS_MAX])
            if key not in counts and len(counts) >= CAUSES_MAX:
                key = (topic, "other causes")
            counts[key] += 1
    return letters, counts, ends


async def _topic_of(client: AsyncClient, group: str) -> str:
    known = await client.admin().queue_groups()
    if group not in known:
        names = ", ".join(known) or "none"
        raise ClientError(f"no queue group {group}; existing groups: {names}")
    topic = known[group].dead_letter_topic
    if topic is None:
        raise ClientError(
            f"queue group {group} drops messages that it gives up: it has no dead"
            " letters"
        )
    return topic


async def _letters(
    client: AsyncClient, group: str, topic: str
) -> AsyncIterator[Message]:
    """Yield the letters that the redrive of a group has not read yet."""
    admin = client.admin()
    await admin.wait_until_there([topic])
    read = await admin.committed_offsets(_reader_of(group), [topic])
    for each in await admin.describe_partitions([topic]):
        stored, offset = read.get(each.partition), each.log_start or 0
        if isinstance(stored, GroupOffset):
            offset = max(offset, stored.offset)
        while offset < (each.log_end or 0):
            found = await client.get(topic, each.partition, Offset(offset))
            for message in found.messages:
                yield message
            if found.next_offset <= offset:
                break
            offset = found.next_offset


async def _send(
    client: AsyncClient,
    group: str,
    choice: LetterChoice,
    ends: Mapping[TopicPartition, Offset],
    total: int,
    timeout_s: float,
) -> int:
    """Send the chosen letters before the ends back; return their number."""
    topic, sent, left = await _topic_of(client, group), 0, dict(ends)
    async with (
        client.producer() as producer,
        client.consumer(
            _reader_of(group), [topic], start="earliest", commit_interval_s=None
        ) as consumer,
    ):
        while left and sent < total:
            count_max = min(BATCH_COUNT, total - sent) if choice.is_all else BATCH_COUNT
            batches = consumer.batches(max_count=count_max, max_wait_s=0.1)
            try:
                async with asyncio.timeout(timeout_s):
                    batch = await anext(batches)
            except TimeoutError as error:
                raise RequestTimeoutError(
                    f"group {_reader_of(group)} received no letter within"
                    f" {timeout_s:g} s: another member may hold its partitions, or one"
                    " that was killed just now"
                ) from error
            with _refusing_large(topic):
                async with producer.exactly_once(batch) as tx:
                    for letter in batch:
                        origin = _origin(letter, group)
                        if origin is None:
                            continue
                        is_meant = sent < total and choice.has(letter, origin)
                        await tx.send(
                            origin.partition.topic if is_meant else topic,
                            letter.data,
                            attribute=letter.attribute,
                            key=letter.key,
                            headers=_own(letter) if is_meant else letter.header_pairs,
                        )
                        sent += is_meant
            for partition, offset in batch.offsets.items():
                if offset >= left.get(partition, offset + 1):
                    del left[partition]
    return sent


@contextlib.contextmanager
def _refusing_large(topic: str) -> Iterator[None]:
    """Name the cure where a letter that is not chosen cannot be put again.

    The broker stores a letter with its origin even where that makes it larger than a
    message may be; sent back, it is as large as its message was.
    """
    try:
        yield
    except MessageTooLargeError as error:
        raise ClientError(
            f"a dead letter of topic {topic} that is not chosen is too large to be put"
            f" again: {error}; a call without choices sends all letters back"
        ) from error


def _reader_of(group: str) -> str:
    """Return the consumer group that commits the progress of a redrive."""
    return f"{group}-redrive"


def _origin(letter: Message, group: str) -> Origin | None:
    """Return the origin of a letter; None if it is not a letter of this group."""
    origin = read_origin(letter)
    return None if origin is None or origin.group != group else origin


def _cause_of(letter: Message) -> str:
    return letter.headers.get(f"{PREFIX}cause", b"").decode(errors="replace")


def _own(letter: Message) -> HeaderPairs:
    """Return the headers of the message before it became a dead letter."""
    return tuple(h for h in letter.header_pairs if not h[0].startswith(PREFIX))
