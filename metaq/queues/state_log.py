"""Records of `__queues`: the stored state of queues. Pure.

The payload of a record, all numbers big-endian:

    byte  0         1      2          6             10       18
          +---------+------+----------+-------------+--------+-----+-----------+------+
          | version | kind | queue id | incarnation | floor  | n   | n entries | name |
          | u8 = 1  | u8   | u32      | u32         | i64    | u32 |           |      |
          +---------+------+----------+-------------+--------+-----+-----------+------+

    entry 1, done       1 u8 | start i64 | end i64            messages that are done
    entry 2, returned   2 u8 | offset i64 | size i32 | count u16 | due i64
    entry 3, returned   3 u8 | as entry 2 | delivery i64 | left u32
    name                partition i32 | generation u32 | topic and group,
                        each u16 + UTF-8

| kind | entries | name | means |
|---|---|---|---|
| 1 opened | none | yes | a new incarnation begins: earlier leases are over |
| 2 changes | what changed | no | applied in the order of the log |
| 3 snapshot | all | yes | the whole state, in place of what was known |
| 4 deleted | none | yes | the queue is gone |

A `changes` record without entries marks a clean shutdown: messages leased then are
among the returned ones, with KEPT_DUE_MS as `due`. Every message below the floor is
done. `due` is wall-clock time in milliseconds, 0 for at once; `left` is the time until
`due` when the record was made, and bounds the wait after the wall clock was set back.
Adjacent done ranges are merged.
"""

import enum
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from metaq.errors import CorruptRecordError
from metaq.model import Offset, SizeBytes

_VERSION: Final = 1
_HEAD: Final = Struct(">BBIIqI")
_DONE: Final = Struct(">Bqq")
_RETURNED: Final = Struct(">BqiHq")
_DELIVERY: Final = Struct(">qI")
_PARTITION: Final = Struct(">iI")
_LENGTH: Final = Struct(">H")
KEPT_DUE_MS: Final = 2**53
"""`due` of a message that was leased at a clean shutdown."""
_FIRST: Final = Offset(0)
COUNT_MAX: Final = 2**16 - 1
"""A higher count of deliveries is stored as this."""


class StateKind(enum.IntEnum):
    """Kind of a record."""

    OPENED = 1
    CHANGES = 2
    SNAPSHOT = 3
    DELETED = 4


class QueueName(NamedTuple):
    """Name of a queue: a group on one partition of a broker."""

    group: str
    topic: str
    partition: int
    generation: int = 0
    """Number of the group; a group deleted and created again has another one."""


class Done(NamedTuple):
    """Range of offsets; all messages that begin in it are done."""

    start: Offset
    end: Offset


class Returned(NamedTuple):
    """A message that was given out and returned, to be given out again."""

    offset: Offset
    size_bytes: SizeBytes
    deliveries: int
    """Number of deliveries so far."""
    due_ms: int
    """Wall-clock time before which it is not given out; 0: at once."""
    delivery: int = 0
    """Last delivery that ended, with this record or without a record; 0: unknown."""
    left_ms: int = 0
    """Time until `due_ms` when the record was made; valid if `delivery` is known."""


Change: TypeAlias = Done | Returned


