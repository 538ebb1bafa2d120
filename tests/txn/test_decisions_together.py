"""Several prepared transactions that one command commits."""

import errno

import pytest

from metaq.errors import StorageError
from metaq.model import MessageId
from metaq.record.layout import HEADER_BYTES
from metaq.txn.side_files import TOGETHER, NamedGroup, encode_fields
from metaq.txn.state import HeuristicOutcome, XaCommandError
from tests.rigs.fs import FaultyFileSystem, Operation, keep_all, keep_none
from tests.txn.support import (
    JOURNAL,
    A,
    B,
    Reader,
    TransactionBench,
    content,
    opened,
    payloads_of,
)

X1, X2, X3 = (f"XID:1:0{n}::uq" for n in range(1, 4))

GOLDEN = b"""{
 "version": 1,
 "together": [
  {
   "XID:1:01::uq": 7,
   "XID:1:02::uq": 6755399441055744
  },
  {
   "XID:1:03::uq": 8
  }
 ],
 "crc": 3479797615
}"""


def prepared(bench: TransactionBench, *keys: str, size: int = 1) -> None:
    """Prepare transactions, each with a message to either partition."""
    for key in keys:
        bench.begin(key)
        for log_id in (A, B):
            bench.put(
                key, log_id, b"%b to %d " % (key.encode(), log_id.partition) * size
            )
        bench.prepare(key)
    bench.run()


def code_of(error: object) -> int | None:
    assert error is None or isinstance(error, XaCommandError)
    return None if error is None else error.code


def test_the_side_file_has_these_bytes_for_ever() -> None:
    """A start after an update reads what the broker before it wrote."""
    groups: list[NamedGroup] = [
        {X1: MessageId(7), X2: MessageId(6755399441055744)},
        {X3: MessageId(8)},
    ]
    assert TOGETHER.encode(groups) == GOLDEN
    assert TOGETHER.decode(GOLDEN) == groups


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", GOLDEN[:-2], GOLDEN.replace(b": 7", b": 8"),
        encode_fields({"together": [["XID:1:01::uq"]]}),
        encode_fields({"together": 1}), encode_fields({"outcomes": []}),
    ],
)  # fmt: skip
def test_a_side_file_that_makes_no_sense_is_damage(data: bytes) -> None:
    """Nothing is guessed: a half of a decision would be one."""
    fs = FaultyFileSystem()
    opened(fs).kill()
    fs.write_atomically(JOURNAL / TOGETHER.name, data)
    with pytest.raises(StorageError, match=r"together damaged: file=.*together"):
        TOGETHER.read(fs, JOURNAL)
    with pytest.raises(StorageError, match="together damaged"):
        opened(fs)


@pytest.mark.parametrize("size", [1, 9000])
def test_a_reader_sees_all_of_them_in_one_step(size: int) -> None:
    """Whatever is put beside them, and also where each is large."""
    bench = opened(FaultyFileSystem(), file_bytes_max=300)
    readers = {log_id: Reader(bench, log_id) for log_id in (A, B)}
    keys = [X1, X2, X3]
    prepared(bench, *keys, size=size)
    bench.put_outside(A, b"before")
    answers = bench.commit_together(*keys)
    bench.put_outside(A, b"behind")
    bench.run()
    assert all(answer.is_good for answer in answers.values())
    for log_id, reader in readers.items():
        data = content(bench, log_id)
        batches = [p for p in payloads_of(data, 0) if p.startswith(b"XID")]
        assert [p[: len(X1)].decode() for p in batches] == keys
        reader.check(data, batches)
    # One after the other is seen: the reader looks often enough.
    alone = ("XID:1:0a::uq", "XID:1:0b::uq")
    prepared(bench, *alone)
    for key in alone:
        bench.commit(key, is_two_phase=True)
        bench.run()
    data = content(bench, B)
    with pytest.raises(AssertionError):
        readers[B].check(data, payloads_of(data, 0)[-2:])


