"""Offsets that the user names in a commit.

commit(message)              up to this message and with it
commit([message, ...])       up to the last one of each partition
commit(batch)                the offsets of the batch
commit({partition: offset})  this offset, which may be before the committed one
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

from metaq.client.names import as_partition
from metaq.client.offsets.committer import CommitOrder
from metaq.client.offsets.offset_reset import NO_MESSAGE
from metaq.client.validation import check_offset
from metaq.model import GroupOffset, Message, MessageId, Offset, TopicPartition


@runtime_checkable
class HasOffsets(Protocol):
    """A batch of messages."""

    @property
    def offsets(self) -> Mapping[TopicPartition, Offset]:
        """The next offset of each of its partitions."""


Committable: TypeAlias = (
    Message | HasOffsets | Iterable[Message] | Mapping[TopicPartition | str, Offset]
)
"""Argument of a commit; see the top of this file."""


def read_committable(what: Committable, topics: Collection[str]) -> CommitOrder:
    """Return a commit of the offsets that its argument names.

    Args:
        what: argument of the commit.
        topics: the subscribed topics, for partitions in texts.

    Raises:
        TypeError: it is something else.
        ConfigError: an offset, or the name of a partition, that is none.
    """
    if isinstance(what, Mapping):
        for offset in what.values():
            check_offset("offset", offset)
        named = {as_partition(one, topics): offset for one, offset in what.items()}
        return CommitOrder(_with_ids(named, {}), may_go_back=True)
    # A message is a tuple, too, and a batch is a sequence.
    messages = [what] if isinstance(what, Message) else what
    ids: dict[TopicPartition, MessageId] = {}
    ends: dict[TopicPartition, Offset] = {}
    if not isinstance(messages, Iterable):
        raise _wrong(what)
    for one in messages:
        if not isinstance(one, Message):
            raise _wrong(one)
        if one.next_offset >= ends.get(one.partition, 0):
            ends[one.partition], ids[one.partition] = one.next_offset, one.id
    if isinstance(what, HasOffsets):
        ends |= what.offsets
    return CommitOrder(_with_ids(ends, ids))


def _with_ids(
    offsets: Mapping[TopicPartition, Offset], ids: Mapping[TopicPartition, MessageId]
) -> dict[TopicPartition, GroupOffset]:
    return {
        partition: GroupOffset(offset, ids.get(partition, NO_MESSAGE))
        for partition, offset in offsets.items()
    }


def _wrong(what: object) -> TypeError:
    return TypeError(
        "commit: expected a Message, messages, a batch, or a mapping of partitions to"
        f" offsets, got {type(what).__name__} {what!r:.80}"
    )
