"""One partition's way out: what waits, what is in flight, what came back.

Also what it looks like on the wire: parts as their broker takes them, and the command
of each. Nothing here sends, and nobody is told; the delivery does both.
"""

from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from typing import Protocol

from metaq.client.attempts import Span, plan_spans
from metaq.client.batches import Batch, Outcome
from metaq.client.errors import MessageTooLargeError, NotSentError, OutcomeUnknownError
from metaq.client.lanes import Announcer, Lane
from metaq.errors import MetaqError, NoBrokerError
from metaq.model import TopicPartition
from metaq.protocol.commands import Command, Mput, Put, Reply
from metaq.protocol.version import Capabilities
from metaq.record.checksum import checksum
from metaq.zk.cluster import Counts
from metaq.zk.znodes import BrokerAddress


class Connection(Announcer, Protocol):
    """What the delivery needs of `BrokerConnection`."""

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
        "was_offered",
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
        self.was_offered = False  # registered for puts when it was connected

    @property
    def partition(self) -> TopicPartition:
        """Return the partition."""
        return self.lane.partition

    def is_early(self, puts: Counts) -> bool:
        """Tell whether a broker that came back has not registered the topic again.

        A put may then keep a MetaQ 1.4 broker from registering it at all, and its
        start fails over that.

        Args:
            puts: how many partitions of each topic each broker takes puts to.
        """
        place = self.partition
        count = puts.get(place.topic, {}).get(place.broker_id, 0)
        if place.partition < count or not self.was_offered:
            self.was_offered = place.partition < count
            return False
        self.trouble = NoBrokerError(
            f"{place}: broker {place.broker_id} does not take puts at the moment"
        )
        return True

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

    def part_of(self, batch: Batch) -> Part:
        """Return the one part of a batch that was just taken."""
        whole = Span(0, len(batch.payloads), is_mput=True)
        return Part(Work(batch), whole, self.next_place())

    def fit_next(
        self, capabilities: Capabilities
    ) -> tuple[Part, MessageTooLargeError | None]:
        """Cut what waits first as the broker wants it.

        Returns:
            What waits first now, and why the broker never takes it, if so.
        """
        part = self.waiting[0]
        batch, span = part.work.batch, part.span
        if part.is_doubtful and span.is_mput and capabilities.has_mput:
            return part, None  # it is recognised by its size
        spans = plan_spans(batch.ends, span.first, span.end, capabilities)
        if spans != [span]:
            self.waiting.popleft()
            part.work.left += len(spans) - 1
            parts = []
            for each in spans:
                cut = Part(part.work, each, part.place)
                cut.is_doubtful = part.is_doubtful
                parts.append(cut)
            self.waiting.extendleft(reversed(parts))
        part = self.waiting[0]
        limit = capabilities.payload_bytes_max
        if limit is None or part.span.is_mput:
            return part, None
        size_bytes = len(batch.payloads[part.span.first])
        if size_bytes <= limit:
            return part, None
        return part, MessageTooLargeError(
            f"message: {self.partition} takes at most {limit} bytes, got {size_bytes}"
        )

    def command(self, part: Part, opaque: int, producer_id: str) -> Command:
        """Return the command of a part; a batch gets its sequence by it."""
        batch, span = part.work.batch, part.span
        topic, number = self.partition.topic, self.partition.partition
        if not span.is_mput:
            payload = batch.payloads[span.first]
            flag = batch.flags.get(span.first, 0)
            return Put(topic, number, payload, flag, checksum(payload), opaque)
        if part.sequence is None:
            part.sequence = self.sequence
            self.sequence += part.message_count
        records = batch.encode(span.first, span.end)
        return Mput(
            topic=topic,
            partition=number,
            count=part.message_count,
            checksum=checksum(records),
            opaque=opaque,
            payload=records,
            producer=producer_id,
            sequence=part.sequence,
        )

    def take_late(self, now_s: float) -> list[Part]:
        """Take what has not left, or came back, and has passed its deadline."""
        late = [p for p in self.waiting if p.work.batch.deadline_s <= now_s]
        late += [p for p in self.returned if p.work.batch.deadline_s <= now_s]
        if late:
            gone = set(late)
            self.waiting = deque(p for p in self.waiting if p not in gone)
            self.returned = [p for p in self.returned if p not in gone]
        return late

    def take_unanswered(self, before_s: float) -> list[Part]:
        """Take what is in flight with a deadline up to `before_s`."""
        lost = [p for p in self.in_flight if p.work.batch.deadline_s <= before_s]
        for part in lost:
            del self.in_flight[part]
        return lost

    def lateness(self, batch: Batch) -> MetaqError:
        """Return the error of messages whose deadline passed before they left."""
        if self.trouble is not None:
            return self.trouble
        return NotSentError(f"{self.partition}: not sent within {batch.timeout_s:g} s")

    def silence(self, batch: Batch) -> MetaqError:
        """Return the error of messages whose deadline passed without an answer."""
        return OutcomeUnknownError(
            f"{self.partition}: no answer within {batch.timeout_s:g} s; outcome unknown"
        )


def _order_of(part: Part) -> tuple[bool, int, int]:
    place = part.place if part.sequence is None else part.sequence
    return part.sequence is None, place, part.span.first
