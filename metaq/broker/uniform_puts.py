"""Uniform runs: puts with one request prefix, read in a few calls for all of them.

    prefix SP checksum SP opaque CRLF payload  prefix SP checksum SP opaque CRLF ...

Pipelined puts are often alike: one topic, one partition, one length, one flag,
so one *request prefix* ("put topic partition length flag"). Taking such a frame apart
by itself costs several operations of the interpreter; a pattern made for the prefix
takes them all apart in one, the checksums are compared as a whole column, and the
opaques stay the text that they are. That is a third of the price per put, with the same
results: a uniform run holds only frames that the general parser accepts with the same
values, and whose checksum is right.

Source: broker spec 1.3, 1.4. Pure.
"""

import re
from collections.abc import Sequence
from struct import unpack
from typing import Final, NamedTuple

from metaq.protocol.commands import NO_CHECKSUM
from metaq.protocol.decimals import I32_MAX, I32_MIN
from metaq.record.checksum import pack_checksums

UNIFORM_MIN: Final = 32
"""Fewest puts that are worth being read as a uniform run."""

UNIFORM_PAYLOAD_BYTES_MAX: Final = 4096
"""Largest payload of a uniform run, bytes; larger ones cost more than their frames."""

UNCHECKED: Final = b"%d" % NO_CHECKSUM
"""Stands for a missing checksum."""

_NUMBERS_BYTES_MAX: Final = len(b" 2147483647 -2147483648\r\n")
"""Bytes of a frame between its prefix and its payload, where nothing is odd."""

_COLUMNS: Final = 5
"""Columns that the pattern splits off a frame: nothing, and its groups (see below)."""

_I32_DIGITS: Final = 10
"""Digits of the largest 32-bit number; shorter numbers are in range."""


class UniformPuts(NamedTuple):
    """The columns of a uniform run, in the order of its frames."""

    opaques: list[bytes]
    """Their opaques, as a reply writes them: 32 bits, in decimal, no zeros before."""
    checksums: bytes
    """Their checksums, as `pack_checksums` has them; the payloads match."""
    payloads: list[bytes]
    """Their payloads, all of one length."""
    end: int
    """Position behind the last of their frames."""


class UniformPutReader:
    """Reads uniform runs of one prefix; made once for one that was seen often."""

    __slots__ = ("_frame_bytes_max", "_pattern", "prefix")

    def __init__(self, prefix: bytes, length: int) -> None:
        """Make the pattern.

        Args:
            prefix: "put topic partition length flag", as the frames begin.
            length: of the payload, bytes, 0 or more.
        """
        self.prefix: Final = prefix
        """Start of each frame."""
        # Groups: checksum, opaque, payload of a frame, or all that follows the run.
        self._pattern = re.compile(
            rb"%b (-1|\d+) (0|-?[1-9]\d{0,9})\r\n(.{%d})|(.+)"
            % (re.escape(prefix), length),
            re.DOTALL,
        )
        self._frame_bytes_max = len(prefix) + _NUMBERS_BYTES_MAX + length

    def read(self, data: bytes, position: int, count_max: int) -> UniformPuts | None:
        """Return the uniform run that starts at a position.

        Args:
            data: received bytes.
            position: where a frame starts.
            count_max: most puts of the run, UNIFORM_MIN or more.

        Returns:
            The run; None if fewer than UNIFORM_MIN puts of this prefix are there in
            whole, or if one of them is odd: a checksum that is wrong, not written
            plainly or missing where others have one, an opaque of more than 32 bits or
            not written plainly.
        """
        if not data.startswith(self.prefix, position):
            return None
        piece = data[position : position + count_max * self._frame_bytes_max]
        columns = self._pattern.split(piece, count_max)
        rest = columns[-2]
        if rest is not None:
            del columns[-_COLUMNS:]
        rest = rest or columns[-1]
        if len(columns) < UNIFORM_MIN * _COLUMNS:
            return None
        tokens, opaques, payloads = (columns[k::_COLUMNS] for k in (1, 2, 3))
        checksums = pack_checksums(payloads)
        if not _are_right(tokens, checksums) or not _are_plain_i32(opaques):
            return None
        return UniformPuts(
            opaques, checksums, payloads, position + len(piece) - len(rest)
        )


def _are_right(tokens: list[bytes], checksums: bytes) -> bool:
    """Tell whether all frames name their checksums, or none of them names one."""
    count = len(tokens)
    plain = b"%d " * count % unpack(f">{count}I", checksums)
    return b" ".join(tokens) == plain[:-1] or tokens.count(UNCHECKED) == count


def _are_plain_i32(tokens: Sequence[bytes]) -> bool:
    """Tell whether decimal numbers of 10 digits or fewer have 32 bits."""
    if max(map(len, tokens)) < _I32_DIGITS:
        return True
    numbers = list(map(int, tokens))
    return min(numbers) >= I32_MIN and max(numbers) <= I32_MAX
