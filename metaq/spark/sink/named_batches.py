"""Batches under names that outlive their sender: sent once more, they are recognised.

Theory of operation: a caller that may be run again with the same messages, as a task of
Spark is, names the producer of each batch itself. Batches stored by an earlier run are
then not stored again by a broker that announced `dedup`. Each batch has a second name
for the case that the first one was used for other messages. Where batches are not
taken, each payload is a put of its own, pipelined; names mean nothing there.

Batches are sent as by every producer (`accumulator.py`, `delivery.py`), on a loop
thread of the sender's own. The end differs (`AttemptLimits`): the first failure ends
the sending, because the caller begins again then. An answer has the time of one
request, and a request without one is sent again, RETRIES_MAX times at most; the same
time is given to connecting again. What was sent before, and is not recognised, may be
stored twice then: it is counted.

A refusal (closed partition, no space) is such a failure: nothing new goes out, the
answers to what is in flight are waited for, each within its time, and then the first
refusal is raised. What has no answer by then has an unknown outcome.

Order: within a partition messages are stored in the order of `send`, except batches
that went under their second name, because brokers of this package store the puts of one
connection in order. A Java broker may not (docs/metaq-1.4/broker.md 1.2).

Source: docs/metaq-1.4/client.md 2.4 and 16, docs/metaq-1.4/broker.md 1.4.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Final

from metaq.client.errors import BufferFullError
from metaq.client.options import IN_FLIGHT_BATCHES_MAX, MIB, ProducerOptions
from metaq.client.produce.attempts import AttemptLimits
from metaq.client.produce.batches import BatchName
from metaq.client.produce.delivery import Delivery
from metaq.client.produce.producer_counters import ProducerStatistics
from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot
from metaq.errors import NoBrokerError
from metaq.model import BrokerId, TopicPartition
from metaq.spark.sink.own_sender import OwnSender

BUFFER_BYTES_MAX: Final = 16 * MIB
"""`send` waits at so many bytes without an answer; a larger batch goes alone."""
RETRIES_MAX: Final = 3
"""Times that what is in flight is sent again."""


class NamedSender(OwnSender):
    """Sends named batches to partitions. Blocking; one thread owns it.

    Lifecycle: a context manager with a thread of its own; `send` any number of times,
    `flush`. After an error nothing more can be sent; `statistics` says how far it came.
    """

    def __init__(
        self,
        addresses: Mapping[BrokerId, str],
        *,
        timeout_s: float,
        retry_timeout_s: float = math.inf,
    ) -> None:
        """Prepare to send; connections are made when they are needed.

        Args:
            addresses: of brokers, `meta://host:port` or `host:port`; read at the first
                batch for each, so that more may be added until then.
            timeout_s: how long one answer may take, and how long to try to connect.
            retry_timeout_s: how long a batch may take with all its tries.

        Raises:
            NoResourcesError: there is no thread to be had.
        """
        self._brokers: dict[BrokerId, BrokerCopies] = {}
        self._retry_timeout_s = retry_timeout_s
        super().__init__("metaq-named-batches", addresses, timeout_s)

    def statistics(self) -> ProducerStatistics:
        """Return a snapshot of the counters."""
        return self._delivery.statistics()

    @property
    def renamed_count(self) -> int:
        """Return how many messages went under a spare name; they may be there twice."""
        return self._delivery.outcomes.renamed_count

    def send(
        self,
        partition: TopicPartition,
        payloads: Sequence[bytes],
        flags: Sequence[int],
        *,
        producer: str,
        sequence: int,
        spare: str,
    ) -> None:
        """Begin to send one batch; waits while too much is buffered.

        Args:
            partition: where it goes.
            payloads: at least one; attribute block, if its flag says so, and
                application bytes each. A batch larger than its broker takes travels in
                several, or single puts.
            flags: one for each payload.
            producer: whose messages these are, the same whenever they are sent, 1..64
                of [A-Za-z0-9._~-]; at most IN_FLIGHT_BATCHES_MAX calls per partition,
                or the first one is forgotten.
            sequence: number of the first payload among the producer's payloads for the
                partition, 0 or more.
            spare: an unused name, under which the batch is sent when other
                messages were sent under the first one.

        Raises:
            NoBrokerError: the partition's broker cannot be reached.
            ConfigError: its address is none.
            RequestTimeoutError: answers do not come; outcomes unknown.
            MessageTooLargeError: the broker does not take a payload.
            WireError: a put was refused.
            ClosedError: the sender is closed, or of another process.
        """
        self._thread.require_usable()
        if partition.broker_id not in self._brokers:
            self._thread.run(self._connect(partition.broker_id))
        name = BatchName(producer, sequence, spare)
        while True:
            if self._delivery.outcomes.failure is not None:
                self.flush()  # raises it when the rest has been waited for
            try:
                self._delivery.accumulator.append_batch(
                    partition, payloads, flags, name
                )
            except BufferFullError as full:
                self._delivery.accumulator.buffer.wait(
                    None, size_bytes=full.size_bytes, message_count=full.message_count
                )
            else:
                return

    def flush(self) -> None:
        """Wait until everything sent is acknowledged; raises as `send`."""
        self._thread.require_usable()
        for batch in self._delivery.accumulator.unanswered():
            batch.wait(None)
        if self._delivery.outcomes.failure is not None:
            raise self._delivery.outcomes.failure

    # -- inside -----------------------------------------------------------------------

    async def _start(self) -> None:
        await super()._start()
        options = ProducerOptions(
            # Each attempt, and a connection in between.
            timeout_s=min((2 + RETRIES_MAX) * self._timeout_s, self._retry_timeout_s),
            in_flight_batches_max=IN_FLIGHT_BATCHES_MAX,
            buffer_bytes_max=BUFFER_BYTES_MAX,
        )
        self._delivery = Delivery(
            pool=self._pool,
            options=options,
            clock=self._clock,
            loop=asyncio.get_running_loop(),
            producer_id="",  # each batch has its own
            request_refresh=lambda: None,
            limits=AttemptLimits(self._timeout_s, RETRIES_MAX),
        )

    async def _connect(self, broker_id: BrokerId) -> None:
        """Find a broker, and wait for the first connection to it."""
        address = self._address_of(broker_id)
        if address is None:
            raise NoBrokerError(f"broker {broker_id} is not there at the moment")
        await self._pool.get(address, deadline_s=self._deadline_s())
        self._brokers[broker_id] = BrokerCopies(address, {})
        self._delivery.on_snapshot(ClusterSnapshot(brokers=dict(self._brokers)), ())

    async def _close(self) -> None:
        self._delivery.close("the sender of named batches was closed")
        await super()._close()
