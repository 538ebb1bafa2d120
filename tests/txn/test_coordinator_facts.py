"""Facts that MetaQ's own tests assert of its transactions, and those that they lack."""

import errno
import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from metaq.errors import DiskError, NoSpaceError, StorageError, TransactionError
from metaq.fs import AppendFile
from metaq.model import Offset
from metaq.txn.figures import TransactionLimits
from metaq.txn.opening import journal_numbers, read_journal
from metaq.txn.records import COMMITS, OperationRecord, decode_record
from metaq.txn.side_files import JournalPosition, read_checkpoint, write_checkpoint
from metaq.txn.state import XaCommandError
from metaq.txn.sums import decode_sums
from tests.rigs.fs import FaultyFileSystem, Operation, keep_all, keep_none
from tests.sampling import IS_WHOLE
from tests.txn.support import JOURNAL, A, B, TransactionBench, killed, opened

LOCAL, OTHER, XA, XB = "TX:s:1", "TX:s:2", "XID:1:0a::uq", "XID:1:0b::vw"


def redo_bytes(fs: FaultyFileSystem) -> bytes:
    numbers = journal_numbers(fs, JOURNAL)
    return b"".join(fs.read_file(JOURNAL / f"redo.{n}", 1 << 30) for n in numbers)  # type: ignore[arg-type]


# -- facts of docs/metaq-1.4/broker.md 5.9 and 11.4 ----------------------------------


def test_rollback_then_reopen() -> None:
    """The partition is empty, the transaction unknown, and the journal said so."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"x")
    answer = bench.rollback(LOCAL)
    bench.run()
    assert answer.is_good
    assert redo_bytes(bench.fs)
    again = killed(bench)
    assert again.payloads() == []
    with pytest.raises(TransactionError, match="has not been started"):
        again.commit(LOCAL)


def test_puts_then_reopen_are_in_flight_and_gone() -> None:
    """Replay finds both with their puts; what is not prepared is not restored."""
    bench = opened(FaultyFileSystem())
    for key, count in ((LOCAL, 2), (XA, 1)):
        bench.begin(key)
        for number in range(count):
            bench.put(key, A, b"%d" % number)
    bench.run()
    replay = read_journal(bench.fs, JOURNAL, journal_numbers(bench.fs, JOURNAL))
    assert {key: len(tx.puts) for key, tx in replay.open.items()} == {LOCAL: 2, XA: 1}
    assert replay.prepared() == []
    again = killed(bench)
    assert again.payloads() == []
    assert again.coordinator.views() == []


def test_a_commit_without_puts_writes_nothing() -> None:
    """Nor does a rollback, nor a prepare, whose vote is read-only."""
    bench = opened(FaultyFileSystem())
    for key in (LOCAL, OTHER, XA):
        bench.begin(key)
    assert bench.commit(LOCAL).is_good
    assert bench.rollback(OTHER).is_good
    assert bench.prepare(XA).vote == 3
    bench.run()
    assert redo_bytes(bench.fs) == b""
    assert bench.coordinator.views() == []
    counters = bench.coordinator.counters
    assert (counters.committed, counters.rolled_back) == (1, 1)


def test_a_prepared_transaction_is_restored_with_its_puts() -> None:
    """As it was: order, ids, checksum -1 and opaque too."""
    bench = opened(FaultyFileSystem())
    bench.begin(XA)
    bench.put(XA, A, b"one")
    bench.put(XA, B, b"two")
    assert not bench.prepare(XA).is_done
    bench.run()
    numbers = journal_numbers(bench.fs, JOURNAL)
    before = read_journal(bench.fs, JOURNAL, numbers).open[XA].puts
    again = killed(bench)
    numbers = journal_numbers(again.fs, JOURNAL)
    assert read_journal(again.fs, JOURNAL, numbers).open[XA].puts == before
    assert again.coordinator.recover("uq") == [XA]
    assert again.coordinator.recover("vw") == []
    assert again.coordinator.recover(None) == [XA]
    answer = again.commit(XA, is_two_phase=True)
    again.run()
    assert answer.is_good
    assert again.payloads() == [b"one", b"two"]


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_prepare_and_decision_then_reopen(decision: str) -> None:
    """Nothing is pending after it, and nothing is applied twice."""
    bench = opened(FaultyFileSystem())
    bench.begin(XA)
    bench.put(XA, A, b"x")
    bench.prepare(XA)
    bench.run()
    answer = getattr(bench, decision)(XA)
    bench.run()
    assert answer.is_good
    for _ in range(2):
        bench = killed(bench)
        assert bench.coordinator.views() == []
        assert bench.payloads() == ([b"x"] if decision == "commit" else [])


def test_puts_and_commit_then_reopen() -> None:
    """Exactly these messages are there; the transaction has left its connection."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL, "owner")
    for data in (b"one", b"two"):
        bench.put(LOCAL, A, data, "owner")
    answer = bench.commit(LOCAL, "owner")
    bench.run()
    assert answer.is_good
    with pytest.raises(TransactionError, match="has not been started"):
        bench.commit(LOCAL, "owner")
    bench.coordinator.end_owner("owner")
    assert bench.coordinator.counters.abandoned == 0
    again = killed(bench)
    assert again.payloads() == [b"one", b"two"]
    assert again.coordinator.views() == []


