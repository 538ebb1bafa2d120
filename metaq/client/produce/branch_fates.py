"""Plan for prepared branches: commit, roll back, or leave prepared. Pure.

Branches named by a decision are committed. Any other branch is rolled back only when no
decision can name it any more; until then it stays prepared.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

from metaq.model import BrokerId, XaTransactionId

Placed: TypeAlias = tuple[BrokerId, XaTransactionId]
"""A branch: its broker and its id."""


class Recovery(NamedTuple):
    """Prepared branches by what becomes of them; each ascending by broker."""

    commit: tuple[Placed, ...]
    """Branches named by a decision."""
    superseded: tuple[Placed, ...]
    """Branches that no decision names or ever will: to be rolled back."""
    undecided: tuple[Placed, ...]
    """Branches that no decision names yet, and one may: left prepared."""


def plan_ends(
    found: Mapping[BrokerId, Collection[XaTransactionId]],
    named: Mapping[XaTransactionId, Collection[BrokerId]],
    is_over: Callable[[XaTransactionId], bool | None],
) -> Recovery:
    """Return what becomes of the branches that brokers have prepared.

    Args:
        found: broker → ids that it lists.
        named: ids that decisions name → their brokers.
        is_over: returns whether no decision can name an id any more; None for a foreign
            id, which is left out.
    """
    commit, superseded = list[Placed](), list[Placed]()
    undecided = list[Placed]()
    for broker_id, xids in sorted(found.items()):
        for xid in xids:
            fate = is_over(xid)
            if fate is None:
                continue
            if broker_id in named.get(xid, ()):
                commit.append((broker_id, xid))
            else:
                (superseded if fate else undecided).append((broker_id, xid))
    return Recovery(tuple(commit), tuple(superseded), tuple(undecided))
