"""`metaq queues redrive`: dead letters of a queue group, back where they came from.

A member of the log group `GROUP-redrive` reads the dead-letter topic. The messages made
of a batch of letters and its offsets are stored together or not at all, so a letter is
sent back once, whenever this is killed. It ends where the topic ended when it began: a
message that dies again is not sent in circles.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Final

import click

from metaq.cli import render
from metaq.cli.cluster import Target
from metaq.cli.queues import group_argument
from metaq.cli.tree import command
from metaq.client import AsyncClient
from metaq.errors import ClientError, RequestTimeoutError
from metaq.model import GroupOffset, Message, Offset, TopicPartition
from metaq.record.dead_letters import PREFIX, origin_topic

COLUMNS = ("topic", "cause", "letters")
BATCH_COUNT: Final = 500
CAUSES_MAX: Final = 50
"""Causes that are counted one by one; others are counted together."""
CAUSE_CHARS_MAX: Final = 80

Found = tuple[Counter[tuple[str, str]], Mapping[TopicPartition, Offset]]
"""Letters by topic and cause, and the end of each partition that has more to read."""


@command(
    "queues redrive",
    group_argument,
    click.option(
        "--limit",
        type=click.IntRange(1),
        metavar="COUNT",
        help="Send back so many at most.  [default: all]",
    ),
    examples=(
        "metaq queues redrive workers --dry-run",
        "metaq queues redrive workers --limit 10 --yes",
    ),
)
def redrive(
    target: Target,
    group: str,
    limit: int | None,
    *,
    is_dry: bool,
    is_sure: bool,
    as_json: bool,
) -> None:
    """Send dead letters of GROUP back to their topics.

    Counts them by cause and asks. Each is sent once: a second call goes on where the
    first one ended, or was killed. They are new messages of their topics, and all
    groups of these get them.
    """
    counts, ends = target.run(lambda client: _find(client, group))
    rows = [(topic, cause, count) for (topic, cause), count in counts.most_common()]
    render.print_rows(COLUMNS, rows, as_json=as_json)
    total = min(counts.total(), counts.total() if limit is None else limit)
    if not total:
        render.say(f"queue group {group} has no dead letters that were not sent back")
        return
    letters = render.count_text(total, "dead letter")
    question = f"Send {letters} of queue group {group} back?"
    if render.may_change(question, is_dry=is_dry, is_sure=is_sure):
        sent = target.run(
            lambda client: _send(client, group, ends, total, target.timeout_s)
        )
        render.say(f"{render.count_text(sent, 'dead letter')} sent back")


async def _find(client: AsyncClient, group: str) -> Found:
    """Count the letters that were not sent back yet."""
    counts, ends = Counter[tuple[str, str]](), dict[TopicPartition, Offset]()
    async for letter in _letters(client, group, await _topic_of(client, group)):
        ends[letter.partition] = letter.next_offset
        topic = _origin(letter, group)
        if topic is not None:
            cause = letter.headers.get(f"{PREFIX}cause", b"").decode(errors="replace")
            key = (topic, cause[:CAUSE_CHARS_MAX])
            if key not in counts and len(counts) >= CAUSES_MAX:
                key = (topic, "other causes")
            counts[key] += 1
    return counts, ends


async def _topic_of(client: AsyncClient, group: str) -> str:
    known = await client.admin().queue_groups()
    if group not in known:
        names = ", ".join(known) or "none"
        raise ClientError(f"no queue group {group}; groups there are: {names}")
    topic = known[group].dead_letter_topic
    if topic is None:
        raise ClientError(
            f"queue group {group} drops what it gives up: it has no dead letters"
        )
    return topic


async def _letters(
    client: AsyncClient, group: str, topic: str
) -> AsyncIterator[Message]:
    """Yield what the redrive of a group has not read of the dead-letter topic."""
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
    ends: Mapping[TopicPartition, Offset],
    total: int,
    timeout_s: float,
) -> int:
    """Send letters back, up to the ends; return how many."""
    topic, sent, left = await _topic_of(client, group), 0, dict(ends)
    async with (
        client.producer() as producer,
        client.consumer(
            _reader_of(group), [topic], start="earliest", commit_interval_s=None
        ) as consumer,
    ):
        while left and sent < total:
            count_max = min(BATCH_COUNT, total - sent)
            batches = consumer.batches(max_count=count_max, max_wait_s=0.1)
            try:
                async with asyncio.timeout(timeout_s):
                    batch = await anext(batches)
            except TimeoutError as error:
                raise RequestTimeoutError(
                    f"group {_reader_of(group)} gets nothing to send for {timeout_s:g}"
                    " s: it may have another member, or one that was killed just now"
                ) from error
            async with producer.exactly_once(batch) as tx:
                for letter in batch:
                    origin = _origin(letter, group)
                    if origin is None:
                        continue
                    own = (
                        h for h in letter.header_pairs if not h[0].startswith(PREFIX)
                    )
                    await tx.send(
                        origin,
                        letter.data,
                        attribute=letter.attribute,
                        key=letter.key,
                        headers=tuple(own),
                    )
                    sent += 1
            for partition, offset in batch.offsets.items():
                if offset >= left.get(partition, offset + 1):
                    del left[partition]
    return sent


def _reader_of(group: str) -> str:
    """Return the log group that remembers what was sent back."""
    return f"{group}-redrive"


def _origin(letter: Message, group: str) -> str | None:
    """Return the topic that a letter of the group is from; None: it is another's."""
    headers = letter.headers
    if headers.get(f"{PREFIX}group") != group.encode(errors="surrogatepass"):
        return None
    return origin_topic(headers.get(f"{PREFIX}origin", b""))
