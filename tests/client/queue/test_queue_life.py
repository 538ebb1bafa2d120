"""Start and close of a worker, and its messages after a restart of its broker."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client.errors import (
    ExchangeError,
    NoTopicError,
    OutcomeUnknownError,
    QueueGroupError,
)
from metaq.client.options import ClientOptions, QueueOptions
from metaq.client.queue.work_queue import AsyncQueue
from metaq.errors import ClosedError, ConfigError
from metaq.model import BrokerId
from metaq.protocol.commands import Command, Reply, Settle
from metaq.testing.clock import ManualClock
from metaq.testing.embedded import EmbeddedBroker
from tests.client.queue.conftest import send
from tests.client.queue.test_broker_link import SIZE, Rig, run
from tests.client.worlds import QUICK, WORLDS
from tests.rigs.inside import change_settings
from tests.rigs.waiting import until, wait_until

DROP: dict[str, Any] = {"group": "g", "then": "drop"}
WAIT_S = 60.0
QUICKLY_S = 8.0
"""Half of the time that the end of a block has."""


@pytest.mark.slow
def test_the_end_of_the_block_gives_everything_back(client: Any) -> None:
    """A message that was not handed out is released; one that was is returned."""
    send(client, "single", b"a", b"b")
    with client.queue("single", retry_delays_s=[], **DROP) as queue:
        assert queue.receive(WAIT_S).data == b"a"
    with client.queue("single", group="g") as queue:
        found = {}
        while len(found) < 2:
            message = queue.receive(WAIT_S)
            found[message.data] = message.deliveries
            message.ack()
        assert found == {b"a": 2, b"b": 1}


def test_a_queue_is_started_once_and_not_used_before(client: Any) -> None:
    """Nor after its end."""
    queue = client.queue("single", **DROP)
    with pytest.raises(ClosedError, match="not started"):
        queue.receive(0)
    with queue:
        pass
    with pytest.raises(ClosedError):
        queue.start()


@pytest.mark.slow
def test_a_group_that_is_defined_otherwise_is_refused(client: Any) -> None:
    """With the difference; and so is a group that says nothing of dead letters."""
    with (
        pytest.raises(ConfigError, match="pass dead_letter_topic"),
        client.queue("single", group="new"),
    ):
        pass
    with client.queue("single", **DROP):
        pass
    with (
        pytest.raises(QueueGroupError, match="lease_ms is 30000, got 5000"),
        client.queue("single", group="g", lease_s=5),
    ):
        pass
    nowhere = client.queue("nowhere", **DROP)
    with pytest.raises(NoTopicError):
        nowhere.start(timeout=2)
    with pytest.raises(ClosedError):
        nowhere.receive(5)


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 0},
        {"lease_s": 0.5},
        {"deliveries_max": 0},
        {"then": "keep"},
        {"then": "drop", "dead_letter_topic": "dead"},
        {"retry_delays_s": [-1]},
        {"ordered_by": "tag"},
        {"start": "middle"},
    ],
)
def test_an_option_that_cannot_be_is_named(client: Any, options: Any) -> None:
    """Before anything is asked."""
    with pytest.raises(ConfigError, match=next(iter(options))[:4]):
        client.queue("single", group="g", **options)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sync", "async"])
def test_a_worker_keeps_what_it_has_over_a_restart(
    world: str, broker: EmbeddedBroker
) -> None:
    """It says so first; the rest of the messages comes after that."""
    with WORLDS[world](**broker.client_options, **QUICK) as client:
        send(client, "single", b"a", b"b")
        with client.queue("single", prefetch=1, **DROP) as queue:
            first = queue.receive(WAIT_S)
            # However long the worker takes to find it again.
            change_settings(broker, queueReclaimMs="60000")
            broker.restart()
            second = None
            first.ack()
            while second is None:
                second = queue.receive(WAIT_S)
            assert (second.data, second.deliveries) == (b"b", 1)
            second.ack()
            assert queue.statistics().lost_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_worker_whose_group_was_deleted_hears_of_it(
    client: Any, caplog: pytest.LogCaptureFixture, *, is_made_again: bool
) -> None:
    """From its acks, within seconds and not at the end of the lease; nor is the end of
    the block waited for, or a line logged for each renewal."""
    send(client, "single", *[b"%d" % n for n in range(9)])
    with client.queue("single", lease_s=60.0, **DROP) as queue:
        first, second, _third = [queue.receive(WAIT_S) for _ in range(3)]
        client.admin().delete_queue_group("g")
        if is_made_again:
            client.admin().create_queue_group("g", topic="single", then="drop")
        time.sleep(2.5)  # the broker may not have heard of it yet
        with pytest.raises(QueueGroupError, match="it was deleted, or created again"):
            first.ack(15.0)
        with pytest.raises(QueueGroupError, match="it was deleted, or created again"):
            second.ack(1.0)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < QUICKLY_S
    assert caplog.text.count("not settled") < 9


@pytest.mark.slow
def test_a_worker_whose_topic_was_deleted_says_so_once(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits, for the topic may be made again; its log says what for."""
    admin = client.admin()
    admin.create_topic("short", partitions=1)
    with client.queue("short", group="workers", then="drop") as queue:
        admin.delete_topic("short")
        text = "no broker serves the topic: group=workers topic=short"
        wait_until(lambda: text in caplog.text)
        admin.create_topic("short", partitions=1)
        send(client, "short", b"new")
        assert queue.receive(10.0).data == b"new"
        assert caplog.text.count(text) == 1


