"""Ends of the branches that dead members of a group have left.

    end_dead   branches whose token is gone: commit what is named, roll back the rest
    settle     by hand: the same for a whole group, and say what is left

Rules 1 and 4 of `rules.py`.
"""

import logging
from typing import NamedTuple

from metaq.client.cluster.catalog import recorded_addresses
from metaq.client.cluster.context import ClientContext
from metaq.client.decisions.rules import plan_group
from metaq.client.errors import TransactionInDoubtError
from metaq.client.fan_out import failures
from metaq.client.names import name_few
from metaq.client.produce.branch_endings import BranchEndings
from metaq.client.produce.branch_fates import Placed
from metaq.client.produce.xa_commands import COMMIT, ROLLBACK
from metaq.errors import ConfigError, MetaqError
from metaq.model import BrokerId
from metaq.zk.decisions import GroupDecisions, parse_batch_xid, qualifier_of

_log = logging.getLogger(__name__)


class Swept(NamedTuple):
    """Branches that were found prepared for a group."""

    committed: tuple[Placed, ...]
    """A decision of a dead member names them."""
    rolled_back: tuple[Placed, ...]
    """No decision names them, and their member is dead."""
    living: dict[str, tuple[Placed, ...]]
    """Name of a member that is alive → branches that are its own to end."""
    silent: tuple[BrokerId, ...]
    """Brokers that did not say what they have, ascending."""


async def end_dead(context: ClientContext, group: str, *, deadline_s: float) -> Swept:
    """End the branches that dead members of a group left prepared.

    Raises:
        ConfigError: a client without ZooKeeper.
        CoordinationError: ZooKeeper cannot be asked; some may be ended.
    """
    if context.coordinator is None:
        raise ConfigError("decisions are in ZooKeeper, and this client has none")
    endings = BranchEndings(context, deadline_s, name=qualifier_of(group))
    decisions = GroupDecisions(context.coordinator, context.paths, group=group)
    # In this order: see rule 4.
    found = await endings.look()
    lists = {k: v for k, v in found.items() if not isinstance(v, MetaqError)}
    silent = tuple(sorted(failures(dict(found))))
    if not any(lists.values()):
        return Swept((), (), {}, silent)
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
        silent,
    )


async def settle(context: ClientContext, group: str, *, deadline_s: float) -> Swept:
    """End what dead members left, and make sure that nothing else is.

    Raises:
        TransactionInDoubtError: something of them stays prepared, or a recorded broker
            does not confirm that nothing is left.
        ConfigError, CoordinationError: as `end_dead`.
    """
    swept = await end_dead(context, group, deadline_s=deadline_s)
    again = await end_dead(context, group, deadline_s=deadline_s)
    left = again.committed + again.rolled_back
    recorded = await recorded_addresses(context, deadline_s=deadline_s)
    there = context.metadata.snapshot.brokers
    silent = sorted({*again.silent, *recorded} - (there.keys() - again.silent))
    if silent or left:
        why = f"{len(left)} branches stay prepared"
        if silent:
            why = (
                f"brokers {name_few(list(map(str, silent)))} do not say what they have"
            )
        raise TransactionInDoubtError(f"group {group}: {why}; settle it again")
    return Swept(swept.committed, swept.rolled_back, again.living, ())
