"""`find`: the records with a key or header, newest first.

An upkeep thread looks them up (`metaq/storage/key_lookup.py`), in the log as it was
when the command came. It works for WORK_S and the reply says where to go on, so a
look-up without an index is many short ones.
"""

import asyncio
from typing import Final

from metaq.broker.acks import Answerer
from metaq.broker.handlers.offset import answer_later, knows_end
from metaq.errors import (
    BadRequestError,
    ForbiddenError,
    NotFoundError,
    ServerError,
    UnavailableError,
)
from metaq.model import Offset
from metaq.protocol import texts
from metaq.protocol.commands import Find
from metaq.protocol.encoding import encode_value_line
from metaq.record.runs import encode_runs
from metaq.storage.key_index import field_names
from metaq.storage.key_lookup import KeyQuestion, KeySearch
from metaq.storage.log_state import LogState
from metaq.storage.segment import DamagedSegmentError
from metaq.storage.span_queries import SpanQueries

FINDS_MAX: Final = 8
"""Look-ups that are not answered yet; more are refused."""

WORK_S: Final = 0.05
"""A reply is sent after so much work."""

LIMIT_MAX: Final = 1000
"""Most records of a reply,"""

RECORDS_BYTES_MAX: Final = 1 << 20
"""and most bytes of them, but for a first one that is larger."""


def handle_find(command: Find, answerer: Answerer) -> None:
    """Look records up; the answer comes later.

    Raises:
        BadRequestError: the payload is no key or header, or the limit is 0.
        ForbiddenError: the partition is closed.
        NotFoundError: no put has made this log.
        UnavailableError: this replica does not know yet where it ends, or there are too
            many look-ups.
        ServerError: the log cannot be read.
    """
    context, topic, partition = answerer.context, command.topic, command.partition
    context.counters.cmd_get += 1
    if not command.payload.startswith((b"key=", b"h.")) or command.limit < 1:
        raise BadRequestError("expected key=VALUE or h.NAME=VALUE, and a limit")
    if context.topics.is_closed(topic, partition):
        broker_id = context.config.system.broker_id
        raise ForbiddenError(texts.get_closed(broker_id, partition))
    log = context.topics.find_log(topic, partition)
    if not knows_end(context, log):
        raise UnavailableError(texts.not_settled(topic, partition))
    if log is None:
        raise NotFoundError(texts.no_such_log(topic, partition))
    if log.state in {LogState.OFFLINE, LogState.CLOSED}:
        raise ServerError(f"partition {log.log_id} is {log.state.value}")
    if context.find_count >= FINDS_MAX:
        raise UnavailableError(texts.too_many_finds(FINDS_MAX))
    names = field_names(context.config.topic(topic).index)
    segments = (*log.segments.sealed, log.readable_active())
    search = KeySearch(
        SpanQueries(context.fs, segments, context.made_indexes, log.damage),
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
    clock, log_id = context.clock, log.log_id

    def work() -> bytes:
        over_s = clock.monotonic_s() + WORK_S
        try:
            found = search.run(lambda: clock.monotonic_s() >= over_s)
        except DamagedSegmentError as error:
            at, end = error.damage.offset, segments[-1].end_offset
            text = texts.with_damage(str(error), error, offset=at, end=end)
            raise ServerError(text) from error
        payload = encode_runs(found.records)
        line = encode_value_line(
            len(payload),
            command.opaque,
            next_offset=found.next_offset,
            read_bytes=found.read_bytes,
        )
        return line + payload

    def finish(_done: "asyncio.Future[bytes]") -> None:
        context.find_count -= 1
        for base in search.damaged:
            context.key_builder.distrust((log_id, base, names))

    context.find_count += 1
    done = answer_later(command, work, answerer, size_bytes=RECORDS_BYTES_MAX)
    done.add_done_callback(finish)
