"""Message ids: wall clock, broker and sequence in one signed 64-bit number.

    bit 63 ........................ 22 | 21 ....... 12 | 11 ........ 0
        milliseconds since ID_ZERO_MS  | broker 0..1023 | sequence

The generator counts *ticks*: `milliseconds << 12 | sequence`, a number that only grows.
It follows the wall clock when the clock is ahead, and runs ahead of the clock after the
clock stepped back, or when a millisecond needed more than 4096 ids; so ids of one
broker never repeat and never decrease, even across restarts if its floor is the largest
id on disk.

Java brokers use a monotonic clock and stamp negative ids, which are ignored as a floor.
Source: docs/metaq-1.4/broker.md 8.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final, Protocol

from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, BrokerId, MessageId, Millis

SEQUENCE_BITS: Final = 12
WORKER_BITS: Final = 10
SEQUENCE_MASK: Final = (1 << SEQUENCE_BITS) - 1
BROKER_ID_MAX: Final = (1 << WORKER_BITS) - 1

MS_MAX: Final = 2**41 - 2**35
"""Latest trusted millisecond, a year before the 41 bits run out (2080). A later floor
does not come from a clock, and would leave no ids."""


class WallClock(Protocol):
    """Clock interface of the generator."""

    def wall_ms(self) -> Millis:
        """Return the wall clock in milliseconds since 1970 (UTC); it may jump."""


def id_after(first: MessageId, k: int) -> MessageId:
    """Return the `k`-th id after `first`; k = 0 gives `first`.

    Broker and client share this rule, because the reply to an `mput` has its first id
    only. It holds for negative ids too.
    """
    carried = (first & SEQUENCE_MASK) + k
    return MessageId(
        first
        - (first & SEQUENCE_MASK)
        + ((carried >> SEQUENCE_BITS) << ID_MS_SHIFT)
        + (carried & SEQUENCE_MASK)
    )


def id_runs(first: MessageId, count: int) -> Iterator[range]:
    """Yield the ids of `count` records from `first` on, as ranges.

    A range ends where the sequence overflows. The ids are `id_after` of 0, 1, ... .
    """
    done = 0
    while done < count:
        start = id_after(first, done)
        size = min(SEQUENCE_MASK + 1 - (start & SEQUENCE_MASK), count - done)
        yield range(start, start + size)
        done += size


def ids_from(first: MessageId, count: int) -> list[int]:
    """Return the ids of `count` records from `first` on: `id_after` of 0, 1, ..."""
    return list(chain.from_iterable(id_runs(first, count)))


class IdGenerator:
    """The ids of one broker. Owner: the thread that stamps records; not thread-safe."""

    def __init__(self, clock: WallClock, broker_id: BrokerId, floor: MessageId) -> None:
        """Start after `floor`.

        Args:
            clock: wall clock; may jump either way.
            broker_id: 0..1023.
            floor: largest id on this broker's disk; negative if there is none.

        Raises:
            ValueError: the broker id is out of range.
        """
        if not 0 <= broker_id <= BROKER_ID_MAX:
            raise ValueError(f"broker id: expected 0..{BROKER_ID_MAX}, got {broker_id}")
        self._clock = clock
        self._worker = broker_id << SEQUENCE_BITS
        # Start at tick 1: with tick 0 broker 0 would stamp the id 0, for "no record".
        self._next_tick = 1 << SEQUENCE_BITS
        if floor >= 0 and floor >> ID_MS_SHIFT <= MS_MAX:
            self._next_tick = max(self._next_tick, _tick_of(floor) + 1)

    def peek(self) -> MessageId:
        """Return the id that `reserve` would start with now."""
        now = min(self._clock.wall_ms() - ID_ZERO_MS, MS_MAX) << SEQUENCE_BITS
        self._next_tick = max(self._next_tick, now)
        return self._id_of(self._next_tick)

    def advance_to(self, next_id: MessageId) -> None:
        """Use no id below `next_id` from now on.

        No effect if the next id is greater already, or if no clock can have made it.
        """
        if next_id >> ID_MS_SHIFT <= MS_MAX:
            self._next_tick = max(self._next_tick, _tick_of(next_id))

    def advance_past(self, time_ms: Millis) -> None:
        """Use no id with a time up to `time_ms`; no effect as in `advance_to`."""
        tick = time_ms + 1 - ID_ZERO_MS
        if tick <= MS_MAX:
            self._next_tick = max(self._next_tick, tick << SEQUENCE_BITS)

    def reserve(self, count: int) -> MessageId:
        """Reserve `count` ids (1 or more); return the first, see `id_after`."""
        first = self.peek()
        self._next_tick += count
        return first

    def _id_of(self, tick: int) -> MessageId:
        milliseconds, sequence = tick >> SEQUENCE_BITS, tick & SEQUENCE_MASK
        return MessageId((milliseconds << ID_MS_SHIFT) | self._worker | sequence)


def _tick_of(message_id: MessageId) -> int:
    return ((message_id >> ID_MS_SHIFT) << SEQUENCE_BITS) | (message_id & SEQUENCE_MASK)
