"""The accumulator: bounds, batches, wakes, and many threads at once."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.errors import BufferFullError, MessageTooLargeError
from metaq.client.options import ProducerOptions
from metaq.client.produce.accumulator import Accumulator
from metaq.client.produce.batches import Batch, BatchName, BatchOutcome, SendResult
from metaq.client.produce.buffer import RESERVE_COUNT, TURN_S, Buffer
from metaq.client.produce.partition_sender import PartitionSender
from metaq.client.produce.routes import Routes
from metaq.clock import Clock, SystemClock
from metaq.errors import ClosedError, ConfigError, NoBrokerError
from metaq.model import MessageId, Offset, TopicPartition
from metaq.protocol.version import Capabilities
from metaq.testing.clock import ManualClock
from tests.client.producing import at
from tests.rigs.virtual_time import run_virtually
from tests.rigs.waiting import until


@dataclass
class Announced:
    """A connection whose broker said something."""

    capabilities: Capabilities
    is_open: bool = True


STORED = SendResult(MessageId(1), at(0), Offset(0))


class Box:
    """An accumulator without a delivery, and how often it notified the loop."""

    def __init__(
        self, partitions: int = 1, clock: Clock | None = None, **options: Any
    ) -> None:
        self.calls = 0
        loop = asyncio.get_running_loop()
        self.buffer = Buffer[PartitionSender](
            ProducerOptions(**options), clock or SystemClock(), loop, self._on_ready
        )
        none: Any = None

        def make(partition: TopicPartition, _row: int | None) -> PartitionSender:
            return PartitionSender(
                partition,
                buffer=self.buffer,
                connections=none,
                outcomes=none,
                producer_id="p",
                sender_of=none,
            )

        self.routes = Routes(make, None, first_turn=1)
        self.accumulator = Accumulator(self.buffer, self.routes)
        self.routes.set_partitions("test", [at(n) for n in range(partitions)])
        self.sender = self.routes.sender(at(0))

    def _on_ready(self) -> None:
        self.calls += 1

    def take(self, now_s: float = 1e9) -> Batch | float | None:
        return self.sender.take(now_s)

    def resolve(self, batch: Batch | float | None) -> None:
        assert isinstance(batch, Batch)
        self.buffer.resolve(batch, [BatchOutcome(0, STORED)])


def test_bounds_are_exact() -> None:
    """As many messages and bytes as the options say, and room again when answered."""

    async def main() -> None:
        box = Box(buffer_count_max=5)
        for _ in range(5):
            box.accumulator.append("test", b"x")
        with pytest.raises(BufferFullError) as caught:
            box.accumulator.append("test", b"x")
        assert (caught.value.size_bytes, caught.value.message_count) == (21, 1)
        box.resolve(box.take())
        for _ in range(5):
            box.accumulator.append("test", b"x")
        box = Box(buffer_bytes_max=210)
        for _ in range(10):
            box.accumulator.append("test", b"x")
        with pytest.raises(BufferFullError):
            box.accumulator.append("test", b"x")
        seen = box.buffer.statistics()
        assert (seen.buffered_count, seen.buffered_bytes) == (10, 210)
        assert (seen.appended_count, seen.full_count) == (10, 1)

    run_virtually(main())


def test_messages_without_a_key_stay_while_any_is_unanswered() -> None:
    """For `TURN_S`: one file is synced. Who waits for each goes round robin."""

    async def main() -> None:
        clock = ManualClock()
        box = Box(partitions=4, clock=clock)

        def send() -> int:
            found = [box.routes.sender(at(n)) for n in range(4)]
            before = [one.open and len(one.open.payloads) for one in found]
            box.accumulator.append("test", b"x")
            after = [one.open and len(one.open.payloads) for one in found]
            (place,) = (n for n in range(4) if before[n] != after[n])
            return place

        def take(place: int) -> Batch | float | None:
            return box.routes.sender(at(place)).take(clock.monotonic_s())

        assert [send(), send()] == [1, 1]
        first = take(1)
        assert send() == 1
        clock.advance_s(TURN_S)
        assert send() == 1, "no message looks at the clock"
        second = take(1)
        assert [send(), send()] == [2, 2]
        for batch in (first, second, take(2)):
            box.resolve(batch)
        assert send() == 3
        box.resolve(take(3))
        assert send() == 0

    run_virtually(main())


def test_a_named_batch_travels_alone_and_in_its_place() -> None:
    """Neither what was appended before it nor another name is in it."""

    async def main() -> None:
        box = Box()
        names = [BatchName("p", 0, "s"), BatchName("p", 2, "t")]
        box.accumulator.append("test", b"plain")
        for name in names:
            box.accumulator.append_batch(at(0), [b"a", b"b"], [0, 1], name)
        box.accumulator.append("test", b"plain")
        batches = [box.take() for _ in range(4)]
        seen = [(b.name, b.payloads, b.flags) for b in batches if isinstance(b, Batch)]
        assert seen == [
            (None, [b"plain"], {}),
            (names[0], [b"a", b"b"], {1: 1}),
            (names[1], [b"a", b"b"], {1: 1}),
            (None, [b"plain"], {}),
        ]
        assert box.take() is None

    run_virtually(main())


def test_a_named_batch_larger_than_the_buffer_goes_when_it_is_empty() -> None:
    """It takes all the room there is, and gives back what it took."""

    async def main() -> None:
        box = Box(buffer_bytes_max=100, buffer_count_max=3)
        name = BatchName("p", 0, "s")
        box.accumulator.append("test", b"x")
        with pytest.raises(BufferFullError) as caught:
            box.accumulator.append_batch(at(0), [bytes(200)] * 4, [0] * 4, name)
        assert (caught.value.size_bytes, caught.value.message_count) == (100, 3)
        box.resolve(box.take())
        box.accumulator.append_batch(at(0), [bytes(200)] * 4, [0] * 4, name)
        with pytest.raises(BufferFullError):
            box.accumulator.append("test", b"x")
        box.resolve(box.take())
        for _ in range(3):
            box.accumulator.append("test", b"x")

    run_virtually(main())


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("aAtr"), st.integers(0, 2), st.integers(0, 60)),
        max_size=80,
    ),
    bytes_max=st.integers(200, 3000),
    count_max=st.integers(1, 60),
)
def test_room_is_never_lost_nor_given_twice(
    steps: list[tuple[str, int, int]], bytes_max: int, count_max: int
) -> None:
    """Append, append a list, take and resolve, in any order; in the end all is free."""

    async def main() -> None:
        box = Box(
            3, buffer_bytes_max=bytes_max, buffer_count_max=count_max, batch_count_max=7
        )
        accumulator, buffer = box.accumulator, box.buffer
        senders = [box.routes.sender(at(n)) for n in range(3)]
        taken: list[Batch] = []
        count = size = 0
        for kind, queue, n in steps:
            if kind == "a":
                try:
                    accumulator.append("test", bytes(n), partition=f"0-{queue}")
                    count, size = count + 1, size + n + 20
                except BufferFullError:
                    assert count or n + 20 > bytes_max
            elif kind == "A" and n:
                appending = accumulator.append_many("test", [bytes(queue)] * n)
                while not appending.is_over and appending.step() is None:
                    pass
                added = buffer.statistics().buffered_count - count
                assert 0 <= added <= n
                count, size = count + added, size + added * (queue + 20)
            elif kind == "t":
                batch = senders[queue].take(1e9)
                if isinstance(batch, Batch):
                    assert 0 < len(batch.payloads) <= 7
                    taken.append(batch)
            elif taken:
                batch = taken.pop()
                count, size = count - len(batch.payloads), size - batch.size_bytes
                box.resolve(batch)
            seen = buffer.statistics()
            assert (seen.buffered_count, seen.buffered_bytes) == (count, size)
            assert count <= count_max
            assert size <= bytes_max
        for each in senders:
            while isinstance(batch := each.take(1e9), Batch):
                taken.append(batch)
        for batch in taken:
            box.resolve(batch)
        for _ in range(room := min(count_max, bytes_max // 20)):
            accumulator.append("test", b"", partition="0-0")
        assert buffer.statistics().buffered_count == room
        with pytest.raises(BufferFullError):
            accumulator.append("test", b"", partition="0-0")

    run_virtually(main())


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupt_as_the_loop_is_told_keeps_no_later_message_back(
    *, is_late: bool
) -> None:
    """Ctrl-C in the thread that sends, before the loop is notified or just after."""

    async def main() -> None:
        box, loop = Box(), asyncio.get_running_loop()
        notify, interrupts = loop.call_soon_threadsafe, [KeyboardInterrupt()]

        def interrupted(callback: Any, *arguments: Any) -> asyncio.Handle:
            if is_late or not interrupts:
                handle = notify(callback, *arguments)
            if interrupts:
                raise interrupts.pop()
            return handle

        def send() -> None:
            with pytest.raises(KeyboardInterrupt):
                box.accumulator.append("test", b"first")
            box.accumulator.append("test", b"second")

        loop.call_soon_threadsafe = interrupted  # type: ignore[method-assign]  # the only way
        await asyncio.to_thread(send)
        await asyncio.sleep(0)
        assert box.calls == 1 + is_late
        assert box.buffer.take_ready() == [box.sender]
        batch = box.take()
        assert isinstance(batch, Batch)
        assert batch.payloads == [b"first", b"second"]
        box.resolve(batch)

    asyncio.run(main())


def test_the_loop_is_told_once_until_it_found_nothing() -> None:
    """No wake per message, and none is missed."""

    async def main() -> None:
        box = Box()
        for _ in range(3 * RESERVE_COUNT):
            box.accumulator.append("test", b"x")
        await asyncio.sleep(0)
        assert box.calls == 1
        assert box.buffer.take_ready() == [box.sender]
        assert isinstance(box.take(), Batch)
        box.accumulator.append("test", b"x")
        await asyncio.sleep(0)
        assert box.calls == 1
        assert isinstance(box.take(), Batch)
        assert box.take() is None
        box.accumulator.append("test", b"x")
        await asyncio.sleep(0)
        assert box.calls == 2

    run_virtually(main())


def test_batches_hold_one_time_out_and_what_the_broker_takes() -> None:
    """Another time-out begins another batch; so does a full one."""

    async def main() -> None:
        box = Box()
        for timeout_s in (None, None, 3.0, 3.0, None):
            box.accumulator.append("test", b"x", timeout_s=timeout_s)
        limits = Capabilities("v", batch_bytes_max=60, batch_records_max=9)
        connection: Any = Announced(limits)
        box.sender.set_connection(connection)
        for _ in range(3):
            box.accumulator.append("test", b"x")
        batches = []
        while isinstance(batch := box.take(), Batch):
            batches.append(batch)
        assert [len(b.payloads) for b in batches] == [2, 2, 2, 2]
        assert [b.timeout_s for b in batches] == [30.0, 3.0, 30.0, 30.0]
        assert batches[1].deadline_s == batches[1].created_s + 3.0

    run_virtually(main())


def test_late_batches_are_given_out_and_old_ones_sealed() -> None:
    """After a tenth of its time a batch that waits takes no more messages."""

    async def main() -> None:
        box = Box(timeout_s=5.0)
        box.accumulator.append("test", b"old")
        start_s = SystemClock().monotonic_s()
        assert box.sender.take_late(start_s + 0.4) == []
        box.accumulator.append("test", b"same")
        assert box.sender.take_late(start_s + 0.6) == []
        box.accumulator.append("test", b"new")
        late = box.sender.take_late(start_s + 5.5)
        assert [b.payloads for b in late] == [[b"old", b"same"], [b"new"]]

    run_virtually(main())


def test_what_is_due_is_old_or_past_its_deadline_and_unanswered() -> None:
    """Each batch comes once when it is old, and again and again when it is late."""

    async def main() -> None:
        box = Box(timeout_s=5.0)
        accumulator, buffer = box.accumulator, box.buffer
        start_s = SystemClock().monotonic_s()
        accumulator.append("test", b"slow")
        slow = box.take()
        accumulator.append("test", b"quick", timeout_s=0.1)
        quick = box.take()
        assert buffer.take_due(start_s, 1.0) == []
        box.resolve(quick)
        assert buffer.take_due(start_s + 2.0, 1.0) == [box.sender]
        assert buffer.take_due(start_s + 4.0, 1.0) == []
        for seconds in (6.0, 7.0):
            due = buffer.take_due(start_s + seconds, 1.0)
            assert due == [box.sender]
        assert buffer.take_due(start_s + 7.5, 1.0) == []
        box.resolve(slow)
        assert buffer.take_due(start_s + 9.0, 1.0) == []

    run_virtually(main())


def test_what_may_change_is_copied() -> None:
    """A buffer that its owner goes on using cannot change the message."""

    async def main() -> None:
        box = Box()
        buffer = bytearray(b"abc")
        box.accumulator.append("test", buffer)
        box.accumulator.append("test", memoryview(buffer)[1:])
        appending = box.accumulator.append_many("test", [buffer, b"x"])
        assert appending.step() is None
        buffer[:] = b"###"
        batch = box.take()
        assert isinstance(batch, Batch)
        assert batch.payloads == [b"abc", b"bc", b"abc", b"x"]

    run_virtually(main())


@pytest.mark.parametrize("data", ["text", 5, None, [1]])
def test_what_are_no_bytes_is_refused(data: Any) -> None:
    """A number would otherwise become so many zeros."""

    async def main() -> None:
        box = Box()
        with pytest.raises(TypeError, match="expected bytes-like"):
            box.accumulator.append("test", data)
        with pytest.raises(TypeError, match="expected bytes-like"):
            box.accumulator.append_many("test", [data])

    run_virtually(main())


def test_refusals_name_what_is_wrong() -> None:
    """Unknown topics, impossible partitions, too much data, a closed producer."""

    async def main() -> None:
        box = Box(buffer_bytes_max=1000)
        append = box.accumulator.append
        with pytest.raises(NoBrokerError, match="topic other is not known"):
            append("other", b"x")
        with pytest.raises(NoBrokerError, match="topic other is not known"):
            box.accumulator.append_many("other", [b"x"])
        with pytest.raises(ConfigError, match="<broker>-<partition>"):
            append("test", b"x", partition="7")
        with pytest.raises(MessageTooLargeError, match="at most 1000 bytes, got 1020"):
            append("test", bytes(1000))
        append("test", b"x")
        box.accumulator.close()
        with pytest.raises(ClosedError):
            append("test", b"x")
        with pytest.raises(ClosedError):
            box.accumulator.append_many("test", [b"x"]).step()

    run_virtually(main())


def test_waiting_for_room_ends_with_room_or_with_time() -> None:
    """Threads are woken by an answer; the loop is not allowed to wait for itself."""

    async def main() -> None:
        box = Box(buffer_count_max=1)
        with pytest.raises(RuntimeError, match="use await"):
            box.buffer.wait(1)
        box.accumulator.append("test", b"x")
        found: list[bool] = []

        def wait() -> None:
            found.append(box.buffer.wait(0.01))
            found.append(box.buffer.wait(5))

        thread = threading.Thread(target=wait)
        thread.start()
        await until(lambda: found)
        box.resolve(box.take())
        thread.join(30)
        assert found == [False, True]

    asyncio.run(main())


def test_many_threads_lose_and_double_nothing() -> None:
    """Each message is in exactly one batch, each thread's in its order."""

    async def main() -> None:
        box = Box(batch_count_max=100)
        start = threading.Barrier(4)

        def work(name: int) -> None:
            start.wait(30)
            for n in range(3000):
                box.accumulator.append("test", b"%d-%05d" % (name, n))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        found: list[bytes] = []
        while len(found) < 12_000:
            batch = box.take()
            if isinstance(batch, Batch):
                found += batch.payloads
                box.resolve(batch)
            else:
                await asyncio.sleep(0)
        for thread in threads:
            thread.join(30)
        for name in range(4):
            mine = [m for m in found if m.startswith(b"%d-" % name)]
            assert mine == [b"%d-%05d" % (name, n) for n in range(3000)]

    asyncio.run(main())
