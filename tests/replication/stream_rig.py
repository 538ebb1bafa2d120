"""Copies of logs on disks in memory, one that leads and others that follow it.

All in one loop with virtual time; storage threads are stepped by a task, and a wire is
a connection whose other end is a function: it delays, stalls and breaks on order.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, TypeVar

from metaq.errors import (
    ClosedError,
    ConnectionLostError,
    MetaqError,
    RequestTimeoutError,
    UnavailableError,
    WireError,
)
from metaq.model import BrokerAddress, LogId, MessageId, Offset, SizeBytes
from metaq.protocol.commands import Command, Follow, Reply, Result, Value
from metaq.protocol.version import Capabilities
from metaq.record.layout import encode_record
from metaq.replication.answers import Answers
from metaq.replication.election import Flag
from metaq.replication.epochs import CopyFacts, Epoch
from metaq.replication.following import Follower
from metaq.replication.leading import LeadingStreams
from metaq.replication.messages import (
    PULL,
    Data,
    Pull,
    TablesReply,
    TablesRequest,
    decode_data,
    decode_pull,
)
from metaq.replication.progress import JoinAnswer, Leadership, Quorum
from metaq.replication.record import make_record
from metaq.replication.replica import (
    Replica,
    ReplicaRole,
    SetFile,
    caught_up,
    declare_incomplete,
    joined,
)
from metaq.replication.serving import copies_of
from metaq.replication.tables import EpochTables
from metaq.storage.append_request import AppendTicket
from metaq.storage.log_state import LogState
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.storage import StorageBench, Ticket
from tests.rigs.virtual_time import VirtualClock, run_virtually
from tests.storage.support import DATA, LOG, config

T = TypeVar("T")

E2, E3 = Epoch(2, "a"), Epoch(3, "b")
RECORD = 120
"""Size of a record with a payload of 100 bytes."""
PAYLOAD = 100
LAG_S = 4.0
STEP_S = 0.001
TICK_S = 0.1
WAIT_S = 60.0
"""Virtual seconds after which a test waits for nothing."""


class LoopClock(VirtualClock):
    """Virtual time for other threads, too."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def monotonic_s(self) -> float:
        return self._loop.time()


class InlineReader(Executor):
    """Reads at once, or when a test lets it; fails as a disk does."""

    def __init__(self) -> None:
        self.is_held = False
        self.is_running = True
        self.count = 0
        self._held: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Run it now, or keep it until `release`."""
        self.count += 1
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # as a thread passes it on
                future.set_exception(error)

        if self.is_held:
            self._held.append(run)
        else:
            run()
        return future

    def release(self) -> None:
        """Run what was kept."""
        self.is_held, held = False, self._held
        self._held = []
        for each in held:
            each()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End; nothing is kept then."""
        self._held.clear()


class Copy:
    """The logs of one replica, on a disk of its own, and their epochs."""

    def __init__(self, fs: FaultyFileSystem, first: int, **system: int) -> None:
        self.fs = fs
        numbers = itertools.count(first)
        self.tables = EpochTables(fs, (DATA,), lambda: next(numbers))
        self.bench = StorageBench(fs, config(**system), LoopClock())
        self.logs = self.bench.manager
        self.logs.open(
            numbers=self.tables.numbers,
            starts=self.tables.starts,
            buried=self.tables.buried,
        )
        self.tables.attach(self.logs)
        self.reader = InlineReader()
        for each in self.logs.directories():
            vars(each)["reader"] = self.reader
        self.is_stalled = False
        """Its storage threads do nothing."""

    def log(self, log_id: LogId = LOG) -> PartitionLog:
        """Return a log; one that leads makes it."""
        settings = self.bench.config.topic(log_id.topic)
        return self.logs.get_or_create(log_id, settings)

    def put(
        self,
        count: int = 1,
        log_id: LogId = LOG,
        *,
        size: int = PAYLOAD,
        ticket: AppendTicket | None = None,
        producer: str = "",
        is_light: bool = False,
    ) -> Any:
        """Append so many records; return the ticket, which has the batch of it."""
        found = Ticket() if ticket is None else ticket
        log, first = self.log(log_id), self.bench.next_id
        self.bench.next_id += count
        data = b"".join(
            encode_record(b"%*d" % (size, each), id=MessageId(each))
            for each in range(first, first + count)
        )
        batch = StoredBatch(
            producer, first, count, -1, MessageId(first), log.next_offset,
            SizeBytes(len(data)),
        )  # fmt: skip
        log.append(
            [data],
            size_bytes=len(data),
            record_count=count,
            last_id=MessageId(first + count - 1),
            ticket=found,
            batch=batch if producer else None,
            is_light=is_light,
        )
        found.batch = batch  # type: ignore[attr-defined]
        return found

    def content(self, log_id: LogId = LOG) -> bytes:
        """Return all bytes that are synced, from the log start on."""
        log, parts = self.logs.logs()[log_id], []
        offset = log.log_start_offset
        while offset < log.synced_end:
            part = log.read_copy(offset, log.synced_end)
            parts.append(part.read())
            part.release()
            offset = Offset(offset + len(parts[-1]))
        return b"".join(parts)

    def close(self) -> None:
        """Close everything."""
        self.is_stalled = False
        self.bench.close()
        self.tables.close()
        assert self.fs.open_paths() == []


