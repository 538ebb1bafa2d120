"""Transaction keys: what they spell, and which are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import RemoteProtocolError
from metaq.model import (
    NULL_TRANSACTION,
    TRANSACTION_KEY_BYTES_MAX,
    LocalTransactionId,
    TransactionId,
    XaTransactionId,
)
from metaq.protocol.transaction_ids import (
    KEYS_MAX,
    decode_keys,
    encode_keys,
    format_key,
    parse_key,
)
from tests.rigs.strategies import transaction_ids

GOOD: list[tuple[str, TransactionId]] = [
    ("null", NULL_TRANSACTION),
    ("TX:s1:1", LocalTransactionId("s1", 1)),
    ("TX:s1:-99", LocalTransactionId("s1", -99)),
    ("TX::1", LocalTransactionId("", 1)),
    ("TX:192.0.2.2-1795-1:1", LocalTransactionId("192.0.2.2-1795-1", 1)),
    ("XID:101:0a0b::uq", XaTransactionId(101, b"\x0a\x0b", b"", "uq")),
    ("XID:-1:::uq", XaTransactionId(-1, b"", b"", "uq")),
    ("XID:1:AbC:f:uq", XaTransactionId(1, b"\xab", b"", "uq")),
    ("XID:1:aa:bb:", XaTransactionId(1, b"\xaa", b"\xbb", "")),
    ("XID:1:::", XaTransactionId(1, b"", b"", "")),
    ("XID:1:aa:bb:\t", XaTransactionId(1, b"\xaa", b"\xbb", "\t")),
]  # fmt: skip
BAD = [
    "", "NULL", "null ", "TX", "TX:s1", "TX:s1:", "TX:s1:x", "TX:s1:3000000000",
    "TX:a:b:1", "tx:s1:1", "ABC:1:2", "XID:100:aa:bb", "XID:100:aa:bb:uq:",
    "XID:100:aa:bb::", "XID:100:zz:bb:uq", "XID:100:aa:b_:uq", "XID:x:aa:bb:uq",
    "XID:2147483648:aa:bb:uq", "XID:1:aa:bb:uq:more", "XID:1:\uff41a:bb:uq",
]  # fmt: skip


@pytest.mark.parametrize(("key", "expected"), GOOD)
def test_keys_spell_ids(key: str, expected: TransactionId) -> None:
    """Local, XA and null; hexadecimal of either case, a half byte dropped."""
    assert parse_key(key) == expected
    assert parse_key(format_key(expected)) == expected


@pytest.mark.parametrize("key", BAD)
def test_other_keys_are_a_breach(key: str) -> None:
    """Wrong counts of parts, numbers, and hexadecimal."""
    with pytest.raises(RemoteProtocolError):
        parse_key(key)


@given(transaction_ids())
def test_keys_read_back(transaction: TransactionId) -> None:
    """Every id has a key that spells it."""
    assert parse_key(format_key(transaction)) == transaction


@given(st.lists(transaction_ids()))
def test_several_keys_read_back(ids: list[TransactionId]) -> None:
    """A line each; what is not so many lines, or no keys, is refused."""
    data = encode_keys(ids)
    assert list(decode_keys(data, len(ids))) == ids
    for other, count in ((data, len(ids) + 1), (data + b"x", len(ids))):
        with pytest.raises(RemoteProtocolError, match="transaction keys: expected"):
            decode_keys(other, count)
    with pytest.raises(RemoteProtocolError):
        list(decode_keys(data + b"x\r\n", len(ids) + 1))


def test_keys_have_bounds() -> None:
    """Else one command keeps a broker busy for minutes, or in memory for ever."""
    key = b"TX:s:1\r\n"
    assert len(list(decode_keys(key * KEYS_MAX, KEYS_MAX))) == KEYS_MAX
    with pytest.raises(RemoteProtocolError, match=f"at most {KEYS_MAX}, got 50001"):
        decode_keys(key * (KEYS_MAX + 1), KEYS_MAX + 1)
    with pytest.raises(RemoteProtocolError, match="expected 1 lines, got 3000000"):
        decode_keys(b"\r\n" * 3_000_000, 1)
    longest = b"TX:" + b"s" * (TRANSACTION_KEY_BYTES_MAX - 5) + b":1"
    assert len(list(decode_keys(longest + b"\r\n", 1))) == 1
    with pytest.raises(RemoteProtocolError, match="at most 1024 bytes in one, got"):
        decode_keys(longest + b"1\r\n", 1)
