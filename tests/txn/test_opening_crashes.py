"""The power goes, or the process, at every call of a life with transactions."""

import errno
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from metaq.errors import StorageError, TransactionError
from metaq.model import SizeBytes
from metaq.txn.opening import journal_numbers
from metaq.txn.state import HeuristicOutcome
from tests.rigs.disk import Choose
from tests.rigs.fs import (
    FaultyFileSystem,
    Operation,
    crash_points,
    keep_all,
    keep_none,
    keep_random,
)
from tests.sampling import examples, failures, quarter, sample
from tests.txn.support import (
    JOURNAL,
    A,
    Answer,
    B,
    Stories,
    Story,
    TransactionBench,
    check_stories,
    opened,
)

FILE = 400
"""Bytes of a redo file: the life rolls a few times."""

HOUR_BACK_MS = -3_600_000

X1, X2, X3, X4, X5, X6, X7, X8, X9 = (f"XID:1:0{n}::uq" for n in range(1, 10))


class Life:
    """Transactions of every kind, and what was promised about them."""

    def __init__(self, fs: FaultyFileSystem, **options: object) -> None:
        self.fs = fs
        self.options = options
        self.stories: Stories = {}
        self.bench: TransactionBench | None = None

    def snapshot(self) -> Stories:
        return dict(self.stories)

    def note(self, key: str, **changes: bool) -> None:
        # The first start may have ended before this one was begun.
        self.stories[key] = replace(self.stories.get(key, Story()), **changes)

    def begin(self, key: str, *payloads: bytes) -> None:
        assert self.bench is not None
        self.bench.begin(key)
        self.stories[key] = Story(frozenset(payloads))
        for number, payload in enumerate(payloads):
            self.bench.put(key, (A, B)[number % 2], payload)

    def ask(self, key: str, word: str) -> Answer:
        assert self.bench is not None
        if word != "prepare":
            self.note(key, was_asked=True)
        self.set_clock_back()
        answer: Answer = getattr(self.bench, word)(key)
        # So batches do not lie where the log ended at the commit.
        self.bench.put_outside(
            A, b"put beside the %b of %b" % (word.encode(), key.encode())
        )
        return answer

    def set_clock_back(self) -> None:
        """Set the wall clock back: nothing that is searched for is found by it."""
        assert self.bench is not None
        self.bench.clock.jump_wall_ms(HOUR_BACK_MS)

    def sync(self) -> None:
        """Let the second pass after which flush mode 2 syncs."""
        assert self.bench is not None
        self.bench.coordinator.sync_due()
        self.bench.run()
        if self.options.get("sync_mode") == 2:
            for key in self.stories:
                self.note(key, is_synced=True)

    def take_in(self, **answers: tuple[str, Answer]) -> None:
        for name, (key, answer) in answers.items():
            if answer.is_good:
                self.note(key, **{f"is_{name}": True})

    def live(self) -> None:
        """Two starts; the first one ends cleanly, the second does not end.

        After a failed sync of a directory the second one is on the disk that a reboot
        finds: Linux takes nothing before that.
        """
        with suppress(StorageError):
            self.first_start()
        if any(call.name == "sync_directory" and call.error for call in self.fs.log):
            self.fs = self.fs.crash(keep_random(len(self.fs.log)))
        with suppress(StorageError):
            self.second_start()

    def first_start(self) -> None:
        bench = self.bench = opened(self.fs, file_bytes_max=FILE, **self.options)
        with suppress(TransactionError):
            self.begin("TX:a:1", b"a1", b"a2" * 60, b"a3")
            done = self.ask("TX:a:1", "commit")
            bench.run()
            self.take_in(committed=("TX:a:1", done))
            self.begin(X1, b"x1", b"x1" * 40)
            voted = self.ask(X1, "prepare")
            self.begin("TX:a:2", b"b1" * 100)
            gone = self.ask("TX:a:2", "rollback")
            bench.run()
            self.take_in(prepared=(X1, voted), rolled_back=("TX:a:2", gone))
            self.sync()
            bench.coordinator.checkpoint()
            self.begin("TX:a:3", b"c1", b"c2")
            bench.run()
            self.begin(X2, b"x2-1", b"x2-2")
            voted = self.ask(X2, "prepare")
            bench.run()
            self.take_in(prepared=(X2, voted))
        bench.close()

    def second_start(self) -> None:
        bench = self.bench = opened(self.fs, file_bytes_max=FILE, **self.options)
        with suppress(TransactionError):
            self.begin(X3, b"x3" * 100, b"x3-2")
            first = self.ask(X3, "commit")
            second = self.ask(X1, "commit")
            bench.run()
            self.take_in(committed=(X3, first))
            self.take_in(committed=(X1, second))
            self.begin("TX:b:1", b"d1" * 50, b"d2" * 50)
            third = self.ask("TX:b:1", "commit")
            bench.run()
            self.take_in(committed=("TX:b:1", third))
            self.sync()
            self.begin(X4, b"x4", b"x4-2")
            voted = self.ask(X4, "prepare")
            bench.run()
            self.take_in(prepared=(X4, voted))
            if X4 in self.stories and self.stories[X4].is_prepared:
                self.note(X4, was_asked=True)
                kept = bench.decide(X4, HeuristicOutcome.COMMIT)
                bench.run()
                self.take_in(committed=(X4, kept))
            bench.coordinator.checkpoint()
            self.begin("TX:b:2", b"e1", b"e2")
            bench.run()


