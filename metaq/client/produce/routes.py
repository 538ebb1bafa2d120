"""Which lane a message goes to: topics, their partitions, and the selectors.

Read by any thread without a lock, written on the event loop: what is read together is
one immutable value, replaced as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from metaq.client.options import ProducerOptions
from metaq.client.partitioner import (
    KeyHash,
    OutgoingMessage,
    Selector,
    parse_partition,
)
from metaq.client.produce.partition_queue import Lane
from metaq.errors import LocalProtocolError, NoBrokerError
from metaq.model import TopicPartition


@dataclass(frozen=True, slots=True)
class _Topic:
    """A topic's partitions, as they are known now; sorted."""

    available: tuple[TopicPartition, ...]
    known: tuple[TopicPartition, ...]


class Routes:
    """The lanes of one producer, and the way to them."""

    def __init__(
        self, options: ProducerOptions, selector: Selector | None, first_turn: int
    ) -> None:
        """Start without topics.

        Args:
            options: of the lanes.
            selector: chooses partitions; None goes by the key of messages that have
                one, and round robin with the others.
            first_turn: where round robin begins, modulo the number of partitions.
        """
        self._options = options
        self._selector = selector
        self._by_key = KeyHash()
        self._topics: dict[str, _Topic] = {}
        self._by_partition: dict[TopicPartition, Lane] = {}
        self.is_default = selector is None
        """Messages without key and partition go to `lanes` in turn."""
        self.lanes: dict[str, tuple[Lane, ...]] = {}
        """Of each known topic: those that take messages, or all when none does."""
        self.turn = count(first_turn)
        """Whose turn it is, as in `RoundRobin`: shared by all topics."""

    def everything(self) -> list[Lane]:
        """Return all lanes that were ever made."""
        return list(self._by_partition.values())

    def lane(self, partition: TopicPartition) -> Lane:
        """Return a partition's lane, made if there is none."""
        lane = self._by_partition.get(partition)
        if lane is None:
            # Two threads may come here at once: the first lane is the lane.
            made = Lane(partition, self._options)
            lane = self._by_partition.setdefault(partition, made)
        return lane

    def next_lane(self, topic: str) -> Lane:
        """Return the lane whose turn it is.

        Raises:
            NoBrokerError: the topic is not known.
        """
        lanes = self.lanes.get(topic)
        if lanes is None:
            raise unknown_topic(topic)
        return lanes[next(self.turn) % len(lanes)]

    def select(self, topic: str, message: OutgoingMessage) -> tuple[Lane, bool]:
        """Return a message's lane, and whether it may move from there.

        Raises:
            NoBrokerError: the topic is not known, or the selector found no partition.
            LocalProtocolError: the message's partition is none, or the selector chose
                one of another topic.
        """
        known = self._topics.get(topic)
        if known is None:
            raise unknown_topic(topic)
        if message.partition is not None:
            return self.lane(parse_partition(topic, message.partition)), False
        selector = self._selector
        if selector is None:
            if message.key is None:
                return self.next_lane(topic), True
            selector = self._by_key
        choice = known.available or known.known
        if getattr(selector, "sees_absent", False):
            choice = known.known
        partition = selector(topic, choice, message)
        if partition.topic != topic:
            raise LocalProtocolError(
                f"selector: expected a partition of {topic}, got {partition}"
            )
        return self.lane(partition), getattr(selector, "may_move", False)

    def set_partitions(
        self, topic: str, available: Sequence[TopicPartition]
    ) -> list[Lane]:
        """Say which partitions of a topic take messages now.

        Returns:
            The lanes of those that do not any more, with or without messages.
        """
        before = self._topics.get(topic, _Topic((), ()))
        partitions = tuple(sorted(available))
        known = tuple(sorted({*before.known, *partitions}))
        if not known or (before.known and before.available == partitions):
            return []
        self._topics[topic] = _Topic(partitions, known)
        self.lanes[topic] = tuple(map(self.lane, partitions or known))
        return [self.lane(p) for p in before.available if p not in set(partitions)]


def unknown_topic(topic: str) -> NoBrokerError:
    """Return the error of a message for a topic whose partitions are not known."""
    return NoBrokerError(f"topic {topic} is not known yet")
