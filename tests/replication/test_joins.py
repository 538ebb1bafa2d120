"""Logs of a follower at its join: cut, made, kept or refused."""

from dataclasses import replace

from metaq.model import Offset
from metaq.replication.election import Flag
from metaq.replication.epochs import CopyFacts, Epoch, EpochStart, EpochTable
from metaq.replication.joins import LogPlan, plan_log, refuse
from metaq.replication.progress import JoinAnswer
from metaq.replication.record import make_record, plan_force
from metaq.replication.replica import Replica, ReplicaRole, SetFile

RECORD = make_record("s", 1, frozenset({1, 2, 3}), min_in_sync=2, nonce="init")
FILE = SetFile("s", 2, RECORD, epoch=1, completed=1)
FOLLOWER = Replica(ReplicaRole.FOLLOWING, FILE, 5, incarnation=3)
FORCED_RECORD = plan_force(RECORD, 5, 1, "f").record
FORCED = replace(FOLLOWER, file=replace(FILE, record=FORCED_RECORD))


def table(*pairs: tuple[int, int]) -> EpochTable:
    return tuple(EpochStart(Epoch(n, "n"), Offset(start)) for n, start in pairs)


def copy(end: int, *pairs: tuple[int, int], start: int = 0, hw: int = 0) -> CopyFacts:
    return CopyFacts(1, Offset(start), Offset(end), Offset(hw), table(*pairs))


def plan(own: CopyFacts, leader: CopyFacts, point: int) -> LogPlan | None:
    return plan_log(FOLLOWER, own, JoinAnswer(leader, Offset(point), leader.end))


def test_a_follower_cuts_where_the_copies_part() -> None:
    """And goes on with the leader's entries from there."""
    found = plan(copy(9, (1, 0), (2, 6), hw=4), copy(8, (1, 0), (3, 5)), 5)
    assert found == LogPlan(Offset(5), Offset(4), table((1, 0), (3, 5)))


def test_nothing_is_cut_below_a_known_high_watermark() -> None:
    """One of the two is not what the set believes; an operator's force decides so."""
    own = copy(9, (1, 0), (2, 3), hw=6)
    leader = copy(8, (1, 0), (2, 3), (3, 5))
    assert plan(own, leader, 5) is None
    answer = JoinAnswer(leader, Offset(5), leader.end)
    forced = plan_log(FORCED, own, answer)
    assert forced == LogPlan(Offset(5), Offset(5), leader.table)
    past = replace(FORCED, file=replace(FILE, completed=2))
    assert plan_log(past, own, answer) is None
    frozen, _ = refuse(FOLLOWER, 1, own, answer)
    assert frozen.role is ReplicaRole.FROZEN
    expected = "partition 1: expected equal bytes up to 6, got 5: "
    assert frozen.reason.startswith(expected)


def test_copies_that_are_not_known_to_be_equal_begin_at_the_log_start() -> None:
    """Of an incomplete replica, under another number, or with nothing in common."""
    leader = copy(9, (2, 5), start=5)
    begun = LogPlan(Offset(5), Offset(5), table((2, 5)), is_restart=True)
    assert plan(copy(7, (1, 0), hw=2), leader, 5) == begun
    assert plan(copy(7, (1, 0), hw=5), leader, 5) != begun
    assert plan(replace(copy(9, (2, 0), hw=7), number=8), leader, 9) == begun
    flagged = replace(FOLLOWER, file=replace(FILE, flag=Flag.INCOMPLETE))
    answer = JoinAnswer(leader, Offset(9), leader.end)
    assert plan_log(flagged, copy(9, (2, 0), hw=7), answer) == begun
