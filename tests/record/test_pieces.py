"""Bytes in several pieces, processed a step at a time."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.record.checksum import checksum
from metaq.record.pieces import checksum_in_steps, in_steps, join_in_steps
from tests.record.stamping import run_to_end

PIECES = st.lists(st.binary(max_size=20), max_size=8)


@given(PIECES, st.integers(1, 30))
def test_steps_are_all_bytes_in_order(pieces: list[bytes], step_bytes: int) -> None:
    """Each step but the last has its full size, wherever the pieces end."""
    steps = [b"".join(step) for step in in_steps(pieces, step_bytes)]
    assert b"".join(steps) == b"".join(pieces)
    assert {len(step) for step in steps[:-1]} <= {step_bytes}


@given(PIECES, st.integers(1, 30))
def test_joined_and_summed_as_if_in_one_piece(
    pieces: list[bytes], block_bytes: int
) -> None:
    """Blocks are copies."""
    whole = b"".join(pieces)
    assert run_to_end(checksum_in_steps(pieces)) == checksum(whole)
    blocks = run_to_end(join_in_steps(pieces, block_bytes))
    assert b"".join(blocks) == whole
