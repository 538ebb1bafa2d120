"""The topics of one consumer: named ones, and those that match its patterns."""

import logging
from collections.abc import Callable, Collection, Iterator

from metaq.client.cluster.metadata import Metadata
from metaq.client.names import TopicPattern, name_few
from metaq.cluster_snapshot import ClusterSnapshot

_log = logging.getLogger(__name__)


class SubscribedTopics(Collection[str]):
    """A collection of names that follows the cluster.

    A pattern only matches topics with served or recorded partitions, because nodes of
    deleted topics remain. Owned by the consumer. Concurrency: one event loop; `names`
    may be read on any thread.
    """

    def __init__(
        self,
        metadata: Metadata,
        names: Collection[str] = (),
        patterns: Collection[TopicPattern] = (),
    ) -> None:
        """Create it with the named topics."""
        self._metadata = metadata
        self._given = tuple(names)
        self.patterns = patterns
        self.names = self._given
        """Named topics as given, then matching ones, ascending."""
        self._exchanges = set[str]()
        """Exchanges with matching names, which are ignored."""
        self.is_known = not self.patterns
        self._unlisten: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start to follow; call this before the users of the names start to listen."""
        for topic in self._given:
            self._metadata.watch_topic(topic)
        if self.patterns:
            self._metadata.watch_names()
            self._unlisten = self._metadata.add_listener(self._follow)
            self._follow(self._metadata.snapshot)

    def stop(self) -> None:
        """Stop following; may be called twice."""
        self._unlisten()

    def _follow(self, snapshot: ClusterSnapshot) -> None:
        matching = {
            name
            for name in snapshot.names or ()
            if any(pattern.matches(name) for pattern in self.patterns)
        }
        for name in sorted(matching - snapshot.topics):
            self._metadata.watch_topic(name)
        for name in sorted((matching & snapshot.exchanges) - self._exchanges):
            _log.info("pattern takes no exchange: exchange=%s topics=%s", name, self)
        self._exchanges = matching & snapshot.exchanges
        there = matching.intersection(snapshot.gets.keys() | snapshot.recorded.keys())
        self.names = (*self._given, *sorted(there.difference(self._given)))
        self.is_known |= snapshot.names is not None and matching <= snapshot.topics

    def problems(self) -> list[str]:
        """Return a sentence for each pattern that no topic matches."""
        return [
            f"pattern '{pattern.glob}': no topic matches it{self._others(pattern)}"
            for pattern in self.patterns
            if self.is_known and not any(map(pattern.matches, self.names))
        ]

    def _others(self, pattern: TopicPattern) -> str:
        found = sorted(filter(pattern.matches, self._exchanges))
        if not found:
            return ""
        return f", but exchange {name_few(found)}, which stores nothing itself"

    def __str__(self) -> str:
        return ", ".join((*self._given, *(each.glob for each in self.patterns)))

    def __contains__(self, topic: object) -> bool:
        return topic in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
