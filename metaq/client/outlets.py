"""One partition's way out: what waits, what is in flight, what came back.

Plain state without decisions; the delivery decides.
"""

from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from typing import Protocol

from metaq.client.attempts import Span
from metaq.client.batches import Batch, Lane, Outcome
from metaq.errors import MetaqError
from metaq.model import TopicPartition
from metaq.protocol.commands import Reply
from metaq.protocol.version import Capabilities
from metaq.zk.znodes import BrokerAddress


class Connection(Protocol):
    """What the delivery needs of `BrokerConnection`."""

    @property
    def capabilities(self) -> Capabilities:
        """What the broker announced."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether one more request keeps the bound on what is in flight."""
        ...

    def next_opaque(self) -> int:
        """Return a number that no request in flight has."""
        ...

    def submit(
        self,
        frame: bytes,
        opaque: int,
        on_reply: Callable[[Reply | MetaqError], None],
        *,
        deadline_s: float,
        is_alone: bool = False,
    ) -> None:
        """Send a request; see `BrokerConnection.submit`."""
        ...


class Pool(Protocol):
    """What the delivery needs of `ConnectionPool`."""

    def ready(self, address: BrokerAddress) -> Connection | None:
        """Return the open connection to an address, if there is one."""
        ...

    async def get(self, address: BrokerAddress, *, deadline_s: float) -> Connection:
        """Return a connection; NoBrokerError at the deadline."""
        ...


class Work:
    """A batch under way: what is known of its parts."""

    __slots__ = ("batch", "left", "outcomes")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.left = 1
        self.outcomes: list[Outcome] = []


class Part:
    """Messages of a batch that travel in one command."""

    __slots__ = ("attempt", "is_doubtful", "place", "sequence", "span", "work")

    def __init__(self, work: Work, span: Span, place: int) -> None:
        self.work = work
        self.span = span
        self.place = place  # in its outlet's order
        self.sequence: int | None = None
        self.attempt = 0
        self.is_doubtful = False

    @property
    def message_count(self) -> int:
        """Return the number of its messages."""
        return self.span.end - self.span.first


class Outlet:
    """One partition's way out."""

    __slots__ = (
        "alarm", "alone", "connection", "failures", "in_flight", "lane", "places",
        "refused_until_s", "resume_s", "returned", "sequence", "trouble", "waiting",
    )  # fmt: skip

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.alarm: TimerHandle | None = None  # fills it when a pause is over
        self.alone: Part | None = None  # nothing is sent while this is in flight
        self.connection: Connection | None = None
        self.waiting: deque[Part] = deque()
        self.returned: list[Part] = []
        self.in_flight: dict[Part, None] = {}
        self.sequence = 0
        self.places = 0
        self.failures = 0  # refusals in a row
        self.resume_s = 0.0
        self.refused_until_s = 0.0  # others' messages do not move here before
        self.trouble: MetaqError | None = None  # why nothing is sent

    @property
    def partition(self) -> TopicPartition:
        """Return the partition."""
        return self.lane.partition

    def next_place(self) -> int:
        """Return the place of the next part in the outlet's order."""
        self.places += 1
        return self.places

    def take_back(self) -> None:
        """Put what came back in front of what waits, in the old order.

        What may be stored goes first. The others get new sequences, and a broker does
        not take a sequence below one that it has seen.
        """
        self.returned.sort(key=_order_of)
        self.waiting.extendleft(reversed(self.returned))
        self.returned.clear()


def _order_of(part: Part) -> tuple[bool, int, int]:
    place = part.place if part.sequence is None else part.sequence
    return part.sequence is None, place, part.span.first
