"""The fixed layout of an ordered producer: which partitions its topic has, for ever.

Source: client spec 8.1.
"""

from collections.abc import Sequence
from typing import Final

from metaq.client.names import check_topic
from metaq.client.partitioner import parse_partition
from metaq.errors import ConfigError, LocalProtocolError
from metaq.model import BrokerId, TopicPartition

PARTITIONS_MAX: Final = 4096
"""A larger layout is taken for a mistake."""


def parse_layout(topic: str, layout: str | Sequence[str]) -> tuple[TopicPartition, ...]:
    """Return the partitions of a layout, sorted.

    Args:
        topic: topic name.
        layout: MetaQ's `partitionsInfo`, `<broker>:<count>;<broker>:<count>`; or the
            partitions themselves, each `<broker>-<partition>`.

    Raises:
        ConfigError: it is neither, has no partition, or too many.
        LocalProtocolError: the topic can be no topic's name.
    """
    check_topic(topic)
    try:
        if isinstance(layout, str):
            found = _parse_counts(topic, layout)
        else:
            found = {parse_partition(topic, name) for name in layout}
    except (ValueError, TypeError, LocalProtocolError) as error:
        raise ConfigError(
            f"layout of topic {topic}: expected '<broker>:<count>;...' or"
            f" ['<broker>-<partition>', ...], got {layout!r}"
        ) from error
    if not 1 <= len(found) <= PARTITIONS_MAX:
        raise ConfigError(
            f"layout of topic {topic}: expected 1 to {PARTITIONS_MAX} partitions, got"
            f" {len(found)}"
        )
    return tuple(sorted(found))


def _parse_counts(topic: str, text: str) -> set[TopicPartition]:
    found = set()
    for part in filter(None, map(str.strip, text.split(";"))):
        broker, _, count = part.partition(":")
        broker_id, number = int(broker), int(count)
        if broker_id < 0 or not 1 <= number <= PARTITIONS_MAX:
            raise ValueError(part)
        found |= {TopicPartition(topic, BrokerId(broker_id), n) for n in range(number)}
    return found
