"""The producer in virtual time, against brokers that fail on cue."""

import asyncio
import gc
import sys
from typing import Any

import pytest

from metaq.client.errors import BufferFullError, OutcomeUnknownError
from metaq.client.names import check_topic
from metaq.client.partitioner import KeyHash, OutgoingMessage, Pinned, RoundRobin
from metaq.client.produce.batches import Batch, SendFuture, SendResult
from metaq.client.produce.partition_sender import PartitionSender
from metaq.errors import (
    ClosedError,
    ConfigError,
    NotSentError,
    RequestTimeoutError,
    ServerError,
)
from metaq.model import TopicPartition
from metaq.protocol.commands import Mput, Put
from metaq.protocol.version import Capabilities
from metaq.record.flags import encode_payload
from tests.client.producing import (
    FORGETFUL,
    JAVA,
    OURS,
    Act,
    StandInBroker,
    at,
    producing,
)
from tests.rigs.virtual_time import run_virtually


def test_a_message_is_acknowledged_with_its_place() -> None:
    """Id, partition and offset are those of the broker's reply."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker) as world:
            first = await world.producer.send("test", b"hello")
            second = await world.producer.send("test", b"again")
            assert first == SendResult(first.message_id, at(0), first.offset)
            assert (first.offset, second.offset) == (0, 25)
            assert second.message_id == first.message_id + 1
        assert broker.stored() == [b"hello", b"again"]

    run_virtually(main())


@pytest.mark.parametrize("capabilities", [OURS, FORGETFUL, JAVA])
def test_order_is_kept_in_many_batches(capabilities: Capabilities) -> None:
    """Messages lie in the order of the calls; results name their own records."""

    async def main() -> None:
        broker = StandInBroker(capabilities=capabilities)
        async with producing(broker, batch_count_max=7) as world:
            sent = [b"%d" % n for n in range(500)]
            futures = [await world.producer.send_nowait("test", m) for m in sent]
            results = [await future for future in futures]
            assert broker.stored() == sent
            sizes = [20 + len(m) for m in sent]
            assert [r.offset for r in results] == [sum(sizes[:n]) for n in range(500)]
            ids = [r.message_id for r in results]
            assert ids == sorted(set(ids))
            many = await world.producer.send_many("test", sent)
            assert [r.offset for r in many] == [
                sum(sizes) + sum(sizes[:n]) for n in range(500)
            ]
            assert list(many)[-1] == many[-1] == many[499]
            assert many[3:5] == [many[3], many[4]]
        kinds = {type(command) for command in broker.commands}
        assert kinds == ({Put} if capabilities is JAVA else {Mput})

    run_virtually(main())


def test_batches_grow_while_others_are_in_flight() -> None:
    """A slow broker gets few large batches; no delay has to be chosen for that."""

    async def main() -> None:
        broker = StandInBroker()
        broker.delay_s = 0.1
        async with producing(broker, in_flight_batches_max=1) as world:
            for n in range(100):
                await world.producer.send_nowait("test", b"%d" % n)
                await asyncio.sleep(0.001)
            await world.producer.flush()
            assert world.producer.statistics().acknowledged_count == 100
        assert len(broker.commands) < 6

    run_virtually(main())


def test_a_lingering_batch_waits_for_company_or_until_it_is_full() -> None:
    """With linger_s a lone batch leaves late; a full one at once; flush ends it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        broker = StandInBroker()
        async with producing(broker, linger_s=1.0, batch_count_max=3) as world:
            await world.producer.prepare("test")
            start_s = loop.time()
            for n in range(4):
                await world.producer.send_nowait("test", b"%d" % n)
            await asyncio.sleep(0.5)
            assert broker.stored() == [b"0", b"1", b"2"]
            await asyncio.sleep(0.6)
            assert broker.stored()[3:] == [b"3"]
            await world.producer.send_nowait("test", b"4")
            await world.producer.flush()
            assert broker.stored()[4:] == [b"4"]
            assert loop.time() - start_s < 1.5

    run_virtually(main())


# -- partitions -----------------------------------------------------------------------


