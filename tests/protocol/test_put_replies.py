"""Replies to many puts, made together, are those that are made one by one."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.protocol.encoding import encode_result
from metaq.protocol.put_replies import encode_put_replies, encode_put_replies_apart
from metaq.protocol.texts import put_reply


@given(
    st.integers(-1, 12),
    st.integers(0, 2**62),
    st.integers(0, 2**40),
    st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), *[st.integers(0, 40)] * 2)),
)
def test_a_run_of_put_replies_equals_one_by_one(
    partition: int, id_: int, offset: int, steps: list[tuple[int, int, int]]
) -> None:
    """One formatting operation for many replies gives the same bytes."""
    opaques, ids, offsets, single = [], [], [], []
    for opaque, id_step, offset_step in steps:
        id_, offset = id_ + id_step, offset + offset_step
        opaques.append(b"%d" % opaque)
        ids.append(id_)
        offsets.append(offset)
        body = put_reply(id_, partition, offset).encode()
        single.append(encode_result(200, body, opaque))
    assert encode_put_replies(partition, opaques, ids, offsets) == b"".join(single)
    if steps:
        apart = encode_put_replies_apart(partition, opaques, ids, offsets)
        assert apart == single


def test_a_run_of_put_replies_splits_where_a_number_gains_a_digit() -> None:
    """Lengths are right on both sides of 9/10 and 99/100."""
    opaques = [b"%d" % -k for k in range(200)]
    replies = encode_put_replies(0, opaques, range(5, 205), range(95, 295))
    single = [encode_result(200, b"%d 0 %d" % (5 + k, 95 + k), -k) for k in range(200)]
    assert replies == b"".join(single)
