"""A queue group on its broker, and the interface of the service that owns it."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from metaq.broker.acks import Answerer
from metaq.broker.queue_part import ServedQueue
from metaq.filter.language import Filter, parse_filter
from metaq.model import Offset
from metaq.protocol.commands import Settle, Take
from metaq.queues.rules import Now, QueueRules
from metaq.storage.log_state import WaitHandle
from metaq.zk.group_definitions import QueueGroupDefinition

OnTried: TypeAlias = Callable[[Offset, bool], None]
"""Called once for each dead letter, after its first try, with the offset of the message
and whether the letter is stored."""


@dataclass(slots=True, eq=False)
class Taker:
    """A `take` that is not answered yet."""

    command: Take
    answerer: Answerer
    group: "QueueGroup"


class Reservation(NamedTuple):
    """Reservation of a worker for a message that is delivered alone."""

    until_ms: int
    """Monotonic end, so that a slow worker does not block the message for ever."""
    queue: ServedQueue | None
    """Queue of the message, while the worker still has others; None: it has the
    message."""


@dataclass(slots=True, eq=False)
class QueueGroup:
    """A queue group on this broker."""

    name: str
    definition: QueueGroupDefinition
    queues: dict[int, ServedQueue] = field(default_factory=dict)
    """Queues in memory, by partition."""
    takers: dict[Taker, None] = field(default_factory=dict)
    """Waiting takers, in the order of arrival."""
    waits: dict[int, WaitHandle] = field(default_factory=dict)
    """Waits for data, by partition."""
    all_queues: list[ServedQueue] | None = None
    """Cached list with one queue for each partition; None: to be made again."""
    version: int = 0
    """Version of the topics at which `all_queues` was made."""
    workers: dict[str, set[Answerer]] = field(default_factory=dict)
    """Connections of each worker, by its name."""
    reservations: dict[str, Reservation] = field(default_factory=dict)
    """Workers reserved for a message that is delivered alone, by name."""
    is_pumping: bool = False
    turn: int = 0
    """Number of the current turn: the first queue to be served rotates."""

    def holds(self, worker: str) -> bool:
        """Return whether a worker has messages."""
        return any(each.state.leases.holds(worker) for each in self.queues.values())

    def stop_waiting(self, partition: int) -> None:
        """Cancel the wait for data of a partition."""
        wait = self.waits.pop(partition, None)
        if wait is not None:
            wait.cancel()


class QueueOwner(Protocol):
    """The queue service, as seen by its parts."""

    def find_group(self, command: Take | Settle) -> QueueGroup:
        """Return the group of a command; raises WireError."""

    def queues_of(self, group: QueueGroup, partition: int) -> list[ServedQueue]:
        """Return the queues of one partition, or of all (-1); raises WireError."""

    def queue_for(self, group: QueueGroup, partition: int) -> ServedQueue:
        """Return the queue of one partition; raises WireError."""

    def has(self, queue: ServedQueue) -> bool:
        """Return whether a queue is still the one in memory."""

    def note_worker(self, group: QueueGroup, name: str, answerer: Answerer) -> None:
        """Register a connection of a worker."""

    def watch(self, queue: ServedQueue) -> None:
        """Set the timer for the next lease or delay of a queue."""

    def send_letters(self, queue: ServedQueue, on_tried: OnTried | None = None) -> int:
        """Send the dead letters of a queue; return their number."""

    def letter_topic(self, queue: ServedQueue) -> str | None:
        """Return the dead-letter topic of a queue; None: its messages are dropped."""

    def on_settled(self, queue: ServedQueue) -> None:
        """Set the timer and deliver, after messages of a queue were settled."""

    def now(self) -> Now:
        """Return both clocks."""

    @property
    def is_ending(self) -> bool:
        """Whether the service stops or has failed: no task may be started."""

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        """Run a task of the service."""


def rules_of(definition: QueueGroupDefinition) -> QueueRules:
    """Return the queue rules of a definition."""
    return QueueRules(
        lease_ms=definition.lease_ms,
        deliveries_max=definition.deliveries_max,
        retry_delays_ms=definition.retry_delays_ms,
        is_ordered=definition.ordered_by is not None,
        takes_letters=definition.dead_letter_topic is not None,
    )


def filter_of(definition: QueueGroupDefinition) -> Filter | None:
    """Return the parsed filter of a definition."""
    return None if definition.where is None else parse_filter(definition.where)
