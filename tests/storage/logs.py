"""Builders of logs on a faulty disk, shared by the tests of storage."""

from collections.abc import Sequence
from pathlib import Path

from metaq.fs import FileSystem
from metaq.model import MessageId, Millis, Offset, SizeBytes
from metaq.record.layout import encode_record
from metaq.storage.segment import segment_file_name
from metaq.storage.span_index import NO_ID, SpanIndexWriter
from tests.rigs.fs import FaultyFileSystem

DIRECTORY = Path("/data/test-0")
ALL = SizeBytes(1 << 30)
SPAN = 64
"""Small spans, so that small logs have several."""


def disk_with_directory() -> FaultyFileSystem:
    """Return a disk with an empty partition directory."""
    disk = FaultyFileSystem()
    disk.make_directory(DIRECTORY.parent)
    disk.make_directory(DIRECTORY)
    return disk


def record(number: int, size: int = 10) -> bytes:
    """Return a record with the id `number` and a payload of its own."""
    payload = (b"%d-" % number * size)[:size]
    return encode_record(payload, id=MessageId(number), flag=0)


def put_file(fs: FileSystem, name: str, data: bytes, *, synced: bool = True) -> Path:
    """Append to a file of the partition directory, creating it."""
    file = fs.open_append(DIRECTORY / name, create=True)
    file.write(data)
    if synced:
        file.sync()
    file.close()
    return DIRECTORY / name


def put_segment(
    fs: FileSystem,
    base: int,
    commits: Sequence[Sequence[bytes]],
    *,
    last_id_before: int = NO_ID,
    indexed: bool = True,
    time_ms: int = 1_000,
    sealed: bool = False,
) -> Path:
    """Write a segment as the broker does, one sync and index entry per commit."""
    path = DIRECTORY / segment_file_name(Offset(base))
    file = fs.open_append(path, create=True)
    writer = None
    if indexed:
        writer = SpanIndexWriter.create(
            fs, path, Offset(base), MessageId(last_id_before), span_bytes_min=SPAN
        )
    for number, records in enumerate(commits):
        file.write_all(records)
        file.sync()
        if writer is not None:
            list(writer.extend(records, record_count=len(records)))
            writer.commit(Millis(time_ms + number))
    if writer is not None and sealed:
        writer.seal()
    elif writer is not None:
        writer.close()
    file.close()
    return path


def content(fs: FileSystem, name: str) -> bytes:
    """Return the bytes of a file of the partition directory."""
    return fs.read_file(DIRECTORY / name, ALL)


def everything(fs: FileSystem) -> dict[str, bytes]:
    """Return every file of the partition directory, by name."""
    return {name: content(fs, name) for name in fs.list_directory(DIRECTORY)}
