"""A consumer: hands out messages of its partitions and commits their offsets.

`AsyncConsumer` is the object of the async client, and the core of the sync one. This
module has messages, pauses and offsets; start, close and health are in
`consumer_life.py`.

Source: docs/metaq-1.4/client.md 10 to 13.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from metaq.client.consume.consumer_life import ConsumerLife
from metaq.client.consume.current_batch import Filling, current_task
from metaq.client.consume.exactly_once import AsyncExactlyOnce
from metaq.client.consume.handler_tasks import CONCURRENCY_MAX, AsyncHandler
from metaq.client.consume.handling import Handling
from metaq.client.consume.message_batch import ListedMessages, check_bounds
from metaq.client.consume.progress import ConsumerState
from metaq.client.consume.redelivery import DEFAULT_POLICY, RetryPolicy
from metaq.client.decisions.member import MemberDecisions
from metaq.client.group.hooks import commits_inside
from metaq.client.names import as_partition
from metaq.client.offsets.commit_orders import Committable, read_committable
from metaq.client.offsets.committer import CommitOrder
from metaq.client.offsets.offset_reset import Goal, check_goal, find_goal
from metaq.client.offsets.offset_store import ZooKeeperOffsets
from metaq.client.options import check_callable, names_calls
from metaq.client.produce.transaction_branch import TransactionParts
from metaq.client.timeouts import within
from metaq.client.validation import check_timeout, check_whole, wrong_type
from metaq.errors import ClientError, ClosedError, ConfigError, MetaqError
from metaq.model import Message, Offset, TopicPartition

_log = logging.getLogger(__name__)

Partitions: TypeAlias = TopicPartition | str | Iterable[TopicPartition | str]
"""One or more partitions as users name them: objects, or names like `0-3`."""


@names_calls
class AsyncConsumer(ConsumerLife):
    """A member of a group, or a reader of fixed partitions.

    Created by `AsyncClient.consumer`; used as `async with`. Reading begins when the
    block is entered. Everything is called on the client's event loop; calls that wait
    raise `ClosedError` on another one.

    Delivery: at least once. A message counts as handled when the next one is requested,
    or by `commit`. Handled offsets are committed every `commit_interval_s`, when
    partitions are revoked, and on `close`; with None only `commit` commits. Messages
    handled after the last commit are delivered again, for example after a crash.

    Cancellation: cancelling any `await` loses no message.
    """

    # -- messages ---------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Message]:
        self._require_loop()
        self.require_started()
        with self.current_batch.loop_of(current_task()):
            while True:
                for piece in self.current_batch.pieces():
                    for message in piece:
                        yield message
                try:
                    await self._take()
                except ClosedError:
                    return
                # Let fetchers run: with a full buffer this loop never waits.
                await asyncio.sleep(0)

    async def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message; None on a time-out.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            MetaqError: the consumer has failed; `ClosedError` after `close`.
        """
        many = await self.receive_many(1, timeout)
        return many[0] if many else None

    async def receive_many(
        self, count_max: int, timeout: float | None = None, *, fill: bool = False
    ) -> list[Message]:
        """Return available messages of one partition, in order.

        With `fill` it waits until there are `count_max` messages of all partitions, and
        returns them partition by partition, each in order.

        Args:
            count_max: maximum number of messages, 1 or more.
            timeout: seconds to wait for the first message, with `fill` for all of them;
                None waits without a limit.
            fill: wait for `count_max` messages.

        Returns:
            1 to `count_max` messages. On a time-out: [], or with `fill` the messages so
            far. All of them count as handled when more are requested, or by `commit`.

        Raises:
            ConfigError: `count_max` is below 1.
            ClientError: another task is reading.
            MetaqError: the consumer has failed; `ClosedError` after `close`.
        """
        self.require_started()
        check_whole("count_max", count_max, 1)
        check_timeout(timeout)
        self.current_batch.require_free_for(current_task())
        if fill:
            return (await self._fill(count_max, timeout=timeout)).messages
        try:
            async with asyncio.timeout(timeout):
                while True:
                    many = self.current_batch.some(count_max)
                    if many:
                        return many
                    self._require_loop()
                    await self._take()
        except TimeoutError:
            return []

    async def _take(self) -> None:
        """Wait for a batch, and hold it."""
        with self.current_batch.taking():
            self.current_batch.hold(await self.fetch_buffer.take_async())

    def batches(
        self,
        *,
        max_count: int = 500,
        max_bytes: int | None = None,
        max_wait_s: float = 1.0,
    ) -> AsyncIterator["AsyncMessageBatch"]:
        """Iterate over batches of messages of one or more partitions.

        A batch is handed out when it is full, or `max_wait_s` after its first message
        arrived; it is never empty. All of its messages count as handled when the next
        batch is requested, or by `commit`. A partition that is revoked or paused while
        a batch is being filled is left out of it.

        Args:
            max_count: maximum number of messages, 1 or more.
            max_bytes: maximum bytes of the log from the first to the last message,
                summed over partitions; a single message may be larger. None: no limit.
            max_wait_s: seconds to wait for more after the first message.

        Returns:
            An iterator that ends when the consumer is closed.

        Raises:
            ConfigError: a number is out of range.
            ClientError: another task is reading.
            MetaqError: the consumer has failed; raised after the fetched messages.
        """
        check_bounds(max_count, max_bytes, max_wait_s)
        return self._iterate_batches(max_count, max_bytes, max_wait_s)

    async def _iterate_batches(
        self, max_count: int, max_bytes: int | None, max_wait_s: float
    ) -> AsyncIterator["AsyncMessageBatch"]:
        self.require_started()
        with self.current_batch.loop_of(current_task()):
            while True:
                try:
                    filling = await self._fill(max_count, max_bytes, wait_s=max_wait_s)
                except ClosedError:
                    return
                if filling.offsets:
                    yield AsyncMessageBatch(self, filling)
                # As in `_iterate`.
                await asyncio.sleep(0)

    async def _fill(
        self,
        count_max: int,
        bytes_max: int | None = None,
        *,
        timeout: float | None = None,
        wait_s: float | None = None,
    ) -> Filling:
        """Return a list when it is full, or its time is over.

        Args:
            count_max: maximum number of messages.
            bytes_max: maximum bytes; None: no limit.
            timeout: seconds in all; None: no limit.
            wait_s: seconds after the first message; None: no limit.
        """
        self._require_loop()
        current = self.current_batch
        with current.taking():
            filling = Filling(current, count_max=count_max, bytes_max=bytes_max)
            try:
                async with asyncio.timeout(timeout) as bound:
                    while not filling.add_nowait():
                        if wait_s is not None and filling.offsets and not bound.when():
                            bound.reschedule(self._loop.time() + wait_s)
                        await self.fetch_buffer.wait_async(current.held)
            except TimeoutError:
                pass
            except BaseException:
                current.release()
                raise
        return filling

    # -- pause ------------------------------------------------------------------------

    def pause(self, partitions: Partitions) -> None:
        """Stop fetching and handing out messages of these partitions until `resume`.

        Fetched messages are kept. The batch being handed out ends at the next request:
        its messages that were not handed out, or are not handled by then, are handed
        out after `resume`. The end of an assignment ends the pause. Never waits.

        Args:
            partitions: one or more assigned partitions; names like `0-3` if one topic
                is read.

        Raises:
            ClosedError: one is not assigned to this consumer; none is paused.
            ConfigError, TypeError: an argument is not a partition.
        """
        chosen = self._as_partitions(partitions)
        for partition in sorted(chosen - self.assignment()):
            raise ClosedError(f"{partition}: not assigned to this consumer")
        self.fetch_buffer.set_paused(chosen, is_paused=True)

    def resume(self, partitions: Partitions) -> None:
        """Fetch and hand out messages of paused partitions again; never waits.

        Partitions that are not paused or no longer assigned are ignored.

        Args:
            partitions: as for `pause`.

        Raises:
            ConfigError, TypeError: an argument is not a partition.
        """
        chosen = self._as_partitions(partitions)
        self.fetch_buffer.set_paused(chosen, is_paused=False)

    def paused(self) -> frozenset[TopicPartition]:
        """Return the paused partitions."""
        return self.fetch_buffer.paused()

    def _as_partitions(self, partitions: Partitions) -> frozenset[TopicPartition]:
        if isinstance(partitions, str | TopicPartition):
            partitions = [partitions]
        return frozenset(as_partition(one, self.topics) for one in partitions)

    async def run(
        self,
        handler: AsyncHandler[Message],
        *,
        concurrency: int = 1,
        retry: RetryPolicy = DEFAULT_POLICY,
        timeout: float | None = None,
    ) -> None:
        """Call the handler for every message, until `close` or the time-out.

        A message counts as handled when its handler has returned. Messages of one
        partition are handled one at a time, in order. A message whose handler fails is
        handled again as `retry` says, while its partition waits. With
        `commit_interval_s=None` nothing is committed until `commit` is called, in a
        handler or elsewhere.

        Args:
            handler: handles one message; an exception is a failure.
            concurrency: number of messages handled at once, 1 or more; one of each
                partition.
            retry: policy for failures.
            timeout: seconds until no more handlers are started. Running ones then have
                `revoke_timeout_s` to end, before they are cancelled and have one more
                second; dead letters have half a second. Then it returns (5 s later if
                the disk of a local retry store hangs), even if a handler still runs,
                which keeps its partition until it ends. The consumer stays open, and
                may be run again. None runs until another task or thread calls `close`.

        Raises:
            NoTopicError: `retry` sends dead letters to a topic that does not exist. If
                the consumer's topic matched a pattern later, `health` reports it.
            HandlerFailedError: a message was given up, and `retry` says to stop.
            ConfigError: the handler is a plain function; its message is delivered
                again.
            RequestTimeoutError: the local retry store could not be opened in time.
            MetaqError: the consumer has failed, is running already, or is not started.

        Cancellation: the handlers are cancelled, and their messages are delivered
        again.
        """
        self._require_loop()
        check_callable("handler", handler)
        handling = self.begin_handling(concurrency, retry)
        grace_s = self.options.revoke_timeout_s
        try:
            await handling.start(timeout)
            await handling.run_workers(
                handler, concurrency, timeout_s=timeout, grace_s=grace_s
            )
        finally:
            await handling.close()

    def begin_handling(self, concurrency: int, retry: RetryPolicy) -> Handling:
        """Create the state that the workers of a `run` share, for both worlds.

        Args:
            concurrency: number of workers, 1 to `CONCURRENCY_MAX`.
            retry: policy for failures.

        Returns:
            The state; the caller closes it.

        Raises:
            ConfigError: `concurrency` is out of range.
            TypeError: `retry` is not a RetryPolicy.
            ClientError: the consumer is not started, or is running already.
        """
        check_whole("concurrency", concurrency, 1, CONCURRENCY_MAX)
        if not isinstance(retry, RetryPolicy):
            raise wrong_type("retry", "RetryPolicy", retry)
        if self._state is ConsumerState.NEW:
            raise ClientError(f"{self} is not started")
        if self._handling is not None and not self._handling.is_closed:
            raise ClientError(f"{self} is already being run")
        self._concurrency = concurrency
        self._handling = Handling(
            self._context,
            self.fetch_buffer,
            group=self.group,
            topics=self._topics,
            policy=retry,
            before=self._handling,
        )
        self._runs.add(self._handling)
        return self._handling

    # -- offsets ----------------------------------------------------------------------

    async def commit(
        self, what: Committable | None = None, timeout: float | None = None
    ) -> None:
        """Commit handled messages, or the given messages or offsets; durable on return.

        None: all messages handed out, including the last one; in a `run` all whose
        handlers have returned, in a hook all that are handled. Partitions that are no
        longer assigned are left out.

        A message, messages or a batch: up to and including them. They count as handled,
        so no later commit goes back before them; it is no error if they are committed
        already. Offsets of partitions may also go back; automatic commits continue from
        there when more is handled. `seek`, `rollback` and an assignment end both. The
        broker first checks an offset that is not next to a message handed out last, as
        for `seek`.

        A commit during another one waits for it, then writes the newest offsets of all
        waiting commits.

        Args:
            what: None; a message, or messages; a batch; or a mapping of partitions,
                `TopicPartition` or names like `"0-3"` if one topic is read, to their
                next offsets.
            timeout: seconds; None takes the client's `request_timeout_s`.

        Raises:
            OwnershipLostError: a given partition, or that of the message being
                handled, belongs to another member now; the others are committed. Or
                called in a hook whose partitions are lost; nothing is committed.
            ClientError: an offset outside the log, or inside a message, is not
                committed; the others are.
            RequestTimeoutError: the time is over; consequences as for MetaqError.
            MetaqError: the store could not write; handled messages stay handled, and
                the next commit tries again. Or an offset could not be checked, and is
                not committed.
            TransactionError: a block of `exactly_once` is open.
            TypeError: `what` is of another type.
            ConfigError: an offset or the name of a partition is invalid.
        """
        self._require_loop()
        check_timeout(timeout)
        order = self.commit_order(what)
        commit = await self._begin_commit(order, timeout)
        failed = await commit.wait()
        if (error := order.error(failed)) is not None:
            raise error

    def commit_nowait(self, what: Committable | None = None) -> asyncio.Future[None]:
        """Begin a commit as `commit` does, without waiting for it.

        The messages to commit are those handed out now, not when the loop commits.

        Returns:
            A future with the outcome of the commit: within `request_timeout_s` if no
            other commit is in progress, else within twice that, and at the latest when
            the client closes. Cancelling it does not cancel the commit. An error that
            the caller does not retrieve is logged, and `health` reports it.

        Raises:
            ClosedError: it belongs to another event loop.
            OwnershipLostError: called in a hook whose partitions are lost.
            TransactionError, TypeError, ConfigError: as for `commit`.
        """
        self._require_loop()
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(_retrieve)
        order = self.commit_order(what)
        self.commit_orders.add(order, future, self._loop.create_task)
        return future

    def commit_order(self, what: Committable | None) -> CommitOrder:
        """Return the order for a commit at this moment; called on the reader's thread.

        Raises:
            TransactionError: a block of `exactly_once` is open.
            OwnershipLostError: in a hook whose partitions are lost.
            TypeError, ConfigError: as for `commit`.
        """
        is_inside = commits_inside(self.hooks)
        if not is_inside:
            self._subscription.decisions.refuse_commit()
        if what is not None:
            order = read_committable(what, self.topics)
            return replace(order, claims=self._subscription.claims(order))
        try:
            # A hook does not confirm the message that the reader is handling.
            if not is_inside:
                self.current_batch.confirm()
        except MetaqError as error:
            return CommitOrder(lost=error)
        return CommitOrder()

    async def committed(
        self,
        partitions: Collection[TopicPartition | str] | None = None,
        timeout: float | None = None,
    ) -> dict[TopicPartition, Offset | None]:
        """Return the committed offsets of the group, read from its store.

        Args:
            partitions: list of partitions, each as for `commit`, assigned or not; None:
                the assigned ones.
            timeout: seconds; None takes the client's `request_timeout_s`.

        Returns:
            The offset of each partition; None if nothing was ever committed.

        Raises:
            RequestTimeoutError: the time is over.
            MetaqError: the store cannot be read.
            TypeError, ConfigError: as for `commit`.
        """
        self._require_loop()
        if isinstance(partitions, str):
            raise wrong_type("partitions", "a list", partitions)
        wanted = self.assignment()
        if partitions is not None:
            wanted = self._as_partitions(partitions)
        limit_s = self._context.limit_s(timeout)
        deadline_s = self._context.deadline_s(limit_s)
        asking = self._subscription.committed(sorted(wanted), deadline_s)
        return await within(limit_s, asking, f"{self}: committed")

    async def seek(
        self, partition: TopicPartition | str, to: Goal, timeout: float | None = None
    ) -> None:
        """Continue at another offset; fetched messages of the partition are dropped.

        The broker is asked first: an offset takes three short requests, and at a MetaQ
        1.4 broker 2 MiB around it are read. Messages may be handed out until it has
        answered.

        Args:
            partition: an assigned partition; a name like `0-3` if one topic is read.
            to: "earliest" for the log start, "latest" for its end; a datetime for the
                first message of that time or later (local time without a zone); or an
                offset at which a message begins or the log ends.
            timeout: seconds; None takes the client's `request_timeout_s`.

        Raises:
            ClosedError: the partition is not assigned to this consumer.
            ClientError: an offset outside the log, or inside a message; the text names
                the nearest valid ones. After any error, reading continues as before.
            CannotAnswerError: a time at a MetaQ 1.4 broker, which has no times.
            ConfigError: the name of the partition, or `to`, is invalid.
            TypeError: `partition` or `to` is of another type.
            RequestTimeoutError: the time is over.
            MetaqError: the broker cannot be asked, or refuses.

        Cancellation: reading continues as before.
        """
        self._require_loop()
        check_goal("to", to)
        one = self._require_assigned(as_partition(partition, self.topics))
        deadline_s = self._context.deadline_s(timeout)
        offset = await find_goal(self._context, one, to, deadline_s=deadline_s)
        self._move(one, offset)

    def _require_assigned(self, partition: TopicPartition) -> TopicPartition:
        if partition not in self.assignment():
            raise ClosedError(f"{partition}: not assigned to this consumer")
        return partition

    def _move(self, partition: TopicPartition, offset: Offset) -> None:
        self._require_assigned(partition)
        self.current_batch.drop(partition)
        self._subscription.move(partition, offset)

    async def rollback(self, timeout: float | None = None) -> None:
        """Go back to the committed offsets; later messages are delivered again.

        Args:
            timeout: seconds; None takes the client's `request_timeout_s`.

        Raises:
            RequestTimeoutError: the time is over; nothing is rolled back.
            MetaqError: the store cannot be read; nothing is rolled back.
        """
        self._require_loop()
        limit_s = self._context.limit_s(timeout)
        asking = self._subscription.last_commits(self._context.deadline_s(limit_s))
        offsets = await within(limit_s, asking, f"{self}: rollback")
        # No await in this loop: if an assignment ended, only some would be moved.
        for partition, offset in offsets.items():
            self._move(partition, offset)
        self._subscription.drop_handled_ids()

    @property
    def decider(self) -> MemberDecisions:
        """Decisions about batches, for `AsyncMessageBatch.block`.

        Raises:
            ConfigError: offsets are committed automatically, or not in ZooKeeper.
        """
        interval_s = self.options.commit_interval_s
        if interval_s is not None:
            raise ConfigError(
                "exactly_once stores the offsets, so the consumer must not: create it"
                f" with commit_interval_s=None, got {interval_s:g}"
            )
        if not isinstance(self._store, ZooKeeperOffsets):
            raise ConfigError(
                f"exactly_once: group {self.group} has its offsets in"
                f" {type(self._store).__name__}, expected ZooKeeper, which stores them"
                " together with the decision: create the consumer without offsets="
            )
        return self._subscription.decisions

    def acknowledge(self, offsets: Mapping[TopicPartition, Offset]) -> None:
        """Note that the messages before these offsets are stored; for duplicates."""
        self._subscription.acknowledge(offsets)


