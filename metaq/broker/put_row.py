"""A row of puts with one head, read in a few calls for all of them.

    name SP checksum SP opaque CRLF payload  name SP checksum SP opaque CRLF payload ...

What clients pipeline is often alike: one topic, one partition, one length, one flag,
so one *name* ("put topic partition length flag"). Taking such a frame apart by itself
costs several operations of the interpreter; a pattern made for the name takes them all
apart in one, and the numbers are read and the checksums compared as whole columns. That
is half the price per put, and nothing else differs: a row holds only frames that the
general parser accepts with the same values, and whose checksum is right.

Source: broker spec 1.3, 1.4. Pure.
"""

import re
from typing import Final, NamedTuple
from zlib import crc32

from metaq.protocol.java import I32_MAX, I32_MIN
from metaq.record.checksum import CHECKSUM_MASK

ROW_MIN: Final = 32
"""Fewest puts that are worth being read as a row."""

ROW_PAYLOAD_BYTES_MAX: Final = 4096
"""Largest payload of a row; with larger ones the bytes are what costs."""

_COLUMNS: Final = 5
"""Of what the pattern splits off a frame: nothing, its groups (see `PutRowReader`)."""


class PutRow(NamedTuple):
    """Puts in the order of their frames."""

    opaques: list[int]
    """Their opaques, 32 bits."""
    checksums: list[int]
    """Their checksums, which are those of the payloads."""
    payloads: list[bytes]
    """Their payloads, all of one length."""
    end: int
    """Position behind the last of their frames."""


class PutRowReader:
    """Reads rows of one name; made once for a name that was seen often."""

    __slots__ = ("_pattern", "name")

    def __init__(self, name: bytes, length: int) -> None:
        """Make the pattern.

        Args:
            name: "put topic partition length flag", as the frames begin.
            length: what it says of the payload, bytes, 0 or more.
        """
        self.name: Final = name
        """What the frames begin with."""
        # Groups: checksum, opaque, payload of a frame, or all that follows the row.
        self._pattern = re.compile(
            rb"%b (\d{1,10}) (-?\d{1,10})\r\n(.{%d})|(.+)" % (re.escape(name), length),
            re.DOTALL,
        )

    def read(self, data: bytes, position: int) -> PutRow | None:
        """Return the row that starts at a position.

        Args:
            data: received bytes.
            position: where a frame starts.

        Returns:
            The row; None if there are fewer than ROW_MIN puts of this name in whole, or
            if one of them is odd: a checksum that is wrong or not written plainly, an
            opaque of more than 32 bits.
        """
        if not data.startswith(self.name, position):
            return None
        columns = self._pattern.split(data[position:])
        rest = columns[-2]
        if rest is not None:
            del columns[-_COLUMNS:]
        if len(columns) < ROW_MIN * _COLUMNS:
            return None
        tokens, payloads = columns[1::_COLUMNS], columns[3::_COLUMNS]
        opaques = list(map(int, columns[2::_COLUMNS]))
        checksums = [crc & CHECKSUM_MASK for crc in map(crc32, payloads)]
        plain = b"%d " * len(checksums) % tuple(checksums)
        if b" ".join(tokens) != plain[:-1]:
            return None
        if min(opaques) < I32_MIN or max(opaques) > I32_MAX:
            return None
        return PutRow(opaques, checksums, payloads, len(data) - len(rest or b""))
