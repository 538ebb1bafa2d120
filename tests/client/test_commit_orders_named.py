"""Explicit offsets of a commit: messages, batches, mappings, and nothing else."""

from typing import Any

import pytest

from metaq.client.offsets.commit_orders import read_committable
from metaq.client.offsets.committer import CommitOrder
from metaq.client.offsets.offset_reset import NO_MESSAGE
from metaq.errors import ConfigError
from metaq.model import (
    BrokerId,
    GroupOffset,
    Message,
    MessageId,
    Offset,
    TopicPartition,
)

FIRST, SECOND = (TopicPartition("test", BrokerId(0), number) for number in range(2))
TOPICS = ["test"]


def message(partition: TopicPartition, start: int, number: int) -> Message:
    """Return a message of 10 bytes with its header."""
    return Message(
        partition.topic,
        b"x",
        None,
        MessageId(number),
        partition,
        Offset(start),
        Offset(start + 10),
        None,
        (),
    )


class Batch(list[Message]):
    """Messages with the offsets that a commit of them stores."""

    offsets: dict[TopicPartition, Offset]


def at(offset: int, number: int = NO_MESSAGE) -> GroupOffset:
    return GroupOffset(Offset(offset), MessageId(number))


def test_a_message_is_committed_with_its_id() -> None:
    """The offset is the next one: the message counts as handled."""
    found = read_committable(message(FIRST, 30, 7), TOPICS)
    assert found == CommitOrder({FIRST: at(40, 7)}, may_go_back=False)


def test_of_each_partition_the_last_message_counts() -> None:
    """In any order; none is a commit of nothing."""
    given = [message(FIRST, 20, 3), message(FIRST, 0, 1), message(SECOND, 10, 9)]
    found = read_committable(iter(given), TOPICS)
    assert found.named == {FIRST: at(30, 3), SECOND: at(20, 9)}
    assert read_committable([], TOPICS).named == {}


def test_a_batch_says_itself_what_a_commit_stores() -> None:
    """It may end after its last message, whose id is stored."""
    batch = Batch([message(FIRST, 0, 1)])
    batch.offsets = {FIRST: Offset(50), SECOND: Offset(20)}
    found = read_committable(batch, TOPICS)
    assert found.named == {FIRST: at(50, 1), SECOND: at(20)}
    assert not found.may_go_back


def test_a_mapping_may_go_back() -> None:
    """Its user says where to begin again; there is no message of that place."""
    found = read_committable({"0-0": Offset(5), SECOND: Offset(0)}, TOPICS)
    assert found == CommitOrder({FIRST: at(5), SECOND: at(0)}, may_go_back=True)


@pytest.mark.parametrize("wrong", [{"0-0": -1}, {"x": 0}])
def test_offsets_and_partitions_that_are_none_are_refused(wrong: Any) -> None:
    """Before anything is stored."""
    with pytest.raises(ConfigError):
        read_committable(wrong, TOPICS)


@pytest.mark.parametrize("wrong", [7, None, "0-0", [b"x"]])
def test_other_things_are_refused_by_name(wrong: Any) -> None:
    """A text is no list of messages either."""
    with pytest.raises(TypeError, match=r"commit: expected a Message, .* got "):
        read_committable(wrong, TOPICS)
