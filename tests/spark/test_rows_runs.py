"""Runs of verified records, found without an object for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import MessageId
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.spark.rows import find_run

SIZES = st.lists(st.integers(1, 40) | st.just(9), min_size=1, max_size=12)


def log_of(sizes: list[int]) -> bytes:
    return b"".join(encode_record(b"x" * n, id=MessageId(n), flag=0) for n in sizes)


def run_of(data: bytes, start: int = 0, **limits: int) -> list[int]:
    asked = {"records_max": 100, "bytes_max": 10**6, "payload_max": 100, **limits}
    return list(find_run(memoryview(data), start, **asked))


@given(SIZES)
def test_edges_are_those_of_headers_and_payloads(sizes: list[int]) -> None:
    """Of equal sizes, of mixed ones, and of equal ones followed by others."""
    wanted = [0]
    for size in sizes:
        wanted += [wanted[-1] + HEADER_BYTES, wanted[-1] + HEADER_BYTES + size]
    data = log_of(sizes)
    assert run_of(data) == wanted
    assert run_of(b"before" + data, 6) == wanted


@given(SIZES, st.data())
def test_a_run_ends_before_the_first_bad_record(
    sizes: list[int], draw: st.DataObject
) -> None:
    """A payload that changed, or a record that the data cut short."""
    bad = draw.draw(st.integers(0, len(sizes) - 1))
    at = len(log_of(sizes[:bad]))
    data = bytearray(log_of(sizes))
    data[at + HEADER_BYTES] ^= 1
    assert len(run_of(bytes(data))) == 2 * bad + 1
    assert len(run_of(log_of(sizes)[: at + HEADER_BYTES])) == 2 * bad + 1


@pytest.mark.parametrize("sizes", [[9] * 5, [9, 8, 7, 6, 5]])
def test_limits_end_a_run(sizes: list[int]) -> None:
    """A run has one record at least, unless that is longer than a payload may be."""
    data = log_of(sizes)
    assert len(run_of(data, records_max=2)) == 5
    assert len(run_of(data, bytes_max=1)) == 3
    assert run_of(data, payload_max=4) == [0]
    assert run_of(b"") == [0]