def test_what_a_partition_refuses_keeps_all_of_them_prepared() -> None:
    """Nothing is written, and nothing decided."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    prepared(bench, X1, X2, size=100)
    bench.topics.withdraw(frozenset({"test"}))
    answers = bench.commit_together(X1, X2)
    bench.run()
    assert [code_of(answers[key].error) for key in (X1, X2)] == [-7, -7]
    assert bench.payloads() == []
    bench.topics.withdraw(frozenset())
    assert set(bench.coordinator.recover(None)) == {X1, X2}
    assert TOGETHER.read(fs, JOURNAL) == []
    again = bench.commit_together(X1, X2)
    bench.run()
    assert all(answer.is_good for answer in again.values())


def test_a_partition_takes_all_of_them_or_none() -> None:
    """Below its limit all, though only the first one ends below it."""
    bench = opened(FaultyFileSystem(), log_bytes_max=1000, segment_bytes_max=1000)
    prepared(bench, X1, X2, size=80)
    bench.put_outside(A, bytes(1950 - HEADER_BYTES))
    bench.run()
    both = bench.commit_together(X1, X2)
    bench.run()
    assert both[X1].is_good
    assert both[X2].is_good
    stored = len(content(bench, A))
    assert stored > 2000
    prepared(bench, X3, size=80)
    full = bench.commit_together(X3)
    bench.run()
    assert code_of(full[X3].error) == -7
    assert "expected less than 2000 bytes" in str(full[X3].error)
    assert len(content(bench, A)) == stored


def test_without_room_for_the_side_file_they_stay_prepared() -> None:
    """Nothing is decided, and either decision can follow."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    prepared(bench, X1, X2, X3)
    fs.set_capacity(0)
    answers = bench.commit_together(X1, X2)
    bench.run()
    fs.set_capacity(1 << 40)
    assert [code_of(answers[key].error) for key in (X1, X2)] == [-7, -7]
    assert "still prepared" in str(answers[X1].error)
    gone = bench.rollback(X1)
    rest = bench.commit_together(X2, X3)
    bench.run()
    assert gone.is_good
    assert all(answer.is_good for answer in rest.values())
    assert len(bench.payloads()) == 4
    again = opened(fs.crash(keep_none))
    assert len(again.payloads()) == 4
    assert again.coordinator.recover(None) == []


def test_a_commit_record_without_room_is_known_after_a_restart() -> None:
    """The side file is there, and says that all are committed: none is answered so."""
    fs = FaultyFileSystem()
    bench = opened(fs, file_bytes_max=200)
    prepared(bench, X1, X2)

    def fill(operation: Operation) -> None:
        if operation.name == "rename" and TOGETHER.name in str(operation.path):
            fs.set_capacity(0)

    fs.on_call(fill)
    answers = bench.commit_together(X1, X2)
    bench.run()
    fs.on_call(None)
    fs.set_capacity(1 << 40)
    assert [code_of(answers[key].error) for key in (X1, X2)] == [-7, -7]
    assert "known after a restart" in str(answers[X2].error)
    assert bench.payloads() == []
    assert len(opened(fs.crash(keep_all)).payloads()) == 4


def test_a_name_that_is_out_of_date_commits_nothing() -> None:
    """A key may be used again while the side file still has it."""
    fs = FaultyFileSystem()
    bench = opened(fs)
    prepared(bench, X1, X2)
    bench.commit_together(X1, X2)
    bench.run()
    bench.clock.advance_s(1)
    prepared(bench, X1)
    assert set(TOGETHER.read(fs, JOURNAL)[0]) == {X1, X2}
    again = opened(fs.crash(keep_all), clock=bench.clock)
    assert again.coordinator.recover(None) == [X1]
    assert len(again.payloads()) == 4


def test_each_gets_the_answer_that_it_would_get_alone() -> None:
    """One that cannot be committed does not hold up the others."""
    local, unknown, unprepared, rolled_back = "TX:s:1", "XID:1:0a::uq", X2, X3
    bench = opened(FaultyFileSystem())
    prepared(bench, X1, rolled_back)
    bench.decide(rolled_back, HeuristicOutcome.ROLLBACK)
    for key in (unprepared, local):
        bench.begin(key)
        bench.put(key, A, b"open")
    bench.run()
    answers = bench.commit_together(X1, unknown, unprepared, rolled_back)
    bench.run()
    codes = {key: code_of(answer.error) for key, answer in answers.items()}
    assert codes == {X1: None, unknown: -4, unprepared: -6, rolled_back: 6}
    (refused,) = bench.commit_together(local).values()
    assert "has not been started" in str(refused.error)
    assert bench.commit(local).error is None
    bench.run()
    assert len(bench.payloads()) == 3


