"""Batches: their bytes, and results that are computed when asked for."""

import asyncio
import gc
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.errors import OutcomeUnknownError, PartlySentError
from metaq.client.produce.batches import (
    Batch,
    BatchOutcome,
    Home,
    SendFuture,
    SendResult,
    SendResults,
    encode_records,
)
from metaq.errors import ClosedError, ForbiddenError, RequestTimeoutError, ServerError
from metaq.model import MessageId, Offset
from metaq.record.ids import id_after
from metaq.record.layout import encode_record
from tests.client.producing import at
from tests.rigs.virtual_time import run_virtually

PLACE = at(2)


def make_home(thread_id: int = -1) -> Home:
    return Home(threading.Lock(), asyncio.get_running_loop(), thread_id)


def make_batch(
    payloads: list[bytes], thread_id: int = -1, home: Home | None = None
) -> Batch:
    home = home or make_home(thread_id)
    batch = Batch(home, created_s=0.0, timeout_s=1.0)
    batch.payloads = payloads
    return batch


def receipt(message_id: int, offset: int) -> SendResult:
    return SendResult(MessageId(message_id), PLACE, Offset(offset))


@given(
    payloads=st.lists(st.binary(max_size=20), min_size=1, max_size=30)
    | st.builds(lambda p, n: [p] * n, st.binary(max_size=20), st.integers(1, 30))
    | st.lists(st.binary(min_size=5, max_size=5), min_size=1, max_size=30),
    has_flags=st.booleans(),
    data=st.data(),
)
def test_records_are_those_of_the_format(
    payloads: list[bytes], has_flags: bool, data: st.DataObject
) -> None:
    """Both ways of encoding write what `encode_record` writes, one by one."""
    flags = None
    if has_flags:
        count = len(payloads)
        flags = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    expected = b"".join(
        encode_record(payload, id=MessageId(0), flag=flag)
        for payload, flag in zip(payloads, flags or [0] * len(payloads), strict=True)
    )
    assert encode_records(payloads, flags) == expected


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    cuts=st.sets(st.integers(1, 19)),
    first_id=st.integers(-(2**62), 2**62),
)
def test_every_message_finds_its_own_outcome(
    sizes: list[int], cuts: set[int], first_id: int
) -> None:
    """However a batch was cut, id and offset follow from the part it travelled in."""

    async def main() -> None:
        batch = make_batch([bytes(size) for size in sizes])
        firsts = [0, *sorted(cut for cut in cuts if cut < len(sizes))]
        outcomes = [
            BatchOutcome(first, receipt(first_id + n * 10**6, n * 10**4))
            for n, first in enumerate(firsts)
        ]
        batch.resolve(outcomes)
        for place in range(len(sizes)):
            part = max(n for n, first in enumerate(firsts) if first <= place)
            before = sizes[firsts[part] : place]
            begin = MessageId(first_id + part * 10**6)
            assert SendFuture(batch, place).result() == SendResult(
                id_after(begin, len(before)),
                PLACE,
                Offset(part * 10**4 + sum(before) + 20 * len(before)),
            )

    run_virtually(main())


def test_a_part_that_failed_fails_its_own_messages() -> None:
    """The others have their results."""

    async def main() -> None:
        batch = make_batch([b"a", b"b", b"c"])
        future = SendFuture(batch, 1)
        assert not future.done()
        with pytest.raises(RequestTimeoutError, match="still being sent"):
            future.result(timeout=0)
        with pytest.raises(RequestTimeoutError, match="still being sent"):
            future.result(timeout=0)
        error = ServerError("no")
        batch.resolve(
            [
                BatchOutcome(0, receipt(1, 0)),
                BatchOutcome(1, error),
                BatchOutcome(2, receipt(5, 21)),
            ]
        )
        assert future.done()
        assert future.exception() is error
        with pytest.raises(ServerError, match="no"):
            await future
        assert SendFuture(batch, 0).exception() is None
        assert await SendFuture(batch, 2) == receipt(5, 21)

    run_virtually(main())


def test_asking_again_and_again_leaves_nothing() -> None:
    """A wait that ends without the outcome takes its callback back, in both worlds."""

    async def main() -> None:
        batch = make_batch([b"a"])
        future = SendFuture(batch, 0)

        def blocks_after_polls() -> int:
            for _ in range(1000):
                with pytest.raises(RequestTimeoutError):
                    future.result(timeout=0)
            gc.collect()
            return sys.getallocatedblocks()

        async def blocks_after_waits() -> int:
            for _ in range(1000):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(future, 0.001)
            gc.collect()
            return sys.getallocatedblocks()

        before = blocks_after_polls()
        assert blocks_after_polls() - before < 500
        before = await blocks_after_waits()
        assert await blocks_after_waits() - before < 500
        batch.resolve([BatchOutcome(0, receipt(1, 0))])
        assert await future == receipt(1, 0)

    run_virtually(main())


