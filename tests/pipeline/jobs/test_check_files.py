"""Data files of an archive, checked and put together; without Spark."""

import io
import logging
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaq.fs import FileSystem
from metaq.fs.calls import LinuxCalls
from metaq.pipeline.errors import ArchiveError
from metaq.pipeline.jobs.archive_store import ArchiveStore
from metaq.pipeline.jobs.check_files import check_file
from metaq.pipeline.jobs.compact import FILE_BYTES
from metaq.pipeline.jobs.day_files import FILE_SCHEMA, DataFile, put_together
from tests.pipeline.jobs.archives import DAY, SECOND, row
from tests.pipeline.jobs.test_day_files import STAGING, write
from tests.sampling import SEED

FLIPS = 400


def rows_of(data: bytes) -> pa.Table:
    """Return the rows as a reader has them that looks at no checksum."""
    return pq.ParquetFile(io.BytesIO(data)).read()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return where the files of `made` are."""
    return tmp_path / STAGING


@pytest.fixture
def made(tmp_path: Path) -> list[DataFile]:
    """Return two files of one day, with keys and headers in them."""
    return [
        made_of
        for first in (0, 300)
        for made_of in write(
            tmp_path,
            [
                row(
                    "logs",
                    2,
                    50 * n,
                    time=DAY - n * SECOND,
                    key=b"k%d" % (n % 5) if n % 3 else None,
                    headers=[("name", b"%d" % n)] if n % 7 == 0 else None,
                )
                for n in range(first, first + 300)
            ],
            piece_rows=1000,
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("is_put_together", [False, True])
def test_each_flipped_bit_is_named_or_changes_nothing(
    root: Path, made: list[DataFile], is_put_together: bool
) -> None:
    """Pages have checksums, and the footer is held against them (issue 30)."""
    file = put_together(str(root), made) if is_put_together else made[0]
    path = root / file.path
    whole = path.read_bytes()
    rows, chance = rows_of(whole), Random(SEED)
    assert check_file(str(root), file).damage == ()
    named = 0
    for _ in range(FLIPS):
        at, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
        data = bytearray(whole)
        data[at] ^= bit
        path.write_bytes(data)
        found = check_file(str(root), file)
        if found.damage:
            named += 1
            assert found.damage[0].path == path
        else:
            assert rows_of(bytes(data)).equals(rows), (at, bit)
    assert named > FLIPS // 2


def test_a_file_is_held_against_its_table(root: Path, made: list[DataFile]) -> None:
    """Its length, its rows and what they reach to; and that it is there."""

    def detail(file: DataFile) -> str:
        found = check_file(str(root), file)
        assert not found.is_unsummed
        (damage,) = found.damage
        return damage.detail

    file = made[0]
    count = {**file.stats, "numRecords": 299}
    least = {**file.stats, "minValues": {**file.stats["minValues"], "offset": 50}}
    other = "expected 1 bytes, got "
    assert detail(replace(file, size_bytes=1)).startswith(other)
    assert detail(replace(file, stats=count)) == "expected 299 rows, got 300"
    assert "the table has 50 to 14950" in detail(replace(file, stats=least))
    (root / file.path).unlink()
    assert detail(file) == "the table names it, and it is not there"


def test_files_without_checksums_are_counted(root: Path, made: list[DataFile]) -> None:
    """As other engines write them; their types may be others."""
    path = root / made[0].path
    rows = rows_of(path.read_bytes())
    pq.write_table(rows, path, use_deprecated_int96_timestamps=True)
    found = check_file(str(root), replace(made[0], size_bytes=path.stat().st_size))
    assert (found.record_count, found.damage, found.is_unsummed) == (300, (), True)
    put = put_together(str(root), made)
    assert check_file(str(root), put).damage == ()
    assert not check_file(str(root), put).is_unsummed
    assert put.message_count == 600
    assert rows_of((root / put.path).read_bytes()).schema.names == FILE_SCHEMA.names


def test_damage_gets_no_checksum_of_its_own(
    root: Path, made: list[DataFile], caplog: pytest.LogCaptureFixture
) -> None:
    """Files with a damaged one are left as they are, with a warning."""
    store = ArchiveStore(str(root), may_be_new=True)
    store.claim()
    store.commit(0, made, positions={})
    path = root / made[1].path
    data = bytearray(path.read_bytes())
    data[data.index(b"PAR1") + 60] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match=made[1].path):
        put_together(str(root), made)
    with caplog.at_level(logging.WARNING):
        assert store.compact(FILE_BYTES) == (0, 0)
    assert "small files stay as they are" in caplog.text
    assert {file.path for file in store.files()} == {file.path for file in made}


def test_bytes_are_on_the_disk_before_a_file_is_handed_on(
    tmp_path: Path,
) -> None:
    """A commit never names what a power cut may take."""
    synced: set[str] = set()

    class Noting(LinuxCalls):
        @staticmethod
        def fdatasync(fd: int, /) -> None:
            synced.add(str(Path(f"/proc/self/fd/{fd}").readlink()))

    root, disk = tmp_path / STAGING, FileSystem(Noting())
    (file,) = write(tmp_path, [row("logs", 2, 0)], disk=disk)
    other = put_together(str(root), [file, file], disk=disk)
    assert synced == {str(root / each.path) for each in (file, other)}
