"""What the producers of one client counted: no sum falls when one of them is closed.

A sum that fell would look like a restart to whoever computes rates from it. So a
producer that is closed is forgotten when it has counted its last, and its counters are
added to those of the closed ones before it. Nothing is buffered or in flight there.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from metaq.client.ordered import OrderedStatistics
from metaq.client.producer import ProducerStatistics
from metaq.stats import merge_snapshots

K = TypeVar("K")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Counting(Protocol[S_co]):
    """A producer, as far as its counters go."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and counts nothing any more."""
        ...

    def statistics(self) -> S_co:
        """Return a snapshot of its counters."""
        ...


class Totals(Generic[S]):
    """The producers of one kind that a client has made.

    Concurrency: `add` on the client's loop, `snapshot` in any thread.
    """

    def __init__(self, total_of: Callable[[Sequence[S]], S]) -> None:
        """Start with none.

        Args:
            total_of: puts snapshots of closed producers together, one or more.
        """
        self._total_of = total_of
        # One value: whoever takes a snapshot may be in another thread.
        self._state: tuple[tuple[S, ...], tuple[Counting[S], ...]] = ((), ())

    def add(self, producer: Counting[S]) -> None:
        """Count what a new producer counts, and forget those that have ended."""
        closed, known = self._state
        ended = [one for one in known if one.has_ended]
        if ended:
            closed = (self._total_of([*closed, *(one.statistics() for one in ended)]),)
        alive = (one for one in known if one not in ended)
        self._state = (closed, (*alive, producer))

    def snapshot(self) -> tuple[tuple[S, ...], S | None]:
        """Return what each open producer counted, and the closed ones together.

        None in place of the second: none was closed.
        """
        before, known = self._state
        opened: list[S] = []
        closed = list(before)
        for one in known:
            side = closed if one.is_closed else opened
            side.append(one.statistics())
        return tuple(opened), self._total_of(closed) if closed else None


def total_of_producers(parts: Sequence[ProducerStatistics]) -> ProducerStatistics:
    """Return what closed producers, one or more, counted together."""
    return ProducerStatistics(
        appended_count=sum(part.appended_count for part in parts),
        acknowledged_count=sum(part.acknowledged_count for part in parts),
        acknowledged_bytes=sum(part.acknowledged_bytes for part in parts),
        by_partition=_added(part.by_partition for part in parts),
        doubtful_count=sum(part.doubtful_count for part in parts),
        failed=_added(part.failed for part in parts),
        dropped=_added(part.dropped for part in parts),
        buffered_count=0,
        buffered_bytes=0,
        full_count=sum(part.full_count for part in parts),
        in_flight_count=0,
        retried_count=sum(part.retried_count for part in parts),
        moved_count=sum(part.moved_count for part in parts),
        batch_counts=merge_snapshots(part.batch_counts for part in parts),
        latency_s=merge_snapshots(part.latency_s for part in parts),
    )


def total_of_ordered(parts: Sequence[OrderedStatistics]) -> OrderedStatistics:
    """Return what closed ordered producers, one or more, counted together."""
    return OrderedStatistics(
        sent_count=sum(part.sent_count for part in parts),
        spooled_count=sum(part.spooled_count for part in parts),
        replayed_count=sum(part.replayed_count for part in parts),
        waiting={},
        problems=(),
    )


def _added(parts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
