"""Sums over producers, consumers and runs that do not fall when one is closed.

A sum that fell would look like a restart to those who compute rates from it. So a
closed object is dropped after its last count, and its counters are added to those of
the closed ones before it. Nothing is buffered or in flight there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

from metaq.client.consume.progress import ConsumerStatistics
from metaq.stats import total_of

CLOSED_GROUPS_MAX: Final = 1_000
"""Groups whose closed consumers one client remembers; of more, those with which a
consumer was closed last."""

S = TypeVar("S")


class Ending(Protocol):
    """End of a counting object."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it is closed and its counters are final."""
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
        # One value, because a snapshot may be taken in another thread.
        self._state: tuple[tuple[S, ...], tuple[E, ...]] = ((), ())

    def add(self, new: E) -> None:
        """Count a new one, and forget those that have ended."""
        closed, known = self._state
        ended = [one for one in known if one.has_ended]
        if ended:
            closed = (self._total_of([*closed, *map(self._read, ended)]),)
        alive = (one for one in known if one not in ended)
        self._state = (closed, (*alive, new))

    def split(self) -> tuple[tuple[E, ...], S | None]:
        """Return those that are open, and the sum of the closed ones.

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
        """Return the sum of all; None: there was none."""
        closed, known = self._state
        parts = [*closed, *map(self._read, known)]
        return self._total_of(parts) if parts else None


def total_of_groups(
    parts: Sequence[Mapping[str, ConsumerStatistics]],
) -> Mapping[str, ConsumerStatistics]:
    """Return the sums of the closed consumers of each group.

    Bounded by `CLOSED_GROUPS_MAX`.
    """
    groups: dict[str, ConsumerStatistics] = {}
    for part in parts:
        for group, counters in part.items():
            known = groups.pop(group, None)
            both = [counters] if known is None else [known, counters]
            groups[group] = total_of(both)
    return dict([*groups.items()][-CLOSED_GROUPS_MAX:])
