"""Subscription state of a consumer: start, progress and end of reading partitions.

It connects the parts that serve a partition: fetcher, fetch handler, fetch buffer and
committer.

    assign:   committed offset, or `start` --> fetch buffer, fetcher
    announce: `on_assigned` --> messages are handed out
    revoke:   fetcher stops --> message being handled comes back --> `on_revoked` -->
              commit, if automatic
    fence:    everything stops at once, without a commit --> `on_lost`

If a partition is assigned again after a lost session, and nothing was committed since
its first assignment, reading begins where it began then.

Source: docs/metaq-1.4/client.md 10 to 13.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from metaq.client.cluster.boundaries import require_boundary
from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import insist
from metaq.client.consume.cursor import PartitionCursor
from metaq.client.consume.duplicate_filter import DuplicateFilter
from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetch_handler import FetchHandler, Marks
from metaq.client.consume.fetcher import PartitionFetcher
from metaq.client.consume.handling import HandlingStatistics
from metaq.client.consume.progress import ConsumerStatistics, ReadStatus
from metaq.client.decisions.member import MemberDecisions
from metaq.client.fan_out import all_for, failures, for_each
from metaq.client.group.assignments import Fence
from metaq.client.group.hooks import Hooks
from metaq.client.offsets.committer import Commit, CommitOrder, Committer
from metaq.client.offsets.offset_reset import NO_MESSAGE, NOTHING_HANDLED, first_offset
from metaq.client.offsets.offset_store import (
    STORE_SLACK_S,
    Failures,
    Offsets,
    OffsetStore,
)
from metaq.client.options import ConsumerOptions
from metaq.client.timeouts import within
from metaq.errors import MetaqError, OwnershipLostError
from metaq.model import BrokerId, GroupOffset, Offset, TopicPartition

_log = logging.getLogger(__name__)

HANDLING_SHARE: Final = 0.5
"""Part of a closing consumer's time for the message being handled; the rest is for the
last commit."""


class SubscriptionState:
    """The partitions of one consumer; the `AssignmentSink` of its partition source.

    Owned by the consumer. Concurrency: its event loop, except the snapshots.
    """

    def __init__(
        self,
        context: ClientContext,
        store: OffsetStore,
        *,
        fence: Callable[[], Fence | None],
        restart: Callable[[Collection[TopicPartition]], None],
        group: str,
        options: ConsumerOptions,
        marks: Marks,
        hooks: Hooks,
        on_fatal: Callable[[MetaqError], None],
    ) -> None:
        """Create it without partitions, on the loop.

        Args:
            context: the client's parts.
            store: offset store; owned by this object.
            fence: returns the fence that commits are bound to at the moment.
            restart: fences partitions, then reads those again that are still assigned.
            group: consumer group.
            options: options chosen by the user.
            marks: shared by the consumers of one client.
            hooks: hooks of the user.
            on_fatal: called with the error when reading cannot continue.
        """
        self._context = context
        self._store = store
        self._group = group
        self._options = options
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._duplicates: DuplicateFilter | None = None
        if options.duplicate_ids is not None:
            self._duplicates = DuplicateFilter(
                options.duplicate_ids,
                group=group,
                clock=context.clock,
                timeout_s=context.options.request_timeout_s,
                waits_for_commit=options.commit_interval_s is None,
                on_room=self._step_all,
            )
        self.fetch_buffer = FetchBuffer(
            clock=context.clock,
            buffer_bytes_max=options.buffer_bytes_max,
            buffer_count_max=options.buffer_count_max,
            on_room=self._on_room,
            on_handled=self._duplicates.on_handled if self._duplicates else None,
        )
        self._fetch_handler = FetchHandler(
            self.fetch_buffer,
            group=group,
            clock=context.clock,
            options=options,
            marks=marks,
            duplicates=self._duplicates,
            on_fatal=on_fatal,
        )
        self._committer = Committer(
            store,
            group=group,
            clock=context.clock,
            timeout_s=context.options.request_timeout_s,
            fence=fence,
        )
        self.decisions = MemberDecisions(
            context,
            group=group,
            fence=fence,
            committer=self._committer,
            restart=restart,
        )
        self._fetchers: dict[TopicPartition, PartitionFetcher] = {}
        self._origins: dict[TopicPartition, GroupOffset] = {}
        """First offset of every partition that was ever read."""
        self.end_s: float | None = None
        """Monotonic time by which every later `revoke` ends; None: its own bounds."""

    # -- interface of the partition source --------------------------------------------

    async def assign(self, partitions: Collection[TopicPartition]) -> None:
        """Begin to read partitions after their claim.

        Raises:
            MetaqError: a decision, an offset or a broker could not be reached.
        """
        deadline_s = self._context.deadline_s()
        # First: what is decided is complete before anything is read.
        settle = partial(self.decisions.settle, deadline_s=deadline_s)
        places = await all_for(settle, partitions)
        find = partial(self._find_begin, deadline_s=deadline_s)
        begins = await all_for(find, partitions)
        for partition, begin in begins.items():
            self.decisions.hold(partition, places[partition], begin.offset)
            self._hooks.begin(partition)
            self._begin(partition, begin, is_committed=True)

    def announce(self, partitions: Collection[TopicPartition]) -> None:
        """Hand out messages once `on_assigned` has returned."""
        self._hooks.announce(partitions)

    async def revoke(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading: wait for the message being handled and the hook, then commit.

        With `commit_interval_s=None` it only waits for a running `commit`.

        Cancellation: another `revoke` of the same partitions continues it.
        """
        revoked = tuple(partitions)
        for partition in revoked:
            self._stop(partition)
        wait_s = self._options.revoke_timeout_s
        clock = self._context.clock
        if self.end_s is not None:
            left_s = max(0.0, self.end_s - clock.monotonic_s())
            wait_s = min(wait_s, left_s * HANDLING_SHARE)
        until_s = clock.monotonic_s() + wait_s
        ends = await asyncio.gather(
            *(self.fetch_buffer.drain(one, timeout_s=wait_s) for one in revoked)
        )
        for partition, is_returned in zip(revoked, ends, strict=True):
            if not is_returned:
                _log.error(
                    "message still being handled after %.1f s, partition goes without"
                    " it: group=%s partition=%s",
                    wait_s,
                    self._group,
                    partition,
                )
        left_s = max(0.0, until_s - clock.monotonic_s()) if all(ends) else 0.0
        may_commit = await self._hooks.revoke(frozenset(revoked), timeout_s=left_s)
        handled = {}
        for partition in revoked:
            offset = self.fetch_buffer.fence(partition)
            if offset is not None:
                handled[partition] = offset
        if self._options.commit_interval_s is None or not may_commit:
            await self._committer.settle(deadline_s=self.end_s)
        else:
            failed = await self._committer.commit(handled, deadline_s=self.end_s)
            for partition in failed:
                self._mark(partition, handled[partition])
        await self.decisions.wait_idle(deadline_s=self.end_s)
        # One that was fenced during the wait may be ours again.
        gone = [one for one in revoked if one not in self._fetchers]
        self._committer.dismiss(gone)
        self.decisions.release(gone)

    def fence(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading at once, without a commit."""
        for partition in partitions:
            handled = self._drop(partition)
            # What a hook did not hear of in time may be undone by it: it comes again.
            if handled is not None and not self._hooks.are_set:
                self._mark(partition, handled)
        self._committer.dismiss(partitions)
        self.decisions.release(partitions)
        self._hooks.lose(partitions)

    def _mark(self, partition: TopicPartition, handled: GroupOffset) -> None:
        # What the user set back comes again, handled or not.
        due = self._committer.due(partition, handled)
        self._fetch_handler.mark(
            partition, due if due.offset < handled.offset else handled
        )

    # -- requests of the user ---------------------------------------------------------

    def move(self, partition: TopicPartition, offset: Offset) -> None:
        """Continue at another offset; fetched messages of the partition are dropped.

        A paused partition stays paused.
        """
        is_paused = partition in self.fetch_buffer.paused()
        self._drop(partition)
        self._fetch_handler.deliver_again(partition)
        self.decisions.move(partition, offset)
        begin = GroupOffset(offset, NO_MESSAGE)
        self._begin(partition, begin, is_paused=is_paused)

    async def commit(self, order: CommitOrder, deadline_s: float) -> Commit:
        """Request a commit of the handled offsets, or of those given by the user.

        If a given offset is not a message boundary, the commit of its partition fails;
        the others are committed.
        """
        refused = await self._refused(order, deadline_s)
        if refused and order.named is not None:
            named = {one: at for one, at in order.named.items() if one not in refused}
            order = replace(order, named=named)
        handled = self._acknowledged(order.named)
        return self._committer.request(
            handled, order, refused=refused, deadline_s=deadline_s
        )

    async def _refused(self, order: CommitOrder, deadline_s: float) -> Failures:
        """Return the errors of explicit offsets; ask brokers about unknown ones only.

        The ends of messages in the buffer, and the stored offset, need no request.
        """
        named = order.free
        unknown = [
            one
            for one, at in named.items()
            if at.offset != self._committer.stored(one)
            and self.fetch_buffer.lacks(one, at.offset)
        ]

        def check(partition: TopicPartition) -> Coroutine[Any, Any, None]:
            offset = named[partition].offset
            return require_boundary(
                self._context, partition, offset, deadline_s=deadline_s
            )

        refused = failures(await for_each(check, unknown))
        for one, claim in order.claims.items():
            if self._committer.claim(one) is not claim:
                refused[one] = OwnershipLostError(
                    f"{one}: moved or assigned again since the commit was requested;"
                    f" offset {named[one].offset} is not committed"
                )
        return refused

    def claims(self, order: CommitOrder) -> dict[TopicPartition, object]:
        """Return the claims of the explicit offsets of an order; from any thread."""
        return {one: self._committer.claim(one) for one in order.free}

    async def committed(
        self, partitions: Collection[TopicPartition], deadline_s: float
    ) -> dict[TopicPartition, Offset | None]:
        """Return the stored offset of each partition; None if there is none.

        Raises:
            MetaqError: the store cannot be asked, or its content cannot be parsed.
        """
        found = await all_for(partial(self._load, deadline_s=deadline_s), partitions)
        return {one: None if at is None else at.offset for one, at in found.items()}

    async def _load(
        self, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the committed offset; None for none.

        It repeats the request after retriable errors, such as a missing connection to
        ZooKeeper.

        Raises:
            MetaqError: the store could not be asked, or its content cannot be parsed.
        """
        context = self._context
        load = partial(self._store.load, self._group, partition)
        asking = insist(context, load, deadline_s)
        limit_s = max(0.0, deadline_s - context.clock.monotonic_s()) + STORE_SLACK_S
        what = f"offset of group {self._group}, {partition}"
        return await within(limit_s, asking, what)

    def acknowledge(self, offsets: Mapping[TopicPartition, Offset]) -> None:
        """Note that the messages before these offsets are committed, for duplicates."""
        self._acknowledged({one: GroupOffset(at) for one, at in offsets.items()})

    def _acknowledged(self, named: Offsets | None) -> Offsets:
        """Return the handled offsets; ids before them, or before others, are added."""
        handled = self._handled()
        if self._duplicates is not None:
            before = dict.fromkeys(handled, GroupOffset(NOTHING_HANDLED))
            stored = handled if named is None else {**before, **named}
            self._duplicates.acknowledge(stored)
        return handled

    async def run_commits(self, interval_s: float) -> None:
        """Commit the handled offsets every `interval_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self._committer.commit(self._handled())

    def _handled(self) -> dict[TopicPartition, GroupOffset]:
        """Return the handled offsets; their messages go to the duplicate filter."""
        self.fetch_buffer.report_handled()
        return self.fetch_buffer.handled()

    async def last_commits(self, deadline_s: float) -> dict[TopicPartition, Offset]:
        """Return the offsets at which a new consumer would begin.

        Raises:
            MetaqError: the store or a broker cannot be asked.
        """
        await self._committer.settle(deadline_s=deadline_s)
        # One that goes and comes again begins where its next claim says.
        fetchers = dict(self._fetchers)
        find = partial(self._find_begin, deadline_s=deadline_s)
        begins = await all_for(find, fetchers)
        return {
            partition: begin.offset
            for partition, begin in begins.items()
            if self._fetchers.get(partition) is fetchers[partition]
        }

    def drop_handled_ids(self) -> None:
        """Drop ids of handled, uncommitted messages, so that these come again."""
        if self._duplicates is not None:
            self._duplicates.discard()

    # -- where to begin ---------------------------------------------------------------

    async def _find_begin(
        self, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset:
        committed = await self._load(partition, deadline_s=deadline_s)
        known = self._known_begin(partition, committed)
        begin, is_reset = await first_offset(
            self._context,
            partition,
            known,
            self._options.start,
            handled=self._fetch_handler.marked(partition),
            deadline_s=deadline_s,
        )
        self._fetch_handler.reset_count += is_reset
        if is_reset and known is not None:
            passed_over = max(0, begin.offset - known.offset)
            self._fetch_handler.missing_bytes += passed_over
        if known is None and self._options.ignore_committed:
            self._fetch_handler.deliver_again(partition)
        elif is_reset or begin.offset >= self._fetch_handler.marked(partition):
            self._fetch_handler.unmark(partition)
        if is_reset or known is None:
            self._origins[partition] = begin
        self._committer.begin(partition, committed)
        return begin

    def _known_begin(
        self, partition: TopicPartition, committed: GroupOffset | None
    ) -> GroupOffset | None:
        """Return the offset to continue at; None: the `start` of the options.

        A consumer that gets a partition again without a commit continues where it began
        the first time: at the *present* latest offset it would skip messages.
        """
        origin = self._origins.get(partition)
        if self._options.ignore_committed and partition not in self._committer.written:
            return origin
        return origin if committed is None else committed

    def _begin(
        self,
        partition: TopicPartition,
        begin: GroupOffset,
        *,
        is_paused: bool = False,
        is_committed: bool = False,
    ) -> None:
        options = self._options
        cursor = PartitionCursor(
            partition,
            begin.offset,
            fetch_bytes_max=options.fetch_bytes_max,
            where=options.where,
        )
        fetcher = PartitionFetcher(
            cursor,
            group=self._group,
            handler=self._fetch_handler,
            context=self._context,
            options=options,
            is_committed=is_committed,
        )
        is_held = partition in self._hooks.held
        self.fetch_buffer.add(partition, begin, is_paused=is_paused, is_held=is_held)
        self._committer.admit(partition)
        self._fetchers[partition] = fetcher
        if self.fetch_buffer.error is None:
            fetcher.step()

    # -- the end ----------------------------------------------------------------------

    def stop_fetching(self) -> None:
        """Send no more gets; fetched messages are still handed out."""
        for fetcher in self._fetchers.values():
            fetcher.stop()

    def _stop(self, partition: TopicPartition) -> None:
        fetcher = self._fetchers.pop(partition, None)
        if fetcher is not None:
            fetcher.stop()
        self._fetch_handler.stop(partition)

    def _drop(self, partition: TopicPartition) -> GroupOffset | None:
        self._stop(partition)
        return self.fetch_buffer.fence(partition)

    async def _close_decisions(self) -> None:
        await self.decisions.close(deadline_s=self._context.deadline_s())

    async def close(self, deadline_s: float | None) -> None:
        """Close the store, and the cache of ids; never raises.

        Each has until `deadline_s` (absolute), or its `close_timeout_s` for None.
        """
        closing = {
            "decisions": self._close_decisions,
            "commits": self._committer.close,
            "offset store": self._store.close,
        }
        if self._duplicates is not None:
            closing = {"duplicate ids": self._duplicates.close, **closing}
        for what, close in closing.items():
            limit_s = self._context.options.close_timeout_s
            if deadline_s is not None:
                limit_s = max(0.0, deadline_s - self._context.clock.monotonic_s())
            try:
                await within(limit_s, close(), f"closing the {what} of {self._group}")
            except Exception as error:  # noqa: BLE001  # users write such parts too
                _log.warning("%s", error)

    # -- events -----------------------------------------------------------------------

    def _on_room(self) -> None:
        # After the client's end there is no loop, and nothing to fetch.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._step_all)

    def _step_all(self) -> None:
        for fetcher in tuple(self._fetchers.values()):
            fetcher.step()

    def on_cluster(self) -> None:
        """End pauses between gets, because the cluster has changed."""
        for fetcher in tuple(self._fetchers.values()):
            fetcher.step_now()

    # -- state ------------------------------------------------------------------------

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """Partitions that are being read."""
        return frozenset(self._fetchers)

    def status_of(self, partition: TopicPartition) -> ReadStatus | None:
        """Return the status of reading a partition; None if it is not read."""
        fetcher = self._fetchers.get(partition)
        if fetcher is None:
            return None
        return ReadStatus(fetcher.cursor.reached, fetcher.problem)

    @property
    def uncommitted_count(self) -> int:
        """Number of partitions whose handled offset is ahead of the committed one."""
        return len(self._committer.changed(self.fetch_buffer.handled()))

    def problems(self) -> list[str]:
        """Return the problems of partitions and commits, one sentence each."""
        found = []
        for fetcher in tuple(self._fetchers.values()):
            if (problem := fetcher.problem) is not None:
                prefix = f"{fetcher.partition}: "
                found.append(prefix + str(problem).removeprefix(prefix))
        if self._committer.last_error is not None:
            found.append(f"commit: {self._committer.last_error}")
        return found

    def held_back(self) -> list[str]:
        """Return a text for each broker that delays gets, with the reason."""
        found: dict[BrokerId, str] = {}
        for fetcher in tuple(self._fetchers.values()):
            if (how := fetcher.held_back) is not None:
                found.setdefault(fetcher.partition.broker_id, how)
        return [f"broker {number} {how}" for number, how in sorted(found.items())]

    def statistics(
        self, *, handling: HandlingStatistics | None, rebalance_count: int
    ) -> ConsumerStatistics:
        """Return a snapshot of the consumer's counters."""
        handler = self._fetch_handler
        return ConsumerStatistics(
            delivered_count=handler.delivered_count,
            filtered_count=handler.filtered_count,
            expired_count=handler.expired_count,
            repeat_count=handler.repeat_count,
            reset_count=handler.reset_count,
            missing_bytes=handler.missing_bytes,
            commit_count=self._committer.commit_count,
            commit_failure_count=self._committer.failure_count,
            fetches={
                fetcher.partition: fetcher.statistics()
                for fetcher in tuple(self._fetchers.values())
            },
            handling=handling,
            rebalance_count=rebalance_count,
            duplicates=self._duplicates.statistics() if self._duplicates else None,
        )
