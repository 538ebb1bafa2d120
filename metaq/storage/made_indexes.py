"""Span indexes made in memory for sealed segments that have none.

A directory that a Java broker wrote has no indexes until the scrub has been there,
which may take days. The first question about such a segment walks its record headers;
what it finds answers the next ones.
"""

from collections.abc import Iterator
from threading import Lock
from typing import Final

from metaq.fs import FileSystem
from metaq.model import Millis, Offset, SizeBytes
from metaq.storage.segment import Segment
from metaq.storage.span_index import Span, SpanIndex, encode_index
from metaq.storage.walk import walk_headers

MADE_SPAN_BYTES: Final = 128 << 10
"""A span ends with the record that reaches this size: 256 KiB of index per GiB."""
MADE_BYTES_MAX: Final = 16 << 20
"""Indexes kept; those that were asked for longest ago go first, and the newest stays
however large it is."""


class MadeIndexes:
    """The indexes, for any thread: one walks, others that need one wait for it."""

    def __init__(self, bytes_max: int = MADE_BYTES_MAX) -> None:
        """Keep up to `bytes_max` bytes of indexes."""
        self._bytes_max = bytes_max
        self._lock = Lock()
        self._made: dict[tuple[Segment, Millis], bytes] = {}
        self.made_count = 0
        """Walks so far: more than there are segments when the bound is too small."""

    def index_of(self, fs: FileSystem, segment: Segment) -> bytes:
        """Return the bytes of an index of a sealed segment, made if need be; blocks.

        Checksums of records are not looked at, and those of the spans are 0. All spans
        have the file's time.

        Raises:
            StorageError: The disk refused a read.
        """
        time_ms = fs.mtime_ms(segment.path)
        # A topic that was made again may have a segment of the same name and size.
        key = (segment, time_ms)
        with self._lock:
            data = self._made.pop(key, None)
            if data is None:
                spans = tuple(_spans_in(fs, segment, time_ms))
                index = SpanIndex(segment.base_offset, spans=spans)
                data = encode_index(index, is_sealed=True)
                self.made_count += 1
            self._made[key] = data
            size = sum(map(len, self._made.values()))
            while size > self._bytes_max and len(self._made) > 1:
                size -= len(self._made.pop(next(iter(self._made))))
        return data


def _spans_in(fs: FileSystem, segment: Segment, time_ms: Millis) -> Iterator[Span]:
    """Yield spans of the records; bytes that are no records end them early."""
    start, end, count = segment.base_offset, segment.end_offset, 0
    for at, size, _id in walk_headers(fs, segment, start, end):
        count += 1
        behind = at + size
        if behind - start >= MADE_SPAN_BYTES or behind >= end:
            if behind > end:
                return
            yield Span(start, SizeBytes(behind - start), count, time_ms, 0)
            start, count = Offset(behind), 0
