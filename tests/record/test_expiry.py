"""When a message expires, by its id and its header."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.model import ID_MS_SHIFT, ID_ZERO_MS, HeaderPairs, MessageId, id_time
from metaq.record.expiry import EXPIRES_IN, EXPIRY_MARK, expiry_of
from metaq.record.flags import encode_payload
from tests.cases import for_each

STAMPED_MS = 1_700_000_000_000
ID = MessageId((STAMPED_MS - ID_ZERO_MS) << ID_MS_SHIFT)

CASES: list[tuple[MessageId, HeaderPairs, int | None]] = [
    (ID, (), None),
    (ID, (("trace", b"1"),), None),
    (ID, ((EXPIRES_IN, b"2000"),), STAMPED_MS + 2000),
    (ID, ((EXPIRES_IN, b"0"), ("trace", b"1")), STAMPED_MS),
    (ID, ((EXPIRES_IN, b"1"), (EXPIRES_IN, b"5")), STAMPED_MS + 5),
    (ID, ((EXPIRES_IN, b"-1"),), None),
    (ID, ((EXPIRES_IN, b""),), None),
    (ID, ((EXPIRES_IN, b"2.5"),), None),
    (ID, ((EXPIRES_IN, "٣".encode()),), None),
    (ID, ((EXPIRES_IN, b"9" * 5000),), None),
    (MessageId(-5), ((EXPIRES_IN, b"1"),), None),
]


@for_each("message_id, headers, expected", CASES)
def test_a_message_expires_its_time_after_its_id(
    message_id: MessageId, headers: HeaderPairs, expected: int | None
) -> None:
    """Never, where the id tells no time or the header is no number."""
    assert expiry_of(message_id, headers) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from([EXPIRES_IN, "h", "trace é"]), st.binary(max_size=5))
    ),
    st.none() | st.binary(max_size=5),
)
def test_the_mark_is_in_every_record_that_may_expire(
    headers: list[tuple[str, bytes]], key: bytes | None
) -> None:
    """So records without it need not be taken apart."""
    payload, _flag = encode_payload(b"", None, key, headers)
    has_header = any(name == EXPIRES_IN for name, _ in headers)
    assert (EXPIRY_MARK in payload) == has_header
    assert id_time(ID) == STAMPED_MS
