"""The state of a queue in which one message stays open, and all after it are done."""

import random

import pytest

from metaq.protocol.queue_frames import Settlement, SettleVerb, Word
from metaq.queues.state_log import encode_state, snapshot_record
from tests.queues.rig import NAME, Rig
from tests.sampling import IS_WHOLE

COUNT = 10_000_000 if IS_WHOLE else 50_000
AT_ONCE = 1_000
SIZE_BYTES = 100


@pytest.mark.slow
def test_acks_out_of_order_around_one_open_message_are_one_range(
    rng: random.Random,
) -> None:
    """However many there are; also in the record that a restart reads."""
    rig = Rig()
    state = rig.state
    state.found(state.scan_offset, SIZE_BYTES, None, rig.now)
    (kept,) = state.take("slow", 1, 10**6, 30_000, rig.now)
    longest = 0
    for _ in range(COUNT // AT_ONCE):
        for _ in range(AT_ONCE):
            state.found(state.scan_offset, SIZE_BYTES, None, rig.now)
        taken = state.take("w", AT_ONCE, 10**9, 30_000, rig.now)
        rng.shuffle(taken)
        for each in taken:
            entry = Settlement(each.offset, each.delivery, SettleVerb.ACK)
            assert state.settle("w", entry, rig.now) is Word.OK
        snapshot = state.snapshot(rig.now)
        longest = max(longest, len(encode_state(snapshot_record(1, NAME, snapshot))))
        state.drain_changes()
        assert (state.open_count, state.floor, len(snapshot.done)) == (1, 0, 1)
    assert longest < 100
    entry = Settlement(kept.offset, kept.delivery, SettleVerb.ACK)
    assert state.settle("slow", entry, rig.now) is Word.OK
    assert state.floor == (COUNT + 1) * SIZE_BYTES