Serve = Callable[[Follow, object, Callable[[bytes | WireError], None]], None]


class Wire:
    """A connection of a follower; requests and answers keep their order."""

    def __init__(self, serve: Serve, on_gone: Callable[[object], None]) -> None:
        self.address = BrokerAddress("leader", 8123)
        self.capabilities = Capabilities("", follow=True)
        self.delay_s = 0.002
        self.is_stalled = False
        """Nothing arrives, in either direction; nobody knows."""
        self.is_open = True
        self.sent: list[Follow] = []
        self.data: list[Data] = []
        """Data that was answered, also while it is on its way."""
        self._serve = serve
        self._on_gone = on_gone
        self._opaque = 0
        self._waiting: dict[int, Callable[[Reply | MetaqError], None]] = {}
        self._listeners: dict[object, Callable[[str], None]] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._held = 0
        """Of the queue, those that would have arrived."""
        self._loop = asyncio.get_running_loop()

    def pulls(self) -> list[Pull]:
        """Return the pulls that were sent."""
        return [decode_pull(each.payload) for each in self.sent if each.kind == PULL]

    # -- as `BrokerConnection`

    def next_opaque(self) -> int:
        self._opaque += 1
        return self._opaque

    def on_closed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        key = object()
        self._listeners[key] = callback
        return lambda: self._listeners.pop(key, None) and None

    def submit(
        self,
        frame: bytes,
        opaque: int,
        on_reply: Callable[[Reply | MetaqError], None],
        *,
        deadline_s: float,
        is_alone: bool = False,
    ) -> None:
        if not self.is_open:
            raise ClosedError("the wire is cut")
        head, payload = frame.split(b"\r\n", 1)
        _verb, kind, size, number = head.decode().split(" ")
        assert int(size) == len(payload)
        assert int(number) == opaque
        self._ask(Follow(kind, payload, opaque), on_reply, deadline_s)

    async def call(self, command: Command, *, deadline_s: float) -> Reply:
        assert isinstance(command, Follow)
        if not self.is_open:
            raise ClosedError("the wire is cut")
        answer: asyncio.Future[Reply | MetaqError] = self._loop.create_future()
        self._ask(
            command,
            lambda r: None if answer.done() else answer.set_result(r),
            deadline_s,
        )
        reply = await answer
        if isinstance(reply, MetaqError):
            raise reply
        return reply

    def close(self, reason: str) -> None:
        if not self.is_open:
            return
        self.is_open = False
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each(ConnectionLostError(reason))
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(reason)
        self._loop.call_later(self.delay_s, self._on_gone, self)

    # -- the wire

    def release(self) -> None:
        """Let everything that was stalled arrive."""
        self.is_stalled = False
        held, self._held = self._held, 0
        for _ in range(held):
            self._queue.popleft()()

    def _ask(
        self,
        command: Follow,
        on_reply: Callable[[Reply | MetaqError], None],
        deadline_s: float,
    ) -> None:
        self._waiting[command.opaque] = on_reply
        self.sent.append(command)
        self._loop.call_at(
            deadline_s, self._reply, command.opaque, RequestTimeoutError("late")
        )

        def answer(found: bytes | WireError) -> None:
            assert not answers, f"answered twice: {command.kind}"
            answers.append(found)
            reply: Reply
            if isinstance(found, bytes):
                if command.kind == PULL:
                    self.data.append(decode_data(found))
                reply = Value(found, command.opaque)
            else:
                reply = Result(found.status, str(found).encode(), command.opaque)
            self._pass(lambda: self._reply(command.opaque, reply))

        answers: list[object] = []
        self._pass(lambda: self._serve(command, self, answer))

    def _pass(self, arrive: Callable[[], None]) -> None:
        # Timers of one moment come in any order.
        self._queue.append(arrive)
        self._loop.call_later(self.delay_s, self._arrive)

    def _arrive(self) -> None:
        if self.is_stalled:
            self._held += 1
        elif self.is_open:
            self._queue.popleft()()

    def _reply(self, opaque: int, reply: Reply | MetaqError) -> None:
        waiting = self._waiting.pop(opaque, None)
        if waiting is not None:
            waiting(reply)


