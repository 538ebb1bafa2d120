"""One XA transaction under way: a branch at each broker that it has messages for.

Its owner ends it: by xid, over any connection.
"""

from metaq.client.errors import XaError
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.put_connection import PutConnection
from metaq.client.produce.transaction_branch import (
    Branch,
    PendingResult,
    TransactionParts,
)
from metaq.client.produce.transaction_replies import DUPID
from metaq.errors import TransactionError
from metaq.model import BrokerId, Millis, XaTransactionId


class XaBranches:
    """A transaction under way. Owner: who began it; one call at a time."""

    def __init__(
        self,
        parts: TransactionParts,
        xid: XaTransactionId,
        lifetime_s: int,
        *,
        is_refusing_others: bool = False,
    ) -> None:
        """Begin without branches; nothing is sent.

        Args:
            parts: of a producer.
            xid: its id.
            lifetime_s: time until a broker rolls back what is not prepared.
            is_refusing_others: it has no messages for MetaQ 1.4 brokers.
        """
        self._parts = parts
        self.xid = xid
        self._lifetime_s = lifetime_s
        self._is_refusing_others = is_refusing_others
        self.branches: dict[BrokerId, Branch] = {}
        self.is_prepared = False
        self.promised_ms: Millis | None = None
        self.failure: BaseException | None = None

    async def put(
        self, topic: str, messages: list[OutgoingMessage], *, deadline_s: float
    ) -> list[PendingResult]:
        """Add messages, at least one; see `TransactionSends.send`."""
        placed = await self._parts.place(
            topic, messages, None, deadline_s=deadline_s, is_bound=False
        )
        places: dict[BrokerId, list[int]] = {}
        for at, message in enumerate(placed):
            places.setdefault(message.partition.broker_id, []).append(at)
        found: dict[int, PendingResult] = {}
        try:
            for broker_id, some in places.items():
                branch = await self._branch(broker_id, deadline_s)
                mine = [placed[at] for at in some]
                branch.check([one.payload for one in mine])
                results = await branch.put(mine, deadline_s=deadline_s)
                found.update(zip(some, results, strict=True))
        except BaseException as error:
            self.failure = error
            raise
        return [found[at] for at in range(len(placed))]

    async def _branch(self, broker_id: BrokerId, deadline_s: float) -> Branch:
        branch = self.branches.get(broker_id)
        if branch is None:
            connection = await self._parts.wait_connect(
                broker_id, deadline_s=deadline_s
            )
            if self._is_refusing_others:
                _require_ours(connection, broker_id)
            branch = Branch(self._parts, connection, broker_id, self.xid)
            self.branches[broker_id] = branch
            try:
                await branch.begin(
                    self._lifetime_s,
                    deadline_s=deadline_s,
                    qualifier=self.xid.qualifier,
                )
            except XaError as error:
                if error.code == DUPID:
                    # It is another program's: no command of ours may reach it.
                    del self.branches[broker_id]
                raise
        return branch


def _require_ours(connection: PutConnection, broker_id: BrokerId) -> None:
    if not connection.capabilities.mput_tx:
        raise TransactionError(
            f"broker {broker_id} is a MetaQ 1.4 broker, which loses prepared"
            " transactions when it starts again: exactly once writes to brokers of this"
            " project alone; its messages may come from there"
        )
