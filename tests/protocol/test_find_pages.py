"""Pages of a reply to a `find`: golden bytes, round trips, what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import RemoteProtocolError
from metaq.protocol.find_pages import FoundPage, decode_pages, encode_pages

I64 = st.integers(0, 2**63 - 1)
PAGES = st.builds(FoundPage, st.integers(0, 2**31 - 1), I64, I64, st.binary())


def test_pages_have_these_bytes() -> None:
    """Partition, next offset, bytes read, length; then the runs."""
    raw = encode_pages([FoundPage(3, 256, 40, b"runs"), FoundPage(1, 0, 0, b"")])
    assert raw == bytes.fromhex(
        "00000003 0000000000000100 0000000000000028 00000004 72756e73"
        "00000001 0000000000000000 0000000000000000 00000000"
    )


@given(st.lists(PAGES))
def test_pages_come_back(pages: list[FoundPage]) -> None:
    assert decode_pages(encode_pages(pages)) == pages


@given(st.lists(PAGES, min_size=1), st.data())
def test_a_page_that_is_cut_short_is_refused(
    pages: list[FoundPage], data: st.DataObject
) -> None:
    raw = encode_pages(pages)
    kept = data.draw(st.integers(1, len(encode_pages(pages[-1:])) - 1))
    with pytest.raises(RemoteProtocolError, match="page"):
        decode_pages(raw[:-kept])


@pytest.mark.parametrize(
    "page",
    [FoundPage(-1, 0, 0, b""), FoundPage(0, -1, 0, b""), FoundPage(0, 0, -1, b"")],
)
def test_a_negative_number_is_refused(page: FoundPage) -> None:
    with pytest.raises(RemoteProtocolError, match="expected 0 to 0 bytes of runs"):
        decode_pages(encode_pages([page]))


@given(st.binary())
def test_any_bytes_are_pages_or_refused(raw: bytes) -> None:
    try:
        pages = decode_pages(raw)
    except RemoteProtocolError:
        return
    assert encode_pages(pages) == raw