class Leader:
    """A copy that leads: owner of its streams, and what it heard from them."""

    def __init__(self, copy: Copy, quorum: Quorum, epoch: Epoch) -> None:
        self.copy = copy
        self.term = Leadership(epoch, quorum)
        self.tokens: dict[int, str] = {}
        self.caught_up: list[int] = []
        self.lost: list[int] = []
        self.saved: list[tuple[int, int]] = []
        self.streams: LeadingStreams = LeadingStreams(
            copy.logs.logs(),
            copy.tables,
            self,
            self.term,
            set_id="s",
            lag_s=LAG_S,
        )
        self.answers = Answers(self, copy)
        self.is_asleep = False

    async def begin(self) -> None:
        """Begin the epoch in all logs, and lead them."""
        logs, epoch = self.copy.logs, self.term.epoch
        for log in logs.logs().values():
            if log.state is LogState.OPEN:
                log.follow()
        ends = {
            log.number: log.next_offset
            for log in logs.logs().values()
            if log.number is not None
        }
        await self.copy.tables.begin_epoch(epoch, ends)
        self.streams.begin()
        logs.assign_number = lambda log_id, directory, start: (
            self.copy.tables.begin_log(log_id, directory, start, epoch)
        )
        logs.on_numbered = self.streams.add_log
        self.copy.tables.on_gone = self.streams.remove_log

    def end(self) -> None:
        """Step down: all logs follow."""
        self.streams.close()
        self.copy.logs.assign_number = self.copy.logs.on_numbered = None
        self.copy.tables.on_gone = None
        for log in self.copy.logs.logs().values():
            if log.state is LogState.OPEN:
                log.follow()

    def set_quorum(self, quorum: Quorum) -> None:
        """Count with another quorum."""
        self.term = replace(self.term, quorum=quorum)
        self.streams.set_term(self.term)

    # -- of the streams

    def on_join(self, replica: int, incarnation: int, revision: int) -> None:
        self.term = self.term.join(replica, incarnation)
        self.streams.set_term(self.term)
        self.on_saved(replica, revision)

    def on_saved(self, replica: int, revision: int) -> None:
        self.saved.append((replica, revision))

    def on_caught_up(self, replica: int) -> None:
        self.caught_up.append(replica)

    def on_lost(self, replica: int) -> None:
        self.lost.append(replica)

    def knows(self, replica: int, token: str) -> bool:
        return self.tokens.get(replica, "token") == token

    # -- of the answers

    def refusal(self) -> UnavailableError:
        return UnavailableError("leads no more")

    async def answer_tables(self, asked: TablesRequest) -> TablesReply:
        copies = copies_of(self.copy.logs.logs(), self.copy.tables)
        return TablesReply(copies, MessageId(77))


class Following:
    """A copy that follows: owner of its stream, and what came of it."""

    def __init__(
        self, copy: Copy, replica: int, wire: Wire, epoch: Epoch, flag: Flag
    ) -> None:
        made = make_record("s", 1, {1, 2, 3}, min_in_sync=1, nonce="init")
        record = replace(made, in_sync=frozenset({1, 2, 3})).at(
            epoch.number, epoch.nonce, leader=1
        )
        file = SetFile("s", replica, record, epoch.number, 1, flag)
        self.copy = copy
        self.wire = wire
        self.replica = Replica(ReplicaRole.FOLLOWING, file, 5, 1, is_sure=not flag)
        self.logs, self.tables, self.revision = copy.logs, copy.tables, record.revision
        self.refused: list[LogId] = []
        self.is_complete = False
        self.is_lost = False
        self.last_id = 0
        self.saves: list[str] = []
        connection: Any = wire
        self.follower = Follower(
            connection,
            self,
            self,
            clock=LoopClock(),
            epoch=epoch,
            token="token",
        )
        self.task = asyncio.ensure_future(self.follower.run())

    @property
    def error(self) -> BaseException | None:
        """Return what ended it; None: it runs, or ended well."""
        if not self.task.done() or self.task.cancelled():
            return None
        return self.task.exception()

    async def end(self) -> None:
        """Follow no more."""
        self.task.cancel()
        await asyncio.wait({self.task})

    async def refuse(self, log_id: LogId, own: CopyFacts, answer: JoinAnswer) -> None:
        self.refused.append(log_id)

    async def on_joined(self, epoch: Epoch) -> None:
        self.saves.append("joined")
        self.replica = joined(self.replica, epoch)[0]

    async def on_caught_up(self) -> None:
        self.saves.append("complete")
        self.replica = caught_up(self.replica)[0]

    async def on_lost(self) -> None:
        self.is_lost = True
        self.replica = declare_incomplete(self.replica)[0]

    def note_last_id(self, last_id: MessageId) -> None:
        self.last_id = max(self.last_id, last_id)

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        settings = self.copy.bench.config.topic(log_id.topic)
        return self.copy.logs.get_or_create(
            log_id, settings, start_offset=start, number=number
        )


