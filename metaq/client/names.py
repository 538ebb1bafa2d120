"""Checking and building of names: groups, topics, partitions and brokers.

A name becomes a step of a ZooKeeper path, a token of a command line and, for topics,
part of a comma-separated list. Names that would break one of these are refused when the
user passes them. Source: docs/metaq-1.4/client.md 5.4, 12.3 and 15.3.
"""

import difflib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Final, TypeAlias

from metaq.client.validation import wrong_type
from metaq.config.topic_rules import TOPIC_NAME, is_pattern, is_safe_topic
from metaq.errors import ConfigError
from metaq.model import (
    INTERNAL_PREFIX,
    SCHEME,
    BrokerAddress,
    TopicPartition,
    is_internal,
    parse_broker_address,
)
from metaq.zk.groups import check_group_name
from metaq.zk.paths import is_legal_step, parse_partition

NAMES_MAX: Final = 5
"""Maximum number of partitions or members that a line of text lists by name."""

DEAD_LETTER_SUFFIX: Final = ".dead"
"""Default suffix of the dead-letter topic of a topic."""


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Topics of a consumer by a pattern: `TopicPattern("orders-*")`.

    It matches whole names, case-sensitively: `*` stands for any characters, `?` for
    one, `[ab]` for one of these. Internal topics, which begin with `__`, never match.
    Dead-letter topics, which end with `.dead`, only match patterns with this end, so
    that a consumer does not read its own dead letters.
    """

    glob: str
    """The pattern."""

    def __post_init__(self) -> None:
        """Refuse a pattern that no topic can match.

        Raises:
            ConfigError: it has a blank, a comma or a slash, or is empty.
            TypeError: it is not a str.
        """
        require_text("pattern", self.glob)
        if not _may_be_topic(self.glob):
            raise ConfigError(
                "pattern: expected text without blanks, commas and slashes, as in"
                f" 'orders-*', got {self.glob!r}"
            )

    def matches(self, topic: str) -> bool:
        """Return whether a topic matches the pattern.

        Args:
            topic: topic name. A pattern in the settings of a broker is not a topic and
                does not match.
        """
        is_left_out = is_internal(topic) or (
            topic.endswith(DEAD_LETTER_SUFFIX)
            and not self.glob.endswith(DEAD_LETTER_SUFFIX)
        )
        return (
            fnmatchcase(topic, self.glob)
            and not is_left_out
            and not is_pattern(topic)
            and _may_be_topic(topic)
        )


Topics: TypeAlias = TopicPattern | Collection[str | TopicPattern]
"""Topics of a consumer: names, patterns, or both."""


def require_text(name: str, value: object) -> None:
    """Raise TypeError unless a value is a str; `name` is that of the argument."""
    if not isinstance(value, str):
        raise wrong_type(name, "str", value)


def require_names(name: str, value: object) -> None:
    """Raise TypeError unless a value is a collection of texts, and not a text."""
    for each in require_list(name, value):
        require_text(name, each)


def require_list(name: str, value: object) -> Collection[object]:
    """Return a collection; raise TypeError for another value, including a text."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Collection):
        raise wrong_type(name, "a list of names", value)
    return value


def check_group(group: str) -> str:
    """Check and return the name of a group.

    Raises:
        ConfigError: MetaQ or ZooKeeper does not accept it.
        TypeError: it is not a str.
    """
    require_text("group", group)
    return check_group_name(group)


def check_topic(topic: str, name: str = "topic") -> None:
    """Check the name of a topic (docs/metaq-1.4/client.md 2.1).

    Args:
        topic: name of a topic or an exchange.
        name: name of the argument, for the error.

    Raises:
        ConfigError: it is empty or too long, has a blank or an unprintable character,
            or cannot be the name of a node.
        TypeError: it is not a str.
    """
    require_text(name, topic)
    if not is_safe_topic(topic) or not is_legal_step(topic):
        raise ConfigError(f"{name}: expected {TOPIC_NAME}, got {topic!r}")


def near_topics(topic: str, known: Collection[str]) -> str:
    """Return the end of the text of an error about a topic that does not exist.

    Args:
        topic: the requested name.
        known: names of existing topics.

    Returns:
        The nearest names, and the command that creates the topic, or why it cannot be
        created.
    """
    near = difflib.get_close_matches(topic, sorted(set(known) - {topic}))
    meant = f"did you mean {', '.join(near)}? " if near else ""
    if not _may_be_topic(topic):
        return f"{meant}names of topics have no blanks, commas and slashes"
    if is_internal(topic):
        return (
            f"{meant}names that begin with {INTERNAL_PREFIX} are reserved for brokers"
        )
    return f"{meant}'metaq topics create {topic} --partitions 1' creates it"


def _may_be_topic(name: str) -> bool:
    return is_safe_topic(name) and "," not in name and is_legal_step(name)