def test_what_waits_costs_nothing_for_the_partitions_that_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While one message waits for its answer nothing looks at the others' queues."""
    looks: list[TopicPartition] = []
    take_late = PartitionSender.take_late

    def look(self: PartitionSender, now_s: float) -> list[Batch]:
        looks.append(self.partition)
        return take_late(self, now_s)

    monkeypatch.setattr(PartitionSender, "take_late", look)

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker, partitions=100, retry_unknown=False) as world:
            for n in range(100):
                await world.producer.send("test", b"x", partition=f"0-{n}")
            broker.acts.append(Act.SWALLOW)
            with pytest.raises(OutcomeUnknownError):
                await world.producer.send("test", b"x", partition="0-7", timeout=20.0)

    run_virtually(main())
    assert set(looks) == {at(7)}
    assert len(looks) <= 5


def test_a_broker_that_goes_costs_no_walk_over_the_others_partitions() -> None:
    """Messages that wait for it in each partition move with a few looks each."""
    count = 100

    async def main() -> None:
        up, gone = StandInBroker(0), StandInBroker(1)
        async with producing(
            up, gone, partitions=count, selector=RoundRobin(), timeout_s=30.0
        ) as world:
            send = world.producer.send_nowait
            for _ in range(2 * count):
                await send("test", b"x")
            await world.producer.flush()
            world.pool.looks = 0
            gone.go_away()
            sent = [await send("test", b"x") for _ in range(2 * count)]
            places = [(await each).partition for each in sent]
            assert {place.broker_id for place in places} == {0}
            assert world.producer.statistics().moved_count == count
            assert world.pool.looks <= 20 * count

    run_virtually(main())


def test_messages_without_a_key_go_round() -> None:
    """Each partition in turn, the second one first."""

    async def main() -> None:
        async with producing(StandInBroker(), partitions=3) as world:
            results = [await world.producer.send("test", b"x") for _ in range(4)]
            assert [r.partition for r in results] == [at(1), at(2), at(0), at(1)]

    run_virtually(main())


def test_key_partition_and_selector_choose() -> None:
    """A key has its partition, a named partition wins, a selector is asked."""

    async def main() -> None:
        async with producing(StandInBroker(), partitions=8) as world:
            send = world.producer.send
            keyed = {(await send("test", b"x", key="user-1")).partition for _ in "abc"}
            assert len(keyed) == 1
            pinned = await send("test", b"x", key="user-1", partition="0-5")
            assert pinned.partition == at(5)
        pin = Pinned("0-3")
        async with producing(StandInBroker(), partitions=8, selector=pin) as world:
            assert (await world.producer.send("test", b"x")).partition == at(3)

        def last(_topic: str, partitions: Any, message: OutgoingMessage) -> Any:
            assert message.attribute == "k=v"
            return partitions[-1]

        async with producing(StandInBroker(), partitions=8, selector=last) as world:
            result = await world.producer.send("test", b"x", attribute="k=v")
            assert result.partition == at(7)

        def astray(*_: object) -> Any:
            return at(0, topic="other")

        async with producing(StandInBroker(), selector=astray) as world:
            with pytest.raises(ConfigError, match="of test, got other/0-0"):
                await world.producer.send("test", b"x")

        for wrong in (None, "0-0", 3):
            chosen: Any = wrong
            async with producing(StandInBroker(), selector=lambda *_: chosen) as world:  # noqa: B023
                with pytest.raises(ConfigError, match=f"of test, got {wrong}$"):
                    await world.producer.send("test", b"x")

    run_virtually(main())


def test_a_flush_ends_though_an_interrupt_kept_the_delivery_from_being_told() -> None:
    """A message unknown to the delivery has its deadline, with no broker there."""

    async def main() -> None:
        broker, loop = StandInBroker(), asyncio.get_running_loop()
        async with producing(broker, timeout_s=1) as world:
            append, call_soon = world.producer.accumulator.append, loop.call_soon

            def interrupted(*_words: Any, **_options: Any) -> asyncio.Handle:
                loop.call_soon = call_soon  # type: ignore[method-assign]
                raise KeyboardInterrupt

            await world.producer.prepare("test")
            broker.go_away()
            loop.call_soon = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                append("test", b"x")
            await world.producer.flush()
            assert sum(world.producer.statistics().failed.values()) == 1

    run_virtually(main())


