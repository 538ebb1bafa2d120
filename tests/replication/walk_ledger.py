"""Accounts of a walk over a set: what was promised, what was read, and the copies.

* what was acknowledged is at its offset in every copy, and so is what was read
* when it was acknowledged, as many disks as the minimum had it for certain, and those
  of all in-sync replicas without a flag
* no message is there twice, and none of which a refusal said that it is not stored
* messages of a sender that waits for each answer are in their order
* a high watermark that was seen is where a record begins, or the end
* ids of records grow in each log, and no two records share one
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from metaq.record.layout import HEADER, HEADER_BYTES
from metaq.replication.election import Flag
from metaq.replication.epochs import entries_within
from metaq.replication.set_file import SET_FILE, decode_set_file
from metaq.storage.producers import StoredBatch
from metaq.storage.span_index import read_index
from tests.replication.replicas import DATA, Replica, Replicas
from tests.rigs.inside import store_of

PLACES: Final = ("test 0", "test 1", "meta-test 0", "meta-test 1")
"""Topics and partitions that are written."""


class Record(NamedTuple):
    """One record of a log."""

    offset: int
    id: int
    data: bytes

    @property
    def end(self) -> int:
        """Return the offset after it."""
        return self.offset + HEADER_BYTES + len(self.data)


def name_of(place: str) -> str:
    """Return the name of a log's directory."""
    return place.replace(" ", "-")


def records(data: bytes, base: int = 0) -> Iterator[Record]:
    """Yield the whole records of some bytes of a log."""
    at = 0
    while at + HEADER_BYTES <= len(data):
        size, _checksum, number, _flag = HEADER.unpack_from(data, at)
        begin = at + HEADER_BYTES
        if size < 0 or begin + size > len(data):
            return
        yield Record(base + at, number, data[begin : begin + size])
        at = begin + size


