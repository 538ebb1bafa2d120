"""`find`: the records with a key or header, newest first.

An upkeep thread searches the log as it was when the command arrived
(`metaq/storage/key_lookup.py`). It works for at most WORK_S, and the reply has the
offset to continue at: a look-up without an index is a sequence of short ones.

All look-ups of one turn of the loop, usually those for the partitions of a topic, are
one job, because a change of threads takes as long as a look-up. If one takes long, the
rest become jobs of their own.
"""

import asyncio
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
    ServerError,
    UnavailableError,
)
from metaq.model import LogId, Offset
from metaq.protocol import texts
from metaq.protocol.commands import Find
from metaq.protocol.encoding import encode_refusal, encode_value_line
from metaq.record.runs import encode_runs
from metaq.storage.key_index import field_names
from metaq.storage.key_lookup import KeyQuestion, KeySearch

FINDS_MAX: Final = 64
"""Maximum look-ups in progress; more are refused. A client sends one for each partition
of a topic at once."""

WORK_S: Final = 0.05
"""Maximum time of one look-up; then its reply is sent."""

TOGETHER_S: Final = 0.002
"""Look-ups that a job has not begun within this time become jobs of their own."""

LIMIT_MAX: Final = 1000
"""Maximum records in a reply."""

RECORDS_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of the records in a reply; a larger first record is sent alone. This
many are counted as in flight for the whole broker until the answer is made."""

HELD_BYTES: Final = 32 << 10
"""Bytes counted as in flight for the connection. Most replies are smaller; counting the
maximum would make a connection look up the partitions of a topic one by one."""


def handle_find(command: Find, answerer: Answerer) -> None:
    """Begin a look-up, which is answered later.

    Raises:
        BadRequestError: the payload is no key or header, or the limit is below 1.
        ForbiddenError: the partition is closed.
        NotFoundError: no put has made this log.
        UnavailableError: this replica does not know the log end yet, or there are too
            many look-ups.
        ServerError: the log cannot be read.
    """
    context, topic, partition = answerer.context, command.topic, command.partition
    context.counters.cmd_get += 1
    if not command.payload.startswith((b"key=", b"h.")) or command.limit < 1:
        raise BadRequestError("expected key=VALUE or h.NAME=VALUE, and a limit")
    context.topics.require_open(topic, partition)
    log = settled_log(context, topic, partition)
    queries = queries_of(context, log)
    if context.find_count >= FINDS_MAX:
        raise UnavailableError(texts.too_many_finds(FINDS_MAX))
    names = field_names(context.config.topic(topic).index)
    search = KeySearch(
        queries,
        KeyQuestion(
            command.payload,
            Offset(command.below),
            command.since_ms,
            command.until_ms,
            min(command.limit, LIMIT_MAX),
            RECORDS_BYTES_MAX,
        ),
        names,
        lists=context.key_lists,
    )
    context.find_count += 1
    answerer.hold(count=1, size_bytes=HELD_BYTES)
    context.load.hold(RECORDS_BYTES_MAX - HELD_BYTES)
    context.finds.append(LookUp(command, answerer, search, log.log_id))
    if len(context.finds) == 1:
        asyncio.get_running_loop().call_soon(_begin_all, context)


@dataclass(frozen=True, slots=True)
class LookUp:
    """A command in progress."""

    command: Find
    answerer: Answerer
    search: KeySearch
    log_id: LogId

    def reply(self, clock: Clock) -> bytes:
        """Return the answer; blocks."""
        search, over_s = self.search, clock.monotonic_s() + WORK_S
        try:
            found = search.run(lambda: clock.monotonic_s() >= over_s)
        except CorruptRecordError as error:
            at = search.question.below if error.offset is None else error.offset
            end = search.log.segments[-1].end_offset
            text = texts.with_damage(str(error), error, offset=at, end=end)
            raise ServerError(text) from error
        payload = encode_runs(found.records)
        line = encode_value_line(
            len(payload),
            self.command.opaque,
            next_offset=found.next_offset,
            read_bytes=found.read_bytes,
        )
        return line + payload

    def finish(self, reply: bytes | Exception) -> None:
        """Answer the command, on the loop's thread."""
        context = self.answerer.context
        context.find_count -= 1
        context.load.release(RECORDS_BYTES_MAX - HELD_BYTES)
        for base in self.search.damaged:
            context.key_builder.distrust((self.log_id, base, self.search.names))
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
