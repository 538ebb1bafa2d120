"""The buffer: deadlines of batches, their senders, and waiters for memory."""

import asyncio
import threading
from typing import Any

import pytest

from metaq.client.errors import BufferFullError
from metaq.client.options import ProducerOptions
from metaq.client.produce.batches import BatchOutcome, SendResult
from metaq.client.produce.buffer import TURN_S, Buffer
from metaq.errors import ClosedError
from metaq.model import MessageId, Offset
from metaq.testing.clock import ManualClock
from tests.client.producing import at
from tests.rigs.virtual_time import run_virtually

STORED = BatchOutcome(0, SendResult(MessageId(1), at(0), Offset(0)))


def made(**options: Any) -> Buffer[str]:
    loop = asyncio.get_running_loop()
    return Buffer(ProducerOptions(**options), ManualClock(), loop, print)


def test_due_are_all_senders_that_have_messages_of_a_batch() -> None:
    """Each once, until the batch has its outcomes."""

    async def main() -> None:
        buffer = made()
        with buffer.lock:
            batch = buffer.begin("one", 5.0)
        buffer.note_moved(batch, "other")
        buffer.note_moved(batch, "other")
        assert buffer.take_due(batch.created_s, 1.0) == []
        assert buffer.take_due(batch.deadline_s, 1.0) == ["one", "other"]
        assert buffer.take_due(batch.deadline_s + 1.0, 1.0) == ["one", "other"]
        buffer.resolve(batch, [STORED])
        assert buffer.take_due(batch.deadline_s + 9.0, 1.0) == []

    run_virtually(main())


def test_a_turn_begins_once_and_ends_under_the_lock() -> None:
    """Of threads that see that it is over, one begins the next; with the lock alone."""

    async def main() -> None:
        buffer = made()
        began = list[bool]()
        with buffer.lock:
            threads = [
                threading.Thread(target=lambda: began.append(buffer.begin_turn()))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
                thread.join(0.01)
            assert began == []
            assert buffer.is_turn_over
        for thread in threads:
            thread.join()
        assert sorted(began) == [False, True]
        assert not buffer.is_turn_over
        now_s = buffer.clock.monotonic_s()
        buffer.take_due(now_s, 1.0)
        assert not buffer.is_turn_over
        buffer.take_due(now_s + TURN_S, 1.0)
        assert buffer.is_turn_over

    run_virtually(main())


def test_memory_is_free_again_when_a_batch_is_resolved() -> None:
    """Waiters hear of it then, and of the close."""

    async def main() -> None:
        buffer = made(buffer_bytes_max=100)
        with buffer.lock:
            batch = buffer.begin("one", 5.0)
            buffer.reserve(batch, 100, 1, 1000, 10)
            with pytest.raises(BufferFullError):
                buffer.check(1, 1)
        room = buffer.room
        buffer.resolve(batch, [STORED])
        assert room.is_set()
        assert not buffer.room.is_set()
        with buffer.lock:
            buffer.check(100, 1)
        room = buffer.room
        buffer.close()
        assert room.is_set()
        with buffer.lock, pytest.raises(ClosedError):
            buffer.check(1, 1)

    run_virtually(main())
