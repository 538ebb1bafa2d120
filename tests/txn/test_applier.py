"""The batches of a commit on their way to the partitions."""

from metaq.model import SizeBytes
from tests.rigs.fs import FaultyFileSystem
from tests.txn.support import A, B, opened

KEY = "TX:s:1"


def test_a_refused_batch_is_retried_and_the_others_are_not_repeated() -> None:
    """The commit is answered once more when its last batch is stored."""
    bench = opened(FaultyFileSystem())
    bench.begin(KEY)
    for log_id in (A, B):
        bench.put(KEY, log_id, b"%d" % log_id.partition * 100)
    bench.run()
    answer = bench.commit(KEY)
    bench.write_journal()
    bench.fs.set_capacity(SizeBytes(0))
    bench.run()
    assert answer.is_done
    assert answer.error is not None
    assert bench.coordinator.figures().stuck_count == 1
    bench.fs.set_capacity(SizeBytes(1 << 40))
    bench.coordinator.tick()
    bench.run()
    assert bench.coordinator.figures().stuck_count == 0
    assert bench.payloads() == [b"0" * 100, b"1" * 100]
