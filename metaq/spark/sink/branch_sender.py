"""Messages of one XA transaction at any number of brokers, until it is prepared.

    sender = BranchSender(addresses, xid, timeout_s=30)
    sender.send(partition, payloads, flags) ... brokers = sender.prepare()

It is for a part of a larger whole, such as a task of Spark: the caller chooses the id
and the partitions, and another process commits. Nothing here asks ZooKeeper.

Theory of operation: a branch begins at a broker with the first messages for it. One
call of `send` is under way at a time; the caller makes the next batch then. The
first failure is the end: which messages are in the transaction is not known then, so
all of it is rolled back. What cannot be rolled back and is not prepared ends with its
time at the broker.

Source: docs/metaq-1.4/client.md 9.3.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from metaq.client.fan_out import failures, for_each, raise_first
from metaq.client.produce.broker_starts import BrokerStarts
from metaq.client.produce.transaction_branch import Branch, BranchParts
from metaq.errors import MetaqError
from metaq.model import BrokerId, Millis, TopicPartition, XaTransactionId
from metaq.spark.sink.own_sender import OwnSender

LIFETIME_S: Final = 24 * 3600
"""Seconds that a branch may take until it is prepared, of which a broker grants as many
as its `maxTxTimeoutInSeconds` says."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class BranchSender(OwnSender):
    """Sends into one XA transaction. Blocking; one thread owns it.

    Lifecycle: a context manager with a thread of its own; `send` any number of times,
    then `prepare` or `roll_back`. Leaving it sends nothing.
    """

    def __init__(
        self,
        addresses: Mapping[BrokerId, str],
        xid: XaTransactionId,
        *,
        timeout_s: float,
    ) -> None:
        """Prepare to send; nothing is connected yet.

        Args:
            addresses: of brokers, `meta://host:port` or `host:port`; read at the first
                messages for each, so that more may be added until then.
            xid: used by no other sender, ever.
            timeout_s: bound on each call, and on a connection.

        Raises:
            NoResourcesError: there is no thread to be had.
        """
        self._xid = xid
        self._branches: dict[BrokerId, Branch] = {}
        self._sending: Future[None] | None = None
        self.message_count = 0
        """Messages that were handed to `send`."""
        self.size_bytes = 0
        """Payload bytes of these."""
        self.promised_ms = Millis(0)
        """Wall clock when brokers were asked to promise; 0 before."""
        super().__init__("metaq-branches", addresses, timeout_s)

    def send(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
    ) -> None:
        """Add messages, in order; waits for those of the last call, not for these.

        Args:
            partition: where they go.
            payloads: attribute block, if its flag says so, and application bytes each.
            flags: one for each payload.

        Raises:
            UnknownXidError: the broker has rolled the branch back: its time is over.
            NoBrokerError: the partition's broker cannot be reached.
            MessageTooLargeError: the broker does not take a payload.
            MetaqError: a broker refuses, or does not answer.
        """
        self._wait()
        self.message_count += len(payloads)
        self.size_bytes += sum(map(len, payloads))
        self._thread.require_usable()
        self._sending = asyncio.run_coroutine_threadsafe(
            self._put(partition, payloads, flags), self._thread.loop
        )

    def prepare(self) -> tuple[BrokerId, ...]:
        """Have every broker promise to keep its branch until it is ended.

        *Durability.* Each promises what its settings for transactions say.

        Returns:
            The brokers that have something to commit, sorted; () when nothing was sent.

        Raises:
            As `send`; roll back then.
        """
        self._wait()
        self.promised_ms = self._clock.wall_ms()
        votes = self._thread.run(self._at_each(self._parts.vote))
        raise_first(votes)
        return tuple(sorted(one for one, has_work in votes.items() if has_work))

    def roll_back(self) -> None:
        """Have every broker drop its branch; one that is not reached is logged."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        # Over any connections: those that it began with may be gone.
        results = self._thread.run(self._at_each(self._parts.roll_back))
        for broker_id, error in failures(results).items():
            _log.info(
                "rollback did not reach a broker: broker=%d error=%s",
                broker_id,
                error,
            )

    # -- inside -----------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for what the last `send` began; its error is raised each time."""
        if self._sending is not None:
            self._sending.result()

    async def _start(self) -> None:
        await super()._start()
        self._parts = BranchParts(
            address_of=self._address_of,
            pool=self._pool,
            clock=self._clock,
            session_id=f"{self._xid.qualifier}-{self._xid.branch.hex()}",
            starts=BrokerStarts(self._clock),
        )

    async def _put(
        self, partition: TopicPartition, payloads: Sequence[bytes], flags: Sequence[int]
    ) -> None:
        deadline_s = self._deadline_s()
        branch = self._branches.get(partition.broker_id)
        if branch is None:
            branch = await self._begin(partition.broker_id, deadline_s)
        branch.check(payloads)
        await branch.put_run(partition, payloads, flags, deadline_s=deadline_s)

    async def _begin(self, broker_id: BrokerId, deadline_s: float) -> Branch:
        connection = await self._parts.connect(broker_id, deadline_s=deadline_s)
        branch = Branch(self._parts, connection, broker_id, self._xid)
        self._branches[broker_id] = branch
        await branch.begin(
            LIFETIME_S, deadline_s=deadline_s, qualifier=self._xid.qualifier
        )
        return branch

    def _at_each(
        self, work: Callable[..., Awaitable[T]]
    ) -> Coroutine[Any, Any, dict[BrokerId, T | MetaqError]]:
        act = partial(work, xid=self._xid, deadline_s=self._deadline_s())
        return for_each(act, self._branches)
