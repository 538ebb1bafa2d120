"""Transactions on a disk in memory, with threads and a loop that the test runs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from metaq.broker.topics import Topics
from metaq.broker.transactions import ServedLogs
from metaq.config.settings import BrokerConfig, LimitsConfig, SystemConfig, TopicConfig
from metaq.errors import MetaqError, StorageError
from metaq.fs.group_thread import RunRequests
from metaq.model import LogId
from metaq.record.ids import IdGenerator
from metaq.record.layout import encode_record
from metaq.storage.log_state import LogState
from metaq.testing.clock import ManualClock
from metaq.txn.coordinator import TransactionCoordinator
from metaq.txn.figures import TransactionLimits
from metaq.txn.journal import Journal, JournalRequest
from metaq.txn.opening import JournalOpening, OpenedJournal
from metaq.txn.records import encode_put
from metaq.txn.state import HeuristicOutcome
from metaq.txn.transaction import PutRun
from tests.rigs.fs import FaultyFileSystem, keep_all
from tests.rigs.storage import StepWorker, StorageBench, Ticket

DATA = Path("/data")
JOURNAL = DATA / "transactions"
TOPIC = TopicConfig(name="test", partition_count=2, data_path=str(DATA))
A, B = LogId("test", 0), LogId("test", 1)


class PutTicket:
    """Outcome of a put."""

    def __init__(self) -> None:
        self.is_written = False
        self.error: StorageError | None = None

    @property
    def is_done(self) -> bool:
        """Tell whether it was answered."""
        return self.is_written or self.error is not None

    def on_journalled(self, _position: int) -> None:
        self.is_written = True

    def on_refused(self, error: StorageError) -> None:
        self.error = error


@dataclass
class Answer:
    """Outcome of a decision."""

    is_done: bool = False
    vote: int | None = None
    error: MetaqError | None = None

    def on_done(self, error: MetaqError | None) -> None:
        assert not self.is_done, "answered twice"
        self.is_done, self.error = True, error

    def on_voted(self, vote: int) -> None:
        self.on_done(None)
        self.vote = vote

    @property
    def is_good(self) -> bool:
        return self.is_done and self.error is None


class TransactionBench:
    """Partition logs, a journal and a coordinator on one disk."""

    def __init__(
        self,
        fs: FaultyFileSystem,
        *,
        clock: ManualClock | None = None,
        sync_mode: int = 1,
        file_bytes_max: int = 1 << 20,
        limits: TransactionLimits | None = None,
        log_bytes_max: int = 0,
        unflush_threshold: int = 0,
        topics: Mapping[str, TopicConfig] | None = None,
        **system: int,
    ) -> None:
        self.fs = fs
        self.clock = clock or ManualClock()
        fs.set_wall_ms(self.clock.wall_ms())
        config = BrokerConfig(
            system=SystemConfig(data_path=str(DATA), partition_count=4, **system),  # type: ignore[arg-type]
            limits=LimitsConfig(free_bytes_min=0, log_bytes_max=log_bytes_max),
            topics=topics
            or {"test": replace(TOPIC, unflush_threshold=unflush_threshold)},
        )
        self.logs = StorageBench(fs, config, self.clock, is_late=True)
        self.workers: list[StepWorker] = []
        self.journal = Journal(
            fs,
            self.clock,
            self.logs.loop.post,
            self.logs.loop.post,
            JOURNAL,
            sync_mode=sync_mode,
            checkpoints_max=3,
            file_bytes_max=file_bytes_max,
            slow_sync_ms=2000,
            start_worker=self._start_worker,
        )
        self.topics = Topics(config, self.logs.manager, choose=lambda _count: 0)
        self.coordinator = TransactionCoordinator(
            fs,
            self.clock,
            self.journal,
            ServedLogs(self.topics).find,
            limits
            or TransactionLimits(
                open_count_max=100_000,
                held_bytes_max=1 << 30,
                timed_count_max=100_000,
                timeout_s_max=60,
                journal_bytes_max=1 << 40,
            ),
        )
        self.opened: OpenedJournal
        self.is_settled = False

    def _start_worker(self, name: str, run: RunRequests[JournalRequest]) -> StepWorker:
        self.workers.append(StepWorker(name, run))  # type: ignore[arg-type]
        return self.workers[-1]

    def open(self) -> None:
        """Recover everything; raises what a start would."""
        self.logs.open()
        try:
            found = JournalOpening(self.fs, self.journal, self.logs.manager).run()
        except StorageError:
            self.journal.abandon()
            self.logs.close()
            raise
        self.go_on(found)

    def go_on(self, found: OpenedJournal) -> None:
        """Serve transactions, with what an opening has found."""
        self.opened = found
        self.ids = IdGenerator(self.clock, 0, self.logs.manager.last_message_id())  # type: ignore[arg-type]
        self.ids.advance_to(self.opened.next_id)
        self.journal.start()
        self.coordinator.restore(self.opened, self._on_settled)
        self.run()
        assert self.is_settled

    def _on_settled(self) -> None:
        self.is_settled = True

    def write_journal(self) -> None:
        """Have written what is queued; the loop does not hear of it yet."""
        self.journal.hand_over()
        for worker in self.workers:
            worker.step()

    def run(self) -> None:
        """Run threads and loop until nothing is queued."""
        self.fs.set_wall_ms(self.clock.wall_ms())
        while True:
            self.logs.run()
            if not any(worker.queue for worker in self.workers):
                return
            for worker in self.workers:
                worker.step()

    def close(self) -> None:
        """Stop cleanly."""
        closed: list[bool] = []
        self.coordinator.close(lambda: closed.append(True))
        self.run()
        assert closed
        assert all(worker.is_stopped for worker in self.workers)
        self.logs.close()

    def kill(self) -> None:
        """Close what is open, as the end of a process does; nothing is written."""
        self.journal.abandon()
        for log in self.logs.manager.logs().values():
            log.writer.abandon()
        for directory in self.logs.manager.directories():
            directory.unlock()

    # -- commands

    def begin(self, key: str, owner: object = None, timeout_s: int = 0) -> None:
        self.coordinator.begin(key, owner, timeout_s)

    def put(
        self, key: str, log_id: LogId, payload: bytes, owner: object = None
    ) -> PutTicket:
        tx = self.coordinator.find_for_put(key, owner)
        self.coordinator.check_room(1, len(payload))
        message_id = self.ids.reserve(1)
        command = b"put %b %d %d 0 -1 %b 1\r\n%b" % (
            log_id.topic.encode(), log_id.partition, len(payload), key.encode(), payload
        )  # fmt: skip
        ticket = PutTicket()
        record = encode_record(payload, id=message_id)
        self.coordinator.put(
            tx,
            PutRun(
                log_id,
                (record,),
                len(record),
                1,
                message_id,
                (encode_put(message_id, command),),
            ),
            ticket,
        )
        return ticket

    def prepare(self, key: str) -> Answer:
        answer = Answer()
        self.coordinator.prepare(key, None, answer.on_voted, answer.on_done)
        return answer

    def commit(
        self, key: str, owner: object = None, *, is_two_phase: bool = False
    ) -> Answer:
        answer = Answer()
        self.coordinator.commit(key, owner, answer.on_done, is_two_phase=is_two_phase)
        return answer

    def commit_together(self, *keys: str) -> dict[str, Answer]:
        """Commit several by one command; all are answered in the same moment."""
        answers = {key: Answer() for key in keys}

        def on_done(outcomes: Sequence[MetaqError | None]) -> None:
            for key, error in zip(keys, outcomes, strict=True):
                answers[key].on_done(error)

        self.coordinator.commit_together(keys, on_done)
        return answers

    def rollback(self, key: str, owner: object = None) -> Answer:
        answer = Answer()
        self.coordinator.rollback(key, owner, answer.on_done)
        return answer

    def decide(self, key: str, outcome: HeuristicOutcome) -> Answer:
        answer = Answer()
        self.coordinator.decide(key, outcome, answer.on_done)
        return answer

    def forget(self, key: str) -> Answer:
        answer = Answer()
        self.coordinator.forget(key, answer.on_done)
        return answer

    def put_outside(self, log_id: LogId, *payloads: bytes) -> None:
        """Put without a transaction; no note is taken of the outcome."""
        topic = self.logs.config.topic(log_id.topic)
        log = self.logs.manager.get_or_create(log_id, topic)
        self.logs.next_id = self.ids.reserve(len(payloads))
        with suppress(StorageError):
            self.logs.append(log, payloads, Ticket())

    # -- what is there

    def payloads(self, *log_ids: LogId) -> list[bytes]:
        """Return what readers see in partitions, in order; all of them by default."""
        found: list[bytes] = []
        for log_id, log in sorted(self.logs.manager.logs().items()):
            if not log_ids or log_id in log_ids:
                found += payloads_of(content(self, log_id), log.log_start_offset)
        return found


class Reader:
    """Looks at a partition at each moment at which more of it is readable."""

    def __init__(self, bench: TransactionBench, log_id: LogId) -> None:
        topic = bench.logs.config.topic(log_id.topic)
        self.log = bench.logs.manager.get_or_create(log_id, topic)
        self.ends: list[int] = []
        """High watermarks, in their order."""
        self._look()

    def _look(self) -> None:
        self.ends.append(self.log.high_watermark)
        if self.log.state is LogState.OPEN:
            self.log.wait(self.log.high_watermark, self._look)

    def check(self, data: bytes, batches: Iterable[bytes]) -> None:
        """Assert that all of these payloads were readable at once, or none.

        Args:
            data: the content of the partition, from offset 0 on.
            batches: payloads that are one append.
        """
        places = [data.index(payload) - 20 for payload in batches]
        ends = [at + 20 + len(each) for at, each in zip(places, batches, strict=True)]
        inside = [end for end in self.ends if min(places) < end < max(ends)]
        assert not inside, (inside, min(places), max(ends))


def content(bench: TransactionBench, log_id: LogId) -> bytes:
    """Return the readable bytes of a partition."""
    manager = bench.logs.manager
    position, end = manager.readable_range(log_id)
    parts = b""
    start = position
    while start + len(parts) < end:
        data = manager.read_back(log_id, start + len(parts), 1 << 20)  # type: ignore[arg-type]
        assert data
        parts += data
    return parts


def payloads_of(data: bytes, _start: int) -> list[bytes]:
    found, position = [], 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        found.append(data[position + 20 : position + 20 + length])
        position += 20 + length
    assert position == len(data)
    return found


def opened(fs: FaultyFileSystem, **options: object) -> TransactionBench:
    """Return an open bench on a disk; its parent directory is made."""
    bench = TransactionBench(fs, **options)  # type: ignore[arg-type]
    bench.open()
    return bench


def each_once(payloads: Iterable[bytes]) -> set[bytes]:
    """Return payloads as a set; none is there twice."""
    found = list(payloads)
    assert len(found) == len(set(found)), sorted(found)
    return set(found)


@dataclass(frozen=True)
class Story:
    """Promises about one transaction."""

    puts: frozenset[bytes] = frozenset()
    """Acknowledged or not: its payloads."""
    is_committed: bool = False
    is_rolled_back: bool = False
    is_prepared: bool = False
    was_asked: bool = False
    """A decision was asked for; the other fields show its outcome."""
    together: frozenset[str] = frozenset()
    """Keys that are committed by one command, its own among them."""
    is_synced: bool = False
    """All that was answered of it was synced since, in a mode that answers before."""


Stories = dict[str, Story]
"""By key."""


def check_stories(
    bench: TransactionBench, stories: Stories, *, keeps_last: bool = True
) -> None:
    """Hold what recovery has made of a disk against what was promised.

    Each transaction is there as a whole or not at all, and never twice; what is still
    prepared can be committed, and is there then. A commit that was answered holds.

    Args:
        bench: open, after the crash.
        stories: what was promised.
        keeps_last: whether prepares and rollbacks hold that were answered and not
            synced: in flush mode 1 there are none, and a kill loses nothing.
    """
    views = bench.coordinator.views()
    in_doubt = {view.key for view in views if view.state == "prepared"}
    ended = {f"{view.key} {view.state}" for view in views}
    assert in_doubt <= set(bench.coordinator.recover(None))
    found = each_once(bench.payloads())
    for key, story in stories.items():
        there = story.puts & found
        assert there in (story.puts, frozenset()), (key, there, story)
        if story.is_committed:
            assert there == story.puts, (key, story)
        for other in story.together:
            is_there = bool(stories[other].puts & found)
            assert is_there is bool(there), (key, there, other, is_there)
        if story.is_rolled_back:
            assert not there, (key, story)
        holds = keeps_last or story.is_synced
        if story.is_prepared and not story.was_asked and holds:
            assert key in in_doubt, (key, story)
        if f"{key} heuristic commit" in ended:
            assert there == story.puts, (key, story)
        if key in in_doubt:
            assert not there, (key, story)
            assert not (story.is_rolled_back and holds), (key, story)
    for key in in_doubt:
        assert stories[key].puts, key
        answer = bench.commit(key, is_two_phase=True)
        bench.run()
        assert answer.is_good, answer
    found = each_once(bench.payloads())
    for key in in_doubt:
        assert stories[key].puts <= found, key


def killed(bench: TransactionBench, **options: object) -> TransactionBench:
    """Return the bench of the start after a kill."""
    return opened(bench.fs.crash(keep_all), **options)
