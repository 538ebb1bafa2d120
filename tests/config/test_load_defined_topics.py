"""Topics that were made by command: validated as sections are, and below them."""

from dataclasses import replace

import pytest

from metaq.config.load import define_topic, parse_config, reload_config
from metaq.config.settings import DeletePolicy, SystemConfig
from metaq.errors import ConfigError

SYSTEM = SystemConfig(partition_count=7, delete_when="0 0 3 * * ?", stat=True)
INI = (
    b"[system]\nbrokerId=0\nnumPartitions=1\nunflushThreshold=0\nunflushInterval=1\n"
    b"maxSegmentSize=1024\nmaxTransferSize=1024\n[zookeeper]\nzk.zkEnable=false\n"
    b"[topic=test]\nnumPartitions=3\n"
)


def test_a_defined_topic_inherits_what_it_does_not_set() -> None:
    """From [system], as a section does."""
    topic = define_topic(
        "orders", 4, {"deletePolicy": "delete,72h", "stat": "false"}, system=SYSTEM
    )
    assert topic.partition_count == 4
    assert topic.delete_policy == DeletePolicy(age_ms=72 * 3_600_000)
    assert (topic.delete_when, topic.stat) == ("0 0 3 * * ?", False)
    assert topic.data_path == SYSTEM.data_path


@pytest.mark.parametrize(
    ("name", "count", "settings", "wanted"),
    [
        ("a/b", 1, {}, "topic 'a/b': expected a name of at most 244 bytes, no blanks"),
        ("wild-*", 1, {}, "expected a name, got a pattern"),
        ("a|b", 1, {}, "expected a name, got a pattern"),
        ("t", 0, {}, "expected 1..10000 partitions, got 0"),
        ("t", 10_001, {}, "expected 1..10000 partitions, got 10001"),
        ("t", 1, {"deletePolcy": "x"}, "key:deletePolcy,do you mean 'deletePolicy'"),
        ("t", 1, {"dataPath": "/x"}, "Invalid config key:dataPath"),
        ("t", 1, {"numPartitions": "2"}, "Invalid config key:numPartitions"),
        ("t", 1, {"deletePolicy": "drop,1"}, "topic 't' deletePolicy=drop,1: expected"),
        ("t", 1, {"unflushThreshold": "x"}, "topic 't' unflushThreshold=x"),
        ("t", 1, {"deleteWhen": "a\nb"}, "printable"),
    ],
)  # fmt: skip
def test_what_a_section_would_refuse_is_refused(
    name: str, count: int, settings: dict[str, str], wanted: str
) -> None:
    """The same key table, and its hints."""
    with pytest.raises(ConfigError) as refused:
        define_topic(name, count, settings, system=SYSTEM)
    assert wanted in str(refused.value)


def test_a_name_with_a_dot_is_no_pattern() -> None:
    """Its dot stands for itself: `orders.v1` is no pattern for `orders-v1`."""
    assert define_topic("orders.v1", 1, {}, system=SYSTEM).name == "orders.v1"


def test_a_section_wins_over_a_definition() -> None:
    """And what is neither has the defaults."""
    config = parse_config(INI, "server.ini")
    defined = {
        name: define_topic(name, 9, {}, system=config.system)
        for name in ("test", "orders")
    }
    config = replace(config, defined=defined)
    counts = [config.topic(name).partition_count for name in ("test", "orders", "x")]
    assert counts == [3, 9, 1]
    assert config.topic_names == ("test", "orders")


def test_a_reload_keeps_what_is_defined_and_tells_of_the_file_alone() -> None:
    """Definitions are no part of the file's differences."""
    config = parse_config(INI, "server.ini")
    defined = {"orders": define_topic("orders", 9, {}, system=config.system)}
    outcome = reload_config(replace(config, defined=defined), INI + b"[topic=new]\n")
    assert outcome.config.defined == defined
    assert (outcome.added, outcome.removed) == (("new",), ())
