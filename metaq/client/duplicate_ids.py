"""Cache of the ids of messages that a group has handled; members may share it.

As in MetaQ, a key is the name of the group, followed by the id in decimal digits. The
cache in this file is for the consumers of one process. For a store shared by several
processes (memcached, Redis), users write a class with the two methods of
`DuplicateIds`. Source: docs/metaq-1.4/client.md 11.3, 11.4.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from metaq.client.validation import check_whole
from metaq.model import MessageId

CAPACITY: Final = 4096
"""Default number of ids, as in MetaQ's cache."""


class DuplicateIds(Protocol):
    """Cache of the ids of handled messages; created and closed by the user.

    Concurrency: each consumer makes one call at a time, from its own thread and never
    from an event loop; consumers that share a store call it concurrently.

    Errors: a call that raises, or that does not return within the client's
    `request_timeout_s`, is logged and counted; messages are delivered then.
    """

    def seen(self, keys: Sequence[str]) -> Collection[str]:
        """Return the keys that were added before; one round trip for a batch.

        Args:
            keys: one for each fetched message, in the order of the log.
        """

    def add(self, keys: Sequence[str]) -> None:
        """Add keys, to be kept as long as the store likes; one round trip for a batch.

        Args:
            keys: keys of handled messages; some may be in the store already.
        """


@dataclass(frozen=True, slots=True)
class LruStatistics:
    """A snapshot of a cache's counters."""

    hit_count: int
    miss_count: int
    evicted_count: int
    key_count: int


class LruDuplicateIds:
    """A cache in memory that drops the least recently used ids; for any thread.

    Both `seen` and `add` count as a use. It does not outlive the process: messages
    handled by another process, or by this one before a restart, are not in it.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Start empty.

        Args:
            capacity: maximum number of keys, 1 or more; about 150 bytes each.

        Raises:
            ConfigError: `capacity` is below 1.
        """
        check_whole("capacity", capacity, 1)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._hit_count = 0
        self._miss_count = 0
        self._evicted_count = 0

    def seen(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that are in the cache, in the order of the argument."""
        with self._lock:
            found = [key for key in keys if key in self._keys]
            for key in found:
                self._keys.move_to_end(key)
            self._hit_count += len(found)
            self._miss_count += len(keys) - len(found)
        return found

    def add(self, keys: Sequence[str]) -> None:
        """Add keys, the last one as the most recently used."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._capacity:
                self._keys.popitem(last=False)
                self._evicted_count += 1

    def statistics(self) -> LruStatistics:
        """Return a snapshot of the counters."""
        with self._lock:
            return LruStatistics(
                hit_count=self._hit_count,
                miss_count=self._miss_count,
                evicted_count=self._evicted_count,
                key_count=len(self._keys),
            )


def key_of(group: str, message_id: MessageId) -> str:
    """Return MetaQ's key of a message."""
    return f"{group}{message_id}"
