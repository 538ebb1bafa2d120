"""Flag bits, and the attribute block that they announce: attribute, key and headers.

    flag bit 0 = 1:   attribute length (i32) | text (UTF-8) | data
    flag bit 0 = 0:   data

    flag bit 1 = 0:   the text is the attribute
    flag bit 1 = 1:   the text begins with a line of key and headers

An empty attribute differs from none: it sets bit 0 and writes length 0. All other bits
are undefined and are kept unchanged. Bit 0 is MetaQ's; bit 1 is ours and has no meaning
without bit 0. A client that does not know bit 1, such as MetaQ's own, shows the line as
part of the attribute, and any parser of query strings can split it.

    key=order-17&h.trace=00-4bf9&h.cause=bad%20row      flag bits 0 and 1
    key=order-17<newline>the attribute                  with an attribute as well

    line    = field *( "&" field )         1 to FIELDS_MAX of them
    field   = "key=" value                 first, once at most
            / "h." name "=" value          in order; a name may occur more than once
    name    = 1*char                       UTF-8 text
    value   = *char                        bytes
    char    = letter / digit / one of "-._~/:@," / "%" two digits 0-9A-F

A byte that needs no escape must not have one, so each field has only one encoding, and
can be searched for without parsing the line. The line is ASCII. If there is an
attribute, a newline and the attribute follow; the attribute may be empty. If the first
line does not match this grammar, the whole text is the attribute.

Source: docs/metaq-1.4/broker.md 1.13.
"""

import re
from binascii import a2b_qp
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from struct import Struct
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import quote_from_bytes

from metaq.errors import ConfigError, CorruptRecordError
from metaq.model import HeaderPairs
from metaq.record.checksum import BytesLike

HAS_ATTRIBUTE: Final = 0x1
"""Bit 0: the payload starts with an attribute block."""

HAS_PROPERTIES: Final = 0x2
"""Bit 1: the text of the attribute block begins with key and headers."""

HAS_BOTH: Final = HAS_ATTRIBUTE | HAS_PROPERTIES
"""Bits of a payload with a line of key and headers."""

_TEXT_LENGTH: Final = Struct(">i")

TEXT_AT: Final = _TEXT_LENGTH.size
"""Position of the text in a payload with an attribute block."""

Headers: TypeAlias = Mapping[str, bytes] | Sequence[tuple[str, bytes]]
"""Headers as users pass them: a dict, or pairs in order."""

FIELDS_MAX: Final = 4096
"""Maximum number of fields in a line: a broker parses all in one turn of its loop.

Source: docs/decisions/0063-a-line-has-so-many-fields.md.
"""

_PLAIN: Final = "/:@,"
"""Characters that are not escaped, besides letters, digits and `-._~`."""

_PLAIN_OCTETS: Final = re.compile(rb"[A-Za-z0-9._~/:@,-]*")

# Possessive, and without look-ahead: a megabyte takes milliseconds.
_CHARS: Final = (
    "(?:[A-Za-z0-9._~/:@,-]++"
    "|(?:%(?:[0189A-F][0-9A-F]|2[0-9AB]|3[B-F]|5[B-E]|60|7[BCDF]))++)"
)
_HEADER: Final = f"h\\.{_CHARS}++={_CHARS}*+"
_LINE: Final = re.compile(f"(?:key={_CHARS}*+|{_HEADER})(?:&{_HEADER})*+")


class Decoded(NamedTuple):
    """Decoded payload."""

    data: bytes
    attribute: str | None
    """Application attribute; "" is an empty one, None is none."""
    key: bytes | None
    """Key; b"" is an empty one, None is none."""
    headers: HeaderPairs


def encode_payload(
    data: bytes,
    attribute: str | None = None,
    key: str | bytes | None = None,
    headers: Headers = (),
) -> tuple[bytes, int]:
    """Return (payload, flag) of a message.

    Args:
        data: application bytes.
        attribute: "" is an empty one, None is none.
        key: None is none; a str is encoded as UTF-8.
        headers: names and values, in order.

    Raises:
        ConfigError: attribute, key or the name of a header cannot be encoded as
            UTF-8 (half of a surrogate pair), or such a name is empty.
        TypeError: one of them has another type.
    """
    if attribute is None and key is None and not headers:
        return data, 0
    try:
        text = b"" if attribute is None else attribute.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"attribute {attribute!r} is no UTF-8") from error
    except AttributeError:
        raise TypeError(
            f"attribute: expected str, got {type(attribute).__name__} {attribute!r:.80}"
        ) from None
    flag = HAS_ATTRIBUTE
    line = encode_properties(key, headers)
    if line:
        flag |= HAS_PROPERTIES
        text = join_properties(line, attribute).encode()
    return _TEXT_LENGTH.pack(len(text)) + text + data, flag


