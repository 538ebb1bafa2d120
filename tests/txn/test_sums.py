"""The side file with the checksums of a redo file."""

import pytest

from metaq.txn.sums import (
    BESIDE,
    BOUND,
    ENTRY_BYTES,
    SYNCED,
    Sums,
    decode_sums,
    encode_entry,
    encode_head,
    encode_span,
)

ENTRIES = (
    encode_head(7),
    encode_entry(BESIDE, 0, 0),
    encode_span(0, b"one", is_synced=True),
    encode_entry(BOUND, 0, 4, 99),
    encode_span(3, b"three", is_synced=False),
    encode_entry(SYNCED, 0, 8),
)


def test_what_is_written_is_read() -> None:
    """Spans, bounds, the synced end, and whether our other files existed."""
    sums = decode_sums(b"".join(ENTRIES), 7)
    assert [(span.position, span.end) for span in sums.spans] == [(0, 3), (3, 8)]
    assert (sums.bounds, sums.synced_end, sums.is_complete) == ({4: 99}, 8, True)


@pytest.mark.parametrize("count", range(len(ENTRIES)))
def test_entries_count_up_to_the_first_damaged_one(count: int) -> None:
    """A flipped bit ends the file there; the entries before it are believed."""
    data = bytearray(b"".join(ENTRIES))
    data[count * ENTRY_BYTES + 5] ^= 1
    whole = decode_sums(b"".join(ENTRIES[:count]), 7)
    assert decode_sums(bytes(data), 7) == whole


def test_a_side_file_of_another_number_has_no_content() -> None:
    """It was renamed by hand."""
    assert decode_sums(b"".join(ENTRIES), 8) == Sums(has_file=True)


def test_spans_without_their_neighbour_end_the_file() -> None:
    """Bytes between two spans would have no checksum."""
    data = ENTRIES[0] + ENTRIES[2] + encode_span(4, b"gap", is_synced=True)
    assert [span[:2] for span in decode_sums(data, 7).spans] == [(0, 3)]