def test_the_loop_does_not_wait_for_itself() -> None:
    """`result` on the loop's thread is an error instead of a deadlock."""

    async def main() -> None:
        future = SendFuture(make_batch([b"a"], threading.get_ident()), 0)
        with pytest.raises(RuntimeError, match="use await"):
            future.result()

    run_virtually(main())


def test_an_outcome_is_awaited_on_another_loop() -> None:
    """Another thread's loop hears of it too, and a cancelled wait harms no other."""

    async def main() -> None:
        batch = make_batch([b"a"])
        found: list[SendResult] = []
        is_waiting = threading.Event()

        async def elsewhere() -> None:
            async def wait() -> SendResult:
                return await SendFuture(batch, 0)

            cancelled = asyncio.create_task(wait())
            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            cancelled.cancel()
            is_waiting.set()
            found.append(await task)

        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        is_waiting.wait(30)
        batch.resolve([BatchOutcome(0, receipt(1, 2))])
        thread.join(30)
        assert found == [receipt(1, 2)]

    asyncio.run(main())


def test_results_follow_the_order_of_the_list() -> None:
    """Also when the messages travelled in another one."""

    async def main() -> None:
        one, two = make_batch([b"", b"", b""]), make_batch([b"", b""])
        one.resolve([BatchOutcome(0, receipt(100, 0))])
        two.resolve([BatchOutcome(0, receipt(200, 0))])
        parts = [(one, 1, 2), (two, 0, 2)]
        assert [r.message_id for r in SendResults(parts, None)] == [101, 102, 200, 201]
        mixed = SendResults(parts, [3, 0, 2, 1])
        assert repr(mixed) == "SendResults(4 messages)"
        assert [r.message_id for r in mixed] == [201, 101, 200, 102]
        assert mixed[-1].message_id == 102
        assert [r.message_id for r in mixed[1:3]] == [101, 200]
        with pytest.raises(IndexError):
            mixed[4]
        mixed.raise_errors()

    run_virtually(main())


def test_failures_of_others_in_the_same_batch_do_not_count() -> None:
    """A list shares its batches with messages that other callers sent."""

    async def main() -> None:
        batch = make_batch([b"", b""])
        error = ForbiddenError("no")
        batch.resolve([BatchOutcome(0, error), BatchOutcome(1, receipt(1, 20))])
        SendResults([(batch, 1, 1)], None).raise_errors()
        with pytest.raises(ForbiddenError):
            SendResults([(batch, 0, 1)], None).raise_errors()
        with pytest.raises(PartlySentError, match=r"1 of 2 .* no") as caught:
            SendResults([(batch, 0, 2)], None).raise_errors()
        assert caught.value.outcomes == [error, receipt(1, 20)]

    run_virtually(main())


def test_a_callback_that_comes_when_the_loop_is_gone_is_called_by_its_caller() -> None:
    """As the callbacks of other futures; the outcome is known."""
    futures: list[SendFuture] = []

    async def main() -> None:
        batch = make_batch([b"a"])
        batch.resolve([BatchOutcome(0, receipt(1, 0))])
        futures.append(SendFuture(batch, 0))

    run_virtually(main())
    called: list[SendFuture] = []
    futures[0].add_done_callback(called.append)
    assert called == futures


def test_nobody_waits_for_a_loop_that_was_closed_before_its_client() -> None:
    """No outcome ever comes; the message may be stored."""

    async def leave() -> SendFuture:
        return SendFuture(make_batch([b"a"], threading.get_ident()), 0)

    future = run_virtually(leave())
    with pytest.raises(OutcomeUnknownError, match="closed before the client"):
        future.result()

    async def wait() -> None:
        await future

    with pytest.raises(OutcomeUnknownError, match="closed before the client"):
        asyncio.run(wait())


def test_a_callback_in_the_child_of_a_fork_is_refused() -> None:
    """Its lock may be held for ever, and its loop is the parent's."""

    async def main() -> None:
        home = make_home()
        home.pid -= 1
        batch = make_batch([b"a"], home=home)
        with pytest.raises(ClosedError, match="its outcome is known there"):
            SendFuture(batch, 0).add_done_callback(print)

    run_virtually(main())
