"""Fate of prepared branches: decided, never to be decided, or still open."""

import pytest

from metaq.client.produce.branch_fates import Recovery, plan_ends
from metaq.model import BrokerId, XaTransactionId

ZERO, ONE = BrokerId(0), BrokerId(1)
OURS = XaTransactionId(1, b"a", b"", "q")
FOREIGN = XaTransactionId(1, b"b", b"", "q")


@pytest.mark.parametrize(
    ("named", "is_over", "fate"),
    [
        ([ZERO], True, "commit"),
        ([ZERO], False, "commit"),
        ([ONE], True, "superseded"),
        ([ONE], False, "undecided"),
        ([], True, "superseded"),
        ([], False, "undecided"),
    ],
)
def test_a_branch_is_committed_only_where_it_is_named(
    named: list[BrokerId], is_over: bool, fate: str
) -> None:
    """At the broker that the decision names; others end when nothing can name them."""
    found = plan_ends({ZERO: [OURS]}, {OURS: named}, lambda _xid: is_over)
    assert found == Recovery((), (), ())._replace(**{fate: ((ZERO, OURS),)})


def test_an_id_that_is_not_ours_is_left_alone() -> None:
    """Also one that a decision seems to name; the rest is in order of brokers."""
    found = plan_ends(
        {ONE: [FOREIGN, OURS], ZERO: [OURS]},
        {OURS: [ZERO, ONE], FOREIGN: [ONE]},
        lambda xid: None if xid == FOREIGN else True,
    )
    assert found == Recovery(((ZERO, OURS), (ONE, OURS)), (), ())
