"""When the journal's thread hears of entries, and of transactions that are over."""

import errno
import random
from contextlib import suppress

import pytest

from metaq.errors import NoSpaceError, TransactionError
from metaq.txn.decisions import DecisionTicket
from metaq.txn.journal import JournalEntry, Slot
from metaq.txn.state import HeuristicOutcome
from tests.rigs.fs import FaultyFileSystem, Operation
from tests.sampling import sample
from tests.txn.support import JOURNAL, A, Answer, PutTicket, TransactionBench, opened

LOCAL = "TX:s:1"
X1, X2, X3, X4 = (f"XID:1:0{n}::uq" for n in range(1, 5))


def test_what_one_turn_of_the_loop_has_shares_a_sync() -> None:
    """The journal's thread is woken once, when the turn is over."""
    bench = opened(FaultyFileSystem())
    (thread,) = bench.workers
    answers = []
    for number in range(10):
        bench.begin(f"TX:s:{number}")
        bench.put(f"TX:s:{number}", A, b"%d" % number)
        answers.append(bench.commit(f"TX:s:{number}"))
    assert thread.queue == []
    bench.logs.run()
    assert len(thread.queue) == 1
    bench.run()
    assert all(answer.is_good for answer in answers)
    assert bench.journal.figures.sync_count == 1


def test_a_transaction_that_is_finished_just_before_the_close() -> None:
    """Its file is let go of before the files are closed."""
    bench = opened(FaultyFileSystem(), file_bytes_max=100)
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"x" * 200)
    answer = bench.commit(LOCAL)
    bench.run()
    assert answer.is_good
    bench.close()
    assert opened(bench.fs).payloads() == [b"x" * 200]


def test_a_last_step_that_fails_is_logged_and_the_directory_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another broker may take it over."""
    bench = opened(FaultyFileSystem())

    def fail() -> None:
        raise NoSpaceError("no room")

    closed: list[bool] = []
    bench.journal.close(fail, lambda: closed.append(True))
    bench.run()
    assert closed
    assert "last step of closing the journal failed: error=no room" in caplog.text
    bench.fs.lock_directory(JOURNAL).release()


def live(bench: TransactionBench) -> list[Answer | PutTicket]:
    """Have the journal do everything it can; return what is to be answered."""
    coordinator = bench.coordinator
    deleted = Answer()
    asked: list[Answer | PutTicket] = [deleted]

    def put(key: str) -> None:
        bench.begin(key)
        asked.append(bench.put(key, A, b"x" * 150))

    with suppress(TransactionError):
        put(LOCAL)
        for key in (X1, X2, X3, X4):
            put(key)
            asked.append(bench.prepare(key))
        asked.append(bench.commit(LOCAL))
        bench.run()
        coordinator.checkpoint()
        coordinator.note_deletion("gone", deleted.on_done)
        asked.extend(bench.commit_together(X1, X2).values())
        asked.append(bench.rollback(X3))
        bench.run()
        asked.append(bench.decide(X4, HeuristicOutcome.COMMIT))
        coordinator.sync_due()
    bench.run()
    return asked


@pytest.mark.parametrize(
    ("sync_mode", "bug"), [(1, ValueError("a bug")), (2, MemoryError())], ids=repr
)
def test_a_bug_takes_the_journal_offline_and_leaves_nothing_unanswered(
    sync_mode: int,
    bug: Exception,
    rng: random.Random,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the journal's thread is at: it goes on, up to the end of its files.

    A run takes some of its calls, a whole one all.
    """

    def lived(at: int) -> tuple[TransactionBench, int]:
        """Live with a bug at one call; return how many there were, too."""
        bench = opened(FaultyFileSystem(), file_bytes_max=300, sync_mode=sync_mode)
        calls = 0

        def on_call(operation: Operation) -> None:
            nonlocal calls
            if bench.workers[0].is_at_work and operation.path.is_relative_to(JOURNAL):
                calls += 1
                if calls == at:
                    raise bug

        bench.fs.on_call(on_call)
        asked = live(bench)
        assert all(each.is_done for each in asked), (at, asked)
        bench.close()
        return bench, calls

    _, count = lived(0)
    for at in sample(range(1, count + 1), 6, rng):
        caplog.clear()
        bench, _ = lived(at)
        cause = bench.coordinator.figures().offline_cause
        assert cause == f"bug in the journal's thread: {bug!r}", at
        # PySpark, where it is in this process, gives the text another form.
        assert any(record.exc_info for record in caplog.records)
        with pytest.raises(TransactionError, match="offline until a restart"):
            bench.begin("TX:s:2")


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_bug_behind_one_outcome_leaves_the_others_told(
    is_refused: bool,
) -> None:
    """Those of its group come after it."""

    def fail(_outcome: object) -> None:
        raise MemoryError("no memory to answer")

    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    slot = Slot()
    for ticket in (DecisionTicket(fail, fail), behind := PutTicket()):
        entry = JournalEntry(slot, (b"x",), ticket)
        bench.journal.submit(entry)
    if is_refused:
        bench.fs.fail_at(bench.fs.calls + 1, errno.ENOSPC)
    with pytest.raises(MemoryError, match="no memory to answer"):
        bench.run()
    bench.run()
    assert behind.is_written is not is_refused
    assert (behind.error is not None) is is_refused
    bench.kill()


def test_a_disk_that_hangs_is_told_once_and_asked_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing piles up while the journal's thread waits; its answer ends the alarm."""
    bench = opened(FaultyFileSystem())
    (thread,) = bench.workers
    bench.coordinator.tick()
    queued = list(thread.queue)
    for _ in range(100):
        bench.clock.advance_s(5)
        bench.coordinator.tick()
        is_told = "journal does not answer" in caplog.text
        assert bench.coordinator.figures().is_silent == is_told
    assert caplog.text.count(f"journal does not answer: directory={JOURNAL}") == 1
    assert thread.queue == queued
    bench.run()
    assert not bench.coordinator.figures().is_silent
    assert f"journal answers again: directory={JOURNAL}" in caplog.text
    for _ in range(100):
        bench.clock.advance_s(5)
        bench.coordinator.tick()
        bench.run()
    assert caplog.text.count("does not answer") == 1
    bench.close()


def test_a_slow_sync_is_measured_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """As one of a segment is: every decision of the group waited for it."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"x")
    bench.commit(LOCAL)

    def on_call(operation: Operation) -> None:
        if operation.name == "sync" and operation.path == JOURNAL / "redo.1":
            bench.clock.advance_s(3)

    bench.fs.on_call(on_call)
    bench.run()
    bench.fs.on_call(None)
    assert f"slow sync: file={JOURNAL / 'redo.1'} duration_ms=3000" in caplog.text
    latency = bench.coordinator.figures().sync_latency
    assert (latency.count, latency.total) == (1, 3.0)
    bench.close()
