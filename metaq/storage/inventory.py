"""Records of the contents of one broker's data directories, kept on disk.

Theory of operation. A start reads every record before it recovers anything. The data
directories are compared with the records and, after recovery, so are the partitions. A
directory that holds less refuses the start as a whole; a partition that holds less is
stopped. Then each record is written again, unsealed. While the broker runs, the loop's
thread makes records and the storage thread of each directory writes them, so that a
file has one writer; its last write at a clean stop is a sealed record.

The record of a stopped log keeps its former extent, so that a second start does not
forget it. Keep in step: `holdings.py` (layout and rules).
"""

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from metaq.clock import Clock
from metaq.errors import (
    DataMissingError,
    DiskError,
    MissingFileError,
    NoSpaceError,
    StorageError,
)
from metaq.fs import FileSystem
from metaq.model import LogId, Millis
from metaq.storage.holdings import (
    CURE,
    HOLDINGS_BYTES_MAX,
    HOLDINGS_FILE,
    Claim,
    Extent,
    Holdings,
    check_directory,
    decode_holdings,
    encode_holdings,
    find_losses,
)
from metaq.storage.opening import parse_log_directory_name
from metaq.storage.segment import META_SUFFIX, Damage, segment_file_name
from metaq.storage.span_index import is_unreadable

TRANSACTIONS: Final = "transactions"
"""Directory of the transaction journal below dataLogPath, of Java brokers and ours."""

JAVA_STOP_FILE: Final = "heuristic.log"
"""File that only a Java broker writes there, when it stops."""

IDENTITY_BYTES: Final = 16
"""Size of the random identity of a data directory, which is unique."""

_log = logging.getLogger(__name__)


def handed_over_path(directory: Path) -> Path:
    """Return the path where `metaq hand-over` keeps what Java brokers must not find."""
    return Path(f"{directory}.handed-over")


def read_holdings(fs: FileSystem, directory: Path) -> Holdings | None:
    """Return the record of a data directory; None if there is no valid one.

    Raises:
        StorageError: the disk refuses anything but reading the record.
    """
    path = directory / HOLDINGS_FILE
    try:
        data = fs.read_file(path, HOLDINGS_BYTES_MAX)
    except MissingFileError:
        return None
    except DiskError as error:
        if not is_unreadable(error):
            raise
        _log.error("going on without the record of a data directory: %s", error)
        return None
    try:
        return decode_holdings(data)
    except StorageError as error:
        _log.error(
            "going on without the record of a data directory: file=%s error=%s",
            path,
            error,
        )
        return None


def write_holdings(fs: FileSystem, directory: Path, record: Holdings) -> None:
    """Replace the record of a data directory; durable on return.

    Raises:
        StorageError: the disk has the old record or the new one.
    """
    fs.write_atomically(directory / HOLDINGS_FILE, encode_holdings(record))


def try_write_holdings(fs: FileSystem, directory: Path, record: Holdings) -> None:
    """Replace the record if there is space and a descriptor; the old one is valid too.

    Raises:
        DiskError: the state of the disk is unknown.
    """
    try:
        write_holdings(fs, directory, record)
    except StorageError as error:
        if not is_harmless(error):
            raise
        _log.warning("record of a data directory not written: %s", error)


def is_harmless(error: StorageError) -> bool:
    """Return whether a record was not written for lack of space or of a descriptor.

    Then the disk still has the old one, and can be trusted.
    """
    is_open = isinstance(error, DiskError) and error.operation == "open"
    return is_open or isinstance(error, NoSpaceError)


def _without_topics(record: Holdings, topics: Collection[str]) -> Holdings:
    """Return a record without the partitions of some topics."""
    partitions = {
        name: extent
        for name, extent in record.partitions.items()
        if (log_id := parse_log_directory_name(name)) is None
        or log_id.topic not in topics
    }
    return replace(record, partitions=partitions)


def last_java_stop_ms(fs: FileSystem, directory: Path) -> Millis | None:
    """Return when a Java broker last wrote beside its journal; None: never."""
    path = directory / JAVA_STOP_FILE
    with suppress(StorageError):
        return fs.mtime_ms(path) if fs.exists(path) else None
    return None


def started(record: Holdings | None) -> Holdings | None:
    """Return a record, or None if it only keeps a refusal."""
    is_known = record is not None and (record.identity or record.is_accepted)
    return record if is_known else None


def claims_of_siblings(
    path: Path, records: Mapping[Path, Holdings | None]
) -> dict[str, Claim]:
    """Return the claims about a data directory in the records of the others."""
    return {
        str(other / HOLDINGS_FILE): record.siblings[str(path)]
        for other, record in records.items()
        if record is not None and str(path) in record.siblings
    }


