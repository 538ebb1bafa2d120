"""Ends the branches left by dead members of a group.

    end_dead   branches whose token is gone: commit those named, roll back the rest
    settle     by an operator: the same, and check that no other branch is left
    forget     before a group is deleted: settle it, and delete its decisions

Rules 1 and 4 of `rules.py`.
"""

import logging
from typing import NamedTuple

from metaq.client.cluster.context import ClientContext
from metaq.client.decisions.rules import plan_group
from metaq.client.errors import GroupInUseError, TransactionInDoubtError
from metaq.client.fan_out import answers
from metaq.client.names import name_few
from metaq.client.produce.branch_endings import BranchEndings, Found, silent_brokers
from metaq.client.produce.branch_fates import Placed
from metaq.client.produce.xa_commands import COMMIT, ROLLBACK, key_of
from metaq.zk.decisions import GroupDecisions, parse_batch_xid, qualifier_of
from metaq.zk.errors import NodeChangedError, NodeNotEmptyError

_log = logging.getLogger(__name__)


class Swept(NamedTuple):
    """Branches found prepared for a group."""

    committed: tuple[Placed, ...]
    """Branches of dead members that a decision names."""
    rolled_back: tuple[Placed, ...]
    """Branches of dead members that no decision names."""
    living: dict[str, tuple[Placed, ...]]
    """Name of a live member → its branches, which it ends itself."""
    found: Found
    """Reply of each broker."""


async def end_dead(context: ClientContext, group: str, *, deadline_s: float) -> Swept:
    """End the branches that dead members of a group left prepared.

    Raises:
        ConfigError: the client has no ZooKeeper.
        CoordinationError: ZooKeeper is not available; no branch was ended.
    """
    decisions = _decisions(context, group)
    endings = BranchEndings(context, deadline_s, name=qualifier_of(group))
    # In this order: see rule 4.
    found = await endings.look()
    lists = answers(found)
    if not any(lists.values()):
        return Swept((), (), {}, found)
    tokens = await decisions.read_tokens(deadline_s=deadline_s)
    plan = plan_group(lists, tokens, await decisions.read_all(deadline_s=deadline_s))
    committed, living = [], dict[str, list[Placed]]()
    for placed in plan.commit + plan.undecided:
        name = parse_batch_xid(placed[1])
        member = tokens.get(name.token) if name else None
        if member is None:
            committed.append(placed)
        else:
            living.setdefault(member, []).append(placed)
    await endings.end(COMMIT, committed)
    await endings.end(ROLLBACK, plan.superseded)
    if committed or plan.superseded:
        _log.info(
            "ended what dead members left: group=%s committed=%d rolled_back=%d",
            group,
            len(committed),
            len(plan.superseded),
        )
    return Swept(
        tuple(committed),
        plan.superseded,
        {member: tuple(some) for member, some in living.items()},
        found,
    )


async def settle(context: ClientContext, group: str, *, deadline_s: float) -> Swept:
    """End the branches of dead members, and verify that none is left.

    Raises:
        TransactionInDoubtError: a branch stays prepared, or a recorded broker does not
            confirm that it has none.
        ConfigError: as `end_dead`.
        CoordinationError: ZooKeeper is not available; some branches may be ended.
    """
    swept = await end_dead(context, group, deadline_s=deadline_s)
    again = await end_dead(context, group, deadline_s=deadline_s)
    if silent := await silent_brokers(context, again.found, deadline_s=deadline_s):
        raise TransactionInDoubtError(
            f"group {group}: brokers {name_few(list(map(str, silent)))} did not report"
            " their transactions; settle it again when they are present"
        )
    if left := again.committed + again.rolled_back:
        keys = name_few([key_of(xid) for _broker_id, xid in left])
        raise TransactionInDoubtError(
            f"group {group}: {len(left)} branches stay prepared ({keys}); settle it"
            " again"
        )
    return swept._replace(living=again.living)


async def forget(context: ClientContext, group: str, *, deadline_s: float) -> None:
    """Settle a group without members, and delete its decisions.

    After an error some decisions may be deleted; call it again.

    Raises:
        GroupInUseError: a member has a token, or has decided since the start.
        TransactionInDoubtError, ConfigError, CoordinationError: as `settle`; no
            decision is deleted.
    """
    decisions = _decisions(context, group)
    if not await decisions.is_used(deadline_s=deadline_s):
        return
    # Read before settling: a decision made later is not settled, and makes this fail.
    kept = await decisions.read_all(deadline_s=deadline_s)
    await settle(context, group, deadline_s=deadline_s)
    try:
        await decisions.forget(kept, deadline_s=deadline_s)
    except (NodeNotEmptyError, NodeChangedError) as error:
        raise GroupInUseError(
            f"group {group}: a member that writes exactly once is alive, or its"
            f" session has not expired yet: {error}"
        ) from error


def _decisions(context: ClientContext, group: str) -> GroupDecisions:
    coordinator = context.require_coordinator("decisions are kept in")
    return GroupDecisions(coordinator, context.paths, group=group)
