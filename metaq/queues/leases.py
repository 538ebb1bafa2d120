"""Open messages of a queue, and the leases that workers hold on them. Pure."""

import enum
import sys
from typing import Final, NamedTuple

from metaq.deadlines import Deadlines
from metaq.model import Offset, SizeBytes


class MessageState(enum.IntEnum):
    """State of an open message."""

    READY = 0
    LEASED = 1
    DELAYED = 2
    DEAD = 3
    HELD = 4
    """Acked in a transaction whose outcome is not known yet."""


class OpenMessage:
    """An open message. Owned by the `QueueState`."""

    __slots__ = (
        "count", "delivery", "expiry_ms", "heap", "key", "lease", "offset",
        "silent_count", "size_bytes", "state", "worker",
    )  # fmt: skip

    def __init__(
        self,
        offset: Offset,
        size_bytes: SizeBytes,
        count: int,
        key: int | None,
        expiry_ms: int | None,
    ) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.count = count
        self.silent_count = count
        """Leases that expired since the last nack; after a restart, all deliveries."""
        self.key = key
        self.expiry_ms = expiry_ms
        self.state = MessageState.READY
        self.delivery = 0
        """Last known delivery, of this incarnation or an earlier one; 0: none."""
        self.worker = ""
        """Worker that acked the message, while it is HELD."""
        self.lease: Lease | None = None
        """Lease of a LEASED message; else None."""
        self.heap: list[Offset] | None = None
        """Heap in which the message is queued to be given out; None: not queued."""

    @property
    def end(self) -> Offset:
        """Return the offset after the message."""
        return Offset(self.offset + self.size_bytes)


class OpenBound:
    """Number of open messages in all queues of a broker, and its maximum."""

    def __init__(self, count_max: int = sys.maxsize) -> None:
        """Start at 0."""
        self.count = 0
        self.count_max: Final = count_max


class Lease:
    """Messages that one take leased to a worker. Owned by the `QueueState`."""

    __slots__ = ("end_ms", "messages", "worker")

    def __init__(self, worker: str, end_ms: int) -> None:
        self.worker = worker
        self.end_ms = end_ms
        """Granted end, monotonic milliseconds; `cut_short` does not change it."""
        self.messages: dict[OpenMessage, None] = {}
        """Leased messages, in the order in which they were given out."""

    def add(self, message: OpenMessage) -> None:
        """Add a message to the lease."""
        message.state, message.lease = MessageState.LEASED, self
        self.messages[message] = None

    def remove(self, message: OpenMessage) -> None:
        """Remove a message from the lease. Call `LeaseTable.drop_empty` next."""
        message.lease = None
        del self.messages[message]


class LeaseTable:
    """The leases of a queue by worker and by end. Owned by the `QueueState`."""

    def __init__(self) -> None:
        """Create an empty table."""
        self._ends: Deadlines[Lease] = Deadlines()
        self._of_worker: dict[str, dict[Lease, None]] = {}
        self._last: Lease | None = None
        """Newest lease, while messages may be added to it."""

    @property
    def first_ms(self) -> float | None:
        """Return a time before which no lease ends; None: there is no lease."""
        return self._ends.first_s

    def holders(self) -> dict[str, int]:
        """Return worker → number of its leased messages."""
        return {
            worker: sum(len(lease.messages) for lease in leases)
            for worker, leases in self._of_worker.items()
        }

    def holds(self, worker: str) -> bool:
        """Return whether a worker has a leased message."""
        return worker in self._of_worker

    def lease_of(self, worker: str, end_ms: int) -> Lease:
        """Return the worker's newest lease if it ends at `end_ms`, else a new lease."""
        lease = self._last
        if lease is None or lease.worker != worker or lease.end_ms != end_ms:
            lease = self._last = Lease(worker, end_ms)
            self._of_worker.setdefault(worker, {})[lease] = None
            self._ends.set(lease, end_ms)
        return lease

    def drop_empty(self, left: list[Lease]) -> None:
        """Drop the leases in `left` that are empty now, then clear the list."""
        for lease in {*left} if len(left) > 1 else left:
            if not lease.messages:
                self.drop(lease)
        left.clear()

    def drop(self, lease: Lease) -> None:
        """Remove an empty lease."""
        if lease is self._last:
            self._last = None
        self._ends.clear(lease)
        leases = self._of_worker[lease.worker]
        del leases[lease]
        if not leases:
            del self._of_worker[lease.worker]

    def cut_short(self, worker: str, end_ms: int) -> None:
        """Let the leases of a worker end at `end_ms` at the latest."""
        self._last = None
        for lease in self._of_worker.get(worker, ()):
            self._ends.set(lease, min(end_ms, lease.end_ms))

    def restore(self, worker: str) -> None:
        """Undo `cut_short`: let the leases of a worker run to their granted end."""
        for lease in self._of_worker.get(worker, ()):
            self._ends.set(lease, lease.end_ms)

    def take_due(self, now_ms: int) -> list[Lease]:
        """Remove the deadlines of expired leases; return these, earliest end first.

        Call `drop_empty` after their messages have left them.
        """
        return self._ends.take_due(now_ms)


class Reclaim(NamedTuple):
    """Messages that workers may hold from earlier incarnations, and until when."""

    end: Offset
    """Messages below it wait for the end of the reclaim time: the log end at the start
    of this incarnation, or 0 after a clean shutdown."""
    until_ms: int
    """End of the reclaim time, monotonic milliseconds."""
