"""Options of a queue group, and the clocks that its rules are given. Pure."""

from dataclasses import dataclass
from typing import Final, NamedTuple

INCARNATION_SHIFT: Final = 40
"""A delivery is `incarnation << 40 | counter`: a life has 10^12 deliveries at most, and
begins again before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """Options of a queue group that its queues go by."""

    lease_ms: int = 30_000
    """For how long a delivery is its worker's, 1 s to 12 h."""
    deliveries_max: int = 16
    """A message that is returned after so many is given out no more, 1 to 1000."""
    retry_delays_ms: tuple[int, ...] = (1_000, 5_000, 30_000, 120_000)
    """Delay of a nack after the first, second, ... delivery; the last one repeats.
    Empty: at once."""
    is_ordered: bool = False
    """One message of a key at a time, in their order."""
    takes_letters: bool = True
    """A message that is given up is a dead letter; False: it is dropped."""

    def retry_delay_ms(self, deliveries: int) -> int:
        """Return the delay of a nack of the given delivery, 1 or more."""
        delays = self.retry_delays_ms
        return delays[min(deliveries, len(delays)) - 1] if delays else 0


class Now(NamedTuple):
    """One moment on both clocks, milliseconds."""

    mono_ms: int
    """Leases and delays in memory go by this one."""
    wall_ms: int
    """Delays that a restart must know go by this one."""
