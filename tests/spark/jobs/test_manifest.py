"""Manifests, plans of compaction, and what failures say; without Spark."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.model import BrokerId, Offset, TopicPartition
from metaq.spark.errors import ArchiveError
from metaq.spark.jobs.compact import plan_compaction
from metaq.spark.jobs.failures import sentence_of
from metaq.spark.jobs.manifest import (
    ArchivedFile,
    ArchivedLog,
    Manifest,
    manifest_name,
    sum_logs,
)

LOGS = st.builds(
    ArchivedLog,
    partition=st.builds(
        TopicPartition,
        st.text(max_size=5),
        st.integers(0, 9).map(BrokerId),
        st.integers(0, 9),
    ),
    message_count=st.integers(1, 2**40),
    first=st.integers(0, 2**62).map(Offset),
    last=st.integers(0, 2**62).map(Offset),
)
FILES = st.builds(
    ArchivedFile,
    path=st.builds(
        "topic={}/date={}/{}.parquet".format,
        st.sampled_from("ab"),
        st.sampled_from("xy"),
        st.uuids(),
    ),
    size_bytes=st.integers(0, 300),
    message_count=st.integers(0, 2**40),
    logs=st.lists(LOGS, max_size=3).map(tuple),
)
SORTED = st.lists(FILES, unique_by=lambda file: file.path).map(
    lambda files: tuple(sorted(files, key=lambda file: file.path))
)


@pytest.mark.slow
@given(files=SORTED, number=st.integers(0, 10**12), batch=st.integers(-1, 10**12))
def test_a_manifest_comes_back(
    files: tuple[ArchivedFile, ...], number: int, batch: int
) -> None:
    """A manifest reads back as written."""
    one = Manifest(number=number, query_id="q", batch=batch, files=files)
    assert Manifest.from_json(one.to_json(), name="m") == one


def test_an_old_manifest_opens() -> None:
    """It says nothing of partitions."""
    text = '{"version":1,"number":3,"query":"q","batch":2,"files":[["a/b",10,4]]}'
    found = Manifest.from_json(text, name="m")
    assert found.files == (ArchivedFile("a/b", 10, 4),)
    assert found.logs == ()


def test_what_files_hold_of_a_partition_is_summed() -> None:
    """Counts are added, and the ends are the outermost ones."""
    one, other = (TopicPartition("t", BrokerId(0), number) for number in (0, 1))
    logs = [
        ArchivedLog(other, 1, Offset(5), Offset(5)),
        ArchivedLog(one, 2, Offset(50), Offset(90)),
        ArchivedLog(one, 3, Offset(0), Offset(40)),
    ]
    summed = (ArchivedLog(one, 5, Offset(0), Offset(90)), logs[0])
    assert sum_logs(logs) == summed
    files = tuple(ArchivedFile(f"f{n}", 1, 1, (log,)) for n, log in enumerate(logs))
    assert Manifest(files=files).logs == summed


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "m is no manifest"),
        ("[]", "m is no manifest"),
        ("{}", "m is no manifest"),
        ('{"version":1}', "m is no manifest"),
        ('{"version":2}', "version 2, expected 1"),
        (
            '{"version":1,"number":1,"query":"q","batch":0,"files":[["a"]]}',
            "no manifest",
        ),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, what: str) -> None:
    """Never taken for an empty archive."""
    with pytest.raises(ArchiveError, match=what):
        Manifest.from_json(text, name="m")


@given(one=st.integers(0, 10**19), other=st.integers(0, 10**19))
def test_names_sort_as_numbers_do(one: int, other: int) -> None:
    """The last name is the truth."""
    assert (manifest_name(one) < manifest_name(other)) == (one < other)


@given(files=SORTED, count_min=st.integers(2, 4))
def test_small_files_of_one_day_become_one(
    files: tuple[ArchivedFile, ...], count_min: int
) -> None:
    """No file twice, none large, none alone, one directory, not longer than asked."""
    plan = plan_compaction(files, file_bytes=200, count_min=count_min)
    chosen = [file for group in plan for file in group]
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(files)
    for group in plan:
        assert len(group) > 1
        assert len({file.directory for file in group}) == 1
        assert sum(file.size_bytes for file in group) <= 200
        assert all(file.size_bytes < 100 for file in group)
    for directory in {file.directory for file in files}:
        small = [f for f in files if f.directory == directory and f.size_bytes < 100]
        left = [file for file in small if file not in chosen]
        # Two that are left, and fit into one, would have been put together.
        if len(small) >= count_min and len(small) == 2:
            assert not left


TRACE = """Traceback (most recent call last):
  File x
metaq.spark.errors.DataLossError: logs 0-0: lost [0, 9)

	at java"""
TWO = """[STREAM_FAILED] Job aborted: pyspark.errors.X: a
metaq.errors.A: first
metaq.errors.B: last
"""
NOT_OURS = "\n[PATH_NOT_FOUND] Path does not exist: x\nJVM stacktrace:"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TRACE, "logs 0-0: lost [0, 9)"),
        (TWO, "last"),
        (NOT_OURS, "[PATH_NOT_FOUND] Path does not exist: x"),
        ("", "ValueError"),
        ("x" * 5000, "x" * 2000),
    ],
)
def test_a_failure_is_told_in_one_sentence(text: str, sentence: str) -> None:
    """Our own sentence if there is one: it names partition and offsets."""
    assert sentence_of(ValueError(text)) == sentence
