"""Quorums, matches, and the place where the high watermark may be."""

from metaq.model import MAX_OFFSET, Offset
from metaq.replication.epochs import CopyFacts, Epoch, EpochStart
from metaq.replication.progress import (
    Leadership,
    Quorum,
    answer_join,
    has_lost,
    may_put,
)
from tests.replication.model_log import ModelLog, begin_model_log

ALL = frozenset({1, 2, 3})
PAIR = frozenset({1, 2})
QUORUM = Quorum(1, ALL, 2)
EPOCH = Epoch(4, "n")


def copy(end: int, *, hw: int = 0, number: int = 1, start: int = 0) -> CopyFacts:
    entries = (EpochStart(EPOCH, Offset(start)),)
    return CopyFacts(number, Offset(start), Offset(end), Offset(hw), entries)


def log(*ends: int, hw: int = 0, begin: int = 0) -> ModelLog:
    """Return a log whose leader has appended and synced up to the last end."""
    made = begin_model_log(copy(begin, hw=hw))
    for end in ends:
        made = made.append(Offset(end)).sync(Offset(end))
    return made


def acked(made: ModelLog, **ends: int) -> ModelLog:
    for name, end in ends.items():
        made = made.acknowledge(int(name[1:]), Offset(end))
    return made


def test_the_high_watermark_is_an_append_end_that_all_have() -> None:
    """Between two ends nothing is readable, and the slowest member is waited for."""
    made = acked(log(10, 20, 30), r2=30, r3=25)
    assert made.advance(QUORUM).hw == 20
    assert acked(made, r3=30).advance(QUORUM).hw == 30


def test_the_bound_of_a_log_is_what_the_slowest_other_copy_has() -> None:
    """The log itself knows its own sync, and where its appends end."""
    made = acked(log(25, begin=20), r2=30, r3=19)
    assert made.bound(QUORUM) is None
    made = acked(made, r3=22)
    assert made.bound(QUORUM) == 22
    assert made.bound(Quorum(1, PAIR, 3)) is None
    assert made.bound(Quorum(1, frozenset({1}), 1)) == 22
    assert made.leave(3).leave(2).bound(Quorum(1, frozenset({1}), 1)) == MAX_OFFSET


def test_the_leaders_own_sync_is_waited_for() -> None:
    """A follower may be the first that has synced an append."""
    made = acked(log(10).append(Offset(20)), r2=20, r3=20)
    assert made.advance(QUORUM).hw == 10
    assert made.sync(Offset(20)).advance(QUORUM).hw == 20


def test_bytes_of_former_epochs_are_committed_at_once() -> None:
    """The first step is to the epoch start, which need not be an append's end here."""
    made = log(25, hw=5, begin=20)
    assert acked(made, r2=19, r3=25).advance(QUORUM).hw == 5
    assert acked(made, r2=21, r3=25).advance(QUORUM).hw == 20
    assert acked(made, r2=25, r3=25).advance(QUORUM).hw == 25


def test_nothing_is_committed_below_the_minimum() -> None:
    """A set that an operator began with one replica waits for a second."""
    made = acked(log(10), r2=10)
    alone = Quorum(1, frozenset({1}), 2)
    assert made.advance(alone).hw == 0
    assert made.advance(alone.settle(PAIR, min_in_sync=2)).hw == 10


def test_both_sets_of_an_open_change_are_waited_for() -> None:
    """ZooKeeper may have either until it has answered."""
    quorum = Quorum(1, PAIR, 2).propose(ALL)
    made = acked(log(10), r2=10)
    assert made.advance(quorum).hw == 0
    assert made.advance(quorum.settle(PAIR, min_in_sync=2)).hw == 10
    leaving = QUORUM.propose(PAIR)
    assert leaving.waited == ALL


def test_a_member_that_went_is_waited_for_until_all_know() -> None:
    """Were ZooKeeper set back, no copy but the leader's would contradict its claim."""
    term = Leadership(EPOCH, QUORUM.settle(PAIR, min_in_sync=2))
    made = acked(log(10), r2=10)
    assert made.advance(term.quorum).hw == 0
    assert made.advance(term.save(2, 6, current=7).quorum).hw == 0
    assert made.advance(term.save(2, 7, current=7).quorum).hw == 10


def test_a_replica_that_joins_is_waited_for_where_it_caught_up() -> None:
    """It caught up once its match is at the high watermark and the epoch start."""
    quorum = Quorum(1, PAIR, 2)
    made = log(30, hw=10, begin=20).join(3, Offset(0))
    late = acked(made, r2=30, r3=19)
    assert 3 not in late.joined
    assert late.advance(quorum).hw == 30
    joined = acked(made, r3=20, r2=30)
    assert 3 in joined.joined
    assert joined.advance(quorum).hw == 20
    assert joined.leave(3).advance(quorum).hw == 30


def test_a_join_forgets_what_a_former_life_had() -> None:
    """The match goes back to what both copies are known to share."""
    made = acked(log(30), r2=30).join(2, Offset(12))
    assert made.match_of(2) == 12
    assert made.joined == frozenset()


def test_acknowledgements_of_other_lives_and_epochs_do_not_count() -> None:
    """A message may be late by an epoch, or by a restart."""
    term = Leadership(EPOCH, QUORUM).join(2, 7)
    assert term.takes(2, 7, EPOCH)
    assert not term.takes(2, 6, EPOCH)
    assert not term.takes(3, 7, EPOCH)
    assert not term.takes(2, 7, Epoch(4, "another"))
    assert not term.join(2, 8).takes(2, 7, EPOCH)


def test_a_join_is_answered_with_the_parting_point_and_a_target() -> None:
    """The target is where the follower has all that it may have promised."""
    made = log(30, hw=10, begin=20)
    answer = answer_join(made, copy(30, hw=10), copy(25))
    assert (answer.point, answer.target) == (25, 20)
    assert answer_join(made, copy(30, start=4), None).point == 4
    assert answer_join(made, copy(30), copy(25, number=9)).point == 0


def test_a_member_that_lost_bytes_is_found_at_its_join() -> None:
    """It acknowledged more in this epoch, or more is committed than it has."""
    made = acked(log(30), r2=20, r3=30)
    assert has_lost(made, QUORUM, 2, Offset(19))
    assert not has_lost(made, QUORUM, 2, Offset(20))
    assert not has_lost(made, Quorum(1, frozenset({1, 3}), 2), 2, Offset(0))
    committed = acked(made, r2=30).advance(QUORUM)
    assert has_lost(committed.join(2, Offset(0)), QUORUM, 2, Offset(0))


def test_puts_that_would_not_be_acknowledged_are_refused() -> None:
    """Too few members, or one that is silent, away or incomplete and cannot go."""
    none = frozenset[int]()

    def may(quorum: Quorum = QUORUM, **sets: frozenset[int]) -> bool:
        given = {"stalled": none, "flagged": none, "present": ALL, **sets}
        return may_put(quorum, **given)

    assert may()
    assert not may(stalled=frozenset({3}))
    assert not may(flagged=frozenset({3}))
    assert not may(present=PAIR)
    assert may(Quorum(1, PAIR, 2), stalled=frozenset({3}), present=PAIR)
    assert not may(Quorum(1, frozenset({1}), 2))
