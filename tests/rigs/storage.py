"""Storage threads and an event loop that a test runs step by step."""

import random
from collections import deque
from collections.abc import Callable, Sequence

from metaq.clock import Clock
from metaq.config.settings import BrokerConfig
from metaq.errors import StorageError
from metaq.fs import FileSystem
from metaq.fs.group_thread import RunRequests
from metaq.model import MessageId
from metaq.record.layout import encode_record
from metaq.storage.append_request import AppendRequest, AppendTicket, Request
from metaq.storage.log_manager import LogManager
from metaq.storage.partition_log import PartitionLog
from metaq.testing.clock import ManualClock
from tests.rigs.fs import FaultyFileSystem
from tests.sampling import SEED


class ManualLoop:
    """Callbacks, which `run` runs in the order in which they were posted."""

    def __init__(self) -> None:
        self._callbacks: deque[Callable[[], None]] = deque()
        self.on_post: Callable[[], object] = lambda: None
        """Called at each post, on the posting thread."""

    def post(self, callback: Callable[[], None]) -> None:
        """Queue a callback, like `loop.call_soon_threadsafe`."""
        self._callbacks.append(callback)
        self.on_post()

    def names(self) -> tuple[str, ...]:
        """Return the names of the queued callbacks, oldest first."""
        found = (getattr(each, "func", each) for each in self._callbacks)
        return tuple(getattr(each, "__qualname__", "") for each in found)

    def run(self) -> None:
        """Run all queued callbacks, and those that these queue."""
        while self._callbacks:
            self._callbacks.popleft()()

    def run_some(self, count: int) -> None:
        """Run the oldest `count` callbacks."""
        for _ in range(min(count, len(self._callbacks))):
            self._callbacks.popleft()()


class StepWorker:
    """A storage thread without a thread: `step` carries out all queued requests."""

    def __init__(
        self,
        name: str,
        run: RunRequests[Request],
        on_idle: Callable[[int], object] = lambda _count: None,
    ) -> None:
        self.name = name
        self.has_more = False
        """Whether requests that were taken need further turns."""
        self.is_at_work = False
        """Whether a group is being written."""
        self.queue: list[Request] = []
        self.is_stopped = False
        self._run = run
        self._on_idle = on_idle
        self._count = 0

    def start(self) -> None:
        """Do nothing, as there is no thread."""

    def submit(self, *requests: Request) -> None:
        """Queue requests."""
        assert not self.is_stopped, "a request after the end of the thread"
        self.queue += requests

    def stop(self, *requests: Request) -> None:
        """Queue the last requests; no others may follow."""
        self.queue += requests
        self.is_stopped = True

    def step(self) -> None:
        """Carry out all queued requests."""
        while self.queue or self.has_more:
            self.turn()

    def turn(self) -> bool:
        """Write one group, or a step of it; return whether more remains."""
        requests, self.queue = self.queue, []
        self._count += len(requests)
        self.is_at_work = True
        self.has_more = self._run(requests)
        self.is_at_work = False
        if not (self.has_more or self.is_stopped):
            self._on_idle(self._count)
        return self.has_more or bool(self.queue)


class Ticket:
    """Ticket that records the outcome of an append."""

    def __init__(self, log: "list[Ticket] | None" = None) -> None:
        self.is_stored = False
        self.error: StorageError | None = None
        self._order = log

    @property
    def is_answered(self) -> bool:
        """Whether the append was stored or failed."""
        return self.is_stored or self.error is not None

    def on_stored(self) -> None:
        """Record that the append is stored."""
        assert not self.is_answered
        self.is_stored = True
        if self._order is not None:
            self._order.append(self)

    def on_failed(self, error: StorageError) -> None:
        """Record the failure of the append."""
        assert not self.is_answered
        self.error = error
        if self._order is not None:
            self._order.append(self)


class StorageBench:
    """A `LogManager` whose storage threads and loop run step by step.

    With `is_late`, callbacks run late: threads go on before the loop has run the
    callbacks of earlier work. The seed decides, so two benches with the same calls
    behave the same.
    """

    def __init__(
        self,
        fs: FileSystem,
        config: BrokerConfig,
        clock: Clock | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        self.fs = fs
        self.config = config
        self.loop = ManualLoop()
        self._lateness = random.Random(SEED) if is_late else None
        self.workers: list[StepWorker] = []
        self.is_busy = False
        """Whether `run` leaves small groups without their index, as under load."""
        self.next_id = 1
        self.syncs = fs.syncs if isinstance(fs, FaultyFileSystem) else None
        self.manager = LogManager(
            fs,
            clock or ManualClock(),
            self.loop.post,
            config,
            start_worker=self._start_worker,
            syncs=self.syncs,
        )

    def open(self) -> None:
        """Open the logs; new ids are above those on the disk."""
        self.manager.open()
        self.next_id = max(0, self.manager.last_message_id()) + 1

    def append(
        self,
        log: PartitionLog,
        payloads: Sequence[bytes],
        ticket: AppendTicket,
        *,
        is_light: bool = False,
    ) -> bytes:
        """Queue one append with a record per payload; return its bytes."""
        chunks = []
        for payload in payloads:
            chunks.append(encode_record(payload, id=MessageId(self.next_id)))
            self.next_id += 1
        data = b"".join(chunks)
        log.append(
            chunks,
            size_bytes=len(data),
            record_count=len(chunks),
            last_id=MessageId(self.next_id - 1),
            ticket=ticket,
            is_light=is_light,
        )
        return data

    def run(self) -> None:
        """Run the storage threads and the loop until nothing is queued."""
        self._run()
        if not self.is_busy:
            self.manager.index()
            self._run()

    def _run(self) -> None:
        while True:
            if self._lateness is None:
                self.loop.run()
            else:
                self.loop.run_some(self._lateness.choice((0, 1, 100)))
            at_work = [each for each in self.workers if each.queue or each.has_more]
            if self.syncs is not None and self.syncs.begun:
                self.syncs.reap()
            for worker in at_work:
                worker.turn()
            is_syncing = self.syncs is not None and self.syncs.begun
            if not (at_work or self.loop.names() or is_syncing):
                return

    def close(self) -> None:
        """Close the logs."""
        self.manager.close(lambda: None)
        self.run()

    def queued_appends(self) -> int:
        """Return the number of appends that the storage threads have not taken yet."""
        return sum(
            isinstance(request, AppendRequest)
            for worker in self.workers
            for request in worker.queue
        )

    def _start_worker(
        self,
        name: str,
        run: RunRequests[Request],
        on_idle: Callable[[int], object],
    ) -> StepWorker:
        self.workers.append(StepWorker(name, run, on_idle))
        return self.workers[-1]