class Stage:
    """Copies, wires and the tasks that move them."""

    def __init__(self, **system: int) -> None:
        self._system = system
        self.copies: list[Copy] = []
        self.leader: Leader
        self.followers: list[Following] = []
        self.wires: list[Wire] = []
        self._tasks: list[asyncio.Task[None]] = []

    def copy(
        self, fs: FaultyFileSystem | None = None, *, first: int | None = None
    ) -> Copy:
        """Return a copy with a disk: a new one, or one that has logs.

        Args:
            fs: a disk that has logs.
            first: number of the first log that it makes.
        """
        first = 100 * len(self.copies) + 1 if first is None else first
        disk = FaultyFileSystem(has_syncs=False) if fs is None else fs
        found = Copy(disk, first, **self._system)
        self.copies.append(found)
        return found

    async def lead(
        self,
        copy: Copy | None = None,
        in_sync: tuple[int, ...] = (1, 2),
        *,
        minimum: int = 1,
        epoch: Epoch = E2,
    ) -> Copy:
        """Have a copy lead, as replica 1."""
        quorum = Quorum(1, frozenset(in_sync), minimum)
        self.leader = Leader(copy or self.copy(), quorum, epoch)
        await self.leader.begin()
        return self.leader.copy

    def follow(
        self,
        copy: Copy | None = None,
        replica: int = 2,
        *,
        epoch: Epoch = E2,
        flag: Flag = Flag.NONE,
        wire: Wire | None = None,
    ) -> Following:
        """Have a copy follow the leader of now."""
        wire = wire or self.wire()
        found = Following(copy or self.copy(), replica, wire, epoch, flag)
        self.followers.append(found)
        return found

    def wire(self) -> Wire:
        """Return a connection to the leader of now."""
        leader = self.leader
        found = Wire(leader.answers.handle, leader.streams.drop)
        self.wires.append(found)
        return found

    async def close(self, copy: Copy) -> FaultyFileSystem:
        """Close a copy; return its disk."""
        self.copies.remove(copy)
        copy.close()
        return copy.fs

    async def until(self, holds: Callable[[], object], wait_s: float = WAIT_S) -> None:
        """Wait for it; fails after `wait_s` virtual seconds."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        while not holds():
            assert not any(each.done() for each in self._tasks), self._tasks
            for each in self.followers:
                assert each.error is None or loop.time() < end_s, each.error
            assert loop.time() < end_s, "it never holds"
            await asyncio.sleep(STEP_S)

    def is_equal(self, following: Following) -> bool:
        """Return whether a follower has all that its leader shows, and shows it."""
        mine, theirs = following.copy.logs.logs(), self.leader.copy.logs.logs()
        return mine.keys() == theirs.keys() and all(
            mine[log_id].high_watermark == log.high_watermark == log.next_offset
            for log_id, log in theirs.items()
        )

    async def run(self, scenario: Callable[["Stage"], Awaitable[None]]) -> None:
        """Run a scenario, and close what it has opened."""
        tasks = self._tasks
        tasks += map(asyncio.ensure_future, (self._step(), self._tick()))
        try:
            await scenario(self)
        finally:
            for each in self.followers:
                await each.end()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if hasattr(self, "leader"):
                await self.leader.answers.end()
                self.leader.streams.close()
        for task in tasks:
            assert task.cancelled(), task.exception()
        await asyncio.sleep(1.0)  # what is on its way arrives
        for copy in self.copies:
            copy.close()

    async def _step(self) -> None:
        while True:
            for each in self.copies:
                if not each.is_stalled:
                    each.bench.run()
            await asyncio.sleep(STEP_S)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if hasattr(self, "leader") and not self.leader.is_asleep:
                self.leader.streams.tick(loop.time())
            await asyncio.sleep(TICK_S)


def play(scenario: Callable[[Stage], Awaitable[None]], **system: int) -> None:
    """Run a scenario in virtual time.

    Args:
        scenario: takes the stage.
        system: settings of the section `system` of all copies.
    """

    async def run() -> None:
        await Stage(**system).run(scenario)

    run_virtually(run())
