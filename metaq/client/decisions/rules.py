"""Exactly once, from topic to topic: decides which transactions are committed. Pure.

The results of a batch, which has messages of one or more partitions of a group, are
messages to other topics. They are prepared in one XA transaction, with a branch at each
of their brokers. Then one write to ZooKeeper *decides*: for each partition of the batch
it stores the next offset and names the transaction (`metaq/zk/decisions.py`). Then all
branches are committed, and the batch is complete.

    sends -> prepare at every broker -> decide -> commit at every broker -> complete

These rules keep members consistent when some die, hang or come back late:

1. A branch is committed only if a decision names it.
2. A member decides about its next batch only after the last one is complete. So a
   decision is complete before the next one of its partition replaces it.
3. After claiming a partition, a member completes its last decision before the first
   get.
4. A branch is rolled back by the member that began it, if it knows that it will not
   decide; by others only if its token is gone and no decision names it. They read in
   this order: branches at brokers, then tokens, then all decisions of the group.
5. A member that does not know whether it has decided drops its token, and then claims
   its partitions again (rule 3). Without the token its request can no longer be carried
   out.

A member that was taken for dead cannot decide: its token is gone with its session, and
so are the owner nodes that others claim. Rule 4 is safe: a token that is gone never
comes back, so a branch not named by then is never named; and a decision that was
replaced was complete (rules 2 and 3), so a rollback of its branches finds nothing.
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
    """Return the branches named by the decision about a partition.

    Raises:
        PayloadError: its xid is not that of an XA transaction.
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
    """Return what becomes of the branches prepared for a group.

    Args:
        found: broker → ids that it lists under the group's qualifier; read first.
        tokens: tokens of live members, who end their own branches; read next.
        decisions: last decision of every partition; read last.
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
