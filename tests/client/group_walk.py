"""Random walks over a group of real async consumers, in virtual time.

A task for each process of a walk calls its consumer at random. Another task causes
events: messages, joins, kills, lost sessions, and absences of ZooKeeper or of a broker,
which are both in memory. Nothing waits for real time. A `Model` follows the walk and
fails it if the consumers do something that it forbids.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Collection, Iterator
from typing import Any

from metaq.client import AsyncClient, AsyncConsumer
from metaq.errors import MetaqError, SessionSuspendedError
from metaq.model import BrokerAddress, BrokerId, MessageId, TopicPartition
from metaq.protocol.commands import (
    Command,
    CountQuestion,
    OffsetQuery,
    Reply,
    Result,
    TimeQuestion,
    Version,
)
from metaq.protocol.version import Capabilities, encode_version_body
from metaq.record.layout import encode_record
from metaq.testing.fake_metaq import FakeMetaq
from metaq.testing.zk import MemoryCoordinator, MemoryZooKeeper
from metaq.zk.paths import BrokerRole, NodeKind
from metaq.zk.znodes import (
    TopicRegistration,
    decode_group_offset,
    encode_address,
    encode_registration,
)
from tests.client.group_members import CLOCK, GROUP, PATHS, owner_path
from tests.client.group_model import PAYLOAD_BYTES, STEP, Model, Process, Reader
from tests.client.group_user import OPTIONS, User
from tests.client.scripted import ScriptedBroker
from tests.rigs.inside import subscription_of
from tests.rigs.virtual_time import run_virtually

OURS = Capabilities("test", spans=True)
PROCESSES_MAX = 3
DRAIN_S = 300.0
ROLE = BrokerRole(BrokerId(0))


class WatchedZooKeeper(MemoryZooKeeper):
    """Has the model hear of each change of the group, and who asked for it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.readers: dict[str, Reader] = {}
        """By the name of the member."""
        self.dead: set[int] = set()
        """Sessions of killed processes, which last."""
        self._asking = 0

    @contextlib.contextmanager
    def serving(self, what: str, path: str, session_id: int) -> Iterator[None]:
        if session_id in self.dead:
            raise SessionSuspendedError(f"{what} {path}: killed")
        with super().serving(what, path, session_id):
            self._asking = session_id
            try:
                yield
            finally:
                self.look()
                self._asking = 0

    def reap(self, session_id: int) -> None:
        super().reap(session_id)
        self.look()

    def look(self) -> None:
        model = self.model
        for one in model.ends:
            node = self.nodes.get(PATHS.group_offset(GROUP, one))
            if node is not None:
                offset = decode_group_offset(node.data).offset
                if model.stored[one] != offset // STEP:
                    model.on_write(one, offset, self._asking)
            owner = self.nodes.get(owner_path(one))
            session_id = 0 if owner is None else owner.owner_session_id
            claim = model.claims.get(one)
            if claim is not None and claim.session_id != session_id:
                is_release = self._asking == claim.session_id
                model.on_released(one, is_release=is_release)
            if owner is not None and one not in model.claims:
                name = owner.data.decode()
                reader = self.readers[name.removesuffix("-0")]
                model.on_claimed(one, reader, session_id)


