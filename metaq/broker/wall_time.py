"""The time that delayed messages and queue groups go by when the clock jumps. Pure."""

from typing import Final

JUMP_MS: Final = 1_000
"""A larger difference between wall clock and boot clock is a jump."""
DRIFT_PER_MS: Final = 1000
"""A clock that is set right gradually differs by one in so many."""
STEADY_MS: Final = 60_000
"""A clock that has jumped is believed when it has run evenly for so long."""


class WallTime:
    """The time that due times, expiry and delays go by: the wall clock, but for jumps.

    It is carried on by the clock that counts from the boot. Where the wall clock
    differs from that by more than JUMP_MS, it is not believed before it has run evenly
    for STEADY_MS.
    """

    def __init__(self, wall_ms: int, boot_ms: int) -> None:
        """Believe the wall clock as it is now."""
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._since_ms = boot_ms
        self.lead_ms = 0
        """By how much the wall clock is ahead, if it is not believed; else 0."""

    def look(self, wall_ms: int, boot_ms: int) -> int:
        """Return the time in milliseconds since 1970, given both clocks."""
        passed = boot_ms - self._boot_ms
        carried = self._wall_ms + passed
        lead = wall_ms - carried
        tolerance = JUMP_MS + passed // DRIFT_PER_MS
        if abs(lead) > tolerance:
            if not self.lead_ms or abs(lead - self.lead_ms) > tolerance:
                self.lead_ms, self._since_ms = lead, boot_ms
            if boot_ms - self._since_ms < STEADY_MS:
                return carried
        self._wall_ms, self._boot_ms, self.lead_ms = wall_ms, boot_ms, 0
        return wall_ms
