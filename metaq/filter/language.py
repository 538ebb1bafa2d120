"""Filters: the expression of `where`, and whether a message matches. Pure.

    where = parse_filter("tag IN ('paid', 'void') AND amount > 100")
    where.matches(key, headers, attribute)

Clients, Spark's tasks and brokers evaluate the same filter in this one place. A filter
is immutable, and travels between processes as its text.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from metaq.errors import FilterError
from metaq.filter.conditions import ATTRIBUTE, KEY, Field, Fields
from metaq.model import HeaderPairs
from metaq.record.flags import HAS_ATTRIBUTE, TEXT_AT, decode_text, text_end

FILTER_BYTES_MAX: Final = 2048
"""Longest expression, in UTF-8."""

FILTERS_REMEMBERED_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on key, headers and attribute of messages; see `parse_filter`."""

    text: str
    """The expression."""
    needles: tuple[bytes, ...] | None = field(compare=False, repr=False)
    """At least one is in each record with an attribute block that matches; None: that
    says nothing."""
    fields: Fields = field(compare=False, repr=False)
    """Of each of these sets one field is in each record that matches, as
    `record.flags.encode_properties` writes it; none: that says nothing."""
    _test: Callable[[Mapping[Field, bytes]], bool | None] = field(
        compare=False, repr=False
    )
    _pattern: re.Pattern[bytes] | None = field(compare=False, repr=False)
    """Finds a needle."""

    def matches(
        self, key: bytes | None, headers: HeaderPairs, attribute: str | None
    ) -> bool:
        """Return whether a message matches; unknown is no match.

        Of a header that occurs several times the last one counts.
        """
        values: dict[Field, bytes] = dict(headers)
        if key is not None:
            values[KEY] = key
        if attribute is not None:
            values[ATTRIBUTE] = attribute.encode()
        return self._test(values) is True

    def candidates(self, buffer: bytes, bounds: Sequence[int]) -> Iterator[int]:
        """Yield which records may match, in order: all but those without a needle.

        Args:
            buffer: records, one after another.
            bounds: where each begins, and where the last one ends.
        """
        if self._pattern is None:
            yield from range(len(bounds) - 1)
            return
        search, index, end = self._pattern.search, 0, bounds[-1]
        while (found := search(buffer, bounds[index], end)) is not None:
            index = bisect_right(bounds, found.start())
            yield index - 1

    def matches_payload(self, buffer: bytes, start: int, end: int, flag: int) -> bool:
        """Return whether a record matches, given where its payload is in a buffer.

        Raises:
            CorruptRecordError: its attribute block is cut short.
        """
        if not flag & HAS_ATTRIBUTE:
            return self._test({}) is True
        stop, pattern = text_end(buffer, start, end), self._pattern
        start += TEXT_AT
        if pattern is not None and pattern.search(buffer, start, stop) is None:
            return False
        return self.matches(*decode_text(buffer[start:stop], flag))

    def __reduce__(self) -> tuple[object, ...]:
        """Travel between processes as the text."""
        return parse_filter, (self.text,)


def has_parser() -> bool:
    """Return whether the parser is loaded, which takes a tenth of a second."""
    return parse_filter.cache_info().currsize > 0


ANY_FILTER: Final = "key IS NULL"
"""To have the parser loaded, by a thread that may wait for it."""


@lru_cache(FILTERS_REMEMBERED_MAX)
def parse_filter(text: str) -> Filter:
    """Return the filter that an expression means.

    Raises:
        FilterError: it means none, or is larger than a filter may be.
        TypeError: it is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"filter: expected str, got {type(text).__name__} {text!r:.80}")
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise FilterError(error.start + 1, "text", "half a surrogate pair") from error
    if size_bytes > FILTER_BYTES_MAX:
        wanted = f"at most {FILTER_BYTES_MAX} bytes of text"
        raise FilterError(1, wanted, f"{size_bytes}")
    from metaq.filter.grammar import parse_condition  # noqa: PLC0415  # takes lark

    condition = parse_condition(text)
    needles = condition.needles
    return Filter(
        text,
        needles,
        condition.fields,
        condition.test,
        re.compile(b"|".join(map(re.escape, needles))) if needles else None,
    )
