"""MetaQ's dialect of ini → sections of plain strings.

Theory of operation. ConfigObj keeps the structure (sections, order, duplicates), but
reads values in its own way: it knows no `;` comments and no `:` separator, and it
cuts values at `#` and at quotes, which occur in quartz expressions. So every line is
first read by MetaQ's rules, and the text between the marks is percent-encoded before
ConfigObj sees it and decoded afterwards: then no name or value can be misread.

    [topic=a-b]                  ->   [topic%3Da-b]
    ; a comment                  ->   (blank)
    deleteWhen: 0 0 6 ? * 6#3    ->   deleteWhen = 0%200%206%20%3F%20%2A%206%233

Invariant: one line in, one line out, so that line numbers in errors are right.

The rules (docs/metaq-1.4/broker.md 4.1): `;` and `#` start comment *lines* (a value has
no comment after it), the first `=` or `:` separates key and value, both are trimmed,
keys are in a section. The text is UTF-8, with or without a byte order mark; a file that
is not valid UTF-8 is read as GBK, which older MetaQ files use in their comments. Unlike
MetaQ, which silently lets the last one win, a key or section that occurs twice is an
error.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from configobj import ConfigObj, ConfigObjError

from metaq.errors import ConfigError

COMMENT_MARKS: Final = (";", "#")
ENCODINGS: Final = ("utf-8-sig", "gb18030")
"""Tried in this order; gb18030 reads every GBK text."""
CONFIG_BYTES_MAX: Final = 1024 * 1024
"""A larger file is something else, and would be kept in memory."""

_LINE_END = re.compile(r"\r\n|\r|\n")
_SEPARATOR = re.compile(r"[=:]")


def parse_sections(data: bytes, path: str) -> dict[str, dict[str, str]]:
    """Read the text of a configuration file.

    Args:
        data: the bytes of the file, at most `CONFIG_BYTES_MAX`.
        path: its name, for error messages only.

    Returns:
        Section name → key → value, both trimmed, in the order of the file; a blank
        value is "".

    Raises:
        ConfigError: the bytes are neither UTF-8 nor GBK, a line is no comment,
            section or setting, or a section or key occurs twice; the message names
            file and line. Any other exception is a bug.
    """
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(
            f"{path}: expected at most {CONFIG_BYTES_MAX} bytes, got {len(data)}"
        )
    lines = _LINE_END.split(_decode(data, path))
    plain = []
    has_section = False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not has_section and text and not text.startswith((*COMMENT_MARKS, "[")):
            raise ConfigError(f"{path}:{number}: '{text}' is before the first section")
        has_section = has_section or text.startswith("[")
        plain.append(_encode_line(text, f"{path}:{number}"))
    try:
        parsed = ConfigObj(
            plain, list_values=False, interpolation=False, raise_errors=True
        )
    except ConfigObjError as error:
        # ConfigObj only refuses duplicates by now.
        line = lines[error.line_number - 1].strip()
        raise ConfigError(
            f"{path}:{error.line_number}: '{line}' occurs twice"
        ) from error
    return {
        unquote(name): {unquote(key): unquote(value) for key, value in section.items()}
        for name, section in parsed.items()
    }


def write_sections(sections: Mapping[str, Mapping[str, str]]) -> bytes:
    """Return a file that `parse_sections` reads as these sections; no comments."""
    lines = []
    for name, section in sections.items():
        lines += [f"[{name}]", *(f"{key}={value}" for key, value in section.items())]
    return "".join(f"{line}\n" for line in lines).encode()


def _decode(data: bytes, path: str) -> str:
    for encoding in ENCODINGS:
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise ConfigError(f"{path}: the text is neither UTF-8 nor GBK")


def _encode_line(text: str, where: str) -> str:
    """Rewrite one trimmed line so that ConfigObj cannot misread it."""
    if not text or text.startswith(COMMENT_MARKS):
        return ""
    if text.startswith("["):
        name = text[1:-1].strip()
        if not text.endswith("]") or not name:
            raise ConfigError(f"{where}: expected [section], got '{text}'")
        return f"[{quote(name, safe='')}]"
    separator = _SEPARATOR.search(text)
    if separator is None or separator.start() == 0:
        raise ConfigError(f"{where}: expected key=value, got '{text}'")
    key = quote(text[: separator.start()].strip(), safe="")
    value = quote(text[separator.end() :].strip(), safe="")
    return f"{key} = {value}"