def test_a_put_without_a_begin_is_refused() -> None:
    """With MetaQ's words; so is one in the local transaction of another connection."""
    bench = opened(FaultyFileSystem())
    for key, kind in ((LOCAL, "Local"), (XA, "XA")):
        with pytest.raises(TransactionError) as caught:
            bench.put(key, A, b"x", "owner")
        assert str(caught.value) == f"{kind} transaction '{key}' has not been started."
    bench.begin(LOCAL, "owner")
    counters = bench.coordinator.counters
    assert (counters.begun_local, counters.begun_xa) == (1, 0)
    with pytest.raises(TransactionError, match="has not been started"):
        bench.put(LOCAL, A, b"x", "other")
    assert redo_bytes(bench.fs) == b""


def test_a_put_behind_the_end_is_refused() -> None:
    """So is a change to a partition that has no batch of a commit yet."""
    bench = opened(FaultyFileSystem())
    for key, ask in ((LOCAL, bench.commit), (XA, bench.prepare)):
        bench.begin(key)
        bench.put(key, A, key.encode())
        bench.coordinator.require_ended(A)
        answer = ask(key)
        with pytest.raises(TransactionError, match="takes no puts"):
            bench.coordinator.find_for_put(key, None)
        if key == LOCAL:
            bench.coordinator.require_ended(B)
            with pytest.raises(StorageError, match=f"'{key}' is being committed to"):
                bench.coordinator.require_ended(A)
        bench.run()
        assert answer.is_good
    with pytest.raises(TransactionError):
        bench.coordinator.find_for_put(XA, None)
    bench.commit(XA)
    bench.run()
    bench.coordinator.require_ended(A)
    assert bench.payloads() == [LOCAL.encode(), XA.encode()]


def test_a_verdict_on_what_has_ended_is_refused() -> None:
    """A second commit, a rollback after a commit, a commit after a rollback."""
    bench = opened(FaultyFileSystem())
    for first in ("commit", "rollback"):
        bench.begin(XA)
        bench.put(XA, A, first.encode())
        bench.prepare(XA)
        bench.run()
        getattr(bench, first)(XA)
        bench.run()
        for second in ("commit", "rollback", "prepare"):
            with pytest.raises(XaCommandError, match="has not been started") as caught:
                getattr(bench, second)(XA)
            assert caught.value.code == -4
    assert bench.payloads() == [b"commit"]


