"""Claims, their order, and when a claimer leads."""

from dataclasses import replace

from metaq.model import Offset
from metaq.replication.election import (
    CLAIM_WAIT_MS,
    MERGE_WAIT_MS,
    RANK_STEP_MS,
    TARGET_WAIT_MS,
    Candidate,
    Flag,
    Merge,
    Presence,
    PresenceState,
    begin_merge,
    claim_delay_ms,
    may_claim,
    merged_watermark,
    newer_copy,
    tail_from,
)
from metaq.replication.epochs import CopyFacts, Epoch, EpochStart
from metaq.replication.record import make_record

ALL = frozenset({1, 2, 3})
RECORD = replace(make_record("s", 1, ALL, min_in_sync=2, nonce="init"), in_sync=ALL).at(
    2, "a", leader=1
)


def present(replica: int, flag: Flag = Flag.NONE, damaged: int = 0) -> Presence:
    ready = PresenceState.READY
    return Presence(replica, 1, ready, RECORD.revision, 2, flag, damaged)


def own(replica: int, flag: Flag = Flag.NONE, *, waited_ms: int = 0) -> Candidate:
    return Candidate(replica, flag, waited_ms, is_sure=True)


def test_a_member_claims_when_enough_others_are_there() -> None:
    """Else it waits, and claims alone if it is sure of its bytes."""
    two = [present(2), present(3)]
    assert may_claim(own(2), RECORD, two)
    assert not may_claim(own(2), RECORD, [present(2)])
    late = own(2, waited_ms=CLAIM_WAIT_MS)
    assert may_claim(late, RECORD, [present(2)])
    assert not may_claim(replace(late, is_sure=False), RECORD, [present(2)])
    cut = own(2, Flag.CUT, waited_ms=CLAIM_WAIT_MS)
    assert not may_claim(cut, RECORD, [present(2, Flag.CUT)])
    assert may_claim(cut, RECORD, [present(2, Flag.CUT), present(3)])


def test_replicas_that_may_lack_bytes_do_not_claim() -> None:
    """Outside the set, incomplete, not ready, or with a record that is no successor."""
    two = [present(2), present(3)]
    outside = replace(RECORD, in_sync=frozenset({1, 3}))
    assert not may_claim(own(2), outside, two)
    assert not may_claim(own(2, Flag.INCOMPLETE), RECORD, two)
    stopping = replace(present(2), state=PresenceState.STOPPING)
    assert not may_claim(own(2), RECORD, [stopping, present(3)])
    newer = replace(present(3), revision=RECORD.revision + 1)
    assert not may_claim(own(2), RECORD, [present(2), newer])


def test_a_chosen_successor_claims_first() -> None:
    """For two seconds, while it is there."""
    record = replace(RECORD, target=3)
    two = [present(2), present(3)]
    assert not may_claim(own(2), record, two)
    assert may_claim(own(3), record, two)
    assert may_claim(own(2, waited_ms=TARGET_WAIT_MS), record, two)
    assert may_claim(own(2), record, [present(1), present(2)])


def test_below_the_minimum_all_members_must_be_there() -> None:
    """A set that was begun, or forced, with one replica is led by it at once."""
    alone = replace(RECORD, in_sync=frozenset({2}))
    assert may_claim(own(2), alone, [present(2)])


def test_the_rank_is_a_pause() -> None:
    """The last leader first, then those without damage and without a cut tail."""
    members = [present(1), present(2, damaged=1), present(3, Flag.CUT)]
    delays = [claim_delay_ms(k, RECORD, members) for k in (1, 2, 3)]
    assert delays == [0, 2 * RANK_STEP_MS, RANK_STEP_MS]


def test_a_copy_from_another_history_stops_claims() -> None:
    """It has more, or knows a change of an epoch that the record has not had."""
    record = RECORD.at(3, "b", leader=2)
    cases = [
        (RECORD.revision, 2, False),
        (RECORD.revision + 1, 2, True),
        (record.revision, 3, False),
        (record.revision + 1, 3, True),
        (record.revision, 4, True),
    ]
    for revision, epoch, is_newer in cases:
        shown = replace(present(1), revision=revision, epoch=epoch)
        assert (newer_copy(record, [shown]) is shown) is is_newer


def test_a_claimer_leads_when_enough_have_answered() -> None:
    """After a time one that is sure of its directories leads with what it has."""
    merge = begin_merge(RECORD, 2)
    assert not merge.may_lead(Flag.NONE, waited_ms=0, is_sure=True)
    assert merge.may_lead(Flag.NONE, waited_ms=MERGE_WAIT_MS, is_sure=True)
    assert not merge.may_lead(Flag.NONE, waited_ms=MERGE_WAIT_MS, is_sure=False)
    assert not merge.may_lead(Flag.CUT, waited_ms=MERGE_WAIT_MS, is_sure=False)
    answered = replace(merge, answered=frozenset({2, 3}))
    assert answered.may_lead(Flag.CUT, waited_ms=0, is_sure=False)
    assert not answered.may_lead(
        Flag.INCOMPLETE, waited_ms=MERGE_WAIT_MS, is_sure=False
    )


def test_a_replica_that_cut_a_tail_is_no_witness_for_itself() -> None:
    """Another one answers, if there is one, also where one is enough."""
    alone = frozenset({2})
    assert Merge(ALL, 1, alone).may_lead(Flag.NONE, waited_ms=0, is_sure=False)
    assert not Merge(ALL, 1, alone).may_lead(
        Flag.CUT, waited_ms=MERGE_WAIT_MS, is_sure=False
    )
    assert Merge(alone, 1, alone).may_lead(Flag.CUT, waited_ms=0, is_sure=False)


def copy(epoch: int, end: int, *, hw: int = 0, begin: int = 0) -> CopyFacts:
    table = [EpochStart(Epoch(1, "n"), Offset(0))]
    if epoch > 1:
        table.append(EpochStart(Epoch(epoch, "n"), Offset(begin)))
    return CopyFacts(1, Offset(0), Offset(end), Offset(hw), tuple(table))


def test_a_claimer_takes_the_tail_that_it_lacks() -> None:
    """From the divergence point on, and never below its own high watermark."""
    assert tail_from(copy(1, 9), copy(1, 12)) == 9
    assert tail_from(copy(1, 12), copy(1, 9)) is None
    assert tail_from(copy(1, 12), copy(2, 9, begin=6)) == 6
    assert tail_from(copy(1, 12, hw=7), copy(2, 9, begin=6)) is None


def test_a_claimer_notices_that_committed_bytes_are_missing() -> None:
    """A high watermark that it hears of is true, and its own end is below."""
    assert merged_watermark(copy(1, 9), [Offset(3), Offset(10)]) == 10
    assert merged_watermark(copy(1, 9, hw=4), [Offset(3)]) == 4
