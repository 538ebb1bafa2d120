"""Check of the data files of an archive, without a broker.

Every page is read and compared with its checksum. The footer of a file, which has no
checksum, is compared with the rows and with the table: columns, number of rows, and
minimum and maximum values of each row group, by which readers skip it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import NativeFile

from metaq.model import Offset
from metaq.pipeline.jobs.day_files import FILE_SCHEMA, MEASURED, DataFile, file_system
from metaq.spark.segments.checks import Damage

_I32_NEXT: Final = 0x15
"""Thrift byte of a 32-bit field whose number is one above that of the last field."""
_HEADER_BYTES: Final = 32
"""Maximum bytes of the first four fields of a page header."""
_MORE: Final = 0x80
_TIME: Final = FILE_SCHEMA.field("timestamp").type


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """Result of checking one data file."""

    record_count: int
    checked_bytes: int
    damage: tuple[Damage, ...]
    """All its damage as one element; () for none."""
    is_unsummed: bool = False
    """Whether its pages lack checksums, so that a changed row may go undetected."""


def check_file(root: str, file: DataFile) -> CheckedFile:
    """Read a whole data file, and compare it with its description in the table."""
    there = file_system(root)
    count, flaws, is_unsummed = 0, list[str](), False
    try:
        with there.open_input_file(file.path) as stream:
            size_bytes = stream.size()
            if size_bytes != file.size_bytes:
                flaws.append(f"expected {file.size_bytes} bytes, got {size_bytes}")
            found = pq.ParquetFile(stream, page_checksum_verification=True)
            flaws += _schema_flaws(found.schema_arrow)
            for number in [] if flaws else range(found.num_row_groups):
                rows = _Rows.of(found.iter_batches(row_groups=[number]))
                count += rows.count
                # After the rows: the library aborts the process here if a column cannot
                # be read.
                flaws += rows.flaws(found.metadata.row_group(number), file.stats)
            is_unsummed = not (flaws or has_checksums(stream, found.metadata))
    except FileNotFoundError:
        flaws.append("the table names it, and it is not there")
    except (OSError, ValueError, pa.ArrowException) as error:
        flaws.append(str(error))
    if not flaws and count != file.message_count:
        flaws.append(f"expected {file.message_count} rows, got {count}")
    path, first = Path(root, file.path), Offset(file.log.first)
    damage = [Damage(path, first, None, "; ".join(flaws))] if flaws else []
    return CheckedFile(count, file.size_bytes, tuple(damage), is_unsummed)


def _schema_flaws(schema: pa.Schema) -> list[str]:
    if schema.names != FILE_SCHEMA.names:
        return [f"expected the columns {FILE_SCHEMA.names}, got {schema.names}"]
    return [
        f"column {wanted.name}: expected {wanted.type}, got {got.type}"
        for wanted, got in zip(FILE_SCHEMA, schema, strict=True)
        if _shape(wanted.type) != _shape(got.type)
    ]


def _shape(kind: pa.DataType) -> str:
    """Return a type as text, without the writer's name for list elements."""
    if pa.types.is_list(kind):
        return f"list<{_shape(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{f.name}: {_shape(f.type)}' for f in kind)}>"
    # Nanoseconds are read from `INT96`, which other engines may write.
    return str(_TIME if kind == pa.timestamp("ns") else kind)


@dataclass(slots=True)
class _Rows:
    """Facts about the rows of one row group."""

    count: int
    bounds: dict[str, tuple[Any, Any]]

    @classmethod
    def of(cls, batches: Iterator[pa.RecordBatch]) -> "_Rows":
        rows = cls(0, {})
        for batch in batches:
            rows.count += batch.num_rows
            for name in MEASURED:
                found = pc.min_max(batch.column(name).cast(pa.int64()))
                low, high = found["min"].as_py(), found["max"].as_py()
                if low is not None:
                    before = rows.bounds.get(name, (low, high))
                    rows.bounds[name] = min(low, before[0]), max(high, before[1])
        return rows

    def flaws(
        self, group: pq.RowGroupMetaData, stats: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield what in the footer or the table contradicts the rows."""
        if group.num_rows != self.count:
            yield f"expected {group.num_rows} rows in a group, got {self.count}"
        columns = (group.column(number) for number in range(group.num_columns))
        for column in columns:
            name, said = column.path_in_schema, column.statistics
            low_high = self.bounds.get(name)
            if low_high is None:
                continue
            if said is not None and said.has_min_max:
                raw = (said.min_raw, said.max_raw)
                if isinstance(raw[0], int) and raw != low_high:
                    yield f"{name}: expected {raw[0]} to {raw[1]}, got {low_high}"
            low, high = (stats[side].get(name) for side in ("minValues", "maxValues"))
            if isinstance(low, int) and not low <= low_high[0] <= low_high[1] <= high:
                yield f"{name}: the table has {low} to {high}, the file {low_high}"


def has_checksums(stream: NativeFile, footer: pq.FileMetaData) -> bool:
    """Return whether the first page has a checksum; True for a file without pages.

    type  bytes unpacked  bytes packed  checksum, if there is one
    each a field of 32 bits: its byte, then 7 bits of the number in each byte
    """
    if not footer.num_row_groups:
        return True
    column = footer.row_group(0).column(0)
    starts = (column.dictionary_page_offset, column.data_page_offset)
    stream.seek(min(start for start in starts if start is not None))
    header, at = stream.read(_HEADER_BYTES), 0
    for _ in range(3):
        at += 1
        while header[at] & _MORE:
            at += 1
        at += 1
    return bool(header[at] == _I32_NEXT)
