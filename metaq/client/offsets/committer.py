"""Commits of handled offsets, on demand and periodically.

Only changed offsets are written. A commit that fails is repeated with the next one: no
offset is lost because a store was away once.

Theory of operation: one write is under way at a time. Commits that come in the
meantime gather in the next one, which takes the newest offset of each partition and
answers all of them: a consumer that commits each message writes as often as its store
can, and no more. A commit under another fence waits for a write of its own, so that
messages handled under one session are not committed under the next.

An offset that the user names holds until more is handled: automatic commits do not set
it back to what is handled, nor forward after the user set it back.

    user names   handled   automatic commits write
    message 7    3         7, until more than 7 is handled
    offset 2     5         2, until more than 5 is handled

Source: docs/metaq-1.4/client.md 13.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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
    """An offset that the user has named."""

    offset: GroupOffset
    until: Offset
    """It holds while no more than this is handled."""


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """Offsets that a user wants committed."""

    named: Offsets | None = None
    """Offsets that are named; None: those of what is handled."""
    may_go_back: bool = False
    """Whether a named offset may be before the committed one."""
    lost: MetaqError | None = None
    """Error of the message being handled; the others are committed."""

    def error(self, failed: Failures) -> MetaqError | None:
        """Return the error for the caller; None when all is committed."""
        return next(iter(failed.values()), self.lost)


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """A commit that has been asked for."""

    offsets: Offsets
    foreign: Failures
    """Partitions that are not ours, with their errors."""
    limit_s: float
    """Seconds that its caller waits."""
    what: str
    failed: asyncio.Future[Failures] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Outcome of its write, which may answer others too."""

    def _end_late(self) -> None:
        text = f"{self.what}: not done within {self.limit_s:.3g} s"
        finish(self.failed, dict.fromkeys(self.offsets, RequestTimeoutError(text)))

    async def wait(self) -> Failures:
        """Return the partitions that were not written, with their errors."""
        timer = self.failed.get_loop().call_later(self.limit_s, self._end_late)
        try:
            failed = await self.failed
        finally:
            timer.cancel()
        ours = {p: error for p, error in failed.items() if p in self.offsets}
        return {**self.foreign, **ours}


@dataclass(slots=True, eq=False)
class _Write:
    """One write to the store, and the commits that it answers."""

    fence: Fence | None
    deadline_s: float
    offsets: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    is_begun: bool = False
    lost: dict[TopicPartition, MetaqError] = field(default_factory=dict)
    """Partitions that went before it began; they may be ours again, elsewhere."""

    def end(self, failed: Failures) -> None:
        """Answer its commits."""
        for one in self.commits:
            finish(one.failed, failed)


