"""A follower's stream: join, then pull, append, sync and acknowledge, until it ends.

    join     facts of the own copies ->   divergence points of all logs
             asides, truncations, tables, the `set` file: only then a high watermark
    pull     synced ends             ->   data: chunks, high watermarks, new logs

`PULLS` pulls are always in flight or being processed: the leader sends the next data
while these are synced. A message is applied when it arrives, with no work per record. A
message that creates or deletes logs waits for the disk, and later messages wait for it.

Any error ends the stream, and its owner joins again: appended bytes stay, and the join
determines how many of them count. There is no other error handling.

Invariants:

* nothing is truncated before every log is known to part at or above its high watermark;
* a log is deleted because its number is gone, never because the leader lacks it;
* no high watermark of the leader is used before all truncations and tables are durable;
* an acknowledgement reports synced bytes; the one that completes the targets is sent
  after it is saved that the copy is complete.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from metaq.clock import Clock
from metaq.errors import ClosedError, MetaqError, StorageError, UnexpectedReplyError
from metaq.model import LogId, MessageId, Offset
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Follow, Reply, Value
from metaq.protocol.encoding import encode
from metaq.replication.epochs import NO_EPOCH, CopyFacts, Epoch, EpochTable, adopt_table
from metaq.replication.joins import LogPlan, plan_log
from metaq.replication.messages import (
    JOIN,
    PULL,
    Chunk,
    Data,
    JoinReply,
    JoinRequest,
    Pull,
    Question,
    decode_data,
    encode_pull,
)
from metaq.replication.progress import JoinAnswer
from metaq.replication.replica import Replica, takes_data
from metaq.replication.serving import copies_of, facts_of
from metaq.replication.store import ReplicaStore
from metaq.replication.tables import EpochTables
from metaq.storage.cut import cut_log
from metaq.storage.log_manager import LogManager
from metaq.storage.log_removal import carry_out
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.span_index import NO_ID

_log = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")

PULLS: Final = 3
"""Number of pulls that are in flight or have data not synced yet."""
CREDIT_BYTES: Final = 4 << 20
"""Size of the records in the reply to one pull, in bytes."""
ASK_S: Final = 10.0
"""Longest wait for the reply to a message other than a pull, in seconds."""
PULL_S: Final = 5.0
"""Longest wait for the reply to a pull, in seconds. A leader without new bytes replies
to one of `PULLS` pulls every half second; this is more than three times the longest
such wait."""
DRAIN_S: Final = 10.0
"""Longest wait for the storage threads to finish the work of an earlier stream."""
DRAIN_STEP_S: Final = 0.005


class FollowerOwner(Protocol):
    """Interface of the replica that follows."""

    @property
    def replica(self) -> Replica:
        """State of the replica."""

    async def refuse(self, log_id: LogId, own: CopyFacts, answer: JoinAnswer) -> None:
        """Called when a log of the leader contradicts the own copy: `joins.refuse`."""

    async def on_joined(self, epoch: Epoch) -> None:
        """Called when all truncations and tables are durable; returns when saved."""

    async def on_caught_up(self) -> None:
        """Called when all logs have reached their targets; returns when saved."""

    async def on_lost(self) -> None:
        """Called when the copy lacks promised bytes: `declare_incomplete`."""

    def note_last_id(self, last_id: MessageId) -> None:
        """Note an id of the leader; own ids must be above it."""

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        """Create and return a log, with the settings of its topic (`get_or_create`)."""


@dataclass(frozen=True, slots=True)
class _Join:
    """Steps of a join, planned before any is carried out."""

    plans: Mapping[LogId, LogPlan]
    """Plans of the logs that continue, truncated or not."""
    begun: Mapping[LogId, tuple[CopyFacts, EpochTable]]
    """Logs to create, replacing existing ones with the same name."""
    gone: tuple[LogId, ...]


class Follower:
    """One stream from one leader. Owned by the replica; used on the loop."""

    def __init__(
        self,
        connection: BrokerConnection,
        store: ReplicaStore,
        owner: FollowerOwner,
        *,
        clock: Clock,
        epoch: Epoch,
        token: str,
    ) -> None:
        """Create a stream; `run` follows.

        Args:
            connection: connection to the leader; closed with the stream.
            store: its logs, which all follow; no other object appends to them.
            owner: the replica.
            clock: for deadlines.
            epoch: epoch of the leader.
            token: token of this process, as in `present/K`.
        """
        self._connection = connection
        self._store = store
        self._logs = store.logs
        self._tables = store.tables
        self._owner = owner
        self._clock = clock
        self._epoch = epoch
        self._token = token
        self._by_number: dict[int, PartitionLog] = {}
        self._acks: dict[int, Offset] = {}
        self._targets: dict[int, Offset] = {}
        """Log number → offset that it must reach before the replica is complete."""
        self._held_pulls = 0
        self._inbox: deque[Data] = deque()
        self._wake = asyncio.Event()
        self._error: MetaqError | None = None

    async def run(self) -> None:
        """Follow until cancelled; return if the leader's reply forbids to follow.

        Raises:
            MetaqError: the error that ended the stream; join again a little later.

        Cancellation: the connection is closed; appended bytes stay.
        """
        stop = self._connection.on_closed(
            lambda reason: self.fail(ClosedError(f"the stream is over: {reason}"))
        )
        try:
            if not self._connection.capabilities.follow:
                address = self._connection.address
                raise UnexpectedReplyError(f"{address} is not a replica of a set")
            for log in self._logs.logs().values():
                if log.state is LogState.OPEN:
                    log.follow()
            await drained(self._logs, self._clock)
            if await self._join():
                await self._stream()
        finally:
            stop()
            self.fail(ClosedError("the stream is over"))
            self._connection.close("the stream is over")

    # -- the join ---------------------------------------------------------------------

    async def _join(self) -> bool:
        """Join the leader; return False if its reply forbids to follow."""
        replica, logs = self._owner.replica, self._logs.logs()
        request = JoinRequest(
            replica.file.set_id,
            self._epoch,
            replica.id,
            replica.incarnation,
            self._token,
            self._store.revision,
            replica.file.flag,
            copies_of(logs, self._tables),
        )
        reply = await ask(
            self._connection, JOIN, request, clock=self._clock, timeout_s=ASK_S
        )
        if reply.epoch != self._epoch:
            raise UnexpectedReplyError(
                f"leader of epoch {self._epoch.number} answers in {reply.epoch.number}"
            )
        if reply.is_lost:
            await self._owner.on_lost()
            return False
        join = await self._planned(reply)
        if join is not None:
            await self._carry_out(reply, join)
        return join is not None

    async def _planned(self, reply: JoinReply) -> _Join | None:
        """Return the steps of a join; None if a log contradicts the own copy."""
        replica, logs = self._owner.replica, self._logs.logs()
        plans: dict[LogId, LogPlan] = {}
        begun: dict[LogId, tuple[CopyFacts, EpochTable]] = {}
        theirs = {each.log_id: each.answer for each in reply.logs}
        for log_id, answer in theirs.items():
            log = logs.get(log_id)
            is_same = log is not None and log.number == answer.copy.number
            if log is None or not is_same or not self._tables.is_living(log.number):
                begun[log_id] = _whole(answer.copy)
                continue
            own = facts_of(log, self._tables)
            plan = plan_log(replica, own, answer)
            if plan is None:
                await self._owner.refuse(log_id, own, answer)
                return None
            if plan.is_restart:
                begun[log_id] = _whole(answer.copy)
            else:
                plans[log_id] = plan
        gone = []
        numbers = {*reply.gone, *self._tables.gone}
        for log_id, log in logs.items():
            if log_id in theirs:
                continue
            if log.number in numbers:
                gone.append(log_id)
            else:
                _log.warning("leader has no such log, it is kept: partition=%s", log_id)
        return _Join(plans, begun, tuple(gone))

    async def _carry_out(self, reply: JoinReply, join: _Join) -> None:
        """Carry out the steps of a join; each is durable before the next."""
        logs = self._logs.logs()
        await self._tables.bury(reply.gone)
        await self._set_aside(join.gone)
        await begin_logs(self._logs, self._tables, self._owner.make_log, join.begun)
        lowered = {
            log_id: plan.hw
            for log_id, plan in join.plans.items()
            if plan.hw < logs[log_id].high_watermark
        }
        if lowered:
            await carry_out(partial(self._logs.lower_high_watermarks, lowered))
        cuts = [
            carry_out(partial(cut_log, self._logs, log_id, plan.end))
            for log_id, plan in join.plans.items()
            if plan.end < logs[log_id].next_offset
        ]
        await asyncio.gather(*cuts)
        answers = {each.log_id: each.answer for each in reply.logs}
        adopted = {}
        for log_id, plan in join.plans.items():
            copy = answers[log_id].copy
            adopted[copy.number] = _with_epoch(plan.table, copy)
        await self._tables.adopt(adopted)
        await self._owner.on_joined(self._epoch)
        for log_id, answer in answers.items():
            self._go_on(logs[log_id], answer)

    def _go_on(self, log: PartitionLog, answer: JoinAnswer) -> None:
        """Start to follow a log; from now on its high watermark is the leader's."""
        number = answer.copy.number
        self._by_number[number] = log
        self._acks[number] = log.synced_end
        log.set_settled_from(answer.target)
        log.set_bound(answer.copy.hw)
        log.leader_start = answer.copy.start
        if not self._owner.replica.is_sure and log.synced_end < answer.target:
            self._targets[number] = answer.target

    async def _set_aside(self, log_ids: Collection[LogId]) -> None:
        """Move logs aside whose deletion is already in the journal of epochs."""
        if log_ids:
            await carry_out(partial(self._logs.set_logs_aside, log_ids))

    # -- the stream -------------------------------------------------------------------

    async def _stream(self) -> None:
        for _ in range(PULLS):
            self._pull_next()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._inbox and self._error is None:
                await self._apply_slowly(self._inbox[0])
                self._inbox.popleft()
            if self._error is not None:
                raise self._error
            if self._held_pulls:
                await self._owner.on_caught_up()
                held, self._held_pulls = self._held_pulls, 0
                for _ in range(held):
                    self._pull_next()

    def _pull_next(self) -> None:
        """Send the next pull, with all acknowledgements; the hot call."""
        if self._error is not None:
            return
        replica = self._owner.replica
        if not replica.is_sure and not self._targets:
            # It is complete once that is saved, and acknowledges afterwards.
            self._held_pulls += 1
            self._wake.set()
            return
        pull = Pull(
            self._epoch,
            replica.id,
            replica.incarnation,
            self._store.revision,
            tuple(self._acks.items()),
            CREDIT_BYTES,
        )
        self._acks.clear()
        opaque = self._connection.next_opaque()
        frame = encode(Follow(PULL, encode_pull(pull), opaque))
        deadline_s = self._clock.monotonic_s() + PULL_S
        try:
            self._connection.submit(
                frame, opaque, self._on_reply, deadline_s=deadline_s, is_alone=True
            )
        except ClosedError as error:
            self.fail(error)

    def _on_reply(self, reply: Reply | MetaqError) -> None:
        if self._error is not None:
            return
        try:
            data = decode_data(payload_of(reply))
            self._check(data)
            if self._inbox or data.new_logs or data.gone:
                self._inbox.append(data)
                self._wake.set()
            else:
                self._apply(data)
        except MetaqError as error:
            self.fail(error)

    async def _apply_slowly(self, data: Data) -> None:
        """Create and delete logs, then apply the data."""
        by_number = self._by_number
        gone = [by_number.pop(number) for number in data.gone if number in by_number]
        await self._tables.bury(data.gone)
        await self._set_aside([each.log_id for each in gone])
        answers = {each.log_id: each.answer for each in data.new_logs}
        begun = {each: _whole(answer.copy) for each, answer in answers.items()}
        await begin_logs(self._logs, self._tables, self._owner.make_log, begun)
        for log_id, answer in answers.items():
            self._go_on(self._logs.logs()[log_id], answer)
        self._check(data)
        self._apply(data)

    def _check(self, data: Data) -> None:
        if data.epoch != self._epoch or not takes_data(self._owner.replica, data.epoch):
            raise ClosedError(f"data of epoch {data.epoch.number} is not followed")

    def _apply(self, data: Data) -> None:
        """Append chunks, then apply high watermarks; the hot call.

        Raises:
            StorageError: a chunk cannot be appended; those before it were.
            ClosedError: a log does not follow any more.
        """
        if not data.chunks:
            self._pull_next()
        synced = _Synced(self, len(data.chunks))
        for chunk in data.chunks:
            self._append(chunk, synced, joins=len(data.chunks) > 1)
        for number, hw, start in data.marks:
            log = self._by_number.get(number)
            if log is not None:
                log.set_bound(hw)
                log.leader_start = start

    def _append(self, chunk: Chunk, synced: "_Synced", *, joins: bool) -> None:
        log = self._by_number.get(chunk.number)
        if log is None:
            raise StorageError(
                f"leader sends bytes of log {chunk.number}, unknown here"
            )
        if log.state is LogState.STOPPED:
            # Damaged: the others continue, and the leader sees that this one does not.
            synced.on_stored()
            return
        if chunk.segment == chunk.offset:
            log.roll(chunk.offset)
        log.append_copy(chunk.appends(), synced, joins=joins)
        synced.ends[chunk.number] = chunk.end_offset
        synced.last_id = max(synced.last_id, chunk.last_id)

    def on_synced(self, ends: Mapping[int, Offset], last_id: MessageId) -> None:
        """Acknowledge the synced chunks of one message."""
        self._owner.note_last_id(last_id)
        self._acks.update(ends)
        for number, end in ends.items() if self._targets else ():
            target = self._targets.get(number)
            if target is not None and end >= target:
                del self._targets[number]
        self._pull_next()

    def fail(self, error: MetaqError) -> None:
        """End the stream with an error; the first one is kept."""
        self._error = self._error or error
        self._wake.set()


