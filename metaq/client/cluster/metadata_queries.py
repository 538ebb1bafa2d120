"""Metadata queries about one partition: log start and end, offsets for times.

Each finds the broker by itself (its leader, or a follower when the leader is gone) and
asks again after errors that may pass, until the deadline.

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
    """Make a request that takes `deadline_s`, again after retriable errors."""
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
        # The error names the broker whose address is wrong, or that is away.
        await context.metadata.wait_newer(0, deadline_s=deadline_s)
    address = context.address_of(partition.broker_id)
    if address is None:
        context.metadata.request_refresh()
        raise NoBrokerError(
            f"{partition}: broker {partition.broker_id} is not registered"
        )
    return await context.pool.get(address, deadline_s=deadline_s)


@dataclass(frozen=True, slots=True)
class LogQueries:
    """Questions about the log of one partition.

    Each raises NoBrokerError where the broker is not there, RequestTimeoutError where
    it does not answer, RemoteProtocolError for an answer that cannot be, which closes
    the connection, and WireError where it refuses.
    """

    context: ClientContext
    partition: TopicPartition
    deadline_s: float
    """When to give up, monotonic."""

    async def ask(
        self,
        make: Callable[[BrokerConnection, int], OffsetQuery | Get | Check | Find],
        parse: Callable[[Reply], T],
    ) -> T:
        """Send one command to the partition's broker; again after passing errors.

        Args:
            make: makes the command from the connection and its next opaque.
            parse: parses the reply.

        Raises:
            CorruptRecordError: the answer to a question is in damaged bytes.
            WireError: it goes on refusing with a status that passes (503, 504); and
                what `parse` raises.
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
        """Return (log start, log end); None when the broker has no log of it yet."""
        start = await self.nearest(Offset(0))
        end = None if start is None else await self.nearest(MAX_OFFSET)
        return None if start is None or end is None else (start, end)

    async def may_be_unopened(self) -> bool:
        """Return whether a log may be there of which the broker knows nothing.

        A MetaQ 1.4 broker forgets partitions at its start, until the next put to them
        (docs/metaq-1.4/broker.md 2.3).
        """
        connection = await connect(self.context, self.partition, self.deadline_s)
        return not connection.capabilities.codes

    async def confirmed_ends(self) -> tuple[Offset, Offset] | None:
        """Return `ends`, of a replica set as its leader says that is registered.

        To be asked before bytes are called lost: a replica that led before may name an
        end of then. While none is registered, or another one than has answered, it is
        asked again.

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
        """Return what is written of a leader's term; NoBrokerError if it has none."""
        broker_id, paths = self.partition.broker_id, self.context.paths
        where = paths.set_leader(broker_id), paths.role(BrokerRole(broker_id))
        await coordinator.sync(where[0], deadline_s=self.deadline_s)
        term, role = [
            await coordinator.get(path, deadline_s=self.deadline_s) for path in where
        ]
        # Of one session: a leader of before may be registered for a moment more.
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
        """Return where reading can start near `offset`; None without a log."""
        return await self._ask_offset(offset, None, parse_nearest)

    async def offset_at(self, moment: Millis) -> Offset | None:
        """Return where to begin to see all that was put at `moment` or later.

        Args:
            moment: wall clock, milliseconds since 1970.

        Returns:
            The offset of the first message of that time or later, or of one shortly
            before; the log end when there is none; None without a log.

        Raises:
            CannotAnswerError: a MetaQ 1.4 broker, whose log has no times.
        """
        question = TimeQuestion(max(0, moment))
        return await self._ask_offset(Offset(0), question, parse_nearest)

    async def count(self, start: Offset, end: Offset) -> int:
        """Return the number of messages in start..end, both record boundaries.

        Raises:
            CannotAnswerError: a MetaQ 1.4 broker, which does not count.
            CorruptRecordError: the range is damaged.
            NoRecordError: an offset is no boundary.
        """
        return await self._ask_offset(start, CountQuestion(end), parse_count)

    async def cut(self, start: Offset, end: Offset, count: int) -> tuple[Offset, ...]:
        """Return record boundaries that divide start..end into parts of similar size.

        Args:
            start: a record boundary.
            end: a record boundary, at or after `start`.
            count: offsets that are wanted, 1 or more; the broker may give fewer.

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
        """Return bytes of the log from `offset` on, as they are.

        Args:
            offset: the first of them.
            size_bytes: how many at most, 1 or more; the broker may give fewer.

        Returns:
            Empty where there are none at that offset now.

        Raises:
            CorruptRecordError: the broker says that they are damaged.
        """

        def make(_connection: BrokerConnection, opaque: int) -> Get:
            topic, number = self.partition.topic, self.partition.partition
            return Get(topic, NO_GROUP, number, offset, size_bytes, opaque)

        outcome = await self.ask(make, partial(parse_get, asked=offset))
        if isinstance(outcome, Damaged):
            raise damage_error(self.partition, offset, outcome)
        return outcome.data if isinstance(outcome, Fetched) else b""

    async def time_of(self, offset: Offset) -> Millis | None:
        """Return when the message at `offset` was stamped; None if unknown."""
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
