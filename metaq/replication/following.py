"""A follower's stream: join, then pull, append, sync and acknowledge, until it ends.

    join     what is here           ->   parting points of all logs
             asides, cuts, tables, the `set` file: only then a high watermark
    pull     what is synced here    ->   data: chunks, high watermarks, new logs

`PULLS` pulls are always on their way or being worked on: the leader sends the next data
while these are synced. A message is taken where it arrives, and nothing is done for a
record in it. One that makes logs, or deletes them, waits for the disk, and those after
it wait for it.

Any fault ends the stream, and its owner joins again: what is appended stays, and the
join finds how much of it counts. There is no other way back.

Invariants:

* nothing is cut before every log is known to part at its high watermark or above;
* a log is deleted because its number is gone, never because the leader lacks it;
* no high watermark of the leader counts before all cuts and tables are durable;
* an acknowledgement says what is synced; the last one of a flag's targets comes after
  the flag is off.
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
"""Pulls on their way, or whose data is not synced yet."""
CREDIT_BYTES: Final = 4 << 20
"""Bytes of records in the answer to one pull."""
ASK_S: Final = 10.0
"""Longest wait for the answer to a message that is no pull."""
PULL_S: Final = 5.0
"""Longest wait for the answer to a pull. A leader without bytes answers one of `PULLS`
each half second: this is more than three times what the last of them waits then."""
DRAIN_S: Final = 10.0
"""Longest wait for the storage threads to end what they have of an earlier stream."""
DRAIN_STEP_S: Final = 0.005


class FollowerOwner(Protocol):
    """The replica that follows."""

    @property
    def replica(self) -> Replica:
        """Its state."""

    async def refuse(self, log_id: LogId, own: CopyFacts, answer: JoinAnswer) -> None:
        """A log of the leader contradicts the own copy: `joins.refuse`."""

    async def on_joined(self, epoch: Epoch) -> None:
        """All cuts and tables are durable: `replica.joined`; returns when saved."""

    async def on_caught_up(self) -> None:
        """All logs are at the targets of a flag: `caught_up`; returns when saved."""

    def on_sure(self) -> None:
        """All logs are at their targets, and there was no flag: it is sure."""

    async def on_lost(self) -> None:
        """The copy lacks bytes that it promised: `declare_incomplete`."""

    def note_last_id(self, last_id: MessageId) -> None:
        """No id of the own may be this one or lower."""

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        """Return a new log, with the settings of its topic (`get_or_create`)."""


@dataclass(frozen=True, slots=True)
class _Join:
    """Steps of a join, decided before anything is done."""

    plans: Mapping[LogId, LogPlan]
    """Of logs that go on, cut or not."""
    begun: Mapping[LogId, tuple[CopyFacts, EpochTable]]
    """Of logs that are made, in the place of others where there are any."""
    gone: tuple[LogId, ...]


class Follower:
    """One stream from one leader. Owner: the replica; used on the loop."""

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
        """Prepare to follow; `run` does.

        Args:
            connection: to the leader; closed with the stream.
            store: all of its logs follow; nothing else appends to them.
            owner: the replica.
            clock: for deadlines.
            epoch: of the leader.
            token: text of this life, as `present/K` has it.
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
        """Logs that are not where the replica is complete, and sure of it."""
        self._is_unsure = False
        self._held_pulls = 0
        self._inbox: deque[Data] = deque()
        self._wake = asyncio.Event()
        self._error: MetaqError | None = None

    async def run(self) -> None:
        """Follow until cancelled; return where the leader's answer forbids to.

        Raises:
            MetaqError: the stream ended for this; to be joined again, a little later.

        Cancellation: the connection is closed; what is appended stays.
        """
        stop = self._connection.on_closed(
            lambda reason: self.fail(ClosedError(f"the stream is over: {reason}"))
        )
        try:
            if not self._connection.capabilities.follow:
                address = self._connection.address
                raise UnexpectedReplyError(f"{address} is no replica of a set")
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
        """Join the leader; False where its answer forbids to follow."""
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
        """Return what a join does; None where a log contradicts the own copy."""
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
        """Do what a join asks for; every step is durable before the next."""
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
        self._is_unsure = not self._owner.replica.is_sure
        await self._owner.on_joined(self._epoch)
        for log_id, answer in answers.items():
            self._go_on(logs[log_id], answer)

    def _go_on(self, log: PartitionLog, answer: JoinAnswer) -> None:
        """Follow a log from now on: its high watermark is the leader's."""
        number = answer.copy.number
        self._by_number[number] = log
        self._acks[number] = log.synced_end
        log.settle(answer.target)
        log.set_bound(answer.copy.hw)
        log.leader_start = answer.copy.start
        if self._is_unsure and log.synced_end < answer.target:
            self._targets[number] = answer.target

    async def _set_aside(self, log_ids: Collection[LogId]) -> None:
        """Move logs aside whose deletion is in the journal of epochs."""
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
                self._is_unsure = False
                held, self._held_pulls = self._held_pulls, 0
                for _ in range(held):
                    self._pull_next()

    def _pull_next(self) -> None:
        """Send the next pull, with all acknowledgements; the hot call."""
        if self._error is not None:
            return
        if self._is_unsure and not self._targets:
            if self._owner.replica.file.flag:
                # It is complete once that is saved, and says so after.
                self._held_pulls += 1
                self._wake.set()
                return
            self._is_unsure = False
            self._owner.on_sure()
        replica = self._owner.replica
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
            if self._inbox or data.births or data.gone:
                self._inbox.append(data)
                self._wake.set()
            else:
                self._apply(data)
        except MetaqError as error:
            self.fail(error)

    async def _apply_slowly(self, data: Data) -> None:
        """Make and delete logs, then take the data."""
        by_number = self._by_number
        gone = [by_number.pop(number) for number in data.gone if number in by_number]
        await self._tables.bury(data.gone)
        await self._set_aside([each.log_id for each in gone])
        births = {each.log_id: each.answer for each in data.births}
        begun = {each: _whole(answer.copy) for each, answer in births.items()}
        await begin_logs(self._logs, self._tables, self._owner.make_log, begun)
        for log_id, answer in births.items():
            self._go_on(self._logs.logs()[log_id], answer)
        self._check(data)
        self._apply(data)

    def _check(self, data: Data) -> None:
        if data.epoch != self._epoch or not takes_data(self._owner.replica, data.epoch):
            raise ClosedError(f"data of epoch {data.epoch.number} is not followed")

    def _apply(self, data: Data) -> None:
        """Append chunks, then take high watermarks; the hot call.

        Raises:
            StorageError: a chunk cannot be appended; those before it are.
            ClosedError: a log follows no more.
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
            # Damaged: the others go on, and the leader sees that this one does not.
            synced.on_stored()
            return
        if chunk.segment == chunk.offset:
            log.roll(chunk.offset)
        log.append_copy(chunk.appends(), synced, joins=joins)
        synced.ends[chunk.number] = chunk.end_offset
        synced.last_id = max(synced.last_id, chunk.last_id)

    def on_synced(self, ends: Mapping[int, Offset], last_id: MessageId) -> None:
        """Acknowledge what one message has brought."""
        self._owner.note_last_id(last_id)
        self._acks.update(ends)
        for number, end in ends.items() if self._targets else ():
            target = self._targets.get(number)
            if target is not None and end >= target:
                del self._targets[number]
        self._pull_next()

    def fail(self, error: MetaqError) -> None:
        """End the stream for an error, the first one."""
        self._error = self._error or error
        self._wake.set()


class _Synced:
    """Ticket of all chunks of one message."""

    __slots__ = ("_follower", "_left", "ends", "last_id")

    def __init__(self, follower: Follower, count: int) -> None:
        self._follower = follower
        self._left = count
        self.ends: dict[int, Offset] = {}
        self.last_id = NO_ID

    def on_stored(self) -> None:
        """One chunk is synced, or passed over."""
        self._left -= 1
        if not self._left:
            self._follower.on_synced(self.ends, self.last_id)

    def on_failed(self, error: StorageError) -> None:
        """Nothing more is known of one."""
        self._follower.fail(error)


def _with_epoch(table: EpochTable, copy: CopyFacts) -> EpochTable:
    """Return a table with the leader's epoch too: its first byte may come now."""
    last = copy.table[-1:]
    if not last or (table and table[-1].epoch == last[0].epoch):
        return table
    return (*table, *last)


