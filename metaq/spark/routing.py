"""Routes of a write's batches, stored so that a repeated batch takes the same ones.

The partition of a row depends on its key, its position and the partitions of its topic.
Brokers recognise batches that they have stored; so a repeated batch must go to the
partitions of its first run, although other brokers may exist by then. These are stored
before the first row is sent:

    next       partitions of the next batch, or of the one in progress; empty right
               after a commit, because brokers may come and go before the next begins
    committed  number of the last batch written completely, and its query: a query
               restarted in the same place counts its batches from 0
    last       partitions of that batch: Spark repeats it after a stop before Spark
               has recorded the commit

Pure; `cluster.py` stores them in ZooKeeper.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from metaq.client.names import name_some
from metaq.client.partitioner import parse_partition
from metaq.errors import ConfigError, NoBrokerError
from metaq.model import TopicPartition
from metaq.spark.errors import SparkError

Route: TypeAlias = Mapping[str, tuple[TopicPartition, ...]]
"""Topic → the partitions that share its rows, in order."""
NO_BATCH: Final = -1
_NO_ROUTES: Final = (
    ValueError, KeyError, TypeError, AttributeError, ConfigError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WriteRoutes:
    """Stored routes of one write; the module docstring explains the fields."""

    committed: int = NO_BATCH
    query: str = ""
    last: Route = field(default_factory=dict)
    next: Route = field(default_factory=dict)

    def begun(self, available: Route) -> "WriteRoutes":
        """Return routes with the topics added that a batch begins to write.

        Args:
            available: partitions that take puts; ignored for topics with a route.
        """
        return replace(self, next={**available, **self.next})

    def moved(self, available: Route) -> "WriteRoutes":
        """Return routes with the partitions of known topics replaced."""
        return replace(
            self,
            last={**self.last, **_same_topics(available, self.last)},
            next={**self.next, **_same_topics(available, self.next)},
        )

    def written(self, batch: int, query: str) -> "WriteRoutes":
        """Return routes after the commit of a batch."""
        return WriteRoutes(batch, query, self.of(batch, query), {})

    def of(self, batch: int, query: str) -> Route:
        """Return the route of a batch of a query."""
        is_again = batch <= self.committed and query == self.query
        return {**self.next, **self.last} if is_again else self.next

    def to_json(self) -> str:
        """Return the text to store; equal routes have equal texts."""
        fields = {
            "committed": self.committed,
            "query": self.query,
            "last": _names(self.last),
            "next": _names(self.next),
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> "WriteRoutes":
        """Parse the text of `to_json`; None gives empty routes.

        Raises:
            SparkError: the text has another form.
        """
        if text is None:
            return cls()
        try:
            fields = json.loads(text)
            return cls(
                int(fields["committed"]),
                str(fields["query"]),
                _route(fields["last"]),
                _route(fields["next"]),
            )
        except _NO_ROUTES as error:
            raise SparkError(f"expected the routes of a write, got {text!r}") from error


def require_targets(
    route: Route, topics: Collection[str], addresses: Mapping[TopicPartition, str]
) -> dict[str, dict[TopicPartition, str]]:
    """Return topic → partitions of the route → addresses that take their puts.

    Raises:
        NoBrokerError: no broker takes puts to a partition now.
    """
    wanted = {partition for topic in topics for partition in route[topic]}
    if away := wanted - addresses.keys():
        brokers = ", ".join(map(str, sorted({p.broker_id for p in away})))
        raise NoBrokerError(
            f"this batch was begun with {name_some(away)}, where no broker takes puts"
            f" now: start broker {brokers} and run it again; with"
            " failOnLostRoute=false it goes to other partitions, and rows that its"
            " first run has stored are stored twice"
        )
    return {topic: {p: addresses[p] for p in route[topic]} for topic in topics}


def _same_topics(available: Route, known: Route) -> Route:
    return {topic: some for topic, some in available.items() if topic in known}


def _names(route: Route) -> dict[str, list[str]]:
    return {topic: [p.name for p in some] for topic, some in route.items()}


def _route(names: Mapping[str, list[str]]) -> Route:
    return {
        topic: tuple(parse_partition(topic, name) for name in some)
        for topic, some in names.items()
    }
