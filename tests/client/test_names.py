"""Names given by users: MetaQ's rules for groups, ours for the rest."""

import pytest

from metaq.client.names import (
    as_partition,
    broadcast_group,
    check_group,
    check_topics,
    fixed_partitions,
)
from metaq.errors import ConfigError
from metaq.model import BrokerId, TopicPartition
from metaq.zk.groups import GROUP_REFUSED


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


def test_a_group_too_long_for_a_line_is_refused() -> None:
    """A broker closes the connection of such a command: nothing would ever come."""
    assert check_group("é" * 512) == "é" * 512
    with pytest.raises(ConfigError, match="at most 1024 bytes, got 1025"):
        check_group("g" + "é" * 512)


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
    with pytest.raises((TypeError, ConfigError), match=r"partitions?: expected"):
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


def test_partitions_are_given_by_name_or_as_what_they_are() -> None:
    """A name is enough where there is one topic."""
    wanted = TopicPartition("t", BrokerId(0), 3)
    assert as_partition("0-3", ["t"]) == as_partition(wanted, ["t", "u"]) == wanted
    assert fixed_partitions(["t", "u"], [wanted, "0-4"]) == (
        wanted,
        TopicPartition("t", BrokerId(0), 4),
        TopicPartition("u", BrokerId(0), 4),
    )


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("0", ConfigError, "expected a name as '0-3', got '0'"),
        ("0-3", ConfigError, "'0-3' may be of any of 2 topics, expected a TopicPart"),
        (3, TypeError, "expected TopicPartition or str, got int 3"),
        (None, TypeError, "expected TopicPartition or str, got NoneType None"),
    ],
)
def test_arguments_that_name_no_partition(
    value: object, kind: type[Exception], text: str
) -> None:
    """The error says what is expected."""
    with pytest.raises(kind, match=f"^partition: {text}"):
        as_partition(value, ["t", "u"])


def test_a_partition_of_another_topic_is_refused() -> None:
    """It would never be read."""
    other = TopicPartition("v", BrokerId(0), 3)
    with pytest.raises(ConfigError, match="expected some of t, u, got v/0-3"):
        fixed_partitions(["u", "t"], [other])