def test_what_each_turn_of_a_loop_says_gathers() -> None:
    """A loop over messages acks one in each turn of the event loop."""
    count = 20

    async def scenario(rig: Rig) -> None:
        async with scripted_queue(rig, count) as queue:
            take_count = len(rig.script.takes)
            rig.give(await rig.take(take_count), [n * SIZE for n in range(count)])
            acks = list[asyncio.Future[None]]()
            async for message in queue:
                acks.append(message.ack_nowait())
                if len(acks) == count:
                    break
            await asyncio.gather(*acks)
            assert len(rig.script.said) == count
            assert rig.script.settle_count < count / 2  # each moment sends some

    run(scenario)


@pytest.mark.parametrize("ordered_by", [None, "key"])
def test_what_is_said_makes_room_in_the_next_turn(ordered_by: str | None) -> None:
    """The next take waits for nothing; the acks gather, unless the group is ordered."""

    async def scenario(rig: Rig) -> None:
        async with scripted_queue(rig, 4, ordered_by) as queue:
            take_count = len(rig.script.takes)
            rig.give(await rig.take(take_count), [0, SIZE])
            first, second = await queue.receive(), await queue.receive()
            assert first is not None
            assert second is not None
            acks = [first.ack_nowait()]
            await asyncio.sleep(0)
            assert queue.statistics().held_count == 1
            (connection,) = rig.pool.statistics().connections
            if ordered_by is not None:
                assert connection.in_flight_count == 2  # the take, and the settle
            acks.append(second.ack_nowait())
            await asyncio.sleep(0)
            assert queue.statistics().held_count == 0
            await asyncio.gather(*acks)
            assert len(rig.script.said) == 2

    run(scenario)


@pytest.mark.parametrize("runs_handler", [True, False])
def test_a_full_prefetch_lets_others_have_their_turns(*, runs_handler: bool) -> None:
    """Also where neither the loop over the messages nor the handler ever waits."""
    count, turns = 20, list[None]()

    async def others() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def scenario(rig: Rig) -> None:
        async with scripted_queue(rig, count) as queue:
            take_count, got = len(rig.script.takes), list[int]()
            rig.give(await rig.take(take_count), [n * SIZE for n in range(count)])
            await until(lambda: queue.statistics().taken_count == count)
            other = asyncio.create_task(others())

            async def handle(message: Any) -> None:
                got.append(len(turns))
                if len(got) == count:
                    running.cancel()

            async def loop() -> None:
                async for message in queue:
                    await handle(message)

            running = asyncio.create_task(queue.run(handle) if runs_handler else loop())
            await asyncio.gather(running, return_exceptions=True)
            other.cancel()
            assert got[-1] - got[0] >= count - 1

    run(scenario)


def test_a_worker_whose_topic_became_an_exchange_asks_for_no_more() -> None:
    """Its take is ended, what it has is settled, and no other broker is asked."""

    async def scenario(rig: Rig) -> None:
        async with scripted_queue(rig, 2) as queue:
            take_count = len(rig.script.takes)
            rig.give(await rig.take(take_count), [0])
            message = await queue.receive()
            assert message is not None
            await rig.take(take_count + 1)
            metadata: Any = rig.parts.context.metadata
            metadata.snapshot.exchanges = frozenset({"orders"})
            for _ in range(2):
                metadata.snapshot.puts["orders"][BrokerId(1)] = None
                for listener in [*metadata.listeners]:
                    listener(metadata.snapshot)
            last = await rig.take(take_count + 2)
            assert last.count == 0
            rig.give(rig.script.takes[take_count + 1], [])
            await message.ack()
            with pytest.raises(ExchangeError):
                await queue.receive()
            assert len(rig.script.takes) == take_count + 3

    run(scenario)


def test_the_end_of_a_worker_ends_its_takes_its_settles_and_its_tasks() -> None:
    """A settle that its broker has not answered by then is in doubt."""

    async def scenario(rig: Rig) -> None:
        def answer(command: Command) -> Reply | None:
            is_settle = isinstance(command, Settle)
            return None if is_settle else rig.script.answer(command)

        rig.broker.answer = answer
        async with scripted_queue(rig, 1) as queue:
            take_count = len(rig.script.takes)
            rig.give(await rig.take(take_count), [0])
            message = await queue.receive()
            assert message is not None
            future = message.ack_nowait()
            await queue.close(0.1)
        assert isinstance(future.exception(), OutcomeUnknownError)
        await until(lambda: rig.script.takes[-1].count == 0)
        await until(
            lambda: (
                not any(
                    each.get_name().endswith(" of g") for each in asyncio.all_tasks()
                )
            )
        )

    run(scenario)


def scripted_queue(
    rig: Rig, prefetch: int, ordered_by: str | None = None
) -> AsyncQueue:
    """Return a worker in the place of the rig's link."""

    async def define() -> Any:
        return SimpleNamespace(generation=1, ordered_by=ordered_by)

    async def find(_topic: str, **_more: Any) -> None:
        return None

    def listen(listener: Any) -> Any:
        listeners: list[Any] = context.metadata.listeners
        listeners.append(listener)
        return lambda: listener in listeners and listeners.remove(listener)

    rig.task.cancel()
    context: Any = rig.parts.context
    context.clock, context.options = ManualClock(), ClientOptions(**QUICK)
    context.draw_token, context.metadata.topic = (lambda: "w-1"), find
    context.metadata.listeners, context.metadata.add_listener = [], listen
    context.metadata.snapshot.puts = {"orders": {BrokerId(0): None}}
    context.metadata.snapshot.exchanges = frozenset()
    options = QueueOptions(prefetch=prefetch)
    return AsyncQueue(context, define, topic="orders", group="g", options=options)