class DoneRanges:
    """Disjoint ranges of offsets, ascending; adjacent ranges are merged."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[Done] = ()) -> None:
        """Start with some ranges, in any order."""
        self._starts: list[Offset] = []
        self._ends: list[Offset] = []
        for start, end in ranges:
            self.add(start, end)

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._starts)

    def add(self, start: Offset, end: Offset) -> None:
        """Add a range, merged with those that it overlaps or touches."""
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def end_at(self, offset: Offset) -> Offset | None:
        """Return the end of the range that contains an offset, or None."""
        at = bisect_right(self._starts, offset) - 1
        return self._ends[at] if at >= 0 and offset < self._ends[at] else None

    def take_below(self, floor: Offset) -> Offset:
        """Remove the ranges that a floor reaches; return the floor raised over them."""
        count = 0
        for start, end in zip(self._starts, self._ends, strict=True):
            if start > floor:
                break
            floor, count = max(floor, end), count + 1
        del self._starts[:count], self._ends[:count]
        return floor

    def cut(self, end: Offset) -> None:
        """Remove everything at or above an offset."""
        count = bisect_left(self._starts, end)
        del self._starts[count:], self._ends[count:]
        if count:
            self._ends[-1] = min(self._ends[-1], end)

    def ranges(self) -> list[Done]:
        """Return all ranges, ascending."""
        return list(map(Done, self._starts, self._ends))


@dataclass(slots=True)
class QueueSnapshot:
    """Stored state of a queue."""

    floor: Offset
    """Every message below this offset is done."""
    done: DoneRanges = field(default_factory=DoneRanges)
    """Done ranges above the floor."""
    returned: dict[Offset, Returned] = field(default_factory=dict)
    """Returned messages by offset; some may be done by now, see `open_returned`."""
    incarnation: int = 0
    """Number of the last incarnation; 0: none yet."""
    is_idle: bool = False
    """Whether the last shutdown was clean, so that leased messages are known."""
    first_incarnation: int = 1
    """Deliveries of earlier incarnations refer to other messages at the same offsets.
    Not stored."""

    @property
    def end(self) -> Offset:
        """Offset after the last message that the state mentions."""
        ends = [each.end for each in self.done.ranges()[-1:]]
        ends += [Offset(at + it.size_bytes) for at, it in self.returned.items()]
        return max([self.floor, *ends])

    def cut(self, end: Offset) -> None:
        """Remove everything at or above an offset: other messages will be there."""
        self.floor = min(self.floor, end)
        self.done.cut(end)
        self.returned = {
            offset: each
            for offset, each in self.returned.items()
            if offset + each.size_bytes <= end
        }
        self.first_incarnation = self.incarnation + 1

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes in order."""
        for change in changes:
            if isinstance(change, Returned):
                self.returned[change.offset] = change
                continue
            self.done.add(*change)
        self.raise_floor(self.floor)

    def raise_floor(self, floor: Offset) -> None:
        """Raise the floor to an offset, and over done ranges that it reaches."""
        self.floor = self.done.take_below(max(floor, self.floor))

    def kept(self) -> frozenset[Offset]:
        """Return the offsets of messages leased at the last clean shutdown."""
        found = self.open_returned().items()
        return frozenset(at for at, it in found if it.due_ms == KEPT_DUE_MS)

    def open_returned(self) -> dict[Offset, Returned]:
        """Return the returned messages that are not done."""
        return {
            offset: each
            for offset, each in self.returned.items()
            if offset >= self.floor and self.done.end_at(offset) is None
        }


@dataclass(frozen=True, slots=True)
class StateRecord:
    """A record of `__queues`."""

    kind: StateKind
    queue_id: int
    incarnation: int
    floor: Offset
    entries: Sequence[Change] = ()
    name: QueueName | None = None


def encode_state(record: StateRecord) -> bytes:
    """Return the payload of a record."""
    head = _HEAD.pack(
        _VERSION,
        record.kind,
        record.queue_id,
        record.incarnation,
        record.floor,
        len(record.entries),
    )
    pieces = [head]
    for each in record.entries:
        if isinstance(each, Done):
            pieces.append(_DONE.pack(1, *each))
        else:
            offset, size, count, due_ms, delivery, left_ms = each
            kind, count = 3 if delivery else 2, min(count, COUNT_MAX)
            pieces.append(_RETURNED.pack(kind, offset, size, count, due_ms))
            if delivery:
                pieces.append(_DELIVERY.pack(delivery, left_ms))
    if record.name is not None:
        pieces.append(_PARTITION.pack(record.name.partition, record.name.generation))
        for text in (record.name.topic, record.name.group):
            raw = text.encode()
            pieces += (_LENGTH.pack(len(raw)), raw)
    return b"".join(pieces)


def snapshot_record(
    queue_id: int, name: QueueName, snapshot: QueueSnapshot
) -> StateRecord:
    """Return the snapshot record of a queue."""
    entries: list[Change] = list(snapshot.done.ranges())
    entries += snapshot.open_returned().values()
    last = snapshot.incarnation
    return StateRecord(
        StateKind.SNAPSHOT, queue_id, last, snapshot.floor, entries, name
    )


def decode_state(payload: bytes) -> StateRecord:
    """Decode the payload of a record.

    Raises:
        CorruptRecordError: it is truncated, too long or invalid.
    """
    try:
        version, kind, queue_id, incarnation, floor, count = _HEAD.unpack_from(payload)
        _require_version(version)
        entries, position = _read_entries(payload, _HEAD.size, count)
        name = None
        if StateKind(kind) is not StateKind.CHANGES:
            name, position = _read_name(payload, position)
        is_sound = position == len(payload) and floor >= 0
    except (struct.error, ValueError) as error:
        raise _invalid(payload) from error
    if not is_sound:
        raise _invalid(payload)
    return StateRecord(
        StateKind(kind), queue_id, incarnation, Offset(floor), entries, name
    )


def _require_version(version: int) -> None:
    if version != _VERSION:
        raise CorruptRecordError(
            f"state of a queue: expected version {_VERSION}, got {version}"
        )