class TogetherLife(Life):
    """Prepared transactions that one command commits, beside others."""

    def together(self, *keys: str) -> dict[str, Answer]:
        """Commit several; those that are prepared are there together or not at all."""
        assert self.bench is not None
        stories = {key: self.stories.get(key, Story()) for key in keys}
        waiting = (k for k, story in stories.items() if not story.was_asked)
        named = frozenset(k for k in waiting if stories[k].is_prepared)
        for key in named:
            self.note(key, was_asked=True)
            self.stories[key] = replace(self.stories[key], together=named)
        self.set_clock_back()
        answers = self.bench.commit_together(*keys)
        self.bench.put_outside(A, b"put beside %b" % keys[0].encode())
        return answers

    def prepare(self, key: str, *payloads: bytes) -> None:
        """Begin and prepare one; the journal rolls between two of them."""
        assert self.bench is not None
        self.begin(key, *payloads)
        voted = self.ask(key, "prepare")
        self.bench.run()
        self.take_in(prepared=(key, voted))

    def take_in_all(self, answers: dict[str, Answer]) -> None:
        for key, answer in answers.items():
            self.take_in(committed=(key, answer))

    def first_start(self) -> None:
        bench = self.bench = opened(self.fs, file_bytes_max=FILE, **self.options)
        with suppress(TransactionError):
            self.prepare(X1, b"x1", b"x1" * 60, b"x1-3")
            self.prepare(X2, b"x2" * 80)
            self.prepare(X3, b"x3", b"x3-2" * 40)
            done = self.together(X1, X2, X3)
            bench.run()
            self.take_in_all(done)
            self.sync()
            self.prepare(X4, b"x4" * 30, b"x4-2")
            self.prepare(X5, b"x5", b"x5-2" * 50)
            bench.coordinator.checkpoint()
        bench.close()

    def second_start(self) -> None:
        bench = self.bench = opened(self.fs, file_bytes_max=FILE, **self.options)
        with suppress(TransactionError):
            self.prepare(X6, b"x6" * 50, b"x6-2")
            self.prepare(X7, b"x7")
            first = self.together(X6, X4)
            # Two commands, and a commit of one alone, in one turn.
            second = self.together(X5, X4)
            alone = self.ask(X7, "commit")
            bench.run()
            self.take_in_all(first)
            self.take_in_all(second)
            self.take_in(committed=(X7, alone))
            self.sync()
            self.prepare(X8, b"x8", b"x8-2" * 40)
            self.prepare(X9, b"x9" * 90, b"x9-2")
            self.together(X8, X9)
            bench.write_journal()


LIVES = pytest.mark.parametrize("kind", [Life, TogetherLife])


def check(disk: FaultyFileSystem, stories: Stories, *, keeps_last: bool = True) -> None:
    """Recover a disk twice: what was promised holds both times."""
    first = opened(disk.snapshot())
    check_stories(first, stories, keeps_last=keeps_last)
    bench = opened(disk)
    before = bench.payloads()
    bench.kill()
    again = opened(bench.fs)
    assert again.payloads() == before
    check_stories(again, stories, keeps_last=keeps_last)


