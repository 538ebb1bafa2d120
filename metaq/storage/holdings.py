"""Record of the contents of a data directory: identity, partitions and their extents.

    <dataPath>/holdings

    metaq-holdings 1 <CRC-32 of the next line, 8 hex digits>
    {"identity": "4be1…", "written_ms": …, "is_sealed": false, "is_accepted": false,
     "partitions": {"test-0": [log start, end], …},
     "siblings": {"/other/data/path": ["90c2…", partition count], …},
     "lost": ["test-1", …],                              (only where there are any)
     "version": 7,                                       (only of a replica)
     "journal": "/journal/transactions",                 (only without replicas)
     "refused_by": {"ZooKeeper /meta/…": ["90c2…", partition count], …}}      (likewise)

An unmounted disk, a removed directory and a missing segment look as if nothing had ever
been there. This record distinguishes them from new ones. It is written at each start,
when segments roll and when logs are added or removed, and *sealed* at a clean stop;
never in step with puts. So an end in it is a synced one, and not more than the disk
has. Differences without a loss:

* a later end: appends since the record was written, ours or a Java broker's;
* a later start: retention. Only between a seal and the next start can it not be ours;
  a Java broker's leaves traces (see `find_losses`). Nor does our retention touch a
  partition that a start has stopped for a loss: it is in `lost`.

Deleting the file loses no record of a log, only this knowledge. If another data
directory of the broker is missing as a whole, only its claim here is left of it. This
module has the values and rules; `inventory.py` reads and writes.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from metaq.errors import DataMissingError, StorageError
from metaq.model import Millis, Offset, SizeBytes, no_items
from metaq.record.checksum import body_after_crc_line, with_crc_line
from metaq.storage.segment import Damage

HOLDINGS_FILE: Final = "holdings"
"""Name of the record in a data directory: without a dash, so it is no partition."""

HOLDINGS_BYTES_MAX: Final = SizeBytes(64 << 20)
"""A larger file is not ours: a partition takes about 50 bytes, 300 at most."""

_MAGIC: Final = b"metaq-holdings 1 "

CURE: Final = (
    "mount its disk or put it back; if it is gone for good, run"
    " 'metaq accept-loss {}' once and start again"
)
"""Advice at the end of errors about missing data."""


class Extent(NamedTuple):
    """Offset range of a partition."""

    start: Offset
    end: Offset
    """Offset after the last byte known to be synced."""


class Claim(NamedTuple):
    """Expected identity and partition count of a data directory, stored elsewhere."""

    identity: str
    partition_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The record of one data directory."""

    identity: str
    """Random, generated once; "" before the first start."""
    written_ms: Millis
    is_sealed: bool = False
    """Whether a clean stop wrote it, after the last change: all offsets are exact."""
    is_accepted: bool = False
    """Whether an operator accepts what the next start finds as complete."""
    partitions: Mapping[str, Extent] = field(default_factory=no_items)
    """Directory name → offsets, for partitions that have or had any bytes."""
    siblings: Mapping[str, Claim] = field(default_factory=no_items)
    """Path → claim about another data directory of the broker."""
    lost: Collection[str] = ()
    """Names in `partitions` that a start has stopped, because they hold less."""
    version: int = 0
    """Version in a replica: it grows, and ZooKeeper has it too. A directory with a
    lower one was restored from a backup. 0 in a broker without replicas."""
    refused_by: Mapping[str, Claim] = field(default_factory=no_items)
    """Witness → its claim about this directory, if the last start was refused for it.
    Kept for `metaq accept-loss` to show; a start asks the witnesses themselves."""
    journal: str = ""
    """Directory of the broker's transactions, for `metaq hand-over`; "": unknown."""


def encode_holdings(holdings: Holdings) -> bytes:
    """Return the content of the file."""
    fields: dict[str, object] = {
        "identity": holdings.identity,
        "written_ms": holdings.written_ms,
        "is_sealed": holdings.is_sealed,
        "is_accepted": holdings.is_accepted,
        "partitions": dict(holdings.partitions),
        "siblings": dict(holdings.siblings),
    }
    if holdings.lost:
        fields["lost"] = list(holdings.lost)
    if holdings.version:
        fields["version"] = holdings.version
    if holdings.refused_by:
        fields["refused_by"] = dict(holdings.refused_by)
    if holdings.journal:
        fields["journal"] = holdings.journal
    return with_crc_line(_MAGIC, json.dumps(fields).encode())


