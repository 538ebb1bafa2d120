"""When transactions run out of time."""

import heapq
from collections.abc import Iterator
from typing import Final

from metaq.txn.transaction import BrokerTransaction

SPARE_MAX: Final = 1000
"""Places in the heap of transactions that have no deadline any more, besides as many as
there are deadlines; then it is made anew."""


class Deadlines:
    """The deadlines of transactions. Owner: the coordinator.

    What is cleared stays in the heap, unheeded, until its time or until there are many.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, BrokerTransaction]] = []
        self._number = 0
        self._count = 0

    def __len__(self) -> int:
        """Return how many transactions have a deadline."""
        return self._count

    def add(self, tx: BrokerTransaction, deadline_s: float) -> None:
        """Give a transaction that has none a deadline on the monotonic clock."""
        assert tx.deadline_s is None, tx.key
        tx.deadline_s = deadline_s
        self._number += 1
        self._count += 1
        heapq.heappush(self._heap, (deadline_s, self._number, tx))

    def clear(self, tx: BrokerTransaction) -> None:
        """Let a transaction take its time."""
        if tx.deadline_s is None:
            return
        tx.deadline_s = None
        self._count -= 1
        if len(self._heap) > 2 * self._count + SPARE_MAX:
            self._heap = [each for each in self._heap if each[2].deadline_s is not None]
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> Iterator[BrokerTransaction]:
        """Yield the transactions whose time is over, oldest deadline first."""
        while self._heap and self._heap[0][0] <= now_s:
            tx = heapq.heappop(self._heap)[2]
            if tx.deadline_s is not None:
                yield tx
