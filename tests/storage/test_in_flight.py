"""Appends that are queued or written, and not answered as stored."""

from typing import Any, cast

import pytest

from metaq.errors import MayBeStoredError, NoSpaceError
from metaq.model import MessageId, Offset, SizeBytes
from metaq.storage.append_request import AppendRequest, Tickets
from metaq.storage.in_flight import AppendsInFlight
from tests.rigs.storage import Ticket

SIZE = 10


def flight(count: int) -> tuple[AppendsInFlight, list[Ticket]]:
    """Return appends of ten bytes each, from offset 0 on, and their tickets."""
    appends, tickets = AppendsInFlight(), [Ticket() for _ in range(count)]
    for number, ticket in enumerate(tickets):
        nobody = cast("Any", None)
        offset, size = Offset(number * SIZE), SizeBytes(SIZE)
        appends.add(
            AppendRequest(
                nobody, nobody, 0, offset, (b"x" * SIZE,), size, 1, MessageId(1), ticket
            )
        )
    return appends, tickets


@pytest.mark.parametrize(
    ("end", "count"), [(0, 0), (9, 0), (10, 1), (15, 1), (30, 3), (99, 3)]
)
def test_what_the_end_has_passed_is_stored(end: int, count: int) -> None:
    """An append of which the last byte is missing is not."""
    appends, tickets = flight(3)
    stored = appends.take_stored(Offset(end))
    assert [each.ticket for each in stored] == tickets[:count]
    assert len(appends) == 3 - count


@pytest.mark.parametrize(("log_end", "count"), [(0, 3), (10, 2), (15, 2), (30, 0)])
def test_what_is_not_written_is_refused(log_end: int, count: int) -> None:
    """In the order in which it was appended."""
    appends, tickets = flight(3)
    refused = appends.take_refused(Offset(log_end))
    assert [each.ticket for each in refused] == tickets[3 - count :]
    assert len(appends) == 3 - count


@pytest.mark.parametrize(
    ("bound", "end"), [(9, None), (10, 10), (19, 10), (29, 20), (30, 30), (50, 30)]
)
def test_a_bound_is_rounded_down_to_the_end_of_an_append(
    bound: int, end: int | None
) -> None:
    """Readers see an append whole or not at all."""
    appends, _tickets = flight(3)
    assert appends.last_end(Offset(bound)) == end


def test_what_ends_in_doubt_stays_without_its_ticket_and_bytes() -> None:
    """It still counts for the bounds, and those who join it later are answered."""
    appends, tickets = flight(3)
    error = MayBeStoredError("slow")
    assert appends.end_in_doubt(error, until=Offset(25)) == 2
    assert [each.error for each in tickets] == [error, error, None]
    repeat = Ticket()
    assert appends.join(Offset(20), repeat)
    assert appends.last_end(Offset(20)) == 20
    stored = appends.take_stored(Offset(20))
    assert [each.chunks for each in stored] == [(), ()]
    for each in stored:
        each.ticket.on_stored()
    assert repeat.is_stored
    assert not tickets[2].is_answered


def test_those_who_join_share_the_outcome_in_their_order() -> None:
    """Of the append that has the byte before the end of the batch."""
    order: list[Ticket] = []
    appends, _tickets = flight(1)
    repeats = [Ticket(order) for _ in range(3)]
    assert all(appends.join(Offset(7), each) for each in repeats)
    assert not appends.join(Offset(11), Ticket())
    (refused,) = appends.take_refused(Offset(0))
    assert isinstance(refused.ticket, Tickets)
    refused.ticket.on_failed(NoSpaceError("full"))
    assert order == repeats
    assert not appends.join(Offset(7), Ticket())
