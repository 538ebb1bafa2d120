"""Runs of records: golden bytes, round trips, damage."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import CorruptRecordError
from metaq.model import MessageId, Offset
from metaq.record.layout import encode_record
from metaq.record.runs import RecordRun, decode_runs, encode_runs, records_of

RUNS = st.lists(
    st.builds(
        RecordRun, st.integers(0, 2**62).map(Offset), st.binary(min_size=1, max_size=50)
    ),
    max_size=5,
)


def test_a_run_has_these_bytes() -> None:
    """Offset, length, records."""
    assert encode_runs([RecordRun(Offset(258), b"abc")]) == (
        bytes.fromhex("0000000000000102 00000003") + b"abc"
    )


@given(RUNS, st.binary(max_size=9))
def test_runs_read_back(runs: list[RecordRun], before: bytes) -> None:
    """After anything that comes before them in the payload."""
    assert decode_runs(before + encode_runs(runs), len(before)) == runs


def test_damage_is_one_error() -> None:
    """Every cut but those between runs, and any bytes."""
    whole = encode_runs([RecordRun(Offset(1), b"abc"), RecordRun(Offset(9), b"d")])
    for size in set(range(1, len(whole))) - {15}:
        with pytest.raises(CorruptRecordError, match="run"):
            decode_runs(whole[:size])
    rng = random.Random(1)
    for _ in range(3_000):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] = rng.randrange(256)
        try:
            found = decode_runs(bytes(damaged))
        except CorruptRecordError:
            continue
        assert encode_runs(found) == damaged


def test_each_record_of_a_run_has_its_offset() -> None:
    """The first one is where the run begins."""
    records = [encode_record(data, id=MessageId(1)) for data in (b"", b"ab", b"c")]
    run = RecordRun(Offset(100), b"".join(records))
    assert list(records_of(run)) == [
        RecordRun(Offset(100), records[0]),
        RecordRun(Offset(120), records[1]),
        RecordRun(Offset(142), records[2]),
    ]
    with pytest.raises(CorruptRecordError, match="no whole record at byte 42 of 62"):
        list(records_of(RecordRun(Offset(100), run.data[:-1])))
