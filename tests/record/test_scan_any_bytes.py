"""No bytes from a disk or a peer make this package raise."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import CorruptRecordError
from metaq.model import MessageId, Position
from metaq.record.flags import decode_payload, encode_payload
from metaq.record.layout import Record
from metaq.record.scan import CleanEnd, find_next_record, read_record, scan_records
from tests.record.stamping import check_and_stamp
from tests.rigs.strategies import segments

ANY = st.binary(max_size=120)


@given(ANY, st.integers(0, 200))
def test_any_bytes_end_a_walk_where_the_record_ends(data: bytes, limit: int) -> None:
    """Walk, single step and search agree on any bytes."""
    result = scan_records(data, payload_bytes_max=limit)
    assert 0 <= result.position <= len(data)
    single = read_record(data, result.position, payload_bytes_max=limit)
    assert not isinstance(single, Record)
    assert type(single) is type(result)
    found = find_next_record(data, payload_bytes_max=limit)
    if found is not None:
        assert isinstance(read_record(data, found), Record)


@given(segments(), ANY)
def test_a_walk_counts_what_was_written(log: bytes, junk: bytes) -> None:
    """Valid records are never lost to what follows them."""
    whole = scan_records(log)
    assert isinstance(whole, CleanEnd)
    assert scan_records(log + junk).record_count >= whole.record_count
    assert scan_records(junk + log, Position(len(junk))).last_id == whole.last_id


@given(ANY, st.integers(-2, 8))
def test_any_bytes_are_stamped_or_refused(data: bytes, count: int) -> None:
    """A batch that is accepted is a log of as many records."""
    buffer = bytearray(data)
    if check_and_stamp(buffer, count, MessageId(1 << 22)) is None:
        result = scan_records(buffer)
        assert isinstance(result, CleanEnd)
        assert result.record_count == count


@given(ANY, st.integers(-(2**31), 2**31 - 1))
def test_any_payload_decodes_or_is_named_corrupt(payload: bytes, flag: int) -> None:
    """Only one error leaves, and what decodes without one is complete."""
    with contextlib.suppress(CorruptRecordError):
        data, attribute, key, headers = decode_payload(payload, flag)
        assert payload.endswith(data)
        block = (attribute, key, headers) != (None, None, ())
        assert block == bool(flag & 1)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.binary(max_size=50), st.none() | TEXTS)
def test_payloads_read_back(data: bytes, attribute: str | None) -> None:
    """None, empty and any other attribute survive."""
    payload, flag = encode_payload(data, attribute)
    assert decode_payload(payload, flag) == (data, attribute, None, ())
