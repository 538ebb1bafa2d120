"""Random groups of either thread against what was promised of them."""

import errno
import random
from collections import deque
from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import Final

import pytest

from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig, TopicConfig
from metaq.errors import StorageError
from metaq.fs.group_thread import GroupThread, RunRequests
from metaq.model import LogId, MessageId
from metaq.record.layout import encode_record
from metaq.storage.append_request import Request
from metaq.storage.commit_owner import LOOP_BYTES_MAX
from metaq.storage.log_manager import LogManager
from metaq.storage.partition_log import PartitionLog
from metaq.testing.clock import ManualClock
from tests.rigs.disk import CAPACITY_BYTES
from tests.rigs.fs import FaultyFileSystem, MemorySyncs, keep_none
from tests.rigs.storage import ManualLoop, Ticket
from tests.sampling import examples
from tests.storage.support import DATA, Promise, check_kept

POLL_S: Final = 0.01
RUNS: Final = examples(30)
STEPS: Final = 400
LOOSE: Final = "loose"
"""A topic whose puts are acknowledged before they are synced."""
GONE: Final = LogId("gone", 0)
"""A log whose topic is deleted."""
LOGS: Final = [LogId("test", 0), LogId("test", 1), GONE, LogId(LOOSE, 0)]
SEGMENT_BYTES: Final = 20_000


