"""Producers of a partition: which batches were stored, so that none is stored twice.

A producer numbers its records per partition; a batch is identified by the producer, the
sequence of its first record and its count. A producer that repeats a batch, because the
outcome of the first attempt is unknown, is answered with the offset of that attempt.
For this the last `BATCHES_KEPT` batches of each producer are remembered, as many as may
be in flight.

    sequence   0        4000      8000      8100
               | batch  | batch   | batch   | expected
               |-- may be repeated ---------|-- is new, a gap is no error

Memory is bounded, so an unknown producer may start at any sequence. This module is
pure; `producer_file.py` keeps the same on disk. Source: docs/protocol.md, *Retries*.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from metaq.errors import SequenceError
from metaq.model import MessageId, Offset, SizeBytes

BATCHES_KEPT: Final = 5
"""Number of batches remembered per producer: the most that it may have in flight."""

NO_CHECKSUM: Final = -1
"""Value without a checksum from the sender: sequence and count alone decide."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A remembered batch."""

    producer: str
    """Name of the producer: 1..64 ASCII characters."""
    sequence: int
    """Sequence of its first record among the producer's records for the partition."""
    count: int
    checksum: int
    """Checksum of its bytes as sent; -1 if none was sent."""
    first_id: MessageId
    """Id of its first record, unique to this batch in the broker."""
    offset: Offset
    size_bytes: SizeBytes

    @property
    def next_sequence(self) -> int:
        """Return the sequence of the producer's next batch."""
        return self.sequence + self.count

    @property
    def end_offset(self) -> Offset:
        """Return the offset after the last byte."""
        return Offset(self.offset + self.size_bytes)


class ProducerTable:
    """The producers of one partition, least recently used first. Not thread-safe."""

    def __init__(self, producer_count_max: int) -> None:
        """Create an empty table with a maximum number of producers."""
        self._producer_count_max = producer_count_max
        self._batches: dict[str, list[StoredBatch]] = {}
        self.forgotten_count = 0
        """Number of producers forgotten because there were too many."""

    def __len__(self) -> int:
        """Return the number of producers."""
        return len(self._batches)

    def __iter__(self) -> Iterator[StoredBatch]:
        """Yield the batches; added in this order they give the same table."""
        for batches in self._batches.values():
            yield from batches

    def find(
        self, producer: str, sequence: int, count: int, checksum: int
    ) -> StoredBatch | None:
        """Return the stored batch if it is repeated, or None if it is new.

        Raises:
            SequenceError: neither: its records, or others with their numbers, are
                stored already.
        """
        batches = self._batches.get(producer)
        if batches is None:
            return None
        for batch in batches:
            if (batch.sequence, batch.count) == (sequence, count):
                self._require_same(batch, checksum)
                self._batches[producer] = self._batches.pop(producer)
                return batch
        expected = batches[-1].next_sequence
        if sequence < expected:
            raise SequenceError(
                f"sequence {sequence} of producer {producer} is already stored or"
                f" overlapping: expected {expected} or more"
            )
        return None

    def add(self, batch: StoredBatch) -> None:
        """Remember a batch as the last of its producer."""
        batches = self._batches.pop(batch.producer, [])
        self._batches[batch.producer] = [*batches, batch][-BATCHES_KEPT:]
        if len(self._batches) > self._producer_count_max:
            del self._batches[next(iter(self._batches))]
            self.forgotten_count += 1

    def remove(self, batch: StoredBatch) -> None:
        """Forget a batch that was not stored; does nothing if it is unknown."""
        batches = self._batches.get(batch.producer, [])
        if batch in batches:
            batches.remove(batch)
            if not batches:
                del self._batches[batch.producer]

    def replace(self, batches: Iterable[StoredBatch]) -> None:
        """Replace all remembered batches by these, in the order of the appends."""
        self._batches.clear()
        for batch in batches:
            self.add(batch)

    def _require_same(self, batch: StoredBatch, checksum: int) -> None:
        if NO_CHECKSUM not in (checksum, batch.checksum) and checksum != batch.checksum:
            raise SequenceError(
                f"sequence {batch.sequence} of producer {batch.producer} was used for"
                f" other records: expected checksum {batch.checksum}, got {checksum}"
            )
