"""Wall time for delayed messages and queue groups, robust against clock jumps. Pure."""

from typing import Final

JUMP_MS: Final = 1_000
"""A larger difference between wall clock and boot clock counts as a jump."""
DRIFT_PER_MS: Final = 1000
"""A clock that is slewed differs from the boot clock by at most 1 ms in this time."""
STEADY_MS: Final = 60_000
"""A clock that has jumped is trusted again after running evenly for this time."""


class WallTime:
    """The time for due times, expiry and delays: the wall clock without its jumps.

    It advances with the boot clock. If the wall clock differs from it by more than
    JUMP_MS, the wall clock is trusted only after running evenly for STEADY_MS.
    """

    def __init__(self, wall_ms: int, boot_ms: int) -> None:
        """Trust the wall clock as it is now."""
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._since_ms = boot_ms
        self.lead_ms = 0
        """Lead of the wall clock in ms while it is not trusted; else 0."""

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
