"""Rules of delayed messages: tiers, progress, selection of a batch. Pure.

A message waits in the *tier* of its delay, so that a message with a long delay does not
keep segments of short delays on disk. Each tier delivers by due time. Its *progress* is
the due time and offset of the last record delivered, and `seen`, the offset up to which
the tier had been read then.

    a record is done  <=>  its offset < seen  and  its (due, offset) <= (due, offset)

A record appended above `seen` with an earlier due time is *late*: it was in flight at
its due time, or its transaction was committed after that. Late records are delivered
next, in order of offset, and `seen` stays at the first one that is left.

After the clock was set back, progress is in the future, and new records would be late
before they are due. So progress is lowered to the current time, and the former progress
is kept as an older *step* until it is passed again. A record is done if any step says
so.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, Protocol, TypeAlias

TICK_MS: Final = 100
"""Interval of delivery."""
TIERS: Final = 4
TIER_ENDS_MS: Final = (3_600_000, 86_400_000, 32 * 86_400_000)
"""Longest delay of each tier but the last: an hour, a day, 32 days."""
RECORD_MESSAGES_MAX: Final = 65_536
"""Maximum number of messages in one record; the default of `batchRecordsMax`."""
BATCH_MESSAGES_MAX: Final = 1024
"""Maximum number of messages of one transaction. Four times as many take four times as
long, without more messages per second."""
BATCH_BYTES_MAX: Final = 4 << 20
"""Maximum bytes of one transaction; a single larger record is delivered alone."""
RETRY_MS_MIN: Final = 1_000
RETRY_MS_MAX: Final = 60_000
STEPS_MAX: Final = 8
"""Maximum number of steps of a tier. Without another step, records that are late
before they are due delay others."""


class Progress(NamedTuple):
    """Progress of a tier; see the head of this file."""

    due_ms: int
    offset: int
    seen: int


NOTHING_DONE: Final = Progress(-1, -1, 0)
OFFSET_MAX: Final = 2**63 - 1
Steps: TypeAlias = tuple[Progress, ...]
"""Progress of a tier, then older steps whose due times are not passed again yet."""


class DueEntry(NamedTuple):
    """An entry of the index: a waiting record of a tier, or a cancelled message."""

    due_ms: int
    offset: int
    """Offset of the record; of a cancelled message, that of the record with it."""
    messages: int
    """Number of messages; below 0: the message at `message_index` is cancelled."""
    size_bytes: int
    """Size of the record; of a cancelled message, its share of that."""
    topic: int
    """CRC-32 of the topic's name."""

    @property
    def key(self) -> tuple[int, int]:
        """Return the sort key, due time and offset."""
        return self.due_ms, self.offset

    @property
    def message_index(self) -> int:
        """Return the index of a cancelled message in its record."""
        return ~self.messages

    @property
    def totals(self) -> tuple[int, int]:
        """Return the number of messages and bytes; negative for a cancelled message."""
        if self.messages < 0:
            return -1, -self.size_bytes
        return self.messages, self.size_bytes

    def has_same_record(self, other: "DueEntry") -> bool:
        """Return whether another entry is about the same record."""
        return other.offset == self.offset


class DueRecord(NamedTuple):
    """A record to deliver."""

    tier: int
    record: DueEntry
    cancelled: tuple[int, ...] = ()
    """Indexes of its cancelled messages."""


class DueSource(Protocol):
    """Interface of a tier for `take_batch`."""

    seen: int
    """Offset up to which the tier has been read."""
    late: list[DueEntry]
    """Late entries by offset, each record followed by its cancelled messages."""

    @property
    def progress(self) -> Progress:
        """Return the progress of the tier."""

    def peek(self) -> DueEntry | None:
        """Return the next entry that is not late; None: no entry, or not in memory."""

    def pop(self) -> DueEntry:
        """Remove and return that entry."""


def tier_of(due_ms: int, now_ms: int) -> int:
    """Return the tier of a due time, 0 or more."""
    return bisect_left(TIER_ENDS_MS, due_ms - now_ms)


def retry_delay_ms(tries: int) -> int:
    """Return the pause after the given number of refusals of a target, 1 or more."""
    return min(RETRY_MS_MIN << min(tries - 1, 16), RETRY_MS_MAX)


def is_done(steps: Steps, key: tuple[int, int]) -> bool:
    """Return whether the record with this due time and offset is done."""
    return any(key[1] < step.seen and key <= step[:2] for step in steps)


def lowered(steps: Steps, now_ms: int) -> Steps:
    """Return the steps with progress not above `now_ms`; the same records are done.

    Steps that have reached `STEPS_MAX` are returned unchanged.
    """
    if steps[0].due_ms <= now_ms or len(steps) >= STEPS_MAX:
        return steps
    return (Progress(now_ms, OFFSET_MAX, steps[0].seen), *steps)


def advanced(steps: Steps, reached: Progress) -> Steps:
    """Return the steps after progress; drop older steps that it has passed."""
    return (reached, *(step for step in steps[1:] if step[:2] > reached[:2]))


def take_batch(
    tiers: Sequence[DueSource],
    now_ms: int,
    held: Collection[tuple[int, int, int]] = (),
) -> tuple[list[DueRecord], list[Progress]]:
    """Take the records of one transaction: late ones, then due ones by due time.

    Args:
        tiers: all tiers; records that are taken are removed from them.
        now_ms: records with a later due time are not taken.
        held: tier, due time and offset of records at which their tier stops.

    Returns:
        The records, and the progress of each tier once they are delivered.
    """
    batch, reached = list[DueRecord](), [tier.progress[:2] for tier in tiers]
    messages, size = 0, 0

    def has_room(record: DueEntry) -> bool:
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
            after = list(takewhile(record.has_same_record, tier.late[taken + 1 :]))
            if record.messages > 0:
                indexes = tuple(each.message_index for each in after)
                batch.append(DueRecord(number, record, indexes))
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
                cancelled.append(tier.pop().message_index)
            reached[number] = head.key
            if head.messages > 0:
                batch.append(DueRecord(number, head, tuple(cancelled)))
                messages, size = messages + head.messages, size + head.size_bytes
    return batch, [
        Progress(*max(key, tier.progress[:2]), end)
        for key, tier, end in zip(reached, tiers, seen, strict=True)
    ]
