"""Appends of one log that are queued or written, and not answered as stored. Pure.

They are contiguous, in the order of their offsets. An append that *ends in doubt* is
answered early, because its sender has waited for too long or the log has another
leader. It stays here without a ticket, and is removed like the others: when it is
stored, when a full disk has refused it, or when its outcome will not be known. So a
batch that is sent again can wait for the bytes of its first append.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from operator import attrgetter

from metaq.errors import StorageError
from metaq.model import Offset
from metaq.storage.append_request import AppendRequest, AppendTicket, Tickets

_offset = attrgetter("offset")


class AppendsInFlight:
    """Queue of the appends in flight. Owner: the loop's side of the log."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: deque[AppendRequest] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: AppendRequest) -> None:
        """Add an append after the last."""
        self._requests.append(request)

    def take_stored(self, end: Offset) -> list[AppendRequest]:
        """Remove and return appends that end at `end` or before, oldest first."""
        requests, stored = self._requests, []
        while requests and requests[0].offset + requests[0].size_bytes <= end:
            stored.append(requests.popleft())
        return stored

    def take_refused(self, log_end: Offset) -> list[AppendRequest]:
        """Remove and return unwritten appends, which end after the log, in order."""
        refused: deque[AppendRequest] = deque()
        while self._requests and self._requests[-1].end_offset > log_end:
            refused.appendleft(self._requests.pop())
        return list(refused)

    def end_in_doubt(self, error: StorageError, *, until: Offset) -> int:
        """Fail appends that end at `until` or before; return their number.

        They stay; the storage thread keeps their bytes while it needs them.
        """
        failed = []
        for index, each in enumerate(self._requests):
            if each.end_offset > until:
                break
            failed.append(each.ticket)
            self._requests[index] = each._replace(ticket=Tickets(), chunks=())
        for ticket in failed:
            ticket.on_failed(error)
        return len(failed)

    def join(self, end: Offset, ticket: AppendTicket) -> bool:
        """Answer a ticket together with the append that has the byte before `end`.

        Returns:
            False if there is no such append; then nothing was done.
        """
        for index, each in enumerate(self._requests):
            if end <= each.end_offset:
                first = each.ticket
                known = first.tickets if isinstance(first, Tickets) else (first,)
                joined = Tickets((*known, ticket))
                self._requests[index] = each._replace(ticket=joined)
                return True
        return False

    def last_end(self, bound: Offset) -> Offset | None:
        """Return the greatest end of an append at `bound` or before, or None."""
        end = None
        for each in self._requests:
            if each.end_offset > bound:
                break
            end = each.end_offset
        return end

    def take_copies(
        self, offset: Offset, end: Offset, max_bytes: int
    ) -> list[AppendRequest]:
        """Return contiguous appends, the first at `offset`, with bytes in memory.

        Up to `end` and `max_bytes`, but at least one if there is one.
        """
        found: list[AppendRequest] = []
        requests = self._requests
        index = bisect_left(requests, offset, key=_offset)
        while index < len(requests):
            each = requests[index]
            is_next = each.offset == offset and each.end_offset <= end
            if not (
                is_next and each.chunks and (not found or each.size_bytes <= max_bytes)
            ):
                break
            found.append(each)
            offset, max_bytes = each.end_offset, max_bytes - each.size_bytes
            index += 1
        return found

    def copy_end(self, offset: Offset, wanted: Offset) -> tuple[Offset, bool]:
        """Return where a copy from `offset` ends, and whether an append ends there.

        The greatest end of an append at `wanted` or before, but at least that of the
        first. In bytes that a new leader found the ends of appends are not known:
        there (`wanted`, False).
        """
        requests = self._requests
        index = bisect_right(requests, offset, key=_offset) - 1
        if index < 0 or requests[index].end_offset <= offset:
            return wanted, False
        first = requests[index]
        if not first.record_count:
            return min(wanted, first.end_offset), wanted >= first.end_offset
        return max(self.last_end(wanted) or first.end_offset, first.end_offset), True

    def clear(self) -> None:
        """Remove all; none may have a ticket any more."""
        self._requests.clear()
