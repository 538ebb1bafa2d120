"""Open messages of a queue, and the leases that workers have of them. Pure."""

import enum
import sys
from typing import Final, NamedTuple

from metaq.deadlines import Deadlines
from metaq.model import Offset, SizeBytes


class At(enum.IntEnum):
    """Place of an open message."""

    READY = 0
    LEASED = 1
    DELAYED = 2
    DEAD = 3
    HELD = 4
    """Acked in a transaction that has no outcome yet."""


class OpenMessage:
    """An open message. Owner: the state."""

    __slots__ = (
        "at", "count", "delivery", "expiry_ms", "heap", "key", "lease", "offset",
        "silent_count", "size_bytes", "worker",
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
        """Leases that ended since its last nack; after a restart all returns."""
        self.key = key
        self.expiry_ms = expiry_ms
        self.at = At.READY
        self.delivery = 0
        """The last one that is known, of this life or an earlier; 0: none."""
        self.worker = ""
        """That has it where a transaction holds it."""
        self.lease: Lease | None = None
        """By which it is LEASED; None: it is not."""
        self.heap: list[Offset] | None = None
        """The one that it is queued in, to be given out; None: it is not."""

    @property
    def end(self) -> Offset:
        """Return the offset after it."""
        return Offset(self.offset + self.size_bytes)


class OpenBound:
    """Open messages of all queues of a broker, and how many there may be."""

    def __init__(self, count_max: int = sys.maxsize) -> None:
        """Begin with none."""
        self.count = 0
        self.count_max: Final = count_max


class Lease:
    """Messages that a worker has until one moment: of one take. Owner: the state."""

    __slots__ = ("end_ms", "messages", "worker")

    def __init__(self, worker: str, end_ms: int) -> None:
        self.worker = worker
        self.end_ms = end_ms
        """Also where it was cut short, because the worker is away."""
        self.messages: dict[OpenMessage, None] = {}
        """Those that are leased by it, as they were given."""

    def add(self, message: OpenMessage) -> None:
        """Lease a message."""
        message.at, message.lease = At.LEASED, self
        self.messages[message] = None

    def leave(self, message: OpenMessage) -> None:
        """Lease a message no more; `LeaseTable.tidy` follows."""
        message.lease = None
        del self.messages[message]


class LeaseTable:
    """The leases of a queue: whose, and until when. Owner: the state."""

    def __init__(self) -> None:
        """Begin with none."""
        self._ends: Deadlines[Lease] = Deadlines()
        self._of_worker: dict[str, dict[Lease, None]] = {}
        self._last: Lease | None = None
        """The last that was begun, while it may get more messages."""

    @property
    def first_ms(self) -> float | None:
        """Return a time before which no lease ends; None: there is none."""
        return self._ends.first_s

    def holders(self) -> dict[str, int]:
        """Return worker → how many messages it has."""
        return {
            worker: sum(len(lease.messages) for lease in leases)
            for worker, leases in self._of_worker.items()
        }

    def holds(self, worker: str) -> bool:
        """Return whether a worker has any message."""
        return worker in self._of_worker

    def lease_of(self, worker: str, end_ms: int) -> Lease:
        """Return the lease of a worker until a moment, to which messages are added."""
        lease = self._last
        if lease is None or lease.worker != worker or lease.end_ms != end_ms:
            lease = self._last = Lease(worker, end_ms)
            self._of_worker.setdefault(worker, {})[lease] = None
            self._ends.set(lease, end_ms)
        return lease

    def tidy(self, left: list[Lease]) -> None:
        """Forget leases of nothing among those that messages have left; clear these."""
        for lease in {*left} if len(left) > 1 else left:
            if not lease.messages:
                self.drop(lease)
        left.clear()

    def drop(self, lease: Lease) -> None:
        """Forget a lease of nothing."""
        if lease is self._last:
            self._last = None
        self._ends.clear(lease)
        leases = self._of_worker[lease.worker]
        del leases[lease]
        if not leases:
            del self._of_worker[lease.worker]

    def cut_short(self, worker: str, end_ms: int) -> None:
        """Let the leases of a worker end at a time, where they end later."""
        self._last = None
        for lease in self._of_worker.get(worker, ()):
            self._ends.set(lease, min(end_ms, lease.end_ms))

    def restore(self, worker: str) -> None:
        """Let the leases of a worker end as they were given."""
        for lease in self._of_worker.get(worker, ()):
            self._ends.set(lease, lease.end_ms)

    def take_due(self, now_ms: int) -> list[Lease]:
        """Return the leases that are over, oldest first; `tidy` follows."""
        return self._ends.take_due(now_ms)


class Reclaim(NamedTuple):
    """Messages that workers of earlier lives may have, until these are back."""

    end: Offset
    """End of the log when this life began: what is above was given out by none."""
    until_ms: int
    """Monotonic."""
