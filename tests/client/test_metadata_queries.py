"""Requests about one partition: answers of both brokers, retries, errors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from metaq.client import AsyncClient
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries, insist
from metaq.client.errors import CannotAnswerError
from metaq.errors import (
    ClosedError,
    NoBrokerError,
    NoRecordError,
    RemoteProtocolError,
    UnavailableError,
)
from metaq.model import BrokerId, Millis, Offset, TopicPartition
from metaq.protocol.commands import Command, OffsetQuery, Reply, Result
from metaq.record.layout import HEADER_BYTES
from tests.brokers import AnyBroker, StartBroker
from tests.client.scripted import ScriptedBroker, ok
from tests.client.worlds import parts_of

ONE_BROKER = {"ScriptedBroker": "it answers as the test says"}
T = TypeVar("T")
PATIENCE_S = 60.0
SHORT_S = 0.5
"""Of waits that are bound to time out."""
RECORD_BYTES = HEADER_BYTES + 2
COUNT = 10
END = Offset(COUNT * RECORD_BYTES)
FIRST, EMPTY = (TopicPartition("test", BrokerId(0), n) for n in range(2))


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    found = start_broker({"test": 2})
    found.put(*[b"%02d" % number for number in range(COUNT)])
    return found


def ask(
    options: dict[str, Any], work: Callable[[ClientContext, float], Awaitable[T]]
) -> T:
    async def main() -> T:
        async with AsyncClient(**options) as client:
            context = parts_of(client)
            deadline_s = context.clock.monotonic_s() + PATIENCE_S
            await context.metadata.topic("test", deadline_s=deadline_s)
            return await work(context, deadline_s)

    return asyncio.run(main())


def test_a_log_has_a_start_and_an_end(broker: AnyBroker) -> None:
    """One that the broker has not made yet has neither."""

    async def both(context: ClientContext, deadline_s: float) -> list[Any]:
        return [
            await LogQueries(context, each, deadline_s).ends()
            for each in (FIRST, EMPTY)
        ]

    assert ask(broker.client_options, both) == [(0, END), None]


def test_a_slice_is_the_bytes_of_the_log(broker: AnyBroker) -> None:
    """As many as asked for; none after the log end."""

    async def read(context: ClientContext, deadline_s: float) -> list[bytes]:
        return [
            await LogQueries(context, FIRST, deadline_s).slice(Offset(at), size_bytes)
            for at, size_bytes in ((RECORD_BYTES, RECORD_BYTES), (END, 100))
        ]

    one, none = ask(broker.client_options, read)
    assert (len(one), one[HEADER_BYTES:], none) == (RECORD_BYTES, b"01", b"")


def test_a_message_says_when_it_was_stored(broker: AnyBroker) -> None:
    """None at the log end; ids of a Java broker begin with the start of its machine."""

    async def times(context: ClientContext, deadline_s: float) -> list[Any]:
        return [
            await LogQueries(context, FIRST, deadline_s).time_of(Offset(at))
            for at in (0, RECORD_BYTES, END)
        ]

    first, second, none = ask(broker.client_options, times)
    assert none is None
    if broker.has_extensions:
        assert first <= second
    else:
        assert (first, second) == (None, None)


def test_counts_times_and_boundaries_are_those_of_the_log(broker: AnyBroker) -> None:
    """MetaQ 1.4 keeps none of them, and the error says which broker that is."""

    async def known(context: ClientContext, deadline_s: float) -> list[Any]:
        start = Offset(2 * RECORD_BYTES)
        log = LogQueries(context, FIRST, deadline_s)
        return [
            await log.count(start, END),
            await log.offset_at(Millis(0)),
            await log.cut(start, END, 3),
        ]

    if not broker.has_extensions:
        with pytest.raises(CannotAnswerError, match=r"test/0-0: .* keeps no counts"):
            ask(broker.client_options, known)
        return
    count, at, inner = ask(broker.client_options, known)
    assert (count, at) == (COUNT - 2, 0)
    assert list(inner) == sorted(set(inner))
    assert all(2 * RECORD_BYTES < each < END for each in inner)
    assert all(each % RECORD_BYTES == 0 for each in inner)


def test_a_count_that_begins_inside_a_record_is_refused(broker: AnyBroker) -> None:
    """Both offsets are boundaries, and a number of something else helps nobody."""

    async def count(context: ClientContext, deadline_s: float) -> int:
        return await LogQueries(context, FIRST, deadline_s).count(Offset(1), END)

    error = NoRecordError if broker.has_extensions else CannotAnswerError
    with pytest.raises(error):
        ask(broker.client_options, count)


@pytest.mark.slow
def test_a_partition_of_a_broker_that_is_not_there_is_an_error_at_the_deadline(
    broker: AnyBroker,
) -> None:
    """Its number is named."""
    far = TopicPartition("test", BrokerId(7), 0)

    async def find(context: ClientContext, _deadline_s: float) -> None:
        soon_s = context.clock.monotonic_s() + SHORT_S
        await LogQueries(context, far, soon_s).ends()

    with pytest.raises(NoBrokerError, match="broker 7 is not registered"):
        ask(broker.client_options, find)


@pytest.mark.slow
def test_what_waits_for_a_broker_that_is_not_there_ends_with_the_client(
    broker: AnyBroker,
) -> None:
    """Not at its deadline, which is long."""
    far = TopicPartition("test", BrokerId(7), 0)

    async def main() -> None:
        async with AsyncClient(**broker.client_options) as client:
            context = parts_of(client)
            deadline_s = context.clock.monotonic_s() + PATIENCE_S
            await context.metadata.topic("test", deadline_s=deadline_s)

            async def reach(*, deadline_s: float) -> None:
                await context.connect_leader(far.broker_id, deadline_s)

            works = [
                asyncio.ensure_future(LogQueries(context, far, deadline_s).ends()),
                asyncio.ensure_future(insist(context, reach, deadline_s)),
            ]
            await asyncio.sleep(SHORT_S)
            assert not any(each.done() for each in works)
        for each in works:
            with pytest.raises(ClosedError):
                await asyncio.wait_for(each, 10)

    asyncio.run(main())


def ask_scripted(
    answer: Callable[[OffsetQuery], Reply], *, times: int = 1, seconds: float = SHORT_S
) -> tuple[list[Any], int]:
    """Ask for an offset; return the outcomes, and how many connections there were."""
    partition = TopicPartition("test", BrokerId(7), 0)

    def reply(command: Command) -> Reply | None:
        return answer(command) if isinstance(command, OffsetQuery) else ok(command)

    async def main() -> tuple[list[Any], int]:
        async with ScriptedBroker() as broker:
            broker.answer = reply
            outcomes: list[Any] = []
            async with AsyncClient(brokers=[str(broker.address)]) as client:
                for _ in range(times):
                    deadline_s = parts_of(client).clock.monotonic_s() + seconds
                    log = LogQueries(parts_of(client), partition, deadline_s)
                    question = log.nearest(Offset(5))
                    outcomes += await asyncio.gather(question, return_exceptions=True)
            return outcomes, broker.accepted_count

    return asyncio.run(main())


def test_a_refusal_that_passes_is_asked_again() -> None:
    """503 is of a broker that starts or ends."""
    left = [503, 503, 200]
    found, _ = ask_scripted(
        lambda ask: Result(left.pop(0), b"40", ask.opaque), seconds=PATIENCE_S
    )
    assert (found, left) == ([40], [])


@pytest.mark.slow
def test_a_refusal_that_goes_on_is_the_outcome() -> None:
    """In the broker's own words."""
    (found,), _ = ask_scripted(
        lambda ask: Result(503, b"busy", ask.opaque), seconds=2.0
    )
    assert isinstance(found, UnavailableError)
    assert "busy" in str(found)


def test_an_answer_that_cannot_be_closes_the_connection() -> None:
    """Its next answer could be as wrong; the next question has another one."""
    bodies = [b"wat", b"40"]
    found, connection_count = ask_scripted(
        lambda ask: Result(200, bodies.pop(0), ask.opaque), times=2, seconds=PATIENCE_S
    )
    assert isinstance(found[0], RemoteProtocolError)
    assert (found[1], connection_count) == (40, 2)
