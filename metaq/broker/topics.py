"""Topics and partitions of this broker, and which of them take puts.

A topic is accepted if a configured name matches it (names are patterns, and reloads
only add to them), or if it was made by command; a partition exists if its number is
below the topic's count. Closed partitions refuse puts and gets until they are opened
again or the broker restarts. A topic that is being deleted is withdrawn: it is treated
as missing, even if a pattern matches it.

Callers that cache a result must compare `version`, which grows with every change that
could make an earlier result wrong.

Source: docs/metaq-1.4/broker.md 2.2, 2.10, 2.11; section 12 row 8.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from metaq.config.settings import BrokerConfig
from metaq.config.topic_rules import TopicRules
from metaq.errors import AdminError, ForbiddenError, ServerError, UnavailableError
from metaq.model import RANDOM_PARTITION, LogId, is_internal, no_items
from metaq.protocol import texts
from metaq.routing.match import Matcher
from metaq.storage.log_manager import LogManager
from metaq.storage.partition_log import PartitionLog

NAMES_REMEMBERED_MAX: Final = 4096
"""Maximum number of topic names for which the result of the rules is cached."""


@dataclass(frozen=True, slots=True)
class ServedExchange:
    """An exchange on this broker."""

    name: str
    matcher: Matcher
    alternate: str | None
    """Topic of messages that match no binding."""


class Topics:
    """The topics of one broker. Owned by the broker; used on the loop's thread."""

    def __init__(
        self, config: BrokerConfig, logs: LogManager, *, choose: Callable[[int], int]
    ) -> None:
        """Load the configured topics; `logs` must be open."""
        self.version = 1
        self.on_new_log: Callable[[LogId], None] = lambda _log_id: None
        self._logs = logs
        self.choose: Final = choose
        """Returns a random number in 0..n-1 for n."""
        self._rules = TopicRules()
        self._closed: dict[str, set[int]] = {}
        self._withdrawn: frozenset[str] = frozenset()
        self.exchanges: Mapping[str, ServedExchange] = {}
        """Served exchanges by name; their names are not topics, even if they match."""
        self._unserved: Mapping[str, str] = {}
        """Exchange → why it is not served here; its name is not a topic either."""
        self._former: Collection[str] = ()
        """Names of deleted exchanges, for the error of puts to them."""
        self.refusal: UnavailableError | None = None
        """Error for all puts, set in a replica set; None: puts are taken."""
        self._config = config
        self.apply(config)

    def apply(self, config: BrokerConfig) -> None:
        """Apply a reloaded configuration."""
        self._rules = self._rules.extended(config.topics)
        stat_rules = TopicRules().extended(
            name for name, topic in config.topics.items() if topic.stat
        )
        # Cached, because each command calls these, and checking a name letter by letter
        # costs as much as the rest of a small command.
        defined = config.defined

        def accepts(topic: str) -> bool:
            is_known = topic in defined or self._rules.accepts(topic)
            return is_known and not is_internal(topic)

        def has_stat(topic: str) -> bool:
            is_defined = topic in defined and topic not in config.topics
            return defined[topic].stat if is_defined else stat_rules.accepts(topic)

        self._accepts_any = lru_cache(NAMES_REMEMBERED_MAX)(accepts)
        self._has_stat = lru_cache(NAMES_REMEMBERED_MAX)(has_stat)
        self._config = config
        self.version += 1

    def withdraw(self, topics: frozenset[str]) -> None:
        """Stop serving these topics, which are being deleted, and no others."""
        for topic in topics:
            self._closed.pop(topic, None)
        self._withdrawn = topics
        self.version += 1

    def set_exchanges(
        self,
        exchanges: Mapping[str, ServedExchange],
        unserved: Mapping[str, str] = no_items(),  # stays empty
        former: Collection[str] = (),
    ) -> None:
        """Serve these exchanges, and no others.

        Args:
            exchanges: exchanges by name.
            unserved: name → why another exchange is not served; no topic either.
            former: names of deleted exchanges; topics may have these names.
        """
        self.exchanges, self._unserved, self._former = exchanges, unserved, former
        self.version += 1

    def is_withdrawn(self, topic: str) -> bool:
        """Return whether a topic is being deleted."""
        return topic in self._withdrawn

    def refuse(self, error: UnavailableError | None) -> None:
        """Refuse all puts with this error; None: take puts."""
        if type(error) is not type(self.refusal):
            self.version += 1
        self.refusal = error

    def accepts(self, topic: str) -> bool:
        """Return whether this broker takes puts to a topic."""
        if topic in self.exchanges or topic in self._unserved:
            return False
        return topic not in self._withdrawn and self._accepts_any(topic)

    # -- puts -------------------------------------------------------------------------

    def resolve_put(self, topic: str, partition: int) -> int:
        """Return the partition of a put; -1 chooses any open one.

        Raises:
            ForbiddenError: the partition is closed, or all are.
            ServerError: the topic is not accepted, or there is no such partition.
            UnavailableError: this replica takes no puts now.
                The texts of all three are only the detail of a reply.
        """
        choices = self.open_for_put(topic, partition)
        return choices[0] if len(choices) == 1 else choices[self.choose(len(choices))]

    def open_for_put(self, topic: str, partition: int) -> Sequence[int]:
        """Return the partitions that a put may go to: one, or every open one for -1.

        The result is valid until `version` changes.

        Raises:
            ForbiddenError: as `resolve_put`.
            ServerError: as `resolve_put`.
            UnavailableError: as `resolve_put`.
        """
        if self.refusal is not None:
            raise self.refusal
        closed: set[int] = self._closed.get(topic, set())
        if partition in closed:
            raise self._closed_error(partition)
        count = self.count_of(topic)
        if partition == RANDOM_PARTITION:
            candidates = [p for p in range(count) if p not in closed]
            if not candidates:
                raise self._closed_error(partition)
            return candidates
        if not 0 <= partition < count:
            raise ServerError(texts.wrong_partition(partition))
        return (partition,)

    def log_for_put(self, topic: str, partition: int) -> PartitionLog:
        """Return the log of a resolved partition; create it for the first put.

        Raises:
            StorageError: the log cannot be created; see `LogManager.get_or_create`.
            UnavailableError: this replica takes no puts now.
        """
        log_id = LogId(topic, partition)
        log = self._logs.get(log_id)
        if log is None:
            if self.refusal is not None:
                raise self.refusal
            log = self._logs.get_or_create(log_id, self._config.topic(topic))
            self.on_new_log(log_id)
        return log

    # -- gets -------------------------------------------------------------------------

    def find_log(self, topic: str, partition: int) -> PartitionLog | None:
        """Return the log of a partition, even if its topic takes no puts."""
        if topic in self._withdrawn or is_internal(topic):
            return None
        return self._logs.get(LogId(topic, partition))

    # -- the broker's own

    def find_internal(self, log_id: LogId) -> PartitionLog | None:
        """Return a log of an internal topic; None before its first record."""
        return self._logs.get(log_id)

    def internal_log(self, log_id: LogId) -> PartitionLog:
        """Return a log of an internal topic; create it if it does not exist.

        Raises:
            StorageError: the log cannot be created; see `LogManager.get_or_create`.
        """
        return self._logs.get_or_create(log_id, self._config.topic(log_id.topic))

    def may_appear(self, topic: str, partition: int) -> bool:
        """Return whether a put could create this log."""
        return self.accepts(topic) and (
            0 <= partition < self._config.topic(topic).partition_count
        )

    def logs(self) -> Iterable[PartitionLog]:
        """Return all logs but internal ones, in no order."""
        logs = self._logs.logs().items()
        return [log for log_id, log in logs if not is_internal(log_id.topic)]

    # -- settings ---------------------------------------------------------------------

    def has_stat(self, topic: str) -> bool:
        """Return whether realtime statistics are kept for a topic."""
        return self._has_stat(topic)

    # -- administration ---------------------------------------------------------------

    def is_closed(self, topic: str, partition: int) -> bool:
        """Return whether a partition is administratively closed."""
        return partition in self._closed.get(topic, ())

    def require_open(self, topic: str, partition: int) -> None:
        """Raise ForbiddenError, for a get, if the partition is closed."""
        if self.is_closed(topic, partition):
            broker_id = self._config.system.broker_id
            raise ForbiddenError(texts.get_closed(broker_id, partition))

    def closed_partitions(self) -> dict[str, tuple[int, ...]]:
        """Return the closed partitions of each topic that has any, sorted."""
        return {
            topic: tuple(sorted(parts))
            for topic, parts in self._closed.items()
            if parts
        }

    def close_partitions(self, topic: str, *, start: int, end: int | None) -> None:
        """Close partitions `start` to `end`; None: to the topic's last.

        Raises:
            AdminError: no such topic in the configuration, or no such range.
        """
        closed = self._range_of(topic, start, end)
        self._closed.setdefault(topic, set()).update(closed)
        self.version += 1

    def open_partitions(
        self, topic: str, *, start: int = 0, end: int | None = None
    ) -> None:
        """Open partitions again; arguments and errors as for closing.

        A closed partition can be opened even after a reload has removed it.
        """
        closed = self._closed.get(topic, set())
        opened = {p for p in closed if start <= p and (end is None or p <= end)}
        if not opened or (end is not None and len(opened) <= end - start):
            self._range_of(topic, start, end)
        closed -= opened
        self.version += 1

    def _range_of(self, topic: str, start: int, end: int | None) -> range:
        if topic not in self._config.topic_names:
            raise AdminError(f"topic '{topic}' is not in the configuration")
        count = self._config.topic(topic).partition_count
        last = count - 1 if end is None else end
        if not 0 <= start <= last < count:
            raise AdminError(
                f"topic '{topic}' has partitions 0..{count - 1}, got {start}..{last}"
            )
        return range(start, last + 1)

    def count_of(self, topic: str) -> int:
        """Return the number of partitions of a topic.

        Raises:
            ServerError: the topic is not accepted.
        """
        if not self.accepts(topic):
            if topic in self._unserved:
                reason = self._unserved[topic]
                raise ServerError(texts.exchange_not_served(topic, reason))
            is_former = topic in self._former
            text = texts.no_exchange if is_former else texts.topic_not_accepted
            raise ServerError(text(topic))
        return self._config.topic(topic).partition_count

    def _closed_error(self, partition: int) -> ForbiddenError:
        broker_id = self._config.system.broker_id
        return ForbiddenError(texts.closed_detail(broker_id, partition))
