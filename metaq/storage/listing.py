"""List a partition directory by name and size: segments, holes, leftovers.

    <base offset>.meta                    a segment; any number of digits is read
    <base offset, 20 digits>.spans        its span index
    <name>.meta.arc, <name>.meta.zip      archived; no longer ours
    <name>.meta.torn-<offset>             a torn tail kept by recovery
    producers                             batches that producers may send again
    <any of these but the first>.tmp      incomplete file that a crash has left

Recovery, the scrub and `metaq verify` read a directory through `check_names`; nothing
here changes it. A segment extends to the base offset of the next one. A file that is
shorter or longer than that is reported here, from names and sizes; the other bytes are
checked in `damage.py`. Source: docs/metaq-1.4/broker.md 2.1, 2.3.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from metaq.errors import DiskError, MissingFileError
from metaq.fs import FileSystem
from metaq.model import Offset, Position, SizeBytes
from metaq.storage.damage import Tail, check_tail, merge_damage
from metaq.storage.key_index import KEYS_SUFFIX
from metaq.storage.segment import META_SUFFIX, Damage, Segment, segment_file_name
from metaq.storage.span_index import SPANS_SUFFIX, SpanIndex, spans_path, try_read_index
from metaq.storage.walk import WINDOW_BYTES, Walk, walk_records

_OFFSET_MAX: Final = 2**63 - 1
_LEFTOVER: Final = re.compile(
    r"([0-9]+\.(keys|spans|meta\.zip|meta\.torn-[0-9]+)|producers)\.tmp"
)


@dataclass(frozen=True, slots=True)
class Names:
    """Files of a partition directory by kind; other files are ignored."""

    segments: tuple[Segment, ...] = ()
    """Sorted by base offset; each with its expected size, up to the next one, and the
    last one with the size of its file."""
    damage: tuple[Damage, ...] = ()
    """Holes, overlaps, files that are too long or missing; merged and sorted."""
    leftovers: tuple[Path, ...] = ()
    """Temporary files of an interrupted step, and indexes of deleted segments."""
    bad_name: str = ""
    """Fault of a file name; if not empty, the whole directory is refused."""


def check_names(fs: FileSystem, directory: Path, *, in_use: bool = False) -> Names:
    """Sort the names of a partition directory, and compare names and sizes.

    Args:
        fs: The disk.
        directory: The partition directory.
        in_use: A broker uses it: only damage found in a second listing too is
            reported, because a listing may omit names that change during it.
    """
    found = _look(fs, directory)
    if in_use and found.damage:
        again = _look(fs, directory)
        damage = tuple(each for each in again.damage if each in found.damage)
        return replace(again, damage=damage)
    return found


def _look(fs: FileSystem, directory: Path) -> Names:
    segments: dict[Offset, Segment] = {}
    indexed: set[Offset] = set()
    keyed: dict[Path, Offset | None] = {}
    leftovers = []
    for name in fs.list_directory(directory):
        path = directory / name
        if _LEFTOVER.fullmatch(name):
            leftovers.append(path)
        elif name.endswith(KEYS_SUFFIX):
            keyed[path] = parse_base_offset(name.removesuffix(KEYS_SUFFIX))
        elif name.endswith(SPANS_SUFFIX):
            base = parse_base_offset(name.removesuffix(SPANS_SUFFIX))
            if base is not None:
                indexed.add(base)
        elif name.endswith(META_SUFFIX) and not fs.is_directory(path):
            base = parse_base_offset(name.removesuffix(META_SUFFIX))
            if base is None:
                return Names(bad_name=f"segment name is not a number: name={name}")
            if base in segments:
                other = segments[base].path.name
                text = f"two segments have one base offset: {other} {name}"
                return Names(bad_name=text)
            try:
                segments[base] = Segment(path, base, fs.size_of_file(path))
            except MissingFileError:
                pass  # retention removed it after the listing
            except DiskError as error:
                if error.errno_name != "EINVAL":
                    raise
                return Names(bad_name=f"segment is not a file: name={name}")
    leftovers += [path for path, base in keyed.items() if base not in segments]
    in_order = [segments[base] for base in sorted(segments)]
    orphans = [
        Segment(directory / segment_file_name(base), base, SizeBytes(0))
        for base in sorted(indexed - set(segments))
    ]
    missing, deleted = _sort_orphans(fs, in_order, orphans)
    return Names(
        with_nominal_sizes(in_order),
        merge_damage([*missing, *check_contiguity(fs, in_order)]),
        (*leftovers, *deleted),
    )


def with_nominal_sizes(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return segments with expected sizes: each but the last extends to the next."""
    sealed = [
        replace(one, size_bytes=SizeBytes(two.base_offset - one.base_offset))
        for one, two in pairwise(segments)
    ]
    return (*sealed, *segments[-1:])