def test_a_closed_pool_is_not_asked_in_a_busy_loop() -> None:
    """The messages fail at their deadline; time passes in between."""

    async def main() -> None:
        asked = 0

        async def get(*_args: object, **_kwargs: object) -> Any:
            nonlocal asked
            asked += 1
            raise ClosedError("the pool is closed")

        async with producing(StandInBroker(), timeout_s=1) as world:
            world.pool.get = get  # type: ignore[method-assign]
            with pytest.raises(NotSentError):
                await world.producer.send("test", b"x")
        assert asked <= 25

    run_virtually(main())


def test_a_list_with_keys_keeps_its_results_in_order() -> None:
    """Messages are grouped by partition; results come as the list went in."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker, partitions=4) as world:
            messages = [
                OutgoingMessage(b"%03d" % n, key=None if n % 5 == 0 else f"k{n % 7}")
                for n in range(60)
            ]
            results = await world.producer.send_many("test", messages)
            assert len(results) == 60
            offsets: dict[TopicPartition, list[int]] = {}
            for result in results:
                offsets.setdefault(result.partition, []).append(result.offset)
            for message, result in zip(messages, results, strict=True):
                index = sorted(offsets[result.partition]).index(result.offset)
                stored = broker.stored(result.partition.partition)[index]
                assert stored == encode_payload(message.data, key=message.key)[0]
            assert list(await world.producer.send_many("test", [])) == []

    run_virtually(main())


def test_what_certainly_was_not_stored_goes_elsewhere() -> None:
    """A closed partition, and an unreachable broker, delay nothing for long."""

    async def main() -> None:
        closed, other = StandInBroker(0), StandInBroker(1)
        closed.default = Act.CLOSED
        async with producing(closed, other) as world:
            results = await asyncio.gather(
                *(world.producer.send("test", b"%d" % n) for n in range(20))
            )
            assert {r.partition for r in results} == {at(0, broker=1)}
            assert world.producer.statistics().moved_count > 0
            closed.go_away()
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            for n in range(6):
                await world.producer.send("test", b"later %d" % n)
            assert loop.time() - start_s < 2
        assert closed.stored() == []
        assert sorted(other.stored()[:20], key=int) == [b"%d" % n for n in range(20)]

    run_virtually(main())


def test_keyed_and_pinned_messages_wait_for_their_partition() -> None:
    """They do not move; when the broker is back in time, nothing is lost."""

    async def main() -> None:
        here, away = StandInBroker(0), StandInBroker(1)
        away.go_away()
        async with producing(here, away) as world:
            future = await world.producer.send_nowait("test", b"x", partition="1-0")
            await asyncio.sleep(3)
            assert not future.done()
            away.come_back()
            assert (await future).partition == at(0, broker=1)

    run_virtually(main())


def test_keys_of_a_vanished_broker_move_or_wait_as_chosen() -> None:
    """KeyHash goes by who is there; with wait=True by who was ever there."""

    async def place(selector: KeyHash, vanish: bool) -> list[Any]:
        brokers = [StandInBroker(n) for n in range(3)]
        async with producing(*brokers, selector=selector) as world:
            await world.producer.prepare("test")
            if vanish:
                world.only(*brokers[1:])
            futures = [
                await world.producer.send_nowait("test", b"x", key=f"k{n}")
                for n in range(30)
            ]
            await asyncio.sleep(1)
            if vanish and selector.sees_absent:
                assert not all(future.done() for future in futures)
            world.everybody()
            return [(await future).partition for future in futures]

    async def main() -> None:
        all_here = await place(KeyHash(), vanish=False)
        moved = await place(KeyHash(), vanish=True)
        assert at(0, broker=0) not in moved
        for before, after in zip(all_here, moved, strict=True):
            assert before == after or before == at(0, broker=0)
        assert await place(KeyHash(wait=True), vanish=True) == all_here

    run_virtually(main())


def test_a_new_address_is_followed() -> None:
    """A broker that comes back elsewhere gets what is still to be sent."""

    async def main() -> None:
        old, new = StandInBroker(0), StandInBroker(0)
        async with producing(old) as world:
            await world.producer.send("test", b"a")
            old.go_away()
            future = await world.producer.send_nowait("test", b"b")
            await asyncio.sleep(1)
            new.address = type(new.address)("elsewhere", 1)
            world.pool.brokers[new.address] = new
            world.only(new)
            await future
        assert (old.stored(), new.stored()) == ([b"a"], [b"b"])

    run_virtually(main())


# -- room, flush, close ---------------------------------------------------------------


def test_room_is_bounded_and_waited_for() -> None:
    """With "block" a send waits for room, with "raise" it says that there is none."""

    async def main() -> None:
        broker = StandInBroker()
        broker.delay_s = 0.5
        async with producing(broker, buffer_count_max=3) as world:
            futures = [await world.producer.send_nowait("test", b"x") for _ in range(9)]
            assert sum(not future.done() for future in futures) <= 3
            await world.producer.flush()
            broker.default = Act.SWALLOW
            for _ in range(3):
                await world.producer.send_nowait("test", b"x")
            with pytest.raises(BufferFullError):
                await world.producer.send_nowait("test", b"x", timeout=1)
        async with producing(
            StandInBroker(), buffer_count_max=3, when_full="raise"
        ) as world:
            await world.producer.prepare("test")
            for _ in range(3):
                await world.producer.send_nowait("test", b"x")
            with pytest.raises(BufferFullError, match="do not fit"):
                await world.producer.send_nowait("test", b"x")

    run_virtually(main())


def test_a_send_that_finds_no_space_in_time_leaves_nothing() -> None:
    """As often as it is tried, while the broker answers none of the others."""

    async def main() -> None:
        broker = StandInBroker()
        broker.default = Act.SWALLOW
        async with producing(broker, buffer_count_max=1) as world:
            send = world.producer.send_nowait
            await send("test", b"x", timeout=600)

            async def blocks_after_trying() -> int:
                for _ in range(1000):
                    with pytest.raises(BufferFullError):
                        await send("test", b"x", timeout=0.001)
                gc.collect()
                return sys.getallocatedblocks()

            before = await blocks_after_trying()
            assert await blocks_after_trying() - before < 500

    run_virtually(main())


def test_a_list_larger_than_the_buffer_goes_through() -> None:
    """It is added as room is made."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker, buffer_bytes_max=2000, partitions=2) as world:
            sent = [b"%04d" % n for n in range(1000)]
            results = await world.producer.send_many("test", sent)
            assert len(set(results)) == 1000
            assert world.producer.statistics().buffered_bytes == 0
        assert sorted(broker.stored(0) + broker.stored(1)) == sent

    run_virtually(main())


