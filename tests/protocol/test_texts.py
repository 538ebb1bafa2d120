"""Error texts word for word, against the replies recorded from the Java broker."""

import pytest

from metaq.errors import WireError
from metaq.protocol import texts
from metaq.protocol.commands import Result, Status
from tests.protocol.golden import reply_text

URI = "meta://127.0.0.1:8123"
RECORDED = [
    (
        "put",
        "put wrong checksum",
        texts.put_failed(URI, "test", 0, texts.CHECKSUM_FAILURE),
    ),
    (
        "put",
        "put unknown topic",
        texts.put_failed(URI, "nosuch", 0, texts.topic_not_accepted("nosuch")),
    ),
    (
        "put",
        "put partition 2 (out of range)",
        texts.put_failed(URI, "test", 2, texts.wrong_partition(2)),
    ),
    (
        "put",
        "put partition -2",
        texts.put_failed(URI, "test", -2, texts.wrong_partition(-2)),
    ),
    (
        "put",
        "put closed partition",
        texts.put_failed(URI, "test", 1, texts.closed_detail(0, 1)),
    ),
    ("put", "get closed partition", texts.get_closed(0, 1)),
    ("get", "get unknown topic", texts.no_such_log("nosuch", 0)),
    ("get", "get max size -1", texts.invalid_max_size(-1)),
    ("get", "get at max", texts.nothing_at(375)),
    ("put", "put plain", texts.put_reply(-5468921910551117824, 0, 0)),
    ("version_quit_errors", "sync to master", texts.NO_SYNC_PROCESSOR),
]


@pytest.mark.parametrize(("group", "case", "text"), RECORDED)
def test_texts_are_those_of_the_java_broker(group: str, case: str, text: str) -> None:
    """Verbatim, mistakes included."""
    assert text == reply_text(group, case)


def test_texts_that_no_recording_shows() -> None:
    """An I/O error has no detail; and our own cap."""
    assert texts.put_failed(URI, "t", -1) == (
        f"Put message to [broker '{URI}'] [partition 't--1'] failed."
    )
    assert texts.too_large("put", 11, 10) == (
        "put: payload of 11 bytes exceeds the limit of 10 bytes"
    )


def test_every_status_has_its_error_class() -> None:
    """The numbers of the enum and of the error tree are the same set, 200 apart."""
    assert {*WireError.by_status} == {status.value for status in Status} - {200}
    assert Result(Status.NOT_FOUND, b"", 1) == Result(404, b"", 1)
