"""Names of groups, topics, partitions and brokers as users give them: checked and made.

A name ends as a step of a ZooKeeper path, as a token of a command line and, for
topics, in a comma-joined list, so what would break there is refused where the user can
see it. Source: docs/metaq-1.4/client.md 5.4, 12.3 and 15.3.
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
"""Partitions, or members, that a line of text lists by name."""

DEAD_LETTER_SUFFIX: Final = ".dead"
"""Default suffix of the topic of dead letters."""


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Topics of a consumer by a pattern: `TopicPattern("orders-*")`.

    It matches whole names, upper and lower case apart: `*` matches any characters,
    `?` for one, `[ab]` for one of these. Internal topics, which begin with `__`, never
    match. Topics of dead letters, which end with `.dead`, match only a pattern that
    ends so too: else a consumer would read its own.
    """

    glob: str
    """The pattern."""

    def __post_init__(self) -> None:
        """Refuse a pattern that no topic can match.

        Raises:
            ConfigError: it has a blank, a comma or a slash, or nothing.
            TypeError: it is no text.
        """
        require_text("pattern", self.glob)
        if not _may_be_topic(self.glob):
            raise ConfigError(
                "pattern: expected text without blanks, commas and slashes, as in"
                f" 'orders-*', got {self.glob!r}"
            )

    def matches(self, topic: str) -> bool:
        """Return whether a topic belongs to the pattern.

        Args:
            topic: its name. One that is a pattern of a broker's settings is no topic.
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
    """Refuse a value that is not a text.

    Args:
        name: of the argument, for the error.
        value: the given value.

    Raises:
        TypeError: it is of another type.
    """
    if not isinstance(value, str):
        raise wrong_type(name, "str", value)


def require_names(name: str, value: object) -> None:
    """Refuse a value that is not a collection of texts; raises as `require_text`."""
    for each in require_list(name, value):
        require_text(name, each)


def require_list(name: str, value: object) -> Collection[object]:
    """Return a collection that is no text; raises as `require_text` for the rest."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Collection):
        raise wrong_type(name, "a list of names", value)
    return value


def check_group(group: str) -> str:
    """Return a group's name.

    Raises:
        ConfigError: MetaQ or ZooKeeper would not take it.
        TypeError: it is no text.
    """
    require_text("group", group)
    return check_group_name(group)


def check_topic(topic: str, name: str = "topic") -> None:
    """Refuse a text that cannot be a topic's name (docs/metaq-1.4/client.md 2.1).

    Args:
        topic: a name, of a topic or an exchange.
        name: of the argument.

    Raises:
        ConfigError: it is empty or too long, has a blank or a character that does not
            print, or is no name of a node.
        TypeError: it is no text.
    """
    require_text(name, topic)
    if not is_safe_topic(topic) or not is_legal_step(topic):
        raise ConfigError(f"{name}: expected {TOPIC_NAME}, got {topic!r}")


def near_topics(topic: str, known: Collection[str]) -> str:
    """Return words for an error that names a topic that there is not.

    Args:
        topic: the requested name.
        known: names of topics that there are.

    Returns:
        The nearest names, and the command that makes the topic, if it can be made.
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
    """Return topic names, sorted, each once.

    Raises:
        ConfigError: there is none, or one that no broker takes.
        TypeError: it is no list, or one of them is no text.
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
    """Return names and patterns of topics, as given; raises as `check_topics`."""
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
    """Return the named partitions of each topic.

    Args:
        topics: topic names.
        names: partitions of these topics; or `b-p`, broker id and number, of each.

    Raises:
        ConfigError: no name, one that is none, or a partition of another topic.
        TypeError: it is no list, or one of them is neither.
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
    """Return the partition that an argument names.

    Args:
        value: a partition, or its name within the topic such as `0-3`: broker id and
            number.
        topics: the topics of the call; a name needs exactly one.

    Raises:
        ConfigError: a text that names no partition, or there are several topics.
        TypeError: another type.
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
    """Return a member's name as MetaQ makes it: `<host>-<pid>-<chance>`.

    Args:
        host: this machine's address.
        chance: a text that no other consumer has.
    """
    return f"{host}-{os.getpid()}-{chance}"


def broadcast_group(group: str, host: str) -> str:
    """Return the group that a machine has for itself: `<group>-<host>`.

    Args:
        group: name of the group on all machines.
        host: this machine's address; dots and colons become dashes.

    Raises:
        ConfigError: the machine has no address but loopback: all such machines would be
            one group, and each would get a part of the messages.
    """
    if ip_address(host).is_loopback:
        raise ConfigError(
            f"broadcast: group {group!r} is named after this machine's address, and it"
            f" has none but {host}, as other machines have; give it an address, or each"
            " machine a group name of its own and leave out broadcast=True"
        )
    return f"{group}-{host.replace('.', '-').replace(':', '-')}"


def name_some(partitions: Collection[TopicPartition]) -> str:
    """Return the names of partitions for a line of text: a few, and how many more."""
    return name_few(list(map(str, sorted(partitions))))


def name_few(names: Sequence[str]) -> str:
    """Return names for a line of text: the first ones, and how many more."""
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


# -- addresses -------------------------------------------------------------------------


def parse_address(text: str) -> BrokerAddress:
    """Return the address that `host:port` or `meta://host:port` says.

    Raises:
        ConfigError: it is neither.
    """
    # Bytes of a command line that are no UTF-8 do not print, and are refused.
    address = parse_broker_address(SCHEME + text.removeprefix(SCHEME))
    if address is None:
        raise ConfigError(f"broker: expected host:port, got {text!r}")
    return address


def parse_addresses(texts: Sequence[str]) -> list[BrokerAddress]:
    """Return the addresses that some texts say.

    Raises:
        ConfigError: one of them is none, or there is none.
        TypeError: it is no list, or one of them is no text.
    """
    require_names("brokers", texts)
    if not texts:
        raise ConfigError("brokers: expected at least one host:port, got none")
    return [parse_address(text) for text in texts]