def check_topics(topics: Collection[str]) -> tuple[str, ...]:
    """Check topic names; return them sorted, without repetitions.

    Raises:
        ConfigError: there is none, or no broker accepts one of them.
        TypeError: it is not a collection, or one of them is not a str.
    """
    require_names("topics", topics)
    for topic in topics:
        if not _may_be_topic(topic):
            raise ConfigError(
                f"topics: expected names without blanks, commas and slashes, got"
                f" {topic!r}"
            )
    if not topics:
        raise ConfigError("topics: expected at least one name, got none")
    return tuple(sorted(set(topics)))


def split_topics(topics: Topics) -> tuple[tuple[str, ...], tuple[TopicPattern, ...]]:
    """Return the names and the patterns of topics; raises as `check_topics`."""
    if isinstance(topics, TopicPattern):
        return (), (topics,)
    if isinstance(topics, str | bytes) or not isinstance(topics, Collection):
        check_topics(topics)
    patterns = [one for one in topics if isinstance(one, TopicPattern)]
    names = [one for one in topics if not isinstance(one, TopicPattern)]
    if names or not patterns:
        check_topics(names)
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys(patterns))


def fixed_partitions(
    topics: Collection[str], names: Collection[str | TopicPartition]
) -> tuple[TopicPartition, ...]:
    """Return the given partitions of the topics, sorted, without repetitions.

    Args:
        topics: topic names.
        names: partitions of these topics; or names like `0-3`, broker id and number,
            for that partition of each topic.

    Raises:
        ConfigError: there is none, a name is invalid, or one is of another topic.
        TypeError: it is not a collection, or one of them has another type.
    """
    require_list("partitions", names)
    if not names:
        raise ConfigError("partitions: expected at least one name such as '0-1'")
    found = {as_partition(name, [topic]) for topic in topics for name in names}
    for one in found:
        if one.topic not in topics:
            raise ConfigError(
                f"partitions: expected some of {name_few(sorted(topics))}, got {one}"
            )
    return tuple(sorted(found))


def as_partition(value: object, topics: Collection[str]) -> TopicPartition:
    """Return the partition given by an argument.

    Args:
        value: a partition, or a name like `0-3`: broker id and number.
        topics: the topics of the call; a name needs exactly one.

    Raises:
        ConfigError: the name is invalid, or there is not exactly one topic.
        TypeError: it is of another type.
    """
    if isinstance(value, TopicPartition):
        return value
    if not isinstance(value, str):
        raise wrong_type("partition", "TopicPartition or str", value)
    parsed = parse_partition(value)
    if parsed is None:
        raise ConfigError(f"partition: expected a name as '0-3', got {value!r}")
    if len(topics) != 1:
        raise ConfigError(
            f"partition: {value!r} may be of any of {len(topics)} topics, expected a"
            " TopicPartition"
        )
    return TopicPartition(next(iter(topics)), *parsed)


def member_id(host: str, chance: object) -> str:
    """Return a member's name in MetaQ's form: `<host>-<pid>-<chance>`.

    Args:
        host: address of this machine.
        chance: a text that is unique among consumers.
    """
    return f"{host}-{os.getpid()}-{chance}"


def broadcast_group(group: str, host: str) -> str:
    """Return the name of a machine's own group: `<group>-<host>`.

    Args:
        group: name of the group on all machines.
        host: address of this machine; dots and colons become dashes.

    Raises:
        ConfigError: it is a loopback address: all such machines would share one group,
            and each would get only a part of the messages.
    """
    if ip_address(host).is_loopback:
        raise ConfigError(
            f"broadcast: group {group!r} is named after this machine's address, and it"
            f" has none but {host}, as other machines have; give it an address, or each"
            " machine a group name of its own and leave out broadcast=True"
        )
    return f"{group}-{host.replace('.', '-').replace(':', '-')}"


def name_some(partitions: Collection[TopicPartition]) -> str:
    """Return the sorted partitions for a line of text: a few, and how many more."""
    return name_few(list(map(str, sorted(partitions))))


def name_few(names: Sequence[str]) -> str:
    """Return names for a line of text: the first ones, and how many more."""
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


# -- addresses -------------------------------------------------------------------------


def parse_address(text: str) -> BrokerAddress:
    """Return the address of a text `host:port` or `meta://host:port`.

    Raises:
        ConfigError: it is neither.
    """
    # This also refuses undecodable bytes of a command line, which are unprintable.
    address = parse_broker_address(SCHEME + text.removeprefix(SCHEME))
    if address is None:
        raise ConfigError(f"broker: expected host:port, got {text!r}")
    return address


def parse_addresses(texts: Sequence[str]) -> list[BrokerAddress]:
    """Return the addresses of texts, each as for `parse_address`.

    Raises:
        ConfigError: there is none, or one is invalid.
        TypeError: it is not a collection, or one of them is not a str.
    """
    require_names("brokers", texts)
    if not texts:
        raise ConfigError("brokers: expected at least one host:port, got none")
    return [parse_address(text) for text in texts]
