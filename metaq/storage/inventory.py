"""Records of the contents of one broker's data directories, kept on disk.

Theory of operation. At a start every record is read before anything is recovered, the
data directories are compared with the records and, after recovery, so are the
partitions. Less than there was refuses the start (a whole directory) or stops one
partition. Then each record is written again, unsealed. While the broker runs the loop's
thread makes records and the storage thread of each directory writes them, so that a
file has one writer; the last thing it writes at a clean stop is a sealed one.

A log that is stopped keeps its former extent in the record, so that nothing
is forgotten by starting twice. Keep in step: `holdings.py` (layout and judgement).
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
"""Directory of the transaction journal below dataLogPath, of a Java broker and ours."""

JAVA_STOP_FILE: Final = "heuristic.log"
"""Files that only a Java broker writes there, at its stop."""

IDENTITY_BYTES: Final = 16
"""Size of the random name of a data directory; no two have the same."""

_log = logging.getLogger(__name__)


def handed_over_path(directory: Path) -> Path:
    """Return where `metaq hand-over` keeps what a Java broker must not find."""
    return Path(f"{directory}.handed-over")


def read_holdings(fs: FileSystem, directory: Path) -> Holdings | None:
    """Return the record of a data directory; None without one that can be believed.

    Raises:
        StorageError: the disk refused something else than the bytes of the record.
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
        StorageError: the old one is there still, or the new one.
    """
    fs.write_atomically(directory / HOLDINGS_FILE, encode_holdings(record))


def try_write_holdings(fs: FileSystem, directory: Path, record: Holdings) -> None:
    """Replace the record if there is space and a descriptor; the old one is true too.

    Raises:
        DiskError: the disk cannot be believed any more.
    """
    try:
        write_holdings(fs, directory, record)
    except StorageError as error:
        if not is_harmless(error):
            raise
        _log.warning("record of a data directory not written: %s", error)


def is_harmless(error: StorageError) -> bool:
    """Return whether a record was not written for lack of space or of a descriptor.

    The old one is there still, and the disk may be believed.
    """
    is_open = isinstance(error, DiskError) and error.operation == "open"
    return is_open or isinstance(error, NoSpaceError)


def _without_topics(record: Holdings, topics: Collection[str]) -> Holdings:
    """Return a record that says nothing of some topics."""
    partitions = {
        name: extent
        for name, extent in record.partitions.items()
        if (log_id := parse_log_directory_name(name)) is None
        or log_id.topic not in topics
    }
    return replace(record, partitions=partitions)


def last_java_stop_ms(fs: FileSystem, directory: Path) -> Millis | None:
    """Return when a Java broker last wrote beside its journal; None: none did."""
    path = directory / JAVA_STOP_FILE
    with suppress(StorageError):
        return fs.mtime_ms(path) if fs.exists(path) else None
    return None


def started(record: Holdings | None) -> Holdings | None:
    """Return a record if it counts: one that only keeps a refusal is none."""
    is_known = record is not None and (record.identity or record.is_accepted)
    return record if is_known else None


def claims_of_siblings(
    path: Path, records: Mapping[Path, Holdings | None]
) -> dict[str, Claim]:
    """Return what the records of a broker's data directories say of one of them."""
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
    """Return what ZooKeeper says of a data directory, where that is more than `found`.

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
    """Return which partitions of a data directory hold less than its record says.

    Args:
        fs: the disk.
        path: the data directory.
        record: its record.
        found: name → its extent after recovery; None: a partition without a segment.
        transactions: where a Java broker on this directory has its journal.
    """
    changed_ms = last_java_stop_ms(fs, transactions)
    was_visited = changed_ms is not None and changed_ms > record.written_ms
    return find_losses(path, record, found, was_visited=was_visited)


def with_cure(path: Path, loss: Damage) -> Damage:
    """Return a loss whose text names the record of a data directory and the remedy."""
    by = f"(by {path / HOLDINGS_FILE}): {CURE.format(path)}"
    return replace(loss, detail=f"{loss.detail} {by}")


class Inventory:
    """Contents records of one broker's data directories. Owner: the log manager."""

    def __init__(self, fs: FileSystem, clock: Clock, transactions: Path) -> None:
        """Begin without records; `read` comes first.

        Args:
            fs: the disk.
            clock: for the time in a record.
            transactions: where a Java broker on these directories has its journal.
        """
        self._fs = fs
        self._clock = clock
        self._transactions = transactions
        self._records: dict[Path, Holdings | None] = {}
        self._found: dict[Path, Collection[str]] = {}
        self._identities: dict[Path, str] = {}
        # Stopped logs: their extents before; and which of them hold less.
        self._kept: dict[LogId, Extent] = {}
        self._lost: set[str] = set()
        self._refused_by: dict[Path, Mapping[str, Claim]] = {}
        self.version = 0
        """Of the directories of a replica: the least that one of them has."""
        self.is_short = False
        """Whether the start found less than the records say, accepted or not."""
        self.were_sealed = False
        """Whether the start found every record sealed."""

    # -- at the start

    def read(
        self, found: Mapping[Path, Collection[str]], left_out: Collection[str] = ()
    ) -> None:
        """Read every record and compare the data directories with them.

        Args:
            found: data directory → names of the partition directories in it.
            left_out: topics that are being deleted: forgotten in the records, for their
                partitions may be gone already.

        Raises:
            DataMissingError: one of them holds less, as a whole.
            StorageError: a disk refuses.
        """
        self._found = dict(found)
        for path in found:
            aside = handed_over_path(path)
            if self._fs.is_directory(aside):
                # Without it queue groups would begin again, and what waits would stay.
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
                    "data directory without a record, believed as it is:"
                    " directory=%s partitions=%d",
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
        """Note for `metaq accept-loss` by which claims a start is refused."""
        if not claims:
            return
        now_ms = self._clock.wall_ms()
        record = self._records[path] or Holdings(identity="", written_ms=now_ms)
        try:
            write_holdings(self._fs, path, replace(record, refused_by=claims))
        except StorageError as error:
            _log.warning("refusal not noted: directory=%s error=%s", path, error)

    def settle_accepted(self, path: Path, names: Collection[str]) -> None:
        """Let partitions whose loss is accepted begin where they ended.

        So no offset ever names two records. Done before recovery.
        """
        record = self._records[path]
        if record is None or not record.is_accepted:
            return
        for name, extent in record.partitions.items():
            directory = path / name
            if name not in names or not self._has_segment(directory):
                self._fs.make_directory(directory)
                self.is_short = True
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
        """Return which partitions of a data directory hold less, by their names.

        Args:
            path: the data directory.
            found: its extent after recovery; None: a partition without a segment.
        """
        record = self._records[path]
        if record is None:
            return {}
        extents = {str(log_id): extent for log_id, extent in found.items()}
        losses = losses_by_record(self._fs, path, record, extents, self._transactions)
        self.is_short = self.is_short or bool(losses)
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
        """Go on remembering this of a log that is stopped."""
        self._kept[log_id] = extent

    def forget(self, log_id: LogId) -> None:
        """Drop the former extent of a log."""
        self._kept.pop(log_id, None)
        self._lost.discard(str(log_id))

    def write_all(self, records: Mapping[Path, Holdings]) -> None:
        """Write the first records of a run, on the thread that opens the directories.

        Records of new directories come last: a new identity may be known elsewhere
        before its own directory has it, but not the other way round.
        """
        for path in sorted(records, key=lambda each: self._records[each] is None):
            try_write_holdings(self._fs, path, records[path])

    # -- at any time

    def identity(self, path: Path) -> str:
        """Return the identity of a data directory."""
        return self._identities[path]

    def check_claims(self, witness: str, claims: Mapping[str, tuple[str, int]]) -> None:
        """Compare the data directories, as they were at the start, with `claims`.

        Args:
            witness: source of the claims, for errors.
            claims: path → identity and number of partitions; paths of no data
                directory of ours are passed over.

        Raises:
            DataMissingError: one of them held less.
        """
        for path, names in self._found.items():
            known = claims_of_zookeeper(path, names, witness, claims)
            if not known:
                continue
            try:
                check_directory(path, self._records[path], names, known)
            except DataMissingError:
                # The records that are written next keep it for `metaq accept-loss`.
                self._refused_by[path] = known
                raise

    def make_records(
        self, logs: Iterable[tuple[Path, LogId, Extent]], *, is_replica: bool
    ) -> dict[Path, Holdings]:
        """Return the record of every data directory, unsealed.

        Args:
            logs: data directory, partition, and its offsets that are synced.
            is_replica: logs may begin anywhere, and have no directory before they have
                a byte.
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
