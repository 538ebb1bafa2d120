"""Rules for the topic names that a broker accepts (docs/metaq-1.4/broker.md 2.2).

Every configured name is a pattern: `*` matches any characters, other regular-expression
syntax applies, and the whole topic must match. The set of patterns only grows while a
broker runs. Topic names come from untrusted clients, so they must also be safe as part
of a directory name and of a ZooKeeper path.
"""

import re
import unicodedata
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from metaq.errors import ConfigError

TOPIC_BYTES_MAX: Final = 255 - len("-2147483647")
"""A partition's directory is `<topic>-<partition>`; a file name has 255 bytes."""
TOPIC_NAME: Final = f"a name of at most {TOPIC_BYTES_MAX} bytes, no blanks or slashes"
"""Description of a valid topic name, for errors."""

_UNSAFE_CATEGORIES: Final = {"Cc", "Cf", "Cs", "Co", "Zs", "Zl", "Zp"}
"""Control, invisible, private and blank characters; blanks separate tokens."""
PATTERN_MARKS: Final = "*\\^$|?+()[]{}"
"""Characters that make a name a pattern. Not the dot, which is common in names."""
_REGEX_MARKS: Final = frozenset(PATTERN_MARKS) - {"*"}


def is_safe_topic(name: str) -> bool:
    """Return whether a topic name is safe in a path and as a token of a line."""
    if name in {"", ".", ".."} or "/" in name:
        return False
    if any(
        unicodedata.category(char) in _UNSAFE_CATEGORIES or "\ufff0" <= char <= "\uffff"
        for char in name
    ):
        return False
    return len(name.encode()) <= TOPIC_BYTES_MAX


def is_pattern(name: str) -> bool:
    """Return whether a configured name is a pattern; dots do not count."""
    return any(mark in name for mark in PATTERN_MARKS)


@dataclass(frozen=True, slots=True)
class TopicRules:
    """An immutable set of patterns."""

    names: tuple[str, ...] = ()
    """The patterns as configured, in the order in which they were added."""
    _patterns: tuple[re.Pattern[str], ...] = ()

    def accepts(self, topic: str) -> bool:
        """Return whether a topic is safe and matches a pattern as a whole."""
        return is_safe_topic(topic) and any(
            pattern.fullmatch(topic) for pattern in self._patterns
        )

    def extended(self, names: Iterable[str]) -> "TopicRules":
        """Return rules that also accept the given names.

        Args:
            names: section names; those already present are ignored.

        Raises:
            ConfigError: a name is not a valid pattern.
        """
        fresh = tuple(name for name in dict.fromkeys(names) if name not in self.names)
        patterns = tuple(compile_topic_pattern(name) for name in fresh)
        return TopicRules(self.names + fresh, self._patterns + patterns)


def compile_topic_pattern(name: str) -> re.Pattern[str]:
    """Compile a configured topic name.

    Raises:
        ConfigError: it is not a valid pattern.
    """
    first, *rest = name.split("*")
    if rest and not _REGEX_MARKS.intersection(name):
        # The text between two stars is literal, so its first occurrence is as good as
        # any later one. The atomic groups prevent backtracking, by which a client's
        # topic could cost length ** stars steps.
        *middle, last = rest
        text = first + "".join(f"(?>.*?{part})" for part in middle) + f".*{last}"
    else:
        text = name.replace("*", ".*")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"'{name}' is no topic pattern: {error}") from error
