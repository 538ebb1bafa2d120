"""Rules of decisions: which branches of a group count, by tokens and decisions."""

import pytest

from metaq.client.decisions.rules import branches_of, make_decision, plan_group
from metaq.client.produce.branch_fates import Recovery
from metaq.model import BrokerId, TopicPartition, XaTransactionId
from metaq.zk.decisions import GroupDecision, Place, batch_xid
from metaq.zk.errors import PayloadError

ZERO, ONE = BrokerId(0), BrokerId(1)
TOKEN = "0a" * 16
BATCH = batch_xid("g", "g_one", TOKEN, 1)
NEXT = batch_xid("g", "g_one", TOKEN, 2)
PLACE = TopicPartition("t", ZERO, 0)


@pytest.mark.parametrize(
    ("tokens", "named", "fate"),
    [
        ([TOKEN], [ZERO], "commit"),
        ([], [ZERO], "commit"),
        ([TOKEN], [], "undecided"),
        ([], [], "superseded"),
        (["0b" * 16], [ONE], "superseded"),
    ],
)
def test_a_batch_ends_by_its_decision_and_its_token(
    tokens: list[str], named: list[BrokerId], fate: str
) -> None:
    """Named: commit. Else roll back, once the token of its member is gone."""
    decisions = {PLACE: Place(decision=make_decision(BATCH, named))}
    found = plan_group({ZERO: [BATCH]}, tokens, decisions)
    assert found == Recovery((), (), ())._replace(**{fate: ((ZERO, BATCH),)})


def test_each_number_is_a_batch_of_its_own() -> None:
    """A decision names one batch of a member, not the next one."""
    decisions = {PLACE: Place(decision=make_decision(BATCH, [ZERO]))}
    found = plan_group({ZERO: [BATCH, NEXT]}, [], decisions)
    assert found == Recovery(((ZERO, BATCH),), ((ZERO, NEXT),), ())


def test_decisions_of_several_partitions_count_together() -> None:
    """Members of other partitions have decided other batches."""
    decisions = {
        PLACE: Place(decision=make_decision(BATCH, [ONE, ZERO])),
        TopicPartition("t", ZERO, 1): Place(decision=make_decision(NEXT, [ONE])),
    }
    found = plan_group({ZERO: [BATCH, NEXT], ONE: [NEXT]}, [], decisions)
    assert found == Recovery(((ZERO, BATCH), (ONE, NEXT)), ((ZERO, NEXT),), ())


def test_an_id_of_another_program_is_left_alone() -> None:
    other = XaTransactionId(7, b"a", b"", "group-g")
    assert plan_group({ZERO: [other]}, [], {}) == Recovery((), (), ())


def test_a_decision_has_its_branches_in_order_of_brokers() -> None:
    decision = make_decision(BATCH, {ONE, ZERO})
    assert branches_of(PLACE, decision) == [(ZERO, BATCH), (ONE, BATCH)]
    assert branches_of(PLACE, make_decision(BATCH, [])) == []


@pytest.mark.parametrize("key", ["", "x", "TX:billing:1", "XID:1:zz:0b:g"])
def test_a_decision_that_names_no_transaction_is_refused(key: str) -> None:
    """Nothing is guessed: which branches count is unknown; the partition is named."""
    with pytest.raises(PayloadError, match="decision about t/0-0: "):
        branches_of(PLACE, GroupDecision(key, (ZERO,)))
