"""Rows of puts: what is read of them, and what is left to others."""

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.broker.put_row import ROW_MIN, PutRowReader
from metaq.record.checksum import pack_checksums

NAME = b"put test 0 5 0"
COUNT = 4 * ROW_MIN


def frames(payloads: list[bytes], opaques: list[int]) -> bytes:
    return b"".join(
        b"%b %d %d\r\n%b" % (NAME, crc32(payload) & 0x7FFFFFFF, opaque, payload)
        for payload, opaque in zip(payloads, opaques, strict=True)
    )


@given(
    puts=st.lists(
        st.tuples(st.binary(min_size=5, max_size=5), st.integers(-(2**31), 2**31 - 1)),
        min_size=ROW_MIN,
        max_size=3 * ROW_MIN,
    ),
    before=st.binary(max_size=9),
    behind=st.sampled_from([b"", b"put test 0 5 0 9", b"put test 0 6 0 1 2\r\nhello!"]),
)
def test_a_row_is_read_exactly(
    puts: list[tuple[bytes, int]], before: bytes, behind: bytes
) -> None:
    """Any payloads and opaques, anything around: the values, and where the row ends."""
    payloads, opaques = [p for p, _ in puts], [o for _, o in puts]
    raw = frames(payloads, opaques)
    row = PutRowReader(NAME, 5).read(before + raw + behind, len(before), COUNT)
    assert row is not None
    assert row.payloads == payloads
    assert row.opaques == [b"%d" % opaque for opaque in opaques]
    assert row.checksums == pack_checksums(payloads)
    assert row.end == len(before + raw)


@pytest.mark.parametrize("opaque", [1, -(2**31)])
def test_a_row_ends_at_its_bound(opaque: int) -> None:
    """What follows is another row, also where numbers are as long as they may be."""
    raw = frames([b"hello"] * (ROW_MIN + 5), [opaque] * (ROW_MIN + 5))
    row = PutRowReader(NAME, 5).read(raw, 0, ROW_MIN)
    assert row is not None
    assert row.opaques == [b"%d" % opaque] * ROW_MIN
    assert raw[row.end :] == raw[: 5 * len(raw) // (ROW_MIN + 5)]


ROW = frames([b"hello"] * ROW_MIN, list(range(ROW_MIN)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        ROW[:-1],
        b"x" + ROW,
        ROW.replace(b"put test 0 5", b"put test 1 5"),
        ROW.replace(b" 907060870 9\r", b" 907060871 9\r"),
        # Without checksum, but one that has it.
        ROW.replace(b" 907060870 9\r", b" -1 9\r"),
        ROW.replace(b" 907060870 ", b" -1 ").replace(b" -1 9\r", b" 907060870 9\r"),
        ROW.replace(b" 907060870 ", b" -1 ").replace(b" -1 9\r", b" -2 9\r"),
        ROW.replace(b" 907060870 9\r", b" 0907060870 9\r"),
        ROW.replace(b" 9\r", b" 2147483648\r"),
        ROW.replace(b" 9\r", b" -2147483649\r"),
        ROW.replace(b" 9\r", b" +9\r"),
        ROW.replace(b" 9\r", b" 09\r"),
        ROW.replace(b" 9\r", b" -0\r"),
        ROW.replace(b" 9\r", b" 12345678901\r"),
    ],
)
def test_what_is_odd_is_no_row(raw: bytes) -> None:
    """Too few, another head, a checksum that is wrong or written oddly, an opaque."""
    assert PutRowReader(NAME, 5).read(raw, 0, COUNT) is None


def test_names_are_no_patterns() -> None:
    """A topic with dots stands for itself."""
    raw = ROW.replace(b"put test", b"put t.st")
    assert PutRowReader(b"put t.st 0 5 0", 5).read(raw, 0, COUNT) is not None
    assert PutRowReader(b"put t.st 0 5 0", 5).read(ROW, 0, COUNT) is None
