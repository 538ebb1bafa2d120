"""A walk over a set of three brokers: load, faults in an order of a seed, accounts.

One loop has the brokers, their clients and the faults; disks and ZooKeeper are in
memory, ways between brokers are proxies. Times are a tenth of those of a real set. The
seed gives the faults and their order; what threads and sockets make of it differs.

    director    one fault after the other; each is undone by a task of its own
    senders     raw puts, and our client's producers
    readers     gets from any replica, and its ends
    watcher     invariants that hold at each moment
"""

import asyncio
import contextlib
import errno
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any, Final

from metaq.client import AsyncClient
from metaq.errors import MetaqError
from metaq.peer.options import ConnectionOptions
from metaq.replication.election import Flag
from metaq.replication.operator import change_set
from metaq.replication.record import (
    Change,
    LeaderNode,
    Purpose,
    ReplicaSetError,
    SetRecord,
    plan_settings,
    plan_transfer,
    restored_record,
)
from metaq.replication.replica import ReplicaRole
from metaq.replication.set_nodes import Outcome
from metaq.testing.proxy import Direction, Proxy
from metaq.testing.zk import Node
from tests.replication.replicas import (
    DATA,
    RECORD,
    Replica,
    Replicas,
    replicas,
)
from tests.replication.walk_ledger import PLACES, Ledger, name_of
from tests.rigs.disk import CAPACITY_BYTES
from tests.rigs.fs import FaultyFileSystem, keep_all, keep_none, keep_random
from tests.rigs.inside import store_of
from tests.rigs.waiting import until

SETTLE_S: Final = 90.0
"""Bound on the time from the last fault to a set that is well."""
ASK_S: Final = 5.0
"""Longest wait for an answer to a raw command; the outcome is unknown then."""
SEND_S: Final = 200.0
"""Deadline of the client's sends: no send may fail."""
SMALL: Final = {
    "maxSegmentSize": "20000",
    "replicaLagTimeoutMs": "700",
}
TIMES: Final[dict[str, Any]] = {
    "metaq.replication.election.CLAIM_WAIT_MS": 2_000,
    "metaq.replication.election.MERGE_WAIT_MS": 2_000,
    "metaq.replication.election.TARGET_WAIT_MS": 500,
    "metaq.replication.node.FAILED_FIRST_S": 2.0,
    "metaq.replication.node.READ_INTERVAL_S": 0.5,
    "metaq.replication.node.HAND_OVER_S": 2.0,
    "metaq.replication.node.DRAIN_S": 1.0,
    "metaq.replication.claims.LAST_IN_RANK_S": 1.0,
    "metaq.replication.claims.TERM_TRIES_S": 4.0,
    "metaq.replication.claims.MERGE_TIMEOUT_S": 2.0,
    "metaq.replication.following.ASK_S": 3.0,
    "metaq.replication.following.PULL_S": 1.5,
    "metaq.replication.following.DRAIN_S": 3.0,
    "metaq.replication.leading.IDLE_S": 0.1,
    "metaq.replication.merging.ANSWER_S": 2.0,
    "metaq.replication.set_nodes.REQUEST_TIMEOUT_S": 1.0,
    "metaq.replication.store.WRITE_S": 2.0,
    "metaq.replication.store.WRITE_PAUSE_S": 0.2,
    "metaq.replication.term.ALONE_S": 2.0,
    "metaq.replication.follow_task.CONNECTION": ConnectionOptions(
        connect_timeout_s=1.0, heartbeat_s=1.0, heartbeat_timeout_s=1.0
    ),
    "metaq.replication.store.HOLDINGS_INTERVAL_S": 0.3,
    "metaq.storage.log_dir.SET_SILENCE_S_MAX": 1.5,
}
"""About a tenth of those of a real set, seconds."""


