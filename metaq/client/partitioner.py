"""Selectors, which choose the partition of a message. Pure.

A selector is any callable of (topic, partitions, message) that returns one of the
partitions. Two optional attributes, by default False, control its use:

* `may_move`: if the chosen partition does not take a message, and it certainly was not
  stored, it may go to another partition. If False, the message waits.
* `sees_absent`: the selector gets all partitions ever seen, including those whose
  broker is away now.

Keys. `KeyHash` divides all keys into KEY_SLOTS slots by CRC-32, and gives each slot to
the partition with the highest weight for it; the weights of a partition are a hash of
its name `<broker>-<partition>`. Weights do not depend on other partitions: when a
partition goes away, only its slots move, and when it returns, they move back. This
needs no stored state, so all producers agree.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import shake_128
from itertools import count, repeat
from operator import itemgetter
from struct import unpack
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from metaq.errors import ConfigError, NoBrokerError
from metaq.model import BrokerId, TopicPartition
from metaq.record.flags import Headers
from metaq.zk import paths

KEY_SLOTS: Final = 4096
"""Number of slots of keys; must never change, because the partition of a key depends on
it. With more than some hundred partitions, their shares become uneven."""

_Place: TypeAlias = tuple[str, BrokerId, int]

_TABLES_MAX: Final = 1024
_WEIGHT_BYTES: Final = 4


class OutgoingMessage(NamedTuple):
    """A message on its way to a broker: argument of selectors and of `send_many`."""

    data: bytes
    """Application bytes."""
    attribute: str | None = None
    """Application attribute; None: none ("" is an attribute)."""
    key: str | bytes | None = None
    """Stored with the message; equal keys go to the same partition."""
    partition: str | TopicPartition | None = None
    """Partition to send it to, as `<broker>-<partition>` or a partition; None: any."""
    headers: Headers = ()
    """Names and values, stored with the message in this order."""
    tag: str | None = None
    """Stored as the header `tag`; a selector finds it in `headers`."""


Selector: TypeAlias = Callable[
    [str, Sequence[TopicPartition], OutgoingMessage], TopicPartition
]
"""(topic, partitions, message) → one of the partitions, of which there is at least one,
sorted by broker and number. Called on any thread that sends."""


class RoundRobin:
    """Selects one partition after the other; the default for messages without a key.

    The first message goes to the second partition, as in MetaQ's clients
    (docs/metaq-1.4/client.md 7.2). Thread-safe; all topics share the counter.
    """

    may_move: Final = True
    sees_absent: Final = False

    def __init__(self) -> None:
        self._count = count(1)

    def __call__(
        self,
        topic: str,  # a selector's signature
        partitions: Sequence[TopicPartition],
        message: OutgoingMessage,  # a selector's signature
    ) -> TopicPartition:
        """Return the partition whose turn it is."""
        return partitions[next(self._count) % len(partitions)]


class KeyHash:
    """Selects the same partition for equal keys; the default for messages with a key.

    With `wait=False`, keys of a broker that is away go to other brokers until it is
    back, so that no message waits; the order of such a key is only kept within each
    partition. With `wait=True` they wait for their partition, up to the deadline.
    """

    may_move: Final = False

    def __init__(self, *, wait: bool = False) -> None:
        self.sees_absent = wait
        self._tables: dict[_Place, tuple[Sequence[TopicPartition], list[int]]] = {}

    def __call__(
        self, topic: str, partitions: Sequence[TopicPartition], message: OutgoingMessage
    ) -> TopicPartition:
        """Return the partition of the message's key; without a key, of b""."""
        # A transaction chooses among the partitions of its broker, others among all.
        place = topic, partitions[0].broker_id, len(partitions)
        known = self._tables.get(place)
        if known is None or known[0] is not partitions:
            if len(self._tables) >= _TABLES_MAX:
                self._tables.clear()
            known = self._tables[place] = (partitions, plan_slots(partitions))
        key = b"" if message.key is None else message.key
        return partitions[known[1][slot_of(key)]]


class Pinned:
    """Selects one fixed partition for all messages."""

    may_move: Final = False
    sees_absent: Final = True

    def __init__(self, partition: str | int) -> None:
        """Choose the partition.

        Args:
            partition: `<broker>-<partition>`, or a number, which selects the first
                broker that has a partition with this number.

        Raises:
            ConfigError: the text is not a partition.
            TypeError: it is neither text nor number.
        """
        self._number = partition if isinstance(partition, int) else None
        self._name = None
        if self._number is None:
            self._name = parse_partition("", partition)

    def __call__(
        self,
        topic: str,
        partitions: Sequence[TopicPartition],
        message: OutgoingMessage,  # a selector's signature
    ) -> TopicPartition:
        """Return the partition, even if a named one was not seen yet.

        Raises:
            NoBrokerError: no broker has a partition with this number.
        """
        if self._name is not None:
            return TopicPartition(topic, self._name.broker_id, self._name.partition)
        for candidate in partitions:
            if candidate.partition == self._number:
                return candidate
        raise NoBrokerError(f"topic {topic} has no partition {self._number}")


def parse_partition(topic: str, text: object) -> TopicPartition:
    """Return the partition `<broker>-<partition>` of a topic, or the partition itself.

    Raises:
        TypeError: it is neither a text nor a partition.
        ConfigError: the text is invalid, or the partition is of another topic.
    """
    wanted = "'<broker>-<partition>', such as '0-1'"
    if isinstance(text, TopicPartition):
        if text.topic == topic:
            return text
        raise ConfigError(f"partition: expected one of topic {topic}, got {text}")
    if not isinstance(text, str):
        # People give numbers.
        raise TypeError(
            f"partition: expected TopicPartition or str {wanted}, got"
            f" {type(text).__name__} {text!r:.80}"
        )
    found = paths.parse_partition(text)
    if found is None:
        raise ConfigError(f"partition: expected {wanted}, got {text[:80]!r}")
    return TopicPartition(topic, *found)


def slots_of(keys: Iterable[bytes]) -> list[int]:
    """Return the slot of each key, in order, as `slot_of`."""
    return [value % KEY_SLOTS for value in map(crc32, keys)]


def slot_of(key: str | bytes) -> int:
    """Return the slot of a key, 0..KEY_SLOTS-1; text counts as its UTF-8 bytes.

    Raises:
        TypeError: it is neither text nor bytes.
    """
    octets = key.encode(errors="surrogatepass") if isinstance(key, str) else key
    try:
        return crc32(octets) % KEY_SLOTS
    except TypeError:
        raise TypeError(
            f"key: expected str or bytes, got {type(key).__name__} {key!r:.80}"
        ) from None


def plan_slots(partitions: Sequence[TopicPartition]) -> list[int]:
    """Return for each slot the index of its partition in `partitions`.

    Costs about half a millisecond per partition.
    """
    best: list[tuple[int, int]] = [(-1, -1)] * KEY_SLOTS
    # In the order of names, so that the result does not depend on the list's order.
    for at in sorted(range(len(partitions)), key=lambda at: partitions[at].name):
        best = list(map(max, best, zip(_weights(partitions[at]), repeat(at))))
    return list(map(itemgetter(1), best))


def _weights(partition: TopicPartition) -> tuple[int, ...]:
    octets = shake_128(partition.name.encode()).digest(KEY_SLOTS * _WEIGHT_BYTES)
    return unpack(f">{KEY_SLOTS}I", octets)