def test_a_life_without_a_crash_keeps_what_it_promised() -> None:
    """The scenario below is what it says: everything in it succeeds."""
    fs = FaultyFileSystem()
    life = Life(fs)
    life.live()
    story = life.stories
    assert all(story[key].is_committed for key in ("TX:a:1", X1, X3, X4, "TX:b:1"))
    assert story[X2].is_prepared
    assert story["TX:a:2"].is_rolled_back
    check(fs.snapshot(), life.snapshot())


@pytest.mark.slow
def test_a_life_of_commits_together_keeps_what_it_promised() -> None:
    """The other scenario is what it says, too."""
    fs = FaultyFileSystem()
    life = TogetherLife(fs)
    life.live()
    story = life.stories
    assert all(story[key].is_committed for key in (X1, X2, X3, X4, X5, X6, X7))
    assert story[X1].together == {X1, X2, X3}
    assert {X8, X9} == story[X8].together
    check(fs.snapshot(), life.snapshot())
    check(fs.crash(keep_all), life.snapshot())


def moments(kind: type[Life], sync_mode: int) -> list[tuple[FaultyFileSystem, Stories]]:
    """Return the disk at every call of a life that changes it, and the promises."""
    fs = FaultyFileSystem()
    life = kind(fs, sync_mode=sync_mode)
    found: list[tuple[FaultyFileSystem, Stories]] = []

    def on_call(operation: Operation) -> None:
        if operation.name not in {"read", "stat", "list", "statvfs", "open"}:
            found.append((fs.snapshot(), life.snapshot()))

    fs.on_call(on_call)
    life.live()
    fs.on_call(None)
    assert len(found) > 100
    found.append((fs.snapshot(), life.snapshot()))
    return found


def random_choices(seed: int, count: int) -> Iterator[Choose]:
    return map(keep_random, range(seed, seed + count))


@pytest.mark.slow
@pytest.mark.parametrize("sync_mode", [0, 1, 2])
@LIVES
def test_a_kill_at_every_call_keeps_what_was_promised(
    rng: random.Random, kind: type[Life], sync_mode: int
) -> None:
    """A process that is killed loses nothing that it wrote, in every flush mode."""
    for disk, stories in quarter(moments(kind, sync_mode), rng):
        check(disk.crash(keep_all), stories)


@pytest.mark.slow
@pytest.mark.parametrize("sync_mode", [0, 1, 2])
@LIVES
def test_a_power_cut_at_every_call_keeps_what_was_promised(
    seed: int, rng: random.Random, kind: type[Life], sync_mode: int
) -> None:
    """Whatever of the rest the disk kept, as its mode promises: with a sync at each
    decision nothing answered is lost; in the other modes prepares and rollbacks
    are, if no sync came after them, and nothing is half or twice there either.

    A run takes one of these ends for each call that it tries, a whole one all.
    """
    for number, (disk, stories) in quarter([*enumerate(moments(kind, sync_mode))], rng):
        ends = (keep_none, *random_choices(seed + number * 100, 3))
        for choose in sample(ends, 1, rng):
            check(disk.crash(choose), stories, keeps_last=sync_mode == 1)


@pytest.mark.slow
@LIVES
def test_whichever_call_fails_what_was_promised_is_kept(
    rng: random.Random, kind: type[Life]
) -> None:
    """For every n: after the n-th call failed, everything answered with success holds
    after a restart and after a power cut, and every decision was answered.

    A run takes one of these ends for each call, a whole one all.
    """
    trial = FaultyFileSystem()
    kind(trial).live()
    for number, error in failures(trial.calls, (errno.EIO, errno.ENOSPC)):
        fs = FaultyFileSystem()
        fs.fail_at(number, error)
        life = kind(fs)
        life.live()
        ends = (keep_none, keep_all, keep_random(number))
        for choose in sample(ends, 1, rng):
            check(life.fs.crash(choose), life.snapshot())


@pytest.mark.slow
@pytest.mark.parametrize("sync_mode", [0, 1, 2])
@LIVES
def test_an_opening_may_be_cut_too(
    seed: int, rng: random.Random, kind: type[Life], sync_mode: int
) -> None:
    """A power cut at every sync of the recovery after a power cut loses nothing, and
    doubles nothing.

    A run takes some of the moments at which the power went first, a whole one a third.
    """
    fs = FaultyFileSystem()
    life = kind(fs, sync_mode=sync_mode)
    points = crash_points(fs, life.live, life.snapshot)
    cuts = [*enumerate(points[::3])]
    for number, point in sample(cuts, 5, rng):
        broken = point.disk.crash(keep_random(seed + number))

        def recover(broken: FaultyFileSystem = broken) -> None:
            opened(broken, sync_mode=sync_mode)

        for again in crash_points(broken, recover, lambda: None):
            disk = again.disk.crash(keep_random(seed + number))
            check(disk, point.progress, keeps_last=sync_mode == 1)


