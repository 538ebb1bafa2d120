"""Queries about the log of one partition: its start and end, offsets for times.

Each query finds the broker (its leader, or a follower if that is gone), and repeats the
request after retriable errors until the deadline.

Source: docs/metaq-1.4/client.md 2.4.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from metaq.client.cluster.context import ClientContext
from metaq.client.errors import CannotAnswerError
from metaq.errors import NoBrokerError, RemoteProtocolError
from metaq.model import (
    MAX_OFFSET,
    BrokerAddress,
    MessageId,
    Millis,
    Offset,
    SizeBytes,
    TopicPartition,
    id_time,
)
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import (
    Damaged,
    Fetched,
    damage_error,
    damage_in,
    parse_boundaries,
    parse_count,
    parse_get,
    parse_nearest,
    raise_passing,
)
from metaq.protocol.commands import (
    NO_GROUP,
    Check,
    CountQuestion,
    Find,
    Get,
    OffsetQuery,
    Question,
    Reply,
    SplitQuestion,
    TimeQuestion,
)
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.retry import Backoff, retry
from metaq.zk.paths import BrokerRole
from metaq.zk.session import Coordinator
from metaq.zk.znodes import encode_address

BACKOFF: Final = Backoff(first_s=0.05, max_s=1.0)

T = TypeVar("T")


async def insist(
    context: ClientContext, request: Callable[..., Awaitable[T]], deadline_s: float
) -> T:
    """Make a request with `deadline_s`; repeat it after retriable errors."""
    return await retry(
        lambda: request(deadline_s=deadline_s),
        backoff=BACKOFF,
        deadline_s=deadline_s,
        clock=context.clock,
    )


async def connect(
    context: ClientContext, partition: TopicPartition, deadline_s: float
) -> BrokerConnection:
    """Return the pool's connection to the partition's broker.

    Raises:
        NoBrokerError: it is not registered, or cannot be reached before the deadline.
        ClosedError: the client is closed.
    """
    if not context.metadata.snapshot.version:
        # If this fails, the error names the broker that cannot be reached.
        await context.metadata.wait_newer(0, deadline_s=deadline_s)
    address = context.address_of(partition.broker_id)
    if address is None:
        context.pool.require_open()
        context.metadata.request_refresh()
        raise NoBrokerError(
            f"{partition}: broker {partition.broker_id} is not registered"
        )
    return await context.pool.get(address, deadline_s=deadline_s)


@dataclass(frozen=True, slots=True)
class LogQueries:
    """Queries about the log of one partition.

    Each raises NoBrokerError if the broker is not registered, RequestTimeoutError if it
    does not answer, RemoteProtocolError for an invalid answer, which closes the
    connection, and WireError if the broker refuses.
    """

    context: ClientContext
    partition: TopicPartition
    deadline_s: float
    """Deadline of all queries, monotonic."""

    async def ask(
        self,
        make: Callable[[BrokerConnection, int], OffsetQuery | Get | Check | Find],
        parse: Callable[[Reply], T],
    ) -> T:
        """Send one command to the partition's broker; repeat it after retriable errors.

        Args:
            make: returns the command, from the connection and its next opaque.
            parse: parses the reply.

        Raises:
            CorruptRecordError: the broker reports damage in the bytes of the query.
            WireError: the broker keeps refusing with a retriable status (503, 504), or
                `parse` raises it.
        """

        async def attempt(*, deadline_s: float) -> T:
            connection = await connect(self.context, self.partition, deadline_s)
            command = make(connection, connection.next_opaque())
            reply = await connection.call(command, deadline_s=deadline_s)
            raise_passing(reply)
            try:
                damaged = damage_in(reply)
                if damaged is not None and isinstance(command, OffsetQuery | Find):
                    raise damage_error(self.partition, damaged.start, damaged)
                return parse(reply)
            except RemoteProtocolError as error:
                connection.close_for(error)
                raise

        return await insist(self.context, attempt, self.deadline_s)

    async def ends(self) -> tuple[Offset, Offset] | None:
        """Return (log start, log end); None if the broker has no log of it yet."""
        start = await self.nearest(Offset(0))
        end = None if start is None else await self.nearest(MAX_OFFSET)
        return None if start is None or end is None else (start, end)

    async def may_be_unopened(self) -> bool:
        """Return whether a log may exist that the broker does not show.

        A MetaQ 1.4 broker may not open partitions at its start, until the next put to
        them (docs/metaq-1.4/broker.md 2.3).
        """
        connection = await connect(self.context, self.partition, self.deadline_s)
        return not connection.capabilities.codes

    async def confirmed_ends(self) -> tuple[Offset, Offset] | None:
        """Return `ends`; for a replica set, those of the registered leader.

        Needed before bytes are reported as lost, because a former leader may return an
        old end. The query is repeated until the replica that answers is the registered
        leader before and after its answer.

        Raises:
            CoordinationError: ZooKeeper cannot be read.
        """

        async def attempt(*, deadline_s: float) -> tuple[Offset, Offset] | None:
            connection = await connect(self.context, self.partition, deadline_s)
            if self.context.coordinator is None or not connection.capabilities.follow:
                return await self.ends()
            address, coordinator = connection.address, self.context.coordinator
            term = await self._term_of(address, coordinator)
            found = await self.ends()
            if await self._term_of(address, coordinator) != term:
                raise NoBrokerError(f"{self.partition}: {address} began another term")
            return found

        return await insist(self.context, attempt, self.deadline_s)

    async def _term_of(self, address: BrokerAddress, coordinator: Coordinator) -> bytes:
        """Return the term node of a leader; raise NoBrokerError if it does not lead."""
        broker_id, paths = self.partition.broker_id, self.context.paths
        where = paths.set_leader(broker_id), paths.role(BrokerRole(broker_id))
        await coordinator.sync(where[0], deadline_s=self.deadline_s)
        term, role = [
            await coordinator.get(path, deadline_s=self.deadline_s) for path in where
        ]
        # Both of one session: a former leader may stay registered for a moment.
        if (
            term is None
            or role is None
            or role.owner_session_id != term.owner_session_id
            or role.data != encode_address(address)
        ):
            raise NoBrokerError(
                f"{self.partition}: {address} is not registered as the leader of its"
                " set now"
            )
        return term.data

    async def nearest(self, offset: Offset) -> Offset | None:
        """Return an offset near `offset` at which reading can start; None: no log."""
        return await self._ask_offset(offset, None, parse_nearest)

    async def offset_at(self, moment: Millis) -> Offset | None:
        """Return an offset from which all messages put at `moment` or later follow.

        Args:
            moment: wall clock, milliseconds since 1970.

        Returns:
            The offset of the first message of that time or later, or of one shortly
            before; the log end if there is none; None without a log.

        Raises:
            CannotAnswerError: a MetaQ 1.4 broker, whose logs have no times.
        """
        question = TimeQuestion(max(0, moment))
        return await self._ask_offset(Offset(0), question, parse_nearest)

    async def count(self, start: Offset, end: Offset) -> int:
        """Return the number of messages in start..end, both record boundaries.

        Raises:
            CannotAnswerError: a MetaQ 1.4 broker, which does not count.
            CorruptRecordError: the range is damaged.
            NoRecordError: an offset is not a boundary.
        """
        return await self._ask_offset(start, CountQuestion(end), parse_count)

    async def cut(self, start: Offset, end: Offset, count: int) -> tuple[Offset, ...]:
        """Return record boundaries that divide start..end into parts of similar size.

        Args:
            start: a record boundary.
            end: a record boundary, at or after `start`.
            count: wanted number of offsets, 1 or more; the broker may return fewer.

        Returns:
            Offsets strictly between `start` and `end`, ascending.

        Raises:
            CannotAnswerError: a MetaQ 1.4 broker, which knows no boundaries.
            CorruptRecordError: the range is damaged.
            NoRecordError: an offset is no boundary.
        """
        question = SplitQuestion(end, count + 2)
        found = await self._ask_offset(start, question, parse_boundaries)
        return tuple(at for at in found if start < at < end)

    async def slice(self, offset: Offset, size_bytes: SizeBytes) -> bytes:
        """Return raw bytes of the log from `offset` on.

        Args:
            offset: offset of the first byte.
            size_bytes: maximum number, 1 or more; the broker may return fewer.

        Returns:
            The bytes; b"" if there are none at that offset now.

        Raises:
            CorruptRecordError: the broker reports them as damaged.
        """

        def make(_connection: BrokerConnection, opaque: int) -> Get:
            topic, number = self.partition.topic, self.partition.partition
            return Get(topic, NO_GROUP, number, offset, size_bytes, opaque)

        outcome = await self.ask(make, partial(parse_get, asked=offset))
        if isinstance(outcome, Damaged):
            raise damage_error(self.partition, offset, outcome)
        return outcome.data if isinstance(outcome, Fetched) else b""

    async def time_of(self, offset: Offset) -> Millis | None:
        """Return the time of the message at `offset`; None if unknown."""
        data = await self.slice(offset, SizeBytes(HEADER_BYTES))
        if len(data) < HEADER_BYTES:
            return None
        _length, _checksum, message_id, _flag = HEADER.unpack_from(data)
        return id_time(MessageId(message_id))

    async def _ask_offset(
        self, offset: Offset, question: Question | None, parse: Callable[[Reply], T]
    ) -> T:
        def make(connection: BrokerConnection, opaque: int) -> OffsetQuery:
            if question is not None and not connection.capabilities.spans:
                raise CannotAnswerError(
                    f"{self.partition}: broker {connection.address}"
                    f" ({connection.capabilities.version}) keeps no counts and no times"
                )
            topic, number = self.partition.topic, self.partition.partition
            return OffsetQuery(topic, NO_GROUP, number, offset, opaque, question)

        return await self.ask(make, parse)
