"""A log with keys and headers, what is in it, and everything that may happen to it."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from metaq.config.settings import (
    BrokerConfig,
    DeleteKind,
    DeletePolicy,
    LimitsConfig,
    SystemConfig,
    TopicConfig,
)
from metaq.fs import FileSystem
from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, MessageId, Offset, SizeBytes
from metaq.record.flags import encode_payload, encode_properties
from metaq.record.layout import encode_record
from metaq.record.runs import RecordRun
from metaq.storage.cut import cut_log
from metaq.storage.key_builder import KeyBuilder, KeyStep, run_key_step
from metaq.storage.key_index import KEYS_SUFFIX, BlockLists, field_names, keys_path
from metaq.storage.key_lookup import NO_MORE, KeyQuestion, KeySearch
from metaq.storage.log_snapshots import key_logs
from metaq.storage.partition_log import PartitionLog
from metaq.storage.retention_run import remove_segment
from metaq.storage.span_queries import SpanQueries
from tests.rigs.fs import FaultyFileSystem, Operation, keep_random
from tests.rigs.storage import StorageBench, Ticket
from tests.storage.support import DATA, LOG, log_of

START_MS = ID_ZERO_MS + 1_000_000
STEP_MS = 10
INDEX = ("key", "order-id")
NAMES = field_names(INDEX)
BLOCK_BYTES = 300
FAR = Offset(1 << 60)
KEYS = [b"a", b"b&=%", "é\n".encode(), b"", b"key=a"]
"""Few, so that each has many records; some need escapes."""

Rows = list[tuple[RecordRun, frozenset[bytes], int]]
"""Each record, its fields, and its time; oldest first."""


def field_of(key: bytes | None, *headers: tuple[str, bytes]) -> bytes:
    """Return how a payload has a key or a header."""
    return encode_properties(key, headers).encode()


def settings(index: tuple[str, ...] = INDEX) -> BrokerConfig:
    """Return those of a broker with small segments and spans."""
    system = SystemConfig(data_path=str(DATA), segment_bytes_max=2000)
    topic = TopicConfig(name=LOG.topic, index=index, data_path=str(DATA))
    limits = LimitsConfig(free_bytes_min=0, span_bytes_min=64)
    return BrokerConfig(system=system, limits=limits, topics={LOG.topic: topic})


def search(
    fs: FileSystem,
    log: PartitionLog,
    question: KeyQuestion,
    *,
    names: tuple[bytes, ...] = NAMES,
    is_over: Callable[[], bool] = lambda: False,
    piece_bytes: int = 400,
    lists: BlockLists | None = None,
) -> tuple[list[RecordRun], int, set[Offset]]:
    """Ask until nothing is left; return what was found, bytes read, and damage."""
    found, read_bytes, damaged = list[RecordRun](), 0, set[Offset]()
    segments = (*log.segments.sealed, log.readable_active())
    while True:
        queries = SpanQueries(fs, segments, damage=log.damage)
        step = KeySearch(
            queries,
            question,
            names,
            piece_bytes=piece_bytes,
            lists=lists or BlockLists(),
        )
        more = step.run(is_over)
        found += more.records
        read_bytes += more.read_bytes
        damaged |= step.damaged
        assert len(more.records) <= question.limit
        if more.next_offset == NO_MORE:
            return found, read_bytes, damaged
        assert more.next_offset < question.below, "it goes on"
        question = replace(question, below=more.next_offset)


class KeyMachine:
    """A log, its index, and a list of what is in it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fs = FaultyFileSystem(has_syncs=False)
        self.now_ms = START_MS
        self.time_s = 0.0
        self.rows: Rows = []
        self.config = settings()
        self.lists = BlockLists(3)
        self.builder = KeyBuilder(1 << 40, step_bytes=BLOCK_BYTES)
        self._open()

    def _open(self) -> None:
        self.fs.set_wall_ms(self.now_ms + 10**12)
        self.bench = StorageBench(self.fs, self.config)
        self.bench.open()
        self.log = log_of(self.bench)

    # -- what may happen

    def append(self) -> None:
        """Store some records of all kinds."""
        rng, chunks, rows, at = self.rng, list[bytes](), Rows(), self.log.next_offset
        for _ in range(rng.randint(1, 8)):
            payload, flag, fields = self._payload()
            message_id = -1
            if fields or rng.random() < 0.5:
                self.now_ms += rng.choice((0, 1, STEP_MS))
                message_id = self.now_ms - ID_ZERO_MS << ID_MS_SHIFT | len(rows)
            record = encode_record(payload, id=MessageId(message_id), flag=flag)
            chunks.append(record)
            time = self.now_ms if message_id >= 0 else -1
            rows.append((RecordRun(at, record), fields, time))
            at = Offset(at + len(record))
        ticket = Ticket()
        self.log.append(
            chunks,
            size_bytes=sum(map(len, chunks)),
            record_count=len(chunks),
            last_id=MessageId(-1),
            ticket=ticket,
        )
        self.bench.run()
        assert ticket.is_stored
        self.rows += rows

    def _payload(self) -> tuple[bytes, int, frozenset[bytes]]:
        rng = self.rng
        kind, data = rng.randrange(6), rng.randbytes(rng.choice((0, 10, 60, 500)))
        if kind == 0:
            # As of a Java producer: an attribute that looks like a line.
            return *encode_payload(data, "key=a"), frozenset()
        if kind == 1:
            # A line that is none, of a broken producer.
            return b"\0\0\0\x07key=a&x" + data, 3, frozenset()
        key = rng.choice((None, *KEYS))
        headers = [
            (rng.choice(("order-id", "other", "key")), rng.choice(KEYS))
            for _ in range(rng.choice((0, 0, 1, 3)))
        ]
        payload, flag = encode_payload(
            data, rng.choice((None, "", "x\nkey=a")), key, headers
        )
        fields = {field_of(None, each) for each in headers}
        return payload, flag, frozenset(fields | ({field_of(key)} - {b""}))

    def build(self) -> None:
        """Make some blocks; a log that is being cut waits for the one that is made."""
        is_cut = self.rng.random() < 0.1
        for _ in range(self.rng.randint(1, 10)):
            step = self._take_step()
            if step is None:
                return
            work = self.bench.manager.while_uncut(partial(run_key_step, self.fs, step))
            if is_cut:
                self.cut(work)
                return
            self.builder.finish_step(step, work(), self.time_s)
            self.bench.run()

    def build_all(self) -> None:
        """Make all blocks that can be made now."""
        for _ in range(1000):
            step = self._take_step()
            if step is None:
                return
            self.builder.finish_step(step, run_key_step(self.fs, step), self.time_s)

    def _take_step(self) -> KeyStep | None:
        self.time_s += 2.0
        logs = key_logs(self.bench.manager.logs(), self.config)
        return self.builder.take_step(logs, self.time_s)

    def trim(self) -> None:
        """Remove some of the oldest segments, as retention does."""
        sealed = self.log.segments.sealed
        for segment in sealed[: self.rng.randint(1, 3)]:
            kind = self.rng.choice((DeleteKind.DELETE, DeleteKind.ARCHIVE))
            remove_segment(self.fs, segment, DeletePolicy(kind=kind))
            self.log.on_removed(segment, 0)
        start = self.log.log_start_offset
        self.rows = [row for row in self.rows if row[0].offset >= start]

    def cut(
        self, meanwhile: Callable[[], object] = lambda: None, kept: int | None = None
    ) -> None:
        """Drop the end of the log, as after a leader that had less."""
        if not self.rows:
            meanwhile()
            return
        if kept is None:
            kept = self.rng.randint(max(0, len(self.rows) - 30), len(self.rows) - 1)
        end, done = self.rows[kept][0].offset, list[Exception | None]()
        manager = self.bench.manager
        self.log.follow()
        self.bench.run()
        manager.lower_high_watermarks({LOG: end}, done.append)
        cut_log(manager, LOG, end, done.append)
        meanwhile()
        self.bench.run()
        assert done == [None, None]
        self.log.lead()
        self.log.set_bound(FAR)
        self.bench.run()
        del self.rows[kept:]

    def restart(self) -> None:
        """Stop and start."""
        self.bench.close()
        self._open()
        self.log.set_bound(FAR)

    def lose_power(self) -> None:
        """Start after a power cut: the index was not synced."""
        self.fs = self.fs.crash(keep_random(self.rng.randrange(1 << 30)))
        self._open()
        self.log.set_bound(FAR)

    def lose_power_in_a_step(self) -> None:
        """Start after a power cut while a block was written, or a file replaced."""
        step = self._take_step()
        if step is None:
            return
        left, keep = self.rng.randint(1, 40), keep_random(self.rng.randrange(1 << 30))
        calls, fs = itertools.count(), self.fs

        def on_call(_operation: Operation) -> None:
            if next(calls) == left:
                self.fs = fs.crash(keep)

        fs.on_call(on_call)
        run_key_step(fs, step)
        fs.on_call(None)
        if self.fs is fs:
            self.fs = fs.crash(keep)
        self._open()
        self.log.set_bound(FAR)

    def index_files(self) -> list[Path]:
        """Return the index files that there are."""
        paths = [keys_path(s.path, s.base_offset) for s in self.log.segments]
        return [path for path in paths if self.fs.exists(path)]

    def damage(self) -> None:
        """Flip a bit of an index, cut it, or remove it."""
        for path in self.index_files():
            size = self.fs.size_of(path)
            match self.rng.randrange(4):
                case 0 if size:
                    self.fs.flip_bit(path, self.rng.randrange(8 * size))
                case 1:
                    with self.fs.open_append(path, create=False) as file:
                        file.truncate(SizeBytes(self.rng.randint(0, size)))
                case 2:
                    self.fs.unlink(path)

    def change_index(self) -> None:
        """Index something else."""
        index = self.rng.choice((INDEX, ("order-id",), ("other", "key")))
        self.config = settings(index)

    # -- what must hold

    def check(self) -> None:
        """Ask for one field in one way; both ways give what is there."""
        rng = self.rng
        field = rng.choice(
            [field_of(key) for key in KEYS]
            + [field_of(None, ("order-id", key)) for key in KEYS]
            + [field_of(None, ("key", b"a")), field_of(b"missing")]
        )
        times = [START_MS - 1, self.now_ms + 1, START_MS, self.now_ms]
        times += [row[2] for row in rng.sample(self.rows, min(4, len(self.rows)))]
        since = rng.choice((0, rng.choice(times)))
        until = rng.choice((FAR, rng.choice(times)))
        expected = [
            run
            for run, fields, time in reversed(self.rows)
            if field in fields and (time < 0 or since <= time <= until)
        ]
        question = KeyQuestion(
            field, FAR, since, until, rng.choice((1, 3, 1000)), rng.choice((50, 10**6))
        )
        names = field_names(self.config.topics[LOG.topic].index)
        for each in (names, ()):
            rush = rng.choice((0.0, 0.3, 1.0))
            found, _read, damaged = search(
                self.fs,
                self.log,
                question,
                names=each,
                is_over=lambda rush=rush: rng.random() < rush,
                piece_bytes=rng.choice((1, 50, 700)),
                lists=self.lists,
            )
            assert found == expected, (field, since, until, each)
            for base in damaged:
                self.builder.distrust((LOG, base, names))
        assert all(path.suffix != KEYS_SUFFIX for path in self.fs.open_paths())
        names = self.fs.names_in(DATA / str(LOG))
        kept = {path.name for path in self.index_files()}
        assert {name for name in names if name.endswith(KEYS_SUFFIX)} == kept
