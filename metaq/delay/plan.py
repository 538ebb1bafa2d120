"""Rules of delayed messages: tiers, progress, one tick. Pure.

A message waits in the *tier* of its due time, so that one that waits for long never
keeps the bytes of others. Tiers are delivered in the order of due times, and
*progress* says how far: due time and offset of the last one, and up to where the tier
had been read then.

    done  <=>  offset < seen  and  (due, offset of it) <= (due, offset)

What is appended above `seen` with an earlier due time is *late*: it was in flight when
its time came, or is of a transaction that was committed after that. It is delivered
next, in the order of offsets, and `seen` stops in front of the first that is left.

A clock that has gone back leaves progress in the future, where what is sent then would
be late before its time. So progress is lowered to now, and the former one is kept as an
older *step* until it is passed again: done is what one of the steps says is done.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, Protocol, TypeAlias

TICK_MS: Final = 100
"""Time between two looks at what is due."""
TIERS: Final = 4
TIER_ENDS_MS: Final = (3_600_000, 86_400_000, 32 * 86_400_000)
"""An hour, a day, 32 days: the longest delay of each tier but the last."""
PLACES_MAX: Final = 65_536
"""Messages in one record: the default of `batchRecordsMax`."""
BATCH_MESSAGES_MAX: Final = 1024
"""Four times as many take four times as long a turn, and are no more per second."""
BATCH_BYTES_MAX: Final = 4 << 20
"""Most that one transaction delivers, but for one larger record."""
RETRY_MS_MIN: Final = 1_000
RETRY_MS_MAX: Final = 60_000
STEPS_MAX: Final = 8
"""More steps of one tier are not kept: what is late before its time holds up others."""


class Progress(NamedTuple):
    """The state of a tier: which records of it are done."""

    due_ms: int
    offset: int
    seen: int


NOTHING_DONE: Final = Progress(-1, -1, 0)
OFFSET_MAX: Final = 2**63 - 1
Steps: TypeAlias = tuple[Progress, ...]
"""Progress of a tier, and older steps whose due times are not passed again yet."""


class Waiting(NamedTuple):
    """A record of a tier that waits, as the index has it."""

    due_ms: int
    offset: int
    """Of the record; of a cancelled message that of the record which has it."""
    messages: int
    """Messages in it; below 0: one of that record is cancelled, at `place`."""
    size_bytes: int
    """Of the record; of a cancelled message its part of that."""
    topic: int
    """CRC-32 of its topic's name."""

    @property
    def key(self) -> tuple[int, int]:
        """Return what it is ordered by."""
        return self.due_ms, self.offset

    @property
    def place(self) -> int:
        """Return the place of a cancelled message in its record."""
        return ~self.messages

    @property
    def weight(self) -> tuple[int, int]:
        """Return the messages and bytes that wait with it, or less where cancelled."""
        if self.messages < 0:
            return -1, -self.size_bytes
        return self.messages, self.size_bytes

    def is_with(self, other: "Waiting") -> bool:
        """Return whether another one is about the same record."""
        return other.offset == self.offset


class DueRecord(NamedTuple):
    """A record that is to be delivered."""

    tier: int
    record: Waiting
    cancelled: tuple[int, ...] = ()
    """Places of its messages that are not delivered."""


class DueSource(Protocol):
    """A tier as `take_batch` uses it."""

    seen: int
    """Up to where it was read."""
    late: list[Waiting]
    """Late ones, in the order of their offsets, and what is cancelled of them."""

    @property
    def progress(self) -> Progress:
        """Return how far it is delivered."""

    def peek(self) -> Waiting | None:
        """Return the next one that is not late; None: none, or none is at hand."""

    def pop(self) -> Waiting:
        """Take it."""


def tier_of(due_ms: int, now_ms: int) -> int:
    """Return the tier for a due time."""
    return bisect_left(TIER_ENDS_MS, due_ms - now_ms)


def retry_delay_ms(tries: int) -> int:
    """Return how long a target is left alone that has refused so often, 1 or more."""
    return min(RETRY_MS_MIN << min(tries - 1, 16), RETRY_MS_MAX)


def is_done(steps: Steps, key: tuple[int, int]) -> bool:
    """Return whether a record was delivered, given its due time and offset."""
    return any(key[1] < step.seen and key <= step[:2] for step in steps)


def lowered(steps: Steps, now_ms: int) -> Steps:
    """Return the same where progress is not in the future; the same steps are done."""
    if steps[0].due_ms <= now_ms or len(steps) >= STEPS_MAX:
        return steps
    return (Progress(now_ms, OFFSET_MAX, steps[0].seen), *steps)


def advanced(steps: Steps, reached: Progress) -> Steps:
    """Return the steps when progress has reached more."""
    return (reached, *(step for step in steps[1:] if step[:2] > reached[:2]))


def take_batch(
    tiers: Sequence[DueSource],
    now_ms: int,
    held: Collection[tuple[int, int, int]] = (),
) -> tuple[list[DueRecord], list[Progress]]:
    """Take what one transaction delivers: late ones, then what is due, oldest first.

    Args:
        tiers: what is taken is theirs no more.
        now_ms: nothing with a later due time is taken.
        held: tier, due time and offset of records at which their tier stops.

    Returns:
        The records, and the progress of each tier once they are delivered.
    """
    batch, reached = list[DueRecord](), [tier.progress[:2] for tier in tiers]
    messages, size = 0, 0

    def has_room(record: Waiting) -> bool:
        return not batch or (
            messages + record.messages <= BATCH_MESSAGES_MAX
            and size + record.size_bytes <= BATCH_BYTES_MAX
        )

    seen = [tier.seen for tier in tiers]
    is_stopped = [False] * len(tiers)
    for number, tier in enumerate(tiers):
        taken = 0
        while taken < len(tier.late):
            record = tier.late[taken]
            if record.due_ms > now_ms or not has_room(record):
                break
            after = list(takewhile(record.is_with, tier.late[taken + 1 :]))
            if record.messages > 0:
                places = tuple(each.place for each in after)
                batch.append(DueRecord(number, record, places))
                messages, size = messages + record.messages, size + record.size_bytes
            taken += 1 + len(after)
        del tier.late[:taken]
        if tier.late:
            seen[number], is_stopped[number] = tier.late[0].offset, True
    while True:
        heads = sorted(
            (*head.key, number)
            for number, tier in enumerate(tiers)
            if not is_stopped[number] and (head := tier.peek()) is not None
        )
        if not heads or heads[0][0] > now_ms:
            break
        number = heads[0][2]
        tier, limit = tiers[number], (heads[1] if heads[1:] else (now_ms + 1, 0, 0))
        while (head := tier.peek()) is not None and head.due_ms <= now_ms:
            if (*head.key, number) > limit:
                break
            if not has_room(head) or (number, *head.key) in held:
                is_stopped[number] = True
                break
            tier.pop()
            cancelled = []
            while (more := tier.peek()) is not None and more.key == head.key:
                cancelled.append(tier.pop().place)
            reached[number] = head.key
            if head.messages > 0:
                batch.append(DueRecord(number, head, tuple(cancelled)))
                messages, size = messages + head.messages, size + head.size_bytes
    return batch, [
        Progress(*max(key, tier.progress[:2]), end)
        for key, tier, end in zip(reached, tiers, seen, strict=True)
    ]
