"""Records made column by column are those that are made one by one."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.model import MessageId
from metaq.record.checksum import pack_checksums
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.record.uniform import encode_uniform, stamp_ids

FLAGS = st.integers(-(2**31), 2**31 - 1)
IDS = st.integers(-(2**63), 2**63 - 1)
RECORDS = st.integers(0, 40).flatmap(
    lambda size: st.lists(
        st.tuples(st.binary(min_size=size, max_size=size), IDS), min_size=1
    )
)


@given(RECORDS, FLAGS)
def test_records_are_those_made_one_by_one(
    records: list[tuple[bytes, int]], flag: int
) -> None:
    """Every field of every one, whatever the payloads, ids and flags."""
    payloads, ids = [payload for payload, _ in records], [id_ for _, id_ in records]
    made = encode_uniform(payloads, pack_checksums(payloads), flag=flag)
    assert made == b"".join(
        encode_record(payload, id=MessageId(0), flag=flag) for payload in payloads
    )
    stamp_ids(made, HEADER_BYTES + len(payloads[0]), ids)
    assert made == b"".join(
        encode_record(payload, id=MessageId(id_), flag=flag) for payload, id_ in records
    )
