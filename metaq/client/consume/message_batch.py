"""A batch of messages for users: a list, with the offsets of its partitions.

All messages of a batch are handled together: by `commit`, or when the next batch is
requested.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

from metaq.client.consume.current_batch import Filling
from metaq.client.validation import check_seconds, check_whole
from metaq.model import Message, Offset, TopicPartition

C_co = TypeVar("C_co", covariant=True)


def check_bounds(max_count: object, max_bytes: object, max_wait_s: object) -> None:
    """Check the bounds of batches.

    Raises:
        ConfigError: a number is out of range.
    """
    check_whole("max_count", max_count, 1)
    if max_bytes is not None:
        check_whole("max_bytes", max_bytes, 1)
    check_seconds("max_wait_s", max_wait_s)


class ListedMessages(Sequence[Message], Generic[C_co]):
    """Messages of one or more partitions, in order for each partition. Immutable."""

    def __init__(self, consumer: C_co, filling: Filling) -> None:
        """Create it from a complete list that is not empty."""
        self.consumer = consumer
        self.offsets: Mapping[TopicPartition, Offset] = filling.offsets
        """Next offset of each partition, which a commit of the batch stores."""
        self.begins: Mapping[TopicPartition, Offset] = filling.begins
        """Offset of the first message of each partition."""
        self._messages = filling.messages
        self._filling = filling

    @property
    def is_last(self) -> bool:
        """Whether no messages were requested after this batch."""
        return self._filling.is_last

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | Sequence[Message]:
        """Return one message, or for a slice a list."""
        return self._messages[at]

    def __iter__(self) -> Iterator[Message]:
        """Iterate over the messages, as fast as over a list."""
        return iter(self._messages)

    def __repr__(self) -> str:
        ranges = (
            f"{each} {self.begins[each]} to {end}" for each, end in self.offsets.items()
        )
        return f"<{type(self).__name__} of {len(self)} messages: {', '.join(ranges)}>"