def encode_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Return the bytes that `encode_payload` puts before data, for each key alone."""
    return [_TEXT_LENGTH.pack(len(line)) + line for line in map(key_line, keys)]


def decode_payload(payload: BytesLike, flag: int) -> Decoded:
    """Return data, attribute, key and headers of a payload.

    Text that is not UTF-8 is decoded with replacement characters, as Java clients do:
    the producer sent these bytes, and an error would stop every consumer of the
    partition at this message.

    Args:
        payload: payload of one record, copied.
        flag: the record's flag; only bits 0 and 1 are used.

    Raises:
        CorruptRecordError: the flag announces an attribute block that is cut short or
            has a negative length.
    """
    if not flag & HAS_ATTRIBUTE:
        return Decoded(bytes(payload), None, None, ())
    end = text_end(payload, 0, len(payload))
    key, headers, attribute = decode_text(bytes(payload[TEXT_AT:end]), flag)
    return Decoded(bytes(payload[end:]), attribute, key, headers)


def text_end(buffer: BytesLike, start: int, end: int) -> int:
    """Return the end of the text in a payload [start, end) with an attribute block.

    Raises:
        CorruptRecordError: as `decode_payload`.
    """
    left = end - start - TEXT_AT
    if left < 0:
        raise CorruptRecordError(
            f"attribute block: expected {TEXT_AT} length bytes, got {end - start}"
        )
    (length,) = _TEXT_LENGTH.unpack_from(buffer, start)
    if not 0 <= length <= left:
        raise CorruptRecordError(
            f"attribute block: length {length}, but {left} bytes follow"
        )
    return start + TEXT_AT + int(length)


def text_of(buffer: BytesLike, start: int, end: int, flag: int) -> bytes:
    """Return the text of a payload [start, end).

    Empty if it has none, or one that is cut short.
    """
    if not flag & HAS_ATTRIBUTE:
        return b""
    try:
        return bytes(buffer[start + TEXT_AT : text_end(buffer, start, end)])
    except CorruptRecordError:
        return b""


def decode_text(text: bytes, flag: int) -> tuple[bytes | None, HeaderPairs, str | None]:
    """Return (key, headers, attribute) of the text of an attribute block."""
    decoded = text.decode(errors="replace")
    if not flag & HAS_PROPERTIES:
        return None, (), decoded
    return split_properties(decoded)


def has_field(payload: bytes, flag: int, field: bytes) -> bool:
    """Return whether a payload has a key or header with this encoding.

    Args:
        payload: payload of one record; may be any bytes.
        flag: the record's flag.
        field: a key or header as `encode_properties` writes it.
    """
    if not flag & HAS_PROPERTIES:
        return False
    line = text_of(payload, 0, len(payload), flag).partition(b"\n")[0]
    return field in line.split(b"&") and _is_line(line.decode("latin-1"))


def encode_properties(key: str | bytes | None, headers: Headers) -> str:
    """Return the line of key and headers; "" without any.

    Args:
        key: a str is encoded as UTF-8; None is no key, "" is an empty one.
        headers: names are not empty; values are bytes.

    Raises:
        ConfigError: a name is empty, or a name or the key cannot be encoded as UTF-8
            (half of a surrogate pair).
        TypeError: one of them has another type.
    """
    fields = []
    if key is not None:
        fields.append("key=" + quote_octets(_octets("key", key)))
    # Most messages have no headers, and checking them costs more than the rest.
    for name, value in () if headers == () else list_headers(headers):
        quoted = quote_octets(_octets("header", name))
        fields.append(f"h.{quoted}={quote_octets(value)}")
    return "&".join(fields)


def quote_octets(octets: bytes) -> str:
    """Return a name or a value as encoded in the line."""
    return quote_from_bytes(octets, _PLAIN)


def key_line(key: bytes) -> bytes:
    """Return the line for a key alone, as `encode_properties` does."""
    if _PLAIN_OCTETS.fullmatch(key):
        return b"key=" + key
    return encode_properties(key, ()).encode()


def list_headers(headers: Headers) -> HeaderPairs:
    """Return headers as pairs, checked.

    Raises:
        ConfigError: a name is empty, or there are too many.
        TypeError: a name is not a str, or a value is not bytes.
    """
    listed: HeaderPairs | None = None
    # Refuse iterators: they would be empty when the message is encoded again.
    if isinstance(headers, Mapping | Sequence):
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        with suppress(TypeError, ValueError):
            listed = tuple((name, value) for name, value in pairs)
    if listed is None:
        raise TypeError(
            "headers: expected a dict of names and bytes, or pairs of them, got"
            f" {type(headers).__name__} {headers!r:.80}"
        )
    if len(listed) >= FIELDS_MAX:  # a key is one, too
        raise ConfigError(
            f"headers: expected at most {FIELDS_MAX - 1}, got {len(listed)}"
        )
    for name, value in listed:
        if not isinstance(name, str):
            raise TypeError(
                f"header: expected str as name, got {type(name).__name__} {name!r:.80}"
            )
        if not name:
            raise ConfigError("header: expected a name, got an empty one")
        if not isinstance(value, bytes):
            raise TypeError(
                f"header {name!r:.80}: expected bytes as value, got"
                f" {type(value).__name__} {value!r:.80}"
            )
    return listed


def join_properties(line: str, attribute: str | None) -> str:
    """Return the text for a line, not empty, and an attribute; None: there is none."""
    return line if attribute is None else f"{line}\n{attribute}"


def split_properties(text: str) -> tuple[bytes | None, HeaderPairs, str | None]:
    """Return (key, headers, attribute) of a text that begins with the line.

    Args:
        text: text of a record with flag bit 1.

    Returns:
        No key, no headers and the whole text, if it does not begin with a valid line.
    """
    line, newline, rest = text.partition("\n")
    if not _is_line(line):
        return None, (), text
    key = None
    headers = []
    for field in line.split("&"):
        name, _, value = field.partition("=")
        if name == "key":
            key = _unquote(value)
        else:
            decoded = _unquote(name[2:]).decode(errors="replace")
            headers.append((decoded, _unquote(value)))
    return key, tuple(headers), rest if newline else None


def _unquote(text: str) -> bytes:
    """Return the bytes of a name or a value of the line."""
    # Of 16 MiB `urllib` takes seconds; a "=" is never in them.
    return a2b_qp(text.replace("%", "="))


def _is_line(text: str) -> bool:
    return text.count("&") < FIELDS_MAX and _LINE.fullmatch(text) is not None


def _octets(what: str, text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} {text!r:.80} is no UTF-8") from error
    except AttributeError:
        raise TypeError(
            f"{what}: expected str or bytes, got {type(text).__name__} {text!r:.80}"
        ) from None
