"""Parser of MetaQ's dialect of ini into sections of plain strings.

Theory of operation. ConfigObj handles the structure (sections, order, duplicates), but
has another syntax of values: it has no `;` comments and no `:` separator, and cuts
values at `#` and at quotes, which occur in quartz expressions. So each line is first
parsed by MetaQ's rules, and names and values are percent-encoded for ConfigObj and
decoded afterwards, so that it cannot misread them.

    [topic=a-b]                  ->   [topic%3Da-b]
    ; a comment                  ->   (blank)
    deleteWhen: 0 0 6 ? * 6#3    ->   deleteWhen = 0%200%206%20%3F%20%2A%206%233

Invariant: each input line becomes one line for ConfigObj, so that line numbers in
errors are right.

The rules (docs/metaq-1.4/broker.md 4.1): `;` and `#` start comment *lines* (there are
no comments after values), the first `=` or `:` separates key and value, both are
trimmed, keys are in a section. The text is UTF-8, with or without a byte order mark; a
file that is not valid UTF-8 is read as GBK, which older MetaQ files use in comments.
A key or section that occurs twice is an error; MetaQ silently uses the last one.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from configobj import ConfigObj, ConfigObjError

from metaq.errors import ConfigError

COMMENT_MARKS: Final = (";", "#")
ENCODINGS: Final = ("utf-8-sig", "gb18030")
"""Encodings to try, in order; gb18030 is a superset of GBK."""
CONFIG_BYTES_MAX: Final = 1024 * 1024
"""Maximum size of a file, which is kept in memory."""

_LINE_END = re.compile(r"\r\n|\r|\n")
_SEPARATOR = re.compile(r"[=:]")


def parse_sections(data: bytes, path: str) -> dict[str, dict[str, str]]:
    """Parse the text of a configuration file.

    Args:
        data: the bytes of the file, at most `CONFIG_BYTES_MAX`.
        path: path of the file, for error messages only.

    Returns:
        Section name → key → value, both trimmed, in the order of the file; a blank
        value is "".

    Raises:
        ConfigError: the file is too large or neither UTF-8 nor GBK; a line is not a
            comment, section or setting; or a section or key occurs twice. Messages
            about a line name file and line. Any other exception is a bug.
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
        # Only duplicates can be left for ConfigObj to refuse.
        line = lines[error.line_number - 1].strip()
        raise ConfigError(
            f"{path}:{error.line_number}: '{line}' occurs twice"
        ) from error
    return {
        unquote(name): {unquote(key): unquote(value) for key, value in section.items()}
        for name, section in parsed.items()
    }


def write_sections(sections: Mapping[str, Mapping[str, str]]) -> bytes:
    """Return the bytes of a file with these sections, for `parse_sections`."""
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
