"""Key and headers of a message, as the first line of its attribute.

    key=order-17&h.trace=00-4bf9&h.cause=bad%20row      flag bits 0 and 1
    key=order-17<newline>the attribute                  with an attribute as well

MetaQ has one text beside the data of a message, the attribute, and one flag bit for it.
A second flag bit says that the attribute begins with this line; without it the text is
all the sender's own, whatever stands in it. A client that does not know the bit, such
as MetaQ's own, shows the line as part of the attribute, and any parser of query strings
takes it apart.

    line    = field *( "&" field )         at least one
    field   = "key=" value                 first, once at most
            / "h." name "=" value          in order; a name may stand more than once
    name    = 1*char                       UTF-8 text
    value   = *char                        bytes
    char    = letter / digit / one of "-._~/:@," / "%" two digits 0-9A-F

The line is ASCII. A newline and the attribute follow it; without a newline there is no
attribute, behind one it may be empty. A line that does not read so is no such line: the
whole text is the attribute.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias
from urllib.parse import quote_from_bytes, unquote_to_bytes

from metaq.errors import LocalProtocolError
from metaq.model import HeaderPairs

Headers: TypeAlias = Mapping[str, bytes] | Sequence[tuple[str, bytes]]
"""Headers as users give them: a dict, or pairs in order."""

_PLAIN: Final = "/:@,"
"""Written as they are, beside letters, digits and `-._~`."""

_PLAIN_OCTETS: Final = re.compile(rb"[A-Za-z0-9._~/:@,-]*")

_CHAR: Final = "(?:[A-Za-z0-9._~/:@,-]|%[0-9A-F]{2})"
_LINE: Final = re.compile(
    f"(?:key={_CHAR}*|h\\.{_CHAR}+={_CHAR}*)(?:&h\\.{_CHAR}+={_CHAR}*)*"
)


def encode_properties(key: str | bytes | None, headers: Headers) -> str:
    """Return the line; "" where there is neither a key nor a header.

    Args:
        key: text stands for its UTF-8 bytes; None is no key, "" is an empty one.
        headers: names are not empty; values are bytes.

    Raises:
        LocalProtocolError: a name is empty, or no UTF-8 (half of a surrogate pair), or
            the key is not.
        TypeError: one of them is of another type.
    """
    fields = []
    if key is not None:
        fields.append("key=" + quote_from_bytes(_octets("key", key), _PLAIN))
    # Most messages have none, and looking at them costs more than all the rest.
    for name, value in () if headers == () else list_headers(headers):
        quoted = quote_from_bytes(_octets("header", name), _PLAIN)
        fields.append(f"h.{quoted}={quote_from_bytes(value, _PLAIN)}")
    return "&".join(fields)


def key_line(key: bytes) -> bytes:
    """Return the line of a message with a key alone, as `encode_properties` does."""
    if _PLAIN_OCTETS.fullmatch(key):
        return b"key=" + key
    return encode_properties(key, ()).encode()


def list_headers(headers: Headers) -> HeaderPairs:
    """Return headers as pairs, checked.

    Raises:
        LocalProtocolError: a name is empty.
        TypeError: a name is no text, or a value is no bytes.
    """
    listed: HeaderPairs | None = None
    # An iterator would be empty when the message is encoded again.
    if isinstance(headers, Mapping | Sequence):
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        with suppress(TypeError, ValueError):
            listed = tuple((name, value) for name, value in pairs)
    if listed is None:
        raise TypeError(
            "headers: expected a dict of names and bytes, or pairs of them, got"
            f" {type(headers).__name__} {headers!r:.80}"
        )
    for name, value in listed:
        if not isinstance(name, str):
            raise TypeError(
                f"header: expected str as name, got {type(name).__name__} {name!r:.80}"
            )
        if not name:
            raise LocalProtocolError("header: expected a name, got an empty one")
        if not isinstance(value, bytes):
            raise TypeError(
                f"header {name!r:.80}: expected bytes as value, got"
                f" {type(value).__name__} {value!r:.80}"
            )
    return listed


def join_properties(line: str, attribute: str | None) -> str:
    """Return the text of a line that is not empty, and an attribute; None for none."""
    return line if attribute is None else f"{line}\n{attribute}"


def split_properties(text: str) -> tuple[bytes | None, HeaderPairs, str | None]:
    """Return (key, headers, attribute) of a text that begins with the line.

    Args:
        text: an attribute of a record with flag bit 1.

    Returns:
        No key, no headers and the whole text, where it does not begin with such a line.
    """
    line, newline, rest = text.partition("\n")
    if _LINE.fullmatch(line) is None:
        return None, (), text
    key = None
    headers = []
    for field in line.split("&"):
        name, _, value = field.partition("=")
        if name == "key":
            key = unquote_to_bytes(value)
        else:
            decoded = unquote_to_bytes(name[2:]).decode(errors="replace")
            headers.append((decoded, unquote_to_bytes(value)))
    return key, tuple(headers), rest if newline else None


def _octets(what: str, text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"{what} {text!r:.80} is no UTF-8") from error
    except AttributeError:
        raise TypeError(
            f"{what}: expected str or bytes, got {type(text).__name__} {text!r:.80}"
        ) from None
