"""The ledger: what happened to each partition, in order, and what may not happen.

Members append events from their threads; the order in which they stand in the list is
the order of the whole run, so no clock is read. `check` walks through them:

* a partition has one reader at a time, from `assign` to the end of `revoke`, or `fence`
* a reader goes on where the partition was left, without a gap, and never before what
  was committed; after a clean end not a message before it
* within one ownership offsets follow each other
* what is handed out after the end is at most the one batch that was on its way
* nothing acknowledged is missing, and every payload was stored once

A session that is ended by force is the exception: others see its nodes go
before its owner can know. Until it does, that member may go on.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from metaq.model import Message, TopicPartition

STRAYS_UNTIL_KNOWN = 1_000_000
"""Batches, where the end of a session is not known yet to its owner."""


class Event(NamedTuple):
    """One line of the ledger."""

    kind: str
    """assign, revoke, fence, commit, refused (a commit) or deliver."""
    member: str
    partition: TopicPartition
    begin: int = 0
    """First offset of a delivery; the offset of a commit."""
    end: int = 0
    """Offset that follows a delivery."""
    is_whole: bool = True
    """The messages of a delivery follow each other without a gap."""


@dataclass
class Ledger:
    """Events of all members, and every payload with the places it was read at."""

    events: list[Event] = field(default_factory=list)
    places: dict[bytes, set[tuple[TopicPartition, int]]] = field(default_factory=dict)
    delivered_count: int = 0

    def deliver(self, member: str, messages: Sequence[Message]) -> None:
        """Enter messages of one partition, as one call handed them out."""
        first, last = messages[0], messages[-1]
        follows = pairwise(messages)
        is_whole = all(a.next_offset == b.offset for a, b in follows)
        self.events.append(
            Event(
                "deliver",
                member,
                first.partition,
                first.offset,
                last.next_offset,
                is_whole,
            )
        )
        for message in messages:
            place = (message.partition, message.offset)
            self.places.setdefault(message.data, set()).add(place)
        self.delivered_count += len(messages)

    def note(
        self, kind: str, member: str, partitions: Iterable[TopicPartition]
    ) -> None:
        """Enter the same event for several partitions."""
        self.events.extend(Event(kind, member, partition) for partition in partitions)

    @property
    def repeat_count(self) -> int:
        """Deliveries beyond the first of each place."""
        return self.delivered_count - sum(map(len, self.places.values()))

    def missing(self, acked: Collection[bytes]) -> set[bytes]:
        """Return what is acknowledged and was not delivered yet."""
        return set(acked) - self.places.keys()


@dataclass
class _History:
    """State of one partition while the events pass."""

    reader: str | None = None
    is_fresh: bool = True
    """The present reader was handed nothing yet."""
    is_refused: bool = False
    """The last commit failed."""
    position: int = 0
    """Offset that follows the last delivery."""
    high: int = 0
    """Offset that follows the furthest delivery."""
    committed: int = 0
    low: int = 0
    """Least offset at which the next reader may begin: behind all that was handed out
    if the last one ended clean, else behind the committed offset."""
    strays: dict[str, int] = field(default_factory=dict)
    """Batches that former readers may still be handed."""
    marks: dict[str, int] = field(default_factory=dict)
    """Start of the last batch of each member: before that it handled all."""


class _Walk:
    """The state of `check`: a history per partition, and what was found."""

    def __init__(self, forced: Collection[str]) -> None:
        self.forced = forced
        self.histories: dict[TopicPartition, _History] = {}
        self.violations: list[str] = []
        self.steps: dict[str, Callable[[Event, _History], None]] = {
            "assign": self.assign,
            "revoke": self.end,
            "fence": self.end,
            "commit": self.commit,
            "refused": self.refuse,
            "deliver": self.deliver,
        }

    def blame(self, event: Event, text: str) -> None:
        self.violations.append(f"{event.member}, {event.partition}: {text}")

    def assign(self, event: Event, history: _History) -> None:
        former = history.reader
        if former is not None and former in self.forced:
            self.end(Event("fence", former, event.partition), history)
            history.strays[former] = STRAYS_UNTIL_KNOWN
        elif former is not None:
            self.blame(event, f"assigned while {former} reads")
        history.reader, history.is_fresh = event.member, True
        history.low = max(history.low, history.committed)

    def end(self, event: Event, history: _History) -> None:
        if history.reader != event.member:
            history.strays[event.member] = min(1, history.strays.get(event.member, 0))
            return
        history.reader = None
        is_clean = event.kind == "revoke" and not history.is_refused
        history.strays[event.member] = event.kind == "fence"
        if not history.is_fresh:
            history.low = history.position if is_clean else history.committed
        history.is_refused = False

    def commit(self, event: Event, history: _History) -> None:
        if history.reader == event.member:
            history.is_refused = False
            if event.begin < history.committed:
                self.blame(
                    event, f"commit went from {history.committed} to {event.begin}"
                )
        history.committed = max(history.committed, event.begin)

    def refuse(self, event: Event, history: _History) -> None:
        if history.reader == event.member:
            history.is_refused = True

    def deliver(self, event: Event, history: _History) -> None:
        if not event.is_whole:
            self.blame(event, f"a gap within {event.begin}..{event.end}")
        if event.begin < history.marks.get(event.member, 0):
            self.blame(event, f"{event.begin} again, handled by this very client")
        history.marks[event.member] = event.begin
        if history.reader == event.member:
            self._follow(event, history)
        else:
            history.strays[event.member] = history.strays.get(event.member, 0) - 1
            if history.strays[event.member] < 0:
                self.blame(event, f"{event.begin} handed out after its end")
        history.high = max(history.high, event.end)

    def _follow(self, event: Event, history: _History) -> None:
        if not history.is_fresh and event.begin != history.position:
            self.blame(event, f"expected {history.position}, got {event.begin}")
        if history.is_fresh and not history.low <= event.begin <= history.high:
            self.blame(
                event, f"expected {history.low} to {history.high}, got {event.begin}"
            )
        history.is_fresh, history.position = False, event.end


def check(
    ledger: Ledger,
    *,
    tried: Collection[bytes],
    acked: Collection[bytes],
    forced: Collection[str] = (),
) -> list[str]:
    """Return everything that may not have happened; [] when all is well.

    Args:
        ledger: what happened.
        tried: every payload that was sent, whatever became of it.
        acked: those that were acknowledged.
        forced: members whose session was ended by force.
    """
    walk = _Walk(forced)
    for event in tuple(ledger.events):
        walk.steps[event.kind](
            event, walk.histories.setdefault(event.partition, _History())
        )
    violations = walk.violations
    missing = ledger.missing(acked)
    if missing:
        violations.append(f"{len(missing)} acknowledged lost, first {min(missing)!r}")
    phantoms = ledger.places.keys() - set(tried)
    violations.extend(f"never sent: {payload!r}" for payload in sorted(phantoms)[:5])
    doubles = [p for p, places in ledger.places.items() if len(places) > 1]
    violations.extend(f"stored twice: {payload!r}" for payload in doubles[:5])
    return violations


def readers(events: Iterable[Event]) -> dict[TopicPartition, str]:
    """Return who reads each partition after these events."""
    reading: dict[TopicPartition, str] = {}
    for event in tuple(events):
        if event.kind == "assign":
            reading[event.partition] = event.member
        is_end = event.kind in ("revoke", "fence")
        if is_end and reading.get(event.partition) == event.member:
            del reading[event.partition]
    return reading