class _Synced:
    """Ticket for all chunks of one message."""

    __slots__ = ("_follower", "_left", "ends", "last_id")

    def __init__(self, follower: Follower, count: int) -> None:
        self._follower = follower
        self._left = count
        self.ends: dict[int, Offset] = {}
        self.last_id = NO_ID

    def on_stored(self) -> None:
        """Called when one chunk is synced or skipped."""
        self._left -= 1
        if not self._left:
            self._follower.on_synced(self.ends, self.last_id)

    def on_failed(self, error: StorageError) -> None:
        """Called when the outcome of one chunk is unknown."""
        self._follower.fail(error)


def _with_epoch(table: EpochTable, copy: CopyFacts) -> EpochTable:
    """Return a table with the leader's epoch, whose first byte may come next."""
    last = copy.table[-1:]
    if not last or (table and table[-1].epoch == last[0].epoch):
        return table
    return (*table, *last)


def _whole(copy: CopyFacts) -> tuple[CopyFacts, EpochTable]:
    """Return a leader's copy and the table for a new copy from its log start on."""
    return copy, _with_epoch(adopt_table((), copy, copy.start), copy)


async def begin_logs(
    logs: LogManager,
    tables: EpochTables,
    make_log: Callable[[LogId, Offset, int], PartitionLog],
    begun: Mapping[LogId, tuple[CopyFacts, EpochTable]],
) -> None:
    """Create logs as another replica has them; existing ones of that name go aside.

    Args:
        logs: the logs of this replica, which follow.
        tables: their epochs.
        make_log: creates a log if there is none of that name.
        begun: partition → the other's copy, and the initial table of the new one.

    Raises:
        StorageError: a step failed; repeat the call.
        ClosedError: the logs are closed.
    """
    there = logs.logs()
    others = {tables.numbers.get(log_id) for log_id in begun}
    others -= {copy.number for copy, _table in begun.values()}
    await tables.bury([each for each in others if each is not None])
    again = {
        log_id: (copy.start, copy.number)
        for log_id, (copy, _table) in begun.items()
        if log_id in there
    }
    if again:
        await carry_out(partial(logs.begin_again, again))
    for log_id, (copy, table) in begun.items():
        log = there.get(log_id) or make_log(log_id, copy.start, copy.number)
        epoch = table[0].epoch if table else NO_EPOCH
        tables.adopt_log(log_id, copy.number, log.log_dir, copy.start, epoch)
    await tables.adopt({copy.number: table for copy, table in begun.values()})