@pytest.mark.slow
def test_a_hundred_connections_with_checkpoints_leave_nothing_active(seed: int) -> None:
    """Their steps are mixed, over redo files of 512 bytes: after a restart no
    transaction is active, one file is left, and each that was committed is there.
    """
    bench, random = opened(FaultyFileSystem(), file_bytes_max=512), Random(seed)
    wanted: list[bytes] = []
    lives: list[Iterator[None]] = []

    def live(owner: int) -> Iterator[None]:
        for number in range(100 if IS_WHOLE else 20):  # MetaQ: 10,000 in all
            key, payload = f"TX:{owner}:{number}", b"%d:%d" % (owner, number)
            bench.begin(key, owner)
            yield
            bench.put(key, (A, B)[number % 2], payload, owner)
            yield
            if random.random() < 0.7:
                bench.commit(key, owner)
                wanted.append(payload)
            else:
                bench.rollback(key, owner)
            yield

    lives += map(live, range(100))
    while lives:
        each = random.choice(lives)
        if next(each, lives) is lives:
            lives.remove(each)
        if random.random() < 0.1:
            bench.coordinator.checkpoint()
            bench.run()
    bench.run()
    bench.coordinator.tick()  # without another entry it lets go of the last ones
    bench.run()
    (number,) = journal_numbers(bench.fs, JOURNAL)
    assert number > 1
    again = killed(bench)
    assert again.coordinator.views() == []
    assert sorted(again.payloads()) == sorted(wanted)


def test_a_partition_that_is_lost_gets_its_batch_again() -> None:
    """Committed, then its directory is deleted: it is back, the same bytes, once."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    for number in range(3):
        bench.put(LOCAL, A, b"payload %d" % number)
    bench.commit(LOCAL)
    bench.run()
    log = bench.logs.manager.logs()[A]
    before = bench.logs.manager.read_back(A, Offset(0), log.size_bytes)
    disk = bench.fs.crash(keep_all)
    for name in disk.list_directory(log.writer.directory):
        disk.unlink(log.writer.directory / name)
    disk.remove_directory(log.writer.directory)
    disk.unlink(log.writer.directory.parent / "holdings")
    for _ in range(2):
        bench = opened(disk)
        assert bench.logs.manager.read_back(A, Offset(0), len(before) + 1) == before
        disk = bench.fs.crash(keep_all)


@pytest.mark.slow
def test_many_transactions_over_small_files_leave_one_file() -> None:
    """A journal limit of 512 bytes and 2,000 transactions: numbers grow, files go."""
    bench = opened(FaultyFileSystem(), file_bytes_max=512)
    for number in range(2000):
        bench.begin(f"TX:s:{number}")
        bench.put(f"TX:s:{number}", A, b"%d" % number)
        bench.commit(f"TX:s:{number}")
        if number % 50 == 0:
            bench.coordinator.checkpoint()
            bench.run()
    bench.run()
    bench.coordinator.tick()  # when the last ones are let go
    bench.run()
    (number,) = journal_numbers(bench.fs, JOURNAL)
    assert number > 1
    again = killed(bench)
    assert again.coordinator.views() == []
    assert again.payloads() == [b"%d" % number for number in range(2000)]


def test_a_large_file_goes_when_nothing_in_it_is_needed() -> None:
    """It need not be full: what is prepared keeps it, and its end lets it go."""
    bench = opened(FaultyFileSystem(), file_bytes_max=1 << 30)
    bench.begin(XA)
    bench.put(XA, A, b"x")
    bench.prepare(XA)
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"y" * (1 << 20))
    bench.commit(LOCAL)
    bench.run()
    assert bench.coordinator.figures().journal_bytes > 1 << 20
    bench.rollback(XA)
    bench.run()
    assert bench.coordinator.figures().journal_bytes == 0
    assert killed(bench).payloads() == [b"y" * (1 << 20)]


# -- checkpoints ----------------------------------------------------------------------


def test_checkpoints_are_written_when_newer_and_few_are_kept() -> None:
    """None at first; an equal or older one is ignored; of four, three are kept."""
    fs = FaultyFileSystem()
    for path in (JOURNAL.parent, JOURNAL):
        fs.make_directory(path)
    assert read_checkpoint(fs, JOURNAL) == (0, 0)
    places = [JournalPosition(1, 30), JournalPosition(1, 40), JournalPosition(2, 0)]
    for place in places:
        assert write_checkpoint(fs, JOURNAL, place, kept_max=3)
        assert not write_checkpoint(fs, JOURNAL, place, kept_max=3)
    assert not write_checkpoint(fs, JOURNAL, JournalPosition(1, 99), kept_max=3)
    assert write_checkpoint(fs, JOURNAL, JournalPosition(2, 9), kept_max=3)
    names = fs.list_directory(JOURNAL)
    assert names == ("checkpoint.2", "checkpoint.3", "checkpoint.4")
    assert read_checkpoint(fs, JOURNAL) == (2, 9)
    data = fs.read_file(JOURNAL / "checkpoint.4", 99)  # type: ignore[arg-type]
    assert data == b'{"number":2,"offset":9}'


def test_a_checkpoint_names_the_oldest_that_is_not_finished() -> None:
    """Replay begins there, and finds all that is prepared after it."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"done")
    bench.commit(LOCAL)
    bench.run()
    start = len(redo_bytes(bench.fs))
    for key in (XA, XB):
        bench.begin(key)
        bench.put(key, A, b"x")
        bench.prepare(key)
    bench.run()
    bench.coordinator.checkpoint()
    bench.run()
    (number,) = journal_numbers(bench.fs, JOURNAL)
    assert read_checkpoint(bench.fs, JOURNAL) == (number, start)
    assert sorted(killed(bench).coordinator.recover(None)) == [XA, XB]


