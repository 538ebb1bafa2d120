"""A fetched batch, and how many of its messages were handed out and are handled.

Concurrency: a batch belongs to one worker while it is in hand; the feed reads its
counts from other threads, which each are one assignment.
"""

from dataclasses import dataclass

from metaq.model import Message, Offset, TopicPartition


@dataclass(slots=True, eq=False)
class Batch:
    """Messages of one partition, in order; belongs to one worker while in hand."""

    partition: TopicPartition
    """Where they lie."""
    messages: list[Message]
    """May be empty: filtered away, and only `next_offset` tells of them."""
    next_offset: Offset
    """Offset behind the last of them, filtered ones included."""
    size_bytes: int
    """Bytes of the log they came from."""
    handed: int = 0
    """Messages that were handed out."""
    held: int = 1
    """How many of the last handed out are still in hand, not handled."""
    confirmed: int = 0
    """Messages that somebody said are handled."""
    told: int = 0
    """Messages that `on_handled` was told of."""
    is_stopped: bool = False
    """Hand out no more: the partition is being taken away, or read elsewhere."""

    @property
    def handled(self) -> int:
        """Messages that are handled: all handed out but those in hand."""
        return max(self.handed - self.held, self.confirmed, 0)

    def confirm(self) -> None:
        """Count what is in hand as handled."""
        self.confirmed = self.handed
