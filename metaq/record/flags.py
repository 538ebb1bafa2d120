"""Flag bits, and the attribute block that one of them announces.

    flag bit 0 = 1:   attribute length (i32) | attribute (UTF-8) | data
    flag bit 0 = 0:   data

An empty attribute is not the same as none: it sets the bit and writes length 0. All
other bits are undefined and travel unchanged. Source: broker spec 1.13.
"""

from struct import Struct
from typing import Final

from metaq.errors import CorruptRecordError, LocalProtocolError
from metaq.record.checksum import BytesLike

HAS_ATTRIBUTE: Final = 0x1
"""Bit 0: the payload starts with an attribute block."""

_ATTRIBUTE_LENGTH: Final = Struct(">i")


def encode_payload(data: bytes, attribute: str | None) -> tuple[bytes, int]:
    """Return (payload, flag) for application bytes and an optional attribute.

    Args:
        data: application bytes.
        attribute: None for none; "" is an attribute, an empty one.

    Raises:
        LocalProtocolError: the attribute cannot be encoded as UTF-8 (half of a
            surrogate pair).
        TypeError: the attribute is no text.
    """
    if attribute is None:
        return data, 0
    try:
        text = attribute.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"attribute {attribute!r} is no UTF-8") from error
    except AttributeError:
        raise TypeError(
            f"attribute: expected str, got {type(attribute).__name__} {attribute!r:.80}"
        ) from None
    return _ATTRIBUTE_LENGTH.pack(len(text)) + text + data, HAS_ATTRIBUTE


def decode_payload(payload: BytesLike, flag: int) -> tuple[bytes, str | None]:
    """Return (data, attribute) of a payload; the attribute is None if there is none.

    An attribute that is not UTF-8 is read with replacement characters, as Java
    clients read it: the producer sent these bytes, and refusing them would
    stop every consumer of the partition at this message.

    Args:
        payload: payload of one record, copied.
        flag: the record's flag; only bit 0 is looked at.

    Raises:
        CorruptRecordError: the flag announces an attribute block that is cut short,
            or whose length is negative.
    """
    if not flag & HAS_ATTRIBUTE:
        return bytes(payload), None
    start = _ATTRIBUTE_LENGTH.size
    if len(payload) < start:
        raise CorruptRecordError(
            f"attribute block: expected {start} length bytes, got {len(payload)}"
        )
    (length,) = _ATTRIBUTE_LENGTH.unpack_from(payload)
    if not 0 <= length <= len(payload) - start:
        raise CorruptRecordError(
            f"attribute block: length {length}, but {len(payload) - start} bytes follow"
        )
    attribute = bytes(payload[start : start + length]).decode(errors="replace")
    return bytes(payload[start + length :]), attribute