@pytest.mark.slow
def test_a_torn_copy_is_never_believed_before_its_original() -> None:
    """An opening was cut while it wrote the copy, the next one while it cleaned up."""
    bench = opened(FaultyFileSystem())
    bench.begin(X1)
    bench.put(X1, A, b"x" * 40)
    bench.prepare(X1)
    bench.run()
    bench.kill()
    disk = bench.fs
    (number,) = journal_numbers(disk, JOURNAL)
    data = disk.read_file(JOURNAL / f"redo.{number}", SizeBytes(1 << 20))
    copy = disk.open_append(JOURNAL / f"redo.{number + 1}", create=True)
    copy.write(data.replace(b"x" * 40, b"x" * 39 + b"\0"))
    copy.sync()
    copy.close()
    for point in crash_points(disk, lambda: opened(disk), lambda: None):
        for choose in (keep_none, keep_all):
            again = opened(point.disk.crash(choose))
            answer = again.commit(X1, is_two_phase=True)
            again.run()
            assert answer.is_good
            assert again.payloads() == [b"x" * 40]


@pytest.mark.slow
@LIVES
def test_an_opening_whose_disk_fails_loses_nothing(
    seed: int, rng: random.Random, kind: type[Life]
) -> None:
    """Every call of a recovery fails once: the next one finds everything.

    A run takes some of the moments at which the power went, a whole one all.
    """
    fs = FaultyFileSystem()
    life = kind(fs)
    points = crash_points(fs, life.live, life.snapshot)
    for number, point in sample([*enumerate(points)], 3, rng):
        broken = point.disk.crash(keep_random(seed + number))
        for call, error in failures(_calls_of_opening(broken), (errno.EIO,)):
            _open_badly(broken, call, error, point.progress)


def _calls_of_opening(broken: FaultyFileSystem) -> int:
    trial = broken.snapshot()
    opened(trial)
    return trial.calls


def _open_badly(
    broken: FaultyFileSystem, call: int, error: int, stories: Stories
) -> None:
    disk = broken.snapshot()
    disk.fail_at(call, error)
    with suppress(StorageError):
        opened(disk)
    check(disk.crash(keep_random(call)), stories)


@pytest.mark.slow
def test_an_offset_that_may_be_torn_is_no_bound_of_what_cannot_be_read() -> None:
    """A start whose disk fails writes it again: taken for a bound, the next start
    searches after the batch, and stores it twice. Of one power cut, every call.
    """
    fs = FaultyFileSystem()
    life = TogetherLife(fs)
    number, point = 34, crash_points(fs, life.live, life.snapshot)[34]
    broken = point.disk.crash(keep_random(1249706121 + number))
    for call in range(1, _calls_of_opening(broken) + 1):
        _open_badly(broken, call, errno.EIO, point.progress)


@pytest.mark.slow
def test_a_cut_batch_is_completed_before_what_was_stuck_in_front_of_it(
    seed: int,
) -> None:
    """In two pieces it is taken for a batch that is missing, at the next start."""
    stuck, cut = "TX:s:1", "TX:s:2"
    fs = FaultyFileSystem()
    life = Life(fs)
    bench = life.bench = opened(fs)
    life.begin(stuck, b"stuck")
    life.ask(stuck, "commit")
    bench.write_journal()
    fs.set_capacity(0)
    bench.run()
    fs.set_capacity(1 << 40)
    assert bench.coordinator.figures().stuck_count == 1
    life.note(stuck, is_committed=True)

    def go_on() -> None:
        life.begin(cut, *(b"%d of cut" % number for number in range(6)))
        done = life.ask(cut, "commit")
        bench.run()
        life.take_in(committed=(cut, done))

    for point in crash_points(fs, go_on, life.snapshot):
        for choose in random_choices(seed, examples(40)):
            check(point.disk.crash(choose), point.progress)
