"""An impossible reply is dropped, and its connection is closed."""

import asyncio
import re
import struct
from collections.abc import Callable

import pytest

from metaq.client import AsyncClient
from metaq.client.errors import OutcomeUnknownError
from metaq.errors import CorruptRecordError, MetaqError, RemoteProtocolError
from metaq.protocol.commands import (
    Command,
    Get,
    Mput,
    OffsetQuery,
    Put,
    Reply,
    Result,
    Stats,
    Value,
)
from tests.client.scripted import ScriptedBroker, ok
from tests.client.worlds import QUICK
from tests.rigs.waiting import until

ONE_BROKER = {"ScriptedBroker": "replies that no broker gives"}


def lying(kinds: type | tuple[type, ...], reply: Callable[[int], Reply]) -> Callable:
    """Return the answers of a broker with false answers to some commands."""

    def answer(command: Command) -> Reply | None:
        if isinstance(command, kinds):
            return reply(command.opaque)
        if isinstance(command, Stats) and command.item == "topics":
            return Result(200, b"STATS\r\ntest *Empty*\r\nEND\r\n", command.opaque)
        return ok(command)

    return answer


def connected(broker: ScriptedBroker) -> AsyncClient:
    return AsyncClient(brokers=[f"127.0.0.1:{broker.address.port}"], **QUICK)


@pytest.mark.parametrize(
    ("kinds", "body", "status"),
    [
        (OffsetQuery, b"-1", 200),
        (OffsetQuery, b"%d" % 2**63, 200),
        (Get, b"-5", 301),
        (Get, b"no [damaged from=7 to=5]", 500),
        (Get, b"no [damaged from=1000 to=2000]", 500),
    ],
)
def test_questions_end_with_an_error_and_the_connection(
    kinds: type, body: bytes, status: int
) -> None:
    """The error shows what came."""

    async def scenario() -> None:
        async with ScriptedBroker() as broker, connected(broker) as client:
            broker.answer = lying(kinds, lambda opaque: Result(status, body, opaque))
            asking = (
                client.get("test", "7-0", 40, 100, timeout=20)
                if kinds is Get
                else anext(client.browse("test", partitions=["7-0"]))
            )
            with pytest.raises(RemoteProtocolError):
                await asking
            await until(lambda: broker.ends)

    asyncio.run(scenario())


@pytest.mark.parametrize("body", ["1 5 0", "1 0 -1", f"1 0 {2**63}", "thanks"])
def test_a_put_whose_receipt_cannot_be_is_of_unknown_outcome(body: str) -> None:
    """It went to partition 0; nothing of the receipt is believed."""

    async def scenario() -> None:
        async with ScriptedBroker() as broker, connected(broker) as client:
            broker.answer = lying(
                (Put, Mput), lambda opaque: Result(200, body.encode(), opaque)
            )
            options = {"retry_unknown": False, "timeout_s": 1.0}
            async with client.producer(**options) as producer:
                with pytest.raises(MetaqError) as caught:
                    await producer.send("test", b"x", partition="7-0")
            assert isinstance(caught.value, OutcomeUnknownError)
            assert "expected 'id 0 offset', got" in str(caught.value)
            await until(lambda: broker.ends)

    asyncio.run(scenario())


def test_a_consumer_uses_nothing_of_it_and_says_so() -> None:
    """It tries again, and `health` reports why nothing comes."""

    async def scenario() -> None:
        def answer(command: Command) -> Reply | None:
            if isinstance(command, OffsetQuery):
                return Result(200, b"0", command.opaque)
            if isinstance(command, Get):
                return Result(301, b"-7", command.opaque)
            return ok(command)

        async with ScriptedBroker() as broker, connected(broker) as client:
            broker.answer = answer
            async with client.consumer("g", ["test"], partitions=["7-0"]) as consumer:
                wanted = "expected an offset, got '-7'"
                await until(lambda: wanted in " ".join(consumer.health().problems))
                await until(lambda: broker.ends)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("filler", [bytes, lambda size: b"x" * min(size, 100)])
def test_a_consumer_ends_over_a_header_that_claims_too_much(
    filler: Callable[[int], bytes],
) -> None:
    """However much comes with it; the error and `health` name both numbers."""
    head = struct.pack(">iiqi", 2_000_000_000, 123, 5, 0)
    wanted = "record of 2000000020 bytes (at most 67108864 are fetched)"

    async def scenario() -> None:
        def answer(command: Command) -> Reply | None:
            if isinstance(command, OffsetQuery):
                return Result(200, b"0", command.opaque)
            if isinstance(command, Get):
                return Value(head + filler(command.max_size), command.opaque)
            return ok(command)

        async with ScriptedBroker() as broker, connected(broker) as client:
            broker.answer = answer
            async with client.consumer("g", ["test"], partitions=["7-0"]) as consumer:
                with pytest.raises(CorruptRecordError, match=re.escape(wanted)):
                    await consumer.receive(timeout=60)
                health = consumer.health()
                assert health.state.value == "failed"
                assert wanted in " ".join(health.problems)

    asyncio.run(scenario())
