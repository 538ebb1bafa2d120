"""Headers of a request, and the bytes of its reply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import BrokerId, HeaderPairs
from metaq.record.reply_to import (
    ReplyAddress,
    decode_reply,
    encode_error,
    encode_reply,
    reply_address,
)

MAILBOX = "0123456789abcdef" * 2
ADDRESS = ReplyAddress(BrokerId(7), MAILBOX, 42)


def test_the_headers_of_a_request() -> None:
    """Those of the spec, as text; the last of a name counts."""
    headers = ADDRESS.headers()
    assert headers == (
        ("reply-to", b"7/" + MAILBOX.encode()),
        ("correlation", b"42"),
    )
    assert reply_address((("reply-to", b"x"), ("a", b"b"), *headers)) == ADDRESS


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("correlation", b"42"),),
        (("reply-to", b"7/" + MAILBOX.encode()),),
        (("reply-to", b"7/" + MAILBOX.encode()), ("correlation", b"-1")),
        (("reply-to", b"7/" + MAILBOX.encode()), ("correlation", b"9" * 19)),
        (("reply-to", MAILBOX.encode()), ("correlation", b"42")),
        (("reply-to", b"7/" + MAILBOX.upper().encode()), ("correlation", b"42")),
        (("reply-to", b"7/" + MAILBOX.encode() + b"\n"), ("correlation", b"42")),
    ],
)
def test_other_messages_want_no_reply(headers: HeaderPairs) -> None:
    """Nothing is sent to a place that no requester has named."""
    assert reply_address(headers) is None


@given(st.binary())
def test_replies_are_read_as_they_were_made(data: bytes) -> None:
    """Data comes back as it is, also none."""
    assert decode_reply(encode_reply(data)) == (data, None)


@given(st.text())
def test_errors_are_told_from_replies(text: str) -> None:
    """The text is replaced where it cannot be encoded."""
    data, found = decode_reply(encode_error(text))
    assert data == b""
    assert found == text.encode(errors="replace").decode()


@given(st.binary())
def test_any_bytes_are_a_reply_or_an_error(payload: bytes) -> None:
    """A mailbox is open to all who know its name."""
    _data, text = decode_reply(payload)
    assert (text is None) == (payload[:1] == b"\0")
