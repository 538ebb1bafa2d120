"""One log at its leader in a model: its progress, and how far it is committed.

In a broker the log itself moves its high watermark (`PartitionLog`), within the bound
that its progress gives it.
"""

from dataclasses import dataclass, replace
from typing import Self

from metaq.model import Offset
from metaq.replication.epochs import CopyFacts
from metaq.replication.progress import NOTHING, LogProgress, Quorum


@dataclass(frozen=True, slots=True)
class ModelLog(LogProgress):
    """A log whose appends, syncs and high watermark are values too."""

    end: Offset = NOTHING
    """Synced end of the leader's own copy."""
    ends: tuple[Offset, ...] = ()
    """Ends of own appends above the high watermark, ascending; some not synced yet."""

    def append(self, end: Offset) -> Self:
        """Return the log with an append on its way to the disk."""
        return replace(self, ends=(*self.ends, end))

    def sync(self, end: Offset) -> Self:
        """Return the log after the leader's own sync of everything below `end`."""
        return replace(self, end=max(self.end, end))

    def advance(self, quorum: Quorum) -> Self:
        """Return the log with the high watermark where it may be now."""
        bound = self.bound(quorum)
        if bound is None:
            return self
        limit = min(bound, self.end)
        hw = max([self.hw, self.epoch_start, *(e for e in self.ends if e <= limit)])
        if hw == self.hw:
            return self
        return replace(self, hw=hw, ends=tuple(e for e in self.ends if e > hw))


def begin_model_log(copy: CopyFacts) -> ModelLog:
    """Return the log at the begin of an epoch."""
    return ModelLog(copy.number, copy.end, copy.hw, end=copy.end)
