"""Fate of branches that brokers have prepared. Pure.

Decisions name the branches that count. Another branch is rolled back only when nothing
can name it any more; until then it stays prepared.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

from metaq.model import BrokerId, XaTransactionId

Placed: TypeAlias = tuple[BrokerId, XaTransactionId]
"""A branch: where it is, and its id."""


class Recovery(NamedTuple):
    """Fate of prepared branches; in order."""

    commit: tuple[Placed, ...]
    """A decision names them."""
    superseded: tuple[Placed, ...]
    """None names them, and none ever will."""
    undecided: tuple[Placed, ...]
    """None names them yet, and one may."""


def plan_ends(
    found: Mapping[BrokerId, Collection[XaTransactionId]],
    named: Mapping[XaTransactionId, Collection[BrokerId]],
    is_over: Callable[[XaTransactionId], bool | None],
) -> Recovery:
    """Return what becomes of the branches that brokers have prepared.

    Args:
        found: broker → ids that it lists.
        named: the ids that decisions name, with their brokers.
        is_over: whether no decision can name an id any more; None: it is not ours, and
            left alone.
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
