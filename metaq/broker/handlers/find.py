"""`find`: the records with a key or header, newest first.

An upkeep thread searches the logs as they were when the command arrived
(`metaq/storage/key_lookup.py`). It works for at most WORK_S, and the reply has the
offset to continue at: a look-up without an index is a sequence of short ones.

All commands of one turn of the loop are one job, because a change of threads takes as
long as a look-up. If one takes long, the rest become jobs of their own.

A command for several partitions works for TOGETHER_S, too. It leaves out the other
partitions, and those that it cannot look up: the client asks for each of them alone,
and then gets the reason.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from metaq.broker.acks import Answerer
from metaq.broker.context import BrokerContext
from metaq.broker.handlers.offset import late_failure, queries_of, settled_log
from metaq.clock import Clock
from metaq.errors import (
    BadRequestError,
    CorruptRecordError,
    MetaqError,
    ServerError,
    UnavailableError,
    WireError,
)
from metaq.model import LogId, Offset
from metaq.protocol import texts
from metaq.protocol.commands import NO_NEXT, Find
from metaq.protocol.encoding import encode_refusal, encode_value_line
from metaq.protocol.find_pages import FIND_PARTITIONS_MAX, FoundPage, encode_pages
from metaq.record.runs import encode_runs
from metaq.storage.key_index import field_names
from metaq.storage.key_lookup import KeyQuestion, KeySearch

FINDS_MAX: Final = 64
"""Maximum commands in progress; more are refused."""

WORK_S: Final = 0.05
"""Maximum time of one look-up; then its reply is sent."""

TOGETHER_S: Final = 0.01
"""Commands that a job has not begun within this time become jobs of their own, and
partitions that a command has not begun within it are left out."""

LIMIT_MAX: Final = 1000
"""Maximum records of a partition in a reply."""

RECORDS_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of the records in a reply; a larger first record is sent alone. This
many are counted as in flight for the whole broker until the answer is made."""

HELD_BYTES: Final = 32 << 10
"""Bytes counted as in flight for the connection. Most replies are smaller; counting the
maximum would make a connection look up the partitions of a topic one by one."""


def handle_find(command: Find, answerer: Answerer) -> None:
    """Begin a look-up, which is answered later.

    Raises:
        BadRequestError: the payload is no key or header, the limit is below 1, or there
            are too many partitions.
        ForbiddenError: the only partition is closed.
        NotFoundError: no put has made its log.
        UnavailableError: this replica does not know its log end yet, or there are too
            many look-ups.
        ServerError: its log cannot be read.
    """
    context = answerer.context
    context.counters.cmd_get += 1
    if not command.payload.startswith((b"key=", b"h.")) or command.limit < 1:
        raise BadRequestError("expected key=VALUE or h.NAME=VALUE, and a limit")
    if len(command.others) >= FIND_PARTITIONS_MAX:
        raise BadRequestError(
            f"expected at most {FIND_PARTITIONS_MAX} partitions, got"
            f" {len(command.others) + 1}"
        )
    searches = _searches(command, context)
    if context.find_count >= FINDS_MAX:
        raise UnavailableError(texts.too_many_finds(FINDS_MAX))
    context.find_count += 1
    answerer.hold(count=1, size_bytes=HELD_BYTES)
    context.load.hold(RECORDS_BYTES_MAX - HELD_BYTES)
    context.finds.append(LookUp(command, answerer, searches))
    if len(context.finds) == 1:
        asyncio.get_running_loop().call_soon(_begin_all, context)


def _searches(command: Find, context: BrokerContext) -> dict[int, KeySearch]:
    """Return a search for each partition that can be looked up."""
    topic, partitions = command.topic, (command.partition, *command.others)
    names = field_names(context.config.topic(topic).index)
    question = KeyQuestion(
        command.payload,
        Offset(command.below),
        command.since_ms,
        command.until_ms,
        min(command.limit, LIMIT_MAX),
        RECORDS_BYTES_MAX // len(partitions),
    )
    searches = dict[int, KeySearch]()
    for partition in partitions:
        try:
            context.topics.require_open(topic, partition)
            queries = queries_of(context, settled_log(context, topic, partition))
        except WireError:
            if not command.others:
                raise
        else:
            searches[partition] = KeySearch(
                queries, question, names, lists=context.key_lists
            )
    return searches