# -- what the journal promises --------------------------------------------------------


def test_what_is_appended_is_decided() -> None:
    """The commit record is synced before a byte reaches a partition."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"x")
    bench.put(LOCAL, B, b"y")
    answer = bench.commit(LOCAL)
    bench.write_journal()
    assert is_committed(bench.fs.crash(keep_none))
    assert bench.payloads() == []
    assert not answer.is_done
    bench.run()
    assert answer.is_good
    assert bench.payloads() == [b"x", b"y"]


def test_a_commit_that_is_under_way_at_the_stop_is_applied_at_the_start() -> None:
    """Its record is the last thing that the journal writes, and nothing removes it."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"x")
    bench.run()
    bench.commit(LOCAL)
    bench.coordinator.close(lambda: None)
    bench.write_journal()
    assert is_committed(bench.fs)
    again = killed(bench)
    assert again.payloads() == [b"x"]
    again.close()
    assert not is_committed(again.fs)


def test_a_stop_waits_for_commits_that_are_under_way() -> None:
    """So it leaves nothing but what is prepared, as a Java broker needs it."""
    bench = opened(FaultyFileSystem())
    for key in (LOCAL, XA):
        bench.begin(key)
        bench.put(key, A, key.encode())
    bench.prepare(XA)
    answer = bench.commit(LOCAL)
    bench.close()
    assert answer.is_good
    assert not is_committed(bench.fs)
    again = opened(bench.fs)
    assert again.payloads() == [LOCAL.encode()]
    assert again.coordinator.recover(None) == [XA]


def is_committed(fs: FaultyFileSystem) -> bool:
    data, position = redo_bytes(fs), 0
    while position < len(data):
        record, position = decode_record(data, position, len(data))
        if isinstance(record, OperationRecord) and record.operation in COMMITS:
            return True
    return False


