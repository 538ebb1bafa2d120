"""Queue groups over logs, journal and clock that a test moves step by step.

It runs on a loop on which waiting takes no time (`tests/rigs/virtual_time.py`).
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, TypeVar

from metaq.broker.context import BrokerContext
from metaq.broker.dispatch import dispatch, dispatch_in_steps
from metaq.broker.queue_groups import QueueGroup
from metaq.broker.queue_log import QUEUES
from metaq.broker.queue_part import ServedQueue
from metaq.broker.queue_service import QueueService
from metaq.errors import MetaqError
from metaq.model import LogId, Millis, Position
from metaq.protocol.commands import Mput, Result, Settle, Take, Value
from metaq.protocol.connection import NEED_DATA, Connection, InPieces, Role, WireLimits
from metaq.protocol.transaction_ids import parse_key
from metaq.record.flags import decode_payload
from metaq.record.layout import Record
from metaq.record.scan import read_record
from metaq.testing.clock import WALL_MS, ManualClock
from metaq.zk.group_definitions import QueueGroupDefinition
from tests.broker.delay_rig import AtOnce
from tests.broker.stepped import context_on
from tests.rigs.fs import FaultyFileSystem
from tests.txn.support import TOPIC, TransactionBench, content

GROUP: Final = "workers"
TOPICS: Final = {"test": 2, "dead": 1, "out": 1}
"""Topics and their partitions: messages, dead letters, what is made of messages."""
SEGMENT_BYTES: Final = 2048
"""Small, so that `__queues` has sealed segments."""

T = TypeVar("T")
OnAnswer: TypeAlias = Callable[[Result | Value], None]


class LoopClock(ManualClock):
    """The time of a loop, and what passes within its turns."""

    def __init__(self, lapse_s: Callable[[], float] = lambda: 0.0) -> None:
        """Let `lapse_s()` seconds pass between two looks at the clock."""
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._lapse_s = lapse_s
        self._inside_s = 0.0
        self._jumped_ms = 0

    def monotonic_s(self) -> float:
        self._inside_s += self._lapse_s()
        return self._loop.time() + self._inside_s

    def wall_ms(self) -> Millis:
        ms = self.monotonic_s() * 1000
        return Millis(round(WALL_MS + self._jumped_ms + ms))

    def boot_s(self) -> float:
        return self.monotonic_s()

    def jump_wall_ms(self, milliseconds: int) -> None:
        self._jumped_ms += milliseconds


class SteppedQueues(QueueService):
    """The service, whose whole states are written when a test says so."""

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        self.fail_count = 0
        """Times that the states were dropped from memory."""

    def fail(self, error: MetaqError) -> None:
        self.fail_count += 1
        super().fail(error)

    def parts(self) -> list[tuple[QueueGroup, ServedQueue]]:
        """Return the queues in memory."""
        groups = self._groups.values()
        return [(group, each) for group in groups for each in group.queues.values()]

    def write_whole(self) -> None:
        """Write the whole state of each queue, as after many changes."""
        log = self._journal.find(QUEUES)
        if self._content is not None and log is not None:
            for _, queue in self.parts():
                self._snapshot(self._content, queue, log.next_offset)

    def wear_out(self) -> None:
        """Begin another life of each queue, as after many deliveries."""
        for group, queue in self.parts():
            is_idle = not queue.letters_open and not queue.state.held_count
            if self._content is not None and is_idle:
                snapshot = queue.state.snapshot(self.now())
                self._content.by_name[queue.name] = snapshot
                self._forget(group, queue)


class QueueSession:
    """A connection as handlers use it: its answers go to `on_answer`, while it is."""

    def __init__(self, rig: "QueueRig") -> None:
        self.context = rig.context
        self._rig = rig
        self.taker_count = 0
        self.in_flight_bytes = 0
        self.is_open = True
        self.on_answer: dict[int, OnAnswer] = {}
        """By opaque."""
        self._connection = Connection(Role.CLIENT, WireLimits())

    def hold(self, *, count: int, size_bytes: int) -> None:
        pass

    def answer(self, replies: bytes, **_more: Any) -> None:
        """Hand over answers."""
        self._connection.receive_data(replies)
        while (reply := self._connection.next_event()) is not NEED_DATA:
            assert isinstance(reply, Result | Value), reply
            on_answer = self.on_answer.pop(reply.opaque, None)
            if self.is_open and self._rig.is_alive and on_answer is not None:
                self._rig.hear(on_answer, reply)

    def run_out(self) -> None:
        raise AssertionError("there is memory")


class QueueRig:
    """One life of a broker with a queue group, on a disk in memory."""

    def __init__(
        self,
        fs: FaultyFileSystem,
        clock: LoopClock,
        definition: QueueGroupDefinition,
        make: type[SteppedQueues] = SteppedQueues,
    ) -> None:
        self.fs = fs
        self.clock = clock
        topics = {
            name: replace(TOPIC, name=name, partition_count=count)
            for name, count in TOPICS.items()
        }
        self.bench = TransactionBench(
            fs, clock=clock, topics=topics, segment_bytes_max=SEGMENT_BYTES
        )
        self.bench.open()
        for directory in self.bench.logs.manager.directories():
            anything: Any = directory
            anything.reader = AtOnce()
        turns: Any = SimpleNamespace(ask=asyncio.get_running_loop().call_soon)
        self.context = context_on(
            self.bench, self.bench.logs.config, upkeep=AtOnce(), turns=turns
        )
        self._definition = definition
        self.service = make(self.context)
        self.context.queues = self.service
        self.context.topics.on_new_log = self.service.on_new_log
        self.is_alive = True
        """Its answers reach those that asked."""
        self.found: list[AssertionError] = []
        """Faults that answers showed."""
        self._seen: dict[str, tuple[int, list[bytes]]] = {}

    async def start(self) -> "QueueRig":
        """Have the service take requests."""
        await self.play(self.service.start())
        self.service.apply_groups({GROUP: self._definition})
        return self

    async def play(self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work, and what disk and journal have to do for it."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self.bench.run()
                await asyncio.sleep(0)
            return await task
        finally:
            task.cancel()

    async def run_some(self, rng: random.Random) -> None:
        """Take a step of a disk, the journal, or what they have to say."""
        logs, syncs = self.bench.logs, self.bench.logs.syncs
        match rng.randrange(5):
            case 0:
                logs.loop.run_some(rng.choice((1, 2, 100)))
            case 1 if syncs is not None and syncs.begun:
                syncs.reap()
            case 2:
                for worker in logs.workers:
                    if worker.queue or worker.has_more:
                        worker.turn()
            case 3:
                for journal in self.bench.workers:
                    journal.step()
            case _:
                await asyncio.sleep(0)

    async def run_all(self) -> None:
        """Have everything end that is under way."""
        for _ in range(8):
            self.bench.run()
            await asyncio.sleep(0)

    def ask(
        self,
        session: QueueSession,
        command: Take | Settle | Mput,
        on_answer: OnAnswer,
    ) -> None:
        """Give a command to the broker; the answer may come at once."""
        answerer: Any = session
        session.on_answer[command.opaque] = on_answer
        if isinstance(command, Mput):
            whole = InPieces(command, [command.payload], len(command.payload))
            steps = dispatch_in_steps(whole, answerer)
            try:
                while True:
                    next(steps)
            except StopIteration as end:
                refused: bytes = end.value
        else:
            refused = dispatch(command, answerer)
        if refused:
            session.answer(refused)

    def hear(self, on_answer: OnAnswer, reply: Result | Value) -> None:
        """Hand over one answer; what that finds is no error of the broker's."""
        try:
            on_answer(reply)
        except AssertionError as error:
            self.found.append(error)

    def drop(self, session: QueueSession) -> None:
        """End a connection: nothing more is heard of it."""
        session.is_open = False
        answerer: Any = session
        self.service.drop(answerer)

    def begin(self, session: QueueSession, key: str) -> None:
        self.bench.coordinator.begin(key, session, 0)

    def end(
        self,
        session: QueueSession,
        key: str,
        on_done: Callable[[MetaqError | None], None],
        *,
        is_committed: bool,
    ) -> None:
        transactions = self.bench.coordinator
        if is_committed:
            transactions.commit(key, session, on_done, is_two_phase=False)
        else:
            transactions.rollback(key, session, on_done)

    def data_in(self, topic: str) -> list[bytes]:
        """Return the data of the messages that readers of a topic see, in order."""
        log_id, at, found = LogId(topic, 0), Position(0), list[bytes]()
        log = self.bench.logs.manager.logs().get(log_id)
        if log is None:
            return found
        end, known = self._seen.get(topic, (-1, found))
        if end == log.high_watermark:
            return known
        data = content(self.bench, log_id)
        while isinstance(record := read_record(data, at), Record):
            found.append(decode_payload(record.payload, record.flag).data)
            at = Position(at + record.size_bytes)
        self._seen[topic] = log.high_watermark, found
        return found

    def tick(self) -> None:
        """Do what is done once a second."""
        self.service.tick()
        self.bench.coordinator.tick()

    def trim(self) -> None:
        """Delete the segments of `__queues` that are not needed any more."""
        self.tick()
        work = self.bench.logs.manager.begin_retention()
        if work is not None:
            assert not work().failures

    async def kill(self) -> None:
        """End this life, as the end of a process does."""
        self.is_alive = False
        self.bench.kill()
        await self.service.stop()


def key_of(number: int) -> tuple[str, Any]:
    """Return the name of a transaction, and as commands carry it."""
    return f"TX:s:{number}", parse_key(f"TX:s:{number}")
