"""What lies in a partition directory, by name and size: segments, holes, leftovers.

    <base offset>.meta                    a segment; any number of digits is read
    <base offset, 20 digits>.spans        its span index
    <name>.meta.arc, <name>.meta.zip      archived; not ours any more
    <name>.meta.torn-<offset>             a torn tail kept aside by recovery
    producers                             what producers may send again
    <any of these but the first>.tmp      half of one: a crash left it

Recovery, the scrub and `metaq verify` read a directory through this module; nothing
here changes it. Source: broker spec 2.1, 2.3.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metaq.fs import FileSystem
from metaq.model import Offset, Position, SizeBytes
from metaq.storage.segment import META_SUFFIX, Damage, Segment, segment_file_name
from metaq.storage.span_index import SPANS_SUFFIX, read_index
from metaq.storage.walk import WINDOW_BYTES, Walk, walk_records

_OFFSET_MAX: Final = 2**63 - 1
_LEFTOVER: Final = re.compile(
    r"([0-9]+\.(spans|meta\.zip|meta\.torn-[0-9]+)|producers)\.tmp"
)


@dataclass(frozen=True, slots=True)
class Listing:
    """A partition directory by kind of file; other files are nobody's business."""

    segments: tuple[Segment, ...]
    """Sorted by base offset, with the sizes that the files have."""
    orphans: tuple[Segment, ...]
    """What the span indexes without a segment belonged to, with size 0; sorted."""
    leftovers: tuple[Path, ...]
    """Temporary files of an interrupted step."""
    bad_name: str = ""
    """What is wrong with a name; not empty: the whole directory is refused."""


def list_partition(fs: FileSystem, directory: Path) -> Listing:
    """Sort the names of a partition directory by what they mean.

    Raises:
        StorageError: The disk refused.
    """
    segments: dict[Offset, Segment] = {}
    indexed: dict[Offset, Path] = {}
    leftovers = []
    for name in fs.list_directory(directory):
        path = directory / name
        if _LEFTOVER.fullmatch(name):
            leftovers.append(path)
        elif name.endswith(SPANS_SUFFIX):
            base = parse_base_offset(name.removesuffix(SPANS_SUFFIX))
            if base is not None:
                indexed[base] = path
        elif name.endswith(META_SUFFIX) and not fs.is_directory(path):
            base = parse_base_offset(name.removesuffix(META_SUFFIX))
            if base is None:
                return Listing((), (), (), f"segment name is not a number: name={name}")
            if base in segments:
                other = segments[base].path.name
                return Listing(
                    (), (), (), f"two segments have one base offset: {other} {name}"
                )
            segments[base] = Segment(path, base, fs.size_of(path))
    orphans = tuple(
        Segment(path.with_name(segment_file_name(base)), base, SizeBytes(0))
        for base, path in sorted(indexed.items())
        if base not in segments
    )
    in_order = tuple(segments[base] for base in sorted(segments))
    return Listing(in_order, orphans, tuple(leftovers))


def parse_base_offset(text: str) -> Offset | None:
    """Return the base offset that a segment's name says, padded or not; or None."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) > _OFFSET_MAX:
        return None
    return Offset(int(text))


def sort_orphans(
    fs: FileSystem, listing: Listing
) -> tuple[tuple[Damage, ...], tuple[Segment, ...]]:
    """Return which orphaned indexes tell of a missing segment, and which of nothing.

    Deletion removes a segment before its index, from the oldest on. So an index without
    a segment is a leftover where it lies before the log start. Behind the log end it
    tells that the active segment is gone, unless it is empty; in between, the hole
    speaks for itself and the index stays as evidence.
    """
    segments = listing.segments
    start = segments[0].base_offset if segments else 0
    end = segments[-1].end_offset if segments else 0
    damage, leftovers = [], []
    for orphan in listing.orphans:
        if segments and start <= orphan.base_offset < end:
            continue
        index = read_index(fs, orphan.path, orphan.base_offset)
        if orphan.base_offset >= end and index is not None and index.spans:
            covered = index.end_offset - index.base_offset
            detail = f"segment is missing, its index covers {covered} bytes"
            damage.append(Damage(orphan.path, orphan.base_offset, None, detail))
        else:
            leftovers.append(orphan)
    return tuple(damage), tuple(leftovers)


def check_contiguity(
    fs: FileSystem, segments: tuple[Segment, ...]
) -> tuple[Damage, ...]:
    """Return the holes and overlaps between neighbours: base + size = next base.

    A hole begins at the last whole record before it, so that no reader is left with a
    part of one.

    Raises:
        StorageError: The disk refused a read.
    """
    damage = []
    following = (*segments[2:], None)
    for one, two, three in zip(segments, segments[1:], following, strict=False):
        ends = f"segment ends at offset {one.end_offset}, next begins at"
        if one.end_offset < two.base_offset:
            damage.append(
                Damage(
                    one.path,
                    _last_boundary(fs, one),
                    two.base_offset,
                    f"{ends} {two.base_offset}",
                )
            )
        elif one.end_offset > two.base_offset:
            # Nobody can tell which of the two is right about the bytes they share, so
            # the second one is not believed at all.
            good = None if three is None else three.base_offset
            damage.append(
                Damage(two.path, two.base_offset, good, f"{ends} {two.base_offset}")
            )
    return tuple(damage)


def _last_boundary(fs: FileSystem, segment: Segment) -> Offset:
    """Return the end of the last whole record of a segment that is too short."""
    index = read_index(fs, segment.path, segment.base_offset)
    start = segment.base_offset
    for span in index.spans if index is not None else ():
        if span.end_offset > segment.end_offset:
            break
        start = span.end_offset
    walk = walk_segment(fs, segment, start, WINDOW_BYTES)
    return segment.offset_at(walk.end)


def walk_segment(
    fs: FileSystem, segment: Segment, start: Offset, span_bytes_min: int
) -> Walk:
    """Walk the records of a segment from `start` to its end."""
    file = fs.open_read(segment.path)
    try:
        return walk_records(
            file,
            segment.base_offset,
            segment.position_of(start),
            Position(segment.size_bytes),
            span_bytes_min=span_bytes_min,
            time_ms=file.mtime_ms(),
        )
    finally:
        file.close()
