"""Replicas of a set in one process: logs on simulated disks, wires, virtual time."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial

from metaq.clock import Clock
from metaq.config.settings import BrokerConfig
from metaq.errors import ConnectionLostError, RequestTimeoutError, WireError
from metaq.fs.group_thread import RunRequests
from metaq.model import LogId, MessageId, Offset
from metaq.protocol.commands import Follow, Result, Value
from metaq.protocol.connection import Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.protocol.version import Capabilities
from metaq.record.layout import encode_record
from metaq.replication import messages
from metaq.replication.epochs import CopyFacts, Epoch
from metaq.replication.following import Follower
from metaq.replication.joins import refuse
from metaq.replication.leading import LeadingStreams
from metaq.replication.progress import JoinAnswer, Leadership, Quorum
from metaq.replication.record import SetRecord
from metaq.replication.replica import (
    Replica,
    ReplicaRole,
    SetFile,
    caught_up,
    declare_incomplete,
    joined,
)
from metaq.replication.serving import answer_tail, copies_of
from metaq.replication.tables import EpochTables
from metaq.storage.append_request import Request
from metaq.storage.log_manager import LogManager
from metaq.storage.partition_log import PartitionLog
from metaq.storage.producers import StoredBatch
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.pair import drain
from tests.rigs.storage import Ticket
from tests.rigs.virtual_time import VirtualClock
from tests.storage.support import DATA, LOG, config

SET = "a-set"
TOKEN = "a-token"
LAG_S = 5.0
TICK_S = 0.1
FIRST = Epoch(1, "one")


class LoopClock(VirtualClock):
    """The clock of the running loop, for threads too."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def monotonic_s(self) -> float:
        """Return its time."""
        return self._loop.time()


class LoopWorker:
    """A storage thread that is the loop: each group takes a moment."""

    group_s = 0.0002

    def __init__(
        self, _name: str, run: RunRequests[Request], on_idle: Callable[[int], object]
    ) -> None:
        self._run, self._on_idle, self._queue = run, on_idle, []
        self._is_due = self.is_hanging = False

    def start(self) -> None:
        """There is no thread."""

    def submit(self, *requests: Request) -> None:
        """Queue requests for the next turn."""
        self._queue += requests
        self._go_on()

    stop = submit

    def _go_on(self) -> None:
        if not self._is_due and not self.is_hanging:
            self._is_due = True
            asyncio.get_running_loop().call_later(self.group_s, self._turn)

    def _turn(self) -> None:
        self._is_due = False
        requests, self._queue = self._queue, []
        if self._run(requests) or self._queue:
            self._go_on()
        else:
            self._on_idle(len(requests))

    def hang(self, *, is_hanging: bool) -> None:
        """Do nothing any more, or go on."""
        self.is_hanging = is_hanging
        self._go_on()


class Inline(Executor):
    """Threads that read at once."""

    is_running = False

    def submit(self, fn, /, *args, **kwargs):
        done: Future = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # as an executor does
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """There is nothing to end."""


class Site:
    """One replica: its disk, its logs and epochs, and its part in the set."""

    def __init__(
        self, number: int, fs: FaultyFileSystem | None = None, **system: int
    ) -> None:
        self.id = number
        self.fs = fs or FaultyFileSystem()
        self.clock: Clock = LoopClock()
        self.config: BrokerConfig = config(**system)
        self.workers: list[LoopWorker] = []
        loop = asyncio.get_running_loop()
        self.logs = LogManager(
            self.fs, self.clock, loop.call_soon, self.config,
            start_worker=self._worker,
        )  # fmt: skip
        self.tables = EpochTables(self.fs, [DATA])
        self.logs.open(
            numbers=self.tables.numbers,
            starts=self.tables.starts,
            buried=self.tables.buried,
        )
        self.tables.attach(self.logs)
        for directory in self.logs.directories():
            directory.reader = Inline()  # type: ignore[misc]
        self.last_id = 0
        record = SetRecord(SET, 1, FIRST, 1, frozenset({1, 2}), frozenset({1, 2, 3}), 2)
        file = SetFile(SET, number, record, 1)
        role = ReplicaRole.FOLLOWING
        self.replica = Replica(role, file, 1, 1, is_sure=True)
        self.events: list[str] = []

    def _worker(self, *args) -> LoopWorker:
        self.workers.append(LoopWorker(*args))
        return self.workers[-1]

    def log(self, log_id: LogId = LOG) -> PartitionLog:
        """Return a log; a leader makes it."""
        return self.logs.get_or_create(log_id, self.config.topic(log_id.topic))

    def content(self, log_id: LogId = LOG) -> bytes:
        """Return all synced bytes of a log."""
        log, parts = self.logs.logs()[log_id], []
        offset = log.log_start_offset
        while offset < log.synced_end:
            part = log.read_copy(offset, log.copy_end(offset, 1 << 30)[0])
            parts.append(part.read())
            part.release()
            offset = Offset(offset + len(parts[-1]))
        return b"".join(parts)

    # -- the owner of a follower

    @property
    def revision(self) -> int:
        assert self.replica.file.record is not None
        return self.replica.file.record.revision

    def make_log(self, log_id: LogId, start: Offset, number: int) -> PartitionLog:
        settings = self.config.topic(log_id.topic)
        return self.logs.get_or_create(
            log_id, settings, start_offset=start, number=number
        )

    async def refuse(self, log_id: LogId, own: CopyFacts, answer: JoinAnswer) -> None:
        self.replica, _ = refuse(self.replica, own.number, own, answer)
        self.events.append(f"refuse {log_id}")

    async def on_joined(self, epoch: Epoch) -> None:
        self.replica, _ = joined(self.replica, epoch)
        self.events.append("joined")

    async def on_caught_up(self) -> None:
        self.replica, _ = caught_up(self.replica)
        self.events.append("caught up")

    async def on_lost(self) -> None:
        self.replica, _ = declare_incomplete(self.replica)
        self.events.append("lost")

    def note_last_id(self, last_id: MessageId) -> None:
        self.last_id = max(self.last_id, last_id)


