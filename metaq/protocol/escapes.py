"""Texts with any characters in a token: UTF-8, percent-encoded."""

from typing import Final
from urllib.parse import quote, unquote_to_bytes

from metaq.errors import LocalProtocolError, RemoteProtocolError

_PLAIN: Final = "/:@,()=<>'\"+"
"""Not escaped, like letters, digits and `-._~`."""


def escape(text: str) -> str:
    """Return a text as a token.

    Raises:
        LocalProtocolError: it is no UTF-8 (half of a surrogate pair).
    """
    try:
        return quote(text, safe=_PLAIN)
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{text!r} cannot travel as UTF-8") from error


def unescape(token: bytes, name: str) -> str:
    """Return the text of a token, which is that of `name`.

    Raises:
        RemoteProtocolError: it is no UTF-8; replaced, it would be another text.
    """
    try:
        return unquote_to_bytes(token).decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"{name} is no UTF-8: {token[:80]!r}") from error
