"""A call of a transaction that was never awaited: it is not committed without it."""

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

import pytest

from metaq.client import (
    AsyncClient,
    OutgoingMessage,
    TransactionError,
    TransactionRolledBackError,
)
from tests.brokers import PYTHON, AnyBroker, StartBroker
from tests.client.worlds import QUICK

ONE_BROKER = {
    "test_an_exactly_once_block_does_not_move_the_offsets_past_a_lost_message": (
        "exactly once is not written to MetaQ 1.4, which has no work queues either"
    )
}

Call = Coroutine[Any, Any, object]


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1, "out": 1})


def connect(broker: AnyBroker) -> AsyncClient:
    return AsyncClient(**broker.client_options, **QUICK)


def test_a_transaction_is_rolled_back_in_place_of_the_commit(broker: AnyBroker) -> None:
    """The error has the number of the calls of each name, and what to write."""

    async def main() -> list[Call]:
        async with (
            connect(broker) as client,
            client.producer() as producer,
            producer.transaction() as tx,
        ):
            await tx.send("test", b"awaited")
            calls: list[Call] = [tx.send("test", b"lost") for _ in range(2)]
            calls += [tx.send_many("test", [b"lost"]), tx.ack(message)]
        return calls

    message: Any = None
    wanted = "1 of ack, 2 of send, 1 of send_many; write `await tx.ack(...)`"
    with pytest.raises(TransactionRolledBackError, match=re.escape(wanted)) as caught:
        asyncio.run(main())
    assert isinstance(caught.value.__cause__, TransactionError)
    close_calls(caught.value)
    assert broker.stored() == []


def test_an_xa_transaction_is_neither_prepared_nor_committed(broker: AnyBroker) -> None:
    """It is rolled back, and the next one knows nothing of the calls before it."""

    async def main() -> None:
        async with connect(broker) as client, client.xa(qualifier="billing") as xa:
            for number, end in enumerate((xa.prepare, xa.commit)):
                await xa.begin(xa.xid(1, f"lost-{number}"))
                await xa.send("test", b"awaited")
                call = xa.send("test", b"lost")
                with pytest.raises(TransactionRolledBackError, match="1 of send;"):
                    await end()
                call.close()
                await xa.begin(xa.xid(1, f"whole-{number}"))
                await xa.send("test", b"%d" % number)
                await xa.commit()

    asyncio.run(main())
    broker.assert_stored([b"0", b"1"])


def test_calls_that_run_later_are_not_refused(broker: AnyBroker) -> None:
    """Those of tasks are, like those of `gather`, awaited."""

    async def main() -> None:
        async with (
            connect(broker) as client,
            client.producer() as producer,
            producer.transaction() as tx,
        ):
            async with asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(tx.send("test", b"%d" % number))
            await asyncio.gather(tx.send("test", b"3"), tx.send("test", b"4"))

    asyncio.run(main())
    assert sorted(broker.stored()) == [b"%d" % number for number in range(5)]


def test_an_exactly_once_block_does_not_move_the_offsets_past_a_lost_message(
    broker: AnyBroker,
) -> None:
    """The batch is delivered again, and written once."""
    if broker.kind != PYTHON:
        return
    broker.put(b"1")
    faults: list[str] = []

    async def main() -> None:
        async with (
            connect(broker) as client,
            client.producer() as producer,
            client.consumer(
                "group", ["test"], start="earliest", commit_interval_s=None
            ) as consumer,
        ):
            batches = consumer.batches(max_count=1, max_wait_s=5)
            batch = await anext(batches)
            for make in (
                lambda tx: tx.send("out", b"lost"),
                lambda tx: tx.send_many("out", [OutgoingMessage(b"lost")]),
            ):
                with pytest.raises(TransactionError) as caught:
                    async with producer.exactly_once(batch) as tx:
                        call = make(tx)
                call.close()
                faults.append(str(caught.value))
                batch = await anext(batches)
            async with producer.exactly_once(batch) as tx:
                await tx.send("out", batch[0].data)
            await batches.aclose()

    asyncio.run(main())
    assert "1 of send; write `await tx.send(...)`" in faults[0]
    assert "1 of send_many; write `await tx.send_many(...)`" in faults[1]
    assert broker.stored("out") == [b"1"]


def close_calls(error: BaseException) -> None:
    """Close the coroutines in the frames of an error, of which Python would warn."""
    trace = error.__traceback__
    while trace is not None:
        for call in trace.tb_frame.f_locals.get("calls", ()):
            call.close()
        trace = trace.tb_next