class Leader(Site):
    """A site that leads, and what its term knows."""

    def __init__(
        self,
        number: int = 1,
        fs: FaultyFileSystem | None = None,
        *,
        epoch: Epoch = FIRST,
        in_sync: frozenset[int] = frozenset({1, 2}),
        minimum: int = 2,
        **system: int,
    ) -> None:
        super().__init__(number, fs, **system)
        self.term = Leadership(epoch, Quorum(number, in_sync, minimum))
        self.streams = LeadingStreams(
            self.logs.logs(), self.tables, self, self.term, set_id=SET, lag_s=LAG_S,
        )  # fmt: skip
        self._ticks: asyncio.Task | None = None
        self.next_id = 1

    async def begin(self) -> "Leader":
        """Begin the epoch and lead."""
        numbered = self.logs.logs().values()
        ends = {log.number: log.synced_end for log in numbered}
        await self.tables.begin_epoch(self.term.epoch, ends)  # type: ignore[arg-type]
        self.streams.begin()
        epoch = self.term.epoch
        self.logs.assign_number = partial(self._birth, epoch)
        self.logs.on_numbered = self.streams.add_log
        self._ticks = asyncio.create_task(self._tick())
        return self

    def _birth(self, epoch: Epoch, log_id, directory, start) -> int:
        return self.tables.begin_log(log_id, directory, start, epoch)

    async def _tick(self) -> None:
        while True:
            self.streams.tick(self.clock.boot_s())
            await asyncio.sleep(TICK_S)

    async def end(self) -> None:
        """Lead no more."""
        assert self._ticks is not None
        self._ticks.cancel()
        self.streams.close()
        self.logs.assign_number = self.logs.on_numbered = None

    def put(
        self,
        count: int = 1,
        size: int = 100,
        log_id: LogId = LOG,
        producer: str = "",
    ) -> Ticket:
        """Append records; return the ticket of all of them."""
        ids = range(self.next_id, self.next_id + count)
        self.next_id += count
        chunks = [
            encode_record(b"%08d" % each * (size // 8), id=MessageId(each))
            for each in ids
        ]
        log, ticket, total = self.log(log_id), Ticket(), sum(map(len, chunks))
        batch = None
        if producer:
            batch = StoredBatch(
                producer, ids[0], count, -1, MessageId(ids[0]), log.next_offset, total
            )
        log.append(
            chunks, size_bytes=total, record_count=count, last_id=MessageId(ids[-1]),
            ticket=ticket, batch=batch,
        )  # fmt: skip
        return ticket

    def quorum(self, *in_sync: int) -> None:
        """Have the record say that these are in sync."""
        quorum = Quorum(self.id, frozenset(in_sync), self.term.quorum.min)
        self.term = replace(self.term, quorum=quorum)
        self.streams.set_term(self.term)

    # -- the owner of the streams

    def on_join(self, replica: int, incarnation: int, revision: int) -> None:
        self.term = self.term.join(replica, incarnation)
        self.on_saved(replica, revision)
        self.events.append(f"join {replica}")

    def on_saved(self, replica: int, revision: int) -> None:
        self.term = self.term.save(replica, revision, current=self.revision)
        self.streams.set_term(self.term)

    def on_caught_up(self, replica: int | None = None) -> None:  # type: ignore[override]
        self.events.append(f"caught up {replica}")

    def on_lost(self, replica: int | None = None) -> None:  # type: ignore[override]
        self.events.append(f"lost {replica}")

    def knows(self, _replica: int, token: str) -> bool:
        return token == TOKEN


def serve(site: Site, command: Follow, owner: object, answer) -> None:
    """Carry out one message at a site."""
    payload = command.payload
    match command.kind:
        case messages.JOIN.kind:
            site.streams.join(messages.JOIN.decode(payload), owner, answer)
        case messages.PULL:
            site.streams.pull(messages.decode_pull(payload), owner, answer)
        case messages.TABLES.kind:
            copies = copies_of(site.logs.logs(), site.tables)
            reply = messages.TablesReply(copies, MessageId(site.last_id))
            answer(messages.TABLES.encode_answer(reply))
        case messages.TAIL.kind:
            asyncio.create_task(_serve_tail(site, payload, answer))  # noqa: RUF006


async def _serve_tail(site: Site, payload: bytes, answer) -> None:
    try:
        reply = await answer_tail(
            site.logs.logs(), site.tables, messages.TAIL.decode(payload)
        )
        answer(messages.TAIL.encode_answer(reply))
    except WireError as error:
        answer(error)


class Wire:
    """A connection in memory: messages in their order, late, cut or held up."""

    delay_s = 0.0005

    def __init__(self, site: Site, *, has_follow: bool = True) -> None:
        self.address = f"site {site.id}"
        self.capabilities = Capabilities("1", follow=has_follow)
        self.is_stalled = False
        self.sent: list[Follow] = []
        self.replies: list[object] = []
        self.change = lambda payload: payload
        self._site = site
        self._loop = asyncio.get_running_loop()
        self._parser = Connection(Role.SERVER, WireLimits())
        self._opaque = 0
        self._reason = ""
        self._waiting: dict[int, Callable] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._due: deque[Callable[[], None]] = deque()

    def next_opaque(self) -> int:
        self._opaque += 1
        return self._opaque

    def submit(self, frame, opaque, on_reply, *, deadline_s, is_alone=False) -> None:
        assert not self._reason, self._reason
        self._waiting[opaque] = on_reply
        self._parser.receive_data(frame)
        (command,) = drain(self._parser)
        self.sent.append(command)
        answer = partial(self._later, self._reply, opaque)
        self._later(self._serve, command, answer)
        late = RequestTimeoutError("late")
        self._loop.call_at(deadline_s, lambda: self._answer(opaque, late))

    async def call(self, command, *, deadline_s):
        answered = self._loop.create_future()

        def on_reply(reply) -> None:
            if isinstance(reply, Exception):
                answered.set_exception(reply)
            else:
                answered.set_result(reply)

        frame = encode(command)
        self.submit(frame, command.opaque, on_reply, deadline_s=deadline_s)
        return await answered

    def _serve(self, command: Follow, answer) -> None:
        serve(self._site, command, self, answer)

    def _later(self, call, *args) -> None:
        self._due.append(partial(call, *args))
        self._loop.call_later(self.delay_s, self._deliver)

    def _deliver(self) -> None:
        while self._due and not self.is_stalled:
            self._due.popleft()()
            if not self.is_stalled:
                return

    def stall(self, *, is_stalled: bool) -> None:
        """Hold everything up, or let it go on."""
        self.is_stalled = is_stalled
        while self._due and not self.is_stalled:
            self._due.popleft()()

    def _reply(self, opaque: int, answer: bytes | WireError) -> None:
        self.replies.append(answer)
        if isinstance(answer, WireError):
            reply = Result(answer.status, str(answer).encode(), opaque)
        else:
            reply = Value(self.change(answer), opaque)
        self._answer(opaque, reply)

    def _answer(self, opaque: int, reply) -> None:
        on_reply = self._waiting.pop(opaque, None)
        if on_reply is not None:
            on_reply(reply)

    def on_closed(self, callback: Callable[[str], None]) -> Callable[[], None]:
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def close(self, reason: str) -> None:
        """Cut it; the site hears of it."""
        if self._reason:
            return
        self._reason = reason
        self._due.clear()
        for opaque in tuple(self._waiting):
            self._answer(opaque, ConnectionLostError(reason))
        for listener in tuple(self._listeners):
            listener(reason)
        if isinstance(self._site, Leader):
            self._site.streams.drop(self)

    def datas(self) -> list[messages.Data]:
        """Return the data messages that came."""
        found = [each for each in self.replies if isinstance(each, bytes)]
        return [messages.decode_data(each) for each in found[1:]]


class Stream:
    """A follower that runs, over one wire."""

    def __init__(self, follower: Site, leader: Leader, **options: object) -> None:
        self.wire = Wire(leader)
        for name, value in options.items():
            setattr(self.wire, name, value)
        self.follower = Follower(
            self.wire, follower, follower,
            clock=follower.clock, epoch=leader.term.epoch, token=TOKEN,
        )  # fmt: skip
        self.task = asyncio.create_task(self.follower.run())

    async def end(self) -> None:
        """Stop following."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def same(*sites: Site) -> bool:
    """Return whether all logs are equal, segments without bytes left out."""
    first, *others = (
        {
            log_id: (
                log.number, site.content(log_id), log.high_watermark,
                [
                    each.base_offset for each in log.segments
                    if each.base_offset < log.synced_end
                ],
                sorted(map(str, log.producers)),
            )
            for log_id, log in site.logs.logs().items()
        }
        for site in sites
    )  # fmt: skip
    return all(each == first for each in others)
