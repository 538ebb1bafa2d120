"""Rows out of segment files: complete, in order, for any files and splits."""

import tracemalloc
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import CorruptRecordError
from metaq.model import BrokerId, Millis, Offset, SizeBytes, TopicPartition
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.spark.errors import OptionError
from metaq.spark.record_bounds import PushedFilters
from metaq.spark.segments.segment_options import MESSAGE_BYTES_MAX
from metaq.spark.segments.segment_plan import plan_query
from metaq.spark.segments.segment_reader import PIECE_BYTES
from metaq.storage.segment import META_SUFFIX, segment_file_name
from metaq.storage.span_index import SPANS_SUFFIX, read_index
from tests.spark.segment_dirs import (
    ARCHIVE,
    BROKER,
    FS,
    LOG,
    OTHER,
    SKIP,
    TIME_MS,
    ZIP,
    archive,
    flip,
    id_at,
    options,
    payloads,
    rows,
    segments_of,
    values,
    write_java_log,
    write_log,
)

PARTITION = TopicPartition("test", BROKER, 0)
STRIDE = 60
"""Record size of `payloads` as they come."""


@pytest.fixture
def directory(data_dir: Path) -> Path:
    """Return a partition directory with 100 records in six segments."""
    return write_log(data_dir, payloads(100))


def test_a_row_says_everything_about_its_record(directory: Path) -> None:
    """Topic and partition from the directory, broker and time from the id."""
    first, second, *_rest, last = rows(options(directory))
    assert first["topic"] == "test"
    assert (first["broker_id"], first["partition"]) == (BROKER, 0)
    assert (first["offset"], second["offset"]) == (0, STRIDE)
    assert last["offset"] == 99 * STRIDE
    assert first["message_id"] == id_at(TIME_MS)
    time = first["timestamp"]
    assert time.timestamp() * 1000 == TIME_MS  # type: ignore[attr-defined]
    assert (first["attribute"], first["flag"]) == (None, 0)
    assert first["value"] == payloads(1)[0]


@pytest.mark.parametrize("policies", [(), (ARCHIVE, ZIP), (ZIP,) * 9, (ARCHIVE,) * 9])
@pytest.mark.parametrize("size", [1, 100, 700, 10**9])
@pytest.mark.parametrize("is_indexed", [True, False])
def test_every_split_size_gives_the_same_rows(
    directory: Path, policies: tuple[object, ...], size: int, is_indexed: bool
) -> None:
    """Splits cover, do not overlap and fall on records, with an index or without."""
    archive(directory, *policies)  # type: ignore[arg-type]
    if not is_indexed:
        for index in directory.glob(f"*{SPANS_SUFFIX}"):
            index.unlink()
    found = rows(options(directory, bytes_per_partition=SizeBytes(size)))
    assert [row["offset"] for row in found] == [STRIDE * n for n in range(100)]
    assert [row["value"] for row in found] == payloads(100)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"topics": ("test", "tset")}, "topic 'tset'; .* test, wild-x"),
        ({"assigned": frozenset({TopicPartition("test", BROKER, 9)})}, "are: none"),
        ({"starts": {TopicPartition("test", BrokerId(0), 0): 60}}, "are: 7-0"),
        ({"ends": {TopicPartition("wild-x", BrokerId(0), 3): 60}}, "by brokerId"),
    ],
)
def test_what_is_named_and_not_there_is_an_error(
    directory: Path, named: dict[str, object], sentence: str
) -> None:
    """A mistyped topic is never an empty result, nor an offset one that is ignored."""
    write_java_log(directory.parent, [payloads(3)], OTHER)
    with pytest.raises(OptionError, match=sentence):
        plan_query(FS, options(directory.parent, **named), PushedFilters())


def test_a_file_without_messages_may_be_of_any_broker(directory: Path) -> None:
    """Its broker is not known before there is one."""
    write_java_log(directory.parent, [[]], OTHER)
    named = TopicPartition("wild-x", BROKER, 3)
    asked = options(directory.parent, assigned=frozenset({PARTITION, named}))
    assert values(asked) == payloads(100)
    asked = options(directory.parent, starts={named: Offset(0)}, broker_id=BROKER)
    assert values(asked) == payloads(100)


def test_files_without_an_index_stay_whole_beyond_a_bound(data_dir: Path) -> None:
    """The driver does not read an archive of terabytes to cut it."""
    write_java_log(data_dir, [payloads(20), payloads(20), payloads(20)])
    asked = options(data_dir, bytes_per_partition=SizeBytes(5 * STRIDE))
    plan = plan_query(FS, asked, PushedFilters(), walk_bytes_max=2 * 20 * STRIDE)
    sizes = [b.size_bytes // STRIDE for task in plan.tasks for b in task]
    assert sizes == [5] * 8 + [20]
    assert values(asked) == payloads(20) * 3


def test_large_files_are_split_and_small_ones_put_together(directory: Path) -> None:
    """The number of tasks follows the bytes, not the files."""

    def tasks(size: int) -> int:
        asked = options(directory, bytes_per_partition=SizeBytes(size))
        return len(plan_query(FS, asked, PushedFilters()).tasks)

    assert len(segments_of(directory)) == 6
    assert tasks(10**9) == 1
    assert 3 <= tasks(2000) <= 6
    assert tasks(300) == 20


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=40),
    size=st.integers(1, 2000),
    is_indexed=st.booleans(),
)
def test_any_records_are_split_on_their_boundaries(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    size: int,
    is_indexed: bool,
) -> None:
    """Records of any size come once each, in order, for any split size."""
    data = tmp_path_factory.mktemp("data")
    written = [b"v" * size for size in sizes]
    if is_indexed:
        write_log(data, written, group=3)
    else:
        write_java_log(data, [written[:20], written[20:]])
    assert values(options(data, bytes_per_partition=SizeBytes(size))) == written


