"""Finds message boundaries: near an offset, and a number of messages before it.

A log is addressed by bytes, so the offset of the n-th message before another one has to
be searched for. Our brokers return record boundaries and count records: the range is
halved until it is one window, and only that is read. MetaQ 1.4 brokers do neither, so
the log is read backwards, window by window, and records are found by their checksums:

    start     trusted                     end, a known boundary
      |--slack--|-----------window---------|
           |--record--|--record--|--record-|

A chain of records counts only if it ends exactly at the known boundary. A message may
itself contain records, which form a chain too. So records that begin less than
SLACK_BYTES after the start of a window are not trusted, because an enclosing message
could begin before the window; later ones are, because the chain of an enclosing message
would have been found. The log start needs no slack.

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
"""Maximum size of a message that contains records: the largest that MetaQ 1.4 consumers
can read. Only used with MetaQ 1.4 brokers."""
WINDOW_BYTES: Final = 2 * SLACK_BYTES
"""Size of a window, unless a message is longer."""
WINDOW_BYTES_MAX: Final = 64 * 1024 * 1024
"""Size up to which a window without a chain of records is doubled; then it is
damaged."""
EFFORT_MAX: Final = 512 * 1024 * 1024
"""Maximum bytes checksummed in vain in one window, as `search_next_record` counts."""


async def offset_back(
    context: ClientContext,
    partition: TopicPartition,
    offset: Offset,
    count: int,
    *,
    deadline_s: float,
) -> Offset:
    """Return the offset of the message that is `count` messages before `offset`.

    The work is bounded. Our brokers get two queries for each halving of the log down to
    a window; then at most WINDOW_BYTES are read. From MetaQ 1.4 brokers, about twice
    the bytes of these messages are read, at least a window.

    Args:
        context: the client's parts.
        partition: partition of the log.
        offset: a message boundary; outside the log, its start or end is used instead.
        count: number of messages, 0 or more.
        deadline_s: deadline, monotonic.

    Returns:
        A message boundary; the log start if there are fewer messages before `offset`; 0
        without a log.

    Raises:
        CorruptRecordError: bytes between the result and `offset` are damaged, so that
            messages cannot be counted. Older damage is no error, except missing bytes
            of a MetaQ 1.4 broker in the same window.
        NoRecordError: `offset` is not a boundary; for MetaQ 1.4 brokers this is a
            CorruptRecordError.
        NoBrokerError: the broker is not registered.
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
    """Refuse an offset that is neither the start of a message nor the log end.

    Our brokers check it. From MetaQ 1.4 brokers, WINDOW_BYTES around it are read: it is
    a boundary if adjacent records end there.

    Args:
        context: the client's parts.
        partition: partition of the log.
        offset: the offset.
        deadline_s: deadline, monotonic.

    Raises:
        ClientError: it is outside the log, or within a message; the text names the
            boundaries on either side, if they are known.
        CorruptRecordError: it is in damaged bytes.
        NoBrokerError: the broker is not registered.
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
        # An empty range, because bytes before the offset may be damaged.
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
    """Queries about one log, and reads of it."""

    async def read(self, start: Offset, end: Offset) -> bytes:
        """Return the bytes from `start` to `end`.

        Raises:
            CorruptRecordError: the broker does not have all of them.
        """
        data = bytearray()
        while (at := Offset(start + len(data))) < end:
            piece = await self.slice(at, SizeBytes(end - at))
            if not piece:
                raise self.damaged(at, f"no data, and the log goes on to {end}", None)
            data += piece
        return bytes(data)

    async def around(self, offset: Offset, low: Offset, end: Offset) -> list[Offset]:
        """Return the nearest boundaries of an offset within low..end, both boundaries.

        The first one may be the offset itself. Either may be missing, because only
        complete records show boundaries.
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
    """A boundary at or before the message."""
    end: Offset
    """A boundary after the message; the result once `left` is 0."""
    left: int
    counts: bool = True
    """Whether the broker counts messages and returns boundaries."""
    size_bytes: int = WINDOW_BYTES
    """Size of the next window."""
    damage: CorruptRecordError | None = None
    """The damage that ends at `low`."""

    async def step(self) -> None:
        """Narrow the range; raises as the queries, and as `_read_window`."""
        if self.counts and self.end - self.low > WINDOW_BYTES:
            await self._halve()
            return
        found = await self._read_window()
        self.size_bytes = WINDOW_BYTES if found else 2 * self.size_bytes
        if found:
            count = min(self.left, len(found))
            self.end, self.left = found[-count], self.left - count

    async def pass_damage(self, error: CorruptRecordError) -> None:
        """Restrict the range to the bytes after damage; raise it if there are none."""
        start, after = await self.log.nearest(Offset(0)), error.next_good_offset
        if start is not None and start > self.low:
            # Retention has deleted the bytes, which may not have been damaged.
            self.low = start
        elif after is not None and self.low < after < self.end:
            self.low, self.damage = after, error
        else:
            raise error

    async def _halve(self) -> None:
        """Reduce the range to the half that has the message."""
        cuts = await self.log.cut(self.low, self.end, 1)
        # Without a cut, the range is one message.
        cut = cuts[0] if cuts else self.low
        count = await self.log.count(cut, self.end)
        if cuts and count >= self.left:
            self.low = cut
        else:
            self.end, self.left = cut, self.left - count

    async def _read_window(self) -> list[Offset]:
        """Return the starts of the last records before `end`.

        They are adjacent, and the last one ends at `end`; [] if the window must be
        longer.

        Raises:
            CorruptRecordError: no adjacent records from `low`, or within the longest
                window, end at `end`.
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
    """Yield the starts of each chain of adjacent records, and its end.

    A chain ends at bytes that are not a complete record; the next chain is searched for
    after them.
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
    """Return the starts of the records in the chain that ends at the end of the bytes.

    Also returns the position at which the chain before it ended.
    """
    broken = Position(0)
    for starts, ending in _chains(data):
        if isinstance(ending, CleanEnd):
            # Zero bytes look like empty records; they only count at a known boundary.
            is_blank = starts[0] > 0 and is_blank_to_end(data, starts[0])
            return ([] if is_blank else starts), broken
        broken = ending.position
    return [], broken
