"""Requests: receipts of a run of puts, and puts that are cut out of it."""

import asyncio
import threading
from typing import Any

import pytest

from metaq.client.produce.attempts import BatchSpan
from metaq.client.produce.batches import Batch, BatchName, Home
from metaq.client.produce.requests import Request
from metaq.errors import MetaqError, ServerError
from metaq.peer.replies import ReceiptColumns
from metaq.protocol.commands import Result
from tests.client.producing import at


def request_of(count: int, *, is_mput: bool = False) -> Request:
    loop = asyncio.new_event_loop()
    loop.close()
    home = Home(threading.Lock(), loop, threading.get_ident())
    batch = Batch(home, created_s=0.0, timeout_s=1.0)
    batch.payloads = [b"%d" % n for n in range(count)]
    return Request(batch, BatchSpan(0, count, is_mput=is_mput), at(0), 1)


def test_failed_puts_are_cut_out_and_the_stored_ones_have_outcomes() -> None:
    """Neighbours that failed stay together; the batch waits for each request."""
    request, failed = request_of(5), list[tuple[list[int], MetaqError]]()

    def on_failed(_request: Request, opaques: Any, error: MetaqError) -> None:
        failed.append((list(opaques), error))

    request.expect_receipts(range(100, 105), lambda _one, _count: None, on_failed)
    request.left = 5
    request.on_receipts(ReceiptColumns([100, 104], [7, 9], [0, 0], [0, 84]))
    request.on_outcome([101], Result(500, b"no", 101))
    (opaques, error) = failed[0]
    assert (opaques, type(error)) == ([101], ServerError)
    assert request.unanswered() == [101, 102, 103]
    assert [one.span for one in request.cut([101, 102])] == [
        BatchSpan(1, 3, is_mput=False)
    ]
    assert request.batch.requests_left == 2
    found = [(o.first, o.ids, o.offsets) for o in request.outcomes()]
    assert found == [(0, [7], [0]), (4, [9], [84])]


@pytest.mark.parametrize(
    ("refused", "failed", "others"),
    [
        ((1, 2, 6), [(11, 13), (16, 17)], [(10, 11), (13, 16)]),
        (range(7), [(10, 17)], []),
        ((), [], [(10, 13), (13, 17)]),
        ((7, 8), [], [(10, 13), (13, 17)]),
    ],
)
def test_what_is_refused_leaves_a_request_or_halves_it(
    refused: tuple[int, ...],
    failed: list[tuple[int, int]],
    others: list[tuple[int, int]],
) -> None:
    """Its messages are counted from its first one; numbers of others count for none."""
    request = request_of(20, is_mput=True)
    request.span = BatchSpan(10, 17, is_mput=True)
    for found, spans in zip(request.split(refused), (failed, others), strict=True):
        assert [one.span[:2] for one in found] == spans
    assert request.batch.requests_left == len(failed) + len(others)


def test_receipts_of_a_run_that_was_given_up_are_ignored() -> None:
    """Its messages have their outcome."""
    request, calls = request_of(1), list[int]()
    request.expect_receipts(
        range(5, 6), lambda _one, count: calls.append(count), pytest.fail
    )
    request.left = 0
    request.on_receipts(ReceiptColumns([5], [7], [0], [0]))
    request.on_outcome([5], ServerError("late"))
    assert calls == []


def test_a_named_request_goes_on_under_its_spare_name_once() -> None:
    """Its sequence is that of the batch and of its first message."""
    request = request_of(3, is_mput=True)
    request.name = BatchName("first", 10, "spare")
    assert b" first 10" in request.encode_mput(1, "ignored")
    assert request.use_spare_name()
    assert b" spare 10" in request.encode_mput(2, "ignored")
    assert not request.use_spare_name()
