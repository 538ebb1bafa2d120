"""Selectors: which partition a message goes to. Pure.

A selector is any callable of (topic, partitions, message) that returns one of the
partitions. Two attributes, both False where they are missing, say how it is used:

* `may_move`: a message that certainly was not stored may go to another partition
  when the chosen one does not take it. Where it is False, the message waits.
* `sees_absent`: it chooses among all partitions that were ever seen, also those whose
  broker is away at the moment.

Keys. `KeyHash` divides all keys into KEY_SLOTS slots by CRC-32, and gives each slot to
the partition with the highest weight for it; the weights of a partition are a hash of
its name `<broker>-<partition>`. A partition's weight does not depend on the others:
when one goes, its slots alone go elsewhere, and when it returns, they come back. No
process keeps any state for that, so all producers agree.
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
"""Number of parts into which keys are divided; it decides the partition of a key, so it
never changes. Beyond some hundred partitions the shares become uneven."""

_Place: TypeAlias = tuple[str, BrokerId, int]

_TABLES_MAX: Final = 1024
_WEIGHT_BYTES: Final = 4


class OutgoingMessage(NamedTuple):
    """A message on its way to a broker: argument of selectors and of `send_many`."""

    data: bytes
    """Application bytes."""
    attribute: str | None = None
    """Application attribute; "" is one, None is none."""
    key: str | bytes | None = None
    """Stored with the message; the same key goes to the same partition."""
    partition: str | TopicPartition | None = None
    """To send it there and nowhere else: `<broker>-<partition>`, or a partition."""
    headers: Headers = ()
    """Names and bytes, stored with the message in this order."""
    tag: str | None = None
    """Stored as the header `tag`; a selector finds it in `headers`."""


Selector: TypeAlias = Callable[
    [str, Sequence[TopicPartition], OutgoingMessage], TopicPartition
]
"""(topic, partitions, message) → one of the partitions. The partitions are sorted by
broker and number, and at least one; any thread that sends may call."""


class RoundRobin:
    """One partition after the other; the default for messages without a key.

    The first message goes to the second partition, as with MetaQ's clients
    (docs/metaq-1.4/client.md 7.2). Safe in threads; all topics share the counter.
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
    """The same key to the same partition; the default for messages with a key.

    With `wait=False` the keys of a broker that is away go to the others until it is
    back, and no message waits; the order of such a key is kept within each partition
    only. With `wait=True` they wait for their partition, up to the deadline.
    """

    may_move: Final = False

    def __init__(self, *, wait: bool = False) -> None:
        self.sees_absent = wait
        self._tables: dict[_Place, tuple[Sequence[TopicPartition], list[int]]] = {}

    def __call__(
        self, topic: str, partitions: Sequence[TopicPartition], message: OutgoingMessage
    ) -> TopicPartition:
        """Return the partition of the message's key; no key is the empty key."""
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
    """Everything to one partition."""

    may_move: Final = False
    sees_absent: Final = True

    def __init__(self, partition: str | int) -> None:
        """Choose the partition.

        Args:
            partition: `<broker>-<partition>`, or a number, which means the first
                broker that has a partition of this number.

        Raises:
            ConfigError: the text is no partition.
            TypeError: neither text nor number.
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
        """Return the partition, also one that was not seen yet.

        Raises:
            NoBrokerError: no broker has a partition of this number.
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
        ConfigError: the text is something else, or the partition of another topic.
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
    """Return the slot of each key, in order; the same as `slot_of`."""
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
    """Return for each slot the position in `partitions` that it belongs to.

    Costs about half a millisecond per partition.
    """
    best: list[tuple[int, int]] = [(-1, -1)] * KEY_SLOTS
    # In the order of the names, so that the list's own order decides nothing.
    for at in sorted(range(len(partitions)), key=lambda at: partitions[at].name):
        best = list(map(max, best, zip(_weights(partitions[at]), repeat(at))))
    return list(map(itemgetter(1), best))


def _weights(partition: TopicPartition) -> tuple[int, ...]:
    octets = shake_128(partition.name.encode()).digest(KEY_SLOTS * _WEIGHT_BYTES)
    return unpack(f">{KEY_SLOTS}I", octets)
