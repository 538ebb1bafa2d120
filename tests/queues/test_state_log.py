"""Records of `__queues`: golden bytes, replay, damage."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import CorruptRecordError
from metaq.model import Offset, SizeBytes
from metaq.queues.state_log import (
    COUNT_MAX,
    Done,
    DoneRanges,
    QueueName,
    QueueSnapshot,
    QueueSnapshots,
    Returned,
    StateKind,
    StateRecord,
    decode_state,
    encode_state,
    snapshot_record,
)

NAME = QueueName("workers", "ördern", 3, 2**32 - 1)
CHANGES = (
    Done(Offset(100), Offset(200)),
    Returned(Offset(300), SizeBytes(50), 2, 1_700_000_000_000),
    Returned(Offset(350), SizeBytes(50), 1, 1_700_000_000_000, 2 << 40 | 9, 5_000),
)
GOLDEN = bytes.fromhex(
    "01 02 00000007 00000002 0000000000000064 00000003"
    "01 0000000000000064 00000000000000c8"
    "02 000000000000012c 00000032 0002 0000018bcfe56800"
    "03 000000000000015e 00000032 0001 0000018bcfe56800 0000020000000009 00001388"
)
OFFSETS = st.integers(0, 60).map(Offset)
RANGES = st.tuples(OFFSETS, st.integers(1, 9)).map(
    lambda pair: Done(pair[0], Offset(pair[0] + pair[1]))
)


def test_changes_have_these_bytes() -> None:
    """They are on disks: added to, never changed."""
    record = StateRecord(StateKind.CHANGES, 7, 2, Offset(100), CHANGES)
    assert encode_state(record) == GOLDEN
    assert decode_state(GOLDEN) == StateRecord(
        StateKind.CHANGES, 7, 2, Offset(100), list(CHANGES)
    )


@pytest.mark.parametrize(
    "kind", [StateKind.OPENED, StateKind.SNAPSHOT, StateKind.DELETED]
)
def test_a_record_with_a_name_reads_back(kind: StateKind) -> None:
    """Group, topic and partition."""
    record = StateRecord(kind, 1, 1, Offset(0), list(CHANGES), NAME)
    assert decode_state(encode_state(record)) == record


def test_a_high_count_is_kept_as_the_highest() -> None:
    """Sixteen bits are enough: no group allows so many deliveries."""
    change = Returned(Offset(1), SizeBytes(1), COUNT_MAX + 9, 0)
    record = StateRecord(StateKind.CHANGES, 1, 1, Offset(0), [change])
    (found,) = decode_state(encode_state(record)).entries
    assert isinstance(found, Returned)
    assert found.deliveries == COUNT_MAX


@pytest.mark.slow
def test_damage_is_one_error() -> None:
    """Every cut, and any bytes: a record, or an error that says so."""
    whole = encode_state(
        StateRecord(StateKind.SNAPSHOT, 1, 1, Offset(0), CHANGES, NAME)
    )
    for size in range(len(whole)):
        with pytest.raises(CorruptRecordError, match="state of a queue"):
            decode_state(whole[:size])
    rng = random.Random(1)
    for _ in range(10_000):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            record = decode_state(bytes(damaged))
        except CorruptRecordError:
            continue
        assert encode_state(record) == damaged


@given(st.lists(RANGES, max_size=30), st.integers(0, 70))
def test_ranges_are_a_set_of_offsets(added: list[Done], floor: int) -> None:
    """Disjoint, ascending, never touching; the floor eats what it reaches."""
    ranges, model = DoneRanges(), set[int]()
    for start, end in added:
        ranges.add(start, end)
        model |= set(range(start, end))
    found = ranges.ranges()
    assert {at for start, end in found for at in range(start, end)} == model
    for before, after in pairwise(found):
        assert before.end < after.start
    for at in range(75):
        assert (ranges.end_at(Offset(at)) is not None) == (at in model)
    risen = ranges.take_below(Offset(floor))
    wanted = floor
    while wanted in model:
        wanted += 1
    assert risen >= wanted
    assert all(start > risen for start, _ in ranges.ranges())


@pytest.mark.slow
def test_acks_in_any_order_around_an_open_message_are_two_ranges() -> None:
    """Neighbours are one range, in any order."""
    ranges, offsets = DoneRanges(), [n * 100 for n in range(200_000) if n != 100_000]
    random.Random(2).shuffle(offsets)
    for offset in offsets:
        ranges.add(Offset(offset), Offset(offset + 100))
    assert ranges.ranges() == [
        Done(Offset(0), Offset(10_000_000)),
        Done(Offset(10_000_100), Offset(20_000_000)),
    ]


def test_replay_knows_what_was_returned_and_what_is_done() -> None:
    """Changes in their order; a snapshot is what they come to."""
    snapshots = QueueSnapshots()
    snapshots.apply(StateRecord(StateKind.OPENED, 1, 4, Offset(0), name=NAME))
    changes = [Returned(Offset(100), SizeBytes(100), 1, 0), Done(Offset(0), Offset(99))]
    snapshots.apply(StateRecord(StateKind.CHANGES, 1, 4, Offset(0), changes))
    snapshot = snapshots.by_name[NAME]
    assert (snapshot.floor, list(snapshot.returned)) == (99, [100])
    assert snapshot.incarnation == 4
    again = QueueSnapshots()
    again.apply(decode_state(encode_state(snapshot_record(1, NAME, snapshot))))
    assert again.by_name[NAME].done.ranges() == snapshot.done.ranges()
    assert again.by_name[NAME].returned == snapshot.returned
    snapshots.apply(StateRecord(StateKind.DELETED, 1, 0, Offset(0), name=NAME))
    assert NAME not in snapshots.by_name
    assert (
        snapshots.apply(StateRecord(StateKind.CHANGES, 1, 4, Offset(0), changes))
        is None
    )


def test_a_record_has_the_floor_and_marks_a_clean_stop() -> None:
    """Changes without entries do; the begin of an incarnation does not."""
    snapshots = QueueSnapshots()
    for kind, floor, is_idle in (
        (StateKind.OPENED, 0, False),
        (StateKind.CHANGES, 300, True),
        (StateKind.OPENED, 300, False),
    ):
        name = None if kind is StateKind.CHANGES else NAME
        snapshots.apply(StateRecord(kind, 1, 1, Offset(floor), name=name))
        snapshot = snapshots.by_name[NAME]
        assert (snapshot.floor, snapshot.is_idle) == (floor, is_idle)


def test_records_before_the_last_snapshot_are_not_needed() -> None:
    """Nor are any of a queue that is gone: their bytes may go."""
    snapshots = QueueSnapshots()
    snapshots.apply(
        StateRecord(StateKind.OPENED, 1, 1, Offset(0), name=NAME), Offset(7)
    )
    assert snapshots.starts == {NAME: 7}
    snapshots.apply(snapshot_record(1, NAME, snapshots.by_name[NAME]), Offset(90))
    assert snapshots.starts == {NAME: 90}
    snapshots.remove(NAME)
    assert snapshots.starts == {}


def test_no_delivery_of_a_queue_that_is_gone_is_one_of_the_next() -> None:
    """Its messages may still be with workers."""
    snapshots = QueueSnapshots()
    snapshots.apply(StateRecord(StateKind.OPENED, 1, 4, Offset(0), name=NAME))
    snapshots.remove(NAME)
    snapshot = snapshots.begin(NAME, Offset(0))
    assert (snapshot.incarnation, snapshot.first_incarnation) == (4, 5)


def test_a_number_is_of_one_queue() -> None:
    """Records that contradict each other are damage."""
    snapshots = QueueSnapshots()
    snapshots.apply(StateRecord(StateKind.OPENED, 1, 1, Offset(0), name=NAME))
    other = NAME._replace(partition=9)
    with pytest.raises(CorruptRecordError, match="number 1 is of"):
        snapshots.apply(StateRecord(StateKind.OPENED, 1, 1, Offset(0), name=other))
    assert snapshots.id_of(other) == 2


def test_a_number_is_not_given_again_when_its_queue_is_gone() -> None:
    """A transaction may append what the queue that had it was told."""
    snapshots, later = QueueSnapshots(), NAME._replace(generation=1)
    snapshots.apply(StateRecord(StateKind.OPENED, 1, 1, Offset(0), name=NAME))
    snapshots.apply(StateRecord(StateKind.DELETED, 1, 0, Offset(0), name=NAME))
    assert snapshots.id_of(later) == 2
    snapshots.apply(StateRecord(StateKind.OPENED, 2, 1, Offset(0), name=later))
    late = StateRecord(StateKind.CHANGES, 1, 1, Offset(9), [Done(Offset(0), Offset(9))])
    assert snapshots.apply(late) is None
    assert snapshots.by_name[later].floor == 0


def test_an_image_without_records_is_empty() -> None:
    """A new queue."""
    snapshot = QueueSnapshot(Offset(70))
    assert (snapshot.floor, len(snapshot.done), snapshot.incarnation) == (70, 0, 0)
