"""Flag bits, and the attribute block that they announce.

    flag bit 0 = 1:   attribute length (i32) | text (UTF-8) | data
    flag bit 0 = 0:   data

    flag bit 1 = 0:   the text is the attribute
    flag bit 1 = 1:   the text begins with key and headers (`properties.py`)

An empty attribute is not the same as none: it sets bit 0 and writes length 0. All other
bits are undefined and travel unchanged. Bit 0 is MetaQ's, bit 1 is of our own; without
bit 0 it means nothing. Source: broker spec 1.13.
"""

from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

from metaq.errors import CorruptRecordError, LocalProtocolError
from metaq.model import HeaderPairs
from metaq.record.checksum import BytesLike
from metaq.record.properties import (
    Headers,
    encode_properties,
    join_properties,
    key_line,
    split_properties,
)

HAS_ATTRIBUTE: Final = 0x1
"""Bit 0: the payload starts with an attribute block."""

HAS_PROPERTIES: Final = 0x2
"""Bit 1: the text of the attribute block begins with key and headers."""

_TEXT_LENGTH: Final = Struct(">i")

TEXT_AT: Final = _TEXT_LENGTH.size
"""Position of the text in a payload that has an attribute block."""


class Decoded(NamedTuple):
    """A payload taken apart."""

    data: bytes
    """Application bytes."""
    attribute: str | None
    """Application attribute; "" is one, None is none."""
    key: bytes | None
    """Key; b"" is one, None is none."""
    headers: HeaderPairs
    """Name and value of each header, in order."""


def encode_payload(
    data: bytes,
    attribute: str | None = None,
    key: str | bytes | None = None,
    headers: Headers = (),
) -> tuple[bytes, int]:
    """Return (payload, flag) of a message.

    Args:
        data: application bytes.
        attribute: None for none; "" is an attribute, an empty one.
        key: None for none; text stands for its UTF-8 bytes.
        headers: names and bytes, in order.

    Raises:
        LocalProtocolError: attribute, key or the name of a header cannot be encoded as
            UTF-8 (half of a surrogate pair), or such a name is empty.
        TypeError: one of them is of another type.
    """
    if attribute is None and key is None and not headers:
        return data, 0
    try:
        text = b"" if attribute is None else attribute.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"attribute {attribute!r} is no UTF-8") from error
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
    """Return what `encode_payload` puts in front of data that has a key alone."""
    return [_TEXT_LENGTH.pack(len(line)) + line for line in map(key_line, keys)]


def decode_payload(payload: BytesLike, flag: int) -> Decoded:
    """Return data, attribute, key and headers of a payload.

    A text that is not UTF-8 is read with replacement characters, as Java
    clients read it: the producer sent these bytes, and refusing them would
    stop every consumer of the partition at this message.

    Args:
        payload: payload of one record, copied.
        flag: the record's flag; only bits 0 and 1 are looked at.

    Raises:
        CorruptRecordError: the flag announces an attribute block that is cut short,
            or whose length is negative.
    """
    if not flag & HAS_ATTRIBUTE:
        return Decoded(bytes(payload), None, None, ())
    start = TEXT_AT
    if len(payload) < start:
        raise CorruptRecordError(
            f"attribute block: expected {start} length bytes, got {len(payload)}"
        )
    (length,) = _TEXT_LENGTH.unpack_from(payload)
    if not 0 <= length <= len(payload) - start:
        raise CorruptRecordError(
            f"attribute block: length {length}, but {len(payload) - start} bytes follow"
        )
    text = bytes(payload[start : start + length]).decode(errors="replace")
    data = bytes(payload[start + length :])
    if not flag & HAS_PROPERTIES:
        return Decoded(data, text, None, ())
    key, headers, attribute = split_properties(text)
    return Decoded(data, attribute, key, headers)
