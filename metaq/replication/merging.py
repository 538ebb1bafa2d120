"""Merge of members into a claimer's logs: it takes the bytes that it lacks itself.

    tables   facts of the member's copies; from then on it follows no older epoch
    cuts     truncates, at its divergence point, each log of which the member has more
    epochs   tables of these logs, in one sync, before the first byte after the points
    tail     bytes from the points on, log by log

Members are merged one after another. No member has the longest copy of every log, and
none needs to: a log of which the claimer has as much as the member is not changed.

Invariants:

* nothing is truncated below the own high watermark;
* all reported high watermarks are true; one above the own end means that acknowledged
  bytes are missing here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

from metaq.clock import Clock
from metaq.errors import RemoteProtocolError, StorageError, UnexpectedReplyError
from metaq.model import LogId, MessageId, Offset
from metaq.peer.connection import BrokerConnection
from metaq.replication.election import merged_watermark, tail_from
from metaq.replication.epochs import CopyFacts, Epoch, EpochTable, adopt_table
from metaq.replication.follow_task import FollowNode
from metaq.replication.following import ask, begin_logs, drained
from metaq.replication.messages import (
    TABLES,
    TAIL,
    TablesReply,
    TablesRequest,
    TailRequest,
)
from metaq.replication.serving import CHUNK_BYTES_MAX, facts_of
from metaq.replication.store import ReplicaStore
from metaq.storage.append_request import Tickets
from metaq.storage.cut import cut_log
from metaq.storage.log_removal import carry_out
from metaq.storage.log_state import LogState

ANSWER_S: Final = 5.0
"""Longest wait for one reply of a member, in seconds."""
AHEAD_BYTES_MAX: Final = 8 << 20
"""Maximum number of bytes of one log that wait for its disk."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Outcome of a merge with one member."""

    last_id: MessageId
    """Greatest id known to the member."""
    lacks_bytes: bool
    """Whether acknowledged bytes are missing: a high watermark is above the end."""


class Merging:
    """Merges members into a claimer's copies. Owned by the replica; on the loop."""

    def __init__(
        self,
        node: FollowNode,
        store: ReplicaStore,
        epoch: Epoch,
        *,
        clock: Clock,
    ) -> None:
        """Prepare to merge; every log must follow and have no unfinished appends.

        Args:
            node: the node of the claimer.
            store: its logs.
            epoch: epoch of the claim.
            clock: for deadlines.
        """
        self._node = node
        self._set_id = node.replica.file.set_id
        self._logs = store.logs
        self._tables = store.tables
        self._epoch = epoch
        self._clock = clock

    async def merge_with(self, connection: BrokerConnection) -> Merged:
        """Take the bytes that a member has more, and its high watermarks.

        Args:
            connection: connection to the member; it stays open.

        Raises:
            WireError: the member refuses, for example after a later promise.
            ClientError: it does not reply within `ANSWER_S`, or breaks the rules.
            StorageError: some of its bytes could not be appended here.
            ClosedError: the logs or the connection are closed.

        Cancellation: appended bytes stay; merge again, with any member.
        """
        if not connection.capabilities.follow:
            raise UnexpectedReplyError(
                f"{connection.address} is not a replica of a set"
            )
        request = TablesRequest(self._set_id, self._epoch, self._node.replica.id)
        reply = await ask(
            connection, TABLES, request, clock=self._clock, timeout_s=ANSWER_S
        )
        points = await self._cut(reply)
        for log_id, (point, other) in points.items():
            await self._take(connection, log_id, point, other)
        return Merged(reply.last_id, self._raise_watermarks(reply))

    async def _cut(self, reply: TablesReply) -> dict[LogId, tuple[Offset, CopyFacts]]:
        """Truncate the logs of which the member has more; return its bytes' starts."""
        points: dict[LogId, tuple[Offset, CopyFacts]] = {}
        begun: dict[LogId, tuple[CopyFacts, EpochTable]] = {}
        cuts: dict[LogId, Offset] = {}
        adopted: dict[int, EpochTable] = {}
        logs = self._logs.logs()
        for log_id, other in ((each.log_id, each.copy) for each in reply.copies):
            log = logs.get(log_id)
            own = None
            if log is not None and log.state is LogState.STOPPED:
                continue  # damaged, but it still contains what is acknowledged
            if log is not None and self._tables.is_living(log.number):
                own = facts_of(log, self._tables)
            point = other.start if own is None else tail_from(own, other)
            if point is None or (own is None and other.number in self._tables.gone):
                continue
            points[log_id] = point, other
            is_same = own is not None and own.number == other.number
            table = self._tables.table(other.number) if is_same else ()
            table = adopt_table(table, other, point)
            if not is_same:
                begun[log_id] = other, table
                continue
            adopted[other.number] = table
            if own is not None and point < own.end:
                cuts[log_id] = point
        await begin_logs(self._logs, self._tables, self._node.make_log, begun)
        for log_id, point in cuts.items():
            await carry_out(partial(cut_log, self._logs, log_id, point))
        await self._tables.adopt(adopted)
        return points

    async def _take(
        self,
        connection: BrokerConnection,
        log_id: LogId,
        point: Offset,
        other: CopyFacts,
    ) -> None:
        """Append the member's bytes from a point on."""
        log, offset = self._logs.logs()[log_id], point
        while offset < other.end:
            request = TailRequest(
                self._set_id, self._epoch, other.number, offset, CHUNK_BYTES_MAX
            )
            reply = await ask(
                connection, TAIL, request, clock=self._clock, timeout_s=ANSWER_S
            )
            chunk = reply.chunk
            if chunk is None or (chunk.number, chunk.offset) != (other.number, offset):
                raise RemoteProtocolError(
                    f"tail of log {other.number}: expected bytes at {offset},"
                    f" got {chunk}"
                )
            if chunk.segment == chunk.offset:
                log.roll(chunk.offset)
            log.append_copy(chunk.appends(), Tickets())
            offset = chunk.end_offset
            if offset - log.synced_end >= AHEAD_BYTES_MAX:
                await drained(self._logs, self._clock)
        await drained(self._logs, self._clock)
        if log.synced_end < other.end:
            raise StorageError(
                f"partition {log_id} takes no tail: expected end {other.end},"
                f" got {log.synced_end}"
            )

    def _raise_watermarks(self, reply: TablesReply) -> bool:
        """Raise the high watermarks; return whether one is above the own end."""
        lacks_bytes = False
        by_number = {each.number: each for each in self._logs.logs().values()}
        for each in reply.copies:
            log = by_number.get(each.copy.number)
            if log is None:
                continue
            hw = merged_watermark(facts_of(log, self._tables), [each.copy.hw])
            lacks_bytes |= hw > log.synced_end
            log.set_bound(min(hw, log.synced_end))
        return lacks_bytes
