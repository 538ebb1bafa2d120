"""The table of keys, and the classes that it fills."""

import dataclasses
import typing

import pytest

from metaq.config.keys import (
    LIMITS_KEYS,
    REPLICATION_KEYS,
    SYSTEM_KEYS,
    TOPIC_KEYS,
    ZOOKEEPER_KEYS,
    KeyKind,
)
from metaq.config.settings import (
    LimitsConfig,
    ReplicationConfig,
    SystemConfig,
    TopicConfig,
    ZooKeeperConfig,
)


@pytest.mark.parametrize(
    ("settings_class", "keys", "extra"),
    [
        (SystemConfig, SYSTEM_KEYS, set()),
        (ZooKeeperConfig, ZOOKEEPER_KEYS, set()),
        (LimitsConfig, LIMITS_KEYS, set()),
        (ReplicationConfig, REPLICATION_KEYS, set()),
        (TopicConfig, TOPIC_KEYS, {"name", "filters"}),
    ],
)
def test_table_and_classes_agree(settings_class, keys, extra) -> None:
    """Every field has one row, and a row reads values of its field's type."""
    hints = typing.get_type_hints(settings_class)
    fields = [field.name for field in dataclasses.fields(settings_class)]
    assert sorted(key.field for key in keys) == sorted(set(fields) - extra)
    assert len({key.name for key in keys}) == len(keys)
    example = {
        KeyKind.BOOLEAN: "true",
        KeyKind.LENIENT_BOOLEAN: "true",
        KeyKind.TEXT: "/x",
        KeyKind.ZNODE: "/x",
        KeyKind.POLICY: "delete,1",
    }
    for key in keys:
        value = key.read(example.get(key.kind, str(key.low)))
        assert type(value).__name__ in str(hints[key.field]).replace("BrokerId", "int")


def test_our_own_keys_are_the_camel_case_of_their_fields() -> None:
    """`line_bytes_max` is `lineBytesMax`: one spelling to remember."""
    for key in LIMITS_KEYS:
        head, *tail = key.field.split("_")
        assert key.name == head + "".join(word.capitalize() for word in tail)
