"""Commits of handled offsets, on demand and periodically.

Only changed offsets are written. The offsets of a failed commit are part of the next
one, so a store that is unavailable for a while loses no offset.

Theory of operation: one write is in progress at a time. Commits requested during it
are combined into the next write, which takes the newest offset of each partition and
answers all of them: a consumer that commits each message writes as often as the store
can, and no more. A commit under another fence gets a write of its own, so that
messages handled under one session are never committed under the next.

An explicit offset stays in effect until more is handled: automatic commits neither move
it back to the handled offset, nor forward again after the user moved it back.

    user names   handled   automatic commits write
    message 7    3         7, until more than 7 is handled
    offset 2     5         2, until more than 5 is handled

Source: docs/metaq-1.4/client.md 13.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from metaq.client.group.assignments import Fence
from metaq.client.offsets.offset_store import (
    STORE_SLACK_S,
    Failures,
    Offsets,
    OffsetStore,
)
from metaq.client.timeouts import finish, within
from metaq.clock import Clock
from metaq.errors import (
    ClosedError,
    MetaqError,
    OwnershipLostError,
    RequestTimeoutError,
)
from metaq.model import GroupOffset, Offset, TopicPartition

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Named:
    """An explicit offset of the user."""

    offset: GroupOffset
    until: Offset
    """In effect until the handled offset is greater than this."""


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """A commit requested by the user."""

    named: Offsets | None = None
    """Explicit offsets; None: commit the handled offsets."""
    may_go_back: bool = False
    """Whether an explicit offset may be less than the committed one."""
    claims: Mapping[TopicPartition, object] = field(default_factory=dict)
    """Claims of the partitions when the commit was requested. It is refused for those
    that were assigned again, or moved by `seek`, before it begins."""
    lost: MetaqError | None = None
    """Set if the partition of the message being handled was lost; the other partitions
    are committed."""

    @property
    def free(self) -> Offsets:
        """Explicit offsets that may be anywhere in the log, and have to be checked."""
        return (self.named or {}) if self.may_go_back else {}

    def error(self, failed: Failures) -> MetaqError | None:
        """Return the error to raise; None if everything was committed."""
        return next(iter(failed.values()), self.lost)


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """A requested commit; `wait` returns its outcome."""

    offsets: Offsets
    foreign: Failures
    """Errors of partitions that are not written: not assigned, or refused."""
    limit_s: float
    """Longest wait of the caller, in seconds."""
    what: str
    failed: asyncio.Future[Failures] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Outcome of the write, which may answer other commits too."""

    def _end_late(self) -> None:
        text = f"{self.what}: not done within {self.limit_s:.3g} s"
        finish(self.failed, dict.fromkeys(self.offsets, RequestTimeoutError(text)))

    async def wait(self) -> Failures:
        """Wait for the write; return the partitions that failed, with their errors."""
        timer = self.failed.get_loop().call_later(self.limit_s, self._end_late)
        try:
            failed = await self.failed
        finally:
            timer.cancel()
        ours = {p: error for p, error in failed.items() if p in self.offsets}
        return {**self.foreign, **ours}


@dataclass(slots=True, eq=False)
class _Write:
    """One write to the store and the commits that it answers."""

    fence: Fence | None
    deadline_s: float
    offsets: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    is_begun: bool = False
    lost: dict[TopicPartition, MetaqError] = field(default_factory=dict)
    """Partitions revoked before the write began. They may be assigned again by now, so
    their offsets must not join this write."""

    def end(self, failed: Failures) -> None:
        """Complete the commits of this write."""
        for one in self.commits:
            finish(one.failed, failed)


