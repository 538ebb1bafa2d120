"""Records made column by column are those that are made one by one."""

from hypothesis import example, given
from hypothesis import strategies as st

from metaq.model import MessageId
from metaq.record.checksum import pack_checksums
from metaq.record.ids import SEQUENCE_MASK, id_after
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.record.uniform import BLOCK_COUNT, encode_uniform, stamp_ids

FLAGS = st.integers(-(2**31), 2**31 - 1)
IDS = st.integers(-(2**62), 2**62)
PAYLOADS = st.integers(0, 40).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1)
)


def assert_made_one_by_one(payloads: list[bytes], first_id: int, flag: int) -> None:
    made = encode_uniform(payloads, pack_checksums(payloads), flag=flag)
    assert made == b"".join(
        encode_record(payload, id=MessageId(0), flag=flag) for payload in payloads
    )
    first, stride = MessageId(first_id), HEADER_BYTES + len(payloads[0])
    stamp_ids(made, stride, first, len(payloads))
    assert made == b"".join(
        encode_record(payload, id=id_after(first, number), flag=flag)
        for number, payload in enumerate(payloads)
    )


@given(PAYLOADS, IDS, FLAGS)
@example([b"a", b"b", b"c"], SEQUENCE_MASK - 1, 0)
@example([b"a", b"b", b"c"], -2, 0)
def test_records_are_those_made_one_by_one(
    payloads: list[bytes], first_id: int, flag: int
) -> None:
    """Every field of every one, whatever the payloads, ids and flags."""
    assert_made_one_by_one(payloads, first_id, flag)


@given(st.integers(-2, 2), st.integers(0, 2**22), st.integers(1, 3))
def test_blocks_and_runs_of_ids_leave_no_seam(
    more: int, first_id: int, blocks: int
) -> None:
    """Counts around whole blocks; ids across bytes and across the sequence's end."""
    count = blocks * BLOCK_COUNT + more
    assert_made_one_by_one([b"%04d" % k for k in range(count)], first_id, 1)
    assert_made_one_by_one([b"%04d" % k for k in range(5000)], first_id, 1)
