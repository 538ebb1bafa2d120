"""`metaq dump` and `metaq verify`: commands that read log files.

Both work without a broker, and while one runs: a file that is being written is read up
to its present end.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from metaq.cli import render
from metaq.cli.options import (
    declared,
    directory_argument,
    json_option,
    max_option,
    option,
    takes,
)
from metaq.cli.tree import command
from metaq.errors import (
    ConfigError,
    CorruptRecordError,
    DiskError,
    LogDirLockedError,
    StorageError,
)
from metaq.fs import LOCK_FILE, FileSystem, SystemFileSystem
from metaq.model import Offset, Position, SizeBytes, id_time
from metaq.record.flags import TEXT_AT, Decoded, decode_payload
from metaq.record.layout import Record
from metaq.record.scan import WINDOW_BYTES, Corrupt, Incomplete, iter_records
from metaq.storage.holdings import HOLDINGS_FILE
from metaq.storage.log_writer import UNSYNCED_BYTES_MAX
from metaq.storage.retention_run import ZIP_SUFFIX
from metaq.storage.segment import META_SUFFIX
from metaq.storage.segment_source import SegmentSource, open_source, unpacked_size
from metaq.storage.verify import Finding, VerifyReport, list_logs, verify_directory
from metaq.storage.walk import search_record

DUMP_PAYLOAD_BYTES_MAX: Final = 64 << 20
"""Longer payloads are not read, because a damaged length would take gigabytes of
memory. Four times the default of brokers."""
DUMP_COLUMNS: Final = {
    "offset": 12,
    "id": 20,
    "time": 24,
    "flag": 4,
    "attribute": 9,
    "size": 6,
    "payload": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpOptions:
    """The options of `metaq dump`."""

    segment: Path = declared(
        click.argument(
            "segment", type=click.Path(exists=True, dir_okay=False, path_type=Path)
        )
    )
    start: int | None = option(
        "--from", type=click.IntRange(0), help="Offset of the first record to print."
    )
    count_max: int | None = declared(max_option("Stop after this many records."))
    as_json: bool = declared(json_option)
    """Print objects, with the whole payload."""


def base_offset_of(path: Path) -> Offset:
    """Return the base offset in the name of a segment, `<offset>.meta`."""
    name = path.name.partition(".")[0]
    if not name.isdecimal() or ".meta" not in path.name:
        raise ConfigError(f"{path}: a segment is named <offset>.meta")
    return Offset(int(name))


def _records(
    file: SegmentSource, start: Position, end: Position
) -> Iterator[tuple[Position, Record] | Corrupt | Incomplete]:
    return iter_records(
        file.read_at, start, end, payload_bytes_max=DUMP_PAYLOAD_BYTES_MAX
    )


@command(
    "dump",
    takes(DumpOptions),
    examples=(
        "metaq dump data/test-0/00000000000000000000.meta",
        "metaq dump 00000000000000000000.meta --from 4096 --max 10 --json",
        "metaq dump archive/test-0/00000000000000000000.meta.zip",
    ),
)
def dump(options: DumpOptions) -> bool:
    """Print the records of the segment file SEGMENT, archived or not.

    The exit code is 1 if a record is damaged, or if no record begins at --from.
    """
    base = base_offset_of(options.segment)
    fs, path = SystemFileSystem(), options.segment
    is_zip = path.suffix == ZIP_SUFFIX
    try:
        end = Position(unpacked_size(fs, path, is_zip=is_zip))
        start = Position(0 if options.start is None else options.start - base)
        if not 0 <= start <= end:
            raise ConfigError(
                f"{path.name} holds offsets {base} to {base + end}, got"
                f" --from {options.start}"
            )
        source = open_source(fs, path, is_zip=is_zip)
        try:
            for at in range(0, start if is_zip else 0, WINDOW_BYTES):
                # A zip can only be read forwards.
                size = SizeBytes(min(WINDOW_BYTES, start - at))
                source.read_at(Position(at), size)
            return _dump(source, base, start, end, options)
        finally:
            source.close()
    except CorruptRecordError as error:
        raise CorruptRecordError(f"{error}: file={path}") from error


def _dump(
    file: SegmentSource,
    base: Offset,
    start: Position,
    end: Position,
    options: DumpOptions,
) -> bool:
    last: Corrupt | Incomplete | None = None
    position = start
    if not options.as_json:
        render.print_header(DUMP_COLUMNS)
    for count, item in enumerate(_records(file, start, end)):
        if isinstance(item, Corrupt | Incomplete):
            last = item
            break
        if count == options.count_max:
            break
        position, record = item
        # Zero bytes inside a record look like empty records.
        if not (count or record.payload) and not _begins_record(options, base, start):
            return False
        _print_record(Offset(base + position), record, as_json=options.as_json)
        position = Position(position + record.size_bytes)
    is_none = last is not None and position == start
    if is_none and not _begins_record(options, base, start):
        return False
    if isinstance(last, Corrupt):
        found = search_record(file, Position(position + 1), end)
        _report_damage(last, Offset(base + position), base, found)
        return False
    if isinstance(last, Incomplete):
        render.say(
            f"incomplete record at offset {base + position}: {end - position} of"
            f" {last.needed_bytes} bytes are there (a torn tail, or a write under way)"
        )
    return True


def _begins_record(options: DumpOptions, base: Offset, start: Position) -> bool:
    """Return whether a record may begin at a position; if not, print where it does."""
    begins_at = _record_start(options.segment, start)
    if begins_at != start:
        render.say(
            f"no record begins at offset {base + start}; the one that holds it"
            f" begins at offset {base + begins_at}"
        )
    return begins_at == start


def _record_start(path: Path, position: Position) -> Position:
    """Return the start of the record at a position; after damage, the position."""
    source = open_source(SystemFileSystem(), path, is_zip=path.suffix == ZIP_SUFFIX)
    begin = Position(0)
    try:
        for item in _records(source, begin, position):
            if isinstance(item, Corrupt):
                return position
            if not isinstance(item, Incomplete):
                begin = Position(item[0] + item[1].size_bytes)
    finally:
        source.close()
    return begin


def _print_record(offset: Offset, record: Record, *, as_json: bool) -> None:
    try:
        found = decode_payload(record.payload, record.flag)
    except CorruptRecordError:
        # The record is as its producer sent it; only its attribute block is invalid.
        found = Decoded(record.payload, None, None, ())
    time = render.format_time(id_time(record.id))
    if as_json:
        render.print_json(
            {
                "offset": offset,
                "id": record.id,
                "time": time,
                "flag": record.flag,
                "size": record.size_bytes,
                **render.message_fields(*found),
            }
        )
        return
    block = record.payload[: len(record.payload) - len(found.data)]
    shown = render.preview(block[TEXT_AT:]) if block else None
    values = (offset, record.id, time, record.flag, shown, record.size_bytes)
    render.print_aligned(DUMP_COLUMNS, (*values, render.preview(found.data)))


def _report_damage(
    damage: Corrupt, offset: Offset, base: Offset, found: Position | None
) -> None:
    next_good = "no good record follows"
    if found is not None:
        next_good = f"the next good record is at offset {base + found}"
    render.say(f"damaged record at offset {offset}: {damage.detail}; {next_good}")


def list_segments(fs: FileSystem, logs: Iterable[Path]) -> list[Path]:
    """Return the segments in partition directories."""
    return [
        path / name
        for path in logs
        for name in fs.list_directory(path)
        if name.endswith(META_SUFFIX)
    ]


def require_data_directory(fs: FileSystem, directory: Path, advice: str = "") -> None:
    """Raise StorageError if a broker was never started on a directory without segments.

    `advice` is the end of the message.
    """
    if not any(fs.exists(directory / name) for name in (LOCK_FILE, HOLDINGS_FILE)):
        text = f"not a data directory of a broker: directory={directory}{advice}"
        raise StorageError(text)


def check(
    fs: FileSystem, directory: Path, segments: Iterable[Path], *, in_use: bool
) -> VerifyReport:
    """Check every stored byte of a data directory; `segments` are for the progress."""
    total_bytes = sum(map(fs.size_of, segments))
    with render.progress("verify", total_bytes) as advance:
        return verify_directory(
            fs,
            directory,
            in_use=in_use,
            unsynced_bytes_max=UNSYNCED_BYTES_MAX,
            on_progress=advance,
        )


@command(
    "verify",
    directory_argument,
    examples=(
        "metaq verify ~/.local/share/metaq",
        "metaq verify /var/lib/metaq --json",
    ),
)
def verify(directory: Path, *, as_json: bool) -> bool:
    """Check every stored byte of a data directory.

    DIRECTORY may also be the directory of one partition. It is only read, and a broker
    may be using it. Prints each problem, its location and the next good record. The
    exit code is 1 if there are problems.
    """
    fs = SystemFileSystem()
    segments = list_segments(fs, (path for _id, path in list_logs(fs, directory)))
    if not segments:
        require_data_directory(fs, directory)
    report = check(fs, directory, segments, in_use=is_in_use(fs, directory))
    for finding in report.findings:
        if as_json:
            render.print_json(_finding_fields(finding))
        else:
            click.echo(str(finding))
    if as_json:
        render.print_json(
            {
                "partitions": report.log_count,
                "segments": report.segment_count,
                "bytes": report.checked_bytes,
                "records": report.record_count,
                "problems": len(report.findings),
            }
        )
    else:
        click.echo(
            f"{render.count_text(report.log_count, 'partition')},"
            f" {render.count_text(report.segment_count, 'segment')},"
            f" {render.count_text(report.record_count, 'record')},"
            f" {render.bytes_text(report.checked_bytes)} checked:"
            f" {render.count_text(len(report.findings), 'problem')}"
        )
    return not report.findings


def is_in_use(fs: FileSystem, directory: Path) -> bool:
    """Return whether a broker uses a directory or, for a partition's, its parent.

    The lock is tried only if its file exists, so that no file is created.
    """
    for path in (directory, directory.absolute().parent):
        if not fs.exists(path / LOCK_FILE):
            continue
        try:
            fs.lock_directory(path).release()
        except LogDirLockedError:
            return True
        except DiskError:
            # Without write permission this is unknown; False selects the stricter
            # check.
            continue
    return False


def _finding_fields(finding: Finding) -> dict[str, object]:
    return {
        "kind": finding.kind.value,
        "topic": finding.log_id.topic,
        "partition": finding.log_id.partition,
        "file": str(finding.path),
        "offset": finding.offset,
        "next_good_offset": finding.next_good_offset,
        "detail": finding.detail,
    }
