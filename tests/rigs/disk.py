"""A disk in memory, and its state after a power cut.

Theory of operation. The disk keeps two versions of everything:

    as seen by reads                 durable: certain to survive a power cut
    file content                     content at the last successful sync
    names in a directory             names at the last successful directory sync

and the differences that *may* survive: dirty pages of 4 KiB, the size of a file, and
changes of names (create, rename, unlink, mkdir, rmdir). `crash` builds the disk that a
machine finds after a power cut. It asks a `Choose` function for the outcome of each
difference, so that one mechanism gives the worst case (`keep_none`), the best case
(`keep_all`), random cases repeated by a seed (`keep_random`) and, in `crashes`, all
cases. Possible outcomes:

* a size is the old one, the new one, or any in between;
* a page is lost (old bytes, or zeros where the file had none), stale (arbitrary bytes
  where the file had none), torn at any byte, or kept, independently of others;
* a change of a name is kept or lost, independently of others; but a rename never loses
  the file: the old name is removed only if the new one is kept.

A failed sync marks the pages clean without writing them, as Linux does: reads still see
the bytes, a later sync succeeds without writing them, and a crash loses them.

Keep in step: `tests/rigs/faulty_calls.py`, which answers system calls from this disk.
"""

import random
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Final

PAGE_BYTES: Final = 4096
"""Size of a page, the unit of write-back of the kernel."""

CAPACITY_BYTES: Final = 1 << 40
"""Size of a new disk in bytes."""

Choose = Callable[[int], int]
"""Chooses one of `count` outcomes in a crash, from 0 (lost) to count-1 (kept)."""


def keep_none(count: int) -> int:
    """Choose that everything unsynced is lost."""
    del count
    return 0


def keep_all(count: int) -> int:
    """Choose that everything is kept, as when only the process is killed."""
    return count - 1


def keep_random(seed: int) -> Choose:
    """Return a chooser repeated by its seed; half of its choices are an extreme."""
    source = random.Random(seed)

    def choose(count: int) -> int:
        if source.random() < 0.5:
            return source.choice((0, count - 1))
        return source.randrange(count)

    return choose


# -- content of the disk --------------------------------------------------------------