class Broker:
    """One broker on the walk's own loop, which knows times and counts."""

    def __init__(self, server: MemoryZooKeeper, rng: random.Random) -> None:
        self.server = server
        self.metaq = FakeMetaq({}, broker_id=0, clock=CLOCK, choose=lambda _count: 0)
        self.metaq.transfer_bytes_max = rng.choice([70, 200, 1000, 10_000])
        self.times: dict[TopicPartition, list[float]] = {}
        self.inner: ScriptedBroker
        self._port = 0
        self._next_id = 0

    async def come(self) -> None:
        self.inner = ScriptedBroker(self._port)
        self.inner.answer = self._answer
        await self.inner.__aenter__()
        if not self._port:
            self._port = self.inner.address.port
            address = encode_address(BrokerAddress("127.0.0.1", self._port))
            self.server.put(f"{PATHS.broker(BrokerId(0))}/master", address)

    def go(self) -> None:
        self.inner.stop_listening()
        self.inner.cut()

    def serve(self, topic: str, count: int) -> None:
        self.metaq.topics[topic] = count
        data = encode_registration(TopicRegistration(count, ROLE))
        for kind in (NodeKind.TOPIC_PUB, NodeKind.TOPIC_SUB):
            self.server.write(PATHS.topic(kind, topic, ROLE), data)

    def append(self, one: TopicPartition, number: int) -> None:
        self._next_id += 1
        payload = b"%0*d" % (PAYLOAD_BYTES, number)
        record = encode_record(payload, id=MessageId(self._next_id), flag=0)
        assert len(record) == STEP
        self.metaq.log(one.topic, one.partition).append(record)
        self.times.setdefault(one, []).append(CLOCK.monotonic_s())

    def number_at(self, one: TopicPartition, time_s: float) -> int:
        """Return the first message of a time or later, or the end."""
        times = self.times.get(one, [])
        return sum(each < time_s for each in times)

    def _answer(self, command: Command) -> Reply | None:
        match command:
            case Version():
                body = encode_version_body(OURS)
                return Result(200, body.encode(), command.opaque)
            case OffsetQuery(question=TimeQuestion(time_ms)):
                one = TopicPartition(command.topic, BrokerId(0), command.partition)
                if not self.times.get(one):
                    return self.metaq.answer(command)
                at = self.number_at(one, time_ms / 1000) * STEP
                return Result(200, str(at).encode(), command.opaque)
            case OffsetQuery(question=CountQuestion(end)) if not (
                command.offset % STEP or end % STEP
            ):
                count = (end - command.offset) // STEP
                return Result(200, str(count).encode(), command.opaque)
            case OffsetQuery(question=CountQuestion()):
                return Result(
                    500, b"no record begins there (no-record)", command.opaque
                )
        return self.metaq.answer(command)  # type: ignore[arg-type]


