"""The delay service over logs, journal and clock that a test moves step by step."""

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import count, groupby
from typing import Any, TypeVar

from metaq.broker.acks import HeldBack, Writer
from metaq.broker.context import BrokerContext
from metaq.broker.delay_service import DelayService
from metaq.broker.dispatch import dispatch
from metaq.broker.handlers.put import handle_mput
from metaq.config.settings import BrokerConfig
from metaq.errors import MetaqError, WireError
from metaq.model import LogId, MessageId
from metaq.protocol.commands import OWN_TIMES, Cancel, ListScheduled, Mput, Result
from metaq.protocol.connection import Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.protocol.transaction_ids import parse_key
from metaq.record.checksum import checksum
from metaq.record.ids import ids_from
from metaq.record.layout import encode_record
from metaq.testing.clock import ManualClock
from tests.broker.stepped import context_on
from tests.rigs.broker import Peer
from tests.rigs.disk import Choose
from tests.rigs.fs import FaultyFileSystem, keep_none
from tests.txn.support import TransactionBench

TOPIC = "test"
SEGMENT_BYTES = 2048
"""Small, so that the tiers have sealed segments."""

T = TypeVar("T")


def records_of(datas: Sequence[bytes], times: Sequence[int]) -> bytes:
    ids = times or [0] * len(datas)
    pairs = zip(datas, ids, strict=True)
    return b"".join(encode_record(data, id=MessageId(each)) for data, each in pairs)


def receipts_of(
    reply: Result, datas: Sequence[bytes], times: Sequence[int], topic: str = TOPIC
) -> list[tuple[int, int, int, int]]:
    """Return tier, offset, time and id of each message of a batch."""
    first_id, _partition, none, tier, offset = map(int, reply.text.split())
    assert none == -1
    found = list[tuple[int, int, int, int]]()
    ids = iter(ids_from(MessageId(first_id), len(datas)))
    for due_ms, group in groupby(zip(times, datas, strict=True), lambda pair: pair[0]):
        size = 49 + len(topic)
        start = offset
        for _, data in group:
            found.append((tier, start, due_ms, next(ids)))
            size += 20 + len(data)
        offset += size
    return found


def mput_of(
    *datas: bytes,
    due_ms: int | None = OWN_TIMES,
    times: Sequence[int] = (),
    topic: str = TOPIC,
    **more: Any,
) -> Mput:
    """Return a batch with a time, or with one of each message."""
    body = records_of(datas, times)
    fields = {"partition": 0, "opaque": 1, "deliver_ms": due_ms, **more}
    return Mput(
        topic,
        count=len(datas),
        checksum=checksum(body),
        payload=body,
        **fields,
    )


def result_of(data: bytes) -> Result:
    connection = Connection(Role.CLIENT, WireLimits())
    connection.receive_data(data)
    reply = connection.next_event()
    assert isinstance(reply, Result), reply
    return reply


async def ask(peer: Peer, command: Mput | Cancel | ListScheduled) -> Result:
    """Send a command to a broker; return its reply."""
    return result_of(await peer.ask(encode(command)))


class AtOnce(Executor):
    """Threads that do their work where it is handed to them."""

    is_running = True

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # for who waits
            done.set_exception(error)
        return done


class FakeSession:
    """A session as handlers use it."""

    taker_count = 0
    in_flight_bytes = 0

    def __init__(self, context: BrokerContext) -> None:
        self.context = context
        self.replies: list[bytes] = []
        self.held_back: dict[Writer, HeldBack] = {}

    def hold(self, *, count: int, size_bytes: int) -> None:
        pass

    def answer(self, replies: bytes, **_more: Any) -> None:
        self.replies.append(replies)

    def run_out(self) -> None:
        raise AssertionError("there is memory")


class SteppedDelays(DelayService):
    """The service, with ticks when a test says so."""

    async def on_start(self) -> None:
        pass


