"""Offset of a reader in one partition, and the handling of answers to its gets. Pure.

    get --> broker --reply--> outcome_of --> on_reply --> messages, the next get

A broker sends at most its `maxTransferSize` at once, and accepts larger records. Such a
record is assembled from several answers, because a get may begin inside a record.
Collected bytes are dropped when the offset moves or the rest does not arrive.

Some answers would cause endless loops, so the repetitions of each are bounded: a record
that stays incomplete although more was requested, an offset that the broker keeps
moving, a record in tiny pieces, and a damaged record. They end in an error that names
partition and offset; the cursor never skips anything itself.

A damaged length that is too large looks like a record that is larger than a fetch, or
whose rest does not arrive. Brokers only send bytes of complete records, so the rest of
a good record always arrives, and it ends at another record or at the end of a segment
or the log: the cursor checks this before it reports a record as too large. After damage
it searches for the next good record in more and more bytes, within a bound on the work,
so that a good record cut by the end of an answer is not skipped with the damage.

A broker that knows of damage reports it, with the offset at which its log can be read
again; this counts like damage found by the cursor. Damage found by the cursor may be
from the network: a broker that supports checks is asked whether its bytes are good, and
good ones are fetched again. If a broker cannot report damage, and sends nothing
although its log has data, the cursor searches for the end of the gap (`GapSearch`).

A get with a filter is answered with the matching records and the next offset, or with
plain bytes of the log, if they are damaged or a record is larger than the get. The rest
of a record is always fetched without a filter.

Source: docs/metaq-1.4/client.md 2.4, 3.3 and 3.4; docs/metaq-1.4/broker.md 1.5.
"""

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NoReturn

from metaq.client.consume.decode import FetchedMessages, decode_matches, decode_messages
from metaq.client.errors import NoProgressError
from metaq.errors import CorruptRecordError, MetaqError, RemoteProtocolError
from metaq.model import Message, Offset, Position, SizeBytes, TopicPartition
from metaq.peer.gap_search import GapSearch, parse_probe
from metaq.peer.replies import (
    Damaged,
    Fetched,
    FetchedRuns,
    GetOutcome,
    MovedTo,
    NothingThere,
    damage_error,
    parse_check,
    parse_get,
)
from metaq.protocol.commands import Check, Get, Reply
from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.record.scan import (
    CleanEnd,
    Corrupt,
    Incomplete,
    is_blank_to_end,
    scan_records,
    search_next_record,
)

FETCH_BYTES: Final = SizeBytes(1024 * 1024)
"""Default size of a get, in bytes: MetaQ's default bound on a reply."""
FETCH_BYTES_MAX: Final = SizeBytes(64 * 1024 * 1024)
"""Default maximum size of a record, in bytes."""
FRUITLESS_MAX: Final = 3
"""Maximum number of consecutive answers that should have messages and have none."""
SMALL_BYTES: Final = 16 * 1024
"""Size below which an answer with a piece of a record is small, in bytes."""
SMALL_MAX: Final = 2048
"""Maximum number of small answers for one record, or for one search of a good one."""
EFFORT_MAX: Final = 512 * 1024 * 1024
"""Maximum bytes checksummed at once in the search of a good record after damage; blocks
the loop for a third of a second. The rest is handled as new damage."""
GAP_AFTER: Final = 2
"""Number of consecutive answers that should have data and have none, before a gap is
searched; that search counts as one more."""
AGAIN_MAX: Final = 3
"""Number of times that bytes at one offset are fetched again because the broker reports
them as good; then they count as damaged anyway."""
_OFFSET_OF: Final = attrgetter("offset")


