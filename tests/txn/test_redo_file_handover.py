"""A directory whose broker was killed at any moment, as a Java broker takes it over."""

import random
from dataclasses import dataclass, field

import pytest

from metaq.model import LogId
from metaq.record.checksum import checksum
from metaq.record.layout import encode_record
from metaq.txn.opening import journal_numbers
from metaq.txn.records import (
    COMMITS,
    OperationRecord,
    PutRecord,
    RecordError,
    RedoOperation,
    decode_put,
    decode_record,
)
from metaq.txn.side_files import read_checkpoint
from tests.rigs.fs import FaultyFileSystem, Operation, keep_all
from tests.sampling import quarter
from tests.txn.support import (
    JOURNAL,
    A,
    B,
    Stories,
    TransactionBench,
    content,
    each_once,
    opened,
    payloads_of,
)
from tests.txn.test_opening_crashes import LIVES, Life, moments

Batches = dict[LogId, bytes]


@dataclass
class JavaStart:
    """The replay of MetaQ 1.4 (docs/metaq-1.4/broker.md 5.7), which ignores ids."""

    logs: Batches
    """Readable messages; batches that it misses come after them."""
    open: dict[str, Batches] = field(default_factory=dict)
    """In flight: rolled back at the end of the start."""
    prepared: dict[str, Batches] = field(default_factory=dict)
    """The answer to RECOVER."""

    def replay(self, fs: FaultyFileSystem) -> None:
        first = read_checkpoint(fs, JOURNAL)
        for number in journal_numbers(fs, JOURNAL):
            path = JOURNAL / f"redo.{number}"
            if number < first.number or not fs.exists(path):
                continue
            data = fs.read_file(path, 1 << 20)  # type: ignore[arg-type]
            position: int = first.position if number == first.number else 0
            while position < len(data):
                try:
                    record, position = decode_record(data, position, len(data))
                except RecordError:
                    break
                self.take(record)

    def take(self, record: PutRecord | OperationRecord) -> None:
        if isinstance(record, PutRecord):
            put = decode_put(record.command)
            batches = self.open.setdefault(record.key, {})
            batches[put.log_id] = batches.get(put.log_id, b"") + encode_record(
                put.payload, id=record.message_id, flag=put.flag
            )
        elif record.operation is RedoOperation.XA_PREPARE:
            self.prepared[record.key] = self.open.pop(record.key)
        else:
            active = self.prepared if record.was_prepared else self.open
            batches = active.pop(record.key, {})
            if record.operation in COMMITS:
                self.commit(batches, record)

    def commit(self, batches: Batches, record: OperationRecord) -> None:
        places = {place.log_id: place for place in record.locations}
        for log_id, data in batches.items():
            log, place = self.logs.get(log_id, b""), places.get(log_id)
            found = b"" if place is None else log[place.offset :][: place.size_bytes]
            if place is None or not found or checksum(found) != place.checksum:
                self.logs[log_id] = log + data


def java_start(disk: FaultyFileSystem) -> JavaStart:
    """Start a Java broker on a disk, in thought."""
    bench = TransactionBench(disk.snapshot())
    bench.logs.open()
    start = JavaStart({log_id: content(bench, log_id) for log_id in (A, B)})
    bench.logs.close()
    start.replay(disk)
    return start


def judge(disk: FaultyFileSystem, stories: Stories) -> None:
    """Hold what a Java broker makes of a disk against what was promised."""
    if not disk.exists(JOURNAL):
        return
    start = java_start(disk)
    found = each_once(payloads_in(start.logs))
    for key, story in stories.items():
        assert story.puts & found in (story.puts, frozenset()), (key, story)
        if story.is_committed:
            assert story.puts <= found, (key, story)
        if story.is_rolled_back or key in start.prepared:
            assert not story.puts & found, (key, story)
        if story.is_prepared and not story.was_asked:
            assert key in start.prepared, (key, story)
    for key, batches in start.prepared.items():
        assert each_once(payloads_in(batches)) == stories[key].puts


def payloads_in(batches: Batches) -> list[bytes]:
    return [one for data in batches.values() for one in payloads_of(data, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("sync_mode", [0, 1, 2])
@LIVES
def test_a_java_broker_takes_over_behind_a_kill_at_every_call(
    rng: random.Random, kind: type[Life], sync_mode: int
) -> None:
    """Each committed transaction is there once, each prepared one is listed whole."""
    for disk, stories in quarter(moments(kind, sync_mode), rng):
        judge(disk.crash(keep_all), stories)


@pytest.mark.slow
def test_a_place_is_right_before_the_batch_is_written() -> None:
    """Also of a second try, when the first one found no room and others went first."""
    key = "TX:s:1"
    bench = opened(FaultyFileSystem())
    bench.begin(key)
    bench.put(key, A, b"x" * 300)
    bench.commit(key)
    bench.put_outside(A, b"in front")
    wrong: list[Batches] = []

    def on_call(_operation: Operation) -> None:
        start = java_start(bench.fs.crash(keep_all))
        if payloads_of(start.logs[A], 0).count(b"x" * 300) != 1:
            wrong.append(start.logs)

    bench.write_journal()
    bench.fs.set_capacity(0)
    bench.fs.on_call(on_call)
    bench.run()
    assert bench.payloads() == []
    bench.fs.set_capacity(1 << 40)
    bench.put_outside(A, b"in front of the second")
    bench.coordinator.tick()
    bench.run()
    bench.fs.on_call(None)
    assert bench.payloads(A) == [b"in front of the second", b"x" * 300]
    assert not wrong


@pytest.mark.slow
def test_places_of_a_group_are_one_write() -> None:
    """One for each partition that they lie in, and right before a batch is written."""
    bench = opened(FaultyFileSystem())
    for number in range(6):
        key = f"TX:s:{number}"
        bench.begin(key)
        for log_id in (A, B):
            bench.put(key, log_id, b"%b %d" % (str(log_id).encode(), number))
        bench.commit(key)
    bench.put_outside(A, b"in front")
    bench.put_outside(B, b"in front")
    wanted = sorted(
        b"%b %d" % (str(log_id).encode(), number)
        for log_id in (A, B)
        for number in range(6)
    )
    wrong: list[list[bytes]] = []
    places: list[Operation] = []

    def on_call(operation: Operation) -> None:
        places.extend([operation] if operation.path.name.startswith("redo") else [])
        start = java_start(bench.fs.crash(keep_all))
        found = sorted(payloads_in(start.logs))
        if [each for each in found if each != b"in front"] != wanted:
            wrong.append(found)

    bench.write_journal()
    bench.fs.on_call(on_call)
    bench.run()
    bench.fs.on_call(None)
    assert not wrong
    assert [each.name for each in places] == ["write", "write"]
    assert bench.payloads(A) == [b"in front", *wanted[:6]]
    assert bench.payloads(B) == [b"in front", *wanted[6:]]
