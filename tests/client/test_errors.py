"""The client's errors: their fields, and which are retriable or in doubt."""

import inspect

from metaq.client import errors
from metaq.errors import MetaqError, RequestTimeoutError, TransactionError
from metaq.model import BrokerId, Message, MessageId, Offset, TopicPartition

PARTITION = TopicPartition("t", BrokerId(0), 1)
MESSAGE = Message(
    "t", b"x", None, MessageId(5), PARTITION, Offset(0), Offset(21), None, ()
)
ALL: list[type[MetaqError]] = [
    one
    for one in vars(errors).values()
    if inspect.isclass(one)
    and issubclass(one, MetaqError)
    and one.__module__ == errors.__name__
]


def test_few_calls_may_be_repeated_unchanged() -> None:
    """Room and topics appear, owners let go, brokers come back; the rest is decided."""
    assert {one for one in ALL if one.retriable} == {
        errors.BufferFullError,
        errors.NoTopicError,
        errors.NotSettledError,
        errors.PartitionsAwayError,
    }


def test_an_outcome_that_is_unknown_is_no_invitation_to_repeat() -> None:
    """Its base may be repeated: what is asked again then is a question."""
    assert RequestTimeoutError.retriable
    for one in (errors.OutcomeUnknownError, errors.GivenUpError):
        assert issubclass(one, RequestTimeoutError)
        assert not one.retriable


def test_a_decision_in_doubt_is_found_by_both_of_its_names() -> None:
    """Programs that send, and programs that decide, each look for their own."""
    assert issubclass(errors.TransactionInDoubtError, errors.OutcomeUnknownError)
    assert issubclass(errors.TransactionInDoubtError, TransactionError)


def test_what_was_rolled_back_is_one_class_for_both_kinds_of_transaction() -> None:
    """An XA transaction says the broker's code besides."""
    found = errors.XaRolledBackError("rolled back", code=104, text="time-out")
    assert isinstance(found, errors.TransactionRolledBackError)
    assert (found.code, found.text) == (104, "time-out")


def test_errors_carry_what_a_program_decides_by() -> None:
    """As fields, so that nobody reads them out of the text."""
    failed = errors.HandlerFailedError("given up", failed=MESSAGE, attempts=6)
    assert (failed.message, failed.attempts) == (MESSAGE, 6)
    full = errors.BufferFullError("full", size_bytes=20, message_count=2)
    assert (full.size_bytes, full.message_count) == (20, 2)
    partly = errors.PartlySentError("1 of 2 failed", [1, failed])
    assert partly.outcomes == [1, failed]
    away = errors.PartitionsAwayError("away", partitions=[PARTITION])
    assert away.partitions == (PARTITION,)
