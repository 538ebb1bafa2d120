"""Exactly once, from topic to topic: which transactions count. Pure.

A batch of messages, of one or more partitions of a group, becomes messages of other
topics: they are prepared in one XA transaction, a branch at each of their brokers. Then
one write to ZooKeeper *decides*: it moves the offsets of the batch and names the
transaction, for each of its partitions (`metaq/zk/decisions.py`). Then all branches are
committed, and the batch is complete.

    sends -> prepare at every broker -> decide -> commit at every broker -> complete

Rules, by which members that die, hang or come back late contradict no other member:

1. A branch is committed only when a decision names it.
2. A member decides about its next batch when the last one is complete. So a decision
   that makes way for the next one of its partition is complete.
3. Who claims a partition completes what its last decision names before the first get.
4. A branch is rolled back by the member that began it, which knows that it will not
   decide; by others only when its token is gone and no decision names it. They look in
   this order: branches at brokers, then tokens, then all decisions of the group.
5. A member that does not know whether it has decided gives up its token, and then
   claims its partitions again, which is rule 3. Without the token its request cannot be
   carried out any more.

Why a member that was taken for dead cannot decide: its token went with its session,
together with the owner nodes that others claim. Why rule 4 is safe: a token that is
gone never comes back, so what is not named by then is never named; and what was named
and has made way was complete (rules 2 and 3), so a rollback finds nothing.
"""

from collections.abc import Collection, Mapping

from metaq.client.produce.branch_fates import Placed, Recovery, plan_ends
from metaq.errors import RemoteProtocolError
from metaq.model import BrokerId, TopicPartition, XaTransactionId
from metaq.protocol.transaction_ids import format_key, parse_key
from metaq.zk.decisions import GroupDecision, Place, parse_batch_xid
from metaq.zk.errors import PayloadError


def make_decision(xid: XaTransactionId, brokers: Collection[BrokerId]) -> GroupDecision:
    """Return the decision that names a transaction."""
    return GroupDecision(format_key(xid), tuple(sorted(brokers)))


def branches_of(partition: TopicPartition, decision: GroupDecision) -> list[Placed]:
    """Return the branches that the decision about a partition names.

    Raises:
        PayloadError: it names no transaction.
    """
    try:
        xid = parse_key(decision.xid)
    except RemoteProtocolError as error:
        raise PayloadError(f"decision about {partition}: {error}") from error
    if not isinstance(xid, XaTransactionId):
        raise PayloadError(
            f"decision about {partition}: expected an XA transaction,"
            f" got {decision.xid!r}"
        )
    return [(broker_id, xid) for broker_id in decision.brokers]


def plan_group(
    found: Mapping[BrokerId, Collection[XaTransactionId]],
    tokens: Collection[str],
    decisions: Mapping[TopicPartition, Place],
) -> Recovery:
    """Return what becomes of branches that brokers have prepared for a group.

    Args:
        found: broker → ids that it lists under the group's qualifier, read first.
        tokens: read after that. Branches of these are their members' to end.
        decisions: the last ones of all partitions, read after that.
    """

    def is_over(xid: XaTransactionId) -> bool | None:
        name = parse_batch_xid(xid)
        return None if name is None else name.token not in tokens

    named: dict[XaTransactionId, set[BrokerId]] = {}
    for partition, place in decisions.items():
        if place.decision is not None:
            for broker_id, xid in branches_of(partition, place.decision):
                named.setdefault(xid, set()).add(broker_id)
    return plan_ends(found, named, is_over)