def test_the_directory_of_a_java_broker_is_read(data_dir: Path) -> None:
    """Without an index all records come; their ids have neither broker nor time."""
    write_java_log(data_dir, [payloads(10), payloads(5)])
    found = rows(options(data_dir))
    assert [row["value"] for row in found] == payloads(10) + payloads(5)
    assert {(row["broker_id"], row["timestamp"]) for row in found} == {(-1, None)}
    found = rows(options(data_dir, broker_id=BrokerId(4)))
    assert {row["broker_id"] for row in found} == {4}


# -- the active segment ---------------------------------------------------------------


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("tail", [b"\x00" * 64, b"\x00\x00\x00\x50torn", b"\x01"])
def test_a_torn_tail_is_not_damage(
    directory: Path, tail: bytes, is_indexed: bool
) -> None:
    """A tail left by a crash, or being written, ends the read quietly."""
    active = segments_of(directory)[-1]
    if not is_indexed:
        active.path.with_suffix(SPANS_SUFFIX).unlink()
    with active.path.open("ab") as file:
        file.write(tail)
    assert values(options(directory)) == payloads(100)


def test_a_segment_that_grows_is_read_up_to_where_it_was(directory: Path) -> None:
    """Records that come after the plan are not for this query."""
    asked = options(directory)
    plan = plan_query(FS, asked, PushedFilters())
    write_log(directory.parent, payloads(7), first_id=id_at(TIME_MS + 5000))
    found = [split.end for task in plan.tasks for split in task]
    assert max(found) == 100 * STRIDE
    assert len(rows(asked)) == 107


def test_a_torn_record_in_a_sealed_segment_is_damage(directory: Path) -> None:
    """Only the newest segment may end within a record."""
    sealed = segments_of(directory)[0]
    with sealed.path.open("r+b") as file:
        file.truncate(sealed.size_bytes - 1)
    with pytest.raises(CorruptRecordError, match=str(sealed.path)):
        rows(options(directory))


# -- damage ---------------------------------------------------------------------------


def test_damage_fails_the_query_and_is_named(directory: Path) -> None:
    """The error says file, offset and where good records begin again."""
    path = segments_of(directory)[1].path
    base = segments_of(directory)[1].base_offset
    flip(path, 3 * STRIDE + HEADER_BYTES)
    with pytest.raises(CorruptRecordError) as caught:
        rows(options(directory))
    assert f"file={path}" in str(caught.value)
    assert f"offset={base + 3 * STRIDE}" in str(caught.value)
    assert caught.value.next_good_offset == base + 4 * STRIDE