def test_flush_waits_for_what_was_appended_before() -> None:
    """Bounded; it names how many messages are left."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker) as world:
            futures = [await world.producer.send_nowait("test", b"x") for _ in "abc"]
            await world.producer.flush(timeout=5)
            assert all(future.done() for future in futures)
            broker.default = Act.SWALLOW
            await world.producer.send_nowait("test", b"x")
            with pytest.raises(RequestTimeoutError, match="1 messages have no outcome"):
                await world.producer.flush(timeout=1)

    run_virtually(main())


def test_close_resolves_everything() -> None:
    """Sent is unknown, unsent is certain, new is refused, and time is bounded."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        broker, away = StandInBroker(0), StandInBroker(1)
        broker.default = Act.SWALLOW
        away.go_away()
        async with producing(broker, away, timeout_s=60) as world:
            send = world.producer.send_nowait
            sent = await send("test", b"x", partition="0-0")
            unsent = await send("test", b"x", partition="1-0")
            await asyncio.sleep(1)
            start_s = loop.time()
            await world.producer.close(timeout=2)
            assert loop.time() - start_s <= 2.1
            assert isinstance(sent.exception(), OutcomeUnknownError)
            assert isinstance(unsent.exception(), ClosedError)
            with pytest.raises(ClosedError):
                await world.producer.send("test", b"x")
            await world.producer.close()

    run_virtually(main())


