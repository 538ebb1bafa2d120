"""Any text as a token: UTF-8, percent-encoded."""

from typing import Final
from urllib.parse import quote, unquote_to_bytes

from metaq.errors import LocalProtocolError, RemoteProtocolError

_PLAIN: Final = "/:@,()=<>'\"+"
"""Not escaped; nor are letters, digits and `-._~`."""


def escape(text: str) -> str:
    """Return a text encoded as a token.

    Raises:
        LocalProtocolError: UTF-8 cannot encode it (half of a surrogate pair).
    """
    try:
        return quote(text, safe=_PLAIN)
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{text!r} cannot travel as UTF-8") from error


def unescape(token: bytes, name: str) -> str:
    """Return the decoded text of a token; `name` names it in the error.

    Raises:
        RemoteProtocolError: it is not UTF-8; replacing bytes would change the text.
    """
    try:
        return unquote_to_bytes(token).decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"{name} is no UTF-8: {token[:80]!r}") from error