class Walk:
    """One walk. `run` it in virtual time."""

    def __init__(self, seed: int, step_count: int) -> None:
        self.rng = random.Random(seed)
        self.step_count = step_count
        self.steps_done = 0
        self.model = Model()
        self.server = WatchedZooKeeper(self.model)
        self.broker = Broker(self.server, self.rng)
        self.strategy = self.rng.choice(["DEFAULT", "CONSIST"])
        self.counts = {
            name: self.rng.randint(1, 3)
            for name in ["a", "b"][: self.rng.randint(1, 2)]
        }
        self.users: list[User] = []
        self.everybody: list[User] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.user_count = 0

    # -- events -----------------------------------------------------------------------

    def add_partitions(self, topic: str) -> None:
        for number in range(self.counts[topic]):
            one = TopicPartition(topic, BrokerId(0), number)
            if one not in self.model.ends:
                self.model.add_partition(one)
        self.broker.serve(topic, self.counts[topic])

    async def send(self) -> None:
        for _ in range(self.rng.choice([1, 2, 5, 20])):
            one = self.rng.choice(sorted(self.model.ends))
            self.broker.append(one, self.model.ends[one])
            self.model.ends[one] += 1

    async def join(self) -> None:
        if len(self.users) < PROCESSES_MAX:
            self.user_count += 1
            name = f"c{self.user_count}"
            seed = self.rng.randrange(2**32)
            user = User(self, Process(name), random.Random(seed))
            self.users.append(user)
            user.begin()

    def pick(self) -> User | None:
        return self.rng.choice(self.users) if self.users else None

    async def leave(self) -> None:
        """The consumer is closed; its process makes another one, or ends."""
        user = self.pick()
        if user is not None:
            user.is_leaving = True
            user.is_ending = self.rng.random() < 0.5
            if user.is_ending:
                self.users.remove(user)

    async def kill(self) -> None:
        """Nothing of the process runs any more; its session lasts a while."""
        user = self.pick()
        if user is None:
            return
        self.users.remove(user)
        self.model.note(f"kill {user.process.name}")
        user.die()
        coordinator = user.coordinator
        if coordinator is None:
            return
        session_id = coordinator.status.session_id
        self.server.dead.add(session_id)
        self.server.abandon(coordinator)
        self.spawn(self._reap(user, session_id, self.rng.choice([0.0, 1.0, 5.0])))

    async def _reap(self, user: User, session_id: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self.server.reap(session_id)
        with contextlib.suppress(MetaqError):
            await user.client.close(0.1)

    async def expire(self) -> None:
        user = self.pick()
        if user is not None and user.coordinator is not None:
            self.model.note(f"expire {user.process.name}")
            self.server.expire(user.coordinator)

    async def suspend(self) -> None:
        user = self.pick()
        if user is not None and user.coordinator is not None:
            self.model.note(f"suspend {user.process.name}")
            self.model.disturb()
            coordinator = user.coordinator
            self.server.suspend(coordinator)
            self.spawn(self._later(lambda: self.server.resume(coordinator)))

    async def _later(self, work: Any) -> None:
        await asyncio.sleep(self.rng.choice([0.1, 1.0, 4.0]))
        work()

    async def lose_zookeeper(self) -> None:
        self.model.note("ZooKeeper away")
        self.model.disturb()
        self.server.stop()
        await self._later(self.server.start)
        self.model.disturb()
        self.model.note("ZooKeeper back")

    async def stall_zookeeper(self) -> None:
        self.model.note("ZooKeeper stalls")
        self.model.disturb()
        self.server.stall = True
        await asyncio.sleep(self.rng.choice([0.1, 1.0, 4.0]))
        self.server.stall = False
        self.model.disturb()
        self.model.note("ZooKeeper answers")

    async def restart_broker(self) -> None:
        self.model.note("broker away")
        self.broker.go()
        await asyncio.sleep(self.rng.choice([0.1, 1.0, 4.0]))
        await self.broker.come()

    async def grow(self) -> None:
        topic = self.rng.choice(sorted(self.counts))
        if self.counts[topic] < 4:
            self.counts[topic] += 1
            self.add_partitions(topic)

    # -- the walk ---------------------------------------------------------------------

    def spawn(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            await self.end()

    async def _run(self) -> None:
        await self.broker.come()
        for topic in self.counts:
            self.add_partitions(topic)
        events = {
            self.send: 30, self.join: 6, self.leave: 3, self.kill: 2, self.expire: 2,
            self.suspend: 1, self.lose_zookeeper: 1, self.stall_zookeeper: 1,
            self.restart_broker: 1, self.grow: 1,
        }  # fmt: skip
        await self.send()
        await self.join()
        names, weights = list(events), list(events.values())
        while self.steps_done < self.step_count:
            (event,) = self.rng.choices(names, weights)
            await event()
            self.steps_done += 1
            await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.1, 0.5, 2.0]))
            self.check()
        await self.drain()

    async def end(self) -> None:
        """Leave nothing open, wherever the walk has ended."""
        self.broker.go()
        for task in self.tasks:
            task.cancel()
        for user in self.everybody:
            user.die()
            with contextlib.suppress(MetaqError):
                await user.client.close(0.0)
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(1.0)

    def check(self) -> None:
        self.model.check()
        for task in self.tasks:
            if task.done() and not task.cancelled() and task.exception():
                self.model.fail(f"a user's task failed: {task.exception()!r}")
                raise self.model.violation from task.exception()  # type: ignore[misc]

    async def drain(self) -> None:
        """All leave; one more member reads to the end of every log."""
        self.model.note("drain")
        for user in self.users:
            user.is_leaving = user.is_ending = True
        async with asyncio.timeout(DRAIN_S):
            await asyncio.gather(*self.tasks, return_exceptions=True)
        self.check()
        last = User(self, Process("last"), self.rng)
        try:
            async with asyncio.timeout(DRAIN_S):
                await last.read_all()
        except TimeoutError:
            self.model.fail("what is left was not handed out in time")
        self.check()
        self.model.check_complete()
        self.check()

    def make_client(self, user: User) -> AsyncClient:
        self.everybody.append(user)

        def make(_clock: object) -> MemoryCoordinator:
            user.coordinator = self.server.coordinator(CLOCK)
            return user.coordinator

        return AsyncClient(coordinator=make, clock=CLOCK, **OPTIONS)

    def make_consumer(self, user: User, reader: Reader, **more: Any) -> AsyncConsumer:
        self.server.readers[f"{GROUP}_{reader.name}"] = reader
        consumer = user.client.consumer(
            GROUP,
            sorted(self.counts),
            strategy=self.strategy,
            consumer_id=reader.name,
            **more,
        )
        subscription = subscription_of(consumer)
        assign = subscription.assign

        async def note(partitions: Collection[TopicPartition]) -> None:
            await assign(partitions)
            handled = consumer.fetch_buffer.handled()
            for one in partitions:
                self.model.on_begun(one, reader, handled[one].offset // STEP)

        subscription.assign = note
        return consumer


def walk(seed: int, step_count: int) -> Walk:
    """Make one walk, and return it.

    Raises:
        Violation: with what happened before it.
    """
    state, disabled = random.getstate(), logging.root.manager.disable
    random.seed(seed)
    # Records of ten thousand warnings take longer than the walk.
    logging.disable(logging.CRITICAL)
    one = Walk(seed, step_count)
    try:
        run_virtually(one.run())
    finally:
        random.setstate(state)
        logging.disable(disabled)
    return one
