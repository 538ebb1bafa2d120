"""Sources of a consumer's partitions, and the interface of their reader.

A `PartitionSource` decides which partitions are read: a group in ZooKeeper
(`rebalancer.py`), or a fixed list. An `AssignmentSink`, the consumer, reads them.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Protocol

from metaq.client.cluster.metadata import Metadata
from metaq.clock import Clock
from metaq.errors import MetaqError
from metaq.model import TopicPartition
from metaq.retry import Backoff, wait_set

_log = logging.getLogger(__name__)

RETRY: Final = Backoff(first_s=0.1, max_s=5.0)


@dataclass(frozen=True, slots=True)
class Fence:
    """Membership and session of a commit, which fails after they have ended."""

    member: str
    session_version: int
    """The ZooKeeper session under which it owns its partitions."""


class AssignmentSink(Protocol):
    """Reader of partitions; all calls are made on the loop's thread.

    Calls for different partitions may run concurrently. A `fence` ends a waiting
    `revoke` of the same partitions.
    """

    async def assign(self, partitions: Collection[TopicPartition]) -> None:
        """Begin to read newly claimed partitions.

        Raises:
            MetaqError: an offset could not be read; none of the partitions is read.

        Cancellation: none of them is read.
        """

    def announce(self, partitions: Collection[TopicPartition]) -> None:
        """Begin to hand out messages, and report an assignment to the user as a whole.

        Partitions that were lost since `assign` are left out.
        """

    async def revoke(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading; wait (bounded) for handlers and hooks; commit if configured.

        Never raises: a failed commit is logged, and its messages are delivered again.
        """

    def fence(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading at once, because another member may own the partitions."""


class PartitionSource(Protocol):
    """Source of a consumer's partitions."""

    unsettled_since_s: float | None
    """Monotonic time since which some partitions are not read; None: all are."""
    last_error: MetaqError | None
    """Error of the last attempt to read all partitions; None if it succeeded."""
    rebalance_count: int
    """Number of rebalances that changed what is read."""

    async def start(self, sink: AssignmentSink) -> None:
        """Make the first assignment, and update it from then on.

        Raises:
            MetaqError: the first assignment failed; the source is stopped.
        """

    async def stop(self, *, deadline_s: float | None = None) -> None:
        """Revoke and release all partitions; bounded, never raises.

        Args:
            deadline_s: monotonic; releases not finished by then continue in the
                background. None: each step is bounded by its option.
        """

    def restart(self, partitions: Collection[TopicPartition]) -> None:
        """Fence partitions, and soon read those still assigned again; never waits."""

    @property
    def fence(self) -> Fence | None:
        """Fence of commits; None without a group in ZooKeeper."""

    def problems(self) -> list[str]:
        """Return the problems of sharing with other members, one sentence each."""


class FixedSource:
    """A fixed list of partitions, or all partitions of some topics, without a group.

    For clients of named brokers and consumers with chosen partitions, which are not
    shared with other members. `find` is called again whenever the cluster changes, and
    new partitions are read too.
    """

    def __init__(
        self,
        find: Callable[[], Collection[TopicPartition]],
        listen: Callable[[Callable[[], None]], Callable[[], None]],
        *,
        clock: Clock,
        wants: Callable[[str], bool] = bool,
    ) -> None:
        """Prepare; nothing is read before `start`.

        Args:
            find: returns the current partitions.
            listen: registers a callback for changes; returns a function to remove it.
            clock: clock of the client.
            wants: whether partitions of a topic must still be read, by its name.
        """
        self._wants = wants
        self._find = find
        self._listen = listen
        self._clock = clock
        self._changed = asyncio.Event()
        self._assigned: set[TopicPartition] = set()
        self._task: asyncio.Task[None] | None = None
        self._unlisten: Callable[[], None] | None = None
        self._sink: AssignmentSink | None = None
        self.unsettled_since_s: float | None = None
        self.last_error: MetaqError | None = None
        self.rebalance_count = 0

    fence: Fence | None = None
    """None, because no other member can own the partitions."""

    def problems(self) -> list[str]:
        """Return nothing, because there are no other members."""
        return []

    async def start(self, sink: AssignmentSink) -> None:
        """Read all partitions; retry those that cannot be read yet.

        Raises:
            MetaqError: there are partitions, and none of them can be read.
        """
        self._sink = sink
        self._unlisten = self._listen(self._changed.set)
        try:
            await self._settle(sink)
        except BaseException as error:
            if not self._assigned or not isinstance(error, MetaqError):
                self._unlisten()
                raise
            self._note(error)
            self._changed.set()
        self._task = asyncio.create_task(self._run(sink), name="fixed partitions")

    async def stop(self, *, deadline_s: float | None = None) -> None:
        """Revoke all partitions; only the sink waits."""
        del deadline_s  # the sink has it
        if self._unlisten is not None:
            self._unlisten()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._sink is not None:
            await self._sink.revoke(self._assigned)
        self._assigned = set()

    def restart(self, partitions: Collection[TopicPartition]) -> None:
        """Fence partitions, and read them again soon."""
        known = self._assigned.intersection(partitions)
        if self._sink is not None:
            self._sink.fence(known)
        self._assigned -= known
        self._changed.set()

    async def _settle(self, sink: AssignmentSink) -> None:
        """Read missing partitions; a broker that is away does not delay the others."""
        gone = {one for one in self._assigned if not self._wants(one.topic)}
        if gone:
            await sink.revoke(gone)
            self._assigned -= gone
        missing = sorted(set(self._find()) - self._assigned)

        async def assign(partition: TopicPartition) -> None:
            await sink.assign([partition])
            self._assigned.add(partition)

        ends = await asyncio.gather(*map(assign, missing), return_exceptions=True)
        sink.announce(missing)
        for end in ends:
            if end is not None:
                raise end

    def _note(self, error: MetaqError) -> None:
        """Keep the error; log it once for each type of error in a row."""
        if type(error) is not type(self.last_error):
            _log.warning("some partitions cannot be read yet: %s", error)
        self.last_error = error
        self.unsettled_since_s = self.unsettled_since_s or self._clock.monotonic_s()

    async def _run(self, sink: AssignmentSink) -> None:
        failures = 0
        while True:
            # A change ends a pause, because failed partitions may be readable now.
            await wait_set(self._changed, RETRY.delay_s(failures) if failures else None)
            self._changed.clear()
            try:
                await self._settle(sink)
            except MetaqError as error:
                failures += 1
                self._note(error)
            except Exception as error:  # noqa: BLE001  # the next attempt may succeed
                failures += 1
                _log.exception("partitions cannot be read")
                self._note(MetaqError(f"partitions cannot be read: {error!r}"))
            else:
                failures, self.last_error, self.unsettled_since_s = 0, None, None


def topic_source(
    metadata: Metadata, topics: Collection[str], *, clock: Clock
) -> FixedSource:
    """Return a source of all present and future partitions of some topics.

    `topics` are watched, and may change before each snapshot.
    """

    def find() -> list[TopicPartition]:
        snapshot = metadata.snapshot
        return [tp for topic in topics for tp in snapshot.get_partitions(topic)]

    def listen(callback: Callable[[], None]) -> Callable[[], None]:
        return metadata.add_listener(lambda _snapshot: callback())

    return FixedSource(find, listen, clock=clock, wants=topics.__contains__)


def listed_source(
    partitions: Collection[TopicPartition], *, clock: Clock
) -> FixedSource:
    """Return a source of these partitions and no others."""
    return FixedSource(lambda: partitions, lambda _on_change: lambda: None, clock=clock)
