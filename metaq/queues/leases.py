"""Open messages of a queue, and the leases that workers have of them. Pure."""

import enum
import sys
from typing import Final, NamedTuple

from metaq.model import Offset, SizeBytes

SPARE_MAX: Final = 16
"""Messages of a lease that ended, which it remembers besides as many as it has."""


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

    __slots__ = ("count", "end_ms", "given", "worker")

    def __init__(self, worker: str, end_ms: int) -> None:
        self.worker = worker
        self.end_ms = end_ms
        """Also where it was cut short, because the worker is away."""
        self.count = 0
        """Messages that are leased by it."""
        self.given: list[OpenMessage] = []
        """These, and some that are not any more."""

    def add(self, message: OpenMessage) -> None:
        """Lease a message."""
        message.at, message.lease = At.LEASED, self
        self.count += 1
        self.given.append(message)

    def leave(self, message: OpenMessage) -> None:
        """Lease a message no more; `tidy` follows."""
        message.lease = None
        self.count -= 1

    def tidy(self) -> None:
        """Forget the messages that have left, where these are many."""
        if len(self.given) > 2 * self.count + SPARE_MAX:
            self.given = self.messages()

    def messages(self) -> list[OpenMessage]:
        """Return those that are leased by it, as they were given."""
        # One that was given back, and taken again in its millisecond, is there twice.
        return [*dict.fromkeys(each for each in self.given if each.lease is self)]


class Reclaim(NamedTuple):
    """Messages that workers of earlier lives may have, until these are back."""

    end: Offset
    """End of the log when this life began: what is above was given out by none."""
    until_ms: int
    """Monotonic."""