def decode_holdings(data: bytes) -> Holdings:
    """Return the record in the content of a file.

    Raises:
        StorageError: it is not a record, or it is damaged.
    """
    body = body_after_crc_line(_MAGIC, data)
    try:
        fields = json.loads(body)
        return Holdings(
            identity=str(fields["identity"]),
            written_ms=Millis(int(fields["written_ms"])),
            is_sealed=bool(fields["is_sealed"]),
            is_accepted=bool(fields["is_accepted"]),
            partitions={
                name: Extent(Offset(int(start)), Offset(int(end)))
                for name, (start, end) in fields["partitions"].items()
            },
            siblings=_decode_claims(fields["siblings"]),
            lost=tuple(map(str, fields.get("lost", ()))),
            version=int(fields.get("version", 0)),
            refused_by=_decode_claims(fields.get("refused_by", {})),
            journal=str(fields.get("journal", "")),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StorageError(
            f"expected the fields of version 1, got {error!r}"
        ) from error


def _decode_claims(fields: Mapping[str, Sequence[object]]) -> dict[str, Claim]:
    return {
        name: Claim(str(identity), int(str(count)))
        for name, (identity, count) in fields.items()
    }


# -- a whole directory ----------------------------------------------------------------


def check_directory(
    path: Path,
    record: Holdings | None,
    found: Collection[str],
    claims: Mapping[str, Claim],
) -> None:
    """Refuse a data directory that is empty or not the known one.

    Raises:
        DataMissingError: it holds less and that is not accepted; the text has the
            remedy.
    """
    if record is not None and record.is_accepted:
        return
    fault = find_fault(path, record, found, claims)
    if fault:
        raise DataMissingError(f"{fault}: {CURE.format(path)}")


def find_fault(
    path: Path,
    record: Holdings | None,
    found: Collection[str],
    claims: Mapping[str, Claim],
) -> str:
    """Return why a data directory is not the known one; "" if it is.

    Args:
        path: the directory.
        record: its own record; None: there is no valid one.
        found: names of the partition directories in it.
        claims: source (another data directory, ZooKeeper) → its claim.
    """
    for witness, claim in claims.items():
        if record is not None and record.identity == claim.identity:
            continue
        # Without its record it is judged by its contents: deleting the record must cost
        # no more than knowledge.
        if record is not None or len(found) < claim.partition_count:
            got = "no record" if record is None else f"identity {record.identity}"
            return (
                f"data directory is not what it was: directory={path} expected"
                f" identity {claim.identity} with {claim.partition_count} partitions"
                f" (by {witness}), got {got} and {len(found)} partitions"
            )
    held = record.partitions if record is not None else {}
    if held and not held.keys() & set(found):
        return (
            f"data directory is empty: directory={path} expected {len(held)} partitions"
            f" (by its record), got none of them"
        )
    return ""


# -- one partition --------------------------------------------------------------------


def find_losses(
    path: Path,
    record: Holdings,
    found: Mapping[str, Extent | None],
    *,
    was_visited: bool,
) -> dict[str, Damage]:
    """Return the losses by partition name.

    A later start is a loss only after a seal without another broker at work since
    (which has appended to a partition, created one, or `was_visited`), or if an earlier
    start has reported it.

    Args:
        path: the data directory.
        record: its contents as recorded before.
        found: name → extent after recovery; None: no segment.
        was_visited: whether another broker has written beside the partitions since.
    """
    is_exact = record.is_sealed and not was_visited
    for name, extent in found.items():
        held = record.partitions.get(name)
        if extent is not None and extent.end > (held.end if held else 0):
            is_exact = False
    losses = {}
    for name, held in record.partitions.items():
        detail, offset, good = "", held.start, None
        extent = found.get(name)
        if extent is None:
            what = "has no segment" if name in found else "is missing"
            detail = f"partition {what}: expected offsets {held.start} to {held.end}"
        elif extent.end < held.end:
            offset = extent.end
            detail = f"log ends too early: expected {held.end}, got {extent.end}"
        elif extent.start > held.start and (is_exact or name in record.lost):
            good = extent.start
            detail = (
                f"first segments are missing: expected the log start {held.start},"
                f" got {extent.start}"
            )
        if detail:
            losses[name] = Damage(path / name, offset, good, detail)
    return losses