async def drained(logs: LogManager, clock: Clock) -> None:
    """Wait until all bytes given to the logs are synced, so that their ends are fixed.

    Raises:
        StorageError: a disk takes longer than `DRAIN_S`.
    """
    deadline_s = clock.monotonic_s() + DRAIN_S
    while True:
        busy = [
            each
            for each in logs.logs().values()
            # The end of a log that is being truncated does not count.
            if each.state is LogState.REOPENING
            or (each.state is LogState.FOLLOWING and each.synced_end < each.next_offset)
        ]
        if not busy:
            return
        if clock.monotonic_s() >= deadline_s:
            raise StorageError(
                f"partition {busy[0].log_id} is not synced within {DRAIN_S:g} s:"
                f" expected {busy[0].next_offset}, got {busy[0].synced_end}"
            )
        await asyncio.sleep(DRAIN_STEP_S)


async def ask(
    connection: BrokerConnection,
    question: Question[Q, A],
    message: Q,
    *,
    clock: Clock,
    timeout_s: float,
) -> A:
    """Send a message to another replica, and return its reply.

    Raises:
        WireError: the message was refused.
        ClientError: there is no reply, or it cannot be decoded.
    """
    deadline_s = clock.monotonic_s() + timeout_s
    opaque = connection.next_opaque()
    command = Follow(question.kind, question.encode(message), opaque)
    reply = await connection.call(command, deadline_s=deadline_s)
    return question.decode_answer(payload_of(reply))


def payload_of(reply: Reply | MetaqError) -> bytes:
    """Return the payload of a reply, or raise the error in it."""
    if isinstance(reply, Value):
        return reply.payload
    if isinstance(reply, MetaqError):
        raise reply
    require_ok(reply)
    raise UnexpectedReplyError("expected a value, got a result")