def test_a_cancelled_send_loses_nothing() -> None:
    """The message is on its way, with or without a waiter."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker) as world:
            await world.producer.prepare("test")
            task = asyncio.create_task(world.producer.send("test", b"x"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await world.producer.flush()
        assert broker.stored() == [b"x"]

    run_virtually(main())


def test_one_way_messages_never_raise_for_delivery() -> None:
    """Dropped and failed ones are counted by reason; bad arguments are errors."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker, timeout_s=1, buffer_count_max=5) as world:
            producer = world.producer
            producer.send_oneway("test", b"early")
            producer.send_oneway("nowhere", b"lost")
            await asyncio.sleep(2)
            for _ in range(7):
                producer.send_oneway("test", b"x")
            with pytest.raises(ConfigError):
                producer.send_oneway("no topic", b"x")
            await producer.flush()
            dropped = producer.statistics().dropped
            assert dropped == {"BufferFullError": 2}
            assert producer.statistics().failed == {"NoBrokerError": 1}
            await producer.close()
            producer.send_oneway("test", b"x")
            assert producer.statistics().dropped["ClosedError"] == 1
        assert broker.stored() == [b"early"] + [b"x"] * 5

    run_virtually(main())


def test_a_close_sends_messages_of_a_topic_that_was_never_used() -> None:
    """A program that sends one and ends would else never send it."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker) as world:
            world.producer.send_oneway("test", b"1")
            future = await world.producer.send_nowait("test", b"2")
            world.producer.send_oneway("test", b"3")
            assert not future.done()
        assert broker.stored() == [b"1", b"2", b"3"]
        statistics = world.producer.statistics()
        assert (statistics.dropped, statistics.failed) == ({}, {})

    run_virtually(main())


def test_a_close_waits_for_the_topic_of_a_one_way_message_in_its_time_alone() -> None:
    async def main() -> None:
        async with producing(StandInBroker()) as world:
            world.producer.send_oneway("nowhere", b"x")
            since_s = asyncio.get_running_loop().time()
            await world.producer.close(timeout=0.5)
            assert asyncio.get_running_loop().time() - since_s == pytest.approx(0.5)
            assert world.producer.statistics().failed == {"ClosedError": 1}

    run_virtually(main())


@pytest.mark.parametrize("topic", ["", "a b", "a\n", "a\rb"])
def test_what_can_be_no_topic_is_refused(topic: str) -> None:
    """Before any request."""
    with pytest.raises(
        ConfigError, match="expected a name of at most 244 bytes, no blanks"
    ):
        check_topic(topic)


def test_a_callback_that_raises_disturbs_nobody() -> None:
    """It is called on the loop, once, and its error goes to the loop's handler."""

    async def main() -> None:
        problems: list[object] = []
        handler = lambda _loop, context: problems.append(context["exception"])  # noqa: E731
        asyncio.get_running_loop().set_exception_handler(handler)
        called: list[SendFuture] = []

        def fail(future: SendFuture) -> None:
            called.append(future)
            raise ValueError("mine")

        async with producing(StandInBroker()) as world:
            future = await world.producer.send_nowait("test", b"x")
            future.add_done_callback(fail)
            await world.producer.send("test", b"y")
            await asyncio.sleep(0)
            assert called == [future]
            assert [str(problem) for problem in problems] == ["mine"]

    run_virtually(main())


def test_statistics_add_up() -> None:
    """Everything appended is acknowledged, failed or still here."""

    async def main() -> None:
        broker = StandInBroker()
        async with producing(broker) as world:
            await world.producer.send_many("test", [b"abc"] * 10)
            broker.acts.append(Act.BROKEN)
            with pytest.raises(ServerError):
                await world.producer.send("test", b"x")
            seen = world.producer.statistics()
            assert (seen.appended_count, seen.acknowledged_count) == (11, 10)
            assert seen.acknowledged_bytes == 30
            assert seen.failed == {"ServerError": 1}
            assert (seen.buffered_count, seen.in_flight_count) == (0, 0)
            assert seen.latency_s.count == 10
            assert seen.batch_counts.count == 2

    run_virtually(main())
