"""Texts in tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import LocalProtocolError, RemoteProtocolError
from metaq.protocol.escapes import escape, unescape


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_travels(text: str) -> None:
    """In one token, whatever is in it."""
    token = escape(text)
    assert token.isascii()
    assert token.split() == ([token] if text else [])
    assert unescape(token.encode(), "where") == text


def test_what_is_no_utf_8_does_not() -> None:
    """Replaced, a filter would be another one."""
    with pytest.raises(LocalProtocolError, match="cannot travel"):
        escape("\ud800")
    with pytest.raises(RemoteProtocolError, match=r"where is no UTF-8: b'a%FF'"):
        unescape(b"a%FF", "where")