class Walk:
    """One walk: the set, its accounts, and what a fault needs to know."""

    def __init__(self, rig: Replicas, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.ledger = Ledger(rig)
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._load: set[asyncio.Task[None]] = set()
        self._undoing: set[asyncio.Task[None]] = set()
        self.busy: set[int] = set()
        """Replicas that are down, or on their way."""
        self.ill: set[int] = set()
        """Replicas whose disks are full, hang or have failed."""
        self.backup: dict[str, Node] = {}
        self.is_over = False
        self._records: list[SetRecord] = []
        self._ends: dict[tuple[FaultyFileSystem, str], int] = {}
        self._marks: dict[int, tuple[object, int]] = {}

    def note(self, text: str) -> None:
        """Enter what happened."""
        self.ledger.history.append(f"{self._loop.time() - self._began_s:.3f} {text}")

    def undo(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a fault end by itself."""
        task = self._loop.create_task(work)
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def pause(self, low_s: float, high_s: float) -> None:
        await asyncio.sleep(self.rng.uniform(low_s, high_s))

    # -- load -------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Put and read while the block runs; then everything has to be answered."""
        new = self.rig.zookeeper.coordinator
        async with AsyncClient(coordinator=new) as client:
            works = [self._watch(), self._read(), self._read()]
            works += [self._put_each(f"raw{n}", p) for n, p in enumerate(PLACES)]
            works += [self._send_each(client, f"each{n}") for n in (0, 1)]
            works += [self._send_on(client, f"on{n}", PLACES[n]) for n in (0, 3)]
            tasks = [self._loop.create_task(work) for work in works]
            try:
                await self._run_until_failed(tasks, until_s=1.0)
                yield
                self.is_over = True
                await self._run_until_failed(tasks, until_s=SETTLE_S)
            finally:
                self.is_over = True
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _run_until_failed(
        self, tasks: list[asyncio.Task[None]], *, until_s: float
    ) -> None:
        done, late = await asyncio.wait(
            tasks, timeout=until_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()
        if self.is_over:
            assert not late, f"not answered within {until_s:g} s: {late}"

    async def _ask(self, number: int, command: bytes) -> bytes:
        """Return the answer of a replica; b"" where there is none."""
        if self.rig[number].broker is None:
            return b""
        try:
            async with asyncio.timeout(ASK_S):
                return await self.rig.ask(number, command)
        except (OSError, asyncio.IncompleteReadError):
            return b""

    def _any_running(self) -> int:
        running = [each.number for each in self.rig.running]
        return random.choice(running) if running else 0

    async def _put_each(self, sender: str, place: str) -> None:
        """Put one message after the other, each once."""
        for number in count():
            if self.is_over:
                return
            target = self.rig.leader() or self._any_running()
            if not target or not self.rig.running:
                await asyncio.sleep(0.05)
                continue
            data = b"%s:%d:" % (sender.encode(), number) + b"x" * random.randrange(300)
            self.ledger.tried[sender].append(data)
            head = b"put %s %d 0 9\r\n" % (place.encode(), len(data))
            answer = await self._ask(target, head + data)
            if answer.startswith(b"result 200 "):
                offset = int(answer.split(b"\r\n", 1)[1].split()[2])
                self.ledger.ack(place, offset, data)
            elif answer.endswith((b"[not-leader]", b"[too-few-replicas]")):
                self.ledger.refused.add(data)
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.01)

    async def _send_each(self, client: AsyncClient, sender: str) -> None:
        """Send one message after the other to any partition; none may fail."""
        async with client.producer(timeout_s=SEND_S) as producer:
            for number in count():
                if self.is_over:
                    return
                data = b"%s:%d:" % (sender.encode(), number)
                data += b"y" * random.randrange(400)
                self.ledger.tried[sender].append(data)
                result = await producer.send("test", data)
                place = f"test {result.partition.partition}"
                self.ledger.ack(place, result.offset, data)
                await asyncio.sleep(0.01)

    async def _send_on(self, client: AsyncClient, sender: str, place: str) -> None:
        """Send groups of messages as batches; none may fail."""
        topic, partition = place.split()
        options: dict[str, Any] = {"timeout_s": SEND_S, "in_flight_batches_max": 1}
        async with client.producer(**options) as producer:
            for number in count():
                if self.is_over:
                    return
                group = [
                    b"%s:%d.%d:" % (sender.encode(), number, n) + b"z" * (n * 7)
                    for n in range(random.randrange(1, 12))
                ]
                self.ledger.tried[sender] += group
                sends = [
                    producer.send(topic, data, partition=f"0-{partition}")
                    for data in group
                ]
                for data, result in zip(
                    group, await asyncio.gather(*sends), strict=True
                ):
                    self.ledger.ack(place, result.offset, data)
                await asyncio.sleep(0.02)

    async def _read(self) -> None:
        """Read from any replica, and look where it ends."""
        offsets: dict[tuple[int, str], int] = {}
        while not self.is_over:
            await asyncio.sleep(0.01)
            number, place = self._any_running(), random.choice(PLACES)
            if not number:
                continue
            at = offsets.get((number, place), 0)
            get = b"get %s %d 30000 7\r\n"
            words = place.split()
            get = f"get {words[0]} g {words[1]} {at} 30000 7\r\n".encode()
            answer = await self._ask(number, get)
            if answer.startswith(b"value "):
                data = answer.split(b"\r\n", 1)[1]
                offsets[number, place] = self.ledger.read(number, place, at, data)
            elif random.random() < 0.05:
                offsets[number, place] = 0
            await self._look_at_end(number, place)

    async def _look_at_end(self, number: int, place: str) -> None:
        """The end that a replica says never goes down."""
        replica, disk = self.rig[number], self.rig[number].disk
        before = self._ends.get((disk, place), 0)
        topic, partition = place.split()
        ask = f"offset {topic} g {partition} {1 << 60} 7\r\n".encode()
        answer = await self._ask(number, ask)
        if answer.startswith(b"result 200 ") and replica.disk is disk:
            end = int(answer.split(b"\r\n", 1)[1])
            if end < before:
                self.ledger.wrong.append(
                    f"replica {number} said {before} of {place}, and then {end}"
                )
            key = disk, place
            self._ends[key] = max(end, self._ends.get(key, 0))

    # -- what holds at each moment ----------------------------------------------------

    async def _watch(self) -> None:
        while not self.is_over:
            self.look()
            await asyncio.sleep(0.01)

    def look(self) -> None:
        """Check what can be seen now."""
        if RECORD in self.rig.zookeeper.nodes:
            self._look_at_record(self.rig.record)
        for each in self.rig.running:
            assert each.broker is not None
            if each.broker.failure is not None:
                raise each.broker.failure
            for log in each.broker.context.topics.logs():
                self._look_at_log(each, log)
        assert not self.ledger.wrong, self.ledger.wrong[:5]

    def _look_at_record(self, record: SetRecord) -> None:
        before = self._records[-1] if self._records else record
        if record != before or not self._records:
            self._records.append(record)
            self.note(
                f"record {record.revision} epoch {record.epoch.number} leader"
                f" {record.leader} in_sync {sorted(record.in_sync)}"
            )
        wrong = self.ledger.wrong
        if len(record.in_sync) < record.min:
            wrong.append(f"fewer than {record.min} in sync: {record}")
        if record.revision < before.revision or record.epoch < before.epoch:
            wrong.append(f"record went back: {before} to {record}")

    def forget_records(self) -> None:
        """ZooKeeper was set back."""
        self._records.clear()

    def _look_at_log(self, replica: Replica, log: Any) -> None:
        known, before = self._marks.get(id(log), (log, 0))
        if log.high_watermark < before and known is log:
            self.ledger.wrong.append(
                f"watermark of {log.log_id} of {replica.number} went back from"
                f" {before} to {log.high_watermark}"
            )
        self._marks[id(log)] = log, log.high_watermark
        self.ledger.marks[str(log.log_id)].add(log.high_watermark)

    # -- replicas ---------------------------------------------------------------------

    def healthy(self) -> list[int]:
        """Return replicas that run and that no fault of this walk has touched."""
        running = {each.number for each in self.rig.running}
        return sorted(running - self.busy - self.ill)

    def is_fragile(self, *, but: int = 0) -> bool:
        """Return whether a disk lacks bytes that are promised, or may lack them."""
        others = self.rig.all.keys() - {but}
        return any(self.ledger.flag(k) is not Flag.NONE for k in others)

    def cut_power(self, number: int) -> None:
        """End a machine: its disk has for certain what was synced."""
        self.ledger.has_all_notes = False
        some = keep_random(self.rng.randrange(1 << 30))
        choose = self.rng.choice([keep_none, keep_all, some, some])
        self.kill(number, self.rig[number].disk.crash(choose))
        self.ill.discard(number)

    def kill(self, number: int, disk: FaultyFileSystem | None = None) -> None:
        """Kill a replica now; it comes back by itself."""
        replica = self.rig[number]
        self.busy.add(number)
        left, session = replica.broker, replica.cut_off(disk)
        replica.broker = None
        assert left is not None
        self.undo(self._come_back(number, left, session))

    async def _come_back(self, number: int, left: Any, session: int) -> None:
        await left.stop()
        if left.failure is not None:
            self.ledger.wrong.append(f"replica {number} failed: {left.failure!r}")
        await self.pause(0.0, 1.0)
        if self.rng.random() < 0.7:
            self.rig.zookeeper.reap(session)
            await self.pause(0.0, 1.0)
        await self.bring_up(number)
        # A session ends at some time, also of a life that is over.
        self.rig.zookeeper.reap(session)

    async def bring_up(self, number: int) -> None:
        """Start a replica, again and again."""
        self.note(f"start {number}")
        # After a power cut while it was being added, another may have started it.
        while self.rig[number].broker is None:
            try:
                await self.rig[number].start()
            except MetaqError as error:
                self.note(f"start of {number} failed: {error}")
                await asyncio.sleep(0.2)
        self.note(f"{number} has started")
        self.busy.discard(number)

    # -- the end ----------------------------------------------------------------------

    async def heal(self) -> None:
        """End all faults; the set has to get well by itself."""
        self.note("heal")
        rig, zookeeper = self.rig, self.rig.zookeeper
        if self._undoing:
            _done, late = await asyncio.wait(self._undoing, timeout=SETTLE_S)
            assert not late, f"not undone: {late}"
        zookeeper.refusal = ""
        for each in rig.running:
            each.client.loses = None
            zookeeper.resume(each.client)
        for each in list(rig.running):
            # A disk that has failed is trusted after a start again.
            if failure := store_of(each.node).failure:
                self.note(f"restart {each.number}: {failure}")
                await each.stop()
                await self.bring_up(each.number)
        self.note("healed")
        await until(self.is_well, SETTLE_S, self.describe)
        self.note("well")

    def is_well(self) -> bool:
        """Return whether all are in sync, and puts are taken."""
        leader = self.rig.leader()
        if not leader or self.rig.record.in_sync != {1, 2, 3}:
            return False
        broker = self.rig[leader].broker
        assert broker is not None
        return broker.context.topics.refusal is None

    def has_acked(self) -> bool:
        """Return whether something was acknowledged in each place."""
        return all(self.ledger.acked[name_of(place)] for place in PLACES)

    def describe(self) -> str:
        self.note(self.rig.describe())
        return self.rig.describe()

    async def finish(self) -> None:
        """Wait until all copies are equal, and check the accounts."""
        await until(self._are_equal, SETTLE_S, self.describe)
        for place in PLACES:
            await self._read_all(place)
        self.look()
        self.ledger.check_copies()
        assert not self.ledger.wrong, self.ledger.wrong[:10]

    def _are_equal(self) -> bool:
        ends = set()
        for each in self.rig.running:
            assert each.broker is not None
            logs = each.broker.context.topics.logs()
            found = {
                (str(log.log_id), log.number, log.next_offset, log.high_watermark)
                for log in logs
            }
            if any(log.next_offset != log.high_watermark for log in logs):
                return False
            ends.add(frozenset(found))
        return len(ends) == 1

    async def _read_all(self, place: str) -> None:
        """Read a log from its begin to its end, as a client does."""
        number = self.rig.leader()
        topic, partition = place.split()
        at = 0
        while True:
            get = f"get {topic} g {partition} {at} 100000 7\r\n".encode()
            answer = await self._ask(number, get)
            if not answer.startswith(b"value "):
                break
            at = self.ledger.read(number, place, at, answer.split(b"\r\n", 1)[1])
        last = max(self.ledger.acked[name_of(place)], default=0)
        assert at > last, f"read to {at} of {place}: {answer!r}"


# -- faults ---------------------------------------------------------------------------

Fault = Callable[[Walk], Awaitable[bool]]
"""Does it and returns True, or finds that it may not be done now."""


async def kill(walk: Walk) -> bool:
    """End a process; its disk keeps what was written."""
    if not (there := walk.healthy()):
        return False
    number = walk.rng.choice(there)
    others = walk.rig.record.in_sync - {number}
    if all(walk.ledger.flag(k) is not Flag.NONE for k in others):
        return False  # it alone has all: without its word only an operator's counts
    walk.note(f"kill {number}")
    walk.kill(number)
    return True


async def cut_power(walk: Walk) -> bool:
    """End a machine; its disk has for certain what was synced."""
    if not (there := walk.healthy()) or walk.is_fragile():
        return False
    number = walk.rng.choice(there)
    walk.note(f"cut power of {number}")
    walk.cut_power(number)
    return True


async def cut_all_power(walk: Walk) -> bool:
    """End all machines at once."""
    if len(walk.healthy()) < 2 or walk.is_fragile():
        return False
    there = [each.number for each in walk.rig.running]
    walk.note(f"cut power of all: {there}")
    for number in there:
        walk.cut_power(number)
    return True


async def restart(walk: Walk) -> bool:
    """Stop in good order, and start again."""
    if not (there := walk.healthy()):
        return False
    number = walk.rng.choice(there)
    walk.note(f"restart {number}")
    walk.busy.add(number)

    async def work() -> None:
        await walk.rig[number].stop()
        if (failure := walk.rig[number].failure) is not None:
            walk.ledger.wrong.append(f"replica {number} failed: {failure!r}")
        await walk.pause(0.0, 1.0)
        await walk.bring_up(number)

    walk.undo(work())
    return True


async def expire(walk: Walk) -> bool:
    """End a session of a replica that runs."""
    if not (there := walk.healthy()):
        return False
    number = walk.rng.choice(there)
    walk.note(f"expire {number}")
    walk.rig.zookeeper.expire(walk.rig[number].client)
    return True


async def part_from_zookeeper(walk: Walk) -> bool:
    """Cut one replica off from ZooKeeper for a while."""
    if not (there := walk.healthy()):
        return False
    number = walk.rng.choice(there)
    client, zookeeper = walk.rig[number].client, walk.rig.zookeeper
    walk.note(f"part {number} from ZooKeeper")
    zookeeper.suspend(client)
    session = client.status.session_id

    async def work() -> None:
        await walk.pause(0.1, 1.5)
        if walk.rng.random() < 0.6:
            walk.note(f"session of {number} is over")
            zookeeper.reap(session)
            await walk.pause(0.0, 1.5)
            if client in zookeeper.coordinators:
                zookeeper.expire(client)
        walk.note(f"{number} has ZooKeeper again")
        zookeeper.resume(client)

    walk.undo(work())
    return True


async def lose_an_answer(walk: Walk) -> bool:
    """Have the next change of a replica in ZooKeeper end without an answer."""
    if not (there := walk.healthy()):
        return False
    number, is_carried_out = walk.rng.choice(there), walk.rng.random() < 0.5
    client, zookeeper = walk.rig[number].client, walk.rig.zookeeper
    walk.note(f"lose the next answer to {number}, carried out: {is_carried_out}")
    zookeeper.lose_answer(client, is_carried_out=is_carried_out)

    async def work() -> None:
        await walk.pause(0.2, 2.0)
        client.loses = None
        if client in zookeeper.coordinators:
            zookeeper.resume(client)

    walk.undo(work())
    return True


async def let_lag(walk: Walk) -> bool:
    """Let a replica read an old state of ZooKeeper, until it syncs or writes."""
    if not (there := walk.healthy()):
        return False
    number = walk.rng.choice(there)
    walk.note(f"let {number} lag")
    walk.rig.zookeeper.lag(walk.rig[number].client)
    return True


async def take_zookeeper_away(walk: Walk) -> bool:
    """Stop ZooKeeper, or have it refuse everything, for a while."""
    zookeeper = walk.rig.zookeeper
    if walk.rng.random() < 0.5:
        walk.note("stop ZooKeeper")
        zookeeper.stop()
        await walk.pause(0.1, 2.0)
        zookeeper.start()
    else:
        walk.note("ZooKeeper refuses everything")
        zookeeper.refusal = "quota"
        await walk.pause(0.1, 1.5)
        zookeeper.refusal = ""
    walk.note("ZooKeeper is back")
    return True


async def fill_disk(walk: Walk) -> bool:
    """Let a disk be full for a while."""
    if not (there := walk.healthy()):
        return False
    number = walk.rng.choice(there)
    room = walk.rng.randrange(4000)
    disk = walk.rig[number].disk
    walk.note(f"leave {room} bytes of room on {number}")
    disk.set_capacity(disk.used_bytes() + room)
    walk.ill.add(number)

    async def work() -> None:
        await walk.pause(0.3, 2.0)
        walk.note(f"room on {number}")
        walk.rig[number].disk.set_capacity(CAPACITY_BYTES)
        walk.ill.discard(number)

    walk.undo(work())
    return True


async def hang_disk(walk: Walk) -> bool:
    """Let a disk hang for a while."""
    if not (there := walk.healthy()):
        return False
    number = walk.rng.choice(there)
    disk = walk.rig[number].disk
    walk.note(f"hang the disk of {number}")
    disk.hang()
    walk.ill.add(number)

    async def work() -> None:
        await walk.pause(0.1, 3.0)
        walk.note(f"the disk of {number} goes on")
        disk.go_on()
        walk.ill.discard(number)

    walk.undo(work())
    return True


async def fail_disk(walk: Walk) -> bool:
    """Let a call fail; some time later the machine goes, and is started again."""
    if not (there := walk.healthy()) or walk.is_fragile():
        return False
    number = walk.rng.choice(there)
    disk = walk.rig[number].disk
    walk.note(f"fail the disk of {number}")
    disk.fail_at(disk.calls + walk.rng.randrange(1, 30), errno.EIO)
    walk.ill.add(number)

    async def work() -> None:
        await walk.pause(0.5, 2.0)
        walk.ill.discard(number)
        if number not in walk.busy and walk.rig[number].broker is not None:
            walk.note(f"cut power of {number}")
            walk.cut_power(number)

    walk.undo(work())
    return True


async def break_links(walk: Walk) -> bool:
    """Cut, hold or slow what replicas say to each other, for a while."""
    links = walk.rig.links
    number = walk.rng.choice([1, 2, 3])
    is_isolated = walk.rng.random() < 0.4
    ways = links.of(number) if is_isolated else [walk.rng.choice(links.of(number))]
    kind = walk.rng.choice(["cut", "stall", "half", "slow", "refuse"])
    walk.note(f"{kind} {len(ways)} ways of {number}")
    direction = walk.rng.choice([Direction.TO_SERVER, Direction.TO_CLIENT])
    for way in ways:
        _break(way, kind, direction)

    async def work() -> None:
        await walk.pause(0.1, 2.5)
        walk.note(f"mend {len(ways)} ways of {number}")
        for way in ways:
            way.pass_all()
            way.accept()

    walk.undo(work())
    return True


def _break(way: Proxy, kind: str, direction: Direction) -> None:
    match kind:
        case "cut":
            way.cut()
        case "stall":
            way.stall()
        case "half":
            way.stall(direction)
        case "slow":
            way.trickle(2000, 0.02)
        case "refuse":
            way.refuse()
            way.cut()


async def transfer(walk: Walk) -> bool:
    """Have an operator name the next leader."""
    target = walk.rng.choice([1, 2, 3])
    walk.note(f"transfer to {target}")
    with contextlib.suppress(MetaqError):
        async with walk.rig.operator() as nodes:
            await change_set(
                nodes,
                lambda view, record: plan_transfer(record, view.view.version, target),
            )
    return True


async def wipe(walk: Walk) -> bool:
    """Replace a machine: its directory is empty."""
    healthy = walk.healthy()
    if len(healthy) < 3 or walk.is_fragile() or len(walk.rig.record.in_sync) < 3:
        return False
    number = walk.rng.choice(healthy)
    walk.note(f"wipe {number}")
    walk.ledger.is_certain = False
    walk.kill(number, new_disk())
    return True


def new_disk() -> FaultyFileSystem:
    """Return a disk with an empty directory."""
    disk = FaultyFileSystem(has_loop_syncs=True)
    disk.make_directory(DATA)
    return disk


async def remove_and_add(walk: Walk) -> bool:
    """Take a replica out of the set, and another machine with its number in."""
    leader = walk.rig.leader()
    healthy = [k for k in walk.healthy() if k != leader]
    if len(healthy) < 2 or walk.is_fragile() or len(walk.rig.record.in_sync) < 3:
        return False
    number = walk.rng.choice(healthy)
    walk.note(f"remove {number}")
    walk.busy.add(number)

    async def settle(replicas: set[int]) -> None:
        while True:
            try:
                async with walk.rig.operator() as nodes:
                    await change_set(
                        nodes,
                        lambda view, record: plan_settings(
                            record, view.view.version, replicas=replicas
                        ),
                    )
                return
            except MetaqError as error:
                walk.note(f"not changed to {replicas}: {error}")
                if number in replicas:
                    await asyncio.sleep(0.2)
                else:
                    raise

    async def work() -> None:
        try:
            await settle({1, 2, 3} - {number})
        except MetaqError:
            walk.busy.discard(number)
            return
        await walk.pause(0.0, 1.0)
        await walk.rig[number].stop()
        walk.ledger.is_certain = False
        walk.rig[number].disk = new_disk()
        walk.note(f"add {number}")
        await settle({1, 2, 3})
        await walk.bring_up(number)

    walk.undo(work())
    return True


async def back_up(walk: Walk) -> bool:
    """Keep what ZooKeeper has."""
    walk.backup = walk.rig.zookeeper.tree()
    walk.note(f"back up ZooKeeper: revision {walk.rig.record.revision}")
    return True


async def set_back(walk: Walk) -> bool:
    """Set ZooKeeper back to a backup; an operator restores the record."""
    rig = walk.rig
    if len(walk.healthy()) < 3 or walk.is_fragile() or not walk.backup:
        return False
    backup, walk.backup = walk.backup, {}
    walk.note("set ZooKeeper back")
    walk.ledger.is_record_known = False
    rig.zookeeper.restore(backup)
    walk.forget_records()
    await walk.pause(0.0, 1.0)
    for session in {node.owner_session_id for node in backup.values()} - {0}:
        rig.zookeeper.reap(session)
    await asyncio.sleep(1.0)
    for _ in range(20):
        if not any(each.role == ReplicaRole.FROZEN for each in rig.running):
            break
        await _restore_record(walk)
        walk.forget_records()
        await asyncio.sleep(1.0)
    walk.note("the record is back")
    walk.ledger.is_record_known = True
    return True


async def _restore_record(walk: Walk) -> None:
    """Do what `metaq replicas restore` does."""
    rig = walk.rig
    files = {each.number: each.node.replica.file for each in rig.running}
    known = {k: file.record for k, file in files.items() if file.record is not None}
    completed = {k: file.completed for k, file in files.items() if not file.flag}
    try:
        async with rig.operator() as nodes:
            view = (await nodes.read(synced=True)).view
            record = restored_record(
                known,
                view.record,
                completed=completed,
                missing=set(),
                nonce=os.urandom(4).hex(),
            )
            if view.record is None:
                outcome = await nodes.create_record(record, {})
            else:
                change = Change(
                    Purpose.OPERATOR, record, view.version, LeaderNode.DELETED
                )
                outcome = await nodes.propose(change)
            walk.note(f"restore to {record.revision}: {outcome}")
            assert outcome in Outcome
    except ReplicaSetError as error:
        walk.note(f"not restored: {error}")
    except MetaqError as error:
        walk.note(f"not restored now: {error}")


async def make_topic_again(walk: Walk) -> bool:
    """Delete a topic with data, and make it again."""
    new = walk.rig.zookeeper.coordinator
    walk.note("make topic own again")

    async def work() -> None:
        async with AsyncClient(coordinator=new, request_timeout_s=3.0) as client:
            admin = client.admin()
            for step in ("delete", "create", "send"):
                try:
                    if step == "delete":
                        await admin.delete_topic("own")
                    elif step == "create":
                        await admin.create_topic("own", partitions=1)
                    else:
                        async with client.producer(timeout_s=3.0) as producer:
                            for n in range(walk.rng.randrange(1, 20)):
                                await producer.send("own", b"own %d" % n)
                except MetaqError as error:
                    walk.note(f"{step}: {error}")
        walk.note("topic own is there again")

    walk.undo(work())
    return True


FAULTS: Final[tuple[tuple[Fault, int], ...]] = (
    (kill, 6),
    (cut_power, 6),
    (cut_all_power, 1),
    (restart, 4),
    (expire, 4),
    (part_from_zookeeper, 4),
    (lose_an_answer, 3),
    (let_lag, 2),
    (take_zookeeper_away, 2),
    (fill_disk, 3),
    (hang_disk, 3),
    (fail_disk, 2),
    (break_links, 8),
    (transfer, 3),
    (wipe, 5),
    (remove_and_add, 3),
    (back_up, 3),
    (set_back, 8),
    (make_topic_again, 1),
)


POWER: Final = frozenset({cut_power, cut_all_power, fail_disk})
"""Faults by which a replica forgets which batches it has."""


async def direct(walk: Walk, *, length_s: float, has_power: bool) -> None:
    """Do one fault after the other for a time.

    Args:
        walk: the walk.
        length_s: seconds.
        has_power: disks lose what was not synced.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + length_s
    chosen = [each for each in FAULTS if has_power or each[0] not in POWER]
    faults = [fault for fault, _weight in chosen]
    weights = [weight for _fault, weight in chosen]
    while loop.time() < until_s:
        (fault,) = walk.rng.choices(faults, weights)
        if await fault(walk):
            await walk.pause(0.02, 0.8)
        else:
            await asyncio.sleep(0.02)
        walk.look()


def run_walk(
    seed: int, directory: Path, act: Callable[[Walk], Awaitable[None]]
) -> None:
    """Walk over a set under load; its history is in `directory`."""
    kept: list[Walk] = []

    async def main() -> None:
        async with replicas(times=TIMES, settings=SMALL, has_links=True) as rig:
            walk = Walk(rig, seed)
            kept.append(walk)
            try:
                async with walk.load():
                    await act(walk)
                    await walk.heal()
                    await until(walk.has_acked, SETTLE_S, walk.describe)
                await walk.finish()
            finally:
                for each in rig.all.values():
                    each.disk.go_on()
                    each.disk.set_capacity(CAPACITY_BYTES)

    path = directory / f"walk-{seed}.txt"
    try:
        asyncio.run(main())
    except BaseException as error:
        for walk in kept:
            walk.note(f"failed: {error!r}")
        error.add_note(f"seed {seed}; the history is in {path}")
        raise
    finally:
        for walk in kept:
            walk.ledger.write(path)
