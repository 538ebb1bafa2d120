"""Where messages begin: so many back from an offset.

A log is addressed by bytes, so the offset of the n-th message before another one has to
be searched. Our brokers say where records begin, and count them: the range is halved
until it is one window, and only that is read. MetaQ 1.4's brokers know neither, so the
log is read backwards, window by window, and records are found by their checksums:

    start     trusted                     end, a known boundary
      |--slack--|-----------window---------|
           |--record--|--record--|--record-|

A chain of records counts only when it ends exactly at the known boundary. A message may
hold records itself, and they chain as well; so nothing is believed that begins less
than SLACK_BYTES after the first byte of a window: a message around it would begin
earlier, and its chain is the one that is found. The log start needs no slack.

Source: docs/metaq-1.4/client.md 2.4; docs/protocol.md, questions.
"""

from dataclasses import dataclass
from typing import Final

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import (
    boundaries_between,
    count_between,
    log_range,
    nearest_offset,
    read_slice,
)
from metaq.client.errors import CannotAnswerError
from metaq.errors import CorruptRecordError
from metaq.model import Offset, Position, SizeBytes, TopicPartition
from metaq.record.scan import (
    CleanEnd,
    is_blank_to_end,
    scan_records,
    search_next_record,
)

SLACK_BYTES: Final = 1024 * 1024
"""A message that holds records may be so long: the largest one that consumers of MetaQ
1.4 can read. Only over its brokers."""
WINDOW_BYTES: Final = 2 * SLACK_BYTES
"""Bytes that are read at once, unless a message is longer."""
WINDOW_BYTES_MAX: Final = 64 * 1024 * 1024
"""A window without a chain of records is doubled up to this size; then it is damage."""
EFFORT_MAX: Final = 512 * 1024 * 1024
"""Bytes of checksums computed in vain in one window, as `search_next_record` counts."""


async def offset_back(
    context: ClientContext,
    partition: TopicPartition,
    offset: Offset,
    count: int,
    *,
    deadline_s: float,
) -> Offset:
    """Return the offset of the message that is `count` messages before `offset`.

    The work is bounded. Our brokers are asked two questions for each time that the log
    is twice as long as a window; then at most WINDOW_BYTES are read. Of MetaQ 1.4's
    brokers about twice the bytes of these messages are read, at least a window.

    Args:
        context: the client's parts.
        partition: whose log.
        offset: a message boundary; outside the log, its start or its end is taken.
        count: how many messages, 0 or more.
        deadline_s: when to give up.

    Returns:
        A message boundary: the log start where it has fewer messages before `offset`; 0
        without a log.

    Raises:
        CorruptRecordError: bytes after the answer are damaged, so they cannot be
            counted. Older damage does not matter, but where bytes of a MetaQ 1.4 broker
            are missing in the same window.
        NoRecordError: `offset` is no boundary; of a MetaQ 1.4 broker it is a
            CorruptRecordError.
        NoBrokerError: the broker is not there.
        WireError: the broker refused.
    """
    ends = await log_range(context, partition, deadline_s=deadline_s)
    if ends is None:
        return Offset(0)
    low, end = ends[0], Offset(max(ends[0], min(offset, ends[1])))
    search = _SearchBack(context, partition, low, end, count, deadline_s)
    try:
        await count_between(context, partition, end, end, deadline_s=deadline_s)
    except CannotAnswerError:
        search.counts = False
    while search.left > 0 and search.low < search.end:
        try:
            await search.step()
        except CorruptRecordError as error:
            await search.pass_damage(error)
    if search.left > 0 and search.damage is not None:
        raise search.damage
    return max(search.low, search.end)


