"""Outcomes of operators are kept, reported, forgotten; a Java broker's left alone."""

import errno

import pytest

from metaq.txn.side_files import JAVA_OUTCOMES_FILE, OUTCOMES, KeptOutcome
from metaq.txn.state import HeuristicOutcome, XaCommandError
from tests.rigs.fs import FaultyFileSystem, keep_none
from tests.txn.support import JOURNAL, A, killed, opened

LOCAL, XA = "TX:s:1", "XID:1:0a::uq"


def test_outcomes_survive_and_are_answered_until_they_are_forgotten() -> None:
    """Codes 7, 6 and 8 for any command; RECOVER lists them; FORGET ends it."""
    bench = opened(FaultyFileSystem())
    keys = {each: f"XID:1:0{n}::uq" for n, each in enumerate(HeuristicOutcome)}
    for outcome, key in keys.items():
        bench.begin(key)
        bench.put(key, A, outcome.value.encode())
        bench.prepare(key)
        bench.run()
        answer = bench.decide(key, outcome)
        bench.run()
        assert answer.is_good
    for _ in range(2):
        assert bench.payloads() == [b"commit"]
        assert sorted(bench.coordinator.recover("uq")) == sorted(keys.values())
        for outcome, key in keys.items():
            with pytest.raises(XaCommandError, match="been heuristically") as caught:
                bench.commit(key)
            assert (
                caught.value.code
                == {"commit": 7, "rollback": 6, "complete": 8}[outcome.value]
            )
        bench = killed(bench)
    for key in keys.values():
        answer = bench.forget(key)
        bench.run()
        assert answer.is_good
    assert killed(bench).coordinator.recover(None) == []
    with pytest.raises(XaCommandError, match="is not a valid xid"):
        bench.forget(LOCAL)


def test_an_outcome_that_could_not_be_forgotten_is_kept() -> None:
    """Forgetting it again is no success before the disk has forgotten it, too."""
    bench = opened(FaultyFileSystem())
    bench.begin(XA)
    bench.put(XA, A, b"x")
    bench.prepare(XA)
    bench.run()
    bench.decide(XA, HeuristicOutcome.COMMIT)
    bench.run()
    bench.fs.set_capacity(0)
    for _ in range(2):
        failed = bench.forget(XA)
        bench.run()
        assert failed.is_done
        assert not failed.is_good
        assert bench.coordinator.recover(None) == [XA]
    bench.fs.set_capacity(1 << 30)
    answer = bench.forget(XA)
    bench.run()
    assert answer.is_good
    assert killed(bench).coordinator.recover(None) == []


def test_an_outcome_that_was_not_carried_out_is_at_the_start() -> None:
    """Written and then killed: the decision of the operator holds."""
    for outcome, wanted in (
        (HeuristicOutcome.COMMIT, [b"x"]),
        (HeuristicOutcome.ROLLBACK, []),
    ):
        bench = opened(FaultyFileSystem())
        bench.begin(XA)
        bench.put(XA, A, b"x")
        bench.prepare(XA)
        bench.run()
        bench.decide(XA, outcome)
        bench.write_journal()
        again = killed(bench)
        assert again.payloads() == wanted
        assert again.coordinator.recover(None) == [XA]


@pytest.mark.parametrize("sync_mode", [0, 2])
def test_an_outcome_does_not_outlive_its_prepare(sync_mode: int) -> None:
    """In modes that answer before the sync: it is synced with the outcome, and without
    that there is none.
    """
    for has_failed in (False, True):
        bench = opened(FaultyFileSystem(), sync_mode=sync_mode)
        bench.begin(XA)
        bench.put(XA, A, b"x")
        bench.prepare(XA)
        bench.run()
        if has_failed:
            bench.fs.fail_at(bench.fs.calls + 1, errno.EIO)
        answer = bench.decide(XA, HeuristicOutcome.COMMIT)
        for worker in bench.workers:
            worker.step()
        again = opened(bench.fs.crash(keep_none))
        assert again.payloads() == ([] if has_failed else [b"x"])
        assert again.coordinator.recover(None) == ([] if has_failed else [XA])
        bench.run()
        assert answer.is_good is not has_failed


def test_outcomes_of_a_java_broker_are_left_alone_and_told() -> None:
    """Its file is not read, not changed, and named at the start."""
    bench = opened(FaultyFileSystem())
    bench.close()
    path = JOURNAL / JAVA_OUTCOMES_FILE
    data = b"\xac\xed\x00\x05" + b"x" * 200
    file = bench.fs.open_append(path, create=True)
    file.write(data)
    file.close()
    again = opened(bench.fs)
    (note,) = again.coordinator.figures().notes
    assert str(path) in note
    assert again.fs.read_file(path, 1 << 20) == data  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "count"), [(0, 0), (134, 0), (135, 0), (136, 1)])
def test_a_java_broker_without_outcomes_leaves_an_empty_map(
    size: int, count: int
) -> None:
    """Or a part of it, where it was killed: nobody is warned."""
    bench = opened(FaultyFileSystem())
    bench.close()
    with bench.fs.open_append(JOURNAL / JAVA_OUTCOMES_FILE, create=True) as file:
        file.write(bytes(size))
    assert len(opened(bench.fs).coordinator.figures().notes) == count


def test_outcomes_are_replaced_as_a_whole() -> None:
    """None without a file; what is written last is what is read."""
    fs = FaultyFileSystem()
    for path in (JOURNAL.parent, JOURNAL):
        fs.make_directory(path)
    assert OUTCOMES.read(fs, JOURNAL) == {}
    for outcome in HeuristicOutcome:
        outcomes = {XA: KeptOutcome(outcome, 1_700_000_000_000)}  # type: ignore[arg-type]
        OUTCOMES.write(fs, JOURNAL, outcomes)
        assert OUTCOMES.read(fs, JOURNAL) == outcomes
    OUTCOMES.write(fs, JOURNAL, {})
    assert OUTCOMES.read(fs, JOURNAL) == {}


def test_outcomes_have_a_checksum() -> None:
    """An outcome that was written is read; anything else is refused."""
    outcomes = {XA: KeptOutcome(HeuristicOutcome.COMPLETE, 1_700_000_000_000)}  # type: ignore[arg-type]
    data = OUTCOMES.encode(outcomes)
    assert OUTCOMES.decode(data) == outcomes
    for broken in (b"", b"[]", data.replace(b"complete", b"commit"), data[:-9]):
        with pytest.raises(ValueError, match=r"."):
            OUTCOMES.decode(broken)