def claims_of_zookeeper(
    path: Path,
    found: Collection[str],
    witness: str,
    claims: Mapping[str, tuple[str, int]],
) -> dict[str, Claim]:
    """Return ZooKeeper's claim about a data directory, if it exceeds `found`.

    It may be older than a record that was made again: a directory with as many
    partitions is accepted.
    """
    claim = claims.get(str(path))
    return {witness: Claim(*claim)} if claim and len(found) < claim[1] else {}


def losses_by_record(
    fs: FileSystem,
    path: Path,
    record: Holdings,
    found: Mapping[str, Extent | None],
    transactions: Path,
) -> dict[str, Damage]:
    """Return the losses of partitions compared with the record of a data directory.

    Args:
        fs: the disk.
        path: the data directory.
        record: its record.
        found: name → its extent after recovery; None: a partition without a segment.
        transactions: directory of the journal of a Java broker on this directory.
    """
    changed_ms = last_java_stop_ms(fs, transactions)
    was_visited = changed_ms is not None and changed_ms > record.written_ms
    return find_losses(path, record, found, was_visited=was_visited)


def with_cure(path: Path, loss: Damage) -> Damage:
    """Return a loss with the record's path and the remedy in its text."""
    by = f"(by {path / HOLDINGS_FILE}): {CURE.format(path)}"
    return replace(loss, detail=f"{loss.detail} {by}")


