"""Position of a reader in one partition, and its reaction to answers. Pure.

    get --> broker --reply--> outcome_of --> on_reply --> messages, the next get

A broker sends at most its `maxTransferSize` at once, and takes records that are larger.
Such a record is put together from several answers: a get may begin inside a record.
Collected bytes are dropped when the offset moves or the rest does not come.

Some answers lead nowhere if they are repeated for ever, so each is bounded: a record
that stays incomplete although more was asked for, an offset that the broker keeps
moving, a record that comes in crumbs, and a damaged record. They end in an error that
names partition and offset; nothing is ever skipped.

A length that rotted upward looks like a record that is larger than a fetch, or whose
rest does not come. Brokers show whole records alone, so a rest that is not there never
comes, and a real record ends where another one, a segment or the log does: that is
looked up before a record counts as too large. Behind damage the next good record is
looked for in more and more bytes, as far as that is quick: one that is cut by the end
of an answer is not left out for the damage of another one.

A broker that knows of damage names it, and where its log can be read on: that counts
as what the cursor finds itself. Of one that cannot say, and gives nothing where its log
has data, the end of the gap is searched (`GapSearch`).

Source: client spec 2.4, 3.3 and 3.4; broker spec 1.5, row 5.
"""

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NoReturn

from metaq.client.consume.decode import decode_messages
from metaq.client.errors import NoProgressError
from metaq.errors import CorruptRecordError
from metaq.model import Message, Offset, Position, SizeBytes, TopicPartition
from metaq.peer.gap_search import GapSearch, parse_probe
from metaq.peer.replies import (
    Damaged,
    Fetched,
    GetOutcome,
    MovedTo,
    NothingThere,
    damage_error,
    parse_get,
)
from metaq.protocol.commands import Get, Reply
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
"""Default size of a get, bytes: MetaQ's default bound on a reply."""
FETCH_BYTES_MAX: Final = SizeBytes(64 * 1024 * 1024)
"""A record larger than this is not read."""
FRUITLESS_MAX: Final = 3
"""Answers in a row that bring no message although they should."""
SMALL_BYTES: Final = 16 * 1024
"""An answer that brings less of a record that comes in pieces is a small one."""
SMALL_MAX: Final = 2048
"""Small answers to one record, or to the search for the next good one."""
EFFORT_MAX: Final = 512 * 1024 * 1024
"""Bytes of checksums computed at once for a good record behind damage: a third of a
second, in which the loop does nothing else. What is left is looked at as new damage."""
GAP_DOUBT: Final = 2
"""Answers in a row without data where there should be some, before a gap is
searched; that search counts as one more."""
_OFFSET_OF: Final = attrgetter("offset")


