"""When the journal's thread hears of entries, and of transactions that are over."""

from tests.rigs.fs import FaultyFileSystem
from tests.txn.support import A, opened

LOCAL = "TX:s:1"


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