def test_a_failed_sync_takes_the_journal_offline() -> None:
    """All that wait get an error, never a success; all is refused from then on."""
    bench = opened(FaultyFileSystem())
    for key in (LOCAL, XA, XB):
        bench.begin(key)
        bench.put(key, A, b"x")
    bench.run()
    answers = [bench.commit(LOCAL), bench.prepare(XA)]

    def fail_sync(operation: Operation) -> None:
        if operation.name == "write" and operation.path.name.startswith("redo"):
            bench.fs.fail_at(operation.number + 1, errno.EIO)

    bench.fs.on_call(fail_sync)
    bench.run()
    bench.fs.on_call(None)
    assert all(answer.is_done and answer.error is not None for answer in answers)
    assert bench.payloads() == []
    with pytest.raises(TransactionError, match="offline until a restart"):
        bench.begin(OTHER)
    with pytest.raises(TransactionError, match="offline until a restart"):
        bench.rollback(XB)
    cause = bench.coordinator.figures().offline_cause
    assert cause is not None
    assert "EIO" in cause


def test_no_room_in_the_journal_fails_a_transaction_and_not_the_next() -> None:
    """A put that is not journalled keeps its transaction from being committed."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"kept")
    bench.run()
    bench.fs.fail_at(bench.fs.calls + 1, errno.ENOSPC)
    lost = bench.put(LOCAL, A, b"lost")
    bench.run()
    assert lost.error is not None
    answer = bench.commit(LOCAL)
    bench.run()
    assert isinstance(answer.error, XaCommandError)
    assert (answer.error.code, str(answer.error)) == (
        104, "STORE COMMIT FAILED: Transaction rolled back.",
    )  # fmt: skip
    bench.begin(OTHER)
    bench.put(OTHER, A, b"next")
    good = bench.commit(OTHER)
    bench.run()
    assert good.is_good
    assert bench.payloads() == [b"next"]
    assert killed(bench).payloads() == [b"next"]


def test_a_refused_commit_does_not_come_back_after_a_power_cut() -> None:
    """Its record was on the disk already when the group found no room for the rest."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"refused")
    bench.run()
    bench.begin(OTHER)
    answer = bench.commit(LOCAL)
    bench.put(OTHER, A, b"y" * 1000)
    bench.fs.fail_at(bench.fs.calls + 1, errno.ENOSPC, taken=1000)
    cut: list[Operation] = []

    def on_call(operation: Operation) -> None:
        if operation.name == "truncate":
            bench.fs.write_back(operation.path)
            cut.append(operation)

    bench.fs.on_call(on_call)
    bench.run()
    bench.fs.on_call(None)
    assert isinstance(answer.error, XaCommandError)
    assert str(answer.error).endswith("Transaction rolled back.")
    assert cut
    assert opened(bench.fs.crash(keep_none)).payloads() == []


@pytest.mark.parametrize("key", [LOCAL, XA])
@pytest.mark.parametrize("fails", ["put", "rollback"])
def test_what_was_rolled_back_without_room_is_none_of_the_next_of_its_key(
    key: str, fails: str
) -> None:
    """Replay would take the puts of both for one; until then the key is in use."""
    bench = opened(FaultyFileSystem())
    bench.begin(key)
    bench.put(key, A, b"over")
    bench.run()
    bench.fs.fail_at(bench.fs.calls + 1, errno.ENOSPC)
    if fails == "put":
        bench.put(key, A, b"lost")
        bench.run()
        bench.commit(key)
    else:
        bench.rollback(key)
    bench.run()
    for _ in range(2):
        with pytest.raises(TransactionError, match="is in use: rolling back"):
            bench.begin(key)
        bench.fs.fail_at(bench.fs.calls + 1, errno.ENOSPC)
        bench.coordinator.tick()
        bench.run()
    bench.coordinator.tick()
    bench.run()
    bench.begin(key)
    bench.put(key, A, b"next")
    good = bench.commit(key)
    bench.run()
    assert good.is_good
    assert killed(bench).payloads() == [b"next"]


