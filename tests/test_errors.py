"""Errors travel between processes, with whatever they carry."""

import copy
import pickle

import pytest

import metaq.client
from metaq.client import (
    BufferFullError,
    ErrorReply,
    HandlerFailedError,
    HeuristicError,
    PartitionsAwayError,
    PartlySentError,
    SendResult,
)
from metaq.client.errors import XaError
from metaq.errors import (
    CorruptRecordError,
    DiskError,
    MetaqError,
    NoBrokerError,
    OffsetOutOfRangeError,
)
from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition

PARTITION = TopicPartition("t", BrokerId(0), 1)
MESSAGE = Message(
    "t", b"x", None, MessageId(5), PARTITION, Offset(0), Offset(21), None, ()
)
STORED = SendResult(MessageId(5), PARTITION, Offset(0))
ERRORS = [
    NoBrokerError("no broker serves it"),
    DiskError("write", "/data/t-1", "EIO"),
    CorruptRecordError("damaged", partition=PARTITION, offset=Offset(3), detail="rot"),
    OffsetOutOfRangeError(Offset(9), log_start=Offset(0), high_watermark=Offset(3)),
    HandlerFailedError("given up", failed=MESSAGE, attempts=6),
    BufferFullError("full", size_bytes=20, message_count=1),
    PartlySentError("1 of 2 failed", [STORED, NoBrokerError("gone")]),
    PartitionsAwayError("away", partitions=[PARTITION]),
    ErrorReply("no reply", text="ValueError: x"),
    XaError("refused", code=-8, text="known"),
    HeuristicError("ended", code=7, text="committed"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_travels_between_processes(error: MetaqError) -> None:
    """One that did not would end the pool of processes that it is raised in."""
    for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(found) is type(error)
        assert str(found) == str(error)
        assert repr(vars(found)) == repr(vars(error))


def test_every_public_error_that_carries_more_than_a_text_is_among_them() -> None:
    """Another one belongs in the table above."""
    tested = {kind for error in ERRORS for kind in type(error).__mro__}
    public = (getattr(metaq.client, name) for name in metaq.client.__all__)
    carriers = {
        one
        for one in public
        if isinstance(one, type)
        and issubclass(one, MetaqError)
        and "__init__" in vars(one)
    }
    assert carriers <= tested