class PartitionCursor:
    """The next offset of one partition. Owner: its reader."""

    def __init__(
        self,
        partition: TopicPartition,
        offset: Offset,
        *,
        end: Offset | None = None,
        fetch_bytes: int = FETCH_BYTES,
        fetch_bytes_max: int = FETCH_BYTES_MAX,
    ) -> None:
        """Start at `offset`.

        Args:
            partition: the partition to read.
            offset: a record boundary, or any offset outside the log.
            end: stop here; None goes on for ever.
            fetch_bytes: size of a get by default.
            fetch_bytes_max: a record larger than this is not read.
        """
        self._fetch_bytes = SizeBytes(fetch_bytes)
        self._fetch_bytes_max = SizeBytes(fetch_bytes_max)
        self.partition = partition
        self.offset = offset
        """The record that is read next."""
        self.size_bytes = self._fetch_bytes
        """Size of the next get, bytes."""
        self.behind_damage = offset
        """After CorruptRecordError: where to go on for who leaves the record out. No
        whole record that was received lies in between."""
        self._end = end
        self._fruitless = 0
        self._part = bytearray()
        """The beginning of a record that comes in several answers; mostly empty."""
        self._part_needed = SizeBytes(0)
        self._small_count = 0
        self._tried = Position(0)
        """Bytes from a flaw on that hold no good record."""
        self._is_doubting = False
        """`_part` begins a record that claims to be larger than a fetch."""
        self._flaw = ""
        """Fault of the record at `offset`, while `_part` grows until a good one is
        found."""
        self._gap: GapSearch | None = None
        """Looks for the end of a gap at `offset`."""
        self._origin: Offset | None = None
        """Offset at which `_part` begins, when that is behind a gap."""

    @property
    def fetch_offset(self) -> Offset:
        """Offset of the next get: behind the bytes held of the record at `offset`.

        Or, of a record that is too large, its last byte and what follows; or where a
        gap may end.
        """
        if self._gap is not None:
            return self._gap.fetch_offset
        if self._is_doubting:
            return Offset(self.offset + self._part_needed - 1)
        return Offset(self._begin + len(self._part))

    @property
    def _begin(self) -> Offset:
        """Return the offset at which `_part` begins."""
        return self.offset if self._origin is None else self._origin

    @property
    def reached(self) -> Offset:
        """Offset behind the bytes read so far; while it stands still, reading does.

        Bytes in which the next good record is looked for do not count.
        """
        is_damaged = self._is_doubting or self._flaw
        return Offset(self.offset + (0 if is_damaged else len(self._part)))

    @property
    def damage(self) -> CorruptRecordError | None:
        """Damage at `offset`, while the next good record is looked for."""
        if not self._flaw:
            return None
        return CorruptRecordError(
            f"damaged record at offset {self.offset}: {self._flaw}; no good record in"
            f" the {len(self._part)} bytes from there on, so far"
        )

    @property
    def is_amid(self) -> bool:
        """Whether the rest of a record is asked for: waiting brings nothing."""
        return bool(self._part) or self.is_searching

    @property
    def is_searching(self) -> bool:
        """Whether the end of a gap is searched: a refusal is an answer, too."""
        return self._gap is not None or self._origin is not None

    @property
    def is_done(self) -> bool:
        """Whether everything up to the end has been read."""
        return self._end is not None and self.offset >= self._end

    def set_fetch_bytes(self, size_bytes: int) -> None:
        """Change the default size of a get."""
        if self.size_bytes == self._fetch_bytes:
            self.size_bytes = SizeBytes(size_bytes)
        self._fetch_bytes = SizeBytes(size_bytes)

    def seek(self, offset: Offset) -> None:
        """Go on at another offset, a record boundary or behind damage."""
        self._start_over()
        self._fruitless = self._small_count = 0
        self.offset = offset

    def search_gap(self) -> None:
        """Doubt that there is nothing at `reached`: the next answers tell.

        Either `on_reply` raises CorruptRecordError, or `is_searching` ends without.
        """
        at = self.reached
        self._start_over()
        self._gap = GapSearch(at)
        self.size_bytes = SizeBytes(HEADER_BYTES)

    def next_get(self, group: str, opaque: int, wait_ms: int = 0) -> Get:
        """Return the next get.

        Args:
            group: that reads, or a name for none.
            opaque: pairs it with its reply.
            wait_ms: how long the broker may hold the answer back; 0 for now.
        """
        topic, number = self.partition.topic, self.partition.partition
        at, size_bytes = self.fetch_offset, self.size_bytes
        return Get(topic, group, number, at, size_bytes, opaque, wait_ms)

    def outcome_of(self, reply: Reply) -> GetOutcome:
        """Return the meaning of a reply to `next_get`, for `on_reply`.

        While the end of a gap is searched, a refusal is no data.

        Raises:
            As `parse_get`.
        """
        parse = parse_probe if self.is_searching else parse_get
        return parse(reply, self.fetch_offset)

    def on_reply(self, outcome: GetOutcome) -> Sequence[Message]:
        """Take in the answer to a get at `fetch_offset`.

        Returns:
            The whole records of the answer, in order; none when there is no data, the
            offset moved, or a record needs a larger get. The cursor has advanced.

        Raises:
            CorruptRecordError: the record at `offset` is damaged, or the broker says
                so, and the next good one is found, or is not in `fetch_bytes_max`.
                Records before it were handed out by the call before; the cursor stays
                where it is.
            NoProgressError: the broker's answers lead nowhere.
        """
        if self._gap is not None:
            return self._search_on(self._gap, outcome)
        if self._is_doubting:
            return self._judge(outcome)
        match outcome:
            case NothingThere():
                if self._part or self._origin is not None:
                    self._end_part()
                elif self._end is not None:
                    self._miss()
                return []
            case Damaged():
                self._on_damaged(outcome)
                return []
            case MovedTo(offset=offset):
                self._start_over()
                self._count_fruitless(f"the broker sends us to offset {offset}")
                self.offset = offset
                return []
            case Fetched(data=data) if self._part or self._origin is not None:
                return self._collect(data)
            case Fetched(data=data):
                return self._read(data)

    def _start_over(self) -> None:
        self._is_doubting, self._flaw = False, ""
        self._gap = self._origin = None
        self._part.clear()
        self.size_bytes = self._fetch_bytes

    def _collect(self, data: bytes) -> Sequence[Message]:
        """Take more of a record that comes in pieces; read it when it is whole."""
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
        """Raise for the record at `offset`, of which too little comes at a time."""
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
            self.offset = messages[-1].next_offset
            self._fruitless = self._small_count = 0
            self.size_bytes = self._fetch_bytes
            if self._end is None or self.offset <= self._end:
                return messages
            return messages[: bisect_left(messages, self._end, key=_OFFSET_OF)]
        if isinstance(ending, CorruptRecordError):
            length, *_rest = HEADER.unpack_from(data)
            follower = Offset(self.offset + HEADER_BYTES + length)
            self.behind_damage = follower
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

    def _ask_for(self, needed: SizeBytes, data: bytes) -> None:
        """Ask for more of a record that is cut short, at once or in pieces."""
        if not data:
            self._count_fruitless("the broker sends nothing")
        elif needed > self._fetch_bytes_max:
            self._part += data
            self._part_needed = needed
            self._is_doubting = True
            self.size_bytes = self._fetch_bytes
            return
        elif len(data) < self.size_bytes:
            self._part += data
            self._part_needed = needed
            self.size_bytes = SizeBytes(max(needed - len(data), 1))
            return
        size_bytes = min(max(needed, self._fetch_bytes), self._fetch_bytes_max)
        self.size_bytes = SizeBytes(size_bytes)

    def _judge(self, outcome: GetOutcome) -> Sequence[Message]:
        """Tell a record that is too large from a damaged length, by later bytes."""
        needed, begun = self._part_needed, bytes(self._part)
        self._start_over()
        what = f"record of {needed} bytes (at most {self._fetch_bytes_max} are fetched)"
        if isinstance(outcome, Fetched) and self._may_follow(outcome.data[1:]):
            raise NoProgressError(
                f"{self.partition}: no progress at offset {self.offset}: {what}"
            )
        return self._search(begun, f"{what}, which does not end where it says")

    def _may_follow(self, data: bytes) -> bool:
        """Tell whether bytes may lie behind a record; none do where a segment ends."""
        ending = scan_records(data)
        if isinstance(ending, Incomplete) and not ending.position:
            return ending.needed_bytes <= self._fetch_bytes_max
        return isinstance(ending, CleanEnd) or bool(ending.position)

    def _end_part(self) -> None:
        """Note that there is no more of the collected bytes."""
        part, flaw, origin = bytes(self._part), self._flaw, self._origin
        lacking = f"the rest of its {self._part_needed} bytes does not come"
        self._fruitless += 1
        if not flaw and self._fruitless == GAP_DOUBT:
            self.search_gap()
            return
        self._start_over()
        if flaw or self._fruitless > FRUITLESS_MAX:
            self._origin = origin
            raise self._damage(part, flaw or lacking, self._next_good(part))

    def _miss(self) -> None:
        """Take note that there is nothing at `offset`, although the log goes on.

        The end was there when reading began: retention took the rest, or there is a
        gap.
        """
        self._count_fruitless("no data before the end of the log")
        if self._fruitless == GAP_DOUBT:
            self.search_gap()

    def _on_damaged(self, damaged: Damaged) -> None:
        """Raise for the named range; a good record before that comes first."""
        part, flaw = bytes(self._part), self._flaw
        found = self._next_good(part) if flaw else None
        if found is not None:
            raise self._damage(part, flaw, found)
        self._start_over()
        self.behind_damage = self.offset if damaged.end is None else damaged.end
        raise damage_error(self.partition, self.offset, damaged)

    def _search_on(self, gap: GapSearch, outcome: GetOutcome) -> Sequence[Message]:
        """Go on with the search for the end of a gap; then look for a record there."""
        gap.on_reply(outcome)
        if gap.is_over:
            self._start_over()
            if gap.found is None:
                self._fruitless += self._fruitless == GAP_DOUBT
            else:
                self._origin = gap.found
                self._flaw = gap.flaw
                self._part_needed = SizeBytes(1)
        return []

    def _next_good(self, data: bytes) -> Position | None:
        """Return where a good record begins in the bytes collected behind a flaw."""
        # Bytes behind a gap may begin with one; the record at `offset` is not good.
        first = Position(1) if self._origin is None else Position(0)
        found, self._tried = search_next_record(data, first, effort_max=EFFORT_MAX)
        return self._tried if found else None

    def _search(self, data: bytes, flaw: str) -> Sequence[Message]:
        """Raise when the next good record is there; else ask for more, to the bound."""
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
        follower = None if found is None else Offset(begin + found)
        tried = self._tried
        size = _size_of_damage(data) if tried == len(data) else tried
        self.behind_damage = follower or Offset(begin + size)
        where = (
            f"no good record in the {tried} bytes from there on"
            if follower is None
            else f"the next good record is at offset {follower}"
        )
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
    """Return how much to leave out of an answer that has no whole good record."""
    if len(data) < HEADER_BYTES:
        return len(data)
    length, *_rest = HEADER.unpack_from(data)
    size = HEADER_BYTES + length
    # A damaged payload leaves the length true, and a record may begin behind it.
    return size if HEADER_BYTES <= size <= len(data) else len(data)