class PartitionCursor:
    """The next offset of one partition. Owned by its reader."""

    def __init__(
        self,
        partition: TopicPartition,
        offset: Offset,
        *,
        end: Offset | None = None,
        fetch_bytes: int = FETCH_BYTES,
        fetch_bytes_max: int = FETCH_BYTES_MAX,
        where: str | None = None,
    ) -> None:
        """Start at `offset`: a record boundary, or any offset outside the log.

        Args:
            partition: the partition to read.
            offset: offset of the first record.
            end: offset at which to stop; None: never.
            fetch_bytes: default size of a get.
            fetch_bytes_max: maximum size of a record.
            where: filter of gets; brokers need not support it.
        """
        self._where = where
        self._is_plain = False
        """Whether the last runs were damaged, so that the next get has no filter."""
        self._fetch_bytes = SizeBytes(fetch_bytes)
        self._fetch_bytes_max = SizeBytes(fetch_bytes_max)
        self.partition = partition
        self._start = offset
        self.offset = offset
        """Offset of the next record to read."""
        self.size_bytes = self._fetch_bytes
        """Size of the next get, in bytes."""
        self.after_damage = offset
        """After CorruptRecordError: the offset to seek to in order to skip the damage.
        No complete record that was received is skipped."""
        self.again_count = 0
        """Number of damaged answers that were dropped because the broker's bytes are
        good."""
        self._end = end
        self._fruitless = 0
        self._part = bytearray()
        """First bytes of a record that arrives in several answers; mostly empty."""
        self._part_needed = SizeBytes(0)
        self._small_count = 0
        self._tried = Position(0)
        """Number of bytes after a flaw that hold no good record."""
        self._is_oversize = False
        """Whether `_part` begins a record whose length is larger than a fetch."""
        self._flaw = ""
        """Fault of the record at `offset`, while `_part` grows until a good one is
        found."""
        self._gap: GapSearch | None = None
        self.is_beyond = False
        """Whether the last search of a gap found that the log ends before `offset`."""
        self._is_named = False
        """Whether the broker reported the damage that was raised last."""
        self._again_at, self._again_left = offset, AGAIN_MAX
        self._origin: Offset | None = None
        """Offset at which `_part` begins, if it follows a gap."""

    @property
    def fetch_offset(self) -> Offset:
        """Offset of the next get: after the collected bytes of the record at `offset`.

        For an oversize record: its last byte. During the search of a gap: the probe.
        """
        if self._gap is not None:
            return self._gap.fetch_offset
        if self._is_oversize:
            return Offset(self.offset + self._part_needed - 1)
        return Offset(self._begin + len(self._part))

    @property
    def _begin(self) -> Offset:
        """Offset at which `_part` begins."""
        return self.offset if self._origin is None else self._origin

    @property
    def reached(self) -> Offset:
        """Offset after the bytes read so far; constant while there is no progress.

        Bytes collected to search for the next good record do not count.
        """
        is_damaged = self._is_oversize or self._flaw
        return Offset(self.offset + (0 if is_damaged else len(self._part)))

    @property
    def damage(self) -> CorruptRecordError | None:
        """Damage at `offset` while the next good record is searched for; else None."""
        if not self._flaw:
            return None
        return CorruptRecordError(
            f"damaged record at offset {self.offset}: {self._flaw}; no good record in"
            f" the {len(self._part)} bytes from there on, so far"
        )

    @property
    def is_incomplete(self) -> bool:
        """Whether the next get is for the rest of a record, which is available now."""
        return bool(self._part) or self.is_searching

    @property
    def is_searching(self) -> bool:
        """Whether the end of a gap is searched for; then a refusal means no data."""
        return self._gap is not None or self._origin is not None

    @property
    def is_done(self) -> bool:
        """Whether everything up to the end has been read."""
        return self._end is not None and self.offset >= self._end

    @property
    def where(self) -> str | None:
        """Filter of the next get; None: the get is for plain bytes."""
        return None if self._is_plain or self.is_incomplete else self._where

    def set_fetch_bytes(self, size_bytes: int) -> None:
        """Change the default size of a get."""
        if self.size_bytes == self._fetch_bytes:
            self.size_bytes = SizeBytes(size_bytes)
        self._fetch_bytes = SizeBytes(size_bytes)

    def seek(self, offset: Offset) -> None:
        """Continue at another offset: a record boundary, or after damage."""
        self._start_over()
        self._fruitless = self._small_count = 0
        self.offset = offset

    def search_gap(self) -> None:
        """Check with the next answers whether a gap begins at `reached`.

        Either `on_reply` raises CorruptRecordError, or `is_searching` becomes false.
        """
        self._gap = GapSearch(self.reached)
        self.size_bytes = SizeBytes(HEADER_BYTES)

    def next_get(
        self, group: str, opaque: int, wait_ms: int, *, can_filter: bool = False
    ) -> Get:
        """Return the next get; the broker may delay its answer by up to `wait_ms`."""
        topic, number = self.partition.topic, self.partition.partition
        at, size_bytes = self.fetch_offset, self.size_bytes
        where = self.where if can_filter else None
        return Get(topic, group, number, at, size_bytes, opaque, wait_ms, where)

    def may_be_good(self) -> bool:
        """Return, after CorruptRecordError, whether to ask the broker by `next_check`.

        False if the broker has reported the damage itself, or if its bytes at this
        offset were fetched AGAIN_MAX times.
        """
        if self._again_at != self.offset:
            self._again_at, self._again_left = self.offset, AGAIN_MAX
        return not self._is_named and self._again_left > 0

    def blamed(self, error: CorruptRecordError) -> CorruptRecordError:
        """Return the error for bytes that are not checked again.

        If the broker reports them as good, and nothing was read before them, reading
        probably began within a message: the stored offset is wrong, not the bytes.
        """
        if self._is_named or self._again_left or self.offset != self._start:
            return error
        follower = error.next_good_offset
        nearest = "" if follower is None else f", the next one begins at {follower}"
        return CorruptRecordError(
            f"{self.partition}: no message begins at offset {self.offset}, at which"
            f" reading began{nearest}: correct the committed offset (`metaq offsets"
            " reset`). The broker reports its bytes there as good; if the offset is"
            " right, the network changes them",
            partition=self.partition,
            offset=self.offset,
            next_good_offset=follower,
            detail="no message begins there",
        )

    def next_check(self, opaque: int) -> Check:
        """Return the check whether the broker's bytes at `offset` are good."""
        size_bytes = max(1, self.after_damage - self.offset)
        self.seek(self.offset)
        topic, number = self.partition.topic, self.partition.partition
        return Check(topic, number, self.offset, size_bytes, opaque)

    def on_check(self, reply: Reply) -> None:
        """Process the answer to `next_check`: the next get begins at `offset` again.

        It also does if the broker cannot answer; the get then shows whether the error
        persists.

        Raises:
            CorruptRecordError: the broker reports that the record is damaged.
            RemoteProtocolError: the answer is invalid.
            WireError: the broker may answer later.
        """
        damaged = None
        try:
            damaged = parse_check(reply, self.offset)
        except MetaqError as error:
            if error.retriable or isinstance(error, RemoteProtocolError):
                raise
        if damaged is not None:
            self._on_damaged(damaged)
        self._again_left -= 1
        self.again_count += 1

    def outcome_of(self, reply: Reply) -> GetOutcome:
        """Parse a reply to `next_get`, for `on_reply`; raises as `parse_get`."""
        if self.is_searching:
            return parse_probe(reply, self.fetch_offset)
        has_filter = self.where is not None
        return parse_get(reply, self.fetch_offset, has_filter=has_filter)

    def on_reply(self, outcome: GetOutcome) -> Sequence[Message]:
        """Process the answer to a get at `fetch_offset`.

        Returns:
            The complete records of the answer, in order; none if there is no data,
            nothing matches, the offset moved, or a record needs a larger get. The
            cursor has advanced.

        Raises:
            CorruptRecordError: the record at `offset` is damaged, or the broker reports
                that, and the next good one was found, or is not within
                `fetch_bytes_max`. The records before it were returned by the previous
                call; the cursor does not move.
            NoProgressError: the answers do not allow progress.
        """
        self._is_named = False
        if self._gap is not None:
            return self._continue_gap_search(self._gap, outcome)
        if self._is_oversize:
            return self._check_oversize(outcome)
        match outcome:
            case NothingThere():
                if self._part or self._origin is not None:
                    self._end_part()
                elif self._end is not None:
                    # Retention has deleted the data since reading began, or there is a
                    # gap.
                    self._count_fruitless("no data before the end of the log")
                    if self._fruitless == GAP_AFTER:
                        self.search_gap()
            case Damaged():
                self._on_damaged(outcome)
            case MovedTo(offset=offset):
                self._start_over()
                self._count_fruitless(f"the broker refers to offset {offset}")
                self.offset = offset
            case FetchedRuns(data=data, next_offset=offset):
                return self._read_matches(data, offset)
            case Fetched(data=data) if self._part or self._origin is not None:
                return self._collect(data)
            case Fetched(data=data):
                return self._read(data)
        return []

    def _start_over(self) -> None:
        self._is_oversize, self._flaw = False, ""
        self._gap = self._origin = None
        self._part.clear()
        self.size_bytes = self._fetch_bytes

    def _collect(self, data: bytes) -> Sequence[Message]:
        """Add to a record that arrives in pieces; read it when it is complete."""
        if not data:
            self._count_fruitless("the broker sends nothing")
        self._part += data
        missing = self._part_needed - len(self._part)
        self._small_count += len(data) < SMALL_BYTES
        if self._small_count > SMALL_MAX:
            self._give_up()
        if missing > 0:
            self.size_bytes = SizeBytes(missing)
            return []
        whole, flaw, origin = bytes(self._part), self._flaw, self._origin
        self._start_over()
        self._origin = origin
        return self._search(whole, flaw) if flaw else self._read(whole)

    def _give_up(self) -> NoReturn:
        """Raise for the record at `offset`, because its pieces are too small."""
        part, flaw, needed = bytes(self._part), self._flaw, self._part_needed
        self._small_count = 0
        if flaw:
            raise self._damage(part, flaw, self._next_good(part))
        self._start_over()
        raise NoProgressError(
            f"{self.partition}: no progress at offset {self.offset}: expected a record"
            f" of {needed} bytes, got {len(part)} of them in over {SMALL_MAX} answers"
        )

    def _read(self, data: bytes) -> Sequence[Message]:
        messages, ending = decode_messages(data, self.partition, self.offset)
        if messages:
            self._is_plain = False
            return self._advance(messages, messages[-1].next_offset)
        if isinstance(ending, CorruptRecordError):
            length, *_rest = HEADER.unpack_from(data)
            follower = Offset(self.offset + HEADER_BYTES + length)
            self.after_damage = follower
            raise CorruptRecordError(
                f"{self.partition}: record at offset {self.offset}: {ending};"
                f" the next record is at {follower}",
                partition=self.partition,
                offset=self.offset,
                next_good_offset=follower,
                detail=str(ending),
            ) from ending
        if isinstance(ending, Corrupt):
            return self._search(data, ending.detail)
        assert isinstance(ending, Incomplete)
        self._ask_for(ending.needed_bytes, data)
        return []

    def _read_matches(self, data: bytes, next_offset: Offset) -> Sequence[Message]:
        """Read runs; if they are damaged, drop them and fetch plain bytes next."""
        found = decode_matches(data, self.partition, self.offset, next_offset)
        if found is None:
            self._is_plain = True
            self.again_count += 1
            return []
        return self._advance(found, next_offset)

    def _advance(
        self, messages: FetchedMessages, next_offset: Offset
    ) -> Sequence[Message]:
        self.offset = next_offset
        self._fruitless = self._small_count = 0
        self.size_bytes = self._fetch_bytes
        if self._end is None or self.offset <= self._end:
            return messages
        return messages[: bisect_left(messages, self._end, key=_OFFSET_OF)]

    def _ask_for(self, needed: SizeBytes, data: bytes) -> None:
        """Request more of an incomplete record, in one larger get or in pieces."""
        is_oversize = needed > self._fetch_bytes_max
        if not data:
            self._count_fruitless("the broker sends nothing")
        elif is_oversize or len(data) < self.size_bytes:
            self._part += data
            self._part_needed = needed
            self._is_oversize = is_oversize
            if is_oversize:
                self.size_bytes = self._fetch_bytes
            else:
                self.size_bytes = SizeBytes(max(needed - len(data), 1))
            return
        size_bytes = min(max(needed, self._fetch_bytes), self._fetch_bytes_max)
        self.size_bytes = SizeBytes(size_bytes)

    def _check_oversize(self, outcome: GetOutcome) -> Sequence[Message]:
        """Distinguish an oversize record from a damaged length, by later bytes."""
        needed, begun = self._part_needed, bytes(self._part)
        self._start_over()
        what = f"record of {needed} bytes (at most {self._fetch_bytes_max} are fetched)"
        if isinstance(outcome, Fetched) and self._may_follow(outcome.data[1:]):
            raise NoProgressError(
                f"{self.partition}: no progress at offset {self.offset}: {what}"
            )
        return self._search(begun, f"{what}, which does not end where it says")

    def _may_follow(self, data: bytes) -> bool:
        """Return whether bytes may follow a record; none do at a segment's end."""
        ending = scan_records(data)
        if isinstance(ending, Incomplete) and not ending.position:
            return ending.needed_bytes <= self._fetch_bytes_max
        return isinstance(ending, CleanEnd) or bool(ending.position)

    def _end_part(self) -> None:
        """Handle an answer without the rest of the collected bytes."""
        part, flaw, origin = bytes(self._part), self._flaw, self._origin
        lacking = f"the rest of its {self._part_needed} bytes does not arrive"
        self._fruitless += 1
        if not flaw and self._fruitless == GAP_AFTER:
            self.search_gap()
            return
        self._start_over()
        if flaw or self._fruitless > FRUITLESS_MAX:
            self._origin = origin
            raise self._damage(part, flaw or lacking, self._next_good(part))

    def _on_damaged(self, damaged: Damaged) -> None:
        """Raise for the range that the broker reported, or for earlier damage."""
        part, flaw = bytes(self._part), self._flaw
        found = self._next_good(part) if flaw else None
        if found is not None:
            raise self._damage(part, flaw, found)
        self._start_over()
        self._is_named = True
        self.after_damage = self.offset if damaged.end is None else damaged.end
        raise damage_error(self.partition, self.offset, damaged)

    def _continue_gap_search(
        self, gap: GapSearch, outcome: GetOutcome
    ) -> Sequence[Message]:
        """Search for the end of a gap; then for a record there."""
        gap.on_reply(outcome)
        if gap.is_over:
            self.is_beyond = gap.log_end is not None and gap.log_end < self.offset
            self._start_over()
            if gap.found is None:
                self._fruitless += self._fruitless == GAP_AFTER
            else:
                self._origin = gap.found
                self._flaw = gap.flaw
                self._part_needed = SizeBytes(1)
        return []

    def _next_good(self, data: bytes) -> Position | None:
        """Return the position of a good record in the bytes collected after a flaw."""
        # Bytes after a gap may begin with a good record, others do not.
        first = Position(1) if self._origin is None else Position(0)
        found, self._tried = search_next_record(data, first, effort_max=EFFORT_MAX)
        return self._tried if found else None

    def _search(self, data: bytes, flaw: str) -> Sequence[Message]:
        """Raise once the next good record is found; until then request more bytes."""
        found = self._next_good(data)
        is_sure = found is not None and not is_blank_to_end(data, found)
        is_last = len(data) >= self._fetch_bytes_max
        is_late = found is None and self._tried < len(data)
        if is_sure or is_late or is_last:
            raise self._damage(data, flaw, found)
        self._part += data
        self._flaw = flaw
        needed = max(2 * len(data), len(data) + self._fetch_bytes)
        self._part_needed = SizeBytes(min(needed, self._fetch_bytes_max))
        self.size_bytes = SizeBytes(self._part_needed - len(data))
        return []

    def _damage(
        self, data: bytes, detail: str, found: Position | None
    ) -> CorruptRecordError:
        begin = self._begin
        self._start_over()
        tried = self._tried
        if found is None:
            follower = None
            size = _size_of_damage(data) if tried == len(data) else tried
            where = f"no good record in the {tried} bytes from there on"
        else:
            follower, size = Offset(begin + found), found
            where = f"the next good record is at offset {follower}"
        self.after_damage = Offset(begin + size)
        return CorruptRecordError(
            f"{self.partition}: damaged record at offset {self.offset}:"
            f" {detail}; {where}",
            partition=self.partition,
            offset=self.offset,
            next_good_offset=follower,
            detail=detail,
        )

    def _count_fruitless(self, what: str) -> None:
        self._fruitless += 1
        if self._fruitless > FRUITLESS_MAX:
            raise NoProgressError(
                f"{self.partition}: no progress at offset {self.offset}: {what},"
                f" {self._fruitless} times in a row"
            )


def _size_of_damage(data: bytes) -> int:
    """Return the bytes to skip of an answer that has no complete good record."""
    if len(data) < HEADER_BYTES:
        return len(data)
    length, *_rest = HEADER.unpack_from(data)
    size = HEADER_BYTES + length
    # If only the payload is damaged, the length is right, and a record may follow it.
    return size if HEADER_BYTES <= size <= len(data) else len(data)
