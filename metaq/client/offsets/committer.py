"""Commits of handled offsets, on demand and periodically.

Only changed offsets are written. A commit that fails is repeated with the next one: no
offset is lost because a store was away once.

Source: docs/metaq-1.4/client.md 13.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from metaq.client.group.assignments import Fence
from metaq.client.offsets.offset_store import STORE_SLACK_S, OffsetStore
from metaq.client.timeouts import within
from metaq.clock import Clock
from metaq.errors import MetaqError, RequestTimeoutError
from metaq.model import GroupOffset, Offset, TopicPartition

_log = logging.getLogger(__name__)

Offsets = Mapping[TopicPartition, GroupOffset]


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
        self._lock = asyncio.Lock()
        self.written: set[TopicPartition] = set()
        """Partitions for which this consumer has committed an offset."""
        self.commit_count = 0
        """Commits that wrote something."""
        self.failure_count = 0
        """Partitions whose commit failed, counted each time."""
        self.last_error: MetaqError | None = None
        """Error of the last commit; None when it succeeded."""

    def begin(self, partition: TopicPartition, offset: GroupOffset | None) -> None:
        """Note the committed offset of a newly assigned partition; None: none."""
        self._committed[partition] = None if offset is None else offset.offset

    def changed(self, handled: Offsets) -> dict[TopicPartition, GroupOffset]:
        """Return the entries of `handled` that differ from the committed ones."""
        return {
            partition: offset
            for partition, offset in handled.items()
            if self._committed.get(partition) != offset.offset
        }

    async def commit(
        self, handled: Offsets, *, deadline_s: float | None = None
    ) -> Mapping[TopicPartition, MetaqError]:
        """Write changed offsets; commits of one consumer run one at a time.

        Args:
            handled: the next offset of each partition.
            deadline_s: absolute, with the wait for earlier commits; None: the bound on
                one commit.

        Returns:
            The partitions that were not written, with their errors.

        Cancellation: offsets sent to the store may still be written.
        """
        left_s = self._left_s(deadline_s)
        end_s = self._clock.monotonic_s() + left_s
        # Get the fence before waiting: messages handled under one session may not be
        # committed under the next.
        work = self._commit(handled, self._fence(), end_s)
        what = f"commit of group {self._group}"
        try:
            return await within(left_s + STORE_SLACK_S, work, what)
        except RequestTimeoutError as error:
            changed = self.changed(handled)
            failed = dict.fromkeys(changed, error)
            self._note(changed, failed)
            return failed

    async def settle(self, *, deadline_s: float | None = None) -> None:
        """Wait until no commit is running, at most to `deadline_s` (absolute).

        None: the bound on one commit.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._left_s(deadline_s)), self._lock:
                pass

    def _left_s(self, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self._timeout_s
        return max(0.0, deadline_s - self._clock.monotonic_s())

    async def _commit(
        self, handled: Offsets, fence: Fence | None, deadline_s: float
    ) -> Mapping[TopicPartition, MetaqError]:
        async with self._lock:
            changed = self.changed(handled)
            if not changed:
                # Offsets that failed were revoked with their partitions, or written
                # since.
                self.last_error = None
                return {}
            try:
                failed = await self._store.commit(
                    self._group, changed, fence=fence, deadline_s=deadline_s
                )
            except MetaqError as error:
                failed = dict.fromkeys(changed, error)
            except Exception as error:  # noqa: BLE001  # users write stores too
                failure = MetaqError(f"offset store of group {self._group}: {error!r}")
                failed = dict.fromkeys(changed, failure)
            self._note(changed, failed)
            return failed

    def _note(
        self, changed: Offsets, failed: Mapping[TopicPartition, MetaqError]
    ) -> None:
        self.commit_count += 1
        self.failure_count += len(failed)
        # A warning once for each outage; `health` reports it as long as it lasts.
        level = logging.WARNING if self.last_error is None else logging.DEBUG
        self.last_error = next(iter(failed.values()), None)
        if failed:
            first, error = next(iter(failed.items()))
            text = "commit failed: group=%s partitions=%d first=%s offset=%d: %s"
            at = changed[first].offset
            _log.log(level, text, self._group, len(failed), first, at, error)
        for partition, offset in changed.items():
            if partition not in failed:
                self._committed[partition] = offset.offset
                self.written.add(partition)