@dataclass(slots=True, eq=False)
class DiskFile:
    """A file, independent of its names."""

    content: bytearray = field(default_factory=bytearray)
    """Content seen by reads."""
    durable: bytearray = field(default_factory=bytearray)
    """Content at the last successful sync."""
    dirty: set[int] = field(default_factory=set)
    """Numbers of pages written since the last sync, successful or not."""
    size_low: int = 0
    """Smallest size since the last successful sync."""
    changed: int = 0
    """Number of changes of the content."""
    mtime_ns: int = 0
    """Time of the last change."""
    locked_by: int | None = None
    """Descriptor that holds the lock; None: unlocked."""

    def write(self, position: int, data: bytes) -> None:
        """Write bytes at a position; a gap before it is filled with zeros."""
        end = position + len(data)
        if position > len(self.content):
            self.resize(position)
        self.content[position:end] = data
        self._touch(position, end)

    def resize(self, size: int) -> None:
        """Truncate the content, or extend it with zeros."""
        old = len(self.content)
        if size < old:
            del self.content[size:]
            self.dirty = {page for page in self.dirty if page * PAGE_BYTES < size}
            self.size_low = min(self.size_low, size)
            # The kernel zeroes the rest of the last page.
            self._touch(size, size + bool(size % PAGE_BYTES))
        else:
            self.content.extend(bytes(size - old))
            self._touch(old, size)

    def _touch(self, start: int, end: int) -> None:
        self.changed += 1
        self.dirty.update(range(start // PAGE_BYTES, -(-end // PAGE_BYTES)))

    def sync(self) -> None:
        """Make the size and the dirty pages durable; clean pages are not written."""
        size = len(self.content)
        del self.durable[size:]
        self.durable.extend(bytes(size - len(self.durable)))
        for page in self.dirty:
            start = page * PAGE_BYTES
            end = min(start + PAGE_BYTES, size)
            self.durable[start:end] = self.content[start:end]
        self.dirty.clear()
        self.size_low = size

    def copy(self) -> "DiskFile":
        """Return a copy of the file, including unsynced state."""
        twin = copy(self)
        twin.content = bytearray(self.content)
        twin.durable = bytearray(self.durable)
        twin.dirty = set(self.dirty)
        twin.locked_by = None
        return twin

    def crash(self, choose: Choose, *, torn: bool) -> "DiskFile":
        """Return the file after a power cut."""
        size = self._size_after(choose, torn=torn)
        result = self.durable[:size]
        result.extend(bytes(size - len(result)))
        for page in sorted(self.dirty):
            start = page * PAGE_BYTES
            end = min(start + PAGE_BYTES, size)
            if start >= end:
                continue
            new = self.content[start:end]
            new.extend(bytes(end - start - len(new)))
            fresh = max(start, min(end, len(self.durable))) - start
            result[start:end] = _page_after(
                result[start:end], new, fresh, page, choose, torn=torn
            )
        return DiskFile(
            result, bytearray(result), size_low=size, mtime_ns=self.mtime_ns
        )

    def _size_after(self, choose: Choose, *, torn: bool) -> int:
        old, new = len(self.durable), len(self.content)
        low, high = min(old, self.size_low), max(old, new)
        if low == high:
            return old
        first_boundary = (low // PAGE_BYTES + 1) * PAGE_BYTES
        starts: list[int] = [low, *range(first_boundary, high, PAGE_BYTES)]
        if not torn:
            starts = [start for start in starts if start not in (old, new)]
        outcome = choose(len(starts) + 2)
        if outcome == 0:
            return old
        if outcome == len(starts) + 1:
            return new
        start = starts[outcome - 1]
        end = min((start // PAGE_BYTES + 1) * PAGE_BYTES, high)
        return start + choose(end - start) if torn and end - start > 1 else start


def _page_after(
    old: bytearray,
    new: bytearray,
    fresh: int,
    page: int,
    choose: Choose,
    *,
    torn: bool,
) -> bytearray:
    """Return a page after a power cut; from `fresh` on it had no durable bytes."""
    if old == new:
        return old
    outcomes = ["lost", "kept"]
    if fresh < len(old):
        outcomes.insert(1, "stale")
    first = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    if torn and first + 1 < len(new):
        outcomes.insert(-1, "torn")
    match outcomes[choose(len(outcomes))]:
        case "lost":
            return old
        case "stale":
            garbage = random.Random(page).randbytes(len(old) - fresh)
            return old[:fresh] + garbage
        case "torn":
            cut = first + 1 + choose(len(new) - first - 1)
            return new[:cut] + old[cut:]
        case _:
            return new


@dataclass(slots=True, eq=False)
class DiskDirectory:
    """A directory: names as seen by reads, and durable names."""

    names: dict[str, "Node"] = field(default_factory=dict)
    """Names seen by reads."""
    durable: dict[str, "Node"] = field(default_factory=dict)
    """Names at the last successful sync of the directory."""


Node = DiskFile | DiskDirectory


@dataclass(slots=True, eq=False)
class NameChange:
    """A change of names in one directory that is not durable yet."""

    directory: DiskDirectory
    removed: str | None = None
    added: str | None = None
    node: Node | None = None
    after: "NameChange | None" = None
    """Change that must be durable before this one."""

    def apply(self, names: dict[str, Node]) -> None:
        """Apply the change to a table of names."""
        if self.removed is not None:
            names.pop(self.removed, None)
        if self.added is not None and self.node is not None:
            names[self.added] = self.node


@dataclass(slots=True, eq=False)
class Disk:
    """A disk with all its files and directories."""

    root: DiskDirectory = field(default_factory=DiskDirectory)
    changes: list[NameChange] = field(default_factory=list)
    """Unsynced changes of names, oldest first."""
    capacity: int = CAPACITY_BYTES
    """Capacity in bytes, for all files together."""

    def used(self) -> int:
        """Return the sum of the sizes of all files with a name."""
        return sum(len(file.content) for file in files_below(self.root))

    def change(self, change: NameChange) -> NameChange:
        """Make a change that reads see at once and a crash may lose."""
        change.apply(change.directory.names)
        self.changes.append(change)
        return change

    def sync_names(self, directory: DiskDirectory) -> None:
        """Make the changes of a directory durable, and those they depend on."""
        wanted: set[int] = set()
        for change in reversed(self.changes):
            if change.directory is directory or id(change) in wanted:
                wanted.add(id(change))
                if change.after is not None:
                    wanted.add(id(change.after))
        for change in self.changes:
            if id(change) in wanted:
                change.apply(change.directory.durable)
        self.changes = [c for c in self.changes if id(c) not in wanted]

    def drop_changes(self, directory: DiskDirectory) -> None:
        """Drop the changes of a directory without writing them, like a failed sync."""
        lost = {id(c) for c in self.changes if c.directory is directory}
        self.changes = [
            c for c in self.changes if id(c) not in lost and id(c.after) not in lost
        ]

    def copy(self) -> "Disk":
        """Return a copy of the disk, including unsynced state."""
        twins: dict[int, Node] = {}
        changes: dict[int, NameChange] = {}

        def twin(node: Node) -> Node:
            if id(node) not in twins:
                if isinstance(node, DiskFile):
                    twins[id(node)] = node.copy()
                else:
                    twins[id(node)] = copied = DiskDirectory()
                    copied.names = {k: twin(v) for k, v in node.names.items()}
                    copied.durable = {k: twin(v) for k, v in node.durable.items()}
            return twins[id(node)]

        root = twin(self.root)
        assert isinstance(root, DiskDirectory)
        for change in self.changes:
            directory = twin(change.directory)
            assert isinstance(directory, DiskDirectory)
            changes[id(change)] = NameChange(
                directory,
                change.removed,
                change.added,
                None if change.node is None else twin(change.node),
                None if change.after is None else changes.get(id(change.after)),
            )
        return Disk(root, list(changes.values()), self.capacity)

    def crash(self, choose: Choose, *, torn: bool) -> "Disk":
        """Return the disk that the machine finds after a power cut."""
        names: dict[int, dict[str, Node]] = {}
        kept: set[int] = set()
        unsynced = {id(change) for change in self.changes}
        for change in self.changes:
            after = change.after
            if after is not None and id(after) in unsynced and id(after) not in kept:
                continue
            if choose(2):
                kept.add(id(change))
                directory = change.directory
                mine = names.setdefault(id(directory), dict(directory.durable))
                change.apply(mine)
        twins: dict[int, Node] = {}

        def left(node: Node) -> Node:
            if id(node) not in twins:
                if isinstance(node, DiskFile):
                    twins[id(node)] = node.crash(choose, torn=torn)
                else:
                    twins[id(node)] = found = DiskDirectory()
                    entries = names.get(id(node), node.durable)
                    found.names = {k: left(entries[k]) for k in sorted(entries)}
                    found.durable = dict(found.names)
            return twins[id(node)]

        root = left(self.root)
        assert isinstance(root, DiskDirectory)
        return Disk(root, [], self.capacity)


def files_below(directory: DiskDirectory) -> Iterator[DiskFile]:
    """Yield every file below a directory."""
    for node in directory.names.values():
        if isinstance(node, DiskFile):
            yield node
        else:
            yield from files_below(node)
