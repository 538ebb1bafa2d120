"""One queue group on its broker, and the service that owns it, as its parts see it."""

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
"""Called once for each dead letter, after the first try: the offset of its message, and
whether it is stored."""


@dataclass(slots=True, eq=False)
class Taker:
    """A `take` that is not answered yet."""

    command: Take
    answerer: Answerer
    group: "QueueGroup"


class Kept(NamedTuple):
    """A worker that gets nothing else for a message that goes out alone."""

    until_ms: int
    """Monotonic: who is long at work holds up nothing for ever."""
    queue: ServedQueue | None
    """Of the message that it is to have, once it has no other; None: it has that."""


@dataclass(slots=True, eq=False)
class QueueGroup:
    """A queue group on this broker."""

    name: str
    definition: QueueGroupDefinition
    queues: dict[int, ServedQueue] = field(default_factory=dict)
    """By partition; those that were needed."""
    takers: dict[Taker, None] = field(default_factory=dict)
    """In the order in which they came."""
    waits: dict[int, WaitHandle] = field(default_factory=dict)
    """Partition → its wait for data."""
    all_queues: list[ServedQueue] | None = None
    """One for each partition; None: to be found again."""
    version: int = 0
    """Of the topics, when they were found."""
    workers: dict[str, set[Answerer]] = field(default_factory=dict)
    """Connections of each worker, by its name."""
    kept: dict[str, Kept] = field(default_factory=dict)
    """Workers that get nothing else, for a message that goes out alone."""
    is_pumping: bool = False
    turn: int = 0
    """Counts what was given, so that queues have turns."""

    def holds(self, worker: str) -> bool:
        """Return whether a worker has messages."""
        return any(each.state.leases.holds(worker) for each in self.queues.values())

    def stop_waiting(self, partition: int) -> None:
        """Wait for no data of a partition."""
        wait = self.waits.pop(partition, None)
        if wait is not None:
            wait.cancel()


class QueueOwner(Protocol):
    """The service."""

    def find_group(self, command: Take | Settle) -> QueueGroup:
        """Return the group that a command names; raises WireError."""

    def queues_of(self, group: QueueGroup, partition: int) -> list[ServedQueue]:
        """Return the queues of one partition, or of all (-1); raises WireError."""

    def queue_for(self, group: QueueGroup, partition: int) -> ServedQueue:
        """Return the queue of one partition; raises WireError."""

    def has(self, queue: ServedQueue) -> bool:
        """Return whether a queue is still the one in memory."""

    def note_worker(self, group: QueueGroup, name: str, answerer: Answerer) -> None:
        """Note that a worker is connected."""

    def watch(self, queue: ServedQueue) -> None:
        """Look at a queue when its next lease or delay ends."""

    def send_letters(self, queue: ServedQueue, on_tried: OnTried | None = None) -> int:
        """Send the dead letters of a queue; return how many there are."""

    def letter_topic(self, queue: ServedQueue) -> str | None:
        """Return the topic of its dead letters now; None: they are dropped."""

    def on_settled(self, queue: ServedQueue) -> None:
        """Look at a queue of which something was settled."""

    def now(self) -> Now:
        """Return both clocks."""

    @property
    def is_ending(self) -> bool:
        """Whether no task may be begun any more: the service stops, or has failed."""

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str
    ) -> asyncio.Task[None]:
        """Run a task of the service."""


def rules_of(definition: QueueGroupDefinition) -> QueueRules:
    """Return the rules that a definition asks for."""
    return QueueRules(
        lease_ms=definition.lease_ms,
        deliveries_max=definition.deliveries_max,
        retry_delays_ms=definition.retry_delays_ms,
        is_ordered=definition.ordered_by is not None,
        takes_letters=definition.dead_letter_topic is not None,
    )


def filter_of(definition: QueueGroupDefinition) -> Filter | None:
    """Return the filter of a definition."""
    return None if definition.where is None else parse_filter(definition.where)