class World:
    """Logs with a real storage thread, a loop of steps, and a disk that errs."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fs = FaultyFileSystem()
        self.clock = ManualClock()
        self.loop = ManualLoop()
        self.gate = Lock()
        """Held by us: the storage thread does not begin its next piece of work."""
        self.is_closed = False
        """The gate is."""
        self.in_flight: dict[LogId, deque[Promised]] = {each: deque() for each in LOGS}
        self.stored: list[Promise] = []
        self.answer_count = 0
        self.is_deleted = False
        self._posted = Event()
        self.loop.on_post = self._posted.set
        self._next_id = 1
        loose = TopicConfig(name=LOOSE, data_path=str(DATA), unflush_threshold=7)
        settings = BrokerConfig(
            system=SystemConfig(data_path=str(DATA), segment_bytes_max=SEGMENT_BYTES),
            limits=LimitsConfig(free_bytes_min=0),
            topics={LOOSE: loose},
        )
        self.settings = settings
        self.manager = LogManager(
            self.fs,
            self.clock,
            self.loop.post,
            settings,
            start_worker=self._start_worker,
            syncs=self.syncs,
        )
        self.manager.open()

    @property
    def syncs(self) -> MemorySyncs:
        assert self.fs.syncs is not None
        return self.fs.syncs

    def _start_worker(
        self,
        name: str,
        run: RunRequests[Request],
        on_idle: Callable[[int], object],
    ) -> GroupThread[Request]:
        def run_behind_gate(requests: Sequence[Request]) -> bool:
            with self.gate:
                return run(requests)

        return GroupThread(name, run_behind_gate, on_idle)

    # -- steps

    def step(self) -> None:
        """Do one of what can happen on the loop's thread."""
        step = self.rng.choices(
            [
                self.put,
                self.turn,
                self.answer,
                self.settle,
                self.move_gate,
                self.pass_time,
                self.ask,
            ],
            [24, 15, 18, 6, 2, 3, 3],
        )
        step[0]()
        for log_id, log in self.manager.logs().items():
            if log.state.value == "open":
                self.check_watermark(log_id, log)

    def put(self) -> None:
        log_id = self.rng.choice(LOGS)
        if self.is_deleted and log_id == GONE:
            return
        size = self.rng.choice([1, 50, 50, 900, 5000])
        if self.rng.random() < 0.02:
            size = LOOP_BYTES_MAX
        count = self.rng.choice([1, 1, 2, 6])
        chunks = []
        for _ in range(count):
            payload = self.rng.randbytes(size // count + 1)
            chunks.append(encode_record(payload, id=MessageId(self._next_id)))
            self._next_id += 1
        in_flight, is_noted = self.in_flight[log_id], self.rng.random() < 0.1
        try:
            log = self.manager.get_or_create(log_id, self.settings.topic(log_id.topic))
        except StorageError:
            return
        promised = Promised(self, log, b"".join(chunks))
        in_flight.append(promised)
        try:
            log.append(
                chunks,
                size_bytes=len(promised.data),
                record_count=count,
                last_id=MessageId(self._next_id - 1),
                ticket=promised,
                before_write=(lambda _offset: ()) if is_noted else None,
                is_light=self.rng.random() < 0.8,
            )
        except StorageError:
            assert in_flight.pop() is promised

    def turn(self) -> None:
        """Pass a turn of the loop; callbacks may come any number of turns late."""
        self.loop.run_some(self.rng.choice([0, 1, 2, 100]))

    def settle(self) -> None:
        """Have the storage thread do all that it was handed."""
        self.open_gate()
        is_done = Event()
        self.manager.directories()[0].submit(is_done.set)
        while not is_done.is_set():
            self.go_on()

    def answer(self) -> None:
        """Have the disk answer one sync, in any order, before callbacks or after."""
        others = self.syncs.begun
        if others:
            self.answer_count += 1
            if self.rng.random() < 0.005:
                self.fs.fail_at(self.fs.calls + 1, errno.EIO)
            self.syncs.begun = [others.pop(self.rng.randrange(len(others)))]
            self.syncs.reap()
            self.syncs.begun[:0] = others

    def move_gate(self) -> None:
        if self.is_closed:
            self.open_gate()
        else:
            self.is_closed = self.gate.acquire()

    def open_gate(self) -> None:
        if self.is_closed:
            self.is_closed = False
            self.gate.release()

    def go_on(self) -> None:
        """Let loop and disk do what they can, or wait for the storage thread."""
        self._posted.clear()
        self.loop.run()
        if self.syncs.begun:
            self.answer()
        else:
            self._posted.wait(POLL_S)

    def pass_time(self) -> None:
        self.clock.advance_s(self.rng.choice([0.01, 0.1, 1]))
        self.manager.tick(self.clock.monotonic_s())
        self.manager.index()
        self.syncs.is_full = self.rng.random() < 0.2

    def ask(self) -> None:
        """Have something done that is no append, or something go wrong."""
        match self.rng.randrange(12):
            case 0 if not self.is_deleted:
                self.is_deleted = True
                self.manager.delete_topic("gone", lambda _error: None)
            case 1 if self.rng.random() < 0.1:
                self.fs.fail_at(self.fs.calls + self.rng.randint(1, 9), errno.EIO)
            case 2 | 3:
                self.fs.set_capacity(self.rng.randrange(400_000))
            case 4 | 5 | 6 | 7 | 8:
                self.fs.set_capacity(CAPACITY_BYTES)
            case _:
                for log in self.manager.logs().values():
                    log.set_interval_s(self.rng.choice([0, 0.05, 10]))

    def close(self) -> None:
        """Stop with everything that is under way; the disk answers in the end."""
        closed = list[bool]()
        self.manager.close(lambda: closed.append(True))
        for _ in range(self.rng.randrange(5)):
            self.answer()
        self.open_gate()
        while not closed:
            self.go_on()

    # -- checks

    def kept(self) -> tuple[Promise, ...]:
        """Return what was acknowledged, and is in the logs."""
        return tuple(
            each
            for each in self.stored
            if not (self.is_deleted and each.log_id == GONE)
        )

    def check_watermark(self, log_id: LogId, log: PartitionLog) -> None:
        """All that can be read is on the disk."""
        active = log.segments.active
        if log.high_watermark > active.base_offset:
            synced = self.fs.synced_bytes(active.path)
            assert len(synced) >= log.high_watermark - active.base_offset, log_id


class Promised(Ticket):
    """An append that is answered once, in its turn, and truly."""

    def __init__(self, world: World, log: PartitionLog, data: bytes) -> None:
        super().__init__()
        self.data = data
        self._world = world
        self._log = log
        self._offset = log.next_offset

    def on_stored(self) -> None:
        super().on_stored()
        self._take_turn()
        log, world = self._log, self._world
        if log.log_id.topic == LOOSE:
            return
        segment = log.segments.find(self._offset) or log.segments.active
        begin = segment.position_of(self._offset)
        synced = world.fs.synced_bytes(segment.path)
        assert synced[begin : begin + len(self.data)] == self.data
        world.stored.append(Promise(log.log_id, self.data, self, self._offset))

    def on_failed(self, error: StorageError) -> None:
        super().on_failed(error)
        self._take_turn()

    def _take_turn(self) -> None:
        assert self._world.in_flight[self._log.log_id].popleft() is self


@pytest.mark.slow
def test_every_append_is_answered_once_in_its_turn_and_truly(
    rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever thread writes, with any fault, whenever it is stopped."""
    answer_count = 0
    for _ in range(RUNS):
        world = World(rng)
        for _ in range(STEPS):
            world.step()
        world.close()
        assert not any(world.in_flight.values())
        assert world.fs.open_paths() == []
        assert not [each for each in caplog.records if each.exc_info], caplog.text
        disk = world.fs.crash(keep_none)
        check_kept(disk, world.kept(), segment_bytes_max=SEGMENT_BYTES)
        answer_count += world.answer_count
    assert answer_count, "nothing was begun"