class DelayRig:
    """One life of a broker with delayed messages, on a disk in memory."""

    def __init__(
        self,
        fs: FaultyFileSystem | None = None,
        clock: ManualClock | None = None,
        *,
        make: type[SteppedDelays] = SteppedDelays,
        segment_bytes: int = SEGMENT_BYTES,
        **limits: int,
    ) -> None:
        self.fs = fs = fs or FaultyFileSystem()
        self.clock = clock = clock or ManualClock()
        self._options: dict[str, Any]
        self._options = {"make": make, "segment_bytes": segment_bytes, **limits}
        self.bench = TransactionBench(fs, clock=clock, segment_bytes_max=segment_bytes)
        self.bench.open()
        for directory in self.bench.logs.manager.directories():
            directory.reader.begin()
        config: BrokerConfig = self.bench.logs.config
        config = replace(config, limits=replace(config.limits, **limits))
        self.context = context_on(self.bench, config, upkeep=AtOnce())
        self.service = make(self.context)
        self.problem = ""
        self.ticked_ms = 0
        """Latest time at which there was a tick."""
        self._keys = count(1)
        self.context.delays = self.service

    async def start(self) -> "DelayRig":
        """Have the service take requests."""
        await self.service.start()
        await self.try_tick()
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

    async def tick(self) -> int:
        """Deliver everything that is due; return the number of batches.

        What is decided, and a full disk did not take, comes first.
        """
        batches = 0
        self.bench.coordinator.tick()
        self.bench.run()
        self.ticked_ms = max(self.ticked_ms, self.now_ms)
        while await self.play(self.service.tick()):
            batches += 1
        return batches

    async def try_tick(self) -> None:
        """The same; what fails is tried again at the next tick, as the task does."""
        for _ in range(3):
            try:
                await self.tick()
            except MetaqError as error:
                self.problem = str(error)
            else:
                self.problem = ""
                return

    @property
    def is_healthy(self) -> bool:
        """Whether nothing keeps what is due from being delivered."""
        return not self.problem and not any(t.problem for t in self.service.tiers)

    def trim(self) -> None:
        """Let go of segments in which nothing waits."""
        self.service.trim()
        work = self.bench.logs.manager.begin_retention()
        if work is not None:
            assert not work().failures
        self.bench.run()

    async def commit(
        self, command: Mput, wait_s: float, *more: Mput, is_committed: bool = True
    ) -> bool:
        """Put batches in a transaction; return whether it was committed."""
        key = f"TX:s:{next(self._keys)}"
        session, transactions = FakeSession(self.context), self.bench.coordinator
        outcomes: list[MetaqError | None] = []
        try:
            transactions.begin(key, session, 0)
            for each in (command, *more):
                inside = replace(each, transaction=parse_key(key))
                for _ in handle_mput(inside, [inside.payload], session):
                    pass
            self.bench.run()
            if any(result_of(each).status != 200 for each in session.replies):
                return False
            self.clock.advance_s(wait_s)
            await self.try_tick()
            if is_committed:
                transactions.commit(key, session, outcomes.append, is_two_phase=False)
            else:
                transactions.rollback(key, session, outcomes.append)
            self.bench.run()
        except (WireError, MetaqError):
            return False
        return is_committed and outcomes == [None]

    async def send(self, command: Mput) -> Result:
        """Put a batch, and wait for its answer."""
        session = FakeSession(self.context)
        try:
            for _ in handle_mput(command, [command.payload], session):
                pass
        except WireError as error:
            return Result(error.status, str(error).encode(), command.opaque)
        while not session.replies:
            self.bench.run()
            await asyncio.sleep(0)
        return result_of(session.replies[0])

    async def schedule(
        self, *datas: bytes, due_ms: int, **more: Any
    ) -> tuple[int, int, int]:
        """Put a batch with a time; return tier, offset and id of the first message."""
        reply = await self.send(mput_of(*datas, due_ms=due_ms, **more))
        assert reply.status == 200, reply
        first_id, _partition, none, tier, offset = map(int, reply.text.split())
        assert none == -1
        return tier, offset, first_id

    async def ask(self, command: Cancel | ListScheduled) -> Result:
        """Ask the service, which begins to work for requests with this."""
        session: Any = FakeSession(self.context)
        refused = dispatch(command, session)
        if refused:
            return result_of(refused)
        if isinstance(command, ListScheduled):
            for _ in range(2):
                await asyncio.sleep(0)
                await self.tick()
        while not session.replies:
            self.bench.run()
            await asyncio.sleep(0)
        return result_of(session.replies[0])

    async def pass_s(self, seconds: float) -> int:
        """Let time pass, and deliver what is due then."""
        self.clock.advance_s(seconds)
        return await self.tick()

    async def again(self, choose: Choose = keep_none) -> "DelayRig":
        """Cut the power, and return the next life."""
        await self.kill()
        return await DelayRig(
            self.fs.crash(choose), self.clock, **self._options
        ).start()

    @property
    def now_ms(self) -> int:
        return self.service.now_ms()

    async def drop(self, topic: str) -> None:
        """Note that a topic is deleted."""
        outcomes: list[MetaqError | None] = []
        self.service.drop_topic(topic, outcomes.append)
        await self.tick()
        assert outcomes == [None]

    def payloads(self, partition: int = 0, topic: str = TOPIC) -> list[bytes]:
        """Return what readers of a partition see."""
        return self.bench.payloads(LogId(topic, partition))

    async def close(self) -> None:
        """End this life by a clean stop."""
        await self.service.stop()
        self.bench.close()
        await self._end_readers()

    async def kill(self) -> None:
        """End this life, as the end of a process does."""
        self.bench.kill()
        await self.service.stop()
        await self._end_readers()

    async def _end_readers(self) -> None:
        for directory in self.bench.logs.manager.directories():
            await directory.reader.end()