def _whole(copy: CopyFacts) -> tuple[CopyFacts, EpochTable]:
    """Return a leader's copy that is made here from its log start on."""
    return copy, _with_epoch(adopt_table((), copy, copy.start), copy)


async def begin_logs(
    logs: LogManager,
    tables: EpochTables,
    make_log: Callable[[LogId, Offset, int], PartitionLog],
    begun: Mapping[LogId, tuple[CopyFacts, EpochTable]],
) -> None:
    """Make logs as another replica has them; others of these names go aside.

    Args:
        logs: of this replica; they follow.
        tables: their epochs.
        make_log: makes one where there is none of that name.
        begun: partition → the other's copy, and the table with which it begins here.

    Raises:
        StorageError: a step failed; all of it is to be repeated.
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
    """Wait until everything that was given to the logs is synced: their ends are fixed.

    Raises:
        StorageError: a disk takes longer than `DRAIN_S`.
    """
    deadline_s = clock.monotonic_s() + DRAIN_S
    while True:
        busy = [
            each
            for each in logs.logs().values()
            # One that is being cut has an end that counts no more.
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
    """Send a message to another replica, and return its answer.

    Raises:
        WireError: it was refused.
        ClientError: there is no answer, or none that can be read.
    """
    deadline_s = clock.monotonic_s() + timeout_s
    opaque = connection.next_opaque()
    command = Follow(question.kind, question.encode(message), opaque)
    reply = await connection.call(command, deadline_s=deadline_s)
    return question.decode_answer(payload_of(reply))


def payload_of(reply: Reply | MetaqError) -> bytes:
    """Return the payload of an answer, or raise what it says."""
    if isinstance(reply, Value):
        return reply.payload
    if isinstance(reply, MetaqError):
        raise reply
    require_ok(reply)
    raise UnexpectedReplyError("expected a value, got a result")
