"""Topics that are deleted, and made again, under transactions."""

import errno

import pytest

from metaq.errors import StorageError, TransactionError
from metaq.txn.side_files import DELETIONS
from tests.rigs.fs import (
    FaultyFileSystem,
    Operation,
    crash_points,
    keep_all,
    keep_none,
    keep_random,
)
from tests.txn.support import DATA, JOURNAL, A, B, TransactionBench, opened

LOCAL, XA = "TX:s:1", "XID:1:0a::uq"


def delete(bench: TransactionBench) -> None:
    """Do what a broker does when the topic is deleted by command."""
    told: list[Exception | None] = []
    bench.topics.withdraw(frozenset({"test"}))
    bench.coordinator.note_deletion("test", told.append)
    bench.run()
    assert told == [None]
    bench.logs.manager.delete_topic("test", told.append)
    bench.run()
    assert told == [None, None]
    bench.coordinator.drop_topic("test")


def make_again(bench: TransactionBench) -> None:
    bench.topics.withdraw(frozenset())


def commit(bench: TransactionBench, key: str, *payloads: bytes) -> None:
    bench.begin(key)
    for number, payload in enumerate(payloads):
        bench.put(key, (A, B)[number % 2], payload)
    answer = bench.commit(key)
    bench.run()
    assert answer.is_good


def test_what_was_committed_for_a_deleted_topic_does_not_come_back() -> None:
    """Behind a kill the topic that was made again has what was put to it, no more."""
    bench = opened(FaultyFileSystem())
    commit(bench, LOCAL, b"old", b"old too")
    delete(bench)
    make_again(bench)
    commit(bench, "TX:s:2", b"new", b"new too")
    assert bench.payloads() == [b"new", b"new too"]
    for _ in range(2):
        bench = opened(bench.fs.crash(keep_all))
        assert bench.payloads() == [b"new", b"new too"]
    assert DELETIONS.read(bench.fs, JOURNAL) == {}


def test_what_is_committed_behind_the_deletion_is_there() -> None:
    """Also in the redo file of the time before it, and when the partition was lost."""
    bench = opened(FaultyFileSystem())
    bench.begin(XA)
    bench.put(XA, A, b"prepared before")
    bench.prepare(XA)
    commit(bench, LOCAL, b"old")
    delete(bench)
    with_topic_away = bench.commit(XA, is_two_phase=True)
    bench.run()
    assert "not served any more" in str(with_topic_away.error)
    make_again(bench)
    # The journal is killed before the batch is appended.
    bench.commit(XA, is_two_phase=True)
    bench.write_journal()
    again = opened(bench.fs.crash(keep_all))
    assert again.payloads() == [b"prepared before"]


def test_a_commit_that_waits_for_a_deleted_topic_is_over() -> None:
    """It is not stuck for ever, and not appended when the name is used again."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"x")
    answer = bench.commit(LOCAL)
    bench.write_journal()
    bench.fs.set_capacity(0)
    bench.run()
    assert answer.error is not None
    assert bench.coordinator.figures().stuck_count == 1
    bench.fs.set_capacity(1 << 40)
    delete(bench)
    assert bench.coordinator.figures().stuck_count == 0
    assert bench.coordinator.views() == []
    make_again(bench)
    bench.coordinator.tick()
    bench.run()
    assert bench.payloads() == []
    assert opened(bench.fs.crash(keep_all)).payloads() == []


def test_a_journal_without_records_notes_nothing() -> None:
    """Thousands of topics go without a write where there are no transactions."""
    bench = opened(FaultyFileSystem())
    bench.put_outside(A, b"x")
    bench.run()
    calls = bench.fs.calls
    bench.coordinator.note_deletion("test", lambda _error: None)
    bench.run()
    assert bench.fs.calls == calls


def test_a_deletion_that_cannot_be_noted_is_held_up() -> None:
    """The data stays until it can: a full disk, and a journal that is offline."""
    bench = opened(FaultyFileSystem())
    commit(bench, LOCAL, b"x")
    told: list[Exception | None] = []
    for error in (errno.ENOSPC, None, errno.EIO):
        if error is not None:
            bench.fs.fail_at(bench.fs.calls + 2, error)
        bench.coordinator.note_deletion("test", told.append)
        bench.run()
    assert isinstance(told[0], StorageError)
    assert told[1] is None
    assert isinstance(told[2], StorageError)
    bench.coordinator.disable(StorageError("damaged"))
    bench.coordinator.note_deletion("test", told.append)
    assert isinstance(told[3], TransactionError)


@pytest.mark.slow
@pytest.mark.parametrize("is_kill", [True, False], ids=["kill", "power"])
def test_a_deletion_may_be_cut_anywhere(seed: int, is_kill: bool) -> None:
    """It is done again after the start, like a broker does, and nothing comes back."""
    fs = FaultyFileSystem()
    steps: list[str] = []

    def live() -> None:
        bench = opened(fs)
        commit(bench, LOCAL, b"old", b"old too")
        steps.append("deleting")
        delete(bench)
        steps.append("made again")
        make_again(bench)
        commit(bench, "TX:s:2", b"new", b"new too")
        steps.append("committed")

    found: list[tuple[FaultyFileSystem, str]] = []

    def on_call(operation: Operation) -> None:
        if operation.name not in {"read", "stat", "list", "statvfs", "open"}:
            found.append((fs.snapshot(), steps[-1] if steps else ""))

    if is_kill:
        fs.on_call(on_call)
        live()
        fs.on_call(None)
    else:
        points = crash_points(fs, live, lambda: steps[-1] if steps else "")
        found = [(point.disk, point.progress) for point in points]
    for number, (disk, step) in enumerate(found):
        choosers = [keep_none, *(map(keep_random, range(seed, seed + 4)))]
        for choose in [keep_all] if is_kill else choosers:
            judge(disk.crash(choose), step, number)


def judge(disk: FaultyFileSystem, step: str, number: int) -> None:
    bench = TransactionBench(disk)
    if step == "deleting":
        bench.topics.withdraw(frozenset({"test"}))
    bench.open()
    if step == "deleting":
        delete(bench)
        make_again(bench)
    old, new = [b"old", b"old too"], [b"new", b"new too"]
    wanted = {
        "": ([], old),
        "deleting": ([],),
        "made again": ([], new),
        "committed": (new,),
    }
    assert bench.payloads() in wanted[step], number
    bench.kill()
    again = opened(bench.fs)
    assert again.payloads() in wanted[step], number


def test_the_record_has_a_checksum() -> None:
    """A file that was written is read; any other is refused, by its name."""
    deletions = {"test": {1: 400, 7: 0}, "other": {}}
    data = DELETIONS.encode(deletions)
    assert DELETIONS.decode(data) == deletions
    for broken in (b"", b"[]", data.replace(b"400", b"401"), data[:-9]):
        with pytest.raises(ValueError, match=r"."):
            DELETIONS.decode(broken)
    fs = FaultyFileSystem()
    for path in (DATA, JOURNAL):
        fs.make_directory(path)
    fs.write_atomically(JOURNAL / DELETIONS.name, b"{}")
    with pytest.raises(StorageError, match="deletions damaged: file="):
        DELETIONS.read(fs, JOURNAL)