class Inventory:
    """Content records of one broker's data directories. Owner: the log manager."""

    def __init__(self, fs: FileSystem, clock: Clock, transactions: Path) -> None:
        """Create an inventory without records; call `read` first.

        Args:
            fs: the disk.
            clock: time for the records.
            transactions: directory of the journal of a Java broker on these
                directories.
        """
        self._fs = fs
        self._clock = clock
        self._transactions = transactions
        self._records: dict[Path, Holdings | None] = {}
        self._found: dict[Path, Collection[str]] = {}
        self._identities: dict[Path, str] = {}
        # Stopped logs: their former extents; and names of those that hold less.
        self._kept: dict[LogId, Extent] = {}
        self._lost: set[str] = set()
        self._refused_by: dict[Path, Mapping[str, Claim]] = {}
        self.version = 0
        """Version of a replica's directories: the least of any of them."""
        self.lacks_bytes = False
        """Whether the start found less than recorded, accepted or not."""
        self.were_sealed = False
        """Whether the start found every record sealed."""

    # -- at the start

    def read(
        self, found: Mapping[Path, Collection[str]], left_out: Collection[str] = ()
    ) -> None:
        """Read every record and compare the data directories with them.

        Args:
            found: data directory → names of the partition directories in it.
            left_out: topics that are being deleted: removed from the records, because
                their partitions may be gone already.

        Raises:
            DataMissingError: a directory, as a whole, holds less.
            StorageError: a disk refuses.
        """
        self._found = dict(found)
        for path in found:
            aside = handed_over_path(path)
            if self._fs.is_directory(aside):
                # Without it queue groups would start over, and waiting messages stay.
                raise DataMissingError(
                    f"data directory was handed over to a Java broker: run 'metaq"
                    f" hand-over {path} --back' before this start; to give up what is"
                    f" in {aside}, move that elsewhere"
                )
            record = started(read_holdings(self._fs, path))
            self._records[path] = record and _without_topics(record, left_out)
        records = self._records.values()
        self.version = min((each.version if each else 0 for each in records), default=0)
        self.were_sealed = all(each and each.is_sealed for each in records)
        for path, names in found.items():
            claims = claims_of_siblings(path, self._records)
            try:
                check_directory(path, self._records[path], names, claims)
            except DataMissingError:
                self._keep_refusal(path, claims)
                raise
        for path, record in self._records.items():
            if record is None and found[path]:
                _log.info(
                    "data directory without a record, accepted as it is: directory=%s"
                    " partitions=%d",
                    path,
                    len(found[path]),
                )
            self._identities[path] = (record and record.identity) or secrets.token_hex(
                IDENTITY_BYTES
            )
            for other, claim in (record.siblings if record else {}).items():
                if Path(other) not in found and claim.partition_count:
                    _log.warning(
                        "data directory is not configured any more: directory=%s"
                        " partitions=%d",
                        other,
                        claim.partition_count,
                    )

    def _keep_refusal(self, path: Path, claims: Mapping[str, Claim]) -> None:
        """Store the claims that refuse a start, for `metaq accept-loss`."""
        if not claims:
            return
        now_ms = self._clock.wall_ms()
        record = self._records[path] or Holdings(identity="", written_ms=now_ms)
        try:
            write_holdings(self._fs, path, replace(record, refused_by=claims))
        except StorageError as error:
            _log.warning("refusal not noted: directory=%s error=%s", path, error)

    def settle_accepted(self, path: Path, names: Collection[str]) -> None:
        """Create segments so that partitions with accepted losses begin at their ends.

        So no offset ever has two records. Called before recovery.
        """
        record = self._records[path]
        if record is None or not record.is_accepted:
            return
        for name, extent in record.partitions.items():
            directory = path / name
            if name not in names or not self._has_segment(directory):
                self._fs.make_directory(directory)
                self.lacks_bytes = True
                first = directory / segment_file_name(extent.end)
                self._fs.open_append(first, create=True).close()
                _log.warning(
                    "loss accepted, partition begins empty: directory=%s offset=%d",
                    directory,
                    extent.end,
                )

    def _has_segment(self, directory: Path) -> bool:
        names = self._fs.list_directory(directory)
        return any(name.endswith(META_SUFFIX) for name in names)

    def find_losses(
        self, path: Path, found: Mapping[LogId, Extent | None]
    ) -> dict[str, Damage]:
        """Return the losses of partitions in a data directory, by partition name.

        Args:
            path: the data directory.
            found: partition → extent after recovery; None: without a segment.
        """
        record = self._records[path]
        if record is None:
            return {}
        extents = {str(log_id): extent for log_id, extent in found.items()}
        losses = losses_by_record(self._fs, path, record, extents, self._transactions)
        self.lacks_bytes = self.lacks_bytes or bool(losses)
        if record.is_accepted:
            for name, loss in losses.items():
                _log.warning("loss accepted: partition=%s %s", name, loss)
            return {}
        self._lost.update(losses)
        return {name: with_cure(path, loss) for name, loss in losses.items()}

    def held(self, path: Path, name: str) -> Extent | None:
        """Return the recorded extent of a partition before this start."""
        record = self._records[path]
        return None if record is None else record.partitions.get(name)

    def keep(self, log_id: LogId, extent: Extent) -> None:
        """Keep this extent in the record of a log that is stopped."""
        self._kept[log_id] = extent

    def forget(self, log_id: LogId) -> None:
        """Drop the former extent of a log."""
        self._kept.pop(log_id, None)
        self._lost.discard(str(log_id))

    def write_all(self, records: Mapping[Path, Holdings]) -> None:
        """Write the first records of a run, on the thread that opens the directories.

        Records of new directories are written last: a new identity may be known
        elsewhere before its own directory has it, but not the other way round.
        """
        for path in sorted(records, key=lambda each: self._records[each] is None):
            try_write_holdings(self._fs, path, records[path])

    # -- at any time

    def identity(self, path: Path) -> str:
        """Return the identity of a data directory."""
        return self._identities[path]

    def check_claims(self, witness: str, claims: Mapping[str, tuple[str, int]]) -> None:
        """Compare the data directories, as found by the start, with `claims`.

        Args:
            witness: source of the claims, for errors.
            claims: path → identity and number of partitions; other paths than those of
                our data directories are ignored.

        Raises:
            DataMissingError: a directory held less.
        """
        for path, names in self._found.items():
            known = claims_of_zookeeper(path, names, witness, claims)
            if not known:
                continue
            try:
                check_directory(path, self._records[path], names, known)
            except DataMissingError:
                # The next records that are written keep it for `metaq accept-loss`.
                self._refused_by[path] = known
                raise

    def make_records(
        self, logs: Iterable[tuple[Path, LogId, Extent]], *, is_replica: bool
    ) -> dict[Path, Holdings]:
        """Return the record of every data directory, unsealed.

        Args:
            logs: data directory, partition, and its synced offsets.
            is_replica: logs may begin anywhere, and have no directory before their
                first byte.
        """
        partitions: dict[Path, dict[str, Extent]] = {
            path: {} for path in self._identities
        }
        for path, log_id, extent in logs:
            kept = self._kept.get(log_id, extent)
            if kept.end > (kept.start if is_replica else 0):
                partitions[path][str(log_id)] = kept
        claims = {
            path: Claim(identity, len(partitions[path]))
            for path, identity in self._identities.items()
        }
        return {
            path: Holdings(
                identity=claims[path].identity,
                written_ms=self._clock.wall_ms(),
                partitions=held,
                siblings={
                    str(other): claim
                    for other, claim in claims.items()
                    if other != path
                },
                lost=tuple(sorted(self._lost & held.keys())),
                version=self.version,
                refused_by=self._refused_by.get(path, {}),
                journal="" if is_replica else str(self._transactions.absolute()),
            )
            for path, held in partitions.items()
        }
