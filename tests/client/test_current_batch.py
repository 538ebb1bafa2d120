"""One task or thread reads a consumer; a loop and `receive` of it take turns."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

from metaq.client import Client, Consumer
from metaq.client.consume.current_batch import CurrentBatch, Filling
from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.errors import ClientError
from metaq.model import Message
from tests.brokers import StartBroker
from tests.client.test_fetch_buffer import (
    BEGIN,
    ONE,
    STEP,
    ZERO,
    batch,
    make_buffer,
    numbers,
    take,
)
from tests.client.worlds import IDLE, QUICK, WORLDS, payloads
from tests.rigs.inside import twin_of
from tests.rigs.waiting import wait_until


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker({"test": 1})


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


def test_a_loop_and_receive_take_turns(broker: Any, client: Any) -> None:
    """Each message once, and all handed out before count when more are asked for."""
    sent = [b"%d" % number for number in range(9)]
    broker.put(*sent)
    seen: list[bytes] = []
    with client.consumer("g", ["test"], **IDLE) as consumer:
        for message in consumer:
            seen.append(message.data)
            seen += payloads(consumer.receive_many(2, 30))
            if len(seen) == 9:
                break
        consumer.commit()
    assert seen == sent


def test_a_second_reader_that_waits_is_refused(broker: Any, client: Any) -> None:
    """It took the batch of the first one, whose partition then stood still."""
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(consumer.receive, 60)
        twin = twin_of(consumer) if isinstance(consumer, Consumer) else consumer.twin
        wait_until(lambda: twin.fetch_buffer.has_waiters)
        for _ in range(2):
            with pytest.raises(ClientError, match="two tasks or threads read this"):
                consumer.receive(60)
        broker.put(b"a", b"b")
        assert first.result().data == b"a"
        assert consumer.receive(60).data == b"b"


def test_a_reader_beside_a_loop_is_refused(broker: Any) -> None:
    """It would count the message as handled that the loop is busy with."""
    broker.put(b"a", b"b")
    with (
        Client(brokers=[broker.address], **QUICK) as client,
        client.consumer("g", ["test"], **IDLE) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        loop = iter(consumer)
        assert next(loop).data == b"a"
        for read in (lambda: consumer.receive(60), lambda: next(iter(consumer))):
            with pytest.raises(ClientError, match="two tasks or threads read this"):
                pool.submit(read).result()
        assert next(loop).data == b"b"


# -- what is held ---------------------------------------------------------------------


def fill(current: CurrentBatch, count: int) -> list[int]:
    filling = Filling(current, count_max=count)
    filling.add_nowait()
    return numbers(filling.messages)


def test_a_commit_is_not_concerned_with_a_partition_of_an_earlier_list() -> None:
    """Its messages are handled, so its loss is no error of the messages that follow."""
    buffer = make_buffer()
    current = CurrentBatch(buffer)
    buffer.put(batch(ZERO, 0, 2))
    assert fill(current, 2) == [0, 1]
    buffer.put(batch(ONE, 0, 3))
    assert fill(current, 3) == [0, 1, 2]
    buffer.fence(ZERO)
    current.confirm()
    assert buffer.handled()[ONE].offset == 3 * STEP


def test_a_list_of_two_gets_of_a_partition_is_counted_and_reported_once() -> None:
    """The second get replaces the first, which is not lost."""
    reported: list[int] = []
    buffer = make_buffer(on_handled=lambda some: reported.extend(numbers(some)))
    for first in (0, 2):
        buffer.put(batch(ZERO, first, 2))
    current = CurrentBatch(buffer)
    assert fill(current, 4) == [0, 1, 2, 3]
    current.confirm()
    assert buffer.handled()[ZERO].offset == 4 * STEP
    assert fill(current, 1) == []
    buffer.report_handled()
    assert reported == [0, 1, 2, 3]


class LostBetween(FetchBuffer):
    """Loses a partition and gets it again just before its next batch is taken."""

    again: FetchedBatch | None = None

    def take_nowait(self, held: Sequence[FetchedBatch] = ()) -> FetchedBatch | None:
        if held and self.again is not None:
            self.fence(self.again.partition)
            self.add(self.again.partition, BEGIN)
            self.put(self.again)
            self.again = None
        return super().take_nowait(held)


def test_a_list_has_no_message_twice_if_its_partition_is_lost_and_comes_again() -> None:
    """Also if that happens between the look at its batches and the next take."""
    buffer = make_buffer(kind=LostBetween)
    assert isinstance(buffer, LostBetween)
    buffer.put(batch(ZERO, 0, 2))
    buffer.again = batch(ZERO, 0, 3)
    assert fill(CurrentBatch(buffer), 9) == [0, 1, 2]
    assert buffer.again is None


def test_nothing_of_a_dropped_batch_is_handed_out_before_its_partition_is_moved() -> (
    None
):
    """A reader on a thread may ask between the drop of a seek and the move."""
    buffer = make_buffer()
    for partition in (ZERO, ONE):
        buffer.put(batch(partition, 0, 3))
    current = CurrentBatch(buffer)
    current.hold(take(buffer))
    loop = chain.from_iterable(current.pieces())
    next(loop)
    current.drop(ZERO)
    assert list(loop) == []
    assert take(buffer).partition == ONE
    assert buffer.take_nowait() is None


def test_a_loop_does_not_count_a_message_that_is_to_come_again() -> None:
    """Reported as handled, it would be passed over as a duplicate."""
    reported: list[Message] = []
    buffer = make_buffer(on_handled=reported.extend)
    buffer.put(batch(ZERO, 0, 3))
    current = CurrentBatch(buffer)
    current.hold(take(buffer))
    loop = chain.from_iterable(current.pieces())
    assert numbers([next(loop), next(loop)]) == [0, 1]
    current.release()
    assert list(loop) == []
    assert numbers(reported) == [0]
    current.hold(take(buffer))
    assert numbers(current.some(3)) == [1, 2]
