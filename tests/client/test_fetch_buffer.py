"""A fetch buffer hands out in order, one worker per partition, and loses nothing."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.consume.current_batch import CurrentBatch
from metaq.client.consume.fetch_buffer import PARTITION_BATCHES_MAX, FetchBuffer
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.errors import ClosedError, OwnershipLostError
from metaq.model import (
    BrokerId,
    GroupOffset,
    Message,
    MessageId,
    Offset,
    TopicPartition,
)
from metaq.testing.clock import ManualClock

ZERO = TopicPartition("t", BrokerId(0), 0)
ONE = TopicPartition("t", BrokerId(0), 1)
STEP = 30
"""Bytes of each record in these tests."""
BEGIN = GroupOffset(Offset(0), MessageId(-1))


def batch(partition: TopicPartition, first: int, count: int) -> FetchedBatch:
    """Return messages number `first` and on; their offsets follow from the number."""
    messages = [
        Message(
            "t",
            b"%d" % number,
            None,
            MessageId(number + 1),
            partition,
            Offset(number * STEP),
            Offset((number + 1) * STEP),
        )
        for number in range(first, first + count)
    ]
    end = Offset((first + count) * STEP)
    return FetchedBatch(partition, messages, end, count * STEP)


def make_buffer(
    on_room: Callable[[], None] = lambda: None,
    *,
    on_handled: Callable[[Sequence[Message]], None] | None = None,
    kind: type[FetchBuffer] = FetchBuffer,
) -> FetchBuffer:
    buffer = kind(
        clock=ManualClock(),
        buffer_bytes_max=10 * STEP,
        buffer_count_max=100,
        on_room=on_room,
        on_handled=on_handled,
    )
    buffer.add(ZERO, BEGIN)
    buffer.add(ONE, BEGIN)
    return buffer


def take(buffer: FetchBuffer) -> FetchedBatch:
    taken = buffer.take_nowait()
    assert taken is not None
    return taken


def hand_out(batch: FetchedBatch, count: int) -> None:
    """Hand out messages one by one; the last of them is still being handled."""
    assert len(list(islice(batch.begin(), count))) == count


def numbers(messages: Sequence[Message]) -> list[int]:
    return [int(message.data) for message in messages]


def test_partitions_take_turns_and_are_with_one_worker_at_a_time() -> None:
    buffer = make_buffer()
    buffer.put(batch(ZERO, 0, 2))
    buffer.put(batch(ZERO, 2, 2))
    buffer.put(batch(ONE, 0, 1))
    first, second = take(buffer), take(buffer)
    assert (first.partition, second.partition) == (ZERO, ONE)
    assert buffer.take_nowait() is None  # the rest of ZERO waits for its worker
    hand_out(first, 2)
    first.confirm()
    buffer.done(first)
    assert numbers(take(buffer).messages) == [2, 3]


def test_what_is_not_handled_comes_again_first() -> None:
    buffer = make_buffer()
    buffer.put(batch(ZERO, 0, 3))
    buffer.put(batch(ZERO, 3, 1))
    first = take(buffer)
    hand_out(first, 2)  # the second one is still being handled
    buffer.done(first)
    assert buffer.handled()[ZERO] == GroupOffset(Offset(STEP), MessageId(1))
    assert numbers(take(buffer).messages) == [1, 2]


def test_room_is_bounded_per_partition_and_in_bytes_and_told_when_it_is_back() -> None:
    calls = []
    buffer = make_buffer(on_room=lambda: calls.append(1))
    for number in range(PARTITION_BATCHES_MAX):
        assert buffer.has_room(ZERO)
        buffer.put(batch(ZERO, number, 1))
    assert not buffer.has_room(ZERO)
    assert buffer.has_room(ONE)
    buffer.put(batch(ONE, 0, 8))
    assert not buffer.has_room(ONE)  # 10 records of at most 10
    assert not calls
    taken = take(buffer)
    assert calls == [1]
    assert buffer.has_room(ZERO)
    buffer.done(taken)


def test_a_filtered_batch_moves_the_offset_behind_what_is_before_it() -> None:
    buffer = make_buffer()
    empty = FetchedBatch(ZERO, [], Offset(70), 70)
    buffer.put(empty)
    assert buffer.handled()[ZERO].offset == 70
    buffer.put(batch(ZERO, 3, 1))
    buffer.put(FetchedBatch(ZERO, [], Offset(200), 0))
    taken = take(buffer)
    assert buffer.handled()[ZERO].offset == 70
    hand_out(taken, 1)
    taken.confirm()
    buffer.done(taken)
    assert buffer.handled()[ZERO] == GroupOffset(Offset(200), MessageId(4))


def test_a_fenced_partition_is_handed_out_no_more_and_reports_nothing() -> None:
    buffer = make_buffer()
    buffer.put(batch(ZERO, 0, 3))
    buffer.put(batch(ZERO, 3, 3))
    current = CurrentBatch(buffer)
    current.hold(take(buffer))
    messages = chain.from_iterable(current.pieces())
    assert int(next(messages).data) == 0
    assert buffer.fence(ZERO) == BEGIN
    assert list(messages) == []
    assert ZERO not in buffer.handled()
    assert buffer.take_nowait() is None
    buffer.put(batch(ZERO, 6, 1))  # an answer that was on its way
    assert buffer.take_nowait() is None


def test_committing_what_was_taken_away_is_refused() -> None:
    buffer = make_buffer()
    buffer.put(batch(ZERO, 0, 3))
    current = CurrentBatch(buffer)
    current.hold(take(buffer))
    next(chain.from_iterable(current.pieces()))
    buffer.fence(ZERO)
    with pytest.raises(OwnershipLostError, match="t/0-0"):
        current.confirm()
    current.confirm()  # nothing is being handled any more


def test_revoking_waits_for_the_message_being_handled() -> None:
    async def scenario() -> None:
        buffer = make_buffer()
        buffer.put(batch(ZERO, 0, 3))
        current = CurrentBatch(buffer)
        current.hold(take(buffer))
        messages = chain.from_iterable(current.pieces())
        next(messages)
        revoking = asyncio.ensure_future(buffer.drain(ZERO, timeout_s=5))
        await asyncio.sleep(0)
        assert not revoking.done()
        assert list(messages) == []  # asked for the next one: the first is handled
        assert await revoking
        assert buffer.fence(ZERO) == GroupOffset(Offset(STEP), MessageId(1))

    asyncio.run(scenario())


def test_revoking_does_not_wait_for_ever() -> None:
    async def scenario() -> None:
        buffer = make_buffer()
        buffer.put(batch(ZERO, 0, 3))
        taken = take(buffer)
        hand_out(taken, 1)
        assert not await buffer.drain(ZERO, timeout_s=0.01)
        assert buffer.fence(ZERO) == BEGIN
        assert not buffer.is_current(taken)

    asyncio.run(scenario())


def test_nothing_overtakes_what_a_partition_left_in_a_batch_that_was_stopped() -> None:
    """Neither what was fetched before that nor what still comes, filtered or not."""
    buffer = make_buffer()
    buffer.put(batch(ZERO, 0, 3))
    buffer.put(batch(ZERO, 3, 1))
    stopped = take(buffer)
    hand_out(stopped, 2)
    stopped.stop()
    buffer.done(stopped)
    buffer.put(batch(ZERO, 4, 1))
    buffer.put(FetchedBatch(ZERO, [], Offset(9 * STEP), 0))
    assert buffer.take_nowait() is None
    assert not buffer.has_room(ZERO)
    assert buffer.fence(ZERO) == GroupOffset(Offset(STEP), MessageId(1))


def test_a_failure_is_told_behind_what_was_fetched_before_it() -> None:
    buffer = make_buffer()
    buffer.put(batch(ZERO, 0, 1))
    buffer.fail(ClosedError("over"))
    taken = take(buffer)
    hand_out(taken, 1)
    taken.confirm()
    buffer.done(taken)
    for _ in range(2):
        with pytest.raises(ClosedError, match="over"):
            buffer.take_nowait()


def test_a_cancelled_wait_takes_nothing_and_passes_its_wake_up_on() -> None:
    async def scenario() -> None:
        buffer = make_buffer()
        waits = [asyncio.ensure_future(buffer.take_async()) for _ in range(2)]
        await asyncio.sleep(0)
        buffer.put(batch(ZERO, 0, 1))  # wakes one of them
        await asyncio.sleep(0)
        for wait in waits:
            if not wait.done():
                wait.cancel()
                break
        done, waiting = await asyncio.wait(waits, timeout=5)
        results = [wait.result() for wait in done if not wait.cancelled()]
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        left = buffer.take_nowait()
        assert len(results) + (left is not None) == 1

    asyncio.run(scenario())


def test_a_thread_that_waits_is_woken() -> None:
    buffer = make_buffer()
    taken: list[FetchedBatch | None] = []
    thread = threading.Thread(target=lambda: taken.append(buffer.take(20)))
    thread.start()
    buffer.put(batch(ZERO, 0, 1))
    thread.join(20)
    assert taken
    assert taken[0] is not None
    assert buffer.take(0) is None


@given(
    sizes=st.lists(st.integers(1, 5), max_size=6),
    breaks=st.lists(st.integers(1, 4), max_size=20),
)
def test_loops_that_end_anywhere_deliver_each_message_once_in_order(
    sizes: list[int], breaks: list[int]
) -> None:
    """A loop that breaks and a next one over the same current batch see one
    sequence."""
    buffer = FetchBuffer(
        clock=ManualClock(),
        buffer_bytes_max=10**9,
        buffer_count_max=10**9,
        on_room=lambda: None,
    )
    buffer.add(ZERO, BEGIN)
    total = 0
    for size in sizes:
        buffer.put(batch(ZERO, total, size))
        total += size
    current = CurrentBatch(buffer)
    seen: list[int] = []
    stops = iter(breaks)
    while True:
        stop = next(stops, 10**9)
        for count, message in enumerate(chain.from_iterable(current.pieces()), 1):
            seen.append(int(message.data))
            assert buffer.handled()[ZERO].offset == (len(seen) - 1) * STEP
            if count == stop:
                break
        else:
            taken = buffer.take_nowait()
            if taken is None:
                break
            current.hold(taken)
    assert seen == list(range(total))
    assert buffer.handled()[ZERO].offset == total * STEP


def test_a_loop_behind_many_at_once_counts_all_that_was_handed_out_before() -> None:
    buffer = make_buffer()
    buffer.put(batch(ZERO, 0, 6))
    current = CurrentBatch(buffer)
    current.hold(take(buffer))
    assert numbers(current.some(3)) == [0, 1, 2]
    loop = chain.from_iterable(current.pieces())
    for number in (3, 4):
        assert numbers([next(loop)]) == [number]
        assert buffer.handled()[ZERO].offset == number * STEP


def test_a_loop_goes_on_behind_what_was_handed_out_meanwhile() -> None:
    """In the same batch, and in the next one where its own is used up."""
    buffer = make_buffer()
    for first in (0, 3):
        buffer.put(batch(ZERO, first, 3))
    current = CurrentBatch(buffer)
    current.hold(take(buffer))
    loop = chain.from_iterable(current.pieces())
    assert numbers([next(loop)]) == [0]
    assert numbers(current.some(1)) == [1]
    assert numbers([next(loop)]) == [2]
    assert current.some(1) == []
    current.hold(take(buffer))
    assert numbers(current.some(2)) == [3, 4]
    assert buffer.handled()[ZERO].offset == 3 * STEP
    assert numbers([next(loop)]) == [5]
    assert buffer.handled()[ZERO].offset == 5 * STEP
    assert list(loop) == []
    assert buffer.handled()[ZERO].offset == 6 * STEP


def test_a_partition_that_goes_leaves_the_line() -> None:
    """A waiter that is woken finds something: a place in line is a batch to take."""

    async def scenario() -> None:
        buffer = make_buffer()
        buffer.put(batch(ZERO, 0, 1))
        buffer.put(batch(ONE, 0, 1))
        buffer.fence(ZERO)
        taken = take(buffer)
        assert taken.partition == ONE
        assert buffer.take(0) is None
        buffer.put(batch(ONE, 1, 1))
        hand_out(taken, 1)
        buffer.done(taken)
        await buffer.drain(ONE, timeout_s=1)
        assert buffer.take(0) is None

    asyncio.run(scenario())


def test_a_paused_partition_waits_until_it_is_resumed() -> None:
    """It does not look idle, new batches wait, and other partitions go on."""
    buffer = make_buffer()
    buffer.put(batch(ZERO, 0, 3))
    taken = take(buffer)
    hand_out(taken, 2)  # the first is handled, the second failed
    buffer.done(taken, is_delayed=True)
    buffer.put(batch(ZERO, 3, 1))
    buffer.put(batch(ONE, 0, 1))
    assert take(buffer).partition == ONE
    assert buffer.take_nowait() is None
    assert buffer.statistics()[ZERO].is_taken
    buffer.end_delay(ZERO)
    assert numbers(take(buffer).messages) == [1, 2]
    buffer.end_delay(TopicPartition("gone", BrokerId(0), 0))


def test_a_paused_partition_is_revoked_at_once() -> None:
    async def scenario() -> None:
        buffer = make_buffer()
        buffer.put(batch(ZERO, 0, 2))
        taken = take(buffer)
        hand_out(taken, 2)
        buffer.done(taken, is_delayed=True)
        assert await buffer.drain(ZERO, timeout_s=1000)
        assert buffer.fence(ZERO) == GroupOffset(Offset(STEP), MessageId(1))
        buffer.add(ZERO, BEGIN)
        buffer.put(batch(ZERO, 0, 1))
        assert take(buffer).partition == ZERO

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("turns", [0, 1])
def test_a_waiter_that_is_cancelled_after_its_wake_up_passes_it_on(
    victim: int, turns: int
) -> None:
    """Else a batch would lie there while a worker waits for it.

    One of both is woken; it may be cancelled before it runs, or after that.
    """

    async def scenario() -> None:
        buffer = make_buffer()
        waiters = [asyncio.ensure_future(buffer.take_async()) for _ in range(2)]
        await asyncio.sleep(0)
        buffer.put(batch(ZERO, 0, 1))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiters[victim].cancel()
        other = waiters[1 - victim]
        taken = await asyncio.wait_for(other, 30)
        assert taken.partition == ZERO
        assert waiters[victim].cancelled()

    asyncio.run(scenario())


def test_what_is_replayed_wakes_a_worker_and_moves_no_offset() -> None:
    async def scenario() -> None:
        buffer = make_buffer()
        wait = asyncio.ensure_future(buffer.take_async())
        await asyncio.sleep(0)
        replayed = batch(ZERO, 5, 1)
        buffer.put_replayed(replayed)
        assert await wait is replayed
        list(replayed.begin())
        replayed.confirm()
        buffer.done(replayed)
        assert buffer.handled()[ZERO] == BEGIN
        buffer.put_replayed(replayed)
        buffer.drop_replayed()
        assert buffer.take_nowait() is None

    asyncio.run(scenario())


def test_each_handled_message_is_told_once() -> None:
    """Taken, given back in pieces, fenced while taken, and given back after that."""
    handled: list[int] = []
    buffer = FetchBuffer(
        clock=ManualClock(),
        buffer_bytes_max=10 * STEP,
        buffer_count_max=100,
        on_room=lambda: None,
        on_handled=lambda messages: handled.extend(numbers(messages)),
    )
    buffer.add(ZERO, BEGIN)
    buffer.put(batch(ZERO, 0, 4))
    first = take(buffer)
    buffer.report_handled()
    assert handled == []
    hand_out(first, 3)
    buffer.report_handled()
    buffer.report_handled()
    assert handled == [0, 1]
    first.confirm()
    buffer.done(first)
    assert handled == [0, 1, 2]
    second = take(buffer)
    hand_out(second, 1)
    buffer.fence(ZERO)
    assert handled == [0, 1, 2]
    second.confirm()
    buffer.done(second)
    assert handled == [0, 1, 2, 3]