@pytest.mark.parametrize("policy", [None, ARCHIVE])
def test_damage_is_skipped_and_reported(
    directory: Path, policy: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Exactly the damaged record is missing, and a warning names it."""
    if policy is not None:
        archive(directory, policy)  # type: ignore[arg-type]
    path = min(p for p in directory.iterdir() if META_SUFFIX in p.name)
    flip(path, 3 * STRIDE + HEADER_BYTES)
    wanted = payloads(100)
    del wanted[3]
    assert values(options(directory, on_corrupt=SKIP)) == wanted
    (warning,) = caplog.messages
    assert f"file={path} offset={3 * STRIDE} next_good_offset={4 * STRIDE}" in warning


def test_a_damaged_zip_gives_what_lies_before_the_damage(
    data_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that cannot be unpacked are one damaged range up to the segment's end."""
    incompressible = [bytes((n * k) % 251 for k in range(997)) for n in range(300)]
    directory = write_log(data_dir, incompressible, segment_bytes=200_000)
    (zipped, *_rest) = archive(directory, ZIP)
    segment_records = 200
    packed = bytearray(zipped.read_bytes())
    middle = len(packed) // 2
    packed[middle : middle + 3000] = b"\xff" * 3000
    zipped.write_bytes(packed)
    with pytest.raises(CorruptRecordError) as caught:
        rows(options(directory))
    assert f"file={zipped} offset=" in str(caught.value)
    found = values(options(directory, on_corrupt=SKIP))
    assert found == incompressible[: len(found) - 100] + incompressible[200:]
    assert 0 < len(found) - 100 < segment_records
    assert f"file={zipped}" in caplog.messages[-1]


def test_a_zip_is_read_in_pieces(data_dir: Path) -> None:
    """Records that cross the pieces come whole."""
    sent = payloads(100, size=PIECE_BYTES // 11)
    directory = write_log(data_dir, sent, segment_bytes=3 * PIECE_BYTES)
    archive(directory, ZIP, ZIP, ARCHIVE)
    assert values(options(directory)) == sent


@pytest.mark.slow
def test_a_message_above_the_limit_is_refused_before_memory_is_taken(
    directory: Path,
) -> None:
    """By its header: a zip of a few kilobytes may claim a gigabyte."""
    first, *_rest = archive(directory, ZIP)
    claimed = MESSAGE_BYTES_MAX + 1
    with ZipFile(first) as zipped:
        (name,) = zipped.namelist()
        records = bytearray(zipped.read(name))
    records[:4] = claimed.to_bytes(4, "big")
    with ZipFile(first, "w", ZIP_DEFLATED) as zipped:
        zipped.writestr(name, bytes(records).ljust(claimed + STRIDE, b"\0"))
    sentence = f"length {claimed}, the limit is {MESSAGE_BYTES_MAX}; if it is a message"
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError, match=sentence):
            rows(options(first))
        _now, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MESSAGE_BYTES_MAX
    small = options(directory, message_bytes_max=SizeBytes(39), on_corrupt=SKIP)
    assert values(small) == []


def test_an_archive_that_is_none_fails_or_is_left_out(directory: Path) -> None:
    """A file that cannot be read at all is damage like any other."""
    zipped = archive(directory, ZIP)[0]
    zipped.write_bytes(b"gone")
    plan = plan_query(FS, options(directory, on_corrupt=SKIP), PushedFilters())
    (flaw,) = plan.unreadable
    assert (flaw.path, flaw.offset) == (zipped, 0)
    assert values(options(directory, on_corrupt=SKIP)) == payloads(100)[20:]


# -- what is wanted -------------------------------------------------------------------


def test_offsets_bound_a_read(directory: Path) -> None:
    """The start is inclusive, the end is not; neither need be a boundary."""
    asked = options(
        directory,
        starts={PARTITION: Offset(10 * STRIDE - 1)},
        ends={PARTITION: Offset(20 * STRIDE + 1)},
    )
    assert values(asked) == payloads(100)[10:21]


def test_times_bound_a_read(data_dir: Path) -> None:
    """The start is inclusive, the end is not."""
    write_log(data_dir, payloads(15))
    write_log(data_dir, payloads(15), first_id=id_at(TIME_MS + 10))
    write_log(data_dir, payloads(15), first_id=id_at(TIME_MS + 20))
    asked = options(
        data_dir, start_ms=Millis(TIME_MS + 10), end_ms=Millis(TIME_MS + 20)
    )
    found = rows(asked)
    assert {row["message_id"] for row in found} == {
        id_at(TIME_MS + 10) + n for n in range(15)
    }


def test_messages_of_transactions_are_older_than_their_neighbours(
    data_dir: Path,
) -> None:
    """Their ids are those of their puts, wherever in a file the commit has them."""
    directory, base = data_dir / str(LOG), 0
    directory.mkdir()
    times = ([1000, 1010], [500, 1020], [1030, 900])
    for pair in times:
        data = b"".join(
            encode_record(b"%d" % time, id=id_at(TIME_MS + time)) for time in pair
        )
        (directory / segment_file_name(base)).write_bytes(data)
        base += len(data)
    late = options(data_dir, start_ms=Millis(TIME_MS + 950))
    assert values(late) == [b"1000", b"1010", b"1020", b"1030"]
    early = options(data_dir, end_ms=Millis(TIME_MS + 950))
    assert values(early) == [b"500", b"900"]


def test_a_file_whose_last_append_was_too_early_is_not_read(directory: Path) -> None:
    """Its index decides, where it covers the file; damage in it is never seen."""
    segments = segments_of(directory)
    flip(segments[0].path, 30)
    newest = read_index(FS, segments[0].path, segments[0].base_offset).spans[-1]
    late = options(directory, start_ms=Millis(newest.append_time_ms + 1))
    assert rows(late, PushedFilters()) == []
    with pytest.raises(CorruptRecordError):
        rows(options(directory, start_ms=Millis(newest.append_time_ms)))


def test_records_without_a_time_are_kept(data_dir: Path) -> None:
    """The age of a Java broker's records is unknown."""
    write_java_log(data_dir, [payloads(4)])
    assert len(rows(options(data_dir, start_ms=Millis(TIME_MS)))) == 4


def test_topics_and_partitions_are_chosen(data_dir: Path) -> None:
    """Files of other partitions are not opened."""
    write_log(data_dir, payloads(3))
    write_log(data_dir, payloads(4), OTHER)
    other = TopicPartition(OTHER.topic, BROKER, OTHER.partition)
    for asked in (
        {"topics": ("wild-x",)},
        {"assigned": frozenset({other})},
    ):
        assert {r["topic"] for r in rows(options(data_dir, **asked))} == {"wild-x"}
    only = PushedFilters(partitions=frozenset({3}), broker_ids=frozenset({7}))
    assert {r["partition"] for r in rows(options(data_dir), only)} == {3}
    none = PushedFilters(topics=frozenset())
    assert rows(options(data_dir), none) == []
