"""Facts about one broker and its topics, parsed from its `stats`. Pure.

The number of a topic's partitions is in ZooKeeper, but no command returns it. So for a
broker known by its address alone, it is derived from the broker's topics, logs and
configuration file (if the broker returns a readable one): the largest number that
follows from any of these, or 1.

Source: docs/metaq-1.4/broker.md 2.2 and 7.1, docs/metaq-1.4/client.md 4.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from metaq.config.load import parse_config
from metaq.config.settings import BrokerConfig
from metaq.config.topic_rules import TopicRules
from metaq.errors import ConfigError, UnexpectedReplyError
from metaq.model import BrokerId
from metaq.zk.cluster import PARTITIONS_MAX

BROKER_ID_MAX: Final = 1023
"""Largest broker id: ten bits of each message id."""

_DIGITS_MAX: Final = 9  # bounds the work of int()


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Facts about one broker at one moment."""

    broker_id: BrokerId
    is_follower: bool
    """Whether it copies another broker's partitions and takes no puts."""
    counts: Mapping[str, int]
    """Named topic → number of partitions, 1 or more; without patterns."""
    refused_puts: frozenset[str]
    """Topics in `counts` that take no puts (`acceptPublish=false`)."""
    refused_gets: frozenset[str]
    """Topics in `counts` that are not read (`acceptSubscribe=false`)."""
    rules: TopicRules
    """Rules for the other topics that it accepts."""
    config: BrokerConfig | None
    """Its configuration; None if it returned no readable one."""
    epoch: int = 0
    """Leader epoch, if it leads a replica set; otherwise 0."""
    exchanges: frozenset[str] = frozenset()
    """Names of the exchanges that it serves."""

    def partition_count(self, topic: str) -> int:
        """Return the number of a topic's partitions; 0 if it is not served."""
        if topic in self.counts:
            return self.counts[topic]
        if topic in self.exchanges or not self.rules.accepts(topic):
            return 0
        return 1 if self.config is None else _configured_count(self.config, topic)

    def takes_puts(self, topic: str) -> bool:
        """Return whether producers may put to a served topic."""
        return not self.is_follower and topic not in self.refused_puts

    def takes_gets(self, topic: str) -> bool:
        """Return whether consumers may read a served topic."""
        return topic not in self.refused_gets


def parse_facts(
    *,
    broker: str,
    topics: str,
    offsets: str,
    config: str | None,
    exchanges: str = "",
    source: str,
) -> BrokerFacts:
    """Parse the bodies of `stats` replies.

    Args:
        broker: body of `stats` without an item.
        topics: body of `stats topics`.
        offsets: body of `stats offsets`.
        config: body of `stats config`; None if it was refused.
        exchanges: body of `stats exchanges`; "" for a broker that has none.
        source: the broker's address, for error texts.

    Raises:
        UnexpectedReplyError: `broker` has no valid broker id.
    """
    stats = {words[0]: words[-1] for words in _lines(broker)}
    broker_id = _number(stats.get("broker_id", ""))
    if broker_id is None or broker_id > BROKER_ID_MAX:
        raise UnexpectedReplyError(
            f"{source}: expected a broker_id in stats, got {broker[:80]!r}"
        )
    settings = _parse_settings(config, broker, source)
    names, refused = _read_topics(topics)
    counts = {name: 1 for name in names if "*" not in name}
    # Of a log: '<topic> part <number> min_offset <n> max_offset <n>'.
    for words in _lines(offsets):
        number = _number(words[2]) if len(words) > 2 and words[1] == "part" else None
        if number is not None and number < PARTITIONS_MAX:
            counts[words[0]] = max(counts.get(words[0], 1), number + 1)
    if settings is not None:
        names |= settings.topics.keys()
        for name in settings.topics:
            if "*" not in name:
                counts.setdefault(name, 1)
        for name, count in counts.items():
            topic = settings.topic(name)
            counts[name] = max(count, _configured_count(settings, name))
            refused[0].update([] if topic.accept_publish else [name])
            refused[1].update([] if topic.accept_subscribe else [name])
    return BrokerFacts(
        broker_id=BrokerId(broker_id),
        is_follower=stats.get("slave") == "true",
        counts=MappingProxyType(dict(sorted(counts.items()))),
        refused_puts=frozenset(refused[0]),
        refused_gets=frozenset(refused[1]),
        rules=_rules(sorted(names)),
        config=settings,
        epoch=_number(stats.get("epoch", "")) or 0,
        exchanges=frozenset(words[0] for words in _lines(exchanges)),
    )


def read_closed(stats: Mapping[str, str]) -> frozenset[str] | None:
    """Return the closed partitions of a broker, as `<topic>-<number>`.

    Args:
        stats: name → value of its `stats`.

    Returns:
        The partitions; None if the broker does not report them, as MetaQ 1.4.
    """
    value = stats.get("closed_partitions")
    return None if value is None else frozenset(value.split(" ")[1:])


def _configured_count(settings: BrokerConfig, topic: str) -> int:
    return min(settings.topic(topic).partition_count, PARTITIONS_MAX)


def _lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each line between `STATS` and `END`."""
    for line in text.splitlines()[1:]:
        words = line.split(" ")
        if line != "END" and words[0]:
            yield words


def _number(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return int(text) if is_number else None


def _read_topics(text: str) -> tuple[set[str], tuple[set[str], set[str]]]:
    """Return all names, patterns included, and those that refuse puts and gets."""
    # '<topic> partitions <n> ... accept_publish <b> accept_subscribe <b>', or
    # '<topic> *Empty*' without a log.
    names: set[str] = set()
    refused: tuple[set[str], set[str]] = (set(), set())
    for words in _lines(text):
        names.add(words[0])
        stats = dict(zip(words[1::2], words[2::2], strict=False))
        if stats.get("accept_publish") == "false":
            refused[0].add(words[0])
        if stats.get("accept_subscribe") == "false":
            refused[1].add(words[0])
    return names, refused


def _parse_settings(text: str | None, broker: str, source: str) -> BrokerConfig | None:
    if text is None:
        return None
    # Brokers of this package list overrides of the file: 'set <key>=<value>'.
    lines = [
        line.split(" ", 1)[1] for line in broker.splitlines() if line[:4] == "set "
    ]
    overrides = dict(line.split("=", 1) for line in lines if "=" in line)
    try:
        return parse_config(text.encode(), source, overrides)
    except ConfigError:
        # Not a configuration, or one with settings of another version.
        return None


def _rules(names: Iterable[str]) -> TopicRules:
    rules = TopicRules()
    for name in names:
        try:
            rules = rules.extended([name])
        except ConfigError:
            continue
    return rules