@dataclass(frozen=True, slots=True)
class LookUp:
    """A command in progress."""

    command: Find
    answerer: Answerer
    searches: dict[int, KeySearch]
    """By partition."""

    def reply(self, clock: Clock) -> bytes:
        """Return the answer; blocks."""
        command, after, read_bytes = self.command, NO_NEXT, 0
        if command.others:
            payload = encode_pages(self._pages(clock))
        else:
            over_s = clock.monotonic_s() + WORK_S
            page = self._page(command.partition, over_s, clock)
            _partition, after, read_bytes, payload = page
        line = encode_value_line(
            len(payload), command.opaque, next_offset=after, read_bytes=read_bytes
        )
        return line + payload

    def _pages(self, clock: Clock) -> Iterator[FoundPage]:
        over_s, size_bytes = clock.monotonic_s() + TOGETHER_S, 0
        for place, partition in enumerate(self.searches):
            if place and clock.monotonic_s() >= over_s:
                return
            with suppress(MetaqError):  # the answer to a command for it alone
                page = self._page(partition, over_s, clock)
                size_bytes += len(page.runs)
                yield page
            if size_bytes >= RECORDS_BYTES_MAX:
                return  # a record alone may be larger than its share

    def _page(self, partition: int, over_s: float, clock: Clock) -> FoundPage:
        search = self.searches[partition]
        try:
            found = search.run(lambda: clock.monotonic_s() >= over_s)
        except CorruptRecordError as error:
            at = search.question.below if error.offset is None else error.offset
            end = search.log.segments[-1].end_offset
            text = texts.with_damage(str(error), error, offset=at, end=end)
            raise ServerError(text) from error
        runs = encode_runs(found.records)
        return FoundPage(partition, found.next_offset, found.read_bytes, runs)

    def finish(self, reply: bytes | Exception) -> None:
        """Answer the command, on the loop's thread."""
        context = self.answerer.context
        context.find_count -= 1
        context.load.release(RECORDS_BYTES_MAX - HELD_BYTES)
        for partition, search in self.searches.items():
            log_id = LogId(self.command.topic, partition)
            for base in search.damaged:
                context.key_builder.distrust((log_id, base, search.names))
        if isinstance(reply, Exception):
            failure = late_failure(reply, self.command, context)
            reply = encode_refusal(failure, self.command.opaque)
        self.answerer.answer(reply, count=1, size_bytes=HELD_BYTES)


def _begin_all(context: BrokerContext) -> None:
    waiting, context.finds = context.finds, []
    _begin(context, waiting)


def _begin(context: BrokerContext, waiting: list[LookUp]) -> None:
    """Answer some look-ups on an upkeep thread."""

    def finish(done: "asyncio.Future[list[bytes | Exception]]") -> None:
        replies = done.result()
        for each, reply in zip(waiting, replies, strict=False):
            each.finish(reply)
        for each in waiting[len(replies) :]:
            _begin(context, [each])

    loop, work = asyncio.get_running_loop(), partial(_work, context.clock, waiting)
    try:
        loop.run_in_executor(context.upkeep, work).add_done_callback(finish)
    except RuntimeError as error:  # the broker stops
        for each in waiting:
            each.finish(UnavailableError(str(error)))


def _work(clock: Clock, waiting: list[LookUp]) -> list[bytes | Exception]:
    """Return the answers to as many look-ups as begin within TOGETHER_S; blocks."""
    replies = list[bytes | Exception]()
    over_s = clock.monotonic_s() + TOGETHER_S
    for each in waiting:
        if replies and clock.monotonic_s() >= over_s:
            break
        try:
            replies.append(each.reply(clock))
        except Exception as error:  # noqa: BLE001  # becomes the answer of this one
            replies.append(error)
    return replies
