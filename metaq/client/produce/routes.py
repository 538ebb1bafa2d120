"""Routes: topics, the senders of their partitions, and the choice of a partition.

Any thread reads them without a lock; the event loop writes them. Values that belong
together are in one immutable object, which is replaced as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from metaq.client.partitioner import KeyHash, OutgoingMessage, Selector, parse_partition
from metaq.client.produce.partition_sender import PartitionSender
from metaq.errors import ConfigError, NoBrokerError
from metaq.model import BrokerId, TopicPartition


@dataclass(frozen=True, slots=True)
class _Topic:
    """Partitions of a topic, sorted: those that take messages, and all ever seen."""

    available: tuple[TopicPartition, ...]
    known: tuple[TopicPartition, ...]

    def of(self, broker_id: BrokerId) -> "_Topic":
        """Return the partitions of one broker."""
        available = (one for one in self.available if one.broker_id == broker_id)
        known = (one for one in self.known if one.broker_id == broker_id)
        return _Topic(tuple(available), tuple(known))


class Routes:
    """The senders of one producer, and the choice among them."""

    def __init__(
        self,
        make: Callable[[TopicPartition, int | None], PartitionSender],
        selector: Selector | None,
        first_turn: int,
    ) -> None:
        """Start without topics.

        Args:
            make: creates the sender of a partition, or of its delayed messages in a row
                of `delay_row`; called in any thread.
            selector: chooses partitions; None for the hash of the key, or round robin
                for messages without a key.
            first_turn: where round robin begins, modulo the number of partitions.
        """
        self._make = make
        self._selector = selector
        self._by_key = KeyHash()
        self._topics: dict[str, _Topic] = {}
        self._at_broker: dict[tuple[str, BrokerId], tuple[_Topic, _Topic]] = {}
        self._by_partition: dict[TopicPartition, PartitionSender] = {}
        self._timed: dict[tuple[TopicPartition, int], PartitionSender] = {}
        self.is_default = selector is None
        """Whether messages without key and partition go to `by_topic` in turn."""
        self.by_topic: dict[str, tuple[PartitionSender, ...]] = {}
        """Known topic → senders of the partitions that take messages, or of all known
        partitions if none does."""
        self.turn = count(first_turn)
        """Next turn, as in `RoundRobin`: shared by all topics."""
        self.place = 0
        """Turn of single messages, used until `Buffer.is_turn_over`."""

    def senders(self) -> list[PartitionSender]:
        """Return all senders ever created."""
        return [*self._by_partition.values(), *self._timed.values()]

    def sender(self, partition: TopicPartition) -> PartitionSender:
        """Return a partition's sender; create it if there is none."""
        found = self._by_partition.get(partition)
        if found is None:
            # Two threads may do this at once: the first one's sender stays.
            made = self._make(partition, None)
            found = self._by_partition.setdefault(partition, made)
        return found

    def timed(self, partition: TopicPartition, row: int) -> PartitionSender:
        """Return the sender of a partition's delayed messages; see `delay_row`."""
        found = self._timed.get((partition, row))
        if found is None:
            made = self._make(partition, row)
            found = self._timed.setdefault((partition, row), made)
        return found

    def next_sender(self, topic: str) -> PartitionSender:
        """Return the next sender of a topic in round robin.

        Raises:
            NoBrokerError: the topic is not known.
        """
        senders = self.by_topic.get(topic)
        if senders is None:
            raise unknown_topic(topic)
        return senders[next(self.turn) % len(senders)]

    def select(
        self, topic: str, message: OutgoingMessage
    ) -> tuple[PartitionSender, bool]:
        """Return a message's sender, and whether it may move from there.

        Raises:
            NoBrokerError: the topic is not known, or the selector found no partition.
            ConfigError: the message's partition is invalid, or the selector did not
                return a partition of the topic.
        """
        known = self._topics.get(topic)
        if known is None:
            raise unknown_topic(topic)
        return self.select_among(topic, known, message)

    def select_among(
        self, topic: str, known: _Topic, message: OutgoingMessage
    ) -> tuple[PartitionSender, bool]:
        """As `select`, among the partitions that `plan` returned."""
        if message.partition is not None:
            return self.sender(parse_partition(topic, message.partition)), False
        selector = self._selector
        if selector is None:
            if message.key is None:
                choice = known.available or known.known
                return self.sender(choice[next(self.turn) % len(choice)]), True
            selector = self._by_key
        partition = _select(selector, topic, known, message)
        return self.sender(partition), getattr(selector, "may_move", False)

    def choose(
        self,
        topic: str,
        message: OutgoingMessage,
        broker_id: BrokerId | None,
        *,
        has_local_keys: bool,
    ) -> TopicPartition | None:
        """Return the partition of a message in a transaction.

        Args:
            topic: of the message.
            message: the message; its partition is chosen as in `select`.
            broker_id: broker of the transaction; None before its first message.
            has_local_keys: a key goes to a partition of that broker; if False, to the
                same partition as outside of transactions, at any broker.

        Returns:
            Its partition, perhaps at another broker; None if that broker has none.

        Raises:
            NoBrokerError, ConfigError: as `select`.
        """
        known = self._topics.get(topic)
        if known is None:
            raise unknown_topic(topic)
        if message.partition is not None:
            return parse_partition(topic, message.partition)
        selector = self._selector or self._by_key
        # With a selector whose messages may move, a key has no fixed partition.
        may_move = message.key is None or getattr(selector, "may_move", False)
        if broker_id is not None and (has_local_keys or may_move):
            known = self._narrowed(topic, known, broker_id)
        choice = known.available or known.known
        if not choice:
            return None
        if self._selector is None and message.key is None:
            return choice[next(self.turn) % len(choice)]
        return _select(selector, topic, known, message)

    def _narrowed(self, topic: str, known: _Topic, broker_id: BrokerId) -> _Topic:
        """Return a broker's part of a topic; cached until the topic changes."""
        found = self._at_broker.get((topic, broker_id))
        if found is None or found[0] is not known:
            found = known, known.of(broker_id)
            self._at_broker[topic, broker_id] = found
        return found[1]

    def set_partitions(
        self, topic: str, available: Sequence[TopicPartition]
    ) -> list[PartitionSender]:
        """Set the partitions of a topic that take messages now.

        Returns:
            The senders of partitions that no longer do, with or without messages.
        """
        before = self._topics.get(topic, _Topic((), ()))
        now = self.plan(topic, available)
        if now is None or (before.known and before.available == now.available):
            return []
        self._topics[topic] = now
        self.by_topic[topic] = tuple(map(self.sender, now.available or now.known))
        gone = set(before.available).difference(now.available)
        moving = [one for one in before.available if one in gone]
        timed = [each for (one, _), each in self._timed.items() if one in gone]
        return [*map(self.sender, moving), *timed]

    def plan(self, topic: str, available: Sequence[TopicPartition]) -> _Topic | None:
        """Return what `set_partitions` would set; None if no partition is known."""
        before = self._topics.get(topic, _Topic((), ()))
        known = tuple(sorted({*before.known, *available}))
        return _Topic(tuple(sorted(available)), known) if known else None


def _select(
    selector: Selector, topic: str, known: _Topic, message: OutgoingMessage
) -> TopicPartition:
    choice = known.available or known.known
    if getattr(selector, "sees_absent", False):
        choice = known.known
    partition = selector(topic, choice, message)
    # The selector is the user's function, and may return anything.
    if getattr(partition, "topic", None) != topic:
        raise ConfigError(f"selector: expected a partition of {topic}, got {partition}")
    return partition


class NotKnownYetError(NoBrokerError):
    """The partitions of a topic are not known yet; they may be at any moment."""


def unknown_topic(topic: str) -> NotKnownYetError:
    """Return the error of a message for a topic whose partitions are not known."""
    return NotKnownYetError(f"topic {topic} is not known yet")
