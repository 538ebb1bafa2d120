"""Names of partition directories: written, read back, and refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import StorageError
from metaq.model import LogId
from metaq.storage.opening import log_directory_name, parse_log_directory_name
from metaq.storage.producer_file import PRODUCERS_NAME
from tests.rigs.fs import FaultyFileSystem
from tests.storage.offline import offline
from tests.storage.support import DATA, filled, log_of, opened


@pytest.mark.parametrize(
    ("name", "log_id"),
    [
        ("test-0", LogId("test", 0)),
        ("a-b-12", LogId("a-b", 12)),
        ("test--1", LogId("test-", 1)),
        ("主题-3", LogId("主题", 3)),
        ("-1", None),
        ("test", None),
        ("test-", None),
        ("test-x", None),
        ("test-01", None),
        ("test-٣", None),
        ("test-²", None),
    ],
)
def test_a_directory_name_is_a_topic_a_dash_and_a_number(
    name: str, log_id: LogId | None
) -> None:
    """Only the spelling that we write is a partition: the last dash divides."""
    assert parse_log_directory_name(name) == log_id


@given(st.text("ab-/0\0é٣ .", min_size=1, max_size=8), st.integers(0, 2**31))
def test_every_name_that_is_written_is_read_again(topic: str, partition: int) -> None:
    """Whatever the topic is: refused, or back from its directory name."""
    log_id = LogId(topic, partition)
    try:
        name = log_directory_name(log_id)
    except StorageError:
        return
    assert parse_log_directory_name(name) == log_id
    assert "/" not in name


@pytest.mark.parametrize(
    "topic",
    ["", "a/b", "../../etc/passwd", "nul\0", "x" * 254, "é" * 127, "\ud800"],
)
def test_a_topic_that_cannot_be_a_directory_harms_nobody(
    fs: FaultyFileSystem, topic: str
) -> None:
    """The put is refused before the disk sees the name; the directory stays online."""
    bench = opened(fs)
    calls = fs.calls
    with pytest.raises(StorageError, match="topic"):
        log_of(bench, LogId(topic, 0))
    bench.run()
    assert fs.calls == calls
    assert offline(bench.manager) == {}
    bench.close()


def test_the_longest_name_is_taken(fs: FaultyFileSystem) -> None:
    """255 bytes are a name."""
    bench = opened(fs)
    log_of(bench, LogId("x" * 253, 0))
    bench.close()


def test_producers_that_cannot_be_read_are_an_error_of_their_partition(
    fs: FaultyFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    """Repeated batches of theirs would be stored twice; of others nothing is said."""
    bench, _ = filled(fs)
    bench.close()
    with fs.open_append(DATA / "test-0" / PRODUCERS_NAME, create=True) as file:
        file.write(b"rubbish")
    opened(fs).close()
    (found,) = [r for r in caplog.records if "producers are forgotten" in r.message]
    assert found.levelname == "ERROR"
    assert "partition=test-0 file=/data/test-0/producers" in found.message
