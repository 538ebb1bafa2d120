"""Options of a queue group, and the times that its rules are given. Pure."""

from dataclasses import dataclass
from typing import Final, NamedTuple

INCARNATION_SHIFT: Final = 40
"""A delivery is `incarnation << 40 | counter`, the counter even: an incarnation has at
most 5 * 10^11 deliveries, and a new one begins before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """Options of a queue group that apply to each of its queues."""

    lease_ms: int = 30_000
    """Duration of a lease, 1 s to 12 h."""
    deliveries_max: int = 16
    """Maximum number of deliveries of a message, 1 to 1000; then it is given up."""
    retry_delays_ms: tuple[int, ...] = (1_000, 5_000, 30_000, 120_000)
    """Delays after a nack of the first, second, ... delivery; the last one repeats.
    Empty: no delay."""
    is_ordered: bool = False
    """Give out the messages of a key one at a time, in log order."""
    takes_letters: bool = True
    """A message that is given up becomes a dead letter; False: it is dropped."""

    def retry_delay_ms(self, deliveries: int) -> int:
        """Return the delay after a nack of a message's n-th delivery, 1 or more."""
        delays = self.retry_delays_ms
        return delays[min(deliveries, len(delays)) - 1] if delays else 0


class Now(NamedTuple):
    """The current time on both clocks, milliseconds."""

    mono_ms: int
    """Clock of leases, and of delays in memory."""
    wall_ms: int
    """Clock of delays that survive a restart, and of message expiry."""
