"""Read partitions without a group: nothing is claimed, nothing is committed.

`TopicBrowser.read` goes through partitions one after the other, each up to the end it
had when reading began; `follow` goes round all of them for ever, with a long poll where
the broker offers one. Within a partition the order is that of the log.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from metaq.client.cursor import PartitionCursor
from metaq.client.discovery import Cluster
from metaq.client.errors import ConnectionLostError
from metaq.client.replies import NothingThere, parse_get
from metaq.client.wire import BROWSER_GROUP, WireConnection, pump
from metaq.clock import Clock
from metaq.errors import NoBrokerError, RequestTimeoutError
from metaq.model import BrokerId, Message, Offset, TopicPartition
from metaq.protocol.commands import Get, Reply

WAIT_MS: Final = 5_000
"""How long a broker is asked to hold a get that finds nothing."""
POLL_INTERVAL_S: Final = 0.25
"""Least time between two gets that find nothing: MetaQ starts with 0.5 s."""
RECONNECT_S: Final = 60.0
"""How long a broker that was lost may be away before following ends."""


@dataclass(slots=True)
class _Follower:
    """One partition that is followed."""

    cursor: PartitionCursor
    due_s: float = 0.0
    deadline_s: float | None = None
    replies: deque[Reply] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        return self.deadline_s is None


class TopicBrowser:
    """Connections to the brokers of a cluster, for reading. One thread owns it.

    Lifecycle: a context manager; connections are made when they are needed.
    """

    def __init__(self, cluster: Cluster, *, timeout_s: float, clock: Clock) -> None:
        """Prepare to read.

        Args:
            cluster: where the brokers are.
            timeout_s: how long one answer may take.
            clock: for deadlines.
        """
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._clock = clock
        self._connections: dict[BrokerId, WireConnection] = {}
        self._lost_s: dict[BrokerId, float] = {}
        """When each broker was lost that has not come back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._connections.values():
            connection.close()

    def connection(self, broker_id: BrokerId) -> WireConnection:
        """Return the connection to a broker.

        Raises:
            NoBrokerError: it is not there.
        """
        connection = self._connections.get(broker_id)
        if connection is None:
            address = self._cluster.brokers.get(broker_id)
            if address is None:
                raise NoBrokerError(f"broker {broker_id} is not there at the moment")
            connection = self._connections[broker_id] = WireConnection.open(
                address, timeout_s=self._timeout_s, clock=self._clock
            )
        return connection

    def range_of(self, partition: TopicPartition) -> tuple[Offset, Offset] | None:
        """Return (log start, log end) now; None for a partition without a log yet."""
        connection = self.connection(partition.broker_id)
        ends = [
            connection.offset(
                partition.topic, partition.partition, 0, timeout_s=self._timeout_s
            ),
            connection.log_end(
                partition.topic, partition.partition, timeout_s=self._timeout_s
            ),
        ]
        start, end = ends
        return None if start is None or end is None else (start, end)

    def read(self, partition: TopicPartition, start: Offset) -> Iterator[list[Message]]:
        """Yield the messages from `start` to the end as it is now, in order.

        Raises:
            CorruptRecordError, NoProgressError, WireError, RequestTimeoutError: as
                the cursor and the connection say; the messages before were yielded.
        """
        ends = self.range_of(partition)
        if ends is None:
            return
        connection = self.connection(partition.broker_id)
        cursor = PartitionCursor(partition, max(start, ends[0]), end=ends[1])
        while not cursor.is_done:
            outcome = connection.get(
                partition.topic,
                partition.partition,
                cursor.fetch_offset,
                max_bytes=cursor.size_bytes,
                timeout_s=self._timeout_s,
            )
            messages = cursor.on_reply(outcome)
            if messages:
                yield messages

    def follow(
        self, starts: Sequence[tuple[TopicPartition, Offset]]
    ) -> Iterator[list[Message]]:
        """Yield messages from all partitions as they come, for ever; as `read`.

        A connection that breaks is made again, and reading goes on where it was.
        """
        followers = [_Follower(PartitionCursor(p, offset)) for p, offset in starts]
        while True:
            for follower in followers:
                if follower.is_idle and follower.due_s <= self._clock.monotonic_s():
                    self._ask(follower)
            self._wait(followers)
            for follower in followers:
                while follower.replies:
                    messages = self._take(follower, follower.replies.popleft())
                    if messages:
                        yield messages

    def _ask(self, follower: _Follower) -> None:
        cursor = follower.cursor
        partition = cursor.partition
        now_s = self._clock.monotonic_s()
        try:
            connection = self.connection(partition.broker_id)
        except NoBrokerError:
            lost_s = self._lost_s.get(partition.broker_id, float("-inf"))
            if now_s - lost_s > RECONNECT_S:
                raise
            follower.due_s = now_s + POLL_INTERVAL_S
            return
        self._lost_s.pop(partition.broker_id, None)
        opaque = connection.next_opaque()
        wait_ms = min(WAIT_MS, connection.capabilities.wait_ms_max)
        command = Get(
            topic=partition.topic,
            group=BROWSER_GROUP,
            partition=partition.partition,
            offset=cursor.fetch_offset,
            max_size=cursor.size_bytes,
            opaque=opaque,
            wait_ms=wait_ms,
        )
        connection.submit(command, opaque, follower.replies.append)
        follower.deadline_s = now_s + wait_ms / 1000 + self._timeout_s
        # A broker that offers to wait may refuse to: it has a limit of waiting gets.
        follower.due_s = now_s + POLL_INTERVAL_S

    def _wait(self, followers: list[_Follower]) -> None:
        connections = [c for c in self._connections.values() if c.in_flight_count]
        times = [
            follower.due_s if follower.deadline_s is None else follower.deadline_s
            for follower in followers
        ]
        try:
            pump(connections, deadline_s=min(times), clock=self._clock)
        except ConnectionLostError:
            self._forget_lost(followers)
        now_s = self._clock.monotonic_s()
        for follower in followers:
            is_late = follower.deadline_s is not None and follower.deadline_s <= now_s
            if is_late and not follower.replies:
                raise RequestTimeoutError(
                    f"get of {follower.cursor.partition}: no answer within"
                    f" {self._timeout_s:g} s"
                )

    def _forget_lost(self, followers: list[_Follower]) -> None:
        now_s = self._clock.monotonic_s()
        for broker_id, connection in list(self._connections.items()):
            if connection.is_open:
                continue
            del self._connections[broker_id]
            self._lost_s[broker_id] = now_s
            for follower in followers:
                if follower.cursor.partition.broker_id == broker_id:
                    follower.deadline_s = None
                    follower.due_s = now_s + POLL_INTERVAL_S

    def _take(self, follower: _Follower, reply: Reply) -> list[Message]:
        outcome = parse_get(reply)
        follower.deadline_s = None
        if not isinstance(outcome, NothingThere):
            follower.due_s = 0.0
        return follower.cursor.on_reply(outcome)