class CrowdedFileSystem(FaultyFileSystem):
    """A disk on which a file of one name cannot be opened for appending."""

    barred = ""
    error: StorageError

    def open_append(
        self, path: Path, *, create: bool, is_synced: bool = True
    ) -> AppendFile:
        if path.name == self.barred:
            raise self.error
        return super().open_append(path, create=create, is_synced=is_synced)


@pytest.mark.parametrize(
    "error",
    [NoSpaceError("open found no room"), DiskError("open", "sums.2", "EMFILE")],
    ids=["room", "descriptor"],
)
@pytest.mark.parametrize("barred", ["redo.2", "sums.2"])
def test_no_room_for_the_next_file_is_no_end_of_the_journal(
    error: StorageError, barred: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The present one goes on, which is logged once; the next comes when it can."""
    fs = CrowdedFileSystem()
    bench = opened(fs, file_bytes_max=100)
    assert journal_numbers(fs, JOURNAL) == [1]
    fs.barred, fs.error = barred, error
    for key in (XA, OTHER, LOCAL):
        bench.begin(key)
        bench.put(key, A, b"y" * (1 << 20))
        good = bench.commit(key)
        bench.run()
        assert good.is_good
        bench.coordinator.tick()  # when it is let go
        bench.run()
    assert bench.coordinator.figures().offline_cause is None
    assert caplog.text.count(f"goes on in a full file: file={JOURNAL / 'redo.1'}") == 1
    assert killed(bench).payloads() == [b"y" * (1 << 20)] * 3
    fs.barred = ""
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"next")
    bench.commit(LOCAL)
    bench.run()
    assert 1 not in journal_numbers(fs, JOURNAL)


def test_a_partition_without_room_is_told_and_tried_again() -> None:
    """Refused before the decision: rolled back. Refused after it: committed all the
    same, answered with a code for that, and stored when there is free space.
    """
    bench = opened(FaultyFileSystem())
    bench.begin(XA)
    bench.put(XA, A, b"x" * 100)
    bench.prepare(XA)
    bench.run()
    answer = bench.commit(XA, is_two_phase=True)
    bench.write_journal()
    bench.fs.set_capacity(0)
    bench.run()
    assert isinstance(answer.error, XaCommandError)
    assert answer.error.code == -7
    assert bench.payloads() == []
    assert bench.coordinator.figures().stuck_count == 1
    with pytest.raises(TransactionError, match="Cannot call rollback now"):
        bench.rollback(XA)
    bench.fs.set_capacity(1 << 40)
    again = bench.commit(XA, is_two_phase=True)
    bench.run()
    assert again.is_good
    assert bench.payloads() == [b"x" * 100]
    assert killed(bench).payloads() == [b"x" * 100]


def test_a_commit_finds_its_batch_behind_other_puts() -> None:
    """Its record says where the log ended; the batch is after what came between."""
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"in between")
    bench.commit(LOCAL)
    bench.put_outside(A, b"first", b"second")
    bench.run()
    wanted = [b"first", b"second", b"in between"]
    assert bench.payloads() == wanted
    disk = bench.fs.crash(keep_all)
    # Also without the side file, which knows the place.
    for number in journal_numbers(disk, JOURNAL):
        disk.unlink(JOURNAL / f"sums.{number}")
    assert opened(disk).payloads() == wanted


@pytest.mark.slow
def test_a_place_that_a_power_cut_has_torn_is_no_damage() -> None:
    """Whatever is in its eight bytes: the batch is found from its bound on, once, with
    a side file or without.
    """
    bench = opened(FaultyFileSystem())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"in between")
    bench.commit(LOCAL)
    bench.put_outside(A, b"first")
    bench.run()
    disk = bench.fs.crash(keep_all)
    (number,) = journal_numbers(disk, JOURNAL)
    sums = decode_sums(disk.read_file(JOURNAL / f"sums.{number}", 1 << 20), number)  # type: ignore[arg-type]
    ((position, bound),) = sums.bounds.items()
    assert (bound, redo_bytes(disk)[position : position + 8]) == (
        0,
        b"\0" * 7 + b"\x19",
    )
    # Of two offsets none is negative, nor is what is left of both.
    for bit in {*range(64)} - {7}:
        torn = disk.snapshot()
        torn.flip_bit(JOURNAL / f"redo.{number}", 8 * position + bit)
        without = torn.snapshot()
        without.unlink(JOURNAL / f"sums.{number}")
        for each in (torn, without):
            again = opened(each)
            assert again.payloads() == [b"first", b"in between"]
            assert again.coordinator.figures().notes == ()


# -- damage ---------------------------------------------------------------------------


def prepared_disk() -> FaultyFileSystem:
    bench = opened(FaultyFileSystem())
    for key in (XA, XB):
        bench.begin(key)
        bench.put(key, A, b"x" * 50)
        bench.prepare(key)
        bench.run()
    return bench.fs.crash(keep_all)


@pytest.mark.slow
def test_rot_is_refused_wherever_it_is() -> None:
    """Any bit of bytes that were synced: the journal says where, and is not changed."""
    disk = prepared_disk()
    (number,) = journal_numbers(disk, JOURNAL)
    path = JOURNAL / f"redo.{number}"
    for bit in range(0, 8 * len(redo_bytes(disk)), 7):
        rotten = disk.snapshot()
        rotten.flip_bit(path, bit)
        before = redo_bytes(rotten)
        with pytest.raises(StorageError, match=rf"damaged: file={path} position="):
            opened(rotten)
        assert redo_bytes(rotten) == before


def test_a_cut_journal_is_refused() -> None:
    """Bytes that were synced and are gone are no torn tail."""
    disk = prepared_disk()
    (number,) = journal_numbers(disk, JOURNAL)
    path = JOURNAL / f"redo.{number}"
    size = len(redo_bytes(disk))
    for left in (0, 1, size // 2, size - 1):
        cut = disk.snapshot()
        file = cut.open_append(path, create=False)
        file.truncate(left)  # type: ignore[arg-type]
        file.close()
        with pytest.raises(StorageError, match="journal damaged"):
            opened(cut)


def test_a_torn_tail_is_cut_and_told() -> None:
    """Bytes that no sync covered are no damage: those in front of them count."""
    bench = opened(prepared_disk())
    bench.begin(LOCAL)
    bench.put(LOCAL, A, b"never synced")
    bench.run()
    disk = bench.fs.crash(keep_all)
    number = journal_numbers(disk, JOURNAL)[-1]
    size = len(redo_bytes(disk))
    disk.flip_bit(JOURNAL / f"redo.{number}", 8 * (size - 4))
    again = opened(disk)
    assert sorted(again.coordinator.recover(None)) == [XA, XB]
    (note,) = again.coordinator.figures().notes
    assert "torn tail" in note


def test_a_journal_without_side_files_opens() -> None:
    """As a Java broker leaves it; a tail that makes no sense is not read."""
    disk = prepared_disk()
    (number,) = journal_numbers(disk, JOURNAL)
    disk.unlink(JOURNAL / f"sums.{number}")
    file = disk.open_append(JOURNAL / f"redo.{number}", create=False)
    file.write(b"\0\0\0\x20garbage")
    file.close()
    again = opened(disk)
    assert sorted(again.coordinator.recover(None)) == [XA, XB]


@pytest.mark.slow
def test_a_side_file_that_is_damaged_is_no_help_and_no_harm() -> None:
    """Whichever bit of it is wrong, what is prepared is restored."""
    disk = prepared_disk()
    (number,) = journal_numbers(disk, JOURNAL)
    path = JOURNAL / f"sums.{number}"
    for bit in range(0, 8 * len(disk.read_file(path, 1 << 20)), 31):  # type: ignore[arg-type]
        rotten = disk.snapshot()
        rotten.flip_bit(path, bit)
        assert sorted(opened(rotten).coordinator.recover(None)) == [XA, XB]


# -- bounds ---------------------------------------------------------------------------


def limited(**changes: int) -> TransactionBench:
    fields = {
        "open_count_max": 3,
        "held_bytes_max": 2000,
        "timed_count_max": 2,
        "timeout_s_max": 60,
        "journal_bytes_max": 1 << 30,
    }
    limits = TransactionLimits(**{**fields, **changes})
    return opened(FaultyFileSystem(), limits=limits)


def test_bounds_are_kept_told_and_counted() -> None:
    """Open transactions, bytes that they hold, time-outs: both numbers, one count."""
    bench = limited()
    bench.begin(LOCAL, timeout_s=5)
    bench.begin(OTHER, timeout_s=5)
    with pytest.raises(
        TransactionError, match="Timer size 3 is great than maxTimerCapacity 2"
    ):
        bench.begin(XA, timeout_s=5)
    bench.begin(XA)
    with pytest.raises(TransactionError, match="expected at most 3, got 4"):
        bench.begin(XB)
    bench.put(LOCAL, A, b"x" * 1500)
    with pytest.raises(TransactionError, match="expected at most 2000 bytes, got"):
        bench.put(OTHER, A, b"x" * 500)
    bench.rollback(LOCAL)
    bench.put(OTHER, A, b"x" * 500)
    bench.run()
    assert bench.coordinator.counters.refused == 3
    assert bench.coordinator.figures().held_bytes < 1000


def test_the_journal_has_a_bound() -> None:
    """A full one takes no puts; decisions are taken, and free space."""
    bench = limited(journal_bytes_max=100, held_bytes_max=1 << 20)
    bench.begin(XA)
    bench.put(XA, A, b"x" * 200)
    bench.run()
    with pytest.raises(TransactionError, match="the transaction journal is full"):
        bench.put(XA, A, b"more")
    answer = bench.commit(XA)
    bench.run()
    assert answer.is_good


def held_by_transactions() -> int:
    """Return the bytes that were allocated in `metaq.txn` and not given back."""
    gc.collect()
    found = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, "*/metaq/txn/*")]
    )
    return sum(trace.size for trace in found.traces)


@pytest.mark.slow
def test_thousands_of_open_transactions_are_bounded_and_end() -> None:
    """All that they hold is counted, and given back; nothing is left of them.

    The first ones fill caches. A table that grows later does so once: what is left of
    transactions would grow in each of the rounds.
    """
    bench = opened(FaultyFileSystem(), file_bytes_max=1 << 16)
    count = 10_000 if IS_WHOLE else 1500
    tracemalloc.start()
    left = [hold_and_end(bench, number * count, count) for number in range(3)]
    tracemalloc.stop()
    assert min(left[1] - left[0], left[2] - left[1]) < 5 * count
    assert len(bench.payloads(A)) == 3 * count // 2


def hold_and_end(bench: TransactionBench, first: int, count: int) -> int:
    """Have so many open, and end all of them; return the bytes that are held then."""
    for number in range(first, first + count):
        bench.begin(f"TX:s:{number}", "owner", timeout_s=30)
        bench.put(f"TX:s:{number}", A, b"x" * 100, "owner")
    bench.run()
    assert held_by_transactions() < 1500 * count
    before = bench.coordinator.figures()
    assert before.open_count == count
    assert 100 * count < before.held_bytes < 400 * count
    for number in range(first, first + count, 2):
        bench.commit(f"TX:s:{number}", "owner")
    bench.run()
    bench.clock.advance_s(31)
    bench.coordinator.tick()
    bench.run()
    figures = bench.coordinator.figures()
    assert (figures.open_count, figures.held_bytes) == (0, 0)
    assert figures.counters.timed_out == (first + count) // 2
    assert figures.journal_bytes < 1 << 18
    return held_by_transactions()
