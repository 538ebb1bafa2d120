"""What producers, consumers and runs counted: no sum falls when one of them is closed.

A sum that fell would look like a restart to whoever computes rates from it. So what is
closed is forgotten when it has counted its last, and its counters are added to those
of the closed ones before it. Nothing is buffered or in flight there.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Generic, Protocol, TypeVar

from metaq.client.consume.duplicate_filter import DuplicateStatistics
from metaq.client.consume.handling import HandlingStatistics
from metaq.client.consume.progress import ConsumerStatistics
from metaq.client.produce.ordered_producer import OrderedStatistics
from metaq.client.produce.producer import ProducerStatistics
from metaq.stats import merge_snapshots

CLOSED_GROUPS_MAX: Final = 1_000
"""Groups whose closed consumers one client remembers; of more, those with which a
consumer was closed last."""

K = TypeVar("K")
S = TypeVar("S")


class Ending(Protocol):
    """What counts, as far as its end goes."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and counts nothing any more."""
        ...


E = TypeVar("E", bound=Ending)


class Totals(Generic[E, S]):
    """All of one kind that one owner has made.

    Concurrency: `add` on the client's loop, the others in any thread.
    """

    def __init__(
        self, read: Callable[[E], S], total_of: Callable[[Sequence[S]], S]
    ) -> None:
        """Start with none.

        Args:
            read: takes a snapshot of one.
            total_of: puts snapshots together, one or more, the oldest first.
        """
        self._read = read
        self._total_of = total_of
        # One value: whoever takes a snapshot may be in another thread.
        self._state: tuple[tuple[S, ...], tuple[E, ...]] = ((), ())

    def add(self, new: E) -> None:
        """Count what a new one counts, and forget those that have ended."""
        closed, known = self._state
        ended = [one for one in known if one.has_ended]
        if ended:
            closed = (self._total_of([*closed, *map(self._read, ended)]),)
        alive = (one for one in known if one not in ended)
        self._state = (closed, (*alive, new))

    def split(self) -> tuple[tuple[E, ...], S | None]:
        """Return those that are open, and what the closed ones counted together.

        None in place of the second: none was closed.
        """
        before, known = self._state
        opened: list[E] = []
        closed = list(before)
        for one in known:
            # Looked at once: it may be closed meanwhile, and is in one of the two.
            if one.is_closed:
                closed.append(self._read(one))
            else:
                opened.append(one)
        return tuple(opened), self._total_of(closed) if closed else None

    def total(self) -> S | None:
        """Return what all of them counted together; None: there was none."""
        closed, known = self._state
        parts = [*closed, *map(self._read, known)]
        return self._total_of(parts) if parts else None


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
        refused_count=sum(part.refused_count for part in parts),
        waiting={},
        problems=(),
    )


def total_of_handling(parts: Sequence[HandlingStatistics]) -> HandlingStatistics:
    """Return what runs, one or more, counted together; parked is what the last has."""
    return HandlingStatistics(
        handled_count=sum(part.handled_count for part in parts),
        failure_count=sum(part.failure_count for part in parts),
        dead_letter_count=sum(part.dead_letter_count for part in parts),
        dropped_count=sum(part.dropped_count for part in parts),
        parked_count=sum(part.parked_count for part in parts),
        replayed_count=sum(part.replayed_count for part in parts),
        waiting_count=parts[-1].waiting_count,
    )


def total_of_groups(
    parts: Sequence[Mapping[str, ConsumerStatistics]],
) -> Mapping[str, ConsumerStatistics]:
    """Return what the closed consumers of each group counted together.

    Bounded by `CLOSED_GROUPS_MAX`.
    """
    groups: dict[str, ConsumerStatistics] = {}
    for part in parts:
        for group, counters in part.items():
            known = groups.pop(group, None)
            both = [counters] if known is None else [known, counters]
            groups[group] = _total_of_consumers(both)
    return dict([*groups.items()][-CLOSED_GROUPS_MAX:])


def _total_of_consumers(parts: Sequence[ConsumerStatistics]) -> ConsumerStatistics:
    runs = [part.handling for part in parts if part.handling is not None]
    asked = [part.duplicates for part in parts if part.duplicates is not None]
    return ConsumerStatistics(
        delivered_count=sum(part.delivered_count for part in parts),
        filtered_count=sum(part.filtered_count for part in parts),
        repeat_count=sum(part.repeat_count for part in parts),
        reset_count=sum(part.reset_count for part in parts),
        missing_bytes=sum(part.missing_bytes for part in parts),
        commit_count=sum(part.commit_count for part in parts),
        commit_failure_count=sum(part.commit_failure_count for part in parts),
        fetches={},
        handling=replace(total_of_handling(runs), waiting_count=0) if runs else None,
        duplicates=_total_of_duplicates(asked) if asked else None,
    )


def _total_of_duplicates(parts: Sequence[DuplicateStatistics]) -> DuplicateStatistics:
    return DuplicateStatistics(
        skipped_count=sum(part.skipped_count for part in parts),
        failure_count=sum(part.failure_count for part in parts),
        forgotten_count=sum(part.forgotten_count for part in parts),
    )


def _added(parts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