def parse_base_offset(text: str) -> Offset | None:
    """Return the base offset in a segment's name, padded or not; or None."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) > _OFFSET_MAX:
        return None
    return Offset(int(text))


def _sort_orphans(
    fs: FileSystem, segments: Sequence[Segment], orphans: Sequence[Segment]
) -> tuple[list[Damage], list[Path]]:
    """Classify indexes without a segment: signs of a missing segment, or leftovers.

    Deletion removes a segment before its index, oldest first. So an index without a
    segment is a leftover if it is before the log start. After the log end it shows that
    the active segment is missing, unless the index is empty. In between, the hole is
    reported and the index is kept as evidence.
    """
    start = segments[0].base_offset if segments else 0
    end = segments[-1].end_offset if segments else 0
    damage, leftovers = [], []
    for orphan in orphans:
        if segments and start <= orphan.base_offset < end:
            continue
        index = index_of(fs, orphan)
        if orphan.base_offset >= end and index.spans:
            covered = index.end_offset - index.base_offset
            detail = f"segment is missing, its index covers {covered} bytes"
            damage.append(Damage(orphan.path, orphan.base_offset, None, detail))
        else:
            leftovers.append(spans_path(orphan.path, orphan.base_offset))
    return damage, leftovers


def check_contiguity(fs: FileSystem, segments: Sequence[Segment]) -> Iterator[Damage]:
    """Yield the holes and overlaps between neighbours: base + size = next base.

    Args:
        fs: The disk.
        segments: Segments of one log in order, with the sizes of their files.
    """
    following = (*(each.base_offset for each in segments[2:]), None)
    for one, two, good in zip(segments, segments[1:], following, strict=False):
        yield from check_neighbours(fs, one, two, good)


def check_neighbours(
    fs: FileSystem, one: Segment, two: Segment, good: Offset | None
) -> Iterator[Damage]:
    """Yield the faults between a segment and the next.

    Args:
        fs: The disk.
        one: A segment, with the size of its file.
        two: The next one.
        good: Base offset of the segment after `two`; None: there is none.
    """
    end, base = one.end_offset, two.base_offset
    detail = f"segment ends at offset {end}, next begins at {base}"
    if end < base:
        # A hole begins after the last whole record before it, so that no reader gets
        # a part of a record.
        tail = rest_of(fs, one)
        yield from tail.damage
        yield Damage(one.path, tail.end, base, detail)
    elif end > base and _goes_on(fs, one, two):
        # Either file may be right about the shared bytes, so the second one is not
        # trusted, nor a record of the first that crosses its base offset.
        size = base - one.base_offset
        tail = rest_of(fs, replace(one, size_bytes=SizeBytes(size)))
        yield from tail.damage
        yield Damage(two.path, tail.end, good, detail)
    elif end > base:
        size = base - one.base_offset
        detail = f"file is too long: expected {size} bytes, got {one.size_bytes}"
        yield Damage(one.path, base, base, detail)


def _goes_on(fs: FileSystem, one: Segment, two: Segment) -> bool:
    """Return whether a segment has records after the base offset of the next one.

    Other bytes there do no harm: they were appended to a sealed file. A file without an
    index is not trusted against one with an index.
    """
    index = index_of(fs, one)
    if index.end_offset == two.base_offset:
        return False
    is_known = fs.exists(spans_path(one.path, one.base_offset))
    if not is_known and fs.exists(spans_path(two.path, two.base_offset)):
        return False
    return rest_of(fs, one).end > two.base_offset


def rest_of(fs: FileSystem, segment: Segment) -> Tail:
    """Walk the records after the last complete span, where the file ends early or late.

    The `end` of the result is that of the last whole record, even after damage.
    """
    index = index_of(fs, segment).until(segment.end_offset)
    with fs.open_read(segment.path) as file:
        return check_tail(
            file,
            segment,
            index.end_offset,
            unsynced_bytes_max=SizeBytes(0),
            span_bytes_min=WINDOW_BYTES,
            time_ms=file.mtime_ms(),
        )


def find_lost(
    fs: FileSystem, segment: Segment, end: Offset, *, is_sealed: bool
) -> Damage | None:
    """Return why a segment's file lacks the byte before `end`, while its log is used.

    Args:
        fs: The disk.
        segment: The segment as the log knows it; the size of an active one is ignored.
        end: End of the wanted bytes.
        is_sealed: The log has a later segment.

    Returns:
        The lost range; None if nothing is lost, or retention may have removed it.
    """
    names = check_names(fs, segment.path.parent, in_use=True)
    for damage in names.damage:
        good = damage.next_good_offset
        if damage.offset < end and (good is None or good > segment.base_offset):
            return damage
    if is_sealed or names.bad_name or not fs.exists(segment.path):
        return None
    size = fs.size_of(segment.path)
    if size >= segment.position_of(end):
        return None
    tail = rest_of(fs, replace(segment, size_bytes=size))
    detail = f"file is too short: expected {segment.position_of(end)} bytes, got {size}"
    return Damage(segment.path, tail.end, None, detail)


def index_of(fs: FileSystem, segment: Segment, *, is_logged: bool = True) -> SpanIndex:
    """Return the valid spans of a segment's index; empty if none or invalid."""
    base = segment.base_offset
    found = try_read_index(fs, segment.path, base, is_logged=is_logged)
    return found or SpanIndex(base)


def walk_segment(
    fs: FileSystem, segment: Segment, start: Offset, span_bytes_min: int
) -> Walk:
    """Walk the records of a segment from `start` to its end."""
    with fs.open_read(segment.path) as file:
        return walk_records(
            file,
            segment.base_offset,
            segment.position_of(start),
            Position(segment.size_bytes),
            span_bytes_min=span_bytes_min,
            time_ms=file.mtime_ms(),
        )