class Committer:
    """The committed offsets of one consumer; on the loop's thread alone."""

    def __init__(
        self,
        store: OffsetStore,
        *,
        group: str,
        clock: Clock,
        timeout_s: float,
        fence: Callable[[], Fence | None],
    ) -> None:
        """Begin without a commit.

        Args:
            store: where offsets are written.
            group: consumer group.
            clock: clock of the client.
            timeout_s: bound on one commit.
            fence: returns the current binding of commits.
        """
        self._store = store
        self._group = group
        self._clock = clock
        self._timeout_s = timeout_s
        self._fence = fence
        self._committed: dict[TopicPartition, Offset | None] = {}
        self._named: dict[TopicPartition, _Named] = {}
        self._ours: set[TopicPartition] = set()
        self._writes: deque[_Write] = deque()
        """The one under way, and those that wait: one for each fence."""
        self._writing: asyncio.Task[None] | None = None
        self.storing = asyncio.Lock()
        """Held by who writes offsets: a write of this, or a decision."""
        self.written: set[TopicPartition] = set()
        """Partitions for which this consumer has committed an offset."""
        self.commit_count = 0
        self.failure_count = 0
        self.last_error: MetaqError | None = None
        """Error of the last commit; None when it succeeded."""

    def begin(self, partition: TopicPartition, offset: GroupOffset | None) -> None:
        """Note the committed offset of a newly assigned partition; None: none.

        Of one that is ours it was read perhaps before the last write.
        """
        if partition not in self._ours:
            self._committed[partition] = None if offset is None else offset.offset

    def admit(self, partition: TopicPartition) -> None:
        """Take commits of a partition from now on; named offsets are forgotten."""
        self._ours.add(partition)
        self._named.pop(partition, None)

    def dismiss(self, partitions: Iterable[TopicPartition]) -> None:
        """Take no more commits of partitions; commits that wait fail for them."""
        for partition in partitions:
            self._ours.discard(partition)
            self._named.pop(partition, None)
            for one in self._writes:
                if not one.is_begun and (at := one.offsets.pop(partition, None)):
                    one.lost[partition] = self._not_ours(partition, at)

    def stored(self, partition: TopicPartition) -> Offset | None:
        """Return the offset that is stored as far as we know; None: none is."""
        return self._committed.get(partition)

    def note_stored(self, offsets: Offsets) -> None:
        """Note offsets that who holds `storing` has stored, as one commit.

        Commits of these partitions that wait are older, and are left out.
        """
        self.commit_count += 1
        for partition, offset in offsets.items():
            self._committed[partition] = offset.offset
            self.written.add(partition)
            self._named.pop(partition, None)
            for one in self._writes:
                one.offsets.pop(partition, None)

    def changed(self, handled: Offsets) -> dict[TopicPartition, GroupOffset]:
        """Return what an automatic commit would write."""
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
        """Return what an automatic commit of a handled offset writes."""
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
            deadline_s: absolute, with the wait for earlier commits; None: the bound on
                one commit.

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
        deadline_s: float | None = None,
    ) -> Commit:
        """Have changed offsets written by the next write.

        Args:
            handled: the next offset of each partition.
            order: of the user, for what he names, or for what is handled: then what he
                set back goes forward. None: an automatic commit.
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
        foreign = {
            p: self._not_ours(p, at) for p, at in due.items() if p not in self._ours
        }
        ours = {p: at for p, at in due.items() if p not in foreign}
        # The write's own bound comes first, where it is the same.
        limit_s = left_s + 2 * STORE_SLACK_S
        asked = Commit(ours, foreign, limit_s, f"commit of group {self._group}")
        if self._writes or self._differing(ours):
            self._join(asked, self._clock.monotonic_s() + left_s)
        else:
            # Offsets that failed were revoked with their partitions, or written since.
            self.last_error = None
            finish(asked.failed, {})
        return asked

    def _name(
        self, offsets: Offsets, handled: Offsets, *, may_go_back: bool
    ) -> dict[TopicPartition, GroupOffset]:
        """Note the offsets that the user names; return what is to be written.

        Unless they may go back, a partition that is committed further stays so.
        """
        due = {}
        for partition, offset in offsets.items():
            newest = self._newest(partition)
            if not may_go_back and newest and offset.offset <= newest.offset:
                # It may be under way: the answer comes when it is written.
                due[partition] = newest
                continue
            at = handled.get(partition, offset) if may_go_back else offset
            until = max(offset.offset, at.offset)
            self._named[partition] = _Named(offset, until)
            due[partition] = offset
        return due

    def _newest(self, partition: TopicPartition) -> GroupOffset | None:
        """Return what is named; else what is under way; else what is committed."""
        named = self._named.get(partition)
        if named is not None:
            return named.offset
        fence = self._fence()
        for one in reversed(self._writes):
            # Under another fence it fails.
            if partition in one.offsets and one.fence == fence:
                return one.offsets[partition]
        committed = self._committed.get(partition)
        return None if committed is None else GroupOffset(committed)

    async def settle(self, *, deadline_s: float | None = None) -> None:
        """Wait until no commit of now is running, at most to `deadline_s` (absolute).

        None: the bound on one commit.
        """
        if self._writes:
            running = Commit({}, {}, self._left_s(deadline_s), "")
            self._writes[-1].commits.append(running)
            await running.wait()

    async def close(self) -> None:
        """Abandon the write under way; all that wait fail, the store is not used."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def _left_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self._timeout_s
        return max(0.0, deadline_s - self._clock.monotonic_s())

    # -- writes -----------------------------------------------------------------------

    def _join(self, asked: Commit, deadline_s: float) -> None:
        """Have a commit answered by the last write, or by one of its own."""
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
        written = changed.keys() - failed.keys()
        self.commit_count += bool(written)
        self.failure_count += len(failed)
        # A warning once for each outage; `health` reports it as long as it lasts.
        level = logging.WARNING if self.last_error is None else logging.DEBUG
        self.last_error = next(iter(failed.values()), None)
        if failed:
            first, error = next(iter(failed.items()))
            text = "commit failed: group=%s partitions=%d first=%s offset=%d: %s"
            at = changed[first].offset
            _log.log(level, text, self._group, len(failed), first, at, error)
        for partition in written:
            self._committed[partition] = changed[partition].offset
            self.written.add(partition)