@dataclass(slots=True)
class _SearchBack:
    """A search for the message that is `left` messages before `end`."""

    context: ClientContext
    partition: TopicPartition
    low: Offset
    """A boundary; it is not before this one."""
    end: Offset
    """A boundary; with none left, the answer."""
    left: int
    deadline_s: float
    counts: bool = True
    """Whether the broker counts records."""
    size_bytes: int = WINDOW_BYTES
    """Of the next window."""
    damage: CorruptRecordError | None = None
    """What ends at `low`."""

    async def step(self) -> None:
        """Bring `low` or `end` nearer; raises as the questions, and as the window."""
        if self.counts and self.end - self.low > WINDOW_BYTES:
            await self._halve()
            return
        found = await self._read_window()
        if not found:
            self.size_bytes *= 2
            return
        self.end = found[-min(self.left, len(found))]
        self.left -= min(self.left, len(found))
        self.size_bytes = WINDOW_BYTES

    async def pass_damage(self, error: CorruptRecordError) -> None:
        """Look at what comes after it alone; raise it if that is nothing."""
        start = await nearest_offset(
            self.context, self.partition, Offset(0), deadline_s=self.deadline_s
        )
        after = error.next_good_offset
        if start is not None and start > self.low:
            # Retention has deleted it, or the bytes were never damaged.
            self.low = start
        elif after is not None and self.low < after < self.end:
            self.low, self.damage = after, error
        else:
            raise error

    async def _halve(self) -> None:
        """Find in which half of the range the message is."""
        ask = self.context, self.partition
        cuts = await boundaries_between(
            *ask, self.low, self.end, 1, deadline_s=self.deadline_s
        )
        # Without a cut it is one message.
        cut, count = self.low, 1
        if cuts:
            cut = cuts[0]
            count = await count_between(*ask, cut, self.end, deadline_s=self.deadline_s)
        if cuts and count >= self.left:
            self.low = cut
        else:
            self.end, self.left = cut, self.left - count

    async def _read_window(self) -> list[Offset]:
        """Return the starts of the last records before `end`.

        They are adjacent, and the last one ends at `end`; none when the window has to
        be longer.

        Raises:
            CorruptRecordError: no records lead from `low`, or from the longest window,
                to `end`.
        """
        start = Offset(max(self.low, self.end - self.size_bytes))
        starts, broken = _chain_to_end(await self._read(start))
        is_whole = start == self.low
        trusted = [at for at in starts if is_whole or at >= SLACK_BYTES]
        is_damaged = self.size_bytes >= WINDOW_BYTES_MAX and not trusted
        if is_whole:
            is_damaged = starts[:1] != [0]
        if not is_damaged:
            return [Offset(start + at) for at in trusted]
        damaged = Offset(start + broken)
        after = Offset(start + starts[0]) if starts else self.end
        raise CorruptRecordError(
            f"{self.partition}: damaged record at offset {damaged}: the records from"
            f" there on do not lead to the next good one at {after}",
            partition=self.partition,
            offset=damaged,
            next_good_offset=after,
            detail=f"its records do not lead to offset {after}",
        )

    async def _read(self, start: Offset) -> bytes:
        """Return the bytes from `start` to `end`."""
        data = bytearray()
        while (at := Offset(start + len(data))) < self.end:
            piece = await read_slice(
                self.context,
                self.partition,
                at,
                SizeBytes(self.end - at),
                deadline_s=self.deadline_s,
            )
            if not piece:
                raise CorruptRecordError(
                    f"{self.partition}: no data at offset {at}, and the log goes on to"
                    f" {self.end}",
                    partition=self.partition,
                    offset=at,
                    detail="no data",
                )
            data += piece
        return bytes(data)


def _chain_to_end(data: bytes) -> tuple[list[Position], Position]:
    """Return the starts of the records that lead to the end of the bytes.

    Also where the records before them broke off.
    """
    at, broken, is_found = Position(0), Position(0), True
    while is_found:
        starts: list[Position] = []
        ending = scan_records(data, at, starts=starts)
        if isinstance(ending, CleanEnd):
            # Zero bytes look like empty records; only a known boundary is believed.
            is_blank = at > 0 and is_blank_to_end(data, at)
            return ([] if is_blank else starts), broken
        # What chained up to there was no record, or is before damage.
        broken = ending.position
        is_found, at = search_next_record(
            data, Position(broken + 1), effort_max=EFFORT_MAX
        )
    return [], broken
