"""Bounds of the wanted records of a partition: ranges of offsets and of times."""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from metaq.model import MAX_OFFSET, Millis, Offset

_US_PER_MS: Final = 1000
_FIRST: Final = Offset(0)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Half-open ranges; a record is wanted when it lies in both.

    A record without a time (a Java broker stamped it) lies in every range of times:
    its time is unknown.
    """

    start: Offset = _FIRST
    """First offset that is wanted; need not be a record boundary."""
    end: Offset = MAX_OFFSET
    """First offset that is not wanted any more."""
    start_ms: Millis | None = None
    """Earliest time that is wanted; None: any."""
    end_ms: Millis | None = None
    """Earliest time that is too late; None: none is."""

    def narrowed(self, other: "Bounds") -> "Bounds":
        """Return the intersection of these bounds with others."""
        starts = [b.start_ms for b in (self, other) if b.start_ms is not None]
        ends = [b.end_ms for b in (self, other) if b.end_ms is not None]
        return Bounds(
            max(self.start, other.start),
            min(self.end, other.end),
            max(starts, default=None),
            min(ends, default=None),
        )

    def overlaps(self, start: Offset, end: Offset) -> bool:
        """Tell whether a record of [start, end) can be wanted."""
        return start < self.end and self.start < end

    def clip(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the wanted rows of a batch with the columns `offset`, `timestamp`."""
        masks = []
        offsets, times = batch.column("offset"), batch.column("timestamp")
        if self.start > 0:
            masks.append(pc.greater_equal(offsets, self.start))
        if self.end < MAX_OFFSET:
            masks.append(pc.less(offsets, self.end))
        if self.start_ms is not None:
            bound = pa.scalar(self.start_ms * _US_PER_MS, times.type)
            masks.append(pc.fill_null(pc.greater_equal(times, bound), True))
        if self.end_ms is not None:
            bound = pa.scalar(self.end_ms * _US_PER_MS, times.type)
            masks.append(pc.fill_null(pc.less(times, bound), True))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        return batch.filter(masks[0]) if masks else batch


EVERYTHING: Final = Bounds()
"""Bounds that leave nothing out."""
