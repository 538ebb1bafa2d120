"""Routes of a write's batches: kept, so that a batch that is run again goes there.

A row goes where its key, its place and the partitions of its topic say. Brokers
recognise batches they have stored already; so a batch that is run again has to go to
the partitions of its first run, with any brokers that exist by then. Those are written
down before its first row is sent:

    next       where the batch goes that comes next, or has begun; none right after a
               commit, because brokers may come and go until it begins
    committed  the last batch that is written as a whole, and of which query: one that
               starts again in the same place counts its batches from 0
    last       where that one went: Spark runs it again if it stops before it has
               noted the commit

Pure; `cluster.py` keeps it in ZooKeeper.
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
"""Topic → the partitions that its rows are spread over, in order."""
NO_BATCH: Final = -1
_NO_ROUTES: Final = (
    ValueError, KeyError, TypeError, AttributeError, ConfigError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WriteRoutes:
    """Kept routes of one write; the fields are explained at the top of this file."""

    committed: int = NO_BATCH
    query: str = ""
    last: Route = field(default_factory=dict)
    next: Route = field(default_factory=dict)

    def begun(self, available: Route) -> "WriteRoutes":
        """Return the same with topics that a batch begins to write now.

        Args:
            available: partitions that take puts; nothing changes for known topics.
        """
        return replace(self, next={**available, **self.next})

    def moved(self, available: Route) -> "WriteRoutes":
        """Return the same with other partitions in the place of the known ones."""
        return replace(
            self,
            last={**self.last, **_same_topics(available, self.last)},
            next={**self.next, **_same_topics(available, self.next)},
        )

    def written(self, batch: int, query: str) -> "WriteRoutes":
        """Return the same after the commit of a batch."""
        return WriteRoutes(batch, query, self.of(batch, query), {})

    def of(self, batch: int, query: str) -> Route:
        """Return where a batch of a query goes."""
        is_again = batch <= self.committed and query == self.query
        return {**self.next, **self.last} if is_again else self.next

    def to_json(self) -> str:
        """Return the text that is kept; the same for the same routes."""
        fields = {
            "committed": self.committed,
            "query": self.query,
            "last": _names(self.last),
            "next": _names(self.next),
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> "WriteRoutes":
        """Read the JSON of `to_json`; None is nothing.

        Raises:
            SparkError: the text is something else.
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
    """Return the partitions of topics with the addresses that take their puts.

    Raises:
        NoBrokerError: some take none now.
    """
    wanted = {partition for topic in topics for partition in route[topic]}
    if away := wanted - addresses.keys():
        brokers = ", ".join(map(str, sorted({p.broker_id for p in away})))
        raise NoBrokerError(
            f"this batch was begun with {name_some(away)}, where no broker takes puts"
            f" now: start broker {brokers} and run it again; with failOnLostRoute=false"
            " it goes elsewhere, and what its first run has stored is there twice"
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