class AsyncMessageBatch(ListedMessages[AsyncConsumer]):
    """Messages that are handled together; created by `AsyncConsumer.batches`."""

    def block(self, parts: TransactionParts) -> AsyncExactlyOnce:
        """Return the block that writes its results, for `AsyncProducer.exactly_once`.

        Raises:
            ConfigError: the consumer commits automatically, or not in ZooKeeper; or it
                and the producer are of different clients.
        """
        return AsyncExactlyOnce(
            parts,
            self,
            self.consumer.decider,
            confirm=self.confirm,
            redeliver=self.redeliver,
            lost=self.lost,
        )

    def lost(self) -> list[TopicPartition]:
        """Return its partitions lost since; call it only for the last batch."""
        return self._filling.lost()

    def redeliver(self) -> None:
        """Deliver its messages again; the next owner does for lost partitions.

        If later messages were requested already, all messages from the stored offsets
        on are delivered again, so that no later batch is stored without this one.
        """
        if self.is_last:
            self.consumer.current_batch.release()
        else:
            self.consumer.decider.restart(self.offsets)

    def confirm(self) -> None:
        """Count its messages as handled, after their offsets were stored."""
        if self.is_last:  # else they count already, and later ones must not
            self.consumer.current_batch.count()
        self.consumer.acknowledge(self.offsets)

    async def commit(self, timeout: float | None = None) -> None:
        """Commit all messages of the batch; durable on return.

        Args:
            timeout: seconds; None takes the client's `request_timeout_s`.

        Raises:
            OwnershipLostError: a partition of it belongs to another member now; the
                others are committed.
            RequestTimeoutError, MetaqError: as `AsyncConsumer.commit`.
        """
        await self.consumer.commit(None if self.is_last else self, timeout)


def _retrieve(future: asyncio.Future[None]) -> None:
    """Retrieve the error, which no caller may do; it is logged already."""
    if not future.cancelled():
        future.exception()