def _invalid(payload: bytes) -> CorruptRecordError:
    return CorruptRecordError(
        f"state of a queue: {len(payload)} bytes that make no sense"
    )


def _read_entries(
    payload: bytes, position: int, count: int
) -> tuple[list[Change], int]:
    entries = list[Change]()
    for _ in range(count):
        word = payload[position : position + 1]
        if word == b"\1":
            _, start, end = _DONE.unpack_from(payload, position)
            if not 0 <= start < end:
                raise ValueError
            entries.append(Done(Offset(start), Offset(end)))
            position += _DONE.size
        elif word in (b"\2", b"\3"):
            kind, offset, size, times, due_ms = _RETURNED.unpack_from(payload, position)
            position += _RETURNED.size
            delivery = left_ms = 0
            if kind == 3:
                delivery, left_ms = _DELIVERY.unpack_from(payload, position)
                position += _DELIVERY.size
            if offset < 0 or size < 1 or due_ms < 0 or (kind == 3 and delivery < 1):
                raise ValueError
            known = Offset(offset), SizeBytes(size), times, due_ms, delivery, left_ms
            entries.append(Returned(*known))
        else:
            raise ValueError
    return entries, position


def _read_name(payload: bytes, position: int) -> tuple[QueueName, int]:
    partition, generation = _PARTITION.unpack_from(payload, position)
    position += _PARTITION.size
    texts = list[str]()
    for _ in range(2):
        (length,) = _LENGTH.unpack_from(payload, position)
        position += _LENGTH.size
        raw = payload[position : position + length]
        if len(raw) != length:
            raise ValueError
        texts.append(raw.decode())
        position += length
    topic, group = texts
    return QueueName(group, topic, partition, generation), position


class QueueSnapshots:
    """The queues of one partition of `__queues`, built from its records in order."""

    def __init__(self) -> None:
        """Start without queues."""
        self.by_name: dict[QueueName, QueueSnapshot] = {}
        self.starts: dict[QueueName, Offset] = {}
        """Offset of the last snapshot of each queue, or of its first record."""
        self._ids: dict[QueueName, int] = {}
        self._names: dict[int, QueueName] = {}
        self._last_id = 0
        """Highest number used. Numbers are not reused, because a transaction may still
        append a record of a queue that was deleted."""
        self._last_incarnation = 0
        """Highest incarnation of a deleted queue; its messages may still be leased."""

    def begin(self, name: QueueName, floor: Offset) -> QueueSnapshot:
        """Add a new queue; deliveries of a deleted queue of that name are not valid."""
        last = self._last_incarnation
        snapshot = QueueSnapshot(floor, incarnation=last, first_incarnation=last + 1)
        self.by_name[name] = snapshot
        return snapshot

    def id_of(self, name: QueueName) -> int:
        """Return the number of a queue; assign one if it has none."""
        found = self._ids.get(name)
        if found is None:
            found = self._last_id = self._last_id + 1
            self._ids[name], self._names[found] = found, name
        return found

    def remove(self, name: QueueName) -> None:
        """Remove a queue."""
        snapshot = self.by_name.pop(name, None)
        if snapshot is not None:
            self._last_incarnation = max(self._last_incarnation, snapshot.incarnation)
        self._names.pop(self._ids.pop(name, 0), None)
        self.starts.pop(name, None)

    def apply(self, record: StateRecord, offset: Offset = _FIRST) -> QueueName | None:
        """Apply a record; return its queue, None if the queue is not known any more.

        Args:
            record: the next record of the partition.
            offset: offset of the record.

        Raises:
            CorruptRecordError: its number belongs to another queue.
        """
        self._last_id = max(self._last_id, record.queue_id)
        name = record.name or self._names.get(record.queue_id)
        if name is None:
            # The record with its name was trimmed, because the queue was deleted.
            return None
        if self._names.setdefault(record.queue_id, name) != name:
            raise CorruptRecordError(
                f"state of a queue: number {record.queue_id} is of"
                f" {self._names[record.queue_id]}, got {name}"
            )
        if record.kind is StateKind.DELETED:
            self.remove(name)
            return name
        self._ids[name] = record.queue_id
        snapshot = self.by_name.get(name)
        if snapshot is None or record.kind is StateKind.SNAPSHOT:
            # A snapshot replaces all earlier records.
            snapshot = self.by_name[name] = QueueSnapshot(record.floor)
            self.starts[name] = offset
        snapshot.incarnation = record.incarnation
        snapshot.is_idle = record.kind is StateKind.CHANGES and not record.entries
        snapshot.apply(record.entries)
        snapshot.raise_floor(record.floor)
        return name