class Committer:
    """The committed offsets of one consumer. Used on the event loop only."""

    def __init__(
        self,
        store: OffsetStore,
        *,
        group: str,
        clock: Clock,
        timeout_s: float,
        fence: Callable[[], Fence | None],
    ) -> None:
        """Create a committer without partitions.

        Args:
            store: where offsets are written.
            group: consumer group.
            clock: clock of the client.
            timeout_s: longest time of one commit, in seconds.
            fence: returns the current fence of commits.
        """
        self._store = store
        self._group = group
        self._clock = clock
        self._timeout_s = timeout_s
        self._fence = fence
        self._committed: dict[TopicPartition, Offset | None] = {}
        self._named: dict[TopicPartition, _Named] = {}
        self._claims: dict[TopicPartition, object] = {}
        """Partitions whose commits are accepted; an assignment or `seek` makes a new
        value."""
        self._writes: deque[_Write] = deque()
        """The write in progress, then the waiting ones: one for each fence."""
        self._writing: asyncio.Task[None] | None = None
        self.storing = asyncio.Lock()
        """Held while offsets are written, by a write of this object or by the decision
        of an exactly-once batch."""
        self.written: set[TopicPartition] = set()
        """Partitions for which this consumer has committed an offset."""
        self.commit_count = 0
        self.failure_count = 0
        self.last_error: MetaqError | None = None
        """Error of the last commit; None if it succeeded."""

    def begin(self, partition: TopicPartition, offset: GroupOffset | None) -> None:
        """Set the committed offset of a newly assigned partition; None: there is none.

        Ignored if the partition is assigned already: the offset may have been read
        before the last write.
        """
        if partition not in self._claims:
            self._committed[partition] = None if offset is None else offset.offset

    def admit(self, partition: TopicPartition) -> None:
        """Accept commits of a partition from now on; drop its explicit offset."""
        self._claims[partition] = object()
        self._named.pop(partition, None)

    def dismiss(self, partitions: Iterable[TopicPartition]) -> None:
        """Accept no more commits of partitions; waiting commits fail for them."""
        for partition in partitions:
            self._claims.pop(partition, None)
            self._named.pop(partition, None)
            for one in self._writes:
                if not one.is_begun and (at := one.offsets.pop(partition, None)):
                    one.lost[partition] = self._not_ours(partition, at)

    def claim(self, partition: TopicPartition) -> object:
        """Return the claim of a partition; None if it is not assigned; on any thread.

        Each assignment, and each `seek`, makes another one.
        """
        return self._claims.get(partition)

    def stored(self, partition: TopicPartition) -> Offset | None:
        """Return the stored offset as last written or read; None: there is none."""
        return self._committed.get(partition)

    def note_stored(self, offsets: Offsets) -> None:
        """Record offsets that the holder of `storing` has stored, as one commit.

        Waiting commits of these partitions are older and are dropped.
        """
        self.commit_count += 1
        for partition, offset in offsets.items():
            self._committed[partition] = offset.offset
            self.written.add(partition)
            self._named.pop(partition, None)
            for one in self._writes:
                one.offsets.pop(partition, None)

    def changed(self, handled: Offsets) -> dict[TopicPartition, GroupOffset]:
        """Return the offsets that an automatic commit would write."""
        return self._differing(
            {partition: self.due(partition, at) for partition, at in handled.items()}
        )

    def _differing(self, offsets: Offsets) -> dict[TopicPartition, GroupOffset]:
        return {
            partition: offset
            for partition, offset in offsets.items()
            if self._committed.get(partition) != offset.offset
        }

    def due(self, partition: TopicPartition, handled: GroupOffset) -> GroupOffset:
        """Return the offset that an automatic commit writes for a handled offset."""
        named = self._named.get(partition)
        return (
            handled if named is None or handled.offset > named.until else named.offset
        )

    # -- commits ----------------------------------------------------------------------

    async def commit(
        self, handled: Offsets, *, deadline_s: float | None = None
    ) -> Failures:
        """Write changed offsets; durable when it returns.

        Args:
            handled: the next offset of each partition.
            deadline_s: absolute; covers the wait for earlier commits too. None: now
                plus the longest time of one commit.

        Returns:
            The partitions that were not written, with their errors.

        Cancellation: offsets may still be written.
        """
        return await self.request(handled, deadline_s=deadline_s).wait()

    def request(
        self,
        handled: Offsets,
        order: CommitOrder | None = None,
        *,
        refused: Failures = MappingProxyType({}),
        deadline_s: float | None = None,
    ) -> Commit:
        """Add changed offsets to the next write.

        Args:
            handled: the next offset of each partition.
            order: request of the user: for explicit offsets, or for the handled ones,
                which then replace offsets that the user moved back. None: an automatic
                commit.
            refused: errors of other partitions, part of the outcome.
            deadline_s: as for `commit`.
        """
        if order is not None and order.named is not None:
            due = self._name(order.named, handled, may_go_back=order.may_go_back)
        else:
            for partition, at in handled.items():
                named = self._named.get(partition)
                if named is not None and at.offset > (
                    named.until if order is None else named.offset.offset
                ):
                    del self._named[partition]
            due = {one: self.due(one, at) for one, at in handled.items()}
        left_s = self._left_s(deadline_s)
        foreign, ours = dict(refused), {}
        for partition, at in due.items():
            if partition in self._claims:
                ours[partition] = at
            elif partition not in foreign:
                foreign[partition] = self._not_ours(partition, at)
        # With slack, so that the write's own time-out fires first.
        limit_s = left_s + 2 * STORE_SLACK_S
        asked = Commit(ours, foreign, limit_s, f"commit of group {self._group}")
        if self._writes or self._differing(ours):
            self._join(asked, self._clock.monotonic_s() + left_s)
        else:
            # Offsets that failed before have been revoked or written since.
            self.last_error = None
            finish(asked.failed, {})
        return asked

    def _name(
        self, offsets: Offsets, handled: Offsets, *, may_go_back: bool
    ) -> dict[TopicPartition, GroupOffset]:
        """Set explicit offsets; return the offsets to write.

        Unless `may_go_back`, an offset at or before the committed one changes nothing.
        """
        due = {}
        for partition, offset in offsets.items():
            newest = self._newest(partition)
            if not may_go_back and newest and offset.offset <= newest.offset:
                # Its write may be in progress: the commit is answered after it.
                due[partition] = newest
                continue
            at = handled.get(partition, offset) if may_go_back else offset
            until = max(offset.offset, at.offset)
            self._named[partition] = _Named(offset, until)
            due[partition] = offset
        return due

    def _newest(self, partition: TopicPartition) -> GroupOffset | None:
        """Return the explicit offset, else the one being written, else the stored."""
        named = self._named.get(partition)
        if named is not None:
            return named.offset
        fence = self._fence()
        for one in reversed(self._writes):
            # A write under another fence will fail.
            if partition in one.offsets and one.fence == fence:
                return one.offsets[partition]
        committed = self._committed.get(partition)
        return None if committed is None else GroupOffset(committed)

    async def settle(self, *, deadline_s: float | None = None) -> None:
        """Wait for the commits requested so far, until `deadline_s` at most (absolute).

        None: for the longest time of one commit.
        """
        if self._writes:
            running = Commit({}, {}, self._left_s(deadline_s), "")
            self._writes[-1].commits.append(running)
            await running.wait()

    async def close(self) -> None:
        """Cancel the write in progress; waiting commits fail without a write."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def _left_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self._timeout_s
        return max(0.0, deadline_s - self._clock.monotonic_s())

    # -- writes -----------------------------------------------------------------------

    def _join(self, asked: Commit, deadline_s: float) -> None:
        """Add a commit to the last write if it fits there, else to a new one."""
        fence, offsets = self._fence(), asked.offsets
        one = self._writes[-1] if self._writes else None
        is_open = one is not None and not one.is_begun and one.fence == fence
        if one is None or not is_open or not one.lost.keys().isdisjoint(offsets):
            one = _Write(fence, deadline_s)
            self._writes.append(one)
        one.commits.append(asked)
        one.offsets |= offsets
        one.deadline_s = max(one.deadline_s, deadline_s)
        if self._writing is None:
            self._writing = asyncio.create_task(
                self._write_all(), name=f"commits of {self._group}"
            )

    async def _write_all(self) -> None:
        try:
            while self._writes:
                one = self._writes[0]
                one.is_begun = True
                async with self.storing:
                    failed = await self._write_one(one)
                self._writes.popleft()
                one.end(failed)
        finally:
            self._writing = None
            for one in self._writes:
                closed = ClosedError(f"commit of group {self._group}: closed before")
                one.end(dict.fromkeys(one.offsets, closed))
            self._writes.clear()

    async def _write_one(self, one: _Write) -> Failures:
        changed = self._differing(one.offsets)
        failed: dict[TopicPartition, MetaqError] = {}
        if changed:
            limit_s = self._left_s(one.deadline_s) + STORE_SLACK_S
            asking = self._store.commit(
                self._group, changed, fence=one.fence, deadline_s=one.deadline_s
            )
            try:
                failed = dict(await within(limit_s, asking, f"commit of {self._group}"))
            except MetaqError as error:
                failed = dict.fromkeys(changed, error)
            except Exception as error:  # noqa: BLE001  # users write stores too
                failure = MetaqError(f"offset store of group {self._group}: {error!r}")
                failed = dict.fromkeys(changed, failure)
        self._note(changed, failed)
        return failed | one.lost

    def _not_ours(self, partition: TopicPartition, at: GroupOffset) -> MetaqError:
        return OwnershipLostError(
            f"{partition}: not assigned to this consumer of group {self._group};"
            f" offset {at.offset} is not committed"
        )

    def _note(self, changed: Offsets, failed: Failures) -> None:
        written = {one: at for one, at in changed.items() if one not in failed}
        self.commit_count += bool(written)
        self.failure_count += len(failed)
        # One warning for each outage; `health` reports the error until it is over.
        level = logging.WARNING if self.last_error is None else logging.DEBUG
        self.last_error = next(iter(failed.values()), None)
        if failed:
            first, error = next(iter(failed.items()))
            text = "commit failed: group=%s partitions=%d first=%s offset=%d: %s"
            at = changed[first].offset
            _log.log(level, text, self._group, len(failed), first, at, error)
        for partition, stored in written.items():
            self._committed[partition] = stored.offset
            self.written.add(partition)
