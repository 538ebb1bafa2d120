"""Filters: the expression of `where`, evaluated for messages. Pure.

    where = parse_filter("tag IN ('paid', 'void') AND amount > 100")
    where.matches(key, headers, attribute)

Clients, Spark tasks and brokers all evaluate filters here. A filter is immutable and
pickled as its text.
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
"""Maximum size of an expression in UTF-8."""

FILTERS_REMEMBERED_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on key, headers and attribute of messages; see `parse_filter`."""

    text: str
    """The expression."""
    needles: tuple[bytes, ...] | None = field(compare=False, repr=False)
    """At least one of them is in each matching record with an attribute block; None: no
    statement."""
    fields: Fields = field(compare=False, repr=False)
    """Each matching record has at least one field of each set, as
    `record.flags.encode_properties` writes it; (): no statement."""
    _test: Callable[[Mapping[Field, bytes]], bool | None] = field(
        compare=False, repr=False
    )
    _pattern: re.Pattern[bytes] | None = field(compare=False, repr=False)
    """Matches any of the needles."""

    def matches(
        self, key: bytes | None, headers: HeaderPairs, attribute: str | None
    ) -> bool:
        """Return whether a message matches; unknown does not match.

        Of headers with the same name, the last one counts.
        """
        values: dict[Field, bytes] = dict(headers)
        if key is not None:
            values[KEY] = key
        if attribute is not None:
            values[ATTRIBUTE] = attribute.encode()
        return self._test(values) is True

    def candidates(self, buffer: bytes, bounds: Sequence[int]) -> Iterator[int]:
        """Yield the indexes of records that contain a needle, ascending.

        Only these can match. A filter without needles yields all indexes.

        Args:
            buffer: consecutive records.
            bounds: start of each record, and end of the last one.
        """
        if self._pattern is None:
            yield from range(len(bounds) - 1)
            return
        search, index, end = self._pattern.search, 0, bounds[-1]
        while (found := search(buffer, bounds[index], end)) is not None:
            index = bisect_right(bounds, found.start())
            yield index - 1

    def matches_payload(self, buffer: bytes, start: int, end: int, flag: int) -> bool:
        """Return whether the record with the payload `buffer[start:end]` matches.

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
        """Pickle as the text."""
        return parse_filter, (self.text,)


def has_parser() -> bool:
    """Return whether the parser is loaded; loading takes a tenth of a second."""
    return parse_filter.cache_info().currsize > 0


ANY_FILTER: Final = "key IS NULL"
"""A filter to load the parser with, on a thread that may block."""


@lru_cache(FILTERS_REMEMBERED_MAX)
def parse_filter(text: str) -> Filter:
    """Parse the expression of a filter.

    Raises:
        FilterError: a syntax error, or the filter is too large.
        TypeError: `text` is not a str.
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