def test_asked_again_it_is_answered_with_the_end_and_nothing_is_doubled() -> None:
    """Over a connection that was lost, and over another coordinator that races it."""
    bench = opened(FaultyFileSystem())
    prepared(bench, X1, X2)
    first = bench.commit_together(X1, X2)
    second = bench.commit_together(X2, X1)
    alone = bench.commit(X1, is_two_phase=True)
    with pytest.raises(XaCommandError, match="Cannot call rollback now"):
        bench.rollback(X2)
    bench.run()
    assert all(a.is_good for a in (*first.values(), *second.values(), alone))
    assert len(bench.payloads()) == 4
    third = bench.commit_together(X1, X2)
    assert [code_of(answer.error) for answer in third.values()] == [-4, -4]


def test_what_a_start_cannot_append_is_seen_in_one_step_later() -> None:
    """A start finds which belong together, as long as one of them waits."""
    fs = FaultyFileSystem()
    bench = opened(fs, file_bytes_max=200)
    prepared(bench, X1, X2)
    bench.commit_together(X1, X2)
    bench.write_journal()
    disk = fs.crash(keep_all)
    for _ in range(2):
        bench = TransactionBench(disk)
        bench.topics.withdraw(frozenset({"test"}))
        bench.open()
        assert bench.coordinator.figures().stuck_count == 2
        assert bench.payloads() == []
        disk = bench.fs.crash(keep_all)
    refused = bench.coordinator.figures().counters.failed
    bench.coordinator.tick()
    # Each of two batches of two transactions once.
    assert bench.coordinator.figures().counters.failed == refused + 4
    reader = Reader(bench, B)
    bench.topics.withdraw(frozenset())
    bench.coordinator.tick()
    bench.run()
    data = content(bench, B)
    assert len(payloads_of(data, 0)) == 2
    reader.check(data, payloads_of(data, 0))
    bench.close()
    assert TOGETHER.read(bench.fs, JOURNAL) == []


def test_a_topic_that_is_deleted_beside_them_stays_empty() -> None:
    """The deletion is noted after their records; a crash may leave any part of both."""
    fs = FaultyFileSystem()
    bench = opened(fs, file_bytes_max=200)
    prepared(bench, X1, X2)
    told: list[Exception | None] = []
    answers = bench.commit_together(X1, X2)
    bench.topics.withdraw(frozenset({"test"}))
    bench.coordinator.note_deletion("test", told.append)
    bench.run()
    bench.logs.manager.delete_topic("test", told.append)
    bench.run()
    assert told == [None, None]
    assert [code_of(answers[key].error) for key in (X1, X2)] == [-7, -7]
    again = opened(bench.fs.crash(keep_all))
    assert again.payloads() == []
    assert again.coordinator.recover(None) == []


def test_a_failed_sync_of_the_side_file_takes_the_journal_offline() -> None:
    """Which of the two files a start finds is not known, and not guessed."""
    trial = opened(FaultyFileSystem())
    prepared(trial, X1, X2)
    before = trial.fs.calls
    trial.commit_together(X1, X2)
    trial.write_journal()
    syncs = [
        number
        for number, call in enumerate(trial.fs.log, start=1)
        if number > before and call.name in {"sync", "sync_directory"}
    ]
    for number in syncs[:2]:
        fs = FaultyFileSystem()
        bench = opened(fs)
        prepared(bench, X1, X2)
        fs.fail_at(number, errno.EIO)
        answers = bench.commit_together(X1, X2)
        bench.run()
        assert [code_of(answers[key].error) for key in (X1, X2)] == [-7, -7]
        assert bench.coordinator.figures().offline_cause is not None
        for choose in (keep_all, keep_none):
            again = opened(fs.crash(choose))
            prepared_keys = set(again.coordinator.recover(None))
            if prepared_keys:
                assert prepared_keys == {X1, X2}
            assert len(again.payloads()) == (0 if prepared_keys else 4)
