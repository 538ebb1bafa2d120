"""Machine-readable codes of refusals, behind their texts for people. Pure.

    <text> [damaged from=375 to=500 file=/data/test-0/00000000000000000000.meta]

A code is the last thing of a body: one word and `name=value` pairs. Old peers see a
text that is a little longer; a peer that knows the word does not need the sentence.
Values are percent-encoded, so that a name of a file has neither blanks nor brackets.
Words and names that a reader does not know mean nothing to it. Brokers that write codes
announce `codes` (`version.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from metaq.model import MAX_OFFSET

DAMAGED: Final = "damaged"
"""Bytes of the log that are asked for contradict a checksum, or are not there: `from`
and `to`, `file` where it is one file, `why` in words."""
NO_ROOM: Final = "no-room"
"""A put is not stored: there is no room now. There may be later, or elsewhere."""
IN_DOUBT: Final = "in-doubt"
"""The disk failed, or the broker stopped, under a put: it may be stored."""
SEQUENCE_USED: Final = "sequence-used"
"""A batch is not stored: its producer has used its sequence before."""
NO_RECORD: Final = "no-record"
"""No record starts at an end of the range that is asked about."""

_TAIL_CHARS_MAX: Final = 4096
"""Longest code; longer text is ignored."""
_NAME: Final = "[a-z][a-z0-9-]{0,31}"
_CODE: Final = re.compile(rf" \[({_NAME})((?: {_NAME}=[!-Z\\^-~]*)*)\]")
_UNSAFE: Final = re.compile(rb"[^0-9A-Za-z/:,()._~-]")
"""Written as a percent sign and two hexadecimal digits; the others are harmless."""
_ESCAPED: Final = re.compile(rb"%([0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class ReplyCode:
    """One code."""

    word: str
    """The code: lower-case letters, digits and `-`."""
    values: Mapping[str, str]
    """The pairs, decoded."""

    def number(self, name: str) -> int | None:
        """Return a value that is a number of 0 to 2**63 - 1; None otherwise."""
        text = self.values.get(name, "")
        if not (
            text.isascii() and text.isdigit() and len(text) <= len(str(MAX_OFFSET))
        ):
            return None
        number = int(text)
        return number if number <= MAX_OFFSET else None


def with_code(text: str, word: str, values: Mapping[str, object]) -> str:
    """Return a text with a code behind it; pairs without a value (None) are left out.

    Args:
        text: for people.
        word: see `ReplyCode`.
        values: texts and numbers; cut short where the code became too long.
    """
    room = _TAIL_CHARS_MAX // 2 // max(1, len(values))
    pairs = "".join(
        f" {name}={_encoded(str(value), room)}"
        for name, value in values.items()
        if value is not None
    )
    return f"{text} [{word}{pairs}]"


def _encoded(value: str, room: int) -> str:
    """Return a value in at most `room` characters; a longer one is cut, with `...`."""
    # A character may be up to twelve characters of percent signs and digits.
    shown = value if len(value) <= room else value[: room // 12] + "..."
    raw = shown.encode(errors="backslashreplace")
    encoded = _UNSAFE.sub(lambda found: b"%%%02X" % found[0][0], raw).decode()
    if len(encoded) <= room or shown is not value:
        return encoded
    return _encoded(value[: room // 12] + "...", room)


def _decoded(text: str) -> str:
    raw = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), text.encode())
    return raw.decode(errors="replace")


def split_code(body: str) -> tuple[str, ReplyCode | None]:
    """Return the text of a body without its code, and the code; None without one."""
    start = body.rfind(" [", max(0, len(body) - _TAIL_CHARS_MAX))
    found = _CODE.fullmatch(body, start) if start >= 0 else None
    if found is None:
        return body, None
    pairs = (pair.partition("=") for pair in found[2].split())
    values = {name: _decoded(value) for name, _, value in pairs}
    return body[:start], ReplyCode(found[1], values)
