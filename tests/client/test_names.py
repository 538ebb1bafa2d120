"""Names that users choose: MetaQ's rules for groups, ours for the rest."""

import pytest

from metaq.client.names import (
    GROUP_REFUSED,
    broadcast_group,
    check_group,
    check_topics,
    fixed_partitions,
)
from metaq.errors import ConfigError
from metaq.model import BrokerId, TopicPartition


@pytest.mark.parametrize("group", ["g", "meta-example", "a@b_c|d\\e{f}", "组"])
def test_groups_that_pass(group: str) -> None:
    """Names that MetaQ lets through, with `@ - _ | \\ { }` among them."""
    assert check_group(group) == group


@pytest.mark.parametrize("mark", sorted(GROUP_REFUSED))
def test_marks_that_no_group_has(mark: str) -> None:
    """Every one that MetaQ refuses, named in the error."""
    with pytest.raises(ConfigError) as error:
        check_group(f"a{mark}b")
    assert repr(mark) in str(error.value)


def test_the_marks_are_those_of_metaq() -> None:
    """As its list has them."""
    assert set("~!#$%^&*()+=`'\",;/?[]<>.: ") == GROUP_REFUSED


@pytest.mark.parametrize("group", ["", "   ", "a\tb", "a\0b", "\ud800"])
def test_groups_that_are_none(group: str) -> None:
    """Blank, or what ZooKeeper has no node for."""
    with pytest.raises(ConfigError):
        check_group(group)


def test_topics_are_sorted_and_each_once() -> None:
    """Also of a set."""
    assert check_topics(["b", "a", "b"]) == ("a", "b")
    assert check_topics({"x"}) == ("x",)


@pytest.mark.parametrize("topics", ["test", [], [""], ["a b"], ["a,b"], ["a/b"], ["."]])
def test_topics_that_are_none(topics: list[str]) -> None:
    """A text is no list of topics: it would be one of its letters."""
    with pytest.raises((TypeError, ConfigError), match="topics: expected"):
        check_topics(topics)


def test_fixed_partitions_are_those_of_every_topic() -> None:
    """Broker and number by name."""
    assert fixed_partitions(["t", "u"], ["1-0", "0-10", "1-0"]) == (
        TopicPartition("t", BrokerId(0), 10),
        TopicPartition("t", BrokerId(1), 0),
        TopicPartition("u", BrokerId(0), 10),
        TopicPartition("u", BrokerId(1), 0),
    )


@pytest.mark.parametrize("names", ["0-1", [], ["0"], ["a-b"], ["-1-0"]])
def test_partitions_that_are_none(names: list[str]) -> None:
    """A text is no list of partitions either."""
    with pytest.raises((TypeError, ConfigError), match="partitions: expected"):
        fixed_partitions(["t"], names)


@pytest.mark.parametrize(
    ("host", "group"), [("10.0.0.7", "g-10-0-0-7"), ("fe80::1", "g-fe80--1")]
)
def test_the_group_of_a_machine(host: str, group: str) -> None:
    """Dots and colons become dashes, so that the name passes the check."""
    assert check_group(broadcast_group("g", host)) == group


def test_machines_without_an_address_are_not_one_group() -> None:
    """Each would get a part of the messages; the error says what to do."""
    for host in ("127.0.0.1", "::1"):
        with pytest.raises(ConfigError, match="a group name of its own"):
            broadcast_group("g", host)