@dataclass
class Ledger:
    """The accounts of one walk."""

    rig: Replicas
    tried: dict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """Sender → what it sent, in its order."""
    acked: dict[str, dict[int, bytes]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """Log → offset → message."""
    refused: set[bytes] = field(default_factory=set)
    """Certainly not stored."""
    seen: dict[str, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """Messages that were read: log → offset → message."""
    marks: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """High watermarks that were seen."""
    history: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Violations, oldest first."""
    has_all_notes: bool = True
    """No replica has lost what was not synced: all remember the numbers of batches."""
    is_record_known: bool = True
    """ZooKeeper has the record that replicas go by."""
    is_certain: bool = True
    """No disk was lost: all that was acknowledged is on disks that are there."""

    def ack(self, place: str, offset: int, data: bytes) -> None:
        """Enter what was acknowledged; look at the disks."""
        name = name_of(place)
        end = offset + HEADER_BYTES + len(data)
        self.history.append(f"acked {name} {offset} {data[:24]!r}")
        if self.acked[name].setdefault(offset, data) != data:
            self.wrong.append(f"two messages are acknowledged at {offset} of {name}")
        have = [k for k in self.rig.all if self.synced_end(k, name) >= end]
        if self.is_certain and len(have) < self.rig.record.min:
            self.wrong.append(f"{offset} of {name} is acknowledged, synced by {have}")

        for k in self.rig.record.in_sync if self.is_record_known else ():
            if self.flag(k) is Flag.NONE and k not in have:
                self.wrong.append(f"{k} is in sync without {offset} of {name}")

    def flag(self, number: int) -> Flag:
        """Return the flag on the disk of a replica."""
        disk = self.rig[number].disk
        if SET_FILE not in disk.names_in(DATA):
            return Flag.INCOMPLETE
        return decode_set_file(disk.content(DATA / SET_FILE)).flag

    def synced_end(self, number: int, name: str) -> int:
        """Return how much of a log is for certain on the disk of a replica."""
        disk = self.rig[number].disk
        # A recovery or a cut may remove a file between its name and its size.
        with disk.held():
            paths = self.rig.segments(number, name)
            return sum(disk.synced_size(path) for path in paths)

    def read(self, number: int, place: str, offset: int, data: bytes) -> int:
        """Enter what a replica gave; return the offset after it."""
        known = self.seen[name_of(place)]
        end = offset
        for record in records(data, offset):
            end = record.end
            if known.setdefault(record.offset, record.data) != record.data:
                self.wrong.append(
                    f"replica {number} gave {record.data[:24]!r} at {record.offset} of"
                    f" {place}, before it was {known[record.offset][:24]!r}"
                )
        return end

    # -- at the end -------------------------------------------------------------------

    def check_copies(self) -> None:
        """Compare the accounts with each copy, and the copies with each other."""
        first, *others = self.rig.running
        for place in PLACES:
            name = name_of(place)
            data = self.rig.bytes_of(first.number, name)
            self._check_log(name, data)
        self._check_senders()
        for each in self.rig.running:
            self._check_spans(each)
        for other in others:
            self._check_equal(first, other)

    def _check_log(self, name: str, data: bytes) -> None:
        log = {each.offset: each for each in records(data)}
        wrong = self.wrong
        for what, known in (("acknowledged", self.acked), ("read", self.seen)):
            for offset, text in known[name].items():
                if offset not in log or log[offset].data != text:
                    there = log.get(offset)
                    wrong.append(f"{what}, not there: {offset} of {name} {text[:24]!r}")
                    wrong.append(f"  there is {there and there.data[:24]!r}")
        bounds = {*log, len(data)}
        wrong += [f"{n} of {name} was a watermark" for n in self.marks[name] - bounds]
        ids = [each.id for each in log.values()]
        wrong += [f"ids of {name}: {b} after {a}" for a, b in pairwise(ids) if b <= a]

    def _check_senders(self) -> None:
        logs = {
            name: [each.data for each in records(self.rig.bytes_of(1, name))]
            for name in map(name_of, PLACES)
        }
        counts = Counter(data for log in logs.values() for data in log)
        twice = [data for data, n in counts.items() if n > 1]
        if not self.has_all_notes:
            # What has no number is sent once.
            twice = [data for data in twice if data.startswith(b"raw")]
        self.wrong += [f"{counts[data]} times: {data[:24]!r}" for data in twice]
        stored = self.refused & counts.keys()
        self.wrong += [f"refused and there: {data[:24]!r}" for data in stored]
        for sender, payloads in self.tried.items():
            order = {data: number for number, data in enumerate(payloads)}
            for name, log in logs.items():
                # Of one that is there again the first counts.
                numbers = [order[data] for data in dict.fromkeys(log) if data in order]
                self.wrong += [
                    f"{sender}: {b} after {a} in {name}"
                    for a, b in pairwise(numbers)
                    if b < a
                ]

    def _check_spans(self, replica: Replica) -> None:
        """Entries of span indexes have the checksums of the bytes."""
        for name in map(name_of, PLACES):
            for path in self.rig.segments(replica.number, name):
                data = replica.disk.content(path)
                base = int(path.stem)
                index = read_index(replica.disk, path, base)  # type: ignore[arg-type]
                for span in index.spans if index else ():
                    begin = span.base_offset - base
                    found = zlib.crc32(data[begin : begin + span.size_bytes])
                    if found != span.checksum or span.end_offset > base + len(data):
                        self.wrong.append(f"replica {replica.number}: {path} {span}")

    def _check_equal(self, one: Replica, other: Replica) -> None:
        what = f"replicas {one.number} and {other.number}"
        mine, theirs = facts(self.rig, one), facts(self.rig, other)
        for name in mine.keys() | theirs.keys():
            a, b = mine.get(name), theirs.get(name)
            if a != b:
                self.wrong.append(f"{what} differ in {name}: {a} and {b}")
        mine, theirs = notes(one), notes(other)
        for key in mine.keys() | theirs.keys():
            a, b = mine.get(key, {}), theirs.get(key, {})
            # Where a full disk refused a batch, its oldest one is forgotten.
            shared = a.keys() & b.keys()
            if self.has_all_notes:
                shared |= {max(a, default=0), max(b, default=0)}
            for sequence in shared:
                first, second = a.get(sequence), b.get(sequence)
                if first and second and not self.has_all_notes:
                    # It may be there twice, and one replica knows the first, the other
                    # the second.
                    at, number = first.offset, first.first_id
                    second = replace(second, offset=at, first_id=number)
                if first != second:
                    self.wrong.append(f"{what} remember {key}: {a} and {b}")

    def write(self, path: Path) -> None:
        """Write the history for people."""
        lines = [*self.history, *(f"WRONG {each}" for each in self.wrong)]
        path.write_text("\n".join(lines) + "\n")


def facts(rig: Replicas, replica: Replica) -> dict[str, object]:
    """Return what has to be equal in all copies."""
    found: dict[str, object] = {}
    broker = replica.broker
    assert broker is not None
    tables = store_of(replica.node).tables
    for log in broker.context.topics.logs():
        assert log.number is not None
        name = str(log.log_id)
        data = rig.bytes_of(replica.number, name)
        paths = rig.segments(replica.number, name)
        table = entries_within(
            tables.table(log.number), log.log_start_offset, log.high_watermark
        )
        found[name] = (
            log.number,
            log.log_start_offset,
            log.high_watermark,
            zlib.crc32(data),
            tuple(p.name for p in paths if replica.disk.synced_size(p)),
            table,
        )
    return found


def notes(replica: Replica) -> dict[tuple[str, str], dict[int, StoredBatch]]:
    """Return the batches that a replica remembers, by log and producer."""
    found: dict[tuple[str, str], dict[int, StoredBatch]] = defaultdict(dict)
    assert replica.broker is not None
    for log in replica.broker.context.topics.logs():
        for each in log.producers:
            found[str(log.log_id), each.producer][each.sequence] = each
    return found
