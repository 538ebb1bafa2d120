"""Queue groups: their definition in ZooKeeper. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGroupDefinition:
    """A queue group as its first user, or a command, wants it."""

    topic: str
    lease_ms: int = 30_000
    deliveries_max: int = 16
    dead_letter_topic: str | None = None
    """Takes what is given out no more; None: that is dropped."""
    retry_delays_ms: tuple[int, ...] = (1_000, 5_000, 30_000, 120_000)
    ordered_by: str | None = None
    start: str = "earliest"
