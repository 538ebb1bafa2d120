"""Message boundaries: at an offset or beside it, and so many messages before it.

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

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from metaq.client.cluster.context import ClientContext
from metaq.client.cluster.metadata_queries import LogQueries
from metaq.client.errors import CannotAnswerError
from metaq.errors import ClientError, CorruptRecordError, NoRecordError
from metaq.model import Offset, Position, SizeBytes, TopicPartition
from metaq.record.scan import (
    CleanEnd,
    ScanResult,
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
    log = _Log(context, partition, deadline_s)
    ends = await log.ends()
    if ends is None:
        return Offset(0)
    end = max(ends[0], min(offset, ends[1]))
    search = _SearchBack(log, ends[0], end, count)
    try:
        await log.count(end, end)
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


async def require_boundary(
    context: ClientContext,
    partition: TopicPartition,
    offset: Offset,
    *,
    deadline_s: float,
) -> None:
    """Refuse an offset at which no message begins, and the log does not end.

    Our brokers know it. Of MetaQ 1.4's, WINDOW_BYTES around it are read: it is a
    boundary where records lead there.

    Args:
        context: the client's parts.
        partition: whose log.
        offset: the offset.
        deadline_s: when to give up.

    Raises:
        ClientError: it is outside the log, or within a message; the text names the
            boundaries on either side, as far as they can be known.
        CorruptRecordError: it is in damaged bytes.
        NoBrokerError: the broker is not there.
        WireError: the broker refused.
    """
    log = _Log(context, partition, deadline_s)
    low, end = await log.ends() or (Offset(0), Offset(0))
    if offset in {low, end}:
        return
    if not low < offset < end:
        raise ClientError(
            f"{partition}: expected an offset from {low} to {end}, got {offset}"
        )
    near: list[Offset] = []
    try:
        # What is before it may be damaged, and the reason to go on here.
        await log.count(offset, offset)
        near = [offset]
    except CannotAnswerError:
        near = await log.around(offset, low, end)
    except NoRecordError:
        with contextlib.suppress(CorruptRecordError):
            near = await log.around(offset, low, end)
    if offset not in near:
        names = ", ".join(map(str, near)) or "not known"
        raise ClientError(
            f"{partition}: {offset} is not a message boundary; nearest: {names}"
        )


class _Log(LogQueries):
    """One log, as it is asked and read."""

    async def read(self, start: Offset, end: Offset) -> bytes:
        """Return the bytes from `start` to `end`.

        Raises:
            CorruptRecordError: the broker has not all of them.
        """
        data = bytearray()
        while (at := Offset(start + len(data))) < end:
            piece = await self.slice(at, SizeBytes(end - at))
            if not piece:
                raise self.damaged(at, f"no data, and the log goes on to {end}", None)
            data += piece
        return bytes(data)

    async def around(self, offset: Offset, low: Offset, end: Offset) -> list[Offset]:
        """Return the boundaries beside an offset within low..end, both boundaries.

        The first one may be the offset itself. Either may be missing: only records that
        are there as a whole show them.
        """
        start = Offset(max(low, offset - SLACK_BYTES))
        data = await self.read(start, Offset(min(end, offset + SLACK_BYTES)))
        for starts, ending in _chains(data):
            bounds = [Offset(start + at) for at in (*starts, ending.position)]
            after = bisect_right(bounds, offset)
            if starts and offset <= bounds[-1]:
                return bounds[max(0, after - 1) : after + 1]
        return []

    def damaged(
        self, at: Offset, detail: str, after: Offset | None
    ) -> CorruptRecordError:
        return CorruptRecordError(
            f"{self.partition}: damaged record at offset {at}: {detail}",
            partition=self.partition,
            offset=at,
            next_good_offset=after,
            detail=detail,
        )


@dataclass(slots=True)
class _SearchBack:
    """A search for the message that is `left` messages before `end`."""

    log: _Log
    low: Offset
    """A boundary; it is not before this one."""
    end: Offset
    """A boundary; with none left, the answer."""
    left: int
    counts: bool = True
    size_bytes: int = WINDOW_BYTES
    """Of the next window."""
    damage: CorruptRecordError | None = None
    """The damage that ends at `low`."""

    async def step(self) -> None:
        """Bring `low` or `end` nearer; raises as the questions, and as the window."""
        if self.counts and self.end - self.low > WINDOW_BYTES:
            await self._halve()
            return
        found = await self._read_window()
        self.size_bytes = WINDOW_BYTES if found else 2 * self.size_bytes
        if found:
            count = min(self.left, len(found))
            self.end, self.left = found[-count], self.left - count

    async def pass_damage(self, error: CorruptRecordError) -> None:
        """Look at what comes after it alone; raise it if that is nothing."""
        start, after = await self.log.nearest(Offset(0)), error.next_good_offset
        if start is not None and start > self.low:
            # Retention has deleted it, or the bytes were never damaged.
            self.low = start
        elif after is not None and self.low < after < self.end:
            self.low, self.damage = after, error
        else:
            raise error

    async def _halve(self) -> None:
        """Find in which half of the range the message is."""
        cuts = await self.log.cut(self.low, self.end, 1)
        # Without a cut it is one message.
        cut = cuts[0] if cuts else self.low
        count = await self.log.count(cut, self.end)
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
        starts, broken = _chain_to_end(await self.log.read(start, self.end))
        if start == self.low:
            trusted, is_damaged = starts, starts[:1] != [0]
        else:
            trusted = [at for at in starts if at >= SLACK_BYTES]
            is_damaged = self.size_bytes >= WINDOW_BYTES_MAX and not trusted
        if is_damaged:
            after = Offset(start + starts[0]) if starts else self.end
            detail = f"the records from there on do not lead to the good one at {after}"
            raise self.log.damaged(Offset(start + broken), detail, after)
        return [Offset(start + at) for at in trusted]


def _chains(data: bytes) -> Iterator[tuple[list[Position], ScanResult]]:
    """Yield the starts of records that are adjacent, and where they end.

    What follows them is no record, or is cut off; the next ones are searched there.
    """
    at, is_found = Position(0), True
    while is_found:
        starts: list[Position] = []
        ending = scan_records(data, at, starts=starts)
        yield starts, ending
        is_found, at = search_next_record(
            data, Position(ending.position + 1), effort_max=EFFORT_MAX
        )


def _chain_to_end(data: bytes) -> tuple[list[Position], Position]:
    """Return the starts of the records that lead to the end of the bytes.

    Also where the records before them broke off.
    """
    broken = Position(0)
    for starts, ending in _chains(data):
        if isinstance(ending, CleanEnd):
            # Zero bytes look like empty records; only a known boundary is believed.
            is_blank = starts[0] > 0 and is_blank_to_end(data, starts[0])
            return ([] if is_blank else starts), broken
        broken = ending.position
    return [], broken
